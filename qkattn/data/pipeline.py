"""Batches of rows: a training batch is a function of (rows, seed, step), without other state."""

import contextlib
import functools
import math
from collections.abc import Generator, Iterator, Sequence

import grain
import numpy as np

from qkattn.config import DataConfig
from qkattn.data.tasks.rows import Batch, Rows
from qkattn.errors import ConfigError
from qkattn.stats.inference import MIN_DOCUMENTS

# The rows of a global batch that this host reads; None is all rows.
Part = slice | np.ndarray | None
# The most evaluation clusters of rows without documents. Such rows are independent, so that more
# clusters would hardly make an interval narrower.
MAX_CLUSTERS = 128


def train_batch(rows: Rows, *, seed: int, step: int, batch_size: int, part: Part = None) -> Batch:
    """Reads the training batch of a step, arrays [rows, ...].

    Training visits an endless sequence of rows: every row of the train split once per epoch, in a
    random order that is drawn from (seed, epoch). Row r of the batch of step k is element
    k * batch_size + r of this sequence.

    Args:
      rows: the task.
      seed: the seed of the trial, in [0, 2**32).
      step: the number of the step, from 0.
      batch_size: the number of rows of the global batch.
      part: which of these rows to read; None for all.

    Raises:
      ConfigError: the seed is out of range, or the part or the train split has no rows.
    """
    if not 0 <= seed < 2**32:
        raise ConfigError(f'seed={seed!r} is out of range; it must be in [0, 2**32).')
    rows_of_part_B = rows_of_part(batch_size, part)
    position_B = int(step) * batch_size + rows_of_part_B

    order = _train_order(rows.count('train'), int(seed))
    row_B = np.array([order[position] for position in position_B.tolist()])

    # The seed of a row's random numbers is the pair (seed of the trial, position in the sequence).
    seed_B = np.full_like(position_B, seed)
    draws_B2 = np.stack([seed_B, position_B], axis=1).astype(np.uint64)
    return rows.read('train', row_B, draws_B2)


@functools.lru_cache(maxsize=4096)
def _train_order(num_rows: int, seed: int) -> grain.MapDataset:
    """Returns the endless sequence of row numbers that training with a seed visits."""
    # `shuffle(seed=...)` would add the epoch to the seed, so that seed 0 in its second epoch would
    # repeat the first epoch of seed 1. `seed()` mixes the two.
    return grain.MapDataset.range(num_rows).seed(seed).shuffle().repeat()


def train_batches(
    rows: Rows,
    *,
    seeds: Sequence[int],
    batch_size: int,
    start_step: int = 0,
    num_steps: int,
    steps_per_read: int = 1,
    part: Part = None,
) -> Generator[Batch]:
    """Yields the training batches of a stack of trials; a thread reads ahead until it is closed.

    Each item holds arrays [steps, trials, rows, ...] of `steps_per_read` steps. Entry [c, x] is the
    `train_batch` of step c of the item for the seed of trial x. Trials with equal seeds share one
    read. The last item is shorter if `steps_per_read` does not divide `num_steps`.

    Args:
      rows: the task.
      seeds: the seed of each trial.
      batch_size: the number of rows of the global batch.
      start_step: the first step to read.
      num_steps: how many steps to read.
      steps_per_read: how many steps an item holds.
      part: which rows of the batch to read; None for all.

    Raises ConfigError as `train_batch`, at the call and not at the first item.
    """
    unique_seeds, seed_of_trial = np.unique(np.asarray(seeds), return_inverse=True)
    steps = range(start_step, start_step + num_steps)

    def read_seed(seed: int, step: int) -> Batch:
        return train_batch(rows, seed=seed, step=step, batch_size=batch_size, part=part)

    def read_step(step: int) -> Batch:
        """Arrays [trials, rows, ...] of a step."""
        by_seed = _stack([read_seed(seed, step) for seed in unique_seeds.tolist()])
        return {name: array[seed_of_trial] for name, array in by_seed.items()}

    def read_item(number: int) -> Batch:
        """Arrays [steps, trials, rows, ...] of the item with this number."""
        first = number * steps_per_read
        steps_of_item = steps[first : first + steps_per_read]
        return _stack([read_step(step) for step in steps_of_item])

    # Reading one batch raises errors in the settings here instead of in the thread.
    for seed in unique_seeds.tolist():
        read_seed(seed, 0)

    num_items = math.ceil(num_steps / steps_per_read)
    items = grain.MapDataset.range(num_items).map(read_item)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)

    def read_ahead() -> Generator[Batch]:
        with contextlib.closing(iter(items.to_iter_dataset(options))) as iterator:
            yield from iterator

    return read_ahead()


def _stack(parts: list[Batch]) -> Batch:
    """Stacks the arrays of several batches along a new first axis."""
    stacked = {}
    for name in parts[0]:
        stacked[name] = np.stack([part[name] for part in parts])
    return stacked


def eval_batches(
    rows: Rows, split: str, *, batch_size: int, max_rows: int | None = None, part: Part = None
) -> Iterator[Batch]:
    """Returns the batches of an evaluation, in a fixed order.

    They hold every row of the split once, or `max_rows` rows at equal distances. The last batch is
    padded to `batch_size` with rows of zeros. Their loss weights are 0, too, so they do not count.

    Args:
      rows: the task.
      split: the split to evaluate on.
      batch_size: the number of rows of the global batch.
      max_rows: the most rows to read; None for all.
      part: which rows of each batch this host reads; None for all.

    Raises:
      ConfigError: the split is unknown or has no rows. It is raised at the call, not at the first
        batch.
    """
    rows_of_part_B = rows_of_part(batch_size, part)
    evaluated_R = eval_rows(rows, split, max_rows)
    starts = range(0, len(evaluated_R), batch_size)
    return (_eval_batch(rows, split, evaluated_R, start + rows_of_part_B) for start in starts)


