"""Several workers of a study on one machine, each on cores or GPUs of its own.

The parent trains nothing. It starts the workers (python -m qkattn.study.local_workers), prints
their lines and what is left, and ends with them; where one crashes, the others go on.
"""

import contextlib
import dataclasses
import logging
import math
import multiprocessing.connection
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax

from qkattn.config import Study
from qkattn.errors import ConfigError, ProcessError, Stopped
from qkattn.jobs import children, cli, machine, signals
from qkattn.jobs.display import Screen
from qkattn.jobs.signals import EXIT_CONFIG, StopRequest
from qkattn.storage.files import check_directory
from qkattn.study import declaration, worker
from qkattn.study.arms import MatchedArm
from qkattn.study.plan import PlannedRun
from qkattn.train.program_cache import keep_programs
from qkattn.train.sharding import least_memory

log = logging.getLogger(__name__)

AUTO = 'auto'
COMMAND = [sys.executable, '-m', 'qkattn.study.local_workers']
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


def _gpus() -> list[str] | None:
    return machine.accelerators(jax.config.jax_platforms)  # type: ignore[attr-defined]


def limit(
    study: Study, arms: list[MatchedArm], wanted: int | None, left: list[PlannedRun]
) -> tuple[int, str]:
    """How many workers to start, and why these are fewer than wanted, or ''.

    By default, one per mesh of GPUs, else one per core, and as many as memory may hold.
    """
    gpus, cores = _gpus(), machine.usable_cores()
    room = len(cores), f'cores: {len(cores)}'
    if gpus is None:
        room = 1, 'an accelerator whose chips one process drives together'
    elif gpus:
        meshes = len(gpus) // math.prod(dataclasses.astuple(study.base.mesh))
        room = max(1, meshes), f'GPUs: {len(gpus)}'
    # The plan of a tuned study grows: an arm goes on from run to run.
    runs = max(len(left), len(arms)) if left and study.tuning.seeds else len(left)
    limits = [room, (max(1, runs), f'runs at a time: {runs}')]
    if wanted is None and left and not gpus:
        each = _PROCESS + _TRAINING * least_memory(left[0].config)
        fit = max(1, int(min(machine.free_memory() / each, 2**20)))
        limits.append((fit, f'each needs {each / 2**30:.1f} GiB of memory'))
    most, reason = min(limits, key=lambda limit: limit[0])
    if most >= (wanted or room[0]):
        return wanted or most, ''
    return most, f'--workers={wanted or AUTO} starts {most} ({reason})'


def run(
    study: Study,
    match: Callable[[], list[MatchedArm]],
    workdir: str | Path,
    wanted: int | None,
) -> Path:
    """Trains until every run of the study has its result, and returns the study's directory.

    Starts `wanted` workers; None for as many as there is room for. `match` makes the arms. Raises
    ConfigError and Stopped as `worker.run`, and ProcessError if runs are left because workers
    crashed.
    """
    path, arms, most = check_directory(workdir), match(), 1
    if wanted != 1:
        declaration.require_no_run(path)
        most, note = limit(study, arms, wanted, worker.left_of(study, arms, path))
        if note:
            log.info('%s: %s', study.name, note)
    if most == 1:
        return worker.run(study, path, arms=arms)
    with StopRequest() as stop, contextlib.closing(_Workers(study, stop)) as workers:
        stop.defer_exit()
        workers.train(most, (study, path, arms, sys.orig_argv))
    if rest := worker.left_of(study, arms, path):
        raise ProcessError(
            f'runs without a result: {len(rest)}; {workers.failure}; the same command resumes'
        )
    return path


class _Workers:
    """The workers that have not ended, by number, and what they report, in their parent."""

    def __init__(self, study: Study, stop: StopRequest):
        self._name, self._stop, self._screen = study.name, stop, Screen()
        self._children: dict[int, children.Child] = {}
        self._done, self._runs = 0, 0
        self._errors: list[str] = []
        self.failure = 'no worker is left'

    def train(self, number: int, task: tuple[Any, ...]) -> None:
        """Sends the task to `number` workers, which share cores and GPUs; returns as all end."""
        gpus = machine.shares(_gpus() or [], number)
        for i, cores in enumerate(machine.shares(machine.usable_cores(), number)):
            variables = {'CUDA_VISIBLE_DEVICES': ','.join(gpus[i])} if gpus[i] else {}
            self._children[i] = children.Child(COMMAND, cores, variables)
        for child in self._children.values():  # all at once: a child takes seconds to start
            child.send(*task)
        stopping = False
        while self._children:
            sources = [source for child in self._children.values() for source in child.sources]
            multiprocessing.connection.wait(sources, _TICK)
            if self._stop.requested and not stopping:
                stopping = True
                for child in self._children.values():
                    child.stop()
            for i in [*self._children]:
                self._receive(i)
            if self._screen.terminal and self._runs:
                self._screen.draw(self._progress())
        if stopping:
            raise Stopped('stopped, and the workers have saved')
        if self._errors:
            raise ConfigError('; '.join(dict.fromkeys(self._errors)))

    def close(self) -> None:
        """Kills the remaining workers."""
        for number in [*self._children]:
            self._remove(number)
        self._screen.close()

    def _receive(self, number: int) -> None:
        """Acts on the messages, the lines and the end of a worker."""
        child = self._children[number]
        code = child.ended()  # before what it has printed last is read
        for kind, *values in child.messages():
            if kind == 'error':
                self._errors.append(values[0])
            elif values != [self._done, self._runs]:
                self._done, self._runs = values
                if not self._screen.terminal:
                    self._screen.print(self._progress())
        self._print(number)
        if code is None:
            return
        self._remove(number)
        if code not in (0, EXIT_CONFIG) and not self._stop.requested:
            how = f'was ended by signal {-code}' if code < 0 else f'ended with exit code {code}'
            self.failure = f'worker {number} {how}'
            self._screen.print(f'{self._name}: {self.failure}')

    def _progress(self) -> str:
        return f'{self._name}: {self._done} of {self._runs} runs done'

    def _remove(self, number: int) -> None:
        self._print(number, last=True)
        self._children.pop(number).close()

    def _print(self, number: int, last: bool = False) -> None:
        for line in self._children[number].lines(last):
            self._screen.print(f'[{number}] {line}')


def work(pipe: Connection) -> None:
    """Trains the study that the parent sends, and reports progress to it.

    An error with a message is sent as ('error', sentence), and is the exit code.
    """

    def send(*message: Any) -> None:
        with contextlib.suppress(OSError):  # the parent was killed
            pipe.send(message)

    try:
        # The command that is recorded is that of the parent.
        study, workdir, arms, sys.orig_argv = pipe.recv()
        worker.run(study, workdir, arms=arms, tell=send)
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
