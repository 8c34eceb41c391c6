"""Child processes that run on their own cores, and whose output the parent reads by lines."""

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
# Bytes per read of a child's output.
_PART_SIZE = 65536
# The prctl(2) option for the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def pipe_to_parent() -> Connection | None:
    """Returns the pipe to the parent process; None if this process is not a `Child`.

    Later calls return None.
    """
    text = os.environ.pop(_PIPE, None)
    if text is None:
        return None
    descriptor = int(text)
    os.set_inheritable(descriptor, False)  # keeps the pipe from children of this process
    return Connection(descriptor)


class Child:
    """A child process that runs on its own cores.

    The child does not get Ctrl-C. On Linux, it gets SIGTERM when the parent ends or is killed.

    Attributes:
        pipe: A connection for messages between parent and child.
        output: The file descriptor of the child's output.
    """

    def __init__(self, line: Sequence[str], cores: Sequence[int], variables: Mapping[str, str]):
        """Starts a command.

        Args:
            line: The command and its arguments.
            cores: The IDs of the CPU cores to run on.
            variables: Environment variables, in addition to those of this process.
        """
        self.pipe, childs_pipe = multiprocessing.Pipe()
        self.output, childs_output = os.pipe()
        os.set_blocking(self.output, False)
        self._incomplete_line = b''  # output after the last newline
        environment = {**os.environ, **variables, _PIPE: str(childs_pipe.fileno())}

        # The child inherits the parent's signal handlers. Block signals until `_set_up_child` has
        # replaced the handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            with warnings.catch_warnings():
                # jax warns that forks may deadlock. The child only sets itself up and runs `line`.
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
        """Returns the complete lines that the child has printed since the last call.

        For example, the output 'step 1\\nste' gives ['step 1'], and 'ste' waits for a later call.
        With `last`, an incomplete line is returned as well.
        """
        output = self._incomplete_line
        with contextlib.suppress(BlockingIOError):  # raised when there is no output to read
            while part := os.read(self.output, _PART_SIZE):
                output += part
        *lines, self._incomplete_line = output.split(b'\n')  # b'' after a final newline
        if last and self._incomplete_line:
            lines.append(self._incomplete_line)
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
    """Sets signals and CPU cores in a forked child, before the child executes its command.

    Args:
        cores: The IDs of the CPU cores to run on.
        parent: The process ID of the parent.
    """
    # The child has inherited the parent's signal handlers.
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    end_with_parent(parent)
    if hasattr(os, 'sched_setaffinity'):
        os.sched_setaffinity(0, cores)
    # The parent has blocked these signals before the fork.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def end_with_parent(parent: int) -> None:
    """Makes this process get SIGTERM when its parent ends; has no effect outside of Linux.

    Args:
        parent: The process ID of the parent.
    """
    if sys.platform == 'linux':
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        # The parent may have ended before this call. Then this process has another parent.
        has_parent_ended = os.getppid() != parent
        if has_parent_ended:
            os._exit(EXIT_REQUEUE)
