"""Real processes, and jobs of several, for the tests that kill and signal them; modes of files."""

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


# The author of commits that tests make, whatever git knows of the user.
GIT_IDENTITY = {
    'GIT_AUTHOR_NAME': 'A Reader',
    'GIT_AUTHOR_EMAIL': 'reader@example.org',
    'GIT_COMMITTER_NAME': 'A Reader',
    'GIT_COMMITTER_EMAIL': 'reader@example.org',
}


def git(directory: Path, *arguments: str) -> str:
    """Runs a command of git in a directory; returns what it prints."""
    return subprocess.run(
        ['git', '-c', 'init.defaultBranch=main', *arguments],
        cwd=directory,
        env={**os.environ, **GIT_IDENTITY},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


def start_python(source: str, *arguments: object, **variables: str) -> subprocess.Popen:
    """Starts a process that runs `source`; it says when it is ready by printing a line."""
    return subprocess.Popen(
        [sys.executable, '-c', textwrap.dedent(source), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu', **variables},
    )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return listener.getsockname()[1]


def environments(count: int) -> list[dict[str, str]]:
    """The variables that tell each process of a job its coordinator, number and rank."""
    job = {'JAX_COORDINATOR_ADDRESS': f'127.0.0.1:{free_port()}', 'JAX_NUM_PROCESSES': str(count)}
    return [job | {'JAX_PROCESS_ID': str(rank)} for rank in range(count)]


def start_job(source: str, count: int, *arguments: object, **variables: str) -> list:
    """Starts `count` processes of a job that run `source`."""
    return [
        start_python(source, *arguments, **environment, **variables)
        for environment in environments(count)
    ]


def wait_for_results(processes: list, timeout: float = 120) -> list[tuple[int, str, str]]:
    """Waits for processes; returns exit code, standard output and standard error of each."""
    try:
        texts = [process.communicate(timeout=timeout) for process in processes]
        return [(one.returncode, *text) for one, text in zip(processes, texts, strict=True)]
    finally:
        for process in processes:
            process.kill()


def wait_until(holds, seconds: float = 120, why=lambda: 'it did not happen') -> None:
    """Waits until `holds()` is true; fails with the message `why()` after so many seconds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, why()
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] not in 'ZX'
    return False


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    """A block under another umask."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """A block in which this process can write no larger files."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def other_modes(directory: Path, mask: int) -> dict[str, str]:
    """The files and directories below whose modes are not those that the umask gives."""
    modes = {path: path.stat().st_mode & 0o777 for path in [directory, *directory.rglob('*')]}
    return {
        str(path): oct(mode)
        for path, mode in modes.items()
        if mode != (0o777 if path.is_dir() else 0o666) & ~mask
    }


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in a block of the main thread that takes longer."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f'it waits for more than {seconds} s')

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
