"""Processes on cores of their own, whose lines this one reads."""

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

# The variable for the descriptor of a child's pipe.
_PIPE = 'QKATTN_PARENT'
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# The operation of prctl(2) that sets the signal which a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def parent() -> Connection | None:
    """The pipe to the process that started this one as a child; None for any other process."""
    text = os.environ.pop(_PIPE, None)
    if text is None:
        return None
    descriptor = int(text)
    os.set_inheritable(descriptor, False)  # by processes that this one starts
    return Connection(descriptor)


class Child:
    """A process on its own cores, which Ctrl-C does not reach; gets SIGTERM if this is killed."""

    def __init__(self, line: Sequence[str], cores: Sequence[int], variables: Mapping[str, str]):
        """Starts the command line on these cores, with variables beside those of this process.

        `pipe` carries messages to it and back; `output` is the descriptor of what it prints, which
        may be waited for.
        """
        self.pipe, childs_pipe = multiprocessing.Pipe()
        self.output, childs_output = os.pipe()
        self._unfinished = b''  # what it has printed of a line
        os.set_blocking(self.output, False)
        # Held back until the child has no handlers of this process, which would take them.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            with warnings.catch_warnings():
                # Of forks in general; this one only runs `_begin` before the program is loaded.
                warnings.filterwarnings('ignore', r'os\.fork\(\) was called', RuntimeWarning)
                self._process = subprocess.Popen(
                    line,
                    stdin=subprocess.DEVNULL,
                    stdout=childs_output,
                    stderr=childs_output,
                    pass_fds=[childs_pipe.fileno()],
                    env={**os.environ, **variables, _PIPE: str(childs_pipe.fileno())},
                    start_new_session=True,
                    preexec_fn=functools.partial(_begin, cores, os.getpid()),
                )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            childs_pipe.close()
            os.close(childs_output)

    def ended(self) -> int | None:
        """The exit code, below zero for a signal; None while it runs."""
        return self._process.poll()

    def lines(self, last: bool = False) -> list[str]:
        """The lines that it has printed since the last call; `last`: also one without an end."""
        with contextlib.suppress(BlockingIOError):  # there is no more for now
            while part := os.read(self.output, 65536):
                self._unfinished += part
        lines = self._unfinished.split(b'\n')
        self._unfinished = lines.pop()
        if last and self._unfinished:
            lines.append(self._unfinished)
        return [line.decode(errors='replace').rstrip('\r') for line in lines]

    def send(self, *message: Any) -> None:
        """Sends a message, unless it has ended."""
        with contextlib.suppress(OSError):
            self.pipe.send(message)

    def stop(self) -> None:
        """Asks it to save and to end."""
        self._process.terminate()

    def close(self) -> None:
        """Kills what is left of it, with the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.pipe.close()
        os.close(self.output)


def _begin(cores: Sequence[int], parent: int) -> None:
    """Called in the child before its program is loaded: its signals, and the cores that it uses."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    end_with_parent(parent)
    if hasattr(os, 'sched_setaffinity'):
        os.sched_setaffinity(0, cores)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def end_with_parent(parent: int) -> None:
    """Called in a child process: it gets SIGTERM once its parent, of this id, ends, on Linux."""
    if sys.platform == 'linux':
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # which has ended before
            os._exit(EXIT_REQUEUE)
