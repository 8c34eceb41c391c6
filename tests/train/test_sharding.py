"""The mesh, arrays by the letters of their names, batches by their rows, memory."""

import dataclasses
import logging

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from qkattn.config import Config, MeshConfig, ModelConfig, TrainConfig, TrialsConfig
from qkattn.errors import ConfigError
from qkattn.model import cost
from qkattn.train import sharding


def test_an_array_is_split_by_the_letters_of_its_name(caplog):
    mesh = sharding.make_mesh(MeshConfig(trial=2, fsdp=2, tensor=2))
    sharding.say_once.cache_clear()
    caplog.set_level(logging.INFO)
    for path, shape, want in (
        ('p/blocks/a/w_q_DNH', (2, 3, 32, 4, 8), P('trial', None, 'fsdp', 'tensor', None)),
        ('params/blocks/a/w_q2_DNH', (2, 3, 32, 4, 8), P('trial', None, 'fsdp', 'tensor', None)),
        ('params/blocks/a/w_Query_DNH', (2, 3, 32, 4, 8), P('trial')),
        ('s/0/mu/blocks/mlp/w_in_DF', (2, 3, 32, 64), P('trial', None, 'fsdp', 'tensor')),
        ('trials/opt_state/1/0/count', (2,), P('trial')),
        ('p/final_norm/g_D', (2, 32), P('trial', 'fsdp')),
        ('p/w_embedding_VD', (2, 256, 32), P('trial', ('tensor', 'fsdp'), None)),
        ('p/w_output_DV', (2, 32, 256), P('trial', None, ('tensor', 'fsdp'))),
        # 50 tokens divide over 2 devices, but not over 4.
        ('p/w_embedding_VD', (2, 50, 32), P('trial', 'fsdp', None)),
        # A mesh axis splits one of two axes of the same letter.
        ('p/blocks/a/w_mix_DNND', (2, 3, 8, 4, 4, 8), P('trial', None, 'fsdp', 'tensor')),
        # 3 heads do not divide over 2 devices: the head size takes their place
        ('p/blocks/a/w_q_DNH', (2, 3, 33, 3, 8), P('trial', None, None, None, 'tensor')),
    ):
        for _ in range(2):
            spec = sharding.spec(path, shape, mesh)
        assert tuple(spec) == (*want, *[None] * (len(spec) - len(want))), path
    assert caplog.text.count('params/') == caplog.text.count('params/blocks/a/w_Query_DNH: ') == 1


@dataclasses.dataclass(frozen=True)
class Device:
    """What a mesh asks of a GPU, which has a node, or a TPU, which has coordinates."""

    id: int
    slice_index: int = 0
    coords: tuple[int, int, int] = (0, 0, 0)
    core_on_chip: int = 0
    process_index: int = 0
    platform: str = 'gpu'
    device_kind: str = 'H100'


def test_inner_axes_stay_inside_a_node_where_they_can():
    # In an order that is not that of the nodes.
    devices = [Device(id=i, slice_index=i % 2) for i in range(8)]
    for mesh, crossing in (
        (MeshConfig(data=2, tensor=4), 'data'),
        (MeshConfig(trial=2, data=2, fsdp=2), 'trial'),
        (MeshConfig(data=4, fsdp=2), 'data'),
        (MeshConfig(fsdp=4, tensor=2), 'fsdp'),
    ):
        built = sharding.make_mesh(mesh, devices)
        assert dict(built.shape) == dataclasses.asdict(mesh)
        assert {d.id for d in built.devices.flat} == set(range(8))
        node = np.vectorize(lambda d: d.slice_index)(built.devices)
        across = [name for i, name in enumerate(built.axis_names) if np.ptp(node, axis=i).any()]
        assert across == [crossing]


