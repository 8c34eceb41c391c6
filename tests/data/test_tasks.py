"""Rows of every task: language, masked language, probes, repeats, translation."""

import collections
import hashlib
import math
import types
from typing import NamedTuple

import numpy as np
import pytest

from qkattn.config import Config, DataConfig, ModelConfig
from qkattn.data.tasks import probe_tasks, repeats
from qkattn.data.tasks.language import DocumentRows, LanguageRows, MaskedRows
from qkattn.data.tasks.probe_tasks import PROBES
from qkattn.data.tasks.task_registry import rows_of
from qkattn.data.tasks.translation import TranslationRows
from qkattn.data.tokens import PairDataset, TokenDataset
from tests.data.datasets import check_shapes, numbers, read_rows, token_dataset
from tests.refusals import refused


@pytest.mark.parametrize(
    ('num_tokens', 'length', 'num_windows'),
    [
        pytest.param(71, 7, 10, id='all tokens'),
        pytest.param(70, 7, 9, id='the last window has no last target'),
        pytest.param(30, 29, 1, id='one window'),
    ],
)
def test_every_token_but_the_first_is_a_target_once(num_tokens, length, num_windows):
    """A text is cut into windows of `length` tokens. The target of each token is the next token.

    A last window that lacks a target is left out.
    """
    # A token is its position in the split: 0, 1, 2, ...
    rows = LanguageRows(numbers(train=num_tokens), length)
    assert rows.count('train') == num_windows

    batch = read_rows(rows, 'train', range(num_windows))

    num_targets = num_windows * length
    assert batch['tokens_BT'].ravel().tolist() == list(range(num_targets))
    assert batch['targets_BT'].ravel().tolist() == list(range(1, num_targets + 1))
    assert np.all(batch['loss_weights_BT'] == 1)


@pytest.mark.parametrize(
    ('rows', 'message'),
    [
        pytest.param(
            LanguageRows(numbers(train=30), length=30),
            "=30 is too long for split 'train' .* at most 29",
            id='no last target',
        ),
        pytest.param(
            LanguageRows(numbers(train=30), length=16, shift=True),
            'context=16 is .* at most 15',
            id='no two windows to shift',
        ),
        pytest.param(
            MaskedRows(numbers(train=9), length=10), 'context=10 is .* at most 9', id='masked'
        ),
    ],
)
def test_a_window_that_is_longer_than_the_split_is_refused(rows, message):
    with refused(message):
        rows.count('train')


NUM_WINDOWS = 14  # of the shifted rows below


@pytest.fixture
def shifted_rows():
    """Rows of 7 tokens, whose training windows are shifted. A token is its position."""
    rows = LanguageRows(numbers(train=105, validation=106), length=7, shift=True)
    assert rows.count('train') == NUM_WINDOWS
    return rows


def offset_of_epoch(rows, seed, epoch):
    """The position of the first training window of an epoch."""
    first_place = NUM_WINDOWS * epoch
    batch = read_rows(rows, 'train', range(NUM_WINDOWS), seed, first_place)
    return int(batch['tokens_BT'][0, 0])


def test_the_windows_of_an_epoch_are_shifted_by_one_offset(shifted_rows):
    # The seed and the epoch decide the offset. Epoch e begins at row NUM_WINDOWS * e of training.
    for seed, epoch in np.ndindex(3, 3):
        first_place = NUM_WINDOWS * epoch
        batch = read_rows(shifted_rows, 'train', range(NUM_WINDOWS), seed, first_place)

        # A token is its position in the split, so the first token is the start of a window.
        starts = batch['tokens_BT'][:, 0]
        assert np.all(np.diff(starts) == 7)  # windows have 7 tokens
        assert 0 <= starts[0] < 7
        assert np.all(batch['targets_BT'] == batch['tokens_BT'] + 1)


def test_seeds_and_epochs_have_offsets_of_their_own(shifted_rows):
    offsets = {}
    for seed, epoch in np.ndindex(3, 3):
        offsets[seed, epoch] = offset_of_epoch(shifted_rows, seed, epoch)

    # There are only 7 offsets, so some of the 9 epochs have equal ones.
    assert len(set(offsets.values())) > 3
    assert len({offsets[0, 0], offsets[0, 1], offsets[0, 2]}) > 1
    assert offset_of_epoch(shifted_rows, seed=0, epoch=0) == offsets[0, 0]


