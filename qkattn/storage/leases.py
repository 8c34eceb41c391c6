"""Leases and locks on storage that many processes and hosts share.

A lease is the right to train a run, stored as JSON {host, process, pid, started, expiry}. A lease
is free if it was not renewed for `expiry` seconds. A lease is also free if its holder has ended,
which only processes on the holder's machine can see.

    leases/RUN.N   On a file system, the file with the highest N = 0, 1, ... counts. The holder
                   renews the lease by touching the file. Another process takes the lease over by
                   creating the file N + 1, which only one process can do.
    leases/RUN     In a bucket, the holder renews the lease by writing the object. A write fails if
                   another process has written the object in between.

Other processes measure the age of a lease by the storage's clock. The holder uses its monotonic
clock, and gives up expiry / 8 seconds before another process may take the lease over. So at most
one process holds a lease, even if the file system's clock jumps by up to expiry / 8 seconds.
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

# Seconds after which a lease that was not renewed is free. Longer than network file systems stall.
EXPIRY = 180.0
# Heartbeats per EXPIRY. The holder gives up one heartbeat before its lease expires.
_BEATS = 8
# Seconds between attempts to take a lock.
_POLL = 0.5
# Maximum number of characters read from a lock file.
_NAME_LENGTH = 1000
# Index of the start time among the fields of /proc/PID/stat that follow the process state.
_START_FIELD = 18
# CLOCK_BOOTTIME includes the time for which the machine is suspended.
_CLOCK = getattr(time, 'CLOCK_BOOTTIME', time.CLOCK_MONOTONIC)

log = logging.getLogger(__name__)


def seconds() -> float:
    """Returns the time on this machine's monotonic clock."""
    return time.clock_gettime(_CLOCK)


class _State(NamedTuple):
    """A stored lease, with times in seconds on the storage's clock."""

    content: bytes
    heartbeat: float  # when the lease was last renewed
    now: float  # when the lease was read


class Lease:
    """The right to train a run, from `acquire`; a context manager that releases the lease.

    A background thread renews the lease until it is released. Subclasses define the four methods
    that access the storage.
    """

    # Returns the stored lease, or None if the run has no lease.
    read: Callable[[], _State | None]
    # Stores the lease of this process; raises FileExistsError if another process was faster.
    take: Callable[[], None]
    # Writes a heartbeat; returns whether this process still holds the lease.
    renew: Callable[[], bool]
    # Marks the lease as free.
    free: Callable[[], None]

    def start(self) -> None:
        """Takes the lease, and starts the thread that renews it."""
        description = {
            'host': socket.gethostname(),
            'process': _identify_process(os.getpid()),
            'pid': os.getpid(),
            'started': time.time_ns(),  # makes every lease unique
            'expiry': EXPIRY,
        }
        self._content = json.dumps(description).encode()
        self._last_heartbeat = seconds()
        self._was_lost = False
        self.take()

        self._released = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, daemon=True)
        self._thread.start()
        exit_hooks.append(self.release)  # frees the run when the process exits

    @property
    def lost(self) -> bool:
        """Whether another process has taken the run over, or soon may.

        A lost lease stays lost. After `release`, the value is constant.
        """
        age = seconds() - self._last_heartbeat
        max_age = EXPIRY * (_BEATS - 1) / _BEATS  # one heartbeat before the lease expires
        if age > max_age and not self._released.is_set():
            self._was_lost = True
        return self._was_lost

    def release(self) -> None:
        """Stops the heartbeat, and frees the run if the storage is writable."""
        with no_interrupt:
            if self._released.is_set():
                return
            # From here on, `lost` is constant and no longer depends on the time.
            self._was_lost = self.lost
            self._released.set()
            exit_hooks.remove(self.release)

            self._thread.join()  # a heartbeat after `free` would take the run again
            # A lease that cannot be freed expires.
            with contextlib.suppress(OSError, ConfigError):
                self.free()

    def __enter__(self) -> 'Lease':
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def _keep_alive(self) -> None:
        """Renews the lease until it is released or lost; runs in the background thread."""
        interval = EXPIRY / _BEATS
        while not self._released.wait(interval):
            if self.lost:
                return
            # Renewing may take long. Its start is used, so that the age is never underestimated.
            renewal_start = seconds()
            # A failed renewal is retried in the next round.
            with contextlib.suppress(Exception):
                is_still_held = self.renew()
                if not is_still_held:
                    self._was_lost = True
                elif not self.lost:  # the lease may have become too old during the renewal
                    self._last_heartbeat = renewal_start


