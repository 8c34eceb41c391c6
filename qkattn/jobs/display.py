"""The display of runs on standard error: a line that a terminal redraws, plain lines elsewhere."""

import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TextIO

import numpy as np

from qkattn.jobs.output import say, short

# A terminal is drawn at most and at least this often, so that something moves.
_DRAWN_EVERY, _TICK = 0.2, 1.0
# Plain lines are at least so many seconds apart, and with a tick at most five; later they are this
# fraction of the run so far apart, so that a long run does not fill its log.
_QUIET, _PLAIN_FRACTION = 4.0, 0.05
_LABEL = 24
_UNIT = ' nats/token'
_ERASE = '\r\x1b[2K'  # the line that is shown

_log = logging.getLogger(__name__)


class Screen:
    """A stream of whole lines, below which a terminal shows one that is redrawn."""

    def __init__(self, stream: TextIO | None = None, columns: int | None = None):
        """Draws nothing on a stream (None: standard error) of so many columns (None: its own)."""
        self._stream, self._columns, self._line = stream or sys.stderr, columns, ''
        dumb = os.environ.get('TERM', 'dumb') in ('dumb', 'unknown')
        self.terminal = self._stream.isatty() and not dumb

    def print(self, text: str) -> None:
        """Writes a line, above the one that is shown."""
        self._write(f'{text}\n', self._line)

    def draw(self, line: str) -> None:
        """Shows this line in place of the one before; for a terminal only."""
        columns = self._columns
        with contextlib.suppress(OSError):  # the terminal may be gone; `say` then drops the line
            columns = columns or os.get_terminal_size(self._stream.fileno()).columns
        columns = columns or 80
        self._write('', line if len(line) < columns else f'{line[: columns - 2]}…')

    def close(self, keep: bool = False) -> None:
        """Removes the line, or keeps it; may be called twice."""
        self._write(f'{self._line}\n' if keep and self._line else '', '')

    def _write(self, text: str, line: str) -> None:
        erase = _ERASE if self._line else ''
        self._line = line
        say(f'{erase}{text}{line}', self._stream)


@dataclasses.dataclass(frozen=True)
class StudyLeft:
    """The runs of a study without a result after this one, as far as its plan is known."""

    runs: int
    work: float  # of these runs for one of the workers, as a multiple of this run's


