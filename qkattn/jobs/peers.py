"""The processes of a job: they stop at the same step, and end when one of them fails.

The coordinator keeps keys that all processes read and write. A thread of every process reads them
regularly. If a process dies or hangs, jax's heartbeats notice and name it; they need no Python.

The keys begin with qkattn/job/. RANK is the rank of a process, and BLOCK counts the `StopRequest`
blocks in which the processes train.

    left/RANK        process RANK ends: [exit code, sentence]
    request          a signal has asked some process to stop: its rank
    also/BLOCK       some process has another reason to stop: its rank
    at/BLOCK/RANK    the last step of process RANK when it saw `request` or `also`
    after/BLOCK      all processes stop after this step: the largest of at/BLOCK/RANK
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
# Seconds between two readings of the coordinator's keys. Above _MANY_PROCESSES the interval grows
# with their number, so that the coordinator has no more to answer.
_INTERVAL = 0.5
_MANY_PROCESSES = 256
# Seconds for which a process that ends waits for the others to end.
_LINGER = 20.0
# Seconds for which the first process that is ready to train waits for the last one.
_MEET_LIMIT = 3600.0
# The beginning of every key.
_ROOT = 'qkattn/job/'


class JobPeers:
    """Watches the other processes of a job.

    A step at which all stop is agreed in two rounds. When a process sees a reason to stop, it
    publishes its last step, and `should_stop` waits. When all have published theirs, process 0
    publishes the largest one, and every process trains up to it.
    """

    def __init__(self, job: Job, seconds: int):
        """Handles aborts from here on; processes have `seconds` seconds to connect."""
        self._job = job
        self._seconds = seconds
        self._watched = threading.Event()  # set when Python exits
        self._broken = False  # whether jax has aborted this process
        self._exit_code: int | None = None  # of this process, once it ends

        # The condition guards the fields below.
        self._moved = threading.Condition()
        self._block = 0  # number of the StopRequest block in which processes train
        self._confirmed = False  # whether all processes are in this block
        self._also = False  # whether this process has a reason to stop besides signals
        self._last = -1  # step of the last `should_stop`
        self._frozen = False  # whether `_last` was published, so that `should_stop` waits
        self._stop_after: int | None = None  # the step after which all stop, once it is agreed

        # If the job is broken, a thread of jax calls abort() in this process.
        self._on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._aborted)
        ctypes.CDLL(None).signal(signal.SIGABRT, self._on_abort)

    def watch(self) -> None:
        """Starts the thread that reads the keys; call it once all processes are connected."""
        StopRequest.peers = self
        thread = threading.Thread(target=self._run, name='peers', daemon=True)
        thread.start()
        # A daemon thread that is in jax's code when Python exits would abort the process.
        atexit.register(self._unwatch, thread)

    def meet(self, requested: bool) -> bool:
        """Waits for all processes, and begins the next block.

        `requested` tells whether a stop was requested in this process. Returns whether a stop was
        requested in any of them.
        """
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
        """Whether all processes stop now that `step` steps are done; see StopRequest.should_stop.

        `also` tells that this process has a reason to stop besides signals. While the processes
        agree on the last step, the function waits.
        """
        with self._moved:
            self._also |= also
            self._moved.wait_for(lambda: not self._frozen or self._stop_after is not None)
            if self._stop_after is not None:
                return step > self._stop_after
            self._last = step
            return False

    def announce(self, code: int, sentence: str) -> None:
        """Tells the others that this process ends, and waits until they end with it.

        `code` is the exit code of this process, and `sentence` says why it ends. The wait takes at
        most _LINGER seconds.
        """
        if self._exit_code is not None:
            # Another thread is ending the process. This one waits, unless jax has aborted.
            if not self._broken:
                time.sleep(_LINGER)
            return

        self._exit_code = code
        deadline = time.monotonic() + _LINGER
        # If the coordinator does not answer, this process ends alone.
        with contextlib.suppress(Exception):
            _set(f'{_ROOT}left/{self._job.process_id}', json.dumps([code, sentence]))
            while time.monotonic() < deadline:
                num_left = len(client().key_value_dir_get(f'{_ROOT}left/'))
                if num_left == self._job.num_processes:
                    # The coordinator ends with process 0, so the others ask for the keys first.
                    if agreement.owner():
                        time.sleep(1)
                    break
                time.sleep(0.1)

    def _unwatch(self, thread: threading.Thread) -> None:
        self._watched.set()
        thread.join(_LINGER)
        ctypes.CDLL(None).signal(signal.SIGABRT, None)

    def _aborted(self, number: int) -> None:
        """Ends the process with a sentence and an exit code when jax aborts it.

        jax aborts a process if the coordinator does not answer, or if another process of the job
        has died. This is the handler of SIGABRT, whose `number` it gets.
        """
        if self._exit_code is not None:
            # The process was about to end anyway, and has told the others.
            os._exit(self._exit_code)

        self._exit_code = EXIT_CRASH
        self._broken = True  # so `announce` does not wait for the others
        if StopRequest.peers is None:  # before `watch`: not all processes have connected
            signals.end(
                EXIT_CRASH,
                f'not all {self._job.num_processes} processes reached the coordinator '
                f'{self._job.coordinator} within {self._seconds} s',
            )
        faulthandler.dump_traceback()
        signals.end(
            EXIT_CRASH,
            f'process {self._job.process_id} was aborted: as printed above, it failed, or another '
            'one died or hangs',
        )

    def _run(self) -> None:
        """Reads the keys of the job in intervals, and acts on them, until Python exits."""
        interval = _INTERVAL * max(1.0, self._job.num_processes / _MANY_PROCESSES)
        while not self._watched.wait(interval) and self._exit_code is None:
            # If the coordinator does not answer, jax ends the process.
            with contextlib.suppress(Exception):
                if StopRequest.pending():
                    _set(f'{_ROOT}request', str(self._job.process_id))
                published = {}
                for key, value in client().key_value_dir_get(_ROOT):
                    published[key.removeprefix(_ROOT)] = value
                self._follow(published)

    def _follow(self, published: dict[str, str]) -> None:
        """Acts on the keys of the job, {key without qkattn/job/: value}.

        The keys are listed at the top of this module.
        """
        ranks = range(self._job.num_processes)
        for rank in ranks:
            left = published.get(f'left/{rank}')
            if left is not None:
                code, sentence = json.loads(left)
                self._end_after(rank, code, sentence)

        is_requested = 'request' in published
        if is_requested and not StopRequest.pending():
            # Some other process got the signal. This one acts as if it had got it too.
            os.kill(os.getpid(), signal.SIGTERM)

        with self._moved:
            block = self._block
            also = self._also
            has_reason = is_requested or f'also/{block}' in published
            is_stopping = has_reason and block > 0  # before the first block nobody trains
            is_first_sight = is_stopping and not self._frozen
            if is_first_sight:
                self._frozen = True  # from here on `should_stop` does not change `_last`
        if not is_stopping:
            if also:
                _set(f'{_ROOT}also/{block}', str(self._job.process_id))
            return
        if is_first_sight:
            _set(f'{_ROOT}at/{block}/{self._job.process_id}', str(self._last))

        # Process 0 decides once it knows the last step of every process.
        steps = []
        for rank in ranks:
            step = published.get(f'at/{block}/{rank}')
            if step is not None:
                steps.append(int(step))
        if agreement.owner() and len(steps) == len(ranks):
            _set(f'{_ROOT}after/{block}', str(max(steps)))

        after = published.get(f'after/{block}')
        if after is not None:
            with self._moved:
                self._stop_after = int(after)
                self._moved.notify_all()

    def _end_after(self, rank: int, code: int, sentence: str) -> None:
        """Ends this process because process `rank` has ended with an exit code and a sentence.

        If the other process stopped on request while all are training, this process does not end
        here: it stops at the agreed step and saves its state.
        """
        if code != EXIT_REQUEUE:
            signals.end(code, f'process {rank} has ended with code {code}: {sentence}')
        # If not all processes have confirmed the block, process `rank` has left before it began,
        # and this process would wait for it in vain.
        is_training = bool(StopRequest.deferring) and self._confirmed
        if not is_training:
            signals.end(code, f'process {rank} has {sentence}')


def _set(key: str, value: str) -> None:
    """Sets a key of the coordinator, and overwrites its value if it has one."""
    client().key_value_set(key, value, allow_overwrite=True)
