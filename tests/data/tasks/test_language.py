import types

import numpy as np
import pytest

from qkattn.data.tasks.language import LanguageRows, MaskedRows
from tests.data.datasets import numbers, read_rows, token_dataset
from tests.refusals import refused


def test_every_token_but_the_first_is_a_target_once():
    # Of 70 tokens 69 are targets: the last starts no window.
    for tokens, length, count in ((71, 7, 10), (70, 7, 9), (30, 29, 1)):
        rows = LanguageRows(numbers(train=tokens), length)
        assert rows.count('train') == count
        batch = read_rows(rows, 'train', range(count))
        assert batch['tokens_BT'].ravel().tolist() == list(range(count * length))
        assert batch['targets_BT'].ravel().tolist() == list(range(1, count * length + 1))
        assert (batch['loss_weights_BT'] == 1).all()


def test_shifted_windows_move_together_and_anew_in_every_epoch():
    rows = LanguageRows(numbers(train=105, validation=106), 7, shift=True)
    assert rows.count('train') == 14
    offsets = []
    for seed, epoch in [*np.ndindex(3, 3), (0, 0)]:
        batch = read_rows(rows, 'train', range(14), seed, first_place=14 * epoch)
        starts = batch['tokens_BT'][:, 0]
        assert (np.diff(starts) == 7).all()
        assert (batch['targets_BT'] == batch['tokens_BT'] + 1).all()
        offsets.append(int(starts[0]))
    assert set(offsets) <= set(range(7)) and len(set(offsets[:3])) > 1
    assert len(set(offsets)) > 3 and offsets[-1] == offsets[0]
    # Evaluation is not shifted, and reads one window more.
    assert rows.count('validation') == 15
    assert read_rows(rows, 'validation', [0])['tokens_BT'][0, 0] == 0


def test_eighty_ten_ten_of_as_many_positions_in_every_row_all_equally_often():
    """Every row of 60,000 tokens, masked once; a token that is its position is its original."""
    rows = MaskedRows(numbers(train=60_010), 20, 0.2)
    batch = read_rows(rows, 'train', range(rows.count('train')))
    assert np.array_equal(batch['targets_BT'].ravel(), np.arange(60_000))
    weights_BT, chosen = batch['loss_weights_BT'], batch['loss_weights_BT'] == 1
    assert np.array_equal(batch['tokens_BT'][~chosen], batch['targets_BT'][~chosen])
    assert set(np.unique(weights_BT)) == {0, 1} and (weights_BT.sum(1) == 4).all()
    # 3000 rows, probability 0.2: standard deviation 0.0073.
    assert abs(weights_BT.mean(0) - 0.2).max() < 0.03
    tokens, targets = batch['tokens_BT'][chosen], batch['targets_BT'][chosen]
    masked, kept = tokens == rows.mask, tokens == targets
    # 12,000 choices: standard deviations 0.0037 and 0.0027.
    assert masked.mean() == pytest.approx(0.8, abs=0.015)
    assert kept.mean() == pytest.approx(0.1, abs=0.012)
    # Uniform over the 65,535 ids that are neither the separator nor the mask.
    drawn = tokens[~masked & ~kept]
    assert 1 <= drawn.min() and drawn.max() <= 65_535
    assert np.histogram(drawn, 4, (0, 65_536))[0] / len(drawn) == pytest.approx(0.25, abs=0.06)
    # A separator is chosen, too, but never drawn.
    tokenizer = types.SimpleNamespace(name='letters', vocab_size=4, separator=2)
    dataset = token_dataset('letters', tokenizer, {'train': np.full(6000, 2, np.uint8)})
    tokens_BT = read_rows(MaskedRows(dataset, 10, 0.5), 'train', range(600))['tokens_BT']
    assert set(tokens_BT[tokens_BT != 2]) == {0, 1, 3, 4}


def test_a_mask_is_a_function_of_the_draws_alone():
    rows = MaskedRows(numbers(train=2000, validation=2000), 20, 0.3)
    draws_B2 = np.array([[7, 1], [7, 2], [7, 3], [1, 7]], np.uint64)
    batch = rows.read('train', np.array([5, 0, 5, 5]), draws_B2)
    assert len(np.unique(batch['loss_weights_BT'], axis=0)) == 4
    one = rows.read('validation', np.array([0]), draws_B2[1:2])
    assert all(np.array_equal(one[name][0], batch[name][1]) for name in batch)
    # Written down, so that a library that draws differently does not go unnoticed.
    assert np.flatnonzero(one['loss_weights_BT'][0]).tolist() == [6, 7, 8, 12, 14, 19]
    assert rows.identity()['masking'] == {'version': 1, 'rate': 0.3}
    assert (rows.vocab_size, rows.bytes_per_token('train')) == (65_537, 2.0)
    assert rows.unigram_nats('train') == pytest.approx(np.log(2000))
    assert MaskedRows(numbers(train=100), 10, 0.01).num_masked == 1


def test_windows_that_do_not_fit_are_one_sentence():
    for rows, says in (
        (LanguageRows(numbers(train=30), 30), "=30 is too long for split 'train' .* at most 29"),
        (LanguageRows(numbers(train=30), 16, shift=True), 'context=16 is .* at most 15'),
        (MaskedRows(numbers(train=9), 10), 'context=10 is .* at most 9'),
    ):
        with refused(says):
            rows.count('train')
