"""Batches of rows: train_batch = f(rows, seed, step), evaluations in a fixed order."""

import contextlib
import functools
from collections.abc import Generator, Iterator, Sequence

import grain
import numpy as np

from qkattn.config import DataConfig
from qkattn.data.tasks.rows import Batch, Rows
from qkattn.errors import ConfigError
from qkattn.stats.inference import MIN_DOCUMENTS

Part = slice | np.ndarray | None  # the rows of a global batch that this host reads; None is all
MAX_CLUSTERS = 128  # of rows without documents, which are independent: more would say little more


def train_batch(rows: Rows, *, seed: int, step: int, batch_size: int, part: Part = None) -> Batch:
    """The training batch of a step, arrays [rows, ...]; `batch_size` is that of the global batch.

    Row r of step k is element k * batch_size + r of an endless sequence that visits every row of
    the train split once per epoch, in an order drawn from (seed, epoch). ConfigError if the seed is
    not in [0, 2**32), or the part or the train split has no rows.
    """
    if not 0 <= seed < 2**32:
        raise ConfigError(f'seed={seed!r} is out of range; it must be in [0, 2**32).')
    positions_B = int(step) * batch_size + selected(batch_size, part)
    order = _train_order(rows.count('train'), int(seed))
    rows_B = np.array([order[position] for position in positions_B.tolist()])
    draws_B2 = np.stack([np.full_like(positions_B, seed), positions_B], axis=1).astype(np.uint64)
    return rows.read('train', rows_B, draws_B2)


# `MapDataset.seed`, not `shuffle(seed=...)`: the latter adds the epoch to the seed, so that seed 0
# in its second epoch would repeat the first epoch of seed 1.
@functools.lru_cache(maxsize=4096)
def _train_order(num_rows: int, seed: int) -> grain.MapDataset:
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
    """The training batches of a stack of trials; one thread reads ahead until it is closed.

    Yields arrays [steps_per_read, trials, rows, ...] for the `num_steps` steps from `start_step`
    on; [c, x] is `train_batch` of seeds[x], read once for trials of one seed. The last read is
    shorter where `steps_per_read` does not divide `num_steps`. There is no state but the step.
    ConfigError at the call, as `train_batch`.
    """
    unique_seeds, seed_of_trial = np.unique(np.asarray(seeds), return_inverse=True)
    steps = range(start_step, start_step + num_steps)

    def read_seed(seed: int, step: int) -> Batch:
        return train_batch(rows, seed=seed, step=step, batch_size=batch_size, part=part)

    def read_step(step: int) -> Batch:
        """Arrays [trials, rows, ...]."""
        by_seed = _stacked([read_seed(seed, step) for seed in unique_seeds.tolist()])
        return {name: array[seed_of_trial] for name, array in by_seed.items()}

    def read_steps(number: int) -> Batch:
        """Arrays [steps_per_read, trials, rows, ...] of the read with this number."""
        first = number * steps_per_read
        return _stacked([read_step(step) for step in steps[first : first + steps_per_read]])

    for seed in unique_seeds.tolist():  # raises errors in the settings here, not in the thread
        read_seed(seed, 0)
    num_reads = -(-num_steps // steps_per_read)
    reads = grain.MapDataset.range(num_reads).map(read_steps)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)

    def read_ahead() -> Generator[Batch]:
        with contextlib.closing(iter(reads.to_iter_dataset(options))) as iterator:
            yield from iterator

    return read_ahead()


def _stacked(parts: list[Batch]) -> Batch:
    """The batches as one, with a new first axis."""
    return {name: np.stack([part[name] for part in parts]) for name in parts[0]}


