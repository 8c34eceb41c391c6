"""Reads a study directory into frozen dataclasses: a partial grid is fine, a bad line is named.

A study is `study.json` (the declared grid), `results.jsonl` (one object per trial) and one
directory per cell with `metrics.jsonl` and, written last, `result.json` (its trials in order).
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from qkattn.report.curves import Curve, json_lines, read_curve
from qkattn.report.records import (
    OPTIONAL,
    TEXT,
    ReportError,
    Trial,
    check_fields,
    parse_trial,
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One architecture of the grid. `progress` says how far a cell without results has come."""

    name: str
    variant: str
    size: str
    directory: Path
    trials: tuple[Trial, ...]
    curve: Curve | None
    progress: str


@dataclasses.dataclass(frozen=True)
class Study:
    """A study as its files describe it. `problems` are sentences about what could not be read."""

    directory: Path
    name: str
    question: str | None
    baseline: str | None
    variants: tuple[str, ...]
    sizes: tuple[str, ...]
    matched: str | None
    command: str | None
    cells: tuple[Cell, ...]
    problems: tuple[str, ...]

    @property
    def trials(self) -> tuple[Trial, ...]:
        return tuple(trial for cell in self.cells for trial in cell.trials)

    @property
    def missing(self) -> tuple[Cell, ...]:
        """Cells of the declared grid that have no result yet."""
        return tuple(cell for cell in self.cells if not cell.trials)


_STUDY_FIELDS: dict[str, tuple[type, ...]] = {
    'name': TEXT,
    'question': TEXT + OPTIONAL,
    'baseline': TEXT + OPTIONAL,
    'variants': (list,),
    'sizes': (list,),
    'matched': TEXT + OPTIONAL,
    'cells': (list,),
    'command': (str, list) + OPTIONAL,
}
_CELL_FIELDS = dict.fromkeys(('cell', 'variant', 'size', 'directory'), TEXT)


