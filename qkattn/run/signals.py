"""Stop requests by signal, and the exit codes that launchers act on."""

import os
import signal
from typing import Any

EXIT_CONFIG = 2
"""An impossible setting or directory: launchers must not retry."""

EXIT_REQUEUE = 75
"""Stopped on request with a checkpoint saved: launchers run the same command again."""


class StopRequest:
    """Turns SIGTERM and the first Ctrl-C into a flag, so that a loop can save and exit.

        with StopRequest() as stop:
            while not stop.requested: ...

    A second Ctrl-C interrupts at once. Previous handlers are restored on exit. Use it in the main
    thread of a job that did not call `jax.distributed.initialize()`: after that call jax handles
    SIGTERM itself, and a handler installed here would replace its own.
    """

    def __init__(self) -> None:
        self.requested = False
        """True once a signal has arrived."""
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> 'StopRequest':
        for number in (signal.SIGTERM, signal.SIGINT):
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

    def _enclosing(self) -> list['StopRequest']:
        handlers = [getattr(handler, '__self__', None) for handler in self._previous.values()]
        return [outer for outer in handlers if isinstance(outer, StopRequest)]

    def _handle(self, number: int, frame: Any) -> None:
        self.requested = True
        if number == signal.SIGINT:
            # os.write, because a handler may interrupt a print halfway.
            os.write(2, b'\nstopping after this step; press Ctrl-C again to stop at once\n')
            signal.signal(signal.SIGINT, signal.default_int_handler)
