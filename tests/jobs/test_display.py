"""The display with a clock that is set by hand, on terminals, plain streams and unread ones."""

import contextlib
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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """The lines that it shows after carriage returns, moves and erased lines."""
        rows = defaultdict(str)
        row = 0
        column = 0
        for part in re.findall(r'\x1b\[[\d;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+', self.getvalue()):
            if part in '\r\n':
                row += part == '\n'
                column = 0
            elif part[0] != '\x1b':
                rows[row] = rows[row][:column] + part
                column += len(part)
            elif part == '\x1b[2K':
                rows[row] = ''
        return [rows[n].rstrip() for n in range(max(row, *rows) + 1)]


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv('TERM', 'xterm')


@pytest.fixture(autouse=True)
def no_ticks_of_the_thread(monkeypatch):
    """Tests call `tick`; the display's thread, which calls it too, could come between."""
    monkeypatch.setattr(display, '_TICK', 3600.0)


@pytest.fixture
def clock():
    return types.SimpleNamespace(seconds=100.0)


@pytest.fixture
def show(clock):
    """show(stream, label, steps, ...) -> a display on a stream, 80 columns wide."""
    return lambda stream, *arguments, columns=80, **settings: Progress(
        *arguments, screen=Screen(stream, columns), clock=lambda: clock.seconds, **settings
    )


def test_plain_lines_are_printed_every_few_seconds(show, clock):
    stream = io.StringIO()
    left = StudyLeft(runs=3, waiting_work=4.0, workers=2)
    progress = show(stream, 'qk.vo', 1100, tokens_per_step=1000, study=lambda: left)
    assert stream.getvalue() == ''
    progress.begin()
    clock.seconds += 5
    for step in range(1041, 1101):
        progress.update(step, loss=jnp.float32(2.5))
        clock.seconds += 0.2
        if step == 1080:
            progress.update_validation_loss(step, np.array([2.25, 2.5]))
    progress.close()
    progress.close()
    validation = 'validation loss 2.2500 to 2.5000 nats/token'
    loss = 'loss 2.5000 nats/token'
    # Four runs of 5 + 1100 / 5 seconds follow, which two workers share.
    assert stream.getvalue().splitlines() == [
        f'qk.vo: step 1,041/1,100, 95%, {loss}, 3 runs left',
        f'qk.vo: step 1,061/1,100, 5,000 tokens/s, 00:07 left, 96%, {loss}, '
        'study 07:37 left with 2 workers, 3 runs left',
        f'qk.vo: step 1,081/1,100, {validation}, 5,000 tokens/s, 00:03 left, 98%, {loss}, '
        'study 07:33 left with 2 workers, 3 runs left',
        f'qk.vo: step 1,100/1,100, {validation}, 5,000 tokens/s, 100%, {loss}, '
        'study 07:30 left with 2 workers, 3 runs left',
    ]


def test_the_display_shows_what_a_step_measured(show, clock):
    stream = io.StringIO()
    with show(stream, 'x', 100, tokens_per_step=10) as progress:
        progress.update(1)
        progress.update_speeds({'mfu': 0.4321, 'input_wait_fraction': 0.07})
        # A step of 10 tokens in 5 s; 98 more take 490 s.
        clock.seconds += 5
        progress.update(2)
    assert stream.getvalue().splitlines() == [
        'x: step 1/100, 1%',
        'x: step 2/100, 2 tokens/s, 43.2% MFU, 08:10 left, 2%, 7% waiting for input',
    ]


# Seconds of a step, of the first evaluation and of later ones, of the first save and of later ones.
PACES = {
    'evaluations are compiled': (0.2, 10.0, 1.0, 5.0, 0.0),
    'evaluations are slow': (0.2, 10.0, 10.0, 0.1, 0.1),
    'steps are slow': (30.0, 60.0, 2.0, 1.0, 1.0),
    'nothing is paid once': (1.0, 1.0, 1.0, 1.0, 1.0),
}


