"""Jobs read from the variables of every engine; what is incomplete is refused."""

import pytest
from jax._src.clusters import cloud_tpu_cluster

from qkattn.errors import ConfigError
from qkattn.jobs import machine
from qkattn.jobs.detection import TRIPLE, Job, detect


def variables_of(text: str) -> dict[str, str]:
    return dict(word.split('=', 1) for word in text.split())


EXPLICIT = dict(zip(TRIPLE, ('10.0.0.1:1234', '4', '3'), strict=True))
SLURM = variables_of(
    'SLURM_JOB_ID=5000 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=2 SLURM_PROCID=3 '
    'SLURM_STEP_NODELIST=gpu[007-008,011],big1 SLURM_LOCALID=1 SLURM_NTASKS=5'
)
MPI = variables_of(
    'OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_LOCAL_RANK=0 '
    'OMPI_COMM_WORLD_LOCAL_SIZE=2 '
    'OMPI_MCA_orte_hnp_uri=1531576320.0;tcp://10.96.0.1,10.148.0.1:34911'
)
GKE = variables_of('TPU_WORKER_HOSTNAMES=w-0.svc,w-1.svc TPU_WORKER_ID=1')
SLICES = GKE | variables_of('MEGASCALE_NUM_SLICES=3 MEGASCALE_SLICE_ID=2')
SLICES |= variables_of('MEGASCALE_COORDINATOR_ADDRESS=s0-w-0.svc:8080')
PORT = {'JAX_COORDINATOR_PORT': '7777'}
MPI_PORT = 61440 + 1531576320 // 4096 % 4096  # jax's, of this job


@pytest.fixture
def job_of(monkeypatch):
    """job_of(environ) -> the job of a process with these variables alone."""

    def make(environ: dict[str, str]) -> Job:
        variables = {*EXPLICIT, *SLURM, *MPI, *SLICES, *PORT}
        for name in {*variables, 'CUDA_VISIBLE_DEVICES', 'JAX_PLATFORMS'}:
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(
            cloud_tpu_cluster, 'running_in_cloud_tpu_vm', any('TPU' in name for name in environ)
        )
        monkeypatch.setattr(cloud_tpu_cluster.socket, 'gethostbyname', lambda host: '10.0.0.1')
        monkeypatch.setattr(cloud_tpu_cluster, 'get_tpu_env_value_from_metadata', lambda key: None)
        monkeypatch.setenv('TPU_SKIP_MDS_QUERY', '1')
        return detect()

    return make


@pytest.mark.parametrize(
    ('environ', 'job'),
    [
        ({}, Job()),
        ({'SLURM_JOB_ID': '7', 'SLURM_NTASKS': '4', 'SLURM_PROCID': '0'}, Job()),
        (SLURM | {'SLURM_STEP_NUM_TASKS': '1'}, Job()),
        (MPI | {'OMPI_COMM_WORLD_SIZE': '1'}, Job()),
        ({'TPU_WORKER_HOSTNAMES': 'localhost', 'TPU_WORKER_ID': '0'}, Job()),
        (EXPLICIT, Job(4, 3, 'explicit', '10.0.0.1:1234')),
        (EXPLICIT | SLURM | MPI, Job(4, 3, 'explicit', '10.0.0.1:1234')),
        (SLURM, Job(4, 3, 'slurm', 'gpu007:62344')),
        (SLURM | PORT, Job(4, 3, 'slurm', 'gpu007:7777')),
        (SLURM | MPI, Job(4, 2, 'openmpi', f'10.96.0.1:{MPI_PORT}')),
        (MPI, Job(4, 2, 'openmpi', f'10.96.0.1:{MPI_PORT}')),
        (MPI | {'JAX_COORDINATOR_ADDRESS': 'h:1'}, Job(4, 2, 'openmpi', 'h:1')),
        (GKE, Job(2, 1, 'gke', 'w-0.svc:8482')),
        (SLICES, Job(6, 5, 'gke', 's0-w-0.svc:8482')),
    ],
)
def test_a_job_is_detected_from_the_variables_of_every_engine(environ, job, job_of):
    assert job_of(environ) == job


# The visible GPUs, the number of GPUs of the node and the number of the task on its node, each as
# in its variable (None: unset), and the task's GPUs, or a part of the refusal.
@pytest.mark.parametrize(
    ('visible', 'on_node', 'local', 'expected'),
    [
        # Visible GPUs, their number on the node, which of two tasks this is, and its GPUs.
        ('', '', '0', None),
        ('0,1,2,3', '4', '0', (0, 1)),  # all of the node's: a block each
        ('0,1,2,3', '4', '1', (2, 3)),
        ('0,1', '4', '1', (0, 1)),  # its own already, as with --gpus-per-task
        ('3', '2', '1', (0,)),
        ('0,1,2,3', None, '1', (2, 3)),
        ('0,1,2', '3', '0', '^2 tasks on a node with 3 GPUs, of which each sees 3'),
        (None, None, '1', (2, 3)),  # none set, as by Open MPI: those of the machine
    ],
)
def test_a_task_of_slurm_takes_its_share_of_the_visible_gpus(
    visible, on_node, local, expected, job_of, monkeypatch
):
    monkeypatch.setattr(machine, 'accelerators', lambda platforms: ['0', '1', '2', '3'])
    variables = SLURM | {'SLURM_LOCALID': local}
    if visible is not None:
        variables['CUDA_VISIBLE_DEVICES'] = visible
    if on_node is not None:
        variables['SLURM_GPUS_ON_NODE'] = on_node
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            job_of(variables)
    else:
        assert job_of(variables).local_device_ids == expected


@pytest.mark.parametrize(
    ('environ', 'words'),
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
def test_incomplete_or_wrong_variables_are_refused(environ, words, job_of):
    with pytest.raises(ConfigError, match=words):
        job_of(environ)
