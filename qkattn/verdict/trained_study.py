"""Reads a study directory, finished or not.

A bad file of the study is refused, a bad file of a run is left out and named.

A study is `study.json` (the declared arms), `plan.jsonl` (one object per run known so far),
`results.jsonl` (one object per trial, those of a run in order), `ledger.jsonl` (what was declared
and when), `yardsticks.json` and one directory per run with `metrics.jsonl` and `documents.json`. A
stored study (`qkattn.study.stored`) has its logs in an archive.
"""

import dataclasses
import statistics
import typing
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qkattn import config
from qkattn.config import Config, ControlsConfig, TuningConfig, fingerprint_of, from_json
from qkattn.config.setting import check_section
from qkattn.errors import ReportError, RunDirectoryError
from qkattn.storage import ledger
from qkattn.storage.files import Files, as_path
from qkattn.storage.ledger import Ledger
from qkattn.storage.records import check, parse_file, read, read_lines
from qkattn.study import chain, stored
from qkattn.study.arm_key import CONTROLS, LONGER, ArmKey
from qkattn.study.chain import Earlier
from qkattn.study.tuning import KNOBS, SCREENING
from qkattn.study.yardstick_definitions import is_current
from qkattn.verdict.runs import TrainedRun, Trial, parse_arm_key, parse_run, parse_trial, with_files

# plan.jsonl and results.jsonl are made from the runs.
_ADVICE = 'restore it from a copy, or remove it and resume the study, which makes it again'
# A trial in yardsticks.json: losses by position, and with the sources of other pairs.
_MEASURED = {'loss': float, **dict.fromkeys(('early', 'late', 'shuffled'), float | None)}


