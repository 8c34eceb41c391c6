"""Works of benchmarks."""

import os

from experiments.benchmark.race import Work


def noted(file: str, letter: str, steps: float = 1) -> Work:
    """Appends its letter to a file with every call."""

    def run(calls: int) -> None:
        with open(file, 'a') as opened:
            opened.write(letter * calls)

    return Work(run, steps, {'here': os.getpid()})


def broken() -> Work:
    raise ValueError('no such kernel\nand more')


def dying() -> Work:
    """Ends its process in the second round, after a call to warm up and a timed one."""
    left = iter(range(3))
    return Work(lambda calls: next(left, None) is None and os._exit(3))
