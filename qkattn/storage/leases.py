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
from typing import TextIO

from qkattn.config.paths import open_regular
from qkattn.errors import ConfigError
from qkattn.jobs.signals import exit_hooks, no_interrupt
from qkattn.storage import buckets
from qkattn.storage.files import below, disk_errors, in_place
from qkattn.storage.records import check, parse_json

EXPIRY = 180.0  # seconds; longer than a network file system stalls, shorter than most runs
_BEATS = 8  # per expiry; the holder gives up one heartbeat before its lease expires
_NAME_LENGTH = 1000  # characters that are read of a lock file
_CLOCK = getattr(time, 'CLOCK_BOOTTIME', time.CLOCK_MONOTONIC)  # the former also counts suspension

log = logging.getLogger(__name__)


def seconds() -> float:
    """Time on a clock that nobody sets, for differences between two events of this machine."""
    return time.clock_gettime(_CLOCK)


class Lease:
    """The right to train a run, once `acquire` returned it; a context manager that frees it.

    A thread renews it until `release`. Subclasses have `read` (content, time of the last heartbeat,
    time now), `take` (FileExistsError if another was faster) and `renew` (whether it is the same).
    """

    read: Callable[[], tuple[bytes, float, float] | None]
    take: Callable[[], None]
    renew: Callable[[], bool]
    free: Callable[[], None]

    def start(self) -> None:
        """Takes the lease and begins to renew it."""
        about = {
            'host': socket.gethostname(),
            'process': _process(os.getpid()),
            'pid': os.getpid(),
            'started': time.time_ns(),  # no two leases are equal
            'expiry': EXPIRY,
        }
        self._content = json.dumps(about).encode()
        self._beaten = seconds()
        self._lost = False
        self.take()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, daemon=True)
        self._thread.start()
        exit_hooks.append(self.release)

    @property
    def lost(self) -> bool:
        """Whether the run was taken over, or soon may be; stays True, and as `release` left it."""
        age = seconds() - self._beaten
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
        while not self._released.wait(EXPIRY / _BEATS) and not self.lost:
            start = seconds()
            # A failed heartbeat is retried at the next interval; `lost` keeps the time.
            with contextlib.suppress(Exception):
                if not self.renew():
                    self._lost = True
                elif not self.lost:  # a heartbeat that came too late does not renew the lease
                    self._beaten = start


class _File(Lease):
    """The newest lease of a run on a file system."""

    def __init__(self, directory: Path, run: str):
        below(directory.parent, directory.name).mkdir(parents=True, exist_ok=True)
        self._prefix = directory / run
        numbers = (name.removeprefix(f'{run}.') for name in os.listdir(directory))
        self._number = max((int(number) for number in numbers if number.isdecimal()), default=-1)

    def path(self, after: int = 0) -> str:
        return f'{self._prefix}.{self._number + after}'

    def read(self) -> tuple[bytes, float, float] | None:
        # Before the lease is read, so that a heartbeat in between can only lower its age.
        with tempfile.TemporaryFile(dir=self._prefix.parent) as file:
            now = os.fstat(file.fileno()).st_mtime
        with contextlib.suppress(FileNotFoundError), open_regular(self.path()) as file:
            # Of the open file: NFS answers a plain stat from a cache that may be a minute old.
            return file.read(), os.fstat(file.fileno()).st_mtime, now
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
            return not os.path.exists(self.path(1))
        return False

    def free(self) -> None:
        os.utime(self.path(), (0, 0), follow_symlinks=False)


class _Object(Lease):
    """The lease of a run in a bucket."""

    def __init__(self, directory: Path, run: str):
        self._path = directory / run
        self._generation = 0

    def read(self) -> tuple[bytes, float, float] | None:
        now = buckets.now(self._path)
        self._generation = 0
        with contextlib.suppress(FileNotFoundError):
            content, self._generation, updated = buckets.read(self._path)
            return content, updated, now
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
    return (_Object if buckets.is_url(directory) else _File)(directory, run)


