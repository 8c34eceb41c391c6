"""Times rows in turns, each in a process of its own that stays alive.

Round i goes through all rows before round i + 1 begins, so that what changes on the machine
in the meantime hits all alike; only one of them computes at a time.
"""

import contextlib
import dataclasses
import functools
import importlib
import logging
import math
import multiprocessing
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from qkattn.jobs.display import waiting
from qkattn.jobs.machine import usable_cores

log = logging.getLogger('qkattn.benchmark')

# The cache of compiled programs does not know the number of threads.
ENVIRONMENT = {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false', 'JAX_ENABLE_COMPILATION_CACHE': 'false'}


class Work(NamedTuple):
    """Something to time, compiled."""

    run: Callable[[int], object]  # works so many times, and returns once all results are there
    steps: float = 1  # (or tokens, ...) of one call; times are given per step
    extra: Mapping[str, Any] = {}  # facts for the row: 'tokens' and 'flops' of a step, ...
    clock: Callable[[], float] = time.perf_counter  # what time is measured in, seconds


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a table, before it is measured and after."""

    name: str  # within its group
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # arguments of `work`
    rounds: Sequence[float] = ()  # seconds per step; round i of all rows of a race is interleaved
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # facts, those of its Work
    work: str = ''  # 'package.module:function', which builds its Work

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third; of one round, that round."""
        if len(self.rounds) == 1:
            return self.rounds[0], self.rounds[0]
        first, _, third = statistics.quantiles(self.rounds, n=4, method='inclusive')
        return first, third

    def ratio(self, reference: 'Row') -> float:
        """The median of ratios of seconds, round by round, so that drift of the machine cancels."""
        pairs = zip(self.rounds, reference.rounds, strict=False)
        return statistics.median(seconds / other for seconds, other in pairs)


def race(rows: Sequence[Row], *, rounds: int, seconds: float) -> list[Row]:
    """The rows with what is measured: all are built, then timed interleaved.

    Rows of one work share a process. In each round a row is timed for at least so many seconds, and
    one call. A row that fails, out of memory for example, is left out, with a warning that says
    why.
    """
    built: dict[str, tuple[int, Work, float]] = {}
    measured: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        process_of = functools.cache(lambda work: stack.enter_context(_process()))

        def ask(row: Row, function: Callable, *arguments: Any) -> Any:
            """The result in the process of a row; None where it fails, which ends the row."""
            try:
                return process_of(row.work).submit(function, *arguments).result()
            except Exception as error:  # whatever a library raises
                why = f'{type(error).__name__}: {error}'.splitlines()[0]
                log.warning('%s is left out: %s', row.name, why)
                measured.pop(row.name, None)

        for row in rows:
            with waiting('benchmark', f'building {row.name}'):
                if (answer := ask(row, _build, row.work, row.settings)) is not None:
                    built[row.name] = answer
                    measured[row.name] = []
        for number in range(rounds):
            with waiting('benchmark', f'round {number + 1} of {rounds}'):
                for row in (row for row in rows if row.name in measured):
                    place, work, once = built[row.name]
                    calls = max(1, math.ceil(seconds / once))
                    if (took := ask(row, _time, place, calls)) is not None:
                        measured[row.name].append(took / (calls * work.steps))
    return [
        dataclasses.replace(
            row, rounds=measured[row.name], extra={**row.extra, **built[row.name][1].extra}
        )
        for row in rows
        if row.name in measured
    ]


def _process() -> ProcessPoolExecutor:
    os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=str(len(usable_cores())))
    context = multiprocessing.get_context('spawn')
    return ProcessPoolExecutor(1, context, initializer=_begin)


# In a process of the race

_works: list[Work] = []


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(2, 1)  # what libraries print


def _end_with_parent() -> None:
    """Ends this process once the one that started it has ended, also where that is killed."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _build(path: str, settings: Mapping[str, Any]) -> tuple[int, Work, float]:
    """The number of a work in this process, its facts without `run`, seconds of its second call."""
    module, function = path.split(':')
    work = getattr(importlib.import_module(module), function)(**settings)
    work.run(1)
    _works.append(work)
    number = len(_works) - 1
    return number, work._replace(run=_time), _time(number, 1)


def _time(number: int, calls: int) -> float:
    """Seconds of so many calls of a work."""
    work = _works[number]
    start = work.clock()
    work.run(calls)
    return work.clock() - start
