"""A worker of a study: acquires the lease of a run, trains it, extends the plan, and repeats.

Any number of workers may share a study's directory. A run is trained by one of them at a time, and
the run of a worker that died is resumed from its last checkpoint.
"""

import logging
import time
from pathlib import Path
from typing import Any

from qkattn.config import Study
from qkattn.data.tasks.task_registry import rows_of
from qkattn.errors import CheckpointError, ConfigError, InUseError, Lost, Stopped
from qkattn.run import leases
from qkattn.run.files import check_directory, locked, make_directory, write_atomic
from qkattn.run.records import read_json, to_jsonable, write_json
from qkattn.run.signals import StopRequest
from qkattn.study import plan
from qkattn.study.arms import Arm, build_arms
from qkattn.study.plan import PlannedRun
from qkattn.train import sharding, train

# Fields of study.json that may differ when a directory is used again.
EXTENSIBLE = ('variants', 'sizes', 'arms', 'question', 'command')

log = logging.getLogger(__name__)

_Known = tuple[list[PlannedRun], list[PlannedRun], plan.Results]


def run(
    study: Study,
    workdir: str | Path,
    *,
    command: list[str] | None = None,
    expiry: float = leases.EXPIRY,
) -> Path:
    """Trains until every run of the study has its result, and returns the study's directory.

    The same call resumes, and may run beside other workers; while they hold all runs that are left,
    it waits. A run that cannot be trained does not stop the others.

    Args:
      expiry: seconds without a heartbeat after which a worker counts as dead.

    Raises:
      ConfigError: an impossible setting or directory; at the end, if runs could not be trained.
      Stopped: on SIGTERM or Ctrl-C, with the state saved.
    """
    arms = build_arms(study)
    path = check_directory(workdir)
    failed: dict[str, str] = {}
    with StopRequest() as stop:
        # Before the directory is created, so that a refused study leaves nothing behind.
        for run in _known(study, arms, path)[1][:1]:
            sharding.require_devices(run.config.mesh)
            rows_of(run.config)
        path = make_directory(path)
        _declare(path, to_jsonable(plan.declaration(study, arms, command)))
        while True:
            if stop.requested:
                raise Stopped('stopped between two runs')
            left = [run for run in _write_plan(study, arms, path) if run.id not in failed]
            if not left:
                break
            if not any(_work(path, run, command, len(left) - 1, expiry, failed) for run in left):
                _wait(path, expiry, stop)
    if failed:
        raise ConfigError(
            f'{len(failed)} run{"s" * (len(failed) > 1)} could not be trained: '
            + '; '.join(f'{run}: {reason}' for run, reason in failed.items())
        )
    return path


def _declare(path: Path, declared: dict[str, Any]) -> None:
    """Writes study.json; raises if the directory holds a study that this one does not extend."""
    with locked(path / 'lock'):
        if (path / 'study.json').exists():
            earlier = read_json(path / 'study.json')
            if earlier.keys() != declared.keys():
                raise ConfigError(
                    f'{path / "study.json"} does not declare a study; give another workdir'
                )
            names = sorted(declared.keys() - {*EXTENSIBLE, 'base', 'base_hash'})
            for name in (*names, 'base_hash'):
                if earlier[name] != declared[name]:
                    raise ConfigError(
                        f'workdir={path} holds a study with another {name}, {earlier[name]} '
                        f'instead of {declared[name]}; set it back or give another workdir'
                    )
            for name in ('variants', 'sizes'):
                if gone := [value for value in earlier[name] if value not in declared[name]]:
                    raise ConfigError(
                        f'workdir={path} holds a study whose {name} have {gone[0]!r}; they may '
                        'grow but not shrink: put it back or give another workdir'
                    )
        write_json(path / 'study.json', declared)


def _known(study: Study, arms: list[Arm], path: Path) -> _Known:
    """Returns every run known so far, those of them without a result, and the results."""
    read: dict[str, list[dict[str, Any]] | None] = {}

    def results(run: PlannedRun) -> list[dict[str, Any]] | None:
        # Each file is read once, so that the plan and the runs left are of the same moment.
        if run.directory not in read:
            result = path / run.directory / 'result.json'
            read[run.directory] = read_json(result) if result.exists() else None
        return read[run.directory]

    runs = plan.runs(study, arms, results)
    return runs, [run for run in runs if results(run) is None], results


def _write_plan(study: Study, arms: list[Arm], path: Path) -> list[PlannedRun]:
    """Writes what is known to plan.jsonl and results.jsonl; returns the runs without a result."""
    # Results are read and the files written under one lock, whoever else writes.
    with locked(path / 'lock'):
        runs, left, results = _known(study, arms, path)
        write_atomic(path / 'plan.jsonl', plan.lines(study, runs))
        write_atomic(path / 'results.jsonl', plan.result_lines(study, runs, results))
    return left


def _work(
    path: Path,
    run: PlannedRun,
    command: list[str] | None,
    runs_left: int,
    expiry: float,
    failed: dict[str, str],
) -> bool:
    """Trains the run unless another worker does; returns whether the plan may have changed."""
    lease = leases.acquire(path / 'leases', run.id, expiry=expiry)
    if lease is None:
        return False
    with lease:
        try:
            train(
                run.config,
                path / run.directory,
                command=command,
                description=f'{run.arm.label} {run.arm.size} {run.knob or run.stage}',
                runs_left=runs_left,
                lost=lambda: lease.lost,
            )
        except (InUseError, Lost) as error:
            log.warning('%s; continuing with another run', error)
            return False
        except (ConfigError, CheckpointError) as error:
            log.error('skipping %s: %s', run.directory, error)
            failed[run.id] = str(error)
    return True


def _wait(path: Path, expiry: float, stop: StopRequest) -> None:
    """Until a lease may have been given up, or a result may have come."""
    holders = leases.holders(path / 'leases', expiry=expiry)
    held = '; '.join(f'{run} by {who}' for run, who in holders.items())
    log.info('waiting for other workers: %s', held)
    until = time.monotonic() + min(10.0, expiry / 4)
    while time.monotonic() < until and not stop.requested:
        time.sleep(0.1)
