"""Which part of which job a process is, read from the variables that its engine sets."""

import dataclasses
import re
from collections.abc import Mapping

from qkattn.errors import ConfigError

TRIPLE = ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')
PORT = 'JAX_COORDINATOR_PORT'
# The ports from which a job takes one by its number, as jax does.
_PORTS, _FIRST_PORT = 2**12, 2**16 - 2**12
_TPU_PORT = 8482


@dataclasses.dataclass(frozen=True)
class Job:
    """The processes that train together, and which of them this one is.

    Attributes:
      num_processes: 1 or more.
      process_id: the rank of this process; 0 is the coordinator and owns the run directory.
      engine: what started the processes: 'single', 'explicit', 'slurm', 'openmpi', 'gke', 'tpu'.
      coordinator: 'host:port' of process 0; None for a single process.
      local_device_ids: the GPUs of this process among those that it sees; None: all.
    """

    num_processes: int = 1
    process_id: int = 0
    engine: str = 'single'
    coordinator: str | None = None
    local_device_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.process_id < self.num_processes:
            raise ConfigError(
                f'process id {self.process_id} ({self.engine}) is not in 0 .. '
                f'{self.num_processes - 1}, the ranks of a job of {self.num_processes}'
            )
        host, _, port = (self.coordinator or 'host:1').rpartition(':')
        if not (host and port.isdecimal() and 0 < int(port) < 2**16):
            raise ConfigError(
                f'the coordinator {self.coordinator!r} ({self.engine}) is not HOST:PORT'
            )


def detect(environ: Mapping[str, str]) -> Job:
    """The job of a process with these variables; without any of an engine, a single process.

    In this order: the triple JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID; a Slurm
    step of several tasks; Open MPI; GKE. JAX_COORDINATOR_PORT replaces the port that an engine's
    job gets by its number, and JAX_COORDINATOR_ADDRESS alone the whole address.

    Raises:
      ConfigError: variables that are incomplete, malformed or contradict each other.
    """
    if any(name in environ for name in TRIPLE[1:]):
        missing = [name for name in TRIPLE if name not in environ]
        if missing:
            raise ConfigError(
                f'{" and ".join(missing)} must be set, too: a job is described by '
                f'{", ".join(TRIPLE)} together, or by its engine alone'
            )
        count, rank = (_integer(environ, name) for name in TRIPLE[1:])
        return Job(count, rank, 'explicit', environ[TRIPLE[0]])
    slurm, mpi = _slurm(environ), _open_mpi(environ)
    if (
        slurm
        and mpi
        and (slurm.num_processes, slurm.process_id)
        != (
            mpi.num_processes,
            mpi.process_id,
        )
    ):
        raise ConfigError(
            f'Slurm says process {slurm.process_id} of {slurm.num_processes}, but Open MPI says '
            f'{mpi.process_id} of {mpi.num_processes}; start with srun alone, or unset '
            'SLURM_STEP_NUM_TASKS'
        )
    job = slurm or mpi or _gke(environ)
    if job is None and TRIPLE[0] in environ:
        raise ConfigError(f'{TRIPLE[0]} is set, but not {TRIPLE[1]} and {TRIPLE[2]}')
    return job or Job()


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except KeyError:
        raise ConfigError(f'{name} is not set, though the engine of this job sets it') from None
    except ValueError:
        raise ConfigError(f'{name}={environ[name]!r} is not an integer') from None


def _address(environ: Mapping[str, str], host: str, port: int) -> str:
    if TRIPLE[0] in environ:
        return environ[TRIPLE[0]]
    return f'{host}:{_integer(environ, PORT) if PORT in environ else port}'


