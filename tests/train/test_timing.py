"""Where the time of a run goes, with seconds that are set by hand; which dispatches are traced."""

import types
from unittest.mock import Mock

import pytest

from qkattn.train import timing
from qkattn.train.loop import train
from qkattn.train.timing import PARTS, Clock, traced


def test_parts_are_waits_for_input_and_logging_and_a_resumed_run_adds_to_them(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(timing, 'time', types.SimpleNamespace(perf_counter=lambda: now[0]))
    timed = Clock(dict.fromkeys(PARTS, 0.0) | {'train_seconds': 40.0, 'logging_seconds': 2.0})

    def wait(seconds):
        now[0] += seconds

    for _ in timed.inputs(wait(2) for _ in range(3)):
        wait(7)  # what is done with a batch is no wait
    timed.start()
    with timed.part('logging_seconds'):
        wait(0.5)
    timed.pause(tokens=10)
    wait(11)
    timed.start()
    wait(1.5)
    timed.pause(tokens=10)
    assert timed.seconds == {'train_seconds': 42, 'input_seconds': 6, 'logging_seconds': 2.5}
    assert timed.tokens_per_second == 10


@pytest.mark.parametrize(('number', 'calls'), [(9, '001112'), (4, '0011'), (2, '00')])
def test_three_dispatches_are_traced(tmp_path, monkeypatch, number, calls):
    """The calls of the profiler so far, at each dispatch, and after the end."""
    profiler, seen = Mock(), ''
    monkeypatch.setattr(timing.jax, 'profiler', profiler)
    for _ in traced(tmp_path, range(number), lambda: None):
        seen += str(len(profiler.method_calls))
    assert seen[:6] == calls
    made = [call[0] for call in profiler.method_calls]
    assert made == ['start_trace', 'stop_trace'] * (number > 2)


@pytest.mark.slow
def test_a_run_is_traced(small, tmp_path):
    train(small(trials={'seeds': (0,)}), tmp_path / 'run', profile=f'{tmp_path}/trace')
    assert len(list((tmp_path / 'trace').rglob('*.xplane.pb'))) == 1