def test_an_axis_may_span_a_part_of_a_side_of_the_torus():
    """`jax.make_mesh` refuses 8 x 2 on a torus of 4 x 4."""
    kind = {'platform': 'tpu', 'device_kind': 'TPU v6 lite'}
    devices = [Device(id=i, coords=(i // 4, i % 4, 0), **kind) for i in range(16)]
    built = sharding.make_mesh(MeshConfig(trial=8, data=2), devices)
    assert {d.id for d in built.devices.flat} == set(range(16))
    with pytest.raises(ConfigError, match="'data': 16.*needs 16 devices, but there are 8"):
        sharding.make_mesh(MeshConfig(data=16))


# Batches and memory

CONFIG = Config(
    model=ModelConfig(d_model=16, num_layers=1, num_heads=2, context=16),
    train=TrainConfig(steps_per_dispatch=5, batch_size=4),
    trials=TrialsConfig(seeds=(0, 1, 2)),
)


def test_a_training_step_has_to_fit_into_memory(monkeypatch):
    model = dataclasses.replace(CONFIG.model, vocab_size=2**31 - 1)
    with pytest.raises(ConfigError, match='model.vocab_size=2147483647.* 768.0 GiB, more than the'):
        sharding.require_memory(dataclasses.replace(CONFIG, model=model))
    # Float32 parameters and gradients; tokens, targets and loss weights of 5 steps of 4 rows.
    needed = 2 * 4 * 3 * cost.measured(CONFIG.model, 'total') + 5 * 3 * 4 * (3 * 16) * 4
    memory = {'SC_PAGE_SIZE': 1, 'SC_PHYS_PAGES': needed}
    monkeypatch.setattr(sharding.os, 'sysconf', memory.__getitem__)
    sharding.require_memory(CONFIG)
    memory['SC_PHYS_PAGES'] -= 1
    with pytest.raises(ConfigError, match='3 trials of 7,472 parameters'):
        sharding.require_memory(CONFIG)


MESHES = [MeshConfig(data=2, fsdp=2, tensor=2), MeshConfig(trial=2, data=4), MeshConfig(data=8)]
# Devices by process: a block each; rows of devices that are not consecutive; one with other trials.
DEVICES_BY_PROCESS = [
    [[0, 1, 2, 3], [4, 5, 6, 7]],
    [[0, 1, 4, 5], [2, 3, 6, 7]],
    [[0, 1, 2], [3, 4, 5], [6, 7]],
]


@pytest.mark.parametrize('job', DEVICES_BY_PROCESS, ids=['blocks', 'spread', 'unequal'])
@pytest.mark.parametrize('mesh', MESHES, ids=str)
def test_a_process_reads_the_rows_that_its_devices_hold(mesh, job, monkeypatch):
    train = TrainConfig(steps_per_dispatch=3, batch_size=16, accumulation=2)
    trials = TrialsConfig(seeds=(0, 1, 2, 3))
    config = dataclasses.replace(CONFIG, train=train, trials=trials, mesh=mesh)
    over = sharding.make_mesh(mesh)
    batch = np.random.default_rng(0).integers(0, 99, (3, 4, 16, 5), np.int32)
    rows = np.random.default_rng(1).integers(0, 99, (16, 5), np.int32)
    placed_batch = sharding.place_batch(config, over, {'_': batch})['_']
    placed_rows = sharding.place_rows(config, over, {'_': rows})['_']
    for a in range(2):  # rows become microbatches in turn
        np.testing.assert_array_equal(placed_batch[:, :, a], batch[:, :, a::2])
    read = np.zeros((len(job), 4, 16), bool)
    own_batch = {}
    own_rows = {}
    for process, ids in enumerate(job):

        def mine(self, shape, ids=ids):
            return {d: i for d, i in self.devices_indices_map(shape).items() if d.id in ids}

        def keep(shape, placed, part, mine=mine):
            return {device.id: part(index) for device, index in mine(placed, shape).items()}

        with monkeypatch.context() as patch:
            patch.setattr(NamedSharding, 'addressable_devices_indices_map', mine)
            patch.setattr(jax, 'make_array_from_callback', keep)
            trials, numbers = sharding.local_share(config, over)
            own = {'_': batch[:, trials][:, :, numbers]}
            own_batch |= sharding.place_batch(config, over, own)['_']
            own = {'_': rows[sharding.local_rows(config, over)]}
            own_rows |= sharding.place_rows(config, over, own)['_']
        read[process][np.ix_(trials, numbers)] = True
    for placed, own in ((placed_batch, own_batch), (placed_rows, own_rows)):
        for shard in placed.addressable_shards:
            np.testing.assert_array_equal(own[shard.device.id], shard.data)
    assert read.any(0).all()
    if mesh.data * mesh.fsdp == 8 or (job is DEVICES_BY_PROCESS[0] and mesh.tensor == 1):
        assert read.sum() == 4 * 16  # nothing is read twice
    if mesh.trial == 2 and job is DEVICES_BY_PROCESS[0]:
        assert read[:, :, 0].tolist() == [[True, True, False, False], [False, False, True, True]]
