"""Where arrays live: the mesh, parameters by the letters in their names, batches by their rows.

A process reads the rows of its own devices; `place_batch` and `place_rows` make them global.
"""

import dataclasses
import functools
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qkattn.config import Config, MeshConfig
from qkattn.data.tasks.task_registry import task_of
from qkattn.errors import ConfigError
from qkattn.model import cost

# For each mesh axis the letters that it may split: the first one whose size divides is split.
# D is never split over tensor: with the embedding's V over fsdp, jaxlib 0.10.2 and 0.12.0 return
# wrong sums from a scan over microbatches on a mesh of all three axes.
CANDIDATES = {'fsdp': 'VDERC', 'tensor': 'NKFHV'}
# The letter that both mesh axes may split together; so are the logits.
JOINT = 'V'
# The mesh axes that split the rows of a batch.
BATCH_AXES = ('data', 'fsdp')

log = logging.getLogger(__name__)


def require_devices(config: MeshConfig) -> None:
    """Raises ConfigError where the mesh needs more devices, or leaves some of a job idle."""
    needed = math.prod(dataclasses.astuple(config))
    present = len(jax.devices())
    num_processes = jax.process_count()
    mesh = f'mesh {dataclasses.asdict(config)}'
    if needed > present:
        message = f'{mesh} needs {needed} devices, but there are {present}'
        if jax.default_backend() == 'cpu':
            message += f'; launch/local.py --devices_per_process={needed} makes as many of a CPU'
        raise ConfigError(message)
    if needed < present and num_processes > 1:
        raise ConfigError(
            f'{mesh} uses {needed} of the {present} devices of {num_processes} processes; '
            'it must use all of them'
        )


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh (trial, data, fsdp, tensor) over the first of `devices`, by default all of the job.

    Neighbours along the last axes are near each other: tensor and fsdp cross from one process, and
    from one slice (TPU) or node (GPU) to another, only where the axes before them are too short.
    """
    if devices is None:
        require_devices(config)
        devices = jax.devices()
    axes = ('trial', 'data', 'fsdp', 'tensor')
    shape = tuple(getattr(config, axis) for axis in axes)
    size = math.prod(shape)
    if size < len(devices):
        log.warning('the mesh uses %d of %d devices', size, len(devices))
    # jax.make_mesh refuses several slices, and a mesh such as 32 x 8 on a torus of 16 x 16 chips.
    devices = sorted(devices[:size], key=_slice_of)
    num_slices = len({_slice_of(device) for device in devices})
    if num_slices > 1:
        arranged = np.array(devices).reshape(shape)
    else:
        arranged = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(arranged, axes, axis_types=(AxisType.Auto,) * 4)


def _slice_of(device: jax.Device) -> int:
    """The TPU slice of a device; 0 for devices of other kinds."""
    return getattr(device, 'slice_index', 0)


def spec(path: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """The partition of one leaf of the train state, by the letters of its axes.

    'params/blocks/mlp/w_in_DF' has the axes X L D F: trials, layers, D and F. A leaf that is no
    parameter has the axis X of trials alone.
    """
    letters = _letters_of(path, len(shape))
    # The mesh axes that split each letter.
    split: dict[str, tuple[str, ...]] = {'X': ('trial',)}
    for mesh_axis in CANDIDATES:
        if mesh.shape[mesh_axis] == 1:
            continue
        # Tensor before fsdp: what fsdp gathers of V is then the part that a device has in logits.
        split_further = {
            letter: (mesh_axis, *split.get(letter, ()))
            for letter in CANDIDATES[mesh_axis]
            if letter in letters and (letter not in split or letter in JOINT)
        }
        letter = _first_that_divides(path, letters, shape, split_further, mesh)
        if letter is not None:
            split[letter] = split_further[letter]

    partition: list[Any] = []
    for position, letter in enumerate(letters):
        mesh_axes = split.get(letter, ())
        # A mesh axis splits one axis of an array: the first N of w_talk_NN, not the second.
        is_repeated = letter in letters[:position]
        if is_repeated or not mesh_axes:
            partition.append(None)
        elif len(mesh_axes) == 1:
            partition.append(mesh_axes[0])
        else:
            partition.append(mesh_axes)
    return P(*partition)


def _first_that_divides(
    path: str,
    letters: str,
    shape: tuple[int, ...],
    split: Mapping[str, tuple[str, ...]],
    mesh: Mesh,
) -> str | None:
    """The first letter of `split` whose axis divides over its mesh axes; None where none does.

    Logs where that is not the first letter. `letters` are those of the axes of the leaf at `path`.
    """
    if not split:
        return None
    chosen = None
    for letter, mesh_axes in split.items():
        size = shape[letters.index(letter)]
        if size % _num_devices(mesh, mesh_axes) == 0:
            chosen = letter
            break
    wanted = list(split)[0]
    if chosen != wanted:
        size = shape[letters.index(wanted)]
        over = ' x '.join(f'{axis}={mesh.shape[axis]}' for axis in split[wanted])
        instead = f'replicated over {split[wanted][0]}'
        if chosen is not None:
            instead = f'split over {chosen}'
        say_once(f'{path}: {wanted}={size} does not divide over {over}; {instead}')
    return chosen


def _letters_of(path: str, num_axes: int) -> str:
    """A letter for each axis of a leaf of the train state; '.' for an axis without one."""
    letters = 'X'
    name = re.search(r'(?:^|/)[wbg](?:_[a-z\d]+)*_([A-Z]+)$', path)
    if name:
        if re.search(r'(^|/)blocks/', path):
            letters += 'L'
        letters += name[1]
    elif re.search(r'(^|/)params/', path):
        say_once(
            f'{path}: the name does not end in the letters of its axes, as w_q_DNH; replicated'
        )
    return letters.ljust(num_axes, '.')[:num_axes]


def _num_devices(mesh: Mesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


@functools.cache
def say_once(message: str) -> None:
    """Logs a message the first time that it is given."""
    log.info(message)


def state_shardings(state: dict, mesh: Mesh) -> dict:
    """A NamedSharding for every leaf of an (abstract) train state; `step` is replicated."""

    def placed(path: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        return NamedSharding(mesh, P() if name == 'step' else spec(name, leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(placed, state)


def place_activations(mesh: Mesh) -> Callable[[jax.Array, str], jax.Array]:
    """States how activations are split, for `qkattn.model.stack.placing`.

    Rows are split as those of the batch, V over tensor, and nothing else. With fsdp XLA would split
    D as that of the parameters and copy the batch. For the same reason embeddings that are stored
    split by D, those of positions and of a V that does not divide, are gathered before their use.
    """
    if mesh.shape['fsdp'] == 1:
        return lambda array, letters: array

    def place(array: jax.Array, letters: str) -> jax.Array:
        """The array with its partition; `letters` name its axes, as in BTD or VD."""
        # An embedding that is stored split by V stays as it is.
        if letters == 'VD' and array.shape[0] % mesh.shape['fsdp'] == 0:
            return array
        axes: dict[str, tuple[str, ...]] = {'B': BATCH_AXES}
        if mesh.shape['tensor'] > 1:
            axes['V'] = ('tensor',)
        partition = []
        for letter, size in zip(letters, array.shape, strict=True):
            mesh_axes = axes.get(letter)
            if mesh_axes is not None and size % _num_devices(mesh, mesh_axes) != 0:
                mesh_axes = None
            partition.append(mesh_axes)
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, P(*partition)))

    return place


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """For tokens_CXABT1: trials over `trial`, sequences of a microbatch over `data` and `fsdp`."""
    return NamedSharding(mesh, P(None, 'trial', None, BATCH_AXES))


def row_sharding(mesh: Mesh) -> NamedSharding:
    """For tokens_BT of an evaluation, which all trials share: rows over `data` and `fsdp`."""
    return NamedSharding(mesh, P(BATCH_AXES))


def leading_shape(config: Config) -> tuple[int, int, int, int]:
    """[C, X, A, B] of one dispatch: steps, trials, microbatches, rows."""
    train = config.train
    num_trials = len(config.trials.trials())
    num_rows = train.batch_size // train.accumulation
    return train.steps_per_dispatch, num_trials, train.accumulation, num_rows


def local_share(config: Config, mesh: Mesh) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the trials and of the rows of a batch that this process holds, sorted.

    A batch of A microbatches has row r at place r // A of microbatch r % A.
    """
    shape = leading_shape(config)
    _, _, A, _ = shape
    trials_X = _held(batch_sharding(mesh), shape, axis=1)
    places_B = _held(batch_sharding(mesh), shape, axis=3)
    rows_BA = places_B[:, None] * A + np.arange(A)
    return trials_X, rows_BA.ravel()


