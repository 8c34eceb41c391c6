"""The training loop: trains the X trials of a run, and resumes after an interruption."""

import contextlib
import dataclasses
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qkattn.config import Config, Study, differences, fingerprint, to_json
from qkattn.data.evaluation_corpora import EvaluationCorpus, identity_with, open_corpora
from qkattn.data.tasks.rows import Rows
from qkattn.data.tasks.task_registry import rows_of
from qkattn.data.tokenizers.vocabulary import use_recorded_tokenizers
from qkattn.errors import CheckpointError, ConfigError, Lost, Stopped
from qkattn.jobs import agreement
from qkattn.jobs.agreement import make_in_process_0, run_in_process_0_first
from qkattn.jobs.display import Progress, StudyLeft, waiting
from qkattn.jobs.signals import StopRequest
from qkattn.model.sites import validate
from qkattn.storage.files import check_directory
from qkattn.storage.records import read_json, read_results, write_json
from qkattn.storage.run_directory import RunDirectory
from qkattn.storage.sinks import Sinks
from qkattn.train import program, results, sharding
from qkattn.train.checkpoint import Checkpoints, recorded_tokenizers
from qkattn.train.checks import check_parts
from qkattn.train.chips import flops_per_step, peak_flops, tokens_per_step
from qkattn.train.initial_parameters import InitialParameters
from qkattn.train.program import Program
from qkattn.train.timing import Clock, Trace, trace_directory
from qkattn.train.trials import Evaluation, Stack

# Seconds to wait until other processes see a file that process 0 has written. A network file system
# may cache for a while that the file does not exist.
SEEN_WITHIN = 60.0

# Files of a run directory.
LIFTING_FILE = 'lifting.json'
RESULTS_FILE = 'result.json'

log = logging.getLogger(__name__)


def train(
    config: Config,
    workdir: str | Path,
    *,
    label: str = 'train',
    study: Callable[[], StudyLeft] | None = None,
    lost: Callable[[], bool] = lambda: False,
    profile: str | None = None,
) -> list[dict[str, Any]]:
    """Trains all trials of a run and returns one result per trial, in trial order.

    A finished run returns its stored results. An unfinished run resumes from its newest undamaged
    checkpoint. With the same devices and versions, its results are bitwise equal to those of an
    uninterrupted run.

    Args:
        config: The settings of the run.
        workdir: The run directory.
        label: The title of the progress display.
        study: Returns the progress of the study that the run belongs to, for the display.
        lost: Returns True if another process has taken over the run. Process 0 calls it after every
            dispatch.
        profile: A directory for a profiler trace of three dispatches; None for no trace.

    Raises:
        ConfigError: A setting is invalid, or the workdir is in use or has another configuration.
        CheckpointError: The checkpoints are damaged, or of another configuration or other data.
        Stopped: The process received SIGTERM or Ctrl-C. If any step was trained, the state is
            saved.
        Lost: Another process has taken over the run.
    """
    validate(config)
    require_same_settings(config)
    check_parts(config)
    path = check_directory(workdir)
    trace_path = None if profile is None else trace_directory(profile)
    sharding.require_devices(config.mesh)
    agreement.call_in_process_0(lambda: sharding.require_memory(config))

    def make_progress() -> Progress:
        tokens = tokens_per_step(config)
        return Progress(label, config.train.num_steps, tokens_per_step=tokens, study=study)

    with contextlib.ExitStack() as exits:
        # Outside of process 0, the methods of `progress`, `directory` and `sinks` do nothing.
        progress = exits.enter_context(make_in_process_0(make_progress))
        rows, corpora = _open_rows(config, path, progress)
        initial = InitialParameters(config)
        if not _is_begun(path):
            # Report an error in train.init_from before the run directory fixes the settings.
            initial.load()
        directory = exits.enter_context(make_in_process_0(lambda: RunDirectory(path, config)))
        stop = exits.enter_context(StopRequest())
        sinks = make_in_process_0(lambda: Sinks(config, path))
        exits.enter_context(contextlib.closing(sinks))
        require_shared(path)
        run = Run(
            config=config,
            path=path,
            rows=rows,
            corpora=corpora,
            initial=initial,
            progress=progress,
            directory=directory,
            stop=stop,
            sinks=sinks,
            lost=lost,
            trace_path=trace_path,
        )
        stored_results = run.stored_results()
        return run.to_end() if stored_results is None else stored_results