def load_study(directory: str | Path) -> Study:
    """Reads the study in `directory`.

    Raises ReportError, in one sentence, when the directory or `study.json` is missing or unreadable
    or when no trial has a result. Everything else that is wrong ends up in `Study.problems`.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ReportError(f'study directory {str(directory)!r} does not exist.')
    declared = _read_declaration(directory / 'study.json')
    problems: list[str] = []
    trials = _read_results(directory / 'results.jsonl', declared['cells'], problems)
    cells = tuple(
        _read_cell(directory, entry, trials[entry['cell']], problems) for entry in declared['cells']
    )
    if not any(cell.trials for cell in cells):
        detail = f' ({problems[0].removesuffix(".")})' if problems else ''
        raise ReportError(f'study {str(directory)!r} has no results yet{detail}.')
    _check_rows(cells, problems)
    _check_scores(cells, problems)
    command = declared['command']
    return Study(
        directory=directory,
        name=declared['name'],
        question=declared['question'],
        baseline=declared['baseline'],
        variants=tuple(declared['variants']),
        sizes=tuple(declared['sizes']),
        matched=declared['matched'],
        command=' '.join(command) if isinstance(command, list) else command,
        cells=cells,
        problems=tuple(problems),
    )


def _read_declaration(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ReportError(f'{str(path)!r} does not exist, so this is not a study directory.')
    try:
        declared = json.loads(path.read_text(encoding='utf-8'))
        check_fields(declared, _STUDY_FIELDS)
        for entry in declared['cells']:
            check_fields(entry, _CELL_FIELDS)
            for field in ('variant', 'size'):
                if entry[field] not in declared[f'{field}s']:
                    raise ValueError(
                        f'cell {entry["cell"]!r} has {field} {entry[field]!r}, which is not one of '
                        f'{field}s {declared[f"{field}s"]}'
                    )
    except ValueError as error:
        raise ReportError(f'{str(path)!r} cannot be read: {error}.') from error
    return declared


def _read_results(
    path: Path, entries: list[dict[str, str]], problems: list[str]
) -> dict[str, dict[tuple, Trial]]:
    declared = {entry['cell']: entry for entry in entries}
    trials: dict[str, dict[tuple, Trial]] = {name: {} for name in declared}
    if not path.is_file():
        problems.append(f'{path.name} does not exist.')
        return trials
    for place, record in json_lines(path, path.name, problems):
        try:
            trial = parse_trial(record)
            if trial.cell not in declared:
                raise ValueError(f'cell {trial.cell!r} is not declared in study.json')
            for field in ('variant', 'size'):
                if getattr(trial, field) != declared[trial.cell][field]:
                    raise ValueError(
                        f'{field} {getattr(trial, field)!r} contradicts study.json, where cell '
                        f'{trial.cell!r} has {declared[trial.cell][field]!r}'
                    )
            known = trials[trial.cell].setdefault(trial.key, trial)
            if known != trial:
                raise ValueError(
                    f'cell {trial.cell!r} seed {trial.seed} repeats an earlier line with other '
                    'numbers'
                )
        except ValueError as error:
            problems.append(f'{place} was left out: {error}.')
    return trials


def _read_cell(
    directory: Path, entry: dict[str, str], trials: dict[tuple, Trial], problems: list[str]
) -> Cell:
    cell_directory = directory / entry['directory']
    result_path = cell_directory / 'result.json'
    label = f'{entry["directory"]}/result.json'
    if result_path.is_file():
        try:
            records = json.loads(result_path.read_text(encoding='utf-8'))
            if not isinstance(records, list):
                raise ValueError(f'expected a list, found {type(records).__name__}')
            own = {trial.key: trial for trial in (_own_trial(r, entry, trials) for r in records)}
        except ValueError as error:
            problems.append(f'{label} was left out: {error}.')
        else:
            for key, trial in trials.items():
                if key in own and own[key] != trial:
                    problems.append(
                        f'{label} and results.jsonl disagree on seed {trial.seed} at learning rate '
                        f'{trial.learning_rate:g}; results.jsonl is shown.'
                    )
            if own.keys() - trials.keys():
                problems.append(
                    f'results.jsonl lacks {len(own.keys() - trials.keys())} of the {len(own)} '
                    f'trials of cell {entry["cell"]!r}; they were taken from {label}.'
                )
            # result.json is in trial order, which is the order of the columns of metrics.jsonl.
            extra = {key: trial for key, trial in trials.items() if key not in own}
            trials = {key: trials.get(key, trial) for key, trial in own.items()} | extra
    curve, progress = read_curve(cell_directory, entry, len(trials), problems)
    return Cell(
        name=entry['cell'],
        variant=entry['variant'],
        size=entry['size'],
        directory=cell_directory,
        trials=tuple(trials.values()),
        curve=curve,
        progress=progress,
    )


def _own_trial(record: Any, entry: dict[str, str], trials: dict[tuple, Trial]) -> Trial:
    """A trial of result.json, which need not repeat what only the study knows about its cell."""
    about = {name: entry[name] for name in ('cell', 'variant', 'size')}
    about |= {'target_weights': None, 'residual': None}
    check_fields(record, {})
    trial = parse_trial(about | record)
    if trial.cell != entry['cell']:
        raise ValueError(f'it holds a trial of cell {trial.cell!r}')
    shown = trials.get(trial.key)
    if shown is None or 'residual' in record:
        return trial
    return dataclasses.replace(trial, target_weights=shown.target_weights, residual=shown.residual)


def _check_rows(cells: tuple[Cell, ...], problems: list[str]) -> None:
    """Names what would make a row (variant x size) spread over several cells mean two things."""
    owners: dict[tuple, Trial] = {}
    shapes: dict[tuple, Trial] = {}
    for cell in cells:
        for trial in cell.trials:
            place = f'{cell.variant!r} at {cell.size!r}'
            owner = owners.setdefault((cell.variant, cell.size, trial.key), trial)
            if owner is not trial:
                raise ReportError(
                    f'cells {owner.cell!r} and {cell.name!r} both hold seed {trial.seed} of '
                    f'{place} with the same settings; one seed cannot count twice.'
                )
            first = shapes.setdefault((cell.variant, cell.size), trial)
            if (first.weights, first.config) != (trial.weights, trial.config):
                problems.append(
                    f'trials of {place} differ in weights or config: cells {first.cell!r} and '
                    f'{cell.name!r}; the table shows those of the best learning rate.'
                )


def _check_scores(cells: tuple[Cell, ...], problems: list[str]) -> None:
    """Names translation scores that may not be compared: otherwise made, or of other sentences."""
    for name, fields in (
        ('BLEU signatures', ('val_bleu_signature', 'test_bleu_signature')),
        ('chrF signatures', ('val_chrf_signature', 'test_chrf_signature')),
        ('numbers of validation sentences', ('val_num_sentences',)),
        ('numbers of test sentences', ('test_num_sentences',)),
    ):
        places: dict[Any, str] = {}
        for cell in cells:
            for trial in cell.trials:
                for value in (getattr(trial, field) for field in fields):
                    if value is not None:
                        places.setdefault(value, f'{cell.variant!r} at {cell.size!r}')
        if len(places) > 1:
            listed = ', '.join(f'{value} ({place})' for value, place in places.items())
            problems.append(f'{name} differ, so the scores of these rows do not compare: {listed}.')
