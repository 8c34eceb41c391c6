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

# On a terminal, at least this many seconds pass between two drawings.
_DRAWN_EVERY = 0.2
# Seconds after which the display is drawn again even if nothing was reported.
_TICK = 1.0
# Elsewhere, at least this many seconds pass between two lines.
_QUIET = 4.0
# Elsewhere, at least this fraction of the time since the start passes between two lines. So a long
# run does not fill its log.
_PLAIN_FRACTION = 0.05
# The most characters of a label on a terminal.
_LABEL = 24
# On a narrow terminal, a label is shortened to this many characters.
_SHORTEST_LABEL = 8
# At least this many seconds pass between two counts of what is left of the study. To count, its
# directory is read.
_STUDY_EVERY = 60.0
_UNIT = ' nats/token'
# Makes a terminal erase its line.
_ERASE = '\r\x1b[2K'

_log = logging.getLogger(__name__)


class Screen:
    """A stream of lines. A terminal shows one more line below them, which is redrawn in place."""

    def __init__(self, stream: TextIO | None = None, columns: int | None = None):
        """Opens the screen without drawing anything.

        Args:
          stream: where to write; by default standard error.
          columns: the width of a row in characters; by default that of the terminal.
        """
        self._stream = stream or sys.stderr
        self._columns = columns
        self._line = ''  # the line that the terminal shows at the bottom
        # A dumb terminal, as of some editors, cannot redraw a line.
        is_dumb = os.environ.get('TERM', 'dumb') in ('dumb', 'unknown')
        self.terminal = self._stream.isatty() and not is_dumb

    def print(self, text: str) -> None:
        """Writes a line above the redrawn one."""
        self._write(f'{text}\n', self._line)

    @property
    def room(self) -> int:
        """The number of characters that a terminal shows in a row without wrapping it."""
        columns = self._columns
        if not columns:
            # If the terminal is gone, any width will do: `say` then drops the line.
            with contextlib.suppress(OSError):
                columns = os.get_terminal_size(self._stream.fileno()).columns
        return (columns or 80) - 1

    def draw(self, line: str) -> None:
        """Shows `line`, cut to the width, in place of the redrawn line; only for a terminal."""
        room = self.room
        if len(line) > room:
            line = f'{line[: room - 1]}…'
        self._write('', line)

    def close(self, keep: bool = False) -> None:
        """Removes the redrawn line, or leaves it on the screen; may be called twice."""
        text = ''
        if keep and self._line:
            text = f'{self._line}\n'
        self._write(text, '')

    def _write(self, text: str, line: str) -> None:
        """Erases the redrawn line, writes `text`, and shows `line` as the redrawn line."""
        erase = _ERASE if self._line else ''
        self._line = line
        say(f'{erase}{text}{line}', self._stream)


@dataclasses.dataclass(frozen=True)
class StudyLeft:
    """What is left of a study besides this run. Only the runs of the plan so far are counted."""

    runs: int  # runs without a result, also those that other workers train
    waiting_work: float  # work of the runs that nobody trains yet, as a multiple of this run's
    workers: int  # workers that train, this one included


@dataclasses.dataclass
class _Pause:
    """The times of a phase that comes again and again between steps, such as an evaluation."""

    first_step: int  # the step after which it came first
    first_seconds: float  # the first time includes costs that come once, such as compilation
    last_step: int  # the step after which it came last
    later_seconds: float = 0.0  # the sum of all times but the first

    @property
    def per_step(self) -> float:
        """The seconds of the phase per step of the run; 0 until it has come again later."""
        if self.last_step == self.first_step:
            return 0.0
        return self.later_seconds / (self.last_step - self.first_step)


