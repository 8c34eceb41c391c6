"""Progress of runs on standard error: a status line in a terminal, plain lines elsewhere."""

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

# The minimum seconds between two drawings in a terminal.
_MIN_DRAW_SECONDS = 0.2
# The seconds between two refreshes without a report.
_TICK = 1.0
# The minimum seconds between two plain lines.
_MIN_PLAIN_SECONDS = 4.0
# The minimum time between two plain lines, as a fraction of the time since the start.
_MIN_PLAIN_FRACTION = 0.05
# The maximum number of characters of a label in a terminal.
_LONGEST_LABEL = 24
# The maximum number of characters of a label in a narrow terminal.
_SHORTEST_LABEL = 8
# The minimum seconds between two calls of `study`, which may read the study's directory.
_STUDY_EVERY = 60.0
_UNIT = ' nats/token'
# The escape code that erases the current line of a terminal.
_ERASE = '\r\x1b[2K'

_log = logging.getLogger(__name__)


class Screen:
    """An output stream of lines, with a status line at the bottom of a terminal."""

    def __init__(self, stream: TextIO | None = None, columns: int | None = None):
        """Opens the screen without drawing anything.

        Args:
            stream: Where to write; by default standard error.
            columns: The width in characters; by default that of the terminal.
        """
        self._stream = stream or sys.stderr
        self._columns = columns
        self._line = ''  # the status line
        # A dumb terminal, as in some editors, cannot redraw a line.
        is_dumb = os.environ.get('TERM', 'dumb') in ('dumb', 'unknown')
        self.terminal = self._stream.isatty() and not is_dumb

    def print(self, text: str) -> None:
        """Writes a line above the status line."""
        self._write(f'{text}\n', self._line)

    @property
    def room(self) -> int:
        """The number of characters that fit into a line without wrapping."""
        columns = self._columns
        if not columns:
            # If the terminal is gone, `say` drops the line, and any width will do.
            with contextlib.suppress(OSError):
                columns = os.get_terminal_size(self._stream.fileno()).columns
        return (columns or 80) - 1

    def draw(self, line: str) -> None:
        """Replaces the status line, and cuts it to the width; only for a terminal."""
        room = self.room
        if len(line) > room:
            line = f'{line[: room - 1]}…'
        self._write('', line)

    def close(self, keep: bool = False) -> None:
        """Removes the status line, or keeps it on the screen; may be called twice."""
        text = ''
        if keep and self._line:
            text = f'{self._line}\n'
        self._write(text, '')

    def _write(self, text: str, line: str) -> None:
        """Erases the status line, writes `text`, and then writes `line` as the status line."""
        erase = _ERASE if self._line else ''
        self._line = line
        say(f'{erase}{text}{line}', self._stream)


@dataclasses.dataclass(frozen=True)
class StudyLeft:
    """The planned runs of a study that are left besides this run."""

    runs: int  # runs without a result, including runs in training
    waiting_work: float  # the work of runs that have not started, in units of this run's work
    workers: int  # workers that train, including this worker


@dataclasses.dataclass
class _Pause:
    """The durations of a recurring phase between steps, such as evaluation."""

    first_step: int  # the steps done before the first occurrence
    first_seconds: float  # the first duration, which includes one-time costs like compilation
    last_step: int  # the steps done before the last occurrence
    later_seconds: float = 0.0  # the sum of all durations but the first

    @property
    def per_step(self) -> float:
        """The mean seconds of this phase per training step; 0 if it has not recurred."""
        num_steps = self.last_step - self.first_step
        return self.later_seconds / num_steps if num_steps else 0.0


