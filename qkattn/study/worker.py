"""A worker of a study: acquires the lease of a run, trains it, extends the plan, and repeats.

Any number of workers may share a study's directory. A run is trained by one of them at a time, and
the run of a worker that died is resumed from its last checkpoint. A worker may be a job of several
processes, of which process 0 holds the leases and writes the files of the study.
"""

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import jax
from jax.errors import JaxRuntimeError

from qkattn.config import Config, Study, from_json, to_json
from qkattn.data.pipeline import check_documents
from qkattn.data.tasks.task_registry import rows_of
from qkattn.errors import (
    CheckpointError,
    ConfigError,
    DiskError,
    InUseError,
    Lost,
    ReadError,
    Stopped,
)
from qkattn.jobs import agreement, cli
from qkattn.jobs.agreement import owned
from qkattn.jobs.display import StudyLeft, waiting
from qkattn.jobs.signals import StopRequest
from qkattn.storage import leases, ledger
from qkattn.storage.buckets import is_url
from qkattn.storage.files import below, check_directory, make_directory, write_atomic
from qkattn.storage.leases import locked
from qkattn.storage.records import read_json
from qkattn.study import declaration, plan
from qkattn.study.arms import PlannedArm, build_arms
from qkattn.study.plan import PlannedRun
from qkattn.study.tuning import SINGLE
from qkattn.train import sharding
from qkattn.train.checks import check_data_if_here, check_parts
from qkattn.train.loop import require_same_settings, train
from qkattn.train.sharding import require_memory

log = logging.getLogger(__name__)


# How long a worker waits, in seconds, before it looks for a run again: while others hold runs, and
# where one was just refused or given up.
_WAIT_FOR_OTHERS = 10.0
_WAIT_FOR_REFUSED = 1.0
# Seconds between two looks at the directory while it waits.
_TICK = 0.1


def run(study: Study, workdir: str | Path, *, arms: list[PlannedArm] | None = None) -> Path:
    """Trains until every run of the study has its result, and returns the study's directory.

    The same call resumes, and may run beside other workers; while they hold all runs that are left,
    it waits. A run that cannot be trained does not stop the others. `arms`: None makes them.

    Raises ConfigError for an impossible setting or directory, and at the end if runs could not be
    trained; Stopped on SIGTERM or Ctrl-C, with the state saved.
    """
    require_same_settings(study)
    path = check_directory(workdir)
    reason_of_failed: dict[str, str] = {}  # by the id of a run that cannot be trained
    with StopRequest() as stop:
        worker = owned(lambda: _Worker(study, path, arms or build_arms(study), stop))
        while True:
            leased = agreement.on_owner(lambda: worker.lease_next(reason_of_failed))
            if leased is None:
                break
            if leased:  # {} where others hold all runs that are left
                _train(path, leased, worker, reason_of_failed)
            if agreement.any_process(stop.requested):
                raise Stopped('stopped between two runs')
    if reason_of_failed:
        number = '1 run' if len(reason_of_failed) == 1 else f'{len(reason_of_failed)} runs'
        reasons = [f'{run_id}: {reason}' for run_id, reason in reason_of_failed.items()]
        raise ConfigError(f'{number} could not be trained: {"; ".join(reasons)}')
    return path


