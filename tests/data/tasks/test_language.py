import numpy as np
import pytest

from qkattn.data.tasks.language import LanguageRows
from tests.data.datasets import check_shapes, read_rows
from tests.data.refusals import refused


@pytest.mark.parametrize(
    ('tokens', 'length', 'count'),
    [
        (71, 7, 10),
        (70, 7, 9),  # 69 targets: the last token starts no window.
        (30, 29, 1),
    ],
)
def test_every_token_but_the_first_is_a_target_once(numbers, tokens, length, count):
    rows = LanguageRows(numbers(train=tokens), length)
    assert rows.count('train') == count
    batch = read_rows(rows, 'train', range(count))
    check_shapes(batch, count, length)
    assert batch['tokens_BT'].ravel().tolist() == list(range(count * length))
    assert batch['targets_BT'].ravel().tolist() == list(range(1, count * length + 1))
    assert (batch['loss_weights_BT'] == 1).all()


@pytest.mark.parametrize(
    ('length', 'shift', 'says'),
    [
        (0, False, 'model.context=0 is too small'),
        (30, False, "model.context=30 is too long for split 'train' .* 30 tokens; .* at most 29"),
        (16, True, "model.context=16 is too long for split 'train' .* 30 tokens; .* at most 15"),
    ],
)
def test_bad_lengths_are_one_sentence(numbers, length, shift, says):
    with refused(says):
        LanguageRows(numbers(train=30), length, shift=shift).count('train')


def test_shifted_windows_move_together_and_anew_in_every_epoch(numbers):
    rows = LanguageRows(numbers(train=105, validation=106), 7, shift=True)
    assert rows.count('train') == 14
    offsets = []
    for seed, epoch in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (0, 0)]:
        batch = read_rows(rows, 'train', range(14), seed, first_place=14 * epoch)
        starts = batch['tokens_BT'][:, 0]
        assert (np.diff(starts) == 7).all()
        assert (batch['targets_BT'] == batch['tokens_BT'] + 1).all()
        offsets.append(int(starts[0]))
    assert set(offsets) <= set(range(7)) and len(set(offsets)) > 3
    assert offsets[-1] == offsets[0]
    # Evaluation is not shifted, and reads one window more.
    assert rows.count('validation') == 15
    assert read_rows(rows, 'validation', [0])['tokens_BT'][0, 0] == 0
