"""Command lines of the experiment scripts: flags, --help, error messages and exit codes."""

import difflib
import errno
import inspect
import logging
import numbers
import operator
import os
import re
import signal
import sys
import textwrap
import traceback
import types
import typing
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TextIO, cast

import absl.logging
from absl import app, flags
from ml_collections import ConfigDict, config_flags
from ml_collections.config_flags.config_flags import ConfigFileFlagParser

from qkattn.config import Config, Study, from_config_dict, to_config_dict
from qkattn.config.paths import expand_home, read_regular, require_regular
from qkattn.config.setting import Setting, concrete_types, settings
from qkattn.errors import (
    CheckpointError,
    ConfigError,
    Lost,
    ProcessError,
    ReadError,
    Stopped,
    UnsuitableFileError,
)
from qkattn.jobs import environment
from qkattn.jobs.display import LogHandler
from qkattn.jobs.machine import keep_freed_memory
from qkattn.jobs.output import discard_output, exit_if_reader_gone, say
from qkattn.jobs.signals import (
    EXIT_CONFIG,
    EXIT_INTERRUPTED,
    EXIT_REQUEUE,
    INTERRUPTED,
    RESUMABLE,
)

# --help of a script lists the flags that functions of this module define, such as --config.
flags.disclaim_key_flags()

# Prefixes of paths of open file descriptors, which a shell passes for --file=<(command).
DESCRIPTORS = ('/dev/fd/', '/dev/stdin')

# The value of --dry_run for a dry run that compiles nothing.
COUNT = 'count'

# The class of a config: what get_config() of a config file returns.
Kind = type[Config] | type[Study]

# Errors of flag parsing: unknown flags or fields, values of a wrong type, malformed literals.
MALFORMED = (flags.Error, AttributeError, KeyError, TypeError, ValueError, SyntaxError)

# An override, such as '--config.model.d_model=3' or '-noconfig.model.biases'. The group is the
# field name, such as 'model.d_model'.
_OVERRIDE = re.compile(r'--?(?:no)?config\.([^=]*)')
# absl's message for an override that does not parse, such as 'flag --config.train.seed=x: ...'. The
# groups are the field name and the value.
_WRONG_OVERRIDE = re.compile(r'flag --config\.([\w.]+)=(.*?): ')


class PathParser(flags.ArgumentParser):
    """Parses a path or a URL, and expands ~."""

    def parse(self, argument: Any) -> str:
        if argument.startswith('~'):
            return os.fspath(expand_home(argument))
        return argument

    def flag_type(self) -> str:
        return 'path'


class PathsParser(flags.ListParser):
    """Parses several paths that commas separate."""

    def parse(self, argument: Any) -> list[str]:
        return [PathParser().parse(path) for path in super().parse(argument)]


class DryRunParser(flags.ArgumentParser):
    """Parses --dry_run, which stands for --dry_run=count, and --dry_run=POD."""

    def parse(self, argument: Any) -> str | None:
        # absl gives these texts for --dry_run and --nodry_run.
        values = {'true': COUNT, 'false': None}
        return values.get(argument, argument)

    def flag_type(self) -> str:
        return f'{COUNT!r} or a pod'


class _OrNone(flags.ArgumentParser):
    """Wraps a parser, so that it also accepts 'None'."""

    def __init__(self, parser: flags.ArgumentParser):
        self.parser = parser

    def parse(self, argument: Any) -> Any:
        return None if argument == 'None' else self.parser.parse(argument)

    def flag_type(self) -> str:
        return self.parser.flag_type()


config_flags.register_flag_parser_for_type(int, _OrNone(flags.IntegerParser()))
config_flags.register_flag_parser_for_type(float, _OrNone(flags.FloatParser()))
# The type of a float whose value in the config file is a whole number; see `to_config_dict`.
config_flags.register_flag_parser_for_type(numbers.Real, _OrNone(flags.FloatParser()))
config_flags.register_flag_parser_for_type(str, _OrNone(flags.ArgumentParser()))


def shipped(folder: str) -> dict[str, Path]:
    """Returns the Python files of configs/ or experiments/ by name, as {'train': .../train.py}.

    In a wheel, the folder is inside the package. In a checkout, it is beside the package.
    """
    package = Path(__file__).parents[1]
    directory = package / folder
    if not directory.is_dir():
        directory = package.parent / folder

    files = {}
    for path in directory.glob('*.py'):
        if path.stem != '__init__':
            files[path.stem] = path
    for path in directory.glob('*/__main__.py'):  # a script of several files
        files[path.parent.name] = path
    return dict(sorted(files.items()))


