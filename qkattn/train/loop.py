"""The training loop: one run of X trials, from its directory to its results, resumable anywhere."""

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qkattn.config import Config, Study, differences, to_json
from qkattn.config.imports import import_paths
from qkattn.data.tasks.rows import Rows
from qkattn.data.tasks.task_registry import rows_of
from qkattn.data.tokenizers.vocabulary import as_recorded
from qkattn.errors import CheckpointError, ConfigError, Lost, Stopped
from qkattn.jobs import agreement
from qkattn.jobs.agreement import owned, owner_first
from qkattn.jobs.display import Progress, StudyLeft, waiting
from qkattn.jobs.signals import StopRequest
from qkattn.model.sites import validate
from qkattn.storage.files import below, check_directory, make_directory
from qkattn.storage.metrics_log import MetricsFile
from qkattn.storage.records import read_json, read_results, write_json
from qkattn.storage.run_directory import RunDirectory
from qkattn.storage.sinks import Sinks
from qkattn.train import exported, program, results, sharding
from qkattn.train.checkpoint import Checkpoints, recorded_tokenizers
from qkattn.train.checks import check_parts
from qkattn.train.program import Program
from qkattn.train.timing import PARTS, Clock, traced
from qkattn.train.trials import Evaluation, Stack

SEEN_WITHIN = 60.0  # seconds, for others to see a file that process 0 has written

# The record before step 0; checkpoints of earlier versions lack some of its fields. `given`: what
# the run began with, by setting, and its sha256. `code`: of the starts that led to it.
_FIRST: dict[str, Any] = {'diverged_at': None, 'evaluated': True, 'metrics': None, 'given': {}}
_FIRST |= {'code': []} | dict.fromkeys(('train_seconds', *PARTS), 0.0)

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
    """Trains the stack of trials to its end and returns one result per trial, in trial order.

    A finished run returns its results at once; an unfinished one resumes at its newest sound
    checkpoint, bitwise as if it had never stopped (same devices, same versions). The progress
    display shows `label` and, in process 0 of a job, what `study` returns. `lost`, called there
    after every dispatch, says whether another process has taken over the run. A trace of three
    dispatches goes to the directory `profile`.

    ConfigError: an invalid setting, or a workdir in use or of another configuration.
    CheckpointError: checkpoints are damaged, or of other data. Stopped: SIGTERM or Ctrl-C; the
    state is saved once a step was trained. Lost: the run was taken over.
    """
    validate(config)
    require_same_settings(config)
    num_steps = config.train.num_steps
    check_parts(config)
    path = check_directory(workdir)
    trials = config.trials.trials()
    traces = None if profile is None else make_directory(profile, name='profile')
    if traces is not None:
        below(traces, 'plugins', 'profile')  # where the profiler writes
    sharding.require_devices(config.mesh)
    agreement.on_owner(lambda: sharding.require_memory(config))
    tokens = len(trials) * config.train.batch_size * config.model.context  # of a step
    with contextlib.ExitStack() as exits:
        progress = exits.enter_context(
            owned(lambda: Progress(label, num_steps, tokens_per_step=tokens, study=study))
        )
        recorded = agreement.on_owner(lambda: recorded_tokenizers(path, config.data))
        with progress.phase('preparing data'), as_recorded(*recorded):
            rows = owner_first(lambda: rows_of(config))
        agreement.require_same('dataset', json.dumps(rows.identity()))
        given = functools.cache(functools.partial(given_params, config))
        files = [path / name for name in ('lifting.json', 'result.json')]
        if not agreement.on_owner(lambda: any(file.exists() for file in files)):
            given()  # refused before there is a run; later starts take them from a checkpoint
        directory = exits.enter_context(owned(lambda: RunDirectory(path, config)))
        stop = exits.enter_context(StopRequest())
        sinks = exits.enter_context(contextlib.closing(owned(lambda: Sinks(config, path))))
        require_shared(path)
        results_path = path / 'result.json'
        finished = agreement.on_owner(
            lambda: read_results(results_path, config) if results_path.exists() else None
        )
        if finished is not None:
            return finished
        with progress.phase('compiling'):
            compiled = build_program(config, path, given)

        def taken_over() -> bool:
            return agreement.owner() and (lost() or directory.lost())

        with contextlib.closing(
            Checkpoints(path / 'checkpoints', keep=config.train.keep)
        ) as checkpoints:
            with progress.phase('initializing'):
                stack, record = start_stack(config, compiled, rows, checkpoints, given)
            metrics = directory.metrics
            run = _Run(path, stack, tokens, metrics, sinks, progress, checkpoints, stop, taken_over)
            trial_results, documents = run.to_end(record, traces)

        def write() -> list[dict[str, Any]]:
            """Writes what a run ends with; a start that finds no results makes all of it again."""
            if taken_over():
                raise Lost(f'{path} was taken over before its results were written')
            for result in trial_results:
                result['checkpoint_seconds'] = checkpoints.stall_seconds
            metrics.check()
            write_json(path / 'documents.json', documents, indent=None)
            final = results.final_record(trial_results)
            metrics.append(final)
            metrics.flush()
            write_json(results_path, trial_results)
            sinks.write(final)
            if diverged := sum(result['status'] != results.FINISHED for result in trial_results):
                log.warning('%s: %s of %s trials diverged', path, diverged, len(trial_results))
            return trial_results

        return agreement.on_owner(write)


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
    (_, first), *_ = by_rank = agreement.from_all([seen, str(directory)])
    for rank, (sees, named) in enumerate(by_rank):
        if not sees:
            raise ConfigError(
                f'workdir={named} of process {rank} is not {first} of process 0; give all '
                'processes the same directory, on a file system that their hosts share'
            )


