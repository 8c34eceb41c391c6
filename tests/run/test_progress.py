"""Progress with a clock that is set by hand."""

import io

import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.run.progress import Progress


class Clock:
    def __init__(self):
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_plain_progress_writes_whole_lines_at_intervals():
    clock, stream = Clock(), io.StringIO()
    progress = Progress(
        100, 'qk.vo', start_step=40, tokens_per_step=1000, stream=stream, clock=clock, runs_left=3
    )
    assert stream.getvalue() == ''
    for step in range(41, 101):
        progress.update(step, loss=jnp.float32(2.5))
        clock.seconds += 0.5
    progress.close()
    progress.close()
    assert stream.getvalue().splitlines() == [
        'qk.vo: step 41/100, loss 2.5000, 3 runs left',
        'qk.vo: step 61/100, loss 2.5000, 2,000 tokens/s, 3 runs left, 00:19 to go',
        'qk.vo: step 81/100, loss 2.5000, 2,000 tokens/s, 3 runs left, 00:09 to go',
        'qk.vo: step 100/100, loss 2.5000, 1,967 tokens/s, 3 runs left',
    ]


def test_progress_fetches_the_loss_only_when_it_is_shown():
    class Loss:
        fetched = 0

        def __array__(self, dtype=None, copy=None):
            Loss.fetched += 1
            return np.asarray(1.0, dtype)

    with Progress(10, 'x', stream=io.StringIO(), clock=Clock()) as progress:
        for step in range(1, 11):
            progress.update(step, Loss())
    assert Loss.fetched == 2


@pytest.mark.parametrize(
    ('loss', 'text'),
    [
        (2.0, 'loss 2.0000'),
        (np.array([2.5, 2.0]), 'loss 2.0000 to 2.5000'),
        (np.array([2.5, np.nan, 2.0]), 'loss 2.0000 to 2.5000 (1 of 3 trials not finite)'),
        (np.nan, 'loss not finite'),
        (None, 'step 1/2'),
    ],
)
def test_progress_shows_the_range_over_trials(loss, text):
    stream = io.StringIO()
    with Progress(2, 'x', stream=stream, clock=Clock()) as progress:
        progress.update(1, loss)
    assert stream.getvalue().strip().endswith(text)


def test_progress_on_a_terminal_is_one_bar():
    clock, stream = Clock(), io.StringIO()
    stream.isatty = lambda: True
    with Progress(
        4, 'run', start_step=1, tokens_per_step=10, stream=stream, clock=clock
    ) as progress:
        for step in (2, 3, 4):
            clock.seconds += 1
            progress.update(step, 1.5)
    text = stream.getvalue()
    assert text.startswith('\rrun:  25%') and text.count('\n') == 1
    last = text.rstrip('\n').rsplit('\r', 1)[-1]
    for shown in ('run: 100%', '4/4', 'loss 1.5000', '10 tokens/s'):
        assert shown in last