def shipped_configs() -> dict[str, Path]:
    """Returns the configs that come with qkattn by name; configs of claims are claims/NAME."""
    configs = shipped('configs')
    for name, path in shipped('configs/claims').items():
        configs[f'claims/{name}'] = path
    return configs


class _ConfigParser(ConfigFileFlagParser):
    """Parses --config: loads a Python file, or a config that comes with qkattn by its name."""

    def __init__(self, kind: Kind):
        super().__init__('config')
        self.kind = kind

    def parse(self, path: str) -> Any:
        """Loads FILE.py or NAME, optionally with ':ARGUMENT' for its get_config().

        Returns:
            The settings as a ConfigDict.

        Raises:
            ConfigError: get_config() does not return settings.
            ValueError: The file is not Python, or its code fails, as in 'line 7: NameError: name
                'x' is not defined'.
        """
        name, colon, argument = path.partition(':')
        shipped_config = shipped_configs().get(name)
        file = PathParser().parse(name) if shipped_config is None else str(shipped_config)

        # absl logs a warning if get_config() returns None. `_config_dict` raises an error instead.
        absl_log = absl.logging.get_absl_logger()
        try:
            if os.path.exists(file) and not os.path.isdir(file):
                require_regular(file)  # raises UnsuitableFileError for a pipe
            absl_log.disabled = True
            returned = super().parse(f'{file}{colon}{argument}')  # runs the file and get_config()
            return _config_dict(returned)
        except ConfigError:
            raise
        except UnsuitableFileError as error:
            raise ValueError(f'{error}; give a Python file') from error
        except Exception as error:
            line = _last_line_that_ran(file, error)  # None if no line of the file ran
            if line is not None:  # the code of the file has failed
                error_name = type(error).__name__
                raise ValueError(f'line {line}: {error_name}: {error}') from error
            if isinstance(error, SyntaxError):  # the file is not Python
                raise ValueError(str(error)) from error
            raise
        finally:
            absl_log.disabled = False


def _last_line_that_ran(file: str, error: BaseException) -> int | None:
    """Returns the line number of a file's innermost frame in a traceback; None if it has none."""
    line = None
    for frame in traceback.extract_tb(error.__traceback__):  # from the outermost frame inwards
        if os.path.abspath(frame.filename) == os.path.abspath(file):
            line = frame.lineno
    return line


def _config_dict(returned: Any) -> Any:
    """Converts the result of get_config() to a ConfigDict; raises ConfigError for other types."""
    if isinstance(returned, Config | Study):
        return to_config_dict(returned)
    # For an unreadable file, ml_collections returns an object that raises the error when used.
    is_delayed_error = type(returned).__module__ == ConfigFileFlagParser.__module__
    if isinstance(returned, ConfigDict) or is_delayed_error:
        return returned
    description = 'nothing' if returned is None else f'a value of type {type(returned).__name__}'
    raise ConfigError(f'get_config() returns {description}; it must return a Config or a Study')


def define_path(name: str, default: str | None, description: str) -> flags.FlagHolder:
    """Defines a flag that names a file or a directory."""
    return flags.DEFINE(PathParser(), name, default, description)


def define_paths(name: str, default: list[str], description: str) -> flags.FlagHolder:
    """Defines a flag that names several files or directories, with commas between them."""
    serializer = flags.CsvListSerializer(',')
    return flags.DEFINE(PathsParser(), name, default, description, serializer=serializer)


def define_trial() -> flags.FlagHolder:
    """Defines the flag --trial, which selects a trial of a run."""
    description = 'Index of the trial of a run; default: the first that has not diverged.'
    return flags.DEFINE_integer('trial', None, description)


def define_data() -> flags.FlagHolder:
    """Defines the flag --data, the source of the tokenizer for a model without a run."""
    description = (
        'For a source that is not a run, what its tokenizer is from: a dataset whose text is read '
        'as bytes, a tokenizer.json, tiktoken:NAME, or a directory that prepare_data has written; '
        'default: bytes, for a model of 256 ids.'
    )
    return flags.DEFINE_string('data', None, description)


def define_imports() -> flags.FlagHolder:
    """Defines the flag --imports, which lists the import paths that files of models may name."""
    description = (
        'Import paths, as in my.module:Score, that files of the model or study may name; code that '
        'they name is imported only if it is named here.'
    )
    return flags.DEFINE_list('imports', [], description)


