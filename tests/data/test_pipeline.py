import subprocess
import sys

import numpy as np
import pytest

from qkattn.config import ConfigError
from qkattn.data import pipeline

TRAIN = {'batch_size': 6, 'length': 7}


def first_tokens(dataset, seed, steps, **settings):
    """First token of every row of consecutive steps, one after another."""
    return np.concatenate(
        [
            pipeline.train_batch(dataset, seed=seed, step=step, **(TRAIN | settings))[:, 0]
            for step in steps
        ]
    )


def test_rows_are_windows_of_consecutive_tokens(numbers):
    tokens_BT1 = pipeline.train_batch(numbers(train=500), seed=1, step=3, **TRAIN)
    assert tokens_BT1.shape == (6, 8)
    assert tokens_BT1.dtype == np.int32
    assert (np.diff(tokens_BT1, axis=1) == 1).all()
    assert (tokens_BT1[:, 0] % 7 == 0).all()


def test_an_epoch_visits_every_window_once_and_the_next_reshuffles(numbers):
    # 7 * 60 + 1 tokens: 60 windows, 10 batches an epoch.
    dataset = numbers(train=421)
    epochs = [first_tokens(dataset, 0, range(10 * e, 10 * e + 10)).tolist() for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(0, 420, 7))
    assert epochs[0] != sorted(epochs[0])
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_epochs_follow_each_other_without_a_gap(numbers):
    # 59 windows: batches of 6 straddle the epochs.
    order = first_tokens(numbers(train=414), 0, range(59)).reshape(6, 59)
    assert (np.sort(order, axis=1) == np.arange(0, 413, 7)).all()


def test_seeds_differ_in_every_epoch(numbers):
    dataset = numbers(train=421)
    epochs = [
        tuple(first_tokens(dataset, seed, range(10 * e, 10 * e + 10)))
        for seed in range(4)
        for e in range(3)
    ]
    assert len(set(epochs)) == len(epochs)


def test_order_is_the_same_for_ever(numbers):
    # Written down, so that a library that shuffles differently does not go unnoticed.
    assert first_tokens(numbers(train=421), 5, range(2)).tolist() == [
        84,
        364,
        175,
        357,
        413,
        399,
        189,
        147,
        336,
        154,
        231,
        210,
    ]


FRESH = """
import sys
from qkattn.data import pipeline
dataset = pipeline.load('stdlib', sys.argv[1])
batch = pipeline.train_batch(dataset, seed=3, step=12345, batch_size=4, length=64)
sys.stdout.buffer.write(batch.tobytes())
"""


def test_a_fresh_process_reads_the_same(stdlib, data_dir):
    fresh = subprocess.run(
        [sys.executable, '-c', FRESH, str(data_dir)], capture_output=True, check=True, timeout=120
    )
    batch = pipeline.train_batch(stdlib, seed=3, step=12345, batch_size=4, length=64)
    assert fresh.stdout == batch.tobytes()


@pytest.mark.parametrize('num_hosts', [1, 2, 3, 6])
def test_hosts_together_read_the_global_batch(numbers, num_hosts):
    dataset = numbers(train=500)
    whole = pipeline.train_batch(dataset, seed=2, step=9, **TRAIN)
    share = 6 // num_hosts
    parts = [
        pipeline.train_batch(
            dataset, seed=2, step=9, **TRAIN, rows=slice(h * share, (h + 1) * share)
        )
        for h in range(num_hosts)
    ]
    assert {part.shape for part in parts} == {(share, 8)}
    assert np.array_equal(np.concatenate(parts), whole)


def test_train_batches_are_train_batch_of_seed_and_step(numbers):
    dataset = numbers(train=500)
    settings = TRAIN | {'rows': slice(2, 5)}
    with pipeline.TrainBatches(
        dataset, seeds=(4, 0, 4), start_step=11, num_steps=8, steps_per_read=3, **settings
    ) as batches:
        reads = list(batches)
    assert [r.shape for r in reads] == [(3, 3, 3, 8), (3, 3, 3, 8), (2, 3, 3, 8)]
    tokens_CXBT1 = np.concatenate(reads)
    assert tokens_CXBT1.dtype == np.int32
    for c, step in enumerate(range(11, 19)):
        for x, seed in enumerate((4, 0, 4)):
            expected = pipeline.train_batch(dataset, seed=seed, step=step, **settings)
            assert np.array_equal(tokens_CXBT1[c, x], expected)


def test_train_batches_refuses_before_reading(numbers):
    with pytest.raises(ConfigError, match='length=500 is too long'):
        pipeline.TrainBatches(numbers(train=500), seeds=(0,), num_steps=1, batch_size=1, length=500)
    with pytest.raises(ConfigError, match='seed=-1 is out of range'):
        pipeline.TrainBatches(numbers(train=500), seeds=(0, -1), num_steps=1, **TRAIN)