def test_windows_of_an_evaluation_begin_with_the_first_token(shifted_rows):
    assert shifted_rows.count('validation') == NUM_WINDOWS + 1
    assert read_rows(shifted_rows, 'validation', [0])['tokens_BT'][0, 0] == 0


def test_rows_of_separate_documents_number_them():
    """Each row numbers its documents from 1, so that attention can stay within a document."""
    # Token 3 is the separator. The documents are 0 1, then 2, an empty one, and 0 1 2.
    tokens = np.array([0, 1, 3, 2, 3, 3, 0, 1, 2], np.uint8)
    tokenizer = types.SimpleNamespace(name='letters', vocab_size=4, separator=3)
    dataset = token_dataset('letters', tokenizer, {'train': tokens})

    batch = read_rows(DocumentRows(dataset, length=4), 'train', [0, 1])

    # The target of each token is the next one.
    assert batch['tokens_BT'].tolist() == [[0, 1, 3, 2], [3, 3, 0, 1]]
    assert batch['targets_BT'].tolist() == [[1, 3, 2, 3], [3, 0, 1, 2]]
    # A separator has the number of the next document, even at the start of a row.
    assert batch['segments_BT'].tolist() == [[1, 1, 2, 2], [2, 3, 3, 3]]
    assert np.all(batch['loss_weights_BT'] == 1)


@pytest.fixture(scope='module')
def masked_rows():
    """3,000 rows of 20 tokens, of which 20 percent are targets. A token is its position."""
    rows = MaskedRows(numbers(train=60_010), length=20, mask_rate=0.2)
    assert rows.count('train') == 3000
    return rows


@pytest.fixture(scope='module')
def masked_batch(masked_rows):
    """A batch of all `masked_rows`."""
    return read_rows(masked_rows, 'train', range(3000))


def test_the_targets_of_masked_rows_are_their_tokens(masked_batch):
    is_target_BT = masked_batch['loss_weights_BT'] == 1
    assert masked_batch['targets_BT'].ravel().tolist() == list(range(60_000))
    # Tokens without a loss are never hidden.
    tokens = masked_batch['tokens_BT'][~is_target_BT]
    assert np.array_equal(tokens, masked_batch['targets_BT'][~is_target_BT])


def test_every_position_of_a_row_is_masked_equally_often(masked_batch):
    weights_BT = masked_batch['loss_weights_BT']
    assert set(np.unique(weights_BT)) == {0, 1}
    # 4 tokens are 20 percent of a row of 20 tokens.
    assert np.all(weights_BT.sum(axis=1) == 4)
    # Over 3,000 rows, a share has the standard deviation sqrt(0.2 * 0.8 / 3000) = 0.0073.
    share_of_position_T = weights_BT.mean(axis=0)
    assert abs(share_of_position_T - 0.2).max() < 0.03


def test_masked_tokens_are_hidden_replaced_or_kept_in_shares_of_80_10_10(masked_rows, masked_batch):
    """At a target, the input is the mask, a random token or the target itself, as in BERT.

    The batch has 3,000 rows with 4 targets each.
    """
    is_target_BT = masked_batch['loss_weights_BT'] == 1
    tokens = masked_batch['tokens_BT'][is_target_BT]
    targets = masked_batch['targets_BT'][is_target_BT]
    assert len(targets) == 12_000

    # The standard deviation of the share 0.8 is sqrt(0.8 * 0.2 / 12_000) = 0.0037. For 0.1 it is
    # sqrt(0.1 * 0.9 / 12_000) = 0.0027.
    is_mask = tokens == masked_rows.mask
    is_kept = tokens == targets
    assert is_mask.mean() == pytest.approx(0.8, abs=0.015)
    assert is_kept.mean() == pytest.approx(0.1, abs=0.012)

    # Random tokens are uniform over the ids 1 to 65,535. The separator is 0, and the mask 65,536.
    replaced = tokens[~is_mask & ~is_kept]
    assert replaced.min() >= 1
    assert replaced.max() <= 65_535
    counts, _ = np.histogram(replaced, bins=4, range=(0, 65_536))
    assert counts / len(replaced) == pytest.approx(0.25, abs=0.06)


