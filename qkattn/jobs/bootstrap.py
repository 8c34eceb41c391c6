"""Joins the processes of a job; a process without a job stays alone and pays nothing."""

import contextlib
import functools
import ipaddress
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable

import jax

from qkattn.errors import ProcessError
from qkattn.jobs import agreement, cli, signals
from qkattn.jobs.detection import Job, connect_seconds, detect
from qkattn.jobs.peers import EXIT_CRASH, JobPeers

# Seconds without a sign of life of a process after which jax ends the others of a job.
HEARTBEAT = 30


@functools.cache
def start() -> Job:
    """Joins the job that the environment describes, before anything else of jax; idempotent.

    ConfigError if its variables contradict each other, ProcessError if its port is in use; with
    exit code 1 if processes do not come in time.
    """
    job = detect()
    if job.engine == 'single':
        return job
    seconds = connect_seconds()
    if job.process_id == 0:
        _require_port(job)
    # JobPeers agrees on stop requests; jax's service would take SIGTERM from Python's handlers.
    jax.config.update('jax_enable_preemption_service', False)
    peers = JobPeers(job, seconds)
    jax.distributed.initialize(
        job.coordinator,
        job.num_processes,
        job.process_id,
        local_device_ids=job.local_device_ids,
        cluster_detection_method='deactivate',
        initialization_timeout=seconds,
        heartbeat_timeout_seconds=HEARTBEAT,
        shutdown_timeout_seconds=HEARTBEAT,
        coordinator_bind_address=bind_address(job),
    )
    peers.watch()
    return job


def in_job(main: Callable[[], None]) -> Callable[[], None]:
    """Makes a script's main function one of a job: it joins the others, and ends with them.

    One that fails ends at once, with os._exit: Python's exit waits for peers, which wait for it.
    """

    @functools.wraps(main)
    def joined() -> None:
        job = start()
        if job.num_processes == 1:
            return main()
        try:
            agreement.require_same('the number of processes', str(job.num_processes))
            # Process 0 speaks for the job; messages and errors of all go to standard error.
            with open(os.devnull, 'w') as nowhere:
                printed = sys.stdout if agreement.owner() else nowhere
                with contextlib.redirect_stdout(printed):
                    main()
            # Whoever is early waits here, where it still answers the others.
            agreement.barrier('the end', limit=agreement.OWNER_LIMIT)
        except BaseException as error:
            expected = cli.outcome(error)
            if expected is None:
                expected = f'{type(error).__name__}: {error}', EXIT_CRASH
            sentence, code = expected
            if code == EXIT_CRASH:
                traceback.print_exc()
            if _from_jax(error):
                # Mostly the echo of another process that died, whose rank jax's heartbeats tell.
                time.sleep(HEARTBEAT + 5)
            signals.end(code, sentence)

    return joined


def _from_jax(error: BaseException) -> bool:
    """Whether an error is, or follows from, one of XLA's, such as a collective that failed."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, jax.errors.JaxRuntimeError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def bind_address(job: Job) -> str | None:
    """Where the coordinator listens, as HOST:PORT; None leaves that to jax.

    By default jax listens on all addresses, as the others of a job may reach it by any of them. A
    job of one machine, whose coordinator has a loopback address, is open to no other machine.
    """
    if 'JAX_COORDINATOR_BIND_ADDRESS' in os.environ:  # which jax reads
        return None
    return job.coordinator if _is_loopback(_host(job)) else None


def _host(job: Job) -> str:
    """The host of the coordinator, '::1' of '[::1]:8476'."""
    return str(job.coordinator).rpartition(':')[0].strip('[]')


def _is_loopback(host: str) -> bool:
    if host == 'localhost':
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        return False


def _require_port(job: Job) -> None:
    """Raises ProcessError where the coordinator cannot listen: jax's service would crash."""
    port = int(str(job.coordinator).rpartition(':')[2])
    host = _host(job) if bind_address(job) else ''
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise ProcessError(
            f'the coordinator cannot listen on port {port} ({os.strerror(error.errno or 0)}); '
            'give the job another port'
        ) from error
