"""Stop requests by signal, and exit codes for launchers."""

import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NoReturn

from qkattn.errors import Stopped

# The exit code for an impossible setting or directory: launchers must not retry.
EXIT_CONFIG = 2
# The exit code after an interrupt, as a shell reports it for SIGINT.
EXIT_INTERRUPTED = 128 + signal.SIGINT
# The exit code after a stop on request with nothing lost: launchers run the same command again.
EXIT_REQUEUE = 75
# The scripts of experiments that use `exit_on_signal`. SIGTERM and Ctrl-C kill other scripts.
RESUMABLE = ('ablate', 'claims', 'prepare_data', 'train')
# A lock that is held during writes. `end` waits for it.
no_interrupt = threading.RLock()
# Functions that `end` calls in reverse order, such as the release of a lease. `no_interrupt` guards
# the list.
exit_hooks: list[Callable[[], None]] = []

# The maximum seconds for which `end`, and before it `_Watcher`, wait for a write; also those for
# which `end` waits for its message and the exit hooks, and then for standard output.
_LONGEST_WRITE = 10.0
# The maximum seconds for which `_Watcher.catch_up` waits.
_LONGEST_CATCH_UP = 10.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# The flag --dry_run or --dry_run=POD, with one or two hyphens.
_DRY_RUN = re.compile(r'--?dry_run(=|$)')
# The last messages of a process that ends on request.
_SAVED = 'stopped after the last step, state saved'
_NOTHING_TO_SAVE = 'stopped with nothing to save; run the same command again'
_NOTHING_TO_RESUME = 'interrupted'
INTERRUPTED = 'interrupted; the same command resumes from what is saved'


class StopRequest:
    """Turns SIGTERM and the first Ctrl-C into a flag, so that a loop can save and exit.

        with StopRequest() as stop:
            compile()
            stop.defer_exit()
            while not stop.requested: ...

    In a script with `exit_on_signal`, the third Ctrl-C ends the process without saving. In other
    scripts, the second Ctrl-C raises KeyboardInterrupt. The end of the block restores the previous
    handlers. Use it in the main thread only.
    """

    requested: ClassVar[bool] = False  # whether a signal came since the outermost block began
    peers: ClassVar[Any] = None  # the job's qkattn.jobs.peers.JobPeers; None without a job
    deferring: ClassVar[list['StopRequest']] = []  # the blocks with something to save
    _depth: ClassVar[int] = 0  # number of nested blocks
    _interrupts: ClassVar[int] = 0  # how often Ctrl-C came while there was something to save
    _watcher: ClassVar['_Watcher | None'] = None  # set within `exit_on_signal`

    def __enter__(self) -> 'StopRequest':
        StopRequest._depth += 1
        self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *exc_info: object) -> None:
        _restore(self._previous)
        self._let_watcher_catch_up()
        with no_interrupt:
            self._stop_deferring()
        StopRequest._depth -= 1
        if StopRequest._depth == 0:
            StopRequest.requested = False
            StopRequest._interrupts = 0

    def defer_exit(self) -> None:
        """Keeps signals from ending the process until the block ends; they only set `requested`.

        Call it before work whose state has to be saved, such as training. The caller then stops and
        saves when `requested` is set. In a job, all processes call it and wait for each other.

        Raises:
            Stopped: This process, or another process of the job, has already got a signal.
        """
        with no_interrupt:
            self.deferring.append(self)

        # A signal may have come just before, to this process or to another one of the job.
        is_stop_requested = self.requested
        if self.peers is not None:  # in a job
            is_stop_requested = self.peers.meet(self.requested)  # whether any process passes True
        if is_stop_requested:
            raise Stopped('stopped with nothing to save')

    def allow_exit(self) -> None:
        """Undoes `defer_exit`: signals end the process at once again.

        Call it when everything is saved. In a job, all processes call it and wait for each other.

        Raises:
            Stopped: This process, or another process of the job, has got a signal.
        """
        is_known_to_all = False  # whether all processes of the job know of a signal
        if self.peers is not None:  # in a job
            is_known_to_all = self.peers.meet(self.requested)  # whether any process passes True

        self._let_watcher_catch_up()
        with no_interrupt:
            self._stop_deferring()
            # Only this process knows of a signal that came after `meet`. `end` tells the others.
            is_known_only_here = self.requested and not is_known_to_all
            is_watched = self._watcher is not None  # within `exit_on_signal`
            if is_known_only_here and is_watched:
                end(EXIT_REQUEUE, _SAVED)
        if self.requested or is_known_to_all:
            raise Stopped(_SAVED)

    def should_stop(self, step: int, has_other_reason: bool = False) -> bool:
        """Whether to stop after `step` finished steps; all processes of a job stop together.

        `has_other_reason` is whether this process has to stop, but not due to a signal.
        """
        if self.peers is not None:
            return self.peers.should_stop(step, has_other_reason)
        return self.requested or has_other_reason

    @classmethod
    def pending(cls) -> bool:
        """Whether a stop was requested in this process while there is something to save."""
        return cls.requested and bool(cls.deferring)

    def _let_watcher_catch_up(self) -> None:
        """Waits until the watcher thread has acted on all signals so far.

        Otherwise the watcher might take a signal from before the save for a later one, and end the
        process.
        """
        if self._watcher is not None:
            self._watcher.catch_up()

    def _stop_deferring(self) -> None:
        """Removes this block from the blocks with something to save."""
        self.deferring[:] = [block for block in self.deferring if block is not self]

    def _handle(self, number: int, frame: Any) -> None:
        """Requests a stop; the signal handler for SIGTERM and Ctrl-C."""
        StopRequest.requested = True
        if number == signal.SIGTERM:
            return

        is_watched = StopRequest._watcher is not None  # within `exit_on_signal`
        if not is_watched:
            _say('\nstopping after this step; press Ctrl-C again to stop at once\n')
            # The default handler raises KeyboardInterrupt.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return

        # `deferring` lists the `with` blocks that have something to save.
        has_something_to_save = bool(StopRequest.deferring)
        if not has_something_to_save:
            return  # the watcher thread ends the process
        StopRequest._interrupts += 1
        if StopRequest._interrupts == 1:
            _say('\nstopping after this step, and saving\n')
        elif StopRequest._interrupts == 2:
            _say('\nwaiting until the state is saved; press Ctrl-C again to stop without it\n')
        else:
            end(EXIT_INTERRUPTED, INTERRUPTED)


