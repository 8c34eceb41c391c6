"""Whatever a setting holds, it is accepted or refused in one sentence, and nothing compiles."""

import dataclasses
import functools
import itertools
import math

import jax
import pytest
from absl import flags
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ml_collections import config_flags

from qkattn.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    Study,
    TrainConfig,
    TrialsConfig,
    TuningConfig,
    from_config_dict,
    from_json,
    to_config_dict,
)
from qkattn.config import setting as declared
from qkattn.errors import CheckpointError, ConfigError
from qkattn.jobs.cli import MALFORMED
from qkattn.study import worker
from qkattn.study.arms import build_arms, table
from qkattn.train import program, train
from tests.lanes import only

RUN = Config(
    data=DataConfig(name='text'),
    model=ModelConfig(d_model=16, num_layers=1, num_heads=2, context=16),
    optimizer=OptimizerConfig(warmup_steps=2),
    train=TrainConfig(num_steps=40, batch_size=4, steps_per_dispatch=5, lifting='map'),
    trials=TrialsConfig(seeds=(0, 1, 2), learning_rates=(1e-3, 2e-3)),
)
PAIRS = dataclasses.replace(
    RUN,
    model=dataclasses.replace(RUN.model, kind='encoder_decoder'),
    data=DataConfig(name='parallel', languages='en-de', drop_long=True),
)
STUDY = Study(
    base=dataclasses.replace(RUN, train=dataclasses.replace(RUN.train, checkpoint_every=40)),
    variants=('qk/vo', 'shared_qk/vo'),
    sizes=('d_model=32',),
    tolerance=5e-3,
    tuning=TuningConfig(seeds=(7, 8)),
)
FIELDS = {config: [*declared.settings(type(config))] for config in (RUN, PAIRS, STUDY)}
# Each setting once: those of a run, those of translation alone, those of a study besides its base.
OF_PAIRS = ('encoder_variant', 'cross_variant', 'num_encoder_layers', 'source_context')
OWN = [
    *((RUN, name) for name in FIELDS[RUN]),
    *((PAIRS, f'model.{name}') for name in OF_PAIRS),
    *((STUDY, name) for name in FIELDS[STUDY] if not name.startswith('base.')),
]

NUMBERS = (2**31, 2**31 - 1, 2**63, -1, 0, 16**5000, 1e300, 1e-320, math.nan, math.inf, -math.inf)
TEXTS = (
    *('', ' ', 'None', '\0', '\ud800', 'a\nb', 'x' * 5000, 'x' * 300, 'a/' * 3000, '~nobody/x'),
    *('/dev/null', '/proc/x', '..:x/vo', ':b/vo', 'a:/vo', 'a::b/vo', 'x:y', 'json:JSONDecoder/vo'),
    *('qk(/vo', 'qk(rank=1)/vo', 'low_rank(rank=99999999999)/vo', 'low_rank(**{})/vo', 'qk/'),
    *('d_model=99999999999', 'd_model=0x' + 'f' * 5000, 'd_model=', 'd_model=2147483647'),
    *('qk/vo?d_model=2147483647', 'qk/vo?num_heads=-1', 'qk/vo?' + '-' * 3000 + '1', 'qk/vo?x=1'),
    *(
        'tfds:',
        'tfds:9',
        '9',
        'hf:',
        'hf:a',
        'recall(pairs=99999999999)',
        'recall(pairs=-1)',
        'copy(',
        '(1,2',
        '(' * 300,
    ),
)
ONE = st.one_of(
    # Hypothesis may print what it samples from, and Python prints no integer of so many digits.
    st.sampled_from(range(len(NUMBERS))).map(lambda place: NUMBERS[place]),
    st.sampled_from(TEXTS),
    st.text(max_size=20),
    st.integers(),
    st.integers(1, 64),
    st.floats(),
    st.floats(0, 1),
    st.booleans(),
    st.none(),
    st.binary(max_size=3),
)
VALUES = st.one_of(
    ONE,
    st.lists(ONE, max_size=3).map(tuple),
    st.lists(ONE, max_size=3),
    st.dictionaries(st.text(max_size=5), ONE, max_size=2),
)


class Accepted(BaseException):
    """Raised where the next step compiles, or creates a study's directory."""


