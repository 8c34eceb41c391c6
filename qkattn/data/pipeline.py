"""Batches of token windows: train_batch = f(dataset, seed, step), eval_batches in a fixed order.

Window w of a split holds tokens [w*length, (w+1)*length]: length + 1 tokens, of which the last is
the first of window w + 1, so every token but the first of the split is a target exactly once. The
fewer than `length` targets that fill no window are left out.
"""

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grain
import numpy as np

from qkattn.config import ConfigError
from qkattn.data import stdlib_text
from qkattn.data.files import data_root
from qkattn.data.prefetch import StepBatches
from qkattn.data.tokenizer import ByteTokenizer
from qkattn.data.tokens import TokenDataset, open_dataset


def _stdlib(data_dir: Path) -> TokenDataset:
    return open_dataset(
        data_dir,
        name='stdlib',
        version=stdlib_text.version(),
        tokenizer=ByteTokenizer(),
        documents=lambda: stdlib_text.documents(data_dir),
    )


DATASETS: dict[str, Callable[[Path], TokenDataset]] = {'stdlib': _stdlib}


def load(name: str = 'stdlib', data_dir: str | os.PathLike[str] | None = None) -> TokenDataset:
    """Opens a dataset by name; prepares it under `data_dir` the first time.

    Args:
      name: a key of DATASETS.
      data_dir: None is $QKATTN_DATA or ~/.cache/qkattn.

    Raises:
      ConfigError: for an unknown name, and for a `data_dir` that cannot be used.
    """
    if name not in DATASETS:
        known = ', '.join(map(repr, sorted(DATASETS)))
        raise ConfigError(f'data.name={name!r} is not a known dataset; valid: {known}.')
    return DATASETS[name](data_root(data_dir))


def train_batch(
    dataset: TokenDataset,
    *,
    seed: int,
    step: int,
    batch_size: int,
    length: int,
    rows: slice | None = None,
) -> np.ndarray:
    """tokens_BT1, int32 [rows, length + 1]: the training batch of a step.

    Row r of step k is element k * batch_size + r of an endless sequence that visits every window of
    the train split once per epoch, in an order drawn from (seed, epoch).

    Args:
      seed: in [0, 2**32).
      batch_size: rows of the global batch.
      length: tokens that are predicted per row.
      rows: the rows of the global batch that this host reads; None is all.

    Raises:
      ConfigError: for a value out of range, and for a train split shorter than one window.
    """
    if not 0 <= seed < 2**32:
        raise ConfigError(f'seed={seed!r} is out of range; it must be in [0, 2**32).')
    if step < 0:
        raise ConfigError(f'step={step!r} is negative; it must be at least 0.')
    wanted = _rows(batch_size, rows)
    order = _train_order(num_windows(dataset, 'train', length), int(seed))
    windows_B = np.array([order[int(step) * batch_size + row] for row in wanted])
    return _read_windows(dataset.split('train'), windows_B, length)


