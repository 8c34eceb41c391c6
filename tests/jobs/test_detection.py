"""Jobs read from the variables of every engine; what is incomplete is refused."""

import dataclasses

import pytest
from jax._src.clusters import cloud_tpu_cluster

from qkattn.errors import ConfigError
from qkattn.jobs import machine
from qkattn.jobs.detection import Job, detect

EXPLICIT = {
    'JAX_COORDINATOR_ADDRESS': '10.0.0.1:1234',
    'JAX_NUM_PROCESSES': '4',
    'JAX_PROCESS_ID': '3',
}
EXPLICIT_JOB = Job(num_processes=4, process_id=3, engine='explicit', coordinator='10.0.0.1:1234')

SLURM = {
    'SLURM_JOB_ID': '5000',
    'SLURM_STEP_NUM_TASKS': '4',
    'SLURM_STEP_NUM_NODES': '2',
    'SLURM_PROCID': '3',
    'SLURM_STEP_NODELIST': 'gpu[007-008,011],big1',
    'SLURM_LOCALID': '1',
    'SLURM_NTASKS': '5',
}
# 61440 + 5000 % 4096 = 62344 is the port that jax computes from the job ID.
SLURM_JOB = Job(num_processes=4, process_id=3, engine='slurm', coordinator='gpu007:62344')

MPI = {
    'OMPI_COMM_WORLD_SIZE': '4',
    'OMPI_COMM_WORLD_RANK': '2',
    'OMPI_COMM_WORLD_LOCAL_RANK': '0',
    'OMPI_COMM_WORLD_LOCAL_SIZE': '2',
    'OMPI_MCA_orte_hnp_uri': '1531576320.0;tcp://10.96.0.1,10.148.0.1:34911',
}
MPI_PORT = 61440 + 1531576320 // 4096 % 4096  # as jax computes it from the job ID
MPI_JOB = Job(num_processes=4, process_id=2, engine='openmpi', coordinator=f'10.96.0.1:{MPI_PORT}')

GKE = {'TPU_WORKER_HOSTNAMES': 'w-0.svc,w-1.svc', 'TPU_WORKER_ID': '1'}
GKE_JOB = Job(num_processes=2, process_id=1, engine='gke', coordinator='w-0.svc:8482')

# Three slices of two processes each.
SLICES = GKE | {
    'MEGASCALE_NUM_SLICES': '3',
    'MEGASCALE_SLICE_ID': '2',
    'MEGASCALE_COORDINATOR_ADDRESS': 's0-w-0.svc:8080',
}
SLICES_JOB = Job(num_processes=6, process_id=5, engine='gke', coordinator='s0-w-0.svc:8482')

PORT = {'JAX_COORDINATOR_PORT': '7777'}
ADDRESS = {'JAX_COORDINATOR_ADDRESS': 'h:1'}


@pytest.fixture
def detect_job(monkeypatch):
    """detect_job(environ) detects the job of a process that has only these variables.

    A job is a group of processes that train together. An engine, such as Slurm, describes the job
    to each process in environment variables.
    """

    def detect_in(environ: dict[str, str]) -> Job:
        """Sets the variables, removes all others that `detect` reads, and calls it."""
        known_variables = {*EXPLICIT, *SLURM, *MPI, *SLICES, *PORT}
        for name in {*known_variables, 'CUDA_VISIBLE_DEVICES', 'JAX_PLATFORMS'}:
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)

        # With these replacements, jax does not ask the network about TPUs and hosts.
        has_tpus = any('TPU' in name for name in environ)
        monkeypatch.setattr(cloud_tpu_cluster, 'running_in_cloud_tpu_vm', has_tpus)
        monkeypatch.setattr(cloud_tpu_cluster.socket, 'gethostbyname', lambda host: '10.0.0.1')
        monkeypatch.setattr(cloud_tpu_cluster, 'get_tpu_env_value_from_metadata', lambda key: None)
        monkeypatch.setenv('TPU_SKIP_MDS_QUERY', '1')
        return detect()

    return detect_in


@pytest.mark.parametrize(
    'environ',
    [
        pytest.param({}, id='no variable'),
        pytest.param(
            {'SLURM_JOB_ID': '7', 'SLURM_NTASKS': '4', 'SLURM_PROCID': '0'},
            id='slurm without a step',
        ),
        pytest.param(SLURM | {'SLURM_STEP_NUM_TASKS': '1'}, id='slurm with one task'),
        pytest.param(MPI | {'OMPI_COMM_WORLD_SIZE': '1'}, id='openmpi with one process'),
        pytest.param(
            {'TPU_WORKER_HOSTNAMES': 'localhost', 'TPU_WORKER_ID': '0'}, id='gke with one worker'
        ),
    ],
)
def test_a_single_process_is_a_job_of_its_own(environ, detect_job):
    assert detect_job(environ) == Job()


