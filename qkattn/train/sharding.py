"""The mesh of a run, and how arrays are split over its devices.

Parameters are split by the letters in their names, batches by their rows. Each process reads only
the rows of its own devices; `place_batch` and `place_rows` make global arrays of them.
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

# The letters of array axes that each mesh axis may split. It splits the first of them whose size
# is a multiple of its own. D is never split over tensor: with the embedding's V over fsdp, jaxlib
# 0.10.2 and 0.12.0 return wrong sums from a scan over microbatches on a mesh of all three axes.
CANDIDATES = {'fsdp': 'VDERC', 'tensor': 'NKFHV'}
# The letter that both mesh axes may split together, as logits are split.
JOINT = 'V'
# The mesh axes that split the rows of a batch.
BATCH_AXES = ('data', 'fsdp')
# The name of a parameter at the end of a path, such as w_q_DNH. The group holds its last part, the
# letters of its axes.
_PARAMETER = re.compile(r'(?:^|/)[wbg](?:_[a-z\d]+)*_([A-Z]+)$')

log = logging.getLogger(__name__)


def require_devices(config: MeshConfig) -> None:
    """Raises ConfigError if there are too few devices for the mesh.

    Raises it also if a job of several processes has devices that the mesh does not use.
    """
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
    """Makes the mesh (trial, data, fsdp, tensor) of the first `devices`, by default of the job's.

    Devices communicate most along tensor and fsdp, so neighbours along these axes are close to each
    other. Where the sizes allow it, they are in one process, TPU slice or GPU node.
    """
    if devices is None:
        require_devices(config)
        devices = jax.devices()
    axes = ('trial', 'data', 'fsdp', 'tensor')
    shape = tuple(getattr(config, axis) for axis in axes)
    size = math.prod(shape)
    if size < len(devices):
        log.warning('the mesh uses %d of %d devices', size, len(devices))
    # `jax.make_mesh` is not used: it refuses several slices, and a mesh such as 32 x 8 on a torus
    # of 16 x 16 chips.
    devices = sorted(devices[:size], key=_slice_of)
    num_slices = len({_slice_of(device) for device in devices})
    if num_slices > 1:
        arranged = np.array(devices).reshape(shape)
    else:
        arranged = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(arranged, axes, axis_types=(AxisType.Auto,) * 4)


def _slice_of(device: jax.Device) -> int:
    """Returns the number of a device's TPU slice; 0 for devices of other kinds."""
    return getattr(device, 'slice_index', 0)


