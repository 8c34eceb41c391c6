import collections
import math

import numpy as np
import pytest

from qkattn.data.tasks import probe_tasks
from qkattn.data.tasks.probe_tasks import PROBES
from tests.data.datasets import check_shapes, read_rows
from tests.refusals import refused

SMALL = [
    *('copy(length=5, symbols=7)', 'reversal(length=5, symbols=7)'),
    *('recall(pairs=4, keys=6, values=3)', 'successor(keys=4, payloads=3)'),
    'induction(length=23, repeats=3, symbols=18)',
]
# At the least that an option may be.
TIGHT = [
    *('induction(length=15)', 'induction(symbols=25)', 'recall(pairs=32)'),
    *('recall(pairs=1, keys=1, values=2)', 'successor(keys=3, payloads=2)'),
    'copy(length=1, symbols=2)',
]
# The answer at position t of a row x of SMALL, and the positions that are asked for.
ANSWERS = {
    'copy': (lambda x, t: x[t - 5], range(5, 10)),
    'reversal': (lambda x, t: x[9 - t], range(5, 10)),
    'induction': (lambda x, t: x[x.index(x[t]) + 1], None),
    'recall': (lambda x, t: x[x.index(x[t]) + 1], range(8, 15, 2)),
    'successor': (lambda x, t: dict(divmod(y, 3) for y in x)[(x[t] // 3 + 1) % 4], range(4)),
}


def opened(name: str) -> probe_tasks.ProbeRows:
    return probe_tasks.ProbeRows(*probe_tasks.find(name))


@pytest.mark.parametrize('name', [*SMALL, *TIGHT])
def test_shapes_types_and_range(name):
    rows = opened(name)
    batch = read_rows(rows, 'train', range(300))
    check_shapes(batch, 300, rows.length)
    # Every row asks the same number of questions, and weights are 0 or 1.
    asked_BT = batch['loss_weights_BT'] == 1
    assert not batch['loss_weights_BT'][~asked_BT].any()
    assert len(set(asked_BT.sum(1))) == 1 and asked_BT.any()
    answers = np.unique(batch['targets_BT'][asked_BT])
    used = np.union1d(batch['tokens_BT'], answers)
    assert 0 <= used.min() and used.max() < rows.vocab_size
    if name in SMALL:  # every id and every answer turns up
        assert used.tolist() == list(range(rows.vocab_size))
        assert rows.unigram_nats('train') == pytest.approx(math.log(len(answers)))
    if probe_tasks.find(name)[1].causal:
        assert np.array_equal(batch['tokens_BT'][:, 1:], batch['targets_BT'][:, :-1])


@pytest.mark.parametrize('name', SMALL)
def test_answers_follow_from_what_a_row_shows(name):
    batch = read_rows(opened(name), 'train', range(300))
    answer, asked = ANSWERS[name.partition('(')[0]]
    rows, layouts = set(), set()
    for tokens_T, targets_T, weights_T in zip(*batch.values(), strict=True):
        x, predicted = tokens_T.tolist(), np.flatnonzero(weights_T).tolist()
        assert targets_T[predicted].tolist() == [answer(x, t) for t in predicted]
        rows.add(tuple(x))
        layouts.add(tuple(x.index(x[t]) for t in predicted))
        if asked is not None:
            assert predicted == list(asked)
        else:  # 24 tokens: three bigrams twice, the other twelve symbols once
            counts = collections.Counter([*x, targets_T[-1]])
            assert sorted(counts.values()) == [1] * 12 + [2] * 6
            assert len(predicted) == 3 and all(x[t] in x[:t] for t in predicted)
        if name.startswith('recall'):
            assert max(x[::2]) < 6 and sorted(x[:8:2]) == sorted(x[8::2])
    # Recall asks in every order.
    assert len(rows) > 100 and len(layouts) >= 24 * name.startswith(('recall', 'induction'))


@pytest.mark.parametrize('name', PROBES)
def test_training_rows_follow_their_draws_and_evaluation_rows_their_numbers(name):
    rows = opened(name)
    assert rows.identity() == {'name': name, 'version': 1, 'options': vars(PROBES[name]())}
    assert [rows.count(split) for split in rows.splits] == [2**24, 1024, 1024]
    batches = {split: read_rows(rows, split, range(50), seed=5) for split in rows.splits}
    # No row is in two splits.
    tokens = np.concatenate([batch['tokens_BT'] for batch in batches.values()])
    assert len(np.unique(tokens, axis=0)) == 150
    draws_B2 = np.array([[5, 7], [7, 5]], np.uint64)
    for split, expected in (('train', [7]), ('validation', [3, 0])):
        again = rows.read(split, np.array([3, 0]), draws_B2)
        for key, array in batches[split].items():
            assert np.array_equal(again[key][: len(expected)], array[expected])
        assert not np.array_equal(again['tokens_BT'][0], again['tokens_BT'][1])


# Written down, so that a library that draws differently does not go unnoticed.
def test_rows_are_the_same_for_ever():
    tokens_BT = read_rows(opened(SMALL[0]), 'train', [0], seed=5)['tokens_BT']
    assert tokens_BT.tolist() == [[5, 4, 1, 3, 1, 7, 5, 4, 1, 3]]


def test_bad_names_are_one_sentence():
    for name, says in (
        ('recal(pairs=2)', "unknown data.name 'recal', did you mean 'recall'"),
        ('copy(length=True)', 'whole numbers'),
        ('induction(length=14)', 'length=14 must be at least 15'),
        ('induction(symbols=24)', 'symbols=24 must be at least 25'),
        ('recall(pairs=33)', 'keys=32 must be at least 33'),
    ):
        with refused(says):
            probe_tasks.find(name)


def test_a_probe_from_outside_is_named_by_import_path(outside):
    copy = 'from qkattn.data.tasks.probe_tasks import Copy\n'
    (outside / 'short_copy.py').write_text(f'{copy}class Short(Copy): pass\n')
    assert probe_tasks.is_probe('short_copy:Short(symbols=5)')
    for name in ('fables:fables', 'tfds:squad', 'stdlib'):
        assert not probe_tasks.is_probe(name)
    identity = opened('short_copy:Short(symbols=5)').identity()
    assert identity['name'] == 'short_copy:Short' and identity['version'].startswith('1-')
    assert identity['options'] == vars(PROBES['copy'](symbols=5))
