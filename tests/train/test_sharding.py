"""Rules from letters, and eight devices against one."""

import dataclasses
import logging

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from qkattn.config import MeshConfig
from qkattn.errors import ConfigError
from qkattn.train import placement, program, sharding


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
        ('p/w_embedding_VD', (2, 256, 32), P('trial', 'fsdp', None)),
        ('p/blocks/a/w_o_NHD', (2, 3, 4, 8, 32), P('trial', None, 'tensor', None, 'fsdp')),
        # 3 heads do not divide over 2 devices: the head size takes their place
        ('p/blocks/a/w_q_DNH', (2, 3, 33, 3, 8), P('trial', None, None, None, 'tensor')),
    ],
)
def test_rules_follow_the_letters_of_the_name(path, shape, want):
    mesh = sharding.make_mesh(MeshConfig(trial=2, fsdp=2, tensor=2))
    assert sharding.spec(path, shape, mesh) == want


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


MESHES = [
    MeshConfig(data=2, fsdp=2, tensor=2),
    MeshConfig(trial=2, data=2, tensor=2),
    MeshConfig(trial=2, fsdp=2, tensor=2),
    MeshConfig(data=4),
    MeshConfig(fsdp=4, tensor=2),
]


@pytest.fixture(scope='module')
def one_device():
    """Losses on one device by lifting."""
    return {}


def three_steps(tiny, mesh, lifting):
    config = tiny(train={'num_steps': 3, 'accumulation': 2, 'steps_per_dispatch': 3})
    tokens_CXBT1 = np.random.default_rng(0).integers(0, 256, (3, 2, 8, 17)).astype(np.int32)
    local = {
        'tokens_BT': tokens_CXBT1[..., :-1],
        'targets_BT': tokens_CXBT1[..., 1:],
        'loss_weights_BT': np.ones((3, 2, 8, 16), np.float32),
    }
    built = program.build(dataclasses.replace(config, mesh=mesh), lifting)
    rows = placement.local_rows(config, built.mesh)
    batch = placement.place_batch(config, built.mesh, local, rows)
    return built, *built.train(built.init(), batch)


@pytest.mark.parametrize(
    ('mesh', 'lifting'),
    [(mesh, 'map') for mesh in MESHES] + [(mesh, 'vmap') for mesh in MESHES[1:3]],
    ids=lambda m: m if isinstance(m, str) else f'{m.trial}{m.data}{m.fsdp}{m.tensor}',
)
def test_losses_do_not_depend_on_the_mesh(
    tiny, one_device, mesh, lifting, without_rematerialization
):
    if lifting not in one_device:
        one_device[lifting] = three_steps(tiny, MeshConfig(), lifting)[2]['loss']
    with without_rematerialization():
        built, state, got = three_steps(tiny, mesh, lifting)
    np.testing.assert_allclose(got['loss'], one_device[lifting], atol=1e-5)
    for leaf, planned in zip(
        jax.tree.leaves(state), jax.tree.leaves(built.abstract_state), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(planned.sharding, leaf.ndim)
