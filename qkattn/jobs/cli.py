"""Shared by the experiment scripts: config flags, --help, messages and exit codes."""

import difflib
import errno
import inspect
import logging
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
from typing import Any, Literal, NoReturn, TextIO, cast

import absl.logging
from absl import app, flags
from ml_collections import ConfigDict, config_flags
from ml_collections.config_flags.config_flags import ConfigFileFlagParser

from qkattn.config import Config, Study, from_config_dict, to_config_dict
from qkattn.config.paths import expanded, read_regular, require_regular
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
from qkattn.jobs.output import discard, ending_unread, say
from qkattn.jobs.signals import (
    EXIT_CONFIG,
    EXIT_INTERRUPTED,
    EXIT_REQUEUE,
    INTERRUPTED,
    RESUMABLE,
)

# Flags that functions of this module define, as --config, are flags of the script that calls them.
flags.disclaim_key_flags()

# What the paths of files begin with that this process was started with, as in --file=<(command).
DESCRIPTORS = ('/dev/fd/', '/dev/stdin')

# What a config file holds.
Kind = type[Config] | type[Study]

# What parsing raises: unknown flags or fields, values of a wrong type, literals that are malformed.
MALFORMED = (flags.Error, AttributeError, KeyError, TypeError, ValueError, SyntaxError)

# '--config.model.d_model=3', '-noconfig.model.biases'; the group is the name of the field.
_OVERRIDE = re.compile(r'--?(?:no)?config\.([^=]*)')
# How absl begins a sentence on an override that does not parse: 'flag --config.train.seed=x: ...'.
_WRONG_OVERRIDE = re.compile(r'flag --config\.([\w.]+)=(.*?): ')


class PathParser(flags.ArgumentParser):
    """A parser of paths and URLs, in which ~ is expanded.

    The empty value of a shell variable that is not set stays empty, for `required` to refuse.
    """

    def parse(self, argument: Any) -> str:
        if argument.startswith('~'):
            return os.fspath(expanded(argument))
        return argument

    def flag_type(self) -> str:
        return 'path'


class PathsParser(flags.ListParser):
    """A parser of paths between commas."""

    def parse(self, argument: Any) -> list[str]:
        return [PathParser().parse(path) for path in super().parse(argument)]


class _OrNone(flags.ArgumentParser):
    """A parser that takes None too; where a setting is not optional, validation refuses it."""

    def __init__(self, parser: flags.ArgumentParser):
        self.parser = parser

    def parse(self, argument: Any) -> Any:
        return None if argument == 'None' else self.parser.parse(argument)

    def flag_type(self) -> str:
        return self.parser.flag_type()


config_flags.register_flag_parser_for_type(int, _OrNone(flags.IntegerParser()))
config_flags.register_flag_parser_for_type(float, _OrNone(flags.FloatParser()))
config_flags.register_flag_parser_for_type(str, _OrNone(flags.ArgumentParser()))


def shipped(folder: str) -> dict[str, Path]:
    """The files of configs/ or experiments/, {'train': .../train.py}, in the order of their names.

    A wheel has the folder inside the package, a checkout beside it.
    """
    package = Path(__file__).parents[1]
    directory = package / folder
    if not directory.is_dir():
        directory = package.parent / folder
    files = {path.stem: path for path in directory.glob('*.py') if path.stem != '__init__'}
    for path in directory.glob('*/__main__.py'):  # scripts of several files
        files[path.parent.name] = path
    return dict(sorted(files.items()))


def shipped_configs() -> dict[str, Path]:
    """The configs that come with qkattn, those of claims as claims/NAME."""
    claims = {f'claims/{name}': path for name, path in shipped('configs/claims').items()}
    return shipped('configs') | claims


