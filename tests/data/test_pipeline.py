"""Batches of training and evaluation, the rows of each, and the clusters of an evaluation."""

import contextlib
import itertools
import re
import threading
import time

import numpy as np
import pytest

from qkattn.config import DataConfig
from qkattn.data import pipeline
from qkattn.data.tasks.language import LanguageRows, MaskedRows
from qkattn.data.tasks.probe_tasks import CausalProbeRows, find
from qkattn.data.tasks.task_registry import batches, rows_of
from qkattn.data.tokenizers.tokenizer import ByteTokenizer
from tests.data.datasets import check_shapes, numbers, token_dataset
from tests.refusals import refused


def windows(**sizes):
    """Rows of 7 tokens. The train split of windows(train=100) has the tokens 0 to 99."""
    return LanguageRows(numbers(**sizes), length=7)


def visited_windows(rows, seed, num_steps):
    """The first token of every row that training visits, in order."""
    batches = pipeline.train_batches(rows, seeds=(seed,), num_steps=num_steps, batch_size=6)
    return np.concatenate([batch['tokens_BT'][0, 0, :, 0] for batch in batches])


def test_every_epoch_visits_every_window_once_in_an_order_of_its_own():
    """Each epoch of each seed visits all windows once, in its own random order."""
    # A window has 7 tokens, and the last target needs one more token.
    num_windows = 59
    rows = windows(train=7 * num_windows + 1)
    assert rows.count('train') == num_windows

    # 59 batches of 6 windows are 6 epochs of 59 windows.
    orders = []
    for seed in (0, 1):
        visited = visited_windows(rows, seed, num_steps=59)
        orders.extend(visited.reshape(6, num_windows))

    # The first token of a window is the position of the window.
    first_tokens = list(range(0, 7 * num_windows, 7))
    for order in orders:
        assert sorted(order.tolist()) == first_tokens
    num_different = len(np.unique(orders, axis=0))
    assert num_different == 2 * 6


def test_the_order_of_training_does_not_change():
    # This test fails if a library begins to shuffle differently.
    visited = visited_windows(windows(train=421), seed=5, num_steps=2)
    assert visited.tolist() == [84, 364, 175, 357, 413, 399, 189, 147, 336, 154, 231, 210]


def test_hosts_together_read_the_global_batches():
    """Each of several hosts reads a part of the rows of every batch.

    The parts in order are the batch that a single host would read.
    """
    rows = windows(train=500, validation=74)

    def read(part):
        """Reads the rows `part` of a training batch and of the batches of an evaluation."""
        train_batch = pipeline.train_batch(rows, seed=2, step=9, batch_size=6, part=part)
        eval_batches = pipeline.eval_batches(rows, 'validation', batch_size=6, part=part)
        return [train_batch, *eval_batches]

    # Each of three hosts reads two of six rows.
    global_batches = read(None)
    first_host = read(slice(0, 2))
    second_host = read(slice(2, 4))
    third_host = read(slice(4, 6))

    batches_of_hosts = zip(first_host, second_host, third_host, strict=True)
    for global_batch, host_batches in zip(global_batches, batches_of_hosts, strict=True):
        for name, global_array in global_batch.items():
            host_arrays = [host_batch[name] for host_batch in host_batches]
            for host_array in host_arrays:
                assert host_array.shape == (2, 7)  # rows of 7 tokens
            assert np.array_equal(np.concatenate(host_arrays), global_array)


@pytest.fixture
def rows_of_draws():
    """Rows whose batches hold only `draws_B2`, the random seeds of the rows."""
    rows = windows(train=500, validation=74)
    rows.read = lambda split, rows_B, draws_B2: {'draws_B2': draws_B2}
    return rows


def test_a_training_row_is_drawn_by_the_seed_and_its_place(rows_of_draws):
    # Batch 2 has the places 8 to 11 of the training sequence. The part leaves out place 8.
    batch = pipeline.train_batch(rows_of_draws, seed=7, step=2, batch_size=4, part=slice(1, 4))
    assert batch['draws_B2'].tolist() == [[7, 9], [7, 10], [7, 11]]


def test_an_evaluation_row_is_drawn_by_its_number(rows_of_draws):
    batches = pipeline.eval_batches(rows_of_draws, 'validation', batch_size=3, max_rows=3)
    batch = next(batches)
    # The rows 0, 3 and 6, each with seed 0.
    assert batch['draws_B2'].tolist() == [[0, 0], [0, 3], [0, 6]]
    assert batch['draws_B2'].dtype == np.uint64
    assert next(batches, None) is None