def require_same_settings(settings: Config | Study) -> None:
    """Raises ConfigError if a process of the job has other settings than process 0.

    All processes of the job must call this.
    """
    # The first call of `jax.devices` may take long, as it opens the devices.
    if jax.distributed.is_initialized():
        jax.devices()
    else:
        with waiting('qkattn', 'opening devices'):
            jax.devices()
    settings_by_rank = agreement.gather_from_processes(to_json(settings))
    for rank, settings_of_rank in enumerate(settings_by_rank):
        changes = differences(settings_by_rank[0], settings_of_rank)
        if changes:
            raise ConfigError(
                f'process {rank} has other settings than process 0 ({", ".join(changes)}); start '
                'all processes with the same command'
            )


def require_shared(directory: Path) -> None:
    """Raises ConfigError if a process does not see the run directory of process 0.

    Waits up to SEEN_WITHIN seconds for config.json, which process 0 has written there.
    """
    config_file = directory / 'config.json'
    deadline = time.monotonic() + SEEN_WITHIN
    is_seen = config_file.exists()
    while not is_seen and time.monotonic() < deadline:
        time.sleep(0.1)
        is_seen = config_file.exists()
    reports = agreement.gather_from_processes({'is_seen': is_seen, 'directory': str(directory)})
    for rank, report in enumerate(reports):
        if not report['is_seen']:
            raise ConfigError(
                f'workdir={report["directory"]} of process {rank} is not '
                f'{reports[0]["directory"]} of process 0; give all processes the same directory, '
                'on a file system that their hosts share'
            )


def compile_program(config: Config, directory: Path) -> Program:
    """Compiles the program of a run, with the same lifting at every start of the run.

    A lifting computes trials side by side ('vmap') or one after another ('map'), which changes the
    last bits of results. The first start chooses the lifting and records it in `directory`.
    """
    path = directory / LIFTING_FILE

    def read_lifting() -> str | None:
        if not path.exists():
            return None
        return read_json(path, {'lifting': str})['lifting']

    recorded_lifting = agreement.call_in_process_0(read_lifting)
    compiled = program.build(config, recorded_lifting)
    if recorded_lifting is None:
        choice = {'lifting': compiled.lifting, 'seconds_per_step': compiled.measured}
        agreement.call_in_process_0(lambda: write_json(path, choice))
    return compiled


def with_divergences(
    diverged_at: Mapping[int, int | None], loss_CX: np.ndarray, last_step: int
) -> dict[int, int | None]:
    """Adds the trials that diverged in the last C steps to a copy of `diverged_at`.

    A trial diverges at the first step whose loss is not finite.

    Args:
        diverged_at: The step at which each diverged trial diverged, by trial number.
        loss_CX: The losses of X trials in the last C steps.
        last_step: The step number of `loss_CX[-1]`.
    """
    first_step = last_step - len(loss_CX) + 1
    updated = dict(diverged_at)
    for trial, loss_C in enumerate(loss_CX.T):
        bad_positions = np.flatnonzero(~np.isfinite(loss_C))
        if bad_positions.size > 0 and trial not in updated:
            updated[trial] = first_step + int(bad_positions[0])
    return updated


@dataclasses.dataclass(frozen=True)
class Boundary:
    """What a run does when it pauses training after a step."""

    # Evaluate the validation split.
    evaluate: bool
    # Save a checkpoint; always True if `stop` is.
    save: bool
    # Stop the run before its last step.
    stop: bool


@dataclasses.dataclass(frozen=True)
class Validation:
    """The evaluations that a run logs at a step."""

    on_split: Evaluation
    # The evaluation on each corpus of data.evaluate, by entry of that setting.
    on_corpora: Mapping[str, Evaluation]


