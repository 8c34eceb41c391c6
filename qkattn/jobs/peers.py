"""Makes the processes of a job stop after the same step, and end when one of them fails.

The processes set keys in jax's coordinator, and a thread in each process polls them. RANK is the
rank of a process. MEETING is the number of `JobPeers.meet` calls, equal in all processes.

    key                             value
    qkattn/job/left/RANK            exit code and error message of a process that ends
    qkattn/job/request              rank of a process that got a signal to stop
    qkattn/job/also/MEETING         rank of a process with another reason to stop
    qkattn/job/at/MEETING/RANK      last step of a process when it saw `request` or `also`
    qkattn/job/after/MEETING        the agreed last step of all processes

If a process dies or hangs, jax's heartbeats end the others.
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
# The polling interval in seconds, for up to _MANY_PROCESSES processes. Above this number, the
# interval grows in proportion.
_INTERVAL = 0.5
_MANY_PROCESSES = 256
# The seconds for which a process waits for the other processes when it ends.
_LINGER = 20.0
# The timeout of `JobPeers.meet` in seconds.
_MEET_LIMIT = 3600.0
# The prefix of every key.
_ROOT = 'qkattn/job/'


class JobPeers:
    """Watches the other processes of a job, and stops training in all of them at the same step.

    If any process has to stop, every process pauses in `should_stop` and publishes its last step.
    All processes stop after the largest of these steps.
    """

    def __init__(self, job: Job, seconds: int):
        """Installs the SIGABRT handler.

        Args:
            job: The processes of the job and their coordinator.
            seconds: The connection timeout, for the handler's error message.
        """
        self._job = job
        self._seconds = seconds
        self._python_exits = threading.Event()
        self._is_aborted = False  # whether jax has aborted this process
        self._exit_code: int | None = None  # set as soon as this process begins to end

        # Guards the fields below. The training thread and the polling thread share them.
        self._agreement = threading.Condition()
        self._num_meetings = 0  # how often this process has called `meet`
        # Whether the last `meet` has returned, and no process of the job had a stop request.
        self._all_have_met = False
        # The fields below are about the time since the last `meet`.
        self._last_step = -1  # the last step that this process has done
        self._has_own_reason = False  # whether this process has to stop, but not due to a signal
        self._is_agreeing = False  # whether `should_stop` waits until all processes agree
        self._stop_after: int | None = None  # the agreed last step

        # jax calls abort() if the job fails. A Python signal handler would run too late.
        handler_type = ctypes.CFUNCTYPE(None, ctypes.c_int)
        self._on_abort = handler_type(self._end_on_abort)  # stored, because C keeps no reference
        libc = ctypes.CDLL(None)
        libc.signal(signal.SIGABRT, self._on_abort)

    def watch(self) -> None:
        """Starts the polling thread; call it once all processes are connected."""
        StopRequest.peers = self
        thread = threading.Thread(target=self._run, name='peers', daemon=True)
        thread.start()
        # If the thread were in jax's code when Python exits, it would abort the process.
        atexit.register(self._unwatch, thread)

    def meet(self, requested: bool) -> bool:
        """Waits until all processes of the job have called `meet`.

        Args:
            requested: Whether this process has got a signal to stop.

        Returns:
            Whether any process has got a signal to stop.
        """
        # Forget earlier reasons to stop, and the agreed step.
        with self._agreement:
            self._num_meetings += 1
            self._all_have_met = False
            self._last_step = -1
            self._has_own_reason = False
            self._is_agreeing = False
            self._stop_after = None

        requests = agreement.gather_from_processes(requested, limit=_MEET_LIMIT)
        is_any_requested = any(requests)
        self._all_have_met = not is_any_requested
        return is_any_requested

    def should_stop(self, step: int, has_other_reason: bool) -> bool:
        """Whether to stop after `step` finished steps; the training thread calls this.

        If any process has to stop, all processes wait here and agree on a step. For example, two
        processes have done 7 and 9 steps. They agree on 9, and the call with `step` 10 returns True
        in both.

        Args:
            step: The number of finished steps.
            has_other_reason: Whether this process has to stop, but not due to a signal.
        """
        with self._agreement:
            # The polling thread tells the other processes, and sets `_is_agreeing` in each.
            self._has_own_reason |= has_other_reason
            while self._is_agreeing and self._stop_after is None:
                self._agreement.wait()  # for the agreed step, `_stop_after`
            if self._stop_after is None:  # no process has to stop
                self._last_step = step
                return False
            return step > self._stop_after

    def announce(self, code: int, sentence: str) -> None:
        """Tells the other processes that this process ends, and waits until they end as well.

        The wait takes at most _LINGER seconds.

        Args:
            code: The exit code of this process.
            sentence: Why this process ends.
        """
        if self._is_aborted:  # another process has failed already
            return
        if self._exit_code is not None:
            # Another thread is in this function, and will end the process.
            time.sleep(_LINGER)
            return

        self._exit_code = code
        deadline = time.monotonic() + _LINGER
        with contextlib.suppress(Exception):  # the coordinator does not answer
            _set(f'{_ROOT}left/{self._job.process_id}', json.dumps([code, sentence]))
            # Every process that ends sets such a key.
            while len(client().key_value_dir_get(f'{_ROOT}left/')) < self._job.num_processes:
                if time.monotonic() >= deadline:
                    return
                time.sleep(0.1)
            # The coordinator runs in process 0. Give the other processes time to read the keys.
            if agreement.is_process_0():
                time.sleep(1)

    def _unwatch(self, thread: threading.Thread) -> None:
        """Ends the polling thread, and removes the SIGABRT handler."""
        self._python_exits.set()
        thread.join(_LINGER)
        ctypes.CDLL(None).signal(signal.SIGABRT, None)

    def _end_on_abort(self, number: int) -> None:
        """Ends the process with an error message; the SIGABRT handler.

        jax aborts a process if the coordinator does not answer, or if another process has died.
        """
        if self._exit_code is not None:  # the process is ending, and has told the others
            os._exit(self._exit_code)

        self._exit_code = EXIT_CRASH
        self._is_aborted = True  # `signals.end` must not wait for other processes
        have_all_connected = StopRequest.peers is not None  # set by `watch`
        if not have_all_connected:
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
        """Polls the keys of the job, and acts on them, until Python exits."""
        # The interval grows with the number of processes, to limit the coordinator's load.
        interval = _INTERVAL * max(1.0, self._job.num_processes / _MANY_PROCESSES)
        while not self._python_exits.wait(interval) and self._exit_code is None:
            # If the coordinator does not answer, jax ends the process.
            with contextlib.suppress(Exception):
                if StopRequest.pending():
                    _set(f'{_ROOT}request', str(self._job.process_id))

                published = {}
                for key, value in client().key_value_dir_get(_ROOT):
                    published[key.removeprefix(_ROOT)] = value
                self._act_on(published)

    def _act_on(self, published: dict[str, str]) -> None:
        """Acts on the keys of all processes, given without the prefix _ROOT.

        For example, {'request': '2'} means that process 2 got a signal to stop, and
        {'left/2': '[1, "out of memory"]'} that process 2 ends with exit code 1.
        """
        for rank in range(self._job.num_processes):
            ending = published.get(f'left/{rank}')
            if ending is not None:
                code, sentence = json.loads(ending)
                self._end_with(rank, code, sentence)

        is_request_new = 'request' in published and not StopRequest.pending()
        if is_request_new:
            # Act as if this process had got the signal, too.
            os.kill(os.getpid(), signal.SIGTERM)

        self._agree_on_last_step(published)

    def _agree_on_last_step(self, published: dict[str, str]) -> None:
        """Advances the agreement on the step after which all processes stop.

        The polling thread calls this with the keys of all processes, without the prefix _ROOT. They
        contain the number of `meet` calls, here 1:

        - 'request' or 'also/1': some process has to stop.
        - 'at/1/0': the last step that process 0 has done.
        - 'after/1': the agreed step, which is the largest of the last steps.
        """
        rank = self._job.process_id
        with self._agreement:
            meeting = self._num_meetings
            if meeting == 0:  # training has not begun
                return
            has_own_reason = self._has_own_reason
            last_step = self._last_step
            some_process_must_stop = 'request' in published or f'also/{meeting}' in published
            must_publish_step = some_process_must_stop and not self._is_agreeing
            if must_publish_step:
                self._is_agreeing = True  # pauses training, so `last_step` stays up to date

        # Publish without the lock, so that training does not wait for the network.
        if must_publish_step:
            _set(f'{_ROOT}at/{meeting}/{rank}', str(last_step))
        if some_process_must_stop:
            # Has an effect once all processes have published their last steps.
            self._take_agreed_step(meeting, published)
        elif has_own_reason:
            _set(f'{_ROOT}also/{meeting}', str(rank))

    def _take_agreed_step(self, meeting: int, published: dict[str, str]) -> None:
        """Publishes the agreed last step in process 0, and passes it to the training thread.

        For example, processes 0 and 1 have done 7 and 9 steps, and have published
        {'at/1/0': '7', 'at/1/1': '9'}. Process 0 adds {'after/1': '9'}. When a process reads this
        key, it stops its training after step 9.

        Args:
            meeting: The number of `meet` calls, 1 in the example.
            published: The keys of all processes, without the prefix _ROOT.
        """
        last_steps = []
        for rank in range(self._job.num_processes):
            step = published.get(f'at/{meeting}/{rank}')
            if step is not None:
                last_steps.append(int(step))
        have_all_published = len(last_steps) == self._job.num_processes
        if have_all_published and agreement.is_process_0():
            _set(f'{_ROOT}after/{meeting}', str(max(last_steps)))

        agreed_step = published.get(f'after/{meeting}')
        if agreed_step is not None:
            with self._agreement:
                self._stop_after = int(agreed_step)
                self._agreement.notify_all()  # wakes the training thread in `should_stop`

    def _end_with(self, rank: int, code: int, sentence: str) -> None:
        """Ends this process because process `rank` ends.

        Returns if this process has to go on, up to the agreed last step.

        Args:
            rank: The rank of the process that ends.
            code: Its exit code.
            sentence: Why it ends.
        """
        is_stop_on_request = code == EXIT_REQUEUE
        if not is_stop_on_request:
            signals.end(code, f'process {rank} has ended with code {code}: {sentence}')

        # If all processes are training, they stop after the agreed step. Otherwise this process
        # would wait for process `rank` in vain.
        all_are_training = bool(StopRequest.deferring) and self._all_have_met
        if not all_are_training:
            signals.end(code, f'process {rank} has {sentence}')


def _set(key: str, value: str) -> None:
    """Sets or overwrites a key of the coordinator."""
    client().key_value_set(key, value, allow_overwrite=True)
