"""Joins the processes of a job; a process without a job stays alone and pays nothing."""

import contextlib
import functools
import os
import time
import traceback
from collections.abc import Callable, Iterator

import jax
from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster

from qkattn.errors import ConfigError
from qkattn.jobs import agreement, cli, signals
from qkattn.jobs.detection import PORT, TRIPLE, Job, detect
from qkattn.jobs.peers import EXIT_CRASH, JobPeers
from qkattn.jobs.rendezvous import meet

HEARTBEAT = 30
"""Seconds without a sign of life after which jax ends the others of a job."""

CONNECT = 'QKATTN_CONNECT_SECONDS'
"""The variable for the seconds within which all processes of a job must have started."""
_CONNECT_SECONDS = 300
_ECHO = 5


@functools.cache
def start() -> Job:
    """Joins the job that the environment describes, before anything else of jax; idempotent.

    Raises:
      ConfigError: variables that contradict, or processes that did not come in time.
    """
    job = detect(os.environ)
    if job.engine == 'single':
        job = _cloud_tpu()
    if job.engine == 'single':
        return job
    seconds = _connect_seconds()
    meet(job, seconds)
    # JobPeers agrees on stop requests; jax's service would take SIGTERM from Python's handlers.
    jax.config.update('jax_enable_preemption_service', False)
    peers = JobPeers(job, HEARTBEAT)
    jax.distributed.initialize(
        job.coordinator,
        job.num_processes,
        job.process_id,
        local_device_ids=job.local_device_ids,
        cluster_detection_method='deactivate',
        initialization_timeout=seconds,
        heartbeat_timeout_seconds=HEARTBEAT,
        shutdown_timeout_seconds=HEARTBEAT,
    )
    peers.watch()
    return job


def in_job(main: Callable[[], None]) -> Callable[[], None]:
    """Makes a script's main function one of a job: it joins the others, and ends with them.

    With several processes, one that fails prints its traceback and ends at once, with os._exit,
    since Python's own exit waits for peers that wait for this process.
    """

    @functools.wraps(main)
    def joined() -> None:
        if start().num_processes == 1:
            return main()
        try:
            # Process 0 speaks for the job; messages and errors of all go to standard error.
            with contextlib.nullcontext() if agreement.owner() else _silence():
                main()
            # Whoever is early waits here, where it still answers the others.
            agreement.barrier('the end', limit=agreement.OWNER_LIMIT)
        except BaseException as error:
            sentence, code = cli.outcome(error) or (f'{type(error).__name__}: {error}', EXIT_CRASH)
            if code == EXIT_CRASH:
                traceback.print_exc()
            if _from_jax(error):
                # Mostly the echo of another process that died, whose rank jax's heartbeats tell.
                time.sleep(HEARTBEAT + _ECHO)
            signals.end(code, sentence)

    return joined


def _from_jax(error: BaseException | None) -> bool:
    """Whether an error is, or follows from, one of XLA's, such as a collective that failed."""
    if error is None or isinstance(error, jax.errors.JaxRuntimeError):
        return error is not None
    return _from_jax(error.__cause__ or error.__context__)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """A block that prints nothing to standard output."""
    with open(os.devnull, 'w') as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def _connect_seconds() -> int:
    text = os.environ.get(CONNECT, str(_CONNECT_SECONDS))
    if not text.isdecimal() or not 1 <= int(text) <= 86_400:
        raise ConfigError(f'{CONNECT}={text!r} is not a number of seconds in 1 .. 86400')
    return int(text)


def _cloud_tpu() -> Job:
    """A host of a TPU slice without Kubernetes, which asks Google's metadata server who it is."""
    if 'tpu' not in os.environ.get('JAX_PLATFORMS', 'tpu'):
        return Job()
    try:
        if not GceTpuCluster.is_env_present() or (count := GceTpuCluster.get_process_count()) == 1:
            return Job()
        address = GceTpuCluster.get_coordinator_address(_connect_seconds(), os.environ.get(PORT))
        return Job(count, GceTpuCluster.get_process_id(), 'tpu', address)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f'the hosts of this TPU are unknown ({error}); set {", ".join(TRIPLE)}, or '
            'TPU_SKIP_MDS_QUERY=1 on a single host'
        ) from error
