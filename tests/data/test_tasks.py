"""Rows of every task: language, masked language, probes, repeats, translation."""

import collections
import hashlib
import math
import types

import numpy as np
import pytest

from qkattn.data.tasks import probe_tasks, repeats
from qkattn.data.tasks.language import DocumentRows, LanguageRows, MaskedRows
from qkattn.data.tasks.probe_tasks import PROBES
from qkattn.data.tasks.translation import TranslationRows
from qkattn.data.tokens import PairDataset, TokenDataset
from tests.data.datasets import check_shapes, numbers, read_rows, token_dataset
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


@pytest.mark.parametrize(
    ('rows', 'message'),
    [
        (LanguageRows(numbers(train=30), 30), "=30 is too long for split 'train' .* at most 29"),
        (LanguageRows(numbers(train=30), 16, shift=True), 'context=16 is .* at most 15'),
        (MaskedRows(numbers(train=9), 10), 'context=10 is .* at most 9'),
    ],
)
def test_a_window_that_is_longer_than_the_split_is_refused(rows, message):
    with refused(message):
        rows.count('train')


def test_the_windows_of_an_epoch_are_shifted_by_one_offset():
    rows = LanguageRows(numbers(train=105, validation=106), 7, shift=True)
    assert rows.count('train') == 14
    offsets = []
    for seed, epoch in [*np.ndindex(3, 3), (0, 0)]:
        batch = read_rows(rows, 'train', range(14), seed, first_place=14 * epoch)
        starts = batch['tokens_BT'][:, 0]
        assert (np.diff(starts) == 7).all()
        assert (batch['targets_BT'] == batch['tokens_BT'] + 1).all()
        offsets.append(int(starts[0]))
    assert set(offsets) <= set(range(7))
    # Epochs of one seed and other seeds have other offsets; the same seed and epoch the same.
    assert len(set(offsets[:3])) > 1
    assert len(set(offsets)) > 3
    assert offsets[-1] == offsets[0]
    # Evaluation is not shifted, and reads one window more.
    assert rows.count('validation') == 15
    assert read_rows(rows, 'validation', [0])['tokens_BT'][0, 0] == 0


def test_rows_of_separate_documents_number_them():
    tokenizer = types.SimpleNamespace(name='letters', vocab_size=4, separator=3)
    tokens = np.array([0, 1, 3, 2, 3, 3, 0, 1, 2], np.uint8)
    dataset = token_dataset('letters', tokenizer, {'train': tokens})
    batch = read_rows(DocumentRows(dataset, 4), 'train', [0, 1])
    assert batch['tokens_BT'].tolist() == [[0, 1, 3, 2], [3, 3, 0, 1]]
    # A separator opens a document; a window that begins in one begins a segment.
    assert batch['segments_BT'].tolist() == [[1, 1, 2, 2], [2, 3, 3, 3]]
    assert batch['targets_BT'].tolist() == [[1, 3, 2, 3], [3, 0, 1, 2]]
    assert (batch['loss_weights_BT'] == 1).all()


def test_masked_tokens_are_hidden_replaced_or_kept_in_shares_of_80_10_10():
    """3,000 rows of 20 tokens have 4 targets each, at positions that are equally often chosen.

    A token is its position in the split, so that its original value is known.
    """
    rows = MaskedRows(numbers(train=60_010), 20, 0.2)
    batch = read_rows(rows, 'train', range(rows.count('train')))
    assert np.array_equal(batch['targets_BT'].ravel(), np.arange(60_000))
    weights_BT = batch['loss_weights_BT']
    chosen = weights_BT == 1
    assert np.array_equal(batch['tokens_BT'][~chosen], batch['targets_BT'][~chosen])
    assert set(np.unique(weights_BT)) == {0, 1}
    assert (weights_BT.sum(1) == 4).all()
    # 3000 rows, probability 0.2: standard deviation 0.0073.
    assert abs(weights_BT.mean(0) - 0.2).max() < 0.03
    tokens = batch['tokens_BT'][chosen]
    masked = tokens == rows.mask
    kept = tokens == batch['targets_BT'][chosen]
    # 12,000 choices: standard deviations 0.0037 and 0.0027.
    assert masked.mean() == pytest.approx(0.8, abs=0.015)
    assert kept.mean() == pytest.approx(0.1, abs=0.012)
    # Uniform over the 65,535 ids that are neither the separator nor the mask.
    drawn = tokens[~masked & ~kept]
    assert 1 <= drawn.min()
    assert drawn.max() <= 65_535
    counts, _ = np.histogram(drawn, 4, (0, 65_536))
    assert counts / len(drawn) == pytest.approx(0.25, abs=0.06)


