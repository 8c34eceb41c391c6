"""Several workers of a study on one machine, each on cores or GPUs of its own.

The parent trains nothing. It starts the workers (python -m qkattn.study.local_workers), prints
their lines and what is left, starts one that crashed again, and ends with the study.
"""

import contextlib
import dataclasses
import functools
import math
import multiprocessing.connection
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax

from qkattn.config import Study
from qkattn.errors import ConfigError, ProcessError, Stopped
from qkattn.jobs import children, cli, machine, signals
from qkattn.jobs.display import Row, Screen, interval
from qkattn.jobs.signals import EXIT_CONFIG, EXIT_REQUEUE, StopRequest
from qkattn.storage.files import check_directory
from qkattn.study import declaration, plan, worker
from qkattn.study.arms import MatchedArm
from qkattn.study.plan import PlannedRun
from qkattn.train.program_cache import keep_programs
from qkattn.train.sharding import least_memory

AUTO = 'auto'
COMMAND = [sys.executable, '-m', 'qkattn.study.local_workers']
RETRIES = 3  # how often each worker that crashed is started again
GRACE = 300.0  # seconds from a stop request to a kill
_TICK = 0.2
# Memory of a worker: bytes of a process, and of training as a multiple of its least.
_PROCESS, _TRAINING = 2**30, 4


def parse(text: str) -> int | None:
    """The value of --workers: a number, or None for 'auto'."""
    if text == AUTO:
        return None
    if text.isascii() and text.isdecimal() and int(text) > 0:
        return int(text)
    raise ConfigError(f'--workers={text} must be {AUTO} or a number of at least 1')


def count(number: int, noun: str) -> str:
    """'1 worker', '2 cores', ..."""
    return f'{number} {noun}{"s" if number != 1 else ""}'


def capacity(study: Study) -> tuple[int, str]:
    """The most workers that the machine has cores or GPUs for, and which of them they share."""
    cores, gpus = len(machine.usable_cores()), _gpus()
    if gpus is None:
        return 1, 'an accelerator whose chips one process drives together'
    if gpus:
        workers = len(gpus) // math.prod(dataclasses.astuple(study.base.mesh))
        return max(1, workers), count(len(gpus), 'GPU')
    return cores, count(cores, 'core')


def limit(
    study: Study, arms: list[MatchedArm], wanted: int | None, left: list[PlannedRun]
) -> tuple[int, str | None]:
    """The most workers that there is work and room for, and why they are fewer than wanted.

    By default, one per mesh of GPUs, else one per core, and as many as memory may hold.
    """
    number, shared = capacity(study)
    # The plan grows; of a chain of runs only the first is known.
    runs = max(len(left), min(len(arms), len(plan.least(study, arms)) - 1)) if left else 0
    runs = len(left) if len(left) != 1 else runs
    limits = [
        (number, f'is room on {shared}'),
        (max(1, runs), f'{"is" if runs == 1 else "are"} {count(runs, "run")} left'),
    ]
    if wanted is None and left and not _gpus():
        free, each = machine.free_memory(), _PROCESS + _TRAINING * least_memory(left[0].config)
        fit = max(1, int(min(free / each, 2**20)))
        limits.append((fit, f'is memory for workers of {each / 2**30:.1f} GiB'))
    most, reason = min(limits, key=lambda limit: limit[0])
    asked = number if wanted is None else wanted
    if asked <= most:
        return asked, None
    return most, f'--workers={wanted or AUTO}: there {reason}, so {count(most, "worker")} will do'


def describe(study: Study, arms: list[MatchedArm], wanted: int | None, workdir: str | None) -> str:
    """What `run` would do, in a line."""
    left = plan.runs(study, arms, lambda run: None)
    if workdir is not None:
        left = worker.left_of(study, arms, check_directory(workdir))
    most, note = limit(study, arms, wanted, left)
    return f'workers: {most}' + ('' if note is None else f' ({note})')


def _gpus() -> list[str] | None:
    return machine.accelerators(jax.config.jax_platforms)  # type: ignore[attr-defined]