@pytest.mark.parametrize(
    ('environ', 'job'),
    [
        pytest.param(EXPLICIT, EXPLICIT_JOB, id='explicit'),
        pytest.param(EXPLICIT | SLURM | MPI, EXPLICIT_JOB, id='explicit in slurm and openmpi'),
        pytest.param(SLURM, SLURM_JOB, id='slurm'),
        pytest.param(
            SLURM | PORT,
            dataclasses.replace(SLURM_JOB, coordinator='gpu007:7777'),
            id='slurm with a port',
        ),
        pytest.param(SLURM | MPI, MPI_JOB, id='openmpi in slurm'),
        pytest.param(MPI, MPI_JOB, id='openmpi'),
        pytest.param(
            MPI | ADDRESS,
            dataclasses.replace(MPI_JOB, coordinator='h:1'),
            id='openmpi with an address',
        ),
        pytest.param(GKE, GKE_JOB, id='gke'),
        # JAX takes an empty variable for one that is not set.
        pytest.param(GKE | {'JAX_PLATFORMS': ''}, GKE_JOB, id='gke with empty platforms'),
        pytest.param(SLICES, SLICES_JOB, id='gke with slices'),
    ],
)
def test_a_job_is_detected_from_the_variables_of_its_engine(environ, job, detect_job):
    assert detect_job(environ) == job


# `local_rank` is 0 or 1, the rank of one of two tasks on a node.
@pytest.mark.parametrize(
    ('cuda_visible_devices', 'gpus_on_node', 'local_rank', 'expected_ids'),
    [
        pytest.param('', '', '0', None, id='no GPUs'),
        pytest.param('0,1,2,3', '4', '0', (0, 1), id='first task sees all GPUs'),
        pytest.param('0,1,2,3', '4', '1', (2, 3), id='second task sees all GPUs'),
        pytest.param('0,1', '4', '1', (0, 1), id='task sees its own two GPUs'),
        pytest.param('3', '2', '1', (0,), id='task sees its own GPU'),
        pytest.param('0,1,2,3', None, '1', (2, 3), id='number on node not set'),
        pytest.param(None, None, '1', (2, 3), id='visible devices not set'),
    ],
)
def test_a_task_of_slurm_takes_its_share_of_the_visible_gpus(
    cuda_visible_devices, gpus_on_node, local_rank, expected_ids, detect_job, monkeypatch
):
    """Two tasks share a node. A task that sees all GPUs of the node takes half of them.

    A task that sees fewer GPUs takes all that it sees, because Slurm has given it these. An id is
    the index of a GPU among those that the task sees.
    """
    # If a variable is not set, GPUs are counted from device files, here four.
    monkeypatch.setattr(machine, 'accelerators', lambda platforms: ['0', '1', '2', '3'])
    environ = SLURM | {'SLURM_LOCALID': local_rank}
    if cuda_visible_devices is not None:
        environ['CUDA_VISIBLE_DEVICES'] = cuda_visible_devices
    if gpus_on_node is not None:
        environ['SLURM_GPUS_ON_NODE'] = gpus_on_node

    assert detect_job(environ).local_device_ids == expected_ids


def test_visible_gpus_that_tasks_cannot_share_equally_are_refused(detect_job, monkeypatch):
    """SLURM describes four tasks on two nodes, so two tasks would share the 3 GPUs of a node."""
    monkeypatch.setattr(machine, 'accelerators', lambda platforms: ['0', '1', '2', '3'])
    environ = SLURM | {
        'SLURM_LOCALID': '0',
        'CUDA_VISIBLE_DEVICES': '0,1,2',
        'SLURM_GPUS_ON_NODE': '3',
    }

    message = '^2 tasks on a node with 3 GPUs, of which each sees 3'
    with pytest.raises(ConfigError, match=message):
        detect_job(environ)


def test_tasks_of_slurm_that_share_gpus_unequally_are_refused(detect_job):
    """Of three tasks on two nodes, two share the GPUs of a node, and no variable tells them so."""
    environ = SLURM | {
        'SLURM_STEP_NUM_TASKS': '3',
        'SLURM_PROCID': '1',
        'CUDA_VISIBLE_DEVICES': '0,1,2,3',
        'SLURM_GPUS_ON_NODE': '4',
    }

    # 3 / 2 tasks per node would be rounded down to one task, which takes all GPUs.
    with pytest.raises(ConfigError, match='^3 tasks with GPUs on 2 nodes'):
        detect_job(environ)


@pytest.mark.parametrize(
    ('environ', 'message'),
    [
        ({'JAX_NUM_PROCESSES': '2'}, 'JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID must be set'),
        ({'JAX_COORDINATOR_ADDRESS': 'h:1'}, 'but not JAX_NUM_PROCESSES and JAX_PROCESS_ID'),
        (EXPLICIT | {'JAX_PROCESS_ID': '4'}, r'process id 4 \(explicit\) is not in 0 .. 3'),
        (EXPLICIT | {'JAX_PROCESS_ID': 'x'}, "JAX_PROCESS_ID='x' must be integers"),
        (EXPLICIT | {'JAX_COORDINATOR_ADDRESS': 'h:70000'}, "'h:70000' .* is not HOST:PORT"),
        (SLURM | {'SLURM_STEP_NUM_TASKS': 'x'}, 'variables of slurm are incomplete or malformed'),
        (MPI | {'OMPI_MCA_orte_hnp_uri': ''}, 'set JAX_COORDINATOR_ADDRESS=HOST:PORT'),
        (GKE | {'TPU_WORKER_ID': '2'}, r'process id 2 \(gke\) is not in 0 .. 1'),
    ],
)
def test_incomplete_or_wrong_variables_are_refused(environ, message, detect_job):
    with pytest.raises(ConfigError, match=message):
        detect_job(environ)
