"""Batches on the mesh: from the rows that a process reads to global arrays."""

import dataclasses
import math
import os

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from qkattn.config import Config
from qkattn.data.tasks.task_registry import task_of
from qkattn.errors import ConfigError
from qkattn.model import cost
from qkattn.train.sharding import batch_sharding, row_sharding


def leading_shape(config: Config) -> tuple[int, int, int, int]:
    """[C, X, A, B] of one dispatch: steps, trials, microbatches, rows."""
    train = config.train
    return (
        train.steps_per_dispatch,
        len(config.trials.trials()),
        train.accumulation,
        train.batch_size // train.accumulation,
    )


def least_memory(config: Config) -> int:
    """Bytes of parameters, gradients and a batch; a run holds more than these."""
    trials, parameters = len(config.trials.trials()), cost.measured(config.model, 'total')
    shapes = task_of(config).array_shapes(config.model).values()
    row = sum(length * np.dtype(dtype).itemsize for length, dtype in shapes)
    return 2 * 4 * trials * int(parameters) + math.prod(leading_shape(config)) * row


def require_memory(config: Config) -> None:
    """Raises ConfigError where `least_memory` is not in the devices: no means would do then."""
    trials, parameters = len(config.trials.trials()), cost.measured(config.model, 'total')
    needed = least_memory(config)
    devices = jax.devices()[: math.prod(dataclasses.astuple(config.mesh))]
    here = [device for device in devices if device.process_index == jax.process_index()]
    limits = [stats['bytes_limit'] for device in here if (stats := device.memory_stats())]
    # CPU devices report no limit and share the memory of the machine.
    present = sum(limits) or os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    present *= len(devices) // len(here)  # of all processes, as that of this one
    if needed > present:
        raise ConfigError(
            f'{trials} trial{"s" * (trials > 1)} of {parameters:,} parameters (model.vocab_size='
            f'{config.model.vocab_size}, model.d_model={config.model.d_model}, model.num_layers='
            f'{config.model.num_layers}) and batches of train.batch_size={config.train.batch_size} '
            f'need {needed / 2**30:,.1f} GiB, more than the {present / 2**30:,.1f} GiB of the '
            'devices; reduce these or use more devices'
        )


@dataclasses.dataclass(frozen=True)
class Share:
    """What a process reads of a batch: the numbers of its trials, and of its rows of each."""

    trials: np.ndarray
    rows: np.ndarray


def local_share(config: Config, mesh: Mesh) -> Share:
    """The trials and rows of the global batch that this process's devices hold.

    Processes that share a slice of the batch axes over fsdp or tensor hold the same rows. Row r of
    a batch is row r // A of microbatch r % A.
    """
    _, X, A, B = shape = leading_shape(config)
    sharding = batch_sharding(mesh)
    rows_B = _held(sharding, shape, axis=3)
    return Share(_held(sharding, shape, axis=1), (rows_B[:, None] * A + np.arange(A)).ravel())


def local_rows(config: Config, mesh: Mesh) -> np.ndarray:
    """The rows of an evaluation batch that this process's devices hold."""
    return _held(row_sharding(mesh), (config.train.batch_size,), axis=0)


def place_batch(config: Config, mesh: Mesh, local: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """The global batch [C, X, A, B, ...] of one dispatch from the `local_share` of it.

    The batch is cut into microbatches here rather than in the program, where the cut would move
    rows between devices.
    """

    def place(local_CXBT: np.ndarray) -> jax.Array:
        (C, X, _, T), (A, B) = local_CXBT.shape, leading_shape(config)[2:]
        local_CXABT = np.swapaxes(local_CXBT.reshape(C, X, -1, A, T), 2, 3)
        return _place(local_CXABT, batch_sharding(mesh), (C, leading_shape(config)[1], A, B, T))

    return {name: place(array) for name, array in local.items()}


def place_rows(config: Config, mesh: Mesh, local: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """The global evaluation batch [B, ...] from its `local_rows`."""

    def place(local_BT: np.ndarray) -> jax.Array:
        shape = (config.train.batch_size, *local_BT.shape[1:])
        return _place(local_BT, row_sharding(mesh), shape)

    return {name: place(array) for name, array in local.items()}


def fetch(array: jax.Array) -> np.ndarray:
    """The whole of a global array, in every process; all processes call it in the same order."""
    return multihost_utils.process_allgather(array, tiled=True)


def _held(sharding: NamedSharding, shape: tuple[int, ...], axis: int) -> np.ndarray:
    """The numbers along one axis of a global array that this process's devices hold, ascending."""
    parts = sharding.addressable_devices_indices_map(shape).values()
    return np.unique([np.arange(shape[axis])[part[axis]] for part in parts])


def _place(local: np.ndarray, sharding: NamedSharding, shape: tuple[int, ...]) -> jax.Array:
    """The global array of which `local` is what this process's devices hold along every axis."""
    partial = [axis for axis, size in enumerate(local.shape) if size < shape[axis]]
    held = {axis: _held(sharding, shape, axis) for axis in partial}

    def part(index: tuple[slice, ...]) -> np.ndarray:
        within = list(index)
        for axis, numbers in held.items():
            start, stop, _ = index[axis].indices(shape[axis])
            first = int(np.searchsorted(numbers, start))
            within[axis] = slice(first, first + stop - start)
        return local[tuple(within)]

    return jax.make_array_from_callback(shape, sharding, part)


def constant_batch(config: Config, mesh: Mesh) -> dict[str, jax.Array]:
    """A global batch of ones, for timing."""
    share, steps = local_share(config, mesh), config.train.steps_per_dispatch
    leading = (steps, len(share.trials), len(share.rows))
    shapes = task_of(config).array_shapes(config.model)
    local = {name: np.ones((*leading, length), dtype) for name, (length, dtype) in shapes.items()}
    return place_batch(config, mesh, local)