def test_batches_of_training_are_those_of_their_steps():
    """`train_batches` reads several seeds and steps at once.

    For each seed and step, it reads the same batch as `train_batch`.
    """
    rows = windows(train=500)
    seeds = (4, 0, 4)
    start_step = 11
    num_steps = 8
    # Of the 6 rows of each batch, rows 2 to 4 are read.
    batch_fields = {'batch_size': 6, 'part': slice(2, 5)}

    batches = pipeline.train_batches(
        rows,
        seeds=seeds,
        start_step=start_step,
        num_steps=num_steps,
        steps_per_read=3,
        **batch_fields,
    )
    reads = [batch['tokens_BT'] for batch in batches]

    # The axes are steps, seeds, rows and tokens. The 8 steps are read as 3 + 3 + 2.
    assert [read.shape for read in reads] == [(3, 3, 3, 7), (3, 3, 3, 7), (2, 3, 3, 7)]

    tokens_SXBT = np.concatenate(reads)
    for s, x in np.ndindex(num_steps, len(seeds)):
        expected = pipeline.train_batch(rows, seed=seeds[x], step=start_step + s, **batch_fields)
        assert tokens_SXBT[s, x].dtype == expected['tokens_BT'].dtype
        assert np.array_equal(tokens_SXBT[s, x], expected['tokens_BT'])


def test_no_steps_have_no_batches():
    batches = pipeline.train_batches(windows(train=500), seeds=(0,), num_steps=0, batch_size=1)
    assert list(batches) == []


def test_one_thread_reads_ahead():
    """While a model trains on a batch, a thread in the background reads the next one.

    The thread ends when the batches are closed.
    """
    rows = windows(train=500)
    read = rows.read
    reading_threads = []  # the thread of each call of `read`

    def read_and_record(*args):
        """Replaces `rows.read`: it also records the thread that calls it."""
        reading_threads.append(threading.current_thread())
        return read(*args)

    rows.read = read_and_record
    batches = pipeline.train_batches(rows, seeds=(3, 1, 3), num_steps=2, batch_size=2)
    with contextlib.closing(batches):
        reading_threads.clear()  # forget the reads that checked the settings

        # After `next` returns the first batch, the thread reads the second one by itself.
        next(batches)
        num_reads = 2 * 2  # two steps of two different seeds
        deadline = time.monotonic() + 10
        while len(reading_threads) < num_reads and time.monotonic() < deadline:
            time.sleep(0.01)

        assert len(reading_threads) == num_reads
        assert len(set(reading_threads)) == 1
        assert reading_threads[0] is not threading.main_thread()

    # Closing ends the thread and the batches.
    reading_threads[0].join(timeout=10)
    assert not reading_threads[0].is_alive()
    assert list(batches) == []


def test_an_evaluation_predicts_every_token_once():
    """An evaluation reads all windows of a split in order.

    Rows of zeros fill the last batch. Their loss weight is 0, so they do not count.
    """
    # 10 windows of 7 tokens. A token is its position: 0, 1, 2, ...
    rows = windows(validation=74)

    batches = list(pipeline.eval_batches(rows, 'validation', batch_size=4))

    for batch in batches:
        check_shapes(batch, num_rows=4, length=7)
    tokens_RT = np.concatenate([batch['tokens_BT'] for batch in batches])
    targets_RT = np.concatenate([batch['targets_BT'] for batch in batches])
    weights_RT = np.concatenate([batch['loss_weights_BT'] for batch in batches])

    # Every token but the first is a target, and the input is the token before it.
    assert targets_RT[:10].ravel().tolist() == list(range(1, 71))
    assert np.array_equal(tokens_RT[:10], targets_RT[:10] - 1)
    assert np.all(weights_RT[:10] == 1)

    # The last two of 3 * 4 rows are padding.
    for array_RT in (tokens_RT, targets_RT, weights_RT):
        assert np.all(array_RT[10:] == 0)


def test_a_subset_of_an_evaluation_is_evenly_spaced():
    rows = windows(validation=74)  # 10 rows
    assert pipeline.eval_rows(rows, 'validation', 4).tolist() == [0, 2, 5, 7]
    assert len(pipeline.eval_rows(rows, 'validation', 999)) == 10

    batches = list(pipeline.eval_batches(rows, 'validation', batch_size=4, max_rows=4))
    assert len(batches) == 1
    first_tokens = batches[0]['tokens_BT'][:, 0]
    assert first_tokens.tolist() == [0 * 7, 2 * 7, 5 * 7, 7 * 7]


def test_bad_settings_of_training_are_refused_at_the_call():
    rows = windows(train=30)
    with refused(r'part=.*6, 9.* no row of a batch of 6'):
        pipeline.train_batch(rows, seed=0, step=0, batch_size=6, part=slice(6, 9))
    with refused('seed=4294967296 is out of range'):
        pipeline.train_batch(rows, seed=2**32, step=0, batch_size=6)
    with refused('seed=-1 is out of range'):
        pipeline.train_batches(rows, seeds=(0, -1), num_steps=1, batch_size=1)


