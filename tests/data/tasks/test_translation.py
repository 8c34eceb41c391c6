import types

import numpy as np
import pytest

from qkattn.data.tasks.translation import TranslationRows
from qkattn.data.tokens import PairDataset, TokenDataset
from tests.data.datasets import read_rows, token_dataset
from tests.refusals import refused

SEPARATOR, SOURCE_LENGTH, LENGTH = 3, 24, 20
WORDS = types.SimpleNamespace(name='words', vocab_size=60_000, separator=SEPARATOR)


def side(name: str, sentences: dict[str, list[np.ndarray]]) -> TokenDataset:
    splits = {
        split: np.concatenate([np.append(ids, SEPARATOR) for ids in documents]).astype(np.uint16)
        for split, documents in sentences.items()
    }
    return token_dataset(name, WORDS, splits, bytes_per_token=3)


def sentences(count: int, longest: int, seed: int) -> list[np.ndarray]:
    """Sentences of 0 to `longest` tokens, no two alike; 0 is an ordinary id."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, longest + 1, count)
    return [np.where((ids := rng.integers(0, 60_000, size)) == SEPARATOR, 0, ids) for size in sizes]


# 500 training pairs of up to 23 and 19 tokens, as long as the lengths of a row allow.
SOURCES = {'train': sentences(500, 23, 0), 'validation': sentences(50, 23, 1)}
TARGETS = {'train': sentences(500, 19, 2), 'validation': sentences(50, 19, 3)}
PARALLEL = PairDataset(side('a', SOURCES), side('b', TARGETS))
ROWS = TranslationRows(PARALLEL, SOURCE_LENGTH, LENGTH)


def read(rows, split='train'):
    return read_rows(rows, split, range(rows.count(split)))


def unpack(batch):
    """The pairs of a batch as (source, target input, target output), row after row."""
    names = ('source_BS', 'source_segments_BS', 'tokens_BT', 'targets_BT', 'segments_BT')
    for source, source_segments, *target, segments in zip(*map(batch.get, names), strict=True):
        for segment in range(1, source_segments.max() + 1):
            sides = (tokens[segments == segment].tolist() for tokens in target)
            yield source[source_segments == segment].tolist(), *sides


@pytest.mark.parametrize('split', ['train', 'validation'])
def test_every_pair_is_in_one_row_whole_and_with_its_own_translation(split):
    expected = sorted(
        ([*source, SEPARATOR], [SEPARATOR, *target], [*target, SEPARATOR])
        for source, target in zip(SOURCES[split], TARGETS[split], strict=True)
    )
    assert sorted(unpack(read(ROWS, split))) == expected
    # Sentences are in file order, without separators, and may be empty.
    for read_back, side in zip(PARALLEL.sentences(split), (SOURCES, TARGETS), strict=True):
        assert [ids.tolist() for ids in read_back] == [ids.tolist() for ids in side[split]]


def test_rows_are_well_filled_and_padded_with_zeros_behind_the_pairs():
    batch = read(ROWS)
    for name, array in read_rows(ROWS, 'train', [3, 0, 3]).items():
        assert np.array_equal(array, batch[name][[3, 0, 3]])
    assert np.array_equal(batch['loss_weights_BT'], (batch['segments_BT'] > 0).astype(np.float32))
    # A pair takes 12 and 10 tokens on average, about two fit into a row.
    assert batch['loss_weights_BT'].mean() > 0.85
    sides = {'source_segments_BS': ['source_BS'], 'segments_BT': ['tokens_BT', 'targets_BT']}
    for name, arrays in sides.items():
        padding = (segments := batch[name]) == 0
        assert padding.any() and not any(batch[array][padding].any() for array in arrays)
        # Segments count 1, 2, ..; once padding begins nothing follows.
        steps = np.diff(segments, axis=1)
        assert (segments[:, 0] == 1).all()
        assert ((steps == 0) | (steps == 1) | (segments[:, 1:] == 0)).all()
        assert (padding[:, 1:] >= padding[:, :-1]).all()


def test_the_packing_is_fixed_and_shuffled():
    first = [source for source, _, _ in unpack(read(ROWS, 'validation'))]
    in_file_order = [[*s, SEPARATOR] for s in PARALLEL.sentences('validation')[0]]
    # Written down, so that a library that draws differently does not go unnoticed.
    assert [in_file_order.index(source) for source in first[:8]] == [0, 43, 38, 9, 21, 33, 4, 2]
    packing = {'version': 1, 'source_length': SOURCE_LENGTH, 'length': LENGTH}
    identity = {'packing': packing, 'dropped_pairs': {'train': 0, 'validation': 0}}
    assert ROWS.identity() == PARALLEL.identity() | identity
    assert ROWS.bytes_per_token('train') == 3
    assert ROWS.unigram_nats('train') == PARALLEL.target.unigram_nats('train')


def test_long_pairs_are_refused_or_dropped_and_counted():
    splits = {split: list(zip(*PARALLEL.sentences(split), strict=True)) for split in ROWS.splits}
    long = sum(len(source) > 21 for pairs in splits.values() for source, _ in pairs)
    with refused(f'^{long} sentence pairs .*source_context=22 .*context=20; 24 and 20 hold all'):
        TranslationRows(PARALLEL, 22, LENGTH)
    short = TranslationRows(PARALLEL, 22, 16, drop_long=True)
    for split, pairs in splits.items():
        kept = [[*s, SEPARATOR] for s, t in pairs if len(s) < 22 and len(t) < 16]
        assert sorted(source for source, _, _ in unpack(read(short, split))) == sorted(kept)
        assert short.identity()['dropped_pairs'][split] == len(pairs) - len(kept) > 0
    with refused("split 'train' of a has no sentence pair"):
        TranslationRows(PARALLEL, 0, 0, drop_long=True).count('train')
    five, four = ({'train': SOURCES['train'][:count]} for count in (5, 4))
    with refused("5 sentences in source 'a' but 4 in"):
        PairDataset(side('a', five), side('b', four))


def test_shuffled_sources_are_those_of_other_pairs_of_equal_length():
    before, shuffled = list(unpack(read(ROWS))), list(unpack(read(ROWS.with_shuffled_sources())))
    assert [pair[1:] for pair in before] == [pair[1:] for pair in shuffled]
    lengths = [len(source) for source, _, _ in before]
    assert [len(source) for source, _, _ in shuffled] == lengths
    assert sorted(source for source, _, _ in before) == sorted(source for source, _, _ in shuffled)
    stay = [a[0] == b[0] for a, b in zip(before, shuffled, strict=True)]
    alone = [length == 1 or lengths.count(length) == 1 for length in lengths]
    assert stay == alone  # empty sentences are alike
