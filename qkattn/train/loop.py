"""The training loop: one run of X trials, from its directory to its results, resumable anywhere."""

import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qkattn.config import Config
from qkattn.data.pipeline import train_batches
from qkattn.data.tasks.rows import Rows
from qkattn.data.tasks.task_registry import rows_of
from qkattn.errors import Lost, Stopped
from qkattn.jobs import agreement
from qkattn.jobs.agreement import owned, owner_first
from qkattn.jobs.display import Progress, StudyLeft
from qkattn.jobs.signals import StopRequest
from qkattn.model.sites import validate
from qkattn.storage.files import check_directory
from qkattn.storage.records import read_results, write_json
from qkattn.storage.run_directory import RunDirectory
from qkattn.storage.sinks import Sinks, check_sinks
from qkattn.train import results, sharding
from qkattn.train.checkpoint import Checkpoints
from qkattn.train.clock import Clock
from qkattn.train.measurements import Evaluation, evaluate
from qkattn.train.optimizer import check_optimizer
from qkattn.train.placement import local_share, place_batch, require_memory
from qkattn.train.program import Program
from qkattn.train.start import (
    Divergences,
    build_program,
    pauses,
    require_same_settings,
    require_shared,
    restore,
    software_of,
)
from qkattn.train.trace import Trace

# Results of the trials, and of the documents that they were evaluated on.
_Outcome = tuple[list[dict[str, Any]], dict[str, Any]]


def train(
    config: Config,
    workdir: str | Path,
    *,
    command: list[str] | None = None,
    label: str = 'train',
    study: StudyLeft | None = None,
    lost: Callable[[], bool] = lambda: False,
    trace: Trace | None = None,
) -> list[dict[str, Any]]:
    """Trains the stack of trials to its end and returns one result per trial, in trial order.

    A finished run returns its results at once; an unfinished one resumes at its newest sound
    checkpoint, bitwise as if it had never stopped (same devices, same versions).

    Args:
      workdir: the run directory.
      command: the command line, for the record.
      label, study: what the progress display calls the run, and what follows it.
      lost: whether another process has taken over the run; called after every dispatch, in
        process 0 of a job.
      trace: the steps that are profiled; None: none.

    Raises:
      ConfigError: an invalid setting, or a workdir that is in use or of another configuration.
      CheckpointError: the checkpoints are damaged, or belong to other data.
      Stopped: on SIGTERM or Ctrl-C; the state is saved once a step was trained.
      Lost: another process has taken over the run.
    """
    validate(config)
    require_same_settings(config)
    check_optimizer(config.optimizer, config.train.num_steps)
    check_sinks(config.train.sinks)
    path = check_directory(workdir)
    sharding.require_devices(config.mesh)
    agreement.on_owner(lambda: require_memory(config))
    total, tokens_per_step = config.train.num_steps, _tokens_per_step(config)
    shown = owned(lambda: Progress(label, total, tokens_per_step=tokens_per_step, study=study))
    with shown as progress:
        with progress.phase('preparing data'):
            rows = owner_first(lambda: rows_of(config))
        agreement.require_same('dataset', json.dumps(rows.identity()))
        directory = owned(lambda: RunDirectory.open(path, config, command))

        def taken_over() -> bool:
            return agreement.owner() and (lost() or directory.lost())

        return _train(config, rows, path, directory, progress, taken_over, trace or Trace())


