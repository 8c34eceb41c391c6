"""Batches by configuration are those of a run."""

import itertools

import numpy as np

from qkattn.data.batches import batches
from qkattn.data.pipeline import train_batch
from qkattn.data.tasks.task_registry import rows_of


def test_training_batches_go_on_and_an_evaluation_ends(tiny):
    config = tiny(data={'eval_sequences': 11})
    rows = rows_of(config)
    for step, batch in enumerate(itertools.islice(batches(config, seed=3), 3)):
        want = train_batch(rows, seed=3, step=step, batch_size=8)
        assert batch.keys() == want.keys()
        for name, array in batch.items():
            np.testing.assert_array_equal(array, want[name])
    first, second = batches(config, 'validation')
    assert first['tokens_BT'].shape == (8, 16)
    assert second['loss_weights_BT'].any(axis=1).tolist() == [True] * 3 + [False] * 5
