import json
import math

import numpy as np
import pytest

from qkattn.data.tasks import probe_tasks
from tests.data.datasets import check_shapes, read_rows
from tests.data.refusals import refused

SMALL = [
    'copy(length=5, symbols=7)',
    'reversal(length=5, symbols=7)',
    'induction(length=23, repeats=3, symbols=18)',
    'recall(pairs=4, keys=6, values=3)',
    'successor(keys=4, payloads=3)',
]
# At the least that an option may be.
TIGHT = [
    *('induction(length=15)', 'induction(symbols=25)', 'recall(pairs=32)'),
    *('recall(pairs=1, keys=1, values=2)', 'successor(keys=3, payloads=2)'),
    'copy(length=1, symbols=2)',
]


def opened(name: str) -> probe_tasks.ProbeRows:
    return probe_tasks.ProbeRows(*probe_tasks.find(name))


def examples(name):
    """Per row the lists tokens, targets, and the positions that are predicted."""
    batch = read_rows(opened(name), 'train', range(300))
    for tokens, targets, weights in zip(*batch.values(), strict=True):
        yield tokens.tolist(), targets.tolist(), np.flatnonzero(weights).tolist()


@pytest.mark.parametrize('name', [*SMALL, *TIGHT])
def test_shapes_types_and_range(name):
    rows = opened(name)
    batch = read_rows(rows, 'train', range(300))
    check_shapes(batch, 300, rows.length)
    # Every row asks the same number of questions, and weights are 0 or 1.
    weights_BT = batch['loss_weights_BT']
    assert set(np.unique(weights_BT)) <= {0, 1}
    assert len(set(weights_BT.sum(1))) == 1 and weights_BT.any()
    answers = np.unique(batch['targets_BT'][weights_BT == 1])
    used = np.union1d(batch['tokens_BT'], answers)
    assert 0 <= used.min() and used.max() < rows.vocab_size
    if name in SMALL:
        # Every id and every answer turns up.
        assert used.tolist() == list(range(rows.vocab_size))
        assert rows.unigram_nats('train') == pytest.approx(math.log(len(answers)))
    if probe_tasks.find(name)[1].causal:
        assert np.array_equal(batch['tokens_BT'][:, 1:], batch['targets_BT'][:, :-1])


@pytest.mark.parametrize('name', SMALL[:2])
def test_copy_and_reversal(name):
    for tokens, targets, predicted in examples(name):
        x = tokens[:5]
        assert max(x) < 7 == tokens[5]
        assert predicted == [5, 6, 7, 8, 9]
        assert targets[5:] == (x if name.startswith('copy') else x[::-1])


def test_induction_asks_what_followed_the_only_earlier_occurrence():
    places = set()
    for tokens, targets, predicted in examples(SMALL[2]):
        assert len(predicted) == 3
        for position in predicted:
            (earlier,) = [s for s in range(position) if tokens[s] == tokens[position]]
            assert targets[earlier] == targets[position]
            places.add((earlier, position))
        # 24 tokens: three bigrams twice, the other twelve symbols once.
        sequence = [*tokens, targets[-1]]
        counts = sorted(sequence.count(symbol) for symbol in set(sequence))
        assert counts == [1] * 12 + [2] * 6
    assert len(places) > 100
    assert min(s for s, _ in places) == 0 and max(t for _, t in places) == 22


def test_recall_asks_for_every_key_once():
    orders = set()
    for tokens, targets, predicted in examples(SMALL[3]):
        sequence = [*tokens, targets[-1]]
        value_of = dict(zip(sequence[:8:2], sequence[1:8:2], strict=True))
        assert len(value_of) == 4
        assert max(value_of) < 6 <= min(value_of.values())
        assert predicted == [8, 10, 12, 14]
        asked = [tokens[t] for t in predicted]
        assert sorted(asked) == sorted(value_of)
        assert [targets[t] for t in predicted] == [value_of[key] for key in asked]
        orders.add(tuple(list(value_of).index(key) for key in asked))
    assert len(orders) == 24


