"""Several workers of a study on one machine, each with its own cores or GPUs.

The parent process does not train. It starts the workers as child processes (python -m
qkattn.study.local_workers), and prints their output. If a worker crashes, the other workers go on.
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
# The longest wait for output of the workers, in seconds.
_TICK = 0.2
# Bytes of memory that a process takes before it trains.
_PROCESS = 2**30
# Memory that training takes, as a multiple of `least_memory`.
_TRAINING = 4


def parse(text: str) -> int | None:
    """Parses the value of --workers: a number of at least 1, or 'auto', which returns None.

    Raises ConfigError for any other text.
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

    A worker takes one core and, if the machine has GPUs, the GPUs of the study's mesh. No more
    workers are started than there are runs to train.

    Args:
        study: The study.
        arms: The arms of the study.
        max_workers: The largest number of workers. If None, it is limited by the machine only. On
            a machine without GPUs, the workers then also have to fit into memory.
        runs_left: The planned runs without a result, longest first.
    """
    gpus = _gpus()  # [] on a machine without GPUs
    if gpus is None:
        # The accelerator cannot be divided: one process drives all its chips.
        return 1

    # How many workers fit on the machine?
    num_fitting = float(len(machine.usable_cores()))
    if gpus:
        mesh_sizes = dataclasses.astuple(study.base.mesh)  # such as (1, 2, 1, 1)
        gpus_per_worker = math.prod(mesh_sizes)
        num_fitting = min(num_fitting, len(gpus) // gpus_per_worker)
    elif max_workers is None and runs_left:
        longest_run = runs_left[0]
        bytes_per_worker = _PROCESS + _TRAINING * least_memory(longest_run.config)
        num_fitting = min(num_fitting, machine.free_memory() / bytes_per_worker)

    # How many workers are needed? In a tuned study, each arm gets further runs as others finish.
    num_needed = len(runs_left)
    is_tuned = bool(study.tuning.seeds)
    if runs_left and is_tuned:
        num_needed = max(num_needed, len(arms))
    num_workers = min(num_fitting, num_needed)
    if max_workers is not None:
        num_workers = min(num_workers, max_workers)
    return max(1, int(num_workers))


def run(study: Study, workdir: str | Path, arms: list[PlannedArm], max_workers: int | None) -> Path:
    """Trains until every run of the study has a result; returns the study's directory.

    Args:
        study: The study.
        workdir: The directory of the study.
        arms: The arms of the study.
        max_workers: The largest number of workers; None for as many as the machine can run. A
            single worker trains in this process.

    Raises:
        ConfigError, Stopped: As in `worker.run`.
        ProcessError: Runs have no result because workers crashed.
    """
    path = check_directory(workdir)
    declaration.require_chain(path, study, arms)
    num_workers = 1
    if max_workers != 1:
        declaration.require_no_run(path)
        runs_left = worker.runs_without_result(study, arms, path)
        num_workers = count_workers(study, arms, max_workers, runs_left)
        log.info('%s: workers on this machine: %d', study.name, num_workers)
    if num_workers == 1:
        return worker.run(study, path, arms=arms)

    with StopRequest() as stop:
        # After a stop signal, this process waits until the workers have saved their state.
        stop.defer_exit()
        task = (study, path, arms, sys.orig_argv)  # as `main` receives it
        last_crash = _train(num_workers, task, stop)
    runs_left = worker.runs_without_result(study, arms, path)
    if runs_left:
        reason = last_crash or 'no worker is left'
        raise ProcessError(
            f'runs without a result: {len(runs_left)}; {reason}; the same command resumes'
        )
    return path


def _train(num_workers: int, task: tuple[Any, ...], stop: StopRequest) -> str | None:
    """Starts workers on a task, and prints their output until all of them have ended.

    Args:
        num_workers: The number of workers. They share the cores and GPUs of the machine.
        task: The arguments of `children.Child.send`.
        stop: Tells whether the workers have to stop.

    Returns:
        A sentence about the last worker that crashed, or None.

    Raises:
        Stopped: A stop was requested.
        ConfigError: Workers refused the task. The message has their last lines.
    """
    workers: dict[int, children.Child] = {}  # the running workers by number
    last_line: dict[int, str] = {}  # the last line that each worker printed
    refusals: list[str] = []  # the last lines of workers that refused the task
    last_crash = None
    is_stopping = False
    try:
        _start(workers, num_workers)
        # A child takes seconds to start. All of them start at once, before any gets its task.
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
                # Ask for the exit code first: the output of an ended child is complete.
                exit_code = child.ended()  # None while it runs
                has_ended = exit_code is not None
                for line in child.lines(last=has_ended):
                    say(f'[{i}] {line}\n', sys.stderr)
                    last_line[i] = line
                if exit_code is None:
                    continue

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


def _start(workers: dict[int, children.Child], num_workers: int) -> None:
    """Starts workers, which share the cores and GPUs of the machine, and adds them to `workers`."""
    cores_of_worker = machine.split_evenly(machine.usable_cores(), num_workers)
    gpus_of_worker = machine.split_evenly(_gpus() or [], num_workers)
    for i in range(num_workers):
        environment = {}
        if gpus_of_worker[i]:
            environment['CUDA_VISIBLE_DEVICES'] = ','.join(gpus_of_worker[i])
        workers[i] = children.Child(COMMAND, cores_of_worker[i], environment)


def _crash(number: int, exit_code: int) -> str:
    """Says how a worker crashed, such as 'worker 2 crashed (exit code 1)'."""
    if exit_code < 0:  # minus the number of a signal
        return f'worker {number} crashed (ended by signal {-exit_code})'
    return f'worker {number} crashed (exit code {exit_code})'


@signals.exit_on_signal()
def main() -> None:
    """Trains the study that the parent process sends."""
    keep_programs()
    pipe = children.pipe_to_parent()
    if pipe is None:
        raise ConfigError('qkattn.study.local_workers is started by ablate --workers')
    study, workdir, arms, parent_command = pipe.recv()
    sys.orig_argv = parent_command  # the command that study.json records
    worker.run(study, workdir, arms=arms)


if __name__ == '__main__':
    cli.run(main)