def define_dry_run(description: str) -> flags.FlagHolder:
    """Defines the flag --dry_run, whose value is optional.

        command line             value of the flag
        nothing                  None
        --dry_run                COUNT
        --dry_run=v5p-2x4x4      'v5p-2x4x4'

    Args:
        description: The help text for --dry_run without a value.
    """
    description += (
        ' With a pod such as v5p-2x4x4 or h100-16x8, compiles for it, and prints memory, FLOPs and '
        'warnings of a step; needs no accelerator. See docs/scaling.md.'
    )
    serializer: flags.ArgumentSerializer = flags.ArgumentSerializer()
    return flags.DEFINE(
        DryRunParser(),
        'dry_run',
        None,
        description,
        serializer=serializer,
        boolean=True,  # makes the value optional: absl parses --dry_run as 'true'
    )


def define_config(kind: Kind) -> flags.FlagHolder:
    """Defines the flag --config=FILE.py or --config=NAME, and flags that override its settings.

    For example, --config.model.d_model=256 overrides one setting.

    Args:
        kind: The class of the config, Config (a run) or Study.
    """
    holder = config_flags.DEFINE_config_file(
        'config',
        None,
        'Python file whose get_config() returns the settings, or the name of a config that '
        f'comes with qkattn: {", ".join(shipped_configs())}. The fields below override its '
        'settings; the defaults are those of a config that does not set them.',
        lock_config=True,
    )
    flags.FLAGS['config'].parser = _ConfigParser(kind)  # accepts names besides files
    return holder


def _config_class() -> Kind:
    """Returns the class that the script's config must have, Config or Study."""
    return cast(_ConfigParser, flags.FLAGS['config'].parser).kind


def read_config(flag: flags.FlagHolder) -> Any:
    """Returns the config of the flag --config, with overrides applied.

    Raises:
        ConfigError: The file cannot be loaded, or its config is not of the class, Config or Study,
            that the script needs.
    """
    if flag.value is None:
        raise ConfigError('--config=FILE.py is required, e.g. --config=quickstart')
    try:
        config = from_config_dict(flag.value)
    except OSError as error:  # ml_collections has delayed the error of an unreadable file
        path = config_flags.get_config_filename(flags.FLAGS['config'])
        last_line = str(error).strip().splitlines()[-1]
        reason = last_line.strip()
        names = list(shipped_configs())
        name, _, _ = path.partition(':')  # 'claims/lm_sharing' of 'claims/lm_sharing:cpu'
        hint = _did_you_mean('--config=', name, names)
        raise ConfigError(
            f'--config={path} cannot be loaded: {reason}; configs that come with qkattn are '
            f'{", ".join(names)}{hint}'
        ) from error

    required_class = _config_class()
    if not isinstance(config, required_class):
        other_script = script('ablate' if isinstance(config, Study) else 'train')
        raise ConfigError(
            f'this config is a {type(config).__name__}, not a {required_class.__name__}; run it '
            f'with {other_script}'
        )
    return config


def _did_you_mean(prefix: str, name: str, known_names: Collection[str]) -> str:
    """Returns a hint such as '; did you mean --config.train.seed?'; '' without a similar name.

    `prefix` precedes the name in the hint, such as '--config.'.
    """
    similar_names = difflib.get_close_matches(name, known_names, n=1)
    return f'; did you mean {prefix}{similar_names[0]}?' if similar_names else ''


def arguments(config: Config) -> list[str]:
    """Returns command-line arguments that give a script this config.

    For example, ['--config=quickstart', '--config.train.seed=1'] if only the seed differs from the
    config file of this script.
    """
    flag = flags.FLAGS['config']
    path = config_flags.get_config_filename(flag)
    config_of_file = from_config_dict(flag.parser.parse(path))  # without overrides
    overrides = []
    for name in settings(type(config)):  # such as 'model.d_model'
        get_setting = operator.attrgetter(name)
        if get_setting(config) != get_setting(config_of_file):
            overrides.append(f'--config.{name}={get_setting(config)}')
    return [f'--config={path}', *overrides]


def required(flag: flags.FlagHolder) -> str:
    """Returns the value of a directory flag; raises ConfigError if it is missing or empty."""
    if not flag.value:  # an unset shell variable gives an empty value
        raise ConfigError(f'--{flag.name}=DIRECTORY is required')
    return flag.value


