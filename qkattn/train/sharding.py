"""Where arrays live: one table from the letters in a parameter's name to the axes of the mesh."""

import dataclasses
import functools
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qkattn.config import MeshConfig
from qkattn.errors import ConfigError

# Candidates in order: the first letter of the name that divides is split over the mesh axis. V, and
# with it the logits, is split over fsdp and tensor together.
# D is never split over tensor: with the embedding split V over fsdp and D over tensor, jaxlib
# 0.10.2 and 0.12.0 return wrong sums from a scan over microbatches on a mesh of all three axes.
CANDIDATES = {'fsdp': 'VDERC', 'tensor': 'NKFHV'}
JOINT = 'V'

BATCH_AXES = ('data', 'fsdp')

log = logging.getLogger(__name__)


def require_devices(config: MeshConfig) -> None:
    """Raises ConfigError where the mesh does not fit the devices.

    One process may leave devices idle; of several, each has to have a part in every array.
    """
    wanted, present = math.prod(dataclasses.astuple(config)), len(jax.devices())
    if wanted > present:
        raise ConfigError(
            f'mesh {dataclasses.asdict(config)} needs {wanted} devices, but there are {present}'
        )
    if wanted < present and jax.process_count() > 1:
        raise ConfigError(
            f'mesh {dataclasses.asdict(config)} uses {wanted} of the {present} devices of '
            f'{jax.process_count()} processes; it must use all of them'
        )


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh (trial, data, fsdp, tensor) over the first of `devices`, by default all of the job.

    Neighbours along the last axes are near each other: tensor and fsdp cross from one process, and
    from one slice (TPU) or node (GPU) to another, only where the axes before them are too short.

    Raises:
      ConfigError: more devices asked for than there are, or a mesh that does not fit the slices.
    """
    shape = (config.trial, config.data, config.fsdp, config.tensor)
    if devices is None:
        require_devices(config)
        devices = jax.devices()
    wanted = math.prod(shape)
    if wanted < len(devices):
        log.warning('the mesh uses %d of %d devices', wanted, len(devices))
    names = ('trial', 'data', 'fsdp', 'tensor')
    devices, types = devices[:wanted], (AxisType.Auto,) * 4
    sizes = Counter(getattr(device, 'slice_index', 0) for device in devices).values()
    if len(sizes) == 1:
        # jax.make_mesh refuses a mesh such as 32 x 8 on a torus of 16 x 16 chips.
        arranged = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(arranged, names, axis_types=types)
    # Slices along each axis, as many as possible along the first ones.
    outer, left = [], len(sizes)
    for size in shape:
        outer.append(math.gcd(size, left))
        left //= outer[-1]
    inner = [size // span for size, span in zip(shape, outer, strict=True)]
    if left > 1 or len(set(sizes)) > 1:
        raise ConfigError(
            f'mesh {dataclasses.asdict(config)} cannot be laid over {len(sizes)} slices or nodes '
            f'of {", ".join(map(str, sizes))} devices; each must have its equal part of the axes'
        )
    arranged = mesh_utils.create_hybrid_device_mesh(
        inner, outer, devices, allow_split_physical_axes=True
    )
    return Mesh(arranged, names, axis_types=types)


def letters(path: str, num_axes: int) -> str:
    """One letter per axis: X for trials, L for layers, then those that the name ends with.

    'params/blocks/mlp/w_in_DF' with 4 axes -> 'XLDF'. A leaf that is no parameter has only X.
    """
    found = re.search(r'(?:^|/)[wbg](?:_[a-z]+)*_([A-Z]+)$', path)
    own = found[1] if found else ''
    leading = 'XL' if re.search(r'(^|/)blocks/', path) and own else 'X'
    return (leading + own).ljust(num_axes, '.')[:num_axes]


def spec(path: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> P:
    """The partition of one leaf of the train state, whose first axis is X."""
    names = letters(path, len(shape))
    if len(names) != len(shape):
        raise ValueError(f'{path} has shape {shape}, but its name says {names}')
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


def _devices(mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


@functools.cache
def say_once(message: str) -> None:
    log.info(message)


def state_shardings(state: dict, mesh: Mesh | AbstractMesh) -> dict:
    """A NamedSharding for every leaf of an (abstract) train state; `step` is replicated."""

    def one(path: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        return NamedSharding(mesh, P() if name == 'step' else spec(name, leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(one, state)


def batch_sharding(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """For tokens_CXABT1: trials over `trial`, sequences of a microbatch over `data` and `fsdp`."""
    return NamedSharding(mesh, P(None, 'trial', None, BATCH_AXES))


def place_activations(mesh: Mesh | AbstractMesh) -> Callable[[jax.Array, str], jax.Array]:
    """States how activations are split, for `qkattn.model.stack.placing`.

    Rows are split as those of the batch, V over tensor, and nothing else. Without fsdp XLA finds
    this by itself; with it, it would split D as that of the parameters and copy the batch. For the
    same reason embeddings that are stored split by D, those of positions and of a V that does not
    divide, are gathered before they are looked up.
    """
    if mesh.shape['fsdp'] == 1:
        return lambda array, letters: array

    def place(array: jax.Array, letters: str) -> jax.Array:
        if letters == 'VD' and array.shape[0] % mesh.shape['fsdp'] == 0:
            return array
        axes = {'B': BATCH_AXES} | ({'V': ('tensor',)} if mesh.shape['tensor'] > 1 else {})
        split = [
            axes[letter] if letter in axes and size % _devices(mesh, axes[letter]) == 0 else None
            for letter, size in zip(letters, array.shape, strict=True)
        ]
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, P(*split)))

    return place


def row_sharding(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """For tokens_BT of an evaluation, which all trials share: rows over `data` and `fsdp`."""
    return NamedSharding(mesh, P(BATCH_AXES))
