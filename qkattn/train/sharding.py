"""The mesh of a run, and the sharding of arrays over it.

Parameters are split by the axis letters in their names, batches by rows. Each process reads only
the rows of its own devices. `place_batch` and `place_rows` turn these rows into global arrays.
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

# The letters of array axes that each mesh axis may split, in order of preference.
# D is never split over tensor. With the embedding's V over fsdp, jaxlib 0.10.2 and 0.12.0 would
# return wrong sums from a scan over microbatches on a mesh of data, fsdp and tensor.
CANDIDATES = {'fsdp': 'VDERC', 'tensor': 'NKFHV'}
# The letter that both of these mesh axes may split, as in logits.
JOINT = 'V'
# The mesh axes that split the rows of a batch.
BATCH_AXES = ('data', 'fsdp')
# A parameter name at the end of a path, such as w_q_DNH. The group matches the axis letters, DNH.
_PARAMETER = re.compile(r'(?:^|/)[wbg](?:_[a-z\d]+)*_([A-Z]+)$')

log = logging.getLogger(__name__)


def require_devices(config: MeshConfig) -> None:
    """Raises ConfigError if the devices do not fit the mesh.

    The mesh must use all devices of a job of several processes.
    """
    num_needed = math.prod(dataclasses.astuple(config))  # the product of all axes
    num_devices = len(jax.devices())
    num_processes = jax.process_count()
    mesh = f'mesh {dataclasses.asdict(config)}'
    if num_needed > num_devices:
        message = f'{mesh} needs {num_needed} devices, but there are {num_devices}'
        if jax.default_backend() == 'cpu':
            message += (
                f'; launch/local.py --devices_per_process={num_needed} makes as many of a CPU'
            )
        raise ConfigError(message)
    if num_needed < num_devices and num_processes > 1:
        raise ConfigError(
            f'{mesh} uses {num_needed} of the {num_devices} devices of {num_processes} processes; '
            'it must use all of them'
        )


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes the mesh (trial, data, fsdp, tensor) from the first of the devices.

    Neighbours along `tensor` and `fsdp` are close to each other, because they communicate most.

    Args:
        config: The sizes of the mesh axes.
        devices: The devices to use; None for those of the job.

    Raises:
        ConfigError: The devices of the job do not fit the mesh.
    """
    if devices is None:
        require_devices(config)
        devices = jax.devices()
    axes = ('trial', 'data', 'fsdp', 'tensor')
    shape = tuple(getattr(config, axis) for axis in axes)
    size = math.prod(shape)
    if size < len(devices):
        log.warning('the mesh uses %d of %d devices', size, len(devices))

    devices = sorted(devices[:size], key=_slice_index)
    num_slices = len({_slice_index(device) for device in devices})
    # `jax.make_mesh` would refuse several TPU slices, and a mesh of 32 x 8 on 16 x 16 chips.
    if num_slices > 1:
        # As the devices are sorted, the first axes of the mesh go over the slices.
        device_array = np.array(devices).reshape(shape)
    else:
        device_array = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(device_array, axes, axis_types=(AxisType.Auto,) * len(axes))


def _slice_index(device: jax.Device) -> int:
    """Returns the index of a device's TPU slice; 0 for other devices."""
    return getattr(device, 'slice_index', 0)


