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

from qkattn.jobs import cli, output
from qkattn.jobs.display import LogHandler, Progress, Screen, StudyLeft, interval, loss_text

LABEL = 'shared_qk(key_norm=True,self_mask=True)/vo d_model=128 equal_shape learning_rate'


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """What stands on it."""
        rows, row, column = defaultdict(str), 0, 0
        for part in re.findall(r'\x1b\[[\d;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+', self.getvalue()):
            if part in '\r\n':
                row, column = row + (part == '\n'), 0
            elif part[0] != '\x1b':
                rows[row] = rows[row][:column] + part
                column += len(part)
            elif part == '\x1b[2K':
                rows[row] = ''
        return [rows[n].rstrip() for n in range(max(row, *rows) + 1)]


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv('TERM', 'xterm')


@pytest.fixture
def clock():
    return types.SimpleNamespace(seconds=100.0)


@pytest.fixture
def show(clock):
    """show(stream, label, steps, ...) -> a display on a stream, 80 columns wide."""
    return lambda stream, *arguments, columns=80, **settings: Progress(
        *arguments, screen=Screen(stream, columns), clock=lambda: clock.seconds, **settings
    )


def test_plain_lines_stand_at_intervals(show, clock):
    stream = io.StringIO()
    progress = show(stream, 'qk.vo', 1100, tokens_per_step=1000, study=StudyLeft(3, work=2.0))
    assert stream.getvalue() == ''
    progress.begin()
    clock.seconds += 5
    for step in range(1041, 1101):
        progress.update(step, loss=jnp.float32(2.5))
        clock.seconds += 0.2
        if step == 1080:
            progress.evaluated(step, np.array([2.25, 2.5]))
    progress.close()
    progress.close()
    loss, both = 'loss 2.5000 nats/token', 'validation loss 2.2500 to 2.5000 nats/token, 5,000'
    assert stream.getvalue().splitlines() == [
        f'qk.vo: 95%, {loss}, 3 runs left, step 1,041/1,100',
        # Two runs of 5 + 1100 / 5 seconds follow.
        f'qk.vo: 96%, {loss}, 00:07 left, study 07:37 left, 3 runs left, step 1,061/1,100, '
        '5,000 tokens/s',
        f'qk.vo: 98%, {loss}, 00:03 left, study 07:33 left, 3 runs left, step 1,081/1,100, '
        f'{both} tokens/s',
        f'qk.vo: 100%, {loss}, study 07:30 left, 3 runs left, step 1,100/1,100, {both} tokens/s',
    ]


def test_plain_lines_of_a_long_run_stand_farther_apart(show, clock):
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
    assert [interval(s) for s in (59.9, 130, 3723)] == ['00:59', '02:10', '1:02:03']


@pytest.mark.parametrize('columns', [80, 140, 200])
def test_the_row_of_a_terminal_fits_and_shows_what_matters_most(columns, show, clock):
    study = StudyLeft(120, work=30.0)
    stream = Terminal()
    progress = show(stream, LABEL, 4000, columns=columns, tokens_per_step=3000, study=study)
    progress.begin()
    for step in (10, 1200):
        clock.seconds += 10
        progress.update(step, np.array([2.5, 2.345]))
    progress.evaluated(1200, np.array([2.5, 2.25]))
    LogHandler().emit(logging.LogRecord('x', 20, '', 1, 'resuming', (), None))
    before = stream.lines()[-1]
    clock.seconds += 1
    progress.tick()
    above, line = stream.lines()
    assert above == 'resuming' and line != before  # the time left
    assert len(line) <= columns and line.startswith('shar') and '…' in line[:24]
    assert '30%' in line and 'loss 2.3450 to 2.5000, 00:2' in line
    rest = ('step 1,200/4,000', 'validation loss 2.25', '357,000 tokens/s')
    shown = ('study 2', '120 runs left', *rest)
    assert sum(text in line for text in shown) == {80: 1, 140: 4, 200: 5}[columns]
    progress.close()
    assert stream.lines() == ['resuming', line, '']


def test_a_phase_that_lasts_is_shown_with_its_seconds(show, clock, caplog):
    caplog.set_level(logging.DEBUG, 'qkattn')
    with show(terminal := Terminal(), 'qk/vo', 10) as progress, progress.phase('compiling'):
        for seconds in range(1, 50):
            clock.seconds += 1
            progress.tick()
            (line,) = terminal.lines()
            assert line.startswith('qk/vo') and line.endswith(f'compiling ... {seconds} s')
    assert not any(terminal.lines())
    assert caplog.messages == ['qk/vo: compiling took 49.000 s']


def test_no_plain_stretch_is_silent_for_more_than_five_seconds(show, clock):
    """Whatever short phases and long steps follow each other."""

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
        progress.evaluated(2, 2.5)  # of a run by itself
    times.append(clock.seconds)
    assert max(np.diff(times)) <= 5 and min(np.diff(times[:4])) >= 4
    first, *_, last = stream.getvalue().splitlines()
    assert first == 'x: compiling ... 1 s'
    assert re.search(r'^x: 20%, [\d:]+ left, step 2/10$', stream.getvalue(), re.M)  # without a loss
    assert last == 'step 2/10: validation loss 2.5000 nats/token'


def test_a_line_that_is_redrawn_stands_below_whole_lines(monkeypatch):
    screen = Screen(stream := Terminal(), 60)
    for done in (1, 2):
        screen.draw(f'study: {done} of 8 runs done')
        screen.print(f'line {done}')
    assert stream.lines() == ['line 1', 'line 2', 'study: 2 of 8 runs done']
    screen.draw('x' * 60)
    assert stream.lines()[2] == 'x' * 58 + '…'
    screen.close()
    screen.close()
    assert stream.lines() == ['line 1', 'line 2', '']
    monkeypatch.setenv('TERM', 'dumb')
    assert screen.terminal and not Screen(stream).terminal


# Output that nobody reads ends a command quietly, and stops no run.


def goes_nowhere(stream) -> bool:
    return os.path.samestat(os.fstat(stream.fileno()), os.stat(os.devnull))


@pytest.mark.parametrize('terminal', [False, True])
@pytest.mark.parametrize('kind', ['progress', 'log'])
def test_no_display_needs_a_reader(kind, terminal, unread, monkeypatch):
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
    assert goes_nowhere(unread)


def test_a_run_goes_on_without_its_terminal():
    ours, theirs = os.openpty()
    with open(theirs, 'w') as stream:
        screen = Screen(stream)
        os.close(ours)
        for _ in range(2):
            screen.draw('a line')
        assert goes_nowhere(stream)


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
    assert code == 2 and cli.outcome(RuntimeError('a bug')) is None


@pytest.mark.parametrize('full', [False, True])
def test_a_wrong_setting_keeps_its_exit_code(unread, monkeypatch, full):
    with open('/dev/full', 'w') if full else contextlib.nullcontext(unread) as stream:
        monkeypatch.setattr(sys, 'stdout', stream)
        print('buffered')
        with pytest.raises(SystemExit) as ended:
            cli.exit_with('d_model=0 must be at least 1')
        assert ended.value.code == 2 and goes_nowhere(stream)
