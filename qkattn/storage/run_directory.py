"""The run directory: one owner, one configuration, provenance and metrics.

    workdir/lock             held by the live process that uses the directory
    workdir/config.json      {"hash": ..., "config": ...}, written once
    workdir/provenance.json  {"starts": [...]}, one entry per start or resume
    workdir/metrics.jsonl    one JSON object per line, steps never decreasing; the last is 'final'
    workdir/documents.json   the final evaluations by document

Readers need no lock: they always see whole files, except for the last line of metrics.jsonl, which
`read_metrics` leaves out while it is being written.
"""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import logging
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
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
from qkattn.config.calls import imported
from qkattn.errors import ConfigError, InUseError, RunDirectoryError, UnknownFieldError
from qkattn.storage.files import make_directory
from qkattn.storage.leases import locked
from qkattn.storage.metrics_log import MetricsFile, read_metrics
from qkattn.storage.records import CONFIG, PROVENANCE, damaged, read_json, write_json

RECORDED_VERSIONS = (
    *('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'tensorflow-datasets', 'grain'),
    'numpy',
)

log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class RunDirectory:
    """A run directory held by this process; make one with `RunDirectory.open`.

    In a job of several processes only process 0 holds it.

    Attributes:
      path: absolute.
      resumed: whether the directory already held a run of this configuration.
      metrics: of metrics.jsonl; `rewind` to the restored checkpoint before appending.
      lost: whether another process may hold the directory, which happens in a bucket alone.
    """

    path: Path
    resumed: bool
    metrics: MetricsFile
    lost: Callable[[], bool]
    _open: contextlib.ExitStack

    @classmethod
    def open(cls, path: str | os.PathLike, config: Config) -> 'RunDirectory':
        """Creates or resumes a run directory; a context manager.

        Call it after `jax.distributed.initialize()`: the devices are recorded.

        Args:
          path: the directory, on a mounted file system or in a bucket.
          config: the resolved configuration; its fingerprint decides whether the directory is its.

        Raises:
          InUseError: a live process holds it.
          RunDirectoryError: out of reach, or damaged.
          ConfigError: holds a study, or a run of another configuration, whose differences the
            message lists.
        """
        directory = make_directory(path)
        with contextlib.ExitStack() as stack:
            try:
                lost = stack.enter_context(locked(directory / 'lock', wait=False, named=True))
            except BlockingIOError as error:
                raise InUseError(
                    f'workdir={directory} is in use by {error}; wait for it, stop it, or give '
                    'another one'
                ) from error
            resumed = _check_config(directory, config)
            provenance = directory / 'provenance.json'
            starts = read_json(provenance, PROVENANCE)['starts'] if provenance.exists() else []
            start = describe_start(imported(to_json(config)))
            write_json(provenance, {'starts': [*starts, start]})
            metrics = MetricsFile(directory / 'metrics.jsonl')
            stack.callback(metrics.close)
            if (directory / 'result.json').exists():
                last = read_metrics(metrics.path)[-1:]
                if not last or last[0].get('kind') != 'final':
                    log.warning(
                        '%s lacks the last records of a finished run; restore it from a copy',
                        metrics.path,
                    )
            return cls(directory, resumed, metrics, lost, stack.pop_all())

    def close(self) -> None:
        """Closes the metrics and releases the directory; may be called twice."""
        self._open.close()

    def __enter__(self) -> 'RunDirectory':
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _check_config(directory: Path, config: Config) -> bool:
    """Writes config.json, or checks the existing one; returns whether it existed."""
    path = directory / 'config.json'
    if not path.exists():
        if (directory / 'study.json').exists():
            raise ConfigError(f'workdir={directory} holds a study; give a run its own directory')
        orphans = [n for n in ('metrics.jsonl', 'checkpoints') if (directory / n).exists()]
        if orphans:
            raise RunDirectoryError(
                f'workdir={directory} holds {" and ".join(orphans)} but no config.json to resume '
                'from; restore it from a copy or give another directory.'
            )
        write_json(path, {'hash': fingerprint(config), 'config': to_json(config)})
        return False
    record = read_json(path, CONFIG)
    if fingerprint_of(record['config']) != record['hash']:
        raise damaged(path, ValueError('its hash is not that of its config'))
    try:
        stored: Config = from_json(Config, record['config'])
    except UnknownFieldError as error:
        raise ConfigError(f'{path} has an {error}; or give another workdir') from error
    except ConfigError as error:
        raise damaged(path, error) from error
    if fingerprint(stored) == fingerprint(config):
        return True
    wanted = with_machine_of(config, stored)
    changes = differences(dataclasses.asdict(stored), dataclasses.asdict(wanted))
    raise ConfigError(
        f'workdir={directory} holds a run of another configuration:\n  '
        + '\n  '.join(changes)
        + '\nSet these fields back to resume it, or give another workdir.'
    )


def command_line() -> list[str]:
    """The command of this process, as a user would type it again."""
    first, *rest = sys.orig_argv[1:] or ['']
    return ['qkattn', *rest] if Path(first).name == 'qkattn' else ['python', first, *rest]


def describe_start(imported: Mapping[str, str | None] | None = None) -> dict[str, Any]:
    """Describes this process as it starts; asks jax for its devices.

    Args:
      imported: the sha256 of the source file of each import path in the config.

    Returns:
      JSON-compatible fields; the version of a package that is not installed is None.
    """
    device = jax.devices()[0]
    return {
        'started': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
        'command': command_line(),
        'working_directory': os.getcwd(),
        'hostname': socket.gethostname(),
        'process': os.getpid(),
        'git': git_state(Path(__file__).resolve().parent),
        'python': platform.python_version(),
        'platform': platform.platform(),
        'imported': dict(imported or {}),
        'versions': {name: _version(name) for name in RECORDED_VERSIONS},
        'devices': {
            'platform': device.platform,
            'kind': device.device_kind,
            'count': jax.device_count(),
            'processes': jax.process_count(),
        },
    }


def git_state(directory: Path) -> dict[str, Any]:
    """Returns the checkout that the package in `directory` belongs to.

    Returns:
      {'commit': full hash, 'dirty': whether files differ from it or are untracked}; without such a
      checkout {'commit': None, 'dirty': None, 'reason': why}. A package installed into an
      environment inside another repository's checkout does not belong to it.
    """
    try:
        _git(directory, 'ls-files', '--error-unmatch', '__init__.py')
        commit = _git(directory, 'rev-parse', 'HEAD').strip()
        dirty = bool(_git(directory, 'status', '--porcelain'))
    except subprocess.CalledProcessError as error:
        return {'commit': None, 'dirty': None, 'reason': error.stderr.strip()}
    except (OSError, subprocess.TimeoutExpired) as error:
        return {'commit': None, 'dirty': None, 'reason': str(error)}
    return {'commit': commit, 'dirty': dirty}


def _git(directory: Path, *arguments: str) -> str:
    # Variables like GIT_DIR, which git sets for its hooks, would name another repository.
    environment = {k: v for k, v in os.environ.items() if not k.startswith('GIT_')}
    environment['GIT_OPTIONAL_LOCKS'] = '0'
    return subprocess.run(
        ['git', '-C', str(directory), *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
        env=environment,
    ).stdout


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