def given_params(config: Config) -> dict | None:
    """The parameters of train.init_from; ConfigError where they do not fit the model."""
    if (source := config.train.init_from) is None:
        return None
    remedy = "name it in the model's settings too, or start from other parameters"
    model, params = exported.load(source, import_paths(to_json(config.model)), remedy)
    exported.check(config.model, params, source)
    changes = differences(to_json(model), to_json(config.model))
    # Most that may be null follow from others, and shapes tell what they are.
    kept = ('logit_cap: ', 'window: ', 'encoder_variant: ', 'cross_variant: ')
    if changes := [c for c in changes if 'null' not in c or c.startswith(kept)]:
        log.warning('train.init_from=%s has other settings: %s', source, ', '.join(changes))
    return params


def build_program(
    config: Config, directory: Path, given: Callable[[], dict | None] = lambda: None
) -> Program:
    """Compiles; the lifting is chosen once per run, since the last bits depend on it."""
    path = directory / 'lifting.json'
    recorded = agreement.on_owner(
        lambda: read_json(path, {'lifting': str})['lifting'] if path.exists() else None
    )
    built = program.build(config, recorded, given)
    if recorded is None:
        chosen = {'lifting': built.lifting, 'seconds_per_step': built.measured}
        agreement.on_owner(lambda: write_json(path, chosen))
    return built


def start_stack(
    config: Config,
    built: Program,
    rows: Rows,
    checkpoints: Checkpoints,
    given: Callable[[], dict | None],
) -> tuple[Stack, dict[str, Any]]:
    """The trials at the newest sound checkpoint, or before step 0, and the checkpoint's record."""
    restored = checkpoints.restore(built.abstract_state)
    if restored is None:
        record = _FIRST
        if (params := given()) is not None:
            sha256 = exported.fingerprint(params)
            agreement.require_same(f'train.init_from={config.train.init_from}', sha256)
            record = record | {'given': {'train.init_from': sha256}}
        return Stack(config, built, rows, built.init()), record
    state, record = restored
    if changes := differences(record['data'], rows.identity()):
        raise CheckpointError(
            f'{checkpoints.directory.parent} was trained on data other than the current dataset '
            f'({", ".join(changes)}); use the interpreter and the data of its first start, or '
            'another workdir'
        )
    stack = Stack(config, built, rows, state)
    checkpoints.discard_after(stack.step)
    log.info('resuming at step %s', f'{stack.step:,}')
    return stack, _FIRST | record


