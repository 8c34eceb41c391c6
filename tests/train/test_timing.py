"""Where the time of a run goes, with seconds that are set by hand; which steps are traced."""

import contextlib
import threading
import types

import pytest

from qkattn.config import TrainConfig
from qkattn.errors import ConfigError
from qkattn.train import timing
from qkattn.train.loop import train
from qkattn.train.timing import PARTS, Clock, Trace

RECORD = dict.fromkeys(PARTS, 0.0) | {'train_seconds': 40.0, 'logging_seconds': 2.0}


@pytest.fixture
def now(monkeypatch):
    """A list whose only number is the time."""
    now = [100.0]
    monkeypatch.setattr(timing, 'time', types.SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_parts_are_waits_for_input_and_logging_and_a_resumed_run_adds_to_them(now):
    timed = Clock(RECORD | {'data': {}})

    def batches():
        for batch in range(3):
            now[0] += 2
            yield batch

    for _ in timed.inputs(batches()):
        now[0] += 7  # what is done with a batch is no wait
    timed.start()
    with timed.part('logging_seconds'):
        now[0] += 0.5
    timed.pause(tokens=10)
    want = {'train_seconds': 40.5, 'input_seconds': 6, 'gap_seconds': 0, 'logging_seconds': 2.5}
    assert timed.seconds == want and timed.tokens_per_second == 20


def test_a_gap_is_from_the_end_of_a_dispatch_to_the_next_one(now, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(timing.jax, 'block_until_ready', lambda _: ended.wait(5) or 1 / 0)
    timed = Clock(RECORD)
    timed.start()
    timed.dispatched('running')
    now[0] += 5
    timed.dispatching()  # while the devices still work
    assert timed.seconds['gap_seconds'] == 0
    ended.set()
    for pause in (False, True):  # what follows a pause is no gap
        timed.dispatched('ended at once')
        timed._ended.result()
        if pause:
            timed.start()
        now[0] += 3
        timed.dispatching()
        assert timed.seconds['gap_seconds'] == 3
    timed.close()


@pytest.mark.parametrize(
    ('directory', 'steps', 'since', 'expected'),
    [
        ('out', None, 0, [('start', 4), ('stop', 10)]),
        ('out', None, 12, [('start', 16), ('stop', 18)]),
        ('out', '1:1', 0, [('start', 0), ('stop', 2)]),
        ('out', '6:9', 0, [('start', 4), ('stop', 10)]),
        ('out', '6:9', 6, [('start', 6), ('stop', 10)]),
        ('out', '1:3', 6, []),
        (None, None, 0, []),
    ],
)
def test_the_dispatches_of_the_steps_are_traced(
    tmp_path, monkeypatch, directory, steps, since, expected
):
    calls, done = [], since
    profiler = types.SimpleNamespace(
        start_trace=lambda *_, **__: calls.append(('start', done)),
        stop_trace=lambda: calls.append(('stop', done)),
    )
    monkeypatch.setattr(timing.jax, 'profiler', profiler)
    settings = TrainConfig(num_steps=20, steps_per_dispatch=2)
    path = directory and str(tmp_path / directory)
    with contextlib.closing(Trace(path, steps, settings)) as tracing:
        for done in range(since, 20, 2):
            tracing.at(done, None)
    assert calls == expected


@pytest.mark.parametrize(
    ('directory', 'steps', 'message'),
    [
        *(('out', steps, f'steps={steps} must be FIRST:LAST') for steps in ('5', '0:3', '5:3', '')),
        ('out', '1:13', '--profile_steps=1:13 must be FIRST:LAST with .* <= 12'),
        (None, '1:2', '--profile_steps=1:2 needs --profile'),
        ('gs://b/x', None, 'gs://b/x must be a directory on a file system'),
        ('/dev/null', None, r'--profile=/dev/null cannot be used \(File exists\)'),
    ],
)
def test_what_cannot_be_traced_is_refused(directory, steps, message):
    with pytest.raises(ConfigError, match=message):
        Trace(directory, steps, TrainConfig(num_steps=12))


@pytest.mark.slow
def test_a_run_is_traced(small, tmp_path):
    config = small(trials={'seeds': (0,)})
    train(config, tmp_path / 'run', trace=Trace(f'{tmp_path}/trace', '9:9', config.train))
    assert len(list((tmp_path / 'trace').rglob('*.xplane.pb'))) == 1