class Pace:
    """Estimates how long steps take, and when a run ends, from reported times.

    A run consists of steps and of phases between them, such as evaluations. Costs that come once
    are not extrapolated: the time before the first report, and the first phase of each name. All
    times are in seconds on the same clock.
    """

    def __init__(self, opened: float):
        """Begins at the time `opened`, when the run starts."""
        self._opened = opened
        self._first: tuple[int, float] | None = None  # step and time of the first report
        self._step = 0
        self._trained = 0.0  # seconds from the first report to the newest one, without phases
        self._paused = 0.0  # seconds of phases since the first report
        self._pause_start: float | None = None  # when the current phase began
        self._pauses: dict[str, _Pause] = {}

    def report(self, step: int, now: float) -> None:
        """Takes the number of steps that are done, also before a run was resumed."""
        if self._first is None:
            self._first = step, now
            self._paused = 0.0
        self._step = step
        self._trained = self._training(now)

    def pause(self, now: float) -> None:
        """Takes the beginning of a phase."""
        self._pause_start = now

    def resume(self, name: str, now: float) -> None:
        """Takes the end of the phase `name`, whose seconds do not count as training.

        A phase between steps, such as an evaluation, comes again later in the run. So its seconds
        are also added up by name, to estimate the time that such phases will take.
        """
        # Phases may be nested. The seconds from the beginning of the inner one to its end count.
        # At the end of the outer one, `_pause_start` is None, and no more seconds count.
        seconds = 0.0 if self._pause_start is None else now - self._pause_start
        self._pause_start = None
        self._paused += seconds

        # Phases before the first report, such as compilation, do not come again.
        has_reported = self._first is not None
        if not has_reported:
            return
        pause = self._pauses.get(name)
        if pause is None:
            self._pauses[name] = _Pause(
                first_step=self._step, first_seconds=seconds, last_step=self._step
            )
        else:
            pause.later_seconds += seconds
            pause.last_step = self._step

    @property
    def step_seconds(self) -> float | None:
        """Seconds per step without phases; None before two reports."""
        if self._first is None:
            return None
        first_step, _ = self._first
        if self._step == first_step:
            return None
        return self._trained / (self._step - first_step)

    def seconds_left(self, total_steps: int, now: float) -> float | None:
        """Returns the seconds until the last step, phases included; None before two reports."""
        if self._with_pauses is None:
            return None
        left_at_report = (total_steps - self._step) * self._with_pauses
        trained_since_report = self._training(now) - self._trained
        return max(0.0, left_at_report - trained_since_report)

    def total_seconds(self, total_steps: int) -> float | None:
        """Returns the seconds that a run like this one takes in all; None before two reports."""
        if self._first is None or self._with_pauses is None:
            return None
        _, first_time = self._first
        # Costs that come once, such as compilation.
        until_first_report = first_time - self._opened
        first_phases = sum(pause.first_seconds for pause in self._pauses.values())
        return until_first_report + first_phases + total_steps * self._with_pauses

    @property
    def _with_pauses(self) -> float | None:
        """Seconds per step, with its share of the phases that recur; None before two reports."""
        if self.step_seconds is None:
            return None
        return self.step_seconds + sum(pause.per_step for pause in self._pauses.values())

    def _training(self, now: float) -> float:
        """Returns the seconds of training since the first report, without phases."""
        if self._first is None:
            return 0.0
        _, first_time = self._first
        # In a phase, training has ended when the phase began.
        training_end = now if self._pause_start is None else self._pause_start
        return training_end - first_time - self._paused


