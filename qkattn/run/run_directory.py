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
import datetime
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from qkattn.errors import ConfigError, InUseError, RunDirectoryError
from qkattn.run.file_schemas import CONFIG, PROVENANCE
from qkattn.run.files import disk_errors, locked, make_directory
from qkattn.run.provenance import describe_start
from qkattn.run.records import MetricsFile, read_json, to_jsonable, write_json


class RunDirectory:
    """A run directory held by this process; make one with `RunDirectory.open`.

    In a job of several processes only process 0 holds it.
    """

    def __init__(self, path: Path, resumed: bool, metrics: MetricsFile, lock: contextlib.ExitStack):
        self.path = path
        """Absolute."""
        self.resumed = resumed
        """Whether the directory already held a run of this configuration."""
        self.metrics = metrics
        """Of metrics.jsonl; `rewind` to the restored checkpoint before appending."""
        self._lock = lock

    @classmethod
    def open(
        cls,
        path: str | os.PathLike,
        config: Mapping[str, Any],
        config_hash: str,
        command: list[str] | None = None,
    ) -> 'RunDirectory':
        """Creates or resumes a run directory; a context manager.

        Call it after `jax.distributed.initialize()`: the devices are recorded.

        Args:
          path: the directory, on a mounted file system.
          config: the resolved configuration.
          config_hash: decides whether a directory belongs to this configuration.
          command: the command line, recorded; None: not recorded.

        Raises:
          InUseError: a live process holds it.
          RunDirectoryError: out of reach, or damaged.
          ConfigError: holds a run of another configuration; the message lists the differences.
        """
        directory = make_directory(path)
        with contextlib.ExitStack() as stack:
            _acquire(stack, directory)
            resumed = _check_config(directory, config, config_hash)
            _record_start(directory / 'provenance.json', command)
            metrics = MetricsFile(directory / 'metrics.jsonl')
            stack.callback(metrics.close)
            return cls(directory, resumed, metrics, stack.pop_all())

    def close(self) -> None:
        """Closes the metrics and releases the directory; may be called twice."""
        self._lock.close()

    def __enter__(self) -> 'RunDirectory':
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _acquire(stack: contextlib.ExitStack, directory: Path) -> None:
    """Locks the directory until `stack` closes, and writes who holds it into the lock file."""
    path = directory / 'lock'
    try:
        lock = stack.enter_context(locked(path, wait=False))
    except BlockingIOError as error:
        holder = path.read_text(errors='replace').strip() or 'another process'
        raise InUseError(
            f'workdir={directory} is in use by {holder}; wait for it, stop it, or give another one'
        ) from error
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
    holder = f'process {os.getpid()} on {socket.gethostname()} since {started}\n'
    with disk_errors(directory):
        lock.truncate(0)
        os.write(lock.fileno(), holder.encode())


def _check_config(directory: Path, config: Mapping[str, Any], config_hash: str) -> bool:
    """Writes config.json, or checks the existing one; returns whether it existed."""
    path = directory / 'config.json'
    if not path.exists():
        orphans = [n for n in ('metrics.jsonl', 'checkpoints') if (directory / n).exists()]
        if orphans:
            raise RunDirectoryError(
                f'workdir={directory} holds {" and ".join(orphans)} but no config.json to resume '
                'from; restore it from a copy or give another directory.'
            )
        write_json(path, {'hash': config_hash, 'config': config})
        return False
    found = read_json(path, CONFIG)
    if found['hash'] == config_hash:
        return True
    differences = list(_differences(found['config'], to_jsonable(config)))
    if not differences:
        differences = [
            f'hash: {found["hash"]} -> {config_hash} (no field differs, so the file was '
            'edited, or the hash computed by other code)'
        ]
    raise ConfigError(
        f'workdir={directory} holds a run of another configuration:\n  '
        + '\n  '.join(differences)
        + '\nSet these fields back to resume it, or give another workdir.'
    )


def _differences(old: Any, new: Any) -> Iterator[str]:
    """Yields 'path: old -> new' for every field that differs; lists are compared by position."""
    old_leaves, new_leaves = dict(_leaves(old)), dict(_leaves(new))
    for path in old_leaves | new_leaves:
        texts = [
            json.dumps(leaves[path]) if path in leaves else 'absent'
            for leaves in (old_leaves, new_leaves)
        ]
        if texts[0] != texts[1]:
            yield f'{path}: {texts[0]} -> {texts[1]}'


def _leaves(value: Any, path: str = '') -> Iterator[tuple[str, Any]]:
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    children = list(items)
    if not children:
        yield path, value
    for key, child in children:
        yield from _leaves(child, f'{path}.{key}' if path else str(key))


def _record_start(path: Path, command: list[str] | None) -> None:
    starts = read_json(path, PROVENANCE)['starts'] if path.exists() else []
    write_json(path, {'starts': [*starts, describe_start(command)]})
