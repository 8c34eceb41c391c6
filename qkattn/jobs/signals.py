"""Stop requests by signal, and the exit codes that launchers act on."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NoReturn, Protocol

from qkattn.errors import Stopped

EXIT_CONFIG = 2
"""An impossible setting or directory: launchers must not retry."""

EXIT_REQUEUE = 75
"""Stopped on request with nothing lost: launchers run the same command again."""

RESUMABLE = ('ablate', 'claims', 'prepare_data', 'train')
"""The scripts of experiments that are `leaving_at_once`; SIGTERM and Ctrl-C end the others."""

WHOLE = threading.RLock()
"""Held while something is written that `leaving_at_once` must not cut."""

BEFORE_LEAVING: list[Callable[[], None]] = []
"""What `end` calls first, latest first, such as the release of a lease; guarded by WHOLE."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SAVED = 'stopped after the last step, state saved'
_NOTHING = 'stopped with nothing to save; the same command resumes'
_PATIENCE = 10.0  # seconds that `end` waits for WHOLE


class Peers(Protocol):
    """The other processes of a job (qkattn.jobs.peers), which stop at the same step."""

    def hold(self, requested: bool) -> bool:
        """Waits until every process is here; whether a stop was requested in one of them."""

    def due(self, step: int, also: bool) -> bool:
        """Whether to stop after `step` steps, as `StopRequest.due`."""

    def announce(self, code: int, sentence: str) -> None:
        """Tells them that this process ends, with this exit code."""


class StopRequest:
    """Turns SIGTERM and the first Ctrl-C into a flag, so that a loop can save and exit.

        with StopRequest() as stop:
            compile()
            stop.hold()
            while not stop.requested: ...

    A second Ctrl-C interrupts at once. Previous handlers are restored on exit. Use it in the main
    thread. In a job of several processes ask `due`, which stops them at the same step; jax's own
    handling of SIGTERM is off there (qkattn.jobs.bootstrap).
    """

    peers: ClassVar[Peers | None] = None
    """The other processes of the job."""

    _held: list['StopRequest'] = []
    _leaves = False

    def __init__(self) -> None:
        self.requested = False
        """True once a signal has arrived."""
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> 'StopRequest':
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        # A request that an enclosing instance has received holds here, too.
        self.requested |= any(outer.requested for outer in self._enclosing())
        return self

    def __exit__(self, *exc_info: object) -> None:
        # A request that came too late to be acted on here is the enclosing instance's.
        for outer in self._enclosing():
            outer.requested |= self.requested
        for number, handler in self._previous.items():
            # None is a handler that was not installed from Python and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        with WHOLE:
            self._held[:] = [other for other in self._held if other is not self]

    def hold(self) -> None:
        """From here to the end of the block there is something to save: nothing leaves at once.

        Every process of a job calls it, and waits for the others.

        Raises:
          Stopped: a signal has arrived before, in any process.
        """
        with WHOLE:
            self._held.append(self)
        if self.requested if self.peers is None else self.peers.hold(self.requested):
            raise Stopped('stopped with nothing to save')

    def release(self) -> None:
        """Everything is saved: from here on signals leave at once again.

        Every process of a job calls it, and waits for the others.

        Raises:
          Stopped: a signal has arrived before, in any process.
        """
        stop = self.peers is not None and self.peers.hold(self.requested)
        with WHOLE:
            self._held[:] = [other for other in self._held if other is not self]
            if self.requested and self._leaves and not stop:
                end(EXIT_REQUEUE, _SAVED)  # the other processes, if any, leave with this one
        if stop or self.requested:
            raise Stopped(_SAVED)

    def due(self, step: int, also: bool = False) -> bool:
        """Whether to stop after `step` steps: the same at that step in all processes.

        Args:
          also: whether this process has a reason of its own.
        """
        return self.requested or also if self.peers is None else self.peers.due(step, also)

    @classmethod
    def held(cls) -> bool:
        """Whether there is something to save."""
        return bool(cls._held)

    @classmethod
    def pending(cls) -> bool:
        """Whether a stop was requested in this process while there is something to save."""
        return any(stop.requested for stop in cls._held)

    def _enclosing(self) -> list['StopRequest']:
        handlers = [getattr(handler, '__self__', None) for handler in self._previous.values()]
        return [outer for outer in handlers if isinstance(outer, StopRequest)]

    def _handle(self, number: int, frame: Any) -> None:
        self.requested = True
        if number == signal.SIGINT:
            if self._held or not self._leaves:
                _say('\nstopping after this step; press Ctrl-C again to stop at once\n')
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """A block in which SIGTERM and Ctrl-C end the process unless a `StopRequest` is held.

    For the main function of a script, which owns its process. It exits with EXIT_REQUEUE from
    within a compilation, too: XLA compiles in C++, and Python runs no handler before that returns,
    but a thread is told of the signal by the wake-up descriptor.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    previous_descriptor = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    # The descriptor is written for signals that have a handler in Python.
    previous = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
    threading.Thread(target=_watch, args=(reading,), name='signals', daemon=True).start()
    StopRequest._leaves = True
    try:
        yield
    finally:
        StopRequest._leaves = False
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(previous_descriptor)
        os.close(writing)


def leave_while_starting(script: str) -> None:
    """Lets signals end the process of a script, in one line, from here to its main function.

    The imports between take seconds, and may swallow a KeyboardInterrupt or crash on it. Behind its
    main function, a script that is RESUMABLE leaves in the same way.
    """
    if script in RESUMABLE:
        for number in _SIGNALS:
            signal.signal(number, lambda *_: end(EXIT_REQUEUE, _NOTHING))
    elif signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored by a shell
        signal.signal(signal.SIGINT, _interrupted)
    sys.excepthook = _without_interrupts


def started() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt, except in a RESUMABLE script."""
    if signal.getsignal(signal.SIGINT) is _interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupted(number: int, frame: Any) -> None:
    _without_interrupts(KeyboardInterrupt, KeyboardInterrupt(), None)
    # The end that a shell expects: it then ends a loop, or a script, around the command.
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _without_interrupts(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        _say('\n' * os.isatty(2) + 'interrupted\n')
    else:
        sys.__excepthook__(kind, error, trace)


def _watch(reading: int) -> None:
    while number := os.read(reading, 1):
        if number[0] in _SIGNALS:
            _leave_unless_held()
    os.close(reading)


def _leave_unless_held() -> None:
    with WHOLE:
        for stop in StopRequest._held:
            stop.requested = True  # the handler may have to wait for native code
        if not StopRequest._held:
            end(EXIT_REQUEUE, _NOTHING)


def end(code: int, sentence: str) -> NoReturn:
    """Ends the process from any thread, after a write that is going on; leases are released."""
    # A write that hangs, with its file system, must not keep the process.
    WHOLE.acquire(timeout=_PATIENCE)
    try:
        # On a terminal the cursor may stand behind the progress line.
        _say('\n' * os.isatty(2) + f'{sentence}\n')
        for call in BEFORE_LEAVING[::-1]:
            call()
        if StopRequest.peers is not None:
            StopRequest.peers.announce(code, sentence)
        sys.stdout.flush()
    finally:
        os._exit(code)


def _say(text: str) -> None:
    # os.write, because a handler may interrupt a print halfway. Ctrl-C also ends `... | tee log`.
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


def _in_forked_child() -> None:
    # A signal to a child is not one to this process.
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_in_forked_child)
