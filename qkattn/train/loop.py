"""The training loop: it trains the X trials of a run, and can resume after any interruption."""

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

# Seconds within which other processes see a file that process 0 has written. A network file system
# may cache for a while that the file does not exist.
SEEN_WITHIN = 60.0

# Files of a run directory.
LIFTING = 'lifting.json'
RESULTS = 'result.json'

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

    A finished run returns its stored results. An unfinished run resumes at its newest sound
    checkpoint; with the same devices and versions, its results are bitwise those of a run that
    never stopped.

    Args:
      config: the settings of the run.
      workdir: the directory of the run.
      label: what the progress display shows.
      study: returns what the display of process 0 shows of the study that the run is part of.
      lost: process 0 calls it after every dispatch. It says whether another process has taken over
        the run.
      profile: a directory for a profiler's trace of three dispatches.

    Raises:
      ConfigError: a setting is invalid, or the workdir is in use or has another configuration.
      CheckpointError: the checkpoints are damaged, or of another configuration or other data.
      Stopped: the process received SIGTERM or Ctrl-C. If any step was trained, the state is saved.
      Lost: another process has taken over the run.
    """
    validate(config)
    require_same_settings(config)
    check_parts(config)
    path = check_directory(workdir)
    traces = None if profile is None else trace_directory(profile)
    sharding.require_devices(config.mesh)
    agreement.call_in_process_0(lambda: sharding.require_memory(config))

    def make_progress() -> Progress:
        tokens = tokens_per_step(config)
        return Progress(label, config.train.num_steps, tokens_per_step=tokens, study=study)

    with contextlib.ExitStack() as exits:
        progress = exits.enter_context(make_in_process_0(make_progress))
        rows, corpora = _open_rows(config, path, progress)
        initial = InitialParameters(config)
        if not _is_begun(path):
            # If the parameters cannot be read, this raises before there is a run directory, which
            # would fix the settings. So the user can correct train.init_from.
            initial.load()
        directory = exits.enter_context(make_in_process_0(lambda: RunDirectory(path, config)))
        stop = exits.enter_context(StopRequest())
        sinks = exits.enter_context(
            contextlib.closing(make_in_process_0(lambda: Sinks(config, path)))
        )
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
            traces=traces,
        )
        finished = run.finished_results()
        return run.to_end() if finished is None else finished


def require_same_settings(settings: Config | Study) -> None:
    """Raises ConfigError if a process of the job has other settings than process 0.

    Every process of a job calls this. `rank` is the number of a process.
    """
    # The first call of `jax.devices` opens the devices, which may take a while.
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
    """Raises ConfigError unless every process sees the run directory of process 0.

    Process 0 has already written config.json there. The others wait up to SEEN_WITHIN for it.
    """
    config_file = directory / 'config.json'
    until = time.monotonic() + SEEN_WITHIN
    is_seen = config_file.exists()
    while not is_seen and time.monotonic() < until:
        time.sleep(0.1)
        is_seen = config_file.exists()
    answers = agreement.gather_from_processes({'is_seen': is_seen, 'directory': str(directory)})
    for rank, answer in enumerate(answers):
        if not answer['is_seen']:
            raise ConfigError(
                f'workdir={answer["directory"]} of process {rank} is not '
                f'{answers[0]["directory"]} of process 0; give all processes the same directory, '
                'on a file system that their hosts share'
            )


def compile_program(config: Config, directory: Path) -> Program:
    """Compiles the program of a run.

    The last bits of results depend on the lifting: whether trials run side by side (`vmap`) or one
    after another (`map`). A run that is interrupted and started again must keep it. So its first
    start chooses the lifting and records it in the run directory, and later starts use that one.
    """
    path = directory / LIFTING

    def recorded_lifting() -> str | None:
        return read_json(path, {'lifting': str})['lifting'] if path.exists() else None

    recorded = agreement.call_in_process_0(recorded_lifting)
    built = program.build(config, recorded)
    if recorded is None:
        choice = {'lifting': built.lifting, 'seconds_per_step': built.measured}
        agreement.call_in_process_0(lambda: write_json(path, choice))
    return built


def with_divergences(
    diverged_at: Mapping[int, int | None], loss_CX: np.ndarray, last_step: int
) -> dict[int, int | None]:
    """Returns `diverged_at` with the trials added that diverged in the last C steps.

    A trial diverges at the first step whose loss is not finite. With the losses [1.2, nan, nan] in
    the steps 10 to 12, it diverged at step 11.

    Args:
      diverged_at: the step at which a trial diverged, by trial number. Its entries do not change.
      loss_CX: the losses of X trials in the C steps.
      last_step: the number of the last of these steps.
    """
    first_step = last_step - len(loss_CX) + 1
    steps = dict(diverged_at)
    for trial, loss_C in enumerate(loss_CX.T):
        bad_positions = np.flatnonzero(~np.isfinite(loss_C))
        if bad_positions.size > 0 and trial not in steps:
            steps[trial] = first_step + int(bad_positions[0])
    return steps


@dataclasses.dataclass(frozen=True)
class Boundary:
    """A pause of training after a step, and what the run does in it."""

    # An evaluation of the validation split is due.
    evaluating: bool
    # A checkpoint is due. It always is if the run stops.
    saving: bool
    stopping: bool


@dataclasses.dataclass(frozen=True)
class Validation:
    """The evaluations that the run logs at a step."""

    of_split: Evaluation
    # The corpora of data.evaluate, by entry.
    of_corpora: Mapping[str, Evaluation]


@dataclasses.dataclass
class Run:
    """One start of a run: the resources that it holds open, and its progress.

    `to_end` trains the run to its last step. All processes of a job call the same methods in the
    same order. Only process 0 owns the run; in the others, `progress`, `directory` and `sinks` do
    nothing.
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
    # Says whether another process has taken over the run.
    lost: Callable[[], bool]
    # The directory of a profiler's trace; None for no trace.
    traces: Path | None

    # `to_end` sets these fields when it restores or initializes the state.
    checkpoints: Checkpoints = dataclasses.field(init=False)
    stack: Stack = dataclasses.field(init=False)
    clock: Clock = dataclasses.field(init=False)
    # The number of steps that are done.
    step: int = dataclasses.field(init=False)
    # The sha256 of files that the run has read before its first step, by setting.
    read_files: dict[str, str] = dataclasses.field(init=False)
    # The code of the starts of this run, each version once. This start is the last entry.
    code: list[dict[str, Any]] = dataclasses.field(init=False)
    # The step at which a trial diverged, by trial number. The step is None if the run was resumed
    # from a checkpoint of an earlier version, which did not record it.
    diverged_at: dict[int, int | None] = dataclasses.field(init=False)

    # The last validation of this start.
    validation: Validation | None = None
    # Numbers the calls of `_should_stop`. All processes make equally many of them.
    questions: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def finished_results(self) -> list[dict[str, Any]] | None:
        """Returns the stored results of a run that has ended; None if it has not ended."""
        path = self.path / RESULTS

        def stored() -> list[dict[str, Any]] | None:
            return read_results(path, self.config) if path.exists() else None

        return agreement.call_in_process_0(stored)

    def to_end(self) -> list[dict[str, Any]]:
        """Trains the remaining steps of the run; stores and returns the results of its trials."""
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
            self._train(is_evaluated=record.get('evaluated', True))
            trial_results, documents = self._measure()
        # The results include the time to close the checkpoints, so they are written afterwards.
        return agreement.call_in_process_0(lambda: self._write_results(trial_results, documents))

    def _restore_or_initialize(self, compiled: Program) -> Mapping[str, Any]:
        """Restores the newest checkpoint that is not damaged; if there is none, initializes step 0.

        Returns the record that `_save` stored with the checkpoint; {} at step 0. Records of earlier
        versions lack some fields. Raises CheckpointError if the checkpoint was trained on other
        data.
        """
        # The state of the trials. `read_files` are the hashes of files that step 0 depends on.
        restored = self.checkpoints.restore(compiled.abstract_state)
        if restored is None:
            record: Mapping[str, Any] = {}
            self.read_files = self.initial.hashes()
            state = compiled.init(self.initial.load())
        else:
            state, record = restored
            self._require_same_data(record['data'])
            self.read_files = record.get('given', {})

        self.stack = Stack(self.config, compiled, self.rows, state, self.corpora)
        self.step = self.stack.step
        self.clock = Clock(record, self.step)

        # The trials that have diverged, and at which step: None if an earlier version saved the
        # checkpoint, which did not record it.
        alive_X = self.stack.alive_X
        diverged_at_X = record.get('diverged_at') or [None] * len(alive_X)
        self.diverged_at = {}
        for trial, step in enumerate(diverged_at_X):
            if not alive_X[trial]:
                self.diverged_at[trial] = step

        if restored is not None:
            # Checkpoints of later steps are damaged. The run saves these steps again.
            self.checkpoints.discard_after(self.step)
            log.info('resuming at step %s', f'{self.step:,}')
        return record

    def _require_same_data(self, recorded: Mapping[str, Any]) -> None:
        """Raises CheckpointError if the data differ from those that a checkpoint has recorded."""
        changes = differences(recorded, identity_with(self.rows, self.corpora))
        if changes:
            raise CheckpointError(
                f'{self.path} was trained on data other than the current dataset '
                f'({", ".join(changes)}); use the interpreter and the data of its first start, or '
                'another workdir'
            )

    def _reopen_logs(self, record: Mapping[str, Any]) -> None:
        """Prepares the logs for training from the current step.

        The start before may have logged steps after its last checkpoint. They are trained again, so
        their lines are removed from metrics.jsonl. The sinks, such as TensorBoard, open at the
        current step.

        `record` is the record of the checkpoint from which the run resumes; {} at step 0.
        """
        is_evaluated = record.get('evaluated', True)
        # How many lines metrics.jsonl had at the checkpoint, and their checksum.
        written = record.get('metrics')

        def remove_later_lines() -> None:
            metrics = self.directory.metrics
            metrics.rewind(self.step, evaluated=is_evaluated, written=written)

        agreement.call_in_process_0(remove_later_lines)
        self.sinks.open(self.step)

        code_of_earlier_starts = record.get('code', [])
        self.code = agreement.call_in_process_0(
            lambda: results.with_code_of_this_start(self.path, code_of_earlier_starts)
        )

    def _train(self, is_evaluated: bool) -> None:
        """Trains to the last step, with evaluations and checkpoints on the way.

        After a signal to stop, it saves the state and raises Stopped.

        `is_evaluated` is False if an earlier start of the run was stopped at this step, before the
        evaluation that was due was complete. This start then begins with that evaluation.
        """
        with (
            contextlib.closing(self.stack.batches()) as batches,
            Trace(self.traces) as trace,
        ):
            placed_batches = self.clock.inputs(map(self.stack.place, batches))
            self.stop.defer_exit()  # from here on, a signal only asks to stop
            if not is_evaluated:
                is_evaluated = self._validate()
                if not is_evaluated:
                    raise self._stopped()

            self.progress.begin()
            while self.step < self.config.train.num_steps:
                boundary = self._train_to_boundary(placed_batches, trace)
                is_evaluated = True
                if boundary.evaluating:
                    # After a signal there is no evaluation. A signal during one ends it early.
                    is_evaluated = not boundary.stopping and self._validate()
                stopping = boundary.stopping or not is_evaluated
                if boundary.saving or stopping:
                    self._save(is_evaluated)
                if stopping:
                    raise self._stopped()

    def _train_to_boundary(self, batches: Iterator[dict[str, jax.Array]], trace: Trace) -> Boundary:
        """Takes and logs steps until an evaluation, a checkpoint or a stop is due."""
        first_step = self.step
        metrics: dict[str, jax.Array] = {}
        boundary = None
        self.clock.start()
        while boundary is None:
            batch = next(batches)
            trace.before_dispatch(self.stack.state)
            # Each iteration dispatches the next C steps to the devices. While they compute these,
            # the host logs the metrics of the C steps before.
            last_metrics = metrics
            metrics = self.stack.train(batch)
            if last_metrics:
                self._log_steps(self.step, last_metrics)
            self.step += self.config.train.steps_per_dispatch
            boundary = self._boundary()
        self._log_steps(self.step, metrics)
        jax.block_until_ready(self.stack.state)
        self.clock.pause((self.step - first_step) * tokens_per_step(self.config))
        return boundary

    def _boundary(self) -> Boundary | None:
        """Returns what is due after the current step; None if training continues.

        Raises Lost if a checkpoint is due, but another process has taken over the run.
        """
        train = self.config.train
        is_taken_over = self._is_taken_over()
        stopping = self._should_stop(also=is_taken_over)  # also True after a signal
        is_last = self.step == train.num_steps
        evaluating = is_last or self.step % train.eval_every == 0
        saving = is_last or stopping or self.step % train.checkpoint_every == 0
        if saving:
            self._raise_if_taken_over(is_taken_over, f'at step {self.step:,}')
        if not evaluating and not saving:
            return None
        return Boundary(evaluating, saving, stopping)

    def _log_steps(self, last_step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Shows and logs the metrics [C, X] of X trials in the C steps up to `last_step`.

        At multiples of train.log_every it logs, for each trial, the means over the C steps.
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
        """Returns the speed of training since the last record, by name (`SPEEDS`).

        `step` is the present step. 'mfu' is the model FLOPs utilization of Chowdhery et al. 2022,
        appendix B. It is absent on a CPU and on chips whose peak rate is unknown.
        """
        lap = self.clock.lap(step)
        speeds = {'tokens_per_second': lap.steps_per_second * tokens_per_step(self.config)}
        devices = self.stack.program.mesh.devices
        peak = peak_flops(devices.flat[0].device_kind)
        if peak is not None:
            flops_per_second = lap.steps_per_second * flops_per_step(self.config)
            speeds['mfu'] = flops_per_second / (peak * devices.size)
        speeds['input_wait_fraction'] = lap.input_wait_fraction
        return speeds

    def _validate(self) -> bool:
        """Evaluates the validation split and the corpora of data.evaluate, and logs the results.

        Returns True if the evaluation is complete. If a signal ends it early, nothing is logged.
        """
        with self.progress.phase('evaluating'):
            evaluation = self.stack.evaluate('validation', self._should_stop)
            if evaluation is None:
                return False
            of_corpora = self.stack.evaluate_corpora(self._should_stop)
            if of_corpora is None:
                return False
        self.validation = Validation(evaluation, of_corpora)
        self._record(results.eval_record(self.step, evaluation, of_corpora))
        self.progress.update_validation_loss(self.step, evaluation.values['loss'])
        return True

    def _save(self, is_evaluated: bool) -> None:
        """Saves a checkpoint: the state of the trials, and a record of what a resumed run needs.

        `is_evaluated` is False if an evaluation is due at this step and has not been made. Raises
        Lost if another process has taken over the run.
        """
        # `_boundary` has checked this, but an evaluation since then may have taken minutes.
        self._raise_if_taken_over(self._is_taken_over(), f'at step {self.step:,}')
        num_trials = len(self.config.trials.trials())
        record = {
            # Metrics are on the disk before the checkpoint, so a resumed file has no gap.
            'metrics': agreement.call_in_process_0(self.directory.metrics.flush),
            'data': identity_with(self.rows, self.corpora),
            **self.clock.seconds,
            # For each trial the step at which it diverged, or None.
            'diverged_at': [self.diverged_at.get(trial) for trial in range(num_trials)],
            'evaluated': is_evaluated,
            # The hashes of files that were read before step 0, and the code of all starts.
            'given': self.read_files,
            'code': self.code,
        }
        with self.progress.phase('saving'):
            self.checkpoints.save(self.step, self.stack.state, record)

    def _measure(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Evaluates the trained models on all splits.

        Returns the results of the trials, and the losses of all trials on each document.
        """
        # Once the last checkpoint is complete, a signal may end the process at once.
        self.checkpoints.wait()
        self.stop.allow_exit()

        evaluations, of_corpora = self._final_evaluations()
        self._raise_if_taken_over(self._is_taken_over(), 'after its last step')

        # What the results say besides metrics: times, software and devices.
        compiled = self.stack.program
        costs = {
            **self.clock.seconds,
            'compile_seconds': compiled.compile_seconds,
            'tokens_per_second': self.clock.tokens_per_second,
            'lifting': compiled.lifting,
        }
        provenance = agreement.call_in_process_0(
            lambda: results.provenance_of(self.path, self.read_files, self.code)
        )

        with self.progress.phase('measuring'):
            trial_results = results.trial_results(
                self.stack, evaluations, costs, provenance, self.diverged_at, of_corpora
            )
        documents = results.document_results(self.stack, evaluations, trial_results)
        return trial_results, documents

    def _final_evaluations(self) -> tuple[dict[str, Evaluation], Mapping[str, Evaluation]]:
        """Returns the evaluations after the last step: of splits, and of further corpora.

        The splits are all but 'train'. The setting data.evaluate names the corpora.
        """
        # Training has evaluated the validation split and the corpora after its last step. It has
        # not if this start has resumed from the checkpoint of the last step.
        validation = self.validation
        evaluations: dict[str, Evaluation] = {}
        of_corpora: Mapping[str, Evaluation] | None
        with self.progress.phase('evaluating'):
            for split in self.rows.splits[1:]:  # the first one is 'train'
                if split == 'validation' and validation is not None:
                    evaluation: Evaluation | None = validation.of_split
                else:
                    evaluation = self.stack.evaluate(split)
                assert evaluation is not None  # it is None only if it is told to stop
                evaluations[split] = evaluation

            if validation is not None:
                of_corpora = validation.of_corpora
            else:
                of_corpora = self.stack.evaluate_corpora()
            assert of_corpora is not None  # it is None only if it is told to stop
        return evaluations, of_corpora

    def _write_results(
        self, trial_results: list[dict[str, Any]], documents: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Writes the last files of a run and returns the results of its trials, in process 0.

        result.json is written after the other files. If it is missing, the next start writes all
        of them again. Raises Lost if another process has taken over the run.
        """
        if self._is_taken_over():
            raise Lost(f'{self.path} was taken over before its results were written')
        for result in trial_results:
            result['checkpoint_seconds'] = self.checkpoints.stall_seconds
        metrics = self.directory.metrics
        metrics.check()  # raises an error if metrics.jsonl was damaged during training
        write_json(self.path / 'documents.json', documents, indent=None)
        final = results.final_record(trial_results)
        metrics.append(final)
        metrics.flush()
        write_json(self.path / RESULTS, trial_results)
        self.sinks.write(final)  # sinks, such as TensorBoard, show the metrics elsewhere
        num_diverged = sum(result['status'] != results.FINISHED for result in trial_results)
        if num_diverged > 0:
            log.warning('%s: %s of %s trials diverged', self.path, num_diverged, len(trial_results))
        return trial_results

    def _record(self, record: Mapping[str, Any]) -> None:
        """Writes a record to metrics.jsonl and to the sinks."""
        self.directory.metrics.append(record)
        self.sinks.write(record)

    def _should_stop(self, also: bool = False) -> bool:
        """Whether to stop, after a signal to any process or if `also` is true in one.

        All processes get the same answer, so they stop at the same step.
        """
        return self.stop.should_stop(next(self.questions), has_other_reason=also)

    def _stopped(self) -> Stopped:
        """Returns the error with which a start ends after a signal."""
        num_steps = self.config.train.num_steps
        return Stopped(f'stopped at step {self.step:,} of {num_steps:,}, state saved')

    def _is_taken_over(self) -> bool:
        """Whether another program trains the run now; False except in process 0."""
        return agreement.is_process_0() and (self.lost() or self.directory.lost())

    def _raise_if_taken_over(self, is_taken_over: bool, when: str) -> None:
        """Raises Lost in every process of the job if `is_taken_over` is True in one.

        `when` ends the message, as in 'at step 100'.
        """
        if agreement.any_process(is_taken_over):
            raise Lost(f'{self.path} was taken over {when}')


def _open_rows(
    config: Config, path: Path, progress: Progress
) -> tuple[Rows, tuple[EvaluationCorpus, ...]]:
    """Opens the rows of a run and the corpora of data.evaluate.

    Raises ConfigError if the processes of a job get different data.
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
    """Whether an earlier start of the run at `path` has compiled, and read train.init_from."""
    files = [path / LIFTING, path / RESULTS]
    return agreement.call_in_process_0(lambda: any(file.exists() for file in files))
