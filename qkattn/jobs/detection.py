"""Detects the job and the rank of a process from environment variables.

The engine that starts the processes of a job, such as Slurm, sets these variables.
"""

import dataclasses
import os

from jax._src.clusters import ClusterEnv, OmpiCluster, SlurmCluster
from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster, GkeTpuCluster

from qkattn.errors import ConfigError
from qkattn.jobs import machine

# The variables that describe a job without an engine. With an engine, ADDRESS may be set alone.
ADDRESS = 'JAX_COORDINATOR_ADDRESS'
_COUNT = 'JAX_NUM_PROCESSES'
_RANK = 'JAX_PROCESS_ID'
TRIPLE = (ADDRESS, _COUNT, _RANK)
# The variable for the coordinator's port in a job of an engine.
PORT = 'JAX_COORDINATOR_PORT'
# jax's private classes that read the variables of an engine. The public way,
# jax.distributed.initialize, would also connect. Open MPI is first, since it may run inside Slurm.
ENGINES: dict[str, type[ClusterEnv]] = {
    'openmpi': OmpiCluster,
    'slurm': SlurmCluster,
    'gke': GkeTpuCluster,
    'tpu': GceTpuCluster,
}

# The variable for the seconds within which all processes of a job must start.
CONNECT = 'QKATTN_CONNECT_SECONDS'


@dataclasses.dataclass(frozen=True)
class Job:
    """The processes that train together, and the rank of this process."""

    num_processes: int = 1
    process_id: int = 0  # the rank; process 0 is the coordinator and owns the run directory
    engine: str = 'single'  # or 'explicit', 'slurm', 'openmpi', 'gke', 'tpu'
    coordinator: str | None = None  # 'host:port' of process 0; None for a single process
    # Indices into the visible GPUs, for the GPUs that this process uses; None uses all.
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
            raise ConfigError(
                f'the coordinator {self.coordinator!r} ({self.engine}) is not HOST:PORT'
            )


def detect() -> Job:
    """Returns the job of this process, from environment variables.

    - If JAX_NUM_PROCESSES and JAX_PROCESS_ID (the rank) are set, they describe the job, together
      with JAX_COORDINATOR_ADDRESS.
    - If an engine such as Slurm has started the job, its own variables describe the job.
      JAX_COORDINATOR_PORT overrides the coordinator's port, JAX_COORDINATOR_ADDRESS its address.
    - Otherwise, the process is a job of its own.

    Raises:
        ConfigError: Variables are incomplete or malformed.
    """
    if _COUNT in os.environ or _RANK in os.environ:
        return _job_of_variables()

    for engine, cluster in ENGINES.items():
        try:
            job = _job_of_engine(engine, cluster)
        except ConfigError:
            raise
        except (KeyError, ValueError, RuntimeError, OSError) as error:  # raised by jax's classes
            raise ConfigError(
                f'the variables of {engine} are incomplete or malformed ({error!r}); set '
                f'{ADDRESS}=HOST:PORT of process 0, or all of {", ".join(TRIPLE)}'
            ) from error
        if job is not None:  # the engine has started this process
            return job

    if ADDRESS in os.environ:
        raise ConfigError(f'{ADDRESS} is set, but not {_COUNT} and {_RANK}')
    return Job()  # of one process


def _job_of_variables() -> Job:
    """Returns the job that the variables of TRIPLE describe: address, number of processes, rank.

    Raises ConfigError if a variable is missing or not a number.
    """
    missing = [name for name in TRIPLE if name not in os.environ]
    if missing:
        raise ConfigError(
            f'{" and ".join(missing)} must be set, too: a job is described by '
            f'{", ".join(TRIPLE)} together, or by its engine alone'
        )
    count = os.environ[_COUNT]
    rank = os.environ[_RANK]
    if not (count.isdecimal() and rank.isdecimal()):
        raise ConfigError(f'{_COUNT}={count!r} and {_RANK}={rank!r} must be integers')
    return Job(
        num_processes=int(count),
        process_id=int(rank),
        engine='explicit',
        coordinator=os.environ[ADDRESS],
    )


def connect_seconds() -> int:
    """Returns the connection timeout, which the variable CONNECT sets; 300 s by default.

    Raises ConfigError if the variable is not a number of seconds in 1 .. 86400.
    """
    text = os.environ.get(CONNECT, '300')
    if not text.isdecimal() or not 1 <= int(text) <= 86_400:
        raise ConfigError(f'{CONNECT}={text!r} is not a number of seconds in 1 .. 86400')
    return int(text)


