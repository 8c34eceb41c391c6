"""A worker of a study: acquires the lease of a run, trains it, extends the plan, and repeats.

Any number of workers may share a study's directory. One worker at a time trains a run. If a worker
dies, another one resumes its run from the last checkpoint. A worker may be a job of several
processes. Its process 0 then holds the leases and writes the files of the study.
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
from qkattn.data.evaluation_corpora import open_corpora
from qkattn.data.pipeline import check_documents
from qkattn.data.tasks.rows import Rows
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
from qkattn.jobs.agreement import make_in_process_0
from qkattn.jobs.display import StudyLeft, waiting
from qkattn.jobs.signals import StopRequest
from qkattn.storage import leases, ledger
from qkattn.storage.buckets import is_url
from qkattn.storage.files import check_directory, join_without_links, make_directory, write_atomic
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


# While other workers hold all runs, a worker looks for a free run again after this many seconds.
_WAIT_FOR_OTHERS = 10.0
# If no worker holds a run, because one was just refused or given up, it looks again after these.
_WAIT_FOR_REFUSED = 1.0
# While it waits, a worker checks every this many seconds whether a run has finished.
_TICK = 0.1
# What `lease_next` returns instead of a run if other workers hold all remaining runs.
_WAITED: dict[str, Any] = {}


def run(study: Study, workdir: str | Path, *, arms: list[PlannedArm] | None = None) -> Path:
    """Trains until every run of the study has its result; returns the study's directory.

    The same call resumes a study. Several processes may make it beside each other: each trains the
    runs that no other one trains, and waits if there are none. A run that cannot be trained does
    not stop the others.

    Args:
        study: The study.
        workdir: Its directory.
        arms: The arms of the study, if the caller has built them.

    Raises:
        ConfigError: A setting or the directory is impossible; or, at the end, runs could not be
            trained.
        Stopped: SIGTERM or Ctrl-C arrived. The state is saved.
    """
    require_same_settings(study)
    path = check_directory(workdir)
    reason_of_failed: dict[str, str] = {}  # by the id of a run that cannot be trained
    with StopRequest() as stop:
        # In a job of several processes, process 0 chooses the runs, and all of them train.
        worker = make_in_process_0(lambda: _Worker(study, path, arms or build_arms(study), stop))
        while True:
            leased = agreement.call_in_process_0(lambda: worker.lease_next(reason_of_failed))
            if leased is None:
                break
            if leased != _WAITED:
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
    """Chooses the next run to train. In a job of several processes, it lives on process 0."""

    study: Study
    path: Path
    arms: list[PlannedArm]
    stop: StopRequest
    # The lease of the run that `lease_next` returned last, and the run.
    lease: leases.Lease | None = None
    _leased: PlannedRun | None = None
    # Ids of runs that were in use or lost to another worker. This worker prefers other runs.
    refused: set[str] = dataclasses.field(default_factory=set)
    # The holder of each lease when the worker last waited.
    _last_holders: dict[str, str] = dataclasses.field(default_factory=dict)
    # The other runs without a result, and the ids of all runs that a worker holds. `study_left`
    # keeps both up to date.
    _others: list[PlannedRun] = dataclasses.field(default_factory=list)
    _held: set[str] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        """Checks the study, creates its directory and declares the study there.

        The checks come first, so a study that is refused leaves no directory behind. Only the
        checks of `declaration.declare` need the directory.
        """
        study = self.study
        path = self.path
        declaration.require_no_run(path)
        # A link in place of one of these would lead workers to write outside the directory.
        for name in ('lock', 'leases', 'runs', 'plots'):
            join_without_links(path, name)
        declaration.require_chain(path, study, self.arms)
        for run in longest_of_each_model(runs_without_result(study, self.arms, path)):
            sharding.require_devices(run.config.mesh)
            require_memory(run.config)
            check_parts(run.config)
            with waiting(study.name, 'preparing data'):
                open_corpora(run.config, check_data(study, run.config))
        make_directory(path)
        self._declared = ledger.declaration_digest(declaration.declare(path, study, self.arms))

    def lease_next(self, failed: Collection[str]) -> dict[str, Any] | None:
        """Acquires the lease of the next run, which is the right to train it.

        There are three cases:

        - A run is free. Its lease is held in `self.lease`, and the run is returned.
        - Other workers hold all remaining runs. Waits for a while, then returns _WAITED.
        - No run remains. Returns None.

        Runs that were in use a moment ago (`self.refused`) are tried only after all others.

        Args:
            failed: The ids of runs that cannot be trained. They do not count as remaining runs.

        Returns:
            In the first case, a dict that the other processes of a job receive as JSON. It has the
            id of the run ('run'), its 'config' and 'directory', and a 'label' for messages.
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
                label = run.arm.title
                if run.stage != SINGLE:
                    label += f' {run.knob or run.stage}'
                return {
                    'run': run.id,
                    'config': to_json(run.config),
                    'directory': run.directory,
                    'label': label,
                }

        self.refused.clear()  # the next call tries these runs again
        if not runs_left:
            return None
        self._wait(runs_left)
        return _WAITED

    def study_left(self) -> StudyLeft:
        """Returns what remains of the study while this worker trains its run.

        `waiting_work` is the work of the runs that no worker has taken, divided by the work of this
        worker's run.
        """
        # If the directory cannot be read, the runs of the last call are counted again.
        with contextlib.suppress(OSError, ReadError):
            self._others = [run for run in self._others if not self._is_finished(run)]
            self._held = set(leases.holders(self.path / 'leases'))
        assert self._leased is not None
        waiting_work = sum(run.work for run in self._others if run.id not in self._held)
        # A worker holds one run, so the held runs are as many as the workers. The run of this
        # worker is among them, even if the leases could not be read.
        held_runs = {self._leased.id, *self._held}
        return StudyLeft(
            runs=len(self._others),
            waiting_work=waiting_work / self._leased.work,
            workers=len(held_runs),
        )

    def _is_finished(self, run: PlannedRun) -> bool:
        """Returns whether a run has its result; always False in a bucket.

        There, each question would be a request over the network.
        """
        return not is_url(self.path) and (self.path / run.directory / 'result.json').exists()

    def _write_plan(self) -> list[PlannedRun]:
        """Writes plan.jsonl and results.jsonl; returns the runs without result, longest first.

        If another process has added arms or seeds to the study, this worker does not know them, and
        its plan would lack them. It then leaves the files to the workers that know them.
        """
        study = self.study
        path = self.path
        # Other workers write the same files. The lock keeps a worker with older results from
        # overwriting a later plan.
        with locked(path / 'lock'):
            results = plan.results_in(path)
            runs = plan.runs(study, self.arms, results)
            digest_in_directory = ledger.declaration_digest(read_json(path / 'study.json', {}))
            if digest_in_directory == self._declared:
                write_atomic(path / 'plan.jsonl', plan.plan_lines(study, runs))
                write_atomic(path / 'results.jsonl', plan.result_lines(study, runs, results))
        return plan.without_result(runs, results)

    def _wait(self, runs_left: list[PlannedRun]) -> None:
        """Waits until a run may have become free: 10 seconds, or 1 second if no worker holds a run.

        Returns earlier if one of the runs is finished or if the worker should stop. Logs which
        worker holds which run, if this has changed since the last call.
        """
        holders = leases.holders(self.path / 'leases')  # by the id of the run
        if holders and holders != self._last_holders:
            directory_of_run = {run.id: run.directory for run in runs_left}
            held = []
            for run_id, holder in holders.items():
                held.append(f'{directory_of_run.get(run_id, run_id)}, held by {holder}')
            log.info('waiting for %s', '; '.join(held))
        self._last_holders = holders

        seconds = _WAIT_FOR_OTHERS if holders else _WAIT_FOR_REFUSED
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.stop.requested:
            if any(self._is_finished(run) for run in runs_left):
                return
            time.sleep(_TICK)


