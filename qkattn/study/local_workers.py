"""Several workers of a study on one machine, each on cores or GPUs of its own.

The parent trains nothing. It starts the workers (python -m qkattn.study.local_workers), shows what
they print, starts one that crashed again, and ends when the study has its results.
"""

import contextlib
import dataclasses
import math
import multiprocessing.connection
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import tqdm

from qkattn.config import Study
from qkattn.errors import ConfigError, ProcessError, Stopped
from qkattn.jobs import children, cli, cores, signals
from qkattn.jobs.crew_display import CrewDisplay
from qkattn.jobs.progress import Progress
from qkattn.jobs.signals import EXIT_CONFIG, EXIT_REQUEUE, StopRequest
from qkattn.storage.files import check_directory
from qkattn.study import declaration, plan, worker
from qkattn.study.arms import Arm
from qkattn.study.plan import PlannedRun
from qkattn.train.placement import least_memory
from qkattn.train.program_cache import keep_programs

AUTO = 'auto'
COMMAND = [sys.executable, '-m', 'qkattn.study.local_workers']
RETRIES = 3
"""How often each worker that crashed is started again."""
GRACE = 300.0
"""Seconds from a stop request to a kill."""
_TICK = 0.2
_REPORTED_EVERY = 0.5  # seconds, of a worker's steps
# Memory of a worker: bytes of a process, and of training as a multiple of its least.
_PROCESS, _TRAINING = 2**30, 4


# How many


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
    number, gpus = len(cores.usable()), _gpus()
    if gpus is None:
        return 1, 'an accelerator whose chips one process drives together'
    if gpus:
        workers = len(gpus) // math.prod(dataclasses.astuple(study.base.mesh))
        return max(1, workers), count(len(gpus), 'GPU')
    return number, count(number, 'core')


