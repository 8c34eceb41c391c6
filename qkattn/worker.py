"""Works on a study: claims a cell, trains it, looks what is known now, until nothing is left.

Any number of workers, processes or jobs, may share a study's directory: one cell is trained by one
of them at a time, and a cell whose worker died is taken over from its last checkpoint.
"""

import logging
import time
from pathlib import Path
from typing import Any

from qkattn import claims, plan, runlog
from qkattn.config import ConfigError, Study
from qkattn.data.files import locked
from qkattn.data.load import rows_of
from qkattn.plan import Cell
from qkattn.study import Arm, arms
from qkattn.train import sharding, train
from qkattn.train.checkpoint import CheckpointError
from qkattn.train.loop import Lost, Stopped

# What a study may add to a directory that holds it already: what is there keeps its meaning.
GROWS = ('variants', 'sizes', 'arms', 'question', 'command')

log = logging.getLogger(__name__)


def run(
    study: Study,
    workdir: str | Path,
    *,
    command: list[str] | None = None,
    expiry: float = claims.EXPIRY,
) -> Path:
    """Trains until every cell of the study has its result, and returns the study's directory.

    The same call goes on where an earlier one stopped, and works beside others. Where other
    workers hold all cells that are left, it waits for them. A cell that cannot be trained does not
    keep the others from being.

    Args:
      expiry: seconds without a sign of life after which a worker counts as dead.

    Raises:
      ConfigError: a setting or a directory that cannot work; in the end, for cells that could not.
      Stopped: SIGTERM or Ctrl-C came; the state is saved.
    """
    contestants = arms(study)
    path = runlog.make_directory(workdir)
    declared = runlog.to_jsonable(plan.declaration(study, contestants, command))
    _declare(path, declared)
    failed: dict[str, str] = {}
    with runlog.StopRequest() as stop:
        for cell in _write_plan(study, contestants, path)[:1]:
            # What all cells share and cannot work is said once, not cell by cell.
            sharding.require_devices(cell.config.mesh)
            rows_of(cell.config)
        while True:
            if stop.requested:
                raise Stopped('stopped between two cells')
            left = [c for c in _write_plan(study, contestants, path) if c.id not in failed]
            if not left:
                break
            if not any(_work(path, c, command, len(left) - 1, expiry, failed) for c in left):
                _wait(path, expiry, stop)
    if failed:
        raise ConfigError(
            f'{len(failed)} cells could not be trained: '
            + '; '.join(f'{cell}: {reason}' for cell, reason in failed.items())
        )
    return path


def _declare(path: Path, declared: dict[str, Any]) -> None:
    """Writes study.json, unless the directory holds a study that this one does not extend."""
    with locked(path / 'lock'):
        if (path / 'study.json').exists():
            there = runlog.read_json(path / 'study.json')
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
        runlog.write_json(path / 'study.json', declared)


def _write_plan(study: Study, contestants: list[Arm], path: Path) -> list[Cell]:
    """Writes what is known to plan.jsonl and results.jsonl; returns the cells without result."""
    found: dict[str, list[dict[str, Any]] | None] = {}

    def results(cell: Cell) -> list[dict[str, Any]] | None:
        # Each is looked for once: what is planned and what is left must not be of two moments.
        if cell.directory not in found:
            result = path / cell.directory / 'result.json'
            found[cell.directory] = runlog.read_json(result) if result.exists() else None
        return found[cell.directory]

    # What is read and what is written belong together, whoever else writes.
    with locked(path / 'lock'):
        known = plan.cells(study, contestants, results)
        runlog.write_text(path / 'plan.jsonl', plan.lines(study, known))
        runlog.write_text(path / 'results.jsonl', plan.result_lines(study, known, results))
    return [cell for cell in known if results(cell) is None]


def _work(
    path: Path,
    cell: Cell,
    command: list[str] | None,
    cells_left: int,
    expiry: float,
    failed: dict[str, str],
) -> bool:
    """Trains the cell unless somebody else does; says whether the plan may have changed."""
    claim = claims.claim(path / 'claims', cell.id, expiry=expiry)
    if claim is None:
        return False
    with claim:
        try:
            train(
                cell.config,
                path / cell.directory,
                command=command,
                description=f'{cell.arm.label} {cell.arm.size} {cell.knob or cell.stage}',
                cells_left=cells_left,
                lost=lambda: claim.lost,
            )
        except (runlog.InUseError, Lost) as error:
            log.warning('%s; going on with another cell', error)
            return False
        except (ConfigError, CheckpointError) as error:
            log.error('cell %s is left out: %s', cell.directory, error)
            failed[cell.id] = str(error)
    return True


def _wait(path: Path, expiry: float, stop: runlog.StopRequest) -> None:
    """Until a claim may have been given up, or a result may have come."""
    holders = claims.holders(path / 'claims', expiry=expiry)
    held = '; '.join(f'{cell} by {who}' for cell, who in holders.items())
    log.info('waiting for other workers: %s', held)
    until = time.monotonic() + min(10.0, expiry / 4)
    while time.monotonic() < until and not stop.requested:
        time.sleep(0.1)
