"""Times rows in turns, each in a process of its own that stays alive.

Round i goes through all rows before round i + 1 begins, so that what changes on the machine
in the meantime hits all alike; only one of them computes at a time.
"""

import contextlib
import dataclasses
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

    run: Callable[[int], object]  # does N calls, and returns once all results are there
    steps: float = 1  # steps, or tokens, of one call; times are given per step
    extra: Mapping[str, Any] = {}  # numbers for the row: 'tokens' and 'flops' of a step, ...
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
        """The median over rounds of the seconds per step."""
        return statistics.median(self.rounds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and third quartile of the rounds. With a single round, both are its seconds."""
        if len(self.rounds) == 1:
            return self.rounds[0], self.rounds[0]
        first, _, third = statistics.quantiles(self.rounds, n=4, method='inclusive')
        return first, third

    def ratio(self, reference: 'Row') -> float:
        """The median of ratios of seconds, round by round, so that drift of the machine cancels."""
        pairs = zip(self.rounds, reference.rounds, strict=False)
        return statistics.median(seconds / other for seconds, other in pairs)


class _Built(NamedTuple):
    """A work that a process of the race has built, as this process knows it."""

    number: int  # in the process
    work: Work  # without `run`, which only the process has
    seconds_of_call: float


def race(rows: Sequence[Row], *, rounds: int, seconds: float) -> list[Row]:
    """Times rows in turns; returns them with the seconds per step of each round.

    First, the work of every row is built. Then each round times one row after the other, each for
    at least `seconds` and at least one call. Rows of the same work share a process. A row that
    fails, for example for lack of memory, is left out, with a warning that says why.
    """
    built: dict[str, _Built] = {}  # by row, without those that have failed
    times: dict[str, list[float]] = {row.name: [] for row in rows}
    with contextlib.ExitStack() as stack:
        processes: dict[str, ProcessPoolExecutor] = {}

        def call(row: Row, function: Callable, *arguments: Any) -> Any:
            """Calls a function in the process of a row; if it fails, warns and returns None."""
            try:
                if row.work not in processes:
                    processes[row.work] = stack.enter_context(_process())
                return processes[row.work].submit(function, *arguments).result()
            except Exception as error:  # libraries raise exceptions of any kind
                reason = f'{type(error).__name__}: {error}'.splitlines()[0]
                log.warning('%s is left out: %s', row.name, reason)
                return None

        for row in rows:
            with waiting('benchmark', f'building {row.name}'):
                result = call(row, _build, row.work, row.settings)
            if result is not None:
                built[row.name] = result

        for number in range(rounds):
            with waiting('benchmark', f'round {number + 1} of {rounds}'):
                for row in rows:
                    if row.name not in built:
                        continue
                    entry = built[row.name]
                    calls = max(1, math.ceil(seconds / entry.seconds_of_call))
                    seconds_of_calls = call(row, _time, entry.number, calls)
                    if seconds_of_calls is None:
                        del built[row.name]
                    else:
                        times[row.name].append(seconds_of_calls / (calls * entry.work.steps))

    measured_rows = []
    for row in rows:
        if row.name in built:
            extra = {**row.extra, **built[row.name].work.extra}
            measured_rows.append(dataclasses.replace(row, rounds=times[row.name], extra=extra))
    return measured_rows


def _process() -> ProcessPoolExecutor:
    """Returns a pool of one process, in which a work is built and timed."""
    # The process inherits these variables.
    os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=str(len(usable_cores())))
    context = multiprocessing.get_context('spawn')
    return ProcessPoolExecutor(max_workers=1, mp_context=context, initializer=_begin)


# In a process of the race

_works: list[Work] = []


def _begin() -> None:
    """Prepares a process of the race."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # What libraries print goes to standard error. Standard output is for the results.
    stdout = 1
    stderr = 2
    os.dup2(stderr, stdout)


def _end_with_parent() -> None:
    """Waits until the process that started this one ends or is killed; then ends this one."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _build(path: str, settings: Mapping[str, Any]) -> _Built:
    """Builds a work with the function 'package.module:function', and calls it twice.

    The first call compiles, and the second one is timed.
    """
    module_name, function_name = path.split(':')
    build_work = getattr(importlib.import_module(module_name), function_name)
    work = build_work(**settings)
    work.run(1)
    _works.append(work)
    number = len(_works) - 1
    seconds_of_call = _time(number, calls=1)
    # `run` may not be sent to another process, so another function stands in its place.
    work_to_send = work._replace(run=_time)
    return _Built(number, work_to_send, seconds_of_call)


def _time(number: int, calls: int) -> float:
    """Returns the seconds that a number of calls of a work take, all together."""
    work = _works[number]
    start = work.clock()
    work.run(calls)
    return work.clock() - start
