import json

import numpy as np
import pytest

from qkattn.data.tasks.masked import MaskedRows
from qkattn.errors import ConfigError
from tests.data.datasets import token_dataset

LENGTH = 20


def draws(rows_B, seed=0):
    return np.stack([np.full_like(rows_B, seed), rows_B], axis=1).astype(np.uint64)


@pytest.fixture(scope='module')
def batch(numbers):
    """Every row of 60,000 tokens, masked once; a token that is its position is its original."""
    rows = MaskedRows(numbers(train=60_010), LENGTH, 0.2)
    rows_B = np.arange(rows.count('train'))
    return rows, rows.read('train', rows_B, draws(rows_B))


def test_windows_hold_every_token_once(batch):
    rows, read = batch
    assert rows.count('train') == 3000
    assert np.array_equal(read['targets_BT'].ravel(), np.arange(60_000))
    assert {name: (a.shape, a.dtype.name) for name, a in read.items()} == {
        'tokens_BT': ((3000, LENGTH), 'int32'),
        'targets_BT': ((3000, LENGTH), 'int32'),
        'loss_weights_BT': ((3000, LENGTH), 'float32'),
    }


def test_a_window_may_be_the_whole_split(numbers):
    rows = MaskedRows(numbers(train=LENGTH), LENGTH)
    assert rows.count('train') == 1


def test_as_many_positions_as_asked_for_in_every_row(batch, numbers):
    rows, read = batch
    assert set(np.unique(read['loss_weights_BT'])) == {0, 1}
    assert (read['loss_weights_BT'].sum(1) == 4).all()
    assert MaskedRows(numbers(train=100), 10, 0.01).num_masked == 1
    assert MaskedRows(numbers(train=100), 128, 0.15).num_masked == 19


def test_every_position_is_chosen_equally_often(batch):
    _, read = batch
    # 3000 rows, probability 0.2: standard deviation 0.0073.
    assert abs(read['loss_weights_BT'].mean(0) - 0.2).max() < 0.03
    pairs_TT = read['loss_weights_BT'].T @ read['loss_weights_BT'] / 3000
    apart_TT = pairs_TT[~np.eye(LENGTH, dtype=bool)]
    assert abs(apart_TT - 4 / 20 * 3 / 19).max() < 0.02


def test_only_chosen_tokens_change(batch):
    _, read = batch
    kept = read['loss_weights_BT'] == 0
    assert np.array_equal(read['tokens_BT'][kept], read['targets_BT'][kept])


def test_eighty_ten_ten(batch):
    rows, read = batch
    chosen = read['loss_weights_BT'] == 1
    tokens, targets = read['tokens_BT'][chosen], read['targets_BT'][chosen]
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
    read = rows.read('train', np.arange(600), draws(np.arange(600)))
    replaced = read['tokens_BT'][read['tokens_BT'] != 2]
    assert rows.vocab_size == 5
    assert set(replaced) == {0, 1, 3, 4}
    assert (read['loss_weights_BT'].sum(1) == 5).all()


def test_a_mask_is_a_function_of_the_draws_alone(numbers):
    rows = MaskedRows(numbers(train=2000, validation=2000), LENGTH, 0.3)
    rows_B = np.array([5, 0, 5])
    read = rows.read('train', rows_B, np.array([[7, 1], [7, 2], [7, 3]], np.uint64))
    assert not np.array_equal(read['loss_weights_BT'][0], read['loss_weights_BT'][2])
    one = rows.read('validation', rows_B[1:2], np.array([[7, 2]], np.uint64))
    for name in read:
        assert np.array_equal(one[name][0], read[name][1])
    swapped = rows.read('train', rows_B[:1], np.array([[1, 7]], np.uint64))
    assert not np.array_equal(swapped['loss_weights_BT'][0], read['loss_weights_BT'][0])
    # Written down, so that a library that draws differently does not go unnoticed.
    assert np.flatnonzero(one['loss_weights_BT'][0]).tolist() == [6, 7, 8, 12, 14, 19]


def test_identity_and_units(batch, numbers):
    rows, _ = batch
    identity = rows.identity()
    assert json.loads(json.dumps(identity)) == identity
    assert identity['name'] == 'numbers'
    assert identity != MaskedRows(numbers(train=60_010), LENGTH, 0.1).identity()
    assert (rows.vocab_size, rows.mask) == (65_537, 65_536)
    assert rows.bytes_per_token('train') == 2
    assert rows.unigram_nats('train') == pytest.approx(np.log(60_010))


@pytest.mark.parametrize(
    ('settings', 'says'),
    [
        ({'mask_rate': 0.0}, r'data.mask_rate=0.0 is out of range; .* between 0 and 1'),
        ({'mask_rate': 1.0}, 'data.mask_rate=1.0 is out of range'),
        ({'length': 0}, 'model.context=0 is too small'),
    ],
)
def test_bad_settings_are_one_sentence(numbers, settings, says):
    with pytest.raises(ConfigError, match=says) as caught:
        MaskedRows(numbers(train=100), **{'length': 10} | settings)
    assert '\n' not in str(caught.value)


def test_a_split_shorter_than_a_window(numbers):
    rows = MaskedRows(numbers(train=100, validation=9), 10)
    with pytest.raises(ConfigError, match="'validation' of dataset 'numbers' with 9 .* at most 9"):
        rows.count('validation')
    with pytest.raises(ConfigError, match="split='test' is not in dataset"):
        rows.count('test')
