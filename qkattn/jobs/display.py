"""The display of runs on standard error: a line that a terminal redraws, plain lines elsewhere."""

import contextlib
import dataclasses
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TextIO

import numpy as np

from qkattn.jobs.output import say, short

# Seconds between two drawings of a terminal, at least and, so that something moves, at most.
_DRAWN_EVERY = 0.2
_TICK = 1.0
# Seconds between two plain lines, at least.
_QUIET = 4.0
# Later, plain lines are this fraction of the run so far apart: a long run does not fill its log.
_PLAIN_FRACTION = 0.05
# Characters of a label on a terminal: at most, and where the line has no room for more.
_LABEL = 24
_SHORTEST_LABEL = 8
# Seconds between two questions of how much of the study is left, which reads its directory.
_STUDY_EVERY = 60.0
_UNIT = ' nats/token'
_ERASE = '\r\x1b[2K'  # the line that is shown

_log = logging.getLogger(__name__)


class Screen:
    """A stream of whole lines, below which a terminal shows one that is redrawn."""

    def __init__(self, stream: TextIO | None = None, columns: int | None = None):
        """Draws nothing on a stream (None: standard error) of so many columns (None: its own)."""
        self._stream = stream or sys.stderr
        self._columns = columns
        self._line = ''
        is_dumb = os.environ.get('TERM', 'dumb') in ('dumb', 'unknown')
        self.terminal = self._stream.isatty() and not is_dumb

    def print(self, text: str) -> None:
        """Writes a line, above the one that is shown."""
        self._write(f'{text}\n', self._line)

    @property
    def room(self) -> int:
        """The characters that a terminal shows in a row without wrapping it."""
        columns = self._columns
        with contextlib.suppress(OSError):  # the terminal may be gone; `say` then drops the line
            columns = columns or os.get_terminal_size(self._stream.fileno()).columns
        return (columns or 80) - 1

    def draw(self, line: str) -> None:
        """Shows this line in place of the one before; for a terminal only."""
        room = self.room
        self._write('', line if len(line) <= room else f'{line[: room - 1]}…')

    def close(self, keep: bool = False) -> None:
        """Removes the line, or keeps it; may be called twice."""
        self._write(f'{self._line}\n' if keep and self._line else '', '')

    def _write(self, text: str, line: str) -> None:
        erase = _ERASE if self._line else ''
        self._line = line
        say(f'{erase}{text}{line}', self._stream)


@dataclasses.dataclass(frozen=True)
class StudyLeft:
    """What is left of a study beside this run, as far as its plan is known."""

    runs: int  # without a result, those that other workers train included
    waiting_work: float  # of the runs that nobody trains yet, as a multiple of this run's
    workers: int  # that train, this one included


@dataclasses.dataclass
class _Pause:
    """A phase that recurs between steps, such as an evaluation."""

    first_step: int
    first_seconds: float  # with what is paid once, such as compilation
    last_step: int
    later_seconds: float = 0.0

    @property
    def per_step(self) -> float:
        """Seconds for each step of the run, as far as it has recurred."""
        if self.last_step == self.first_step:
            return 0.0
        return self.later_seconds / (self.last_step - self.first_step)


