"""The display of runs on standard error: rows that a terminal redraws, plain lines elsewhere."""

import contextlib
import dataclasses
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TextIO, cast

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from qkattn.jobs.output import say, short

# A terminal is drawn at most and at least this often, so that something moves.
_DRAWN_EVERY, _TICK = 0.2, 1.0
# Plain lines are at least so many seconds apart, and with a tick at most five; later they are this
# fraction of the run so far apart, so that a long run does not fill its log.
_QUIET, _PLAIN_FRACTION = 4.0, 0.05
_LABEL, _BAR = 24, 12
_UNIT = ' nats/token'

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of a terminal: a label, the fraction done if it is known, details by importance."""

    label: str
    fraction: float | None
    details: str

    def __str__(self) -> str:
        percent = '' if self.fraction is None else f'{self.fraction:.0%}, '
        return f'{self.label}: {percent}{self.details}'


class Screen:
    """A stream of whole lines, below which a terminal shows rows that are redrawn."""

    def __init__(self, stream: TextIO | None = None, columns: int | None = None):
        """Draws nothing on a stream (None: standard error) of so many columns (None: its own)."""
        self._stream, self._columns = stream or sys.stderr, columns
        self._live: Live | None = None
        self.terminal = self._stream.isatty() and not Console(force_terminal=True).is_dumb_terminal

    def print(self, text: str) -> None:
        """Writes a line, above the rows."""
        if self._live is None:
            say(f'{text}\n', self._stream)
        else:
            self._live.console.print(Text(text), soft_wrap=True)

    def draw(self, rows: Sequence[Row]) -> None:
        """Shows these rows; for a terminal only."""
        if self._live is None:
            file = cast(TextIO, _Stream(self._stream))
            console = _Console(
                file=file, force_terminal=True, force_jupyter=False, width=self._columns
            )
            self._live = Live(
                console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
        self._live.update(_table(rows, self._live.console.width), refresh=True)

    def close(self, keep: bool = False) -> None:
        """Removes the rows, or keeps them as lines; may be called twice."""
        if self._live is not None:
            self._live.transient = not keep
            self._live.stop()
            self._live = None


class _Console(Console):
    def show_cursor(self, show: bool = True) -> bool:
        """Leaves the cursor as it is: a process that is killed could not show it again."""
        return False


@dataclasses.dataclass
class _Stream:
    """A stream whose reader may be gone."""

    stream: TextIO

    def write(self, text: str) -> None:
        say(text, self.stream)

    def flush(self) -> None:
        """Nothing is left: `write` flushes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _table(rows: Sequence[Row], width: int) -> Table:
    labels = [short(row.label, min(_LABEL, width // 4)) for row in rows]
    table = Table.grid(padding=(0, 1))
    for column in (max(map(len, labels)), _BAR if width >= 80 else 4, 4, None):
        table.add_column(width=column)
    for row, label in zip(rows, labels, strict=True):
        known = row.fraction is not None
        table.add_row(
            Text(label),
            ProgressBar(1.0 if known else None, row.fraction or 0.0, pulse=not known),
            Text(f'{row.fraction:4.0%}' if known else ''),
            Text(row.details, no_wrap=True, overflow='ellipsis'),
        )
    return table


@dataclasses.dataclass(frozen=True)
class StudyLeft:
    """The runs of a study without a result after this one, as far as its plan is known."""

    runs: int
    work: float  # of these runs for one of the workers, as a multiple of this run's


class Progress(contextlib.AbstractContextManager['Progress']):
    """Phase or step, training loss and time left of a run; for process 0 alone."""

    _shown: ClassVar['Progress | None'] = None

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
        self._every = _DRAWN_EVERY if self._screen.terminal else _QUIET
        self._clock, self._opened = clock, clock()
        self._phase: tuple[str, float] | None = None  # name, start
        self._first: tuple[int, float] | None = None  # step and time of the first report
        self._last = (0, self._opened)
        self._step = self._shown_step = 0
        self._losses: dict[str, Any] = {'training': None, 'validation': None}  # newest
        self._paused = 0.0  # seconds of phases since the first report
        self._next_time = self._opened + _QUIET  # of a plain line
        # Reentrant: the program's log goes through here, too, and may come from anywhere.
        self._lock = threading.RLock()
        self._closed = threading.Event()
        Progress._shown = self
        threading.Thread(target=self._run, name='progress', daemon=True).start()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A block without steps, as 'compiling': named if it lasts, its seconds logged at DEBUG."""
        before, start = self._phase, self._clock()
        self._phase = name, start
        try:
            yield
        finally:
            with self._lock:
                seconds = self._clock() - start
                self._phase = before
                self._paused += seconds if self._first else 0.0
                self._screen.close()
            _log.debug('%s: %s took %.3f s', self._label, name, seconds)

    def begin(self, step: int) -> None:
        """Training starts or resumes after `step` steps."""
        self._step = self._shown_step = step
        self._phase = 'first steps', self._clock()

    def update(self, step: int, loss: Any = None) -> None:
        """Takes the steps done, resumed ones too, and the training loss of trials, in nats."""
        with self._lock:
            now, self._phase = self._clock(), None
            # Rates are measured from the first report: the time before it is mostly compilation.
            shown, self._first = self._first and now < self._next_time, self._first or (step, now)
            self._step, self._losses['training'] = step, loss
            self._last = step, now - self._paused
            if not shown:
                self._show(now)

    def evaluated(self, step: int, loss: Any) -> None:
        """Takes the validation loss of the trials, in nats per token, at `step`."""
        with self._lock:
            self._losses['validation'] = loss
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
            if self._first and (self._screen.terminal or self._step != self._shown_step):
                self._show(self._clock())
            self._screen.close(keep=self._first is not None)
            Progress._shown = None

    def tick(self) -> None:
        """Shows how long the phase has lasted, or a terminal how long the run still takes."""
        with self._lock:
            if self._closed.is_set():
                return
            now = self._clock()
            if self._phase:
                name, start = self._phase
                row = Row(self._label, None, f'{name} ... {now - start:.0f} s')
                if self._screen.terminal:
                    self._screen.draw([row])
                elif now >= self._next_time:
                    self.print(str(row))
                    self._wait(now)
            elif self._first and (self._screen.terminal or now >= self._next_time):
                self._show(now)

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self) -> None:
        with contextlib.suppress(ValueError):  # the stream is closed
            while not self._closed.wait(_TICK):
                self.tick()

    def _wait(self, now: float) -> None:
        gap = 0.0 if self._screen.terminal else _PLAIN_FRACTION * (now - self._opened)
        self._next_time = now + max(self._every, gap)

    def _show(self, now: float) -> None:
        """The last step, with the newest losses."""
        self._shown_step = self._step
        self._wait(now)
        step, left = f'{self._step:,}/{self._total:,}', self._left(now)
        # Since the first report, without evaluations and checkpoints.
        steps, seconds = np.subtract(self._last, self._first or self._last)
        tokens = steps * (self._tokens_per_step or 0)
        speed = f'{tokens / seconds:,.0f} tokens/s' if tokens and seconds > 0 else ''
        unit = '' if self._screen.terminal else _UNIT
        loss, val = (None if x is None else loss_text(x, unit) for x in self._losses.values())
        if self._screen.terminal:
            parts = [loss and f'loss {loss}', *left, step, val and f'validation {val}', speed]
            fraction = self._step / max(1, self._total)
            self._screen.draw([Row(self._label, fraction, ', '.join(filter(None, parts)))])
            return
        losses = [loss and f'training loss {loss}', val and f'validation loss {val}']
        text = ', '.join(filter(None, [*losses, speed, *left]))
        self.print(f'{self._label}: step {step}, {text}')

    def _left(self, now: float) -> tuple[str, str, str]:
        """Time left of the run and of the study, and the study's runs; '' where over."""
        # Steps to come, with what is between them, take as long as those since the first report.
        of_run = of_study = ''
        study, (step, time_of_first) = self._study, self._first or (self._step, now)
        if self._step > step:
            each = (self._last[1] + self._paused - time_of_first) / (self._step - step)
            since = now - self._last[1] - self._paused  # of the step that is under way
            left = max(0.0, (self._total - self._step) * each - since)
            if self._step < self._total:
                of_run = f'{interval(left)} left'
            if study and study.runs:
                run = time_of_first - self._opened + each * self._total
                of_study = f'study {interval(left + study.work * run)} left'
        runs = f'{study.runs} run{"s" * (study.runs != 1)} left' if study and study.runs else ''
        return of_run, of_study, runs


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
        text, shown = self.format(record), Progress._shown
        if shown is None:
            say(f'{text}\n', sys.stderr)
        else:
            shown.print(text)
