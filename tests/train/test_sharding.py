"""Placement of arrays by the letters of their names."""

import dataclasses
import logging
import math

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from qkattn.config import MeshConfig
from qkattn.errors import ConfigError
from qkattn.train import sharding


@pytest.mark.parametrize(
    ('path', 'shape', 'want'),
    [
        ('p/blocks/a/w_q_DNH', (2, 3, 32, 4, 8), P('trial', None, 'fsdp', 'tensor', None)),
        (
            'trials/opt_state/1/0/mu/blocks/mlp/w_in_DF',
            (2, 3, 32, 64),
            P('trial', None, 'fsdp', 'tensor'),
        ),
        ('trials/opt_state/1/0/count', (2,), P('trial')),
        ('trials/alive', (2,), P('trial')),
        ('p/final_norm/g_D', (2, 32), P('trial', 'fsdp')),
        ('p/w_embedding_VD', (2, 256, 32), P('trial', ('tensor', 'fsdp'), None)),
        ('p/w_output_DV', (2, 32, 256), P('trial', None, ('tensor', 'fsdp'))),
        # 50 tokens divide over 2 devices, but not over 4.
        ('p/w_embedding_VD', (2, 50, 32), P('trial', 'fsdp', None)),
        ('p/blocks/a/w_o_NHD', (2, 3, 4, 8, 32), P('trial', None, 'tensor', None, 'fsdp')),
        # A mesh axis splits one of two axes of the same letter.
        ('p/blocks/a/w_talk_NN', (2, 3, 4, 4), P('trial', None, 'tensor', None)),
        ('p/blocks/a/w_mix_DNND', (2, 3, 8, 4, 4, 8), P('trial', None, 'fsdp', 'tensor')),
        # 3 heads do not divide over 2 devices: the head size takes their place
        ('p/blocks/a/w_q_DNH', (2, 3, 33, 3, 8), P('trial', None, None, None, 'tensor')),
    ],
)
def test_rules_follow_the_letters_of_the_name(path, shape, want):
    mesh = sharding.make_mesh(MeshConfig(trial=2, fsdp=2, tensor=2))
    spec = sharding.spec(path, shape, mesh)
    assert tuple(spec) == (*want, *[None] * (len(spec) - len(want)))
    placed = jax.device_put(np.zeros(shape), NamedSharding(mesh, spec))
    axes = [axis for over in want if over for axis in ((over,) if isinstance(over, str) else over)]
    split = math.prod(mesh.shape[axis] for axis in axes)
    assert placed.addressable_shards[0].data.size == placed.size // split


def test_a_fallback_is_said_once_by_name(caplog):
    mesh = sharding.make_mesh(MeshConfig(tensor=4))
    with caplog.at_level(logging.INFO, 'qkattn'):
        for _ in range(2):
            sharding.spec('p/blocks/said_once/w_q_DNH', (1, 2, 32, 6, 8), mesh)
    assert [r.getMessage() for r in caplog.records if 'said_once' in r.getMessage()] == [
        'p/blocks/said_once/w_q_DNH: N=6 does not divide over tensor=4; split over H'
    ]


def test_a_mesh_of_more_devices_than_there_are_is_refused():
    with pytest.raises(ConfigError, match="'data': 16.*needs 16 devices, but there are 8"):
        sharding.make_mesh(MeshConfig(data=16))


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What a mesh asks of a device."""

    id: int
    slice_index: int
    platform: str = 'gpu'
    device_kind: str = 'H100'


@pytest.mark.parametrize(
    ('mesh', 'crossing'),
    [
        (MeshConfig(data=2, tensor=4), {'data'}),
        (MeshConfig(trial=2, data=2, fsdp=2), {'trial'}),
        (MeshConfig(data=4, fsdp=2), {'data'}),
        (MeshConfig(fsdp=8), {'fsdp'}),
        (MeshConfig(trial=1, fsdp=4, tensor=2), {'fsdp'}),
    ],
    ids=str,
)
def test_fsdp_and_tensor_stay_inside_a_node_where_they_can(mesh, crossing):
    """`jax.make_mesh` refuses the devices of several nodes."""
    # In an order that is not that of the nodes.
    devices = [Gpu(id=i, slice_index=i % 2) for i in range(8)]
    built = sharding.make_mesh(mesh, devices)
    assert dict(built.shape) == dataclasses.asdict(mesh)
    assert {d.id for d in built.devices.flat} == set(range(8))
    node = np.vectorize(lambda d: d.slice_index)(built.devices)
    found = {name for i, name in enumerate(built.axis_names) if np.ptp(node, axis=i).any()}
    assert found == crossing


@dataclasses.dataclass(frozen=True)
class Tpu:
    """What JAX asks a TPU for."""

    id: int
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    process_index: int = 0
    platform: str = 'tpu'
    device_kind: str = 'TPU v6 lite'


@pytest.mark.parametrize('mesh', [MeshConfig(trial=8, data=2), MeshConfig(data=4, fsdp=4)], ids=str)
def test_an_axis_may_span_a_part_of_a_side_of_the_torus(mesh):
    """`jax.make_mesh` refuses 8 x 2 on a torus of 4 x 4."""
    devices = [Tpu(id=i, coords=(i // 4, i % 4, 0)) for i in range(16)]
    built = sharding.make_mesh(mesh, devices)
    assert dict(built.shape) == dataclasses.asdict(mesh)
    assert {d.id for d in built.devices.flat} == set(range(16))


def test_a_mesh_that_does_not_fit_the_nodes_is_refused():
    devices = [Gpu(id=i, slice_index=i // 3) for i in range(8)]  # of 3, 3 and 2
    with pytest.raises(ConfigError, match='over 3 slices or nodes of 3, 3, 2 devices'):
        sharding.make_mesh(MeshConfig(data=8), devices)
