"""Batches by configuration, for loops of one's own; runs read ahead with `TrainBatches`."""

import itertools
from collections.abc import Iterator

from qkattn.config import Config
from qkattn.data.pipeline import eval_batches, train_batch
from qkattn.data.tasks.rows import Batch
from qkattn.data.tasks.task_registry import rows_of


def batches(config: Config, split: str = 'train', *, seed: int = 0) -> Iterator[Batch]:
    """The batches that a run with this configuration reads, arrays [train.batch_size, length].

    'train' has no end and is the data of the trial with this seed; 'validation' and 'test' are the
    data.eval_sequences rows of an evaluation, once.

    Raises:
      ConfigError: as `rows_of`, `train_batch` and `eval_batches`.
    """
    rows, size = rows_of(config), config.train.batch_size
    if split == 'train':
        steps = itertools.count()
        return (train_batch(rows, seed=seed, step=step, batch_size=size) for step in steps)
    return eval_batches(rows, split, batch_size=size, max_rows=config.data.eval_sequences)
