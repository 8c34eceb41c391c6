"""The mesh, the split of arrays and batches over its devices, and memory."""

import contextlib
import dataclasses
import logging

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from qkattn.config import Config, MeshConfig, ModelConfig, TrainConfig, TrialsConfig
from qkattn.errors import ConfigError
from qkattn.model import cost
from qkattn.train import sharding


@pytest.mark.parametrize(
    ('path', 'shape', 'partition'),
    [
        ('p/blocks/a/w_q_DNH', (2, 3, 32, 4, 8), ('trial', None, 'fsdp', 'tensor', None)),
        ('p/blocks/a/w_q2_DNH', (2, 3, 32, 4, 8), ('trial', None, 'fsdp', 'tensor', None)),
        ('s/0/mu/blocks/mlp/w_in_DF', (2, 3, 32, 64), ('trial', None, 'fsdp', 'tensor')),
        ('trials/opt_state/1/0/count', (2,), ('trial',)),
        ('p/final_norm/g_D', (2, 32), ('trial', 'fsdp')),
        ('p/w_embedding_VD', (2, 256, 32), ('trial', ('tensor', 'fsdp'), None)),
        ('p/w_output_DV', (2, 32, 256), ('trial', None, ('tensor', 'fsdp'))),
        # 50 tokens divide over 2 devices, but not over 4.
        ('p/w_embedding_VD', (2, 50, 32), ('trial', 'fsdp', None)),
        # D and N occur twice each. A mesh axis splits only one of the two.
        (
            'p/blocks/a/w_mix_DNND',
            (2, 3, 8, 4, 4, 8),
            ('trial', None, 'fsdp', 'tensor', None, None),
        ),
        # D = 33 and N = 3 do not divide over 2 devices, but the head size H = 8 does.
        ('p/blocks/a/w_q_DNH', (2, 3, 33, 3, 8), ('trial', None, None, None, 'tensor')),
    ],
)
def test_an_array_is_split_by_the_letters_of_its_name(path, shape, partition):
    """The first axis has the trials. In `blocks`, the second axis has the layers."""
    mesh = sharding.make_mesh(MeshConfig(trial=2, fsdp=2, tensor=2))
    spec = sharding.spec(path, shape, mesh)
    assert tuple(spec) == partition


def test_a_parameter_without_letters_of_its_axes_is_logged_once(caplog):
    """The letters at the end of a parameter's name, as in w_q2_DNH, say how to split it.

    The name w_Query_DNH is invalid, because 'Query' has an upper case letter. The parameter is
    split over trials only, and a message names it.
    """
    caplog.set_level(logging.INFO)
    sharding.say_once.cache_clear()  # forget the messages of other tests
    mesh = sharding.make_mesh(MeshConfig(trial=2, fsdp=2, tensor=2))
    # The sizes of the axes: 2 trials, 3 layers, D = 32, N = 4, H = 8.
    shape = (2, 3, 32, 4, 8)

    for _ in range(2):
        with_letters = sharding.spec('params/blocks/a/w_q2_DNH', shape, mesh)
        without_letters = sharding.spec('params/blocks/a/w_Query_DNH', shape, mesh)

    assert tuple(with_letters) == ('trial', None, 'fsdp', 'tensor', None)
    assert tuple(without_letters) == ('trial', None, None, None, None)

    # In two rounds, there is one message, about the invalid name.
    assert caplog.text.count('params/blocks/a/w_Query_DNH: ') == 1
    assert caplog.text.count('params/') == 1


@dataclasses.dataclass(frozen=True)
class Device:
    """A stand-in for a GPU in node `slice_index`, or for a TPU at `coords` in a torus."""

    id: int
    slice_index: int = 0
    coords: tuple[int, int, int] = (0, 0, 0)
    core_on_chip: int = 0
    process_index: int = 0
    platform: str = 'gpu'
    device_kind: str = 'H100'


@pytest.mark.parametrize(
    ('mesh_config', 'axis_across_nodes'),
    [
        (MeshConfig(data=2, tensor=4), 'data'),
        (MeshConfig(trial=2, data=2, fsdp=2), 'trial'),
        (MeshConfig(data=4, fsdp=2), 'data'),
        (MeshConfig(fsdp=4, tensor=2), 'fsdp'),
    ],
    ids=str,
)
def test_inner_axes_stay_inside_a_node(mesh_config, axis_across_nodes):
    """Only the outermost mesh axis of a size above 1 crosses nodes.

    From outermost to innermost, the axes are trial, data, fsdp and tensor. Devices along inner axes
    communicate most, so they share a node.
    """
    # Two nodes of four devices. Even devices are in node 0 and odd devices in node 1.
    devices = [Device(id=i, slice_index=i % 2) for i in range(8)]

    mesh = sharding.make_mesh(mesh_config, devices)

    assert dict(mesh.shape) == dataclasses.asdict(mesh_config)
    assert {device.id for device in mesh.devices.flat} == set(range(8))

    # An axis crosses nodes if a device along it is in another node than the first device.
    node_of_device = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    axes_across_nodes = []
    for axis, name in enumerate(mesh.axis_names):
        node_of_first = node_of_device.take([0], axis)
        if (node_of_device != node_of_first).any():
            axes_across_nodes.append(name)
    assert axes_across_nodes == [axis_across_nodes]