def _slurm(environ: Mapping[str, str]) -> Job | None:
    """A task of a step; a batch script itself is a process of its own."""
    if 'SLURM_STEP_NUM_TASKS' not in environ:
        return None
    count = _integer(environ, 'SLURM_STEP_NUM_TASKS')
    if count == 1:
        return None
    rank, local = _integer(environ, 'SLURM_PROCID'), _integer(environ, 'SLURM_LOCALID')
    # Two steps of one allocation run side by side.
    number = _integer(environ, 'SLURM_JOB_ID') + 61 * _integer(environ, 'SLURM_STEP_ID')
    nodes = environ.get('SLURM_STEP_NODELIST', '')
    first = re.match(r'([^,\[]+)(?:\[(\w+))?', nodes)
    if first is None:
        raise ConfigError(f'SLURM_STEP_NODELIST={nodes!r} names no node')
    host = ''.join(part for part in first.groups() if part)
    tasks = _tasks_on_node(environ)
    devices = _block(environ, local, tasks, environ.get('SLURM_GPUS_ON_NODE'))
    address = _address(environ, host, _FIRST_PORT + number % _PORTS)
    return Job(count, rank, 'slurm', address, devices)


def _tasks_on_node(environ: Mapping[str, str]) -> int:
    """Of SLURM_STEP_TASKS_PER_NODE, such as '2(x3),1', the number for this node."""
    text = environ.get('SLURM_STEP_TASKS_PER_NODE', '')
    counts = re.findall(r'(\d+)(?:\(x(\d+)\))?', text)
    tasks = [int(count) for count, times in counts for _ in range(int(times or 1))]
    node = _integer(environ, 'SLURM_NODEID')
    if not 0 <= node < len(tasks):
        raise ConfigError(f'SLURM_NODEID={node} has no entry in SLURM_STEP_TASKS_PER_NODE={text!r}')
    return tasks[node]


def _block(
    environ: Mapping[str, str], local: int, tasks: int, on_node: str | None
) -> tuple[int, ...] | None:
    """The GPUs of a task among those it sees: all if they are its own, else its equal share."""
    visible = len([gpu for gpu in environ.get('CUDA_VISIBLE_DEVICES', '').split(',') if gpu])
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


def _open_mpi(environ: Mapping[str, str]) -> Job | None:
    if 'OMPI_COMM_WORLD_SIZE' not in environ:
        return None
    count = _integer(environ, 'OMPI_COMM_WORLD_SIZE')
    if count == 1:
        return None
    rank, local = (_integer(environ, f'OMPI_COMM_WORLD_{name}') for name in ('RANK', 'LOCAL_RANK'))
    uri = environ.get(
        'OMPI_MCA_orte_hnp_uri', ''
    )  # '1531576320.0;tcp://10.96.0.1,10.148.0.1:34911'
    found = re.match(r'(\d+)\..*?(?:tcp://([^,:]+)|tcp6://\[([^],]+))', uri)
    if found is None and TRIPLE[0] not in environ:
        raise ConfigError(
            f'Open MPI gives no address of its launcher (OMPI_MCA_orte_hnp_uri={uri!r}); set '
            f'{TRIPLE[0]}=HOST:PORT of process 0'
        )
    number, v4, v6 = found.groups() if found else (0, '', None)
    # The number of an Open MPI job is a multiple of 2**12.
    port = _FIRST_PORT + int(number) // _PORTS % _PORTS
    tasks = _integer(environ, 'OMPI_COMM_WORLD_LOCAL_SIZE')
    address = _address(environ, v4 or f'[{v6}]', port)
    return Job(count, rank, 'openmpi', address, _block(environ, local, tasks, None))


def _gke(environ: Mapping[str, str]) -> Job | None:
    """A host of one or more TPU slices, as GKE describes them."""
    text = environ.get('TPU_PROCESS_ADDRESSES') or environ.get('TPU_WORKER_HOSTNAMES') or ''
    hosts = [host for host in text.split(',') if host]
    slices = _integer(environ, 'MEGASCALE_NUM_SLICES') if 'MEGASCALE_NUM_SLICES' in environ else 1
    if len(hosts) * slices < 2:
        return None
    in_slice = _integer(environ, 'TPU_WORKER_ID')
    if not 0 <= in_slice < len(hosts):
        raise ConfigError(f'TPU_WORKER_ID={in_slice} is not one of the {len(hosts)} hosts {text}')
    number = _integer(environ, 'MEGASCALE_SLICE_ID') if slices > 1 else 0
    first = environ.get('MEGASCALE_COORDINATOR_ADDRESS') or hosts[0]
    address = _address(environ, first.split(':')[0], _TPU_PORT)
    return Job(len(hosts) * slices, in_slice + number * len(hosts), 'gke', address)