def test_a_separator_is_hidden_but_replaces_no_token():
    """A separator may be masked. The random token in place of a masked one is no separator."""
    tokenizer = types.SimpleNamespace(name='letters', vocab_size=4, separator=2)
    only_separators = np.full(6000, 2, np.uint8)
    dataset = token_dataset('letters', tokenizer, {'train': only_separators})

    batch = read_rows(MaskedRows(dataset, length=10, mask_rate=0.5), 'train', range(600))

    # The mask is 4. The random tokens are 0, 1 and 3, because 2 is the separator.
    tokens_BT = batch['tokens_BT']
    assert set(tokens_BT[tokens_BT != 2]) == {0, 1, 3, 4}


def test_a_mask_is_a_function_of_the_draws_alone():
    """Which tokens of a row are masked depends only on its draws.

    The draws are two numbers that seed the row's random generator. The split and the place in the
    batch do not matter.
    """
    # Both splits have the same tokens, 0 to 1999.
    rows = MaskedRows(numbers(train=2000, validation=2000), length=20, mask_rate=0.3)
    draws_B2 = np.array([[7, 1], [7, 2], [7, 3], [1, 7]], np.uint64)

    # Row 5 has three different draws, and row 0 has others, so all four masks differ.
    batch = rows.read('train', np.array([5, 0, 5, 5]), draws_B2)
    masks = np.unique(batch['loss_weights_BT'], axis=0)
    assert len(masks) == 4

    # Read row 0 again with the draws [7, 2], without other rows and from the other split.
    alone = rows.read('validation', np.array([0]), draws_B2[1:2])
    for name, array in batch.items():
        assert np.array_equal(alone[name][0], array[1])

    # 30 percent of 20 tokens are 6. If a library draws differently, other tokens are masked.
    masked_positions = np.flatnonzero(alone['loss_weights_BT'][0])
    assert masked_positions.tolist() == [6, 7, 8, 12, 14, 19]


def test_masked_rows_describe_their_data():
    rows = MaskedRows(numbers(train=2000, validation=2000), length=20, mask_rate=0.3)
    assert rows.identity()['masking'] == {'version': 1, 'rate': 0.3}
    assert rows.vocab_size == 65_536 + 1  # with the mask
    assert rows.bytes_per_token('train') == 2.0
    assert rows.unigram_nats('train') == pytest.approx(np.log(2000))


def test_at_least_one_token_of_a_row_is_masked():
    assert MaskedRows(numbers(train=100), length=10, mask_rate=0.01).num_masked == 1


COPY = 'copy(length=5, symbols=7)'
REVERSAL = 'reversal(length=5, symbols=7)'
RECALL = 'recall(pairs=4, keys=6, values=3)'
SUCCESSOR = 'successor(keys=4, payloads=3)'
INDUCTION = 'induction(length=23, repeats=3, symbols=18)'
SMALL_PROBES = [COPY, REVERSAL, RECALL, SUCCESSOR, INDUCTION]
# Each has an option at its limit.
PROBES_AT_THEIR_LIMITS = [
    'induction(length=15)',
    'induction(symbols=25)',
    'recall(pairs=32)',
    'recall(pairs=1, keys=1, values=2)',
    'successor(keys=3, payloads=2)',
    'copy(length=1, symbols=2)',
]


def probe_rows(name: str) -> probe_tasks.ProbeRows:
    return probe_tasks.ProbeRows(*probe_tasks.find(name))


class ProbeRow(NamedTuple):
    """A row of a probe, with the positions that it asks for and the right answers there."""

    tokens: list[int]
    asked: list[int]
    answers: list[int]

    def first_places(self) -> tuple[int, ...]:
        """For each asked position, the first place in the row of the token there."""
        return tuple(self.tokens.index(self.tokens[position]) for position in self.asked)


def read_probe_rows(name: str) -> list[ProbeRow]:
    """300 training rows of a probe, a synthetic task such as 'copy(length=5, symbols=7)'."""
    batch = read_rows(probe_rows(name), 'train', range(300))
    rows = []
    for tokens_T, targets_T, weights_T in zip(
        batch['tokens_BT'], batch['targets_BT'], batch['loss_weights_BT'], strict=True
    ):
        # The probe asks for the targets at positions with a loss weight.
        asked = np.flatnonzero(weights_T)
        rows.append(ProbeRow(tokens_T.tolist(), asked.tolist(), targets_T[asked].tolist()))
    return rows


