"""Pieces of work that benchmarks time: one that writes, one that raises and one that exits."""

import os

from experiments.benchmark.race import Work


def writes_letter(file: str, letter: str, steps: float = 1) -> Work:
    """Work that appends its letter to a file once a call, so that the order of calls is seen."""

    def run(calls: int) -> None:
        with open(file, 'a') as stream:
            stream.write(letter * calls)

    return Work(run, steps, {'here': os.getpid()})


def raises_value_error() -> Work:
    raise ValueError('no such kernel\nand more')


def exits_in_second_round() -> Work:
    """Ends its process in the second round, after a call to warm up and a timed one."""
    left = iter(range(3))
    return Work(lambda calls: next(left, None) is None and os._exit(3))