@dataclasses.dataclass
class _Run:
    """One start of a run, from a checkpoint to the last step."""

    path: Path
    stack: Stack
    tokens_per_step: int
    metrics: MetricsFile
    sinks: Sinks
    progress: Progress
    checkpoints: Checkpoints
    stop: StopRequest
    lost: Callable[[], bool]
    asked: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    given: dict[str, str] = dataclasses.field(default_factory=dict)  # as in the record
    code: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    validated: tuple[int, Evaluation] | None = None  # the newest, and its step
    diverged_at: dict[int, int | None] = dataclasses.field(default_factory=dict)  # by trial

    def to_end(
        self, record: dict[str, Any], traces: Path | None
    ) -> tuple[list[dict], dict[str, Any]]:
        """Trains from the checkpoint of `record` on; the results of trials and documents."""
        stack = self.stack
        train = self.stack.config.train
        step = self.stack.step
        alive_X = stack.alive_X
        kept = {'evaluated': record['evaluated'], 'written': record['metrics']}
        agreement.on_owner(lambda: self.metrics.rewind(step, **kept))
        self.sinks.open(step)
        self.given = record['given']
        self.code = agreement.on_owner(lambda: results.with_this_start(self.path, record['code']))
        # A step that the record of a checkpoint lacks stays unknown, None.
        steps_X = record['diverged_at'] or [None] * len(alive_X)
        self.diverged_at = {x: at for x, at in enumerate(steps_X) if not alive_X[x]}
        clock = Clock(record)
        unwritten = None
        with (
            contextlib.closing(stack.batches()) as batches,
            contextlib.closing(
                traced(traces, clock.inputs(map(stack.place, batches)), lambda: stack.state)
            ) as placed,
        ):
            self.stop.defer_exit()
            stopped = f'stopped at step %s of {train.num_steps}, state saved'
            if not record['evaluated'] and not self._validate(step):
                raise Stopped(stopped % step)
            self.progress.begin()
            since = step
            clock.start()
            for batch in placed:
                metrics = stack.train(batch)
                # Metrics are fetched one dispatch late, so that the device never waits for them.
                self._write(unwritten, clock)
                step += train.steps_per_dispatch
                unwritten = step, metrics
                lost = self.lost()
                stopping = self._should_stop(also=lost)
                last = step == train.num_steps
                evaluating = last or step % train.eval_every == 0
                saving = last or stopping or step % train.checkpoint_every == 0
                if saving and agreement.any_process(lost):
                    raise Lost(f'{self.path} was taken over at step {step}')
                if not (evaluating or saving):
                    continue
                self._write(unwritten, clock)
                unwritten = None
                jax.block_until_ready(stack.state)
                clock.pause((step - since) * self.tokens_per_step)
                stopping = stopping or (evaluating and not self._validate(step))
                if saving or stopping:
                    if agreement.any_process(self.lost()):  # an evaluation may take minutes
                        raise Lost(f'{self.path} was taken over at step {step}')
                    record = {
                        # On the disk before the checkpoint: a resumed file has no gap.
                        'metrics': agreement.on_owner(self.metrics.flush),
                        'data': stack.rows.identity(),
                        **clock.seconds,
                        'diverged_at': [self.diverged_at.get(x) for x in range(len(alive_X))],
                        'evaluated': not (evaluating and stopping),
                        'given': self.given,
                        'code': self.code,
                    }
                    with self.progress.phase('saving'):
                        self.checkpoints.save(step, stack.state, record)
                if stopping:
                    raise Stopped(stopped % step)
                since = step
                clock.start()
        return self._results(clock)

    def _should_stop(self, also: bool = False) -> bool:
        """Whether to stop here: the same in all processes, which ask equally often."""
        return self.stop.should_stop(next(self.asked), also=also)

    def _validate(self, step: int) -> bool:
        """Records an evaluation; False if a stop request came before its end."""
        with self.progress.phase('evaluating'):
            evaluation = self.stack.evaluate('validation', self._should_stop)
        if evaluation is None:
            return False
        self.validated = step, evaluation
        self._record(results.eval_record(step, evaluation))
        self.progress.evaluated(step, evaluation.values['loss'])
        return True

    def _record(self, record: dict[str, Any]) -> None:
        self.metrics.append(record)
        self.sinks.write(record)

    def _write(self, unwritten: tuple[int, dict] | None, clock: Clock) -> None:
        """Shows and logs the metrics of a dispatch: means over its steps by trial."""
        if unwritten is None:
            return
        step, metrics = unwritten
        jax.block_until_ready(metrics)
        with clock.part('logging_seconds'):
            loss_CX = np.asarray(metrics['loss'], np.float64)
            for x, loss_C in enumerate(loss_CX.T):
                if (bad_steps := np.flatnonzero(~np.isfinite(loss_C))).size:
                    self.diverged_at.setdefault(x, step - len(loss_C) + int(bad_steps[0]) + 1)
            if step % self.stack.config.train.log_every == 0:
                means = {n: np.asarray(v_CX, np.float64).mean(0) for n, v_CX in metrics.items()}
                self._record({'kind': 'train', 'step': step, **means})
        self.progress.update(step, loss_CX.mean(0))

    def _results(self, clock: Clock) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The results of the trials, and of the documents that they were evaluated on."""
        stack = self.stack
        self.checkpoints.wait()
        self.stop.allow_exit()
        evaluations = {}
        for split in stack.rows.splits[1:]:
            if split == 'validation' and self.validated and self.validated[0] == stack.step:
                evaluations[split] = self.validated[1]
                continue
            with self.progress.phase('evaluating'):
                evaluations[split] = stack.evaluate(split)
        if agreement.any_process(self.lost()):
            raise Lost(f'{self.path} was taken over after its last step')
        costs = {
            **clock.seconds,
            'compile_seconds': stack.program.compile_seconds,
            'tokens_per_second': clock.tokens_per_second,
            'lifting': stack.program.lifting,
        }
        provenance = agreement.on_owner(
            lambda: results.software_of(self.path, self.given, self.code)
        )
        with self.progress.phase('measuring'):
            by_trial = results.trial_results(
                stack, evaluations, costs, {'provenance': provenance}, self.diverged_at
            )
        return by_trial, results.document_results(stack, evaluations, by_trial)
