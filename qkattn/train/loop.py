"""The training loop: one run of X trials, from its directory to its results, resumable anywhere."""

import dataclasses
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qkattn.config import Config, fingerprint, to_json
from qkattn.data.pipeline import TrainBatches
from qkattn.data.tasks.rows import Rows
from qkattn.data.tasks.task_registry import rows_of
from qkattn.errors import CheckpointError, ConfigError, Lost, Stopped
from qkattn.model.sites import validate
from qkattn.run.files import check_directory
from qkattn.run.progress import Progress
from qkattn.run.records import read_json, write_json
from qkattn.run.run_directory import RunDirectory
from qkattn.run.signals import StopRequest
from qkattn.train import exported, results, sharding
from qkattn.train import program as programs
from qkattn.train.checkpoint import Checkpoints
from qkattn.train.measurements import evaluate
from qkattn.train.optimizer import check_optimizer
from qkattn.train.placement import local_rows, place_batch
from qkattn.train.program import Program

log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Clock:
    """Seconds spent in training proper, over all starts of the run."""

    seconds: float
    tokens: int = 0
    here: float = 0.0

    def add(self, seconds: float, tokens: int) -> None:
        self.seconds += seconds
        self.here += seconds
        self.tokens += tokens

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.here if self.here else None


def train(
    config: Config,
    workdir: str | Path,
    *,
    command: list[str] | None = None,
    description: str = 'train',
    runs_left: int | None = None,
    lost: Callable[[], bool] = lambda: False,
) -> list[dict[str, Any]]:
    """Trains the stack of trials to its end and returns one result per trial, in trial order.

    A finished run returns its results at once; an unfinished one goes on from its newest sound
    checkpoint, bitwise as if it had never stopped (same devices, same versions).

    Args:
      command: the command line, recorded.
      description, runs_left: for the progress bar.
      lost: asked after every dispatch whether another process has taken the run over.

    Raises:
      ConfigError: a setting that cannot work, or a workdir of another configuration or in use.
      CheckpointError: the checkpoints are damaged, or belong to other data.
      Stopped: SIGTERM or Ctrl-C came; the state is saved.
      Lost: the run was taken over.
    """
    validate(config)
    check_optimizer(config.optimizer)
    check_directory(workdir)
    sharding.require_devices(config.mesh)
    rows = rows_of(config)
    if jax.process_count() > 1:
        raise ConfigError(f'a run is one process, but this job has {jax.process_count()}')

    opened = RunDirectory.open(workdir, to_json(config), fingerprint(config), command)
    with opened as directory, StopRequest() as stop:
        result_path = directory.path / 'result.json'
        if result_path.exists():
            return read_json(result_path)
        reached = _Run(config, rows, directory, stop, description, runs_left, lost).run()
        if lost():
            raise Lost(f'{directory.path} was taken over before its results were written')
        write_json(result_path, reached)
        return reached


