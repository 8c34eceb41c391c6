"""Whatever a setting holds, it is accepted or refused in one sentence, and nothing compiles."""

import functools
import itertools
import math

import jax
import pytest
from absl import flags
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ml_collections import config_flags

from qkattn.config import Config, Study, from_config_dict, from_json, to_config_dict, to_json
from qkattn.config import setting as declared
from qkattn.errors import CheckpointError, ConfigError
from qkattn.jobs.cli import MALFORMED
from qkattn.study import worker
from qkattn.study.arms import build_arms, table
from qkattn.train import program
from qkattn.train.loop import train
from tests.lanes import slow_except

RUN = {
    'data': {'name': 'text'},
    'model': {'d_model': 16, 'num_layers': 1, 'num_heads': 2, 'context': 16},
    'optimizer': {'warmup_steps': 2},
    'train': {'num_steps': 40, 'batch_size': 4, 'steps_per_dispatch': 5, 'lifting': 'map'},
    'trials': {'seeds': (0, 1, 2), 'learning_rates': (1e-3, 2e-3)},
}
PAIRS = {
    **RUN,
    'model': RUN['model'] | {'kind': 'encoder_decoder'},
    'data': {'name': 'parallel', 'languages': 'en-de', 'drop_long': True},
}
STUDY = {
    'base': RUN | {'train': RUN['train'] | {'checkpoint_every': 40}},
    'variants': ('qk/vo', 'shared_qk/vo'),
    'sizes': ('d_model=32',),
    'tolerance': 5e-3,
    'tuning': {'seeds': (7, 8)},
}
CONFIGS = {
    'run': from_json(Config, RUN),
    'pairs': from_json(Config, PAIRS),
    'study': from_json(Study, STUDY),
}
FIELDS = {kind: declared.settings(type(config)) for kind, config in CONFIGS.items()}
# Each setting once: those of a run, those of translation alone, those of a study besides its base.
OF_PAIRS = ('encoder_variant', 'cross_variant', 'num_encoder_layers', 'source_context')
FIELDS_TO_TRY = {
    'run': list(FIELDS['run']),
    'pairs': [f'model.{name}' for name in OF_PAIRS],
    'study': [name for name in FIELDS['study'] if not name.startswith('base.')],
}

NUMBERS = (2**31, 2**31 - 1, 2**63, -1, 0, 1e300, 1e-320, math.nan, math.inf, -math.inf)
TEXTS = (
    *('', ' ', 'None', '\0', 'a\nb', 'x' * 5000, 'x' * 300, 'a/' * 3000, '~nobody/x'),
    *('/dev/null', '/proc/x', '..:x/vo', ':b/vo', 'a:/vo', 'a::b/vo', 'x:y', 'json:JSONDecoder/vo'),
    *('qk(/vo', 'qk(rank=1)/vo', 'low_rank(rank=99999999999)/vo', 'low_rank(**{})/vo', 'qk/'),
    *('d_model=99999999999', 'd_model=', 'd_model=2147483647'),
    *('qk/vo?d_model=2147483647', 'qk/vo?num_heads=-1', 'qk/vo?' + '-' * 3000 + '1', 'qk/vo?x=1'),
    *('tfds:', 'tfds:9', '9', 'hf:', 'hf:a', 'recall(pairs=99999999999)', 'recall(pairs=-1)'),
    *('copy(', '(1,2'),
)
SCALARS = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.text(max_size=20),
    *(st.integers(), st.integers(1, 64), st.floats(), st.floats(0, 1)),
    *(st.booleans(), st.none(), st.binary(max_size=3)),
)
LISTS = st.lists(SCALARS, max_size=3)
VALUES = st.one_of(
    SCALARS, LISTS.map(tuple), LISTS, st.dictionaries(st.text(), SCALARS, max_size=2)
)


class Accepted(BaseException):
    """Raised where the next step compiles, or creates a study's directory."""


