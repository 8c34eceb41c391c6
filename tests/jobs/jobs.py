"""Real jobs of several processes on this machine, for the tests of what they agree on."""

import socket

from tests.processes import start_python


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return listener.getsockname()[1]


def environments(count: int) -> list[dict[str, str]]:
    """The explicit triple of each process of a job."""
    job = {'JAX_COORDINATOR_ADDRESS': f'127.0.0.1:{free_port()}', 'JAX_NUM_PROCESSES': str(count)}
    return [job | {'JAX_PROCESS_ID': str(rank)} for rank in range(count)]


def start_job(source: str, count: int, *arguments: object, **variables: str) -> list:
    """Starts `count` processes of a job that run `source`."""
    return [
        start_python(source, *arguments, **environment, **variables)
        for environment in environments(count)
    ]


def ended(processes: list, timeout: float = 120) -> list[tuple[int, str, str]]:
    """Exit code, standard output and standard error of each process of a job."""
    try:
        texts = [process.communicate(timeout=timeout) for process in processes]
        return [(one.returncode, *text) for one, text in zip(processes, texts, strict=True)]
    finally:
        for process in processes:
            process.kill()
