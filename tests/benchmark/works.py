"""Works that import neither jax nor torch, for tests of races."""

import os
from pathlib import Path

from qkattn.benchmark.work import Work
from qkattn.run.cores import usable


def noted(file: str, letter: str, steps: float = 1) -> Work:
    """Appends its letter to a file with every call."""

    def run(calls: int) -> None:
        with Path(file).open('a') as opened:
            opened.write(letter * calls)

    return Work(run, steps, {'tokens': 10, 'here': [os.getpid(), *usable()]})


def located(file: str) -> Work:
    """Appends the cores that it may use to a file, a line a call."""

    def run(calls: int) -> None:
        with Path(file).open('a') as opened:
            print(*usable(), file=opened)

    return Work(run)


def broken() -> Work:
    raise ValueError('no such kernel\nand more')


def dying() -> Work:
    """Ends its process in the second round, after a call to warm up and a timed one."""
    left = iter(range(3))
    return Work(lambda calls: next(left, None) is None and os._exit(3))