@pytest.fixture(scope='module')
def accepts(tmp_path_factory):
    """accepts(kind, changes, text) -> whether the config of this kind with the changes is accepted.

    It fails the test where a refusal has several lines or anything compiles. With `text`, changes
    are given as on the command line, otherwise as in a file. The data is text that is prepared at
    once, in as many documents as a study asks for.
    """
    directory = tmp_path_factory.mktemp('any')
    numbers = itertools.count()
    compilations = []
    data = {'path': str(directory / 'texts'), 'data_dir': str(directory / 'data')}
    for split in ('train', 'validation', 'test'):
        (directory / 'texts' / split).mkdir(parents=True)
        for number in range(100):
            (directory / 'texts' / split / f'{number}.txt').write_text(f'{split} {number} ' * 9)
        for language in ('en', 'de'):
            pairs = directory / 'texts' / f'{split}.{language}'
            pairs.write_text(f'{split} {language}\n' * 20)
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: 'backend_compile' in event and compilations.append(event)
    )

    def accept(*args, **kwargs):
        raise Accepted

    def try_settings(kind, changes, text) -> bool:
        section = 'base.data' if kind == 'study' else 'data'
        changes = {f'{section}.{name}': value for name, value in data.items()} | changes
        try:
            config = (parse_overrides if text else replace_fields)(CONFIGS[kind], changes)
            start = train
            if isinstance(config, Study):
                table(build_arms(config), config.match)
                start = worker.run
            start(config, directory / str(next(numbers)))
            raise AssertionError(f'{changes} ended without a program')
        except Accepted:
            return True
        except (ConfigError, CheckpointError) as error:
            assert str(error) and '\n' not in str(error), (changes, str(error))
            return False
        finally:
            assert not compilations, changes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, 'train_steps', accept)
        patch.setattr(worker, 'make_directory', accept)
        patch.chdir(directory)  # A relative directory of data may be accepted.
        yield try_settings


def parse_overrides(config, changes):
    """The config as the command line overrides it; what it cannot parse is a ConfigError."""
    arguments = ['train', *(f'--config.{name}={as_typed(x)}' for name, x in changes.items())]
    try:
        values = flags.FlagValues()
        config_flags.DEFINE_config_dict(
            'config', to_config_dict(config), flag_values=values, sys_argv=arguments
        )
        values(arguments)
        return from_config_dict(values.config)
    except MALFORMED as error:
        raise ConfigError((str(error) or type(error).__name__).splitlines()[0]) from error


def replace_fields(config, changes):
    """The config with fields of any type, as a file in Python or JSON may have them."""
    values = to_json(config)
    for name, value in changes.items():
        *sections, field = name.split('.')
        functools.reduce(lambda at, key: at.setdefault(key, {}), sections, values)[field] = value
    return from_json(type(config), values)


def as_typed(value) -> str:
    """As on the command line, which holds no null characters."""
    return value.replace('\0', '') if isinstance(value, str) else repr(value)


@pytest.mark.parametrize('kind', CONFIGS)
def test_every_field_accepts_an_extreme_value_or_refuses_it_in_one_sentence(accepts, kind):
    """By turns, values are given as on the command line and as in a file."""
    assert accepts(kind, {}, text=True)
    assert accepts(kind, {}, text=False)
    extremes = NUMBERS + TEXTS
    for number, name in enumerate(FIELDS_TO_TRY[kind]):
        # `accepts` fails unless the config is valid, or refused in one sentence.
        accepts(kind, {name: extremes[5 * number % len(extremes)]}, text=number % 2 == 0)
        if FIELDS[kind][name].bounds.path:
            for path in ('\0', 'a\nb', 'x' * 5000):
                assert not accepts(kind, {name: path}, text=False)


def changes_of(kind: str):
    changes = st.dictionaries(st.sampled_from([*FIELDS[kind]]), VALUES, min_size=1, max_size=3)
    return st.tuples(st.just(kind), changes, st.booleans())


@pytest.mark.parametrize('examples', slow_except([15], [15, 5000]))
def test_random_values_are_accepted_or_refused_in_one_sentence(accepts, examples):
    fixed = {'derandomize': True, 'database': None, 'deadline': None}
    options = settings(max_examples=examples, suppress_health_check=list(HealthCheck), **fixed)

    @options
    @given(st.one_of(*map(changes_of, CONFIGS)))
    # `accepts` fails unless the config is valid, or refused in one sentence.
    def check(changes):
        accepts(*changes)

    check()


def test_optional_settings_are_switched_off_on_the_command_line():
    for kind, names in FIELDS_TO_TRY.items():
        for name in (name for name in names if 'None' in str(FIELDS[kind][name].kind)):
            changed = parse_overrides(CONFIGS[kind], {name: None})
            assert functools.reduce(getattr, name.split('.'), changed) is None, name
