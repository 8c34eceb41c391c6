"""Progress with a clock that is set by hand, on plain streams and on terminals of a given width."""

import io
import logging
import re

import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.jobs import progress as progress_module
from qkattn.jobs.progress import LogHandler, Progress, StudyLeft
from qkattn.jobs.shown import short


class Clock:
    def __init__(self):
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def screen(self) -> list[str]:
        """The lines as a terminal shows them; the one that is being updated stands last."""
        lines = ['']
        for text in re.split(r'(\r|\n|\x1b\[K)', self.getvalue()):
            if text == '\n':
                lines.append('')
            elif text == '\r':
                column = 0
            elif text == '\x1b[K':
                lines[-1] = lines[-1][:column]
            elif text:
                column = 0 if not lines[-1] else column
                lines[-1] = lines[-1][:column] + text + lines[-1][column + len(text) :]
                column += len(text)
        return lines


def test_plain_progress_writes_whole_lines_at_intervals(clock):
    stream = io.StringIO()
    study = StudyLeft(3, work=2.0)
    settings = {'tokens_per_step': 1000, 'plain_every_seconds': 10}
    progress = Progress('qk.vo', 1100, **settings, stream=stream, clock=clock, study=study)
    assert stream.getvalue() == ''
    progress.begin(1040)
    clock.seconds += 5
    for step in range(1041, 1101):
        progress.update(step, loss=jnp.float32(2.5))
        clock.seconds += 0.5
        if step == 1080:
            progress.evaluated(step, np.array([2.25, 2.5]))
    progress.close()
    progress.close()
    loss = 'training loss 2.5000 nats/token'
    both = f'{loss}, validation loss 2.2500 to 2.5000 nats/token'
    assert stream.getvalue().splitlines() == [
        f'qk.vo: step 1,041/1,100, {loss}, 3 runs left',
        # Two runs of 5 + 1100 / 2 seconds follow.
        f'qk.vo: step 1,061/1,100, {loss}, 2,000 tokens/s, 00:19 left, study 18:49 left, 3 runs '
        'left',
        f'qk.vo: step 1,081/1,100, {both}, 2,000 tokens/s, 00:09 left, study 18:39 left, 3 runs '
        'left',
        f'qk.vo: step 1,100/1,100, {both}, 2,000 tokens/s, study 18:30 left, 3 runs left',
    ]


def test_plain_lines_of_a_long_run_stand_farther_apart(clock):
    stream = io.StringIO()
    with Progress('x', 86400, stream=stream, clock=clock) as progress:
        for step in range(1, 86401):
            clock.seconds += 1
            progress.update(step)
    assert len(stream.getvalue().splitlines()) < 170


def test_progress_fetches_the_loss_only_when_it_is_shown(clock):
    class Loss:
        fetched = 0

        def __array__(self, dtype=None, copy=None):
            Loss.fetched += 1
            return np.asarray(1.0, dtype)

    with Progress('x', 10, stream=io.StringIO(), clock=clock) as progress:
        for step in range(1, 11):
            progress.update(step, Loss())
    assert Loss.fetched == 2


def test_every_line_shows_the_newest_loss(clock):
    """Also where the lines are those of the timer, each just before an update."""
    stream = io.StringIO()
    with Progress('x', 9, stream=stream, clock=clock) as progress:
        for step in range(1, 10):
            progress.update(step, 4 - step / 10)
            clock.seconds += 10
            progress.tick()
    shown = re.findall(r'step (\d)/9, training loss ([\d.]+)', stream.getvalue())
    assert shown == [('1', '3.9000')] + [(f'{n}', f'{4 - n / 10:.4f}') for n in range(1, 10)]


