"""Settings: names and import paths, mistakes in one clear sentence, JSON and hashes."""

import dataclasses
import json
import re
import sys
import typing

import pytest

from qkattn.config import ModelConfig, Study, serialize
from qkattn.config.calls import accepts_arguments, resolve
from qkattn.config.imports import import_paths
from qkattn.config.run_config import Config, DataConfig, MeshConfig, TrainConfig, TrialsConfig
from qkattn.config.serialize import fingerprint, fingerprint_of, from_json, to_json
from qkattn.config.variant import split_pattern
from qkattn.errors import ConfigError
from qkattn.model.sites import validate
from qkattn.study.stored import PLAN, open_files, planned
from tests.attention import examples  # noqa: F401, classes that the settings name
from tests.refusals import refused
from tests.studies import RESULTS

OUTSIDE_CALLS = """
class Linear:
    def __init__(self, config, *, slope=1.0): pass
def quadratic(config, steps, *, power=2): pass
NUMBER = 3
"""
OUTSIDE_SCORE = """
from qkattn.attention import Normalizer, Value
from qkattn.attention.parameters import affine
from qkattn.attention.scores.symmetric import SharedQK
from qkattn.attention.values.vo import VO
class Flat(SharedQK):
    def queries(self, x_BTD):
        return super().queries(x_BTD).reshape(7)
class Failing(SharedQK):
    def __init__(self, spec, *, key):
        raise KeyError(spec)
class Broken(Normalizer):
    def __init__(self):
        raise KeyError('broken')
class Lettered(SharedQK):
    def __init__(self, spec, *, key):
        self.w_q_DNQ, _ = affine(spec, key, 'w_q_DNQ')
class Narrow(VO):
    def output(self, o_BTNH, score, x_BTD):
        return super().output(o_BTNH, score, x_BTD)[..., :1]
class Unwritten(Value):
    def __init__(self, spec, score, *, key): pass
"""


@pytest.fixture(autouse=True)
def outside_modules(tmp_path, monkeypatch):
    """Modules outside_calls, outside_score and two that cannot be imported, as users write them."""
    files = {
        'calls': OUTSIDE_CALLS,
        'failing': '\nx = 1 / 0\n',
        'missing': 'import no_such_library\n',
    }
    files |= {'score': OUTSIDE_SCORE}
    for name, source in files.items():
        (tmp_path / f'outside_{name}.py').write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith('outside_')]:
        del sys.modules[name]


def resolve_schedule(text, **options):
    """(target, options) of a text for optimizer.schedule, where `constant` is the only name."""
    return resolve(text, {'constant': len}, 'optimizer.schedule', **options)


def test_a_name_or_an_import_path_is_resolved_with_its_options():
    assert resolve_schedule('constant') == (len, {})
    target, options = resolve_schedule('outside_calls:Linear(slope=(1, 2))')
    assert target.__name__ == 'Linear'
    assert options == {'slope': (1, 2)}
    # Options of something that is called through another function.
    call = {'call': lambda target: lambda *, rank: None}
    assert resolve_schedule('outside_calls:Linear(rank=3)', **call)[1] == {'rank': 3}


def test_a_text_that_names_no_schedule_is_refused_in_one_sentence():
    no_import_paths = ('..:x', ':b', 'a:', 'a:b:c', '.a:b', 'a b:c', 'a:b/c', 'a\0:b')
    no_options = ('', '2)', 'a=)', 'a=x)', 'a=1, a=2)', 'a=1)(a=2)', '**{"a": 1})')
    no_options += ('a={[]: 1})', f'a={"(" * 500})')
    import_path_form = '^optimizer.schedule=.* must be written package.module:name to be'
    options_form = r'must be written name\(option=value, ...\) with'

    # The schedule, and what the refusal says.
    for text, message in (
        ('constnt', "^unknown optimizer.schedule 'constnt', did you mean 'constant'.*constant, or"),
        *((text, import_path_form) for text in no_import_paths),
        *((f'constant({options}', options_form) for options in no_options),
        ('no.such.module:x', "schedule='no.such.module:x': no module named 'no'"),
        ('outside_missing:x', "no module named 'no_such_library'"),
        ('outside_calls:missing', "outside_calls has no 'missing'$"),
        ('outside_calls:Liner', "outside_calls has no 'Liner'; did you mean 'Linear'\\?"),
        ('outside_failing:x', r'ZeroDivisionError in .*outside_failing.py, line 2: division'),
        ('outside_calls:NUMBER', "='outside_calls:NUMBER' is not a function of two"),
        ('outside_calls:Linear', 'is not a function of two'),
        ('outside_calls:quadratic(slope=1)', "no option 'slope'; it takes power"),
    ):
        with refused(message):
            resolve_schedule(
                text, needs='a function of two', is_valid=accepts_arguments('config', 'steps')
            )


