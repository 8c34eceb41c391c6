"""Reads a study directory, finished or not; a bad line is left out and named.

A study is `study.json` (the declared arms), `plan.jsonl` (one object per run known so far),
`results.jsonl` (one object per trial, those of a run in order), `ledger.jsonl` (what was declared
and when), `orphans.jsonl` (runs outside the plan) and one directory per run with `metrics.jsonl`
and `documents.json`; or the files of `qkattn.study.stored`, from which these are made.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qkattn.config.study_config import Choice
from qkattn.errors import ReportError
from qkattn.storage import ledger
from qkattn.storage.files import as_path
from qkattn.storage.ledger import Ledger
from qkattn.storage.records import ORPHAN, RUN_FILES, check, for_each_line, parse_file, read
from qkattn.study import stored
from qkattn.study.place import CONTROLS, EQUAL_SHAPE, Place, parse_expected
from qkattn.study.tuning import KNOBS, SINGLE, VERDICT
from qkattn.verdict.consistency import arm_problems, document_problems, named, score_problems
from qkattn.verdict.runs import (
    PlannedRun,
    Trial,
    lost_logs,
    parse_place,
    parse_run,
    parse_trial,
    with_documents,
    with_log,
)
from qkattn.verdict.yardstick import Yardsticks, read_yardsticks


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The tuning of every arm: screening seeds and initial grids."""

    seeds: tuple[int, ...]
    max_points: int
    max_seeds: int
    learning_rates: tuple[float, ...]
    weight_decays: tuple[float, ...]
    score_scales: tuple[float, ...]
    init_embeddings: tuple[float, ...]
    init_qks: tuple[float, ...]
    init_vos: tuple[float, ...]
    init_mlps: tuple[float, ...]
    choice: Choice = 'vertex'

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
    place: Place
    stage: str | None
    knob: str | None = None
    step: int | None = None
    num_steps: int | None = None


