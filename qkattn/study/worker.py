"""A worker of a study: acquires the lease of a run, trains it, extends the plan, and repeats.

Any number of workers may share a study's directory. A run is trained by one of them at a time, and
the run of a worker that died is resumed from its last checkpoint.
"""

import json
import logging
import time
from pathlib import Path
from typing import Any

from qkattn.config import Study
from qkattn.data.documents import check_documents
from qkattn.data.tasks.task_registry import rows_of
from qkattn.errors import (
    CheckpointError,
    ConfigError,
    DiskError,
    InUseError,
    Lost,
    RunDirectoryError,
    Stopped,
)
from qkattn.run import leases, ledger
from qkattn.run.file_schemas import CONFIG, STUDY, read_results
from qkattn.run.files import check_directory, locked, make_directory, write_atomic
from qkattn.run.json_schema import check, flat
from qkattn.run.records import damaged, read_json, to_jsonable, write_json
from qkattn.run.signals import StopRequest
from qkattn.study import plan
from qkattn.study.arms import Arm, build_arms
from qkattn.study.plan import PlannedRun
from qkattn.train import sharding, train

# Fields of study.json that may gain values when a directory is used again, and those that may
# differ altogether.
GROWING = ('variants', 'sizes', 'corpora')
EXTENSIBLE = (*GROWING, 'arms', 'question', 'command')
# Settings of the base that workers on several machines may each have their own of.
OF_MACHINE, OF_MACHINE_DATA = ('mesh',), ('data_dir', 'manual_dir')

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
        for run in {run.config.data: run for run in _known(study, arms, path)[1]}.values():
            sharding.require_devices(run.config.mesh)
            rows = rows_of(run.config)
            if study.tuning.seeds:
                check_documents(rows, run.config.data)
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
    """Writes study.json and the ledger; raises unless the directory's study is this or smaller."""
    with locked(path / 'lock'):
        file, entries = path / 'study.json', path / ledger.NAME
        if file.exists():
            earlier = read_json(file, {})
            declared = _extended(file, earlier, declared)
            hashes = {ledger.digest(study) for study in (earlier, declared)}
            if ledger.read(entries).declaration not in hashes:
                raise ConfigError(
                    f'{file} is not what {entries} declares last; restore both from a copy, or '
                    'give another workdir'
                )
        elif (path / 'runs').exists() or (
            entries.exists() and ledger.read(entries).declaration != ledger.digest(declared)
        ):
            raise ConfigError(
                f'workdir={path} holds runs or a ledger, but no study.json; restore it from a '
                'copy, or give another workdir'
            )
        ledger.declare(path, declared)
        if not file.exists() or ledger.digest(earlier) != ledger.digest(declared):
            write_json(file, declared)


def _extended(file: Path, earlier: Any, declared: dict[str, Any]) -> dict[str, Any]:
    """What is declared, with the machine's settings of before; raises unless it extends that."""
    missing = declared.keys() - earlier.keys()
    if missing or (unknown := earlier.keys() - declared.keys()):
        problem = f'no field {min(missing)!r}' if missing else f'a field {min(unknown)!r}'
        raise ConfigError(
            f'{file} has {problem}, so it is not the declaration of a study that can be continued; '
            'give another workdir'
        )
    try:
        check(earlier, STUDY)
    except ValueError as error:
        raise damaged(file, error) from error
    of_machine = {name: earlier['base'][name] for name in OF_MACHINE}
    data = {name: earlier['base']['data'][name] for name in OF_MACHINE_DATA}
    base = declared['base'] | of_machine
    declared = declared | {'base': base | {'data': base['data'] | data}}
    old, new = (
        dict(flat({name: value for name, value in of.items() if name not in EXTENSIBLE}))
        for of in (earlier, declared)
    )
    for name in sorted(old.keys() | new.keys()):
        was, now = (repr(of[name]) if name in of else 'nothing' for of in (old, new))
        if was != now:
            seeds = ', or declare looks for seeds to add' if name == 'base.trials.seeds' else ''
            raise ConfigError(
                f'workdir={file.parent} holds a study with another {name}, {was} instead of {now}; '
                f'set it back or give another workdir{seeds}'
            )
    for name in GROWING:
        if gone := [value for value in earlier[name] if value not in declared[name]]:
            raise ConfigError(
                f'workdir={file.parent} holds a study whose {name} have {gone[0]!r}; they may '
                'grow but not shrink: put it back or give another workdir'
            )
    return declared


def _known(study: Study, arms: list[Arm], path: Path) -> _Known:
    """Returns every run known so far, those of them without a result, and the results."""
    read: dict[str, list[dict[str, Any]] | None] = {}

    def results(run: PlannedRun) -> list[dict[str, Any]] | None:
        # Each file is read once, so that the plan and the runs left are of the same moment.
        if run.directory not in read:
            result = path / run.directory / 'result.json'
            trials = run.config.trials.trials()
            read[run.directory] = read_results(result, trials) if result.exists() else None
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
        _list_orphans(path, {run.directory for run in runs})
    return left


def _list_orphans(path: Path, planned: set[str]) -> None:
    """Writes orphans.jsonl: the run directories that do not belong to the plan, and their results.

    They are kept: a line has {directory, run, config, results}, null where nothing was written or
    the file is damaged.
    """
    lines = []
    for directory in sorted(path.glob('runs/*')):
        if (name := directory.relative_to(path).as_posix()) not in planned:
            about = _readable(directory / 'config.json', CONFIG)
            about = about or {'hash': None, 'config': None}
            line = {'directory': name, 'run': about['hash'], 'config': about['config']}
            line['results'] = _readable(directory / 'result.json', [{}])
            lines.append(json.dumps(line) + '\n')
    file, text = path / 'orphans.jsonl', ''.join(lines)
    if file.is_dir() or text.encode() != (file.read_bytes() if file.exists() else b''):
        write_atomic(file, text)
        log.warning(
            '%d of the run directories in %s do not belong to the plan; orphans.jsonl lists them',
            len(lines),
            path,
        )


def _readable(path: Path, schema: Any) -> Any:
    """The content of an orphan's file; None if there is none, or it is damaged, which is named."""
    try:
        return read_json(path, schema) if path.exists() else None
    except RunDirectoryError as error:
        log.warning('%s', error)
        return None


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
                description=f'{run.arm.title} {run.knob or run.stage}',
                runs_left=runs_left,
                lost=lambda: lease.lost,
            )
        except (InUseError, Lost) as error:
            log.warning('%s; continuing with another run', error)
            return False
        except DiskError:
            raise  # no other run could be saved either
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