def spec(path: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """Returns the partition of one leaf (array) of the train state, by the letters of its axes.

    For example, 'params/blocks/mlp/w_in_DF' has the axes X (trials), L (layers), D and F. On a mesh
    with trial=2, fsdp=2 and tensor=2, its partition is P('trial', None, 'fsdp', 'tensor').

    The letters are known only for leaves with the name of a parameter. Of other leaves, only the
    axis X is split.
    """
    letters = _letters_of(path, len(shape))
    mesh_axes_by_letter = _mesh_axes_by_letter(path, letters, shape, mesh)

    partition: list[Any] = []
    for position, letter in enumerate(letters):
        mesh_axes = mesh_axes_by_letter.get(letter, ())
        # A mesh axis can split only one axis of an array. Of w_talk_NN, it splits the first N.
        is_repeated = letter in letters[:position]
        if is_repeated or not mesh_axes:
            partition.append(None)
        elif len(mesh_axes) == 1:
            partition.append(mesh_axes[0])
        else:
            partition.append(mesh_axes)
    return P(*partition)


def _mesh_axes_by_letter(
    path: str, letters: str, shape: tuple[int, ...], mesh: Mesh
) -> dict[str, tuple[str, ...]]:
    """Returns the mesh axes that split each letter of a leaf: {'X': ('trial',), 'D': ('fsdp',)}.

    For example, w_q_DNH has D = 64, N = 6 and H = 16, on a mesh with fsdp=4 and tensor=4. The
    letters that tensor may split are N K F H V, in this order of preference. 6 is not a multiple of
    4, so it splits H. The only one of V D E R C in the leaf is D, so fsdp splits D.

    In general, a mesh axis splits the first of its CANDIDATES that divides evenly and that is not
    split yet. The letter JOINT, which is V, may be split by both: {'V': ('tensor', 'fsdp')}.
    """
    split: dict[str, tuple[str, ...]] = {'X': ('trial',)}
    for mesh_axis, candidates in CANDIDATES.items():
        if mesh.shape[mesh_axis] == 1:
            continue
        # Letters that this mesh axis may split, and the mesh axes that would split them together.
        options: dict[str, tuple[str, ...]] = {}
        for letter in candidates:
            if letter not in letters:
                continue
            if letter not in split:
                options[letter] = (mesh_axis,)
            elif letter == JOINT:
                # fsdp splits V already. Tensor comes first here: a device that gathers V over fsdp
                # then holds the part of V that it needs for its logits.
                options[letter] = (mesh_axis, *split[letter])
        letter_to_split = _first_that_divides(path, letters, shape, options, mesh)
        if letter_to_split is not None:
            split[letter_to_split] = options[letter_to_split]
    return split


def _first_that_divides(
    path: str,
    letters: str,
    shape: tuple[int, ...],
    options: Mapping[str, tuple[str, ...]],
    mesh: Mesh,
) -> str | None:
    """Chooses the axis of a leaf (array) to split: the first of `options` that divides evenly.

    Returns its letter; None if no axis divides evenly, so that the leaf is replicated. Logs a
    message unless it is the first letter of `options`, the preferred one.

    For example, w_q_DNH has N = 6 and H = 16, on a mesh with tensor=4. The options are
    {'N': ('tensor',), 'H': ('tensor',)}. 6 is not a multiple of 4, so this returns 'H', and logs
    'w_q_DNH: N=6 does not divide over tensor=4; split over H'.

    Args:
      path: the path of the leaf.
      letters: the letter of each axis of the leaf.
      shape: the shape of the leaf.
      options: the letters that may be split, the preferred one first; for each of them, the mesh
        axes that would split it.
      mesh: the mesh of the run.
    """
    if not options:
        return None
    size_of_letter = {letter: shape[letters.index(letter)] for letter in options}
    chosen = None
    for letter, mesh_axes in options.items():
        if size_of_letter[letter] % _num_devices(mesh, mesh_axes) == 0:
            chosen = letter
            break

    preferred = next(iter(options))
    if chosen != preferred:
        # The first mesh axis is the one that is to split the leaf; a second one splits it already.
        preferred_axes = options[preferred]
        over = ' x '.join(f'{axis}={mesh.shape[axis]}' for axis in preferred_axes)
        if chosen is None:
            instead = f'replicated over {preferred_axes[0]}'
        else:
            instead = f'split over {chosen}'
        size = size_of_letter[preferred]
        say_once(f'{path}: {preferred}={size} does not divide over {over}; {instead}')
    return chosen


def _letters_of(path: str, num_axes: int) -> str:
    """Returns the letter of each axis of a leaf of the train state.

    The letters are those at the end of the leaf's name, after X for the trials and L for the
    layers. An axis without a letter gets '.', and is not split. For example:

        'params/blocks/attention/w_q_DNH', 5 axes -> 'XLDNH'
        'params/w_embedding_VD', 3 axes -> 'XVD'
        'opt_state/count', 2 axes -> 'X.'
    """
    modules = path.split('/')[:-1]
    letters = 'X'  # the first axis of every leaf is that of trials
    parameter = _PARAMETER.search(path)
    if parameter is not None:
        if 'blocks' in modules:
            letters += 'L'  # blocks are stacked over layers
        letters += parameter[1]
    elif 'params' in modules:
        # A parameter should have letters; other leaves, such as counters, need none.
        say_once(
            f'{path}: the name does not end in the letters of its axes, as w_q_DNH; replicated'
        )
    # An optimizer may keep a state with fewer axes than its parameter, so 'XLDNH' may be too long.
    letters = letters.ljust(num_axes, '.')
    return letters[:num_axes]


def _num_devices(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """Returns the number of devices along some axes of a mesh together."""
    return math.prod(mesh.shape[axis] for axis in axes)


@functools.cache
def say_once(message: str) -> None:
    """Logs a message, unless this process has logged it before."""
    log.info(message)


def state_shardings(state: dict, mesh: Mesh) -> dict:
    """Returns a NamedSharding for every leaf of an (abstract) train state."""

    def sharding_of(path: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        if name == 'step':
            return NamedSharding(mesh, P())  # a scalar that all trials share
        return NamedSharding(mesh, spec(name, leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(sharding_of, state)


def place_activations(mesh: Mesh) -> Callable[[jax.Array, str], jax.Array]:
    """Returns a function that constrains the sharding of activations inside of a model.

    The model calls it, inside a block of `qkattn.model.stack.use_placement`. It splits the rows B
    over `data` and `fsdp`, splits V over `tensor`, and replicates all other axes. Without it, XLA
    would split the D of activations over fsdp, like the D of parameters, and copy the batch to
    every device.
    """
    if mesh.shape['fsdp'] == 1:
        return lambda array, letters: array

    mesh_axes_by_letter: dict[str, tuple[str, ...]] = {'B': BATCH_AXES}
    if mesh.shape['tensor'] > 1:
        mesh_axes_by_letter['V'] = ('tensor',)

    def place(array: jax.Array, letters: str) -> jax.Array:
        """Constrains the sharding of an array; `letters` name its axes, as in BTD or VD."""
        # The embedding VD is stored with its V split over fsdp if V is a multiple of fsdp, and with
        # its D split otherwise. With V split, it is used as it is stored. With D split, XLA would
        # split the D of activations, too. So it gets the sharding below, in which D is whole.
        is_embedding = letters == 'VD'
        if is_embedding:
            V, _ = array.shape
            is_split_by_V = V % mesh.shape['fsdp'] == 0
            if is_split_by_V:
                return array

        # Split each axis that divides evenly over the mesh axes of its letter.
        partition = []
        for letter, size in zip(letters, array.shape, strict=True):
            mesh_axes = mesh_axes_by_letter.get(letter)
            if mesh_axes is not None and size % _num_devices(mesh, mesh_axes) != 0:
                mesh_axes = None
            partition.append(mesh_axes)
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, P(*partition)))

    return place


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a training batch, [C, X, A, B, ...].

    X, the trials, is split over `trial`; B, the rows of a microbatch, over `data` and `fsdp`.
    """
    return NamedSharding(mesh, P(None, 'trial', None, BATCH_AXES))


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an evaluation batch, [B, ...], which all trials share.

    B, the rows, is split over `data` and `fsdp`.
    """
    return NamedSharding(mesh, P(BATCH_AXES))


def leading_shape(config: Config) -> tuple[int, int, int, int]:
    """Returns (C, X, A, B) of one dispatch: steps, trials, microbatches, rows of a microbatch."""
    train = config.train
    num_trials = len(config.trials.trials())
    num_rows = train.batch_size // train.accumulation
    return train.steps_per_dispatch, num_trials, train.accumulation, num_rows


def local_share(config: Config, mesh: Mesh) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of the trials and of the batch rows that this process holds, ascending.

    Row r of a batch with A microbatches is row r // A of microbatch r % A. With A = 2, a process
    that holds the rows 2 and 3 of each microbatch holds the rows 4, 5, 6 and 7 of the batch.
    """
    shape = leading_shape(config)
    _, _, A, _ = shape
    trials_X = _local_indices(batch_sharding(mesh), shape, axis=1)
    microbatch_rows_B = _local_indices(batch_sharding(mesh), shape, axis=3)
    # Row b of microbatch a is row b A + a of the batch.
    rows_BA = microbatch_rows_B[:, None] * A + np.arange(A)
    return trials_X, rows_BA.ravel()


def local_rows(config: Config, mesh: Mesh) -> np.ndarray:
    """Returns the numbers of the rows of an evaluation batch that this process holds."""
    return _local_indices(row_sharding(mesh), (config.train.batch_size,), axis=0)


def place_batch(config: Config, mesh: Mesh, local: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Makes the global batch of one dispatch, [C, X, A, B, T], from the part of this process.

    A dispatch has C steps of X trials. Each step has A microbatches of B rows, of T elements each.

    `local` has arrays [C, trials, rows, T], with the trials and rows that `local_share` returns.
    They are cut into microbatches here, on the host. Inside of the program, that would move rows
    between devices.
    """
    C, X, A, B = leading_shape(config)

    def place(local_array: np.ndarray) -> jax.Array:
        """Cuts the rows of one array into A microbatches, and makes the global array."""
        # Row r belongs to microbatch r % A. For example, A is 2 and the rows are 0 to 5. They are
        # cut into [[0, 1], [2, 3], [4, 5]]. Swapping the axes gives [[0, 2, 4], [1, 3, 5]].
        _, num_local_trials, num_local_rows, T = local_array.shape
        local_CXBAT = local_array.reshape(C, num_local_trials, num_local_rows // A, A, T)
        local_CXABT = np.swapaxes(local_CXBAT, 2, 3)
        global_shape = (C, X, A, B, T)
        return _global_array(local_CXABT, batch_sharding(mesh), global_shape)

    return jax.tree.map(place, local)


def place_rows(config: Config, mesh: Mesh, local: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Makes the global evaluation batch [B, ...] from the rows that `local_rows` returns."""
    B = config.train.batch_size
    return {
        name: _global_array(local_BT, row_sharding(mesh), (B, *local_BT.shape[1:]))
        for name, local_BT in local.items()
    }


def fetch(array: jax.Array) -> np.ndarray:
    """Returns the whole of a global array in every process, all of which have to call it."""
    return multihost_utils.process_allgather(array, tiled=True)


def _local_indices(sharding: NamedSharding, shape: tuple[int, ...], axis: int) -> np.ndarray:
    """Returns the indices along one axis of a global array that this process holds, ascending."""
    all_indices = np.arange(shape[axis])
    slices_by_device = sharding.addressable_devices_indices_map(shape)
    return np.unique([all_indices[slices[axis]] for slices in slices_by_device.values()])


def _global_array(local: np.ndarray, sharding: NamedSharding, shape: tuple[int, ...]) -> jax.Array:
    """Makes a global array of a shape from the part of it that this process holds, `local`.

    For example, the second of two processes holds the rows 4 to 7 of 8, as the rows 0 to 3 of
    `local`. The array that both make has 8 rows.
    """
    # For each axis along which `local` has only a part: the global indices of this part.
    global_indices_by_axis = {}
    for axis, local_size in enumerate(local.shape):
        if local_size < shape[axis]:
            global_indices_by_axis[axis] = _local_indices(sharding, shape, axis)

    def part_of_device(global_index: tuple[slice, ...]) -> np.ndarray:
        """Returns global_array[global_index], the part of one device, as a part of `local`."""
        local_index = list(global_index)
        for axis, global_indices in global_indices_by_axis.items():
            # If `local` has the global indices [4, 5, 6, 7], then 6:8 is 2:4 in it.
            start, stop, _ = global_index[axis].indices(shape[axis])
            local_start = int(np.searchsorted(global_indices, start))
            local_index[axis] = slice(local_start, local_start + stop - start)
        return local[tuple(local_index)]

    return jax.make_array_from_callback(shape, sharding, part_of_device)


def least_memory(config: Config) -> int:
    """Returns a lower bound of a run's memory: bytes of parameters, gradients and a batch."""
    num_trials = len(config.trials.trials())
    num_parameters = int(cost.measured(config.model, 'total'))
    # A float32 parameter and its gradient take 4 bytes each.
    bytes_of_floats = 2 * 4 * num_trials * num_parameters

    num_rows = math.prod(leading_shape(config))
    arrays = task_of(config).array_shapes(config.model).values()
    bytes_per_row = sum(length * np.dtype(dtype).itemsize for length, dtype in arrays)
    return bytes_of_floats + num_rows * bytes_per_row


def require_memory(config: Config) -> None:
    """Raises ConfigError if the devices of the mesh together have less than `least_memory`."""
    needed = least_memory(config)
    available = _memory_of_mesh(config.mesh)
    if needed <= available:
        return
    model = config.model
    num_trials = len(config.trials.trials())
    trials = '1 trial' if num_trials == 1 else f'{num_trials} trials'
    num_parameters = cost.measured(model, 'total')
    raise ConfigError(
        f'{trials} of {num_parameters:,} parameters (model.vocab_size={model.vocab_size}, '
        f'model.d_model={model.d_model}, model.num_layers={model.num_layers}) '
        f'and batches of train.batch_size={config.train.batch_size} need '
        f'{needed / 2**30:,.1f} GiB, more than the {available / 2**30:,.1f} GiB of the devices; '
        'reduce these or use more devices'
    )


def _memory_of_mesh(mesh: MeshConfig) -> int:
    """Returns the bytes of memory of all devices of a mesh.

    It assumes that the other processes of the job have as much memory as this one.
    """
    num_devices = math.prod(dataclasses.astuple(mesh))
    devices = jax.devices()[:num_devices]
    local_devices = [device for device in devices if device.process_index == jax.process_index()]
    memory_of_process = 0
    for device in local_devices:
        statistics = device.memory_stats()
        if statistics:
            memory_of_process += statistics['bytes_limit']
    if memory_of_process == 0:
        # CPU devices report no limit. They share the memory of the machine.
        memory_of_process = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    # All processes have equally many devices.
    num_processes = len(devices) // len(local_devices)
    return memory_of_process * num_processes
