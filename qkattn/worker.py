"""Works on a study: claims a cell, trains it, looks what is known now, until nothing is left.

Any number of workers, processes or jobs, may share a study's directory: one cell is trained by one
of them at a time, and a cell whose worker died is taken over from its last checkpoint.
"""

import logging
import time
from pathlib import Path
from typing import Any

from qkattn import claims, plan, runlog
from qkattn.config import Study
from qkattn.data.files import locked
from qkattn.plan import Cell
from qkattn.study import Arm, arms
from qkattn.train import train
from qkattn.train.loop import Lost, Stopped

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
    workers hold all cells that are left, it waits for them.

    Args:
      expiry: seconds without a sign of life after which a worker counts as dead.

    Raises:
      ConfigError: a setting or a directory that cannot work.
      Stopped: SIGTERM or Ctrl-C came; the state is saved.
    """
    contestants = arms(study)
    path = runlog.make_directory(workdir)
    runlog.write_json(path / 'study.json', plan.declaration(study, contestants, command))
    while True:
        known = _write_plan(study, contestants, path)
        left = [cell for cell in known if _results(path, cell) is None]
        if not left:
            return path
        if not any(_work(path, cell, command, len(left) - 1, expiry) for cell in left):
            _wait(path, expiry)


def _results(path: Path, cell: Cell) -> list[dict[str, Any]] | None:
    result = path / cell.directory / 'result.json'
    return runlog.read_json(result) if result.exists() else None


def _write_plan(study: Study, contestants: list[Arm], path: Path) -> list[Cell]:
    """Writes what is known to plan.jsonl and results.jsonl, and returns the cells."""
    # What is read and what is written belong together, whoever else writes.
    with locked(path / 'lock'):
        known = plan.cells(study, contestants, lambda cell: _results(path, cell))
        runlog.write_text(path / 'plan.jsonl', plan.lines(study, known))
        runlog.write_text(path / 'results.jsonl', plan.result_lines(study, known, path))
    return known


def _work(
    path: Path, cell: Cell, command: list[str] | None, cells_left: int, expiry: float
) -> bool:
    """Trains the cell unless somebody else does; says whether there is a result by now."""
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
    return True


def _wait(path: Path, expiry: float) -> None:
    """Until a claim may have been given up, or a result may have come."""
    held = '; '.join(
        f'{cell} by {who}' for cell, who in claims.holders(path / 'claims', expiry=expiry).items()
    )
    log.info('waiting for other workers: %s', held)
    with runlog.StopRequest() as stop:
        until = time.monotonic() + min(10.0, expiry / 4)
        while time.monotonic() < until:
            if stop.requested:
                raise Stopped('stopped while waiting for other workers')
            time.sleep(0.1)
