"""Which part of which job a process is, read from the variables that its engine sets."""

import dataclasses
import os

from jax._src.clusters import ClusterEnv, OmpiCluster, SlurmCluster
from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster, GkeTpuCluster

from qkattn.errors import ConfigError
from qkattn.jobs import machine

# The variables that describe a job without an engine.
TRIPLE = ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')
# The variable for the port of the coordinator, in place of the one that an engine's job gets.
PORT = 'JAX_COORDINATOR_PORT'
# What jax reads of each engine: none of it is public, and jax.distributed.initialize detects and
# connects at once. In this order, as Open MPI may start its processes through Slurm.
ENGINES: dict[str, type[ClusterEnv]] = {
    'openmpi': OmpiCluster,
    'slurm': SlurmCluster,
    'gke': GkeTpuCluster,
    'tpu': GceTpuCluster,
}

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

    In this order: the triple JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID; what jax
    detects of Open MPI, a Slurm step of several tasks, GKE and the metadata server of a TPU VM.
    JAX_COORDINATOR_PORT replaces the port that an engine's job gets, and JAX_COORDINATOR_ADDRESS
    alone the whole address. ConfigError if variables are incomplete or malformed.
    """
    if any(name in os.environ for name in TRIPLE[1:]):
        missing = [name for name in TRIPLE if name not in os.environ]
        if missing:
            raise ConfigError(
                f'{" and ".join(missing)} must be set, too: a job is described by '
                f'{", ".join(TRIPLE)} together, or by its engine alone'
            )
        address, count, rank = (os.environ[name] for name in TRIPLE)
        if not (count.isdecimal() and rank.isdecimal()):
            raise ConfigError(f'{TRIPLE[1]}={count!r} and {TRIPLE[2]}={rank!r} must be integers')
        return Job(int(count), int(rank), 'explicit', address)
    for engine, cluster in ENGINES.items():
        try:
            job = _job(engine, cluster)
        except ConfigError:
            raise
        except (KeyError, ValueError, RuntimeError, OSError) as error:
            raise ConfigError(
                f'the variables of {engine} are incomplete or malformed ({error!r}); set '
                f'{TRIPLE[0]}=HOST:PORT of process 0, or all of {", ".join(TRIPLE)}'
            ) from error
        if job is not None:
            return job
    if TRIPLE[0] in os.environ:
        raise ConfigError(f'{TRIPLE[0]} is set, but not {TRIPLE[1]} and {TRIPLE[2]}')
    return Job()


def connect_seconds() -> int:
    """The seconds that CONNECT grants."""
    text = os.environ.get(CONNECT, '300')
    if not text.isdecimal() or not 1 <= int(text) <= 86_400:
        raise ConfigError(f'{CONNECT}={text!r} is not a number of seconds in 1 .. 86400')
    return int(text)


def _job(engine: str, cluster: type[ClusterEnv]) -> Job | None:
    """The job of an engine, as jax reads it; None where it is another's or a single process."""
    is_for_any_platform = cluster in (OmpiCluster, SlurmCluster)
    may_use_tpus = 'tpu' in os.environ.get('JAX_PLATFORMS', 'tpu')
    if not (is_for_any_platform or may_use_tpus) or not cluster.is_env_present():
        return None
    count = cluster.get_process_count()
    if cluster is SlurmCluster:  # a step may have fewer tasks than its allocation
        count = int(os.environ.get('SLURM_STEP_NUM_TASKS', count))
    if count == 1:
        return None
    rank = cluster.get_process_id()
    address = os.environ.get(TRIPLE[0])
    if address is None:
        address = cluster.get_coordinator_address(connect_seconds(), os.environ.get(PORT))
    return Job(count, rank, engine, address, _gpus(engine, count))


def _gpus(engine: str, count: int) -> tuple[int, ...] | None:
    """The GPUs of a task by their indices among those that it sees; None without any.

    They are all that it sees if the engine has given it GPUs of its own, and its equal share if it
    sees all GPUs of the node, as the other tasks there do. ConfigError where shares are not whole.
    `count` is the number of tasks of the job.
    """
    cuda_devices = os.environ.get('CUDA_VISIBLE_DEVICES')
    if cuda_devices is None:  # Open MPI does not set it
        visible = len(machine.accelerators(os.environ.get('JAX_PLATFORMS')) or [])
    else:
        visible = len(machine.listed(cuda_devices))
    if not visible:
        return None
    total = visible  # GPUs of the node
    if engine == 'slurm':
        task_on_node = int(os.environ['SLURM_LOCALID'])
        tasks = count // int(os.environ['SLURM_STEP_NUM_NODES'])
        total = int(os.environ.get('SLURM_GPUS_ON_NODE', visible))
    elif engine == 'openmpi':
        task_on_node = int(os.environ['OMPI_COMM_WORLD_LOCAL_RANK'])
        tasks = int(os.environ['OMPI_COMM_WORLD_LOCAL_SIZE'])
    else:
        return None
    if visible * tasks == total:
        return tuple(range(visible))
    if visible == total and visible % tasks == 0:
        share = visible // tasks
        return tuple(range(task_on_node * share, (task_on_node + 1) * share))
    raise ConfigError(
        f'{tasks} tasks on a node with {total} GPUs, of which each sees {visible}: the GPUs do '
        'not divide over the tasks; ask for a multiple of the tasks, or one task per node'
    )
