"""Real jobs of several processes on this machine, for the tests of what they agree on."""

import os
import socket
import subprocess
import sys
import textwrap

from tests.processes import ROOT


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return listener.getsockname()[1]


def start_job(source: str, count: int, *arguments: object, **variables: str) -> list:
    """Starts `count` processes of a job that run `source`, as a job of the explicit triple."""
    job = {
        'PYTHONPATH': str(ROOT),
        'JAX_PLATFORMS': 'cpu',
        'JAX_COORDINATOR_ADDRESS': f'127.0.0.1:{free_port()}',
        'JAX_NUM_PROCESSES': str(count),
    }
    return [
        subprocess.Popen(
            [sys.executable, '-c', textwrap.dedent(source), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **job, 'JAX_PROCESS_ID': str(rank), **variables},
        )
        for rank in range(count)
    ]


def ended(processes: list, timeout: float = 120) -> list[tuple[int, str, str]]:
    """Exit code, standard output and standard error of each process of a job."""
    try:
        texts = [process.communicate(timeout=timeout) for process in processes]
        return [(one.returncode, *text) for one, text in zip(processes, texts, strict=True)]
    finally:
        for process in processes:
            process.kill()
