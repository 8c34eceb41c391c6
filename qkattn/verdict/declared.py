"""The declaration of a study (study.json) and its plan (plan.jsonl, one line per run)."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qkattn.errors import ReportError
from qkattn.study.tuning import KNOBS, VERDICT
from qkattn.verdict import reading
from qkattn.verdict.trials import check_stage


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The tuning of every arm: screening seeds and initial grids."""

    seeds: tuple[int, ...]
    max_points: int
    learning_rates: tuple[float, ...]
    weight_decays: tuple[float, ...]
    score_scales: tuple[float, ...]

    @property
    def grids(self) -> dict[str, tuple[float, ...]]:
        """The initial grid of each knob, in the order of tuning."""
        return {knob: getattr(self, f'{knob}s') for knob in KNOBS}

    @property
    def knobs(self) -> tuple[str, ...]:
        """The knobs that are tuned: those with more than one value."""
        return tuple(knob for knob, values in self.grids.items() if len(values) > 1)


@dataclasses.dataclass(frozen=True)
class Declaration:
    """A study as study.json declares it.

    `arms` are (variant, size). If the study has several destinations of saved parameters, a
    variant's name includes its destination. `matched` and `fill` are None if nothing is matched,
    `tuning` if nothing is tuned.
    """

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


@dataclasses.dataclass(frozen=True)
class Planned:
    """One line of plan.jsonl.

    `directory` is relative to the study; `target` and `residual` are None if nothing is matched;
    `config` is the resolved config as JSON.
    """

    name: str
    variant: str
    size: str
    destination: str | None
    stage: str
    knob: str | None
    directory: str
    num_trials: int
    target: float | None
    residual: float | None
    config: Mapping[str, Any]

    @property
    def num_steps(self) -> int:
        return self.config['train']['num_steps']


_CONFIG = {
    'model': {'score_scale': float},
    'optimizer': {'schedule': str, 'final_fraction': float},
    'train': {'num_steps': int},
    'trials': {'seeds': tuple[int, ...]},
}


def read_declaration(path: Path) -> Declaration:
    """Reads study.json; raises ReportError if it cannot be read."""
    if not path.is_file():
        raise ReportError(f'{str(path)!r} does not exist, so this is not a study directory.')
    try:
        return _declaration(json.loads(path.read_text(encoding='utf-8')))
    except ValueError as error:
        raise ReportError(f'{str(path)!r} cannot be read: {error}.') from error


def _declaration(record: Any) -> Declaration:
    schema = {'tuning': dict | None, 'arms': tuple[dict, ...], 'command': str | list | None}
    reading.check(record, {'name': str, 'question': str | None} | schema)
    for arm in record['arms']:
        reading.check(arm, {'variant': str, 'size': str})
    command = record['command']
    declared = reading.read(
        Declaration,
        record,
        tuning=None if record['tuning'] is None else _tuning(record['tuning']),
        arms=tuple((arm['variant'], arm['size']) for arm in record['arms']),
        command=' '.join(command) if isinstance(command, list) else command,
    )
    _check_seeds(declared.seeds)
    for variant, size in declared.arms:
        for field, value in (('variant', variant), ('size', size)):
            valid = getattr(declared, f'{field}s')
            if value not in valid:
                raise ValueError(
                    f'an arm has {field} {value!r}, which is not one of {field}s {list(valid)}'
                )
    return declared


def _tuning(record: Any) -> Tuning:
    tuning = reading.read(Tuning, record)
    _check_seeds(tuning.seeds)
    for knob, values in tuning.grids.items():
        several = len(values) > 1
        if not values or several and tuple(sorted({v for v in values if v > 0})) != values:
            raise ValueError(
                f"field '{knob}s' of its tuning is {list(values)}, expected one value or several, "
                'ascending from above 0'
            )
    return tuning


def _check_seeds(seeds: tuple[int, ...]) -> None:
    if not seeds:
        raise ValueError("field 'seeds' is [], expected at least one whole number")


def read_plan(
    path: Path, arms: tuple[tuple[str, str], ...], problems: list[str]
) -> dict[str, Planned]:
    """The planned runs by name, in the plan's order; bad lines become problems."""
    planned: dict[str, Planned] = {}
    verdicts: dict[tuple[str, str], str] = {}
    if not path.is_file():
        problems.append(f'{path.name} does not exist, so no run is known.')
        return planned
    for place, record in reading.json_lines(path, path.name, problems):
        try:
            run = _planned(record)
            arm = f'{run.variant!r} at {run.size!r}'
            if (run.variant, run.size) not in arms:
                raise ValueError(f'{arm} is no arm that study.json declares')
            if planned.get(run.name, run) != run:
                raise ValueError(f'run {run.name!r} is planned twice, differently')
            if run.stage == VERDICT:
                first = verdicts.setdefault((run.variant, run.size), run.name)
                if first != run.name:
                    raise ValueError(
                        f'{arm} has its verdict in run {first!r} already, {run.name!r} would be a '
                        'second one'
                    )
            planned[run.name] = run
        except ValueError as error:
            problems.append(f'{place} was left out: {error}.')
    return planned


def _planned(record: Any) -> Planned:
    reading.check(record, {'run': str, 'trials': int, 'config': _CONFIG})
    run = reading.read(Planned, record, name=record['run'], num_trials=record['trials'])
    check_stage(run.stage, run.knob)
    _check_seeds(run.config['trials']['seeds'])
    return run
