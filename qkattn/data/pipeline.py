"""Batches of rows: train_batch = f(rows, seed, step), eval_batches in a fixed order."""

import functools
from collections.abc import Iterator, Sequence

import grain
import numpy as np

from qkattn.data.prefetch import StepBatches
from qkattn.data.tasks.rows import Batch, Rows
from qkattn.errors import ConfigError

# Of the rows of a global batch, those that this host reads; None is all.
Part = slice | np.ndarray | None


def train_batch(rows: Rows, *, seed: int, step: int, batch_size: int, part: Part = None) -> Batch:
    """The training batch of a step, arrays [rows, ...].

    Row r of step k is element k * batch_size + r of an endless sequence that visits every row of
    the train split once per epoch, in an order drawn from (seed, epoch).

    Args:
      seed: in [0, 2**32).
      batch_size: rows of the global batch.
      part: the rows of the global batch that this host reads; None is all.

    Raises:
      ConfigError: for a value out of range, and for a train split without rows.
    """
    if not 0 <= seed < 2**32:
        raise ConfigError(f'seed={seed!r} is out of range; it must be in [0, 2**32).')
    if step < 0:
        raise ConfigError(f'step={step!r} is negative; it must be at least 0.')
    places_B = int(step) * batch_size + chosen(batch_size, part)
    order = _train_order(rows.count('train'), int(seed))
    rows_B = np.array([order[place] for place in places_B.tolist()])
    draws_B2 = np.stack([np.full_like(places_B, seed), places_B], axis=1).astype(np.uint64)
    return rows.read('train', rows_B, draws_B2)


class TrainBatches(StepBatches):
    """Iterates over the training batches of a stack of trials; one thread reads ahead.

    Yields arrays [steps_per_read, trials, rows, ...] for the `num_steps` steps from `start_step`
    on; [c, x] is `train_batch` of seeds[x]. The last read is shorter where `steps_per_read` does
    not divide `num_steps`. Close it when done, or use it in a `with` statement.

    Raises:
      ConfigError: on creation, for a value out of range and for a train split without rows.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        seeds: Sequence[int],
        batch_size: int,
        start_step: int = 0,
        num_steps: int,
        steps_per_read: int = 1,
        part: Part = None,
    ):
        def read(seed: int, step: int) -> Batch:
            return train_batch(rows, seed=seed, step=step, batch_size=batch_size, part=part)

        # Raises errors in the settings here instead of in the thread.
        for seed in seeds:
            read(seed, 0)
        super().__init__(
            read,
            seeds=seeds,
            start_step=start_step,
            num_steps=num_steps,
            steps_per_read=steps_per_read,
        )


def eval_batches(
    rows: Rows,
    split: str,
    *,
    batch_size: int,
    max_rows: int | None = None,
    part: Part = None,
) -> Iterator[Batch]:
    """Batches over a split in a fixed order; every row once.

    Rows that pad the last batch to `batch_size` hold zeros, loss weights included.

    Args:
      max_rows: reads that many rows, evenly spaced over the split; None is all.
      part: the rows of each global batch that this host reads; None is all.

    Raises:
      ConfigError: at the call, for a value out of range, an unknown split and one without rows.
    """
    wanted = chosen(batch_size, part)
    evaluated = eval_rows(rows, split, max_rows)

    def batches() -> Iterator[Batch]:
        for start in range(0, len(evaluated), batch_size):
            real_B = start + wanted < len(evaluated)
            rows_B = evaluated[np.where(real_B, start + wanted, 0)]
            draws_B2 = np.stack([np.zeros_like(rows_B), rows_B], axis=1).astype(np.uint64)
            yield {
                name: np.where(real_B[(slice(None),) + (None,) * (array.ndim - 1)], array, 0)
                for name, array in rows.read(split, rows_B, draws_B2).items()
            }

    return batches()


def eval_rows(rows: Rows, split: str, max_rows: int | None = None) -> np.ndarray:
    """Numbers of the rows that `eval_batches` reads."""
    available = rows.count(split)
    if max_rows is None:
        return np.arange(available)
    if max_rows < 1:
        raise ConfigError(
            f'max_rows={max_rows!r} is too small; it must be at least 1, or None for all.'
        )
    chosen = min(max_rows, available)
    return np.arange(chosen) * available // chosen


def chosen(batch_size: int, part: Part) -> np.ndarray:
    """The numbers of the rows of a batch that `part` selects."""
    if batch_size < 1:
        raise ConfigError(f'batch_size={batch_size!r} is too small; it must be at least 1.')
    numbers = np.arange(batch_size)[... if part is None else part]
    if not numbers.size:
        raise ConfigError(f'part={part!r} selects no row of a batch of {batch_size}.')
    return numbers


# `MapDataset.seed`, not `shuffle(seed=...)`: the latter adds the epoch to the seed, so that seed 0
# in its second epoch would repeat the first epoch of seed 1.
@functools.lru_cache(maxsize=4096)
def _train_order(num_rows: int, seed: int) -> grain.MapDataset:
    return grain.MapDataset.range(num_rows).seed(seed).shuffle().repeat()