def _job_of_engine(engine: str, cluster: type[ClusterEnv]) -> Job | None:
    """Returns the job of this process, if an engine has started it with several processes.

    Args:
        engine: A key of ENGINES.
        cluster: Jax's class that reads the variables of the engine.
    """
    is_tpu_engine = cluster not in (OmpiCluster, SlurmCluster)
    platforms = os.environ.get('JAX_PLATFORMS')
    may_use_tpus = not platforms or 'tpu' in platforms  # None and '' allow all platforms
    if is_tpu_engine and not may_use_tpus:
        return None
    if not cluster.is_env_present():
        return None

    num_processes = cluster.get_process_count()
    if cluster is SlurmCluster:
        # jax counts all tasks of the allocation. The Slurm step of this process may have fewer.
        num_processes = int(os.environ.get('SLURM_STEP_NUM_TASKS', num_processes))
    if num_processes == 1:
        return None

    rank = cluster.get_process_id()
    address = os.environ.get(ADDRESS)
    if address is None:
        address = cluster.get_coordinator_address(connect_seconds(), os.environ.get(PORT))
    return Job(
        num_processes=num_processes,
        process_id=rank,
        engine=engine,
        coordinator=address,
        local_device_ids=_gpus(engine, num_processes),
    )


def _gpus(engine: str, num_processes: int) -> tuple[int, ...] | None:
    """Returns indices of the GPUs that this process uses, among the GPUs that it sees.

    For example, a node has 8 GPUs and 4 processes. If each process sees only 2 GPUs, all processes
    get (0, 1). If each process sees all 8 GPUs, the first process gets (0, 1), the second (2, 3).

    Args:
        engine: A key of ENGINES.
        num_processes: The number of processes of the whole job.

    Returns:
        The indices, or None without GPUs or for an engine of TPUs.

    Raises:
        ConfigError: The GPUs of the node do not divide over its processes.
    """
    cuda_devices = os.environ.get('CUDA_VISIBLE_DEVICES')
    if cuda_devices is None:  # Open MPI does not set the variable
        gpus = machine.accelerators(os.environ.get('JAX_PLATFORMS')) or []
    else:
        gpus = machine.split_visible_gpus(cuda_devices)
    num_visible = len(gpus)
    if num_visible == 0:
        return None

    # Slurm and Open MPI call processes tasks.
    if engine == 'slurm':
        rank_on_node = int(os.environ['SLURM_LOCALID'])
        tasks_on_node = _count_slurm_tasks_on_node(num_processes)
        gpus_on_node = int(os.environ.get('SLURM_GPUS_ON_NODE', num_visible))
    elif engine == 'openmpi':
        rank_on_node = int(os.environ['OMPI_COMM_WORLD_LOCAL_RANK'])
        tasks_on_node = int(os.environ['OMPI_COMM_WORLD_LOCAL_SIZE'])
        gpus_on_node = num_visible
    else:
        return None

    sees_own_gpus_only = num_visible * tasks_on_node == gpus_on_node
    if sees_own_gpus_only:
        return tuple(range(num_visible))
    sees_all_gpus = num_visible == gpus_on_node
    if sees_all_gpus and gpus_on_node % tasks_on_node == 0:
        gpus_per_task = gpus_on_node // tasks_on_node
        first = rank_on_node * gpus_per_task
        return tuple(range(first, first + gpus_per_task))
    raise ConfigError(
        f'{tasks_on_node} tasks on a node with {gpus_on_node} GPUs, of which each sees '
        f'{num_visible}: the GPUs do not divide over the tasks; ask for a multiple of the tasks, '
        'or one task per node'
    )


def _count_slurm_tasks_on_node(num_tasks: int) -> int:
    """Returns the number of tasks on each node of a Slurm step with `num_tasks` tasks.

    Raises ConfigError if the number differs between nodes.
    """
    num_nodes = int(os.environ['SLURM_STEP_NUM_NODES'])
    if num_tasks % num_nodes != 0:
        raise ConfigError(
            f'{num_tasks} tasks with GPUs on {num_nodes} nodes: the nodes have different '
            'numbers of tasks; set --ntasks-per-node, the same number for every node'
        )
    return num_tasks // num_nodes
