"""What a start of a run begins with: its compiled programs, its state and its time so far."""

import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qkattn.config import Config, Study, TrainConfig, differences, to_json
from qkattn.data.tasks.rows import Rows
from qkattn.errors import CheckpointError, ConfigError
from qkattn.jobs import agreement
from qkattn.jobs.display import waiting
from qkattn.storage.records import PROVENANCE, START, read_json, write_json
from qkattn.train import exported
from qkattn.train import program as programs
from qkattn.train.checkpoint import Checkpoints
from qkattn.train.clock import Clock
from qkattn.train.placement import fetch
from qkattn.train.program import Program

SEEN_WITHIN = 60.0
"""Seconds within which a file that process 0 has written is seen by the others."""

log = logging.getLogger(__name__)


class Divergences:
    """The trials that have diverged, and their first step without a finite loss and gradient."""

    def __init__(self, alive_X: np.ndarray, steps: Sequence[int | None] | None = None):
        """Takes `alive` and `record()` of a checkpoint; steps that it lacks stay unknown, None."""
        steps = [None] * len(alive_X) if steps is None else steps
        self._steps = {x: at for x, at in enumerate(steps) if not alive_X[x]}
        self._number = len(alive_X)

    def add(self, done: int, loss_CX: np.ndarray) -> None:
        """Enters the losses of a dispatch, after which `done` steps are done."""
        for x, loss_C in enumerate(loss_CX.T):
            bad_steps = np.flatnonzero(~np.isfinite(loss_C))
            if bad_steps.size:
                self._steps.setdefault(x, done - len(loss_C) + int(bad_steps[0]) + 1)

    def record(self) -> list[int | None]:
        """The steps by trial; None for one that has not diverged."""
        return [self._steps.get(x) for x in range(self._number)]


def require_same_settings(settings: Config | Study) -> None:
    """Raises ConfigError where a process of the job has other settings than process 0."""
    alone = not jax.distributed.is_initialized()
    with waiting('qkattn', 'opening devices') if alone else contextlib.nullcontext():
        jax.devices()
    first, *others = agreement.from_all(to_json(settings))
    for rank, other in enumerate(others, 1):
        if changes := differences(first, other):
            raise ConfigError(
                f'process {rank} has other settings than process 0 ({", ".join(changes)}); start '
                'all processes with the same command'
            )


def require_shared(directory: Path) -> None:
    """Raises ConfigError unless every process sees the run directory that process 0 has opened."""
    # A network file system may remember for a while that a file was not there.
    until = time.monotonic() + SEEN_WITHIN
    while not (seen := (directory / 'config.json').exists()) and time.monotonic() < until:
        time.sleep(0.1)
    by_rank = agreement.from_all([seen, str(directory)])
    for rank, (sees, own) in enumerate(by_rank):
        if not sees:
            raise ConfigError(
                f'workdir={own} of process {rank} is not {by_rank[0][1]} of process 0; give all '
                'processes the same directory, on a file system that their hosts share'
            )


def build_program(config: Config, directory: Path) -> Program:
    """Compiles; the lifting is chosen once per run, since the last bits depend on it."""
    params = None
    if config.train.init_from is not None:
        _, params = exported.load(config.train.init_from)
        exported.check(config.model, params, config.train.init_from)
    path = directory / 'lifting.json'
    recorded = agreement.on_owner(
        lambda: read_json(path, {'lifting': str})['lifting'] if path.exists() else None
    )
    program = programs.build(config, recorded, params)
    if recorded is None:
        chosen = {'lifting': program.lifting, 'seconds_per_step': program.measured}
        agreement.on_owner(lambda: write_json(path, chosen))
    return program


def restore(
    program: Program, checkpoints: Checkpoints, rows: Rows
) -> tuple[dict, int, Clock, Divergences, dict[str, Any]]:
    """What the newest sound checkpoint, or a run that begins, goes on from.

    Returns:
      state, step, time, divergences, and what of metrics.jsonl belongs to it, as `evaluated` and
      `written` of `MetricsFile.rewind`.

    Raises:
      CheckpointError: every checkpoint is damaged, or they belong to other data.
    """
    restored = checkpoints.restore(program.abstract_state)
    if restored is None:
        state = program.init()
        checkpoints.prepare(state)
        diverged = Divergences(fetch(state['trials']['alive']))
        return state, 0, Clock({}), diverged, {'evaluated': True}
    state, record = restored
    if changes := differences(record['data'], rows.identity()):
        raise CheckpointError(
            f'{checkpoints.directory.parent} was trained on other data than the present dataset '
            f'({", ".join(changes)}); use the interpreter and the data of its first start, or '
            'another workdir'
        )
    step = int(state['step'])
    checkpoints.discard_after(step)
    log.info('resuming at step %s', f'{step:,}')
    # Checkpoints of earlier versions lack some fields.
    diverged = Divergences(fetch(state['trials']['alive']), record.get('diverged_at'))
    kept = {'evaluated': record.get('evaluated', True), 'written': record.get('metrics')}
    return state, step, Clock(record), diverged, kept


def pauses(train: TrainConfig, step: int, splits: Sequence[str]) -> dict[str, int]:
    """How many evaluations and checkpoints follow `step`: each split but 'train' ends with one."""
    each = {'evaluating': train.eval_every, 'saving': train.checkpoint_every}
    count = {name: train.num_steps // every - step // every for name, every in each.items()}
    count['evaluating'] += len(splits) - 1 - (train.num_steps % train.eval_every == 0)
    count['saving'] += train.num_steps % train.checkpoint_every != 0
    return count


def software_of(directory: Path) -> dict[str, Any]:
    """The provenance of results; user and host stay in provenance.json."""
    start = read_json(directory / 'provenance.json', PROVENANCE)['starts'][-1]
    imported = {'imported': start['imported']} if start['imported'] else {}
    return {name: start[name] for name in START} | imported
