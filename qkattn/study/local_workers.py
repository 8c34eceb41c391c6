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
# Seconds between two looks at the workers.
_TICK = 0.2
# Bytes of memory that a process takes before it trains.
_PROCESS = 2**30
# Memory that training takes, as a multiple of `least_memory`.
_TRAINING = 4


def parse(text: str) -> int | None:
    """Parses the value of --workers: a number, or 'auto', which is None.

    Raises ConfigError for other text, and for a number below 1.
    """
    if text == AUTO:
        return None
    if text.isascii() and text.isdecimal() and int(text) > 0:
        return int(text)
    raise ConfigError(f'--workers={text} must be {AUTO} or a number of at least 1')


def _gpus() -> list[str] | None:
    """Returns the GPUs that this process may use; None if the accelerator cannot be divided."""
    return machine.accelerators(jax.config.jax_platforms)  # type: ignore[attr-defined]


def count_workers(
    study: Study, arms: list[PlannedArm], max_workers: int | None, runs_left: list[PlannedRun]
) -> int:
    """Returns how many workers to start on this machine, at least 1.

    For example, a machine with 4 GPUs has room for 4 workers if each trains on one GPU. If only 3
    runs are left, 3 workers are started, as a worker trains one run at a time.

    - With GPUs, each worker takes the GPUs of its mesh and one core.
    - Without GPUs, each worker takes one core. If `max_workers` is None, the workers also have to
      fit into memory.
    - An accelerator that cannot be divided has one worker.

    Args:
        study: The study.
        arms: Its arms.
        max_workers: The number that the user asks for. Fewer are started if there is no room for
            them. None asks for as many as there is room for.
        runs_left: The runs planned so far that have no result.
    """
    gpus = _gpus()
    if gpus is None:
        # One process drives all chips of such an accelerator.
        return 1

    # How many workers does the machine have room for?
    room = float(len(machine.usable_cores()))
    if gpus:
        gpus_of_worker = math.prod(dataclasses.astuple(study.base.mesh))
        room = min(room, len(gpus) // gpus_of_worker)
    elif max_workers is None and runs_left:
        memory_of_worker = _PROCESS + _TRAINING * least_memory(runs_left[0].config)
        room = min(room, machine.free_memory() / memory_of_worker)

    # How many workers have something to do? The plan of a tuned study grows: each arm has further
    # runs once its first one is finished.
    num_busy = len(runs_left)
    if runs_left and study.tuning.seeds:
        num_busy = max(num_busy, len(arms))
    number = min(room, num_busy)
    if max_workers is not None:
        number = min(number, max_workers)
    return max(1, int(number))


def run(study: Study, workdir: str | Path, arms: list[PlannedArm], max_workers: int | None) -> Path:
    """Trains until every run of the study has its result; returns the study's directory.

    Starts at most `max_workers` workers, each a process of its own. If `max_workers` is None, it
    starts as many as there is room for. A single worker trains in this process.

    Raises:
        ConfigError, Stopped: As in `worker.run`.
        ProcessError: Runs have no result because workers crashed.
    """
    path = check_directory(workdir)
    declaration.require_chain(path, study, arms)
    number = 1
    if max_workers != 1:
        declaration.require_no_run(path)
        runs_left = worker.runs_without_result(study, arms, path)
        number = count_workers(study, arms, max_workers, runs_left)
        log.info('%s: workers on this machine: %d', study.name, number)
    if number == 1:
        return worker.run(study, path, arms=arms)

    with StopRequest() as stop:
        # This process ends after its workers, which save their state first.
        stop.defer_exit()
        last_crash = _train(number, (study, path, arms, sys.orig_argv), stop)
    runs_left = worker.runs_without_result(study, arms, path)
    if runs_left:
        reason = last_crash or 'no worker is left'
        raise ProcessError(
            f'runs without a result: {len(runs_left)}; {reason}; the same command resumes'
        )
    return path


def _train(number: int, task: tuple[Any, ...], stop: StopRequest) -> str | None:
    """Sends the task to `number` workers and prints their lines until all have ended.

    The workers share the cores and GPUs of the machine. Returns a sentence about the last worker
    that crashed, or None. Raises Stopped if a stop was requested. Otherwise, if workers refused the
    task, raises ConfigError with their last lines.
    """
    workers: dict[int, children.Child] = {}  # the running workers by number
    last_line: dict[int, str] = {}  # the last line that each worker printed
    refusals: list[str] = []  # the last lines of workers that refused the task
    last_crash = None
    is_stopping = False
    cores_of_worker = machine.split_evenly(machine.usable_cores(), number)
    gpus_of_worker = machine.split_evenly(_gpus() or [], number)
    try:
        for i in range(number):
            variables = {}
            if gpus_of_worker[i]:
                variables['CUDA_VISIBLE_DEVICES'] = ','.join(gpus_of_worker[i])
            workers[i] = children.Child(COMMAND, cores_of_worker[i], variables)
        # A child takes seconds to start, so all are started before the first one is sent its task.
        for child in workers.values():
            child.send(*task)

        while workers:
            outputs = [child.output for child in workers.values()]
            multiprocessing.connection.wait(outputs, _TICK)
            if stop.requested and not is_stopping:
                is_stopping = True
                for child in workers.values():
                    child.stop()
            for i, child in list(workers.items()):
                # The exit code is asked for before the lines are read: if the child has ended, its
                # output is then complete.
                exit_code = child.ended()
                for line in child.lines(last=exit_code is not None):
                    say(f'[{i}] {line}\n', sys.stderr)
                    last_line[i] = line
                if exit_code is None:
                    continue

                # The child has ended: it refused the task, crashed, or is done.
                child.close()
                del workers[i]
                if exit_code == EXIT_CONFIG:
                    refusal = last_line.get(i, 'a worker refused the study')
                    if refusal not in refusals:
                        refusals.append(refusal)
                elif exit_code != 0 and not is_stopping:
                    last_crash = _crash(i, exit_code)
                    log.warning('%s', last_crash)
    finally:
        for child in workers.values():
            child.close()
    if is_stopping:
        raise Stopped('stopped, and the workers have saved')
    if refusals:
        raise ConfigError('; '.join(refusals))
    return last_crash


def _crash(number: int, exit_code: int) -> str:
    """Describes how a worker crashed. An exit code below zero is the number of a signal."""
    if exit_code < 0:
        return f'worker {number} crashed (ended by signal {-exit_code})'
    return f'worker {number} crashed (exit code {exit_code})'


@signals.exit_on_signal()
def main() -> None:
    """Trains the study that the parent sends."""
    keep_programs()
    pipe = children.pipe_to_parent()
    if pipe is None:
        raise ConfigError('qkattn.study.local_workers is started by ablate --workers')
    # The command that is recorded is that of the parent.
    study, workdir, arms, sys.orig_argv = pipe.recv()
    worker.run(study, workdir, arms=arms)


if __name__ == '__main__':
    cli.run(main)
