"""Stop requests by signal, and the exit codes that launchers act on."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NoReturn

from qkattn.errors import Stopped

# An impossible setting or directory: launchers must not retry.
EXIT_CONFIG = 2
# What a shell reports of a command that SIGINT ended.
EXIT_INTERRUPTED = 128 + signal.SIGINT
# Stopped on request with nothing lost: launchers run the same command again.
EXIT_REQUEUE = 75
# The scripts of experiments that `exit_on_signal`; SIGTERM and Ctrl-C kill the others.
RESUMABLE = ('ablate', 'claims', 'prepare_data', 'train')
# Held while something is written that `exit_on_signal` must not cut.
no_interrupt = threading.RLock()
# What `end` calls, latest first, such as the release of a lease; guarded by `no_interrupt`.
exit_hooks: list[Callable[[], None]] = []

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SAVED = 'stopped after the last step, state saved'
_NOTHING = 'stopped with nothing to save; the same command resumes'
INTERRUPTED = 'interrupted; the same command resumes from what is saved'


class StopRequest:
    """Turns SIGTERM and the first Ctrl-C into a flag, so that a loop can save and exit.

        with StopRequest() as stop:
            compile()
            stop.defer_exit()
            while not stop.requested: ...

    In a script with `exit_on_signal` a second Ctrl-C changes nothing, and a third one ends the
    process without what is being saved; elsewhere the second one interrupts at once. Previous
    handlers are restored on exit. For the main thread.
    """

    requested: ClassVar[bool] = False  # whether a signal came since the outermost block began
    peers: ClassVar[Any] = None  # the others of the job, a qkattn.jobs.peers.JobPeers
    deferring: ClassVar[list['StopRequest']] = []  # those with something to save
    _depth: ClassVar[int] = 0  # of nested blocks
    _interrupts: ClassVar[int] = 0  # Ctrl-C while there was something to save
    _exits = False  # whether inside `exit_on_signal`

    def __enter__(self) -> 'StopRequest':
        StopRequest._depth += 1
        self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *exc_info: object) -> None:
        _restore(self._previous)
        with no_interrupt:
            self._undefer()
        StopRequest._depth -= 1
        if StopRequest._depth == 0:
            StopRequest.requested = False
            StopRequest._interrupts = 0

    def defer_exit(self) -> None:
        """From here to the end of the block there is something to save: no signal exits at once.

        All processes of a job call it. Raises Stopped if a signal has come before, in any of them.
        """
        with no_interrupt:
            self.deferring.append(self)
        stop = self.requested
        if self.peers is not None:
            stop = self.peers.meet(self.requested)
        if stop:
            raise Stopped('stopped with nothing to save')

    def allow_exit(self) -> None:
        """Everything is saved: from here on signals exit at once again.

        All processes of a job call it. Raises Stopped if a signal has come before, in any of them.
        """
        all_stop = self.peers is not None and self.peers.meet(self.requested)
        with no_interrupt:
            self._undefer()
            # In a job, a signal since the processes met: they exit with this one.
            if self.requested and self._exits and not all_stop:
                end(EXIT_REQUEUE, _SAVED)
        if all_stop or self.requested:
            raise Stopped(_SAVED)

    def should_stop(self, step: int, also: bool = False) -> bool:
        """Whether to stop after `step` steps, as all do; `also`: this one has another reason to."""
        if self.peers is not None:
            return self.peers.should_stop(step, also)
        return self.requested or also

    @classmethod
    def pending(cls) -> bool:
        """Whether a stop was requested in this process while there is something to save."""
        return cls.requested and bool(cls.deferring)

    def _undefer(self) -> None:
        """Takes this block out of those with something to save."""
        self.deferring[:] = [other for other in self.deferring if other is not self]

    def _handle(self, number: int, frame: Any) -> None:
        """The handler of SIGTERM and Ctrl-C: sets `requested`, and says what another Ctrl-C does.

        `_exits` is whether the process is in `exit_on_signal`, `deferring` whether there is
        something to save.
        """
        StopRequest.requested = True
        if number != signal.SIGINT:
            return
        if not self._exits:
            _say('\nstopping after this step; press Ctrl-C again to stop at once\n')
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return
        if not self.deferring:
            return  # the thread of `exit_on_signal` ends the process
        StopRequest._interrupts += 1
        if self._interrupts == 1:
            _say('\nstopping after this step, and saving\n')
        elif self._interrupts == 2:
            _say('\nwaiting until the state is saved; press Ctrl-C again to stop without it\n')
        else:
            end(EXIT_INTERRUPTED, INTERRUPTED)


@contextlib.contextmanager
def exit_on_signal() -> Iterator[None]:
    """A block in which SIGTERM and Ctrl-C end the process unless a `StopRequest` defers that.

    A thread reads the wake-up descriptor: no handler runs while XLA compiles, which is in C++.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    previous_descriptor = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    # It is written for signals that have a handler in Python.
    previous = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
    threading.Thread(target=_watch, args=(reading,), name='signals', daemon=True).start()
    StopRequest._exits = True
    try:
        yield
    except Stopped:  # the process ends as it was asked to, and not by who asks again
        # Python keeps this to its very end, where it takes its own handlers away.
        previous = dict.fromkeys(_SIGNALS, signal.SIG_IGN)
        raise
    finally:
        StopRequest._exits = False
        _restore(previous)
        signal.set_wakeup_fd(previous_descriptor)
        os.close(writing)


def exit_while_starting(script: str) -> None:
    """Lets signals end a RESUMABLE script in one line while it imports."""
    if script in RESUMABLE:
        for number in _SIGNALS:
            signal.signal(number, lambda *_: end(EXIT_REQUEUE, _NOTHING))


def end(code: int, sentence: str) -> NoReturn:
    """Ends the process from any thread, after a write in progress; leases are released.

    Results are printed before the others know of it, and may end this process, too.
    """
    # A write that hangs, with its file system, must not keep the process.
    no_interrupt.acquire(timeout=10.0)
    try:
        text = f'{sentence}\n'
        if os.isatty(2):
            text = f'\n{text}'  # the cursor may stand behind the progress line
        _say(text)
        for hook in reversed(exit_hooks):
            hook()
        with contextlib.suppress(Exception):  # without a reader
            sys.stdout.flush()
        if StopRequest.peers is not None:
            StopRequest.peers.announce(code, sentence)
    finally:
        os._exit(code)


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    """Installs the handlers that signals had before."""
    for number, handler in handlers.items():
        # None is a handler that was not installed from Python and cannot be restored.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _watch(reading: int) -> None:
    """Acts on signals, whose numbers are read from a pipe as one byte each, until it is closed."""
    while number := os.read(reading, 1):
        if number[0] in _SIGNALS:
            with no_interrupt:
                if not StopRequest.deferring:
                    end(EXIT_REQUEUE, _NOTHING)
                StopRequest.requested = True  # the handler may have to wait for native code
    os.close(reading)


def _say(text: str) -> None:
    """Writes to standard error, if it has a reader."""
    # os.write, because a handler may interrupt a print halfway. Ctrl-C also ends `... | tee log`.
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


def _in_forked_child() -> None:
    # A signal to a child is not one to this process.
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_in_forked_child)
