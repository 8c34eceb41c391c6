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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import absl.logging
from absl import app, flags
from ml_collections import ConfigDict, config_flags
from ml_collections.config_flags.config_flags import ConfigFileFlagParser

from qkattn.config import Config, Study, from_config_dict, to_config_dict
from qkattn.config.paths import expanded, read_regular, require_regular, require_utf8
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

flags.disclaim_key_flags()  # --config is a flag of the script that defines it here

DESCRIPTORS = ('/dev/fd/', '/dev/stdin')  # files that this process was started with

Kind = type[Config] | type[Study]

# What parsing raises: unknown flags or fields, values of a wrong type, literals that are malformed.
MALFORMED = (
    *(flags.Error, AttributeError, KeyError, TypeError, ValueError),
    *(SyntaxError, MemoryError, RecursionError),
)


class PathParser(flags.ArgumentParser):
    """A parser of paths and URLs: ~ is expanded, and what is not UTF-8 is refused.

    The empty value of a shell variable that is not set stays empty, for `required` to refuse.
    """

    def parse(self, argument: Any) -> str:
        require_utf8(argument)
        return os.fspath(expanded(argument)) if argument.startswith('~') else argument

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
    """The files of configs/ or experiments/ by name: inside the package in a wheel, else beside."""
    package = Path(__file__).parents[1]
    inside = package / folder
    directory = inside if inside.is_dir() else package.parent / folder
    files = {path.stem: path for path in directory.glob('*.py') if path.stem != '__init__'}
    packages = {path.parent.name: path for path in directory.glob('*/__main__.py')}
    return dict(sorted((files | packages).items()))


def shipped_configs() -> dict[str, Path]:
    """The configs that come with qkattn, those of claims as claims/NAME."""
    claims = {f'claims/{name}': path for name, path in shipped('configs/claims').items()}
    return shipped('configs') | claims


class _ConfigParser(ConfigFileFlagParser):
    """Loads a file, or the config of that name that comes with the package, of a kind."""

    def __init__(self, kind: Kind):
        super().__init__('config')
        self.kind = kind

    def parse(self, path: str) -> Any:
        name, colon, argument = path.partition(':')
        file = str(shipped_configs().get(name) or PathParser().parse(name))
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
        except Exception as error:  # of the file's own code, at the last of its lines that ran
            frames = traceback.extract_tb(error.__traceback__)
            own = os.path.abspath(file)
            lines = [f.lineno for f in frames if os.path.abspath(f.filename) == own]
            if lines:
                raise ValueError(f'line {lines[-1]}: {type(error).__name__}: {error}') from error
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


def define_path(name: str, default: str | None, about: str) -> flags.FlagHolder:
    """A flag that names a file or a directory; whatever a flag names is defined by this."""
    return flags.DEFINE(PathParser(), name, default, about)


def define_paths(name: str, default: list[str], about: str) -> flags.FlagHolder:
    """A flag that names several files or directories, between commas."""
    serializer = flags.CsvListSerializer(',')
    return flags.DEFINE(PathsParser(), name, default, about, serializer=serializer)


def define_trial() -> flags.FlagHolder:
    """The flag --trial of scripts that read a run."""
    about = 'Index of the trial of a run; default: the first that has not diverged.'
    return flags.DEFINE_integer('trial', None, about)


def define_imports() -> flags.FlagHolder:
    """The flag --imports of scripts that read what may be from others."""
    about = (
        'Import paths, as in my.module:Score, that files of the model or study may name; code that '
        'they name is imported only if it is named here.'
    )
    return flags.DEFINE_list('imports', [], about)


def define_config(kind: Kind) -> flags.FlagHolder:
    """The flag --config=FILE.py or NAME of a kind, whose fields --config.a.b=VALUE overrides."""
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
        known = shipped_configs()
        near = difflib.get_close_matches(path.partition(':')[0], known, n=1)
        meant = f'; did you mean --config={near[0]}?' if near else ''
        raise ConfigError(
            f'--config={path} cannot be loaded: {reason}; configs that come with qkattn are '
            f'{", ".join(known)}{meant}'
        ) from error
    if not isinstance(config, kind := _kind()):
        other = script('ablate' if isinstance(config, Study) else 'train')
        name = type(config).__name__
        raise ConfigError(f'this config is a {name}, not a {kind.__name__}; run it with {other}')
    return config