def _train(
    path: Path, leased: dict[str, Any], worker: _Worker, reason_of_failed: dict[str, str]
) -> None:
    """Trains the run whose lease `worker` holds; `leased` describes the run (see `lease_next`).

    There are three kinds of errors:

    - Another worker has the run. `worker.refused` gets its id, and the worker goes on.
    - Only this run cannot be trained, for example because it is out of memory. `reason_of_failed`
      gets the reason under its id, and the worker goes on.
    - No run could be trained, for example because the disk is full. The error is raised.
    """
    run_id = leased['run']
    with cast(leases.Lease, worker.lease) as lease:
        try:
            train(
                from_json(Config, leased['config']),
                join_without_links(path, *leased['directory'].split('/')),
                label=leased['label'],
                study=worker.study_left,
                lost=lambda: lease.lost,
            )
        except (InUseError, Lost) as error:
            log.warning('%s; continuing with another run', error)
            worker.refused.add(run_id)
        except DiskError:
            # No other run could be saved either.
            raise
        except (ConfigError, CheckpointError, JaxRuntimeError) as error:
            outcome = cli.outcome(error)
            if outcome is None:
                # An XLA error other than a lack of memory is a bug or a fault of the machine.
                raise
            if isinstance(error, JaxRuntimeError) and jax.process_count() > 1:
                # The other processes of the job may not have the error. They would wait for this
                # one.
                raise
            log.error('skipping %s: %s', leased['directory'], outcome.sentence)
            reason_of_failed[run_id] = outcome.sentence


def longest_of_each_model(runs: list[PlannedRun]) -> list[PlannedRun]:
    """Returns the longest run of each model on each corpus. `runs` are sorted, longest first."""
    run_of_model = {}
    for run in reversed(runs):
        # A longer run replaces a shorter one.
        run_of_model[run.config.data, run.config.model] = run
    return list(run_of_model.values())


def check_data(study: Study, config: Config) -> Rows:
    """Opens and returns the rows of a run.

    Raises ConfigError if they do not fit the run or have too few documents for a verdict.
    """
    rows = rows_of(config)
    if study.tuning.seeds:
        check_documents(rows, config.data)
    return rows


def check_start(study: Study, arms: list[PlannedArm], path: Path | None) -> list[str]:
    """Makes the checks that `run` makes before it trains, but writes nothing.

    Devices and memory are not checked, because the study may be trained elsewhere.

    Args:
        study: The study.
        arms: Its arms.
        path: Its directory. If None, all runs of a study that has not begun are checked.

    Returns:
        One sentence for each kind of data that could not be checked here.

    Raises:
        ConfigError: As in `run`.
    """
    if path is not None:
        declaration.check(path, study, arms)
        runs_left = runs_without_result(study, arms, path)
    else:
        runs_left = plan.without_result(plan.runs(study, arms, _no_results), _no_results)
    reasons: list[str] = []
    for run in longest_of_each_model(runs_left):
        check_parts(run.config)
        check = functools.partial(check_data, study)  # takes a config
        reason = check_data_if_here(run.config, study.name, check)
        if reason is not None and reason not in reasons:
            reasons.append(reason)
    return reasons


def _no_results(run: PlannedRun) -> None:
    """Returns the results of a run in a study that has not begun: None."""


def runs_without_result(study: Study, arms: list[PlannedArm], path: Path) -> list[PlannedRun]:
    """Returns the runs planned so far that have no result, in the order that workers take them."""
    results = plan.results_in(path)
    return plan.without_result(plan.runs(study, arms, results), results)
