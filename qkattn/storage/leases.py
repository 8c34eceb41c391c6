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
import datetime
import json
import math
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from qkattn.errors import ConfigError, RunDirectoryError
from qkattn.jobs.signals import exit_hooks, no_interrupt
from qkattn.storage import buckets
from qkattn.storage.buckets import seconds
from qkattn.storage.files import as_path, disk_errors, make_directory
from qkattn.storage.json_schema import check
from qkattn.storage.records import parse_json

EXPIRY = 300.0
"""Seconds; longer than a network file system stalls, shorter than most runs."""

_BEATS = 8
"""Heartbeats per expiry; the holder gives up one heartbeat before its lease expires."""


# What a lease is, wherever it lies


class Mark(Protocol):
    """Where a lease is kept."""

    path: Path

    def renew(self) -> bool:
        """Makes the lease young again; returns whether it still is this one."""

    def free(self) -> None:
        """Ends the lease, if it still is this one."""


class Lease:
    """The right of this process to train a run; returned by `acquire`, a context manager.

    A daemon thread renews it until `release`. A child made by os.fork does not hold it: there
    `lost` is True and `release` does nothing.
    """

    def __init__(self, mark: Mark, expiry: float, created: float):
        self.path = mark.path
        """The file or object of the lease."""
        self._mark = mark
        self._pid = os.getpid()
        self._patience = expiry * (_BEATS - 1) / _BEATS
        self._beaten = created
        self._lost = False
        self._released = threading.Event()
        self._thread = threading.Thread(
            target=self._keep_alive,
            args=(expiry / _BEATS,),
            name=f'lease {self.path.name}',
            daemon=True,
        )
        self._thread.start()
        exit_hooks.append(self.release)

    @property
    def lost(self) -> bool:
        """Whether another process holds the run, or soon may; stays True.

        True once the run was taken over, the file was deleted or replaced, or no heartbeat
        succeeded for 7/8 of the expiry (a paused process, an unreachable file system). `release`
        freezes the value.
        """
        if os.getpid() != self._pid:
            return True
        if not self._released.is_set() and seconds() - self._beaten > self._patience:
            self._lost = True
        return self._lost

    def release(self) -> None:
        """Frees the run and stops the heartbeat; may be called twice.

        If the file system fails, the run becomes free when the lease expires.
        """
        with no_interrupt:
            if os.getpid() != self._pid or self._released.is_set():
                return
            self._lost = self.lost
            self._released.set()
            exit_hooks.remove(self.release)
            # A heartbeat in progress would undo the write below.
            self._thread.join()
            with contextlib.suppress(OSError, ConfigError):
                self._mark.free()

    def __enter__(self) -> 'Lease':
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def _keep_alive(self, interval: float) -> None:
        while not self._released.wait(interval) and not self.lost:
            # A failed heartbeat is retried at the next interval; `lost` keeps the time.
            with contextlib.suppress(Exception):
                self._beat()

    def _beat(self) -> None:
        start = seconds()
        if not self._mark.renew():
            self._lost = True
            return
        # A touch that came too late does not renew the lease.
        if not self.lost:
            self._beaten = start


@dataclasses.dataclass(frozen=True)
class Holder:
    """The process that holds a run; as text, 'process 12 on host, 35 s ago'.

    Attributes:
      name: 'process 12 on host'; 'an unknown process' if it died before it wrote its name.
      age: seconds since the last heartbeat.
      free_in: seconds until the lease expires without another heartbeat.
      process: as `process` names it; None where that is not known.
      generation: of the lease's object in a bucket; another heartbeat has another one.
    """

    name: str
    age: float
    free_in: float
    process: str | None = None
    generation: int = 0

    def __str__(self) -> str:
        return f'{self.name}, {max(self.age, 0):.0f} s ago'


def holder_of(content: bytes, age: float, expiry: float) -> Holder | None:
    """The holder of a lease of this content, whose last heartbeat is `age` seconds ago."""
    name, known = 'an unknown process', None
    with contextlib.suppress(ValueError):  # cut off or damaged
        about = parse_json(content)
        check(about, {'host': str, 'pid': int, 'expiry': float})
        if 0 < about['expiry'] < math.inf:
            name, expiry = f'process {about["pid"]} on {about["host"]}', about['expiry']
            known = about.get('process')
    return Holder(name, age, expiry - age, known) if age <= expiry else None


def content_of(expiry: float) -> bytes:
    """What a lease of this process holds."""
    about = {
        'host': socket.gethostname(),
        'process': process(),
        'pid': os.getpid(),
        'started': datetime.datetime.now(datetime.UTC).isoformat(),
        'expiry': expiry,
    }
    return json.dumps(about).encode() + b'\n'


def process(pid: int | None = None) -> str | None:
    """A name of a process, this one or another of this machine, that no other one has or gets.

    It is made of the boot, the process namespace, the number, and when the process began; None
    where there is no such process, or no /proc.
    """
    try:
        boot = Path('/proc/sys/kernel/random/boot_id').read_text().strip()
        space = os.stat('/proc/self/ns/pid').st_ino
        state, *fields = Path(f'/proc/{pid or "self"}/stat').read_text().rpartition(')')[2].split()
    except OSError:
        return None
    return None if state in 'ZX' else f'{boot} {space} {pid or os.getpid()} {fields[18]}'


# On a file system


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
        lease = acquire_object(as_path(directory) / run, expiry)
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
            with contextlib.suppress(FileExistsError), no_interrupt:
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
        return _object_holders(directory, expiry)
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
    return None if holder and is_alive(holder) is False else holder


# In a bucket


def acquire_object(path: Path, expiry: float) -> Lease | Holder:
    """Acquires the lease that is the object `path`, or returns who holds it."""
    content = content_of(expiry)
    while True:
        try:
            found = buckets.read(path)
        except FileNotFoundError:
            found = None
        if found and (holder := _object_holder(path, found, expiry)):
            return holder
        created = seconds()
        # If another process was faster, who holds it is looked up again.
        with contextlib.suppress(FileExistsError), no_interrupt:
            generation = buckets.write(path, content, found.generation if found else 0)
            return Lease(_Object(path, content, generation), expiry, created)


def _object_holders(directory: Path, expiry: float) -> dict[str, Holder]:
    """The holder of each lease below `directory` that is held, by name."""
    found: dict[str, Holder] = {}
    for path in sorted(directory.iterdir()):
        with contextlib.suppress(FileNotFoundError):
            if holder := _object_holder(path, buckets.read(path), expiry):
                found[path.name] = holder
    return found


def _object_holder(path: Path, found: buckets.Object, expiry: float) -> Holder | None:
    """The holder of a lease; None if it expired, or was a process of this machine that is gone."""
    holder = holder_of(found.content, buckets.now(path) - found.updated, expiry)
    if holder is None or is_alive(holder) is False:
        return None
    return dataclasses.replace(holder, generation=found.generation)


def is_alive(holder: Holder) -> bool | None:
    """Whether the holder is a live process of this machine; None for another machine's."""
    here, there = process(), holder.process
    if not here or not isinstance(there, str) or here.split()[:2] != there.split()[:2]:
        return None
    return process(int(there.split()[2])) == there


@dataclasses.dataclass
class _Object:
    """A lease in a bucket."""

    path: Path
    content: bytes
    generation: int

    def renew(self) -> bool:
        try:
            self.generation = buckets.write(self.path, self.content, self.generation)
        except FileExistsError:
            return False
        return True

    def free(self) -> None:
        buckets.delete(self.path, self.generation)
