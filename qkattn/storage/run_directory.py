"""The run directory: one owner, one configuration, metrics, provenance (files: docs/resume.md).

Readers need no lock. They see whole files; only the last line of metrics.jsonl may be partial.
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

# Paths in a run directory that a link must not replace, each as a tuple of its components: files
# that are changed in place, and directories in which files are written and deleted.
WRITTEN = (
    ('lock',),
    ('metrics.jsonl',),
    ('checkpoints', 'trash'),
    ('tensorboard',),
    ('wandb',),
)


class RunDirectory(contextlib.ExitStack):
    """A run directory that this process holds until `close`; in a job, process 0 holds it.

    `metrics` is the metrics log. Call `metrics.rewind` before the first record is appended.
    `lost()` tells whether another process has taken the directory over.
    """

    def __init__(self, path: str | os.PathLike, config: Config):
        """Creates a run directory, or opens it to resume its run.

        Locks the directory, writes or checks config.json, adds this start to provenance.json, and
        opens the metrics log. jax opens its devices here, since provenance.json lists them.

        Raises:
          InUseError: a live process holds the directory.
          RunDirectoryError: the directory is damaged, or has a link where files are written.
          ConfigError: the directory holds a study, or a run with another configuration.
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
            self.callback(self._close_metrics)
        except BlockingIOError as error:  # `locked` raises it; the text names the holder
            raise InUseError(
                f'workdir={directory} is in use by {error}; wait for it, stop it, or give another'
            ) from error
        except BaseException:
            self.close()  # frees the lock
            raise

    def _close_metrics(self) -> None:
        # In a bucket, closing writes the whole file. It must not overwrite that of the next owner.
        if not self.lost():
            self.metrics.close()


def require_no_links(directory: Path) -> None:
    """Raises RunDirectoryError if a link is where a run writes or deletes files.

    Whoever made the directory may have linked to any file of this user.
    """
    for names in WRITTEN:
        join_without_links(directory, *names)  # raises if one of the components is a link
    for step in (directory / 'checkpoints').glob('[0-9]*'):
        join_without_links(directory, 'checkpoints', step.name)


def _check_config(directory: Path, config: Config) -> None:
    """Writes config.json, or checks that the existing one has the same configuration.

    Raises ConfigError if the directory holds a study, or a run with another configuration. Raises
    RunDirectoryError if it holds other files of a run, but no config.json.
    """
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
    """Raises ConfigError unless the configuration in config.json is `config`.

    The error lists the settings that differ. Settings of the machine, such as the mesh, may differ:
    the fingerprint does not cover them.
    """
    stored = _read_config(path)
    if fingerprint(stored) == fingerprint(config):
        return
    # Both configs get the same settings of the machine, so that the error does not list these.
    comparable = with_machine_of(config, stored)
    changes = differences(dataclasses.asdict(stored), dataclasses.asdict(comparable))
    change_lines = '\n  '.join(changes)
    raise ConfigError(
        f'workdir={path.parent} holds a run with another configuration:\n  {change_lines}\n'
        'Set these fields back to resume it, or give another workdir.'
    )


def _read_config(path: Path) -> Config:
    """Reads a config.json; raises ConfigError if it is damaged or from a later version."""
    record = read_json(path, CONFIG)
    config_json = record['config']
    if fingerprint_of(config_json) != record['hash']:
        raise damaged_file_error(path, ConfigError('its hash does not match its config'))
    try:
        return from_json(Config, config_json)
    except UnknownFieldError as error:  # of a later version
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
    """Returns the command of this process, as a user would type it again."""
    arguments = sys.orig_argv[1:]  # without the interpreter
    if arguments and Path(arguments[0]).name == 'qkattn':
        return ['qkattn', *arguments[1:]]
    return ['python', *arguments]


def describe_start() -> dict[str, Any]:
    """Describes this process: its command, machine, code, versions and devices, as JSON.

    jax opens its devices here. The field `imported` stays empty: a caller that has a run fills it
    with the code from outside the package that the run imports.
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
    """Returns the working directory; None if it was removed while a worker of a study runs."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def git_state(directory: Path = PACKAGE) -> dict[str, Any]:
    """Returns the state of the git checkout that contains a package.

    The state is {'commit': its hash, 'dirty': whether files have changed}; untracked files count as
    changes. Outside of a checkout, or without git, both are None, and 'reason' says why.
    """
    environment = dict(os.environ)
    environment['GIT_OPTIONAL_LOCKS'] = '0'  # `git status` then writes nothing into the checkout

    def git(*arguments: str) -> str:
        """The output of a git command; SubprocessError if the command fails."""
        command = ['git', '-C', str(directory), *arguments]
        completed = run_program(
            command, check=True, capture_output=True, timeout=30, env=environment
        )
        return completed.stdout.strip()

    try:
        # Fails if git does not track the package, as for a copy that pip has installed.
        git('ls-files', '--error-unmatch', '__init__.py')
        commit = git('rev-parse', 'HEAD')
        changed_files = git('status', '--porcelain')
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, 'stderr', None) or str(error)
        return {'commit': None, 'dirty': None, 'reason': reason.strip()}
    return {'commit': commit, 'dirty': bool(changed_files)}


def _version(distribution: str) -> str | None:
    """Returns the installed version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