@dataclasses.dataclass(frozen=True)
class Study:
    """A study as its files describe it.

    Attributes:
      variants: their names include the destination of saved parameters if there are several.
      corpora: names of data sets, each with arms of its own.
      matched: None if nothing is matched.
      tuning: None if nothing is tuned.
      looks: numbers of verdict seeds at which arms are judged, ascending; all seeds are the last.
      controls: `equal_shape`, `longer` and `longer_seeds` of the config.
      expected: the positive controls, as in the config.
      arms: the declared ones, controls included but those that are trained longer.
      base, base_hash: the settings that all arms share, as JSON, and their fingerprint.
      directory, files: where reports go, and where logs are; two for a stored study.
      ledger: None in a study without tuning that has none.
      altered: the runs that are not what an earlier look saw, with the number of that look.
      orphans: directories of runs that are no part of the plan.
      runs: those of the plan.
      yardsticks: None if they are not recorded.
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
    corpora: tuple[str, ...]
    looks: tuple[int, ...]
    controls: Mapping[str, Any]
    arms: tuple[Place, ...]
    base: Mapping[str, Any]
    base_hash: str
    command: str | None
    directory: Path
    files: Path
    declaration: str
    ledger: Ledger | None = None
    altered: Mapping[str, int] = dataclasses.field(default_factory=dict)
    orphans: tuple[str, ...] = ()
    runs: tuple[PlannedRun, ...] = ()
    problems: tuple[str, ...] = ()
    yardsticks: Yardsticks | None = None
    expected: tuple[str, ...] = ()

    @property
    def trials(self) -> tuple[Trial, ...]:
        return tuple(trial for run in self.runs for trial in run.trials)

    @property
    def has_documents(self) -> bool:
        """Whether trials have losses by document; those of earlier versions have none."""
        return any(trial.documents for trial in self.trials)

    @property
    def missing(self) -> tuple[Missing, ...]:
        """Declared arms without results and planned runs that are not finished."""
        missing = []
        last = SINGLE if self.tuning is None else VERDICT
        for arm in dict.fromkeys((*self.arms, *(run.place for run in self.runs))):
            own = [run for run in self.runs if run.place == arm]
            waiting = [run for run in own if not run.trials]
            missing += [
                Missing(run.name, arm, run.stage, run.knob, run.step, run.num_steps)
                for run in waiting
            ]
            if not waiting and not any(run.stage == last for run in own):
                missing.append(Missing(None, arm, last if own else None))
        return tuple(missing)

    @property
    def by_name(self) -> dict[str, PlannedRun]:
        return {run.name: run for run in self.runs}

    def bare(self, variant: str) -> str:
        """A variant without the destination in its name."""
        for destination in self.destinations:
            variant = variant.removesuffix(f' [{destination}]')
        return variant


def load_study(directory: str | Path) -> Study:
    """Reads the study in `directory`.

    Raises ReportError if the directory or `study.json` is missing or unreadable, if no trial has a
    result, or if two runs hold the same trial. Other errors are listed in `Study.problems`.
    """
    directory = as_path(directory)
    path, files = directory / 'study.json', stored.opened(directory)
    if not directory.is_dir():
        raise ReportError(f'study directory {str(directory)!r} does not exist.')
    if not path.exists() and (directory / 'config.json').exists():
        raise ReportError(f'{str(directory)!r} is the directory of a run; give it as --run.')
    if not path.exists():
        raise ReportError(f'{str(path)!r} does not exist, so this is not a study directory.')
    try:
        study = _declared(directory, files, parse_file(path, {}))
    except ValueError as error:
        raise ReportError(f'{str(path)!r} cannot be read: {error}.') from error
    problems: list[str] = []
    planned = _read_plan(study, problems)
    for run in planned.values():
        problems += _damaged(files, run)
    with_results = _with_results(files / 'results.jsonl', planned, problems)
    problems += lost_logs(with_results, files)
    runs = tuple(
        with_documents(with_log(run, files, problems), files, problems) for run in with_results
    )
    if not any(run.trials for run in runs):
        detail = f' ({problems[0].removesuffix(".")})' if problems else ''
        raise ReportError(f'study {str(directory)!r} has no results yet{detail}.')
    entries = directory / ledger.NAME
    kept = ledger.read(entries) if study.tuning or entries.exists() else None
    study = dataclasses.replace(
        study,
        runs=runs,
        ledger=kept,
        altered=kept.altered(ledger.seen(files)) if kept else {},
        orphans=_read_orphans(files / 'orphans.jsonl', problems),
        yardsticks=read_yardsticks(directory, problems),
    )
    problems += [
        *arm_problems(study.trials),
        *score_problems(study.trials),
        *document_problems(study.trials),
    ]
    return dataclasses.replace(study, problems=tuple(problems))


def _declared(directory: Path, files: Path, record: Any) -> Study:
    """A study as study.json declares it, without runs."""
    schema = {'tuning': dict | None, 'arms': tuple[dict, ...], 'command': str | list | None}
    check(record, {'name': str, 'question': str | None} | schema)
    if not {'base', 'corpora', 'controls', 'looks'} <= record.keys():
        raise ValueError(
            "it is of an older format without 'base', 'corpora', 'controls' and 'looks'; run the "
            'study again, or report it with the version that made it'
        )
    controls = {'equal_shape': bool, 'longer': float | None, 'longer_seeds': tuple[int, ...]}
    check(record, {name: tuple[int, ...] for name in ('seeds', 'looks')} | {'controls': controls})
    tuning, command = record['tuning'], record['command']
    study = read(
        Study,
        record,
        tuning=None if tuning is None else read(Tuning, tuning),
        looks=tuple(record['looks']) or (len(record['seeds']),),
        arms=tuple(parse_place(arm) for arm in record['arms']),
        command=' '.join(command) if isinstance(command, list) else command,
        directory=directory,
        files=files,
        declaration=ledger.digest(record),
        ledger=None,
        altered={},
        orphans=(),
    )
    if not study.seeds or study.tuning and not study.tuning.seeds:
        raise ValueError("field 'seeds' is [], expected at least one whole number")
    if study.looks[-1] != len(study.seeds) or list(study.looks) != sorted(set(study.looks)):
        raise ValueError(
            f"field 'looks' is {list(study.looks)}, expected numbers of seeds that ascend to all "
            f'{len(study.seeds)}'
        )
    for text in study.expected:
        if parse_expected(text).variant not in {arm.variant for arm in study.arms}:
            raise ValueError(f"field 'expected' holds {text!r}, which is about no declared arm")
    if not study.margin > 0:
        raise ValueError(f"field 'margin' is {study.margin}, expected nats per token above 0")
    valid = {'size': study.sizes, 'corpus': study.corpora, 'control': (None, *CONTROLS)}
    for arm in study.arms:
        of_arm = valid | ({} if arm.control == EQUAL_SHAPE else {'variant': study.variants})
        for field, among in of_arm.items():
            if (value := getattr(arm, field)) not in among:
                raise ValueError(f'an arm has {field} {value!r}, which is not one of {list(among)}')
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
    verdicts: dict[tuple[Place, int], str] = {}

    def add(record: Any) -> None:
        run = parse_run(record)
        if run.place.declared not in study.arms:
            raise ValueError(f'{named(run.place)} is no arm that study.json declares')
        if planned.get(run.name, run) != run:
            raise ValueError(f'run {run.name!r} is planned twice, differently')
        for seed in run.seeds if run.stage == VERDICT else ():
            if (first := verdicts.get((run.place, seed), run.name)) != run.name:
                raise ValueError(
                    f'{named(run.place)} has its verdict on seed {seed} in run {first!r} already, '
                    f'{run.name!r} would be a second one'
                )
        verdicts.update({(run.place, seed): run.name for seed in run.seeds if run.stage == VERDICT})
        planned[run.name] = run

    for_each_line(study.files / 'plan.jsonl', 'plan.jsonl', problems, add)
    return planned


def _damaged(directory: Path, run: PlannedRun) -> Iterator[str]:
    """The damaged files of a run that no number of a report comes from."""
    for name, schema in RUN_FILES.items():
        path = directory / run.directory / name
        try:
            if path.exists():
                parse_file(path, schema)
        except (OSError, ValueError) as error:
            yield f'{run.directory}/{name} is damaged: {error}.'


def _with_results(
    path: Path, planned: dict[str, PlannedRun], problems: list[str]
) -> list[PlannedRun]:
    """The runs with their trials, in the order of results.jsonl and of the columns of logs."""
    trials: dict[str, dict[tuple, Trial]] = {name: {} for name in planned}

    def add(record: Any) -> None:
        check(record, {'run': str})
        if (name := record['run']) not in planned:
            raise ValueError(f'run {name!r} is not in plan.jsonl')
        trial = parse_trial(record, planned[name])
        if trials[name].setdefault(trial.key, trial) != trial:
            raise ValueError(
                f'run {name!r} seed {trial.seed} repeats an earlier line with other numbers'
            )

    for_each_line(path, path.name, problems, add)
    return [
        dataclasses.replace(run, trials=tuple(trials[name].values()))
        for name, run in planned.items()
    ]


def _read_orphans(path: Path, problems: list[str]) -> tuple[str, ...]:
    """The directories of runs that are no part of the plan."""
    found: list[str] = []

    def add(record: Any) -> None:
        check(record, ORPHAN)
        found.append(record['directory'])

    if path.exists():
        for_each_line(path, path.name, problems, add)
    return tuple(found)