class _File(Lease):
    """The newest lease of a run on a file system: the file RUN.N with the highest N."""

    def __init__(self, directory: Path, run: str):
        """Finds the newest lease in `directory`, which is created if needed."""
        join_without_links(directory.parent, directory.name).mkdir(parents=True, exist_ok=True)
        self._prefix = directory / run
        self._number = -1  # N of the newest lease; -1 if the run has no lease
        for name in os.listdir(directory):
            suffix = name.removeprefix(f'{run}.')
            if suffix.isdecimal():
                self._number = max(self._number, int(suffix))

    def path(self) -> str:
        return f'{self._prefix}.{self._number}'

    def read(self) -> _State | None:
        # A new file's modification time is the file system's current time. It is read before the
        # lease, so that a renewal in between makes the lease look younger, not older.
        with tempfile.TemporaryFile(dir=self._prefix.parent) as probe:
            now = os.fstat(probe.fileno()).st_mtime
        try:
            with open_regular(self.path()) as file:
                content = file.read()
                # A renewal sets the modification time. `os.stat` of the path could return a
                # modification time that NFS cached a minute ago.
                heartbeat = os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return None
        return _State(content, heartbeat, now)

    def take(self) -> None:
        self._number += 1
        with open(self.path(), 'xb', buffering=0) as file:
            try:
                file.write(self._content)
            except OSError:
                self.free()  # otherwise other processes wait until the empty lease expires
                raise

    def renew(self) -> bool:
        try:
            os.utime(self.path(), follow_symlinks=False)
        except FileNotFoundError:
            return False
        next_lease = f'{self._prefix}.{self._number + 1}'
        is_taken_over = os.path.exists(next_lease)
        return not is_taken_over

    def free(self) -> None:
        # The lease expires at once if its last heartbeat was in 1970.
        os.utime(self.path(), (0, 0), follow_symlinks=False)


class _Object(Lease):
    """The lease of a run in a bucket: an object that each heartbeat writes again."""

    def __init__(self, directory: Path, run: str):
        self._path = directory / run
        # Generation of the object when this process last accessed it; 0 if the object was missing.
        self._generation = 0

    def read(self) -> _State | None:
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
    """Returns the stored lease of a run, which this process does not hold."""
    if buckets.is_url(directory):
        return _Object(directory, run)
    return _File(directory, run)


def acquire(directory: Path, run: str) -> Lease | None:
    """Takes the lease of a run, and returns it; returns None if another process holds it.

    Afterwards, check whether the run still needs training: the last holder may have finished it.

    Args:
        directory: The directory of the study's leases.
        run: Name of the run.

    Raises:
        DiskError: The lease cannot be written.
    """
    with disk_errors(directory):
        lease = _stored_lease(directory, run)
        while True:
            holder = _find_holder(lease)
            if holder is not None:
                return None
            try:
                with no_interrupt:  # a signal ends the process before or after, not in between
                    lease.start()
                    return lease
            except FileExistsError:
                # Another process was faster, or the directory listing was outdated. Try again.
                continue


def holders(directory: Path) -> dict[str, str]:
    """Returns the holder of each run that is not free, such as {'RUN': 'process 12 on host'}.

    `directory` is the directory of the study's leases.
    """
    if not directory.exists():
        return {}

    runs = set()
    for path in directory.iterdir():
        if buckets.is_url(path):
            runs.add(path.name)  # the object RUN
        else:
            runs.add(path.stem)  # the file RUN.N

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
    # Whether the holder is a live process of this machine. False on any other machine, where a
    # process may be alive or dead.
    is_alive_here: bool


def _find_holder(lease: Lease) -> _Holder | None:
    """Returns the process that holds a lease, or None if the lease is free.

    A lease is free if it does not exist, if it has expired, or if its holder was a process of this
    machine that has ended. An unreadable lease expires after EXPIRY seconds.
    """
    state = lease.read()
    if state is None:
        return None
    age = state.now - state.heartbeat  # seconds since the last renewal
    try:
        description = parse_json(state.content)
        check(description, {'host': str, 'pid': int, 'expiry': float})
    except ValueError:  # the lease is unreadable
        is_expired = age > EXPIRY
        return None if is_expired else _Holder('an unknown process', is_alive_here=False)
    if age > description['expiry']:
        return None

    pid = description['pid']
    name = f'process {pid} on {description["host"]}'
    holder_identity = str(description.get('process'))
    if not _is_of_this_machine(holder_identity):
        return _Holder(name, is_alive_here=False)

    # If the holder has ended, no process or a later process, with another identity, has this PID.
    present_identity = _identify_process(pid)
    has_ended = present_identity != holder_identity
    return None if has_ended else _Holder(name, is_alive_here=True)


