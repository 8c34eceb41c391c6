"""Contestants side by side: each in a process of its own that stays alive, timed in turns.

Round i goes through all contestants before round i + 1 begins, so that what changes on the machine
in the meantime hits all alike; only one of them computes at a time.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from qkattn.benchmark.binding import rebind
from qkattn.benchmark.measurement import Measurement
from qkattn.run import signals
from qkattn.run.cores import usable
from qkattn.run.progress import waiting

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contestant:
    """One row of a race.

    Attributes:
      name: of the row.
      work: a key of WORKS, or 'package.module:function'.
      settings: keyword arguments of that function, JSON values.
      cores: how many cores its process is bound to.
      process: contestants with the same non-empty one, and as many cores, share a process.
      extra: facts for the row: 'tokens' and 'flops' of a step, the number at the figure's x axis.
      environment: variables of its process.
    """

    name: str
    work: str
    settings: Mapping[str, Any]
    cores: int
    process: str = ''
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def race(contestants: Sequence[Contestant], *, rounds: int, seconds: float) -> list[Measurement]:
    """Times all contestants, interleaved; a row for each, in their order.

    Args:
      rounds: times that each is timed.
      seconds: that a contestant is timed for in a round, at least; at least one call.
    """
    with contextlib.ExitStack() as stack:
        runners = _started(contestants, stack)
        for number in range(rounds):
            with waiting('benchmark', f'round {number + 1} of {rounds}'):
                for runner in runners:
                    runner.time(seconds)
            log.info('  round %d of %d', number + 1, rounds)
    return [runner.measurement() for runner in runners]


class _Runner:
    """A work in a running process."""

    def __init__(self, contestant: Contestant, process: subprocess.Popen, errors: IO, number: int):
        self.contestant, self.process, self.errors, self.number = (
            contestant,
            process,
            errors,
            number,
        )
        self.rounds: list[float] = []
        self.built = self._answer()
        if 'failed' not in self.built:
            took = self.built['extra']['build_seconds']
            log.info('  %s: built in %.1f s', contestant.name, took)

    def time(self, seconds: float) -> None:
        """One round."""
        if 'failed' in self.built:
            return
        calls = max(1, math.ceil(seconds / self.built['seconds']))
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f'{self.number} {calls}\n')
            self.process.stdin.flush()
        answer = self._answer()
        if 'failed' in answer:
            self.built = answer
        else:
            self.rounds.append(answer['seconds'] / (calls * self.built['steps']))

    def measurement(self) -> Measurement:
        own = self.contestant
        settings = {**own.settings, 'cores': own.cores}
        if 'failed' in self.built:
            return Measurement(own.name, settings, [], {'failed': self.built['failed']})
        return Measurement(own.name, settings, self.rounds, {**own.extra, **self.built['extra']})

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {'failed': self._last_words()}
        if 'failed' in answer:
            log.warning('  %s failed: %s', self.contestant.name, answer['failed'])
        return answer

    def _last_words(self) -> str:
        self.errors.seek(0)
        code, lines = self.process.wait(), self.errors.read().strip().splitlines()
        return f'its process ended with code {code}' + (f', {lines[-1]}' if lines else '')


def _started(contestants: Sequence[Contestant], stack: contextlib.ExitStack) -> list[_Runner]:
    """All works; those of processes that leave cores free are built side by side."""
    runners: dict[int, _Runner] = {}
    numbered = sorted(enumerate(contestants), key=lambda pair: _place(*pair))
    grouped = itertools.groupby(numbered, key=lambda pair: _place(*pair))
    left, free = [list(members) for _, members in grouped], usable()
    while left:
        building: list[tuple[list, subprocess.Popen, IO]] = []
        while left and (not building or left[0][0][1].cores <= len(free)):
            members = left.pop(0)
            cores = members[0][1].cores
            building.append((members, *stack.enter_context(_process(members, free[-cores:]))))
            free = free[:-cores]
        for members, process, errors in building:
            for number, (index, contestant) in enumerate(members):
                with waiting('benchmark', f'building {contestant.name}'):
                    runners[index] = _Runner(contestant, process, errors, number)
            rebind(process.pid, usable()[-members[0][1].cores :])
        free = usable()
    return [runners[index] for index in range(len(contestants))]


def _place(index: int, contestant: Contestant) -> tuple:
    """Equal for contestants that share a process."""
    if not contestant.process:
        return (1, index)
    return (0, contestant.process, contestant.cores, sorted(contestant.environment.items()))


@contextlib.contextmanager
def _process(
    members: Sequence[tuple[int, Contestant]], cores: Sequence[int]
) -> Iterator[tuple[subprocess.Popen, IO]]:
    """The process of numbered contestants, bound to cores, and the file of its standard error.

    It is killed at the end of the block, and with this process (`signals.end`).
    """
    order = {'cores': cores, 'works': [(own.work, own.settings) for _, own in members]}
    with tempfile.TemporaryFile('w+', errors='replace') as errors:
        process = subprocess.Popen(
            [sys.executable, '-m', 'qkattn.benchmark.contestant', json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=_environment(members[0][1]),
        )
        signals.BEFORE_LEAVING.append(process.kill)
        try:
            yield process, errors
        finally:
            signals.BEFORE_LEAVING.remove(process.kill)
            process.kill()
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()


def _environment(contestant: Contestant) -> dict[str, str]:
    """Its variables: no compilation cache but one of the same number of cores.

    What XLA compiles for a CPU depends on the number of its threads, which its cache does not know.
    """
    root = Path(__file__).parents[2]
    own = {**os.environ, 'OMP_NUM_THREADS': str(contestant.cores)}
    own['PYTHONPATH'] = os.pathsep.join([str(root), *filter(None, [own.get('PYTHONPATH')])])
    own['XLA_PYTHON_CLIENT_PREALLOCATE'] = 'false'
    if cache := own.get('JAX_COMPILATION_CACHE_DIR'):
        own['JAX_COMPILATION_CACHE_DIR'] = f'{cache}/{contestant.cores}-cores'
    return own | dict(contestant.environment)
