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
# The most evaluation clusters of rows without documents. Such rows are independent, so more
# clusters would hardly narrow an interval.
MAX_CLUSTERS = 128


def train_batch(rows: Rows, *, seed: int, step: int, batch_size: int, part: Part = None) -> Batch:
    """Reads the training batch of a step.

    Training reads all rows of the train split in a random order, then again in another random
    order, and so on. Each step reads the next `batch_size` rows of this endless sequence.

    Args:
        rows: The task.
        seed: The seed of the trial, in [0, 2**32).
        step: The index of the step, from 0.
        batch_size: Number of rows in the global batch.
        part: The rows of the global batch to read; None for all.

    Returns:
        Arrays [rows, ...] by name.

    Raises:
        ConfigError: The seed is out of range, or the part or the train split has no rows.
    """
    if not 0 <= seed < 2**32:
        raise ConfigError(f'seed={seed!r} is out of range; it must be in [0, 2**32).')
    index_in_batch_B = rows_of_part(batch_size, part)
    first_position = int(step) * batch_size
    position_B = first_position + index_in_batch_B

    # The row at each position of the endless sequence. grain looks up one position at a time.
    row_sequence = _train_order(rows.count('train'), int(seed))
    row_B = np.array([row_sequence[position] for position in position_B.tolist()])

    # The random numbers of a row depend on the pair (seed, position).
    seed_B = np.full_like(position_B, seed)
    seed_pair_B2 = np.stack([seed_B, position_B], axis=1).astype(np.uint64)
    return rows.read('train', row_B, seed_pair_B2)


