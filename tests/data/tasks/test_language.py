import numpy as np
import pytest

from qkattn.data.tasks.language import LanguageRows
from qkattn.errors import ConfigError


def read(rows, split, numbers_B, seed=0, first_place=0):
    numbers_B = np.asarray(numbers_B)
    places_B = first_place + np.arange(len(numbers_B))
    draws_B2 = np.stack([np.full_like(places_B, seed), places_B], axis=1).astype(np.uint64)
    return rows.read(split, numbers_B, draws_B2)


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
    batch = read(rows, 'train', range(count))
    assert batch['tokens_BT'].ravel().tolist() == list(range(count * length))
    assert batch['targets_BT'].ravel().tolist() == list(range(1, count * length + 1))
    assert (batch['loss_weights_BT'] == 1).all()
    assert [array.dtype.name for array in batch.values()] == ['int32', 'int32', 'float32']


@pytest.mark.parametrize(
    ('length', 'shift', 'says'),
    [
        (0, False, 'model.context=0 is too small'),
        (30, False, "model.context=30 is too long for split 'train' .* 30 tokens; .* at most 29"),
        (16, True, "model.context=16 is too long for split 'train' .* 30 tokens; .* at most 15"),
    ],
)
def test_bad_lengths_are_one_sentence(numbers, length, shift, says):
    with pytest.raises(ConfigError, match=says):
        LanguageRows(numbers(train=30), length, shift=shift).count('train')


def test_shifted_windows_move_together_and_anew_in_every_epoch(numbers):
    rows = LanguageRows(numbers(train=105, validation=106), 7, shift=True)
    assert rows.count('train') == 14
    offsets = []
    for seed, epoch in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]:
        batch = read(rows, 'train', range(14), seed, first_place=14 * epoch)
        starts = batch['tokens_BT'][:, 0]
        assert (np.diff(starts) == 7).all()
        assert (batch['targets_BT'] == batch['tokens_BT'] + 1).all()
        offsets.append(int(starts[0]))
    assert set(offsets) <= set(range(7)) and len(set(offsets)) > 3
    assert read(rows, 'train', range(14), 0)['tokens_BT'][0, 0] == offsets[0]
    # Evaluation is not shifted, and reads one window more.
    assert rows.count('validation') == 15
    assert read(rows, 'validation', [0])['tokens_BT'][0, 0] == 0


def test_units_are_those_of_the_text(numbers):
    rows = LanguageRows(numbers(train=50, validation=20), 7)
    assert rows.splits == ('train', 'validation')
    assert rows.bytes_per_token('validation') == 2.0
    assert rows.unigram_nats('validation') == pytest.approx(np.log(20))
    assert rows.identity()['name'] == 'numbers'
