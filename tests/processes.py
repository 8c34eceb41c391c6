"""Helpers that start processes and jobs, wait for them, and limit what this process may do."""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


# The author of commits that tests make.
GIT_IDENTITY = {
    'GIT_AUTHOR_NAME': 'A Reader',
    'GIT_AUTHOR_EMAIL': 'reader@example.org',
    'GIT_COMMITTER_NAME': 'A Reader',
    'GIT_COMMITTER_EMAIL': 'reader@example.org',
}


def git(directory: Path, *arguments: str) -> str:
    """Runs a git command in a directory and returns what it prints.

    Commits have the author GIT_IDENTITY. The first branch of a new repository is `main`.

    Raises:
        CalledProcessError: The command failed.
    """
    finished = subprocess.run(
        ['git', '-c', 'init.defaultBranch=main', *arguments],
        cwd=directory,
        env={**os.environ, **GIT_IDENTITY},
        check=True,
        capture_output=True,
        text=True,
    )
    return finished.stdout.strip()


def start_python(source: str, *arguments: object, **variables: str) -> subprocess.Popen:
    """Starts a Python process that runs `source`, with environment variables `variables`."""
    command = [sys.executable, '-c', textwrap.dedent(source)]
    for argument in arguments:
        command.append(str(argument))
    environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu', **variables}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return listener.getsockname()[1]


def environments(count: int) -> list[dict[str, str]]:
    """Returns the environment variables of each process in a job of `count` processes.

    JAX connects processes that have the same address and number of processes. Process 0 listens at
    the address.
    """
    address = f'127.0.0.1:{free_port()}'
    return [
        {
            'JAX_COORDINATOR_ADDRESS': address,
            'JAX_NUM_PROCESSES': str(count),
            'JAX_PROCESS_ID': str(rank),
        }
        for rank in range(count)
    ]


def start_job(source: str, count: int, *arguments: object, **variables: str) -> list:
    """Starts a job of `count` processes, each of which runs `source`."""
    return [
        start_python(source, *arguments, **environment, **variables)
        for environment in environments(count)
    ]


def wait_for_results(
    processes: list[subprocess.Popen], timeout: float = 120
) -> list[tuple[int, str, str]]:
    """Waits until all processes have ended, and returns their exit codes and outputs.

    Args:
        processes: Processes with pipes for standard output and error, as from `start_python`.
        timeout: How long to wait for each process, in seconds.

    Returns:
        Exit code, standard output and standard error of each process, in the order of `processes`.

    Raises:
        subprocess.TimeoutExpired: A process did not end in time. All processes are killed.
    """
    results = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=timeout)
            results.append((process.returncode, output, errors))
        return results
    finally:
        # After a timeout, processes may still be running. Killing an ended process does nothing.
        for process in processes:
            process.kill()


def wait_until(holds, seconds: float = 120, why=lambda: 'it did not happen') -> None:
    """Waits until `holds()` is true, and fails after `seconds` with the message `why()`."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, why()
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended, on Linux."""
    try:
        status = Path(f'/proc/{pid}/stat').read_text()
    except OSError:  # there is no process with this ID
        return False
    # The content looks like '42 (python) S 1 ...'. The name of the program may contain spaces.
    _, _, after_name = status.rpartition(')')
    state = after_name.split()[0]
    # A process that has ended stays a zombie until its parent has read its exit code.
    is_zombie = state == 'Z'
    is_dead = state == 'X'
    return not is_zombie and not is_dead


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    """Sets the umask for a `with` block."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Limits the size of files that this process can write, in bytes, for a `with` block."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard_limit))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft_limit, hard_limit))


def other_modes(directory: Path, mask: int) -> dict[str, str]:
    """The modes of all files and directories whose mode differs from what the umask gives."""
    modes = {}
    for path in [directory, *directory.rglob('*')]:
        mode = path.stat().st_mode & 0o777
        mode_without_umask = 0o777 if path.is_dir() else 0o666
        if mode != mode_without_umask & ~mask:
            modes[str(path)] = oct(mode)
    return modes


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError if a `with` block takes longer. Works only in the main thread.

    A timer sends the signal SIGALRM to this process, and the handler raises the error.
    """

    def raise_timeout(signal_number: int, frame: object) -> None:
        raise TimeoutError(f'it waits for more than {seconds} s')

    handler_before = signal.signal(signal.SIGALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # stops the timer
        signal.signal(signal.SIGALRM, handler_before)