@dataclasses.dataclass
class Run:
    """One start of a run: its open resources and the state of training.

    All processes of a job call the same methods in the same order. The methods of `progress`,
    `directory` and `sinks` do nothing outside of process 0.
    """

    config: Config
    path: Path
    rows: Rows
    # The corpora of data.evaluate.
    corpora: tuple[EvaluationCorpus, ...]
    initial: InitialParameters
    progress: Progress
    directory: RunDirectory
    stop: StopRequest
    sinks: Sinks
    # Returns True if another process has taken over the run.
    lost: Callable[[], bool]
    # The directory for a profiler trace; None for no trace.
    trace_path: Path | None

    # `to_end` sets the fields with init=False.
    checkpoints: Checkpoints = dataclasses.field(init=False)
    stack: Stack = dataclasses.field(init=False)
    clock: Clock = dataclasses.field(init=False)
    # The number of completed steps.
    step: int = dataclasses.field(init=False)
    # The sha256 of each file that the run reads before its first step, by setting.
    read_files: dict[str, str] = dataclasses.field(init=False)
    # The code versions of all starts of the run, without repeats. The last one is running.
    code: list[dict[str, Any]] = dataclasses.field(init=False)
    # The step at which each diverged trial diverged, by trial number. Checkpoints of earlier
    # versions did not record the step, which is then None.
    diverged_at: dict[int, int | None] = dataclasses.field(init=False)

    # The last validation of this start.
    validation: Validation | None = None
    # Numbers the calls of `_should_stop`, equally in all processes.
    stop_check_numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def stored_results(self) -> list[dict[str, Any]] | None:
        """Returns the results that a finished run has stored; None for an unfinished run."""
        path = self.path / RESULTS_FILE

        def read_if_finished() -> list[dict[str, Any]] | None:
            return read_results(path, self.config) if path.exists() else None

        return agreement.call_in_process_0(read_if_finished)

    def to_end(self) -> list[dict[str, Any]]:
        """Trains the remaining steps, writes the results and returns one result per trial."""
        with self.progress.phase('compiling'):
            compiled = compile_program(self.config, self.path)
        self.checkpoints = Checkpoints(
            self.path / 'checkpoints',
            keep=self.config.train.keep,
            config_hash=fingerprint(self.config),
        )
        with contextlib.closing(self.checkpoints):
            with self.progress.phase('initializing'):
                record = self._restore_or_initialize(compiled)
            self._reopen_logs(record)
            code_of_earlier_starts = record.get('code', [])
            self.code = agreement.call_in_process_0(
                lambda: results.with_code_of_this_start(self.path, code_of_earlier_starts)
            )
            self._train(is_evaluated=record.get('evaluated', True))
            trial_results, document_losses = self._measure()
        # The results include the time that closing the checkpoints takes, so they come last.
        return agreement.call_in_process_0(
            lambda: self._write_results(trial_results, document_losses)
        )

    def _restore_or_initialize(self, compiled: Program) -> Mapping[str, Any]:
        """Restores the newest undamaged checkpoint, or initializes step 0 if there is none.

        Returns:
            The record that was saved with the checkpoint; {} at step 0. Earlier versions saved
            fewer fields.

        Raises:
            CheckpointError: The checkpoint was trained on other data.
        """
        restored = self.checkpoints.restore(compiled.abstract_state)
        if restored is None:
            record: Mapping[str, Any] = {}
            self.read_files = self.initial.hashes()
            state = compiled.init(self.initial.load())
        else:
            state, record = restored
            self._require_same_data(record['data'])
            self.read_files = record.get('given', {})  # the sha256 of each input file

        self.stack = Stack(self.config, compiled, self.rows, state, self.corpora)
        self.step = self.stack.step
        self.clock = Clock(record, self.step)
        self.diverged_at = self._recorded_divergences(record)

        if restored is not None:
            # All later checkpoints are damaged. Training saves these steps again.
            self.checkpoints.discard_after(self.step)
            log.info('resuming at step %s', f'{self.step:,}')
        return record

    def _recorded_divergences(self, record: Mapping[str, Any]) -> dict[int, int | None]:
        """Returns the step at which each diverged trial diverged, by trial number."""
        alive_X = self.stack.alive_X
        # Earlier versions did not record the steps.
        step_X = record.get('diverged_at') or [None] * len(alive_X)
        diverged_at = {}
        for trial, step in enumerate(step_X):
            if not alive_X[trial]:
                diverged_at[trial] = step
        return diverged_at

    def _require_same_data(self, recorded_data: Mapping[str, Any]) -> None:
        """Raises CheckpointError if the data differ from the data recorded in a checkpoint."""
        current_data = identity_with(self.rows, self.corpora)
        changes = differences(recorded_data, current_data)
        if changes:
            raise CheckpointError(
                f'{self.path} was trained on data other than the current dataset '
                f'({", ".join(changes)}); use the interpreter and the data of its first start, or '
                'another workdir'
            )

    def _reopen_logs(self, record: Mapping[str, Any]) -> None:
        """Removes later steps from metrics.jsonl, and opens the sinks at the current step.

        `record` is the record of the restored checkpoint; {} at step 0.
        """
        is_evaluated = record.get('evaluated', True)
        # The line count and checksum of metrics.jsonl at the checkpoint.
        written = record.get('metrics')

        def remove_later_steps() -> None:
            metrics = self.directory.metrics
            metrics.rewind(self.step, evaluated=is_evaluated, written=written)

        agreement.call_in_process_0(remove_later_steps)
        self.sinks.open(self.step)

    def _train(self, is_evaluated: bool) -> None:
        """Trains to the last step, with evaluations and checkpoints along the way.

        Args:
            is_evaluated: False if a stop left the evaluation at the current step incomplete.

        Raises:
            Stopped: A signal came, and the state is saved.
        """
        with (
            contextlib.closing(self.stack.batches()) as batches,
            Trace(self.trace_path) as trace,
        ):
            # On the devices; the clock counts the time of waiting for them.
            placed_batches = self.clock.inputs(map(self.stack.place, batches))
            self.stop.defer_exit()  # from here on, a signal only sets a flag
            if not is_evaluated and not self._validate():
                raise self._stopped()

            self.progress.begin()
            while self.step < self.config.train.num_steps:
                boundary = self._train_to_boundary(placed_batches, trace)
                is_evaluated = True  # unless an evaluation is due
                stopping = boundary.stop
                if boundary.evaluate:
                    # `_validate` returns False if a signal ends the evaluation early.
                    is_evaluated = not stopping and self._validate()
                    stopping = not is_evaluated
                if boundary.save or stopping:
                    self._save(is_evaluated)
                if stopping:
                    raise self._stopped()

    def _train_to_boundary(self, batches: Iterator[dict[str, jax.Array]], trace: Trace) -> Boundary:
        """Takes and logs training steps until an evaluation, a checkpoint or a stop is due."""
        first_step = self.step
        metrics: dict[str, jax.Array] = {}
        boundary = None
        self.clock.start()
        while boundary is None:
            batch = next(batches)
            trace.before_dispatch(self.stack.state)
            previous_metrics = metrics
            metrics = self.stack.train(batch)
            # While the devices compute these steps, log the previous ones.
            if previous_metrics:
                self._log_steps(self.step, previous_metrics)
            self.step += self.config.train.steps_per_dispatch
            boundary = self._boundary()
        self._log_steps(self.step, metrics)
        jax.block_until_ready(self.stack.state)
        num_steps = self.step - first_step
        self.clock.pause(num_steps * tokens_per_step(self.config))
        return boundary

    def _boundary(self) -> Boundary | None:
        """Returns what is due after the current step; None if training continues.

        Raises:
            Lost: A checkpoint is due, but another process has taken over the run.
        """
        train = self.config.train
        is_taken_over = self._is_taken_over()
        stop = self._should_stop(has_other_reason=is_taken_over)
        is_last = self.step == train.num_steps
        evaluate = is_last or self.step % train.eval_every == 0
        save = is_last or stop or self.step % train.checkpoint_every == 0
        if save:
            self._raise_if_taken_over(is_taken_over, f'at step {self.step:,}')
        if not evaluate and not save:
            return None
        return Boundary(evaluate=evaluate, save=save, stop=stop)

    def _log_steps(self, last_step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Displays and logs the metrics [C, X] of X trials over the C steps up to `last_step`.

        At multiples of train.log_every, it logs each trial's means over the C steps.
        """
        jax.block_until_ready(metrics)
        with self.clock.counted_as('logging_seconds'):
            loss_CX = np.asarray(metrics['loss'], np.float64)
            self.diverged_at = with_divergences(self.diverged_at, loss_CX, last_step)
            if last_step % self.config.train.log_every == 0:
                record: dict[str, Any] = {'kind': 'train', 'step': last_step}
                for name, values_CX in metrics.items():
                    record[name] = np.asarray(values_CX, np.float64).mean(0)
                speeds = self._speeds(last_step)
                self._record(record | speeds)
                self.progress.update_speeds(speeds)
        self.progress.update(last_step, loss_CX.mean(0))

    def _speeds(self, step: int) -> dict[str, float]:
        """Returns training speeds between the last call and step `step`, by name.

        'mfu' is the model FLOPs utilization (Chowdhery et al. 2022, appendix B). It is absent if
        the device's peak FLOPs are unknown, as on a CPU.
        """
        lap = self.clock.lap(step)
        speeds = {'tokens_per_second': lap.steps_per_second * tokens_per_step(self.config)}
        devices = self.stack.program.mesh.devices  # an array with the axes of the mesh
        peak_flops_per_device = peak_flops(devices.flat[0].device_kind)
        if peak_flops_per_device is not None:
            flops_per_second = lap.steps_per_second * flops_per_step(self.config)
            speeds['mfu'] = flops_per_second / (peak_flops_per_device * devices.size)
        speeds['input_wait_fraction'] = lap.input_wait_fraction
        return speeds

    def _validate(self) -> bool:
        """Evaluates the validation split and the corpora of data.evaluate, and logs the results.

        Returns False, and logs nothing, if a signal ends the evaluation early.
        """
        with self.progress.phase('evaluating'):
            on_split = self.stack.evaluate('validation', self._should_stop)
            if on_split is None:
                return False
            on_corpora = self.stack.evaluate_corpora(self._should_stop)
            if on_corpora is None:
                return False
        self.validation = Validation(on_split, on_corpora)
        self._record(results.eval_record(self.step, on_split, on_corpora))
        self.progress.update_validation_loss(self.step, on_split.values['loss'])
        return True

    def _save(self, is_evaluated: bool) -> None:
        """Saves a checkpoint: the state of the trials and a record for resuming.

        Args:
            is_evaluated: False if an evaluation at this step is due but incomplete.

        Raises:
            Lost: Another process has taken over the run.
        """
        # Check again, because an evaluation may have taken minutes.
        is_taken_over = self._is_taken_over()
        self._raise_if_taken_over(is_taken_over, f'at step {self.step:,}')
        num_trials = len(self.config.trials.trials())
        # Flush before saving, so that metrics.jsonl has all steps up to the checkpoint.
        flushed = agreement.call_in_process_0(self.directory.metrics.flush)
        record = {
            'metrics': flushed,  # the line count and checksum of metrics.jsonl
            'data': identity_with(self.rows, self.corpora),
            **self.clock.seconds,  # such as 'train_seconds'
            # None for trials that have not diverged.
            'diverged_at': [self.diverged_at.get(trial) for trial in range(num_trials)],
            'evaluated': is_evaluated,
            'given': self.read_files,  # the sha256 of each input file
            'code': self.code,
        }
        with self.progress.phase('saving'):
            self.checkpoints.save(self.step, self.stack.state, record)

    def _measure(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Evaluates the trained models on all splits, and adds times and provenance.

        Returns:
            One result per trial, and the losses of all trials on each document.
        """
        # Once the last checkpoint is complete, a signal may end the process at once.
        self.checkpoints.wait()
        self.stop.allow_exit()

        evaluations, on_corpora = self._final_evaluations()
        is_taken_over = self._is_taken_over()
        self._raise_if_taken_over(is_taken_over, 'after its last step')

        train_program = self.stack.program
        costs = {
            **self.clock.seconds,  # such as 'train_seconds'
            'compile_seconds': train_program.compile_seconds,
            'tokens_per_second': self.clock.tokens_per_second,
            'lifting': train_program.lifting,
        }
        provenance = agreement.call_in_process_0(
            lambda: results.provenance_of(self.path, self.read_files, self.code)
        )

        with self.progress.phase('measuring'):
            trial_results = results.trial_results(
                self.stack,
                evaluations,
                costs=costs,
                provenance=provenance,
                diverged_at=self.diverged_at,
                corpora=on_corpora,
            )
        document_losses = results.document_results(self.stack, evaluations, trial_results)
        return trial_results, document_losses

    def _final_evaluations(self) -> tuple[dict[str, Evaluation], Mapping[str, Evaluation]]:
        """Evaluates the trained models on all splits but 'train', and on further corpora.

        Returns:
            Evaluations by split, and evaluations by corpus of data.evaluate.
        """
        # The validation after the last step; None if this start resumed after that step.
        validation = self.validation
        evaluations: dict[str, Evaluation] = {}
        with self.progress.phase('evaluating'):
            for split in self.rows.splits[1:]:  # the first split is 'train'
                if split == 'validation' and validation is not None:
                    evaluations[split] = validation.on_split
                    continue
                evaluation = self.stack.evaluate(split)
                assert evaluation is not None  # only a request to stop gives None
                evaluations[split] = evaluation

            if validation is not None:
                return evaluations, validation.on_corpora
            on_corpora = self.stack.evaluate_corpora()
            assert on_corpora is not None
        return evaluations, on_corpora

    def _write_results(
        self, trial_results: list[dict[str, Any]], document_losses: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Completes and writes the results of a run; only process 0 calls this.

        Raises:
            Lost: Another process has taken over the run.
        """
        if self._is_taken_over():
            raise Lost(f'{self.path} was taken over before its results were written')
        for result in trial_results:
            result['checkpoint_seconds'] = self.checkpoints.stall_seconds
        metrics = self.directory.metrics
        metrics.check()  # raises an error if metrics.jsonl was damaged during training
        write_json(self.path / 'documents.json', document_losses, indent=None)
        final_record = results.final_record(trial_results)
        metrics.append(final_record)
        metrics.flush()
        # This file marks the run as finished, so the others must be complete.
        write_json(self.path / RESULTS_FILE, trial_results)
        self.sinks.write(final_record)
        num_diverged = sum(result['status'] != results.FINISHED for result in trial_results)
        if num_diverged > 0:
            log.warning('%s: %s of %s trials diverged', self.path, num_diverged, len(trial_results))
        return trial_results

    def _record(self, record: Mapping[str, Any]) -> None:
        """Writes a record to metrics.jsonl and to the sinks."""
        self.directory.metrics.append(record)
        self.sinks.write(record)

    def _should_stop(self, has_other_reason: bool = False) -> bool:
        """Whether any process got a signal or has another reason to stop.

        All processes get the same answer, so they stop at the same step.
        """
        check_number = next(self.stop_check_numbers)  # equal in all processes
        return self.stop.should_stop(check_number, has_other_reason=has_other_reason)

    def _stopped(self) -> Stopped:
        """Returns the exception that ends this start after a signal."""
        num_steps = self.config.train.num_steps
        return Stopped(f'stopped at step {self.step:,} of {num_steps:,}, state saved')

    def _is_taken_over(self) -> bool:
        """Whether another program has taken over the run; always False outside of process 0."""
        return agreement.is_process_0() and (self.lost() or self.directory.lost())

    def _raise_if_taken_over(self, is_taken_over: bool, when: str) -> None:
        """Raises Lost in all processes if `is_taken_over` is True in any process.

        `when` ends the message, as in 'at step 100'.
        """
        if agreement.any_process(is_taken_over):
            raise Lost(f'{self.path} was taken over {when}')


def _open_rows(
    config: Config, path: Path, progress: Progress
) -> tuple[Rows, tuple[EvaluationCorpus, ...]]:
    """Opens the rows of a run and the corpora of data.evaluate.

    Raises:
        ConfigError: The processes of the job see different data.
    """

    def open_data() -> tuple[Rows, tuple[EvaluationCorpus, ...]]:
        rows = rows_of(config)
        corpora = open_corpora(config, rows)
        return rows, corpora

    # A tokenizer.json can be opened in two ways. Checkpoints record which way the run uses.
    tokenizer_names = agreement.call_in_process_0(lambda: recorded_tokenizers(path, config.data))
    with progress.phase('preparing data'), use_recorded_tokenizers(*tokenizer_names):
        # Process 0 prepares the data on disk, where the other processes find them.
        rows, corpora = run_in_process_0_first(open_data)

    data_identity = identity_with(rows, corpora)
    agreement.require_same('dataset', json.dumps(data_identity))
    return rows, corpora


def _is_begun(path: Path) -> bool:
    """Whether an earlier start of the run at `path` got past reading train.init_from."""
    files = [path / LIFTING_FILE, path / RESULTS_FILE]
    return agreement.call_in_process_0(lambda: any(file.exists() for file in files))
