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
import logging
import os
from collections.abc import Callable
from pathlib import Path

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
from qkattn.storage.appended import MetricsFile
from qkattn.storage.file_schemas import CONFIG, PROVENANCE
from qkattn.storage.files import make_directory
from qkattn.storage.locks import locked
from qkattn.storage.provenance import describe_start
from qkattn.storage.records import damaged, read_json, read_metrics, write_json

log = logging.getLogger(__name__)


class RunDirectory:
    """A run directory held by this process; make one with `RunDirectory.open`.

    In a job of several processes only process 0 holds it.
    """

    def __init__(
        self,
        path: Path,
        resumed: bool,
        metrics: MetricsFile,
        lock: contextlib.ExitStack,
        lost: Callable[[], bool],
    ):
        self.path = path
        """Absolute."""
        self.resumed = resumed
        """Whether the directory already held a run of this configuration."""
        self.metrics = metrics
        """Of metrics.jsonl; `rewind` to the restored checkpoint before appending."""
        self.lost = lost
        """Whether another process may hold the directory, which happens in a bucket alone."""
        self._lock = lock

    @classmethod
    def open(
        cls,
        path: str | os.PathLike,
        config: Config,
        command: list[str] | None = None,
    ) -> 'RunDirectory':
        """Creates or resumes a run directory; a context manager.

        Call it after `jax.distributed.initialize()`: the devices are recorded.

        Args:
          path: the directory, on a mounted file system or in a bucket.
          config: the resolved configuration; its fingerprint decides whether the directory is its.
          command: the command line, recorded; None: not recorded.

        Raises:
          InUseError: a live process holds it.
          RunDirectoryError: out of reach, or damaged.
          ConfigError: holds a study, or a run of another configuration, whose differences the
            message lists.
        """
        directory = make_directory(path)
        with contextlib.ExitStack() as stack:
            lost = _acquire(stack, directory)
            resumed = _check_config(directory, config)
            _record_start(directory / 'provenance.json', command, config)
            metrics = MetricsFile(directory / 'metrics.jsonl')
            stack.callback(metrics.close)
            if (directory / 'result.json').exists():
                _check_finished(metrics.path)
            return cls(directory, resumed, metrics, stack.pop_all(), lost)

    def close(self) -> None:
        """Closes the metrics and releases the directory; may be called twice."""
        self._lock.close()

    def __enter__(self) -> 'RunDirectory':
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _check_finished(metrics: Path) -> None:
    last = read_metrics(metrics)[-1:]
    if not last or last[0].get('kind') != 'final':
        log.warning('%s lacks the last records of a finished run; restore it from a copy', metrics)


def _acquire(stack: contextlib.ExitStack, directory: Path) -> Callable[[], bool]:
    """Locks the directory until `stack` closes; returns what says whether the lock is lost."""
    try:
        return stack.enter_context(locked(directory / 'lock', wait=False, named=True))
    except BlockingIOError as error:
        raise InUseError(
            f'workdir={directory} is in use by {error}; wait for it, stop it, or give another one'
        ) from error


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
    found = read_json(path, CONFIG)
    if fingerprint_of(found['config']) != found['hash']:
        raise damaged(path, ValueError('its hash is not that of its config'))
    try:
        stored: Config = from_json(Config, found['config'])
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


def _record_start(path: Path, command: list[str] | None, config: Config) -> None:
    starts = read_json(path, PROVENANCE)['starts'] if path.exists() else []
    write_json(path, {'starts': [*starts, describe_start(command, imported(to_json(config)))]})