def spec(path: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """Returns the PartitionSpec of one leaf of the train state.

    For example, 'params/blocks/mlp/w_in_DF' has the axes X (trials), L (layers), D and F. On a mesh
    with trial=2, fsdp=2 and tensor=2, the result is P('trial', None, 'fsdp', 'tensor').

    Args:
        path: The path of the leaf. A parameter's name ends in the letters of its axes. A leaf with
            another name is split only over trials.
        shape: The shape of the leaf.
        mesh: The mesh of the run.
    """
    letters = _axis_letters(path, len(shape))
    mesh_axes_by_letter = _mesh_axes_by_letter(path, letters, shape, mesh)

    partition: list[Any] = []
    for position, letter in enumerate(letters):
        mesh_axes = mesh_axes_by_letter.get(letter, ())
        # A mesh axis can split only one axis of an array, such as the first N of w_talk_NN.
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
    """Returns the mesh axes that split each letter of a leaf, such as {'X': ('trial',)}.

    A mesh axis splits the first of its CANDIDATES that divides evenly and is not split yet. The
    letter V may be split twice.

    For example, a leaf w_q_DNH has D = 64, N = 6 and H = 16, on a mesh with fsdp=4 and tensor=4. D
    is split over fsdp. H is split over tensor, because N does not divide evenly.
    """
    mesh_axes_by_letter: dict[str, tuple[str, ...]] = {'X': ('trial',)}
    for mesh_axis, candidates in CANDIDATES.items():  # such as 'tensor', 'NKFHV'
        if mesh.shape[mesh_axis] == 1:
            continue
        # The mesh axes that each letter would be split over.
        options: dict[str, tuple[str, ...]] = {}
        for letter in candidates:
            if letter not in letters:
                continue
            if letter not in mesh_axes_by_letter:
                options[letter] = (mesh_axis,)
            elif letter == JOINT:  # V
                # With tensor first, a device that gathers V over fsdp has the V of its logits.
                options[letter] = (mesh_axis, *mesh_axes_by_letter[letter])
        letter_to_split = _first_that_divides(path, letters, shape, options, mesh)
        if letter_to_split is not None:
            mesh_axes_by_letter[letter_to_split] = options[letter_to_split]
    return mesh_axes_by_letter


def _first_that_divides(
    path: str,
    letters: str,
    shape: tuple[int, ...],
    options: Mapping[str, tuple[str, ...]],
    mesh: Mesh,
) -> str | None:
    """Returns the first letter of `options` that splits evenly over its mesh axes, or None.

    Logs a message if it is not the first option, such as
    'w_q_DNH: N=6 does not divide over tensor=4; split over H'.

    Args:
        path: The path of the leaf.
        letters: The letter of each axis of the leaf.
        shape: The shape of the leaf.
        options: The mesh axes that each letter would be split over, the preferred letter first.
        mesh: The mesh of the run.
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
        preferred_axes = options[preferred]
        over = ' x '.join(f'{axis}={mesh.shape[axis]}' for axis in preferred_axes)
        if chosen is None:
            # Of ('tensor', 'fsdp'), for example, fsdp splits the leaf already.
            instead = f'replicated over {preferred_axes[0]}'
        else:
            instead = f'split over {chosen}'
        size = size_of_letter[preferred]
        say_once(f'{path}: {preferred}={size} does not divide over {over}; {instead}')
    return chosen


def _axis_letters(path: str, num_axes: int) -> str:
    """Returns the letter of each axis of a leaf of the train state, '.' if it has none.

    The letters are X for trials, L for layers, and the end of a parameter's name. For example:

        'params/blocks/attention/w_q_DNH', 5 axes -> 'XLDNH'
        'params/w_embedding_VD', 3 axes -> 'XVD'
        'opt_state/count', 2 axes -> 'X.'
    """
    modules = path.split('/')[:-1]
    letters = 'X'
    parameter_name = _PARAMETER.search(path)
    if parameter_name is not None:
        if 'blocks' in modules:
            letters += 'L'  # the parameters of blocks are stacked over layers
        letters += parameter_name[1]
    elif 'params' in modules:
        say_once(
            f'{path}: the name does not end in the letters of its axes, as w_q_DNH; replicated'
        )
    # The state of an optimizer may have fewer axes than its parameter.
    letters = letters.ljust(num_axes, '.')
    return letters[:num_axes]


def _num_devices(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """Returns the product of the sizes of mesh axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


@functools.cache
def say_once(message: str) -> None:
    """Logs a message, unless this process has logged it before."""
    log.info(message)


def state_shardings(state: dict, mesh: Mesh) -> dict:
    """Returns a NamedSharding for every leaf of an (abstract) train state."""

    def sharding_of(key_path: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        path = jax.tree_util.keystr(key_path, simple=True, separator='/')
        if path == 'step':
            return NamedSharding(mesh, P())  # a scalar, the same for all trials
        return NamedSharding(mesh, spec(path, leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(sharding_of, state)


def place_activations(mesh: Mesh) -> Callable[[jax.Array, str], jax.Array]:
    """Returns a function (array, letters) that constrains the sharding of activations.

    Rows B are split over `data` and `fsdp`, tokens V over `tensor`. Other axes are replicated.
    Without this, XLA would split D over fsdp and copy the batch to every device.
    """
    if mesh.shape['fsdp'] == 1:
        return lambda array, letters: array

    mesh_axes_by_letter: dict[str, tuple[str, ...]] = {'B': BATCH_AXES}
    if mesh.shape['tensor'] > 1:
        mesh_axes_by_letter['V'] = ('tensor',)

    def place(array: jax.Array, letters: str) -> jax.Array:
        """Constrains the sharding of an array with axes `letters`, such as BTD."""
        # An embedding VD is stored split over V, or over D if V does not divide evenly. Only a
        # split D must be gathered, or else XLA would also split the D of activations.
        is_embedding = letters == 'VD'
        if is_embedding:
            V, _ = array.shape
            is_split_over_V = V % mesh.shape['fsdp'] == 0
            if is_split_over_V:
                return array

        partition = []
        for letter, size in zip(letters, array.shape, strict=True):
            mesh_axes = mesh_axes_by_letter.get(letter)
            if mesh_axes is not None and size % _num_devices(mesh, mesh_axes) != 0:
                mesh_axes = None  # does not divide evenly
            partition.append(mesh_axes)
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, P(*partition)))

    return place


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a training batch [C, X, A, B, ...].

    Trials X are split over `trial`, rows B over `data` and `fsdp`.
    """
    return NamedSharding(mesh, P(None, 'trial', None, BATCH_AXES))


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an evaluation batch [B, ...]: rows over `data` and `fsdp`."""
    return NamedSharding(mesh, P(BATCH_AXES))


def leading_shape(config: Config) -> tuple[int, int, int, int]:
    """Returns (C, X, A, B) of one dispatch: steps, trials, microbatches, rows of a microbatch."""
    train = config.train
    num_trials = len(config.trials.trials())
    num_rows = train.batch_size // train.accumulation
    return train.steps_per_dispatch, num_trials, train.accumulation, num_rows


def local_share(config: Config, mesh: Mesh) -> tuple[np.ndarray, np.ndarray]:
    """Returns the trials and the rows of a training batch that this process holds.

    Both are ascending indices. Row b of microbatch a is row b * A + a of the batch.
    """
    shape = leading_shape(config)  # (C, X, A, B): steps, trials, microbatches, rows
    _, _, A, _ = shape
    local_trials_X = _local_indices(batch_sharding(mesh), shape, axis=1)
    rows_of_microbatch_B = _local_indices(batch_sharding(mesh), shape, axis=3)
    local_rows_BA = rows_of_microbatch_B[:, None] * A + np.arange(A)
    return local_trials_X, local_rows_BA.ravel()


def local_rows(config: Config, mesh: Mesh) -> np.ndarray:
    """Returns the indices of the rows of an evaluation batch that this process holds."""
    return _local_indices(row_sharding(mesh), (config.train.batch_size,), axis=0)


def place_batch(config: Config, mesh: Mesh, local: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Makes the global batch of one dispatch from the part of this process.

    Args:
        config: The settings of the run.
        mesh: The mesh of the run.
        local: Arrays [C, trials, rows, T] by name, with the trials and rows of `local_share`.

    Returns:
        Arrays [C, X, A, B, T]: steps, trials, microbatches, rows, positions.
    """
    C, X, A, B = leading_shape(config)

    # On the devices, cutting into microbatches would exchange rows. So do it on the host.
    def place(local_array: np.ndarray) -> jax.Array:
        # With A = 2, the rows 0 to 5 become the microbatches [0, 2, 4] and [1, 3, 5].
        _, num_local_trials, num_local_rows, T = local_array.shape
        local_CXBAT = local_array.reshape(C, num_local_trials, num_local_rows // A, A, T)
        local_CXABT = np.swapaxes(local_CXBAT, 2, 3)
        return _global_array(local_CXABT, batch_sharding(mesh), shape=(C, X, A, B, T))

    return jax.tree.map(place, local)


def place_rows(config: Config, mesh: Mesh, local: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Makes the global evaluation batch [B, ...] from the rows `local_rows` of this process."""
    B = config.train.batch_size
    return {
        name: _global_array(local_BT, row_sharding(mesh), (B, *local_BT.shape[1:]))
        for name, local_BT in local.items()
    }


def fetch(array: jax.Array) -> np.ndarray:
    """Returns a global array in every process; all processes must call this."""
    return multihost_utils.process_allgather(array, tiled=True)


def _local_indices(sharding: NamedSharding, shape: tuple[int, ...], axis: int) -> np.ndarray:
    """Returns the ascending indices along `axis` of a global array that this process holds."""
    all_indices = np.arange(shape[axis])
    # The part of each local device, such as (slice(0, 4), slice(None)): a slice for each axis.
    slices_by_device = sharding.addressable_devices_indices_map(shape)
    return np.unique([all_indices[slices[axis]] for slices in slices_by_device.values()])


def _global_array(local: np.ndarray, sharding: NamedSharding, shape: tuple[int, ...]) -> jax.Array:
    """Makes a global array of the given shape from the part `local` of this process."""
    # The global indices that `local` holds, along each axis where it is only a part.
    global_indices_by_axis = {}
    for axis, local_size in enumerate(local.shape):
        if local_size < shape[axis]:
            global_indices_by_axis[axis] = _local_indices(sharding, shape, axis)

    def data_of_device(global_index: tuple[slice, ...]) -> np.ndarray:
        """Returns the data of one device, the part `global_index` of the global array."""
        local_index = list(global_index)
        for axis, global_indices in global_indices_by_axis.items():
            # If `local` holds the global rows [4, 5, 6, 7], global rows 6:8 are local rows 2:4.
            start, stop, _ = global_index[axis].indices(shape[axis])
            local_start = int(np.searchsorted(global_indices, start))
            local_index[axis] = slice(local_start, local_start + stop - start)
        return local[tuple(local_index)]

    return jax.make_array_from_callback(shape, sharding, data_of_device)


def least_memory(config: Config) -> int:
    """Returns a lower bound of a run's memory: bytes of parameters, gradients and a batch."""
    num_trials = len(config.trials.trials())
    num_parameters = int(cost.measured(config.model, 'total'))
    bytes_per_parameter = 2 * 4  # a float32 and its gradient
    bytes_of_floats = bytes_per_parameter * num_trials * num_parameters

    num_rows = math.prod(leading_shape(config))  # of all steps and trials of a dispatch
    arrays = task_of(config).array_shapes(config.model).values()
    bytes_per_row = sum(length * np.dtype(dtype).itemsize for length, dtype in arrays)
    return bytes_of_floats + num_rows * bytes_per_row


def require_memory(config: Config) -> None:
    """Raises ConfigError if a run needs more memory than the devices of its mesh have."""
    needed = least_memory(config)  # only parameters, gradients and a batch, in bytes
    available = _memory_of_mesh(config.mesh)
    if needed <= available:
        return

    model = config.model
    num_parameters = cost.measured(model, 'total')
    num_trials = len(config.trials.trials())
    trials_text = '1 trial' if num_trials == 1 else f'{num_trials} trials'
    needed_gib = needed / 2**30
    available_gib = available / 2**30
    raise ConfigError(
        f'{trials_text} of {num_parameters:,} parameters (model.vocab_size={model.vocab_size}, '
        f'model.d_model={model.d_model}, model.num_layers={model.num_layers}) '
        f'and batches of train.batch_size={config.train.batch_size} need '
        f'{needed_gib:,.1f} GiB, more than the {available_gib:,.1f} GiB of the devices; '
        'reduce these or use more devices'
    )


def _memory_of_mesh(mesh: MeshConfig) -> int:
    """Returns the bytes of memory of all devices of a mesh.

    Assumes that all processes of the job have as much memory as this one.
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
        # CPU devices report no limit, and share the memory of the machine.
        memory_of_process = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    # Every process has the same number of devices.
    num_processes = len(devices) // len(local_devices)
    return memory_of_process * num_processes