def token_ids(flag: flags.FlagHolder, vocab_size: int) -> list[int]:
    """Returns the token ids in a flag such as "12 7 301".

    Raises:
        ConfigError: The flag has no ids, or something else than whole numbers below `vocab_size`.
    """
    words = flag.value.split()
    are_ids = all(word.isdecimal() and int(word) < vocab_size for word in words)
    if not words or not are_ids:
        raise ConfigError(
            f'--{flag.name}={flag.value!r} must be whole numbers from 0 to {vocab_size - 1}'
        )
    return [int(word) for word in words]


def text_or_file_content(text: flags.FlagHolder, file: flags.FlagHolder) -> str:
    """Returns the value of the flag `text`, or the content of the file in the flag `file`.

    Returns '' if neither flag is given.

    Raises:
        ConfigError: Both flags are given, or the file cannot be read.
    """
    if file.value is None:
        return '' if text.value is None else text.value
    if text.value is not None:
        raise ConfigError(f'--{text.name} and --{file.name} exclude each other')
    try:
        # --file=<(command) names a pipe, which `read_regular` refuses.
        if file.value.startswith(DESCRIPTORS):
            content = Path(file.value).read_bytes()
        else:
            content = read_regular(file.value)
        # utf-8-sig drops a byte order mark. Text mode would also replace lone carriage returns.
        return content.decode('utf-8-sig').replace('\r\n', '\n')
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'--{file.name}={file.value} cannot be read: {error}') from error


def is_dry_run() -> bool:
    """Whether the flag --dry_run is set; False for scripts without this flag."""
    return 'dry_run' in flags.FLAGS and flags.FLAGS['dry_run'].value not in (None, False)


def script(name: str) -> str:
    """Returns the command of another script, in the form in which this script was started.

    script('train') is 'qkattn train' or 'python -m experiments.train'.
    """
    is_module = any(argument.startswith('experiments.') for argument in sys.orig_argv)
    return f'python -m experiments.{name}' if is_module else f'qkattn {name}'


def run(main: Callable[[], None], positional: flags.FlagHolder | None = None) -> None:
    """Parses the flags of a script, calls its function `main`, and ends with an exit code.

      0    done
      1    other errors
      2    an impossible setting or workdir: do not retry
      75   stopped on request with nothing lost: run the same command again
      130  interrupted without saving
      141  the reader of the output has gone, as in `... | head`

    Args:
        main: A function of the script's module.
        positional: The flag that takes positional arguments. For example, `report DIRECTORY` is
            short for `report --study=DIRECTORY`.
    """
    script_globals = inspect.unwrap(main).__globals__  # of the module that defines `main`
    kind = _config_class() if 'config' in flags.FLAGS else None

    def parse_flags(argv: Sequence[str]) -> list[str]:
        """Parses the flags; returns the script's name and its positional arguments."""
        if '--help' in argv or '-h' in argv:
            with exit_if_reader_gone():
                print(_help(script_globals['__doc__'], kind))
            sys.exit(0)
        try:
            return flags.FLAGS(argv)
        except MALFORMED as error:
            exit_with(_describe_malformed(error, kind))

    def run_main(argv: list[str]) -> None:
        """Calls `main`, and turns its errors into exit codes; `argv` is from `parse_flags`."""
        positional_arguments = argv[1:]
        if positional is not None and _accepts_positional(positional, positional_arguments):
            flags.FLAGS[positional.name].parse(','.join(positional_arguments))
        elif positional_arguments:
            hint = '; settings are given as --config.field=value' if kind is not None else ''
            exit_with(f'unknown argument {positional_arguments[0]!r}{hint}')

        _log_to_stderr()
        keep_freed_memory()  # must come before other threads start
        try:
            with exit_if_reader_gone():
                main()
        except Exception as error:
            ending = outcome(error)
            if ending is None:  # an unexpected error, such as a bug
                raise
            exit_with(ending.sentence, ending.code)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # another Ctrl-C would print a traceback
            script_name = _script_name(Path(script_globals['__file__']))
            is_resumable = script_name in RESUMABLE and not is_dry_run()
            exit_with(INTERRUPTED if is_resumable else 'interrupted', EXIT_INTERRUPTED)

    try:
        environment.check()
    except ConfigError as error:
        exit_with(str(error))
    app.run(run_main, flags_parser=parse_flags)


def _script_name(file: Path) -> str:
    """Returns the name of a script: 'train' of train.py, 'claims' of claims/__main__.py."""
    return file.parent.name if file.stem == '__main__' else file.stem