def test_a_separator_is_hidden_too_but_never_put_in_the_place_of_another_token():
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


SMALL_PROBES = [
    *('copy(length=5, symbols=7)', 'reversal(length=5, symbols=7)'),
    *('recall(pairs=4, keys=6, values=3)', 'successor(keys=4, payloads=3)'),
    'induction(length=23, repeats=3, symbols=18)',
]
# At the least that an option may be.
PROBES_AT_THEIR_LIMITS = [
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


def probe_rows(name: str) -> probe_tasks.ProbeRows:
    return probe_tasks.ProbeRows(*probe_tasks.find(name))


def test_rows_of_probes_are_well_formed():
    for name in (*SMALL_PROBES, *PROBES_AT_THEIR_LIMITS):
        rows = probe_rows(name)
        batch = read_rows(rows, 'train', range(300))
        check_shapes(batch, 300, rows.length)
        # Every row asks the same number of questions, and weights are 0 or 1.
        asked_BT = batch['loss_weights_BT'] == 1
        assert not batch['loss_weights_BT'][~asked_BT].any()
        assert len(set(asked_BT.sum(1))) == 1
        assert asked_BT.any()
        answers = np.unique(batch['targets_BT'][asked_BT])
        used = np.union1d(batch['tokens_BT'], answers)
        assert 0 <= used.min()
        assert used.max() < rows.vocab_size
        if name in SMALL_PROBES:  # every id and every answer turns up
            assert used.tolist() == list(range(rows.vocab_size))
            assert rows.unigram_nats('train') == pytest.approx(math.log(len(answers)))
        if probe_tasks.find(name)[1].causal:
            assert np.array_equal(batch['tokens_BT'][:, 1:], batch['targets_BT'][:, :-1])


@pytest.mark.parametrize('name', SMALL_PROBES)
def test_answers_follow_from_what_a_row_shows(name):
    batch = read_rows(probe_rows(name), 'train', range(300))
    # The right answer at a position, and the positions that are asked for (None: they differ).
    answer, asked = ANSWERS[name.partition('(')[0]]
    rows = set()
    layouts = set()  # where the asked-for tokens occurred first, in order
    for tokens_T, targets_T, weights_T in zip(*batch.values(), strict=True):
        x = tokens_T.tolist()
        predicted = np.flatnonzero(weights_T).tolist()
        assert targets_T[predicted].tolist() == [answer(x, t) for t in predicted]
        rows.add(tuple(x))
        layouts.add(tuple(x.index(x[t]) for t in predicted))
        if asked is not None:
            assert predicted == list(asked)
        else:  # 24 tokens: three bigrams twice, the other twelve symbols once
            counts = collections.Counter([*x, targets_T[-1]])
            assert sorted(counts.values()) == [1] * 12 + [2] * 6
            assert len(predicted) == 3
            assert all(x[t] in x[:t] for t in predicted)
        # Keys and values alternate: four keys are shown, then asked for.
        if name.startswith('recall'):
            assert max(x[::2]) < 6
            assert sorted(x[:8:2]) == sorted(x[8::2])
    assert len(rows) > 100
    if name.startswith(('recall', 'induction')):  # which ask in every order
        assert len(layouts) >= 24


@pytest.mark.parametrize('name', PROBES)
def test_training_rows_follow_their_draws_and_evaluation_rows_their_numbers(name):
    rows = probe_rows(name)
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


def test_rows_of_a_seed_do_not_change():
    # Written down, so that a library that draws differently does not go unnoticed.
    tokens_BT = read_rows(probe_rows(SMALL_PROBES[0]), 'train', [0], seed=5)['tokens_BT']
    assert tokens_BT.tolist() == [[5, 4, 1, 3, 1, 7, 5, 4, 1, 3]]


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('copy(length=True)', 'whole numbers'),
        ('induction(length=14)', 'length=14 must be at least 15'),
        ('recall(pairs=33)', 'keys=32 must be at least 33'),
    ],
)
def test_options_of_a_probe_that_do_not_fit_are_refused(name, message):
    with refused(message):
        probe_tasks.find(name)


