import threading

import numpy as np
import pytest

from qkattn.data.prefetch import StepBatches
from tests.data.refusals import refused


def read(seed, step):
    return {'tokens': np.full((2, 3), 100 * seed + step), 'step': np.array(step)}


def test_steps_and_trials_are_in_front_and_trials_of_one_seed_share_the_read():
    calls = []

    def counted(seed, step):
        calls.append((seed, step))
        return read(seed, step)

    seeds = (7, 3, 7)
    with StepBatches(counted, seeds=seeds, start_step=4, num_steps=5, steps_per_read=2) as batches:
        reads = list(batches)
    assert [r['tokens'].shape for r in reads] == [(2, 3, 2, 3), (2, 3, 2, 3), (1, 3, 2, 3)]
    tokens_CX = np.concatenate([r['tokens'][:, :, 0, 0] for r in reads])
    assert tokens_CX.tolist() == [[700 + k, 300 + k, 700 + k] for k in range(4, 9)]
    assert np.concatenate([r['step'] for r in reads])[:, 0].tolist() == [4, 5, 6, 7, 8]
    assert sorted(calls) == [(seed, step) for seed in (3, 7) for step in range(4, 9)]


def test_reads_ahead_in_another_thread_but_not_without_bound():
    read_steps, done = [], threading.Event()

    def recorded(seed, step):
        assert threading.current_thread() is not threading.main_thread()
        read_steps.append(step)
        if step == 3:
            done.set()
        return np.array(step)

    with StepBatches(recorded, seeds=(0,), start_step=0, num_steps=100, num_ahead=3) as batches:
        assert next(batches) == 0
        assert done.wait(10), 'nothing was read ahead'
        assert next(batches) == 1
    assert max(read_steps) <= 5


def test_an_error_reaches_the_consumer_at_its_step():
    def broken(seed, step):
        if step == 2:
            raise RuntimeError('cannot read step 2')
        return np.array(step)

    batches = StepBatches(broken, seeds=(0,), start_step=0, num_steps=100)
    assert [int(next(batches)[0, 0]) for _ in range(2)] == [0, 1]
    with pytest.raises(RuntimeError, match='cannot read step 2'):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)


def test_close_ends_the_thread_and_the_iteration():
    before = set(threading.enumerate())
    batches = StepBatches(read, seeds=(0,), start_step=0, num_steps=100)
    next(batches)
    (thread,) = [t for t in set(threading.enumerate()) - before if 'prefetch' in t.name]
    batches.close()
    batches.close()
    thread.join(10)
    assert not thread.is_alive()
    with pytest.raises(StopIteration):
        next(batches)
    # There may be nothing to read, or nothing read.
    StepBatches(read, seeds=(0,), start_step=0, num_steps=3).close()
    assert list(StepBatches(read, seeds=(0,), start_step=9, num_steps=0)) == []


@pytest.mark.parametrize(
    ('change', 'says'),
    [
        ({'seeds': ()}, r'seeds=\(\) names no trial'),
        ({'start_step': -1}, 'start_step=-1 .* at least 0'),
        ({'num_steps': -1}, 'num_steps=-1 .* at least 0'),
        ({'steps_per_read': 0}, 'steps_per_read=0 .* at least 1'),
    ],
)
def test_bad_settings_are_one_sentence(change, says):
    with refused(says):
        StepBatches(read, **{'seeds': (0,), 'start_step': 0, 'num_steps': 1} | change)
