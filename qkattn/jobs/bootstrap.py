"""Joins the processes of a job; a process without a job stays alone and pays nothing."""

import contextlib
import functools
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax

from qkattn.errors import ConfigError
from qkattn.jobs import agreement, cli, signals
from qkattn.jobs.detection import Job, connect_seconds, detect
from qkattn.jobs.peers import EXIT_CRASH, JobPeers

HEARTBEAT = 30  # seconds without a sign of life after which jax ends the others of a job
_AGAIN = 0.2  # seconds between two attempts


@functools.cache
def start() -> Job:
    """Joins the job that the environment describes, before anything else of jax; idempotent.

    ConfigError if its variables contradict each other, or processes do not come in time.
    """
    job = detect()
    if job.engine == 'single':
        return job
    seconds = connect_seconds()
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

    One that fails ends at once, with os._exit: Python's exit waits for peers, which wait for it.
    """

    @functools.wraps(main)
    def joined() -> None:
        if start().num_processes == 1:
            return main()
        try:
            # Process 0 speaks for the job; messages and errors of all go to standard error.
            with open(os.devnull, 'w') as nowhere:
                printed = sys.stdout if agreement.owner() else nowhere
                with contextlib.redirect_stdout(printed):
                    main()
            # Whoever is early waits here, where it still answers the others.
            agreement.barrier('the end', limit=agreement.OWNER_LIMIT)
        except BaseException as error:
            sentence, code = cli.outcome(error) or (f'{type(error).__name__}: {error}', EXIT_CRASH)
            if code == EXIT_CRASH:
                traceback.print_exc()
            if _from_jax(error):
                # Mostly the echo of another process that died, whose rank jax's heartbeats tell.
                time.sleep(HEARTBEAT + 5)
            signals.end(code, sentence)

    return joined


def _from_jax(error: BaseException | None) -> bool:
    """Whether an error is, or follows from, one of XLA's, such as a collective that failed."""
    if error is None or isinstance(error, jax.errors.JaxRuntimeError):
        return error is not None
    return _from_jax(error.__cause__ or error.__context__)


def meet(job: Job, seconds: float) -> None:
    """Returns once all processes are at the coordinator's port, where jax then starts its service.

    jax ends a process by abort() if one of them is missing, and does not say which. ConfigError if
    some are missing after `seconds`, or disagree on how many they are.
    """
    deadline = time.monotonic() + seconds
    host, _, port = str(job.coordinator).rpartition(':')
    if job.process_id:
        _report(job, (host.strip('[]'), int(port)), seconds, deadline)
        return
    with contextlib.ExitStack() as stack:
        listener, total = stack.enter_context(_listen(int(port), deadline)), job.num_processes
        arrived: dict[int, socket.socket] = {}
        while len(arrived) < total - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection = stack.enter_context(listener.accept()[0])
            except TimeoutError:
                missing = [rank for rank in range(1, total) if rank not in arrived]
                raise ConfigError(
                    f'{agreement.named(missing)} of {total} did not reach the '
                    f'coordinator {job.coordinator} within {seconds:g} s'
                ) from None
            connection.settimeout(5.0)  # to say who it is
            try:
                rank, count = map(int, connection.recv(64).split())
            except (OSError, ValueError):  # not one of ours
                continue
            if count != total:
                answer = f'process {rank} is one of {count} processes, but process 0 one of {total}'
                connection.sendall(answer.encode())
                raise ConfigError(answer)
            connection.setblocking(False)
            arrived[rank] = connection
            # Whoever has died since may be started again.
            arrived = {rank: socket for rank, socket in arrived.items() if _is_open(socket)}
        for connection in arrived.values():
            with contextlib.suppress(OSError):  # jax says what is wrong with it
                connection.sendall(b'go')


def _is_open(connection: socket.socket) -> bool:
    """Whether the other side, which sends nothing more, has not closed it."""
    try:
        return bool(connection.recv(1))
    except OSError as error:
        return isinstance(error, BlockingIOError)


def _listen(port: int, deadline: float) -> socket.socket:
    ipv6 = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    options: dict[str, Any] = {'family': family, 'backlog': 4096, 'dualstack_ipv6': ipv6}
    while True:
        try:
            return socket.create_server(('', port), **options)
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f'the coordinator cannot listen on port {port} '
                    f'({os.strerror(error.errno or 0)}); give the job another one'
                ) from error
        time.sleep(_AGAIN)


def _report(job: Job, address: tuple[str, int], seconds: float, deadline: float) -> None:
    """In the others: tells process 0 who this is, and waits until all are there."""
    reason: OSError | str = 'it does not answer'
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=left) as connection:
                connection.sendall(f'{job.process_id} {job.num_processes}'.encode())
                answer = connection.recv(1024).decode()
        except OSError as error:
            reason, answer = error.strerror or error, ''
        if answer == 'go':
            return
        if answer:
            raise ConfigError(answer)
        time.sleep(_AGAIN)
    raise ConfigError(
        f'process {job.process_id} does not reach the coordinator {job.coordinator}, or not all '
        f'{job.num_processes} processes do, within {seconds:g} s ({reason})'
    )
