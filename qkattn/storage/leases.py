"""Leases and locks: which of many processes and hosts on shared storage works on what.

A lease is the right to train a run. It is stored as JSON {host, process, pid, started, expiry}. A
lease is free once nobody has renewed it for `expiry` seconds. It is also free once its holder has
ended, which only processes on the holder's machine can tell.

    leases/RUN.N   on a file system. The file with the highest N = 0, 1, ... is in force. Its holder
                   renews it by touching it. A process takes the run by creating the file N + 1,
                   which fails if another process has created it.
    leases/RUN     in a bucket. Each write names the generation of the object that it replaces, and
                   fails if another process has written in between.

The storage's clock measures the age of a lease. The holder measures it by a monotonic clock, and
gives up before others may take over. So at most one process sees its lease as not lost, unless the
clock of a file system jumps by more than expiry / 8.
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
from qkattn.storage.files import disk_errors, in_place, join_without_links
from qkattn.storage.records import check, parse_json

# Seconds after which a lease that was not renewed is free. Network file systems stall for less, and
# most runs last longer.
EXPIRY = 180.0
# Heartbeats per expiry. The holder gives up one heartbeat before its lease expires.
_BEATS = 8
# Seconds after which a process that waits for a lock tries again.
_POLL = 0.5
# Most characters that are read from a lock file.
_NAME_LENGTH = 1000
# /proc/PID/stat lists the process's name, its state, and then fields such as its start time. This
# is the index of the start time among these fields.
_START_FIELD = 18
# CLOCK_BOOTTIME also counts the time for which the machine is suspended.
_CLOCK = getattr(time, 'CLOCK_BOOTTIME', time.CLOCK_MONOTONIC)

log = logging.getLogger(__name__)


def seconds() -> float:
    """Returns the time on a clock that nobody sets, to compare two events of this machine."""
    return time.clock_gettime(_CLOCK)


class _State(NamedTuple):
    """A lease as it is stored, with times in seconds on the clock of the storage."""

    content: bytes
    heartbeat: float  # when the lease was last renewed
    now: float  # when the lease was read


class Lease:
    """The right to train a run; a context manager that frees the run when its block ends.

    `acquire` returns a lease that this process holds. A thread renews it until `release`. The
    subclasses say how a lease is stored.
    """

    # Reads the lease in force; None if there is none.
    read: Callable[[], _State | None]
    # Stores the lease of this process. Raises FileExistsError if another process was faster.
    take: Callable[[], None]
    # Writes a heartbeat. Returns whether this process still holds the lease.
    renew: Callable[[], bool]
    # Frees the run for others.
    free: Callable[[], None]

    def start(self) -> None:
        """Takes the lease, and starts the thread that renews it."""
        # Take the lease: store who holds it.
        description = {
            'host': socket.gethostname(),
            'process': _identify_process(os.getpid()),
            'pid': os.getpid(),
            'started': time.time_ns(),  # so that no two leases are equal
            'expiry': EXPIRY,
        }
        self._content = json.dumps(description).encode()
        self._last_heartbeat = seconds()
        self._lost = False
        self.take()

        # Renew it until it is released, at the latest when the process ends.
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, daemon=True)
        self._thread.start()
        exit_hooks.append(self.release)

    @property
    def lost(self) -> bool:
        """Whether another process has taken the run over, or soon may.

        A lost lease stays lost. The value does not change after `release`.
        """
        age = seconds() - self._last_heartbeat
        longest_age = EXPIRY * (_BEATS - 1) / _BEATS
        if not self._released.is_set() and age > longest_age:
            self._lost = True
        return self._lost

    def release(self) -> None:
        """Stops the heartbeat, and frees the run if the storage can be written."""
        with no_interrupt:
            if self._released.is_set():
                return
            # From now on, the property `lost` keeps the value that it has now.
            self._lost = self.lost
            self._released.set()
            exit_hooks.remove(self.release)  # `start` has added it, to free the run at an exit

            # Wait for the thread: a heartbeat after `free` would take the run again.
            self._thread.join()
            # If the lease cannot be freed now, it expires.
            with contextlib.suppress(OSError, ConfigError):
                self.free()

    def __enter__(self) -> 'Lease':
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def _keep_alive(self) -> None:
        """Renews the lease until it is released or lost; runs in a thread of its own."""
        interval = EXPIRY / _BEATS
        while not self._released.wait(interval) and not self.lost:
            # Renewing may take long. The lease counts as renewed when the renewal began, so that it
            # never counts as younger than it is.
            start = seconds()
            # If renewing fails, the next round tries again, until the lease is too old.
            with contextlib.suppress(Exception):
                is_still_held = self.renew()
                if not is_still_held:
                    self._lost = True
                elif not self.lost:  # it may have become too old in the meantime
                    self._last_heartbeat = start


class _File(Lease):
    """The newest lease of a run on a file system: the file RUN.N with the highest N."""

    def __init__(self, directory: Path, run: str):
        """Finds the newest lease of a run in leases/, and creates this directory if needed."""
        join_without_links(directory.parent, directory.name).mkdir(parents=True, exist_ok=True)
        self._prefix = directory / run
        self._number = -1  # stays -1 if the run has no lease
        for name in os.listdir(directory):
            number = name.removeprefix(f'{run}.')
            if number.isdecimal():
                self._number = max(self._number, int(number))

    def path(self, after: int = 0) -> str:
        """Returns the path of the lease, or with `after=1` of the next lease."""
        return f'{self._prefix}.{self._number + after}'

    def read(self) -> _State | None:
        """Reads the content of the lease, when it was last renewed, and what time it is now.

        Both times are on the clock of the file system. Returns None if there is no lease.
        """
        # The modification time of a file that is created now is the time now. It is read before the
        # lease: if the lease is renewed in between, it looks younger than it is, not older.
        with tempfile.TemporaryFile(dir=self._prefix.parent) as probe:
            now = os.fstat(probe.fileno()).st_mtime
        try:
            with open_regular(self.path()) as file:
                content = file.read()
                # Renewing sets the modification time. fstat of the open file gives it. stat of the
                # path may come from a cache of NFS that is a minute old.
                heartbeat = os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return None
        return _State(content, heartbeat, now)

    def take(self) -> None:
        """Creates the next lease; raises FileExistsError if another process has created it."""
        self._number += 1
        with open(self.path(), 'xb', buffering=0) as file:
            try:
                file.write(self._content)
            except OSError:
                self.free()  # so that nobody waits until the empty lease expires
                raise

    def renew(self) -> bool:
        try:
            os.utime(self.path(), follow_symlinks=False)
        except FileNotFoundError:
            return False
        is_taken_over = os.path.exists(self.path(after=1))
        return not is_taken_over

    def free(self) -> None:
        # A lease whose last heartbeat was in 1970 has expired.
        os.utime(self.path(), (0, 0), follow_symlinks=False)


class _Object(Lease):
    """The lease of a run in a bucket: an object that each heartbeat writes again."""

    def __init__(self, directory: Path, run: str):
        self._path = directory / run
        # The generation of the object that this process read or wrote last; 0 if there was none.
        self._generation = 0

    def read(self) -> _State | None:
        """Reads the lease, and remembers its generation for `take`."""
        now = buckets.now(self._path)
        self._generation = 0
        try:
            stored = buckets.read(self._path)
        except FileNotFoundError:
            return None
        self._generation = stored.generation
        return _State(stored.content, stored.updated, now)

    def take(self) -> None:
        stored = buckets.write(self._path, self._content, self._generation)
        self._generation = stored.generation

    def renew(self) -> bool:
        try:
            self.take()
        except FileExistsError:
            return False
        return True

    def free(self) -> None:
        buckets.delete(self._path, self._generation)


def _stored_lease(directory: Path, run: str) -> Lease:
    """Returns the lease of a run as it is stored; this process does not hold it."""
    if buckets.is_url(directory):
        return _Object(directory, run)
    return _File(directory, run)


def acquire(directory: Path, run: str) -> Lease | None:
    """Takes the lease of a run, and returns it; returns None if another process holds it.

    The caller checks afterwards whether the run still needs training: the last holder may have
    finished it. Raises DiskError if the lease cannot be written.
    """
    with disk_errors(directory):
        lease = _stored_lease(directory, run)
        while True:
            is_free = _find_holder(lease) is None
            if not is_free:
                return None
            try:
                with no_interrupt:
                    lease.start()
                    return lease
            except FileExistsError:
                # Another process was faster, or the listing of the directory was out of date. Look
                # again at the lease that is there.
                continue


def holders(directory: Path) -> dict[str, str]:
    """Returns the holder of each run that is not free: {run: 'process 12 on host'}.

    `directory` is the directory leases/ of a study.
    """
    if not directory.exists():
        return {}

    # In a bucket, the lease of a run has the name of the run. On a disk, it is a file RUN.N.
    runs = set()
    for path in directory.iterdir():
        if buckets.is_url(path):
            runs.add(path.name)
        else:
            runs.add(path.stem)

    holder_by_run = {}
    for run in sorted(runs):
        holder = _find_holder(_stored_lease(directory, run))
        if holder is not None:
            holder_by_run[run] = holder.name
    return holder_by_run


@dataclasses.dataclass(frozen=True)
class _Holder:
    """The process that holds a lease."""

    name: str  # 'process 12 on host'
    # True for a live process of this machine. False for other machines, where nobody can tell.
    is_alive_here: bool


def _find_holder(lease: Lease) -> _Holder | None:
    """Returns the process that holds a lease, or None if the lease is free.

    A lease is free in three cases: it does not exist; it was not renewed in time; or its holder was
    a process of this machine that has ended. If the content of a lease cannot be read, an unknown
    process holds it until it is EXPIRY seconds old.
    """
    # No lease, or one that was not renewed in time.
    state = lease.read()
    if state is None:
        return None
    age = state.now - state.heartbeat
    try:
        description = parse_json(state.content)
        check(description, {'host': str, 'pid': int, 'expiry': float})
    except ValueError:
        if age > EXPIRY:
            return None
        return _Holder('an unknown process', is_alive_here=False)
    if age > description['expiry']:
        return None

    # Another machine, where nobody can tell whether the holder has ended.
    pid = description['pid']
    name = f'process {pid} on {description["host"]}'
    process = str(description.get('process'))
    if not _is_of_this_machine(process):
        return _Holder(name, is_alive_here=False)

    # This machine. If the holder has ended, its id belongs to no process, or to one that started
    # later, which `_identify_process` tells apart.
    is_alive = _identify_process(pid) == process
    return _Holder(name, is_alive_here=True) if is_alive else None


def _is_of_this_machine(process: str) -> bool:
    """Whether the text 'BOOT NAMESPACE PID START' of a process was made on this machine."""
    this_process = _identify_process(os.getpid())
    if this_process is None:
        return False
    # Processes of one machine have the same BOOT and NAMESPACE.
    return process.split()[:2] == this_process.split()[:2]


def _identify_process(pid: int) -> str | None:
    """Returns a unique text 'BOOT NAMESPACE PID START' for a live process of this machine.

        BOOT         boot ID of the machine
        NAMESPACE    PID namespace, which differs between containers
        START        start time, which differs between processes that reuse a PID

    Returns None if the process has ended or the system has no /proc.
    """
    try:
        boot = Path('/proc/sys/kernel/random/boot_id').read_text().strip()
        namespace = os.stat('/proc/self/ns/pid').st_ino
        status = Path(f'/proc/{pid}/stat').read_text()
    except OSError:
        return None

    # The file reads '12 (name) S 1 12 ...'. The name may contain spaces and parentheses.
    text_after_name = status.rpartition(')')[2]
    state, *fields_after_state = text_after_name.split()
    is_zombie_or_dead = state in ('Z', 'X')
    if is_zombie_or_dead:
        return None
    start = fields_after_state[_START_FIELD]
    return f'{boot} {namespace} {pid} {start}'


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[Callable[[], bool]]:
    """Holds an exclusive lock on the file `path` while the block runs.

    Yields a function that returns whether the lock was lost. On a file system, this never happens.
    In a bucket, the lock is a lease: see `Lease.lost`.

    Args:
      path: the lock file, which is created if needed.
      wait: whether to wait while another process holds the lock.

    Raises:
      BlockingIOError: without `wait`, a live process holds the lock; the text names the process. In
        a bucket this may take EXPIRY seconds, because the lease of a dead process on another
        machine has to expire first.
      ConfigError: the directory cannot be written, or its file system has no locks.
    """
    if buckets.is_url(path):
        with _lock_in_bucket(path, wait) as lease:
            yield lambda: lease.lost
        return
    with _file_lock(path, wait):
        yield lambda: False


@contextlib.contextmanager
def _file_lock(path: Path, wait: bool) -> Iterator[None]:
    """Holds a lock on a file of a file system. If the process dies, the kernel frees the lock.

    A process that locks without `wait` writes its name into the file: 'process 12 on host'. The
    error of another process that wants the lock contains this name. The arguments and errors are
    those of `locked`.
    """
    with contextlib.ExitStack() as exits:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = exits.enter_context(open(path, 'a+', encoding='utf-8', opener=in_place))
            if wait:
                fcntl.flock(file, fcntl.LOCK_EX)
            else:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:  # another process holds the lock
            raise BlockingIOError(_read_name(file) or 'another process') from error
        except OSError as error:
            raise ConfigError(
                f'{path.parent} cannot be written ({error.strerror}); give a directory that this '
                'user can write to, as workdir for results or as data_dir or QKATTN_DATA for data'
            ) from error

        if not wait:
            # On a full disk this fails. The file is locked all the same, but names nobody.
            with contextlib.suppress(OSError):
                file.truncate(0)
                name = f'process {os.getpid()} on {socket.gethostname()}\n'
                os.write(file.fileno(), name.encode())
        yield


def _read_name(file: TextIO) -> str:
    """Returns the name of the process that a lock file contains, or '' if it contains none."""
    file.seek(0)
    try:
        return file.read(_NAME_LENGTH).strip()
    except UnicodeDecodeError:
        return ''


def _lock_in_bucket(path: Path, wait: bool) -> Lease:
    """Takes a lock in a bucket, and returns its lease.

    With `wait`, it waits until the lock is free. Without `wait`, it raises BlockingIOError once it
    knows that the holder is alive. For a process of this machine, it knows at once. For a process
    of another machine it waits EXPIRY seconds: if that process is dead, its lease expires by then.
    """
    deadline = seconds() + EXPIRY
    has_warned = False
    while True:
        lease = acquire(path.parent, path.name)
        if lease is not None:
            return lease
        holder = _find_holder(_stored_lease(path.parent, path.name))
        if holder is None:  # the holder freed the lock in between
            continue

        if not wait:
            # A dead holder's lease would have expired by the deadline.
            is_past_deadline = seconds() > deadline
            if holder.is_alive_here or is_past_deadline:
                raise BlockingIOError(holder.name)
            if not has_warned:
                log.warning('%s is held by %s; waiting until it counts as dead', path, holder.name)
                has_warned = True
        time.sleep(_POLL)
