"""Where the time of a run goes, with seconds that are set by hand."""

import threading
import types

import pytest

from qkattn.train import clock
from qkattn.train.clock import PARTS, Clock


@pytest.fixture
def now(monkeypatch):
    """A list whose only number is the time."""
    now = [100.0]
    monkeypatch.setattr(clock, 'time', types.SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_input_is_the_wait_for_the_next_batch_and_not_what_is_done_with_it(now):
    timed = Clock(dict.fromkeys(('train_seconds', *PARTS), 0.0))

    def batches():
        for batch in range(3):
            now[0] += 2
            yield batch

    for _ in timed.inputs(batches()):
        now[0] += 7
    assert timed.seconds['input_seconds'] == 6


def test_a_gap_is_from_the_end_of_a_dispatch_to_the_next_one(now, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(clock.jax, 'block_until_ready', lambda _: ended.wait(5) or 1 / 0)
    timed = Clock(dict.fromkeys(('train_seconds', *PARTS), 0.0))
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


def test_a_resumed_run_goes_on_from_the_seconds_of_its_checkpoint(now):
    record = dict.fromkeys(PARTS, 0.0) | {'train_seconds': 40.0, 'logging_seconds': 2.0}
    timed = Clock(record | {'data': {}})
    timed.start()
    with timed.part('logging_seconds'):
        now[0] += 0.5
    timed.pause(tokens=10)
    assert timed.seconds['train_seconds'] == 40.5 and timed.seconds['logging_seconds'] == 2.5
    assert timed.seconds['gap_seconds'] == 0 and timed.tokens_per_second == 20
