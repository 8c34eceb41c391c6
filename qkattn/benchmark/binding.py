"""Which cores a process runs on. Imports no jax: the process of a contestant may be without it."""

import contextlib
import os


def pin(cores: list[int]) -> None:
    """Binds this process, and threads that it will start, to cores, where the system can."""
    if hasattr(os, 'sched_setaffinity'):
        os.sched_setaffinity(0, cores)


def rebind(process: int, cores: list[int]) -> None:
    """Binds all threads of a running process to other cores, on Linux; one that has ended stays."""
    with contextlib.suppress(OSError, AttributeError):
        for thread in os.listdir(f'/proc/{process}/task'):
            os.sched_setaffinity(int(thread), cores)