def _is_of_this_machine(identity: str) -> bool:
    """Whether a process ran on this machine; `identity` is from `_identify_process`."""
    own_identity = _identify_process(os.getpid())
    if own_identity is None:
        return False
    boot_and_namespace = identity.split()[:2]
    own_boot_and_namespace = own_identity.split()[:2]
    return boot_and_namespace == own_boot_and_namespace


def _identify_process(pid: int) -> str | None:
    """Returns a unique identity 'BOOT NAMESPACE PID START' of a live process of this machine.

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

    # The file contains '12 (name) S 1 12 ...'. The name may contain spaces and parentheses.
    _, _, text_after_name = status.rpartition(')')
    state, *fields_after_state = text_after_name.split()
    is_zombie_or_dead = state in ('Z', 'X')
    if is_zombie_or_dead:
        return None
    start = fields_after_state[_START_FIELD]
    return f'{boot} {namespace} {pid} {start}'


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[Callable[[], bool]]:
    """Holds an exclusive lock on the file `path` while the block runs.

    Args:
        path: The lock file, which is created if needed.
        wait: Whether to wait while another process holds the lock.

    Yields:
        A function that returns whether the lock was lost, which can only happen in a bucket.

    Raises:
        BlockingIOError: `wait` is false and a live process holds the lock. The message is the name
            of the process. In a bucket, finding out whether the process is alive may take EXPIRY
            seconds.
        ConfigError: The directory is not writable, or its file system has no locks.
    """
    if buckets.is_url(path):
        with _lock_in_bucket(path, wait) as lease:
            yield lambda: lease.lost
        return
    with _file_lock(path, wait):
        yield lambda: False


@contextlib.contextmanager
def _file_lock(path: Path, wait: bool) -> Iterator[None]:
    """Implements `locked` on a file system; the kernel frees the lock if the process dies.

    Without `wait`, the holder writes its name 'process 12 on host' into the lock file.
    """
    with contextlib.ExitStack() as exits:  # closes the file, which frees the lock, at the end
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = exits.enter_context(open(path, 'a+', encoding='utf-8', opener=in_place))
            operation = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
            fcntl.flock(file, operation)
        except BlockingIOError as error:  # another process holds the lock
            raise BlockingIOError(_read_name(file) or 'another process') from error
        except OSError as error:
            raise ConfigError(
                f'{path.parent} cannot be written ({error.strerror}); give a directory that this '
                'user can write to, as workdir for results or as data_dir or QKATTN_DATA for data'
            ) from error

        if not wait:
            # On a full disk, the lock file does not name its holder.
            with contextlib.suppress(OSError):
                file.truncate(0)
                name = f'process {os.getpid()} on {socket.gethostname()}\n'
                os.write(file.fileno(), name.encode())
        yield


def _read_name(file: TextIO) -> str:
    """Reads the holder's name from a lock file; '' if the file has no valid name."""
    file.seek(0)
    try:
        return file.read(_NAME_LENGTH).strip()
    except UnicodeDecodeError:
        return ''


def _lock_in_bucket(path: Path, wait: bool) -> Lease:
    """Takes a lock in a bucket, and returns its lease.

    With `wait`, waits until the lock is free. Without `wait`, raises BlockingIOError if the holder
    is alive. A holder on another machine counts as alive if its lease has not expired after EXPIRY
    seconds.
    """
    deadline = seconds() + EXPIRY
    has_warned = False
    while True:
        lease = acquire(path.parent, path.name)
        if lease is not None:
            return lease
        holder = _find_holder(_stored_lease(path.parent, path.name))
        if holder is None:  # the lock was freed in between
            continue

        if not wait:
            # The lease of a dead holder would have expired by the deadline.
            counts_as_alive = holder.is_alive_here or seconds() > deadline
            if counts_as_alive:
                raise BlockingIOError(holder.name)
            if not has_warned:
                log.warning('%s is held by %s; waiting until it counts as dead', path, holder.name)
                has_warned = True
        time.sleep(_POLL)