@dataclasses.dataclass
class _Worker:
    """Chooses the next run to train; in a job of several processes, on process 0."""

    study: Study
    path: Path
    arms: list[PlannedArm]
    stop: StopRequest
    lease: leases.Lease | None = None  # of the run that `lease_next` has returned
    refused: set[str] = dataclasses.field(default_factory=set)  # tried again after the others
    _leased: PlannedRun | None = None  # the run that `lease_next` has returned
    _last_holders: dict[str, str] = dataclasses.field(default_factory=dict)  # at the last wait
    # When `study_left` last looked: the other runs without a result, and all that are held.
    _others: list[PlannedRun] = dataclasses.field(default_factory=list)
    _held: set[str] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        """Checks and declares the study."""
        study = self.study
        path = self.path
        declaration.require_no_run(path)
        for name in ('lock', 'leases', 'runs', 'plots'):
            below(path, name)
        declaration.require_chain(path, study, self.arms)
        # Before the directory is created, so that a refused study leaves nothing behind.
        for run in of_each_model(left_of(study, self.arms, path)):
            sharding.require_devices(run.config.mesh)
            require_memory(run.config)
            check_parts(run.config)
            with waiting(study.name, 'preparing data'):
                check_data(study, run.config)
        make_directory(path)
        self._declared = ledger.digest(declaration.declare(path, study, self.arms))

    def lease_next(self, failed: Collection[str]) -> dict[str, Any] | None:
        """Acquires the lease of the next run that is not in `failed`; describes the run as JSON.

        {} after a while of waiting if others hold all runs that are left; None if none is left. A
        run that was in use, or was lost to another worker, is tried again after the others.
        """
        runs_left = [run for run in self._write_plan() if run.id not in failed]
        self.lease = None
        for run in runs_left:
            if run.id in self.refused:
                continue
            self.lease = leases.acquire(self.path / 'leases', run.id)
            if self.lease is not None:
                self._leased = run
                self._others = [other for other in runs_left if other is not run]
                purpose = run.knob or run.stage
                title = run.arm.title
                return {
                    'run': run.id,
                    'config': to_json(run.config),
                    'directory': run.directory,
                    'label': title if purpose == SINGLE else f'{title} {purpose}',
                }
        self.refused.clear()
        if not runs_left:
            return None
        self._wait(runs_left)
        return {}

    def study_left(self) -> StudyLeft:
        """What is left beside the run that `lease_next` has returned, as others have gone on."""
        with contextlib.suppress(OSError, ReadError):  # else what was known before
            self._others = [run for run in self._others if not self._is_finished(run)]
            self._held = set(leases.holders(self.path / 'leases'))
        assert self._leased is not None
        waiting_work = sum(run.work for run in self._others if run.id not in self._held)
        return StudyLeft(
            runs=len(self._others),
            waiting_work=waiting_work / self._leased.work,
            workers=len({self._leased.id, *self._held}),
        )

    def _is_finished(self, run: PlannedRun) -> bool:
        """Whether a run has its result; never in a bucket, which would be asked for every run."""
        return not is_url(self.path) and (self.path / run.directory / 'result.json').exists()

    def _write_plan(self) -> list[PlannedRun]:
        """Writes the files of the study; returns the runs without result.

        Where arms or seeds were added meanwhile, the workers that know them write the files.
        """
        study = self.study
        path = self.path
        # Results are read and the files written under one lock, whoever else writes.
        with locked(path / 'lock'):
            results = plan.results_in(path)
            runs = plan.runs(study, self.arms, results)
            if ledger.digest(read_json(path / 'study.json', {})) == self._declared:
                write_atomic(path / 'plan.jsonl', plan.lines(study, runs))
                write_atomic(path / 'results.jsonl', plan.result_lines(study, runs, results))
        return plan.left(runs, results)

    def _wait(self, runs_left: list[PlannedRun]) -> None:
        """Waits until one of the runs is finished, or a lease may have been given up.

        Says who holds which run, unless it has said so before.
        """
        holders = leases.holders(self.path / 'leases')
        if holders and holders != self._last_holders:
            directory_of_run = {run.id: run.directory for run in runs_left}
            held = []
            for run_id, holder in holders.items():
                held.append(f'{directory_of_run.get(run_id, run_id)}, held by {holder}')
            log.info('waiting for %s', '; '.join(held))
        self._last_holders = holders
        end = time.monotonic() + (_WAIT_FOR_OTHERS if holders else _WAIT_FOR_REFUSED)
        while time.monotonic() < end and not self.stop.requested:
            if any(self._is_finished(run) for run in runs_left):
                return
            time.sleep(_TICK)


def _train(
    path: Path, leased: dict[str, Any], worker: _Worker, reason_of_failed: dict[str, str]
) -> None:
    """Trains the run that `worker` holds the lease of; `leased` describes it (`lease_next`).

    Enters a run that cannot be trained in `reason_of_failed`.
    """
    run_id = leased['run']
    with cast(leases.Lease, worker.lease) as lease:
        try:
            train(
                from_json(Config, leased['config']),
                below(path, *leased['directory'].split('/')),
                label=leased['label'],
                study=worker.study_left,
                lost=lambda: lease.lost,
            )
        except (InUseError, Lost) as error:
            log.warning('%s; continuing with another run', error)
            worker.refused.add(run_id)
        except DiskError:
            raise  # no other run could be saved either
        except (ConfigError, CheckpointError, JaxRuntimeError) as error:
            outcome = cli.outcome(error)
            # Out of memory is a fault of this run; other errors of XLA are bugs, or of the machine.
            if outcome is None:
                raise
            # In a job, the other processes may not have it, and would wait for this one.
            if isinstance(error, JaxRuntimeError) and jax.process_count() > 1:
                raise
            reason, _ = outcome
            log.error('skipping %s: %s', leased['directory'], reason)
            reason_of_failed[run_id] = reason


def of_each_model(runs: list[PlannedRun]) -> list[PlannedRun]:
    """The longest run of each model on each corpus; `runs` begin with the longest."""
    run_of_model = {(run.config.data, run.config.model): run for run in reversed(runs)}
    return list(run_of_model.values())


def check_data(study: Study, config: Config) -> None:
    """Opens the data of a run; ConfigError where they do not fit it, or cannot decide the study."""
    rows = rows_of(config)
    if study.tuning.seeds:
        check_documents(rows, config.data)


def check_start(study: Study, arms: list[PlannedArm], path: Path | None) -> list[str]:
    """Checks what a worker checks before it trains, for a dry run, which writes nothing to `path`.

    Devices and memory are left out, as the study may be trained elsewhere. Returns why data could
    not be checked here, a sentence each. ConfigError as `run`.
    """
    if path is None:
        runs_left = plan.left(plan.runs(study, arms, _no_results), _no_results)
    else:
        declaration.check(path, study, arms)
        runs_left = left_of(study, arms, path)
    reasons: list[str] = []
    for run in of_each_model(runs_left):
        check_parts(run.config)
        reason = check_data_if_here(run.config, study.name, functools.partial(check_data, study))
        if reason is not None and reason not in reasons:
            reasons.append(reason)
    return reasons


def _no_results(run: PlannedRun) -> None:
    """The results of a run in a study that has not begun."""


def left_of(study: Study, arms: list[PlannedArm], path: Path) -> list[PlannedRun]:
    """The runs known so far that have no result, in the order in which workers take them."""
    results = plan.results_in(path)
    return plan.left(plan.runs(study, arms, results), results)