class Pace:
    """How long steps take, and so the rest of a run, from times that it is told.

    What is paid once is not extrapolated: the time before the first report, and the first phase of
    each name.
    """

    def __init__(self, opened: float):
        self._opened = opened
        self._first: tuple[int, float] | None = None  # step and time of the first report
        self._step = 0
        self._trained = 0.0  # seconds from the first report to the newest one, without phases
        self._paused = 0.0  # seconds of phases since the first report
        self._pause_start: float | None = None
        self._pauses: dict[str, _Pause] = {}

    def report(self, step: int, now: float) -> None:
        """`step` steps are done, resumed ones too."""
        if self._first is None:
            self._first = step, now
            self._paused = 0.0
        self._step = step
        self._trained = self._training(now)

    def pause(self, now: float) -> None:
        """A phase begins."""
        self._pause_start = now

    def resume(self, name: str, now: float) -> None:
        """The phase of this name ends."""
        start = now if self._pause_start is None else self._pause_start
        seconds = now - start
        self._pause_start = None
        self._paused += seconds
        pause = self._pauses.get(name)
        if pause is not None:
            pause.later_seconds += seconds
            pause.last_step = self._step
        elif self._first is not None:
            self._pauses[name] = _Pause(self._step, seconds, self._step)

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step alone; None before two reports."""
        if self._first is None or self._step == self._first[0]:
            return None
        return self._trained / (self._step - self._first[0])

    def left(self, total_steps: int, now: float) -> float | None:
        """Seconds until the last step, with the phases that recur; None before two reports."""
        if self._with_pauses is None:
            return None
        since_report = self._training(now) - self._trained
        return max(0.0, (total_steps - self._step) * self._with_pauses - since_report)

    def whole(self, total_steps: int) -> float | None:
        """Seconds of a run like this one from its start on; None before two reports."""
        if self._first is None or self._with_pauses is None:
            return None
        paid_once = self._first[1] - self._opened
        paid_once += sum(pause.first_seconds for pause in self._pauses.values())
        return paid_once + total_steps * self._with_pauses

    @property
    def _with_pauses(self) -> float | None:
        """Seconds of a step with its share of the phases that recur."""
        if self.step_seconds is None:
            return None
        return self.step_seconds + sum(pause.per_step for pause in self._pauses.values())

    def _training(self, now: float) -> float:
        """Seconds since the first report, without phases."""
        if self._first is None:
            return 0.0
        _, first_time = self._first
        end = now if self._pause_start is None else self._pause_start  # of training
        return end - first_time - self._paused


class Progress(contextlib.AbstractContextManager['Progress']):
    """Phase or step, training loss and time left of a run; for process 0 alone."""

    _open: ClassVar['Progress | None'] = None

    def __init__(
        self,
        label: str,
        total_steps: int = 0,
        *,
        tokens_per_step: int | None = None,
        study: Callable[[], StudyLeft] | None = None,
        screen: Screen | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Shows nothing until a phase lasts, or until the first `update`.

        Tokens per step are summed over trials. Without a study every evaluation is printed; with
        one, `study` is asked at evaluations what is left of it.
        """
        self._label = label
        self._total = total_steps
        self._tokens_per_step = tokens_per_step
        self._study = study
        self._study_left: StudyLeft | None = None
        self._study_asked = -math.inf  # time of the last answer
        self._screen = Screen() if screen is None else screen
        self._unit = '' if self._screen.terminal else _UNIT
        self._clock = clock
        self._opened = clock()
        self._pace = Pace(self._opened)
        self._phase: tuple[str, float] | None = None  # name, start
        self._step: int | None = None  # of the newest report
        self._shown: int | None = None  # of the one shown
        self._loss = self._validation_loss = None  # the newest ones
        self._speeds: Mapping[str, float] = {}
        self._next_time = self._opened + _QUIET  # at which something is shown
        # Reentrant: the program's log goes through here, too, and may come from anywhere.
        self._lock = threading.RLock()
        self._closed = threading.Event()
        Progress._open = self
        threading.Thread(target=self._run, name='progress', daemon=True).start()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A block without steps, as 'compiling': named if it lasts, its seconds logged at DEBUG."""
        with self._lock:
            start = self._clock()
            before = self._phase
            self._phase = name, start
            self._pace.pause(start)
        try:
            yield
        finally:
            with self._lock:
                end = self._clock()
                self._phase = before
                self._pace.resume(name, end)
            _log.debug('%s: %s took %.3f s', self._label, name, end - start)

    def begin(self) -> None:
        """Training starts or resumes."""
        self._ask_study()
        self._phase = 'first steps', self._clock()

    def update(self, step: int, loss: Any = None) -> None:
        """Takes the steps done, resumed ones too, and the training loss of trials, in nats."""
        with self._lock:
            now = self._clock()
            self._phase = None
            self._loss = loss
            if self._step is None:
                self._next_time = now
            self._step = step
            self._pace.report(step, now)
            self._show(now)

    def measured(self, speeds: Mapping[str, float]) -> None:
        """Takes the newest SPEEDS of `qkattn.metrics`."""
        with self._lock:
            self._speeds = speeds

    def evaluated(self, step: int, loss: Any) -> None:
        """Takes the validation loss of the trials, in nats per token, at `step`."""
        self._ask_study()
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
            if self._screen.terminal or self._step != self._shown:
                self._next_time = 0.0
                self._show(self._clock())
            self._screen.close(keep=self._step is not None)
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

    def _ask_study(self) -> None:
        """Asks what is left of the study, unless that was asked a moment ago."""
        if self._study is not None and self._clock() >= self._study_asked + _STUDY_EVERY:
            self._study_left = self._study()
            self._study_asked = self._clock()

    def _show(self, now: float) -> None:
        """Shows the phase, or the last report, if it is time."""
        if now < self._next_time and not (self._phase and self._screen.terminal):
            return
        if self._phase:
            name, start = self._phase
            fields = [f'{name} ... {now - start:.0f} s']
        elif self._step is not None:
            self._shown = self._step
            fields = self._fields(now)
        else:
            return
        if self._screen.terminal:
            self._screen.draw(self._row(fields, self._screen.room))
            self._next_time = now + _DRAWN_EVERY
        else:
            self.print(f'{self._label}: {", ".join(fields)}')
            self._next_time = now + max(_QUIET, _PLAIN_FRACTION * (now - self._opened))

    def _fields(self, now: float) -> list[str]:
        """What is known of the run after its last report, by importance."""
        step = self._step or 0
        fields = [f'step {step:,}/{self._total:,}']
        if self._validation_loss is not None:
            fields.append(f'validation loss {loss_text(self._validation_loss, self._unit)}')
        if self._tokens_per_step and self._pace.step_seconds:
            fields.append(f'{self._tokens_per_step / self._pace.step_seconds:,.0f} tokens/s')
        if 'mfu' in self._speeds:
            fields.append(f'{self._speeds["mfu"]:.1%} MFU')
        left = self._pace.left(self._total, now)
        if left is not None and step < self._total:
            fields.append(f'{interval(left)} left')
        fields.append(f'{step / max(1, self._total):.0%}')
        if self._loss is not None:
            fields.append(f'loss {loss_text(self._loss, self._unit)}')
        if 'input_wait_fraction' in self._speeds:
            fields.append(f'{self._speeds["input_wait_fraction"]:.0%} waiting for input')
        if self._study_left is not None and self._study_left.runs:
            fields += self._study_fields(self._study_left, left)
        return fields

    def _study_fields(self, study: StudyLeft, left: float | None) -> Iterator[str]:
        """What is left of the study: the runs that wait are shared by its workers."""
        whole = self._pace.whole(self._total)
        if left is not None and whole is not None:
            seconds = left + whole * study.waiting_work / study.workers
            yield f'study {interval(seconds)} left with {_counted(study.workers, "worker")}'
        yield f'{_counted(study.runs, "run")} left'

    def _row(self, fields: list[str], room: int) -> str:
        """The label and as many fields as there is room for; the label is shortened first."""
        text = fields[0]
        for field in fields[1:]:
            longer = f'{text}, {field}'
            if min(len(self._label), _SHORTEST_LABEL) + len(f': {longer}') <= room:
                text = longer
        longest_label = min(_LABEL, max(_SHORTEST_LABEL, room - len(f': {text}')))
        return f'{short(self._label, longest_label)}: {text}'


def _counted(number: int, noun: str) -> str:
    return f'{number} {noun}' if number == 1 else f'{number} {noun}s'


def loss_text(loss: Any, unit: str = '') -> str:
    """The loss with four decimals; over several trials its range, and how many are not finite."""
    values = np.asarray(loss, np.float64).ravel()
    finite = values[np.isfinite(values)]
    if finite.size == 0:
        return 'not finite'
    text = f'{finite.min():.4f}'
    if values.size > 1:
        text += f' to {finite.max():.4f}'
    text += unit
    num_diverged = values.size - finite.size
    if num_diverged:
        text += f' ({num_diverged} of {values.size} trials not finite)'
    return text


def interval(seconds: float) -> str:
    """'02:10', or '1:02:10' from an hour on."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f'{hours}:{minutes:02d}:{seconds:02d}'
    return f'{minutes:02d}:{seconds:02d}'


@contextlib.contextmanager
def waiting(label: str, phase: str) -> Iterator[None]:
    """A block outside of a run that is named, as a phase is, if it lasts."""
    with Progress(label) as progress, progress.phase(phase):
        yield


class LogHandler(logging.Handler):
    """Prints messages on standard error, above the display if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        progress = Progress._open
        if progress is None:
            say(f'{text}\n', sys.stderr)
        else:
            progress.print(text)