class _Run:
    """The live objects of one start of a run."""

    def __init__(
        self,
        config: Config,
        rows: Rows,
        directory: RunDirectory,
        stop: StopRequest,
        description: str,
        runs_left: int | None,
        lost: Callable[[], bool],
    ):
        self.config, self.rows, self.directory, self.stop = config, rows, directory, stop
        self.trials = config.trials.trials()
        self.program = self._build()
        self.checkpoints = Checkpoints(directory.path / 'checkpoints')
        self.description, self.runs_left, self.lost = description, runs_left, lost
        train = config.train
        self.tokens_per_step = len(self.trials) * train.batch_size * config.model.context

    def _build(self) -> Program:
        """Compiles; the lifting is chosen once per run, since the last bits depend on it."""
        params = None
        if self.config.train.init_from is not None:
            _, params = exported.load(self.config.train.init_from)
            exported.check(self.config.model, params, self.config.train.init_from)
        path = self.directory.path / 'lifting.json'
        if path.exists():
            return programs.build(self.config, read_json(path)['lifting'], params)
        program = programs.build(self.config, params=params)
        measured = {'lifting': program.lifting, 'seconds_per_step': program.measured}
        write_json(path, measured)
        return program

    def run(self) -> list[dict[str, Any]]:
        try:
            return self._run()
        finally:
            self.checkpoints.close()

    def _run(self) -> list[dict[str, Any]]:
        config, program, train = self.config, self.program, self.config.train
        state, step, clock = self._restore()
        self.directory.metrics.rewind(step, every=train.log_every)
        part = local_rows(config, program.mesh)
        batches = TrainBatches(
            self.rows,
            seeds=[trial['seed'] for trial in self.trials],
            batch_size=train.batch_size,
            start_step=step,
            num_steps=train.num_steps - step,
            steps_per_read=train.steps_per_dispatch,
            part=part,
        )
        progress = Progress(
            train.num_steps,
            self.description,
            start_step=step,
            tokens_per_step=self.tokens_per_step,
            runs_left=self.runs_left,
        )
        val_loss, held = math.inf, None
        with batches, progress:
            started, since = time.perf_counter(), step
            for local in batches:
                batch = place_batch(config, program.mesh, local, part)
                state, measured = program.train(state, batch)
                # Metrics are fetched one dispatch late, so that the device never waits for them.
                held = self._record(held)
                step += train.steps_per_dispatch
                if self.lost():
                    raise Lost(f'{self.directory.path} was taken over at step {step}')
                progress.update(step, measured['loss'][-1])
                if step % train.log_every == 0:
                    held = step, measured
                evaluating = step % train.eval_every == 0
                stopping = self.stop.requested and step < train.num_steps
                saving = stopping or step % train.checkpoint_every == 0 or step == train.num_steps
                if not (evaluating or saving):
                    continue
                held = self._record(held)
                jax.block_until_ready(state)
                clock.add(time.perf_counter() - started, (step - since) * self.tokens_per_step)
                if evaluating:
                    reached = evaluate(config, program, self.rows, state, 'validation')
                    self.directory.metrics.append(results.of_evaluation(step, reached))
                    val_loss = float(np.mean(reached.values['loss']))
                if saving:
                    self._save(step, state, val_loss, clock)
                if stopping:
                    raise Stopped(f'stopped at step {step} of {train.num_steps}, state saved')
                started, since = time.perf_counter(), step
        return self._results(state, clock)

    def _record(self, held: tuple[int, dict[str, jax.Array]] | None) -> None:
        """Writes the metrics of a dispatch: means over its steps, for each trial."""
        if held is None:
            return
        step, measured = held
        means = {name: np.asarray(v_CX, np.float64).mean(0) for name, v_CX in measured.items()}
        self.directory.metrics.append({'kind': 'train', 'step': step, **means})

    def _restore(self) -> tuple[dict, int, _Clock]:
        found = self.checkpoints.restore(self.program.abstract_state)
        if found is None:
            return self.program.init(), 0, _Clock(0.0)
        state, record = found
        if record['data'] != self.rows.identity():
            raise CheckpointError(
                f'{self.directory.path} was trained on {record["data"]}, but the dataset is '
                f'{self.rows.identity()}; use the interpreter and data that it began with, '
                'or another workdir'
            )
        step = int(state['step'])
        self.checkpoints.discard_after(step)
        log.info('resuming at step %d', step)
        return state, step, _Clock(record['train_seconds'])

    def _save(self, step: int, state: dict, val_loss: float, clock: _Clock) -> None:
        # The metrics reach the disk before the checkpoint does: a resumed file has no gap.
        self.directory.metrics.flush()
        record = {'data': self.rows.identity(), 'train_seconds': clock.seconds}
        self.checkpoints.save(step, state, record, val_loss)

    def _provenance(self) -> dict[str, Any]:
        """What made the numbers; who and where stays in provenance.json."""
        start = read_json(self.directory.path / 'provenance.json')['starts'][-1]
        return {name: start[name] for name in ('git', 'python', 'versions', 'devices')}

    def _results(self, state: dict, clock: _Clock) -> list[dict[str, Any]]:
        costs = {
            'train_seconds': clock.seconds,
            'compile_seconds': self.program.compile_seconds,
            'tokens_per_second': clock.tokens_per_second,
            'lifting': self.program.lifting,
        }
        reached = {
            split: evaluate(self.config, self.program, self.rows, state, split)
            for split in self.rows.splits[1:]
        }
        if self.lost():
            raise Lost(f'{self.directory.path} was taken over after its last step')
        return results.of_trials(
            self.config, self.program, self.rows, state, reached, costs, self._provenance()
        )
