"""The run directory (its files: docs/resume.md): one owner, one configuration, metrics, provenance.

Readers need no lock: they see whole files, but for an unfinished last line of metrics.jsonl.
"""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from qkattn.config import (
    Config,
    differences,
    fingerprint,
    fingerprint_of,
    from_json,
    to_json,
    with_machine_of,
)
from qkattn.config.imports import imported
from qkattn.errors import ConfigError, InUseError, RunDirectoryError, UnknownFieldError
from qkattn.jobs.output import run_program
from qkattn.storage.files import below, make_directory, remove_unfinished
from qkattn.storage.leases import locked
from qkattn.storage.metrics_log import MetricsFile
from qkattn.storage.records import CONFIG, PROVENANCE, damaged, read_json, write_json

PACKAGE = Path(__file__).resolve().parent
# Distributions whose versions every start records.
RECORDED_VERSIONS = (
    'jax',
    'jaxlib',
    'flax',
    'optax',
    'orbax-checkpoint',
    'tensorflow-datasets',
    'grain',
    'numpy',
)

# The files of a run directory that are changed in place, and the directories in which files are
# written and deleted, by their components.
WRITTEN = (
    ('lock',),
    ('metrics.jsonl',),
    ('checkpoints', 'trash'),
    ('tensorboard',),
    ('wandb',),
)


class RunDirectory(contextlib.ExitStack):
    """A run directory that this process, in a job process 0, holds until `close`.

    `metrics` is its log, of which `rewind` is called before a record is appended; `lost()` says
    whether another process has taken the directory over.
    """

    def __init__(self, path: str | os.PathLike, config: Config):
        """Creates or resumes a run directory; records jax's devices, which it opens.

        InUseError if a live process holds it, RunDirectoryError if it is damaged or has a link
        where something is written, ConfigError if it holds a study or a run of another
        configuration.
        """
        super().__init__()
        directory = make_directory(path)
        require_no_links(directory)
        try:
            self.lost = self.enter_context(locked(directory / 'lock', wait=False))
            remove_unfinished(directory)
            _check_config(directory, config)
            _record_start(directory, config)
            self.metrics = MetricsFile(directory / 'metrics.jsonl')
            self.callback(self._close_metrics)
        except BlockingIOError as error:
            raise InUseError(
                f'workdir={directory} is in use by {error}; wait for it, stop it, or give another'
            ) from error
        except BaseException:
            self.close()
            raise

    def _close_metrics(self) -> None:
        # In a bucket this writes the whole file, which may be that of another owner by then.
        if not self.lost():
            self.metrics.close()


def require_no_links(directory: Path) -> None:
    """Raises RunDirectoryError where a link in a run directory would be followed by its owner."""
    for names in WRITTEN:
        below(directory, *names)
    for step in (directory / 'checkpoints').glob('[0-9]*'):
        below(directory, 'checkpoints', step.name)


def _check_config(directory: Path, config: Config) -> None:
    """Writes config.json, or checks the existing one.

    ConfigError where the directory holds a study or the run of another configuration.
    """
    path = directory / 'config.json'
    if not path.exists():
        if (directory / 'study.json').exists():
            raise ConfigError(f'workdir={directory} holds a study; give a run its own directory')
        orphans = [name for name in ('metrics.jsonl', 'checkpoints') if (directory / name).exists()]
        if orphans:
            raise RunDirectoryError(
                f'workdir={directory} holds {" and ".join(orphans)} but no config.json to resume '
                'from; restore it from a copy or give another directory.'
            )
        write_json(path, {'hash': fingerprint(config), 'config': to_json(config)})
        return
    stored = _stored_config(path)
    if fingerprint(stored) == fingerprint(config):
        return
    # Settings of the machine may differ, and are not listed.
    expected = with_machine_of(config, stored)
    changes = differences(dataclasses.asdict(stored), dataclasses.asdict(expected))
    raise ConfigError(
        f'workdir={directory} holds a run with another configuration:\n  '
        + '\n  '.join(changes)
        + '\nSet these fields back to resume it, or give another workdir.'
    )


def _stored_config(path: Path) -> Config:
    """The config of a config.json; ConfigError where it is damaged or of a later version."""
    record = read_json(path, CONFIG)
    try:
        if fingerprint_of(record['config']) != record['hash']:
            raise ConfigError('its hash does not match its config')
        return from_json(Config, record['config'])
    except UnknownFieldError as error:
        raise ConfigError(f'{path} has an {error}; or give another workdir') from error
    except ConfigError as error:
        raise damaged(path, error) from error


def _record_start(directory: Path, config: Config) -> None:
    """Adds this start to provenance.json."""
    path = directory / 'provenance.json'
    starts = read_json(path, PROVENANCE)['starts'] if path.exists() else []
    start = describe_start() | {'imported': imported(to_json(config))}
    write_json(path, {'starts': [*starts, start]})


def command_line() -> list[str]:
    """The command of this process, as a user would type it again."""
    arguments = sys.orig_argv[1:]  # without the interpreter
    if arguments and Path(arguments[0]).name == 'qkattn':
        return ['qkattn', *arguments[1:]]
    return ['python', *arguments]


def describe_start() -> dict[str, Any]:
    """Describes this process as it starts, as JSON; asks jax for its devices.

    `imported`, of code from outside, is that of the run, which adds it.
    """
    device = jax.devices()[0]
    return {
        'started': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
        'command': command_line(),
        'working_directory': _working_directory(),
        'hostname': socket.gethostname(),
        'process': os.getpid(),
        'git': git_state(),
        'python': platform.python_version(),
        'platform': platform.platform(),
        'imported': {},
        'versions': {name: _version(name) for name in RECORDED_VERSIONS},
        'devices': {
            'platform': device.platform,
            'kind': device.device_kind,
            'count': jax.device_count(),
            'processes': jax.process_count(),
        },
    }


def _working_directory() -> str | None:
    """The working directory; None once it was removed, which a worker of a study outlives."""
    with contextlib.suppress(FileNotFoundError):
        return os.getcwd()
    return None


def git_state(directory: Path = PACKAGE) -> dict[str, Any]:
    """The state of the checkout that a package is in: {'commit': sha, 'dirty': whether changed}.

    Untracked files count as changes. Outside of a checkout, or without git, both are None, and
    'reason' says why.
    """
    environment = {**os.environ, 'GIT_OPTIONAL_LOCKS': '0'}  # writes nothing into the checkout

    def git(*arguments: str) -> str:
        command = ['git', '-C', str(directory), *arguments]
        completed = run_program(
            command, check=True, capture_output=True, timeout=30, env=environment
        )
        return completed.stdout.strip()

    try:
        git('ls-files', '--error-unmatch', '__init__.py')  # fails for an installed copy
        return {'commit': git('rev-parse', 'HEAD'), 'dirty': bool(git('status', '--porcelain'))}
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, 'stderr', None) or str(error)
        return {'commit': None, 'dirty': None, 'reason': reason.strip()}


def _version(distribution: str) -> str | None:
    """The installed version of a distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
