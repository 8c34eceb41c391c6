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
from tests.lanes import only

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
OWN = {
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
ONE = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.text(max_size=20),
    *(st.integers(), st.integers(1, 64), st.floats(), st.floats(0, 1)),
    *(st.booleans(), st.none(), st.binary(max_size=3)),
)
SEVERAL = st.lists(ONE, max_size=3)
VALUES = st.one_of(ONE, SEVERAL.map(tuple), SEVERAL, st.dictionaries(st.text(), ONE, max_size=2))


class Accepted(BaseException):
    """Raised where the next step compiles, or creates a study's directory."""


@pytest.fixture(scope='module')
def accepted(tmp_path_factory):
    """accepted(kind, changes, text) -> whether; fails where it is refused in several lines.

    With `text`, changes are given as on the command line, otherwise as in a file. The data is text
    that is prepared at once, in as many documents as a study asks for.
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

    def checked(kind, changes, text) -> bool:
        section = 'base.data' if kind == 'study' else 'data'
        changes = {f'{section}.{name}': value for name, value in data.items()} | changes
        try:
            config = (parsed if text else replaced)(CONFIGS[kind], changes)
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
        yield checked


def parsed(config, changes):
    """The config as the command line overrides it; what it cannot parse is a ConfigError."""
    arguments = ['train', *(f'--config.{name}={written(x)}' for name, x in changes.items())]
    try:
        values = flags.FlagValues()
        config_flags.DEFINE_config_dict(
            'config', to_config_dict(config), flag_values=values, sys_argv=arguments
        )
        values(arguments)
        return from_config_dict(values.config)
    except MALFORMED as error:
        raise ConfigError((str(error) or type(error).__name__).splitlines()[0]) from error


def replaced(config, changes):
    """The config with fields of any type, as a file in Python or JSON may have them."""
    values = to_json(config)
    for name, value in changes.items():
        *sections, field = name.split('.')
        functools.reduce(lambda at, key: at.setdefault(key, {}), sections, values)[field] = value
    return from_json(type(config), values)


def written(value) -> str:
    """As on the command line, which holds no null characters."""
    return value.replace('\0', '') if isinstance(value, str) else repr(value)


@pytest.mark.parametrize('kind', CONFIGS)
def test_every_field_takes_or_refuses_extremes(accepted, kind):
    """In turns as on the command line and as in a file."""
    assert accepted(kind, {}, text=True) and accepted(kind, {}, text=False)
    extremes = NUMBERS + TEXTS
    for number, name in enumerate(OWN[kind]):
        accepted(kind, {name: extremes[5 * number % len(extremes)]}, text=number % 2 == 0)
        if FIELDS[kind][name].bounds.path:
            for path in ('\0', 'a\nb', 'x' * 5000):
                assert not accepted(kind, {name: path}, text=False)


def changes_of(kind: str):
    changes = st.dictionaries(st.sampled_from([*FIELDS[kind]]), VALUES, min_size=1, max_size=3)
    return st.tuples(st.just(kind), changes, st.booleans())


@pytest.mark.parametrize('examples', only([15], [15, 5000]))
def test_any_values_are_accepted_or_refused(accepted, examples):
    fixed = {'derandomize': True, 'database': None, 'deadline': None}
    options = settings(max_examples=examples, suppress_health_check=list(HealthCheck), **fixed)

    @options
    @given(st.one_of(*map(changes_of, CONFIGS)))
    def check(changes):
        accepted(*changes)

    check()


def test_optional_settings_are_switched_off_on_the_command_line():
    for kind, names in OWN.items():
        for name in (name for name in names if 'None' in str(FIELDS[kind][name].kind)):
            changed = parsed(CONFIGS[kind], {name: None})
            assert functools.reduce(getattr, name.split('.'), changed) is None, name