def _train(
    config: Config,
    rows: Rows,
    path: Path,
    directory: RunDirectory,
    progress: Progress,
    lost: Callable[[], bool],
    trace: Trace,
) -> list[dict[str, Any]]:
    """Trains a run whose directory is open, unless it is finished, and closes it."""
    with (
        directory,
        StopRequest() as stop,
        contextlib.closing(owned(lambda: Sinks(config, path))) as sinks,
    ):
        require_shared(path)
        finished = agreement.on_owner(lambda: _finished(path, config))
        resumed = agreement.on_owner(lambda: directory.resumed)
        trace.check(config, resumed=resumed, finished=finished is not None)
        if finished is not None:
            return finished
        with progress.phase('compiling'):
            program = build_program(config, path)
        with contextlib.closing(Checkpoints(path / 'checkpoints')) as checkpoints:
            run = _Run(
                config,
                rows,
                path,
                directory,
                sinks,
                program,
                checkpoints,
                progress,
                stop,
                lost,
                trace,
            )
            trial_results, documents = run.to_end()
        return agreement.on_owner(lambda: run.write(trial_results, documents))


def _finished(path: Path, config: Config) -> list[dict[str, Any]] | None:
    """The results of a finished run; None for one that is not finished."""
    results_path = path / 'result.json'
    return read_results(results_path, config.trials.trials()) if results_path.exists() else None