class Pace:
    """Estimates the time per step and the time left of a run.

    A run consists of training steps and of phases between the steps, such as evaluations. The time
    before the first report, and the first phase of each name, are one-time costs. All times are in
    seconds on the same clock.
    """

    def __init__(self, opened: float):
        """Begins at the time `opened`, when the run starts."""
        self._opened = opened
        self._first: tuple[int, float] | None = None  # (step, time) of the first report
        self._step = 0  # of the last report
        self._trained = 0.0  # seconds from the first to the last report, without phases
        self._paused = 0.0  # seconds of phases since the first report
        self._pause_start: float | None = None  # when the current phase began
        self._pauses: dict[str, _Pause] = {}  # by phase name

    def report(self, step: int, now: float) -> None:
        """Records that `step` steps of the run are done."""
        if self._first is None:
            self._first = step, now
            self._paused = 0.0
        self._step = step
        self._trained = self._training(now)

    def pause(self, now: float) -> None:
        """Records the beginning of a phase."""
        self._pause_start = now

    def resume(self, name: str, now: float) -> None:
        """Records the end of the phase `name`."""
        # A phase around another phase adds no time: the end of the inner one clears `_pause_start`.
        seconds = 0.0 if self._pause_start is None else now - self._pause_start
        self._pause_start = None
        self._paused += seconds

        # Phases before the first report, such as compilation, do not recur.
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
        num_steps = self._step - first_step
        return self._trained / num_steps if num_steps else None

    def seconds_left(self, total_steps: int, now: float) -> float | None:
        """Returns the seconds until the last step, with phases; None before two reports."""
        if self._step_seconds_with_phases is None:
            return None
        left_at_report = (total_steps - self._step) * self._step_seconds_with_phases
        trained_since_report = self._training(now) - self._trained
        return max(0.0, left_at_report - trained_since_report)

    def total_seconds(self, total_steps: int) -> float | None:
        """Returns the seconds of a whole run like this run; None before two reports."""
        if self._first is None or self._step_seconds_with_phases is None:
            return None
        _, first_time = self._first
        until_first_report = first_time - self._opened  # includes compilation
        first_phases = sum(pause.first_seconds for pause in self._pauses.values())
        return until_first_report + first_phases + total_steps * self._step_seconds_with_phases

    @property
    def _step_seconds_with_phases(self) -> float | None:
        """Seconds per step, with recurring phases; None before two reports."""
        if self.step_seconds is None:
            return None
        return self.step_seconds + sum(pause.per_step for pause in self._pauses.values())

    def _training(self, now: float) -> float:
        """Returns the seconds of training since the first report, without phases."""
        if self._first is None:
            return 0.0
        _, first_time = self._first
        # During a phase, training has stopped at its beginning.
        training_end = now if self._pause_start is None else self._pause_start
        return training_end - first_time - self._paused