def _accepts_positional(flag: flags.FlagHolder, positional_arguments: Sequence[str]) -> bool:
    """Whether positional arguments can be the value of `flag`, several of them for a list flag."""
    if not positional_arguments or flag.value is not None:
        return False
    type_in_words = flags.FLAGS[flag.name].flag_type()
    is_list = type_in_words.startswith('comma')  # 'comma separated list of strings'
    return len(positional_arguments) == 1 or is_list


def _describe_malformed(error: BaseException, kind: Kind | None) -> str:
    """Returns a sentence that tells the user why a script's arguments cannot be parsed.

    Args:
        error: The parsing error, an instance of MALFORMED.
        kind: The class of the config, Config or Study; None for a script without --config.
    """
    message = (str(error) or type(error).__name__).strip()
    lines = message.splitlines()
    sentence = lines[0]  # of the error; replaced below for known mistakes

    if kind is not None:
        # An unknown setting, such as --config.train.sed=1.
        unknown_field = _describe_unknown_field(sys.argv[1:], kind)
        if unknown_field is not None:
            return unknown_field
        # A value of a wrong type, such as --config.train.seed=x.
        wrong_value = _describe_wrong_value(sentence, kind)
        if wrong_value is not None:
            return wrong_value

    # ml_collections imports the config file as a module named config_config.
    if "'config_config' has no attribute 'get_config'" in sentence:
        sentence = 'the file of --config has no function get_config()'

    # The file has a Study where the script needs a Config, or vice versa.
    elif isinstance(error, KeyError):
        name = sentence.strip('\'"')
        other_script = script('train' if kind is Study else 'ablate')
        sentence = (
            f'the config has no field {name!r} to override; if it is for {other_script}, run that'
        )

    # The code of the config file has failed. The last line is 'ERROR: REASON'.
    if 'Traceback' in message:
        _, _, reason = lines[-1].partition(': ')
        sentence += f' {reason}'
    return sentence


def _describe_unknown_field(arguments: Sequence[str], kind: Kind) -> str | None:
    """Returns an error message for the first unknown --config.FIELD; None if all are known."""
    fields = settings(kind)  # by name, such as 'model.d_model'
    sections = {name.rpartition('.')[0] for name in fields}  # such as 'model'
    for argument in arguments:
        override = _OVERRIDE.match(argument)  # such as '--config.model.d_model=3'
        if override is None:
            continue
        name = override[1]  # 'model.d_model'
        if name not in fields and name not in sections:
            hint = _did_you_mean('--config.', name, fields)
            return f'unknown field --config.{name}{hint} (--help lists all fields)'
    return None


def _describe_wrong_value(absl_message: str, kind: Kind) -> str | None:
    """Returns an error message for an override whose value has a wrong type.

    For example, '--config.train.num_steps=x must be int, at least 1 and below 2**31' for absl's
    message 'flag --config.train.num_steps=x: ...'. Returns None for any other message.
    """
    override = _WRONG_OVERRIDE.match(absl_message)
    if override is None:
        return None
    name, value = override.groups()  # 'train.num_steps' and 'x'
    field = settings(kind).get(name)
    if field is None:
        return None
    return f'--config.{name}={value} must be {_describe_valid_values(field)}'


class Outcome(NamedTuple):
    """The sentence on standard error and the exit code with which a script ends."""

    sentence: str
    code: int


def outcome(error: BaseException) -> Outcome | None:
    """Returns how a script ends after an error; None for an unexpected error, such as a bug."""
    problem = environment.platform_problem(error)
    if problem is not None:
        return Outcome(problem, EXIT_CONFIG)
    if isinstance(error, ConfigError | CheckpointError):
        return Outcome(str(error), EXIT_CONFIG)
    if isinstance(error, Stopped):
        return Outcome(f'{error}; the same command resumes', EXIT_REQUEUE)
    if isinstance(error, Lost | ProcessError | ReadError):
        return Outcome(str(error), 1)
    if isinstance(error, UnsuitableFileError):
        return Outcome(f'{error.filename} cannot be read: {error}', EXIT_CONFIG)

    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.EACCES):
        sentence = f'{error.filename} cannot be used ({error.strerror}); give another path'
        return Outcome(sentence, EXIT_CONFIG)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):  # disk is full
        target = error.filename or 'standard output or error'
        reason = f'({error.strerror}); make room and run the command again'
        return Outcome(f'{target} cannot be written {reason}', EXIT_CONFIG)

    if isinstance(error, RuntimeError) and str(error).startswith('RESOURCE_EXHAUSTED'):
        # XLA's message begins 'RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes.'.
        first_line = str(error).splitlines()[0]
        _, _, allocation = first_line.partition(': ')
        sentence = (
            f'the devices are out of memory ({allocation.rstrip(".")}); reduce train.batch_size, '
            'model.context or the trials of a run, or set train.accumulation or model.remat'
        )
        return Outcome(sentence, EXIT_CONFIG)
    return None