@pytest.mark.parametrize('name', [*SMALL_PROBES, *PROBES_AT_THEIR_LIMITS])
def test_rows_of_probes_are_well_formed(name):
    """A probe is a synthetic task, such as 'copy(length=5, symbols=7)'.

    It asks for the targets at the positions whose loss weight is 1.
    """
    rows = probe_rows(name)

    batch = read_rows(rows, 'train', range(300))

    check_shapes(batch, 300, rows.length)

    # Weights are 0 or 1, and every row asks for the same number of targets.
    assert set(np.unique(batch['loss_weights_BT'])) <= {0, 1}
    num_asked_B = batch['loss_weights_BT'].sum(axis=1)
    assert np.all(num_asked_B == num_asked_B[0])
    assert num_asked_B[0] > 0

    # Tokens and targets are ids of the vocabulary.
    is_asked_BT = batch['loss_weights_BT'] == 1
    for ids in (batch['tokens_BT'], batch['targets_BT'][is_asked_BT]):
        assert ids.min() >= 0
        assert ids.max() < rows.vocab_size

    # A causal probe asks for next tokens.
    _, probe = probe_tasks.find(name)
    if probe.causal:
        assert np.array_equal(batch['tokens_BT'][:, 1:], batch['targets_BT'][:, :-1])


@pytest.mark.parametrize('name', SMALL_PROBES)
def test_every_id_and_every_answer_of_a_probe_turns_up(name):
    rows = probe_rows(name)
    batch = read_rows(rows, 'train', range(300))
    answers = np.unique(batch['targets_BT'][batch['loss_weights_BT'] == 1])

    used_ids = np.union1d(batch['tokens_BT'], answers)
    assert used_ids.tolist() == list(range(rows.vocab_size))

    # All answers are equally probable, so guessing one has the loss log(number of answers).
    assert rows.unigram_nats('train') == pytest.approx(math.log(len(answers)))


@pytest.mark.parametrize('name', SMALL_PROBES)
def test_rows_of_a_probe_differ(name):
    rows = read_probe_rows(name)
    assert len({tuple(row.tokens) for row in rows}) > 100


@pytest.mark.parametrize('name', [RECALL, INDUCTION])
def test_recall_and_induction_ask_in_every_order(name):
    rows = read_probe_rows(name)
    assert len({row.first_places() for row in rows}) >= 24


def test_copy_asks_for_the_first_half_again():
    for row in read_probe_rows(COPY):
        assert row.asked == [5, 6, 7, 8, 9]
        assert row.answers == row.tokens[:5]


def test_reversal_asks_for_the_first_half_backwards():
    for row in read_probe_rows(REVERSAL):
        assert row.asked == [5, 6, 7, 8, 9]
        assert row.answers == row.tokens[:5][::-1]


def test_recall_asks_for_the_value_of_each_key():
    """A row of 'recall' has four pairs of a key and a value. The same pairs follow, shuffled.

    At each key of the second half, the probe asks for the value of the key.
    """
    for row in read_probe_rows('recall(pairs=4, keys=6, values=3)'):
        # Keys and values alternate: four pairs, then the same keys in another order.
        keys = row.tokens[0::2]
        assert max(keys) < 6
        assert sorted(keys[:4]) == sorted(keys[4:])

        # The second half begins at position 8, and every other position is a key.
        assert row.asked == [8, 10, 12, 14]
        # The value follows the key at its first place in the row.
        for first_place, answer in zip(row.first_places(), row.answers, strict=True):
            assert answer == row.tokens[first_place + 1]


def test_successor_asks_for_the_payload_of_the_next_key():
    """A row of 'successor' has 4 keys in random order, each with a random payload.

    A token is key * 3 + payload. Its target is the payload of key (key + 1) % 4.
    """
    num_keys = 4
    num_payloads = 3
    for row in read_probe_rows('successor(keys=4, payloads=3)'):
        payload_of_key = {}
        for token in row.tokens:
            key, payload = divmod(token, num_payloads)
            payload_of_key[key] = payload

        # Every position has a target.
        assert row.asked == [0, 1, 2, 3]
        for token, answer in zip(row.tokens, row.answers, strict=True):
            key = token // num_payloads
            next_key = (key + 1) % num_keys
            assert answer == payload_of_key[next_key]


