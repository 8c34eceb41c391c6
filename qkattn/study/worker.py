"""A worker of a study: acquires the lease of a run, trains it, extends the plan, and repeats.

Any number of workers may share a study's directory. If a worker dies, another worker resumes its
run from the last checkpoint. A worker may be a job of several processes, of which process 0 holds
the leases and writes the files of the study.
"""

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import jax
from jax.errors import JaxRuntimeError

from qkattn.config import Config, Study, from_json, to_json
from qkattn.data.evaluation_corpora import open_corpora
from qkattn.data.pipeline import check_documents
from qkattn.data.tasks.rows import Rows
from qkattn.data.tasks.task_registry import (
    has_yardsticks_from_outside,
    rows_of,
    yardsticks_of,
)
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


# Seconds until a worker looks for a free run again, while other workers hold runs.
_WAIT_FOR_OTHERS = 10.0
# Seconds until a worker looks for a free run again, if no worker holds one.
_WAIT_FOR_REFUSED = 1.0
# Seconds between checks whether a run has finished, during these waits.
_TICK = 0.1
# The result of `lease_next` if there are runs left, but none is free.
_WAITED: dict[str, Any] = {}


def run(study: Study, workdir: str | Path, *, arms: list[PlannedArm] | None = None) -> Path:
    """Trains until every run of the study has a result; returns the study's directory.

    The same call resumes a study. Several workers may share the directory: each run is trained by
    one worker. A run that cannot be trained is skipped.

    Args:
        study: The study.
        workdir: The directory of the study.
        arms: The arms of the study, if they are built already.

    Raises:
        ConfigError: A setting or the directory is invalid, or runs were skipped.
        Stopped: SIGTERM or Ctrl-C arrived. The state is saved.
    """
    require_same_settings(study)
    path = check_directory(workdir)
    reason_by_run: dict[str, str] = {}  # why a run cannot be trained, by its id
    with StopRequest() as stop:
        # In a job of several processes, process 0 chooses each run, and all processes train it.
        worker = make_in_process_0(lambda: _Worker(study, path, arms or build_arms(study), stop))
        while True:
            leased = agreement.call_in_process_0(lambda: worker.lease_next(reason_by_run))
            if leased is None:  # no run is left
                break
            if leased != _WAITED:  # a run was free
                _train(path, leased, worker, reason_by_run)
            if agreement.any_process(stop.requested):
                raise Stopped('stopped between two runs')
    if reason_by_run:
        count = '1 run' if len(reason_by_run) == 1 else f'{len(reason_by_run)} runs'
        reasons = [f'{run_id}: {reason}' for run_id, reason in reason_by_run.items()]
        raise ConfigError(f'{count} could not be trained: {"; ".join(reasons)}')
    return path