@contextlib.contextmanager
def exit_on_signal(dry_run: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """A block in which SIGTERM and Ctrl-C end the process, unless a `StopRequest` defers the exit.

    Python's signal handlers do not run while XLA compiles in C++. So a thread ends the process. It
    reads a pipe into which Python writes signal numbers at once, even during compilation.

    Args:
        dry_run: Returns whether the script leaves nothing to resume from; called once, at the
            beginning. If so, the exit code does not ask for a restart.
    """
    watcher = _Watcher(dry_run())  # the thread
    previous_descriptor = signal.set_wakeup_fd(watcher.write_end, warn_on_full_buffer=False)
    # Python writes to the pipe only for signals that have a Python handler.
    previous_handlers = {}
    for number in _SIGNALS:
        previous_handlers[number] = signal.signal(number, lambda *_: None)
    StopRequest._watcher = watcher

    final_handlers: dict[signal.Signals, Any] = previous_handlers
    try:
        yield
    except Stopped:
        # Ignore signals until the process ends. Python would remove its own handlers before.
        final_handlers = dict.fromkeys(_SIGNALS, signal.SIG_IGN)
        raise
    finally:
        StopRequest._watcher = None
        _restore(final_handlers)
        signal.set_wakeup_fd(previous_descriptor)
        watcher.close()


def exit_while_starting(script: str) -> None:
    """Lets signals end a script with a message while it imports its modules.

    Does nothing for a script that is not in RESUMABLE, which signals kill.
    """
    if script not in RESUMABLE:
        return
    dry_run = any(_DRY_RUN.match(argument) for argument in sys.argv)  # flags are not parsed yet

    def end_script(number: int, frame: Any) -> None:
        _end_with_nothing_to_save(number, dry_run)

    for number in _SIGNALS:
        signal.signal(number, end_script)


def end(code: int, sentence: str) -> NoReturn:
    """Ends the process with an exit code and a message, from any thread.

    Waits for a write in progress, calls the exit hooks, flushes standard output, and tells the
    other processes of a job. Does not wait for a write or a hook that hangs with its disk, nor for
    a reader of the output that hangs.
    """
    # Never released, so that no other thread begins to write.
    no_interrupt.acquire(timeout=_LONGEST_WRITE)
    try:
        # Ends the process if printing the message or a hook hangs.
        fallback = _call_later(_leave, code, sentence)
        text = f'{sentence}\n'
        if os.isatty(2):
            text = f'\n{text}'  # the cursor may be at the end of a progress line
        _say(text)
        for hook in reversed(exit_hooks):
            hook()
        fallback.cancel()
    finally:
        _leave(code, sentence)


def _leave(code: int, sentence: str) -> NoReturn:
    """Flushes standard output, tells the other processes of a job, and ends this process."""
    try:
        # Ends the process if flushing hangs, as for a full pipe whose reader hangs.
        _call_later(_tell_peers_and_exit, code, sentence)
        with contextlib.suppress(Exception):  # nobody reads standard output
            sys.stdout.flush()
    finally:
        _tell_peers_and_exit(code, sentence)


def _call_later(
    function: Callable[[int, str], NoReturn], code: int, sentence: str
) -> threading.Timer:
    """Calls a function after _LONGEST_WRITE seconds, unless the returned timer is cancelled."""
    timer = threading.Timer(_LONGEST_WRITE, function, [code, sentence])
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # threads cannot start while Python shuts down
        timer.start()
    return timer


def _tell_peers_and_exit(code: int, sentence: str) -> NoReturn:
    """Tells the other processes of a job that this one ends, and ends it."""
    try:
        # The other processes may then end this process.
        if StopRequest.peers is not None:
            StopRequest.peers.announce(code, sentence)
    finally:
        os._exit(code)


def _end_with_nothing_to_save(number: int, dry_run: bool) -> NoReturn:
    """Ends the process after signal `number`, before the first step.

    The exit code asks launchers to run the command again, except for a dry run.
    """
    if dry_run:
        end(128 + number, _NOTHING_TO_RESUME)  # as a shell reports it for other commands
    end(EXIT_REQUEUE, _NOTHING_TO_SAVE)


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    """Installs signal handlers that `signal.signal` has returned."""
    for number, handler in handlers.items():
        # None is a handler that was not installed from Python, and cannot be restored.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


class _Watcher:
    """A thread that reads signal numbers from a pipe, and ends the process.

    If a `StopRequest` has something to save, the thread only sets `StopRequest.requested`.

    Attributes:
        write_end: The file descriptor that Python writes signal numbers to, one byte each.
    """

    def __init__(self, dry_run: bool) -> None:
        """Starts the thread; `dry_run` is whether there is nothing to resume from."""
        self._dry_run = dry_run
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self.write_end, False)
        self._caught_up = threading.Event()
        self._thread = threading.Thread(target=self._watch, name='signals', daemon=True)
        self._thread.start()

    def catch_up(self) -> None:
        """Waits until the thread has acted on each signal in the pipe."""
        if not self._thread.is_alive():  # in a forked child
            return
        self._caught_up.clear()
        with contextlib.suppress(BlockingIOError):  # the pipe is full of signals
            os.write(self.write_end, b'\0')
            self._caught_up.wait(_LONGEST_CATCH_UP)

    def close(self) -> None:
        """Ends the thread."""
        os.close(self.write_end)

    def _watch(self) -> None:
        while content := os.read(self._read_end, 1):  # empty once the write end is closed
            number = content[0]
            if number == 0:  # from `catch_up`
                self._caught_up.set()
            elif number in _SIGNALS:
                self._act_on(number)
        os.close(self._read_end)

    def _act_on(self, number: int) -> None:
        """Ends the process after signal `number`, or requests a stop if there is work to save."""
        # A write that hangs with its disk must not keep the process alive.
        is_lock_held = no_interrupt.acquire(timeout=_LONGEST_WRITE)
        try:
            has_something_to_save = bool(StopRequest.deferring)
            if not has_something_to_save:
                _end_with_nothing_to_save(number, self._dry_run)
            # `StopRequest._handle` would set the flag only after code in C++ returns.
            StopRequest.requested = True
        finally:
            if is_lock_held:
                no_interrupt.release()


def _say(text: str) -> None:
    """Writes to standard error; drops the text if nobody reads it.

    Unlike `print`, it is safe in a signal handler.
    """
    with contextlib.suppress(OSError):  # for example, Ctrl-C has ended tee in `... | tee log`
        os.write(2, text.encode())


def _in_forked_child() -> None:
    """Detaches a forked child from the pipe, so that its signals do not reach this process."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_in_forked_child)
