"""Joins the processes of a job; does nothing for a single process."""

import contextlib
import functools
import ipaddress
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

import jax

from qkattn.errors import ProcessError
from qkattn.jobs import agreement, cli, signals
from qkattn.jobs.detection import Job, connect_seconds, detect
from qkattn.jobs.peers import EXIT_CRASH, JobPeers

# The heartbeat timeout in seconds. jax ends a job if one of its processes exceeds this timeout.
HEARTBEAT = 30


@functools.cache
def start() -> Job:
    """Joins the job that environment variables describe, and returns it.

    Call it before any other function of jax. Further calls do nothing. If a process does not come
    in time, this process ends with exit code 1.

    Raises:
        ConfigError: The variables contradict each other.
        ProcessError: The coordinator's port is in use.
    """
    job = detect()
    if job.engine == 'single':
        return job
    timeout = connect_seconds()
    if job.process_id == 0:
        _require_port(job)
    # jax's preemption service would take SIGTERM away from Python's handlers. JobPeers replaces it.
    jax.config.update('jax_enable_preemption_service', False)
    peers = JobPeers(job, timeout)
    jax.distributed.initialize(
        job.coordinator,
        job.num_processes,
        job.process_id,
        local_device_ids=job.local_device_ids,
        cluster_detection_method='deactivate',
        initialization_timeout=timeout,
        heartbeat_timeout_seconds=HEARTBEAT,
        shutdown_timeout_seconds=HEARTBEAT,
        coordinator_bind_address=bind_address(job),
    )
    peers.watch()  # all processes are connected
    return job


def in_job(main: Callable[[], None]) -> Callable[[], None]:
    """Wraps a script's main function to join the job, and to end all of its processes together.

    A process that fails ends by os._exit, because Python's exit would wait for the other processes.
    """

    @functools.wraps(main)
    def main_in_job() -> None:
        """Runs `main` in every process of a job. If it fails in one of them, all end."""
        job = start()
        if job.num_processes == 1:
            return main()
        try:
            agreement.require_same('the number of processes', str(job.num_processes))
            # Only process 0 prints results.
            with open(os.devnull, 'w') as devnull:
                stdout = sys.stdout if agreement.is_process_0() else devnull
                with contextlib.redirect_stdout(stdout):
                    main()
            # Until all processes are here, they may need this process for messages.
            agreement.barrier('the end', limit=agreement.OWNER_LIMIT)
        except BaseException as error:
            _end_job(error)

    return main_in_job


def _end_job(error: BaseException) -> NoReturn:
    """Ends all processes of the job after an error in this process."""
    outcome = cli.outcome(error)  # the exit code and the sentence to print
    if outcome is None:  # an unexpected error, such as a bug
        outcome = cli.Outcome(f'{type(error).__name__}: {error}', EXIT_CRASH)
    if outcome.code == EXIT_CRASH:
        traceback.print_exc()

    # An XLA error mostly means that another process has died. Within HEARTBEAT seconds, jax ends
    # this process with a better message, which names the dead process.
    if _is_from_xla(error):
        time.sleep(HEARTBEAT + 5)
    signals.end(outcome.code, outcome.sentence)


def _is_from_xla(error: BaseException) -> bool:
    """Whether an error, or one of its causes, comes from XLA, such as a failed collective."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, jax.errors.JaxRuntimeError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def bind_address(job: Job) -> str | None:
    """Returns the HOST:PORT that the coordinator listens on, or None for jax's choice.

    A coordinator with a loopback address, such as 'localhost:8476', listens on this address only,
    so that no other machine can connect. Otherwise jax listens on all addresses.
    """
    is_set_by_user = 'JAX_COORDINATOR_BIND_ADDRESS' in os.environ  # jax reads the variable
    if is_set_by_user or not _is_loopback(_host(job)):
        return None
    return job.coordinator


def _host(job: Job) -> str:
    """Returns the host of the coordinator: '::1' for '[::1]:8476'."""
    host, _, _ = str(job.coordinator).rpartition(':')
    return host.strip('[]')


def _is_loopback(host: str) -> bool:
    if host == 'localhost':
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # another host name
        return False


def _require_port(job: Job) -> None:
    """Raises ProcessError if the coordinator's port is in use; jax itself would crash."""
    _, _, port_text = str(job.coordinator).rpartition(':')
    port = int(port_text)
    # Without a bind address, jax listens on all addresses, here ''.
    host = '' if bind_address(job) is None else _host(job)
    is_ipv6 = ':' in host
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    try:
        server = socket.create_server((host, port), family=family)
        server.close()
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ProcessError(
            f'the coordinator cannot listen on port {port} ({reason}); give the job another port'
        ) from error
