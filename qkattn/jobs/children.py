"""Child processes: each runs on its own cores, and this process reads the lines that it prints."""

import contextlib
import ctypes
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from qkattn.jobs.signals import EXIT_REQUEUE

# The environment variable that tells a child the descriptor of its pipe.
_PIPE = 'QKATTN_PARENT'
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Bytes that are read from a child at a time.
_PART_SIZE = 65536
# The operation of prctl(2) that sets the signal which a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def pipe_to_parent() -> Connection | None:
    """Returns the pipe to the process that started this one; None if this one is no `Child`."""
    text = os.environ.pop(_PIPE, None)
    if text is None:
        return None
    descriptor = int(text)
    os.set_inheritable(descriptor, False)  # processes that this one starts do not get the pipe
    return Connection(descriptor)


class Child:
    """A child process that runs on its own cores.

    Ctrl-C does not reach the child. On Linux it gets SIGTERM when this process ends, also when this
    process is killed.
    """

    def __init__(self, line: Sequence[str], cores: Sequence[int], variables: Mapping[str, str]):
        """Starts a command.

        The attribute `pipe` carries messages between the two processes. `output` is the descriptor
        of the child's output, so that a caller can wait for it.

        Args:
          line: the command line.
          cores: the numbers of the cores to run on.
          variables: environment variables, in addition to those of this process.
        """
        self.pipe, childs_pipe = multiprocessing.Pipe()
        self.output, childs_output = os.pipe()
        self._unfinished = b''  # the beginning of a line whose end has not been printed
        os.set_blocking(self.output, False)
        environment = {**os.environ, **variables, _PIPE: str(childs_pipe.fileno())}

        # The child inherits the signal handlers of this process. So signals are blocked: in the
        # child until `_set_up_child` has replaced the handlers, and here until it has started.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            with warnings.catch_warnings():
                # jax warns of forks, because its threads may hold locks that the child needs. But
                # this child runs only `_set_up_child` before the command.
                warnings.filterwarnings('ignore', r'os\.fork\(\) was called', RuntimeWarning)
                self._process = subprocess.Popen(
                    line,
                    stdin=subprocess.DEVNULL,
                    stdout=childs_output,
                    stderr=childs_output,
                    pass_fds=[childs_pipe.fileno()],
                    env=environment,
                    start_new_session=True,
                    preexec_fn=functools.partial(_set_up_child, cores, os.getpid()),
                )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            childs_pipe.close()
            os.close(childs_output)

    def ended(self) -> int | None:
        """Returns the exit code, below zero if a signal ended the child; None while it runs."""
        return self._process.poll()

    def lines(self, last: bool = False) -> list[str]:
        """Returns the lines that the child has printed since the last call.

        After 'step 1\\nste' they are ['step 1']. The next call returns the line that begins with
        'ste', if it is complete. With `last`, it is returned at once.
        """
        with contextlib.suppress(BlockingIOError):  # the child has printed nothing more so far
            while part := os.read(self.output, _PART_SIZE):
                self._unfinished += part
        lines = self._unfinished.split(b'\n')
        self._unfinished = lines.pop()  # what follows the last newline
        if last and self._unfinished:
            lines.append(self._unfinished)
        return [line.decode(errors='replace').rstrip('\r') for line in lines]

    def send(self, *message: Any) -> None:
        """Sends a message, unless the child has ended."""
        with contextlib.suppress(OSError):
            self.pipe.send(message)

    def stop(self) -> None:
        """Asks the child to save its state and to end."""
        self._process.terminate()

    def close(self) -> None:
        """Kills the child and the processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.pipe.close()
        os.close(self.output)


def _set_up_child(cores: Sequence[int], parent: int) -> None:
    """Sets the signals and cores of a child; runs in the child before its program is loaded.

    `parent` is the process id of the parent.
    """
    # The child has inherited the parent's signal handlers.
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    end_with_parent(parent)
    if hasattr(os, 'sched_setaffinity'):
        os.sched_setaffinity(0, cores)
    # The parent has blocked the signals before it started the child.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def end_with_parent(parent: int) -> None:
    """Makes this process get SIGTERM once its parent ends. It does nothing outside of Linux.

    `parent` is the process id of the parent.
    """
    if sys.platform == 'linux':
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        has_ended_before = os.getppid() != parent
        if has_ended_before:
            os._exit(EXIT_REQUEUE)
