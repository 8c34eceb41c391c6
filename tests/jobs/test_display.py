"""The display with a clock that is set by hand, on terminals, plain streams and unread ones."""

import io
import logging
import os
import re
import sys
import types
from collections import defaultdict
from unittest.mock import MagicMock, Mock

import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.jobs import cli, display, output
from qkattn.jobs.display import (
    LogHandler,
    Pace,
    Progress,
    Screen,
    StudyLeft,
    format_duration,
    loss_text,
)

LABEL = 'shared_qk(key_norm=True,self_mask=True)/vo d_model=128 equal_shape learning_rate'
# A control sequence, such as ESC [ 2 K, a single control character, or plain text.
TERMINAL_PART = re.compile(r'\x1b\[[\d;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+')
ERASE_LINE = '\x1b[2K'


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """The lines that a terminal would show after everything that was written.

        A carriage return moves to the start of the row, and later text overwrites the row from
        there. The only other control sequence with an effect is the one that erases a row.
        """
        rows = defaultdict(str)
        row = 0
        column = 0
        # A part is a control sequence, a newline, a carriage return, or plain text.
        for part in TERMINAL_PART.findall(self.getvalue()):
            if part == '\n':
                row += 1
                column = 0
            elif part == '\r':
                column = 0
            elif part == ERASE_LINE:
                rows[row] = ''
            elif not part.startswith('\x1b'):
                rows[row] = rows[row][:column] + part
                column += len(part)

        # The row of the cursor counts even if it is empty.
        last_row = max(row, *rows)
        return [rows[index].rstrip() for index in range(last_row + 1)]


@pytest.fixture(autouse=True)
def terminal_that_can_redraw_lines(monkeypatch):
    monkeypatch.setenv('TERM', 'xterm')


@pytest.fixture(autouse=True)
def no_ticks_of_the_thread(monkeypatch):
    """Only tests call `tick`. The display's thread, which also calls it, waits for an hour."""
    monkeypatch.setattr(display, '_TICK', 3600.0)


@pytest.fixture
def clock():
    """The clock of displays, which tests set by clock.seconds += 5."""
    return types.SimpleNamespace(seconds=100.0)


@pytest.fixture
def make_progress(clock):
    """make_progress(stream, label, total_steps, ...) returns a display with the test's clock."""

    def make(stream, label, total_steps, *, columns=80, **settings):
        screen = Screen(stream, columns)
        return Progress(label, total_steps, screen=screen, clock=lambda: clock.seconds, **settings)

    return make


def log(message):
    record = logging.LogRecord(
        'qkattn', logging.INFO, pathname='', lineno=1, msg=message, args=(), exc_info=None
    )
    LogHandler().emit(record)


def test_plain_lines_are_printed_every_few_seconds(make_progress, clock):
    """On a stream that is no terminal, a line is printed every 4 s.

    The run resumes at step 1,041, and a step takes 0.2 s. So 20 steps pass between two lines.
    """
    stream = io.StringIO()
    # Three runs are left, this one included. The two that have not started are as much work as four
    # runs like this one.
    left = StudyLeft(runs=3, waiting_work=4.0, workers=2)
    progress = make_progress(stream, 'qk.vo', 1100, tokens_per_step=1000, study=lambda: left)
    assert stream.getvalue() == ''

    progress.begin()
    clock.seconds += 5  # compilation
    for step in range(1041, 1101):
        progress.update(step, loss=jnp.float32(2.5))
        clock.seconds += 0.2
        if step == 1080:
            progress.update_validation_loss(step, np.array([2.25, 2.5]))
    progress.close()
    progress.close()  # a second call changes nothing

    loss = 'loss 2.5000 nats/token'
    # Two trials have the validation losses 2.25 and 2.5.
    validation = 'validation loss 2.2500 to 2.5000 nats/token'
    speed = '5,000 tokens/s'  # 1,000 tokens in 0.2 s
    # A whole run takes 5 s to compile and 1,100 * 0.2 s = 220 s of steps, together 225 s. So the
    # waiting work takes 4 * 225 s / 2 workers = 450 s, which is 07:30. The time left of this run is
    # added to it. Seconds are rounded down.
    assert stream.getvalue().splitlines() == [
        # One report does not tell how long a step takes, so there is no speed and no time left.
        f'qk.vo: step 1,041/1,100, 95%, {loss}, 3 runs left',
        # The 39 steps left take 39 * 0.2 s = 7.8 s, and 450 s + 7.8 s = 457.8 s.
        f'qk.vo: step 1,061/1,100, {speed}, 00:07 left, 96%, {loss}, '
        'study 07:37 left with 2 workers, 3 runs left',
        # The 19 steps left take 19 * 0.2 s = 3.8 s, and 450 s + 3.8 s = 453.8 s.
        f'qk.vo: step 1,081/1,100, {validation}, {speed}, 00:03 left, 98%, {loss}, '
        'study 07:33 left with 2 workers, 3 runs left',
        # `close` prints the last step, after which this run has no time left.
        f'qk.vo: step 1,100/1,100, {validation}, {speed}, 100%, {loss}, '
        'study 07:30 left with 2 workers, 3 runs left',
    ]


