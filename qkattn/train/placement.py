"""Batches on the mesh: from the rows that a process reads to global arrays."""

import dataclasses
import math
import os
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qkattn.config import Config
from qkattn.data.tasks.task_registry import task_of
from qkattn.errors import ConfigError
from qkattn.model import cost
from qkattn.train.sharding import batch_sharding


def leading_shape(config: Config) -> tuple[int, int, int, int]:
    """[C, X, A, B] of one dispatch: steps, trials, microbatches, rows."""
    train = config.train
    return (
        train.steps_per_dispatch,
        len(config.trials.trials()),
        train.accumulation,
        train.batch_size // train.accumulation,
    )


def require_memory(config: Config) -> None:
    """Raises ConfigError where parameters, gradients and a batch do not fit in the devices.

    A run holds more than these; what is refused here cannot be trained by any means.
    """
    trials, parameters = len(config.trials.trials()), cost.measured(config.model, 'total')
    shapes = task_of(config).array_shapes(config.model).values()
    row = sum(length * np.dtype(dtype).itemsize for length, dtype in shapes)
    needed = 2 * 4 * trials * parameters + math.prod(leading_shape(config)) * row
    devices = jax.devices()[: math.prod(dataclasses.astuple(config.mesh))]
    limits = [stats['bytes_limit'] for device in devices if (stats := device.memory_stats())]
    # CPU devices report no limit and share the memory of the machine.
    present = sum(limits) or os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    if needed > present:
        raise ConfigError(
            f'{trials} trial{"s" * (trials > 1)} of {parameters:,} parameters (model.vocab_size='
            f'{config.model.vocab_size}, model.d_model={config.model.d_model}, model.num_layers='
            f'{config.model.num_layers}) and batches of train.batch_size={config.train.batch_size} '
            f'need {needed / 2**30:,.1f} GiB, more than the {present / 2**30:,.1f} GiB of the '
            'devices; reduce these or use more devices'
        )


def local_rows(config: Config, mesh: Mesh) -> slice:
    """The rows of the global batch that this process's devices hold.

    Row r of a batch is row r // A of microbatch r % A, so that these rows are consecutive.
    """
    shape = leading_shape(config)
    parts = batch_sharding(mesh).addressable_devices_indices_map(shape).values()
    bounds = [part[3].indices(shape[3]) for part in parts]
    return slice(min(b[0] for b in bounds) * shape[2], max(b[1] for b in bounds) * shape[2])


def place_batch(
    config: Config, mesh: Mesh, local: dict[str, np.ndarray], rows: slice
) -> dict[str, jax.Array]:
    """The global batch [C, X, A, B, ...] of one dispatch from the rows [C, X, ...] read here.

    The batch is cut into microbatches here rather than in the program, where the cut would move
    rows between devices.
    """

    def place(local_CXBT: np.ndarray) -> jax.Array:
        shape = (len(local_CXBT), *leading_shape(config)[1:], local_CXBT.shape[-1])
        C, X, A, B, T = shape
        local_CXABT = np.swapaxes(local_CXBT.reshape(C, X, -1, A, T), 2, 3)

        def part(index: tuple[slice, ...]) -> np.ndarray:
            start, stop, _ = index[3].indices(B)
            first = rows.start // A
            return local_CXABT[index[0], index[1], :, start - first : stop - first]

        return jax.make_array_from_callback(shape, batch_sharding(mesh), part)

    return {name: place(array) for name, array in local.items()}


def constant_batch(config: Config, mesh: Mesh) -> dict[str, jax.Array]:
    """A global batch of ones, for timing."""
    rows = local_rows(config, mesh)
    leading = (*leading_shape(config)[:2], rows.stop - rows.start)
    shapes = task_of(config).array_shapes(config.model)
    local = {name: np.ones((*leading, length), dtype) for name, (length, dtype) in shapes.items()}
    return place_batch(config, mesh, local, rows)


def place_everywhere(mesh: Mesh, tree: Any) -> Any:
    """Numpy arrays, replicated on every device of the mesh."""
    replicated = NamedSharding(mesh, P())
    return jax.tree.map(
        lambda a: jax.make_array_from_callback(np.shape(a), replicated, lambda i: a[i]), tree
    )
