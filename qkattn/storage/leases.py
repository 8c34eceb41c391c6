"""Leases and locks: which process works on what, of many processes and hosts on shared storage.

A lease is the right to train a run: JSON {host, process, pid, started, expiry}. It is free when it
was not renewed for `expiry` seconds, or when its holder, a process of this machine, is gone.

    leases/RUN.N   on a file system, renewed by touching it: the highest N = 0, 1, ... is in force,
                   and whoever creates the next one, exclusively, holds the run
    leases/RUN     in a bucket: created, renewed and taken over by the generation that it replaces

Ages are on the clock of the storage. The holder gives up, by a monotonic clock, before others may
take over: at most one process sees its lease as not lost, unless the clock of a file system jumps
by more than expiry / 8.
"""

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from qkattn.config.paths import open_regular
from qkattn.errors import ConfigError
from qkattn.jobs.signals import exit_hooks, no_interrupt
from qkattn.storage import buckets
from qkattn.storage.files import below, disk_errors, in_place
from qkattn.storage.records import check, parse_json

# Seconds; longer than a network file system stalls, shorter than most runs.
EXPIRY = 180.0
# Heartbeats per expiry; the holder gives up one heartbeat before its lease expires.
_BEATS = 8
# Seconds between two looks at a lock that is held.
_POLL = 0.5
# Characters that are read of a lock file.
_NAME_LENGTH = 1000
# The index of a process's start time among the fields of /proc/PID/stat behind its name and state.
_START_FIELD = 18
# CLOCK_BOOTTIME also counts the time for which the machine is suspended.
_CLOCK = getattr(time, 'CLOCK_BOOTTIME', time.CLOCK_MONOTONIC)

log = logging.getLogger(__name__)


def seconds() -> float:
    """Time on a clock that nobody sets, for differences between two events of this machine."""
    return time.clock_gettime(_CLOCK)


class _State(NamedTuple):
    """A lease as it is stored; times are seconds on the clock of the storage."""

    content: bytes
    heartbeat: float  # time of the last one
    now: float


class Lease:
    """The right to train a run, once `acquire` returned it; a context manager that frees it.

    A thread renews it until `release`. The subclasses say how it is stored.
    """

    # What is stored of the lease in force; None where there is none.
    read: Callable[[], _State | None]
    # Stores the lease of this process; FileExistsError where another process was faster.
    take: Callable[[], None]
    # Writes a heartbeat, and returns whether the lease is still that of this process.
    renew: Callable[[], bool]
    # Frees the run for others.
    free: Callable[[], None]

    def start(self) -> None:
        """Takes the lease and begins to renew it."""
        description = {
            'host': socket.gethostname(),
            'process': _process(os.getpid()),
            'pid': os.getpid(),
            'started': time.time_ns(),  # no two leases are equal
            'expiry': EXPIRY,
        }
        self._content = json.dumps(description).encode()
        self._last_heartbeat = seconds()
        self._lost = False
        self.take()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, daemon=True)
        self._thread.start()
        exit_hooks.append(self.release)

    @property
    def lost(self) -> bool:
        """Whether the run was taken over, or soon may be; stays True, and as `release` left it."""
        age = seconds() - self._last_heartbeat
        if not self._released.is_set() and age > EXPIRY * (_BEATS - 1) / _BEATS:
            self._lost = True
        return self._lost

    def release(self) -> None:
        """Frees the run, if the file system allows it, and stops the heartbeat."""
        with no_interrupt:
            if self._released.is_set():
                return
            self._lost = self.lost
            self._released.set()
            exit_hooks.remove(self.release)
            self._thread.join()  # a heartbeat in progress would undo what follows
            with contextlib.suppress(OSError, ConfigError):
                self.free()

    def __enter__(self) -> 'Lease':
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def _keep_alive(self) -> None:
        """Renews the lease until it is released or lost; runs in a thread of its own."""
        while not self._released.wait(EXPIRY / _BEATS) and not self.lost:
            start = seconds()
            # A failed heartbeat is tried again after the interval; `lost` says when it is too late.
            with contextlib.suppress(Exception):
                if not self.renew():
                    self._lost = True
                elif not self.lost:  # a heartbeat that came too late does not renew the lease
                    self._last_heartbeat = start


