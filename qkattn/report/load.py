"""Reads a study directory into frozen dataclasses: a partial grid is fine, a bad line is named.

A study is `study.json` (the declared arms), `plan.jsonl` (one object per cell known so far),
`results.jsonl` (one object per trial) and one directory per cell with `metrics.jsonl` and, written
last, `result.json` (its trials in order).
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qkattn.report.curves import Curve, json_lines, read_curve
from qkattn.report.declared import Planned, Tuning, read_declaration, read_plan
from qkattn.report.missing import Missing, missing
from qkattn.report.records import ReportError, Trial, check_fields, parse_trial
from qkattn.tuning import SINGLE


@dataclasses.dataclass(frozen=True)
class Cell(Planned):
    """A planned cell and its results. `progress` says how far it has come, 'step 30 of 80'."""

    trials: tuple[Trial, ...]
    curve: Curve | None
    progress: str


@dataclasses.dataclass(frozen=True)
class Study:
    """A study as its files describe it.

    `variants` are labels of arms; `arms` are (variant, size). `tuning` is None where nothing is
    tuned. `cells` are those of the plan. `problems` are sentences about what could not be read.
    """

    directory: Path
    name: str
    question: str | None
    baseline: str | None
    variants: tuple[str, ...]
    sizes: tuple[str, ...]
    matched: str | None
    fill: str | None
    tolerance: float
    margin: float
    destinations: tuple[str, ...]
    seeds: tuple[int, ...]
    tuning: Tuning | None
    arms: tuple[tuple[str, str], ...]
    command: str | None
    cells: tuple[Cell, ...]
    problems: tuple[str, ...]

    @property
    def trials(self) -> tuple[Trial, ...]:
        return tuple(trial for cell in self.cells for trial in cell.trials)

    @property
    def missing(self) -> tuple[Missing, ...]:
        """Declared arms without their result, and planned cells that are not finished."""
        return missing(self.arms, self.cells, tuned=self.tuning is not None)

    @property
    def by_name(self) -> dict[str, Cell]:
        return {cell.name: cell for cell in self.cells}


def load_study(directory: str | Path) -> Study:
    """Reads the study in `directory`.

    Raises ReportError, in one sentence, when the directory or `study.json` is missing or unreadable
    or when no trial has a result. Everything else that is wrong ends up in `Study.problems`.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ReportError(f'study directory {str(directory)!r} does not exist.')
    declared = read_declaration(directory / 'study.json')
    problems: list[str] = []
    planned = read_plan(directory / 'plan.jsonl', declared['arms'], problems)
    trials = _read_results(directory / 'results.jsonl', planned, problems)
    cells = tuple(
        _read_cell(directory, cell, trials[name], problems) for name, cell in planned.items()
    )
    if not any(cell.trials for cell in cells):
        detail = f' ({problems[0].removesuffix(".")})' if problems else ''
        raise ReportError(f'study {str(directory)!r} has no results yet{detail}.')
    _check_rows(cells, problems)
    _check_scores(cells, problems)
    return Study(directory=directory, **declared, cells=cells, problems=tuple(problems))


def _read_results(
    path: Path, planned: Mapping[str, Planned], problems: list[str]
) -> dict[str, dict[tuple, Trial]]:
    trials: dict[str, dict[tuple, Trial]] = {name: {} for name in planned}
    if not path.is_file():
        problems.append(f'{path.name} does not exist.')
        return trials
    for place, record in json_lines(path, path.name, problems):
        try:
            trial = parse_trial(record)
            if trial.cell not in planned:
                raise ValueError(f'cell {trial.cell!r} is not in plan.jsonl')
            trial = _of_plan(trial, planned[trial.cell])
            known = trials[trial.cell].setdefault(trial.key, trial)
            if known != trial:
                raise ValueError(
                    f'cell {trial.cell!r} seed {trial.seed} repeats an earlier line with other '
                    'numbers'
                )
        except ValueError as error:
            problems.append(f'{place} was left out: {error}.')
    return trials


def _of_plan(trial: Trial, cell: Planned) -> Trial:
    """The trial with what only its cell knows; ValueError where the two contradict each other."""
    about = ('variant', 'size', 'stage', 'knob')
    for field, planned in [(field, getattr(cell, field)) for field in about] + [
        ('target_weights', cell.target),
        ('residual', cell.residual),
    ]:
        if getattr(trial, field) != planned:
            raise ValueError(
                f'{field} {getattr(trial, field)!r} contradicts plan.jsonl, where cell '
                f'{cell.name!r} has {planned!r}'
            )
    seeds = cell.config['trials']['seeds']
    if trial.seed not in seeds:
        raise ValueError(f'seed {trial.seed} is not one of cell {cell.name!r}, which has {seeds}')
    return dataclasses.replace(trial, score_scale=cell.config['model']['score_scale'])


def _read_cell(
    directory: Path, planned: Planned, trials: dict[tuple, Trial], problems: list[str]
) -> Cell:
    cell_directory = directory / planned.directory
    result_path = cell_directory / 'result.json'
    label = f'{planned.directory}/result.json'
    if result_path.is_file():
        try:
            records = json.loads(result_path.read_text(encoding='utf-8'))
            if not isinstance(records, list):
                raise ValueError(f'expected a list, found {type(records).__name__}')
            own = {trial.key: trial for trial in (_own_trial(r, planned) for r in records)}
        except ValueError as error:
            problems.append(f'{label} was left out: {error}.')
        else:
            trials = _joined(planned, trials, own, label, problems)
    curve, progress = read_curve(cell_directory, planned, len(trials), problems)
    return Cell(**vars(planned), trials=tuple(trials.values()), curve=curve, progress=progress)


def _joined(
    planned: Planned,
    trials: Mapping[tuple, Trial],
    own: Mapping[tuple, Trial],
    label: str,
    problems: list[str],
) -> dict[tuple, Trial]:
    for key, trial in trials.items():
        if key in own and own[key] != trial:
            problems.append(
                f'{label} and results.jsonl disagree on seed {trial.seed} at learning rate '
                f'{trial.learning_rate:g}; results.jsonl is shown.'
            )
    if own.keys() - trials.keys():
        problems.append(
            f'results.jsonl lacks {len(own.keys() - trials.keys())} of the {len(own)} trials of '
            f'cell {planned.name!r}; they were taken from {label}.'
        )
    # result.json is in trial order, which is the order of the columns of metrics.jsonl.
    extra = {key: trial for key, trial in trials.items() if key not in own}
    return {key: trials.get(key, trial) for key, trial in own.items()} | extra


def _own_trial(record: Any, cell: Planned) -> Trial:
    """A trial of result.json, which need not repeat what only the study knows about its cell."""
    about = {name: getattr(cell, name) for name in ('variant', 'size', 'stage', 'knob')}
    about |= {'cell': cell.name, 'target_weights': cell.target, 'residual': cell.residual}
    check_fields(record, {})
    trial = parse_trial(about | record)
    if trial.cell != cell.name:
        raise ValueError(f'it holds a trial of cell {trial.cell!r}')
    return _of_plan(trial, cell)


def _check_rows(cells: tuple[Cell, ...], problems: list[str]) -> None:
    """Names what would make a row (variant x size) spread over several cells mean two things."""
    owners: dict[tuple, Trial] = {}
    shapes: dict[tuple, Trial] = {}
    for cell in cells:
        for trial in cell.trials:
            place = f'{cell.variant!r} at {cell.size!r}'
            if cell.stage == SINGLE:
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
                    f'{cell.name!r}; the table shows those of the chosen trials.'
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