def arguments(config: Config) -> list[str]:
    """The arguments that give a script these settings: those that --config's file lacks are set."""
    flag = flags.FLAGS['config']
    path = config_flags.get_config_filename(flag)
    of_file = from_config_dict(flag.parser.parse(path))
    changes = []
    for name in settings(type(config)):
        value = operator.attrgetter(name)(config)
        if value != operator.attrgetter(name)(of_file):
            changes.append(f'--config.{name}={value}')
    return [f'--config={path}', *changes]


def required(flag: flags.FlagHolder) -> str:
    """The value of a flag that names a directory; ConfigError without one."""
    if not flag.value:  # an empty one, of a shell variable that is not set, is no directory
        raise ConfigError(f'--{flag.name}=DIRECTORY is required')
    return flag.value


def token_ids(flag: flags.FlagHolder, vocab_size: int) -> list[int]:
    """The token ids of a flag, given as in "12 7 301"; ConfigError where one is no token."""
    words = flag.value.split()
    if not words or not all(word.isdecimal() and int(word) < vocab_size for word in words):
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
        # Without a mark of byte order, and with one kind of line ends. Text mode would end lines at
        # lone carriage returns, too.
        return content.decode('utf-8-sig').replace('\r\n', '\n')
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'--{file.name}={file.value} cannot be read: {error}') from error


def script(name: str) -> str:
    """How another script is started, in the way in which this one was."""
    of_module = any(argument.startswith('experiments.') for argument in sys.orig_argv)
    return f'python -m experiments.{name}' if of_module else f'qkattn {name}'


def run(main: Callable[[], None], positional: flags.FlagHolder | None = None) -> None:
    """Runs `main` under absl; the value of the flag `positional` may be given without its name.

    Exit codes: 0 done; 75 stopped on request with nothing lost (run the same command again); 2 an
    impossible setting or workdir (do not retry); 130 interrupted without saving; 141 done as far
    as anybody read what it printed, as in `... | head`; 1 anything else.
    """

    def wrapped(argv: list[str]) -> None:
        if positional is not None and positional.value is None and len(argv) > 1:
            flag = flags.FLAGS[positional.name]
            if len(argv) == 2 or flag.flag_type().startswith('comma'):
                flag.parse(','.join(argv[1:]))
                del argv[1:]
        if len(argv) > 1:
            settings = '; settings are given as --config.field=value' * ('config' in flags.FLAGS)
            exit_with(f'unknown argument {argv[1]!r}{settings}')
        _log_to_stderr()
        keep_freed_memory()  # before there are other threads
        try:
            with ending_unread():
                main()
        except Exception as error:
            if (expected := outcome(error)) is None:
                raise
            exit_with(*expected)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # another one would end in a traceback
            name = Path(inspect.unwrap(main).__globals__['__file__']).stem
            exit_with(INTERRUPTED if name in RESUMABLE else 'interrupted', EXIT_INTERRUPTED)

    parsed = False
    kind = _kind() if 'config' in flags.FLAGS else None

    def parse(argv: Sequence[str]) -> list[str]:
        nonlocal parsed
        if {'--help', '-h'} & {*argv}:
            with ending_unread():
                print(_help(inspect.unwrap(main).__globals__['__doc__'], kind))
            sys.exit(0)
        rest = flags.FLAGS(argv)
        parsed = True
        return rest

    try:
        environment.check()
    except ConfigError as error:
        exit_with(str(error))
    try:
        app.run(wrapped, flags_parser=parse)
    except MALFORMED as error:
        if parsed:  # a bug, which keeps its traceback
            raise
        near = _misspelt(sys.argv[1:], kind) if kind else None
        first, *more = (str(error) or type(error).__name__).strip().splitlines()
        wrong = re.match(r'flag --config\.([\w.]+)=(.*?): ', first)
        if wrong and kind and (field := settings(kind).get(wrong[1])):
            first = f'--config.{wrong[1]}={wrong[2]} must be {_expected(field)}'
            more = []
        elif "'config_config' has no attribute 'get_config'" in first:  # ml_collections' name of it
            first = 'the file of --config has no function get_config()'
        elif isinstance(error, KeyError):  # a known field, of a config of the other kind
            other = script('train' if kind is Study else 'ablate')
            name = first.strip('\'"')
            first = f'the config has no field {name!r} to override; if it is for {other}, run that'
        # Of what a config raised, its last line behind the name of the error.
        reason = f' {more[-1].partition(": ")[2]}' if 'Traceback' in str(error) else ''
        exit_with(near or f'{first}{reason}')


