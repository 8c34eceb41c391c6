"""Reads a study directory, finished or not; a bad line is left out and named.

A study is `study.json` (the declared arms), `plan.jsonl` (one object per run known so far),
`results.jsonl` (one object per trial) and one directory per run with `metrics.jsonl` and, written
last, `result.json` (its trials in order).
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qkattn.errors import ReportError
from qkattn.metrics import METRICS
from qkattn.study.tuning import SINGLE, VERDICT
from qkattn.verdict import reading
from qkattn.verdict.curves import Curve, read_curve
from qkattn.verdict.declared import Declaration, Planned, read_declaration, read_plan
from qkattn.verdict.trials import Trial, parse_trial

# What both a trial and its planned run state: the field of Trial and that of Planned.
_SHARED = {name: name for name in ('variant', 'size', 'stage', 'knob', 'residual')} | {
    'run': 'name',
    'target_parameters': 'target',
}
_Trials = dict[tuple, Trial]


@dataclasses.dataclass(frozen=True)
class PlannedRun(Planned):
    """A planned run and its results; `step` is the last logged step, if any."""

    trials: tuple[Trial, ...]
    curve: Curve | None
    step: int | None


@dataclasses.dataclass(frozen=True)
class Missing:
    """An arm or a planned run without results.

    Attributes:
      name: of the run; None if none is planned yet.
      stage, knob: of the run; None for an arm without planned runs.
      step: the last logged step, of `num_steps`; None if the run has not started.
    """

    name: str | None
    variant: str
    size: str
    stage: str | None
    knob: str | None = None
    step: int | None = None
    num_steps: int | None = None


@dataclasses.dataclass(frozen=True)
class Study(Declaration):
    """A study as its files describe it.

    `runs` are those of the plan. `problems` are sentences about what could not be read.
    """

    directory: Path
    runs: tuple[PlannedRun, ...]
    problems: tuple[str, ...]

    @property
    def trials(self) -> tuple[Trial, ...]:
        return tuple(trial for run in self.runs for trial in run.trials)

    @property
    def missing(self) -> tuple[Missing, ...]:
        """Declared arms without results and planned runs that are not finished."""
        missing = []
        last = SINGLE if self.tuning is None else VERDICT
        for arm in self.arms:
            own = [run for run in self.runs if (run.variant, run.size) == arm]
            waiting = [run for run in own if not run.trials]
            missing += [
                Missing(run.name, *arm, run.stage, run.knob, run.step, run.num_steps)
                for run in waiting
            ]
            if not waiting and not any(run.stage == last for run in own):
                missing.append(Missing(None, *arm, last if own else None))
        return tuple(missing)

    @property
    def by_name(self) -> dict[str, PlannedRun]:
        return {run.name: run for run in self.runs}


def load_study(directory: str | Path) -> Study:
    """Reads the study in `directory`.

    Raises ReportError if the directory or `study.json` is missing or unreadable, if no trial has a
    result, or if two runs hold the same trial. Other errors are listed in `Study.problems`.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ReportError(f'study directory {str(directory)!r} does not exist.')
    declared = read_declaration(directory / 'study.json')
    problems: list[str] = []
    planned = read_plan(directory / 'plan.jsonl', declared.arms, problems)
    trials = _read_results(directory / 'results.jsonl', planned, problems)
    runs = tuple(_read_run(directory, run, trials[name], problems) for name, run in planned.items())
    if not any(run.trials for run in runs):
        detail = f' ({problems[0].removesuffix(".")})' if problems else ''
        raise ReportError(f'study {str(directory)!r} has no results yet{detail}.')
    _check_arms(runs, problems)
    _check_scores(runs, problems)
    return Study(directory=directory, **vars(declared), runs=runs, problems=tuple(problems))


def _read_results(
    path: Path, planned: Mapping[str, Planned], problems: list[str]
) -> dict[str, _Trials]:
    trials: dict[str, _Trials] = {name: {} for name in planned}
    if not path.is_file():
        problems.append(f'{path.name} does not exist.')
        return trials
    for place, record in reading.json_lines(path, path.name, problems):
        try:
            trial = parse_trial(record)
            if trial.run not in planned:
                raise ValueError(f'run {trial.run!r} is not in plan.jsonl')
            trial = _of_plan(trial, planned[trial.run])
            if trials[trial.run].setdefault(trial.key, trial) != trial:
                raise ValueError(
                    f'run {trial.run!r} seed {trial.seed} repeats an earlier line with other '
                    'numbers'
                )
        except ValueError as error:
            problems.append(f'{place} was left out: {error}.')
    return trials