def test_a_probe_from_outside_is_named_by_import_path(outside):
    copy = 'from qkattn.data.tasks.probe_tasks import Copy\n'
    (outside / 'short_copy.py').write_text(f'{copy}class Short(Copy): pass\n')
    assert probe_tasks.is_probe('short_copy:Short(symbols=5)')
    for name in ('fables:fables', 'tfds:squad', 'stdlib'):
        assert not probe_tasks.is_probe(name)
    identity = probe_rows('short_copy:Short(symbols=5)').identity()
    assert identity['name'] == 'short_copy:Short'
    assert identity['version'].startswith('1-')
    assert identity['options'] == vars(PROBES['copy'](symbols=5))


def test_repeated_sequences_are_shuffled_tokens_of_rows_all_over_the_split():
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


SEPARATOR = 3
SOURCE_LENGTH = 24
LENGTH = 20
WORDS = types.SimpleNamespace(name='words', vocab_size=60_000, separator=SEPARATOR)


def dataset_of_sentences(name: str, sentences: dict[str, list[np.ndarray]]) -> TokenDataset:
    """A dataset whose documents are these sentences, each with an end."""
    splits = {
        split: np.concatenate([np.append(ids, SEPARATOR) for ids in documents]).astype(np.uint16)
        for split, documents in sentences.items()
    }
    return token_dataset(name, WORDS, splits, bytes_per_token=3)


def sentences(count: int, longest: int, seed: int) -> list[np.ndarray]:
    """Sentences of 0 to `longest` tokens, no two alike; 0 is an ordinary id."""
    rng = np.random.default_rng(seed)
    drawn = []
    for size in rng.integers(0, longest + 1, count):
        ids = rng.integers(0, 60_000, size)
        drawn.append(np.where(ids == SEPARATOR, 0, ids))
    return drawn


# 500 training pairs of up to 23 and 19 tokens, as long as the lengths of a row allow.
SOURCES = {'train': sentences(500, 23, 0), 'validation': sentences(50, 23, 1)}
TARGETS = {'train': sentences(500, 19, 2), 'validation': sentences(50, 19, 3)}
PARALLEL = PairDataset(dataset_of_sentences('a', SOURCES), dataset_of_sentences('b', TARGETS))
ROWS = TranslationRows(PARALLEL, SOURCE_LENGTH, LENGTH)


def read_split(rows, split='train'):
    return read_rows(rows, split, range(rows.count(split)))


def unpack_pairs(batch):
    """The pairs of a batch as (source, target input, target output), row after row."""
    names = ('source_BS', 'source_segments_BS', 'tokens_BT', 'targets_BT', 'segments_BT')
    for source, source_segments, *target, segments in zip(*map(batch.get, names), strict=True):
        for segment in range(1, source_segments.max() + 1):
            sides = (tokens[segments == segment].tolist() for tokens in target)
            yield source[source_segments == segment].tolist(), *sides


def test_every_pair_is_in_one_row_beside_its_translation():
    expected = sorted(
        ([*source, SEPARATOR], [SEPARATOR, *target], [*target, SEPARATOR])
        for source, target in zip(SOURCES['train'], TARGETS['train'], strict=True)
    )
    assert sorted(unpack_pairs(read_split(ROWS))) == expected
    # Sentences are in file order, without separators, and may be empty.
    for read_back, side in zip(PARALLEL.sentences('train'), (SOURCES, TARGETS), strict=True):
        assert [ids.tolist() for ids in read_back] == [ids.tolist() for ids in side['train']]


