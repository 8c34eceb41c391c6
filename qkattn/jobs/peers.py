"""The processes of a job: they stop at the same step, and end when one of them fails.

The coordinator keeps keys that all processes read and write. A thread of every process reads them
regularly. If a process dies or hangs, jax's heartbeats notice and name it; they need no Python.

The keys begin with qkattn/job/. RANK is the rank of a process. BLOCK is a number: the processes
train in one `StopRequest` block after another, and count these blocks alike from 1.

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
# Seconds between two readings of the coordinator's keys, with up to _MANY_PROCESSES processes. With
# more, the seconds grow in proportion to their number.
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

    The processes agree in two rounds on the step after which they stop. When a process sees a
    reason to stop, it publishes the last step that it has done, and its `should_stop` waits. When
    all have published theirs, process 0 publishes the largest one. Every process trains up to it.
    """

    def __init__(self, job: Job, seconds: int):
        """Installs the handler of aborts.

        `seconds` is the time that the processes have to connect, for the message of the handler.
        """
        self._job = job
        self._seconds = seconds
        self._python_exits = threading.Event()
        self._is_aborted = False  # by jax
        self._exit_code: int | None = None  # set as soon as this process is about to end

        # The training thread and the thread that reads the keys share the fields below. The
        # condition guards them.
        self._agreement = threading.Condition()
        self._block = 0  # the number of the current StopRequest block; 0 before the first
        self._all_in_block = False  # whether all processes have entered this block
        self._last_step = -1  # the last step of this process in this block
        self._has_own_reason = False  # whether this process has a reason to stop besides signals
        self._is_agreeing = False  # whether `should_stop` waits until all agree
        self._stop_after: int | None = None  # the agreed step, after which all stop

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
        """Waits until all processes begin the next block; returns whether any of them must stop.

        `requested` is whether a signal has asked this process to stop. If one has asked any
        process, all get True and leave the block without training.
        """
        with self._agreement:
            self._block += 1
            self._all_in_block = False
            self._last_step = -1
            self._has_own_reason = False
            self._is_agreeing = False
            self._stop_after = None
        requests = agreement.gather_from_processes(requested, limit=_MEET_LIMIT)  # one per process
        self._all_in_block = not any(requests)
        return any(requests)

    def should_stop(self, step: int, also: bool) -> bool:
        """Whether this process stops now that `step` steps are done.

        While the processes agree on the step after which all stop, the function waits. If they
        agree on 9, a process with 7 steps goes on, until its call with `step` 10 returns True.

        `also` is whether this process has a reason to stop besides signals.
        """
        with self._agreement:
            self._has_own_reason |= also
            while self._is_agreeing and self._stop_after is None:
                self._agreement.wait()
            if self._stop_after is None:  # no process has a reason to stop
                self._last_step = step
                return False
            return step > self._stop_after

    def announce(self, code: int, sentence: str) -> None:
        """Tells the other processes that this one ends, and waits until all are ending.

        `code` is the exit code of this process, and `sentence` says why it ends. The wait takes at
        most _LINGER seconds.
        """
        if self._is_aborted:  # the coordinator or another process has failed already
            return
        if self._exit_code is not None:
            # Another thread is in this function, and ends the process afterwards.
            time.sleep(_LINGER)
            return

        self._exit_code = code
        deadline = time.monotonic() + _LINGER
        # If the coordinator does not answer, this process ends alone.
        with contextlib.suppress(Exception):
            _set(f'{_ROOT}left/{self._job.process_id}', json.dumps([code, sentence]))
            # Each process that ends sets such a key.
            while len(client().key_value_dir_get(f'{_ROOT}left/')) < self._job.num_processes:
                if time.monotonic() >= deadline:
                    return
                time.sleep(0.1)
            # The coordinator runs in process 0. So process 0 ends one second later, when the
            # others have read the keys, too.
            if agreement.is_process_0():
                time.sleep(1)

    def _unwatch(self, thread: threading.Thread) -> None:
        """Ends the thread that reads the keys, and removes the handler of aborts."""
        self._python_exits.set()
        thread.join(_LINGER)
        ctypes.CDLL(None).signal(signal.SIGABRT, None)

    def _aborted(self, number: int) -> None:
        """Handles SIGABRT: ends the process with a sentence and an exit code.

        jax aborts a process if the coordinator does not answer, or if another process of the job
        has died. `number` is the number of the signal.
        """
        if self._exit_code is not None:
            # The process was about to end anyway, and has told the others.
            os._exit(self._exit_code)

        self._exit_code = EXIT_CRASH
        self._is_aborted = True  # so `announce` does not wait for the others
        all_have_connected = StopRequest.peers is not None  # `watch` sets it
        if not all_have_connected:
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
        """Reads the keys of the job at intervals, and acts on them, until Python exits."""
        # With many processes the intervals are longer, so that the coordinator keeps up.
        interval = _INTERVAL * max(1.0, self._job.num_processes / _MANY_PROCESSES)
        while not self._python_exits.wait(interval) and self._exit_code is None:
            # Errors do not matter here: if the coordinator does not answer, jax ends the process.
            with contextlib.suppress(Exception):
                if StopRequest.pending():
                    _set(f'{_ROOT}request', str(self._job.process_id))
                published = {}
                for key, value in client().key_value_dir_get(_ROOT):
                    published[key.removeprefix(_ROOT)] = value
                self._follow(published)

    def _follow(self, published: dict[str, str]) -> None:
        """Acts on what the processes of the job have published.

        `published` has the keys of the list at the top of this module, without qkattn/job/:
        {'request': '2'} after a signal to process 2.
        """
        for rank in range(self._job.num_processes):
            left = published.get(f'left/{rank}')
            if left is not None:
                code, sentence = json.loads(left)
                self._end_after(rank, code, sentence)

        if 'request' in published and not StopRequest.pending():
            # Another process got a signal. This one acts as if it had got the signal, too.
            os.kill(os.getpid(), signal.SIGTERM)

        self._follow_reasons_to_stop(published)

    def _follow_reasons_to_stop(self, published: dict[str, str]) -> None:
        """Agrees on the last step if any process has published a reason to stop training.

        Before that, this process publishes a reason of its own if it has one.
        """
        with self._agreement:
            block = self._block
            if block == 0:  # no block has begun, so nothing is trained
                return
            has_own_reason = self._has_own_reason
            last_step = self._last_step
            was_agreeing = self._is_agreeing
            has_reason = 'request' in published or f'also/{block}' in published
            if has_reason:
                self._is_agreeing = True  # `should_stop` waits, so `_last_step` does not change

        if has_reason and not was_agreeing:
            _set(f'{_ROOT}at/{block}/{self._job.process_id}', str(last_step))
        if has_reason:
            self._agree(block, published)
        elif has_own_reason:
            _set(f'{_ROOT}also/{block}', str(self._job.process_id))

    def _agree(self, block: int, published: dict[str, str]) -> None:
        """Chooses the step after which all stop, in process 0, and takes it, in every process.

        For example, two processes publish {'at/1/0': '7', 'at/1/1': '9'} in block 1. Then process 0
        publishes {'after/1': '9'}. A process that reads this wakes `should_stop`.
        """
        last_steps = []
        for rank in range(self._job.num_processes):
            step = published.get(f'at/{block}/{rank}')
            if step is not None:
                last_steps.append(int(step))
        have_all_published = len(last_steps) == self._job.num_processes
        if have_all_published and agreement.is_process_0():
            _set(f'{_ROOT}after/{block}', str(max(last_steps)))

        stop_after = published.get(f'after/{block}')
        if stop_after is not None:
            with self._agreement:
                self._stop_after = int(stop_after)
                self._agreement.notify_all()

    def _end_after(self, rank: int, code: int, sentence: str) -> None:
        """Ends this process because process `rank` ends, unless both stop after the agreed step.

        `code` and `sentence` say how process `rank` ends.
        """
        is_stop_on_request = code == EXIT_REQUEUE
        if not is_stop_on_request:
            signals.end(code, f'process {rank} has ended with code {code}: {sentence}')

        # If all are training, process `rank` has agreed on a step and stopped there. This process
        # trains up to that step, too. In all other cases, it would wait for process `rank` in vain.
        all_are_training = bool(StopRequest.deferring) and self._all_in_block
        if not all_are_training:
            signals.end(code, f'process {rank} has {sentence}')


def _set(key: str, value: str) -> None:
    """Sets a key of the coordinator, and overwrites its value if it has one."""
    client().key_value_set(key, value, allow_overwrite=True)
