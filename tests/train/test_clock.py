"""Where the time of a run goes, with seconds that are set by hand."""

import threading
import types

import pytest

from qkattn.train import clock
from qkattn.train.clock import PARTS, Clock

RECORD = dict.fromkeys(PARTS, 0.0) | {'train_seconds': 40.0, 'logging_seconds': 2.0}


@pytest.fixture
def now(monkeypatch):
    """A list whose only number is the time."""
    now = [100.0]
    monkeypatch.setattr(clock, 'time', types.SimpleNamespace(perf_counter=lambda: now[0]))
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
    monkeypatch.setattr(clock.jax, 'block_until_ready', lambda _: ended.wait(5) or 1 / 0)
    timed = Clock(RECORD | {'train_seconds': 0.0})
    timed.start()
    timed.dispatching()
    timed.dispatched('running')
    now[0] += 5
    timed.dispatching()  # while the devices still work
    assert timed.seconds['gap_seconds'] == 0
    ended.set()
    timed.dispatched('ended at once')
    timed._ended.result()
    now[0] += 3
    timed.dispatching()
    assert timed.seconds['gap_seconds'] == 3
    timed.dispatched('followed by a pause')
    timed._ended.result()
    timed.pause(tokens=400)
    now[0] += 11
    timed.start()
    timed.dispatching()
    assert timed.seconds['gap_seconds'] == 3
    assert timed.seconds['train_seconds'] == 8 and timed.tokens_per_second == 50
    timed.close()
