"""The run directory of one configuration, locked by one process (files: docs/resume.md).

Reading needs no lock. All files are complete except for the last line of metrics.jsonl.
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
from qkattn.config.imports import source_hashes
from qkattn.errors import ConfigError, InUseError, RunDirectoryError, UnknownFieldError
from qkattn.jobs.output import run_program
from qkattn.storage.files import join_without_links, make_directory, remove_unfinished
from qkattn.storage.leases import locked
from qkattn.storage.metrics_log import MetricsFile
from qkattn.storage.records import CONFIG, PROVENANCE, damaged_file_error, read_json, write_json

PACKAGE = Path(__file__).resolve().parent
# Distributions whose versions are recorded.
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

# Paths in a run directory, as components, that must not be links: files that are changed in place,
# and directories in which files are written and deleted.
WRITTEN = (
    ('lock',),
    ('metrics.jsonl',),
    ('checkpoints', 'trash'),
    ('tensorboard',),
    ('wandb',),
)


class RunDirectory(contextlib.ExitStack):
    """A run directory that is locked until `close`; in a job, process 0 opens it.

    Attributes:
        lost: A function that returns whether another process has taken the lock.
        metrics: The metrics log. Call `metrics.rewind` before appending records.
    """

    def __init__(self, path: str | os.PathLike, config: Config):
        """Creates a run directory, or opens it to resume its run.

        Locks the directory, writes or checks config.json, adds this start to provenance.json, and
        opens the metrics log. Initializes the JAX devices, which provenance.json lists.

        Raises:
            InUseError: A live process holds the directory.
            RunDirectoryError: The directory is damaged, or has a link where files are written.
            ConfigError: The directory holds a study, or a run with another configuration.
        """
        super().__init__()
        directory = make_directory(path)
        require_no_links(directory)
        try:
            # `lost` is a function that returns whether another process has taken the lock.
            self.lost = self.enter_context(locked(directory / 'lock', wait=False))
            remove_unfinished(directory)
            _check_config(directory, config)
            _record_start(directory, config)
            self.metrics = MetricsFile(directory / 'metrics.jsonl')
            self.callback(self._close_metrics)  # called by `close`
        except BlockingIOError as error:  # from `locked`, with the holder's name
            raise InUseError(
                f'workdir={directory} is in use by {error}; wait for it, stop it, or give another'
            ) from error
        except BaseException:
            self.close()  # frees the lock
            raise

    def _close_metrics(self) -> None:
        # In a bucket, closing would overwrite the file of a process that has taken the lock.
        if not self.lost():
            self.metrics.close()


def require_no_links(directory: Path) -> None:
    """Raises RunDirectoryError if a link is where a run writes or deletes files.

    In an untrusted directory, a link may lead to any file of the user.
    """
    for components in WRITTEN:
        join_without_links(directory, *components)  # raises if a component is a link
    for checkpoint in (directory / 'checkpoints').glob('[0-9]*'):
        join_without_links(directory, 'checkpoints', checkpoint.name)


def _check_config(directory: Path, config: Config) -> None:
    """Writes config.json, or checks that an existing config.json has the same configuration."""
    path = directory / 'config.json'
    if path.exists():
        _require_same_config(path, config)
        return

    if (directory / 'study.json').exists():
        raise ConfigError(f'workdir={directory} holds a study; give a run its own directory')
    leftovers = [name for name in ('metrics.jsonl', 'checkpoints') if (directory / name).exists()]
    if leftovers:
        raise RunDirectoryError(
            f'workdir={directory} holds {" and ".join(leftovers)} but no config.json to resume '
            'from; restore it from a copy or give another directory.'
        )
    write_json(path, {'hash': fingerprint(config), 'config': to_json(config)})


def _require_same_config(path: Path, config: Config) -> None:
    """Raises ConfigError, which lists the differences, if config.json differs from `config`.

    Machine settings, such as the mesh, may differ; the fingerprint does not cover them.
    """
    stored = _read_config(path)
    if fingerprint(stored) == fingerprint(config):
        return
    # With the stored machine settings, the differences below do not list them.
    config_to_compare = with_machine_of(config, stored)
    changes = differences(dataclasses.asdict(stored), dataclasses.asdict(config_to_compare))
    change_lines = '\n  '.join(changes)
    raise ConfigError(
        f'workdir={path.parent} holds a run with another configuration:\n  {change_lines}\n'
        'Set these fields back to resume it, or give another workdir.'
    )


def _read_config(path: Path) -> Config:
    """Reads config.json; raises ConfigError if the file is damaged or from a later version."""
    record = read_json(path, CONFIG)
    config_json = record['config']
    if fingerprint_of(config_json) != record['hash']:
        raise damaged_file_error(path, ConfigError('its hash does not match its config'))
    try:
        return from_json(Config, config_json)
    except UnknownFieldError as error:  # written by a later version
        raise ConfigError(f'{path} has an {error}; or give another workdir') from error
    except ConfigError as error:
        raise damaged_file_error(path, error) from error


def _record_start(directory: Path, config: Config) -> None:
    """Adds a description of this start of the run to provenance.json."""
    path = directory / 'provenance.json'
    starts = []
    if path.exists():
        starts = read_json(path, PROVENANCE)['starts']
    start = describe_start()
    start['imported'] = source_hashes(to_json(config))
    write_json(path, {'starts': [*starts, start]})


def command_line() -> list[str]:
    """Returns the command that started this process, as a user would type it."""
    arguments = sys.orig_argv[1:]  # without the interpreter
    if arguments and Path(arguments[0]).name == 'qkattn':
        return ['qkattn', *arguments[1:]]
    return ['python', *arguments]


def describe_start() -> dict[str, Any]:
    """Returns the command, machine, code, versions and devices of this process, as JSON.

    Initializes the JAX devices. The field `imported`, for hashes of outside code, is left empty.
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
    """Returns the working directory, or None if the directory was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def git_state(directory: Path = PACKAGE) -> dict[str, Any]:
    """Returns the commit of a package's git checkout, and whether files have changed.

    Args:
        directory: Directory of the package.

    Returns:
        {'commit': hash, 'dirty': whether tracked files differ or untracked files exist}. If the
        package is not in a checkout or git fails, both are None, and 'reason' is the error.
    """
    environment = dict(os.environ)
    environment['GIT_OPTIONAL_LOCKS'] = '0'  # keeps `git status` from writing to the checkout

    def git(*arguments: str) -> str:
        """Returns the output of a git command; raises SubprocessError if the command fails."""
        command = ['git', '-C', str(directory), *arguments]
        completed = run_program(
            command, check=True, capture_output=True, timeout=30, env=environment
        )
        return completed.stdout.strip()

    try:
        # Fails if git does not track the package, such as a pip-installed copy in a checkout.
        git('ls-files', '--error-unmatch', '__init__.py')
        commit = git('rev-parse', 'HEAD')
        changed_files = git('status', '--porcelain')
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(error)
        if isinstance(error, subprocess.CalledProcessError) and error.stderr:
            reason = error.stderr
        return {'commit': None, 'dirty': None, 'reason': reason.strip()}
    return {'commit': commit, 'dirty': bool(changed_files)}


def _version(distribution: str) -> str | None:
    """Returns the installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
