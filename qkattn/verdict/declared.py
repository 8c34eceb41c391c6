"""What a study declares and has planned: study.json, and plan.jsonl with one line per run."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qkattn.errors import ReportError
from qkattn.study.tuning import KNOBS, VERDICT
from qkattn.verdict.curves import json_lines
from qkattn.verdict.trials import MAPPING, NUMBER, OPTIONAL, TEXT, check_fields, check_stage


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How each arm finds its settings: screening seeds, and the values every grid starts from."""

    seeds: tuple[int, ...]
    max_points: int
    learning_rates: tuple[float, ...]
    weight_decays: tuple[float, ...]
    score_scales: tuple[float, ...]

    @property
    def grids(self) -> dict[str, tuple[float, ...]]:
        """Where the search for each setting starts, in the order of tuning."""
        return {knob: getattr(self, f'{knob}s') for knob in KNOBS}

    @property
    def knobs(self) -> tuple[str, ...]:
        """The settings that are tuned: those with more than one value."""
        return tuple(knob for knob, values in self.grids.items() if len(values) > 1)


@dataclasses.dataclass(frozen=True)
class Planned:
    """One line of plan.jsonl.

    `variant` is the arm's label, `directory` is relative to the study, `target` and `residual` are
    None where nothing is matched, `config` is the resolved config as JSON.
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


_STUDY_FIELDS: dict[str, tuple[type, ...]] = {
    'name': TEXT,
    'question': TEXT + OPTIONAL,
    'baseline': TEXT + OPTIONAL,
    'variants': (list,),
    'sizes': (list,),
    'matched': TEXT + OPTIONAL,
    'fill': TEXT + OPTIONAL,
    'tolerance': NUMBER,
    'margin': NUMBER,
    'destinations': (list,),
    'seeds': (list,),
    'tuning': MAPPING + OPTIONAL,
    'arms': (list,),
    'command': (str, list) + OPTIONAL,
}
_TUNING_FIELDS: dict[str, tuple[type, ...]] = {
    'seeds': (list,),
    'max_points': (int,),
    'learning_rates': (list,),
    'weight_decays': (list,),
    'score_scales': (list,),
}
_PLAN_FIELDS: dict[str, tuple[type, ...]] = {
    'run': TEXT,
    'variant': TEXT,
    'size': TEXT,
    'destination': TEXT + OPTIONAL,
    'stage': TEXT,
    'knob': TEXT + OPTIONAL,
    'directory': TEXT,
    'trials': (int,),
    'target': NUMBER + OPTIONAL,
    'residual': NUMBER + OPTIONAL,
    'config': MAPPING,
}
_CONFIG_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    'model': {'score_scale': NUMBER},
    'optimizer': {'schedule': TEXT, 'final_fraction': NUMBER},
    'train': {'num_steps': (int,)},
    'trials': {'seeds': (list,)},
}


def read_declaration(path: Path) -> dict[str, Any]:
    """study.json, its lists as tuples; ReportError, in one sentence, where it cannot be read."""
    if not path.is_file():
        raise ReportError(f'{str(path)!r} does not exist, so this is not a study directory.')
    try:
        declared = json.loads(path.read_text(encoding='utf-8'))
        check_fields(declared, _STUDY_FIELDS)
        _check_seeds(declared['seeds'])
        if declared['tuning'] is not None:
            _check_tuning(declared['tuning'])
        for arm in declared['arms']:
            _check_arm(arm, declared)
    except ValueError as error:
        raise ReportError(f'{str(path)!r} cannot be read: {error}.') from error
    command, tuning = declared['command'], declared['tuning']
    values = {
        name: tuple(declared[name]) if types == (list,) else declared[name]
        for name, types in _STUDY_FIELDS.items()
    }
    values['arms'] = tuple((arm['variant'], arm['size']) for arm in declared['arms'])
    values['command'] = ' '.join(command) if isinstance(command, list) else command
    values['tuning'] = None if tuning is None else Tuning(**_tuples(tuning))
    return values


def _tuples(tuning: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: tuning[name] for name in _TUNING_FIELDS}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}


def _check_tuning(tuning: Mapping[str, Any]) -> None:
    check_fields(tuning, _TUNING_FIELDS)
    _check_seeds(tuning['seeds'])
    for name in (f'{knob}s' for knob in KNOBS):
        values = tuning[name]
        for value in values:
            check_fields({name: value}, {name: NUMBER})
        if not values or len(values) > 1 and sorted({v for v in values if v > 0}) != values:
            raise ValueError(
                f'field {name!r} of its tuning is {values}, expected one value or several, '
                'ascending from above 0'
            )


def _check_seeds(seeds: list) -> None:
    if not seeds or not all(type(seed) is int for seed in seeds):
        raise ValueError(f"field 'seeds' is {seeds}, expected whole numbers, at least one")


def _check_arm(arm: Any, declared: Mapping[str, Any]) -> None:
    check_fields(arm, {'variant': TEXT, 'size': TEXT})
    for field in ('variant', 'size'):
        if arm[field] not in declared[f'{field}s']:
            raise ValueError(
                f'an arm has {field} {arm[field]!r}, which is not one of {field}s '
                f'{declared[f"{field}s"]}'
            )


def read_plan(
    path: Path, arms: tuple[tuple[str, str], ...], problems: list[str]
) -> dict[str, Planned]:
    """The runs known so far, by name, in the plan's order; bad lines become problems."""
    planned: dict[str, Planned] = {}
    verdicts: dict[tuple[str, str], str] = {}
    if not path.is_file():
        problems.append(f'{path.name} does not exist, so no run is known.')
        return planned
    for place, record in json_lines(path, path.name, problems):
        try:
            run = _planned(record)
            if (run.variant, run.size) not in arms:
                raise ValueError(
                    f'{run.variant!r} at {run.size!r} is no arm that study.json declares'
                )
            if planned.get(run.name, run) != run:
                raise ValueError(f'run {run.name!r} is planned twice, differently')
            if run.stage == VERDICT:
                first = verdicts.setdefault((run.variant, run.size), run.name)
                if first != run.name:
                    raise ValueError(
                        f'{run.variant!r} at {run.size!r} has its verdict in run {first!r} '
                        f'already, {run.name!r} would be a second one'
                    )
            planned[run.name] = run
        except ValueError as error:
            problems.append(f'{place} was left out: {error}.')
    return planned


def _planned(record: Any) -> Planned:
    check_fields(record, _PLAN_FIELDS)
    check_stage(record)
    for part, fields in _CONFIG_FIELDS.items():
        check_fields(record['config'], {part: MAPPING})
        check_fields(record['config'][part], fields)
    _check_seeds(record['config']['trials']['seeds'])
    values = {name: record[name] for name in _PLAN_FIELDS if name not in ('run', 'trials')}
    return Planned(name=record['run'], num_trials=record['trials'], **values)