def test_induction_asks_for_the_token_after_the_first_place():
    """A row of 'induction' contains three pairs of neighbours a b twice.

    At the second a, the probe asks for b, the token after the first a.
    """
    for row in read_probe_rows('induction(length=23, repeats=3, symbols=18)'):
        assert len(row.asked) == 3  # one token for each of the three pairs
        for position, first_place, answer in zip(
            row.asked, row.first_places(), row.answers, strict=True
        ):
            assert first_place < position
            assert answer == row.tokens[first_place + 1]


def test_rows_of_induction_have_three_bigrams_twice():
    batch = read_rows(probe_rows(INDUCTION), 'train', range(300))
    last_targets_B1 = batch['targets_BT'][:, -1:]
    sequences_BT1 = np.concatenate([batch['tokens_BT'], last_targets_B1], axis=1)

    for sequence in sequences_BT1:
        # There are 24 = 12 + 2 * 6 tokens. The 3 * 2 = 6 tokens of the bigrams occur twice.
        _, counts = np.unique(sequence, return_counts=True)
        assert sorted(counts.tolist()) == [1] * 12 + [2] * 6


@pytest.mark.parametrize('name', PROBES)
def test_a_probe_describes_itself(name):
    rows = probe_rows(name)
    default_options = vars(PROBES[name]())
    assert rows.identity() == {'name': name, 'version': 1, 'options': default_options}
    assert rows.splits == ('train', 'validation', 'test')
    assert rows.count('train') == 2**24
    assert rows.count('validation') == 1024
    assert rows.count('test') == 1024


@pytest.mark.parametrize('name', PROBES)
def test_no_row_of_a_probe_is_in_two_splits(name):
    rows = probe_rows(name)
    batches = [read_rows(rows, split, range(50), seed=5) for split in rows.splits]
    tokens = np.concatenate([batch['tokens_BT'] for batch in batches])
    assert len(np.unique(tokens, axis=0)) == 3 * 50


@pytest.mark.parametrize('name', PROBES)
def test_training_rows_of_a_probe_follow_their_draws(name):
    """A training row depends only on its draws, two numbers that seed a random generator.

    The number of the row does not matter.
    """
    rows = probe_rows(name)
    # Row 7 of this batch has the draws (5, 7).
    batch = read_rows(rows, 'train', range(50), seed=5)

    again = rows.read('train', np.array([3, 0]), np.array([[5, 7], [7, 5]], np.uint64))

    for key, array in batch.items():
        assert np.array_equal(again[key][0], array[7])
    # Other draws make another row.
    assert not np.array_equal(again['tokens_BT'][0], again['tokens_BT'][1])


@pytest.mark.parametrize('split', ['validation', 'test'])
@pytest.mark.parametrize('name', PROBES)
def test_evaluation_rows_of_a_probe_follow_their_numbers(name, split):
    """An evaluation row depends only on its number, not on the draws that seed training rows."""
    rows = probe_rows(name)
    batch = read_rows(rows, split, range(50), seed=5)

    again = rows.read(split, np.array([3, 0]), np.array([[5, 7], [7, 5]], np.uint64))

    for key, array in batch.items():
        assert np.array_equal(again[key], array[[3, 0]])
    assert not np.array_equal(again['tokens_BT'][0], again['tokens_BT'][1])


def test_rows_of_a_seed_do_not_change():
    # This test fails if a library begins to draw differently.
    batch = read_rows(probe_rows(COPY), 'train', [0], seed=5)
    assert batch['tokens_BT'].tolist() == [[5, 4, 1, 3, 1, 7, 5, 4, 1, 3]]


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
    module = 'from qkattn.data.tasks.probe_tasks import Copy\nclass Short(Copy): pass\n'
    (outside / 'short_copy.py').write_text(module)

    assert probe_tasks.is_probe('short_copy:Short(symbols=5)')
    identity = probe_rows('short_copy:Short(symbols=5)').identity()
    assert identity['name'] == 'short_copy:Short'
    assert identity['version'].startswith('1-')  # then a digest of the module
    assert identity['options'] == vars(PROBES['copy'](symbols=5))


def test_the_probe_of_the_docs_sorts_digits(outside):
    """The module sorting is in docs/outside.md; separator 10 stands between digits and order."""
    data = DataConfig(name='sorting:Sorting(length=4)', task='sorting:Ranked')
    config = Config(model=ModelConfig(context=8), data=data)

    rows = rows_of(config)

    batch = read_rows(rows, 'train', range(50))
    sequences = np.concatenate([batch['tokens_BT'], batch['targets_BT'][:, -1:]], axis=1)
    for sequence in sequences.tolist():
        assert sequence == [*sequence[:4], 10, *sorted(sequence[:4])]
    assert batch['loss_weights_BT'].tolist() == [[0] * 4 + [1] * 4] * 50
    # The frequencies of digits at each place are better than chance, log 10.
    losses = rows.yardsticks(config).losses
    assert losses.keys() == {'val', 'test'}
    for loss in losses.values():
        assert 0 < loss['frequencies'] < math.log(10) - 0.1