@dataclasses.dataclass(frozen=True)
class Yardstick:
    """The losses that a baseline has to beat, and what its models are measured to do.

    `gain` and `sources` are means over the trials of verdict runs, measured from their checkpoints
    on the last split; None where none is, or has such targets.
    """

    run: str  # the baseline's run whose data it was counted on
    task: str
    seen: int  # tokens that its models are trained on
    tokens: int | None  # those that were counted, if any
    # Nats/token by split ('val', 'test') and name; empty for a translation.
    losses: Mapping[str, Mapping[str, float]]
    gain: float | None  # fall of the loss from position 4 to the last half of the context
    sources: float | None  # rise of the loss with the sources of other pairs
    bleu: Mapping[str, float]  # of IBM model 1, by split; empty but for a translation
    is_current: bool  # whether it is recorded by the definition of this version

    def best(self, split: str) -> tuple[str, float] | None:
        """The name and the loss of the lowest on a split; None where nothing was counted."""
        return min(self.losses.get(split, {}).items(), key=lambda item: item[1], default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedStudy(config.Study):
    """A study as described by its files: its settings as declared, its runs and their results.

    `variants` are named with the destination of saved parameters, if there are several.
    """

    seeds: tuple[int, ...]  # of the verdict, those of `base`
    grids: Mapping[str, tuple[float, ...]]  # the initial grid of each knob; empty without tuning
    arms: tuple[ArmKey, ...]  # the declared ones, controls included but those trained longer
    command: str | None
    directory: Path  # where reports go
    files: Files  # the logs, which a stored study has in an archive
    declaration: str
    ledger: Ledger
    # Runs that are not what an earlier look saw, with the number of that look.
    altered: Mapping[str, int] = dataclasses.field(default_factory=dict)
    runs: tuple[TrainedRun, ...] = ()
    problems: tuple[str, ...] = ()  # sentences about files of runs that could not be read
    # By the key of the baseline; None if they are not recorded.
    yardsticks: Mapping[ArmKey, Yardstick] | None = None
    earlier: tuple[Earlier, ...] = ()  # the studies of its chain before it

    @property
    def tuned(self) -> bool:
        """Whether it is tuned, which verdicts need."""
        return bool(self.tuning.seeds)

    @property
    def trials(self) -> tuple[Trial, ...]:
        return tuple(trial for run in self.runs for trial in run.trials)

    @property
    def tuned_knobs(self) -> tuple[str, ...]:
        """The knobs with more than one value, in the order of tuning."""
        return tuple(knob for knob, values in self.grids.items() if len(values) > 1)

    @property
    def missing(self) -> tuple[ArmKey, ...]:
        """Declared and planned arms of which no run but those of the screening has results."""
        tried = {run.key for run in self.runs if run.trials and run.stage != SCREENING}
        arms = dict.fromkeys((*self.arms, *(run.key for run in self.runs)))
        return tuple(arm for arm in arms if arm not in tried)

    def verdict_seeds(self, key: ArmKey) -> tuple[int, ...]:
        """The declared seeds of an arm's verdict run."""
        return (key.control == LONGER and self.controls.longer_seeds) or self.seeds

    def question_of(self, key: ArmKey) -> ArmKey:
        """What an arm asks, the same in every study of a chain (`chain.question`)."""
        about = {'baseline': self.baseline, 'destinations': self.destinations}
        return chain.question(key, about | {'matched': self.match})

    def look(self, key: ArmKey, other: ArmKey) -> int:
        """How many studies of the chain compare two arms, this one included."""
        asked = {self.question_of(key), self.question_of(other)}
        return 1 + sum(asked <= one.questions for one in self.earlier)

    def is_variant(self, label: str, variant: str) -> bool:
        """Whether a variant, with or without a destination, names the labelled arm."""
        return variant in (label, self.bare(label))

    def bare(self, variant: str) -> str:
        """A variant without the destination in its name."""
        for destination in self.destinations:
            variant = variant.removesuffix(f' [{destination}]')
        return variant


def load_study(directory: str | Path) -> TrainedStudy:
    """Reads the study in `directory`.

    Raises ReportError if the directory, `study.json` or its ledger is missing, if a file of the
    study is unreadable, and if no trial has a result. `problems` of the study names bad files of
    runs.
    """
    directory = as_path(directory)
    declaration = directory / 'study.json'
    files = stored.opened(directory)
    if not directory.is_dir():
        problem = 'is a file' if directory.exists() else 'does not exist'
        raise ReportError(f'study directory {str(directory)!r} {problem}.')
    if not declaration.exists():
        raise ReportError(f'{str(declaration)!r} does not exist, so this is not a study directory.')
    kept = ledger.read(directory / ledger.NAME)
    try:
        study = _declared(directory, files, kept, parse_file(declaration, {}))
    except ValueError as error:
        raise ReportError(f'{str(declaration)!r} cannot be read: {error}.') from error
    problems = [*study.problems]
    try:
        planned = _read_runs(study)
        runs = [with_files(run, files, problems) for run in planned]
    except RunDirectoryError as error:
        raise ReportError(f'{error}') from error
    recorded = directory / ledger.YARDSTICKS
    try:
        yardsticks = None
        if recorded.exists():
            yardsticks = _yardsticks(recorded, study.baseline, planned)
    except ValueError as error:
        raise ReportError(f'{str(recorded)!r} cannot be read: {error}.') from error
    if not any(run.trials for run in runs):
        raise ReportError(f'study {str(directory)!r} has no results yet.')
    altered = kept.altered(ledger.seen(files))
    earlier = chain.earlier_studies(directory, kept, parse_file(declaration, {}))
    return dataclasses.replace(
        study,
        runs=tuple(runs),
        problems=tuple(problems),
        yardsticks=yardsticks,
        altered=altered,
        earlier=tuple(earlier),
    )


def _declared(directory: Path, files: Files, kept: Ledger, record: Any) -> TrainedStudy:
    """A study as study.json declares it, without runs; ValueError names what is wrong."""
    check(
        record,
        {
            'base': {'model': {'kind': str}},
            'base_hash': str,
            'controls': dict,
            'matched': str | None,
            'tuning': dict | None,
            'arms': tuple[dict, ...],
        },
    )
    tuning = record['tuning']
    grids: dict[str, tuple[float, ...]] = {}
    if tuning is not None:
        check(tuning, {f'{knob}s': tuple[float, ...] for knob in KNOBS})
        grids = {knob: tuple(tuning[f'{knob}s']) for knob in KNOBS}
    problems = []
    if record['base_hash'] != fingerprint_of(record['base']):
        problems.append('base_hash of study.json is not the hash of its base')
    study = read(
        TrainedStudy,
        record | {'match': record['matched']},
        base=read_base(record),
        tuning=read(TuningConfig, tuning or {}),
        controls=read(ControlsConfig, record['controls']),
        grids=grids,
        arms=tuple(parse_arm_key(arm) for arm in record['arms']),
        problems=tuple(problems),
        directory=directory,
        files=files,
        declaration=ledger.digest(record),
        ledger=kept,
        altered={},
        earlier=(),
    )
    check_section('tuning.', study.tuning)
    is_tuned_without_seeds = tuning is not None and not study.tuned
    if not study.seeds or is_tuned_without_seeds:
        raise ValueError("field 'seeds' is [], expected at least one whole number")
    if not study.margin > 0:
        raise ValueError(f"field 'margin' is {study.margin}, expected nats per token above 0")
    valid = {'size': study.sizes, 'corpus': study.corpora, 'control': (None, *CONTROLS)}
    for arm in study.arms:
        for field, values in valid.items():
            value = getattr(arm, field)
            if value not in values:
                raise ValueError(
                    f'an arm has {field} {value!r}, which is not one of {list(values)}'
                )
    return study


def read_base(record: Mapping[str, Any]) -> Config:
    """The config that the arms of a study.json share; ValueError where it is none."""
    return from_json(Config, known_settings(Config, record['base']))


def known_settings(cls: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `values` that the config class has; results of other versions can be read."""
    kinds = typing.get_type_hints(cls)
    known: dict[str, Any] = {}
    for name, value in values.items():
        if name not in kinds:
            continue
        is_section = dataclasses.is_dataclass(kinds[name]) and isinstance(value, dict)
        known[name] = known_settings(kinds[name], value) if is_section else value
    return known


def _read_runs(study: TrainedStudy) -> list[TrainedRun]:
    """The runs of plan.jsonl in its order, with their trials in the order of results.jsonl.

    A line that stands there twice counts once. RunDirectoryError names a bad line, and one that
    contradicts another.
    """
    planned: dict[str, TrainedRun] = {}  # by name
    trials: dict[str, dict[Hashable, Trial]] = {}  # by the name of the run; by seed and settings

    def add_run(record: Any) -> None:
        run = parse_run(record)
        if run.key.declared not in study.arms:
            raise ValueError(f'{run.key} is not an arm that study.json declares')
        if planned.setdefault(run.name, run) != run:
            raise ValueError(f'run {run.name!r} is planned twice, differently')

    def add_trial(record: Any) -> None:
        check(record, {'run': str})
        name = record['run']
        if name not in planned:
            raise ValueError(f'run {name!r} is not in plan.jsonl')
        trial = parse_trial(record, planned[name])
        of_run = trials.setdefault(name, {})
        if of_run.setdefault((trial.seed, trial.settings), trial) != trial:
            raise ValueError(f'run {name!r} seed {trial.seed} has two results, which differ')

    for name, add in (('plan.jsonl', add_run), ('results.jsonl', add_trial)):
        if (study.files / name).exists():  # as soon as a worker has planned
            read_lines(study.files / name, {}, _ADVICE, add)
    return [
        dataclasses.replace(run, trials=tuple(trials.get(name, {}).values()))
        for name, run in planned.items()
    ]


def _yardsticks(
    path: Path, baseline: str, planned: Sequence[TrainedRun]
) -> dict[ArmKey, Yardstick]:
    """Those of yardsticks.json by the key of the baseline.

    ValueError where it is damaged, or was recorded of other runs than the planned ones.
    """
    record = parse_file(path, {'groups': tuple[dict, ...], 'runs': tuple[dict, ...]})
    arms = {run.name: run.key for run in planned}
    trials_by_key: dict[ArmKey, list[dict[str, Any]]] = {}
    for run in record['runs']:
        check(run, {'run': str, 'trials': tuple[dict, ...] | None})
        key = parse_arm_key(run)
        _check_recorded(run['run'], key, arms)
        for trial in run['trials'] or ():
            check(trial, _MEASURED)
            trials_by_key.setdefault(key, []).append(trial)
    yardsticks = {}
    for group in record['groups']:
        check(group, {'run': str, 'size': str, 'corpus': str, 'longer': bool})
        control = LONGER if group['longer'] else None
        key = ArmKey(baseline, group['size'], group['corpus'], control)
        _check_recorded(group['run'], key, arms)
        bleu = group.get('bleu', {})
        check(bleu, dict.fromkeys(bleu, float))
        gains = []  # nats/token
        sources = []
        for trial in trials_by_key.get(key, []):
            if trial['early'] and trial['late']:
                gains.append(trial['early'] - trial['late'])
            if trial['shuffled']:
                sources.append(trial['shuffled'] - trial['loss'])
        yardsticks[key] = read(
            Yardstick,
            group,
            gain=statistics.fmean(gains) if gains else None,
            sources=statistics.fmean(sources) if sources else None,
            bleu=bleu,
            is_current=is_current(group),
        )
    return yardsticks


def _check_recorded(run: str, key: ArmKey, planned: Mapping[str, ArmKey]) -> None:
    """Raises ValueError unless the run of a yardstick is planned for the same arm.

    A run that is trained longer may have left the plan: once arms are added, fewer are decided.
    """
    if run not in planned and key.control == LONGER:
        return
    if planned.get(run) != key:
        arm = planned.get(run, 'no arm of this study')
        raise ValueError(f'run {run!r} is recorded for {key}, but planned for {arm}')