@dataclasses.dataclass(frozen=True)
class _Run:
    """One start of a run."""

    config: Config
    rows: Rows
    path: Path
    directory: RunDirectory
    sinks: Sinks
    program: Program
    checkpoints: Checkpoints
    progress: Progress
    stop: StopRequest
    lost: Callable[[], bool]
    trace: Trace
    asked: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    validated: dict[int, Evaluation] = dataclasses.field(default_factory=dict)  # newest, by step

    def to_end(self) -> _Outcome:
        """Trains from the newest checkpoint to the last step."""
        config, program, train = self.config, self.program, self.config.train
        with self.progress.phase('initializing'):
            state, step, clock, diverged, kept = restore(program, self.checkpoints, self.rows)
        agreement.on_owner(lambda: self.directory.metrics.rewind(step, train.log_every, **kept))
        self.sinks.open(step)
        tokens_per_step = _tokens_per_step(config)
        trials, share = config.trials.trials(), local_share(config, program.mesh)
        batches = train_batches(
            self.rows,
            seeds=[trials[x]['seed'] for x in share.trials],
            batch_size=train.batch_size,
            start_step=step,
            num_steps=train.num_steps - step,
            steps_per_read=train.steps_per_dispatch,
            part=share.rows,
        )
        val_loss, unwritten = math.inf, None
        self.trace.begin(config, step, self.progress)
        with contextlib.closing(batches), contextlib.closing(clock), contextlib.closing(self.trace):
            self.stop.defer_exit()
            if not kept['evaluated'] and (val_loss := self._evaluate(state, step)) is None:
                raise Stopped(self._stopped(step))
            self.progress.begin(step, **pauses(train, step, self.rows.splits))
            since = step
            clock.start()
            for batch in clock.inputs(place_batch(config, program.mesh, b) for b in batches):
                self.trace.at(step, state)
                clock.dispatching()
                state, metrics = program.train(state, batch)
                clock.dispatched(metrics)
                # Metrics are fetched one dispatch late, so that the device never waits for them.
                self._write(unwritten, diverged, clock)
                step += train.steps_per_dispatch
                lost = self.lost()
                stopping = self._due(also=lost)
                unwritten = step, metrics
                evaluating = step % train.eval_every == 0
                saving = stopping or step % train.checkpoint_every == 0 or step == train.num_steps
                if saving and agreement.any_process(lost):
                    raise Lost(f'{self.path} was taken over at step {step}')
                if not (evaluating or saving):
                    continue
                self._write(unwritten, diverged, clock)
                unwritten = None
                jax.block_until_ready(state)
                clock.pause((step - since) * tokens_per_step)
                if evaluating and not stopping:
                    val_loss = self._evaluate(state, step)
                    stopping = val_loss is None
                if saving or stopping:
                    record = {
                        # On the disk before the checkpoint: a resumed file has no gap.
                        'metrics': agreement.on_owner(self.directory.metrics.flush),
                        'data': self.rows.identity(),
                        **clock.seconds,
                        'diverged_at': diverged.record(),
                        'evaluated': not (evaluating and stopping),
                    }
                    with self.progress.phase('saving'):
                        self.checkpoints.save(step, state, record, val_loss)
                if stopping:
                    raise Stopped(self._stopped(step))
                since = step
                clock.start()
        return self._results(state, clock, diverged)

    def write(
        self, trial_results: list[dict[str, Any]], documents: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Writes what a run ends with; a start that finds no results makes all of it again."""
        if self.lost():
            raise Lost(f'{self.path} was taken over before its results were written')
        for result in trial_results:
            result['checkpoint_seconds'] = self.checkpoints.stall_seconds
        self.directory.metrics.check()
        write_json(self.path / 'documents.json', documents, indent=None)
        final = results.final_record(trial_results)
        self.directory.metrics.append(final)
        self.directory.metrics.flush()
        write_json(self.path / 'result.json', trial_results)
        self.sinks.write(final)
        results.warn_of_diverged(self.path, trial_results)
        return trial_results

    def _due(self, also: bool = False) -> bool:
        """Whether to stop here: the same in all processes, which ask equally often."""
        return self.stop.should_stop(next(self.asked), also=also)

    def _stopped(self, step: int) -> str:
        return f'stopped at step {step} of {self.config.train.num_steps}, state saved'

    def _evaluate(self, state: dict, step: int) -> float | None:
        """Records an evaluation; its mean loss, None if a stop request came before its end."""
        evaluation = self._evaluation(state, 'validation', stop=self._due)
        if evaluation is None:
            return None
        self.validated.clear()
        self.validated[step] = evaluation
        self._record(results.of_evaluation(step, evaluation))
        self.progress.evaluated(step, evaluation.values['loss'])
        return float(np.mean(evaluation.values['loss']))

    def _evaluation(self, state: dict, split: str, **stop: Callable[[], bool]) -> Evaluation | None:
        with self.progress.phase('evaluating'):
            return evaluate(self.config, self.program, self.rows, state, split, **stop)

    def _write(
        self, unwritten: tuple[int, dict] | None, diverged: Divergences, clock: Clock
    ) -> None:
        """Shows and logs the metrics of a dispatch: means over its steps by trial."""
        if unwritten is None:
            return
        step, metrics = unwritten
        jax.block_until_ready(metrics)
        with clock.part('logging_seconds'):
            loss_CX = np.asarray(metrics['loss'], np.float64)
            diverged.add(step, loss_CX)
            if step % self.config.train.log_every == 0:
                means = {n: np.asarray(v_CX, np.float64).mean(0) for n, v_CX in metrics.items()}
                self._record({'kind': 'train', 'step': step, **means})
        self.progress.update(step, loss_CX.mean(0))

    def _record(self, record: dict[str, Any]) -> None:
        self.directory.metrics.append(record)
        self.sinks.write(record)

    def _results(self, state: dict, clock: Clock, diverged: Divergences) -> _Outcome:
        self.checkpoints.wait()
        self.stop.allow_exit()
        done = self.validated.get(self.config.train.num_steps)
        evaluations = {
            split: (split == 'validation' and done) or self._evaluation(state, split)
            for split in self.rows.splits[1:]
        }
        if agreement.any_process(self.lost()):
            raise Lost(f'{self.path} was taken over after its last step')
        costs = {
            **clock.seconds,
            'compile_seconds': self.program.compile_seconds,
            'tokens_per_second': clock.tokens_per_second,
            'lifting': self.program.lifting,
        }
        provenance = agreement.on_owner(lambda: software_of(self.path))
        with self.progress.phase('measuring'):
            found = results.of_trials(
                self.config,
                self.program,
                self.rows,
                state,
                evaluations,
                costs,
                provenance,
                diverged.record(),
            )
        return found, results.of_documents(self.config, self.rows, evaluations, found)


def _tokens_per_step(config: Config) -> int:
    """Training tokens of a step, summed over trials."""
    return len(config.trials.trials()) * config.train.batch_size * config.model.context
