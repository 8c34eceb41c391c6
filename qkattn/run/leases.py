"""Leases: which process trains which run, among many processes and hosts that share a directory.

    leases/RUN.N   lease number N = 0, 1, 2, ... of a run: JSON {host, pid, started, expiry}

The highest number is in force. The holder touches its file at regular intervals; a file that was
not touched for `expiry` seconds has expired, and whoever creates the next number holds the run.
Exclusive creation succeeds in exactly one process, and nothing is renamed or deleted, so there is
no race. The files of finished runs stay, about a hundred bytes each.

Ages compare timestamps of the file system (of the lease, and of a file created for the purpose),
because clocks of hosts differ. The holder measures the time since its last heartbeat with a
monotonic clock and gives up before anybody else may take over, so at most one process at a time
sees its lease as not lost. On a file system whose clock jumps, or differs between hosts by more
than expiry / 8, two may see it so until the next heartbeat.

A lease shows that its process is alive, not that its training makes progress.

In a bucket a lease is one object, RUN, that is created, renewed and taken over by the generation
that it replaces, so that of several processes one succeeds; ages are on the bucket's clock. There
the lock of a run directory is a lease, too.

A holder on this machine whose process is gone does not have to be waited for.
"""

import contextlib
import dataclasses
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from qkattn.errors import ConfigError, RunDirectoryError
from qkattn.run import buckets, object_leases
from qkattn.run.buckets import seconds
from qkattn.run.files import as_path, disk_errors, make_directory
from qkattn.run.heartbeats import EXPIRY, Holder, Lease, content_of, holder_of
from qkattn.run.signals import WHOLE


def acquire(directory: Path, run: str, *, expiry: float = EXPIRY) -> Lease | None:
    """Acquires the lease of a run unless another process holds it.

    Check afterwards whether the run is finished: its last holder may just have finished it.

    Args:
      directory: shared by all workers; created if missing.
      run: a name without slashes.
      expiry: seconds without a heartbeat after which others may take the run over. An existing
        lease expires by the value that its holder wrote.

    Returns:
      The lease; None if the run is held.

    Raises:
      ConfigError: `expiry` is not a positive number.
      RunDirectoryError: `directory` cannot be written.
    """
    if not (math.isfinite(expiry) and expiry > 0):
        raise ConfigError(f'expiry={expiry} must be a positive, finite number of seconds')
    if buckets.is_url(directory):
        lease = object_leases.acquire(as_path(directory) / run, expiry)
        return lease if isinstance(lease, Lease) else None
    directory = make_directory(directory)
    content = content_of(expiry)
    with _usable(directory):
        number = _highest(directory).get(run, -1)
        while number < 0 or _holder(directory / f'{run}.{number}', expiry) is None:
            number += 1
            path = directory / f'{run}.{number}'
            created = seconds()
            # If it exists, another process was faster or the listing was stale: check it as well.
            with contextlib.suppress(FileExistsError), WHOLE:
                _create(path, content)
                return Lease(_File(path, content), expiry, created)
    return None


def holders(directory: Path, *, expiry: float = EXPIRY) -> dict[str, Holder]:
    """Returns the holder of each run that is held.

    Args:
      directory: as for `acquire`; it need not exist.
      expiry: seconds, for leases whose holder died before it wrote its own.

    Raises:
      RunDirectoryError: `directory` cannot be read or written.
    """
    directory = as_path(directory)
    if not directory.exists():
        return {}
    if buckets.is_url(directory):
        return object_leases.holders(directory, expiry)
    with _usable(directory):
        all_runs = {
            run: _holder(directory / f'{run}.{number}', expiry)
            for run, number in sorted(_highest(directory).items())
        }
    return {run: holder for run, holder in all_runs.items() if holder is not None}


@dataclasses.dataclass
class _File:
    """A lease on a file system."""

    path: Path
    content: bytes

    def renew(self) -> bool:
        """Whether the lease is still this one; touches it."""
        try:
            mine = _read(self.path)[1] == self.content
        except FileNotFoundError:
            mine = False
        if not mine or _successor(self.path).exists():
            return False
        os.utime(self.path)
        return True

    def free(self) -> None:
        if _read(self.path)[1] == self.content:
            os.utime(self.path, (0, 0))


@contextlib.contextmanager
def _usable(directory: Path) -> Iterator[None]:
    try:
        with disk_errors(directory):
            yield
    except OSError as error:
        raise RunDirectoryError(
            f'{directory} cannot hold leases ({error.strerror}); '
            'give a workdir that this user can write to'
        ) from error


def _create(path: Path, content: bytes) -> None:
    """Creates `path` or raises FileExistsError. A crash may leave the file empty."""
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        os.write(file, content)
    except OSError:
        os.utime(file, (0, 0))  # released: nobody has to wait until it expires
        raise
    finally:
        os.close(file)


def _successor(path: Path) -> Path:
    run, _, number = path.name.rpartition('.')
    return path.with_name(f'{run}.{int(number) + 1}')


def _highest(directory: Path) -> dict[str, int]:
    """The highest number by run."""
    numbers: dict[str, int] = {}
    for name in os.listdir(directory):
        run, _, number = name.rpartition('.')
        if run and number.isdecimal():
            numbers[run] = max(numbers.get(run, 0), int(number))
    return numbers


def _read(path: Path) -> tuple[float, bytes]:
    """Returns (mtime, content).

    The mtime is read from the open file, because NFS answers a plain stat from a cache that may be
    a minute old, but an open from the server.
    """
    with open(path, 'rb') as file:
        return os.fstat(file.fileno()).st_mtime, file.read()


def _holder(path: Path, expiry: float) -> Holder | None:
    """The holder of the lease `path`; None if it expired, was released or deleted, or is dead."""
    # Read before the lease, so that a heartbeat in between can only lower its age.
    with tempfile.TemporaryFile(dir=path.parent) as file:
        now = os.fstat(file.fileno()).st_mtime
    try:
        mtime, content = _read(path)
    except FileNotFoundError:
        return None
    holder = holder_of(content, now - mtime, expiry)
    return None if holder and object_leases.is_alive(holder) is False else holder
