"""Where arrays live: the mesh, parameters by the letters in their names, batches by their rows.

A process reads the rows of its own devices; `place_batch` and `place_rows` make them global.
"""

import dataclasses
import functools
import logging
import math
import os
import re
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qkattn.config import Config, MeshConfig
from qkattn.data.tasks.task_registry import task_of
from qkattn.errors import ConfigError
from qkattn.model import cost

# The first letter that divides is split over the mesh axis; V, and the logits, over both together.
# Never D over tensor: with the embedding's V over fsdp, jaxlib 0.10.2 and 0.12.0 return wrong sums
# from a scan over microbatches on a mesh of all three axes.
CANDIDATES = {'fsdp': 'VDERC', 'tensor': 'NKFHV'}
JOINT = 'V'
BATCH_AXES = ('data', 'fsdp')

log = logging.getLogger(__name__)


def require_devices(config: MeshConfig) -> None:
    """Raises ConfigError where the mesh needs more devices, or leaves some of a job idle."""
    wanted, present = math.prod(dataclasses.astuple(config)), len(jax.devices())
    mesh, processes = f'mesh {dataclasses.asdict(config)}', jax.process_count()
    if wanted > present:
        advice = f'; launch/local.py --devices_per_process={wanted} makes as many of a CPU'
        advice *= jax.default_backend() == 'cpu'
        raise ConfigError(f'{mesh} needs {wanted} devices, but there are {present}{advice}')
    if wanted < present and processes > 1:
        devices = f'{wanted} of the {present} devices of {processes} processes'
        raise ConfigError(f'{mesh} uses {devices}; it must use all of them')


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh (trial, data, fsdp, tensor) over the first of `devices`, by default all of the job.

    Neighbours along the last axes are near each other: tensor and fsdp cross from one process, and
    from one slice (TPU) or node (GPU) to another, only where the axes before them are too short.
    """
    if devices is None:
        require_devices(config)
        devices = jax.devices()
    names = ('trial', 'data', 'fsdp', 'tensor')
    shape = tuple(getattr(config, axis) for axis in names)
    if (size := math.prod(shape)) < len(devices):
        log.warning('the mesh uses %d of %d devices', size, len(devices))
    # jax.make_mesh refuses several slices, and a mesh such as 32 x 8 on a torus of 16 x 16 chips.
    devices = sorted(devices[:size], key=lambda device: getattr(device, 'slice_index', 0))
    if len({getattr(device, 'slice_index', 0) for device in devices}) > 1:
        arranged = np.array(devices).reshape(shape)
    else:
        arranged = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(arranged, names, axis_types=(AxisType.Auto,) * 4)


def spec(path: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """The partition of one leaf of the train state, by the letters of its axes.

    'params/blocks/mlp/w_in_DF' has XLDF: trials, layers, D and F. Others than parameters have X.
    """
    match = re.search(r'(?:^|/)[wbg](?:_[a-z\d]+)*_([A-Z]+)$', path)
    if not match and re.search(r'(^|/)params/', path):
        say_once(
            f'{path}: the name does not end in the letters of its axes, as w_q_DNH; replicated'
        )
    names = 'X' + ('L' if match and re.search(r'(^|/)blocks/', path) else '')
    names = (names + (match[1] if match else '')).ljust(len(shape), '.')[: len(shape)]
    axes: dict[str, tuple[str, ...]] = {'X': ('trial',)}
    for mesh_axis, candidates in CANDIDATES.items():
        present = [c for c in candidates if c in names and (c not in axes or c in JOINT)]
        if mesh.shape[mesh_axis] == 1 or not present:
            continue
        # Tensor before fsdp: what fsdp gathers of V is then the part that a device has in logits.
        over = {c: (mesh_axis, *axes.get(c, ())) for c in present}
        fitting = [c for c in present if shape[names.index(c)] % _devices(mesh, over[c]) == 0]
        if fitting[:1] != present[:1]:
            taken = f'split over {fitting[0]}' if fitting else f'replicated over {mesh_axis}'
            size = shape[names.index(present[0])]
            where = ' x '.join(f'{axis}={mesh.shape[axis]}' for axis in over[present[0]])
            say_once(f'{path}: {present[0]}={size} does not divide over {where}; {taken}')
        if fitting:
            axes[fitting[0]] = over[fitting[0]]
    # A mesh axis splits one axis of an array: the first N of w_talk_NN, and the second is whole.
    split = [axes.get(x, ()) if x not in names[:i] else () for i, x in enumerate(names)]
    return P(*(over if len(over) > 1 else (over or (None,))[0] for over in split))


def _devices(mesh: Mesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


@functools.cache
def say_once(message: str) -> None:
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
        if letters == 'VD' and array.shape[0] % mesh.shape['fsdp'] == 0:
            return array
        axes = {'B': BATCH_AXES} | ({'V': ('tensor',)} if mesh.shape['tensor'] > 1 else {})
        over = [axes.get(letter) for letter in letters]
        sizes = zip(over, array.shape, strict=True)
        split = [o if o and size % _devices(mesh, o) == 0 else None for o, size in sizes]
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, P(*split)))

    return place


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """For tokens_CXABT1: trials over `trial`, sequences of a microbatch over `data` and `fsdp`."""
    return NamedSharding(mesh, P(None, 'trial', None, BATCH_AXES))


def row_sharding(mesh: Mesh) -> NamedSharding:
    """For tokens_BT of an evaluation, which all trials share: rows over `data` and `fsdp`."""
    return NamedSharding(mesh, P(BATCH_AXES))


def leading_shape(config: Config) -> tuple[int, int, int, int]:
    """[C, X, A, B] of one dispatch: steps, trials, microbatches, rows."""
    train, trials = config.train, len(config.trials.trials())
    rows = train.batch_size // train.accumulation
    return train.steps_per_dispatch, trials, train.accumulation, rows


def local_share(config: Config, mesh: Mesh) -> tuple[np.ndarray, np.ndarray]:
    """Trials and rows (r // A of microbatch r % A) of a batch that this process holds, sorted."""
    _, _, A, _ = shape = leading_shape(config)
    trials, rows_B = (_held(batch_sharding(mesh), shape, axis) for axis in (1, 3))
    return trials, (rows_B[:, None] * A + np.arange(A)).ravel()


def local_rows(config: Config, mesh: Mesh) -> np.ndarray:
    """The rows of an evaluation batch that this process's devices hold."""
    return _held(row_sharding(mesh), (config.train.batch_size,), axis=0)


def place_batch(config: Config, mesh: Mesh, local: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """The global batch [C, X, A, B, ...] of one dispatch from the `local_share` of it."""
    # Cut into microbatches here, since a cut in the program would move rows between devices.
    C, X, A, B = leading_shape(config)

    def place(local_CXBT: np.ndarray) -> jax.Array:
        _, held, _, T = local_CXBT.shape
        local_CXABT = np.swapaxes(local_CXBT.reshape(C, held, -1, A, T), 2, 3)
        return _place(local_CXABT, batch_sharding(mesh), (C, X, A, B, T))

    return jax.tree.map(place, local)


def place_rows(config: Config, mesh: Mesh, local: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """The global evaluation batch [B, ...] from its `local_rows`."""
    B, rows = config.train.batch_size, row_sharding(mesh)
    return {name: _place(a_BT, rows, (B, *a_BT.shape[1:])) for name, a_BT in local.items()}


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


def least_memory(config: Config) -> int:
    """Bytes of parameters, gradients and a batch; a run holds more than these."""
    trials, parameters = len(config.trials.trials()), cost.measured(config.model, 'total')
    shapes = task_of(config).array_shapes(config.model).values()
    row = sum(length * np.dtype(dtype).itemsize for length, dtype in shapes)
    return 2 * 4 * trials * int(parameters) + math.prod(leading_shape(config)) * row


def require_memory(config: Config) -> None:
    """Raises ConfigError where the devices lack `least_memory`, however it is placed."""
    needed, model, trials = least_memory(config), config.model, len(config.trials.trials())
    devices = jax.devices()[: math.prod(dataclasses.astuple(config.mesh))]
    here = [device for device in devices if device.process_index == jax.process_index()]
    limits = [stats['bytes_limit'] for device in here if (stats := device.memory_stats())]
    # CPU devices report no limit and share the memory of the machine.
    present = sum(limits) or os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    present *= len(devices) // len(here)  # of all processes, as that of this one
    if needed > present:
        fields = ('vocab_size', 'd_model', 'num_layers')
        sizes = ', '.join(f'model.{name}={getattr(model, name)}' for name in fields)
        raise ConfigError(
            f'{trials} trial{"s" * (trials > 1)} of {cost.measured(model, "total"):,} parameters '
            f'({sizes}) and batches of train.batch_size={config.train.batch_size} need '
            f'{needed / 2**30:,.1f} GiB, more than the {present / 2**30:,.1f} GiB of the devices; '
            'reduce these or use more devices'
        )
