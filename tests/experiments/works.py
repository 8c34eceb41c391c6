"""Pieces of work that benchmarks time: one that writes, one that raises and one that exits."""

import os

from experiments.benchmark.race import Work


def writes_letter(file: str, letter: str, steps: float = 1) -> Work:
    """Appends a letter to a file at each call, which shows the order of calls."""

    def run(calls: int) -> None:
        with open(file, 'a') as stream:
            stream.write(letter * calls)

    return Work(run, steps, extra={'here': os.getpid()})


def raises_value_error() -> Work:
    raise ValueError('no such kernel\nand more')


def exits_in_second_round() -> Work:
    """A work that ends its process with exit code 3 at the fourth call, which is round 2.

    A race makes the first call to warm up, and the second one to plan. The third one is round 1.
    """
    num_calls = 0

    def run(calls: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 4:
            os._exit(3)

    return Work(run)
