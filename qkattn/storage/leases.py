"""Leases and locks: which process works on what, of many processes and hosts on shared storage.

A lease is the right to train a run: JSON {host, process, pid, started, expiry}. Its holder renews
it at regular intervals. One that was not renewed for `expiry` seconds is free, and at once one
whose holder was a process of this machine that is gone.

    leases/RUN.N   on a file system: lease number N = 0, 1, ... of a run, renewed by touching it
    leases/RUN     in a bucket: one object, renewed by writing it again

On a file system the highest number is in force, and whoever creates the next one holds the run:
exclusive creation succeeds in one process, and nothing is renamed or deleted. In a bucket an object
is created, renewed and taken over by the generation that it replaces.

Ages are on the clock of the file system or bucket, because clocks of hosts differ. The holder
measures the time since its last heartbeat with a monotonic clock and gives up before anybody else
may take over, so at most one process at a time sees its lease as not lost. On a file system whose
clock jumps, or differs between hosts by more than expiry / 8, two may see it so until the next
heartbeat. A lease shows that its process is alive, not that its training makes progress.

A lock (`locked`) is one of the kernel on a file system, and a lease in a bucket.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import json
import logging
import math
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from qkattn.errors import ConfigError, RunDirectoryError
from qkattn.jobs.signals import exit_hooks, no_interrupt
from qkattn.storage import buckets
from qkattn.storage.buckets import seconds
from qkattn.storage.files import as_path, disk_errors, make_directory
from qkattn.storage.records import check, parse_json

EXPIRY = 300.0
"""Seconds; longer than a network file system stalls, shorter than most runs."""
LOCK_EXPIRY = 120.0
"""Seconds without a heartbeat after which a lock in a bucket is taken over."""
_BEATS = 8
"""Heartbeats per expiry; the holder gives up one heartbeat before its lease expires."""
_POLL = 0.5

log = logging.getLogger(__name__)


class Lease:
    """The right of this process to train a run; returned by `acquire`, a context manager.

    A daemon thread renews it until `release`. A child made by os.fork does not hold it: there
    `lost` is True and `release` does nothing.
    """

    def __init__(self, entry: '_File | _Object', content: bytes, expiry: float, created: float):
        self._entry, self._content, self._pid = entry, content, os.getpid()
        self._patience = expiry * (_BEATS - 1) / _BEATS
        self._beaten, self._lost = created, False
        self._released = threading.Event()
        keep_alive, name = self._keep_alive, f'lease {self.path.name}'
        self._thread = threading.Thread(
            target=keep_alive, args=(expiry / _BEATS,), name=name, daemon=True
        )
        self._thread.start()
        exit_hooks.append(self.release)

    @property
    def path(self) -> Path:
        """The file or object of the lease."""
        return self._entry.path

    @property
    def lost(self) -> bool:
        """Whether another process holds the run, or soon may; stays True, and as `release` left it.

        True once the run was taken over, the file was deleted or replaced, or no heartbeat
        succeeded for 7/8 of the expiry (a paused process, an unreachable file system).
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
            self._thread.join()  # a heartbeat in progress would undo what follows
            with contextlib.suppress(OSError, ConfigError):
                self._entry.free(self._content)

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
        if not self._entry.renew(self._content):
            self._lost = True
        elif not self.lost:  # a heartbeat that came too late does not renew the lease
            self._beaten = start


@dataclasses.dataclass(frozen=True)
class Holder:
    """The process that holds a run; as text, 'process 12 on host, 35 s ago'.

    Attributes:
      name: 'process 12 on host'; 'an unknown process' if it died before it wrote its name.
      beat: time of the last heartbeat on the clock of the storage.
      age: seconds since then.
      free_in: seconds until the lease expires without another heartbeat.
      alive: whether it is a live process of this machine; None for another machine's.
    """

    name: str
    beat: float
    age: float
    free_in: float
    alive: bool | None = None

    def __str__(self) -> str:
        return f'{self.name}, {max(self.age, 0):.0f} s ago'


def acquire(directory: Path, run: str, *, expiry: float = EXPIRY) -> Lease | None:
    """Acquires the lease of a run; None if another process holds it.

    Check afterwards whether the run is finished: its last holder may just have finished it.

    Args:
      directory: shared by all workers; created if missing.
      run: a name without slashes.
      expiry: seconds without a heartbeat after which others may take the run over. An existing
        lease expires by the value that its holder wrote.

    Raises:
      ConfigError: `expiry` is not a positive number.
      RunDirectoryError: `directory` cannot be written.
    """
    if not (math.isfinite(expiry) and expiry > 0):
        raise ConfigError(f'expiry={expiry} must be a positive, finite number of seconds')
    directory = as_path(directory) if buckets.is_url(directory) else make_directory(directory)
    lease = _acquire(directory, run, expiry)
    return lease if isinstance(lease, Lease) else None


def holders(directory: Path, *, expiry: float = EXPIRY) -> dict[str, Holder]:
    """The holder of each run that is held; raises as `acquire`.

    Args:
      directory: it need not exist.
      expiry: seconds, for leases whose holder died before it wrote its own.
    """
    directory = as_path(directory)
    if not directory.exists():
        return {}
    with _usable(directory):
        by_run = {run: _holder(entry, expiry) for run, entry in sorted(_entries(directory).items())}
    return {run: holder for run, holder in by_run.items() if holder is not None}


