import numpy as np
import pytest

from qkattn.data import pipeline
from qkattn.data.tasks.language import LanguageRows
from qkattn.errors import ConfigError

TRAIN = {'batch_size': 6}


def windows(dataset):
    return LanguageRows(dataset, 7)


def first_tokens(dataset, seed, steps, **settings):
    """First token of every row of consecutive steps, one after another."""
    return np.concatenate(
        [
            pipeline.train_batch(windows(dataset), seed=seed, step=step, **(TRAIN | settings))[
                'tokens_BT'
            ][:, 0]
            for step in steps
        ]
    )


def test_epochs_visit_every_window_once_each_in_an_order_of_its_own(numbers):
    # 7 * 60 + 1 tokens: 60 windows, 10 batches an epoch.
    dataset = numbers(train=421)
    epochs = [
        tuple(first_tokens(dataset, seed, range(10 * e, 10 * e + 10)).tolist())
        for seed in range(4)
        for e in range(3)
    ]
    for epoch in epochs:
        assert sorted(epoch) == list(range(0, 420, 7)) != list(epoch)
    assert len(set(epochs)) == len(epochs)


def test_epochs_follow_each_other_without_a_gap(numbers):
    # 59 windows: batches of 6 straddle the epochs.
    order = first_tokens(numbers(train=414), 0, range(59)).reshape(6, 59)
    assert (np.sort(order, axis=1) == np.arange(0, 413, 7)).all()


def test_order_is_the_same_for_ever(numbers):
    # Written down, so that a library that shuffles differently does not go unnoticed.
    order = [84, 364, 175, 357, 413, 399, 189, 147, 336, 154, 231, 210]
    assert first_tokens(numbers(train=421), 5, range(2)).tolist() == order


@pytest.mark.parametrize('num_hosts', [1, 2, 3, 6])
def test_hosts_together_read_the_global_batches(numbers, num_hosts):
    rows = windows(numbers(train=500, validation=74))
    share = 6 // num_hosts

    def batches(part):
        yield pipeline.train_batch(rows, seed=2, step=9, batch_size=6, part=part)
        yield from pipeline.eval_batches(rows, 'validation', batch_size=6, part=part)

    whole = batches(None)
    parts = [batches(slice(h * share, (h + 1) * share)) for h in range(num_hosts)]
    for batch, *shares in zip(whole, *parts, strict=True):
        for name, array in batch.items():
            assert {part[name].shape for part in shares} == {(share, 7)}
            assert np.array_equal(np.concatenate([part[name] for part in shares]), array)


def test_train_batches_are_train_batch_of_seed_and_step(numbers):
    rows = windows(numbers(train=500))
    settings = TRAIN | {'part': slice(2, 5)}
    with pipeline.TrainBatches(
        rows, seeds=(4, 0, 4), start_step=11, num_steps=8, steps_per_read=3, **settings
    ) as batches:
        reads = [batch['tokens_BT'] for batch in batches]
    assert [r.shape for r in reads] == [(3, 3, 3, 7), (3, 3, 3, 7), (2, 3, 3, 7)]
    tokens_CXBT = np.concatenate(reads)
    assert tokens_CXBT.dtype == np.int32
    for c, step in enumerate(range(11, 19)):
        for x, seed in enumerate((4, 0, 4)):
            expected = pipeline.train_batch(rows, seed=seed, step=step, **settings)
            assert np.array_equal(tokens_CXBT[c, x], expected['tokens_BT'])


class Draws:
    """Rows that tell what they were asked for."""

    splits = ('train', 'validation')

    def count(self, split):
        return 5

    def read(self, split, rows_B, draws_B2):
        return {'rows': rows_B[:, None], 'draws': draws_B2}


def test_a_row_is_told_its_seed_and_its_place_in_the_endless_sequence():
    batch = pipeline.train_batch(Draws(), seed=7, step=3, batch_size=4)
    assert batch['draws'].tolist() == [[7, 12], [7, 13], [7, 14], [7, 15]]
    assert batch['draws'].dtype == np.uint64
    part = pipeline.train_batch(Draws(), seed=7, step=3, batch_size=4, part=slice(2, 4))
    assert part['draws'].tolist() == [[7, 14], [7, 15]]
    (batch,) = pipeline.eval_batches(Draws(), 'validation', batch_size=5)
    assert batch['draws'].tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [0, 4]]


def test_train_batches_refuses_before_reading(numbers):
    rows = LanguageRows(numbers(train=500), 500)
    with pytest.raises(ConfigError, match='model.context=500 is too long'):
        pipeline.TrainBatches(rows, seeds=(0,), num_steps=1, batch_size=1)
    with pytest.raises(ConfigError, match='seed=-1 is out of range'):
        pipeline.TrainBatches(windows(numbers(train=500)), seeds=(0, -1), num_steps=1, **TRAIN)


@pytest.mark.parametrize(
    ('change', 'says'),
    [
        ({'batch_size': 0}, 'batch_size=0 is too small'),
        ({'part': slice(6, 9)}, r'part=slice\(6, 9, None\) selects no row of a batch of 6'),
        ({'seed': 2**32}, 'seed=4294967296 is out of range'),
        ({'step': -1}, 'step=-1 is negative'),
    ],
)
def test_bad_settings_are_one_sentence(numbers, change, says):
    with pytest.raises(ConfigError, match=says) as caught:
        pipeline.train_batch(windows(numbers(train=30)), **{'seed': 0, 'step': 0} | TRAIN | change)
    assert '\n' not in str(caught.value)


def test_eval_predicts_every_token_once_and_pads_the_last_batch(numbers):
    # 10 windows of 7, 3 tokens over.
    rows = windows(numbers(validation=74))
    batches = list(pipeline.eval_batches(rows, 'validation', batch_size=4))
    assert len(batches) == 3
    targets = []
    for batch in batches:
        assert {name: a.shape for name, a in batch.items()} == {
            'tokens_BT': (4, 7),
            'targets_BT': (4, 7),
            'loss_weights_BT': (4, 7),
        }
        assert [a.dtype.name for a in batch.values()] == ['int32', 'int32', 'float32']
        real = batch['loss_weights_BT'] == 1
        assert (real | (batch['loss_weights_BT'] == 0)).all()
        assert (batch['targets_BT'] - batch['tokens_BT'] == real).all()
        targets += batch['targets_BT'][real].tolist()
    assert targets == list(range(1, 71))
    assert batches[-1]['loss_weights_BT'].sum() == 2 * 7


def test_eval_subset_is_evenly_spaced(numbers):
    rows = windows(numbers(validation=701))
    (batch,) = pipeline.eval_batches(rows, 'validation', batch_size=8, max_rows=8)
    starts = batch['tokens_BT'][:, 0] // 7
    assert starts.tolist() == [0, 12, 25, 37, 50, 62, 75, 87]
    assert len(pipeline.eval_rows(rows, 'validation', 999)) == 100


def test_eval_refuses_at_the_call(numbers):
    rows = windows(numbers(validation=74))
    for change, says in (
        ({'batch_size': 0}, 'batch_size=0'),
        ({'max_rows': 0}, 'max_rows=0 is too small'),
        ({'split': 'train'}, "split='train' is not in dataset 'numbers'; valid: 'validation'"),
    ):
        settings = {'split': 'validation', 'batch_size': 4} | change
        with pytest.raises(ConfigError, match=says):
            pipeline.eval_batches(rows, **settings)