def test_variants_are_separated_by_the_commas_outside_of_parentheses():
    text = 'shared_qk(key_norm=True,self_mask=True)/vo, qk/low_rank(rank=(2)),a.b:C/no_v'
    variants = ['shared_qk(key_norm=True,self_mask=True)/vo', 'qk/low_rank(rank=(2))', 'a.b:C/no_v']
    assert split_pattern(text) == variants
    nested = 'a.b:C(rows=((0, 1), (2, 3)))/vo'
    assert split_pattern(f'{nested}, qk/vo') == [nested, 'qk/vo']


BOTH = {'model.kind': 'encoder_decoder'}
NAN = float('nan')
INF = float('inf')
INVERSE_SQRT = {'optimizer.schedule': 'inverse_sqrt()'}
CROSS = 'model.cross_variant'
ENCODER = 'model.encoder_variant'
PATTERN = 'model.pattern'
DOT_PRODUCT = {'model.kernel': 'dot_product'}


def config_with(fields: dict) -> Config:
    """The default config with these fields, as in {'model.d_model': 64}."""
    config = Config()
    for name, value in fields.items():
        section, field = name.split('.')
        change = dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{section: change})
    return config


def test_a_wrong_setting_is_named_with_its_value():
    # These are valid: a kernel of TPUs on a machine without one, perhaps for a dry run of a pod;
    # and a cross-attention without a rotary form, since it never has rotary positions.
    for value in ('vo', 'gated:Gated'):
        splash = {'model.kernel': 'splash', 'model.context': 128}
        validate(config_with(splash | {'model.value': value}))
    validate(config_with(BOTH | {'model.positions': 'rope', CROSS: 'merged/vo'}))
    for name, value, requirement in (
        ('model.kind', 'seq2seq', 'must be one of decoder, encoder,'),
        ('model.num_kv_heads', 3, 'must divide num_heads=4'),
        ('model.kernel', 'flash', 'must be one of auto, einsum, blockwise'),
        ('model.d_model', 130, 'must be a multiple of num_heads=4'),
        ('model.d_ff', 0, 'must be at least 1 and at most 2**20, or None'),
        ('model.biases', 1, 'must be of type bool'),
        *(('model.dropout', r, 'must be at least 0 and below 1') for r in (-0.1, 1.0, NAN)),
        *(('model.init_qk', f, 'must be above 0 and finite') for f in (0.0, INF, NAN)),
        ('train.accumulation', 3, 'must divide batch_size=16'),
        ('train.log_every', 15, 'must be a multiple of train.steps_per_dispatch=10'),
        ('train.eval_every', 25, 'must be a multiple of train.log_every=10'),
        ('optimizer.epsilon', 0.0, 'must be above 0 and finite'),
        ('optimizer.warmup_steps', 1000, 'must be below train.num_steps=1000'),
        ('trials.seeds', (), 'must hold at least one value'),
        ('trials.seeds', (1, 1), 'must hold no value twice'),
        ('trials.seeds', (-1,), 'must hold values that are at least 0 and below 2**31'),
        ('trials.weight_decays', (0.0, 0.1), 'must be below 0.1 with optimizer.decay='),
        ('mesh.trial', 2, 'must divide the number of trials, 1'),
        ('data.name', 'a\nb', 'must be Unicode text'),
        ('model.encoder_variant', 'qk/vo', 'is a setting of an encoder-decoder, not of decoder'),
    ):
        field = name.partition('.')[2]
        with refused(re.escape(f'{field}={value!r} {requirement}')):
            validate(config_with({name: value}))


