"""The other processes of a job: they stop at the same step, and end when one of them fails.

A thread of every process reads a few keys of the coordinator once in a while. Processes that die or
hang are noticed and named by jax's heartbeats, which need no Python; this adds the exit code.

Keys below qkattn/job/, for process RANK and the StopRequest block of number BLOCK:

    left/RANK        [exit code, sentence] of a process that ends
    request          a process that was asked to stop by a signal
    also/BLOCK       a process that has another reason to stop
    at/BLOCK/RANK    the last step of a process when it saw one of the two
    after/BLOCK      the step after which all stop: the largest of these
"""

import atexit
import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import threading
import time

from qkattn.jobs import agreement, signals
from qkattn.jobs.agreement import client
from qkattn.jobs.detection import Job
from qkattn.jobs.signals import EXIT_REQUEUE, StopRequest

EXIT_CRASH = 1
# Seconds between two readings of the coordinator's keys; more in a job of over 256 processes.
_INTERVAL = 0.5
# Seconds that a process which ends waits for the others to end.
_LINGER = 20.0
# Seconds between the first process that is ready to train and the last one.
_MEET_LIMIT = 3600.0
# What the keys of a job begin with.
_ROOT = 'qkattn/job/'


class JobPeers:
    """Watches the others of a job, who have `seconds` to connect."""

    def __init__(self, job: Job, seconds: int):
        self._job = job
        self._seconds = seconds
        self._watched = threading.Event()  # set when Python exits
        self._broken = False
        self._exit_code: int | None = None  # of this process, once it ends
        self._moved = threading.Condition()  # guards the fields below
        self._block = 0  # number of the StopRequest block that defers exits
        self._confirmed = False  # whether all processes are in it
        self._also = False  # whether this process has another reason to stop
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

    def meet(self, requested: bool) -> bool:
        """Waits for every process; whether a stop was requested in one of them."""
        with self._moved:
            self._block += 1
            self._last = -1
            self._stop_after = None
            self._also = False
            self._frozen = False
            self._confirmed = False
        stop = any(agreement.from_all(requested, limit=_MEET_LIMIT))
        self._confirmed = not stop
        return stop

    def should_stop(self, step: int, also: bool) -> bool:
        """As `StopRequest.should_stop`."""
        with self._moved:
            self._also |= also
            self._moved.wait_for(lambda: not self._frozen or self._stop_after is not None)
            if self._stop_after is not None:
                return step > self._stop_after
            self._last = step
            return False

    def announce(self, code: int, sentence: str) -> None:
        """Tells the others that this process ends, and waits for them to end with it."""
        if self._exit_code is not None:
            time.sleep(0 if self._broken else _LINGER)  # another thread ends the process
            return
        self._exit_code = code
        deadline = time.monotonic() + _LINGER
        with contextlib.suppress(Exception):  # the job is broken: end alone
            _set(f'{_ROOT}left/{self._job.process_id}', json.dumps([code, sentence]))
            while time.monotonic() < deadline:
                if len(client().key_value_dir_get(f'{_ROOT}left/')) == self._job.num_processes:
                    time.sleep(agreement.owner())  # its end ends the service, which they ask
                    break
                time.sleep(0.1)

    def _unwatch(self, thread: threading.Thread) -> None:
        self._watched.set()
        thread.join(_LINGER)
        ctypes.CDLL(None).signal(signal.SIGABRT, None)

    def _aborted(self, number: int) -> None:
        """Replaces an abort by jax by a sentence and an exit code that launchers know."""
        if self._exit_code is not None:  # the others were faster
            os._exit(self._exit_code)
        self._exit_code = EXIT_CRASH
        self._broken = True  # the coordinator does not answer here
        if StopRequest.peers is None:
            signals.end(
                EXIT_CRASH,
                f'not all {self._job.num_processes} processes reached the coordinator '
                f'{self._job.coordinator} within {self._seconds} s',
            )
        faulthandler.dump_traceback()
        text = 'was aborted: as printed above, it failed, or another one died or hangs'
        signals.end(EXIT_CRASH, f'process {self._job.process_id} {text}')

    def _run(self) -> None:
        interval = _INTERVAL * max(1.0, self._job.num_processes / 256)
        while not self._watched.wait(interval) and self._exit_code is None:
            # Without a coordinator jax ends the process.
            with contextlib.suppress(Exception):
                if StopRequest.pending():
                    _set(f'{_ROOT}request', str(self._job.process_id))
                published = {}
                for key, value in client().key_value_dir_get(_ROOT):
                    published[key.removeprefix(_ROOT)] = value
                self._follow(published)

    def _follow(self, published: dict[str, str]) -> None:
        """Acts on the keys that the processes have published, as at the top of this module."""
        ranks = range(self._job.num_processes)
        for rank in ranks:
            left = published.get(f'left/{rank}')
            if left is not None:
                code, sentence = json.loads(left)
                self._end_after(rank, code, sentence)
        if 'request' in published and not StopRequest.pending():
            os.kill(os.getpid(), signal.SIGTERM)  # as if it had been sent to this process, too
        with self._moved:
            block = self._block
            also = self._also
            stopping = block > 0 and ('request' in published or f'also/{block}' in published)
            sees_it_first = stopping and not self._frozen
            if sees_it_first:
                self._frozen = True
        if also and not stopping:
            _set(f'{_ROOT}also/{block}', str(self._job.process_id))
        if not stopping:
            return
        if sees_it_first:
            _set(f'{_ROOT}at/{block}/{self._job.process_id}', str(self._last))
        steps = [published.get(f'at/{block}/{rank}') for rank in ranks]
        if agreement.owner() and None not in steps:
            last_step = max(int(step) for step in steps if step is not None)
            _set(f'{_ROOT}after/{block}', str(last_step))
        after = published.get(f'after/{block}')
        if after is not None:
            with self._moved:
                self._stop_after = int(after)
                self._moved.notify_all()

    def _end_after(self, rank: int, code: int, sentence: str) -> None:
        """Ends this process after another one; what is being saved is saved."""
        if code != EXIT_REQUEUE:
            signals.end(code, f'process {rank} has ended with code {code}: {sentence}')
        # All are in a block or none is, so who left before it began will never come.
        if not (StopRequest.deferring and self._confirmed):
            signals.end(code, f'process {rank} has {sentence}')


def _set(key: str, value: str) -> None:
    """Sets a key of the coordinator, which may have a value."""
    client().key_value_set(key, value, allow_overwrite=True)
