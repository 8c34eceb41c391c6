"""Batches of rows: train_batch = f(rows, seed, step), evaluations in a fixed order."""

import contextlib
import functools
import itertools
from collections.abc import Generator, Iterator, Sequence

import grain
import numpy as np

from qkattn.config import Config, DataConfig
from qkattn.data.tasks.rows import Batch, Rows
from qkattn.data.tasks.task_registry import rows_of
from qkattn.errors import ConfigError
from qkattn.stats.inference import MIN_DOCUMENTS

Part = slice | np.ndarray | None  # the rows of a global batch that this host reads; None is all
MAX_CLUSTERS = 128  # of rows without documents, which are independent: more would say little more


def batches(config: Config, split: str = 'train', *, seed: int = 0) -> Iterator[Batch]:
    """The batches that a run with this configuration reads, arrays [train.batch_size, length].

    'train' has no end and is the data of the trial with this seed; 'validation' and 'test' are the
    data.eval_sequences rows of an evaluation, once. ConfigError as `rows_of`, `train_batch` and
    `eval_batches`.
    """
    rows = rows_of(config)
    size = config.train.batch_size
    if split == 'train':
        steps = itertools.count()
        return (train_batch(rows, seed=seed, step=step, batch_size=size) for step in steps)
    return eval_batches(rows, split, batch_size=size, max_rows=config.data.eval_sequences)


def train_batch(rows: Rows, *, seed: int, step: int, batch_size: int, part: Part = None) -> Batch:
    """The training batch of a step, arrays [rows, ...]; `batch_size` is that of the global batch.

    Row r of step k is element k * batch_size + r of an endless sequence that visits every row of
    the train split once per epoch, in an order drawn from (seed, epoch). ConfigError if the seed is
    not in [0, 2**32), or the part or the train split has no rows.
    """
    if not 0 <= seed < 2**32:
        raise ConfigError(f'seed={seed!r} is out of range; it must be in [0, 2**32).')
    positions_B = int(step) * batch_size + chosen(batch_size, part)
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
        by_seed = _stacked([read_seed(seed, step) for seed in unique_seeds.tolist()])
        return {name: array[seed_of_trial] for name, array in by_seed.items()}

    def read(number: int) -> Batch:
        first = number * steps_per_read
        return _stacked([read_step(step) for step in steps[first : first + steps_per_read]])

    for seed in unique_seeds.tolist():  # raises errors in the settings here, not in the thread
        read_seed(seed, 0)
    reads = grain.MapDataset.range(-(-num_steps // steps_per_read)).map(read)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)

    def ahead() -> Generator[Batch]:
        with contextlib.closing(iter(reads.to_iter_dataset(options))) as iterator:
            yield from iterator

    return ahead()


def _stacked(parts: list[Batch]) -> Batch:
    return {name: np.stack([part[name] for part in parts]) for name in parts[0]}


def eval_batches(
    rows: Rows, split: str, *, batch_size: int, max_rows: int | None = None, part: Part = None
) -> Iterator[Batch]:
    """Batches over a split in a fixed order; every row once, or `max_rows` evenly spaced ones.

    Rows that pad the last batch to `batch_size` hold zeros, loss weights included. ConfigError at
    the call, for an unknown split and one without rows.
    """
    numbers_B = chosen(batch_size, part)
    evaluated_R = eval_rows(rows, split, max_rows)

    def batches() -> Iterator[Batch]:
        for start in range(0, len(evaluated_R), batch_size):
            real_B = start + numbers_B < len(evaluated_R)
            rows_B = evaluated_R[np.where(real_B, start + numbers_B, 0)]
            draws_B2 = np.stack([np.zeros_like(rows_B), rows_B], axis=1).astype(np.uint64)
            yield {
                name: np.where(real_B[(slice(None),) + (None,) * (array.ndim - 1)], array, 0)
                for name, array in rows.read(split, rows_B, draws_B2).items()
            }

    return batches()


def eval_rows(rows: Rows, split: str, max_rows: int | None = None) -> np.ndarray:
    """Numbers of the rows that `eval_batches` reads."""
    available = rows.count(split)
    count = available if max_rows is None else min(max_rows, available)
    return np.arange(count) * available // count


def chosen(batch_size: int, part: Part) -> np.ndarray:
    """The numbers of the rows of a batch that `part` selects."""
    numbers = np.arange(batch_size)[... if part is None else part]
    if not numbers.size:
        raise ConfigError(f'part={part!r} selects no row of a batch of {batch_size}.')
    return numbers


def clusters(rows: Rows, split: str, max_rows: int | None = None) -> tuple[list[str], np.ndarray]:
    """Names of evaluation clusters, and the cluster of each row that `eval_batches` reads.

    A cluster is a document, whose rows depend on each other. Rows of a task without documents are
    dealt out in turn to at most MAX_CLUSTERS clusters, '0', '1' and so on.
    """
    chosen_R = eval_rows(rows, split, max_rows)
    documents = rows.documents(split)
    if documents is not None:
        names, document_R = documents
        return names, document_R[chosen_R]
    count = min(MAX_CLUSTERS, len(chosen_R))
    return [str(number) for number in range(count)], np.arange(len(chosen_R)) % count


def check_documents(rows: Rows, data: DataConfig, minimum: int = MIN_DOCUMENTS) -> None:
    """Raises ConfigError without a test split, or if an evaluation reads too few documents."""
    name = f'data.name={data.name!r}{"" if data.path is None else f", data.path={data.path!r}"}'
    for split in rows.splits[1:]:
        documents = rows.documents(split)
        number = data.eval_sequences
        evaluated = len(np.unique(clusters(rows, split, number)[1]))
        if documents is not None and evaluated < minimum:
            total = len(np.unique(documents[1]))
            remedy = (
                "choose a corpus of more documents, such as 'stdlib', 'packages', or 'text' with a "
                'folder of files per split'
            )
            if number is not None and total >= minimum:
                while len(np.unique(clusters(rows, split, number)[1])) < minimum:
                    number *= 2
                remedy = f'raise it to {number}'
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