@functools.lru_cache(maxsize=4096)
def _train_order(num_rows: int, seed: int) -> grain.MapDataset:
    """Returns the endless sequence of row indices in training with a seed."""
    # With `shuffle(seed=...)`, epoch 1 of seed 0 would repeat epoch 0 of seed 1.
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
    """Reads the training batches of several trials in a background thread.

    Trials with equal seeds share their reads. Closing the generator stops the thread.

    Args:
        rows: The task.
        seeds: The seed of each trial.
        batch_size: Number of rows in the global batch.
        start_step: The first step to read.
        num_steps: Number of steps to read.
        steps_per_read: Number of steps in an item. The last item may be shorter.
        part: The rows of the global batch to read; None for all.

    Returns:
        A generator of items, arrays [steps, trials, rows, ...] by name.

    Raises:
        ConfigError: At the call, as `train_batch`.
    """
    unique_seeds, seed_index_of_trial = np.unique(np.asarray(seeds), return_inverse=True)
    steps = range(start_step, start_step + num_steps)

    def read_seed(seed: int, step: int) -> Batch:
        return train_batch(rows, seed=seed, step=step, batch_size=batch_size, part=part)

    def read_step(step: int) -> Batch:
        """Returns arrays [trials, rows, ...]."""
        by_seed = _stack([read_seed(seed, step) for seed in unique_seeds.tolist()])
        return {name: array[seed_index_of_trial] for name, array in by_seed.items()}

    def read_item(item: int) -> Batch:
        """Returns arrays [steps, trials, rows, ...]."""
        first = item * steps_per_read
        steps_of_item = steps[first : first + steps_per_read]
        return _stack([read_step(step) for step in steps_of_item])

    # Raise errors in the settings here instead of in the thread.
    for seed in unique_seeds.tolist():
        read_seed(seed, step=0)

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

    The last batch is padded to `batch_size` with rows of zeros, whose loss weights are 0.

    Args:
        rows: The task.
        split: The split to evaluate on.
        batch_size: Number of rows in the global batch.
        max_rows: Evaluates at most this number of rows, evenly spaced; None for all.
        part: The rows of each global batch to read; None for all.

    Raises:
        ConfigError: At the call, if the split is unknown or has no rows.
    """
    index_in_batch_B = rows_of_part(batch_size, part)
    row_R = eval_rows(rows, split, max_rows)
    starts = range(0, len(row_R), batch_size)
    return (_eval_batch(rows, split, row_R, start + index_in_batch_B) for start in starts)


def _eval_batch(rows: Rows, split: str, row_R: np.ndarray, position_B: np.ndarray) -> Batch:
    """Reads one batch of an evaluation.

    Args:
        rows: The task.
        row_R: The indices of all evaluated rows.
        position_B: The position in `row_R` of each row of the batch. Positions beyond the end give
            rows of zeros.
    """
    is_real_B = position_B < len(row_R)
    readable_position_B = np.where(is_real_B, position_B, 0)  # padding reads any row
    row_B = row_R[readable_position_B]
    # The random numbers of a row depend on the pair (0, row index).
    zero_B = np.zeros_like(row_B)
    seed_pair_B2 = np.stack([zero_B, row_B], axis=1).astype(np.uint64)
    batch = rows.read(split, row_B, seed_pair_B2)

    padded = {}
    for name, array in batch.items():
        other_axes = tuple(range(1, array.ndim))
        is_real = np.expand_dims(is_real_B, other_axes)  # [B, 1, ...]
        padded[name] = np.where(is_real, array, 0)
    return padded


def eval_rows(rows: Rows, split: str, max_rows: int | None = None) -> np.ndarray:
    """Returns the indices of the rows that `eval_batches` reads, evenly spaced.

    For example, 4 of 10 rows are the rows 0, 2, 5 and 7.
    """
    num_available = rows.count(split)
    num_read = num_available
    if max_rows is not None:
        num_read = min(max_rows, num_available)
    return np.arange(num_read) * num_available // num_read


def rows_of_part(batch_size: int, part: Part) -> np.ndarray:
    """Returns the indices, in [0, batch_size), of the batch rows that `part` selects.

    Raises:
        ConfigError: `part` selects no row.
    """
    index_in_batch_B = np.arange(batch_size)
    if part is not None:
        index_in_batch_B = index_in_batch_B[part]
    if not index_in_batch_B.size:
        raise ConfigError(f'part={part!r} selects no row of a batch of {batch_size}.')
    return index_in_batch_B


def clusters(rows: Rows, split: str, max_rows: int | None = None) -> tuple[list[str], np.ndarray]:
    """Assigns each row that `eval_batches` reads to a cluster, for confidence intervals.

    Rows of one document are correlated, so each document is a cluster. Rows of a task without
    documents are assigned in turn to at most MAX_CLUSTERS clusters.

    Returns:
        names: The name of each cluster. A cluster may have no rows.
        cluster_R: The index of each row's cluster in `names`.
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
    """Checks that a study can decide between variants on these data.

    Args:
        rows: The task.
        data: The settings of its data.
        minimum: The least number of documents in an evaluation, if the task has documents.

    Raises:
        ConfigError: The data have no test split, or an evaluation reads too few documents.
    """
    name = f'data.name={data.name!r}'
    if data.path is not None:
        name += f', data.path={data.path!r}'

    evaluation_splits = rows.splits[1:]  # the first split is train
    for split in evaluation_splits:
        if rows.documents(split) is None:  # all rows are independent
            continue
        num_read = _num_documents_read(rows, split, max_rows=data.eval_sequences)
        if num_read < minimum:
            total = _num_documents_read(rows, split, max_rows=None)
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
    """Returns advice for an evaluation of `num_rows` rows (None is all) with too few documents."""
    num_documents = _num_documents_read(rows, split, max_rows=None)
    if num_rows is None or num_documents < minimum:
        return (
            "choose a corpus of more documents, such as 'stdlib' or 'text' with a folder of files "
            'per split, or cut its texts with data.documents'
        )
    # Double the rows until they are from enough documents.
    while _num_documents_read(rows, split, num_rows) < minimum:
        num_rows *= 2
    return f'raise it to {num_rows}'


def _num_documents_read(rows: Rows, split: str, max_rows: int | None) -> int:
    """Counts the documents of the rows in an evaluation; `max_rows` None evaluates all rows."""
    _, document_of_row = clusters(rows, split, max_rows)
    return len(np.unique(document_of_row))
