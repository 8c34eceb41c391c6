"""Three works for the race of a benchmark: one writes, one raises an error, and one exits."""

import os

from experiments.benchmark.race import Work


def writes_letter(file: str, letter: str, steps: float = 1) -> Work:
    """A work that appends a letter to a file at each call. The file shows the order of calls.

    `here` is the process in which the work was built.
    """

    def run(calls: int) -> None:
        with open(file, 'a') as stream:
            stream.write(letter * calls)

    return Work(run, steps, extra={'here': os.getpid()})


def raises_value_error() -> Work:
    raise ValueError('no such kernel\nand more')


def exits_in_second_round() -> Work:
    """A work that ends its process with exit code 3 at the fourth call.

    A race makes two calls when it builds a work, and one call in each round. So the fourth call is
    in round 2.
    """
    num_calls = 0

    def run(calls: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 4:
            os._exit(3)

    return Work(run)