def outcome(error: BaseException) -> tuple[str, int] | None:
    """The sentence and the exit code of an error; None for a bug, which keeps its traceback."""
    if (problem := environment.platform_problem(error)) is not None:
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
        text = f'{error.filename} cannot be used ({error.strerror}); give another path'
        return text, EXIT_CONFIG
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = error.filename or 'standard output or error'
        text = f'{place} cannot be written ({error.strerror}); make room and run the command again'
        return text, EXIT_CONFIG
    if isinstance(error, RuntimeError) and str(error).startswith('RESOURCE_EXHAUSTED'):  # of XLA
        reason = str(error).partition(': ')[2].partition('\n')[0].rstrip('.')
        text = f'the devices are out of memory ({reason}); reduce train.batch_size, model.context '
        text += 'or the trials of a run, or set train.accumulation or model.remat'
        return text, EXIT_CONFIG
    return None


def exit_with(sentence: str, code: int = EXIT_CONFIG) -> None:
    """Ends the process with a sentence on standard error; 2 is a setting that is wrong."""
    printable = sentence.encode(errors='backslashreplace').decode()  # of paths that are not UTF-8
    for text, stream in ((f'{printable}\n', sys.stderr), ('', sys.stdout)):  # what is buffered
        try:
            say(text, stream)
        except OSError:  # on a full disk; the exit code has to do
            discard(stream)
    sys.exit(code)


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
    """What a script does, its flags, and the settings of its config."""
    lines = []
    width = flags.get_help_width()
    for paragraph in inspect.cleandoc(doc).split('\n\n'):
        command = paragraph.lstrip().startswith('python')
        lines += [paragraph if command else textwrap.fill(paragraph, width), '']
    lines.append('flags:')
    for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0]):
        lines += _entry(f'--{flag.name}: {flag.flag_type()}; default {flag.default!r}', flag.help)
    for name, field in settings(kind).items() if kind else ():
        description = field.doc
        registered_names = field.registered_names()
        if registered_names:
            description += f'\nNames: {", ".join(registered_names)}.'
        lines += _entry(
            f'--config.{name}: {_expected(field)}; default {field.default!r}', description
        )
    return '\n'.join(lines)


def _entry(head: str, description: str | None) -> list[str]:
    """A flag, and what it does; line breaks of a description are kept."""
    lines = []
    for indent, text in ((2, head), *((6, part) for part in (description or '').splitlines())):
        options: dict[str, Any] = {'break_long_words': False, 'break_on_hyphens': False}
        options |= {'initial_indent': ' ' * indent, 'subsequent_indent': ' ' * (indent + 2)}
        lines += textwrap.wrap(text, flags.get_help_width(), **options)
    return lines


def _type(kind: Any) -> str:
    """A type as in 'int or None', 'tuple of float', or the values of a Literal."""
    origin = typing.get_origin(kind)
    parts = typing.get_args(kind)
    if origin is Literal:
        return ' or '.join(map(repr, parts))
    if origin in (types.UnionType, typing.Union):
        return ' or '.join(map(_type, parts))
    if origin is tuple:
        return f'tuple of {_type(parts[0])}'
    return 'None' if kind is type(None) else kind.__name__


def _expected(setting: Setting) -> str:
    """The type, with the bounds of numbers; texts have their limits at the length of a path."""
    (kind, *_) = concrete_types(setting.kind)
    if kind is tuple:
        (kind, *_) = concrete_types(typing.get_args(setting.kind)[0])
    bounds = setting.bounds.describe(kind) if kind in (int, float) else ''
    return ', '.join(filter(None, [_type(setting.kind), bounds]))


def _misspelt(arguments: Sequence[str], kind: Kind) -> str | None:
    """A sentence on the first --config.FIELD that the config does not have; None without any."""
    known = settings(kind)
    sections = {name.rpartition('.')[0] for name in known}
    for argument in arguments:
        name = re.match(r'--?(?:no)?config\.([^=]*)', argument)
        if name and name[1] not in known and name[1] not in sections:
            near = difflib.get_close_matches(name[1], known, n=1)
            meant = f'; did you mean --config.{near[0]}?' if near else ''
            return f'unknown field --config.{name[1]}{meant} (--help lists all fields)'
    return None