@pytest.mark.parametrize('name', PACES)
def test_the_time_left_counts_no_compilation_a_second_time(name, clock):
    """A run evaluates and saves after every 25 of its 200 steps.

    The first evaluation and save, which compile, must not count for the later ones.
    """
    step_seconds, first_evaluation, evaluation, first_save, save = PACES[name]
    pace = Pace(clock.seconds)
    clock.seconds += 100.0  # compilation
    estimates = {}
    for step in range(1, 201):
        clock.seconds += step_seconds
        pace.report(step, clock.seconds)
        if step % 25 == 0:
            first = step == 25
            for phase, seconds in (
                ('evaluating', first_evaluation if first else evaluation),
                ('saving', first_save if first else save),
            ):
                pace.pause(clock.seconds)
                clock.seconds += seconds
                assert pace.seconds_left(200, clock.seconds) == pace.seconds_left(
                    200, clock.seconds - seconds
                )
                pace.resume(phase, clock.seconds)
        estimates[step] = pace.seconds_left(200, clock.seconds)
    assert estimates[1] is None  # of the first step nothing is known yet
    of_steps = {step: (200 - step) * step_seconds for step in estimates}
    for step in (2, 24, 25, 26, 49):  # before the phases have recurred
        assert estimates[step] == pytest.approx(of_steps[step])
    for step in (50, 74, 100, 199):
        recurring = (200 - step) / 25 * (evaluation + save)
        assert estimates[step] == pytest.approx(of_steps[step] + recurring)


def test_a_display_asks_what_is_left_of_a_study_once_a_minute(show, clock):
    ask = Mock(return_value=StudyLeft(runs=3, waiting_work=4.0, workers=2))
    progress = show(io.StringIO(), 'x', 100, study=ask)
    progress.begin()
    assert ask.call_count == 1
    # A step and an evaluation every 10 s.
    for step in range(1, 101):
        clock.seconds += 10
        progress.update(step)
        progress.update_validation_loss(step, 2.5)
    assert ask.call_count == 1 + 1000 // 60


def test_plain_lines_of_a_long_run_are_printed_less_often(show, clock):
    loss = MagicMock(__array__=Mock(return_value=np.asarray(1.0)))
    with show(stream := io.StringIO(), 'x', 86400) as progress:
        for step in range(1, 86401):
            clock.seconds += 1
            progress.update(step, loss)
    lines = len(stream.getvalue().splitlines())
    assert lines < 170 and loss.__array__.call_count == lines  # from the device, only what is shown


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
    assert [format_duration(s) for s in (59.9, 130, 3723)] == ['00:59', '02:10', '1:02:03']