def run(
    study: Study,
    match: Callable[[], list[MatchedArm]],
    workdir: str | Path,
    wanted: int | None,
    meanwhile: Callable[[], object] = lambda: None,
    **options: Any,
) -> Path:
    """Trains until every run of the study has its result, and returns the study's directory.

    Starts `wanted` workers; None for as many as there is room for. `match` makes the arms, and is
    called while they start. `meanwhile` is called in a thread once a worker finds nothing more to
    do, and its cores are free. `options` are those of `worker.run`. Raises ConfigError and Stopped
    as `worker.run`, and ProcessError if runs are left because workers crashed.
    """
    path, (largest, _) = check_directory(workdir), capacity(study)
    declaration.require_no_run(path)
    if largest == 1 or wanted == 1:
        return worker.run(study, path, arms=match(), **options)
    with (
        StopRequest() as stop,
        contextlib.closing(_Workers(study, path, options, stop, meanwhile)) as workers,
    ):
        stop.defer_exit()
        workers.start(min(wanted or largest, largest))
        options['arms'] = arms = match()
        most, note = limit(study, arms, wanted, worker.left_of(study, arms, path))
        if note is not None:
            workers.say(note)
        if most > 1:
            workers.train(most)
    if most == 1:
        return worker.run(study, path, **options)
    if rest := worker.left_of(study, arms, path):
        runs = f'{count(len(rest), "run")} {"has" if len(rest) == 1 else "have"}'
        raise ProcessError(f'{runs} no result: {workers.failure}; the same command resumes')
    return path


@dataclasses.dataclass
class _Worker:
    """A worker as its parent sees it; `start` starts its process, again after a crash."""

    number: int
    start: Callable[[], children.Child]
    child: children.Child
    retries: int = 0


class _Workers:
    """The workers, and what the parent knows of them."""

    def __init__(
        self,
        study: Study,
        path: Path,
        options: dict[str, Any],
        stop: StopRequest,
        meanwhile: Callable[[], object],
    ):
        self._study, self._path, self._options, self._stop = study, path, options, stop
        self._meanwhile = threading.Thread(target=meanwhile, name='meanwhile', daemon=True)
        self._workers: list[_Worker] = []
        self._screen = Screen()
        self._remaining = Remaining()
        self._stop_time: float | None = None  # when the workers were asked to stop
        self._errors: list[str] = []
        self.failure = 'no worker is left'

    def say(self, text: str) -> None:
        self._screen.print(f'{self._study.name}: {text}')

    def start(self, number: int) -> None:
        """Starts workers, which share the cores and the GPUs, and wait until they are to train."""
        gpus = machine.shares(_gpus() or [], number)
        for i, cores in enumerate(machine.shares(machine.usable_cores(), number)):
            variables = {'CUDA_VISIBLE_DEVICES': ','.join(gpus[i])} if gpus[i] else {}
            start = functools.partial(children.Child, COMMAND, cores, variables)
            self._workers.append(_Worker(i, start, start()))

    def train(self, number: int) -> None:
        """Has `number` workers train until the study has its results or none of them is left."""
        for member in self._workers[number:]:
            self._remove(member)
        for member in self._workers:
            self._train(member)
        while self._workers:
            sources = [source for member in self._workers for source in member.child.sources]
            multiprocessing.connection.wait(sources, _TICK)
            for member in self._workers[:]:
                self._receive(member)
            self._pass_on_stop()
            done, runs = self._remaining.done()
            if self._screen.terminal and runs:
                text = self._remaining.text(time.monotonic())
                self._screen.draw([Row(self._study.name, done / runs, text)])
        if self._stop_time is not None:
            raise Stopped('stopped, and the workers have saved')
        if self._errors:
            raise ConfigError('; '.join(dict.fromkeys(self._errors)))

    def close(self) -> None:
        """Kills what is left of the workers."""
        for member in self._workers[:]:
            self._remove(member)
        self._screen.close()

    def _train(self, member: _Worker) -> None:
        member.child.send(self._study, self._path, self._options, sys.orig_argv)

    def _remove(self, member: _Worker) -> None:
        self._print(member, last=True)
        member.child.close()
        self._workers.remove(member)

    def _print(self, member: _Worker, last: bool = False) -> None:
        for line in member.child.lines(last):
            self._screen.print(f'[{member.number}] {line}')

    def _receive(self, member: _Worker) -> None:
        """Acts on the messages, the lines and the end of a worker."""
        code = member.child.ended()  # before what it has printed last is read
        for kind, *values in member.child.messages():
            if kind == 'error':
                self._errors.append(values[0])
            elif kind == 'lease':
                before, now = self._remaining.done(), time.monotonic()
                run, runs, left = values
                self._remaining.leased(member.number, run, runs, left, now)
                if self._remaining.done() != before and not self._screen.terminal:
                    self.say(self._remaining.text(now))
                if run is None and self._meanwhile.ident is None:
                    self._meanwhile.start()
        self._print(member)
        if code is not None:
            self._ended(member, code)

    def _ended(self, member: _Worker, code: int) -> None:
        """Leaves a worker out that has ended, or starts it again."""
        self._remove(member)
        if code in (0, EXIT_CONFIG) or self._stop_time is not None:
            return
        how = f'was ended by signal {-code}' if code < 0 else f'ended with exit code {code}'
        self.failure = f'worker {member.number} {how}'
        if code != EXIT_REQUEUE:  # not a crash
            member.retries += 1
        if member.retries > RETRIES:
            self.say(f'{self.failure}; no retry is left of {RETRIES}')
            return
        self.say(f'{self.failure}; it is started again, retry {member.retries} of {RETRIES}')
        member.child = member.start()
        self._workers.append(member)
        self._train(member)

    def _pass_on_stop(self) -> None:
        """Passes a stop request on; kills the workers that have not ended long after it."""
        if not self._stop.requested:
            return
        if self._stop_time is None:
            self._stop_time = time.monotonic()
            for member in self._workers:
                member.child.stop()
        elif time.monotonic() - self._stop_time > GRACE:
            self.say(f'{count(len(self._workers), "worker")} did not end within {GRACE:.0f} s')
            self.close()