@pytest.fixture(scope='module', autouse=True)
def compilations():
    """Stops where a program would be traced to be compiled; lists what is compiled all the same."""
    durations = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: 'backend_compile' in event and durations.append(event)
    )

    def accept(*args, **kwargs):
        raise Accepted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, 'train_steps', accept)
        patch.setattr(worker, 'make_directory', accept)
        yield durations


@pytest.fixture(scope='module')
def texts(tmp_path_factory):
    """Text that is prepared at once, in as many documents as a study asks for."""
    directory = tmp_path_factory.mktemp('texts')
    for split in ('train', 'validation', 'test'):
        (directory / split).mkdir()
        for place in range(100):
            (directory / split / f'{place}.txt').write_text(f'{split} {place} ' * 9)
        for language in ('en', 'de'):
            (directory / f'{split}.{language}').write_text(f'{split} {language}\n' * 20)
    return str(directory)


@pytest.fixture(scope='module')
def accepted(texts, tmp_path_factory, compilations):
    """accepted(config, changes, text) -> whether; fails where it is refused in several lines.

    With `text`, changes are given as on the command line, otherwise as in a file.
    """
    directory, numbers = tmp_path_factory.mktemp('any'), itertools.count()

    def settle(config, changes, text) -> bool:
        data = 'base.data.' if config is STUDY else 'data.'
        changes = {f'{data}path': texts, f'{data}data_dir': str(directory / 'data')} | changes
        try:
            read = (parsed if text else replaced)(config, changes)
            if isinstance(read, Study):
                table(build_arms(read), read.match)
                worker.run(read, directory / str(next(numbers)))
            else:
                train(read, directory / str(next(numbers)))
        except Accepted:
            return True
        except (ConfigError, CheckpointError) as error:
            assert str(error) and '\n' not in str(error), (changes, str(error))
            return False
        raise AssertionError(f'{changes} ended without a program')

    def checked(config, changes, text) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(directory)  # A relative directory of data may be accepted.
            outcome = settle(config, changes, text)
        assert not compilations, changes
        return outcome

    return checked


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
    values = dataclasses.asdict(config)
    for name, value in changes.items():
        *sections, field = name.split('.')
        functools.reduce(dict.__getitem__, sections, values)[field] = value
    return from_json(type(config), values)


def written(value) -> str:
    """As on the command line, which holds no null characters."""
    try:
        return value.replace('\0', '') if isinstance(value, str) else repr(value)
    except ValueError:  # Python prints integers of up to 4,300 digits
        return '0x' + 'f' * 5000


def profile(examples: int):
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


CHANGES = st.one_of(
    *(
        st.tuples(
            st.just(config),
            st.dictionaries(st.sampled_from(names), VALUES, min_size=1, max_size=3),
            st.booleans(),
        )
        for config, names in FIELDS.items()
    )
)


# Each field in both forms; in the quick tests in one, in turns.
FORMS = [(True, 0), (False, 1), (True, 1), (False, 0)]


@pytest.mark.parametrize(('text', 'half'), only(FORMS[:2], FORMS))
@pytest.mark.parametrize('config', FIELDS, ids=['run', 'pairs', 'study'])
def test_every_field_takes_or_refuses_extremes(accepted, config, text, half):
    extremes, step = NUMBERS + TEXTS, 1 if text else 5
    for place, (of, name) in [*enumerate(OWN)][half::2]:
        if of is config:
            accepted(config, {name: extremes[place * step % len(extremes)]}, text)


@profile(40)
@given(CHANGES)
def test_any_values_are_accepted_or_refused(accepted, changes):
    accepted(*changes)


@pytest.mark.slow
@profile(5000)
@given(CHANGES)
def test_many_values_are_accepted_or_refused(accepted, changes):
    accepted(*changes)


@pytest.mark.parametrize('config', FIELDS, ids=['run', 'pairs', 'study'])
@pytest.mark.parametrize('text', [True, False])
def test_the_settings_that_others_start_from_are_accepted(accepted, config, text):
    assert accepted(config, {}, text)


@pytest.mark.parametrize(
    ('config', 'name'),
    [
        (config, name)
        for config, name in OWN
        if 'None' in str(declared.settings(type(config))[name].kind)
    ],
)
def test_optional_settings_are_switched_off_on_the_command_line(config, name):
    changed = parsed(config, {name: None})
    assert functools.reduce(getattr, name.split('.'), changed) is None
