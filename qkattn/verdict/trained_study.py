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
    path = declared = directory / 'study.json'
    files = stored.opened(directory)
    if not directory.is_dir():
        problem = 'is a file' if directory.exists() else 'does not exist'
        raise ReportError(f'study directory {str(directory)!r} {problem}.')
    if not path.exists():
        raise ReportError(f'{str(path)!r} does not exist, so this is not a study directory.')
    kept = ledger.read(directory / ledger.NAME)
    try:
        study = _declared(directory, files, kept, parse_file(path, {}))
    except ValueError as error:
        raise ReportError(f'{str(path)!r} cannot be read: {error}.') from error
    problems = [*study.problems]
    try:
        planned = _read_runs(study)
        runs = [with_files(run, files, problems) for run in planned]
    except RunDirectoryError as error:
        raise ReportError(f'{error}') from error
    path = directory / ledger.YARDSTICKS
    try:
        yardsticks = _yardsticks(path, study.baseline, planned) if path.exists() else None
    except ValueError as error:
        raise ReportError(f'{str(path)!r} cannot be read: {error}.') from error
    if not any(run.trials for run in runs):
        raise ReportError(f'study {str(directory)!r} has no results yet.')
    return dataclasses.replace(
        study,
        runs=tuple(runs),
        problems=tuple(problems),
        yardsticks=yardsticks,
        altered=kept.altered(ledger.seen(files)),
        earlier=tuple(chain.earlier_studies(directory, kept, parse_file(declared, {}))),
    )


def _declared(directory: Path, files: Files, kept: Ledger, record: Any) -> TrainedStudy:
    """A study as study.json declares it, without runs; ValueError names what is wrong."""
    kinds = {'base': {'model': {'kind': str}}, 'base_hash': str, 'controls': dict}
    kinds |= {'matched': str | None, 'tuning': dict | None, 'arms': tuple[dict, ...]}
    check(record, kinds)
    if (tuning := record['tuning']) is not None:
        check(tuning, {f'{knob}s': tuple[float, ...] for knob in KNOBS})
    is_hash = record['base_hash'] == fingerprint_of(record['base'])
    study = read(
        TrainedStudy,
        record | {'match': record['matched']},
        base=read_base(record),
        tuning=read(TuningConfig, tuning or {}),
        controls=read(ControlsConfig, record['controls']),
        grids={} if tuning is None else {knob: tuple(tuning[f'{knob}s']) for knob in KNOBS},
        arms=tuple(map(parse_arm_key, record['arms'])),
        problems=() if is_hash else ('base_hash of study.json is not the hash of its base',),
        directory=directory,
        files=files,
        declaration=ledger.digest(record),
        ledger=kept,
        altered={},
        earlier=(),
    )
    check_section('tuning.', study.tuning)
    if not study.seeds or tuning is not None and not study.tuned:
        raise ValueError("field 'seeds' is [], expected at least one whole number")
    if not study.margin > 0:
        raise ValueError(f"field 'margin' is {study.margin}, expected nats per token above 0")
    valid = {'size': study.sizes, 'corpus': study.corpora, 'control': (None, *CONTROLS)}
    for arm in study.arms:
        for field, among in valid.items():
            if (value := getattr(arm, field)) not in among:
                raise ValueError(f'an arm has {field} {value!r}, which is not one of {list(among)}')
    return study


def read_base(record: Mapping[str, Any]) -> Config:
    """The config that the arms of a study.json share; ValueError where it is none."""
    return from_json(Config, known_settings(Config, record['base']))


def known_settings(cls: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that this version knows; results of others can be read."""
    kinds = typing.get_type_hints(cls)
    known = {name: value for name, value in values.items() if name in kinds}
    sections = {n: v for n, v in known.items() if dataclasses.is_dataclass(kinds[n])}
    return known | {
        n: known_settings(kinds[n], v) for n, v in sections.items() if isinstance(v, dict)
    }


def _read_runs(study: TrainedStudy) -> list[TrainedRun]:
    """The planned runs in the plan's order, with the trials of results.jsonl in that of logs."""
    planned: dict[str, TrainedRun] = {}
    trials: dict[str, dict[Hashable, Trial]] = {}

    def add_run(record: Any) -> None:
        run = parse_run(record)
        if run.key.declared not in study.arms:
            raise ValueError(f'{run.key} is not an arm that study.json declares')
        if planned.setdefault(run.name, run) != run:
            raise ValueError(f'run {run.name!r} is planned twice, differently')

    def add_trial(record: Any) -> None:
        check(record, {'run': str})
        if (name := record['run']) not in planned:
            raise ValueError(f'run {name!r} is not in plan.jsonl')
        trial = parse_trial(record, planned[name])
        if trials.setdefault(name, {}).setdefault((trial.seed, trial.at), trial) != trial:
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
    measured: dict[ArmKey, list[dict[str, Any]]] = {}
    for run in record['runs']:
        check(run, {'run': str, 'trials': tuple[dict, ...] | None})
        key = parse_arm_key(run)
        _check_recorded(run['run'], key, arms)
        for trial in run['trials'] or ():
            check(trial, _MEASURED)
            measured.setdefault(key, []).append(trial)

    def mean(values: list[float]) -> float | None:
        return statistics.fmean(values) if values else None

    yardsticks = {}
    for group in record['groups']:
        check(group, {'run': str, 'size': str, 'corpus': str, 'longer': bool})
        control = LONGER if group['longer'] else None
        key = ArmKey(baseline, group['size'], group['corpus'], control)
        _check_recorded(group['run'], key, arms)
        trials = measured.get(key, [])
        gain = mean([t['early'] - t['late'] for t in trials if t['early'] and t['late']])
        sources = mean([t['shuffled'] - t['loss'] for t in trials if t['shuffled']])
        measures: dict[str, Any] = {'gain': gain, 'sources': sources}
        measures |= {'bleu': group.get('bleu', {}), 'is_current': is_current(group)}
        check(measures['bleu'], dict.fromkeys(measures['bleu'], float))
        yardsticks[key] = read(Yardstick, group, **measures)
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
