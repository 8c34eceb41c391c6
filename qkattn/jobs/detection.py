"""Which part of which job a process is, read from the variables that its engine sets."""

import dataclasses
import os
import re
from typing import Any

from jax._src.clusters import ClusterEnv, OmpiCluster, SlurmCluster
from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster

from qkattn.errors import ConfigError

TRIPLE = ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')
PORT = 'JAX_COORDINATOR_PORT'

# The variable for the seconds within which all processes of a job must have started.
CONNECT = 'QKATTN_CONNECT_SECONDS'


@dataclasses.dataclass(frozen=True)
class Job:
    """The processes that train together, and which of them this one is."""

    num_processes: int = 1
    process_id: int = 0  # the rank; 0 is the coordinator and owns the run directory
    engine: str = 'single'  # or 'explicit', 'slurm', 'openmpi', 'gke', 'tpu'
    coordinator: str | None = None  # 'host:port' of process 0; None for a single process
    local_device_ids: tuple[int, ...] | None = None  # GPUs among those that it sees; None: all

    def __post_init__(self) -> None:
        if not 0 <= self.process_id < self.num_processes:
            raise ConfigError(
                f'process id {self.process_id} ({self.engine}) is not in 0 .. '
                f'{self.num_processes - 1}, the ranks of a job of {self.num_processes}'
            )
        host, _, port = (self.coordinator or 'host:1').rpartition(':')
        if not (host and port.isdecimal() and 0 < int(port) < 2**16):
            text = f'the coordinator {self.coordinator!r} ({self.engine}) is not HOST:PORT'
            raise ConfigError(text)


def detect() -> Job:
    """The job of this process; without an engine's variables, a single process.

    In this order: the triple JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID; a Slurm
    step of several tasks; Open MPI; GKE; the metadata server of a TPU VM. JAX_COORDINATOR_PORT
    replaces the port that an engine's job gets by its number, and JAX_COORDINATOR_ADDRESS alone the
    whole address. ConfigError if variables are incomplete, malformed or contradict each other.
    """
    if any(name in os.environ for name in TRIPLE[1:]):
        if missing := [name for name in TRIPLE if name not in os.environ]:
            raise ConfigError(
                f'{" and ".join(missing)} must be set, too: a job is described by '
                f'{", ".join(TRIPLE)} together, or by its engine alone'
            )
        count, rank = map(_integer, TRIPLE[1:])
        return Job(count, rank, 'explicit', os.environ[TRIPLE[0]])
    slurm, mpi = _slurm(), _open_mpi()
    ranks = [(job.process_id, job.num_processes) for job in (slurm, mpi) if job]
    if len(set(ranks)) > 1:
        raise ConfigError(
            f'Slurm says process {ranks[0][0]} of {ranks[0][1]}, but Open MPI says {ranks[1][0]} '
            f'of {ranks[1][1]}; start with srun alone, or unset SLURM_STEP_NUM_TASKS'
        )
    job = slurm or mpi or _gke()
    if job is None and TRIPLE[0] in os.environ:
        raise ConfigError(f'{TRIPLE[0]} is set, but not {TRIPLE[1]} and {TRIPLE[2]}')
    return job or _tpu_vm() or Job()


def connect_seconds() -> int:
    """The seconds that CONNECT grants."""
    text = os.environ.get(CONNECT, '300')
    if not text.isdecimal() or not 1 <= int(text) <= 86_400:
        raise ConfigError(f'{CONNECT}={text!r} is not a number of seconds in 1 .. 86400')
    return int(text)


def _integer(name: str) -> int:
    try:
        return int(os.environ[name])
    except KeyError:
        raise ConfigError(f'{name} is not set, though the engine of this job sets it') from None
    except ValueError:
        raise ConfigError(f'{name}={os.environ[name]!r} is not an integer') from None


def _slurm() -> Job | None:
    # jax counts the tasks of the allocation, gives its steps one port, and a task one GPU.
    if os.environ.get('SLURM_STEP_NUM_TASKS', '1') == '1':
        return None
    number = _integer('SLURM_JOB_ID') + 61 * _integer('SLURM_STEP_ID')
    text = os.environ.get('SLURM_STEP_TASKS_PER_NODE', '')  # such as '2(x3),1'
    counts = re.findall(r'(\d+)(?:\(x(\d+)\))?', text)
    tasks = [int(count) for count, times in counts for _ in range(int(times or 1))]
    node = _integer('SLURM_NODEID')
    if not 0 <= node < len(tasks):
        raise ConfigError(f'SLURM_NODEID={node} has no entry in SLURM_STEP_TASKS_PER_NODE={text!r}')
    devices = _block(_integer('SLURM_LOCALID'), tasks[node], os.environ.get('SLURM_GPUS_ON_NODE'))
    port = str(2**16 - 2**12 + number % 2**12)  # a high one by the job's number, as in jax
    return _launched('slurm', SlurmCluster, _integer('SLURM_STEP_NUM_TASKS'), port, devices)


