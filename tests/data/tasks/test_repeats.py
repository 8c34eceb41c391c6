import hashlib

import numpy as np
import pytest

from qkattn.data.tasks import probe_tasks, repeats
from qkattn.data.tasks.language import LanguageRows
from tests.data.datasets import check_shapes, numbers, read_rows


def test_sequences_are_tokens_of_rows_all_over_the_split_in_random_order():
    def text(length, tokens=3000):
        return LanguageRows(numbers(train=100, validation=tokens), length)

    rows = text(9)
    r_BH = repeats.sequences(rows)
    assert r_BH.shape == (64, 5)
    # Every token is a number of its own: none is read twice, and none keeps its neighbour.
    assert len(np.unique(r_BH)) == r_BH.size
    assert (np.diff(r_BH, axis=1) == 1).mean() < 0.02
    pool_BT = read_rows(rows, 'validation', np.arange(64) * rows.count('validation') // 64)
    assert np.isin(r_BH, pool_BT['tokens_BT']).all()
    # Shuffled across rows: the tokens of one come from many.
    assert len(np.unique(r_BH[0] // 9)) > 2
    # Small splits have few rows and probes none; the order never changes.
    digest = hashlib.sha256(repeats.sequences(text(16)).astype('<i4').tobytes()).hexdigest()
    assert digest[:16] == '31739a6c26ddd7b2'
    assert repeats.sequences(text(8, tokens=8 * 5 + 1)).shape == (5, 4)
    assert repeats.sequences(text(7)) is None
    assert repeats.sequences(probe_tasks.CausalProbeRows(*probe_tasks.find('recall'))) is None


@pytest.mark.parametrize('length', [8, 9])
@pytest.mark.parametrize('copy', ['first', 'second'])
def test_each_copy_asks_for_all_tokens_but_the_first(length, copy):
    half = (length + 1) // 2
    r_BH = np.arange(1, 1 + 4 * half, dtype=np.int32).reshape(4, half)
    parts = list(repeats.batches(r_BH, length, copy, batch_size=3))
    for batch in parts:
        check_shapes(batch, 3, length)
    whole = {name: np.concatenate([batch[name] for batch in parts]) for name in parts[0]}
    assert not any(array[4:].any() for array in whole.values())
    twice_BT1 = np.concatenate([r_BH, r_BH, np.zeros((4, 1), int)], axis=1)[:, : length + 1]
    assert np.array_equal(whole['tokens_BT'][:4], twice_BT1[:, :-1])
    assert np.array_equal(whole['targets_BT'][:4], twice_BT1[:, 1:])
    # The targets are r_2 .. r_H, each at the token before it in this copy.
    begin = 0 if copy == 'first' else half
    expected_T = np.isin(np.arange(length), np.arange(begin, begin + half - 1))
    assert (whole['loss_weights_BT'][:4] == expected_T).all()