class _File(Lease):
    """The newest lease of a run on a file system: the file RUN.N with the highest N."""

    def __init__(self, directory: Path, run: str):
        below(directory.parent, directory.name).mkdir(parents=True, exist_ok=True)
        self._prefix = directory / run
        self._number = -1  # without any lease
        for name in os.listdir(directory):
            number = name.removeprefix(f'{run}.')
            if number.isdecimal():
                self._number = max(self._number, int(number))

    def path(self, after: int = 0) -> str:
        """The file of the lease, or of the one that is so many after it."""
        return f'{self._prefix}.{self._number + after}'

    def read(self) -> _State | None:
        # The time is read before the lease, so that a heartbeat in between can only lower its age.
        with tempfile.TemporaryFile(dir=self._prefix.parent) as probe:
            now = os.fstat(probe.fileno()).st_mtime
        with contextlib.suppress(FileNotFoundError), open_regular(self.path()) as file:
            # The time of the open file: NFS answers a plain stat from a cache, which may be a
            # minute old.
            return _State(file.read(), os.fstat(file.fileno()).st_mtime, now)
        return None

    def take(self) -> None:
        self._number += 1
        with open(self.path(), 'xb', buffering=0) as file:
            try:
                file.write(self._content)
            except OSError:  # nobody has to wait until it expires
                self.free()
                raise

    def renew(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.path(), follow_symlinks=False)
            return not os.path.exists(self.path(after=1))
        return False

    def free(self) -> None:
        # A heartbeat in 1970 has expired.
        os.utime(self.path(), (0, 0), follow_symlinks=False)


class _Object(Lease):
    """The lease of a run in a bucket: an object of which each heartbeat is a generation."""

    def __init__(self, directory: Path, run: str):
        self._path = directory / run
        self._generation = 0  # of the object that was read or written last; 0 for none

    def read(self) -> _State | None:
        now = buckets.now(self._path)
        self._generation = 0
        with contextlib.suppress(FileNotFoundError):
            stored = buckets.read(self._path)
            self._generation = stored.generation
            return _State(stored.content, stored.updated, now)
        return None

    def take(self) -> None:
        stored = buckets.write(self._path, self._content, self._generation)
        self._generation = stored.generation

    def renew(self) -> bool:
        with contextlib.suppress(FileExistsError):
            self.take()
            return True
        return False

    def free(self) -> None:
        buckets.delete(self._path, self._generation)


def _lease(directory: Path, run: str) -> Lease:
    """The lease in force of a run, which this process does not hold yet."""
    if buckets.is_url(directory):
        return _Object(directory, run)
    return _File(directory, run)


def acquire(directory: Path, run: str) -> Lease | None:
    """The lease of a run; None if another process holds it. DiskError where it cannot be written.

    Check afterwards whether the run is finished: its last holder may just have finished it.
    """
    with disk_errors(directory):
        lease = _lease(directory, run)
        while _holder(lease) is None:
            # FileExistsError where another process was faster, or the listing of the directory was
            # stale: the loop then asks for the holder of the next lease.
            with contextlib.suppress(FileExistsError), no_interrupt:
                lease.start()
                return lease
    return None


def holders(directory: Path) -> dict[str, str]:
    """The holder of each held run, as 'process 12 on host'."""
    if not directory.exists():
        return {}
    runs = {path.name if buckets.is_url(path) else path.stem for path in directory.iterdir()}
    holder_by_run = {}
    for run in sorted(runs):
        holder = _holder(_lease(directory, run))
        if holder is not None:
            holder_by_run[run] = holder.name
    return holder_by_run


@dataclasses.dataclass(frozen=True)
class _Holder:
    """The process that holds a lease."""

    name: str  # 'process 12 on host'
    # Whether it is a process of this machine, which is alive; other machines' cannot be told.
    is_alive_here: bool


