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
from qkattn.data.tasks.language import LanguageRows
from qkattn.data.tasks.probe_tasks import CausalProbeRows, find
from qkattn.data.tasks.task_registry import batches, rows_of
from qkattn.data.tokenizers.tokenizer import ByteTokenizer
from tests.data.datasets import check_shapes, numbers, token_dataset
from tests.refusals import refused


def windows(**sizes):
    return LanguageRows(numbers(**sizes), 7)


def test_every_epoch_visits_every_window_once_in_an_order_of_its_own():
    def order(rows, seed, num_steps):
        """The first tokens of all rows."""
        batches = pipeline.train_batches(rows, seeds=(seed,), num_steps=num_steps, batch_size=6)
        return np.concatenate([batch['tokens_BT'][0, 0, :, 0] for batch in batches])

    # 59 windows: batches of 6 straddle the epochs.
    rows = windows(train=414)
    epochs = np.concatenate([order(rows, seed, 59).reshape(6, 59) for seed in range(2)])
    assert (np.sort(epochs, axis=1) == np.arange(0, 413, 7)).all()
    assert len(np.unique(epochs, axis=0)) == len(epochs) == 12
    # Written down, so that a library that shuffles differently does not go unnoticed.
    known = [84, 364, 175, 357, 413, 399, 189, 147, 336, 154, 231, 210]
    assert order(windows(train=421), 5, 2).tolist() == known


def test_hosts_together_read_the_global_batches():
    rows = windows(train=500, validation=74)

    def batches(part):
        yield pipeline.train_batch(rows, seed=2, step=9, batch_size=6, part=part)
        yield from pipeline.eval_batches(rows, 'validation', batch_size=6, part=part)

    # Each of three hosts reads two of six rows.
    parts = [batches(slice(first, first + 2)) for first in (0, 2, 4)]
    for batch, *shares in zip(batches(None), *parts, strict=True):
        for name, array in batch.items():
            assert {part[name].shape for part in shares} == {(2, 7)}
            assert np.array_equal(np.concatenate([part[name] for part in shares]), array)


def test_a_row_is_drawn_by_the_seed_and_its_place_in_the_sequence():
    rows = windows(train=500, validation=74)
    rows.read = lambda split, rows_B, draws_B2: {'draws': draws_B2}
    # Step 2 begins at place 2 x 4; the part takes the rows 1 to 3 of it.
    batch = pipeline.train_batch(rows, part=slice(1, 4), seed=7, step=2, batch_size=4)
    assert batch['draws'].tolist() == [[7, 9], [7, 10], [7, 11]]
    # Evaluations have seed 0, and the places of the rows in the split.
    (batch,) = pipeline.eval_batches(rows, 'validation', batch_size=3, max_rows=3)
    assert batch['draws'].tolist() == [[0, 0], [0, 3], [0, 6]]
    assert batch['draws'].dtype == np.uint64


def test_batches_of_training_are_those_of_their_steps():
    rows = windows(train=500)
    settings = {'batch_size': 6, 'part': slice(2, 5)}
    steps = {'start_step': 11, 'num_steps': 8, 'steps_per_read': 3}
    batches = pipeline.train_batches(rows, seeds=(4, 0, 4), **steps, **settings)
    # 8 steps from the 11th, 3 to a read; each with the 3 rows of this part for 3 seeds.
    reads = [batch['tokens_BT'] for batch in batches]
    assert [r.shape for r in reads] == [(3, 3, 3, 7), (3, 3, 3, 7), (2, 3, 3, 7)]
    for c, tokens_XBT in enumerate(np.concatenate(reads)):
        for seed, tokens_BT in zip((4, 0, 4), tokens_XBT, strict=True):
            expected = pipeline.train_batch(rows, seed=seed, step=11 + c, **settings)['tokens_BT']
            assert tokens_BT.dtype == expected.dtype
            assert np.array_equal(tokens_BT, expected)
    assert list(pipeline.train_batches(rows, seeds=(0,), num_steps=0, batch_size=1)) == []


def test_one_thread_reads_ahead():
    rows = windows(train=500)
    read = rows.read
    threads = []

    def recording(*args):
        threads.append(threading.current_thread())
        return read(*args)

    rows.read = recording
    batches = pipeline.train_batches(rows, seeds=(3, 1, 3), num_steps=2, batch_size=2)
    with contextlib.closing(batches):
        del threads[:]  # of the reads that check the settings
        next(batches)
        deadline = time.monotonic() + 10
        while len(threads) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(threads) == 4 and len(set(threads)) == 1  # two seeds, two steps
        assert threads[0] is not threading.main_thread()
    threads[0].join(10)
    assert not threads[0].is_alive()
    assert list(batches) == []