class Progress(contextlib.AbstractContextManager['Progress']):
    """Displays the phase or step, the losses and the time left of a run; only in process 0."""

    _open: ClassVar['Progress | None'] = None  # the displayed instance

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
        """Starts the display.

        Args:
            label: The name of the run.
            total_steps: The step at which the run ends.
            tokens_per_step: Tokens of all trials in one step, to show tokens per second.
            study: Returns what is left of the study; called at evaluations. Without a study, each
                evaluation is printed.
            screen: Where to draw; by default on standard error.
            clock: Returns the time in seconds.
        """
        self._label = label
        self._total = total_steps
        self._tokens_per_step = tokens_per_step
        self._screen = Screen() if screen is None else screen
        self._unit = '' if self._screen.terminal else _UNIT
        self._clock = clock
        self._opened = clock()
        self._pace = Pace(self._opened)

        # The study, and the last result of `study`.
        self._study = study
        self._study_left: StudyLeft | None = None
        self._study_call_time = -math.inf  # the time of the last call of `study`

        # The last report.
        self._step: int | None = None
        self._loss: Any = None
        self._validation_loss: Any = None
        self._speeds: Mapping[str, float] = {}  # such as {'mfu': 0.4}

        # What is shown.
        self._phase: tuple[str, float] | None = None  # (name, start time) of the current phase
        self._shown_step: int | None = None  # the last step that was shown
        # Nothing is shown before this time.
        self._next_show_time = self._opened + _MIN_PLAIN_SECONDS

        # Reentrant, because log messages go through this object and may come at any time.
        self._lock = threading.RLock()
        self._closed = threading.Event()
        Progress._open = self
        threading.Thread(target=self._run, name='progress', daemon=True).start()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A block without training steps, such as 'compiling', that is displayed if it is long.

        Its duration is logged at level DEBUG, and does not count as training.
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
        """Shows the phase 'first steps' until the first `update`."""
        self._ask_study()
        self._phase = 'first steps', self._clock()

    def update(self, step: int, loss: Any = None) -> None:
        """Reports the number of finished steps, and the training losses in nats per token."""
        with self._lock:
            now = self._clock()
            is_first_report = self._step is None
            if is_first_report:
                self._next_show_time = now  # shows the first report at once
            self._phase = None  # so that the report is shown, and not a phase like 'first steps'
            self._step = step
            self._loss = loss
            self._pace.report(step, now)  # for the estimate of the time left
            self._show(now)

    def update_speeds(self, speeds: Mapping[str, float]) -> None:
        """Reports the metrics SPEEDS of `qkattn.metrics`."""
        with self._lock:
            self._speeds = speeds

    def update_validation_loss(self, step: int, loss: Any) -> None:
        """Reports the validation losses of the trials at `step`, in nats per token."""
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
            self._phase = None  # so that the report is shown, and no phase
            is_newer_than_shown = self._step != self._shown_step
            if self._screen.terminal or is_newer_than_shown:
                self._next_show_time = 0.0  # shows the report at once
                self._show(self._clock())
            has_report = self._step is not None
            self._screen.close(keep=has_report)
            Progress._open = None

    def tick(self) -> None:
        """Updates the displayed times."""
        with self._lock:
            if not self._closed.is_set():
                self._show(self._clock())

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self) -> None:
        """Updates the display every _TICK seconds; runs in its own thread."""
        with contextlib.suppress(ValueError):  # the stream is closed
            while not self._closed.wait(_TICK):
                self.tick()

    def _ask_study(self) -> None:
        """Calls `study`, unless the last call was less than _STUDY_EVERY seconds ago."""
        if self._study is None:
            return
        if self._clock() >= self._study_call_time + _STUDY_EVERY:
            self._study_left = self._study()
            self._study_call_time = self._clock()

    def _show(self, now: float) -> None:
        """Shows the current phase, such as 'compiling ... 12 s', or else the last report.

        Shows nothing before `_next_show_time`, except for a phase in a terminal.
        """
        is_terminal = self._screen.terminal
        has_phase = self._phase is not None
        is_due = now >= self._next_show_time or (is_terminal and has_phase)
        if not is_due:
            return

        if self._phase is not None:
            name, start = self._phase
            fields = [f'{name} ... {now - start:.0f} s']
        elif self._step is not None:
            fields = self._report_fields(now)  # such as ['step 1,200/4,000', '30%']
            self._shown_step = self._step
        else:  # neither a phase nor a report
            return

        if is_terminal:
            line = self._row(fields, self._screen.room)
            self._screen.draw(line)  # replaces the line drawn before
            wait_seconds = _MIN_DRAW_SECONDS
        else:
            self.print(f'{self._label}: {", ".join(fields)}')
            # Each of these lines stays, so they become rarer in a long run.
            seconds_so_far = now - self._opened
            wait_seconds = max(_MIN_PLAIN_SECONDS, _MIN_PLAIN_FRACTION * seconds_so_far)
        self._next_show_time = now + wait_seconds

    def _report_fields(self, now: float) -> list[str]:
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
            fields += self._study_fields(study_left, run_seconds_left)
        return fields

    def _study_fields(self, study: StudyLeft, run_seconds_left: float | None) -> Iterator[str]:
        """Yields display fields for the study, such as '3 runs left'.

        The estimated time includes this run. Waiting runs are shared equally by the workers.
        """
        run_seconds = self._pace.total_seconds(self._total)
        if run_seconds_left is not None and run_seconds is not None:
            waiting_seconds = run_seconds * study.waiting_work  # the work is in runs like this one
            seconds_left = run_seconds_left + waiting_seconds / study.workers
            workers = _counted(study.workers, 'worker')  # such as '2 workers'
            yield f'study {format_duration(seconds_left)} left with {workers}'
        yield f'{_counted(study.runs, "run")} left'

    def _row(self, fields: list[str], room: int) -> str:
        """Returns a line 'LABEL: FIELD, FIELD' of at most `room` characters.

        The label is shortened, and fields that do not fit are left out. The first field stays.
        """
        shortest_label = min(len(self._label), _SHORTEST_LABEL)
        fields_room = room - shortest_label - len(': ')
        text = fields[0]
        for field in fields[1:]:
            longer_text = f'{text}, {field}'
            if len(longer_text) <= fields_room:
                text = longer_text

        # The label takes the room that the fields leave.
        label_room = room - len(': ') - len(text)
        label_size = min(_LONGEST_LABEL, max(_SHORTEST_LABEL, label_room))
        return f'{short(self._label, label_size)}: {text}'


def _counted(number: int, noun: str) -> str:
    return f'{number} {noun}' if number == 1 else f'{number} {noun}s'


def loss_text(loss: Any, unit: str = '') -> str:
    """Returns the loss of a trial, or the range of several losses, as text.

    For example, '3.1000', '3.1000 to 3.2000', '3.1000 to 3.2000 (1 of 4 trials not finite)', or
    'not finite'. `unit` follows the numbers.
    """
    losses = np.asarray(loss, np.float64).ravel()
    finite_losses = losses[np.isfinite(losses)]
    if finite_losses.size == 0:
        return 'not finite'
    text = f'{finite_losses.min():.4f}'
    if losses.size > 1:
        text += f' to {finite_losses.max():.4f}'
    text += unit
    num_diverged = losses.size - finite_losses.size
    if num_diverged:
        text += f' ({num_diverged} of {losses.size} trials not finite)'
    return text


def format_duration(seconds: float) -> str:
    """Formats seconds as '02:10' (minutes and seconds), or '1:02:10' with hours."""
    all_minutes, seconds_shown = divmod(int(seconds), 60)
    hours, minutes_shown = divmod(all_minutes, 60)
    if hours:
        return f'{hours}:{minutes_shown:02d}:{seconds_shown:02d}'
    return f'{minutes_shown:02d}:{seconds_shown:02d}'


@contextlib.contextmanager
def waiting(label: str, phase: str) -> Iterator[None]:
    """A block outside of a run, displayed as `label` and `phase` if it is long."""
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