def test_successor_labels_with_the_payload_of_the_next_key():
    orders = set()
    for tokens, targets, predicted in examples(SMALL[4]):
        assert predicted == [0, 1, 2, 3]
        payload_of = dict(divmod(token, 3) for token in tokens)
        assert sorted(payload_of) == [0, 1, 2, 3]
        assert targets == [payload_of[(token // 3 + 1) % 4] for token in tokens]
        orders.add(tuple(token // 3 for token in tokens))
    assert len(orders) == 24


@pytest.mark.parametrize('name', probe_tasks.PROBES)
def test_training_rows_follow_their_draws_and_evaluation_rows_their_numbers(name):
    rows = opened(name)
    assert [rows.count(split) for split in rows.splits] == [2**24, 1024, 1024]
    batches = {split: read_rows(rows, split, range(50), seed=5) for split in rows.splits}
    # 50 rows each, and no row in two splits.
    tokens = np.concatenate([batch['tokens_BT'] for batch in batches.values()])
    assert len(np.unique(tokens, axis=0)) == 150
    draws_B2 = np.array([[5, 7], [7, 5]], np.uint64)
    for split, expected in (('train', [7]), ('validation', [3, 0])):
        again = rows.read(split, np.array([3, 0]), draws_B2)
        for key, array in batches[split].items():
            assert np.array_equal(again[key][: len(expected)], array[expected])
        assert not np.array_equal(again['tokens_BT'][0], again['tokens_BT'][1])


def test_identities_and_rows_are_the_same_for_ever():
    # Written down, so that a library that draws differently does not go unnoticed.
    tokens_BT = read_rows(opened(SMALL[0]), 'train', [0], seed=5)['tokens_BT']
    assert tokens_BT.tolist() == [[5, 4, 1, 3, 1, 7, 5, 4, 1, 3]]
    identity = opened('recall(pairs=5)').identity()
    options = {'pairs': 5, 'keys': 32, 'values': 32}
    assert identity == {'name': 'recall', 'version': 1, 'options': options}
    assert json.loads(json.dumps(identity)) == identity


@pytest.mark.parametrize(
    ('name', 'says'),
    [
        ('recal(pairs=2)', "unknown data.name 'recal', did you mean 'recall'"),
        ('copy(size=3)', "copy has no option 'size'; it takes length, symbols"),
        ('copy(length=0)', 'length=0 must be at least 1'),
        ('copy(length=True)', 'whole numbers'),
        ('induction(length=14)', 'length=14 must be at least 15'),
        ('induction(symbols=24)', 'symbols=24 must be at least 25'),
        ('recall(pairs=33)', 'keys=32 must be at least 33'),
        ('successor(keys=2)', 'keys=2 must be at least 3'),
    ],
)
def test_bad_names_are_one_sentence(name, says):
    with refused(says):
        probe_tasks.find(name)


OUTSIDE = """
import dataclasses
from qkattn.data.tasks.probe_tasks import Copy
@dataclasses.dataclass(frozen=True, kw_only=True)
class Short(Copy):
    length: int = 3
class Other: pass
"""


def test_a_probe_from_outside_is_named_by_import_path(outside):
    (outside / 'short_copy.py').write_text(OUTSIDE)
    assert probe_tasks.is_probe('short_copy:Short(symbols=5)')
    for name in ('fables:fables', 'tfds:squad', 'stdlib'):
        assert not probe_tasks.is_probe(name)
    rows = opened('short_copy:Short(symbols=5)')
    identity = rows.identity()
    assert (rows.length, identity['options']) == (6, {'length': 3, 'symbols': 5})
    assert identity['name'] == 'short_copy:Short' and identity['version'].startswith('1-')
    with refused("data.name='short_copy:Other' is not a subclass of Probe"):
        opened('short_copy:Other')
