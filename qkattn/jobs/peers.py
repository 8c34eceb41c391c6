"""The processes of a job: they stop at the same step, and end when one of them fails.

The coordinator keeps keys that all processes read and write. A thread of every process reads them
regularly. If a process dies or hangs, jax's heartbeats notice and name it; they need no Python.

The keys begin with qkattn/job/. RANK is the rank of a process. MEETING is the number of calls of
`JobPeers.meet` so far, which all processes count alike. So a key of an earlier stretch of training
is not mistaken for one of the current stretch.

    left/RANK        process RANK ends: [exit code, sentence]
    request          a signal has asked some process to stop: its rank
    also/MEETING     some process has another reason to stop: its rank
    at/MEETING/RANK  the last step of process RANK when it saw `request` or `also`
    after/MEETING    all processes stop after this step: the largest of at/MEETING/RANK
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
        """Installs the SIGABRT handler.

        Args:
          job: the processes of the job and their coordinator.
          seconds: the connection timeout, for the handler's error message.
        """
        self._job = job
        self._seconds = seconds
        self._python_exits = threading.Event()
        self._is_aborted = False  # whether jax has aborted this process
        self._exit_code: int | None = None  # set as soon as this process begins to end

        # Guards the fields below. The training thread and the watching thread share them.
        self._agreement = threading.Condition()
        self._num_meetings = 0  # how often this process has called `meet`
        # Whether the last `meet` has returned, and no process of the job had a stop request.
        self._all_have_met = False
        # `meet` resets the fields below.
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
        """Starts the thread that reads the keys; call it once all processes are connected."""
        StopRequest.peers = self
        thread = threading.Thread(target=self._run, name='peers', daemon=True)
        thread.start()
        # A daemon thread that is in jax's code when Python exits would abort the process.
        atexit.register(self._unwatch, thread)

    def meet(self, requested: bool) -> bool:
        """Waits until all processes of the job have called this; returns whether any has to stop.

        They meet before they train, and again when everything is saved. `requested` is whether a
        signal has asked this process to stop. If one process passes True, all of them get True.
        """
        # Reasons to stop, and the step that was agreed on, do not count beyond a meeting.
        with self._agreement:
            self._num_meetings += 1
            self._all_have_met = False
            self._last_step = -1
            self._has_own_reason = False
            self._is_agreeing = False
            self._stop_after = None

        # Waits for the other processes, and gets what each of them has passed as `requested`.
        requests = agreement.gather_from_processes(requested, limit=_MEET_LIMIT)
        self._all_have_met = not any(requests)
        return any(requests)

    def should_stop(self, step: int, has_other_reason: bool) -> bool:
        """Whether this process stops now that `step` steps are done; the training thread asks.

        The processes stop at the same step. Suppose that one gets a signal when it has done 7 steps
        and another one has done 9. Both wait here until they agree on 9. The first one then goes
        on, until its call with `step` 10 returns True.

        `has_other_reason` is whether this process has a reason to stop besides signals.
        """
        with self._agreement:
            # The thread that reads the keys tells the other processes.
            self._has_own_reason |= has_other_reason
            while self._is_agreeing and self._stop_after is None:
                self._agreement.wait()
            if self._stop_after is None:  # no process has a reason to stop
                self._last_step = step
                return False
            return step > self._stop_after

    def announce(self, code: int, sentence: str) -> None:
        """Tells the other processes that this one ends, and waits until all of them end, too.

        The wait takes at most _LINGER seconds. `code` is the exit code of this process, and
        `sentence` says why it ends. They are published under the key left/RANK.
        """
        if self._is_aborted:  # the coordinator or another process has failed already
            return
        if self._exit_code is not None:
            # Another thread is announcing the end already, and ends the process when it is done.
            time.sleep(_LINGER)
            return

        self._exit_code = code
        deadline = time.monotonic() + _LINGER
        # If the coordinator does not answer, this process ends alone.
        with contextlib.suppress(Exception):
            _set(f'{_ROOT}left/{self._job.process_id}', json.dumps([code, sentence]))
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

    def _end_on_abort(self, number: int) -> None:
        """Ends the process with a sentence and an exit code; the handler of SIGABRT.

        jax aborts a process if the coordinator does not answer, or if another process of the job
        has died. `number` is the number of the signal.
        """
        if self._exit_code is not None:
            # The process was about to end anyway, and has told the others.
            os._exit(self._exit_code)

        self._exit_code = EXIT_CRASH
        self._is_aborted = True  # `signals.end` calls `announce`, which then waits for nobody
        # `watch` sets `peers` once all processes are connected.
        all_have_connected = StopRequest.peers is not None
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
                # Tell the other processes of a signal to this one.
                if StopRequest.pending():
                    _set(f'{_ROOT}request', str(self._job.process_id))

                published = {}
                for key, value in client().key_value_dir_get(_ROOT):
                    published[key.removeprefix(_ROOT)] = value
                self._act_on(published)

    def _act_on(self, published: dict[str, str]) -> None:
        """Acts on the values that the processes of the job have published, by key.

        For example, {'request': '2'} says that a signal has asked process 2 to stop, and
        {'left/2': '[1, "out of memory"]'} that process 2 ends with exit code 1.
        """
        for rank in range(self._job.num_processes):
            ending = published.get(f'left/{rank}')
            if ending is not None:
                code, sentence = json.loads(ending)
                self._end_with(rank, code, sentence)

        if 'request' in published and not StopRequest.pending():
            # Another process got a signal. This one acts as if it had got the signal, too.
            os.kill(os.getpid(), signal.SIGTERM)

        self._agree_on_last_step(published)

    def _agree_on_last_step(self, published: dict[str, str]) -> None:
        """Advances the agreement on the step after which all processes stop.

        A thread calls this at intervals with the keys of all processes, without the prefix _ROOT.
        The keys contain the number of `meet` calls, here 1:

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
                # The training thread pauses in `should_stop`, so `last_step` stays up to date.
                self._is_agreeing = True

        # Publish without the lock, so that training does not wait for the network.
        if must_publish_step:
            _set(f'{_ROOT}at/{meeting}/{rank}', str(last_step))
        if some_process_must_stop:
            # Takes effect in a later call, once all processes have published their last steps.
            self._take_agreed_step(meeting, published)
        elif has_own_reason:
            _set(f'{_ROOT}also/{meeting}', str(rank))

    def _take_agreed_step(self, meeting: int, published: dict[str, str]) -> None:
        """Takes part in the agreement on the step after which all processes of the job stop.

        For example, processes 0 and 1 have done 7 and 9 steps. They have published
        {'at/1/0': '7', 'at/1/1': '9'}. Process 0 then publishes the larger step, {'after/1': '9'}.
        Once a process reads this key, it tells its training thread to stop after step 9.

        Args:
          meeting: the number of the last call of `meet`, 1 in the example.
          published: the keys that all processes have published, without _ROOT in front.
        """
        # Process 0 chooses the step once all processes have published how far they are.
        last_steps = []
        for rank in range(self._job.num_processes):
            step = published.get(f'at/{meeting}/{rank}')
            if step is not None:
                last_steps.append(int(step))
        have_all_published = len(last_steps) == self._job.num_processes
        if have_all_published and agreement.is_process_0():
            _set(f'{_ROOT}after/{meeting}', str(max(last_steps)))

        # Every process, 0 too, takes the choice from the published keys once it is among them.
        stop_after = published.get(f'after/{meeting}')
        if stop_after is not None:
            with self._agreement:
                self._stop_after = int(stop_after)
                self._agreement.notify_all()  # wakes the training thread in `should_stop`

    def _end_with(self, rank: int, code: int, sentence: str) -> None:
        """Ends this process because process `rank` ends; returns if both stop after the same step.

        `code` is the exit code of process `rank`, and `sentence` says why it ends.
        """
        is_stop_on_request = code == EXIT_REQUEUE
        if not is_stop_on_request:
            signals.end(code, f'process {rank} has ended with code {code}: {sentence}')

        # If all processes are training, they have agreed on a step, and process `rank` has stopped
        # there. This one trains up to that step. In all other cases it would wait in vain.
        all_are_training = bool(StopRequest.deferring) and self._all_have_met
        if not all_are_training:
            signals.end(code, f'process {rank} has {sentence}')


def _set(key: str, value: str) -> None:
    """Sets a key of the coordinator, and overwrites its value if it has one."""
    client().key_value_set(key, value, allow_overwrite=True)