@pytest.mark.parametrize(
    ('columns', 'row'),
    [
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
def test_the_row_of_a_terminal_shows_more_where_it_is_wider(columns, row, show, clock):
    study = StudyLeft(120, waiting_work=30.0, workers=1)
    stream = Terminal()
    settings = {'columns': columns, 'tokens_per_step': 3000, 'study': lambda: study}
    progress = show(stream, LABEL, 4000, **settings)
    progress.begin()
    for step in (10, 1200):
        clock.seconds += 10
        progress.update(step, np.array([2.5, 2.345]))
    progress.update_validation_loss(1200, np.array([2.5, 2.25]))
    # A line of the log is printed above the row.
    LogHandler().emit(logging.LogRecord('x', 20, '', 1, 'resuming', (), None))
    clock.seconds += 1
    progress.tick()
    assert stream.lines() == ['resuming', row]
    assert len(row) < columns
    progress.close()
    assert stream.lines() == ['resuming', row, '']


def test_a_phase_that_lasts_is_shown_with_its_seconds(show, clock, caplog):
    caplog.set_level(logging.DEBUG, 'qkattn')
    with show(terminal := Terminal(), 'qk/vo', 10) as progress, progress.phase('compiling'):
        for seconds in range(1, 50):
            clock.seconds += 1
            progress.tick()
            (line,) = terminal.lines()
            assert line.startswith('qk/vo')
            assert line.endswith(f'compiling ... {seconds} s')
    assert not any(terminal.lines())
    assert caplog.messages == ['qk/vo: compiling took 49.000 s']


def test_a_plain_line_is_printed_at_least_every_five_seconds(show, clock):
    """Three phases of 3 s, a first step of 12 s, two of 17 s and an evaluation of 9 s."""

    class Lines(io.StringIO):
        def write(self, text):
            times.append(clock.seconds)
            return super().write(text)

    times = [clock.seconds]
    with show(stream := Lines(), 'x', 10) as progress:

        def wait(seconds):
            for _ in range(seconds):
                clock.seconds += 1
                progress.tick()

        for phase in ('preparing data', 'compiling', 'initializing'):
            with progress.phase(phase):
                wait(3)
        progress.begin()
        wait(12)
        for step, loss in ((1, 1.5), (2, None)):
            progress.update(step, loss)
            wait(17)
        with progress.phase('evaluating'):
            wait(9)
        progress.update_validation_loss(2, 2.5)  # of a run by itself
    times.append(clock.seconds)
    assert max(np.diff(times)) <= 5
    assert min(np.diff(times[:4])) >= 4
    first, *_, last = stream.getvalue().splitlines()
    assert first == 'x: compiling ... 1 s'
    assert re.search(r'^x: step 2/10, [\d:]+ left, 20%$', stream.getvalue(), re.M)  # without a loss
    assert last == 'step 2/10: validation loss 2.5000 nats/token'


def test_a_line_that_is_redrawn_stands_below_whole_lines(monkeypatch):
    screen = Screen(stream := Terminal(), 60)
    for done in (1, 2):
        screen.draw(f'study: {done} of 8 runs done')
        screen.print(f'line {done}')
    assert stream.lines() == ['line 1', 'line 2', 'study: 2 of 8 runs done']

    # A line is cut to the width, and removed at the end.
    screen.draw('x' * 60)
    assert stream.lines()[2] == 'x' * 58 + '…'
    screen.close()
    screen.close()
    assert stream.lines() == ['line 1', 'line 2', '']

    # On a terminal that cannot move the cursor, no line is redrawn.
    monkeypatch.setenv('TERM', 'dumb')
    assert screen.terminal
    assert not Screen(stream).terminal


# Output that nobody reads ends a command quietly, and stops no run.


def is_null_device(stream) -> bool:
    return os.path.samestat(os.fstat(stream.fileno()), os.stat(os.devnull))


@pytest.mark.parametrize('terminal', [False, True])
@pytest.mark.parametrize('kind', ['progress', 'log'])
def test_a_display_whose_reader_has_gone_writes_nowhere(kind, terminal, unread, monkeypatch):
    monkeypatch.setattr(unread, 'isatty', lambda: terminal, raising=False)
    monkeypatch.setattr(sys, 'stderr', unread)
    if kind == 'log':
        LogHandler().emit(logging.LogRecord('qkattn', logging.INFO, '', 1, 'resuming', (), None))
    else:
        with Progress('run', 10, screen=Screen(columns=80)) as progress:
            progress.update(1, 2.5)
            progress.print('a line')
            progress.tick()
    print('b' * 100_000, file=unread, flush=True)  # by anybody else
    assert is_null_device(unread)


def test_a_screen_whose_terminal_was_closed_writes_nowhere():
    ours, theirs = os.openpty()
    with open(theirs, 'w') as stream:
        screen = Screen(stream)
        os.close(ours)
        # The first attempt fails, and the stream is led to the null device.
        for _ in range(2):
            screen.draw('a line')
        assert is_null_device(stream)


def test_a_full_disk_is_an_error():
    with pytest.raises(OSError, match='No space left') as raised, open('/dev/full', 'w') as full:
        output.say('a', full)
    sentence = 'standard output or error cannot be written (No space left on device); make room'
    assert cli.outcome(raised.value) == (f'{sentence} and run the command again', 2)


def test_exhausted_devices_are_not_tried_again():
    with pytest.raises(RuntimeError) as raised:
        jnp.zeros(2**46, jnp.uint8).block_until_ready()
    sentence, code = cli.outcome(raised.value)
    assert re.match(
        r'the devices are out of memory \(Out of memory allocating \d+ bytes\); r', sentence
    )
    assert code == 2
    assert cli.outcome(RuntimeError('a bug')) is None


@pytest.mark.parametrize('full', [False, True])
def test_a_wrong_setting_keeps_its_exit_code(unread, monkeypatch, full):
    # The stream is a full disk, or a pipe that nobody reads; what it holds is dropped.
    with open('/dev/full', 'w') if full else contextlib.nullcontext(unread) as stream:
        monkeypatch.setattr(sys, 'stdout', stream)
        print('buffered')
        with pytest.raises(SystemExit) as ended:
            cli.exit_with('d_model=0 must be at least 1')
        assert ended.value.code == 2
        assert is_null_device(stream)