class _ConfigParser(ConfigFileFlagParser):
    """The parser of --config: loads a file, or the config of that name that comes with qkattn."""

    def __init__(self, kind: Kind):
        super().__init__('config')
        self.kind = kind

    def parse(self, path: str) -> Any:
        """The settings of FILE.py or NAME, perhaps with ':ARGUMENT' for its get_config.

        ConfigError where get_config returns no settings; ValueError where the file is none that
        Python reads, or its code fails.
        """
        name, colon, argument = path.partition(':')
        shipped_config = shipped_configs().get(name)
        file = PathParser().parse(name) if shipped_config is None else str(shipped_config)
        absl_log = absl.logging.get_absl_logger()
        try:
            if os.path.exists(file) and not os.path.isdir(file):
                require_regular(file)
            absl_log.disabled = True  # it warns of None, which `_config_dict` refuses
            returned = super().parse(f'{file}{colon}{argument}')
            return _config_dict(returned)
        except ConfigError:
            raise
        except UnsuitableFileError as error:
            raise ValueError(f'{error}; give a Python file') from error
        except Exception as error:
            # Where the file's own code fails, the last of its lines that ran is named.
            frames = traceback.extract_tb(error.__traceback__)
            own_lines = [
                frame.lineno
                for frame in frames
                if os.path.abspath(frame.filename) == os.path.abspath(file)
            ]
            if own_lines:
                name_of_error = type(error).__name__
                raise ValueError(f'line {own_lines[-1]}: {name_of_error}: {error}') from error
            if isinstance(error, SyntaxError):  # the file is not Python
                raise ValueError(str(error)) from error
            raise
        finally:
            absl_log.disabled = False


def _config_dict(returned: Any) -> Any:
    """What get_config() of a file has returned, as a ConfigDict, which flags override."""
    if isinstance(returned, Config | Study):
        return to_config_dict(returned)
    # The other class stands for a file that cannot be read, and raises why once it is used.
    is_unread = type(returned).__module__ == ConfigFileFlagParser.__module__
    if isinstance(returned, ConfigDict) or is_unread:
        return returned
    kind = 'nothing' if returned is None else f'a value of type {type(returned).__name__}'
    raise ConfigError(f'get_config() returns {kind}; it must return a Config or a Study')


def define_path(name: str, default: str | None, description: str) -> flags.FlagHolder:
    """A flag that names a file or a directory; whatever a flag names is defined by this."""
    return flags.DEFINE(PathParser(), name, default, description)


def define_paths(name: str, default: list[str], description: str) -> flags.FlagHolder:
    """A flag that names several files or directories, between commas."""
    serializer = flags.CsvListSerializer(',')
    return flags.DEFINE(PathsParser(), name, default, description, serializer=serializer)


def define_trial() -> flags.FlagHolder:
    """The flag --trial of scripts that read a run."""
    description = 'Index of the trial of a run; default: the first that has not diverged.'
    return flags.DEFINE_integer('trial', None, description)


def define_imports() -> flags.FlagHolder:
    """The flag --imports of scripts that read what may be from others."""
    description = (
        'Import paths, as in my.module:Score, that files of the model or study may name; code that '
        'they name is imported only if it is named here.'
    )
    return flags.DEFINE_list('imports', [], description)


def define_config(kind: Kind) -> flags.FlagHolder:
    """The flag --config=FILE.py or --config=NAME, of a run (Config) or of a study (Study).

    Flags as --config.model.d_model=256 override its fields.
    """
    holder = config_flags.DEFINE_config_file(
        'config',
        None,
        'Python file whose get_config() returns the settings, or the name of a config that '
        f'comes with qkattn: {", ".join(shipped_configs())}. The fields below override its '
        'settings; the defaults are those of a config that does not set them.',
        lock_config=True,
    )
    flags.FLAGS['config'].parser = _ConfigParser(kind)
    return holder


def _kind() -> Kind:
    """Whether the script's --config is one of a run or of a study."""
    return cast(_ConfigParser, flags.FLAGS['config'].parser).kind