def _eval_batch(rows: Rows, split: str, evaluated_R: np.ndarray, position_B: np.ndarray) -> Batch:
    """Reads one batch of an evaluation.

    Args:
      rows: the task.
      split: the split.
      evaluated_R: the numbers of all rows of the evaluation.
      position_B: the rows of the batch, as positions in `evaluated_R`. A position beyond its end
        gives a row of zeros.
    """
    # In place of padding, the first row of the evaluation is read, and set to zero afterwards.
    is_real_B = position_B < len(evaluated_R)
    row_B = evaluated_R[np.where(is_real_B, position_B, 0)]
    # The seed of a row's random numbers is the pair (0, number of the row).
    draws_B2 = np.stack([np.zeros_like(row_B), row_B], axis=1).astype(np.uint64)

    batch = {}
    for name, array in rows.read(split, row_B, draws_B2).items():
        other_axes = tuple(range(1, array.ndim))
        is_real = np.expand_dims(is_real_B, other_axes)  # [B, 1, ...]
        batch[name] = np.where(is_real, array, 0)
    return batch


def eval_rows(rows: Rows, split: str, max_rows: int | None = None) -> np.ndarray:
    """Returns the numbers of the rows that `eval_batches` reads.

    They have equal distances: 4 of 10 rows are the rows 0, 2, 5 and 7.
    """
    available = rows.count(split)
    count = available if max_rows is None else min(max_rows, available)
    return np.arange(count) * available // count


def rows_of_part(batch_size: int, part: Part) -> np.ndarray:
    """Returns the numbers of the batch rows that `part` selects; ConfigError if there are none."""
    numbers_B = np.arange(batch_size)
    if part is not None:
        numbers_B = numbers_B[part]
    if not numbers_B.size:
        raise ConfigError(f'part={part!r} selects no row of a batch of {batch_size}.')
    return numbers_B


def clusters(rows: Rows, split: str, max_rows: int | None = None) -> tuple[list[str], np.ndarray]:
    """Assigns each row that `eval_batches` reads to a cluster, for confidence intervals.

    Rows of one document are correlated, so each document is a cluster. Rows of a task without
    documents are assigned in turn to at most MAX_CLUSTERS clusters.

    Returns:
      names: the name of each cluster. A cluster may have no rows.
      cluster_R: the index of each row's cluster in `names`.
    """
    row_R = eval_rows(rows, split, max_rows)
    documents = rows.documents(split)
    if documents is not None:
        document_names, document_of_row = documents  # for all rows of the split
        return document_names, document_of_row[row_R]

    num_clusters = min(MAX_CLUSTERS, len(row_R))
    names = [str(cluster) for cluster in range(num_clusters)]
    cluster_R = np.arange(len(row_R)) % num_clusters
    return names, cluster_R


def check_documents(rows: Rows, data: DataConfig, minimum: int = MIN_DOCUMENTS) -> None:
    """Raises ConfigError unless a study can decide between variants on these data.

    The data need a test split, and each evaluation has to read enough documents.

    Args:
      rows: the task.
      data: the settings of its data.
      minimum: the least number of documents. It does not apply to a task without documents.
    """
    name = f'data.name={data.name!r}'
    if data.path is not None:
        name += f', data.path={data.path!r}'

    evaluation_splits = rows.splits[1:]  # the first one is train
    for split in evaluation_splits:
        if rows.documents(split) is None:
            continue
        num_read = _num_documents_read(rows, split, data.eval_sequences)
        if num_read < minimum:
            total = _num_documents_read(rows, split, None)
            remedy = _remedy_for_few_documents(rows, split, data.eval_sequences, minimum)
            raise ConfigError(
                f'data.eval_sequences={data.eval_sequences} evaluates {num_read} of {total} '
                f'documents in split {split!r} of {name}, but a study that decides between '
                f'variants needs at least {minimum}; {remedy}.'
            )

    if 'test' not in rows.splits:
        raise ConfigError(
            f'{name} has no test split, on which a study decides between variants; set '
            'data.carve_test=True to carve a tenth of its train split.'
        )


def _remedy_for_few_documents(rows: Rows, split: str, num_rows: int | None, minimum: int) -> str:
    """Returns advice if an evaluation of `num_rows` rows reads fewer than `minimum` documents.

    `num_rows` is None if the evaluation reads all rows.
    """
    num_documents = _num_documents_read(rows, split, None)
    if num_rows is None or num_documents < minimum:
        return (
            "choose a corpus of more documents, such as 'stdlib' or 'text' with a folder of files "
            'per split, or cut its texts with data.documents'
        )
    # More rows read more documents. Double the rows until they suffice.
    while _num_documents_read(rows, split, num_rows) < minimum:
        num_rows *= 2
    return f'raise it to {num_rows}'


def _num_documents_read(rows: Rows, split: str, max_rows: int | None) -> int:
    """Counts the documents of which an evaluation reads a row. `max_rows` is None for all rows."""
    _, document_of_row = clusters(rows, split, max_rows)
    return len(np.unique(document_of_row))