def _holder(lease: Lease) -> _Holder | None:
    """Who holds a lease; None where it is free.

    A lease that is cut off or damaged holds for EXPIRY, by an unknown process.
    """
    state = lease.read()
    if state is None:
        return None
    age = state.now - state.heartbeat
    try:
        description = parse_json(state.content)
        check(description, {'host': str, 'pid': int, 'expiry': float})
    except ValueError:
        return _Holder('an unknown process', False) if age <= EXPIRY else None
    if age > description['expiry']:
        return None
    is_here = False
    # As `_process` gives them, 'BOOT NAMESPACE PID START': the first two tell machines apart.
    process = str(description.get('process'))
    this_process = _process(os.getpid())
    if this_process is not None and process.split()[:2] == this_process.split()[:2]:
        is_here = True
        if _process(description['pid']) != process:
            return None  # it has ended
    return _Holder(f'process {description["pid"]} on {description["host"]}', is_here)


def _process(pid: int) -> str | None:
    """A live process as 'BOOT NAMESPACE PID START', which is unique; None without /proc."""
    try:
        boot = Path('/proc/sys/kernel/random/boot_id').read_text().strip()
        namespace = os.stat('/proc/self/ns/pid').st_ino
        status = Path(f'/proc/{pid}/stat').read_text()
    except OSError:
        return None
    # '12 (name) S 1 12 ...', where the name may have spaces and parentheses.
    state, *fields = status.rpartition(')')[2].split()
    is_dead = state in 'ZX'  # a zombie, which its parent has not waited for
    return None if is_dead else f'{boot} {namespace} {pid} {fields[_START_FIELD]}'


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[Callable[[], bool]]:
    """Holds an exclusive lock on the file `path`; yields a function: whether the lock is lost.

    On a file system it is never lost, and the kernel frees it when the holder dies. In a bucket it
    is a lease: without `wait`, too, a caller waits for its expiry, until the holder shows a
    heartbeat. BlockingIOError names a holder that is not waited for; ConfigError where the
    directory cannot be written, or its file system has no locks.
    """
    if buckets.is_url(path):
        with _lock_in_bucket(path, wait) as lease:
            yield lambda: lease.lost
        return
    with contextlib.ExitStack() as exits:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = exits.enter_context(open(path, 'a+', encoding='utf-8', opener=in_place))
            operation = fcntl.LOCK_EX
            if not wait:
                operation |= fcntl.LOCK_NB  # BlockingIOError where another process holds it
            fcntl.flock(file, operation)
        except BlockingIOError as error:
            raise BlockingIOError(_name_in(file) or 'another process') from error
        except OSError as error:
            raise ConfigError(
                f'{path.parent} cannot be written ({error.strerror}); give a directory that this '
                'user can write to, as workdir for results or as data_dir or QKATTN_DATA for data'
            ) from error
        if not wait:  # others do not wait either, and name the holder
            with contextlib.suppress(OSError):  # a full disk takes no name
                file.truncate(0)
                holder = f'process {os.getpid()} on {socket.gethostname()}\n'
                os.write(file.fileno(), holder.encode())
        yield lambda: False


def _name_in(file: TextIO) -> str:
    """The holder that a lock file names, '' without one."""
    file.seek(0)
    try:
        return file.read(_NAME_LENGTH).strip()
    except UnicodeDecodeError:
        return ''


def _lock_in_bucket(path: Path, wait: bool) -> Lease:
    """The lease of a lock in a bucket, once it is free.

    Without `wait`, BlockingIOError once the holder is known to live: it is a process of this
    machine, or its lease was renewed since this process began to wait.
    """
    deadline = seconds() + EXPIRY
    has_told = False
    while True:
        lease = acquire(path.parent, path.name)
        if lease is not None:
            return lease
        holder = _holder(_lease(path.parent, path.name))
        if holder is None:  # it was freed in between
            continue
        if not wait:
            if holder.is_alive_here or seconds() > deadline:
                raise BlockingIOError(holder.name)
            if not has_told:
                log.warning('%s is held by %s; waiting until it counts as dead', path, holder.name)
                has_told = True
        time.sleep(_POLL)