def read_config(flag: flags.FlagHolder) -> Any:
    """The settings after overrides; ConfigError if the file holds the other kind of config."""
    if flag.value is None:
        raise ConfigError('--config=FILE.py is required, e.g. --config=quickstart')
    try:
        config = from_config_dict(flag.value)
    except OSError as error:  # config_flags loads the file on first access
        path = config_flags.get_config_filename(flags.FLAGS['config'])
        reason = str(error).strip().splitlines()[-1].strip()
        names = list(shipped_configs())
        hint = _did_you_mean('--config=', path.partition(':')[0], names)
        raise ConfigError(
            f'--config={path} cannot be loaded: {reason}; configs that come with qkattn are '
            f'{", ".join(names)}{hint}'
        ) from error
    kind = _kind()
    if not isinstance(config, kind):
        other_script = script('ablate' if isinstance(config, Study) else 'train')
        raise ConfigError(
            f'this config is a {type(config).__name__}, not a {kind.__name__}; run it with '
            f'{other_script}'
        )
    return config


def _did_you_mean(prefix: str, name: str, known: Collection[str]) -> str:
    """The end of a sentence on an unknown name, '' where no known one is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f'; did you mean {prefix}{near[0]}?' if near else ''


def arguments(config: Config) -> list[str]:
    """The arguments that give a script these settings.

    They are --config=FILE as it was given, and --config.FIELD=VALUE for each setting that differs
    from that of the file.
    """
    flag = flags.FLAGS['config']
    path = config_flags.get_config_filename(flag)
    config_of_file = from_config_dict(flag.parser.parse(path))
    changes = []
    for name in settings(type(config)):
        value_of = operator.attrgetter(name)  # 'model.d_model' is of a section
        if value_of(config) != value_of(config_of_file):
            changes.append(f'--config.{name}={value_of(config)}')
    return [f'--config={path}', *changes]


def required(flag: flags.FlagHolder) -> str:
    """The value of a flag that names a directory; ConfigError without one."""
    if not flag.value:  # an empty one, of a shell variable that is not set, is no directory
        raise ConfigError(f'--{flag.name}=DIRECTORY is required')
    return flag.value


def token_ids(flag: flags.FlagHolder, vocab_size: int) -> list[int]:
    """The token ids of a flag, given as in "12 7 301"; ConfigError where one is no token."""
    words = flag.value.split()
    are_tokens = all(word.isdecimal() and int(word) < vocab_size for word in words)
    if not words or not are_tokens:
        raise ConfigError(
            f'--{flag.name}={flag.value!r} must be whole numbers from 0 to {vocab_size - 1}'
        )
    return [int(word) for word in words]


def text_of(text: flags.FlagHolder, file: flags.FlagHolder) -> str:
    """The value of `text`, or the content of the file that `file` names; '' without either."""
    if file.value is None:
        return '' if text.value is None else text.value
    if text.value is not None:
        raise ConfigError(f'--{text.name} and --{file.name} exclude each other')
    try:
        # What a shell gives as --file=<(command), or as standard input, may be a pipe.
        if file.value.startswith(DESCRIPTORS):
            content = Path(file.value).read_bytes()
        else:
            content = read_regular(file.value)
        # Without a byte order mark, and with one kind of line ends. Text mode would end lines at
        # lone carriage returns, too.
        return content.decode('utf-8-sig').replace('\r\n', '\n')
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'--{file.name}={file.value} cannot be read: {error}') from error


def script(name: str) -> str:
    """How another script is started, in the way in which this one was.

    script('train') is 'qkattn train' or 'python -m experiments.train'.
    """
    is_module = any(argument.startswith('experiments.') for argument in sys.orig_argv)
    return f'python -m experiments.{name}' if is_module else f'qkattn {name}'


def run(main: Callable[[], None], positional: flags.FlagHolder | None = None) -> None:
    """Runs `main` under absl; the value of the flag `positional` may be given without its name.

    Exit codes: 0 done; 75 stopped on request with nothing lost (run the same command again); 2 an
    impossible setting or workdir (do not retry); 130 interrupted without saving; 141 done as far
    as anybody read what it printed, as in `... | head`; 1 anything else.
    """
    script_globals = inspect.unwrap(main).__globals__
    kind = _kind() if 'config' in flags.FLAGS else None

    def parse_flags(argv: Sequence[str]) -> list[str]:
        """The arguments that are no flags, behind the name of the script."""
        if '--help' in argv or '-h' in argv:
            with ending_unread():
                print(_help(script_globals['__doc__'], kind))
            sys.exit(0)
        try:
            return flags.FLAGS(argv)
        except MALFORMED as error:
            exit_with(_describe_malformed(error, kind))

    def run_main(argv: list[str]) -> None:
        unnamed = argv[1:]
        if positional is not None and positional.value is None and unnamed:
            flag = flags.FLAGS[positional.name]
            takes_several = flag.flag_type().startswith('comma')  # 'comma separated list ...'
            if len(unnamed) == 1 or takes_several:
                flag.parse(','.join(unnamed))
                unnamed = []
        if unnamed:
            hint = '; settings are given as --config.field=value' if kind is not None else ''
            exit_with(f'unknown argument {unnamed[0]!r}{hint}')
        _log_to_stderr()
        keep_freed_memory()  # before there are other threads
        try:
            with ending_unread():
                main()
        except Exception as error:
            expected = outcome(error)
            if expected is None:
                raise
            sentence, code = expected
            exit_with(sentence, code)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # another one would end in a traceback
            is_resumable = Path(script_globals['__file__']).stem in RESUMABLE
            exit_with(INTERRUPTED if is_resumable else 'interrupted', EXIT_INTERRUPTED)

    try:
        environment.check()
    except ConfigError as error:
        exit_with(str(error))
    app.run(run_main, flags_parser=parse_flags)


def _describe_malformed(error: BaseException, kind: Kind | None) -> str:
    """A sentence on the arguments of a script, whose parsing raised an error of MALFORMED.

    `kind` is that of --config, None for a script that does not have it.
    """
    misspelt = _misspelt(sys.argv[1:], kind) if kind else None
    if misspelt is not None:
        return misspelt
    lines = (str(error) or type(error).__name__).strip().splitlines()
    sentence = lines[0]
    wrong = _WRONG_OVERRIDE.match(sentence)
    field = settings(kind).get(wrong[1]) if wrong and kind else None
    if wrong and field is not None:
        return f'--config.{wrong[1]}={wrong[2]} must be {_expected(field)}'
    if "'config_config' has no attribute 'get_config'" in sentence:  # ml_collections' name of it
        sentence = 'the file of --config has no function get_config()'
    elif isinstance(error, KeyError):  # a known field, of a config of the other kind
        name = sentence.strip('\'"')
        other_script = script('train' if kind is Study else 'ablate')
        sentence = (
            f'the config has no field {name!r} to override; if it is for {other_script}, run that'
        )
    if 'Traceback' in str(error):
        # Of an error inside a config file, the last line, behind the name of the error.
        sentence += f' {lines[-1].partition(": ")[2]}'
    return sentence


def _misspelt(arguments: Sequence[str], kind: Kind) -> str | None:
    """A sentence on the first --config.FIELD that the config does not have; None without any."""
    known = settings(kind)
    sections = {name.rpartition('.')[0] for name in known}
    for argument in arguments:
        override = _OVERRIDE.match(argument)
        if override and override[1] not in known and override[1] not in sections:
            hint = _did_you_mean('--config.', override[1], known)
            return f'unknown field --config.{override[1]}{hint} (--help lists all fields)'
    return None


def outcome(error: BaseException) -> tuple[str, int] | None:
    """The sentence and the exit code of an error; None for a bug, which keeps its traceback."""
    problem = environment.platform_problem(error)
    if problem is not None:
        return problem, EXIT_CONFIG
    if isinstance(error, ConfigError | CheckpointError):
        return str(error), EXIT_CONFIG
    if isinstance(error, Stopped):
        return f'{error}; the same command resumes', EXIT_REQUEUE
    if isinstance(error, Lost | ProcessError | ReadError):
        return str(error), 1
    if isinstance(error, UnsuitableFileError):
        return f'{error.filename} cannot be read: {error}', EXIT_CONFIG
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.EACCES):
        sentence = f'{error.filename} cannot be used ({error.strerror}); give another path'
        return sentence, EXIT_CONFIG
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        target = error.filename or 'standard output or error'
        reason = f'({error.strerror}); make room and run the command again'
        return f'{target} cannot be written {reason}', EXIT_CONFIG
    if isinstance(error, RuntimeError) and str(error).startswith('RESOURCE_EXHAUSTED'):
        # XLA's text is 'RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes.', and more lines.
        reason = str(error).splitlines()[0].partition(': ')[2].rstrip('.')
        sentence = (
            f'the devices are out of memory ({reason}); reduce train.batch_size, model.context '
            'or the trials of a run, or set train.accumulation or model.remat'
        )
        return sentence, EXIT_CONFIG
    return None


def exit_with(sentence: str, code: int = EXIT_CONFIG) -> NoReturn:
    """Ends the process with a sentence on standard error; 2 is a setting that is wrong."""
    _write_or_discard(f'{sentence}\n', sys.stderr)
    _write_or_discard('', sys.stdout)  # flushes results
    sys.exit(code)


def _write_or_discard(text: str, stream: TextIO) -> None:
    """Writes text; on a full disk the exit code has to do."""
    try:
        say(text, stream)
    except OSError:
        discard(stream)


def _log_to_stderr() -> None:
    """Prints the package's messages, one line each; libraries keep their thresholds."""
    if not flags.FLAGS['verbosity'].present:
        absl.logging.set_verbosity(absl.logging.FATAL)  # orbax logs each save, and all it raises
    handler = LogHandler()
    handler.setFormatter(logging.Formatter('%(message)s'))
    logger = logging.getLogger('qkattn')
    logger.addHandler(handler)
    level = os.environ.get('QKATTN_LOG', '').upper()
    logger.setLevel(level if level in logging.getLevelNamesMapping() else logging.INFO)
    logger.propagate = False