class TrainBatches(StepBatches):
    """Iterates over the training batches of a stack of trials; one thread reads ahead.

    Yields tokens_CXBT1, int32 [steps_per_read, trials, rows, length + 1], for the `num_steps` steps
    from `start_step` on; [c, x] is `train_batch` of seeds[x]. The last read is shorter where
    `steps_per_read` does not divide `num_steps`. Close it when done, or use it in a `with`
    statement.

    Raises:
      ConfigError: on creation, for a value out of range and for a train split shorter than one
        window.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        seeds: Sequence[int],
        batch_size: int,
        length: int,
        start_step: int = 0,
        num_steps: int,
        steps_per_read: int = 1,
        rows: slice | None = None,
    ):
        def read(seed: int, step: int) -> np.ndarray:
            return train_batch(
                dataset, seed=seed, step=step, batch_size=batch_size, length=length, rows=rows
            )

        # Reading once here moves an error of the settings from the thread to the caller.
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
    dataset: TokenDataset,
    split: str,
    *,
    batch_size: int,
    length: int,
    max_sequences: int | None = None,
    rows: slice | None = None,
) -> Iterator[dict[str, np.ndarray]]:
    """Batches over a split in a fixed order; every token is a target at most once.

    Yields dicts of tokens_BT and targets_BT, int32 [rows, length], and weights_BT, float32: 1, or 0
    on the rows that pad the last batch to `batch_size` (their tokens and targets are 0).

    Args:
      max_sequences: reads that many windows, evenly spaced over the split; None is all.
      rows: the rows of each global batch that this host reads; None is all.

    Raises:
      ConfigError: at the call, for a value out of range, an unknown split and a split shorter than
        one window.
    """
    wanted = np.asarray(_rows(batch_size, rows))
    windows = _eval_windows(dataset, split, length, max_sequences)
    tokens = dataset.split(split)

    def batches() -> Iterator[dict[str, np.ndarray]]:
        for start in range(0, len(windows), batch_size):
            real_B = start + wanted < len(windows)
            tokens_BT1 = np.zeros((len(wanted), length + 1), np.int32)
            tokens_BT1[real_B] = _read_windows(tokens, windows[(start + wanted)[real_B]], length)
            weights_BT = np.repeat(real_B[:, None], length, axis=1).astype(np.float32)
            yield {
                'tokens_BT': tokens_BT1[:, :-1],
                'targets_BT': tokens_BT1[:, 1:],
                'weights_BT': weights_BT,
            }

    return batches()


def eval_tokens(
    dataset: TokenDataset, split: str, *, length: int, max_sequences: int | None = None
) -> int:
    """Target tokens that `eval_batches` yields with these settings: the sum of its weights."""
    return length * len(_eval_windows(dataset, split, length, max_sequences))


def num_windows(dataset: TokenDataset, split: str, length: int) -> int:
    """Windows in a split; of the train split, the rows of an epoch.

    Raises:
      ConfigError: if length < 1 or the split is shorter than one window.
    """
    if length < 1:
        raise ConfigError(f'length={length!r} is too small; it must be at least 1.')
    num_tokens = len(dataset.split(split))
    if num_tokens <= length:
        raise ConfigError(
            f'length={length!r} is too long for split {split!r} of dataset {dataset.name!r} with '
            f'{num_tokens} tokens; it must be at most {max(num_tokens - 1, 0)}.'
        )
    return (num_tokens - 1) // length


def _rows(batch_size: int, rows: slice | None) -> range:
    if batch_size < 1:
        raise ConfigError(f'batch_size={batch_size!r} is too small; it must be at least 1.')
    chosen = range(batch_size) if rows is None else range(batch_size)[rows]
    if not chosen:
        raise ConfigError(f'rows={rows!r} selects no row of a batch of {batch_size}.')
    return chosen


# `MapDataset.seed`, not `shuffle(seed=...)`: the latter adds the epoch to the seed, so that seed 0
# in its second epoch would repeat the first epoch of seed 1.
@functools.lru_cache(maxsize=4096)
def _train_order(num_windows: int, seed: int) -> grain.MapDataset:
    return grain.MapDataset.range(num_windows).seed(seed).shuffle().repeat()


def _eval_windows(
    dataset: TokenDataset, split: str, length: int, max_sequences: int | None
) -> np.ndarray:
    available = num_windows(dataset, split, length)
    if max_sequences is None:
        return np.arange(available)
    if max_sequences < 1:
        raise ConfigError(
            f'max_sequences={max_sequences!r} is too small; it must be at least 1, or None for all.'
        )
    chosen = min(max_sequences, available)
    return np.arange(chosen) * available // chosen


def _read_windows(tokens: np.ndarray, windows_B: np.ndarray, length: int) -> np.ndarray:
    positions_BT1 = windows_B[:, None] * length + np.arange(length + 1)
    return np.asarray(tokens)[positions_BT1].astype(np.int32)
