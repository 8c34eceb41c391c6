"""Reads a pure batch = read(seed, step) ahead of the consumer and stacks steps and trials."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np

from qkattn.errors import ConfigError


class _Reads:
    """Random access: read i covers steps [first + i*C, first + (i+1)*C) for every trial."""

    def __init__(
        self, read: Callable[[int, int], Any], seeds: Sequence[int], steps: range, per_read: int
    ):
        self._read = read
        self._steps = steps
        self._per_read = per_read
        # Trials of one seed see the same data: read it once, place it many times.
        self._seeds, self._seed_of_trial = np.unique(np.asarray(seeds), return_inverse=True)

    def __len__(self) -> int:
        return -(-len(self._steps) // self._per_read)

    def __getitem__(self, index: int) -> Any:
        steps = self._steps[index * self._per_read : (index + 1) * self._per_read]
        stacks = [self._stack_trials(step) for step in steps]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *stacks)

    def _stack_trials(self, step: int) -> Any:
        batches = [self._read(int(seed), step) for seed in self._seeds]
        return jax.tree.map(lambda *leaves: np.stack(leaves)[self._seed_of_trial], *batches)


class StepBatches(Iterator[Any]):
    """Iterates over consecutive steps of a stack of trials; one thread reads ahead.

    Yields the pytrees of numpy arrays that `read(seed, step)` returns, with axes C (steps) and X
    (trials) in front of every leaf. There is no state but the step: start again at any
    `start_step`. An error in `read` is raised when its batch is requested. Close it when done, or
    use it in a `with` statement.

    Args:
      read: batch = read(seed, step), pure.
      seeds: one per trial; trials of the same seed share the read.
      start_step: the first step.
      num_steps: how many steps from there on.
      steps_per_read: C; the last read is shorter where it does not divide `num_steps`.
      num_ahead: reads kept ready.

    Raises:
      ConfigError: for an empty `seeds` or a count that is too small.
    """

    def __init__(
        self,
        read: Callable[[int, int], Any],
        *,
        seeds: Sequence[int],
        start_step: int,
        num_steps: int,
        steps_per_read: int = 1,
        num_ahead: int = 2,
    ):
        if not len(seeds):
            raise ConfigError('seeds=() names no trial; give at least one seed.')
        for field, value, least in (
            ('start_step', start_step, 0),
            ('num_steps', num_steps, 0),
            ('steps_per_read', steps_per_read, 1),
        ):
            if value < least:
                raise ConfigError(f'{field}={value!r} is too small; it must be at least {least}.')
        steps = range(start_step, start_step + num_steps)
        reads = _Reads(read, seeds, steps, steps_per_read)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=num_ahead)
        self._num_left = len(reads)
        self._iterator = iter(grain.MapDataset.source(reads).to_iter_dataset(options))

    def __next__(self) -> Any:
        if not self._num_left:
            self.close()
            raise StopIteration
        try:
            batch = next(self._iterator)
        except BaseException:
            self.close()
            raise
        self._num_left -= 1
        return batch

    def close(self) -> None:
        """Stops reading ahead; nothing more is yielded. Closing twice does nothing."""
        self._num_left = 0
        self._iterator.close()

    def __enter__(self) -> 'StepBatches':
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
