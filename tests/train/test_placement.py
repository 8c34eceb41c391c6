"""Whether a run fits in the memory of its devices, and what each process reads of a batch."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from qkattn.config import Config, MeshConfig, ModelConfig, TrainConfig, TrialsConfig
from qkattn.errors import ConfigError
from qkattn.model import cost
from qkattn.train import placement, sharding

CONFIG = Config(
    model=ModelConfig(d_model=16, num_layers=1, num_heads=2, context=16),
    train=TrainConfig(steps_per_dispatch=5, batch_size=4),
    trials=TrialsConfig(seeds=(0, 1, 2)),
)


def test_parameters_gradients_and_a_batch_have_to_fit(monkeypatch):
    # Float32 parameters and gradients; tokens, targets and loss weights of 5 steps of 4 rows.
    needed = 2 * 4 * 3 * cost.measured(CONFIG.model, 'total') + 5 * 3 * 4 * (3 * 16) * 4
    memory = {'SC_PAGE_SIZE': 1, 'SC_PHYS_PAGES': needed}
    monkeypatch.setattr(placement.os, 'sysconf', memory.__getitem__)
    placement.require_memory(CONFIG)
    memory['SC_PHYS_PAGES'] -= 1
    with pytest.raises(ConfigError, match='3 trials of 7,472 parameters'):
        placement.require_memory(CONFIG)


def test_sizes_that_no_machine_holds_are_refused_by_name():
    model = dataclasses.replace(CONFIG.model, vocab_size=2**31 - 1)
    with pytest.raises(ConfigError, match='model.vocab_size=2147483647.* 768.0 GiB, more than the'):
        placement.require_memory(dataclasses.replace(CONFIG, model=model))


MESHES = [
    MeshConfig(data=8),
    MeshConfig(data=2, fsdp=2, tensor=2),
    MeshConfig(trial=2, data=4),
    MeshConfig(trial=2, data=2, tensor=2),
    MeshConfig(trial=4, tensor=2),
    MeshConfig(fsdp=4, tensor=2),
]
# Devices by process: a block each; rows of devices that are not consecutive; one with other trials.
JOBS = [[[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 4, 5], [2, 3, 6, 7]], [[0, 1, 2], [3, 4, 5], [6, 7]]]


@pytest.mark.parametrize('job', JOBS, ids=['blocks', 'spread', 'unequal'])
@pytest.mark.parametrize('mesh', MESHES, ids=str)
def test_processes_read_what_their_devices_hold_and_place_the_batch(mesh, job, monkeypatch):
    config = dataclasses.replace(
        CONFIG,
        train=TrainConfig(steps_per_dispatch=3, batch_size=16, accumulation=2),
        trials=TrialsConfig(seeds=(0, 1, 2, 3)),
        mesh=mesh,
    )
    over = sharding.make_mesh(mesh)
    batch = {'tokens_BT': np.random.default_rng(0).integers(0, 99, (3, 4, 16, 5), np.int32)}
    rows = {'tokens_BT': np.random.default_rng(1).integers(0, 99, (16, 5), np.int32)}
    want = {
        'batch': placement.place_batch(config, over, batch)['tokens_BT'],
        'rows': placement.place_rows(config, over, rows)['tokens_BT'],
    }
    given: dict = {'batch': {}, 'rows': {}}
    read = np.zeros((len(job), 4, 16), bool)
    for process, ids in enumerate(job):

        def mine(self, shape, ids=ids):
            return {d: i for d, i in self.devices_indices_map(shape).items() if d.id in ids}

        def keep(shape, placed, part, mine=mine):
            return {device.id: part(index) for device, index in mine(placed, shape).items()}

        with monkeypatch.context() as patch:
            patch.setattr(NamedSharding, 'addressable_devices_indices_map', mine)
            patch.setattr(jax, 'make_array_from_callback', keep)
            share, numbers = placement.local_share(config, over), placement.local_rows(config, over)
            own = batch['tokens_BT'][:, share.trials][:, :, share.rows]
            given['batch'] |= placement.place_batch(config, over, {'_': own})['_']
            own = rows['tokens_BT'][numbers]
            given['rows'] |= placement.place_rows(config, over, {'_': own})['_']
        read[process][np.ix_(share.trials, share.rows)] = True
    for name, array in want.items():
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(given[name][shard.device.id], shard.data)
    assert read.any(0).all()
    if math.prod((mesh.data, mesh.fsdp)) == 8 or (job is JOBS[0] and mesh.tensor == 1):
        assert read.sum() == 4 * 16  # nothing is read twice
    if mesh.trial == 2 and job is JOBS[0]:
        assert read[:, :, 0].tolist() == [[True, True, False, False], [False, False, True, True]]
