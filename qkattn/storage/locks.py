"""Exclusive locks: of the kernel on a file system, leases in a bucket."""

import contextlib
import datetime
import fcntl
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from qkattn.errors import ConfigError
from qkattn.storage import buckets, leases
from qkattn.storage.files import as_path, disk_errors

EXPIRY = 120.0
"""Seconds without a heartbeat after which a lock in a bucket is taken over."""

_POLL = 0.5

log = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(
    path: str | os.PathLike[str], *, wait: bool = True, named: bool = False
) -> Iterator[Callable[[], bool]]:
    """Holds an exclusive lock on the file `path`; yields a function: whether the lock is lost.

    On a file system the kernel releases the lock when the holder dies, however it dies, and a lock
    is never lost. Children made by os.fork share it and keep it until they end; other programs that
    this process starts do not.

    A lock in a bucket is a lease. It is taken over at once where its holder was a process of this
    machine that is gone, else when it expires; a holder that shows a heartbeat until then has it.

    Args:
      wait: for another holder to release the lock; otherwise BlockingIOError, which says who holds
        it, is raised.
      named: whether the file says who holds it; a lease always does.

    Raises:
      ConfigError: the directory of `path` cannot be written, or its file system has no locks.
    """
    path = as_path(path)
    with _leased(path, wait) if buckets.is_url(path) else _flocked(path, wait, named) as lost:
        yield lost


@contextlib.contextmanager
def _flocked(path: Path, wait: bool, named: bool) -> Iterator[Callable[[], bool]]:
    try:
        with disk_errors(path.parent, creates=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, 'a+', encoding='utf-8')  # noqa: SIM115 (closed below)
    except OSError as error:
        raise ConfigError(
            f'{path.parent} cannot be written ({error.strerror}); give a directory that this user '
            'can write to, as workdir for results or as data_dir or QKATTN_DATA for data'
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            holder = path.read_text(errors='replace').strip() or 'another process'
            raise BlockingIOError(holder) from error
        except OSError as error:
            raise ConfigError(
                f'{path.parent} is on a file system without locks ({error.strerror}); '
                'give a directory on one that has them'
            ) from error
        if named:
            started = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
            holder = f'process {os.getpid()} on {socket.gethostname()} since {started}\n'
            with disk_errors(path.parent):
                file.truncate(0)
                os.write(file.fileno(), holder.encode())
        yield lambda: False


@contextlib.contextmanager
def _leased(path: Path, wait: bool) -> Iterator[Callable[[], bool]]:
    seen: int | None = None
    while not isinstance(found := leases.acquire_object(path, EXPIRY), leases.Lease):
        if not wait:
            if leases.is_alive(found) or seen not in (None, found.generation):
                raise BlockingIOError(found.name)
            if seen is None:
                log.warning(
                    '%s is held by %s; going on in %.0f s unless it shows that it is alive',
                    path,
                    found,
                    max(found.free_in, 0),
                )
        seen = found.generation
        time.sleep(_POLL)
    with found as lease:
        yield lambda: lease.lost
