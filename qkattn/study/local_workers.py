"""Several workers of a study on one machine, each on cores or GPUs of its own.

The parent trains nothing. It starts the workers (python -m qkattn.study.local_workers), prints
their lines behind their numbers, and ends with them; where one crashes, the others go on.
"""

import dataclasses
import logging
import math
import multiprocessing.connection
import sys
from pathlib import Path
from typing import Any

import jax

from qkattn.config import Study
from qkattn.errors import ConfigError, ProcessError, Stopped
from qkattn.jobs import children, cli, machine, signals
from qkattn.jobs.output import say
from qkattn.jobs.signals import EXIT_CONFIG, StopRequest
from qkattn.storage.files import check_directory
from qkattn.study import declaration, worker
from qkattn.study.arms import PlannedArm
from qkattn.study.plan import PlannedRun
from qkattn.train.program_cache import keep_programs
from qkattn.train.sharding import least_memory

log = logging.getLogger(__name__)

AUTO = 'auto'
COMMAND = [sys.executable, '-m', 'qkattn.study.local_workers']
_TICK = 0.2
# Bytes of memory that a process takes before it trains.
_PROCESS = 2**30
# Memory that training takes, as a multiple of `least_memory`.
_TRAINING = 4


def parse(text: str) -> int | None:
    """The value of --workers: a number, or None for 'auto'."""
    if text == AUTO:
        return None
    if text.isascii() and text.isdecimal() and int(text) > 0:
        return int(text)
    raise ConfigError(f'--workers={text} must be {AUTO} or a number of at least 1')


def _gpus() -> list[str] | None:
    return machine.accelerators(jax.config.jax_platforms)  # type: ignore[attr-defined]


def limit(study: Study, arms: list[PlannedArm], wanted: int | None, left: list[PlannedRun]) -> int:
    """How many workers to start: `wanted`, but no more than meshes of GPUs, else cores, or runs.

    By default as many as these, and on cores as many as memory may hold.
    """
    gpus = _gpus()
    room = float(len(machine.usable_cores()))
    if gpus is None:
        return 1  # an accelerator whose chips one process drives together
    if gpus:
        room = min(room, len(gpus) // math.prod(dataclasses.astuple(study.base.mesh)))
    elif wanted is None and left:
        each = _PROCESS + _TRAINING * least_memory(left[0].config)
        room = min(room, machine.free_memory() / each)
    # The plan of a tuned study grows: an arm goes on from run to run.
    runs = max(len(left), len(arms)) if left and study.tuning.seeds else len(left)
    return max(1, int(min(wanted or room, room, runs)))


def run(study: Study, workdir: str | Path, arms: list[PlannedArm], wanted: int | None) -> Path:
    """Trains until every run of the study has its result, and returns the study's directory.

    Starts `wanted` workers; None for as many as there is room for. Raises ConfigError and Stopped
    as `worker.run`, and ProcessError if runs are left because workers crashed.
    """
    path = check_directory(workdir)
    number = 1
    declaration.require_chain(path, study, arms)
    if wanted != 1:
        declaration.require_no_run(path)
        number = limit(study, arms, wanted, worker.left_of(study, arms, path))
        log.info('%s: workers on this machine: %d', study.name, number)
    if number == 1:
        return worker.run(study, path, arms=arms)
    with StopRequest() as stop:
        stop.defer_exit()
        crash = _train(number, (study, path, arms, sys.orig_argv), stop)
    if rest := worker.left_of(study, arms, path):
        raise ProcessError(f'runs without a result: {len(rest)}; {crash}; the same command resumes')
    return path


def _train(number: int, task: tuple[Any, ...], stop: StopRequest) -> str:
    """Sends the task to workers that share cores and GPUs; how the last of them crashed, if any.

    Returns as all have ended. ConfigError with the last line of each worker that refused the task.
    """
    workers: dict[int, children.Child] = {}
    latest: dict[int, str] = {}  # the last line of each
    stopping = False
    refusals = dict[str, None]()
    crash = 'no worker is left'
    gpus = machine.shares(_gpus() or [], number)
    try:
        for i, cores in enumerate(machine.shares(machine.usable_cores(), number)):
            variables = {'CUDA_VISIBLE_DEVICES': ','.join(gpus[i])} if gpus[i] else {}
            workers[i] = children.Child(COMMAND, cores, variables)
        for child in workers.values():  # all at once: a child takes seconds to start
            child.send(*task)
        while workers:
            multiprocessing.connection.wait([child.output for child in workers.values()], _TICK)
            if stop.requested and not stopping:
                stopping = True
                for child in workers.values():
                    child.stop()
            for i, child in [*workers.items()]:
                code = child.ended()  # before what it has printed last is read
                for line in child.lines(last=code is not None):
                    say(f'[{i}] {line}\n', sys.stderr)
                    latest[i] = line
                if code is None:
                    continue
                workers.pop(i).close()
                if code == EXIT_CONFIG:
                    refusals[latest.get(i, 'a worker refused the study')] = None
                elif code and not stopping:
                    how = f'ended by signal {-code}' if code < 0 else f'exit code {code}'
                    crash = f'worker {i} crashed ({how})'
                    log.warning('%s', crash)
    finally:
        for child in workers.values():
            child.close()
    if stopping:
        raise Stopped('stopped, and the workers have saved')
    if refusals:
        raise ConfigError('; '.join(refusals))
    return crash


@signals.exit_on_signal()
def main() -> None:
    keep_programs()
    if (pipe := children.parent()) is None:
        raise ConfigError('qkattn.study.local_workers is started by ablate --workers')
    # The command that is recorded is that of the parent.
    study, workdir, arms, sys.orig_argv = pipe.recv()
    worker.run(study, workdir, arms=arms)


if __name__ == '__main__':
    cli.run(main)
