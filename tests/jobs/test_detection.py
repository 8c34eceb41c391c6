"""Jobs read from the variables of every engine; what is incomplete or contradicts is refused."""

import pytest

from qkattn.errors import ConfigError
from qkattn.jobs.detection import TRIPLE, Job, detect


def environ(text: str) -> dict[str, str]:
    return dict(word.split('=', 1) for word in text.split())


EXPLICIT = dict(zip(TRIPLE, ('10.0.0.1:1234', '4', '3'), strict=True))
SLURM = environ(
    'SLURM_JOB_ID=5000 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=5 SLURM_STEP_TASKS_PER_NODE=2(x2),1 '
    'SLURM_STEP_NODELIST=gpu[007-008,011],big1 SLURM_NODEID=1 SLURM_PROCID=3 SLURM_LOCALID=1 '
    'SLURM_NTASKS=5'
)
MPI = environ(
    'OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_LOCAL_RANK=0 '
    'OMPI_COMM_WORLD_LOCAL_SIZE=2 '
    'OMPI_MCA_orte_hnp_uri=1531576320.0;tcp://10.96.0.1,10.148.0.1:34911'
)
GKE = environ('TPU_WORKER_HOSTNAMES=w-0.svc,w-1.svc TPU_WORKER_ID=1')
SLICES = GKE | environ('MEGASCALE_NUM_SLICES=3 MEGASCALE_SLICE_ID=2')
SLICES |= environ('MEGASCALE_COORDINATOR_ADDRESS=s0-w-0.svc:8080')
IPV6 = {'OMPI_MCA_orte_hnp_uri': '1531576320.0;tcp6://[fe80::b9b,2620:10d::2]:43370'}
PORT = {'JAX_COORDINATOR_PORT': '7777'}
MPI_PORT = 61440 + 1531576320 // 4096 % 4096  # jax's, of this job


@pytest.fixture
def job_of(monkeypatch):
    """job_of(environ) -> the job of a process with these variables alone."""

    def make(environ: dict[str, str]) -> Job:
        for name in {*EXPLICIT, *SLURM, *MPI, *SLICES, *PORT, 'CUDA_VISIBLE_DEVICES'}:
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
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
        (SLURM, Job(5, 3, 'slurm', 'gpu007:62344')),
        (SLURM | {'SLURM_STEP_ID': '1'}, Job(5, 3, 'slurm', 'gpu007:62405')),
        (SLURM | PORT, Job(5, 3, 'slurm', 'gpu007:7777')),
        (MPI, Job(4, 2, 'openmpi', f'10.96.0.1:{MPI_PORT}')),
        (MPI | IPV6, Job(4, 2, 'openmpi', f'[fe80::b9b]:{MPI_PORT}')),
        (MPI | {'JAX_COORDINATOR_ADDRESS': 'h:1'}, Job(4, 2, 'openmpi', 'h:1')),
        (GKE, Job(2, 1, 'gke', 'w-0.svc:8482')),
        (SLICES, Job(6, 5, 'gke', 's0-w-0.svc:8482')),
    ],
)
def test_a_job_of_every_engine(environ, job, job_of):
    assert job_of(environ) == job


@pytest.mark.parametrize(
    ('visible', 'on_node', 'local', 'devices'),
    [
        ('', '', '0', None),
        ('0,1,2,3', '4', '0', (0, 1)),  # all of the node's: a block each
        ('0,1,2,3', '4', '1', (2, 3)),
        ('0,1', '4', '1', (0, 1)),  # its own already, as with --gpus-per-task
        ('3', '2', '1', (0,)),
        ('0,1,2,3', None, '1', (2, 3)),
    ],
)
def test_the_gpus_of_a_task(visible, on_node, local, devices, job_of):
    gpus = {'CUDA_VISIBLE_DEVICES': visible, 'SLURM_LOCALID': local}
    gpus |= {} if on_node is None else {'SLURM_GPUS_ON_NODE': on_node}
    assert job_of(SLURM | gpus).local_device_ids == devices


@pytest.mark.parametrize(
    ('environ', 'words'),
    [
        ({'JAX_NUM_PROCESSES': '2'}, 'JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID must be set'),
        ({'JAX_COORDINATOR_ADDRESS': 'h:1'}, 'but not JAX_NUM_PROCESSES and JAX_PROCESS_ID'),
        (EXPLICIT | {'JAX_PROCESS_ID': '4'}, r'process id 4 \(explicit\) is not in 0 .. 3'),
        (EXPLICIT | {'JAX_PROCESS_ID': 'x'}, "JAX_PROCESS_ID='x' is not an integer"),
        (EXPLICIT | {'JAX_COORDINATOR_ADDRESS': 'h:70000'}, "'h:70000' .* is not HOST:PORT"),
        (SLURM | {'SLURM_NODEID': '3'}, 'SLURM_NODEID=3 has no entry'),
        ({k: v for k, v in SLURM.items() if k != 'SLURM_LOCALID'}, 'SLURM_LOCALID is not set'),
        (
            SLURM | {'CUDA_VISIBLE_DEVICES': '0,1,2', 'SLURM_GPUS_ON_NODE': '3'},
            '2 tasks on a node with 3 GPUs, of which each sees 3',
        ),
        (SLURM | MPI, 'process 3 of 5, but Open MPI says 2 of 4'),
        (MPI | {'OMPI_MCA_orte_hnp_uri': ''}, 'set JAX_COORDINATOR_ADDRESS=HOST:PORT'),
        (GKE | {'TPU_WORKER_ID': '2'}, 'TPU_WORKER_ID=2 is not one of the 2 hosts'),
    ],
)
def test_what_is_incomplete_or_contradicts(environ, words, job_of):
    with pytest.raises(ConfigError, match=words):
        job_of(environ)