def test_the_time_left_counts_the_evaluations_and_checkpoints_to_come(clock, monkeypatch):
    monkeypatch.setattr(progress_module, '_PLAIN_FRACTION', 0.0)
    stream = io.StringIO()
    settings = {'tokens_per_step': 10, 'plain_every_seconds': 1}
    progress = Progress('x', 40, **settings, stream=stream, clock=clock)
    progress.begin(0, evaluating=5, saving=2)
    for step in range(1, 41):
        clock.seconds += 2
        progress.update(step, 3.0)
        if step % 10 == 0:
            with progress.phase('evaluating'):
                clock.seconds += 50 if step == 10 else 30  # the first one compiles
        if step % 20 == 0:
            with progress.phase('saving'):
                clock.seconds += 1
    progress.close()
    left = dict(re.findall(r'step (\d+)/40, .* 5 tokens/s, (.*)', stream.getvalue()))
    assert [left[step] for step in ('2', '11', '20', '21', '31', '39', '40')] == [
        '01:16 left plus 5 evaluations and 2 checkpoints',
        '04:18 left plus 2 checkpoints',
        '04:00 left plus 2 checkpoints',
        '02:09 left',
        '01:19 left',
        '01:03 left',
        '01:01 left',
    ]
    # The speed is that of the steps alone.
    assert set(re.findall(r'(\S+) tokens/s', stream.getvalue())) == {'5'}


def test_an_evaluation_before_the_first_step_is_a_measurement(clock):
    stream = io.StringIO()
    progress = Progress('x', 40, stream=stream, clock=clock, study=StudyLeft(1, work=2.0))
    with progress.phase('evaluating'):
        clock.seconds += 7
    progress.begin(20, evaluating=3)
    for step in (30, 40):
        progress.update(step, 3.0)
        clock.seconds += 10
    progress.tick()
    # A whole run takes 7 s before its first step, 40 steps, and twice as many evaluations.
    assert 21 + 2 * (7 + 40 + 42) == 3 * 60 + 19
    assert '00:21 left, study 03:19 left, 1 run left' in stream.getvalue()


@pytest.mark.parametrize(
    ('loss', 'text'),
    [
        (2.0, 'loss 2.0000 nats/token'),
        (np.array([2.5, 2.0]), 'loss 2.0000 to 2.5000 nats/token'),
        (
            np.array([2.5, np.nan, 2.0]),
            'loss 2.0000 to 2.5000 nats/token (1 of 3 trials not finite)',
        ),
        (np.nan, 'training loss not finite'),
        (np.array([np.nan, np.inf]), 'training loss not finite'),
        (None, 'step 1/2, '),
    ],
)
def test_progress_shows_the_range_over_trials(loss, text, clock):
    stream = io.StringIO()
    with Progress('x', 2, stream=stream, clock=clock) as progress:
        progress.update(1, loss)
    assert stream.getvalue().endswith(f'{text}\n')


def test_a_run_by_itself_prints_every_evaluation(clock):
    stream = io.StringIO()
    with Progress('train', 2000, stream=stream, clock=clock) as progress:
        progress.evaluated(1000, np.array([2.5, 2.0]))
    assert stream.getvalue() == ('step 1,000/2,000: validation loss 2.0000 to 2.5000 nats/token\n')


LABEL = 'shared_qk(key_norm=True,self_mask=True)/vo d_model=128 equal_shape learning_rate'