def test_the_display_shows_measured_speeds(make_progress, clock):
    """MFU is model FLOPs utilization: the fraction of the device's peak that the model uses."""
    stream = io.StringIO()

    with make_progress(stream, 'x', 100, tokens_per_step=10) as progress:
        progress.update(1)
        progress.update_speeds({'mfu': 0.4321, 'input_wait_fraction': 0.07})
        clock.seconds += 5
        progress.update(2)

    # Step 2 took 5 s, so 10 tokens in 5 s are 2 tokens/s.
    # The 98 steps left take 98 * 5 s = 490 s, which is 08:10.
    assert stream.getvalue().splitlines() == [
        'x: step 1/100, 1%',
        'x: step 2/100, 2 tokens/s, 43.2% MFU, 08:10 left, 2%, 7% waiting for input',
    ]


@pytest.mark.parametrize(
    # All in seconds.
    ('step_time', 'first_evaluation', 'later_evaluation', 'first_save', 'later_save'),
    [
        pytest.param(0.2, 10.0, 1.0, 5.0, 0.0, id='evaluations are compiled'),
        pytest.param(0.2, 10.0, 10.0, 0.1, 0.1, id='evaluations are slow'),
        pytest.param(30.0, 60.0, 2.0, 1.0, 1.0, id='steps are slow'),
        pytest.param(1.0, 1.0, 1.0, 1.0, 1.0, id='nothing is compiled'),
    ],
)
def test_the_time_left_counts_no_compilation_twice(
    step_time, first_evaluation, later_evaluation, first_save, later_save, clock
):
    """The first evaluation and the first save compile, so the time left does not count them.

    A run evaluates and saves after every 25 of its 200 steps.
    """
    pace = Pace(clock.seconds)
    clock.seconds += 100.0  # compilation

    def spend(phase, seconds):
        """Lets a phase without steps pass, during which the estimate must stand still."""
        pace.pause(clock.seconds)
        left_at_start = pace.seconds_left(200, clock.seconds)
        clock.seconds += seconds
        left_at_end = pace.seconds_left(200, clock.seconds)
        assert left_at_end == left_at_start
        pace.resume(phase, clock.seconds)

    seconds_left = {}  # by step
    for step in range(1, 201):
        clock.seconds += step_time
        pace.report(step, clock.seconds)
        if step == 25:
            spend('evaluating', first_evaluation)
            spend('saving', first_save)
        elif step % 25 == 0:
            spend('evaluating', later_evaluation)
            spend('saving', later_save)
        seconds_left[step] = pace.seconds_left(200, clock.seconds)

    # The time until step 1 includes compilation, so the time of a step is unknown.
    assert seconds_left[1] is None

    # Before step 50, only the first evaluation and save can have happened. Neither counts.
    for step in (2, 24, 25, 26, 49):
        steps_left = 200 - step
        assert seconds_left[step] == pytest.approx(steps_left * step_time)

    # From step 50 on, the time per step includes 1/25 of a later evaluation and save.
    for step in (50, 74, 100, 199):
        steps_left = 200 - step
        time_per_step = step_time + (later_evaluation + later_save) / 25
        assert seconds_left[step] == pytest.approx(steps_left * time_per_step)


def test_a_display_asks_what_is_left_of_a_study_once_a_minute(make_progress, clock):
    """`begin` asks the study, and so do evaluations at least 60 s after the last question."""
    ask_study = Mock(return_value=StudyLeft(runs=3, waiting_work=4.0, workers=2))
    progress = make_progress(io.StringIO(), 'x', 100, study=ask_study)
    progress.begin()
    assert ask_study.call_count == 1

    # A step and an evaluation every 10 s, for 1000 s.
    for step in range(1, 101):
        clock.seconds += 10
        progress.update(step)
        progress.update_validation_loss(step, 2.5)

    calls_in_begin = 1
    full_minutes = 1000 // 60
    assert ask_study.call_count == calls_in_begin + full_minutes


