"""The processes of a job meet at the coordinator's port before jax starts its service there.

jax ends a process by abort() if one of them is missing, and does not say which.
"""

import contextlib
import os
import socket
import time

from qkattn.errors import ConfigError
from qkattn.jobs.agreement import named
from qkattn.jobs.detection import Job

_HELLO = 5.0  # seconds that a process may take to say who it is, once connected
_AGAIN = 0.2  # seconds between two attempts


def meet(job: Job, seconds: float) -> None:
    """Returns once all processes are there.

    Raises:
      ConfigError: the coordinator is not reached, or processes are missing, after `seconds`; or
        they disagree on how many they are.
    """
    deadline = time.monotonic() + seconds
    host, _, port = str(job.coordinator).rpartition(':')
    if job.process_id == 0:
        _receive(job, int(port), seconds, deadline)
    else:
        _report(job, (host.strip('[]'), int(port)), seconds, deadline)


def _receive(job: Job, port: int, seconds: float, deadline: float) -> None:
    """In process 0: waits for the others, then lets them go on."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(port, deadline))
        arrived: dict[int, socket.socket] = {}
        while len(arrived) < job.num_processes - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection = stack.enter_context(listener.accept()[0])
            except TimeoutError:
                missing = [rank for rank in range(1, job.num_processes) if rank not in arrived]
                raise ConfigError(
                    f'{named(missing)} of {job.num_processes} did not reach the coordinator '
                    f'{job.coordinator} within {seconds:g} s'
                ) from None
            connection.settimeout(_HELLO)
            try:
                rank, count = map(int, connection.recv(64).split())
            except (OSError, ValueError):  # not one of ours
                continue
            if count != job.num_processes:
                answer = (
                    f'process {rank} is one of {count} processes, but process 0 one of '
                    f'{job.num_processes}'
                )
                connection.sendall(answer.encode())
                raise ConfigError(answer)
            connection.setblocking(False)
            arrived[rank] = connection
            # Whoever has died since may be started again.
            arrived = {rank: there for rank, there in arrived.items() if _waits(there)}
        for connection in arrived.values():
            with contextlib.suppress(OSError):  # jax says what is wrong with it
                connection.sendall(b'go')


def _waits(connection: socket.socket) -> bool:
    """Whether the other side has not closed it; it sends nothing more."""
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _listen(port: int, deadline: float) -> socket.socket:
    while True:
        try:
            if socket.has_dualstack_ipv6():
                return socket.create_server(
                    ('', port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True
                )
            return socket.create_server(('', port), backlog=4096)
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f'the coordinator cannot listen on port {port} '
                    f'({os.strerror(error.errno or 0)}); give the job another one'
                ) from error
        time.sleep(_AGAIN)


def _report(job: Job, address: tuple[str, int], seconds: float, deadline: float) -> None:
    """In the others: says to process 0 who this is, and waits until all are there."""
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