def test_settings_that_do_not_fit_each_other_are_refused(tmp_path):
    # Settings by name, and what the refusal says.
    for fields, message in (
        (
            {'model.attention_gain': False, 'model.norm_position': 'post'},
            'model.attention_gain=False needs model.norm_position=pre',
        ),
        ({'model.num_heads': 2**14, 'model.head_size': 2**11}, 'must be at most 16777216'),
        ({'mesh.fsdp': 3}, 'mesh.data * mesh.fsdp = 3 must divide the microbatch of 16'),
        (INVERSE_SQRT | {'optimizer.warmup_steps': 0}, 'at least 1 with optimizer.schedule=inve'),
        (
            {'optimizer.schedule': 'wsd', 'optimizer.decay_fraction': 0.95},
            'must leave room for optimizer.warmup_steps=100: it decays in 950 of',
        ),
        (BOTH | {ENCODER: 'qqk/vo'}, "model.encoder_variant: unknown score 'qqk'"),
        (
            BOTH | {CROSS: 'merged/no_v', 'model.num_kv_heads': 1},
            'cross_variant: num_kv_heads=1 ch',
        ),
        ({PATTERN: 'qk/no_v,qk/vo'}, 'must begin with the variant of the model, qk/vo'),
        (
            {PATTERN: 'qk/vo,qk/no_v', 'model.num_layers': 1},
            'has 2 variants, more than num_layers=1',
        ),
        (BOTH | {PATTERN: 'qk/vo,qk/no_v'}, 'is for a decoder or an encoder'),
        ({PATTERN: 'qk/vo,qk/ov'}, "unknown value 'ov'"),
        ({PATTERN: 'qk/vo,merged/vo', 'model.positions': 'rope'}, '[1]: merged has no rotary'),
        (
            DOT_PRODUCT | {'model.positions': 'alibi'},
            "model: kernel='dot_product' cannot add position biases",
        ),
        (
            DOT_PRODUCT | {'data.cross_documents': False},
            "model: kernel='dot_product' does not take padding or packed sequences",
        ),
        (BOTH | DOT_PRODUCT, "model: kernel='dot_product' does not take padding"),
        (
            {'model.score': 'outside_score:Flat'},
            f"'outside_score:Flat/vo' fails, TypeError in {tmp_path}/outside_score.py, line 8: ",
        ),
        (
            {'model.score': 'outside_score:Failing', 'model.positions': 'rope'},
            f"'outside_score:Failing/vo' fails, KeyError in {tmp_path}/outside_score.py, line 11: ",
        ),
        ({'model.normalizer': 'outside_score:Broken'}, "model='outside_score:Broken' fails, Key"),
        ({'model.score': 'outside_score:Lettered'}, 'axis Q of w_q_DNQ has no size; the sizes are'),
        (
            {'model.value': 'outside_score:Narrow'},
            "model='qk/outside_score:Narrow' returns an output of shape (1, ",
        ),
        ({'model.value': 'outside_score:Unwritten'}, ': raised by cached'),
    ):
        with refused(re.escape(message)):
            validate(config_with(fields))


# The config of a later version: a field more, a section more, and another default of a field.


@dataclasses.dataclass(frozen=True, kw_only=True)
class WiderModel(ModelConfig):
    lately: str = 'softmax'
    window: int | None = 64  # None in schema 1


@dataclasses.dataclass(frozen=True)
class Extra:
    rate: float = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class WiderConfig(Config):
    model: WiderModel = WiderModel()
    extra: Extra = Extra()


def wider_config(**model):
    """A config of the later version that means what the default config of this one means."""
    return WiderConfig(model=WiderModel(**{'window': None} | model))


def test_configs_make_round_trips():
    for config in (Config(), Study()):
        assert from_json(type(config), to_json(config)) == config
        assert serialize.from_config_dict(serialize.to_config_dict(config)) == config


def test_a_config_takes_overrides_of_the_type_of_a_field():
    values = serialize.to_config_dict(Config())
    values.model.d_ff = 300
    values.model.scan_unroll = None
    assert serialize.from_config_dict(values).model.d_ff == 300
    with pytest.raises(TypeError):
        values.model.d_ff = 'wide'
    with pytest.raises(AttributeError):
        values.model.width = 3


