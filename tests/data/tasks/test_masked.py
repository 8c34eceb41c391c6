import json

import numpy as np
import pytest

from qkattn.data.tasks.masked import MaskedRows
from tests.data.datasets import check_shapes, read_rows, token_dataset
from tests.data.refusals import refused

LENGTH = 20


@pytest.fixture(scope='module')
def rows(numbers):
    return MaskedRows(numbers(train=60_010), LENGTH, 0.2)


@pytest.fixture(scope='module')
def batch(rows):
    """Every row of 60,000 tokens, masked once; a token that is its position is its original."""
    return read_rows(rows, 'train', range(rows.count('train')))


def test_windows_hold_every_token_once_and_only_chosen_tokens_change(batch):
    check_shapes(batch, 3000, LENGTH)
    assert np.array_equal(batch['targets_BT'].ravel(), np.arange(60_000))
    kept = batch['loss_weights_BT'] == 0
    assert np.array_equal(batch['tokens_BT'][kept], batch['targets_BT'][kept])


def test_as_many_positions_as_asked_for_in_every_row_all_equally_often(batch, numbers):
    weights_BT = batch['loss_weights_BT']
    assert set(np.unique(weights_BT)) == {0, 1}
    assert (weights_BT.sum(1) == 4).all()
    # 3000 rows, probability 0.2: standard deviation 0.0073.
    assert abs(weights_BT.mean(0) - 0.2).max() < 0.03
    pairs_TT = weights_BT.T @ weights_BT / 3000
    apart_TT = pairs_TT[~np.eye(LENGTH, dtype=bool)]
    assert abs(apart_TT - 4 / 20 * 3 / 19).max() < 0.02
    assert MaskedRows(numbers(train=100), 10, 0.01).num_masked == 1
    assert MaskedRows(numbers(train=100), 128, 0.15).num_masked == 19


def test_eighty_ten_ten(rows, batch):
    chosen = batch['loss_weights_BT'] == 1
    tokens, targets = batch['tokens_BT'][chosen], batch['targets_BT'][chosen]
    masked, kept = tokens == rows.mask, tokens == targets
    # 12,000 choices: standard deviations 0.0037 and 0.0027.
    assert masked.mean() == pytest.approx(0.8, abs=0.015)
    assert kept.mean() == pytest.approx(0.1, abs=0.012)
    drawn = tokens[~masked & ~kept]
    # Uniform over the 65,535 ids that are neither the separator nor the mask.
    assert drawn.min() >= 1
    assert drawn.max() <= 65_535
    assert np.histogram(drawn, 4, (0, 65_536))[0] / len(drawn) == pytest.approx(0.25, abs=0.06)


def test_a_separator_is_chosen_but_never_drawn():
    class Letters:
        name, vocab_size, separator = 'letters', 4, 2

    dataset = token_dataset('letters', Letters(), {'train': np.full(6000, 2, np.uint8)})
    rows = MaskedRows(dataset, 10, 0.5)
    batch = read_rows(rows, 'train', range(600))
    assert rows.vocab_size == 5
    assert set(batch['tokens_BT'][batch['tokens_BT'] != 2]) == {0, 1, 3, 4}
    assert (batch['loss_weights_BT'].sum(1) == 5).all()


def test_a_mask_is_a_function_of_the_draws_alone(numbers):
    rows = MaskedRows(numbers(train=2000, validation=2000), LENGTH, 0.3)
    draws_B2 = np.array([[7, 1], [7, 2], [7, 3], [1, 7]], np.uint64)
    batch = rows.read('train', np.array([5, 0, 5, 5]), draws_B2)
    assert len(np.unique(batch['loss_weights_BT'], axis=0)) == 4
    one = rows.read('validation', np.array([0]), draws_B2[1:2])
    for name in batch:
        assert np.array_equal(one[name][0], batch[name][1])
    # Written down, so that a library that draws differently does not go unnoticed.
    assert np.flatnonzero(one['loss_weights_BT'][0]).tolist() == [6, 7, 8, 12, 14, 19]


def test_identity_and_units(rows, numbers):
    identity = rows.identity()
    assert json.loads(json.dumps(identity)) == identity
    assert identity['name'] == 'numbers'
    assert identity != MaskedRows(numbers(train=60_010), LENGTH, 0.1).identity()
    assert (rows.vocab_size, rows.mask) == (65_537, 65_536)
    # Units are those of the text.
    assert (rows.splits, rows.bytes_per_token('train')) == (('train',), 2.0)
    assert rows.unigram_nats('train') == pytest.approx(np.log(60_010))
    assert MaskedRows(numbers(train=LENGTH), LENGTH).count('train') == 1


@pytest.mark.parametrize(
    ('settings', 'split', 'says'),
    [
        ({'mask_rate': 0.0}, 'train', 'data.mask_rate=0.0 is out of range; .* between 0 and 1'),
        ({'mask_rate': 1.0}, 'train', 'data.mask_rate=1.0 is out of range'),
        ({'length': 0}, 'train', 'model.context=0 is too small'),
        ({}, 'validation', "'validation' of dataset 'numbers' with 9 .* at most 9"),
        ({}, 'test', "split='test' is not in dataset"),
    ],
)
def test_bad_settings_are_one_sentence(numbers, settings, split, says):
    with refused(says):
        dataset = numbers(train=100, validation=9)
        MaskedRows(dataset, **{'length': 10} | settings).count(split)
