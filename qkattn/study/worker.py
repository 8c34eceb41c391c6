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


def run(study: Study, workdir: str | Path, *, arms: list[PlannedArm] | None = None) -> Path:
    """Trains until every run of the study has its result, and returns the study's directory.

    The same call resumes, and may run beside other workers; while they hold all runs that are left,
    it waits. A run that cannot be trained does not stop the others. `arms`: None makes them.

    Raises ConfigError for an impossible setting or directory, and at the end if runs could not be
    trained; Stopped on SIGTERM or Ctrl-C, with the state saved.
    """
    require_same_settings(study)
    path = check_directory(workdir)
    failed: dict[str, str] = {}
    with StopRequest() as stop:
        worker = owned(lambda: _Worker(study, path, arms or build_arms(study), stop))
        while (leased := agreement.on_owner(lambda: worker.lease_next(failed))) is not None:
            if leased:
                _train(path, leased, worker, failed)
            if agreement.any_process(stop.requested):
                raise Stopped('stopped between two runs')
    if failed:
        raise ConfigError(
            f'{len(failed)} run{"s" * (len(failed) > 1)} could not be trained: '
            + '; '.join(f'{run}: {reason}' for run, reason in failed.items())
        )
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
    _held: dict[str, str] = dataclasses.field(default_factory=dict)  # the runs last waited for
    _leased: PlannedRun | None = None
    # When `study_left` last looked: the others without a result, and all that are held.
    _others: list[PlannedRun] = dataclasses.field(default_factory=list)
    _trained: set[str] = dataclasses.field(default_factory=set)

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
        """The next run that is not in `failed`, whose lease this process then holds; JSON.

        {} after a while of waiting if others hold all runs that are left; None if none is left.
        """
        left = [run for run in self._write_plan() if run.id not in failed]
        self.lease = None
        for run in left:
            if run.id not in self.refused:
                self.lease = leases.acquire(self.path / 'leases', run.id)
            if self.lease is not None:
                break
        if self.lease is None:
            self.refused.clear()
            return self._wait(left) if left else None
        self._leased = run
        self._others = [other for other in left if other is not run]
        return {
            'run': run.id,
            'config': to_json(run.config),
            'directory': run.directory,
            'label': f'{run.arm.title} {run.knob or run.stage}'.removesuffix(f' {SINGLE}'),
        }

    def study_left(self) -> StudyLeft:
        """What is left beside the run that `lease_next` has returned, as others have gone on."""
        with contextlib.suppress(OSError, ReadError):  # else what was known before
            self._others = [run for run in self._others if not self._is_finished(run)]
            self._trained = set(leases.holders(self.path / 'leases'))
        assert self._leased is not None
        waiting = [run for run in self._others if run.id not in self._trained]
        return StudyLeft(
            runs=len(self._others),
            waiting_work=sum(run.work for run in waiting) / self._leased.work,
            workers=len({self._leased.id, *self._trained}),
        )

    def _is_finished(self, run: PlannedRun) -> bool:
        # A bucket would be asked once for every run.
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

    def _wait(self, left: list[PlannedRun]) -> dict[str, Any]:
        """Waits until a result has come, a lease may have been given up, or 10 s have passed."""
        held = leases.holders(self.path / 'leases')
        places = {run.id: run.directory for run in left}
        if held and held != self._held:
            by_run = (f'{places.get(run, run)}, held by {holder}' for run, holder in held.items())
            log.info('waiting for %s', '; '.join(by_run))
        self._held = held
        until = time.monotonic() + (10.0 if held else 1.0)
        while time.monotonic() < until and not self.stop.requested:
            done = ((self.path / place / 'result.json').exists() for place in places.values())
            if not is_url(self.path) and any(done):
                break
            time.sleep(0.1)
        return {}


def _train(path: Path, leased: dict[str, Any], worker: _Worker, failed: dict[str, str]) -> None:
    """Trains the run that `worker` holds the lease of; enters it in `failed` if it cannot."""
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
            worker.refused.add(leased['run'])
        except DiskError:
            raise  # no other run could be saved either
        except (ConfigError, CheckpointError, JaxRuntimeError) as error:
            # Out of memory is a fault of this run; other errors of XLA are bugs, or of the machine.
            known = cli.outcome(error)
            if known is None or isinstance(error, JaxRuntimeError) and jax.process_count() > 1:
                raise
            log.error('skipping %s: %s', leased['directory'], known[0])
            failed[leased['run']] = known[0]


def of_each_model(runs: list[PlannedRun]) -> list[PlannedRun]:
    """The longest run of each model on each corpus; `runs` begin with the longest."""
    by_model = {(run.config.data, run.config.model): run for run in reversed(runs)}
    return list(by_model.values())


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
        left = plan.left(plan.runs(study, arms, lambda run: None), lambda run: None)
    else:
        declaration.check(path, study, arms)
        left = left_of(study, arms, path)
    unchecked: dict[str, None] = {}  # in order, each once
    for run in of_each_model(left):
        check_parts(run.config)
        reason = check_data_if_here(run.config, study.name, functools.partial(check_data, study))
        if reason is not None:
            unchecked[reason] = None
    return list(unchecked)


def left_of(study: Study, arms: list[PlannedArm], path: Path) -> list[PlannedRun]:
    """The runs known so far that have no result, in the order in which workers take them."""
    results = plan.results_in(path)
    return plan.left(plan.runs(study, arms, results), results)