def eval_batches(
    rows: Rows, split: str, *, batch_size: int, max_rows: int | None = None, part: Part = None
) -> Iterator[Batch]:
    """Batches over a split in a fixed order; every row once, or `max_rows` evenly spaced ones.

    Rows that pad the last batch to `batch_size` hold zeros, loss weights included. ConfigError at
    the call, for an unknown split and one without rows.
    """
    numbers_B = selected(batch_size, part)
    evaluated_R = eval_rows(rows, split, max_rows)

    def batches() -> Iterator[Batch]:
        for start in range(0, len(evaluated_R), batch_size):
            positions_B = start + numbers_B
            is_real_B = positions_B < len(evaluated_R)
            rows_B = evaluated_R[np.where(is_real_B, positions_B, 0)]
            draws_B2 = np.stack([np.zeros_like(rows_B), rows_B], axis=1).astype(np.uint64)
            batch = {}
            for name, array in rows.read(split, rows_B, draws_B2).items():
                trailing_axes = (1,) * (array.ndim - 1)
                batch[name] = np.where(is_real_B.reshape(-1, *trailing_axes), array, 0)
            yield batch

    return batches()


def eval_rows(rows: Rows, split: str, max_rows: int | None = None) -> np.ndarray:
    """Numbers of the rows that `eval_batches` reads."""
    available = rows.count(split)
    count = available if max_rows is None else min(max_rows, available)
    return np.arange(count) * available // count


def selected(batch_size: int, part: Part) -> np.ndarray:
    """The numbers of the rows of a batch that `part` selects; ConfigError if it selects none."""
    numbers_B = np.arange(batch_size)
    if part is not None:
        numbers_B = numbers_B[part]
    if not numbers_B.size:
        raise ConfigError(f'part={part!r} selects no row of a batch of {batch_size}.')
    return numbers_B


def clusters(rows: Rows, split: str, max_rows: int | None = None) -> tuple[list[str], np.ndarray]:
    """Names of evaluation clusters, and the cluster of each row that `eval_batches` reads.

    A cluster is a document, whose rows depend on each other. Rows of a task without documents are
    dealt out in turn to at most MAX_CLUSTERS clusters, '0', '1' and so on.
    """
    evaluated_R = eval_rows(rows, split, max_rows)
    documents = rows.documents(split)
    if documents is not None:
        names, document_R = documents
        return names, document_R[evaluated_R]
    num_clusters = min(MAX_CLUSTERS, len(evaluated_R))
    names = [str(number) for number in range(num_clusters)]
    return names, np.arange(len(evaluated_R)) % num_clusters


def check_documents(rows: Rows, data: DataConfig, minimum: int = MIN_DOCUMENTS) -> None:
    """Raises ConfigError without a test split, or if an evaluation reads too few documents.

    `data` are the settings of the rows, for the message.
    """
    name = f'data.name={data.name!r}'
    if data.path is not None:
        name += f', data.path={data.path!r}'

    def num_evaluated(split: str, max_rows: int | None) -> int:
        """The number of documents that an evaluation of so many rows reads."""
        _, cluster_R = clusters(rows, split, max_rows)
        return len(np.unique(cluster_R))

    for split in rows.splits[1:]:
        documents = rows.documents(split)
        if documents is None:
            continue
        evaluated = num_evaluated(split, data.eval_sequences)
        if evaluated >= minimum:
            continue
        _, document_R = documents
        total = len(np.unique(document_R))
        remedy = (
            "choose a corpus of more documents, such as 'stdlib' or 'text' with a folder of files "
            'per split, or cut its texts with data.documents'
        )
        sequences = data.eval_sequences
        if sequences is not None and total >= minimum:
            while num_evaluated(split, sequences) < minimum:
                sequences *= 2
            remedy = f'raise it to {sequences}'
        raise ConfigError(
            f'data.eval_sequences={data.eval_sequences} evaluates {evaluated} of {total} '
            f'documents in split {split!r} of {name}, but a study that decides between '
            f'variants needs at least {minimum}; {remedy}.'
        )
    if 'test' not in rows.splits:
        raise ConfigError(
            f'{name} has no test split, on which a study decides between variants; set '
            'data.carve_test=True to carve a tenth of its train split.'
        )