def test_a_split_shorter_than_a_row_is_refused_at_the_call():
    rows = windows(train=30, test=7)  # a row needs 8 tokens, the last one as a target
    with refused("too long for split 'test'"):
        pipeline.eval_batches(rows, 'test', batch_size=4)


def test_training_batches_of_a_config_are_endless(tiny):
    config = tiny(data={'eval_sequences': 11})
    rows = rows_of(config)
    first_batches = itertools.islice(batches(config, seed=3), 3)

    for step, batch in enumerate(first_batches):
        expected = pipeline.train_batch(rows, seed=3, step=step, batch_size=8)
        assert batch.keys() == expected.keys()
        for name, array in batch.items():
            assert np.array_equal(array, expected[name])


def test_evaluation_batches_of_a_config_cover_the_sequences_once(tiny):
    config = tiny(data={'eval_sequences': 11})  # in batches of 8
    first, second = batches(config, 'validation')

    assert first['tokens_BT'].shape == (8, 16)
    # The second batch has the other 3 sequences, and 5 rows of padding.
    has_targets_B = second['loss_weights_BT'].any(axis=1)
    assert has_targets_B.tolist() == [True] * 3 + [False] * 5


@pytest.fixture
def letters():
    """A dataset whose splits have documents of 9, 3 and 8 tokens: aaaaaaaa0bb0ccccccc0."""
    text = np.frombuffer(b'aaaaaaaa\0bb\0ccccccc\0', np.uint8)
    splits = {'train': text, 'validation': text}
    return token_dataset('letters', ByteTokenizer(), splits)


def test_a_cluster_of_text_is_a_document(letters):
    # The split has 4 rows of 4 tokens: aaaa aaaa 0bb0 cccc.
    rows = LanguageRows(letters, length=4)
    names, document_R = pipeline.clusters(rows, 'validation')
    assert names == ['0', '1', '2']
    assert document_R.tolist() == [0, 0, 1, 2]

    # Of two rows, the first and the third.
    _, document_R = pipeline.clusters(rows, 'validation', max_rows=2)
    assert document_R.tolist() == [0, 1]


@pytest.mark.parametrize(
    ('length', 'expected'),
    [
        (1, 9 * [0] + 3 * [1] + 8 * [2]),
        (3, [0, 0, 0, 1, 2, 2]),  # aaa aaa aa0 bb0 ccc ccc
    ],
)
def test_a_masked_row_belongs_to_the_document_of_its_middle_token(letters, length, expected):
    rows = MaskedRows(letters, length)
    names, document_R = pipeline.clusters(rows, 'validation')
    assert names == ['0', '1', '2']
    assert document_R.tolist() == expected


def test_rows_without_documents_are_dealt_out_to_clusters():
    probe = CausalProbeRows(*find('recall(pairs=2)'))

    names, cluster_R = pipeline.clusters(probe, 'test', max_rows=200)

    assert names == [str(cluster) for cluster in range(128)]
    # There are 128 clusters. The other 200 - 128 = 72 rows go to the first 72 clusters.
    assert cluster_R.tolist() == [*range(128), *range(72)]


def test_rows_without_documents_need_no_minimum():
    probe = CausalProbeRows(*find('recall(pairs=2)'))
    pipeline.check_documents(probe, DataConfig(), minimum=1000)


@pytest.mark.parametrize(
    ('fields', 'minimum', 'message'),
    [
        pytest.param(
            {'name': 'letters'},
            3,
            "'letters' has no test split, .*; set data.carve_test=True",
            id='no test split',
        ),
        pytest.param(
            {'path': 'a.txt'},
            4,
            "3 of 3 documents in split 'validation' of .*'a.txt', .* 4; choose",
            id='too few documents',
        ),
    ],
)
def test_a_study_needs_a_test_split_of_many_documents(letters, fields, minimum, message):
    # `letters` has 3 documents in train and validation.
    rows = LanguageRows(letters, length=4)
    with refused(message):
        pipeline.check_documents(rows, DataConfig(**fields), minimum)


def test_the_number_of_rows_that_suffices_is_named(stdlib):
    modules = LanguageRows(stdlib, length=128)
    with refused(r'evaluates \d+ of \d+ documents .* at least 100; raise it to \d+\.$') as caught:
        pipeline.check_documents(modules, DataConfig(eval_sequences=64), minimum=100)
    suggested = int(re.search(r'raise it to (\d+)\.$', str(caught.value))[1])

    # This number suffices, and half of it does not.
    pipeline.check_documents(modules, DataConfig(eval_sequences=suggested), minimum=100)
    with refused(f'at least 100; raise it to {suggested}'):
        pipeline.check_documents(modules, DataConfig(eval_sequences=suggested // 2), minimum=100)


def test_default_settings_evaluate_enough_documents(stdlib):
    pipeline.check_documents(LanguageRows(stdlib, length=128), DataConfig())
