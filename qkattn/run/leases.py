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
"""

import contextlib
import dataclasses
import datetime
import json
import math
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from qkattn.errors import ConfigError, RunDirectoryError
from qkattn.run.files import disk_errors, make_directory
from qkattn.run.json_schema import check
from qkattn.run.records import parse_json
from qkattn.run.signals import BEFORE_LEAVING, WHOLE

EXPIRY = 300.0
"""Seconds; longer than a network file system stalls, shorter than most runs."""

_BEATS = 8
"""Heartbeats per expiry; the holder gives up one heartbeat before its lease expires."""

# CLOCK_BOOTTIME, where there is one, also counts the time for which a machine is suspended.
_CLOCK = getattr(time, 'CLOCK_BOOTTIME', time.CLOCK_MONOTONIC)


class Lease:
    """The right of this process to train a run; returned by `acquire`, a context manager.

    A daemon thread renews it until `release`. A child made by os.fork does not hold it: there
    `lost` is True and `release` does nothing.
    """

    def __init__(self, path: Path, content: bytes, expiry: float, created: float):
        self.path = path
        """The file of the lease."""
        self._content = content
        self._pid = os.getpid()
        self._patience = expiry * (_BEATS - 1) / _BEATS
        self._beaten = created
        self._lost = False
        self._released = threading.Event()
        self._thread = threading.Thread(
            target=self._keep_alive, args=(expiry / _BEATS,), name=f'lease {path.name}', daemon=True
        )
        self._thread.start()
        BEFORE_LEAVING.append(self.release)

    @property
    def lost(self) -> bool:
        """Whether another process holds the run, or soon may; stays True.

        True once the run was taken over, the file was deleted or replaced, or no heartbeat
        succeeded for 7/8 of the expiry (a paused process, an unreachable file system). `release`
        freezes the value.
        """
        if os.getpid() != self._pid:
            return True
        if not self._released.is_set() and _seconds() - self._beaten > self._patience:
            self._lost = True
        return self._lost

    def release(self) -> None:
        """Frees the run and stops the heartbeat; may be called twice.

        If the file system fails, the run becomes free when the lease expires.
        """
        with WHOLE:
            if os.getpid() != self._pid or self._released.is_set():
                return
            self._lost = self.lost
            self._released.set()
            BEFORE_LEAVING.remove(self.release)
            # A heartbeat in progress would undo the write below.
            self._thread.join()
            with contextlib.suppress(OSError):
                if _read(self.path)[1] == self._content:
                    os.utime(self.path, (0, 0))

    def __enter__(self) -> 'Lease':
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def _keep_alive(self, interval: float) -> None:
        while not self._released.wait(interval) and not self.lost:
            # A failed heartbeat is retried at the next interval; `lost` keeps the time.
            with contextlib.suppress(OSError):
                self._beat()

    def _beat(self) -> None:
        start = _seconds()
        try:
            mine = _read(self.path)[1] == self._content
        except FileNotFoundError:
            mine = False
        if not mine or _successor(self.path).exists():
            self._lost = True
            return
        os.utime(self.path)
        # A touch that came too late does not renew the lease.
        if not self.lost:
            self._beaten = start


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
    directory = make_directory(directory)
    content = _content(expiry)
    with _usable(directory):
        number = _highest(directory).get(run, -1)
        while number < 0 or _holder(directory / f'{run}.{number}', expiry) is None:
            number += 1
            path = directory / f'{run}.{number}'
            created = _seconds()
            # If it exists, another process was faster or the listing was stale: check it as well.
            with contextlib.suppress(FileExistsError), WHOLE:
                _create(path, content)
                return Lease(path, content, expiry, created)
    return None


@dataclasses.dataclass(frozen=True)
class Holder:
    """The process that holds a run; as text, 'process 12 on host, 35 s ago'.

    Attributes:
      name: 'process 12 on host'; 'an unknown process' if it died before it wrote its name.
      age: seconds since the last heartbeat.
      free_in: seconds until the lease expires without another heartbeat.
    """

    name: str
    age: float
    free_in: float

    def __str__(self) -> str:
        return f'{self.name}, {max(self.age, 0):.0f} s ago'


def holders(directory: Path, *, expiry: float = EXPIRY) -> dict[str, Holder]:
    """Returns the holder of each run that is held.

    Args:
      directory: as for `acquire`; it need not exist.
      expiry: seconds, for leases whose holder died before it wrote its own.

    Raises:
      RunDirectoryError: `directory` cannot be read or written.
    """
    directory = Path(directory)
    if not directory.exists():
        return {}
    with _usable(directory):
        all_runs = {
            run: _holder(directory / f'{run}.{number}', expiry)
            for run, number in sorted(_highest(directory).items())
        }
    return {run: holder for run, holder in all_runs.items() if holder is not None}


def _seconds() -> float:
    return time.clock_gettime(_CLOCK)


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


def _content(expiry: float) -> bytes:
    about = {
        'host': socket.gethostname(),
        'pid': os.getpid(),
        'started': datetime.datetime.now(datetime.UTC).isoformat(),
        'expiry': expiry,
    }
    return json.dumps(about).encode() + b'\n'


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
    """The holder of the lease `path`; None if it expired, was released or deleted."""
    # Read before the lease, so that a heartbeat in between can only lower its age.
    with tempfile.TemporaryFile(dir=path.parent) as file:
        now = os.fstat(file.fileno()).st_mtime
    try:
        mtime, content = _read(path)
    except FileNotFoundError:
        return None
    name = 'an unknown process'
    with contextlib.suppress(ValueError):  # cut off or damaged
        about = parse_json(content)
        check(about, {'host': str, 'pid': int, 'expiry': float})
        if 0 < about['expiry'] < math.inf:
            name, expiry = f'process {about["pid"]} on {about["host"]}', about['expiry']
    age = now - mtime
    return Holder(name, age, expiry - age) if age <= expiry else None
