"""Rows side by side: each work in a process that stays alive, timed in turns.

Round i goes through all rows before round i + 1 begins, so that what changes on the machine
in the meantime hits all alike; only one of them computes at a time.

Nothing here imports jax: a process imports what it times, and torch shares none.
"""

import contextlib
import dataclasses
import importlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qkattn.jobs.display import waiting
from qkattn.jobs.machine import keep_freed_memory, usable_cores

ROOT = str(Path(__file__).parents[2])
OWN = 'experiments.benchmark.works'  # programs as qkattn's scripts run them


@dataclasses.dataclass(frozen=True)
class Work:
    """Something to time, compiled.

    Attributes:
      run: does its work `calls` times, and returns once all results are there.
      steps: steps (or tokens, ...) of one call; times are given per step.
      extra: facts for the row: 'tokens' and 'flops' of a step, ...
    """

    run: Callable[[int], object]
    steps: float = 1
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a table, before it is measured and after.

    Attributes:
      name: of the row within its group.
      settings: keyword arguments of `work`, JSON values; the cores too once it is measured.
      rounds: seconds per step, one number a round; round i of all rows of a race is interleaved.
      extra: facts of its Work; 'failed' in place of rounds where it could not be measured.
      work: 'package.module:function', which builds its Work.
    """

    name: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rounds: Sequence[float] = ()
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    work: str = ''

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


def race(rows: Sequence[Row], *, cores: int, rounds: int, seconds: float) -> list[Row]:
    """The rows with what is measured: all are built, then timed interleaved.

    Args:
      rows: those of one work share a process.
      cores: number of cores that each process is bound to.
      rounds: times that each row is timed.
      seconds: that a row is timed for in a round, at least; at least one call.
    """
    processes: dict[str, Process] = {}
    built: list[tuple[Row, Process, dict[str, Any]]] = []
    with contextlib.ExitStack() as stack:
        for row in rows:
            if row.work not in processes:
                processes[row.work] = stack.enter_context(Process(usable_cores()[-cores:]))
            process = processes[row.work]
            with waiting('benchmark', f'building {row.name}'):
                answer = process.ask({'work': row.work, 'settings': row.settings})
            built.append((row, process, answer | {'rounds': []}))
        for number in range(rounds):
            with waiting('benchmark', f'round {number + 1} of {rounds}'):
                for _, process, work in built:
                    if 'failed' not in work:
                        calls = max(1, math.ceil(seconds / work['seconds']))
                        answer = process.ask({'number': work['number'], 'calls': calls})
                        if 'failed' in answer:
                            work |= answer
                        else:
                            work['rounds'].append(answer['seconds'] / (calls * work['steps']))
    return [
        dataclasses.replace(
            row,
            settings={**row.settings, 'cores': cores},
            rounds=[] if 'failed' in work else work['rounds'],
            extra={'failed': work['failed']} if 'failed' in work else row.extra | work['extra'],
        )
        for row, _, work in built
    ]


class Process(contextlib.AbstractContextManager):
    """A process, bound to cores, that builds works and times them until the end of a block."""

    def __init__(self, cores: Sequence[int]):
        # Not by -m, for which experiments/__init__.py begins a script: other memory, a display.
        program = f'import sys; sys.path.append({ROOT!r}); '
        program += f'from experiments.benchmark import race; race.serve({list(cores)})'
        environment = {'OMP_NUM_THREADS': str(len(cores)), 'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}
        # The cache does not know the number of threads.
        environment['JAX_ENABLE_COMPILATION_CACHE'] = 'false'
        self._process = subprocess.Popen(
            [sys.executable, '-c', program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to an order of `serve`; {'failed': why} where the process has ended."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f'{json.dumps(order)}\n')
            self._process.stdin.flush()
        if line := self._process.stdout.readline():
            return json.loads(line)
        return {'failed': f'its process ended with code {self._process.wait()}'}


def bind(cores: Sequence[int]) -> None:
    """Binds this process to cores, where the system can."""
    if hasattr(os, 'sched_setaffinity'):
        os.sched_setaffinity(0, cores)


def serve(cores: Sequence[int]) -> None:
    """Answers each order, a JSON object on a line of standard input, by one on standard output.

    {'work', 'settings'} builds a work -> 'number', 'steps', 'extra', 'seconds' of its second call.
    {'number', 'calls'} runs it that often -> 'seconds' of all calls.
    What fails -> 'failed', a sentence.
    """
    bind(cores)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    answers = os.fdopen(os.dup(1), 'w', buffering=1)
    os.dup2(2, 1)  # what libraries print
    works: list[Work] = []
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = {}
            if 'work' in order:
                module, function = order['work'].split(':')
                if module == OWN:
                    keep_freed_memory()  # before an import starts a thread
                work = getattr(importlib.import_module(module), function)(**order['settings'])
                work.run(1)
                works.append(work)
                order = {'number': len(works) - 1, 'calls': 1}
                answer = {'number': order['number'], 'steps': work.steps, 'extra': work.extra}
            start = time.perf_counter()
            works[order['number']].run(order['calls'])
            answer['seconds'] = time.perf_counter() - start
        except Exception as error:  # whatever a library raises, out of memory too
            traceback.print_exc()
            answer = {'failed': f'{type(error).__name__}: {error}'.splitlines()[0]}
        print(json.dumps(answer), file=answers)
