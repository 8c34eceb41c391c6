"""Works on a study: claims a run, trains it, looks what is known now, until nothing is left.

Any number of workers, processes or jobs, may share a study's directory: one run is trained by one
of them at a time, and a run whose worker died is taken over from its last checkpoint.
"""

import logging
import time
from pathlib import Path
from typing import Any

from qkattn.config import Study
from qkattn.data.cache import locked
from qkattn.data.load import rows_of
from qkattn.errors import CheckpointError, ConfigError, InUseError, Lost, Stopped
from qkattn.run import leases, run_directory
from qkattn.study import plan
from qkattn.study.arms import Arm, build_arms
from qkattn.study.plan import PlannedRun
from qkattn.train import sharding, train

# What a study may add to a directory that holds it already: what is there keeps its meaning.
GROWS = ('variants', 'sizes', 'arms', 'question', 'command')

log = logging.getLogger(__name__)


def run(
    study: Study,
    workdir: str | Path,
    *,
    command: list[str] | None = None,
    expiry: float = leases.EXPIRY,
) -> Path:
    """Trains until every run of the study has its result, and returns the study's directory.

    The same call goes on where an earlier one stopped, and works beside others. Where other
    workers hold all runs that are left, it waits for them. A run that cannot be trained does not
    keep the others from being.

    Args:
      expiry: seconds without a sign of life after which a worker counts as dead.

    Raises:
      ConfigError: a setting or a directory that cannot work; in the end, for runs that could not.
      Stopped: SIGTERM or Ctrl-C came; the state is saved.
    """
    contestants = build_arms(study)
    path = run_directory.make_directory(workdir)
    declared = run_directory.to_jsonable(plan.declaration(study, contestants, command))
    _declare(path, declared)
    failed: dict[str, str] = {}
    with run_directory.StopRequest() as stop:
        for run in _write_plan(study, contestants, path)[:1]:
            # What all runs share and cannot work is said once, not run by run.
            sharding.require_devices(run.config.mesh)
            rows_of(run.config)
        while True:
            if stop.requested:
                raise Stopped('stopped between two runs')
            left = [c for c in _write_plan(study, contestants, path) if c.id not in failed]
            if not left:
                break
            if not any(_work(path, c, command, len(left) - 1, expiry, failed) for c in left):
                _wait(path, expiry, stop)
    if failed:
        raise ConfigError(
            f'{len(failed)} runs could not be trained: '
            + '; '.join(f'{run}: {reason}' for run, reason in failed.items())
        )
    return path


def _declare(path: Path, declared: dict[str, Any]) -> None:
    """Writes study.json, unless the directory holds a study that this one does not extend."""
    with locked(path / 'lock'):
        if (path / 'study.json').exists():
            there = run_directory.read_json(path / 'study.json')
            if there.keys() != declared.keys():
                raise ConfigError(
                    f'{path / "study.json"} does not declare a study; give another workdir'
                )
            for name in sorted(declared.keys() - set(GROWS)):
                if there[name] != declared[name]:
                    raise ConfigError(
                        f'workdir={path} holds a study with another {name}, {there[name]} instead '
                        f'of {declared[name]}; set it back or give another workdir'
                    )
            for name in ('variants', 'sizes'):
                if gone := [value for value in there[name] if value not in declared[name]]:
                    raise ConfigError(
                        f'workdir={path} holds a study whose {name} have {gone[0]!r}; they may '
                        'grow but not shrink: put it back or give another workdir'
                    )
        run_directory.write_json(path / 'study.json', declared)


def _write_plan(study: Study, contestants: list[Arm], path: Path) -> list[PlannedRun]:
    """Writes what is known to plan.jsonl and results.jsonl; returns the runs without result."""
    found: dict[str, list[dict[str, Any]] | None] = {}

    def results(run: PlannedRun) -> list[dict[str, Any]] | None:
        # Each is looked for once: what is planned and what is left must not be of two moments.
        if run.directory not in found:
            result = path / run.directory / 'result.json'
            found[run.directory] = run_directory.read_json(result) if result.exists() else None
        return found[run.directory]

    # What is read and what is written belong together, whoever else writes.
    with locked(path / 'lock'):
        known = plan.runs(study, contestants, results)
        run_directory.write_text(path / 'plan.jsonl', plan.lines(study, known))
        run_directory.write_text(path / 'results.jsonl', plan.result_lines(study, known, results))
    return [run for run in known if results(run) is None]


def _work(
    path: Path,
    run: PlannedRun,
    command: list[str] | None,
    runs_left: int,
    expiry: float,
    failed: dict[str, str],
) -> bool:
    """Trains the run unless somebody else does; says whether the plan may have changed."""
    claim = leases.claim(path / 'leases', run.id, expiry=expiry)
    if claim is None:
        return False
    with claim:
        try:
            train(
                run.config,
                path / run.directory,
                command=command,
                description=f'{run.arm.label} {run.arm.size} {run.knob or run.stage}',
                runs_left=runs_left,
                lost=lambda: claim.lost,
            )
        except (InUseError, Lost) as error:
            log.warning('%s; going on with another run', error)
            return False
        except (ConfigError, CheckpointError) as error:
            log.error('run %s is left out: %s', run.directory, error)
            failed[run.id] = str(error)
    return True


def _wait(path: Path, expiry: float, stop: run_directory.StopRequest) -> None:
    """Until a claim may have been given up, or a result may have come."""
    holders = leases.holders(path / 'leases', expiry=expiry)
    held = '; '.join(f'{run} by {who}' for run, who in holders.items())
    log.info('waiting for other workers: %s', held)
    until = time.monotonic() + min(10.0, expiry / 4)
    while time.monotonic() < until and not stop.requested:
        time.sleep(0.1)