class Progress(contextlib.AbstractContextManager['Progress']):
    """Phase or step, training loss and time left of a run; for process 0 alone."""

    _open: ClassVar['Progress | None'] = None

    def __init__(
        self,
        label: str,
        total_steps: int = 0,
        *,
        tokens_per_step: int | None = None,
        study: StudyLeft | None = None,
        screen: Screen | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Shows nothing until a phase lasts, or until the first `update`.

        Tokens per step are summed over trials. Without a study every evaluation is printed.
        """
        self._label, self._total = label, total_steps
        self._tokens_per_step, self._study = tokens_per_step, study
        self._screen = Screen() if screen is None else screen
        self._unit = '' if self._screen.terminal else _UNIT
        self._clock, self._opened = clock, clock()
        self._phase: tuple[str, float] | None = None  # name, start
        self._first: tuple[int, float] | None = None  # step and time of the first report
        self._last = self._shown = 0, self._opened  # of the newest one, and of the one shown
        self._loss = self._validation_loss = None  # the newest ones
        self._next_time = self._opened + _QUIET  # at which something is shown
        # Reentrant: the program's log goes through here, too, and may come from anywhere.
        self._lock = threading.RLock()
        self._closed = threading.Event()
        Progress._open = self
        threading.Thread(target=self._run, name='progress', daemon=True).start()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A block without steps, as 'compiling': named if it lasts, its seconds logged at DEBUG."""
        before, start = self._phase, self._clock()
        self._phase = name, start
        try:
            yield
        finally:
            self._phase = before
            _log.debug('%s: %s took %.3f s', self._label, name, self._clock() - start)

    def begin(self) -> None:
        """Training starts or resumes."""
        self._phase = 'first steps', self._clock()

    def update(self, step: int, loss: Any = None) -> None:
        """Takes the steps done, resumed ones too, and the training loss of trials, in nats."""
        with self._lock:
            now, self._phase = self._clock(), None
            self._last, self._loss = (step, now), loss
            if self._first is None:
                # Rates are measured from here: the time before it is mostly compilation.
                self._first, self._next_time = self._last, now
            self._show(now)

    def evaluated(self, step: int, loss: Any) -> None:
        """Takes the validation loss of the trials, in nats per token, at `step`."""
        with self._lock:
            self._validation_loss = loss
            if self._study is None:
                text = loss_text(loss, _UNIT)
                self.print(f'step {step:,}/{self._total:,}: validation loss {text}')

    def print(self, text: str) -> None:
        """Writes a line of its own."""
        with self._lock:
            self._screen.print(text)

    def close(self) -> None:
        """Shows the last report if it has not been shown; may be called twice."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            self._phase = None
            if self._screen.terminal or self._last != self._shown:
                self._next_time = 0.0
                self._show(self._clock())
            self._screen.close(keep=self._first is not None)
            Progress._open = None

    def tick(self) -> None:
        """Shows how long the phase has lasted, or how long the run still takes."""
        with self._lock:
            if not self._closed.is_set():
                self._show(self._clock())

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self) -> None:
        with contextlib.suppress(ValueError):  # the stream is closed
            while not self._closed.wait(_TICK):
                self.tick()

    def _show(self, now: float) -> None:
        """Shows the phase, or the last report, if it is time."""
        if now < self._next_time and not (self._phase and self._screen.terminal):
            return
        if self._phase:
            name, start = self._phase
            text = f'{name} ... {now - start:.0f} s'
        elif self._first:
            self._shown = self._last
            text = ', '.join(filter(None, self._details(now)))
        else:
            return
        if self._screen.terminal:
            self._screen.draw(f'{short(self._label, _LABEL)}: {text}')
            self._next_time = now + _DRAWN_EVERY
        else:
            self.print(f'{self._label}: {text}')
            self._next_time = now + max(_QUIET, _PLAIN_FRACTION * (now - self._opened))

    def _details(self, now: float) -> Iterator[str]:
        """What is known of the run after its last report, by importance; '' for what is not."""
        (step, last), (first_step, first) = self._last, self._first or self._last
        yield f'{step / max(1, self._total):.0%}'
        if self._loss is not None:
            yield f'loss {loss_text(self._loss, self._unit)}'
        each = (last - first) / max(1, step - first_step)  # with what is between the steps
        left = max(0.0, (self._total - step) * each - (now - last))
        if each and step < self._total:
            yield f'{interval(left)} left'
        if self._study and self._study.runs:
            whole = first - self._opened + each * self._total
            yield f'study {interval(left + self._study.work * whole)} left' if each else ''
            yield f'{self._study.runs} run{"s" * (self._study.runs != 1)} left'
        yield f'step {step:,}/{self._total:,}'
        if self._validation_loss is not None:
            yield f'validation loss {loss_text(self._validation_loss, self._unit)}'
        if each and self._tokens_per_step:
            yield f'{self._tokens_per_step / each:,.0f} tokens/s'


def loss_text(loss: Any, unit: str = '') -> str:
    """The loss with four decimals; over several trials its range, and how many are not finite."""
    values = np.asarray(loss, np.float64).ravel()
    finite = values[np.isfinite(values)]
    if finite.size == 0:
        return 'not finite'
    low, high = finite.min(), finite.max()
    text = (f'{low:.4f}' if values.size == 1 else f'{low:.4f} to {high:.4f}') + unit
    diverged = values.size - finite.size
    return f'{text} ({diverged} of {values.size} trials not finite)' if diverged else text


def interval(seconds: float) -> str:
    """'02:10', or '1:02:10' from an hour on."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f'{hours}:{minutes:02d}:{seconds:02d}' if hours else f'{minutes:02d}:{seconds:02d}'


@contextlib.contextmanager
def waiting(label: str, phase: str) -> Iterator[None]:
    """A block outside of a run that is named, as a phase is, if it lasts."""
    with Progress(label) as progress, progress.phase(phase):
        yield


class LogHandler(logging.Handler):
    """Prints messages on standard error, above the display if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        text, progress = self.format(record), Progress._open
        if progress is None:
            say(f'{text}\n', sys.stderr)
        else:
            progress.print(text)
