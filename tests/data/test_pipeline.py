import numpy as np
import pytest

from qkattn.data import pipeline
from qkattn.data.tasks.language import LanguageRows
from tests.data.datasets import check_shapes
from tests.data.refusals import refused

TRAIN = {'seed': 0, 'step': 0, 'batch_size': 6}


def windows(dataset):
    return LanguageRows(dataset, 7)


def first_tokens(dataset, seed, num_steps):
    """First token of every row of consecutive steps, one after another."""
    settings = [TRAIN | {'seed': seed, 'step': step} for step in range(num_steps)]
    batches = [pipeline.train_batch(windows(dataset), **each) for each in settings]
    return np.concatenate([batch['tokens_BT'][:, 0] for batch in batches])


def test_epochs_visit_every_window_once_each_in_an_order_of_its_own(numbers):
    # 59 windows: batches of 6 straddle the epochs.
    order = [first_tokens(numbers(train=414), seed, 59).reshape(6, 59) for seed in range(4)]
    epochs = np.concatenate(order)
    assert (np.sort(epochs, axis=1) == np.arange(0, 413, 7)).all()
    assert len(np.unique(epochs, axis=0)) == len(epochs) == 24


def test_order_is_the_same_for_ever(numbers):
    # Written down, so that a library that shuffles differently does not go unnoticed.
    order = [84, 364, 175, 357, 413, 399, 189, 147, 336, 154, 231, 210]
    assert first_tokens(numbers(train=421), 5, 2).tolist() == order


@pytest.mark.parametrize('num_hosts', [1, 2, 3, 6])
def test_hosts_together_read_the_global_batches(numbers, num_hosts):
    rows = windows(numbers(train=500, validation=74))
    share = 6 // num_hosts

    def batches(part):
        yield pipeline.train_batch(rows, seed=2, step=9, batch_size=6, part=part)
        yield from pipeline.eval_batches(rows, 'validation', batch_size=6, part=part)

    parts = [batches(slice(h * share, (h + 1) * share)) for h in range(num_hosts)]
    for batch, *shares in zip(batches(None), *parts, strict=True):
        for name, array in batch.items():
            assert {part[name].shape for part in shares} == {(share, 7)}
            assert np.array_equal(np.concatenate([part[name] for part in shares]), array)


def test_train_batches_are_train_batch_of_seed_and_step(numbers):
    rows = windows(numbers(train=500))
    settings = {'batch_size': 6, 'part': slice(2, 5)}
    steps = {'start_step': 11, 'num_steps': 8, 'steps_per_read': 3}
    with pipeline.TrainBatches(rows, seeds=(4, 0, 4), **steps, **settings) as batches:
        reads = [batch['tokens_BT'] for batch in batches]
    assert [r.shape for r in reads] == [(3, 3, 3, 7), (3, 3, 3, 7), (2, 3, 3, 7)]
    for c, tokens_XBT in enumerate(np.concatenate(reads)):
        for seed, tokens_BT in zip((4, 0, 4), tokens_XBT, strict=True):
            expected = pipeline.train_batch(rows, seed=seed, step=11 + c, **settings)['tokens_BT']
            assert tokens_BT.dtype == expected.dtype and np.array_equal(tokens_BT, expected)


class Draws:
    """Rows that tell what they were asked for."""

    splits = ('train', 'validation')

    def count(self, split):
        return 5

    def read(self, split, rows_B, draws_B2):
        return {'rows': rows_B[:, None], 'draws': draws_B2}


def test_a_row_is_told_its_seed_and_its_place_in_the_endless_sequence():
    settings = {'seed': 7, 'step': 3, 'batch_size': 4}
    draws = pipeline.train_batch(Draws(), part=slice(1, 4), **settings)['draws']
    assert draws.tolist() == [[7, 13], [7, 14], [7, 15]] and draws.dtype == np.uint64
    (batch,) = pipeline.eval_batches(Draws(), 'validation', batch_size=5)
    assert batch['draws'].tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [0, 4]]


def test_eval_predicts_every_token_once_and_pads_the_last_batch(numbers):
    # 10 windows of 7, 3 tokens over.
    rows = windows(numbers(validation=74))
    batches = list(pipeline.eval_batches(rows, 'validation', batch_size=4))
    assert len(batches) == 3
    targets = []
    for batch in batches:
        check_shapes(batch, 4, 7)
        real = batch['loss_weights_BT'] == 1
        assert (real | (batch['loss_weights_BT'] == 0)).all()
        assert (batch['targets_BT'] - batch['tokens_BT'] == real).all()
        targets += batch['targets_BT'][real].tolist()
    assert targets == list(range(1, 71))
    assert real.sum() == 2 * 7


def test_eval_subset_is_evenly_spaced(numbers):
    rows = windows(numbers(validation=701))
    (batch,) = pipeline.eval_batches(rows, 'validation', batch_size=8, max_rows=8)
    starts = batch['tokens_BT'][:, 0] // 7
    assert starts.tolist() == [0, 12, 25, 37, 50, 62, 75, 87]
    assert len(pipeline.eval_rows(rows, 'validation', 999)) == 100


BATCHES = {'seeds': (0,), 'num_steps': 1, 'batch_size': 1}
EVAL = {'split': 'validation', 'batch_size': 4}


@pytest.mark.parametrize(
    ('read', 'settings', 'says'),
    [
        (pipeline.train_batch, TRAIN | {'batch_size': 0}, 'batch_size=0 is too small'),
        (pipeline.train_batch, TRAIN | {'part': slice(6, 9)}, r'part=.*6, 9.* no row .* of 6'),
        (pipeline.train_batch, TRAIN | {'seed': 2**32}, 'seed=4294967296 is out of range'),
        (pipeline.train_batch, TRAIN | {'step': -1}, 'step=-1 is negative'),
        # At the call, before anything is read.
        (pipeline.TrainBatches, BATCHES | {'seeds': (0, -1)}, 'seed=-1 is out of range'),
        (pipeline.eval_batches, EVAL | {'batch_size': 0}, 'batch_size=0'),
        (pipeline.eval_batches, EVAL | {'max_rows': 0}, 'max_rows=0 is too small'),
        (pipeline.eval_batches, EVAL | {'split': 'x'}, "'x' is not in .* 'train', 'validation'"),
        (pipeline.eval_batches, EVAL | {'split': 'test'}, "context=7 is too long for split 'test'"),
    ],
)
def test_bad_settings_are_one_sentence(numbers, read, settings, says):
    with refused(says):
        read(windows(numbers(train=30, validation=74, test=7)), **settings)