def test_plain_lines_of_a_long_run_are_printed_less_often(make_progress, clock):
    """After the time t, the next line comes t / 20 later, but at least 4 s later.

    With a line every 4 s, a day would have 21,600 lines. It has fewer than 170.
    """
    seconds_per_day = 86400
    # Reading a loss from a device calls __array__, which is counted here.
    read_from_device = Mock(return_value=np.asarray(1.0))
    loss = MagicMock(__array__=read_from_device)
    stream = io.StringIO()

    with make_progress(stream, 'x', seconds_per_day) as progress:
        for step in range(1, seconds_per_day + 1):
            clock.seconds += 1
            progress.update(step, loss)

    # In the first 80 s, a line every 4 s makes 20 lines.
    # Then each line multiplies the time by 1.05, and 80 s * 1.05^144 > 86,400 s.
    # So a day has about 20 + 144 lines.
    num_lines = len(stream.getvalue().splitlines())
    assert num_lines < 170
    # Only losses that are shown are read.
    assert read_from_device.call_count == num_lines


@pytest.mark.parametrize(
    ('loss', 'text'),
    [
        (2.0, '2.0000'),
        ([2.5, 2.0], '2.0000 to 2.5000'),
        ([2.5, np.nan, 2.0], '2.0000 to 2.5000 (1 of 3 trials not finite)'),
        ([np.nan, np.inf], 'not finite'),
    ],
)
def test_the_loss_of_several_trials_is_their_range(loss, text):
    assert loss_text(np.array(loss)) == text


@pytest.mark.parametrize(('seconds', 'text'), [(59.9, '00:59'), (130, '02:10'), (3723, '1:02:03')])
def test_a_duration_is_shown_in_hours_minutes_and_seconds(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ('columns', 'row'),
    [
        # Here, the validation loss does not fit. The shorter fields after it do.
        (60, 'share…_rate: step 1,200/4,000, 357,000 tokens/s, 00:22 left'),
        (80, 'shar…rate: step 1,200/4,000, validation loss 2.2500 to 2.5000, 357,000 tokens/s'),
        (
            110,
            'shared_qk(k…rning_rate: step 1,200/4,000, validation loss 2.2500 to 2.5000, '
            '357,000 tokens/s, 00:22 left, 30%',
        ),
        (
            200,
            'shared_qk(ke…arning_rate: step 1,200/4,000, validation loss 2.2500 to 2.5000, '
            '357,000 tokens/s, 00:22 left, 30%, loss 2.3450 to 2.5000, '
            'study 22:10 left with 1 worker, 120 runs left',
        ),
    ],
)
def test_the_row_of_a_terminal_shows_more_where_it_is_wider(columns, row, make_progress, clock):
    """Fields that do not fit are left out, and the middle of the label becomes '…'.

    The label has between 8 and 24 characters.
    """
    # waiting_work=30.0: The runs that have not started are as much work as 30 runs like this one.
    left = StudyLeft(runs=120, waiting_work=30.0, workers=1)
    stream = Terminal()
    progress = make_progress(
        stream, LABEL, 4000, columns=columns, tokens_per_step=3000, study=lambda: left
    )

    progress.begin()
    # Step 10 is done after 10 s, and the next 1,190 steps take 10 s.
    # So the speed is 1,190 * 3,000 tokens / 10 s = 357,000 tokens/s.
    # The 2,800 steps left take 2,800 * 10 s / 1,190 = 23.5 s.
    for step in (10, 1200):
        clock.seconds += 10
        progress.update(step, np.array([2.5, 2.345]))
    progress.update_validation_loss(1200, np.array([2.5, 2.25]))
    log('resuming')
    # 1 s later, 22.5 s of the run are left.
    clock.seconds += 1
    progress.tick()

    # A line of the log is printed above the row.
    # A whole run takes 10 s until step 10, and 4,000 * 10 s / 1,190 of steps: 43.6 s.
    # The study has 22.5 s + 30 * 43.6 s = 1,330 s left, which is 22:10.
    assert stream.lines() == ['resuming', row]
    assert len(row) < columns

    # The row stays on the screen, and the cursor is on the empty line below it.
    progress.close()
    assert stream.lines() == ['resuming', row, '']