def _open_mpi() -> Job | None:
    if os.environ.get('OMPI_COMM_WORLD_SIZE', '1') == '1':
        return None
    local, tasks = (_integer(f'OMPI_COMM_WORLD_LOCAL_{name}') for name in ('RANK', 'SIZE'))
    count, devices = _integer('OMPI_COMM_WORLD_SIZE'), _block(local, tasks, None)
    return _launched('openmpi', OmpiCluster, count, None, devices)


def _launched(
    engine: str, cluster: type[ClusterEnv], count: int, port: str | None, devices: Any
) -> Job:
    """A job whose rank, and whose coordinator unless it is set, jax reads."""
    try:
        rank, address = cluster.get_process_id(), os.environ.get(TRIPLE[0])
        if address is None:
            address = cluster.get_coordinator_address(None, os.environ.get(PORT, port))
            host, _, port = address.rpartition(':')
            address = f'[{host}]:{port}' if ':' in host else address  # IPv6
    except (KeyError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f'the variables of {engine} are incomplete or malformed ({error!r}); set '
            f'{TRIPLE[0]}=HOST:PORT of process 0, or all of {", ".join(TRIPLE)}'
        ) from error
    return Job(count, rank, engine, address, devices)


def _block(local: int, tasks: int, on_node: str | None) -> tuple[int, ...] | None:
    """The GPUs of a task among those it sees: all if they are its own, else its equal share."""
    visible = len([gpu for gpu in os.environ.get('CUDA_VISIBLE_DEVICES', '').split(',') if gpu])
    if not visible:
        return None
    total = int(on_node) if on_node and on_node.isdecimal() else visible
    if visible * tasks == total:
        return tuple(range(visible))
    if visible == total and visible % tasks == 0:
        share = visible // tasks
        return tuple(range(local * share, (local + 1) * share))
    raise ConfigError(
        f'{tasks} tasks on a node with {total} GPUs, of which each sees {visible}: the GPUs do '
        'not divide over the tasks; ask for a multiple of the tasks, or one task per node'
    )


def _gke() -> Job | None:
    # jax looks up the coordinator's address, and asks the metadata server for slices.
    text = os.environ.get('TPU_PROCESS_ADDRESSES') or os.environ.get('TPU_WORKER_HOSTNAMES') or ''
    hosts = [host for host in text.split(',') if host]
    slices = _integer('MEGASCALE_NUM_SLICES') if 'MEGASCALE_NUM_SLICES' in os.environ else 1
    if len(hosts) * slices < 2:
        return None
    in_slice = _integer('TPU_WORKER_ID')
    if not 0 <= in_slice < len(hosts):
        raise ConfigError(f'TPU_WORKER_ID={in_slice} is not one of the {len(hosts)} hosts {text}')
    number = _integer('MEGASCALE_SLICE_ID') if slices > 1 else 0
    first = os.environ.get('MEGASCALE_COORDINATOR_ADDRESS') or hosts[0]
    port = _integer(PORT) if PORT in os.environ else 8482
    address = os.environ.get(TRIPLE[0], f'{first.split(":")[0]}:{port}')
    return Job(len(hosts) * slices, in_slice + number * len(hosts), 'gke', address)


def _tpu_vm() -> Job | None:
    """A host of a TPU slice without Kubernetes, which asks Google's metadata server who it is."""
    if 'tpu' not in os.environ.get('JAX_PLATFORMS', 'tpu'):
        return None
    try:
        if not GceTpuCluster.is_env_present() or (count := GceTpuCluster.get_process_count()) == 1:
            return None
        address = GceTpuCluster.get_coordinator_address(connect_seconds(), os.environ.get(PORT))
        return Job(count, GceTpuCluster.get_process_id(), 'tpu', address)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f'the hosts of this TPU are unknown ({error}); set {", ".join(TRIPLE)}, or '
            'TPU_SKIP_MDS_QUERY=1 on a single host'
        ) from error