@pytest.mark.parametrize('columns', [60, 80, 100, 140, 200])
def test_the_line_of_a_terminal_fits_and_keeps_label_loss_and_times(columns, clock):
    stream = Terminal()
    progress = Progress(
        LABEL,
        4000,
        stream=stream,
        clock=clock,
        columns=columns,
        tokens_per_step=3000,
        study=StudyLeft(120, work=30.0),
    )
    progress.begin(0)
    for step in (10, 1200):
        clock.seconds += 10
        progress.update(step, np.array([2.5, 2.345]))
    progress.evaluated(1200, np.array([2.5, 2.25]))
    clock.seconds += 1
    progress.tick()
    line = stream.screen()[-1]
    assert len(stream.screen()) == 1 and len(line) == columns - 1
    assert line.startswith('shar') and line[: columns // 2].count('…') == 1
    assert ' 30%|' in line and 'train loss 2.345-2.500' in line and '00:22 left' in line
    assert re.search(r'left, study 2\d:\d\d', line) or columns < 80
    shown = ('nats/token', '1,200/4,000', 'val 2.250-2.500', '120 runs left', '357,000 tokens/s')
    assert [text in line for text in shown] == {
        60: [False] * 5,
        80: [False] * 5,
        100: [True, False, False, False, False],
        140: [True, True, True, False, False],
        200: [True] * 5,
    }[columns]
    progress.close()
    assert stream.getvalue().endswith('\n')


def test_a_phase_that_lasts_is_shown_with_its_seconds(clock):
    plain, terminal = io.StringIO(), Terminal()
    for stream in (plain, terminal):
        progress = Progress('qk/vo', 10, stream=stream, clock=clock, columns=80)
        with progress.phase('compiling'):
            for seconds in range(1, 50):
                clock.seconds += 1
                progress.tick()
                if stream is terminal:
                    assert terminal.screen() == [f'qk/vo: compiling ... {seconds} s']
        progress.tick()
        progress.close()
    assert plain.getvalue().splitlines() == [
        f'qk/vo: compiling ... {seconds} s' for seconds in range(4, 50, 4)
    ]
    assert terminal.screen() == ['']


def test_a_terminal_moves_between_two_updates(clock):
    stream = Terminal()
    progress = Progress('qk/vo', 100, stream=stream, clock=clock, columns=80)
    progress.begin(0)
    for step in (10, 20):
        clock.seconds += 20
        progress.update(step, 1.0)
    assert '02:40 left' in stream.screen()[-1]
    clock.seconds += 5
    progress.tick()
    assert '02:35 left' in stream.screen()[-1]
    progress.close()


def test_messages_stand_above_the_line_of_a_terminal(clock, capsys):
    handler, record = LogHandler(), logging.LogRecord('x', 20, '', 1, 'resuming', (), None)
    handler.emit(record)
    assert capsys.readouterr().err == 'resuming\n'
    stream = Terminal()
    with Progress('qk/vo', 100, stream=stream, clock=clock, columns=80) as progress:
        progress.update(10, 1.0)
        handler.emit(record)
        progress.tick()
    above, line, end = stream.screen()
    assert (above, line[:11], end) == ('resuming', 'qk/vo:  10%', '')


def test_the_middle_of_a_long_name_is_left_out():
    assert (short('qk/vo', 5), short('shared_qk/vo', 7)) == ('qk/vo', 'sha…/vo')


def test_a_phase_is_logged_with_its_seconds(clock, caplog):
    caplog.set_level(logging.DEBUG, 'qkattn')
    progress = Progress('qk.vo', stream=io.StringIO(), clock=clock)
    with progress, progress.phase('compiling'):
        clock.seconds += 1.25
    assert caplog.messages == ['qk.vo: compiling took 1.250 s']


def test_no_plain_stretch_is_silent_for_more_than_five_seconds(clock):
    """Whatever short phases and long steps follow each other."""

    class Lines(io.StringIO):
        def write(self, text):
            times.append(clock.seconds)
            return super().write(text)

    times, stream = [clock.seconds], Lines()
    with Progress('x', 10, stream=stream, clock=clock) as progress:

        def wait(seconds):
            for _ in range(seconds):
                clock.seconds += 1
                progress.tick()

        for phase in ('preparing data', 'compiling', 'initializing'):
            with progress.phase(phase):
                wait(3)
        progress.begin(0)
        wait(12)
        for step in (1, 2):
            progress.update(step, 1.5)
            wait(17)
        with progress.phase('evaluating'):
            wait(9)
    times.append(clock.seconds)
    assert max(np.diff(times)) <= 5
    lines = stream.getvalue().splitlines()
    assert lines[0] == 'x: compiling ... 1 s' and lines.count(lines[-1]) == 1