def exit_with(sentence: str, code: int = EXIT_CONFIG) -> NoReturn:
    """Prints a sentence on standard error, and ends the process with an exit code."""
    _write_or_discard(f'{sentence}\n', sys.stderr)
    _write_or_discard('', sys.stdout)  # flushes results
    sys.exit(code)


def _write_or_discard(text: str, stream: TextIO) -> None:
    """Writes text, or drops it if it cannot be written, for example on a full disk."""
    try:
        say(text, stream)
    except OSError:
        discard_output(stream)


def _log_to_stderr() -> None:
    """Prints qkattn's log messages on standard error, at the level of the variable QKATTN_LOG."""
    # orbax logs each save through absl. Hide it unless the user sets absl's flag --verbosity.
    if not flags.FLAGS['verbosity'].present:
        absl.logging.set_verbosity(absl.logging.FATAL)

    handler = LogHandler()
    handler.setFormatter(logging.Formatter('%(message)s'))
    logger = logging.getLogger('qkattn')
    logger.addHandler(handler)
    level = os.environ.get('QKATTN_LOG', '').upper()
    is_level = level in logging.getLevelNamesMapping()
    logger.setLevel(level if is_level else logging.INFO)
    logger.propagate = False  # absl's handler would print the messages again


def _help(doc: str, kind: Kind | None) -> str:
    """Returns the --help text: a script's docstring, its flags, and its config settings.

    Args:
        doc: The docstring of the script.
        kind: The class of the config, Config or Study; None for a script without --config.
    """
    lines = []
    width = flags.get_help_width()
    for paragraph in inspect.cleandoc(doc).split('\n\n'):
        is_command = paragraph.lstrip().startswith('python')
        lines.append(paragraph if is_command else textwrap.fill(paragraph, width))
        lines.append('')

    lines.append('flags:')
    for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0]):
        head = f'--{flag.name}: {flag.flag_type()}; default {flag.default!r}'
        lines += _help_entry(head, flag.help or '')
    if kind is None:
        return '\n'.join(lines)

    for name, setting in settings(kind).items():
        # '--config.model.d_model: int, at least 1; default 64'
        values = _describe_valid_values(setting)
        head = f'--config.{name}: {values}; default {setting.default!r}'
        description = setting.doc
        registered_names = setting.registered_names()
        if registered_names:
            description += f'\nNames: {", ".join(registered_names)}.'
        lines += _help_entry(head, description)
    return '\n'.join(lines)


def _help_entry(head: str, description: str) -> list[str]:
    """Returns the --help lines for a flag: its head, and its indented description."""
    lines = _wrap(head, indent=2)
    for paragraph in description.splitlines():
        lines += _wrap(paragraph, indent=6)
    return lines


def _wrap(text: str, indent: int) -> list[str]:
    """Wraps and indents text; all lines but the first are indented by two more characters."""
    return textwrap.wrap(
        text,
        flags.get_help_width(),
        initial_indent=' ' * indent,
        subsequent_indent=' ' * (indent + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _describe_type(annotation: Any) -> str:
    """Returns a type in words, such as 'int or None', 'tuple of float' or "'adam' or 'sgd'"."""
    origin = typing.get_origin(annotation)
    parameters = typing.get_args(annotation)
    if origin is Literal:  # Literal['adam', 'sgd']
        return ' or '.join(repr(value) for value in parameters)
    if origin in (types.UnionType, typing.Union):  # int | None
        return ' or '.join(_describe_type(member) for member in parameters)
    if origin is tuple:  # tuple[float, ...]
        return f'tuple of {_describe_type(parameters[0])}'
    return 'None' if annotation is type(None) else annotation.__name__


def _describe_valid_values(setting: Setting) -> str:
    """Returns the values that a setting takes, as in 'int, at least 1 and below 2**31'."""
    type_in_words = _describe_type(setting.kind)
    number_type = concrete_types(setting.kind)[0]  # int for 'int | None'
    if number_type is tuple:  # the bounds are those of its entries
        entry_annotation = typing.get_args(setting.kind)[0]
        number_type = concrete_types(entry_annotation)[0]
    if number_type in (int, float):
        return f'{type_in_words}, {setting.bounds.describe(number_type)}'
    return type_in_words