def test_rows_of_pairs_are_well_filled():
    batch = read_split(ROWS)
    for name, array in read_rows(ROWS, 'train', [3, 0, 3]).items():
        assert np.array_equal(array, batch[name][[3, 0, 3]])
    assert np.array_equal(batch['loss_weights_BT'], (batch['segments_BT'] > 0).astype(np.float32))
    # A pair takes 12 and 10 tokens on average, about two fit into a row.
    assert batch['loss_weights_BT'].mean() > 0.85


def test_rows_are_padded_with_zeros_behind_the_pairs():
    batch = read_split(ROWS)
    sides = {'source_segments_BS': ['source_BS'], 'segments_BT': ['tokens_BT', 'targets_BT']}
    for name, arrays in sides.items():
        padding = (segments := batch[name]) == 0
        assert padding.any()
        assert not any(batch[array][padding].any() for array in arrays)
        # Segments count 1, 2, ..; once padding begins nothing follows.
        steps = np.diff(segments, axis=1)
        assert (segments[:, 0] == 1).all()
        assert ((steps == 0) | (steps == 1) | (segments[:, 1:] == 0)).all()
        assert (padding[:, 1:] >= padding[:, :-1]).all()


def test_the_identity_of_translation_rows_has_the_packing():
    packing = {'version': 1, 'source_length': SOURCE_LENGTH, 'length': LENGTH}
    identity = {'packing': packing, 'dropped_pairs': {'train': 0, 'validation': 0}}
    assert ROWS.identity() == PARALLEL.identity() | identity
    assert ROWS.bytes_per_token('train') == 3
    assert ROWS.unigram_nats('train') == PARALLEL.target.unigram_nats('train')


def test_the_packing_is_a_fixed_shuffle():
    first = [source for source, _, _ in unpack_pairs(read_split(ROWS, 'validation'))]
    in_file_order = [[*s, SEPARATOR] for s in PARALLEL.sentences('validation')[0]]
    # Written down, so that a library that draws differently does not go unnoticed.
    assert [in_file_order.index(source) for source in first[:8]] == [0, 43, 38, 9, 21, 33, 4, 2]


PAIRS = {split: list(zip(*PARALLEL.sentences(split), strict=True)) for split in ROWS.splits}


def test_pairs_longer_than_a_row_are_refused():
    long = sum(len(source) > 21 for pairs in PAIRS.values() for source, _ in pairs)
    with refused(f'^{long} sentence pairs .*source_context=22 .*context=20; .*at least 24 and 20'):
        TranslationRows(PARALLEL, 22, LENGTH)


def test_pairs_longer_than_a_row_are_dropped_and_counted_if_asked():
    short = TranslationRows(PARALLEL, 22, 16, drop_long=True)
    for split, pairs in PAIRS.items():
        kept = [[*s, SEPARATOR] for s, t in pairs if len(s) < 22 and len(t) < 16]
        assert sorted(source for source, _, _ in unpack_pairs(read_split(short, split))) == sorted(
            kept
        )
        assert short.identity()['dropped_pairs'][split] == len(pairs) - len(kept) > 0
    with refused("split 'train' of a has no sentence pair"):
        TranslationRows(PARALLEL, 0, 0, drop_long=True).count('train')


def test_unequally_many_sentences_are_refused():
    five = dataset_of_sentences('a', {'train': SOURCES['train'][:5]})
    four = dataset_of_sentences('b', {'train': SOURCES['train'][:4]})
    with refused("5 sentences in source 'a' but 4 in"):
        PairDataset(five, four)


def test_shuffled_sources_are_those_of_other_pairs_of_equal_length():
    before = list(unpack_pairs(read_split(ROWS)))
    shuffled = list(unpack_pairs(read_split(ROWS.with_shuffled_sources())))
    assert [pair[1:] for pair in before] == [pair[1:] for pair in shuffled]
    lengths = [len(source) for source, _, _ in before]
    assert [len(source) for source, _, _ in shuffled] == lengths
    assert sorted(source for source, _, _ in before) == sorted(source for source, _, _ in shuffled)
    stay = [a[0] == b[0] for a, b in zip(before, shuffled, strict=True)]
    alone = [length == 1 or lengths.count(length) == 1 for length in lengths]
    assert stay == alone  # empty sentences are alike
