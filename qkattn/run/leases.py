"""Which process works on which run: claims of many processes and hosts in one shared directory.

    claims/CELL.N   a run's claim number N = 0, 1, 2, ...: JSON {host, pid, started, expiry}

The highest number counts. The holder touches its file again and again; a file that was not touched
for `expiry` seconds is expired, and whoever creates the next number has the run. Exclusive
creation lets exactly one process succeed, and nothing is renamed or deleted, so there is no race to
lose. The files of finished runs stay: each is about a hundred bytes.

Ages compare times that the file system stamped (a claim's against that of a file made for the
purpose), because the clocks of hosts differ. A holder measures its own silence with a clock that
only runs forward, and gives up before anybody else may take over; so at most one process at a time
sees its claim as not lost. Where a file system's clock jumps, or is each host's own and these
differ by more than expiry / 8, two may see it so until the next heartbeat.

A claim says that its process lives, not that its work gets ahead.
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
from typing import Any

from qkattn.errors import ConfigError, RunDirectoryError
from qkattn.run.files import make_directory

EXPIRY = 300.0
"""Seconds: longer than a network file system hesitates, shorter than a run usually takes."""

_BEATS = 8
"""Heartbeats per expiry; the holder gives up one beat before its claim expires."""

# Where there is a clock that also counts the time a suspended machine sleeps, it is this one.
_CLOCK = getattr(time, 'CLOCK_BOOTTIME', time.CLOCK_MONOTONIC)


class Claim:
    """A run held by this process; made by `claim`, a context manager.

    A daemon thread keeps it alive until `release`. A child made by os.fork holds nothing: there
    `lost` is True and `release` does nothing.
    """

    def __init__(self, path: Path, content: bytes, expiry: float, created: float):
        self.path = path
        """The claim's file."""
        self._content = content
        self._pid = os.getpid()
        self._patience = expiry * (_BEATS - 1) / _BEATS
        self._beaten = created
        self._lost = False
        self._released = threading.Event()
        self._thread = threading.Thread(
            target=self._keep_alive, args=(expiry / _BEATS,), name=f'claim {path.name}', daemon=True
        )
        self._thread.start()

    @property
    def lost(self) -> bool:
        """Whether the run is, or may soon be, somebody else's; once True it stays so.

        True when somebody took the run over, when the claim's file vanished or was replaced, and
        when no heartbeat succeeded for 7/8 of the expiry (a paused process, a file system that is
        gone). After `release` it keeps saying what it said then.
        """
        if os.getpid() != self._pid:
            return True
        if not self._released.is_set() and _seconds() - self._beaten > self._patience:
            self._lost = True
        return self._lost

    def release(self) -> None:
        """Frees the run at once and ends the heartbeat; may be called twice.

        Where the file system fails the run becomes free when the claim expires.
        """
        if os.getpid() != self._pid or self._released.is_set():
            return
        self._lost = self.lost
        self._released.set()
        # A heartbeat under way would take back what is written here.
        self._thread.join()
        with contextlib.suppress(OSError):
            if _read(self.path)[1] == self._content:
                os.utime(self.path, (0, 0))

    def __enter__(self) -> 'Claim':
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def _keep_alive(self, interval: float) -> None:
        while not self._released.wait(interval) and not self.lost:
            # What fails is tried again at the next beat; `lost` counts the time.
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
        # Asked after the touch: one that came too late proves nothing.
        if not self.lost:
            self._beaten = start


def claim(directory: Path, run: str, *, expiry: float = EXPIRY) -> Claim | None:
    """Claims a run, unless somebody else holds it.

    Look again whether the run is finished once you hold it: its last holder may have finished it
    in the meantime.

    Args:
      directory: shared by all workers; created where it is missing.
      run: a name without slashes.
      expiry: seconds without a heartbeat after which others may take the run over. A claim that is
        there goes by the expiry that its holder wrote into it.

    Returns:
      The claim; None where the run is held.

    Raises:
      ConfigError: `expiry` is not a positive number.
      RunDirectoryError: `directory` cannot be written.
    """
    if not (math.isfinite(expiry) and expiry > 0):
        raise ConfigError(f'expiry={expiry} must be a positive number of seconds.')
    directory = make_directory(directory)
    content = _content(expiry)
    with _usable(directory):
        number = _highest(directory).get(run, -1)
        while number < 0 or _holder(directory / f'{run}.{number}', expiry) is None:
            number += 1
            path = directory / f'{run}.{number}'
            created = _seconds()
            # Where it is there somebody was faster, or the listing was an old one: look at it too.
            with contextlib.suppress(FileExistsError):
                _create(path, content)
                return Claim(path, content, expiry, created)
    return None


@dataclasses.dataclass(frozen=True)
class Holder:
    """Who holds a run; as text, 'process 12 on host, 35 s ago'.

    Attributes:
      name: 'process 12 on host'; 'an unknown process' where it died before it wrote its name.
      age: seconds since the last heartbeat.
      free_in: seconds until the claim expires if no further heartbeat comes.
    """

    name: str
    age: float
    free_in: float

    def __str__(self) -> str:
        return f'{self.name}, {max(self.age, 0):.0f} s ago'


def holders(directory: Path, *, expiry: float = EXPIRY) -> dict[str, Holder]:
    """Returns who holds which run; free runs are left out.

    Args:
      directory: as given to `claim`; nobody holds anything where there is none.
      expiry: seconds, for claims whose holder died before it wrote its own.

    Raises:
      RunDirectoryError: `directory` cannot be read or written.
    """
    directory = Path(directory)
    if not directory.exists():
        return {}
    with _usable(directory):
        found = {
            run: _holder(directory / f'{run}.{number}', expiry)
            for run, number in sorted(_highest(directory).items())
        }
    return {run: holder for run, holder in found.items() if holder is not None}


def _seconds() -> float:
    return time.clock_gettime(_CLOCK)


@contextlib.contextmanager
def _usable(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(
            f'{directory} cannot hold claims ({error.strerror}); '
            'give a workdir that this user can write to.'
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
    """Creates `path`; FileExistsError where it is there. A crash may leave it without content."""
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        os.write(file, content)
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

    The file is opened for its mtime too: NFS answers a plain stat from a cache that may be a minute
    old, and an open from the server.
    """
    with open(path, 'rb') as file:
        return os.fstat(file.fileno()).st_mtime, file.read()


def _holder(path: Path, expiry: float) -> Holder | None:
    """Who holds the claim `path`; None where it expired, was released, or is gone."""
    # The present before the claim's time: a heartbeat in between makes the claim younger.
    with tempfile.TemporaryFile(dir=path.parent) as file:
        now = os.fstat(file.fileno()).st_mtime
    try:
        mtime, content = _read(path)
    except FileNotFoundError:
        return None
    try:
        about: Any = json.loads(content)
        name, expiry = f'process {about["pid"]} on {about["host"]}', float(about['expiry'])
    except (ValueError, KeyError, TypeError):
        name = 'an unknown process'
    age = now - mtime
    return Holder(name, age, expiry - age) if age <= expiry else None