def test_a_phase_that_lasts_is_shown_with_its_seconds(make_progress, clock, caplog):
    """A phase is a part of a run without training steps, here a compilation of 49 s."""
    caplog.set_level(logging.DEBUG, 'qkattn')
    stream = Terminal()

    with make_progress(stream, 'qk/vo', 10) as progress, progress.phase('compiling'):
        for seconds in range(1, 50):
            clock.seconds += 1
            progress.tick()

            # The terminal shows a single line, which is redrawn.
            lines = stream.lines()
            assert len(lines) == 1
            assert lines[0].startswith('qk/vo')
            assert lines[0].endswith(f'compiling ... {seconds} s')

    # The line is erased at the end, and the log has the whole duration.
    assert not any(stream.lines())
    assert caplog.messages == ['qk/vo: compiling took 49.000 s']


class TimedStream(io.StringIO):
    """A stream that keeps the times at which text was written to it."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock
        self.times = []

    def write(self, text):
        if text:
            self.times.append(self.clock.seconds)
        return super().write(text)


def wait(clock, progress, seconds):
    """Lets seconds pass, after each of which the display may print a line."""
    for _ in range(seconds):
        clock.seconds += 1
        progress.tick()


def wait_in_short_phases(clock, progress):
    """Waits for 3 seconds in each of the phases before the first step."""
    for phase in ('preparing data', 'compiling', 'initializing'):
        with progress.phase(phase):
            wait(clock, progress, seconds=3)


def test_a_plain_line_is_printed_at_least_every_five_seconds(make_progress, clock):
    """Lines are printed in short phases, in the first step, between steps and in evaluations."""
    stream = TimedStream(clock)
    start = clock.seconds

    with make_progress(stream, 'x', total_steps=10) as progress:
        wait_in_short_phases(clock, progress)
        progress.begin()
        wait(clock, progress, seconds=12)
        progress.update(step=1, loss=1.5)
        wait(clock, progress, seconds=17)
        progress.update(step=2, loss=None)
        wait(clock, progress, seconds=17)
        with progress.phase('evaluating'):
            wait(clock, progress, seconds=9)
        progress.update_validation_loss(step=2, loss=2.5)

    end = clock.seconds
    seconds_without_a_line = np.diff([start, *stream.times, end])
    assert max(seconds_without_a_line) <= 5


def test_short_phases_have_a_plain_line_every_four_seconds(make_progress, clock):
    stream = TimedStream(clock)
    start = clock.seconds

    with make_progress(stream, 'x', total_steps=10) as progress:
        wait_in_short_phases(clock, progress)
        progress.begin()  # the phase 'first steps'
        wait(clock, progress, seconds=3)

    # A line is printed every 4 s.
    # The phases begin after 0, 3, 6 and 9 s. A line shows for how long its phase has lasted.
    assert [time - start for time in stream.times] == [4, 8, 12]
    assert stream.getvalue().splitlines() == [
        'x: compiling ... 1 s',
        'x: initializing ... 2 s',
        'x: first steps ... 3 s',
    ]


def test_a_plain_line_of_a_step_without_a_loss_has_no_loss(make_progress, clock):
    stream = io.StringIO()

    with make_progress(stream, 'x', total_steps=10) as progress:
        progress.update(step=1, loss=1.5)
        clock.seconds += 4
        progress.update(step=2, loss=None)

    # The 8 steps left take 8 * 4 s = 32 s.
    assert stream.getvalue().splitlines() == [
        'x: step 1/10, 10%, loss 1.5000 nats/token',
        'x: step 2/10, 00:32 left, 20%',
    ]


def test_a_validation_loss_is_a_plain_line_of_its_own(make_progress):
    stream = io.StringIO()

    with make_progress(stream, 'x', total_steps=10) as progress:
        progress.update(step=2, loss=None)
        progress.update_validation_loss(step=2, loss=2.5)

    # Closing the display prints nothing, because step 2 has been shown.
    assert stream.getvalue().splitlines() == [
        'x: step 2/10, 20%',
        'step 2/10: validation loss 2.5000 nats/token',
    ]


def test_a_line_that_is_redrawn_stands_below_whole_lines():
    """`draw` replaces the bottom line of a terminal, and `print` adds a line above it."""
    stream = Terminal()
    screen = Screen(stream, columns=60)

    screen.draw('study: 1 of 8 runs done')
    screen.print('line 1')
    screen.draw('study: 2 of 8 runs done')
    screen.print('line 2')
    assert stream.lines() == ['line 1', 'line 2', 'study: 2 of 8 runs done']

    # A drawn line has at most 59 of the 60 columns. A longer line is cut and ends with '…'.
    screen.draw('x' * 60)
    assert stream.lines() == ['line 1', 'line 2', 'x' * 58 + '…']

    # The first `close` removes the redrawn line. The second `close` changes nothing.
    screen.close()
    screen.close()
    assert stream.lines() == ['line 1', 'line 2', '']


def test_no_line_is_redrawn_on_a_terminal_that_cannot_move_the_cursor(monkeypatch):
    assert Screen(Terminal()).terminal
    monkeypatch.setenv('TERM', 'dumb')
    assert not Screen(Terminal()).terminal


# Output whose reader has gone is dropped without an error.


def is_null_device(stream) -> bool:
    return os.path.samestat(os.fstat(stream.fileno()), os.stat(os.devnull))


@pytest.mark.parametrize('is_terminal', [False, True])
def test_a_display_whose_reader_has_gone_writes_nowhere(is_terminal, unread, monkeypatch):
    """Standard error is a pipe whose reading end is closed, so writing to it is an error.

    At this error, the display redirects standard error to /dev/null, and the run goes on.
    """
    monkeypatch.setattr(unread, 'isatty', lambda: is_terminal, raising=False)
    monkeypatch.setattr(sys, 'stderr', unread)

    with Progress('run', 10, screen=Screen(columns=80)) as progress:
        progress.update(1, 2.5)
        progress.print('a line')
        progress.tick()

    # More than a pipe holds is written without an error.
    print('b' * 100_000, file=unread, flush=True)
    assert is_null_device(unread)


@pytest.mark.parametrize('is_terminal', [False, True])
def test_a_log_whose_reader_has_gone_writes_nowhere(is_terminal, unread, monkeypatch):
    monkeypatch.setattr(unread, 'isatty', lambda: is_terminal, raising=False)
    monkeypatch.setattr(sys, 'stderr', unread)

    log('resuming')

    print('b' * 100_000, file=unread, flush=True)  # raises no error
    assert is_null_device(unread)


def test_a_screen_whose_terminal_was_closed_writes_nowhere():
    window_end, program_end = os.openpty()
    with open(program_end, 'w') as stream:
        screen = Screen(stream)
        os.close(window_end)  # as if the window of the terminal was closed

        # The first line cannot be written, so the stream is redirected to /dev/null.
        screen.draw('a line')
        screen.draw('a line')

        assert is_null_device(stream)


def test_a_full_disk_is_an_error():
    with pytest.raises(OSError, match='No space left') as raised, open('/dev/full', 'w') as full:
        output.say('a', full)

    sentence, code = cli.outcome(raised.value)
    assert sentence == (
        'standard output or error cannot be written (No space left on device); make room and run '
        'the command again'
    )
    assert code == 2


def test_exhausted_devices_are_not_tried_again():
    with pytest.raises(RuntimeError) as raised:
        jnp.zeros(2**46, jnp.uint8).block_until_ready()

    sentence, code = cli.outcome(raised.value)
    assert re.match(
        r'the devices are out of memory \(Out of memory allocating \d+ bytes\); r', sentence
    )
    assert code == 2


def test_a_runtime_error_of_another_kind_is_not_explained():
    assert cli.outcome(RuntimeError('a bug')) is None


def assert_exit_code_is_kept(stdout, monkeypatch):
    """Ends a command because of a wrong setting, while `stdout` cannot be written."""
    monkeypatch.setattr(sys, 'stdout', stdout)
    print('buffered')
    with pytest.raises(SystemExit) as ended:
        cli.exit_with('d_model=0 must be at least 1')
    assert ended.value.code == 2
    assert is_null_device(stdout)  # what was buffered is dropped


def test_a_wrong_setting_keeps_its_exit_code_without_a_reader(unread, monkeypatch):
    assert_exit_code_is_kept(unread, monkeypatch)


def test_a_wrong_setting_keeps_its_exit_code_on_a_full_disk(monkeypatch):
    with open('/dev/full', 'w') as full:
        assert_exit_code_is_kept(full, monkeypatch)