def test_an_evaluation_predicts_every_token_once():
    # 10 windows of 7, 3 tokens over.
    rows = windows(validation=74)
    batches = list(pipeline.eval_batches(rows, 'validation', batch_size=4))
    for batch in batches:
        check_shapes(batch, 4, 7)
    whole = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    is_target = whole['loss_weights_BT'] == 1
    # The last batch has two rows of padding.
    assert is_target.sum(1).tolist() == [7] * 10 + [0] * 2
    assert not whole['loss_weights_BT'][~is_target].any()
    # A token is its position, so that each target is its token plus 1.
    assert (whole['targets_BT'] - whole['tokens_BT'] == is_target).all()
    assert whole['targets_BT'][is_target].tolist() == list(range(1, 71))


def test_a_subset_of_an_evaluation_is_evenly_spaced():
    rows = windows(validation=74)
    assert pipeline.eval_rows(rows, 'validation', 4).tolist() == [0, 2, 5, 7]
    (batch,) = pipeline.eval_batches(rows, 'validation', batch_size=4, max_rows=4)
    assert (batch['tokens_BT'][:, 0] // 7).tolist() == [0, 2, 5, 7]
    assert len(pipeline.eval_rows(rows, 'validation', 999)) == 10


def test_bad_settings_are_refused_in_one_sentence_at_the_call():
    rows = windows(train=30, validation=74, test=7)
    for fields, message in (
        ({'part': slice(6, 9)}, r'part=.*6, 9.* no row of a batch of 6'),
        ({'seed': 2**32}, 'seed=4294967296 is out of range'),
    ):
        with refused(message):
            pipeline.train_batch(rows, **{'seed': 0, 'step': 0, 'batch_size': 6} | fields)
    with refused('seed=-1 is out of range'):
        pipeline.train_batches(rows, seeds=(0, -1), num_steps=1, batch_size=1)
    with refused("too long for split 'test'"):
        pipeline.eval_batches(rows, 'test', batch_size=4)


def test_training_batches_of_a_config_are_endless(tiny):
    config = tiny(data={'eval_sequences': 11})
    for step, batch in enumerate(itertools.islice(batches(config, seed=3), 3)):
        expected = pipeline.train_batch(rows_of(config), seed=3, step=step, batch_size=8)
        assert batch.keys() == expected.keys()
        assert all(np.array_equal(array, expected[name]) for name, array in batch.items())


def test_evaluation_batches_of_a_config_cover_the_sequences_once(tiny):
    first, second = batches(tiny(data={'eval_sequences': 11}), 'validation')
    assert first['tokens_BT'].shape == (8, 16)
    assert second['loss_weights_BT'].any(axis=1).tolist() == [True] * 3 + [False] * 5


@pytest.fixture
def letters():
    """Documents of 9, 3 and 8 tokens; rows aaaa aaaa 0bb0 cccc."""
    text = np.frombuffer(b'aaaaaaaa\0bb\0ccccccc\0', np.uint8)
    splits = {'train': text, 'validation': text}
    return LanguageRows(token_dataset('letters', ByteTokenizer(), splits), 4)


def test_a_cluster_of_text_is_a_document(letters):
    names, document_R = pipeline.clusters(letters, 'validation')
    assert names == ['0', '1', '2']
    assert document_R.tolist() == [0, 0, 1, 2]
    _, document_R = pipeline.clusters(letters, 'validation', 2)
    assert document_R.tolist() == [0, 1]


def test_rows_without_documents_are_dealt_out_to_clusters():
    probe = CausalProbeRows(*find('recall(pairs=2)'))
    names, cluster_R = pipeline.clusters(probe, 'test', 200)
    assert names == [*map(str, range(128))]
    assert cluster_R.tolist() == [*range(128), *range(72)]
    pipeline.check_documents(probe, DataConfig(), 1000)


@pytest.mark.parametrize(
    ('fields', 'minimum', 'message'),
    [
        ({'name': 'letters'}, 3, "'letters' has no test split, .*; set data.carve_test=True"),
        ({'path': 'a.txt'}, 4, "3 of 3 documents in split 'validation' of .*'a.txt', .* 4; choose"),
    ],
)
def test_a_study_needs_a_test_split_of_many_documents(letters, fields, minimum, message):
    with refused(message):
        pipeline.check_documents(letters, DataConfig(**fields), minimum)


def test_the_rows_that_read_enough_documents_are_named(stdlib):
    modules = LanguageRows(stdlib, 128)
    pipeline.check_documents(modules, DataConfig())
    with refused(r'evaluates \d+ of \d+ documents .* at least 100; raise it to \d+\.$') as caught:
        pipeline.check_documents(modules, DataConfig(eval_sequences=64), 100)
    # The number that the refusal names is enough, and half of it is not.
    number = int(re.search(r'(\d+)\.$', str(caught.value))[1])
    pipeline.check_documents(modules, DataConfig(eval_sequences=number), 100)
    with refused(f'at least 100; raise it to {number}'):
        pipeline.check_documents(modules, DataConfig(eval_sequences=number // 2), 100)
