"""Whatever a setting holds, it is accepted or refused in one sentence, and nothing compiles."""

import itertools
import math
import operator

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
# Each setting is tried once: as a setting of a run, of a translation model, or of a study. The base
# of a study has the settings of a run.
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
    """accepts(kind, changes, as_flags=...): whether CONFIGS[kind] with the changes is accepted.

    The changes are parsed from flags, or read as from a file. The test fails if a refusal has
    several lines, or if anything is compiled.
    """
    directory = tmp_path_factory.mktemp('any')
    write_texts(directory / 'texts')
    paths = {'path': str(directory / 'texts'), 'data_dir': str(directory / 'data')}
    run_numbers = itertools.count()
    compilations = []

    def note_compilation(event, duration, **_):
        """Listens to events of JAX, and notes each compilation of a program."""
        if 'backend_compile' in event:
            compilations.append(event)

    def accept(*args, **kwargs):
        """Stands in for the first function that is called after all settings are checked."""
        raise Accepted

    def try_settings(kind, changes, as_flags) -> bool:
        """Whether the changed config is accepted, that is, gets as far as a call of `accept`."""
        # The data are small files, unless the changes name other data.
        section = 'base.data' if kind == 'study' else 'data'
        paths_in_section = {f'{section}.{name}': path for name, path in paths.items()}
        changes = paths_in_section | changes
        replace = parse_overrides if as_flags else replace_fields
        try:
            config = replace(CONFIGS[kind], changes)
            run_directory = directory / str(next(run_numbers))
            if isinstance(config, Study):
                arms = build_arms(config)
                table(arms, config.match)
                worker.run(config, run_directory)
            else:
                train(config, run_directory)
            # `accept` has not been called.
            raise AssertionError(f'{changes} ended without a program')
        except Accepted:
            return True
        except (ConfigError, CheckpointError) as error:
            # A refusal is one line of text.
            assert str(error), changes
            assert '\n' not in str(error), (changes, str(error))
            return False
        finally:
            assert not compilations, changes

    jax.monitoring.register_event_duration_secs_listener(note_compilation)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, 'train_steps', accept)
        patch.setattr(worker, 'make_directory', accept)
        patch.chdir(directory)  # an accepted relative path of data leads into this directory
        yield try_settings


def write_texts(directory):
    """Writes a small corpus of documents, and one of pairs in English and German."""
    for split in ('train', 'validation', 'test'):
        (directory / split).mkdir(parents=True)
        for number in range(100):  # a study requires 100 documents
            (directory / split / f'{number}.txt').write_text(f'{split} {number} ' * 9)
        for language in ('en', 'de'):
            (directory / f'{split}.{language}').write_text(f'{split} {language}\n' * 20)


def parse_overrides(config, changes):
    """Returns the config with changes that are given as flags, such as --config.model.d_model=8.

    Args:
        config: The settings of a run or of a study.
        changes: Values by the name of the setting, such as 'model.d_model'.

    Raises:
        ConfigError: A flag cannot be parsed. The message is its first line.
    """
    arguments = ['train']  # the name of the script
    for name, value in changes.items():
        arguments.append(f'--config.{name}={as_typed(value)}')

    # With a new FlagValues, the flags of this process do not change.
    flag_values = flags.FlagValues()
    try:
        config_flags.DEFINE_config_dict(
            'config', to_config_dict(config), flag_values=flag_values, sys_argv=arguments
        )
        flag_values(arguments)  # parses
        return from_config_dict(flag_values.config)
    except MALFORMED as error:  # any error that absl raises for what it cannot parse
        message = str(error) or type(error).__name__
        raise ConfigError(message.splitlines()[0]) from error


def replace_fields(config, changes):
    """The config with some fields replaced by values of any type, as a file may have them."""
    values = to_json(config)
    for name, value in changes.items():
        *sections, field = name.split('.')
        holder = values
        for section in sections:
            holder = holder.setdefault(section, {})
        holder[field] = value
    return from_json(type(config), values)


def as_typed(value) -> str:
    """The text of a value in a flag. Null characters are removed, as no command line has them."""
    return value.replace('\0', '') if isinstance(value, str) else repr(value)


@pytest.mark.parametrize('kind', CONFIGS)
def test_a_config_is_accepted_as_flags_and_in_a_file(accepts, kind):
    assert accepts(kind, {}, as_flags=True)
    assert accepts(kind, {}, as_flags=False)


@pytest.mark.parametrize('kind', CONFIGS)
def test_an_extreme_value_is_accepted_or_refused_in_one_sentence(accepts, kind):
    """`accepts` asserts that a refusal is one line. Either result is right here."""
    extremes = NUMBERS + TEXTS
    for place, field in enumerate(FIELDS_TO_TRY[kind]):
        value = extremes[5 * place % len(extremes)]
        accepts(kind, {field: value}, as_flags=place % 2 == 0)


@pytest.mark.parametrize('path', ['\0', 'a\nb', 'x' * 5000], ids=['null', 'newline', 'long'])
def test_a_path_that_cannot_exist_is_refused(accepts, path):
    for kind, fields in FIELDS_TO_TRY.items():
        for field in fields:
            if FIELDS[kind][field].bounds.path:
                assert not accepts(kind, {field: path}, as_flags=False)


def arguments_of_accepts(kind: str):
    """A Hypothesis strategy for the arguments of `accepts`, with one to three changed fields."""
    fields = st.sampled_from(list(FIELDS[kind]))
    changes = st.dictionaries(fields, VALUES, min_size=1, max_size=3)
    as_flags = st.booleans()
    return st.tuples(st.just(kind), changes, as_flags)


@pytest.mark.parametrize('num_examples', slow_except([15], [15, 5000]))
def test_random_values_are_accepted_or_refused_in_one_sentence(accepts, num_examples):
    """No settings lead to a crash, to a compilation, or to a refusal of several lines.

    `accepts` asserts this. Its result does not matter: random settings may be valid or not.
    """
    arguments_of_any_kind = st.one_of(*map(arguments_of_accepts, CONFIGS))

    @settings(
        max_examples=num_examples,
        suppress_health_check=list(HealthCheck),
        derandomize=True,  # every run of the test draws the same values
        database=None,
        deadline=None,
    )
    @given(arguments_of_any_kind)
    def check(arguments):
        kind, changes, as_flags = arguments
        accepts(kind, changes, as_flags)

    check()


def is_optional(kind: str, field: str) -> bool:
    return 'None' in str(FIELDS[kind][field].kind)


def test_a_flag_may_be_a_fraction_where_the_file_has_a_whole_number():
    config = from_json(Config, {'model': {'dropout': 0}})

    # dropout is a float, and a file may write 0 for 0.0.
    assert parse_overrides(config, {'model.dropout': 0.5}).model.dropout == 0.5

    # Without a flag, the number stays an int, because the hash of a config tells 0 from 0.0.
    assert type(parse_overrides(config, {}).model.dropout) is int


def test_optional_settings_are_switched_off_on_the_command_line():
    for kind, fields in FIELDS_TO_TRY.items():
        for field in fields:
            if is_optional(kind, field):
                changed = parse_overrides(CONFIGS[kind], {field: None})
                value = operator.attrgetter(field)(changed)
                assert value is None, field
