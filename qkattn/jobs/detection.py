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
        """Raises ConfigError if the rank or the coordinator's address is not valid.

        The message names the engine: the program that has started the job, such as 'slurm'.
        """
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
    """Returns the job of this process, by its environment variables.

    There are three cases:

    - The three variables of TRIPLE describe a job: address, number of processes and rank.
    - An engine has started the job. The engines are Open MPI, Slurm (a step of several tasks), GKE,
      and a TPU VM (by its metadata server), in this order. JAX_COORDINATOR_PORT then replaces the
      port of the coordinator, and JAX_COORDINATOR_ADDRESS its whole address.
    - Otherwise the process is alone.

    Raises ConfigError if variables are incomplete or malformed.
    """
    # The variables of TRIPLE.
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

    # A job of an engine.
    for engine, cluster in ENGINES.items():
        try:
            job = _job_of_engine(engine, cluster)
        except ConfigError:
            raise
        except (KeyError, ValueError, RuntimeError, OSError) as error:
            raise ConfigError(
                f'the variables of {engine} are incomplete or malformed ({error!r}); set '
                f'{ADDRESS}=HOST:PORT of process 0, or all of {", ".join(TRIPLE)}'
            ) from error
        if job is not None:
            return job

    # A process alone.
    if ADDRESS in os.environ:
        raise ConfigError(f'{ADDRESS} is set, but not {count_name} and {rank_name}')
    return Job()


def connect_seconds() -> int:
    """Returns the seconds that CONNECT sets, by default 300; ConfigError if they are not valid."""
    text = os.environ.get(CONNECT, '300')
    if not text.isdecimal() or not 1 <= int(text) <= 86_400:
        raise ConfigError(f'{CONNECT}={text!r} is not a number of seconds in 1 .. 86400')
    return int(text)


def _job_of_engine(engine: str, cluster: type[ClusterEnv]) -> Job | None:
    """Returns the job that an engine has started and that this process belongs to.

    Returns None if there is no such job, or if it has a single process.

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
    if cluster is SlurmCluster:
        # jax counts the tasks of the allocation. The step of this process may have fewer.
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

    For example, a node has 8 GPUs and 4 processes, which engines call tasks. If the engine has
    given each process 2 GPUs of its own, all processes get (0, 1). If each process sees all GPUs,
    the first one gets (0, 1), the second one (2, 3). None leaves the choice to jax: without GPUs,
    or for an engine of TPUs.

    `num_processes` is the size of the whole job. Raises ConfigError if the GPUs do not divide over
    the processes.
    """
    # How many GPUs this process sees.
    cuda_devices = os.environ.get('CUDA_VISIBLE_DEVICES')
    if cuda_devices is None:  # Open MPI does not set the variable
        gpus = machine.accelerators(os.environ.get('JAX_PLATFORMS')) or []
    else:
        gpus = machine.split_visible_gpus(cuda_devices)
    num_visible = len(gpus)
    if num_visible == 0:
        return None

    # How many GPUs and tasks the node has.
    if engine == 'slurm':
        rank_on_node = int(os.environ['SLURM_LOCALID'])
        tasks_on_node = num_processes // int(os.environ['SLURM_STEP_NUM_NODES'])
        gpus_on_node = int(os.environ.get('SLURM_GPUS_ON_NODE', num_visible))
    elif engine == 'openmpi':
        rank_on_node = int(os.environ['OMPI_COMM_WORLD_LOCAL_RANK'])
        tasks_on_node = int(os.environ['OMPI_COMM_WORLD_LOCAL_SIZE'])
        gpus_on_node = num_visible
    else:
        return None

    # With 8 GPUs and 4 tasks, a task that sees 2 GPUs has them for itself. One that sees 8 takes
    # its share of them.
    sees_only_its_own = num_visible * tasks_on_node == gpus_on_node
    if sees_only_its_own:
        return tuple(range(num_visible))
    sees_all = num_visible == gpus_on_node
    if sees_all and gpus_on_node % tasks_on_node == 0:
        gpus_per_task = gpus_on_node // tasks_on_node
        first = rank_on_node * gpus_per_task
        return tuple(range(first, first + gpus_per_task))
    raise ConfigError(
        f'{tasks_on_node} tasks on a node with {gpus_on_node} GPUs, of which each sees '
        f'{num_visible}: the GPUs do not divide over the tasks; ask for a multiple of the tasks, '
        'or one task per node'
    )
