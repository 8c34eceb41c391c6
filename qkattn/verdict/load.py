"""Reads a study directory, finished or not; a bad line is left out and named.

A study is `study.json` (the declared arms), `plan.jsonl` (one object per run known so far),
`results.jsonl` (one object per trial, those of a run in order) and one directory per run with
`metrics.jsonl`.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from qkattn.errors import ReportError
from qkattn.metrics import METRICS
from qkattn.study.tuning import KNOBS, SINGLE, VERDICT
from qkattn.verdict import reading
from qkattn.verdict.codes import Place
from qkattn.verdict.runs import PlannedRun, Trial, parse_run, parse_trial, with_log


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The tuning of every arm: screening seeds and initial grids."""

    seeds: tuple[int, ...]
    max_points: int
    max_seeds: int
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
class Study:
    """A study as its files describe it.

    Attributes:
      variants: their names include the destination of saved parameters if there are several.
      matched: None if nothing is matched.
      tuning: None if nothing is tuned.
      runs: those of the plan.
      problems: sentences about what could not be read.
    """

    name: str
    question: str | None
    baseline: str | None
    variants: tuple[str, ...]
    sizes: tuple[str, ...]
    matched: str | None
    tolerance: float
    margin: float
    destinations: tuple[str, ...]
    seeds: tuple[int, ...]
    tuning: Tuning | None
    arms: tuple[Place, ...]
    command: str | None
    directory: Path
    runs: tuple[PlannedRun, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def trials(self) -> tuple[Trial, ...]:
        return tuple(trial for run in self.runs for trial in run.trials)

    @property
    def missing(self) -> tuple[Missing, ...]:
        """Declared arms without results and planned runs that are not finished."""
        missing = []
        last = SINGLE if self.tuning is None else VERDICT
        for arm in self.arms:
            own = [run for run in self.runs if run.place == arm]
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
    path = directory / 'study.json'
    if not directory.is_dir():
        raise ReportError(f'study directory {str(directory)!r} does not exist.')
    if not path.is_file():
        raise ReportError(f'{str(path)!r} does not exist, so this is not a study directory.')
    try:
        study = _declared(directory, reading.parse_json(path.read_text(encoding='utf-8')))
    except ValueError as error:
        raise ReportError(f'{str(path)!r} cannot be read: {error}.') from error
    problems: list[str] = []
    planned = _read_plan(study, problems)
    runs = tuple(
        with_log(run, directory / run.directory / 'metrics.jsonl', problems)
        for run in _with_results(directory / 'results.jsonl', planned, problems)
    )
    if not any(run.trials for run in runs):
        detail = f' ({problems[0].removesuffix(".")})' if problems else ''
        raise ReportError(f'study {str(directory)!r} has no results yet{detail}.')
    study = dataclasses.replace(study, runs=runs)
    problems += [*_arm_problems(study.trials), *_score_problems(study.trials)]
    return dataclasses.replace(study, problems=tuple(problems))


def _declared(directory: Path, record: Any) -> Study:
    """A study as study.json declares it, without runs."""
    schema = {'tuning': dict | None, 'arms': tuple[dict, ...], 'command': str | list | None}
    reading.check(record, {'name': str, 'question': str | None} | schema)
    for arm in record['arms']:
        reading.check(arm, {'variant': str, 'size': str})
    tuning, command = record['tuning'], record['command']
    study = reading.read(
        Study,
        record,
        tuning=None if tuning is None else reading.read(Tuning, tuning),
        arms=tuple((arm['variant'], arm['size']) for arm in record['arms']),
        command=' '.join(command) if isinstance(command, list) else command,
        directory=directory,
    )
    if not study.seeds or study.tuning and not study.tuning.seeds:
        raise ValueError("field 'seeds' is [], expected at least one whole number")
    for field, valid in (('variant', study.variants), ('size', study.sizes)):
        for value in (arm[field] for arm in record['arms']):
            if value not in valid:
                raise ValueError(
                    f'an arm has {field} {value!r}, which is not one of {field}s {list(valid)}'
                )
    for knob, values in study.tuning.grids.items() if study.tuning else ():
        ascending = tuple(sorted({value for value in values if value > 0}))
        if len(values) != 1 and (not values or values != ascending):
            raise ValueError(
                f"field '{knob}s' of its tuning is {list(values)}, expected one value or several, "
                'ascending from above 0'
            )
    return study


def _read_plan(study: Study, problems: list[str]) -> dict[str, PlannedRun]:
    """The planned runs by name, in the plan's order."""
    planned: dict[str, PlannedRun] = {}
    verdicts: dict[Place, str] = {}

    def add(record: Any) -> None:
        run = parse_run(record)
        arm = f'{run.variant!r} at {run.size!r}'
        if run.place not in study.arms:
            raise ValueError(f'{arm} is no arm that study.json declares')
        if planned.get(run.name, run) != run:
            raise ValueError(f'run {run.name!r} is planned twice, differently')
        first = verdicts.setdefault(run.place, run.name) if run.stage == VERDICT else run.name
        if first != run.name:
            raise ValueError(
                f'{arm} has its verdict in run {first!r} already, {run.name!r} would be a second '
                'one'
            )
        planned[run.name] = run

    reading.for_each_line(study.directory / 'plan.jsonl', 'plan.jsonl', problems, add)
    return planned


def _with_results(
    path: Path, planned: dict[str, PlannedRun], problems: list[str]
) -> list[PlannedRun]:
    """The runs with their trials, in the order of results.jsonl and of the columns of logs."""
    trials: dict[str, dict[tuple, Trial]] = {name: {} for name in planned}

    def add(record: Any) -> None:
        reading.check(record, {'run': str})
        if (name := record['run']) not in planned:
            raise ValueError(f'run {name!r} is not in plan.jsonl')
        trial = parse_trial(record, planned[name])
        if trials[name].setdefault(trial.key, trial) != trial:
            raise ValueError(
                f'run {name!r} seed {trial.seed} repeats an earlier line with other numbers'
            )

    reading.for_each_line(path, path.name, problems, add)
    return [
        dataclasses.replace(run, trials=tuple(trials[name].values()))
        for name, run in planned.items()
    ]


def _arm_problems(trials: Iterable[Trial]) -> Iterator[str]:
    """Trials of an arm in several runs that do not belong together."""
    owners: dict[tuple, Trial] = {}
    shapes: dict[Place, Trial] = {}
    for trial in trials:
        arm = f'{trial.variant!r} at {trial.size!r}'
        owner = owners.setdefault((trial.place, trial.stage, trial.key), trial)
        if trial.stage == SINGLE and owner is not trial:
            raise ReportError(
                f'runs {owner.run!r} and {trial.run!r} both hold seed {trial.seed} of {arm} with '
                'the same settings; one seed cannot count twice.'
            )
        first = shapes.setdefault(trial.place, trial)
        if (first.parameters, first.config) != (trial.parameters, trial.config):
            yield (
                f'trials of {arm} differ in parameters or config: runs {first.run!r} and '
                f'{trial.run!r}; the table shows those of the chosen trials.'
            )


def _score_problems(trials: Sequence[Trial]) -> Iterator[str]:
    """Scores that do not compare: not computed alike (signatures), or on other numbers of texts.

    The details of a metric are the same for all trials; texts on all splits together.
    """
    for metric in METRICS.values():
        for name, kind in metric.details.items():
            fields = tuple(f'{prefix}_{name}' for prefix in metric.prefixes)
            for compared in [fields] if kind is str else [(field,) for field in fields]:
                places: dict[Any, str] = {}
                for trial, field in itertools.product(trials, compared):
                    if (value := trial.metrics[field]) is not None:
                        places.setdefault(value, f'{trial.variant!r} at {trial.size!r}')
                if len(places) > 1:
                    listed = ', '.join(f'{value} ({place})' for value, place in places.items())
                    names = '/'.join(compared)
                    yield f'scores are not comparable, {names} differs: {listed}.'
