"""Real processes for the tests that kill and signal them; umasks, modes and limits of files."""

import contextlib
import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def start_python(source: str, *arguments: object, **variables: str) -> subprocess.Popen:
    """Starts a process that runs `source`; it says when it is ready by printing a line."""
    return subprocess.Popen(
        [sys.executable, '-c', textwrap.dedent(source), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu', **variables},
    )


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