def test_a_mesh_axis_may_span_a_part_of_a_side_of_the_torus():
    """A torus of 4 x 4 TPUs can be a mesh of 8 x 2.

    `jax.make_mesh` refuses such a mesh, because it splits a side of the torus in two.
    """
    devices = []
    for i in range(16):
        row, column = divmod(i, 4)
        device = Device(id=i, coords=(row, column, 0), platform='tpu', device_kind='TPU v6 lite')
        devices.append(device)

    mesh = sharding.make_mesh(MeshConfig(trial=8, data=2), devices)

    # Every device is in the mesh.
    assert {device.id for device in mesh.devices.flat} == set(range(16))


def test_a_mesh_of_more_devices_than_there_are_is_refused():
    with pytest.raises(ConfigError, match="'data': 16.*needs 16 devices, but there are 8"):
        sharding.make_mesh(MeshConfig(data=16))


# Batches and memory

CONFIG = Config(
    model=ModelConfig(d_model=16, num_layers=1, num_heads=2, context=16),
    train=TrainConfig(steps_per_dispatch=5, batch_size=4),
    trials=TrialsConfig(seeds=(0, 1, 2)),
)


def test_a_model_that_does_not_fit_into_memory_is_refused():
    model = dataclasses.replace(CONFIG.model, vocab_size=2**31 - 1)
    config = dataclasses.replace(CONFIG, model=model)
    with pytest.raises(ConfigError, match='model.vocab_size=2147483647.* 768.0 GiB, more than the'):
        sharding.require_memory(config)


def test_parameters_gradients_and_a_batch_have_to_fit_into_memory(monkeypatch):
    """A run is refused if the machine has one byte less than its largest arrays need."""
    # CONFIG has 3 trials and 5 steps per dispatch. A batch has 4 rows of 16 tokens.
    bytes_per_number = 4
    num_trials = 3
    num_parameters = cost.measured(CONFIG.model, 'total')
    parameters_and_gradients = 2 * num_trials * num_parameters * bytes_per_number
    steps = 5
    rows = 4
    context = 16
    arrays = 3  # tokens, targets and loss weights
    batch = steps * num_trials * rows * context * arrays * bytes_per_number
    needed = parameters_and_gradients + batch

    # The machine has as many bytes of memory as are needed: `needed` pages of 1 byte.
    memory = {'SC_PAGE_SIZE': 1, 'SC_PHYS_PAGES': needed}
    monkeypatch.setattr(sharding.os, 'sysconf', memory.__getitem__)
    sharding.require_memory(CONFIG)

    memory['SC_PHYS_PAGES'] = needed - 1
    assert num_parameters == 7472
    with pytest.raises(ConfigError, match='3 trials of 7,472 parameters'):
        sharding.require_memory(CONFIG)


# Device IDs of each process of a job.
BLOCKS = [[0, 1, 2, 3], [4, 5, 6, 7]]
SPREAD = [[0, 1, 4, 5], [2, 3, 6, 7]]
UNEQUAL = [[0, 1, 2], [3, 4, 5], [6, 7]]

OVER_ROWS_AND_TENSOR = MeshConfig(data=2, fsdp=2, tensor=2)
OVER_TRIALS_AND_ROWS = MeshConfig(trial=2, data=4)
OVER_ROWS = MeshConfig(data=8)

BATCH_CONFIG = dataclasses.replace(
    CONFIG,
    train=TrainConfig(steps_per_dispatch=3, batch_size=16, accumulation=2),
    trials=TrialsConfig(seeds=(0, 1, 2, 3)),
)


@contextlib.contextmanager
def as_process_with(device_ids):
    """Makes this process act as if it had only the devices `device_ids` of a job.

    In the block, a placed array is a dict with the part of each of these devices, by ID.
    """

    def indices_of_devices(self, shape):
        """Returns the slice of an array of `shape` that each device of this process holds."""
        indices = self.devices_indices_map(shape)
        return {device: indices[device] for device in indices if device.id in device_ids}

    def parts_by_device(shape, array_sharding, part_of_device):
        """Replaces jax.make_array_from_callback. Returns the part of each device, by ID."""
        indices = indices_of_devices(array_sharding, shape)
        return {device.id: part_of_device(index) for device, index in indices.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NamedSharding, 'addressable_devices_indices_map', indices_of_devices)
        patch.setattr(jax, 'make_array_from_callback', parts_by_device)
        yield


