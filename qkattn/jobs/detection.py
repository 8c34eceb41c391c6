"""Detects the job that a process belongs to, and its rank.

The engine that starts the processes of a job, such as Slurm, sets environment variables.
"""

import dataclasses
import os

from jax._src.clusters import ClusterEnv, OmpiCluster, SlurmCluster
from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster, GkeTpuCluster

from qkattn.errors import ConfigError
from qkattn.jobs import machine

# The three variables that describe a job without an engine. In a job of an engine, the address may
# be set alone.
ADDRESS = 'JAX_COORDINATOR_ADDRESS'
TRIPLE = (ADDRESS, 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')
# The variable that sets the port of the coordinator in a job of an engine.
PORT = 'JAX_COORDINATOR_PORT'
# The classes by which jax reads the variables of each engine. They are not public, but the public
# jax.distributed.initialize also connects. Open MPI may start its processes through Slurm, so it
# comes first.
ENGINES: dict[str, type[ClusterEnv]] = {
    'openmpi': OmpiCluster,
    'slurm': SlurmCluster,
    'gke': GkeTpuCluster,
    'tpu': GceTpuCluster,
}

# The variable that sets the seconds within which all processes of a job must start.
CONNECT = 'QKATTN_CONNECT_SECONDS'


@dataclasses.dataclass(frozen=True)
class Job:
    """The processes that train together, and the rank of this process."""

    num_processes: int = 1
    process_id: int = 0  # the rank; process 0 is the coordinator and owns the run directory
    engine: str = 'single'  # or 'explicit', 'slurm', 'openmpi', 'gke', 'tpu'
    coordinator: str | None = None  # 'host:port' of process 0; None for a single process
    # The GPUs that this process uses, by index among those that it sees; None uses all.
    local_device_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError if the rank or the coordinator's address is not valid."""
        if not 0 <= self.process_id < self.num_processes:
            raise ConfigError(
                f'process id {self.process_id} ({self.engine}) is not in 0 .. '
                f'{self.num_processes - 1}, the ranks of a job of {self.num_processes}'
            )
        if not self.coordinator:
            return
        host, _, port = self.coordinator.rpartition(':')
        is_port = port.isdecimal() and 0 < int(port) < 2**16
        if not (host and is_port):
            text = f'the coordinator {self.coordinator!r} ({self.engine}) is not HOST:PORT'
            raise ConfigError(text)


def detect() -> Job:
    """Returns the job of this process; without the variables of a job, a single process.

    The variables of TRIPLE come first. Without them, jax looks in this order for Open MPI, a Slurm
    step of several tasks, GKE, and the metadata server of a TPU VM. In a job of these engines,
    JAX_COORDINATOR_PORT replaces the port of the coordinator, and JAX_COORDINATOR_ADDRESS its whole
    address.

    Raises ConfigError if variables are incomplete or malformed.
    """
    _, count_name, rank_name = TRIPLE
    if count_name in os.environ or rank_name in os.environ:
        missing = [name for name in TRIPLE if name not in os.environ]
        if missing:
            raise ConfigError(
                f'{" and ".join(missing)} must be set, too: a job is described by '
                f'{", ".join(TRIPLE)} together, or by its engine alone'
            )
        count = os.environ[count_name]
        rank = os.environ[rank_name]
        if not (count.isdecimal() and rank.isdecimal()):
            raise ConfigError(f'{count_name}={count!r} and {rank_name}={rank!r} must be integers')
        return Job(int(count), int(rank), 'explicit', os.environ[ADDRESS])

    for engine, cluster in ENGINES.items():
        try:
            job = _job(engine, cluster)
        except ConfigError:
            raise
        except (KeyError, ValueError, RuntimeError, OSError) as error:
            raise ConfigError(
                f'the variables of {engine} are incomplete or malformed ({error!r}); set '
                f'{ADDRESS}=HOST:PORT of process 0, or all of {", ".join(TRIPLE)}'
            ) from error
        if job is not None:
            return job

    if ADDRESS in os.environ:
        raise ConfigError(f'{ADDRESS} is set, but not {count_name} and {rank_name}')
    return Job()


def connect_seconds() -> int:
    """Returns the seconds that CONNECT sets, by default 300; ConfigError if they are not valid."""
    text = os.environ.get(CONNECT, '300')
    if not text.isdecimal() or not 1 <= int(text) <= 86_400:
        raise ConfigError(f'{CONNECT}={text!r} is not a number of seconds in 1 .. 86400')
    return int(text)


def _job(engine: str, cluster: type[ClusterEnv]) -> Job | None:
    """Returns the job that an engine has started, if this process is in one; otherwise None.

    A job of a single process counts as none.

    Args:
      engine: a key of ENGINES.
      cluster: the class of jax that reads the variables of the engine.
    """
    # Engines of TPUs are skipped if JAX may not use TPUs.
    starts_only_tpus = cluster not in (OmpiCluster, SlurmCluster)
    may_use_tpus = 'tpu' in os.environ.get('JAX_PLATFORMS', 'tpu')
    if starts_only_tpus and not may_use_tpus:
        return None
    if not cluster.is_env_present():
        return None

    num_processes = cluster.get_process_count()
    if cluster is SlurmCluster:  # jax counts the tasks of the allocation; a step may have fewer
        num_processes = int(os.environ.get('SLURM_STEP_NUM_TASKS', num_processes))
    if num_processes == 1:
        return None

    rank = cluster.get_process_id()
    address = os.environ.get(ADDRESS)
    if address is None:
        address = cluster.get_coordinator_address(connect_seconds(), os.environ.get(PORT))
    return Job(num_processes, rank, engine, address, _gpus(engine, num_processes))


def _gpus(engine: str, num_processes: int) -> tuple[int, ...] | None:
    """Returns the GPUs that this process uses, as indices among the GPUs that it sees.

    If the engine has given each process of a node its own GPUs, the process uses all that it sees.
    If every process sees all GPUs of the node, the processes share them equally. None leaves the
    choice to jax: without GPUs, or for an engine of TPUs.

    `num_processes` is the size of the whole job. Raises ConfigError if the GPUs do not divide over
    the processes.
    """
    cuda_devices = os.environ.get('CUDA_VISIBLE_DEVICES')
    if cuda_devices is None:  # Open MPI does not set the variable
        gpus = machine.accelerators(os.environ.get('JAX_PLATFORMS')) or []
    else:
        gpus = machine.listed(cuda_devices)
    num_visible = len(gpus)
    if num_visible == 0:
        return None

    # The rank of this process among those of the node ("tasks"), their number, and the number of
    # GPUs of the node.
    num_on_node = num_visible
    if engine == 'slurm':
        task_on_node = int(os.environ['SLURM_LOCALID'])
        num_tasks = num_processes // int(os.environ['SLURM_STEP_NUM_NODES'])
        num_on_node = int(os.environ.get('SLURM_GPUS_ON_NODE', num_visible))
    elif engine == 'openmpi':
        task_on_node = int(os.environ['OMPI_COMM_WORLD_LOCAL_RANK'])
        num_tasks = int(os.environ['OMPI_COMM_WORLD_LOCAL_SIZE'])
    else:
        return None

    has_own_gpus = num_visible * num_tasks == num_on_node
    if has_own_gpus:
        return tuple(range(num_visible))
    sees_all_gpus = num_visible == num_on_node
    if sees_all_gpus and num_visible % num_tasks == 0:
        share = num_visible // num_tasks
        first = task_on_node * share
        return tuple(range(first, first + share))
    raise ConfigError(
        f'{num_tasks} tasks on a node with {num_on_node} GPUs, of which each sees {num_visible}: '
        'the GPUs do not divide over the tasks; ask for a multiple of the tasks, or one task per '
        'node'
    )
