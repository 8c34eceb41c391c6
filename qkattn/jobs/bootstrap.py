"""Joins the processes of a job. For a process without a job this costs nothing."""

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

# If a process gives no sign of life for this many seconds, jax ends the others of its job.
HEARTBEAT = 30


@functools.cache
def start() -> Job:
    """Joins the job that environment variables describe, and returns it.

    Call it before any other function of jax; further calls do nothing. If not all processes come in
    time, the process ends with exit code 1.

    Raises ConfigError if the variables contradict each other, ProcessError if the coordinator's
    port is in use.
    """
    job = detect()
    if job.engine == 'single':
        return job
    seconds = connect_seconds()
    if job.process_id == 0:
        _require_port(job)
    # jax has a service of its own by which all processes stop at the same step after a SIGTERM. It
    # would take the signal away from Python's handlers, so JobPeers is used instead.
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
    peers.watch()  # all processes are connected
    return job


def in_job(main: Callable[[], None]) -> Callable[[], None]:
    """Wraps a script's main function, so that it joins the other processes and ends with them.

    A process that fails ends by os._exit. Python's own exit would wait for the other processes,
    while they wait for this one.
    """

    @functools.wraps(main)
    def main_in_job() -> None:
        """Runs `main` in every process of a job. If it fails in one of them, all end."""
        job = start()
        if job.num_processes == 1:
            return main()
        try:
            agreement.require_same('the number of processes', str(job.num_processes))
            # Only process 0 prints results. Messages and errors of all go to standard error.
            with open(os.devnull, 'w') as nowhere:
                printed = sys.stdout if agreement.is_process_0() else nowhere
                with contextlib.redirect_stdout(printed):
                    main()
            # Wait for the other processes. They may still exchange messages with this one.
            agreement.barrier('the end', limit=agreement.OWNER_LIMIT)
        except BaseException as error:
            _end_job(error)

    return main_in_job


def _end_job(error: BaseException) -> NoReturn:
    """Ends this process and the other processes of its job after an error in this one."""
    outcome = cli.outcome(error)
    if outcome is None:  # a bug
        outcome = cli.Outcome(f'{type(error).__name__}: {error}', EXIT_CRASH)
    if outcome.code == EXIT_CRASH:
        traceback.print_exc()
    # A computation across processes mostly fails because another process has died. jax notices that
    # within HEARTBEAT seconds, and ends this process with a message that names the dead one. That
    # says more than this error, so wait for it.
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
    """Returns the address on which the coordinator listens, as HOST:PORT; None leaves it to jax.

    If the coordinator has a loopback address, such as 'localhost:8476', the whole job is on this
    machine. It then listens on this address only, so that no other machine can connect. Otherwise
    jax listens on all addresses, because the other processes may reach it by any of them.
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
    except ValueError:  # a name, not an address
        return False


def _require_port(job: Job) -> None:
    """Raises ProcessError if the coordinator's port is in use; jax itself would crash."""
    _, _, port_text = str(job.coordinator).rpartition(':')
    port = int(port_text)
    # Listen where jax will: on all addresses, '', unless `bind_address` chooses one.
    host = _host(job) if bind_address(job) else ''
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    try:
        server = socket.create_server((host, port), family=family)
        server.close()
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ProcessError(
            f'the coordinator cannot listen on port {port} ({reason}); give the job another port'
        ) from error
