"""A worker of a study: acquires the lease of a run, trains it, extends the plan, and repeats.

Any number of workers may share a study's directory. A run is trained by one of them at a time, and
the run of a worker that died is resumed from its last checkpoint. A worker may be a job of several
processes, of which process 0 holds the leases and writes the files of the study.
"""

import dataclasses
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
from qkattn.errors import CheckpointError, ConfigError, DiskError, InUseError, Lost, Stopped
from qkattn.jobs import agreement, cli
from qkattn.jobs.agreement import owned
from qkattn.jobs.display import StudyLeft, waiting
from qkattn.jobs.signals import StopRequest
from qkattn.storage import leases, ledger
from qkattn.storage.buckets import is_url
from qkattn.storage.files import check_directory, make_directory, write_atomic
from qkattn.storage.leases import locked
from qkattn.storage.records import read_json
from qkattn.study import declaration, plan
from qkattn.study.arms import MatchedArm, build_arms
from qkattn.study.plan import PlannedRun
from qkattn.study.tuning import SINGLE
from qkattn.train import sharding
from qkattn.train.loop import require_same_settings, train
from qkattn.train.sharding import require_memory

log = logging.getLogger(__name__)


def run(study: Study, workdir: str | Path, *, arms: list[MatchedArm] | None = None) -> Path:
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
    arms: list[MatchedArm]
    stop: StopRequest
    lease: leases.Lease | None = None  # of the run that `lease_next` has returned
    refused: set[str] = dataclasses.field(default_factory=set)  # tried again after the others
    _held: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks and declares the study."""
        study, path = self.study, self.path
        declaration.require_no_run(path)
        declaration.require_chain(path, study, self.arms)
        # Before the directory is created, so that a refused study leaves nothing behind.
        left = reversed(left_of(study, self.arms, path))
        # Of each model on each corpus the longest run.
        for run in {(run.config.data, run.config.model): run for run in left}.values():
            sharding.require_devices(run.config.mesh)
            require_memory(run.config)
            with waiting(study.name, 'preparing data'):
                rows = rows_of(run.config)
            if study.tuning.seeds:
                check_documents(rows, run.config.data)
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
        others = sum(one.work for one in left) - run.work
        workers = len(leases.holders(self.path / 'leases'))
        return {
            'run': run.id,
            'config': to_json(run.config),
            'directory': run.directory,
            'label': f'{run.arm.title} {run.knob or run.stage}'.removesuffix(f' {SINGLE}'),
            'left': dataclasses.asdict(StudyLeft(len(left) - 1, others / run.work / workers)),
        }

    def _write_plan(self) -> list[PlannedRun]:
        """Writes the files of the study; returns the runs without result.

        Where arms or seeds were added meanwhile, the workers that know them write the files.
        """
        study, path = self.study, self.path
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
                path / leased['directory'],
                label=leased['label'],
                study=StudyLeft(**leased['left']),
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


def left_of(study: Study, arms: list[MatchedArm], path: Path) -> list[PlannedRun]:
    """The runs known so far that have no result, in the order in which workers take them."""
    results = plan.results_in(path)
    return plan.left(plan.runs(study, arms, results), results)