def _acquire(directory: Path, run: str, expiry: float) -> Lease | Holder:
    about = {
        'host': socket.gethostname(),
        'process': _process(),
        'pid': os.getpid(),
        'started': datetime.datetime.now(datetime.UTC).isoformat(),
        'expiry': expiry,
    }
    content = json.dumps(about).encode() + b'\n'
    with _usable(directory):
        entry = _entries(directory, run)[run]
        while (holder := _holder(entry, expiry)) is None:
            created = seconds()
            # If another process was faster, or the listing was stale, that lease is checked, too.
            with contextlib.suppress(FileExistsError), no_interrupt:
                entry.take(content)
                return Lease(entry, content, expiry, created)
    return holder


def _holder(entry: '_File | _Object', expiry: float) -> Holder | None:
    """The holder of a lease; None if there is none, or it expired, was released or is dead."""
    if (current := entry.read()) is None:
        return None
    content, beat, now = current
    name, alive = 'an unknown process', None
    with contextlib.suppress(ValueError):  # cut off or damaged
        about = parse_json(content)
        check(about, {'host': str, 'pid': int, 'expiry': float})
        if about['expiry'] > 0:
            name, expiry = f'process {about["pid"]} on {about["host"]}', about['expiry']
            alive = _is_alive(about.get('process'))
    age = now - beat
    return None if age > expiry or alive is False else Holder(name, beat, age, expiry - age, alive)


def _is_alive(name: object) -> bool | None:
    """Whether the process that `_process` named is alive; None for one of another machine."""
    here = _process()
    if not here or not isinstance(name, str) or here.split()[:2] != name.split()[:2]:
        return None
    return _process(int(name.split()[2])) == name


def _process(pid: int | None = None) -> str | None:
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


# Where a lease is kept. `read` gives its content, the time of its last heartbeat and the time now;
# `take` replaces what was read, with FileExistsError if another process has been faster.


@dataclasses.dataclass
class _File:
    """The lease of a run on a file system."""

    directory: Path
    run: str
    number: int

    @property
    def path(self) -> Path:
        return self.directory / f'{self.run}.{self.number}'

    def read(self) -> tuple[bytes, float, float] | None:
        # Before the lease is read, so that a heartbeat in between can only lower its age.
        with tempfile.TemporaryFile(dir=self.directory) as file:
            now = os.fstat(file.fileno()).st_mtime
        with contextlib.suppress(FileNotFoundError), open(self.path, 'rb') as file:
            # Of the open file: NFS answers a plain stat from a cache that may be a minute old.
            return file.read(), os.fstat(file.fileno()).st_mtime, now
        return None

    def take(self, content: bytes) -> None:
        self.number += 1
        file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        try:
            os.write(file, content)
        except OSError:
            os.utime(file, (0, 0))  # released: nobody has to wait until it expires
            raise
        finally:
            os.close(file)

    def renew(self, content: bytes) -> bool:
        """Touches the lease; returns whether it still is this one."""
        successor = dataclasses.replace(self, number=self.number + 1)
        with contextlib.suppress(FileNotFoundError):
            if self.path.read_bytes() == content and not successor.path.exists():
                os.utime(self.path)
                return True
        return False

    def free(self, content: bytes) -> None:
        if self.path.read_bytes() == content:
            os.utime(self.path, (0, 0))


@dataclasses.dataclass
class _Object:
    """The lease of a run in a bucket."""

    path: Path
    generation: int = 0

    def read(self) -> tuple[bytes, float, float] | None:
        now = buckets.now(self.path)
        try:
            content, self.generation, updated = buckets.read(self.path)
        except FileNotFoundError:
            self.generation = 0
            return None
        return content, updated, now

    def take(self, content: bytes) -> None:
        self.generation = buckets.write(self.path, content, self.generation)

    def renew(self, content: bytes) -> bool:
        try:
            self.take(content)
        except FileExistsError:
            return False
        return True

    def free(self, content: bytes) -> None:
        buckets.delete(self.path, self.generation)


def _entries(directory: Path, *runs: str) -> Mapping[str, '_File | _Object']:
    """The lease of each run below `directory`, and of `runs`, which need not have one."""
    if buckets.is_url(directory):
        names = runs or [path.name for path in directory.iterdir()]
        return {run: _Object(directory / run) for run in names}
    numbers = dict.fromkeys(runs, -1)
    for name in os.listdir(directory):
        run, _, number = name.rpartition('.')
        if run and number.isdecimal():
            numbers[run] = max(numbers.get(run, -1), int(number))
    return {run: _File(directory, run, number) for run, number in numbers.items()}


@contextlib.contextmanager
def _usable(directory: Path) -> Iterator[None]:
    try:
        with disk_errors(directory):
            yield
    except OSError as error:
        if buckets.is_url(directory):
            raise
        raise RunDirectoryError(
            f'{directory} cannot hold leases ({error.strerror}); '
            'give a workdir that this user can write to'
        ) from error


# Locks


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
    if buckets.is_url(path):
        with _leased(path, wait) as lease:
            yield lambda: lease.lost
        return
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


def _leased(path: Path, wait: bool) -> Lease:
    """The lease of a lock in a bucket, once it is free."""
    first: Holder | None = None
    while not isinstance(holder := _acquire(path.parent, path.name, LOCK_EXPIRY), Lease):
        if not wait and (holder.alive or (first and holder.beat != first.beat)):
            raise BlockingIOError(holder.name)
        if not wait and first is None:
            log.warning(
                '%s is held by %s; going on in %.0f s unless it shows that it is alive',
                path,
                holder,
                max(holder.free_in, 0),
            )
        first = first or holder
        time.sleep(_POLL)
    return holder