def shares_read(mesh_config, job):
    """Returns an array [p, x, r]: whether process p reads row r of the batch of trial x.

    `job` holds the device IDs of each process. Each of 4 trials has 16 rows in a batch.
    """
    config = dataclasses.replace(BATCH_CONFIG, mesh=mesh_config)
    mesh = sharding.make_mesh(mesh_config)
    is_read = np.zeros((len(job), 4, 16), bool)
    for process, device_ids in enumerate(job):
        with as_process_with(device_ids):
            trials, rows = sharding.local_share(config, mesh)
        is_read[process][np.ix_(trials, rows)] = True
    return is_read


JOBS = [
    pytest.param(BLOCKS, id='blocks'),
    pytest.param(SPREAD, id='spread'),
    pytest.param(UNEQUAL, id='unequal'),
]
MESHES = [OVER_ROWS_AND_TENSOR, OVER_TRIALS_AND_ROWS, OVER_ROWS]


@pytest.mark.parametrize('mesh_config', MESHES, ids=str)
def test_rows_become_microbatches_in_turn(mesh_config):
    """The first of two microbatches has the even rows of a batch, and the second the odd rows."""
    config = dataclasses.replace(BATCH_CONFIG, mesh=mesh_config)
    mesh = sharding.make_mesh(mesh_config)
    # 3 steps of 4 trials on 16 rows of 5 tokens.
    batch = np.random.default_rng(0).integers(0, 99, (3, 4, 16, 5), np.int32)

    placed = sharding.place_batch(config, mesh, {'tokens': batch})['tokens']

    # Axis 2 of the placed batch has the microbatches.
    np.testing.assert_array_equal(placed[:, :, 0], batch[:, :, 0::2])
    np.testing.assert_array_equal(placed[:, :, 1], batch[:, :, 1::2])


@pytest.mark.parametrize('job', JOBS)
@pytest.mark.parametrize('mesh_config', MESHES, ids=str)
def test_processes_make_the_arrays_that_one_process_makes(mesh_config, job):
    """A device gets the same part of a batch, whether one or several processes read the batch.

    `job` holds the device IDs of each process. Inside `as_process_with`, a placed array is a dict
    with the part of each device, by ID.
    """
    config = dataclasses.replace(BATCH_CONFIG, mesh=mesh_config)
    mesh = sharding.make_mesh(mesh_config)
    # 3 steps of 4 trials on 16 rows of 5 tokens, and an evaluation batch of 16 rows.
    train_batch = np.random.default_rng(0).integers(0, 99, (3, 4, 16, 5), np.int32)
    eval_batch = np.random.default_rng(1).integers(0, 99, (16, 5), np.int32)

    # Each process reads its share of rows, and makes the parts of its own devices.
    train_parts = {}
    eval_parts = {}
    for device_ids in job:
        with as_process_with(device_ids):
            trials, rows = sharding.local_share(config, mesh)
            batches_of_trials = train_batch[:, trials]
            local_train_batch = {'tokens': batches_of_trials[:, :, rows]}
            train_parts |= sharding.place_batch(config, mesh, local_train_batch)['tokens']

            eval_rows = sharding.local_rows(config, mesh)
            local_eval_batch = {'tokens': eval_batch[eval_rows]}
            eval_parts |= sharding.place_rows(config, mesh, local_eval_batch)['tokens']

    # One process reads all rows. Each shard of its array must equal the part of the same device.
    train_array = sharding.place_batch(config, mesh, {'tokens': train_batch})['tokens']
    eval_array = sharding.place_rows(config, mesh, {'tokens': eval_batch})['tokens']
    for shard in train_array.addressable_shards:
        np.testing.assert_array_equal(train_parts[shard.device.id], shard.data)
    for shard in eval_array.addressable_shards:
        np.testing.assert_array_equal(eval_parts[shard.device.id], shard.data)


@pytest.mark.parametrize('job', JOBS)
@pytest.mark.parametrize('mesh_config', MESHES, ids=str)
def test_processes_together_read_every_row(mesh_config, job):
    is_read = shares_read(mesh_config, job)
    assert is_read.any(axis=0).all()


@pytest.mark.parametrize(
    ('mesh_config', 'job'),
    [
        (OVER_ROWS, BLOCKS),
        (OVER_ROWS, SPREAD),
        (OVER_ROWS, UNEQUAL),
        (OVER_TRIALS_AND_ROWS, BLOCKS),
    ],
    ids=str,
)
def test_no_row_is_read_twice_if_processes_share_none(mesh_config, job):
    """In these jobs, no two processes have devices that hold the same rows."""
    # is_read[p, x, r] says whether process p reads row r of trial x.
    is_read = shares_read(mesh_config, job)
    num_processes_per_row = is_read.sum(axis=0)
    assert (num_processes_per_row == 1).all()


def test_a_process_reads_only_the_trials_of_its_devices():
    """The mesh splits 4 trials into two halves. Each process has the devices of one half."""
    # is_read[p, x, r] says whether process p reads row r of trial x.
    is_read = shares_read(OVER_TRIALS_AND_ROWS, BLOCKS)
    is_trial_read = is_read[:, :, 0]
    assert is_trial_read.tolist() == [
        [True, True, False, False],  # process 0
        [False, False, True, True],  # process 1
    ]