@pytest.mark.parametrize('name', ['fables:fables', 'tfds:squad', 'stdlib'])
def test_a_corpus_is_no_probe(outside, name):
    assert not probe_tasks.is_probe(name)


def rows_of_numbers(length, num_tokens=3000):
    """Rows of a validation split in which a token is its position."""
    return LanguageRows(numbers(train=100, validation=num_tokens), length)


def test_repeated_sequences_are_shuffled_tokens_of_64_rows():
    """`sequences` returns random tokens, which a model reads twice to measure induction.

    It shuffles the tokens of 64 rows of the validation split.
    """
    length = 9
    # A token is its position in the split.
    rows = rows_of_numbers(length)

    r_BH = repeats.sequences(rows)

    # A row of 9 tokens and a last target has room for two copies of (9 + 1) / 2 = 5 tokens.
    assert r_BH.shape == (64, 5)
    # No token is used twice. Few tokens are followed by the same token as in the text.
    assert len(np.unique(r_BH)) == r_BH.size
    is_next_token = np.diff(r_BH, axis=1) == 1
    assert is_next_token.mean() < 0.02

    # All tokens are from 64 rows at equal distances.
    row_numbers = np.arange(64) * rows.count('validation') // 64
    batch = read_rows(rows, 'validation', row_numbers)
    assert np.all(np.isin(r_BH, batch['tokens_BT']))

    # A sequence mixes tokens of several rows.
    rows_of_first_sequence = r_BH[0] // length
    assert len(np.unique(rows_of_first_sequence)) > 2


def test_repeated_sequences_do_not_change():
    # This test fails if a library begins to shuffle differently.
    r_BH = repeats.sequences(rows_of_numbers(16))
    digest = hashlib.sha256(r_BH.astype('<i4').tobytes()).hexdigest()
    assert digest[:16] == '31739a6c26ddd7b2'


def test_a_small_split_has_few_repeated_sequences():
    five_rows = rows_of_numbers(8, num_tokens=5 * 8 + 1)
    assert repeats.sequences(five_rows).shape == (5, 4)


def test_short_rows_and_probes_have_no_repeated_sequences():
    assert repeats.sequences(rows_of_numbers(7)) is None
    probe = probe_tasks.CausalProbeRows(*probe_tasks.find('recall'))
    assert repeats.sequences(probe) is None


SEPARATOR = 3
SOURCE_LENGTH = 24  # tokens of a row, with a separator after each sentence
LENGTH = 20
WORDS = types.SimpleNamespace(name='words', vocab_size=60_000, separator=SEPARATOR)


def dataset_of_sentences(name: str, sentences: dict[str, list[np.ndarray]]) -> TokenDataset:
    """A dataset whose documents are these sentences, each with a separator after it."""
    splits = {}
    for split, documents in sentences.items():
        with_separators = [np.append(ids, SEPARATOR) for ids in documents]
        splits[split] = np.concatenate(with_separators).astype(np.uint16)
    return token_dataset(name, WORDS, splits, bytes_per_token=3)


def sentences(count: int, longest: int, seed: int) -> list[np.ndarray]:
    """Random sentences of 0 to `longest` tokens, without the separator."""
    rng = np.random.default_rng(seed)
    drawn = []
    for size in rng.integers(0, longest + 1, count):
        ids = rng.integers(0, WORDS.vocab_size, size)
        drawn.append(np.where(ids == SEPARATOR, 0, ids))
    return drawn


# The longest sentences have 23 and 19 tokens. With a separator, they fill a row of 24 and 20.
SOURCES = {'train': sentences(500, 23, 0), 'validation': sentences(50, 23, 1)}
TARGETS = {'train': sentences(500, 19, 2), 'validation': sentences(50, 19, 3)}
SENTENCE_PAIRS = PairDataset(dataset_of_sentences('a', SOURCES), dataset_of_sentences('b', TARGETS))
TRANSLATION_ROWS = TranslationRows(SENTENCE_PAIRS, SOURCE_LENGTH, LENGTH)


