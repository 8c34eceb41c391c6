"""What every experiment script does around its main: messages, exit codes, config files."""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import absl.logging
from absl import app, flags
from ml_collections import config_flags

from qkattn.config import Config, Study, from_config_dict
from qkattn.errors import CheckpointError, ConfigError, Stopped
from qkattn.run.signals import EXIT_CONFIG, EXIT_REQUEUE


def define_config() -> flags.FlagHolder:
    """The flag --config=FILE.py, whose single fields --config.a.b=VALUE overrides."""
    return config_flags.DEFINE_config_file(
        'config', None, 'Python file whose get_config() returns the settings.', lock_config=True
    )


def read_config(flag: flags.FlagHolder, kind: type[Config] | type[Study]) -> Config | Study:
    """The settings after overrides; ConfigError where the file holds the other kind."""
    if flag.value is None:
        raise ConfigError('--config=FILE.py is required, e.g. --config=configs/quickstart.py')
    try:
        config = from_config_dict(flag.value)
    except OSError as error:  # config_flags loads the file when it is first looked at
        path = config_flags.get_config_filename(flags.FLAGS['config'])
        reason = str(error).strip().splitlines()[-1].strip()
        raise ConfigError(f'--config={path} cannot be loaded: {reason}') from error
    if not isinstance(config, kind):
        script = 'experiments.ablate' if isinstance(config, Study) else 'experiments.train'
        raise ConfigError(
            f'this config is a {type(config).__name__}, not a {kind.__name__}; '
            f'run it with python -m {script}'
        )
    return config


def text_of(text: flags.FlagHolder, file: flags.FlagHolder) -> str:
    """What one of two flags gives, the second as the name of a file; '' without either."""
    if file.value is None:
        return '' if text.value is None else text.value
    if text.value is not None:
        raise ConfigError(f'--{text.name} and --{file.name} exclude each other')
    try:
        return Path(file.value).read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'--{file.name}={file.value} cannot be read: {error}') from error


def command(script: str) -> list[str]:
    """The command line, as a user would type it again."""
    return ['python', '-m', f'experiments.{script}', *sys.argv[1:]]


def run(main: Callable[[], None]) -> None:
    """Runs `main` under absl with the exit codes that launchers go by.

    0 done; 75 stopped on request with a checkpoint saved (start the same command again); 2 a
    setting or a workdir that cannot work (do not try again); 1 anything else.
    """

    def wrapped(argv: Sequence[str]) -> None:
        if len(argv) > 1:
            _leave(f'unknown argument {argv[1]!r}; settings are given as --config.field=value')
        _log_to_stderr()
        try:
            main()
        except (ConfigError, CheckpointError) as error:
            _leave(str(error))
        except Stopped as stopped:
            _leave(f'{stopped}; the same command goes on', EXIT_REQUEUE)

    try:
        app.run(wrapped, flags_parser=_parse)
    except (flags.Error, AttributeError, TypeError, ValueError) as error:
        # While flags are parsed, these are an unknown flag or field, or a value of another type;
        # anything later is a bug and keeps its traceback.
        if _parsed:
            raise
        _leave(str(error).splitlines()[0])


_parsed: list[bool] = []


def _parse(argv: Sequence[str]) -> list[str]:
    rest = flags.FLAGS(argv)
    _parsed.append(True)
    return rest


def _leave(sentence: str, code: int = EXIT_CONFIG) -> None:
    print(sentence, file=sys.stderr)
    sys.exit(code)


def _log_to_stderr() -> None:
    """The package's own messages, one line each; libraries keep their thresholds."""
    if not flags.FLAGS['verbosity'].present:
        absl.logging.set_verbosity(absl.logging.ERROR)  # orbax tells every step of every save
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter('%(message)s'))
    logger = logging.getLogger('qkattn')
    logger.addHandler(handler)
    logger.setLevel(os.environ.get('QKATTN_LOG', 'INFO'))
    logger.propagate = False