def _help(doc: str, kind: Kind | None) -> str:
    """What a script does, by its docstring, its flags, and the settings of its config."""
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
    if kind is not None:
        for name, field in settings(kind).items():
            head = f'--config.{name}: {_expected(field)}; default {field.default!r}'
            description = field.doc
            registered_names = field.registered_names()
            if registered_names:
                description += f'\nNames: {", ".join(registered_names)}.'
            lines += _help_entry(head, description)
    return '\n'.join(lines)


def _help_entry(head: str, description: str) -> list[str]:
    """The lines on a flag, and below it on what it does; line breaks of a description are kept."""
    lines = _wrapped(head, indent=2)
    for paragraph in description.splitlines():
        lines += _wrapped(paragraph, indent=6)
    return lines


def _wrapped(text: str, indent: int) -> list[str]:
    """Text in lines of the terminal's width, of which those after the first are indented more."""
    return textwrap.wrap(
        text,
        flags.get_help_width(),
        initial_indent=' ' * indent,
        subsequent_indent=' ' * (indent + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _type(annotation: Any) -> str:
    """A type as in 'int or None', 'tuple of float', or the values of a Literal."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is Literal:
        return ' or '.join(repr(value) for value in arguments)
    if origin in (types.UnionType, typing.Union):
        return ' or '.join(_type(member) for member in arguments)
    if origin is tuple:
        return f'tuple of {_type(arguments[0])}'
    return 'None' if annotation is type(None) else annotation.__name__


def _expected(setting: Setting) -> str:
    """What a setting takes, as in 'int, at least 1 and below 2**31'.

    Texts are limited by the length of a path, which goes without saying.
    """
    kind = concrete_types(setting.kind)[0]
    if kind is tuple:
        entry = typing.get_args(setting.kind)[0]
        kind = concrete_types(entry)[0]
    if kind in (int, float):
        return f'{_type(setting.kind)}, {setting.bounds.describe(kind)}'
    return _type(setting.kind)