def read_split(rows, split='train'):
    """A batch of all rows of a split."""
    return read_rows(rows, split, range(rows.count(split)))


class PackedPair(NamedTuple):
    """The tokens of a pair in a row."""

    source: list[int]  # ends with the separator
    target_input: list[int]  # begins with the separator
    target_output: list[int]  # ends with the separator


def unpack_pairs(batch) -> list[PackedPair]:
    """The sentence pairs of a batch, row after row.

    A row holds several pairs. The segment of a token is the number of its pair in the row, from 1.
    Segment 0 is padding.
    """
    pairs = []
    for row in range(len(batch['tokens_BT'])):
        source_segments = batch['source_segments_BS'][row]
        target_segments = batch['segments_BT'][row]
        for segment in range(1, source_segments.max() + 1):
            is_source = source_segments == segment
            is_target = target_segments == segment
            pair = PackedPair(
                source=batch['source_BS'][row][is_source].tolist(),
                target_input=batch['tokens_BT'][row][is_target].tolist(),
                target_output=batch['targets_BT'][row][is_target].tolist(),
            )
            pairs.append(pair)
    return pairs


def test_every_pair_is_in_one_row_beside_its_translation():
    """Sentence pairs are packed into the rows of an encoder-decoder. None is lost or divided.

    The decoder reads a separator and the target. It predicts the target and a separator.
    """
    expected = []
    for source, target in zip(SOURCES['train'], TARGETS['train'], strict=True):
        pair = PackedPair(
            source=[*source, SEPARATOR],
            target_input=[SEPARATOR, *target],
            target_output=[*target, SEPARATOR],
        )
        expected.append(pair)

    packed_pairs = unpack_pairs(read_split(TRANSLATION_ROWS))

    # Packing changes the order of the pairs.
    assert sorted(packed_pairs) == sorted(expected)


def test_sentences_are_in_file_order_without_separators():
    sources, targets = SENTENCE_PAIRS.sentences('train')
    assert [ids.tolist() for ids in sources] == [ids.tolist() for ids in SOURCES['train']]
    assert [ids.tolist() for ids in targets] == [ids.tolist() for ids in TARGETS['train']]


def test_rows_of_pairs_are_read_by_number():
    whole_split = read_split(TRANSLATION_ROWS)
    batch = read_rows(TRANSLATION_ROWS, 'train', [3, 0, 3])
    for name, array in batch.items():
        assert np.array_equal(array, whole_split[name][[3, 0, 3]])


def test_rows_of_pairs_are_well_filled():
    batch = read_split(TRANSLATION_ROWS)
    is_pair_BT = batch['segments_BT'] > 0
    assert np.array_equal(batch['loss_weights_BT'], is_pair_BT.astype(np.float32))
    # A pair has about 12 and 10 tokens on average, so about two fit into a row of 24 and 20.
    assert batch['loss_weights_BT'].mean() > 0.85


@pytest.mark.parametrize(
    ('segments_name', 'token_names'),
    [
        pytest.param('source_segments_BS', ['source_BS'], id='source'),
        pytest.param('segments_BT', ['tokens_BT', 'targets_BT'], id='target'),
    ],
)
def test_rows_are_padded_with_zeros_behind_the_pairs(segments_name, token_names):
    """Each row holds several sentence pairs, and then padding.

    The segment of a token is the number of its pair in the row, from 1. Padding has segment 0.
    """
    batch = read_split(TRANSLATION_ROWS)
    segments = batch[segments_name]

    # Tokens of padding are 0.
    is_padding = segments == 0
    assert is_padding.any()
    for name in token_names:
        assert not batch[name][is_padding].any()

    for segments_of_row in segments:
        # All padding follows the pairs.
        num_tokens = np.count_nonzero(segments_of_row)
        segments_of_pairs = segments_of_row[:num_tokens]
        assert np.all(segments_of_pairs > 0)

        # Segments count the pairs from 1.
        assert segments_of_pairs[0] == 1
        assert set(np.diff(segments_of_pairs)) <= {0, 1}


def test_the_identity_of_translation_rows_has_the_packing():
    assert TRANSLATION_ROWS.identity() == SENTENCE_PAIRS.identity() | {
        'packing': {'version': 1, 'source_length': SOURCE_LENGTH, 'length': LENGTH},
        'dropped_pairs': {'train': 0, 'validation': 0},
    }