def local_rows(config: Config, mesh: Mesh) -> np.ndarray:
    """The rows of an evaluation batch that this process's devices hold."""
    return _held(row_sharding(mesh), (config.train.batch_size,), axis=0)


def place_batch(config: Config, mesh: Mesh, local: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """The global batch [C, X, A, B, ...] of one dispatch from the `local_share` of it."""
    # Cut into microbatches here, since a cut in the program would move rows between devices.
    C, X, A, B = leading_shape(config)

    def place(local_CXBT: np.ndarray) -> jax.Array:
        _, num_local_trials, _, T = local_CXBT.shape
        local_CXABT = np.swapaxes(local_CXBT.reshape(C, num_local_trials, -1, A, T), 2, 3)
        return _place(local_CXABT, batch_sharding(mesh), (C, X, A, B, T))

    return jax.tree.map(place, local)


def place_rows(config: Config, mesh: Mesh, local: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """The global evaluation batch [B, ...] from its `local_rows`."""
    B = config.train.batch_size
    return {
        name: _place(local_BT, row_sharding(mesh), (B, *local_BT.shape[1:]))
        for name, local_BT in local.items()
    }


def fetch(array: jax.Array) -> np.ndarray:
    """The whole of a global array, in every process; all processes call it in the same order."""
    return multihost_utils.process_allgather(array, tiled=True)


def _held(sharding: NamedSharding, shape: tuple[int, ...], axis: int) -> np.ndarray:
    """The indices along one axis of a global array that this process's devices hold, ascending."""
    parts = sharding.addressable_devices_indices_map(shape).values()
    return np.unique([np.arange(shape[axis])[part[axis]] for part in parts])


def _place(local: np.ndarray, sharding: NamedSharding, shape: tuple[int, ...]) -> jax.Array:
    """The global array of which `local` is what this process's devices hold along every axis."""
    # Along these axes `local` has only the indices that are held here.
    held = {
        axis: _held(sharding, shape, axis)
        for axis, size in enumerate(local.shape)
        if size < shape[axis]
    }

    def part_of_device(global_index: tuple[slice, ...]) -> np.ndarray:
        local_index = list(global_index)
        for axis, held_here in held.items():
            start, stop, _ = global_index[axis].indices(shape[axis])
            first = int(np.searchsorted(held_here, start))
            local_index[axis] = slice(first, first + stop - start)
        return local[tuple(local_index)]

    return jax.make_array_from_callback(shape, sharding, part_of_device)


def least_memory(config: Config) -> int:
    """Bytes of parameters, gradients and a batch; a run holds more than these."""
    num_trials = len(config.trials.trials())
    num_parameters = int(cost.measured(config.model, 'total'))
    arrays = task_of(config).array_shapes(config.model).values()
    bytes_per_row = sum(length * np.dtype(dtype).itemsize for length, dtype in arrays)
    bytes_of_floats = 2 * 4 * num_trials * num_parameters
    return bytes_of_floats + math.prod(leading_shape(config)) * bytes_per_row


def require_memory(config: Config) -> None:
    """Raises ConfigError where the devices lack `least_memory`, however it is placed."""
    needed = least_memory(config)
    available = _memory_of_mesh(config.mesh)
    if needed <= available:
        return
    num_trials = len(config.trials.trials())
    trials = '1 trial' if num_trials == 1 else f'{num_trials} trials'
    sizes = ', '.join(
        f'model.{name}={getattr(config.model, name)}'
        for name in ('vocab_size', 'd_model', 'num_layers')
    )
    raise ConfigError(
        f'{trials} of {cost.measured(config.model, "total"):,} parameters '
        f'({sizes}) and batches of train.batch_size={config.train.batch_size} need '
        f'{needed / 2**30:,.1f} GiB, more than the {available / 2**30:,.1f} GiB of the devices; '
        'reduce these or use more devices'
    )


def _memory_of_mesh(mesh: MeshConfig) -> int:
    """Bytes of memory of the devices of a mesh, if other processes have as much as this one."""
    devices = jax.devices()[: math.prod(dataclasses.astuple(mesh))]
    local = [device for device in devices if device.process_index == jax.process_index()]
    statistics = [device.memory_stats() for device in local]
    available = sum(of_device['bytes_limit'] for of_device in statistics if of_device)
    if not available:
        # CPU devices report no limit and share the memory of the machine.
        available = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    return available * (len(devices) // len(local))
