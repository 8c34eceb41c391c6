"""The progress display of a run: one line that is updated on a terminal, plain lines elsewhere."""

import collections
import contextlib
import dataclasses
import logging
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TextIO

import tqdm

from qkattn.jobs.readers import say
from qkattn.jobs.shown import loss_text, short, time_left

# A terminal's line is drawn at most and at least this often, so that something moves.
_DRAWN_EVERY, _TICK = 0.2, 1.0
# Plain lines are at least so many seconds apart, and with a tick at most five; later they are this
# fraction of the run so far apart, so that a long run does not fill its log.
_QUIET, _PLAIN_FRACTION = 4.0, 0.05
_LABEL, _BAR = 24, 4
# Phases between steps, and what they make: the time left counts those to come.
_PAUSES = {'evaluating': 'evaluation', 'saving': 'checkpoint'}
_FULL = {'brief': True, 'unit': True}

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class StudyLeft:
    """What is left of a study after a run, as far as its plan is known.

    Attributes:
      runs: further runs without a result.
      work: of these runs for one of the workers, as a multiple of this run's.
    """

    runs: int
    work: float


class Progress:
    """Phase or step, training loss and time left of a run: a line of a terminal, or plain lines.

    `update` may be called after every step, with numbers of the host: every line shows the newest
    ones. In a job of several processes only process 0 should create one.
    """

    _shown: 'Progress | None' = None
    told: ClassVar[Callable[[int, int], None]] = staticmethod(lambda step, total: None)
    """Called by `update` of every display with the step and the last step."""

    def __init__(
        self,
        label: str,
        total_steps: int = 0,
        *,
        tokens_per_step: int | None = None,
        study: StudyLeft | None = None,
        plain_every_seconds: float = _QUIET,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        columns: int | None = None,
    ):
        """Shows nothing until a phase lasts, or until the first `update`.

        Args:
          label: of the run; a terminal shows its beginning.
          total_steps: the last step of the run.
          tokens_per_step: summed over trials; None: not shown.
          study: what follows the run; None: nothing, and every evaluation is printed.
          plain_every_seconds: least seconds between lines where `stream` is not a terminal.
          stream: where to write; None: standard error.
          clock: seconds, from any origin.
          columns: of the terminal; None: as wide as it is.
        """
        self._label, self._total = label, total_steps
        self._tokens_per_step, self._study = tokens_per_step, study
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._every = _DRAWN_EVERY if self._terminal else plain_every_seconds
        self._clock, self._columns = clock, columns
        self._opened = clock()
        self._phase: tuple[str, float] | None = None  # name, start
        self._first: tuple[int, float] | None = None  # step and time of the first report
        self._last = (0, self._opened)
        self._begun = self._step = self._shown_step = 0
        self._losses: dict[str, Any] = {'training': None, 'validation': None}  # newest
        self._took: dict[str, list[float]] = collections.defaultdict(list)  # seconds by phase
        self._paused = 0.0  # seconds of phases since the first report
        self._planned: dict[str, int] = {}  # _PAUSES after `begin`
        self._to_come: collections.Counter[str] = collections.Counter()  # of these
        self._next_time = self._opened + plain_every_seconds  # of a plain line
        self._drawn = False
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
                self._took[name].append(seconds)
                self._paused += seconds if self._first else 0.0
                self._to_come[name] -= self._to_come[name] > 0
                self._erase()
            _log.debug('%s: %s took %.3f s', self._label, name, seconds)

    def begin(self, step: int, *, evaluating: int = 0, saving: int = 0) -> None:
        """Training starts or resumes after `step` steps; so many phases of these names follow."""
        self._begun = self._step = self._shown_step = step
        self._planned = {'evaluating': evaluating, 'saving': saving}
        self._to_come = collections.Counter(self._planned)
        self._phase = 'first steps', self._clock()

    def update(self, step: int, loss: Any = None) -> None:
        """Updates the display.

        Args:
          step: steps done since the start of the run, including resumed ones.
          loss: training loss of the step in nats per token; a number, or an array over trials,
            whose range is shown.
        """
        with self._lock:
            now, self._phase = self._clock(), None
            # Rates are measured from the first report: the time before it is mostly compilation.
            shown, self._first = self._first and now < self._next_time, self._first or (step, now)
            self._step, self._losses['training'] = step, loss
            self._last = step, now - self._paused
            Progress.told(step, self._total)
            if not shown:
                self._say(now)

    def evaluated(self, step: int, loss: Any) -> None:
        """Takes the validation loss of the trials, in nats per token, at `step`."""
        with self._lock:
            self._losses['validation'] = loss
            if self._study is None:
                text = loss_text(loss, unit=True)
                self.print(f'step {step:,}/{self._total:,}: validation loss {text}')

    def print(self, text: str) -> None:
        """Writes a line of its own."""
        with self._lock:
            self._erase()
            say(f'{text}\n', self._stream)

    def close(self) -> None:
        """Shows the last report if it has not been shown; may be called twice."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            self._phase = None
            if self._first and (self._terminal or self._step != self._shown_step):
                self._say(self._clock())
            if self._drawn and self._first:
                say('\n', self._stream)
                self._drawn = False
            self._erase()
            Progress._shown = None

    def tick(self) -> None:
        """Shows how long the phase has lasted, or a terminal how long the run still takes."""
        with self._lock:
            if self._closed.is_set():
                return
            now = self._clock()
            if self._phase:
                name, start = self._phase
                text = f'{name} ... {now - start:.0f} s'
                if self._terminal:
                    self._draw(f'{short(self._label, self._width() - len(text) - 2)}: {text}')
                elif now >= self._next_time:
                    self.print(f'{self._label}: {text}')
                    self._wait(now)
            elif self._first and (self._terminal or now >= self._next_time):
                self._say(now)

    def __enter__(self) -> 'Progress':
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closed.wait(_TICK):
            try:
                self.tick()
            except ValueError:  # the stream is closed
                return

    def _wait(self, now: float) -> None:
        gap = 0.0 if self._terminal else _PLAIN_FRACTION * (now - self._opened)
        self._next_time = now + max(self._every, gap)

    def _say(self, now: float) -> None:
        """The last step, with the newest losses."""
        self._shown_step = self._step
        self._wait(now)
        if self._terminal:
            self._draw(self._line(now))
            return
        losses = [
            f'{kind} loss {loss_text(loss, unit=True)}'
            for kind, loss in self._losses.items()
            if loss is not None
        ]
        _, of_run, of_study, runs = self._left(now)
        parts = (*losses, self._speed(), of_run, of_study, runs)
        text = ', '.join(part for part in parts if part)
        self.print(f'{self._label}: step {self._step:,}/{self._total:,}, {text}')

    def _line(self, now: float) -> str:
        """The line of a terminal: label, loss and times left, and of the rest what fits."""
        width, brief, of_run, of_study, runs = self._width(), *self._left(now)
        loss, val = ('' if x is None else loss_text(x, brief=True) for x in self._losses.values())
        parts = {'step': '', 'loss': loss and f'train loss {loss}', 'val': '', 'speed': ''}
        parts |= {'run': brief, 'study': of_study.removesuffix(' left') or runs}
        more = {
            'val': val and f'val {val}',
            'loss': loss and 'train loss ' + loss_text(self._losses['training'], **_FULL),
            'step': f'{self._step:,}/{self._total:,}',
            'study': ', '.join(filter(None, (of_study.removesuffix(' left'), runs))),
            'run': of_run,
            'speed': self._speed(),
        }

        def tail(parts: dict[str, str]) -> str:
            return ', '.join(filter(None, parts.values()))

        label = min(len(self._label), _LABEL)
        for name, text in more.items():
            longer = parts | {name: text}
            if label + len(': 100%|| ') + _BAR + len(tail(longer)) <= width:
                parts = longer
        room = width - len(': 100%|| ') - _BAR - len(tail(parts))
        return tqdm.tqdm.format_meter(
            self._step,
            self._total,
            0,
            ncols=width,
            prefix=short(self._label, max(8, min(_LABEL, room))),
            bar_format=f'{{desc}}: {{percentage:3.0f}}%|{{bar}}| {tail(parts)}',
        )

    def _rate(self) -> float:
        """Steps per second since the first report."""
        first_step, first_time = self._first or self._last
        step, last_time = self._last
        return (step - first_step) / (last_time - first_time) if last_time > first_time else 0.0

    def _speed(self) -> str:
        speed = self._rate() * (self._tokens_per_step or 0)
        return f'{speed:,.0f} tokens/s' if speed else ''

    def _left(self, now: float) -> tuple[str, str, str, str]:
        """Time left of the run, briefly and in full, and of the study, and its runs; '' where over.

        Evaluations and checkpoints take as long as those before them; without one, they are named.
        """
        rate, study, brief, of_run, of_study = self._rate(), self._study, '', '', ''
        # The low median, since the first evaluation also compiles.
        each = {name: statistics.median_low(took) for name, took in self._took.items()}
        to_come = {name: number for name, number in self._to_come.items() if number}
        untimed = {_PAUSES[name]: n for name, n in to_come.items() if name not in each}
        if rate:
            steps = (self._total - self._step) / rate - (now - self._paused - self._last[1])
            left = max(0.0, steps) + sum(n * each.get(name, 0.0) for name, n in to_come.items())
            if self._step < self._total or to_come:
                brief, of_run = time_left(left, untimed)
            if study and study.runs:
                # A run also takes the time before its first step, which is mostly compilation.
                before = self._first[1] - self._opened if self._first else 0.0
                pauses = sum(n * each.get(name, 0.0) for name, n in self._planned.items())
                pauses *= self._total / max(1, self._total - self._begun)
                whole = before + self._total / rate + pauses
                of_study = f'study {time_left(left + study.work * whole, untimed)[0]}'
        runs = f'{study.runs} run{"s" * (study.runs != 1)} left' if study and study.runs else ''
        return brief, of_run, of_study, runs

    def _width(self) -> int:
        """The last column stays free: some terminals wrap once it is written."""
        if self._columns is not None:
            return self._columns - 1
        try:
            return os.get_terminal_size(self._stream.fileno()).columns - 1
        except (OSError, ValueError):
            return shutil.get_terminal_size().columns - 1

    def _draw(self, text: str) -> None:
        say(f'\r{text}\x1b[K', self._stream)
        self._drawn = True

    def _erase(self) -> None:
        if self._drawn:
            say('\r\x1b[K', self._stream)
            self._drawn = False


@contextlib.contextmanager
def waiting(label: str, phase: str) -> Iterator[None]:
    """A block outside of a run that is named, as a phase is, if it lasts."""
    with Progress(label) as progress, progress.phase(phase):
        yield


class LogHandler(logging.Handler):
    """Prints messages on standard error, above the progress display if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        text, shown = self.format(record), Progress._shown
        if shown is None:
            say(f'{text}\n', sys.stderr)
        else:
            shown.print(text)
