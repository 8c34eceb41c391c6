"""The other processes of a job: they stop at the same step, and end when one of them fails.

A thread of every process reads a few keys of the coordinator once in a while. Processes that die or
hang are found by jax's heartbeats, which need no Python; this adds their ranks and the exit code.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from typing import Any

from jax._src import distributed

from qkattn.jobs import agreement, signals
from qkattn.jobs.detection import Job
from qkattn.jobs.signals import EXIT_REQUEUE, StopRequest

EXIT_CRASH = 1

_INTERVAL = 0.5
"""Seconds between two looks at the coordinator's keys; more in a job of over 256 processes."""

_LINGER = 20.0
"""Seconds that a process which ends waits for the others to end with it."""

_HOLD_LIMIT = 3600.0
"""Seconds between the first and the last process that is ready to train."""

_ROOT, _BEATS = 'qkattn/job/', 'qkattn/beats/'


class JobPeers:
    """Watches the others of a job; `StopRequest.peers` of each of its processes.

    Args:
      job: of several processes.
      heartbeat: seconds of silence after which jax finds a process dead.
    """

    def __init__(self, job: Job, heartbeat: int):
        self._job = job
        self._patience = heartbeat / 3  # seconds after which one would be named, should jax do so
        self._watched = threading.Event()  # set when Python exits
        self._broken = False
        self._ending: int | None = None  # the exit code
        self._silent: list[int] = []
        self._seen: dict[int, tuple[str | None, float]] = {}  # beats by rank, and since when
        self._moved = threading.Condition()  # guards the fields below
        self._block = 0  # number of the block of a StopRequest that is held
        self._confirmed = False  # whether all processes hold it
        self._also = False  # whether this process has a reason of its own to stop
        self._last = -1  # step of the last `should_stop`
        self._frozen = False  # `_last` was published, so `should_stop` waits for the decision
        self._stop_after: int | None = None
        # jax ends a process whose job is broken by abort(), in a thread of its own.
        self._on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._aborted)
        ctypes.CDLL(None).signal(signal.SIGABRT, self._on_abort)

    def watch(self) -> None:
        """Starts to watch; all processes are connected."""
        StopRequest.peers = self
        thread = threading.Thread(target=self._run, name='peers', daemon=True)
        thread.start()
        # Python unwinds the stack of a daemon thread when it exits, and jax's code there aborts.
        atexit.register(self._unwatch, thread)

    def _unwatch(self, thread: threading.Thread) -> None:
        self._watched.set()
        thread.join(_LINGER)
        ctypes.CDLL(None).signal(signal.SIGABRT, None)

    def meet(self, requested: bool) -> bool:
        with self._moved:
            self._block += 1
            self._last, self._stop_after = -1, None
            self._also = self._frozen = self._confirmed = False
        stop = any(agreement.from_all(requested, limit=_HOLD_LIMIT))
        self._confirmed = not stop
        return stop

    def should_stop(self, step: int, also: bool) -> bool:
        with self._moved:
            self._also |= also
            self._moved.wait_for(lambda: not self._frozen or self._stop_after is not None)
            if self._stop_after is not None:
                return step > self._stop_after
            self._last = step
            return False

    def announce(self, code: int, sentence: str) -> None:
        if self._ending is not None:
            time.sleep(0 if self._broken else _LINGER)  # another thread ends the process
            return
        self._ending = code
        deadline = time.monotonic() + _LINGER
        with contextlib.suppress(Exception):  # the job is broken: end alone
            self._set(f'{_ROOT}left/{self._job.process_id}', json.dumps([code, sentence]))
            while time.monotonic() < deadline:
                if len(_client().key_value_dir_get(f'{_ROOT}left/')) == self._job.num_processes:
                    time.sleep(agreement.owner())  # its end ends the service, which they ask
                    break
                time.sleep(0.1)

    def _aborted(self, number: int) -> None:
        """Replaces an abort by jax by a sentence and an exit code that launchers know."""
        if self._ending is not None:  # the others were faster
            os._exit(self._ending)
        self._ending, self._broken = EXIT_CRASH, True  # the coordinator does not answer here
        ranks = self._silent or [0]
        if ranks == [self._job.process_id]:  # no other: XLA or the C library aborts
            faulthandler.dump_traceback()
            signals.end(EXIT_CRASH, f'{agreement.named(ranks)} failed as printed above')
        signals.end(EXIT_CRASH, f'{agreement.named(ranks)} died or hangs; the job ends with it')

    def _run(self) -> None:
        interval = _INTERVAL * max(1.0, self._job.num_processes / 256)
        for beat in range(sys.maxsize):
            if self._watched.wait(interval) or self._ending is not None:
                return
            # Without a coordinator jax ends the process.
            with contextlib.suppress(Exception):
                self._set(f'{_BEATS}{self._job.process_id}', str(beat))
                if agreement.owner():
                    self._find_silent()
                if StopRequest.pending():
                    self._set(f'{_ROOT}request', str(self._job.process_id))
                news = dict(_client().key_value_dir_get(_ROOT))
                self._follow({key.removeprefix(_ROOT): value for key, value in news.items()})

    def _find_silent(self) -> None:
        """In process 0: publishes who has not looked for a while."""
        now = time.monotonic()
        beats = dict(_client().key_value_dir_get(_BEATS))
        for rank in range(1, self._job.num_processes):
            beat = beats.get(f'{_BEATS}{rank}')
            if rank not in self._seen or self._seen[rank][0] != beat:
                self._seen[rank] = beat, now
        silent = [rank for rank, (_, at) in self._seen.items() if now - at > self._patience]
        if silent != self._silent:
            self._set(f'{_ROOT}silent', json.dumps(silent))

    def _follow(self, news: dict[str, str]) -> None:
        """Acts on what the others have published."""
        self._silent = json.loads(news.get('silent', '[]'))
        for rank in range(self._job.num_processes):
            if (left := news.get(f'left/{rank}')) is not None:
                self._follow_out(rank, *json.loads(left))
        if 'request' in news and not StopRequest.pending():
            os.kill(os.getpid(), signal.SIGTERM)  # as if it had been sent to this process, too
        with self._moved:
            block, also = self._block, self._also
            stopping = block > 0 and ('request' in news or f'also/{block}' in news)
            first = stopping and not self._frozen
            self._frozen |= first
        if also and not stopping:
            self._set(f'{_ROOT}also/{block}', str(self._job.process_id))
        if not stopping:
            return
        if first:
            self._set(f'{_ROOT}at/{block}/{self._job.process_id}', str(self._last))
        at = [news.get(f'at/{block}/{rank}') for rank in range(self._job.num_processes)]
        steps = [int(step) for step in at if step is not None]
        if agreement.owner() and len(steps) == len(at):
            self._set(f'{_ROOT}after/{block}', str(max(steps)))
        if (after := news.get(f'after/{block}')) is not None:
            with self._moved:
                self._stop_after = int(after)
                self._moved.notify_all()

    def _follow_out(self, rank: int, code: int, sentence: str) -> None:
        """Ends this process with another one; what is being saved is saved."""
        if code != EXIT_REQUEUE:
            signals.end(code, f'process {rank} has ended with code {code}: {sentence}')
        # All hold a block or none does, so who left before it was held will never come.
        if not (StopRequest.deferred() and self._confirmed):
            signals.end(code, f'process {rank} has {sentence}')

    def _set(self, key: str, value: str) -> None:
        _client().key_value_set(key, value, allow_overwrite=True)


def _client() -> Any:
    return distributed.global_state.client