def test_the_fingerprint_leaves_out_settings_of_the_machine():
    assert fingerprint(Config()) == '5c6b1299941b'  # of the defaults of schema 1
    elsewhere = Config(
        mesh=MeshConfig(data=8),
        data=DataConfig(data_dir='a', manual_dir='b'),
        train=TrainConfig(sinks=('wandb',)),
        model=ModelConfig(kernel='einsum'),
    )
    assert fingerprint(elsewhere) == fingerprint(Config())
    assert serialize.with_machine_of(Config(), elsewhere) == elsewhere
    other_seeds = Config(trials=TrialsConfig(seeds=(1,)))
    other_model = Config(model=ModelConfig(value='no_v'))
    prints = {fingerprint(config) for config in (Config(), other_seeds, other_model)}
    assert len(prints) == 3


def test_remat_is_stored_as_schema_1_wrote_it():
    """Schema 1 had a boolean: 'none' is stored as False and 'full' as True."""
    for value, stored in (('none', False), ('full', True), ('dots', 'dots')):
        config = Config(model=ModelConfig(remat=value))
        written = to_json(config)['model']['remat']
        assert written == stored
        assert type(written) is type(stored)
        assert from_json(Config, to_json(config)) == config
        assert (fingerprint(config) == fingerprint(Config())) == (value == 'none')


def test_a_later_field_counts_unless_it_is_at_its_default():
    # `wider_config` has a field and a section more than Config.
    assert to_json(wider_config()) == to_json(Config())
    for config in (
        wider_config(lately='sigmoid'),
        dataclasses.replace(wider_config(), extra=Extra(rate=0.25)),
    ):
        assert fingerprint(config) != fingerprint(Config())
        assert from_json(WiderConfig, to_json(config)) == config
        with pytest.raises(ConfigError, match=r'unknown field (model\.lately|extra)=.*newer'):
            from_json(Config, to_json(config))


def test_changed_defaults_leave_stored_configs_their_meaning(monkeypatch):
    assert fingerprint(WiderConfig()) != fingerprint(Config())
    stored = to_json(Config())
    del stored['model']['window'], stored['decode']
    assert from_json(WiderConfig, stored) == wider_config()
    assert fingerprint(from_json(Config, stored)) == fingerprint(Config())
    assert fingerprint_of(stored) != fingerprint(Config())
    # The default of a later field is frozen with its schema.
    later = serialize.SCHEMAS | {'2': {'WiderModel': {'lately': 'sigmoid'}}}
    monkeypatch.setattr(serialize, 'SCHEMAS', later)
    monkeypatch.setattr(serialize, 'defaults', serialize.defaults.__wrapped__)
    assert from_json(WiderConfig, to_json(Config())) == wider_config(lately='sigmoid')
    assert fingerprint(wider_config(lately='sigmoid')) == fingerprint(Config())
    assert fingerprint(wider_config()) != fingerprint(Config())


def test_every_field_has_a_frozen_default():
    """Every field of Study and of its sections is in a schema, so that its default is kept."""
    classes = [Study]
    for cls in classes:  # the list grows by the sections of each class
        classes += filter(dataclasses.is_dataclass, typing.get_type_hints(cls).values())
        known = set()
        for schema in serialize.SCHEMAS.values():
            known |= schema.get(cls.__name__, {}).keys()
        missing = {n: v for n, v in serialize.defaults(cls).items() if n not in known}
        assert not missing, f'add to {serialize.FILE.name}: {json.dumps({cls.__name__: missing})}'


def test_committed_runs_are_named_by_the_hash_of_their_configs():
    assert (studies := [*RESULTS.rglob('study.json')])
    for study in studies:
        declared = json.loads(study.read_text())
        assert fingerprint_of(declared['base']) == declared['base_hash'], study
        for number, run in enumerate(planned(open_files(study.parent) / PLAN)):
            assert fingerprint_of(run['config']) == run['run'], (study, run['run'])
            # Reading every config takes too long.
            if number % 10 == 0:
                assert to_json(from_json(Config, run['config'])) == run['config']


def test_import_paths_are_told_from_paths_of_corpora_and_names_of_encodings():
    corpora = {'evaluate': ['text:book.txt', 'tokens:made', 'own:corpus', '@test']}
    others = {'name': 'text:Evil', 'tokenizer': 'tiktoken:gpt2', 'path': 'tokens:Other'}
    config = {'base': {'data': corpora | others}, 'runs': [{'tokenizer': 'own:Nibbles(high=1)'}]}
    expected = ['own:Nibbles', 'own:corpus', 'text:Evil', 'tokens:Other']
    assert import_paths(config) == expected