@pytest.mark.parametrize(
    ('change', 'says'),
    [
        ({'length': 0}, 'length=0 is too small'),
        ({'length': 30}, "length=30 is too long for split 'train' .* 30 tokens; .* at most 29"),
        ({'batch_size': 0}, 'batch_size=0 is too small'),
        ({'rows': slice(6, 9)}, r'rows=slice\(6, 9, None\) selects no row of a batch of 6'),
        ({'seed': 2**32}, 'seed=4294967296 is out of range'),
        ({'step': -1}, 'step=-1 is negative'),
    ],
)
def test_bad_settings_are_one_sentence(numbers, change, says):
    with pytest.raises(ConfigError, match=says) as caught:
        pipeline.train_batch(numbers(train=30), **{'seed': 0, 'step': 0} | TRAIN | change)
    assert '\n' not in str(caught.value)


def test_the_longest_length_reads_the_one_window(numbers):
    dataset = numbers(train=30)
    batch = pipeline.train_batch(dataset, seed=0, step=0, batch_size=2, length=29)
    assert batch.tolist() == [list(range(30))] * 2


def test_eval_predicts_every_token_once_and_pads_the_last_batch(numbers):
    # 10 windows of 7, 3 tokens over.
    dataset = numbers(validation=74)
    batches = list(pipeline.eval_batches(dataset, 'validation', batch_size=4, length=7))
    assert len(batches) == 3
    targets = []
    for batch in batches:
        assert {name: a.shape for name, a in batch.items()} == {
            'tokens_BT': (4, 7),
            'targets_BT': (4, 7),
            'weights_BT': (4, 7),
        }
        assert [a.dtype.name for a in batch.values()] == ['int32', 'int32', 'float32']
        real = batch['weights_BT'] == 1
        assert (real | (batch['weights_BT'] == 0)).all()
        assert (batch['targets_BT'] - batch['tokens_BT'] == real).all()
        targets += batch['targets_BT'][real].tolist()
    assert targets == list(range(1, 71))
    assert pipeline.eval_tokens(dataset, 'validation', length=7) == 70
    assert batches[-1]['weights_BT'].sum() == 2 * 7


def test_the_last_token_of_a_split_starts_no_window(numbers):
    # 70 tokens are 69 targets: 9 windows of 7, not 10.
    dataset = numbers(train=70, validation=70)
    assert pipeline.num_windows(dataset, 'train', 7) == 9
    assert pipeline.eval_tokens(dataset, 'validation', length=7) == 63
    (batch,) = pipeline.eval_batches(dataset, 'validation', batch_size=9, length=7)
    assert batch['targets_BT'].max() == 63


def test_eval_subset_is_evenly_spaced(numbers):
    dataset = numbers(validation=701)
    (batch,) = pipeline.eval_batches(dataset, 'validation', batch_size=8, length=7, max_sequences=8)
    starts = batch['tokens_BT'][:, 0] // 7
    assert starts.tolist() == [0, 12, 25, 37, 50, 62, 75, 87]
    assert pipeline.eval_tokens(dataset, 'validation', length=7, max_sequences=8) == 56
    assert pipeline.eval_tokens(dataset, 'validation', length=7, max_sequences=999) == 700


def test_eval_rows_of_hosts_make_the_global_batches(numbers):
    dataset = numbers(validation=74)
    settings = {'batch_size': 4, 'length': 7}
    whole = list(pipeline.eval_batches(dataset, 'validation', **settings))
    parts = [
        list(pipeline.eval_batches(dataset, 'validation', **settings, rows=rows))
        for rows in (slice(0, 2), slice(2, 4))
    ]
    for batch, first, second in zip(whole, *parts, strict=True):
        for name, array in batch.items():
            assert np.array_equal(np.concatenate([first[name], second[name]]), array)


def test_eval_refuses_at_the_call(numbers):
    dataset = numbers(validation=74)
    for change, says in (
        ({'batch_size': 0}, 'batch_size=0'),
        ({'length': 74}, 'length=74 is too long'),
        ({'max_sequences': 0}, 'max_sequences=0 is too small'),
        ({'split': 'train'}, "split='train' is not in dataset 'numbers'; valid: 'validation'"),
    ):
        settings = {'split': 'validation', 'batch_size': 4, 'length': 7} | change
        with pytest.raises(ConfigError, match=says):
            pipeline.eval_batches(dataset, **settings)


def test_load_names_the_known_datasets():
    with pytest.raises(ConfigError, match="data.name='c4' is not a known dataset; valid: 'stdlib'"):
        pipeline.load('c4')


def test_load_says_that_a_directory_cannot_be_written(tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(ConfigError, match='cannot be written'):
        pipeline.load('stdlib', tmp_path / 'file' / 'below')


def test_load_uses_the_environment(stdlib, data_dir, monkeypatch):
    monkeypatch.setenv('QKATTN_DATA', str(data_dir))
    assert pipeline.load('stdlib').identity() == stdlib.identity()


def test_stdlib_reads_as_source_code(stdlib):
    batch = pipeline.train_batch(stdlib, seed=0, step=0, batch_size=64, length=256)
    assert 'self' in stdlib.tokenizer.decode(batch.ravel())
    assert 4.0 < stdlib.unigram_bits_per_byte('train') < 5.0
    assert pipeline.eval_tokens(stdlib, 'validation', length=128) > 100_000
