"""What a lease is, wherever it lies: renewed at regular intervals, and lost without a heartbeat."""

import contextlib
import dataclasses
import datetime
import json
import math
import os
import socket
import threading
from pathlib import Path
from typing import Protocol

from qkattn.errors import ConfigError
from qkattn.run.buckets import seconds
from qkattn.run.json_schema import check
from qkattn.run.records import parse_json
from qkattn.run.signals import BEFORE_LEAVING, WHOLE

EXPIRY = 300.0
"""Seconds; longer than a network file system stalls, shorter than most runs."""

_BEATS = 8
"""Heartbeats per expiry; the holder gives up one heartbeat before its lease expires."""


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
        if not self._released.is_set() and seconds() - self._beaten > self._patience:
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