def limit(
    study: Study, arms: list[Arm], wanted: int | None, left: list[PlannedRun]
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
        free, each = cores.free_memory(), _PROCESS + _TRAINING * least_memory(left[0].config)
        fit = max(1, int(min(free / each, 2**20)))
        limits.append((fit, f'is memory for workers of {each / 2**30:.1f} GiB'))
    most, reason = min(limits, key=lambda limit: limit[0])
    asked = number if wanted is None else wanted
    if asked <= most:
        return asked, None
    return most, f'--workers={wanted or AUTO}: there {reason}, so {count(most, "worker")} will do'


def describe(study: Study, arms: list[Arm], wanted: int | None, workdir: str | None) -> str:
    """What `run` would do, in a line."""
    left = plan.runs(study, arms, lambda run: None)
    if workdir is not None:
        left = worker.left_of(study, arms, check_directory(workdir))
    most, note = limit(study, arms, wanted, left)
    return f'workers: {most}' + ('' if note is None else f' ({note})')


def _gpus() -> list[str] | None:
    """As `cores.accelerators`."""
    return cores.accelerators(jax.config.jax_platforms)  # type: ignore[attr-defined]


# The parent


def run(
    study: Study,
    match: Callable[[], list[Arm]],
    workdir: str | Path,
    wanted: int | None,
    meanwhile: Callable[[], object] = lambda: None,
    **options: Any,
) -> Path:
    """Trains until every run of the study has its result, and returns the study's directory.

    Args:
      match: makes the arms; called while the workers start.
      wanted: workers; None for as many as there is room for.
      meanwhile: called in a thread once a worker finds nothing more to do, and its cores are free.
      options: of `worker.run`.

    Raises:
      ConfigError, Stopped: as `worker.run`.
      ProcessError: runs are left, because workers crashed.
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
        runs = '1 run has' if len(rest) == 1 else f'{len(rest)} runs have'
        raise ProcessError(f'{runs} no result: {workers.failure}; the same command resumes')
    return path


@dataclasses.dataclass
class _Worker:
    """A worker as its parent sees it."""

    number: int
    own: Sequence[int]  # its cores
    variables: dict[str, str]
    child: children.Child
    retries: int = 0
    stopping: bool = False


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
        self._display = CrewDisplay()
        self._remaining = Remaining()
        self._free = cores.free_memory()
        self._peak = 1
        self._asked: float | None = None  # when the workers were asked to stop
        self._drawn = 0.0
        self._errors: list[str] = []
        self.failure = 'no worker is left'

    def say(self, text: str) -> None:
        self._display.print(f'{self._study.name}: {text}')

    def start(self, number: int) -> None:
        """Starts workers, which share the cores and the GPUs, and wait until they are to train."""
        gpus = cores.shares(_gpus() or [], number)
        for place, own in enumerate(cores.shares(cores.usable(), number)):
            variables = {'CUDA_VISIBLE_DEVICES': ','.join(gpus[place])} if gpus[place] else {}
            child = children.Child(COMMAND, own, variables, self._display.columns)
            self._workers.append(_Worker(place, own, variables, child))

    def train(self, number: int) -> None:
        """Has `number` workers train until the study has its results or none of them is left."""
        self._end(self._workers[number:])
        for member in self._workers:
            self._train(member)
        while self._workers:
            self._turn()
        if self._asked is not None:
            raise Stopped('stopped, and the workers have saved')
        if self._errors:
            raise ConfigError('; '.join(dict.fromkeys(self._errors)))

    def close(self) -> None:
        """Kills what is left of the workers."""
        self._end(self._workers)
        self._display.close()

    def _train(self, member: _Worker) -> None:
        member.child.tell(self._study, self._path, self._options)

    def _end(self, members: Sequence[_Worker]) -> None:
        for member in list(members):
            member.child.close()
            self._workers.remove(member)
            self._display.remove(member.number)

    def _turn(self) -> None:
        """Waits for messages for a moment, and acts on them."""
        sources = [source for member in self._workers for source in member.child.sources()]
        multiprocessing.connection.wait(sources, _TICK)
        for member in list(self._workers):
            ended = member.child.ended()  # before what it has printed last is read
            for message in member.child.news():
                self._receive(member, *message)
            self._display.feed(member.number, member.child.read())
            if ended is not None:
                self._ended(member, ended)
        self._pass_on_stop()
        if time.monotonic() - self._drawn > _TICK:
            self._drawn = time.monotonic()
            self._display.draw()

    def _receive(self, member: _Worker, kind: str, *values: Any) -> None:
        if kind == 'error':
            self._errors.append(values[0])
        elif kind == 'lease':
            self._remaining.leased(member.number, *values)
            if values[0] is None and self._meanwhile.ident is None:
                self._meanwhile.start()
        elif kind == 'step':
            step, total, peak = values
            self._remaining.stepped(member.number, step / total, time.monotonic())
            self._require_memory(peak)
        if text := self._remaining.text(time.monotonic()):
            self._display.status(f'{self._study.name}: {text}', self._remaining.changed())

    def _require_memory(self, peak: int) -> None:
        """Stops the workers for which there is no memory."""
        self._peak = max(self._peak, peak)
        working = [member for member in self._workers if not member.stopping]
        fit = max(1, int(min(self._free / self._peak, 2**20)))
        if len(working) > fit:
            each, free = self._peak / 2**30, self._free / 2**30
            self.say(
                f'{len(working)} workers of {each:.1f} GiB each need more than the {free:.1f} GiB '
                f'that are free, so {fit} will do'
            )
            for member in working[fit:]:
                member.stopping = True
                member.child.stop()

    def _ended(self, member: _Worker, code: int) -> None:
        """Leaves a worker out that has ended, or starts it again."""
        self._end([member])
        self._remaining.ended(member.number)
        if code in (0, EXIT_CONFIG) or member.stopping or self._asked is not None:
            return
        how = f'was ended by signal {-code}' if code < 0 else f'ended with exit code {code}'
        self.failure = f'worker {member.number} {how}'
        if code != EXIT_REQUEUE:  # not a crash
            member.retries += 1
        if member.retries > RETRIES:
            self.say(f'{self.failure}; no retry is left of {RETRIES}')
            return
        self.say(f'{self.failure}; it is started again, retry {member.retries} of {RETRIES}')
        columns = self._display.columns
        member.child = children.Child(COMMAND, member.own, member.variables, columns)
        self._workers.append(member)
        self._train(member)

    def _pass_on_stop(self) -> None:
        """Passes a stop request on; kills the workers that have not ended long after it."""
        if not self._stop.requested:
            return
        if self._asked is None:
            self._asked = time.monotonic()
            for member in self._workers:
                member.child.stop()
        elif time.monotonic() - self._asked > GRACE:
            self.say(f'{count(len(self._workers), "worker")} did not end within {GRACE:.0f} s')
            self._end(self._workers)


@dataclasses.dataclass
class _Training:
    """The run that a worker trains: its work, the fractions done at first and last report."""

    run: str
    work: float
    first: float | None = None
    done: float = 0.0

    @property
    def trained(self) -> float:
        return self.work * (self.done - (self.first or 0.0))


class Remaining:
    """Runs and work (tokens x parameters) that workers have done, and how long the rest takes."""

    def __init__(self) -> None:
        self._runs = 0
        self._left: dict[str, float] = {}
        self._training: dict[int, _Training] = {}
        self._done = 0.0  # of runs that are over
        self._since: float | None = None
        self._shown = -1

    def leased(self, worker: int, run: str | None, runs: int, left: dict[str, float]) -> None:
        """A worker begins a run, or waits (None); `left` is the work of all runs without result."""
        self.ended(worker)
        self._runs, self._left = runs, left
        if run is not None:
            self._training[worker] = _Training(run, left[run])

    def stepped(self, worker: int, fraction: float, now: float) -> None:
        """A worker has done this fraction of its run at a time in seconds."""
        self._since = now if self._since is None else self._since
        if (training := self._training.get(worker)) is not None:
            training.first = fraction if training.first is None else training.first
            training.done = fraction

    def ended(self, worker: int) -> None:
        """A worker does not train its run any more."""
        if (training := self._training.pop(worker, None)) is not None:
            self._done += training.trained

    def seconds(self, now: float) -> float | None:
        """At the speed since the first report; None before there is one."""
        done = self._done + sum(training.trained for training in self._training.values())
        if self._since is None or now <= self._since or done <= 0:
            return None
        left = sum(self._left.values()) - sum(
            training.work * training.done
            for training in self._training.values()
            if training.run in self._left
        )
        return max(0.0, left) * (now - self._since) / done

    def text(self, now: float) -> str:
        """'3 of 8 runs done, 02:10 left'; '' before anything is known."""
        if not self._runs:
            return ''
        seconds, done = self.seconds(now), self._runs - len(self._left)
        unknown = seconds is None or not self._left
        left = '' if unknown else f', {tqdm.tqdm.format_interval(seconds)} left'
        return f'{done} of {self._runs} runs done{left}'

    def changed(self) -> bool:
        """Whether another number of runs is done than at the last call."""
        before, self._shown = self._shown, self._runs - len(self._left)
        return self._shown != before


# A worker


def work(pipe: Connection) -> None:
    """Trains the study that the parent sends, and tells it of leases and steps.

    An error that has a sentence is told as ('error', sentence), and is the exit code.
    """

    def tell(*message: Any) -> None:
        with contextlib.suppress(OSError):  # the parent was killed
            pipe.send(message)

    reported = -_REPORTED_EVERY

    def report(step: int, total: int) -> None:
        nonlocal reported
        if step == total or time.monotonic() - reported >= _REPORTED_EVERY:
            reported = time.monotonic()
            tell('step', step, total, _peak_memory())

    Progress.told = report
    try:
        study, workdir, options = pipe.recv()
        worker.run(study, workdir, tell=tell, **options)
    except Exception as error:
        if (expected := cli.outcome(error)) is None:
            raise
        tell('error', expected[0])
        sys.exit(expected[1])


def _peak_memory() -> int:
    """The most memory that this process has had, in bytes."""
    unit = 1 if sys.platform == 'darwin' else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@signals.exit_on_signal()
def main() -> None:
    keep_programs()
    if (pipe := children.parent()) is None:
        raise ConfigError('qkattn.study.local_workers is started by ablate --workers')
    work(pipe)


if __name__ == '__main__':
    cli.run(main)
