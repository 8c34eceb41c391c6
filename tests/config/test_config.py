"""Settings: names and import paths, mistakes in one clear sentence, JSON and hashes."""

import dataclasses
import json
import re
import sys
import typing

import pytest

from qkattn.config import ModelConfig, Study, serialize
from qkattn.config.calls import accepts_arguments, resolve
from qkattn.config.imports import import_paths, require_named
from qkattn.config.run_config import Config, DataConfig, MeshConfig, TrainConfig, TrialsConfig
from qkattn.config.serialize import fingerprint, fingerprint_of, from_json, to_json
from qkattn.config.variant import Variant, split_pattern
from qkattn.errors import ConfigError, SpecError
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
import jax.numpy as jnp
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
class Widened(VO):
    def output(self, o_BTNH, score, x_BTD):
        return super().output(o_BTNH, score, x_BTD) * jnp.linspace(0, 1, x_BTD.shape[-1])
class Unwritten(Value):
    def __init__(self, spec, score, *, key): pass
class Bare(VO):
    def __init__(self, spec, score, *, key):
        super().__init__(spec, score, key=key)
        self.g_gain_NH = jnp.ones((spec.num_heads, spec.head_size))
"""


@pytest.fixture(autouse=True)
def outside_modules(tmp_path, monkeypatch):
    """Makes modules importable that stand for modules of users.

    A setting names an object in such a module, as in 'outside_calls:Linear'.
    """
    sources = {
        'outside_calls': OUTSIDE_CALLS,
        'outside_score': OUTSIDE_SCORE,
        # These two cannot be imported.
        'outside_failing': '\nx = 1 / 0\n',
        'outside_missing': 'import no_such_library\n',
    }
    for name, source in sources.items():
        (tmp_path / f'{name}.py').write_text(source)
    monkeypatch.syspath_prepend(tmp_path)

    yield

    # Without this, the next test would get these modules instead of its own.
    for name in sources:
        sys.modules.pop(name, None)


def resolve_schedule(text, **settings):
    """Resolves a text for optimizer.schedule, where `constant` is the only known name."""
    return resolve(text, {'constant': len}, 'optimizer.schedule', **settings)


def test_a_known_name_is_resolved():
    assert resolve_schedule('constant') == (len, {})


def test_an_import_path_is_resolved_with_its_options():
    target, options = resolve_schedule('outside_calls:Linear(slope=(1, 2))')
    assert target.__name__ == 'Linear'
    assert options == {'slope': (1, 2)}


def test_options_may_be_those_of_a_function_that_calls_the_target():
    def make_call(target):
        def call(*, rank):
            pass

        return call

    _, options = resolve_schedule('outside_calls:Linear(rank=3)', call=make_call)
    assert options == {'rank': 3}


def assert_schedule_is_refused(text, message):
    is_valid = accepts_arguments('config', 'steps')
    with refused(message):
        resolve_schedule(text, needs='a function of two', is_valid=is_valid)


@pytest.mark.parametrize('text', ['..:x', ':b', 'a:', 'a:b:c', '.a:b', 'a b:c', 'a:b/c', 'a\0:b'])
def test_a_malformed_import_path_is_refused(text):
    message = '^optimizer.schedule=.* must be written package.module:name to be'
    assert_schedule_is_refused(text, message)


@pytest.mark.parametrize(
    ('file', 'module'),
    [
        ('outside_calls.py', 'outside_calls'),
        ('./outside_calls.py', 'outside_calls'),
        ('schedules/mine.py', 'schedules.mine'),
        ('/home/me/mine.py', 'mine'),
        ('../mine.py', 'mine'),
    ],
)
def test_a_file_in_place_of_a_module_is_refused_with_its_module(file, module):
    message = f"schedule='{file}:Linear' names a file; name its module, as in {module}:Linear$"
    assert_schedule_is_refused(f'{file}:Linear(slope=2)', message)


@pytest.mark.parametrize('text', ['scores/mine.py:Mine/vo', 'qk/values/mine.py:Mine'])
def test_a_file_in_a_folder_in_place_of_a_module_of_a_variant_is_refused(text):
    with refused(f"variant '{text}' names a file; name its module", SpecError):
        Variant.parse(text)


@pytest.mark.parametrize(
    'text',
    [
        'constant(',
        'constant(2)',
        'constant(a=)',
        'constant(a=x)',
        'constant(a=1, a=2)',
        'constant(a=1)(a=2)',
        'constant(**{"a": 1})',
        'constant(a={[]: 1})',
        pytest.param('constant(a=' + 500 * '(' + ')', id='too many parentheses'),
    ],
)
def test_malformed_options_are_refused(text):
    assert_schedule_is_refused(text, r'must be written name\(option=value, ...\) with')


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        (
            'constnt',
            "^unknown optimizer.schedule 'constnt', did you mean 'constant'.*constant, or",
        ),
        ('no.such.module:x', "schedule='no.such.module:x': no module named 'no'"),
        ('outside_missing:x', "no module named 'no_such_library'"),
        ('outside_calls:missing', "outside_calls has no 'missing'$"),
        ('outside_calls:Liner', "outside_calls has no 'Liner'; did you mean 'Linear'\\?"),
        (
            'outside_failing:x',
            'ZeroDivisionError in .*outside_failing.py, line 2: division by zero',
        ),
        ('outside_calls:NUMBER', "='outside_calls:NUMBER' is not a function of two"),
        ('outside_calls:Linear', 'is not a function of two'),
        ('outside_calls:quadratic(slope=1)', "no option 'slope'; it takes power"),
    ],
)
def test_a_text_that_names_no_schedule_is_refused(text, message):
    assert_schedule_is_refused(text, message)


@pytest.mark.parametrize(
    ('text', 'variants'),
    [
        (
            'shared_qk(key_norm=True,self_mask=True)/vo, qk/low_rank(rank=(2)),a.b:C/no_v',
            [
                'shared_qk(key_norm=True,self_mask=True)/vo',
                'qk/low_rank(rank=(2))',
                'a.b:C/no_v',
            ],
        ),
        (
            'a.b:C(rows=((0, 1), (2, 3)))/vo, qk/vo',
            ['a.b:C(rows=((0, 1), (2, 3)))/vo', 'qk/vo'],
        ),
    ],
)
def test_variants_are_separated_by_commas_outside_of_parentheses(text, variants):
    assert split_pattern(text) == variants


def config_with(fields: dict) -> Config:
    """The default config with these fields, as in {'model.d_model': 64}."""
    config = Config()
    for name, value in fields.items():
        section_name, field = name.split('.')
        section = dataclasses.replace(getattr(config, section_name), **{field: value})
        config = dataclasses.replace(config, **{section_name: section})
    return config


@pytest.mark.parametrize('value', ['vo', 'gated:Gated'])
def test_a_kernel_of_tpus_is_valid_without_a_tpu(value):
    """A machine without a TPU can check settings for a TPU, such as in a dry run."""
    fields = {'model.kernel': 'splash', 'model.context': 128, 'model.value': value}
    validate(config_with(fields))


def test_cross_attention_needs_no_rotary_form():
    """`merged` has no rotary form, but cross-attention never uses rotary positions."""
    fields = {
        'model.kind': 'encoder_decoder',
        'model.positions': 'rope',
        'model.cross_variant': 'merged/vo',
    }
    validate(config_with(fields))


NAN = float('nan')
INF = float('inf')


@pytest.mark.parametrize(
    ('name', 'value', 'requirement'),
    [
        ('model.kind', 'seq2seq', 'must be one of decoder, encoder,'),
        ('model.num_kv_heads', 3, 'must divide num_heads=4'),
        ('model.kernel', 'flash', 'must be one of auto, einsum, blockwise'),
        ('model.d_model', 130, 'must be a multiple of num_heads=4'),
        ('model.d_ff', 0, 'must be at least 1 and at most 2**20, or None'),
        ('model.biases', 1, 'must be of type bool'),
        ('model.dropout', -0.1, 'must be at least 0 and below 1'),
        ('model.dropout', 1.0, 'must be at least 0 and below 1'),
        ('model.dropout', NAN, 'must be at least 0 and below 1'),
        ('model.init_qk', 0.0, 'must be above 0 and finite'),
        ('model.init_qk', INF, 'must be above 0 and finite'),
        ('model.init_qk', NAN, 'must be above 0 and finite'),
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
    ],
)
def test_a_wrong_setting_is_named_with_its_value(name, value, requirement):
    field = name.split('.')[1]
    message = re.escape(f'{field}={value!r} {requirement}')
    with refused(message):
        validate(config_with({name: value}))


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        (
            {'model.attention_gain': False, 'model.norm_position': 'post'},
            'model.attention_gain=False needs model.norm_position=pre',
        ),
        ({'model.num_heads': 2**14, 'model.head_size': 2**11}, 'must be at most 16777216'),
        ({'mesh.fsdp': 3}, 'mesh.data * mesh.fsdp = 3 must divide the microbatch of 16'),
        (
            {'optimizer.schedule': 'inverse_sqrt()', 'optimizer.warmup_steps': 0},
            'must be at least 1 with optimizer.schedule=inverse_sqrt',
        ),
        (
            {'optimizer.schedule': 'wsd', 'optimizer.decay_fraction': 0.95},
            'must leave room for optimizer.warmup_steps=100: it decays in 950 of',
        ),
        (
            {'model.kind': 'encoder_decoder', 'model.encoder_variant': 'qqk/vo'},
            "model.encoder_variant: unknown score 'qqk'",
        ),
        (
            {
                'model.kind': 'encoder_decoder',
                'model.cross_variant': 'merged/no_v',
                'model.num_kv_heads': 1,
            },
            'cross_variant: num_kv_heads=1 changes nothing in merged/no_v',
        ),
        (
            {'model.pattern': 'qk/no_v,qk/vo'},
            'must begin with the variant of the model, qk/vo',
        ),
        (
            {'model.pattern': 'qk/vo,qk/no_v', 'model.num_layers': 1},
            'has 2 variants, more than num_layers=1',
        ),
        (
            {'model.pattern': 'qk/vo,qk/no_v', 'model.kind': 'encoder_decoder'},
            'is for a decoder or an encoder',
        ),
        ({'model.pattern': 'qk/vo,qk/ov'}, "unknown value 'ov'"),
        (
            {'model.pattern': 'qk/vo,merged/vo', 'model.positions': 'rope'},
            '[1]: merged has no rotary form',
        ),
        (
            {'model.kernel': 'dot_product', 'model.positions': 'alibi'},
            "model: kernel='dot_product' cannot add position biases",
        ),
        (
            {'model.kernel': 'dot_product', 'data.cross_documents': False},
            "model: kernel='dot_product' does not take padding or packed sequences",
        ),
        (
            {'model.kernel': 'dot_product', 'model.kind': 'encoder_decoder'},
            "model: kernel='dot_product' does not take padding",
        ),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused(fields, message):
    with refused(re.escape(message)):
        validate(config_with(fields))


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        (
            {'model.score': 'outside_score:Flat'},
            "'outside_score:Flat/vo' fails, TypeError in {tmp_path}/outside_score.py, line 9: ",
        ),
        (
            {'model.score': 'outside_score:Failing', 'model.positions': 'rope'},
            "'outside_score:Failing/vo' fails, KeyError in {tmp_path}/outside_score.py, line 12: ",
        ),
        (
            {'model.normalizer': 'outside_score:Broken'},
            "model='outside_score:Broken' fails, KeyError",
        ),
        (
            {'model.score': 'outside_score:Lettered'},
            'axis Q of w_q_DNQ has no size; the sizes are',
        ),
        (
            {'model.value': 'outside_score:Narrow'},
            "model='qk/outside_score:Narrow' returns an output of shape (1, ",
        ),
        (
            # jnp.linspace is float32, so its product with a bfloat16 array is float32.
            {'model.value': 'outside_score:Widened', 'model.compute_dtype': 'bfloat16'},
            'returns an output of float32 for a stream of bfloat16, which is model.compute_dtype',
        ),
        ({'model.value': 'outside_score:Unwritten'}, ': a subclass must define cached'),
        (
            {'model.value': 'outside_score:Bare'},
            "model='qk/outside_score:Bare' has an array as its attribute 'g_gain_NH'; make it an "
            'nnx.Param to train it, or compute it in the method that needs it',
        ),
    ],
)
def test_an_outside_class_that_fails_is_refused(fields, message, tmp_path):
    message = message.replace('{tmp_path}', str(tmp_path))
    with refused(re.escape(message)):
        validate(config_with(fields))


CALLS_QKATTN = """
from qkattn.config.variant import Variant
VARIANT = Variant.parse('qk')
"""
CALLS_EXPERIMENTS = """
from experiments.claims.claim import Expectation
EXPECTATION = Expectation('lm', 'qk/vo', 'x')
"""


@pytest.mark.parametrize('source', [CALLS_QKATTN, CALLS_EXPERIMENTS], ids=['qkattn', 'experiments'])
def test_an_error_of_the_package_is_located_in_the_module_that_calls_it(
    tmp_path, monkeypatch, source
):
    (tmp_path / 'calls_the_package.py').write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    message = f'Error in {tmp_path}/calls_the_package.py, line 3: '
    with refused(re.escape(message)):
        validate(config_with({'model.score': 'calls_the_package:Score'}))


def test_a_syntax_error_is_located_in_the_module(tmp_path, monkeypatch):
    (tmp_path / 'unfinished.py').write_text('import math\ndef matrix(self)\n    return 0\n')
    monkeypatch.syspath_prepend(tmp_path)
    message = f"SyntaxError in {tmp_path}/unfinished.py, line 2: expected ':'"
    with refused(re.escape(message)):
        validate(config_with({'model.score': 'unfinished:Score'}))


# The config of a later version, with one more field, one more section, and another default.


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


def wider_config(*, lately='softmax', rate=0.5):
    """A config of a later version, which has the additional fields `lately` and `rate`.

    With the default values of `lately` and `rate`, the config means the same as Config().
    """
    model = WiderModel(window=Config().model.window, lately=lately)
    return WiderConfig(model=model, extra=Extra(rate=rate))


@pytest.mark.parametrize('config', [Config(), Study()], ids=['config', 'study'])
def test_configs_make_round_trips(config):
    assert from_json(type(config), to_json(config)) == config

    config_dict = serialize.to_config_dict(config)
    assert serialize.from_config_dict(config_dict) == config


def test_a_config_takes_overrides_of_the_type_of_a_field():
    """Flags such as --config.model.d_ff=300 set fields of a ConfigDict, which checks types."""
    values = serialize.to_config_dict(Config())

    # d_ff and scan_unroll are whole numbers or None.
    values.model.d_ff = 300
    values.model.scan_unroll = None
    config = serialize.from_config_dict(values)
    assert config.model.d_ff == 300
    assert config.model.scan_unroll is None

    with pytest.raises(TypeError):
        values.model.d_ff = 'wide'
    # The model has no field `width`.
    with pytest.raises(AttributeError):
        values.model.width = 3


def test_the_fingerprint_of_the_defaults_never_changes():
    assert fingerprint(Config()) == '5c6b1299941b'  # as in schema 1


def test_the_fingerprint_leaves_out_settings_of_the_machine():
    elsewhere = Config(
        mesh=MeshConfig(data=8),
        data=DataConfig(data_dir='a', manual_dir='b'),
        train=TrainConfig(sinks=('wandb',)),
        model=ModelConfig(kernel='einsum'),
    )
    assert fingerprint(elsewhere) == fingerprint(Config())
    assert serialize.with_machine_of(Config(), elsewhere) == elsewhere


def test_the_fingerprint_tells_seeds_and_models_apart():
    other_seeds = Config(trials=TrialsConfig(seeds=(1,)))
    other_model = Config(model=ModelConfig(value='no_v'))
    assert fingerprint(other_seeds) != fingerprint(Config())
    assert fingerprint(other_model) != fingerprint(Config())
    assert fingerprint(other_seeds) != fingerprint(other_model)


@pytest.mark.parametrize(('remat', 'stored'), [('none', False), ('full', True), ('dots', 'dots')])
def test_remat_is_stored_as_in_schema_1(remat, stored):
    """Schema 1 had a boolean: False is 'none', and True is 'full'."""
    config = Config(model=ModelConfig(remat=remat))

    written = to_json(config)

    assert written['model']['remat'] == stored
    assert type(written['model']['remat']) is type(stored)
    assert from_json(Config, written) == config


def test_the_fingerprint_depends_on_remat():
    default = fingerprint(Config())
    assert fingerprint(Config(model=ModelConfig(remat='none'))) == default
    assert fingerprint(Config(model=ModelConfig(remat='full'))) != default
    assert fingerprint(Config(model=ModelConfig(remat='dots'))) != default


def test_a_later_field_at_its_default_is_not_stored():
    assert to_json(wider_config()) == to_json(Config())


@pytest.mark.parametrize(
    ('config', 'field'),
    [
        pytest.param(wider_config(lately='sigmoid'), 'model.lately', id='field'),
        pytest.param(wider_config(rate=0.25), 'extra', id='section'),
    ],
)
def test_a_later_field_with_another_value_is_stored(config, field):
    stored = to_json(config)

    assert fingerprint(config) != fingerprint(Config())
    assert from_json(WiderConfig, stored) == config
    with pytest.raises(ConfigError, match=rf'unknown field {re.escape(field)}=.*newer'):
        from_json(Config, stored)


def test_stored_configs_keep_their_meaning_when_a_default_changes():
    """A stored config without model.window still means None. WiderConfig has the default 64."""
    stored = to_json(Config())
    del stored['model']['window']
    del stored['decode']

    assert fingerprint(WiderConfig()) != fingerprint(Config())
    # A missing field or section gets the default of its schema.
    assert from_json(WiderConfig, stored) == wider_config()
    assert fingerprint(from_json(Config, stored)) == fingerprint(Config())
    # `fingerprint_of` hashes the JSON without adding defaults.
    assert fingerprint_of(stored) != fingerprint(Config())


def test_the_default_of_a_later_field_is_frozen_with_its_schema(monkeypatch):
    """A stored config without model.lately gets the default 'sigmoid' of schema 2.

    The default of the class, 'softmax', does not matter.
    """
    later_schemas = serialize.SCHEMAS | {'2': {'WiderModel': {'lately': 'sigmoid'}}}
    monkeypatch.setattr(serialize, 'SCHEMAS', later_schemas)
    uncached_defaults = serialize.defaults.__wrapped__
    monkeypatch.setattr(serialize, 'defaults', uncached_defaults)

    assert from_json(WiderConfig, to_json(Config())) == wider_config(lately='sigmoid')
    assert fingerprint(wider_config(lately='sigmoid')) == fingerprint(Config())
    assert fingerprint(wider_config()) != fingerprint(Config())


def config_classes(cls):
    """The class of a config, the classes of its sections, and of the sections of sections."""
    classes = [cls]
    for field_type in typing.get_type_hints(cls).values():
        if dataclasses.is_dataclass(field_type):
            classes += config_classes(field_type)
    return classes


@pytest.mark.parametrize('cls', config_classes(Study))
def test_every_field_has_a_frozen_default(cls):
    """schema.json has the default of each field of each section of settings.

    A stored config leaves out fields that have this default. If the default then changed with the
    class, the stored config would get another meaning.
    """
    # Each schema is {class: {field: default}}, with the fields that were added at the same time.
    frozen_fields = set()
    for schema in serialize.SCHEMAS.values():
        defaults_of_fields = schema.get(cls.__name__, {})
        frozen_fields.update(defaults_of_fields)

    missing_defaults = {}
    for field, default in serialize.defaults(cls).items():
        if field not in frozen_fields:
            missing_defaults[field] = default
    addition = json.dumps({cls.__name__: missing_defaults})
    assert not missing_defaults, f'add to {serialize.FILE.name}: {addition}'


def test_committed_runs_are_named_by_the_hash_of_their_configs():
    """This version of the code computes the same hashes of configs as committed studies have.

    A resumed study finds its finished runs by these hashes.
    """
    study_files = list(RESULTS.rglob('study.json'))
    assert study_files

    for study_file in study_files:
        study = json.loads(study_file.read_text())
        # The config of each run is the base with some settings changed.
        assert fingerprint_of(study['base']) == study['base_hash'], study_file

        planned_runs = planned(open_files(study_file.parent) / PLAN)
        for index, run in enumerate(planned_runs):
            stored_config = run['config']
            assert fingerprint_of(stored_config) == run['run'], (study_file, run['run'])

            # Every tenth config is also read and written again. All of them would take too long.
            if index % 10 == 0:
                config = from_json(Config, stored_config)
                assert to_json(config) == stored_config


def test_all_import_paths_that_the_user_has_not_named_are_listed():
    config = {
        'model': {'score': 'mine:Score'},
        'data': {'name': 'yours:corpus(size=2)', 'task': 'yours:Task'},
    }
    message = '^plan.jsonl names yours:Task, yours:corpus, .*--imports=mine:Score,yours:Task,yours:'
    with refused(message):
        require_named(config, ['mine:Score'], 'plan.jsonl', 'give --imports={}')
    require_named(config, import_paths(config), 'plan.jsonl', 'give --imports={}')


def test_import_paths_are_told_from_names_of_data():
    """`import_paths` returns the import paths MODULE:NAME in a config, at any depth, sorted.

    Some names of data look like import paths, and are left out. In `evaluate`, these are 'text:...'
    and 'tokens:...'. In `tokenizer`, they are 'tiktoken:...'.
    """
    data = {
        'evaluate': ['text:book.txt', 'tokens:made', 'own:corpus', '@test'],
        'name': 'text:Evil',
        'tokenizer': 'tiktoken:gpt2',
        'path': 'tokens:Other',
    }
    run = {'tokenizer': 'own:Nibbles(high=1)'}
    config = {'base': {'data': data}, 'runs': [run]}

    assert import_paths(config) == [
        'own:Nibbles',  # in run.tokenizer, without its options
        'own:corpus',  # in data.evaluate
        'text:Evil',  # in data.name
        'tokens:Other',  # in data.path
    ]