def _of_plan(trial: Trial, run: Planned) -> Trial:
    """The trial with the score scale of its run; ValueError if it contradicts the plan."""
    for field, planned in ((field, getattr(run, name)) for field, name in _SHARED.items()):
        if getattr(trial, field) != planned:
            raise ValueError(
                f'{field} {getattr(trial, field)!r} contradicts plan.jsonl, where run '
                f'{run.name!r} has {planned!r}'
            )
    seeds = run.config['trials']['seeds']
    if trial.seed not in seeds:
        raise ValueError(f'seed {trial.seed} is not one of run {run.name!r}, which has {seeds}')
    return dataclasses.replace(trial, score_scale=run.config['model']['score_scale'])


def _read_run(
    directory: Path, planned: Planned, trials: _Trials, problems: list[str]
) -> PlannedRun:
    run_directory = directory / planned.directory
    result_path = run_directory / 'result.json'
    label = f'{planned.directory}/{result_path.name}'
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
    curve, step = read_curve(run_directory, planned, len(trials), problems)
    return PlannedRun(**vars(planned), trials=tuple(trials.values()), curve=curve, step=step)


def _own_trial(record: Any, run: Planned) -> Trial:
    """A trial of result.json, which need not repeat what the plan states."""
    reading.check(record, {})
    trial = parse_trial({field: getattr(run, name) for field, name in _SHARED.items()} | record)
    if trial.run != run.name:
        raise ValueError(f'it holds a trial of run {trial.run!r}')
    return _of_plan(trial, run)


def _joined(
    planned: Planned, trials: _Trials, own: _Trials, label: str, problems: list[str]
) -> _Trials:
    for key, trial in trials.items():
        if own.get(key, trial) != trial:
            problems.append(
                f'{label} and results.jsonl disagree on seed {trial.seed} at learning rate '
                f'{trial.learning_rate:g}; results.jsonl is shown.'
            )
    if absent := own.keys() - trials.keys():
        problems.append(
            f'results.jsonl lacks {len(absent)} of the {len(own)} trials of run {planned.name!r}; '
            f'they were taken from {label}.'
        )
    # result.json is in trial order, which is the order of the columns of metrics.jsonl.
    return {key: trials.get(key, trial) for key, trial in (own | trials).items()}


def _check_arms(runs: tuple[PlannedRun, ...], problems: list[str]) -> None:
    """Checks that the trials of an arm in several runs belong together."""
    owners: dict[tuple, Trial] = {}
    shapes: dict[tuple, Trial] = {}
    for run in runs:
        for trial in run.trials:
            place = f'{run.variant!r} at {run.size!r}'
            if run.stage == SINGLE:
                owner = owners.setdefault((run.variant, run.size, trial.key), trial)
                if owner is not trial:
                    raise ReportError(
                        f'runs {owner.run!r} and {run.name!r} both hold seed {trial.seed} of '
                        f'{place} with the same settings; one seed cannot count twice.'
                    )
            first = shapes.setdefault((run.variant, run.size), trial)
            if (first.parameters, first.config) != (trial.parameters, trial.config):
                problems.append(
                    f'trials of {place} differ in parameters or config: runs {first.run!r} and '
                    f'{run.name!r}; the table shows those of the chosen trials.'
                )


def _check_scores(runs: tuple[PlannedRun, ...], problems: list[str]) -> None:
    """Checks that scores are comparable: computed alike (signatures), on equally many sentences."""
    trials = [trial for run in runs for trial in run.trials]
    for fields in _comparable_fields():
        places: dict[Any, str] = {}
        for trial, field in itertools.product(trials, fields):
            if (value := trial.metrics[field]) is not None:
                places.setdefault(value, f'{trial.variant!r} at {trial.size!r}')
        if len(places) > 1:
            listed = ', '.join(f'{value} ({place})' for value, place in places.items())
            problems.append(f'scores are not comparable, {"/".join(fields)} differs: {listed}.')


def _comparable_fields() -> Iterator[tuple[str, ...]]:
    """Details of metrics that are the same for all trials; texts on all splits together."""
    for metric in METRICS.values():
        for name, kind in metric.details.items():
            fields = tuple(f'{prefix}_{name}' for prefix in metric.prefixes)
            yield from [fields] if kind is str else [(field,) for field in fields]