class Remaining:
    """Runs and work (tokens x parameters) that workers have done, and how long the rest takes."""

    def __init__(self) -> None:
        self._runs, self._done, self._since = 0, 0.0, 0.0
        self._left: dict[str, float] = {}
        self._running: dict[int, tuple[str, float]] = {}  # run and work by worker

    def leased(
        self, worker: int, run: str | None, runs: int, left: dict[str, float], now: float
    ) -> None:
        """A worker begins a run, or waits (None); `left` is the work of all runs without result."""
        self._since = self._since or now
        last, work = self._running.pop(worker, (None, 0.0))
        self._done += 0.0 if last in left else work
        self._runs, self._left = runs, left
        if run is not None:
            self._running[worker] = run, left[run]

    def done(self) -> tuple[int, int]:
        """The number of runs that are done, and of all."""
        return self._runs - len(self._left), self._runs

    def text(self, now: float) -> str:
        """'3 of 8 runs done, 02:10 left', by the work of the runs that have ended."""
        done, runs = self.done()
        left = ''
        if self._done and self._left:
            seconds = (now - self._since) * sum(self._left.values()) / self._done
            left = f', {interval(seconds)} left'
        return f'{done} of {runs} runs done{left}' if runs else ''


def work(pipe: Connection) -> None:
    """Trains the study that the parent sends, and tells it of leases.

    An error that has a sentence is sent as ('error', sentence), and is the exit code.
    """

    def send(*message: Any) -> None:
        with contextlib.suppress(OSError):  # the parent was killed
            pipe.send(message)

    try:
        # The command that is recorded is that of the parent.
        study, workdir, options, sys.orig_argv = pipe.recv()
        worker.run(study, workdir, tell=send, **options)
    except Exception as error:
        if (expected := cli.outcome(error)) is None:
            raise
        send('error', expected[0])
        sys.exit(expected[1])


@signals.exit_on_signal()
def main() -> None:
    keep_programs()
    if (pipe := children.parent()) is None:
        raise ConfigError('qkattn.study.local_workers is started by ablate --workers')
    work(pipe)


if __name__ == '__main__':
    cli.run(main)