def acquire(directory: Path, run: str) -> Lease | None:
    """The lease of a run; None if another process holds it. DiskError where it cannot be written.

    Check afterwards whether the run is finished: its last holder may just have finished it.
    """
    with disk_errors(directory):
        lease = _lease(directory, run)
        while _holder(lease) is None:
            # If another process was faster, or the listing was stale, that lease is checked, too.
            with contextlib.suppress(FileExistsError), no_interrupt:
                lease.start()
                return lease
    return None


def holders(directory: Path) -> dict[str, str]:
    """The holder of each held run, as 'process 12 on host'."""
    paths = directory.iterdir() if directory.exists() else ()
    runs = sorted({path.name if buckets.is_url(path) else path.stem for path in paths})
    held = {run: _holder(_lease(directory, run)) for run in runs}
    return {run: holder[0] for run, holder in held.items() if holder}


def _holder(lease: Lease) -> tuple[str, bool | None] | None:
    """(name, whether it is a live process of this machine, None for another's); None if free."""
    if (current := lease.read()) is None:
        return None
    content, beat, now = current
    name = 'an unknown process'
    alive = None
    expiry = EXPIRY
    with contextlib.suppress(ValueError):  # cut off or damaged
        about = parse_json(content)
        check(about, {'host': str, 'pid': int, 'expiry': float})
        name = f'process {about["pid"]} on {about["host"]}'
        expiry = about['expiry']
        process = str(about.get('process'))
        here = _process(os.getpid())
        if here and process.split()[:2] == here.split()[:2]:
            alive = _process(about['pid']) == process
    return None if now - beat > expiry or alive is False else (name, alive)


def _process(pid: object) -> str | None:
    """Boot, namespace, number and start of a live process: unique; None without /proc."""
    try:
        boot = Path('/proc/sys/kernel/random/boot_id').read_text().strip()
        space = os.stat('/proc/self/ns/pid').st_ino
        state, *fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    except OSError:
        return None
    return None if state in 'ZX' else f'{boot} {space} {pid} {fields[18]}'


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[Callable[[], bool]]:
    """Holds an exclusive lock on the file `path`; yields a function: whether the lock is lost.

    On a file system it is never lost, and the kernel frees it when the holder dies. In a bucket it
    is a lease: without `wait`, too, a caller waits for its expiry, until the holder shows a
    heartbeat. BlockingIOError names a holder that is not waited for; ConfigError where the
    directory cannot be written, or its file system has no locks.
    """
    if buckets.is_url(path):
        with _leased(path, wait) as lease:
            yield lambda: lease.lost
        return
    with contextlib.ExitStack() as exits:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = exits.enter_context(open(path, 'a+', encoding='utf-8', opener=in_place))
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            holder = _name_in(file) or 'another process'
            raise BlockingIOError(holder) from error
        except OSError as error:
            raise ConfigError(
                f'{path.parent} cannot be written ({error.strerror}); give a directory that this '
                'user can write to, as workdir for results or as data_dir or QKATTN_DATA for data'
            ) from error
        if not wait:  # others do not wait either, and say who holds it
            with contextlib.suppress(OSError):  # a full disk takes no name
                file.truncate(0)
                holder = f'process {os.getpid()} on {socket.gethostname()}\n'
                os.write(file.fileno(), holder.encode())
        yield lambda: False


def _name_in(file: TextIO) -> str:
    """The holder that a lock file names, '' without one."""
    file.seek(0)
    with contextlib.suppress(UnicodeDecodeError):
        return file.read(_NAME_LENGTH).strip()
    return ''


def _leased(path: Path, wait: bool) -> Lease:
    """The lease of a lock in a bucket, once it is free."""
    until = seconds() + EXPIRY
    told = False
    while (lease := acquire(path.parent, path.name)) is None:
        name, alive = _holder(_lease(path.parent, path.name)) or ('', None)
        if not wait and (alive or seconds() > until):
            raise BlockingIOError(name)
        if not wait and not told:
            log.warning('%s is held by %s; waiting until it counts as dead', path, name)
            told = True
        time.sleep(0.5)
    return lease