@dataclasses.dataclass
class _Worker:
    """Chooses the next run to train. Only process 0 of a job has a _Worker."""

    study: Study
    path: Path  # the directory of the study
    arms: list[PlannedArm]
    stop: StopRequest
    lease: leases.Lease | None = None  # of the run to train
    _leased: PlannedRun | None = None  # the run to train
    # Ids of runs that another worker has taken. They are tried again after all other runs.
    refused: set[str] = dataclasses.field(default_factory=set)
    # The holder of each lease, by the id of the run, when the worker last waited.
    _last_holders: dict[str, str] = dataclasses.field(default_factory=dict)
    # The other runs without a result.
    _others: list[PlannedRun] = dataclasses.field(default_factory=list)
    # Ids of the runs that any worker holds.
    _held: set[str] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        """Checks the study, creates its directory and declares the study in it."""
        study = self.study
        path = self.path
        declaration.require_no_run(path)
        # Through a link, workers would write outside the directory.
        for name in ('lock', 'leases', 'runs', 'plots'):
            join_without_links(path, name)  # raises an error for a link
        declaration.require_chain(path, study, self.arms)
        runs_left = longest_of_each_model(runs_without_result(study, self.arms, path))
        for run in runs_left:
            sharding.require_devices(run.config.mesh)
            require_memory(run.config)
            check_parts(run.config)
            measures_yardsticks = run is runs_left[0]  # once is enough
            with waiting(study.name, 'preparing data'):
                rows = check_data(study, run.config, yardsticks=measures_yardsticks)
                open_corpora(run.config, rows)
        make_directory(path)
        self._declared = ledger.declaration_digest(declaration.declare(path, study, self.arms))

    def lease_next(self, failed: Collection[str]) -> dict[str, Any] | None:
        """Acquires the lease of the next free run, and keeps it in `self.lease`.

        Waits for a while if other workers hold all runs that are left.

        Args:
            failed: The ids of runs that cannot be trained.

        Returns:
            The run as JSON: its id ('run'), 'config', 'directory', and 'label' for messages.
            _WAITED if no run is free, None if no run is left.
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
                return _to_json(run)

        self.refused.clear()  # the next call tries these runs again
        if not runs_left:
            return None
        self._wait(runs_left)
        return _WAITED

    def study_left(self) -> StudyLeft:
        """Returns what is left of the study besides the run of this worker.

        `waiting_work` is the work of runs that no worker holds, relative to this worker's run.
        """
        # If the directory cannot be read, the values of the last call are used.
        with contextlib.suppress(OSError, ReadError):
            self._others = [run for run in self._others if not self._is_finished(run)]
            self._held = set(leases.holders(self.path / 'leases'))  # ids of runs
        assert self._leased is not None
        waiting_work = sum(run.work for run in self._others if run.id not in self._held)
        held_runs = {self._leased.id, *self._held}
        return StudyLeft(
            runs=len(self._others),
            waiting_work=waiting_work / self._leased.work,
            workers=len(held_runs),  # each worker holds one run
        )

    def _is_finished(self, run: PlannedRun) -> bool:
        """Returns whether a run has a result; always False in a bucket, to save requests."""
        is_bucket = is_url(self.path)
        return not is_bucket and (self.path / run.directory / 'result.json').exists()

    def _write_plan(self) -> list[PlannedRun]:
        """Writes plan.jsonl and results.jsonl; returns the runs without result, longest first.

        Writes nothing if the study has grown since this worker started. The plan of this worker
        would lack the new arms.
        """
        study = self.study
        path = self.path
        # Under the lock, no other worker can write a newer plan that this one would overwrite.
        with locked(path / 'lock'):
            results = plan.results_in(path)
            runs = plan.runs(study, self.arms, results)
            digest_in_directory = ledger.declaration_digest(read_json(path / 'study.json', {}))
            has_grown = digest_in_directory != self._declared
            if not has_grown:
                plan_text = plan.plan_lines(study, runs)
                results_text = plan.result_lines(study, runs, results)
                # Results of runs that have left the plan are kept.
                unplanned = plan.unplanned_runs(path, runs)
                more_plan, more_results = plan.unplanned_lines(study, path, unplanned)
                write_atomic(path / 'plan.jsonl', plan_text + more_plan)
                write_atomic(path / 'results.jsonl', results_text + more_results)
        return plan.without_result(runs, results)

    def _wait(self, runs_left: list[PlannedRun]) -> None:
        """Waits for a few seconds, or until a run is finished or a stop is requested.

        Logs the holders of the runs if they have changed since the last call.
        """
        holders = leases.holders(self.path / 'leases')  # such as {RUN_ID: 'process 12 on host'}
        if holders and holders != self._last_holders:
            _log_holders(holders, runs_left)
        self._last_holders = holders

        seconds = _WAIT_FOR_OTHERS if holders else _WAIT_FOR_REFUSED
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.stop.requested:
            if any(self._is_finished(run) for run in runs_left):
                return
            time.sleep(_TICK)


def _log_holders(holders: Mapping[str, str], runs_left: list[PlannedRun]) -> None:
    """Logs which runs are held, and by whom. `holders` has the holder of each run by its id."""
    directory_by_id = {run.id: run.directory for run in runs_left}
    held_runs = []
    for run_id, holder in holders.items():
        run_name = directory_by_id.get(run_id, run_id)  # a run that is not left has only its id
        held_runs.append(f'{run_name}, held by {holder}')
    log.info('waiting for %s', '; '.join(held_runs))


def _to_json(run: PlannedRun) -> dict[str, Any]:
    """Returns what all processes of a job need to train a run, as JSON."""
    label = run.arm.title  # for messages
    if run.stage != SINGLE:
        label += f' {run.knob or run.stage}'  # such as 'learning_rate' or 'verdict'
    return {
        'run': run.id,
        'config': to_json(run.config),
        'directory': run.directory,
        'label': label,
    }


def _train(
    path: Path, leased: dict[str, Any], worker: _Worker, reason_by_run: dict[str, str]
) -> None:
    """Trains a run.

    If another worker has the run, its id is added to `worker.refused`. If only this run cannot be
    trained, for example for lack of memory, the reason is added to `reason_by_run`. All other
    errors are raised.

    Args:
        path: The directory of the study.
        leased: The run, as returned by `worker.lease_next`.
        worker: The worker, which holds the lease of the run.
        reason_by_run: Why a run cannot be trained, by its id.
    """
    run_id = leased['run']
    with cast(leases.Lease, worker.lease) as lease:  # released at the end of the block
        try:
            config = from_json(Config, leased['config'])
            directory = join_without_links(path, *leased['directory'].split('/'))
            train(
                config,
                directory,
                label=leased['label'],
                study=worker.study_left,
                lost=lambda: lease.lost,
            )
        except (InUseError, Lost) as error:
            log.warning('%s; continuing with another run', error)
            worker.refused.add(run_id)
        except DiskError:
            # It is a ConfigError too, but no other run could be saved either.
            raise
        except (ConfigError, CheckpointError, JaxRuntimeError) as error:
            outcome = cli.outcome(error)
            if outcome is None:  # a bug or a hardware fault, not a lack of memory
                raise
            if isinstance(error, JaxRuntimeError) and jax.process_count() > 1:
                # Processes without this error would wait for this process forever.
                raise
            log.error('skipping %s: %s', leased['directory'], outcome.sentence)
            reason_by_run[run_id] = outcome.sentence


def longest_of_each_model(runs: list[PlannedRun]) -> list[PlannedRun]:
    """Returns the longest run of each model on each corpus; `runs` are sorted longest first."""
    longest = {}  # by data and model
    for run in reversed(runs):
        longest[run.config.data, run.config.model] = run  # replaces a shorter run
    return list(longest.values())


def check_data(study: Study, config: Config, *, yardsticks: bool) -> Rows:
    """Opens the rows of a run.

    Args:
        study: The study.
        config: The config of the run.
        yardsticks: Whether to measure yardsticks from outside the package, so that they do not
            fail after training.

    Raises:
        ConfigError: The rows do not fit the config, have too few documents for a verdict, or have
            invalid yardsticks.
    """
    rows = rows_of(config)
    if study.tuning.seeds:
        check_documents(rows, config.data)
    if yardsticks and has_yardsticks_from_outside(config, rows):
        yardsticks_of(config, rows)
    return rows


def check_start(study: Study, arms: list[PlannedArm], path: Path | None) -> list[str]:
    """Makes the checks of `run`, except of devices and memory. Writes nothing to the directory.

    Args:
        study: The study.
        arms: The arms of the study.
        path: The directory of the study. None for a study that has no directory yet.

    Returns:
        A sentence for each kind of data that is not on this machine and so was not checked.

    Raises:
        ConfigError: The study cannot be trained.
    """
    if path is not None:
        declaration.check(path, study, arms)
        runs_left = runs_without_result(study, arms, path)
    else:
        runs_left = plan.without_result(plan.runs(study, arms, _no_results), _no_results)
    reasons: list[str] = []
    longest_runs = longest_of_each_model(runs_left)
    for run in longest_runs:
        check_parts(run.config)
        measures_yardsticks = run is longest_runs[0]  # once is enough
        check = functools.partial(check_data, study, yardsticks=measures_yardsticks)
        reason = check_data_if_here(run.config, study.name, check)
        if reason is not None and reason not in reasons:
            reasons.append(reason)
    return reasons


def _no_results(run: PlannedRun) -> None:
    """Returns None, as no run of a new study has results."""


def runs_without_result(study: Study, arms: list[PlannedArm], path: Path) -> list[PlannedRun]:
    """Returns the runs planned so far that have no result, longest first."""
    results = plan.results_in(path)
    return plan.without_result(plan.runs(study, arms, results), results)