def test_counts_of_translation_rows_are_those_of_the_targets():
    assert TRANSLATION_ROWS.bytes_per_token('train') == 3
    assert TRANSLATION_ROWS.unigram_nats('train') == SENTENCE_PAIRS.target.unigram_nats('train')


def test_the_packing_is_a_fixed_shuffle():
    packed_pairs = unpack_pairs(read_split(TRANSLATION_ROWS, 'validation'))
    in_file_order = [[*source, SEPARATOR] for source in SOURCES['validation']]
    # This test fails if a library begins to draw differently.
    numbers_of_first_pairs = [in_file_order.index(pair.source) for pair in packed_pairs[:8]]
    assert numbers_of_first_pairs == [0, 43, 38, 9, 21, 33, 4, 2]


def test_pairs_longer_than_a_row_are_refused():
    """The message counts the sentence pairs that do not fit into a row.

    It also names lengths that fit all pairs.
    """
    # The longest sentences have 23 and 19 tokens. With a separator, they need 24 and 20.
    source_length = 22
    num_too_long = 0
    for source in SOURCES['train'] + SOURCES['validation']:
        if len(source) + 1 > source_length:
            num_too_long += 1

    with refused(
        f'^{num_too_long} sentence pairs .*source_context=22 .*context=20; .*at least 24 and 20'
    ):
        TranslationRows(SENTENCE_PAIRS, source_length, length=20)


@pytest.mark.parametrize('split', ['train', 'validation'])
def test_pairs_longer_than_a_row_are_dropped_and_counted_if_asked(split):
    """With `drop_long`, sentence pairs that do not fit into a row are left out.

    Results record the number of dropped pairs, as part of the identity of the rows.
    """
    rows = TranslationRows(SENTENCE_PAIRS, source_length=22, length=16, drop_long=True)

    # A separator follows each sentence, hence + 1.
    sources_that_fit = []
    for source, target in zip(SOURCES[split], TARGETS[split], strict=True):
        if len(source) + 1 <= 22 and len(target) + 1 <= 16:
            sources_that_fit.append([*source, SEPARATOR])
    packed_pairs = unpack_pairs(read_split(rows, split))
    assert sorted(pair.source for pair in packed_pairs) == sorted(sources_that_fit)

    num_dropped = len(SOURCES[split]) - len(sources_that_fit)
    assert num_dropped > 0
    assert rows.identity()['dropped_pairs'][split] == num_dropped


def test_a_split_whose_pairs_are_all_too_long_is_refused():
    rows = TranslationRows(SENTENCE_PAIRS, source_length=0, length=0, drop_long=True)
    with refused("split 'train' of a has no sentence pair"):
        rows.count('train')


def test_unequally_many_sentences_are_refused():
    five = dataset_of_sentences('a', {'train': SOURCES['train'][:5]})
    four = dataset_of_sentences('b', {'train': SOURCES['train'][:4]})
    with refused("5 sentences in source 'a' but 4 in"):
        PairDataset(five, four)


def test_shuffled_sources_are_those_of_other_pairs_of_equal_length():
    """Exchanging the sources of sentence pairs shows whether a model uses its sources.

    A source is replaced only by one of equal length. Targets stay in place.
    """
    pairs = unpack_pairs(read_split(TRANSLATION_ROWS))
    shuffled_pairs = unpack_pairs(read_split(TRANSLATION_ROWS.with_shuffled_sources()))

    # Targets and lengths are as before.
    for pair, shuffled_pair in zip(pairs, shuffled_pairs, strict=True):
        assert shuffled_pair.target_input == pair.target_input
        assert shuffled_pair.target_output == pair.target_output
        assert len(shuffled_pair.source) == len(pair.source)

    # The sources are the same ones, in another order.
    sources = [pair.source for pair in pairs]
    assert sorted(pair.source for pair in shuffled_pairs) == sorted(sources)

    # A source changes if another source has the same length. All empty sources are equal.
    num_of_length = collections.Counter(len(source) for source in sources)
    for source, shuffled_pair in zip(sources, shuffled_pairs, strict=True):
        is_empty = source == [SEPARATOR]
        if num_of_length[len(source)] > 1 and not is_empty:
            assert shuffled_pair.source != source
        else:
            assert shuffled_pair.source == source