class Progress(contextlib.AbstractContextManager['Progress']):
    """Displays the phase or step, the losses and the time left of a run; only in process 0."""

    _open: ClassVar['Progress | None'] = None  # the one that is displayed

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
        """Starts the display. It shows a phase that lasts for some time, and steps after `update`.

        Args:
          label: the name of the run.
          total_steps: the step at which the run ends.
          tokens_per_step: tokens of all trials in one step, to show tokens per second.
          study: returns what is left of the study that the run belongs to; it is called at
            evaluations. Without a study, every evaluation is printed instead.
          screen: where to draw; by default on standard error.
          clock: returns the time in seconds.
        """
        # What does not change.
        self._label = label
        self._total = total_steps
        self._tokens_per_step = tokens_per_step
        self._screen = Screen() if screen is None else screen
        self._unit = '' if self._screen.terminal else _UNIT
        self._clock = clock
        self._opened = clock()
        self._pace = Pace(self._opened)

        # The study, and what is left of it by the last call of `study`.
        self._study = study
        self._study_left: StudyLeft | None = None
        self._study_asked = -math.inf  # the time of the last call

        # The newest report: the step, None before the first report, and the losses.
        self._step: int | None = None
        self._loss: Any = None
        self._validation_loss: Any = None
        self._speeds: Mapping[str, float] = {}  # metrics of speed, such as 'mfu'

        # What is shown.
        self._phase: tuple[str, float] | None = None  # name and start of the current phase
        self._shown_step: int | None = None  # the step of the report that was shown last
        self._next_time = self._opened + _QUIET  # nothing is shown before this time

        # Reentrant, because log messages also go through this object and may come at any time.
        self._lock = threading.RLock()
        self._closed = threading.Event()
        Progress._open = self
        threading.Thread(target=self._run, name='progress', daemon=True).start()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A `with` block without training steps, such as 'compiling'.

        The display names the phase if it lasts. Its seconds are logged at DEBUG, and do not count
        in the speed of training.
        """
        with self._lock:
            start = self._clock()
            outer_phase = self._phase
            self._phase = name, start
            self._pace.pause(start)
        try:
            yield
        finally:
            with self._lock:
                end = self._clock()
                self._phase = outer_phase
                self._pace.resume(name, end)
            _log.debug('%s: %s took %.3f s', self._label, name, end - start)

    def begin(self) -> None:
        """Training starts or resumes."""
        self._ask_study()
        self._phase = 'first steps', self._clock()

    def update(self, step: int, loss: Any = None) -> None:
        """Takes the number of steps done and the training loss of the trials, in nats per token."""
        with self._lock:
            now = self._clock()
            is_first_report = self._step is None
            if is_first_report:
                self._next_time = now  # so that `_show` shows it at once
            self._phase = None  # ends the phase 'first steps', which `begin` has set
            self._step = step
            self._loss = loss
            self._pace.report(step, now)
            self._show(now)

    def update_speeds(self, speeds: Mapping[str, float]) -> None:
        """Takes the newest SPEEDS of `qkattn.metrics`."""
        with self._lock:
            self._speeds = speeds

    def update_validation_loss(self, step: int, loss: Any) -> None:
        """Takes the validation loss of the trials, in nats per token, at `step`."""
        self._ask_study()
        with self._lock:
            self._validation_loss = loss
            if self._study is None:
                text = loss_text(loss, _UNIT)
                self.print(f'step {step:,}/{self._total:,}: validation loss {text}')

    def print(self, text: str) -> None:
        """Prints a line above the display."""
        with self._lock:
            self._screen.print(text)

    def close(self) -> None:
        """Shows the last report, and ends the display; may be called twice."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            # Show the last report. A terminal draws it again, in place of a phase that it may show.
            # Elsewhere it is printed, unless it was printed already.
            self._phase = None
            is_newer_than_shown = self._step != self._shown_step
            if self._screen.terminal or is_newer_than_shown:
                self._next_time = 0.0  # `_show` then does not wait
                self._show(self._clock())
            self._screen.close(keep=self._step is not None)
            Progress._open = None

    def tick(self) -> None:
        """Draws again, since the seconds of a phase and the time left change."""
        with self._lock:
            if not self._closed.is_set():
                self._show(self._clock())

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self) -> None:
        """Draws the display every _TICK seconds; runs in its own thread."""
        with contextlib.suppress(ValueError):  # raised once the stream is closed
            while not self._closed.wait(_TICK):
                self.tick()

    def _ask_study(self) -> None:
        """Asks what is left of the study, if the last answer is _STUDY_EVERY seconds old."""
        if self._study is None:
            return
        if self._clock() >= self._study_asked + _STUDY_EVERY:
            self._study_left = self._study()
            self._study_asked = self._clock()

    def _show(self, now: float) -> None:
        """Shows the current phase, such as 'compiling ... 12 s', or else the newest report.

        Nothing is shown before `_next_time`, so that lines do not follow each other too fast. But a
        terminal always shows a phase.
        """
        is_too_early = now < self._next_time
        is_phase_on_terminal = self._phase is not None and self._screen.terminal
        if is_too_early and not is_phase_on_terminal:
            return

        # Choose what to show.
        if self._phase is not None:
            name, start = self._phase
            fields = [f'{name} ... {now - start:.0f} s']
        elif self._step is not None:
            self._shown_step = self._step
            fields = self._fields(now)
        else:  # neither a phase nor a report
            return

        # A terminal redraws its line. Elsewhere each call prints a line, so calls are rarer.
        if self._screen.terminal:
            self._screen.draw(self._row(fields, self._screen.room))
            quiet_seconds = _DRAWN_EVERY
        else:
            self.print(f'{self._label}: {", ".join(fields)}')
            seconds_so_far = now - self._opened
            quiet_seconds = max(_QUIET, _PLAIN_FRACTION * seconds_so_far)
        self._next_time = now + quiet_seconds

    def _fields(self, now: float) -> list[str]:
        """Returns the last report as display fields, the most important first.

        For example, ['step 1,200/4,000', 'validation loss 3.1000', '02:10 left', '30%'].
        """
        step = 0 if self._step is None else self._step
        fields = [f'step {step:,}/{self._total:,}']
        if self._validation_loss is not None:
            fields.append(f'validation loss {loss_text(self._validation_loss, self._unit)}')
        step_seconds = self._pace.step_seconds
        if self._tokens_per_step and step_seconds:
            tokens_per_second = self._tokens_per_step / step_seconds
            fields.append(f'{tokens_per_second:,.0f} tokens/s')
        if 'mfu' in self._speeds:
            fields.append(f'{self._speeds["mfu"]:.1%} MFU')
        run_seconds_left = self._pace.seconds_left(self._total, now)
        if run_seconds_left is not None and step < self._total:
            fields.append(f'{format_duration(run_seconds_left)} left')
        fraction_done = step / max(1, self._total)
        fields.append(f'{fraction_done:.0%}')
        if self._loss is not None:
            fields.append(f'loss {loss_text(self._loss, self._unit)}')
        if 'input_wait_fraction' in self._speeds:
            fields.append(f'{self._speeds["input_wait_fraction"]:.0%} waiting for input')
        study_left = self._study_left
        if study_left is not None and study_left.runs > 0:
            # The time left for the study includes the time left for this run.
            fields += self._study_fields(study_left, left=run_seconds_left)
        return fields

    def _study_fields(self, study: StudyLeft, left: float | None) -> Iterator[str]:
        """Yields what is left of the study in words; `left` are the seconds left of this run.

        The estimate assumes that the workers share the waiting runs equally.
        """
        total_seconds = self._pace.total_seconds(self._total)
        if left is not None and total_seconds is not None:
            seconds = left + total_seconds * study.waiting_work / study.workers
            yield f'study {format_duration(seconds)} left with {_counted(study.workers, "worker")}'
        yield f'{_counted(study.runs, "run")} left'

    def _row(self, fields: list[str], room: int) -> str:
        """Returns a row 'LABEL: FIELD, FIELD' of at most `room` characters.

        If room is short, the label is shortened, down to _SHORTEST_LABEL characters. Then fields
        that do not fit are left out, but not the first one.
        """
        # Take all fields that fit beside the label at its shortest.
        shortest_label = min(len(self._label), _SHORTEST_LABEL)
        fields_room = room - shortest_label - len(': ')
        text = fields[0]
        for field in fields[1:]:
            longer_text = f'{text}, {field}'
            if len(longer_text) <= fields_room:
                text = longer_text

        # The label gets the room that the fields leave.
        label_room = room - len(': ') - len(text)
        label_size = min(_LABEL, max(_SHORTEST_LABEL, label_room))
        return f'{short(self._label, label_size)}: {text}'


def _counted(number: int, noun: str) -> str:
    return f'{number} {noun}' if number == 1 else f'{number} {noun}s'


def loss_text(loss: Any, unit: str = '') -> str:
    """Returns a loss, or the range of the losses of several trials, as text.

    For example, '3.1000', '3.1000 to 3.2000', '3.1000 to 3.2000 (1 of 4 trials not finite)', or
    'not finite'. The unit follows the numbers.
    """
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


def format_duration(seconds: float) -> str:
    """Returns seconds as '02:10' (minutes and seconds), or '1:02:10' from an hour on."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f'{hours}:{minutes:02d}:{seconds:02d}'
    return f'{minutes:02d}:{seconds:02d}'


@contextlib.contextmanager
def waiting(label: str, phase: str) -> Iterator[None]:
    """A block outside of a run: if it lasts, the display names `label` and `phase`."""
    with Progress(label) as progress, progress.phase(phase):
        yield


class LogHandler(logging.Handler):
    """Prints log messages on standard error, above the display if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        progress = Progress._open
        if progress is None:
            say(f'{text}\n', sys.stderr)
        else:
            progress.print(text)
