"""Reads a study directory, finished or not; a bad line is left out and named.

A study is `study.json` (the declared arms), `plan.jsonl` (one object per run known so far),
`results.jsonl` (one object per trial, those of a run in order), `ledger.jsonl` (what was declared
and when), `orphans.jsonl` (runs outside the plan), `yardsticks.json` and one directory per run with
`metrics.jsonl` and `documents.json`; or the files of `qkattn.study.stored`, which give these.
"""

import dataclasses
import statistics
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from qkattn.config import TuningConfig
from qkattn.errors import ReportError
from qkattn.metrics import outside
from qkattn.storage import ledger
from qkattn.storage.files import as_path
from qkattn.storage.ledger import Ledger
from qkattn.storage.records import ORPHAN, RUN_FILES, check, for_each_line, parse_file, read
from qkattn.study import rules, stored
from qkattn.study.arm_key import CONTROLS, ArmKey, parse_expected
from qkattn.study.tuning import KNOBS, SCREENING, SINGLE, VERDICT
from qkattn.verdict.runs import (
    Run,
    Trial,
    lost_logs,
    parse_arm_key,
    parse_run,
    parse_trial,
    with_documents,
    with_log,
)


@dataclasses.dataclass(frozen=True)
class Measured:
    """A trial of a verdict run, measured from its checkpoint; nats/token on the last split."""

    seed: int
    loss: float
    # By position: '1', ..., '5-8', ...; None, as the next three, where there is no such target.
    positions: Mapping[str, float | None]
    early: float | None  # at position 4
    late: float | None  # over the last half of the context
    shuffled: float | None  # with the sources of other pairs


@dataclasses.dataclass(frozen=True)
class Yardstick:
    """What the models of one size, corpus and length of training have to beat."""

    run: str  # the baseline's run whose data it was counted on
    task: str
    seen: int  # tokens that the models of the group are trained on
    tokens: int | None  # those that were counted, if any
    # Nats/token by split ('val', 'test') and name; empty for a translation.
    losses: Mapping[str, Mapping[str, float]]

    def best(self, split: str) -> tuple[str, float] | None:
        """The name and the loss of the lowest on a split; None where nothing was counted."""
        return min(self.losses.get(split, {}).items(), key=lambda item: item[1], default=None)


@dataclasses.dataclass(frozen=True)
class Yardsticks:
    """Of a study: by (size, corpus, whether trained longer), and by arm what was measured of it."""

    groups: Mapping[tuple[str, str, bool], Yardstick]
    measured: Mapping[ArmKey, tuple[Measured, ...]]

    def gain(self, key: ArmKey) -> float | None:
        """How much the loss falls from position 4 to the last half; None if not recorded."""
        falls = [m.early - m.late for m in self.measured.get(key, ()) if m.early and m.late]
        return statistics.fmean(falls) if falls else None

    def sources(self, key: ArmKey) -> float | None:
        """How much the loss rises where sources are shuffled; None if not recorded."""
        rises = [m.shuffled - m.loss for m in self.measured.get(key, ()) if m.shuffled]
        return statistics.fmean(rises) if rises else None


@dataclasses.dataclass(frozen=True)
class Missing:
    """An arm or a planned run without results."""

    name: str | None  # of the run, as `stage` and `knob`; None if none is planned yet
    key: ArmKey
    stage: str | None
    knob: str | None = None
    step: int | None = None  # the last logged one, of `num_steps`; None if the run has not started
    num_steps: int | None = None


@dataclasses.dataclass(frozen=True)
class Study:
    """A study as its files describe it."""

    name: str
    question: str | None
    baseline: str | None
    variants: tuple[str, ...]  # named with the destination of saved parameters, if several
    sizes: tuple[str, ...]
    matched: str | None
    tolerance: float
    margin: float
    destinations: tuple[str, ...]
    seeds: tuple[int, ...]
    tuning: TuningConfig | None  # None if nothing is tuned
    grids: Mapping[str, tuple[float, ...]]  # the initial grid of each knob; empty without tuning
    corpora: tuple[str, ...]
    # Numbers of verdict seeds at which arms are judged, ascending; all seeds are the last.
    looks: tuple[int, ...]
    controls: Mapping[str, Any]
    arms: tuple[ArmKey, ...]  # the declared ones, controls included but those trained longer
    base: Mapping[str, Any]  # the settings that all arms share, as JSON
    base_hash: str  # their fingerprint
    command: str | None
    directory: Path  # where reports go
    files: Path  # where logs are; another than `directory` for a stored study
    declaration: str
    ledger: Ledger | None = None
    # Runs that are not what an earlier look saw, with the number of that look.
    altered: Mapping[str, int] = dataclasses.field(default_factory=dict)
    orphans: tuple[str, ...] = ()  # directories of runs that are no part of the plan
    runs: tuple[Run, ...] = ()
    problems: tuple[str, ...] = ()  # sentences about what could not be read
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
    def tuned_knobs(self) -> tuple[str, ...]:
        """The knobs with more than one value, in the order of tuning."""
        return tuple(knob for knob, values in self.grids.items() if len(values) > 1)

    @property
    def missing(self) -> tuple[Missing, ...]:
        """Declared arms without results and planned runs that are not finished."""
        missing = []
        last = SINGLE if self.tuning is None else VERDICT
        for arm in dict.fromkeys((*self.arms, *(run.key for run in self.runs))):
            of_arm = [run for run in self.runs if run.key == arm]
            waiting = [run for run in of_arm if not run.trials]
            missing += [
                Missing(run.name, arm, run.stage, run.knob, run.step, run.num_steps)
                for run in waiting
            ]
            if not waiting and not any(run.stage == last for run in of_arm):
                missing.append(Missing(None, arm, last if of_arm else None))
        return tuple(missing)

    @property
    def by_name(self) -> dict[str, Run]:
        return {run.name: run for run in self.runs}

    def bare(self, variant: str) -> str:
        """A variant without the destination in its name."""
        for destination in self.destinations:
            variant = variant.removesuffix(f' [{destination}]')
        return variant


def named(key: ArmKey) -> str:
    """'b/vo' at 'd_model=128' on 'stdlib' as a sentence names it, with its control if it is one."""
    return f'{key.variant!r} at {key.size!r} on {key.corpus!r}' + (
        f' ({key.control})' if key.control else ''
    )


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
    runs = _with_results(files / 'results.jsonl', _read_plan(study, problems), problems)
    problems += [problem for run in runs for problem in _damaged(files, run)]
    problems += lost_logs(runs, files)
    runs = [with_documents(with_log(run, files, problems), files, problems) for run in runs]
    if not any(run.trials for run in runs):
        detail = f' ({problems[0].removesuffix(".")})' if problems else ''
        raise ReportError(f'study {str(directory)!r} has no results yet{detail}.')
    entries = directory / ledger.NAME
    kept = ledger.read(entries) if study.tuning or entries.exists() else None
    study = dataclasses.replace(
        study,
        runs=tuple(runs),
        ledger=kept,
        altered=kept.altered(ledger.seen(files)) if kept else {},
        orphans=_read_orphans(files / 'orphans.jsonl', problems),
        yardsticks=_read_yardsticks(directory / ledger.YARDSTICKS, problems),
    )
    problems += _unlike(study.trials)
    return dataclasses.replace(study, problems=tuple(problems))


def _declared(directory: Path, files: Path, record: Any) -> Study:
    """A study as study.json declares it, without runs; ValueError names what is wrong."""
    ints = tuple[int, ...]
    controls = {'equal_shape': bool, 'longer': float | None, 'longer_seeds': ints}
    fields = {'tuning': dict | None, 'arms': tuple[dict, ...], 'command': str | list | None}
    check(record, {'controls': controls, 'seeds': ints, 'looks': ints} | fields)
    tuning, command = record['tuning'], record['command']
    if tuning is not None:
        check(tuning, {f'{knob}s': tuple[float, ...] for knob in KNOBS} | {'seeds': ints})
    grids = {} if tuning is None else {knob: tuple(tuning[f'{knob}s']) for knob in KNOBS}
    study = read(
        Study,
        record,
        tuning=None if tuning is None else read(TuningConfig, tuning),
        grids=grids,
        looks=tuple(record['looks']) or (len(record['seeds']),),
        arms=tuple(parse_arm_key(arm) for arm in record['arms']),
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
    if not study.margin > 0:
        raise ValueError(f"field 'margin' is {study.margin}, expected nats per token above 0")
    broken = [*rules.looks(study.looks, len(study.seeds))]
    broken += rules.grids({f'tuning.{knob}s': values for knob, values in grids.items()})
    labels = tuple(dict.fromkeys(arm.variant for arm in study.arms))
    for text in study.expected:
        broken += rules.known(text, parse_expected(text).variant, labels, study.baseline)
    for code, data in broken:
        raise ValueError(rules.sentence(code, data))
    valid = {'size': study.sizes, 'corpus': study.corpora, 'control': (None, *CONTROLS)}
    for arm in study.arms:
        for field, among in valid.items():
            if (value := getattr(arm, field)) not in among:
                raise ValueError(f'an arm has {field} {value!r}, which is not one of {list(among)}')
    return study


def _read_plan(study: Study, problems: list[str]) -> dict[str, Run]:
    """The planned runs by name, in the plan's order."""
    planned: dict[str, Run] = {}
    verdicts: dict[tuple[ArmKey, int], str] = {}

    def add(record: Any) -> None:
        run = parse_run(record)
        if run.key.declared not in study.arms:
            raise ValueError(f'{named(run.key)} is no arm that study.json declares')
        if planned.get(run.name, run) != run:
            raise ValueError(f'run {run.name!r} is planned twice, differently')
        judged = [(run.key, seed) for seed in run.seeds if run.stage == VERDICT]
        for key, seed in judged:
            if (first := verdicts.get((key, seed), run.name)) != run.name:
                raise ValueError(
                    f'{named(key)} has its verdict on seed {seed} in run {first!r} already, '
                    f'{run.name!r} would be a second one'
                )
        verdicts.update(dict.fromkeys(judged, run.name))
        planned[run.name] = run

    for_each_line(study.files / 'plan.jsonl', 'plan.jsonl', problems, add)
    return planned


def _damaged(directory: Path, run: Run) -> Iterator[str]:
    """The damaged files of a run that no number of a report comes from."""
    for name, schema in RUN_FILES.items():
        path = directory / run.directory / name
        try:
            if path.exists():
                parse_file(path, schema)
        except (OSError, ValueError) as error:
            yield f'{run.directory}/{name} is damaged: {error}.'


def _with_results(path: Path, planned: dict[str, Run], problems: list[str]) -> list[Run]:
    """The runs with their trials, in the order of results.jsonl and of the columns of logs."""
    trials: dict[str, dict[tuple, Trial]] = {name: {} for name in planned}

    def add(record: Any) -> None:
        check(record, {'run': str})
        if (name := record['run']) not in planned:
            raise ValueError(f'run {name!r} is not in plan.jsonl')
        trial = parse_trial(record, planned[name])
        if trials[name].setdefault((trial.seed, trial.settings), trial) != trial:
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
    orphans: list[str] = []

    def add(record: Any) -> None:
        check(record, ORPHAN)
        orphans.append(record['directory'])

    if path.exists():
        for_each_line(path, path.name, problems, add)
    return tuple(orphans)


def _read_yardsticks(path: Path, problems: list[str]) -> Yardsticks | None:
    """The yardsticks of a study; None if they are not recorded, or damaged, which is a problem."""
    if not path.exists():
        return None
    try:
        record = parse_file(path, {'groups': tuple[dict, ...], 'runs': tuple[dict, ...]})
        groups: dict[tuple[str, str, bool], Yardstick] = {}
        measured: dict[ArmKey, tuple[Measured, ...]] = {}
        for group in record['groups']:
            check(group, {'size': str, 'corpus': str, 'longer': bool})
            groups[group['size'], group['corpus'], group['longer']] = read(Yardstick, group)
        for run in record['runs']:
            check(run, {'trials': tuple[dict, ...] | None})
            trials = tuple(read(Measured, trial) for trial in run['trials'] or ())
            key = parse_arm_key(run)
            measured[key] = measured.get(key, ()) + trials
    except (OSError, ValueError) as error:
        problems.append(f'{path.name} is damaged: {error}.')
        return None
    return Yardsticks(groups, measured)


def _unlike(trials: Iterable[Trial]) -> Iterator[str]:
    """Trials that do not belong together, or whose numbers do not compare.

    ReportError if two runs hold one seed of an arm with the same settings.
    """
    firsts: dict[Hashable, tuple[Trial, Any]] = {}
    differ: set[Hashable] = set()
    for trial in trials:
        for about, value in _comparable(trial):
            first, expected = firsts.setdefault(about, (trial, value))
            if about[0] == 'run' and first is not trial:
                raise ReportError(
                    f'runs {first.run!r} and {trial.run!r} both hold seed {trial.seed} of '
                    f'{named(trial.key)} with the same settings; one seed cannot count twice.'
                )
            if value != expected and about not in differ:
                differ.add(about)
                yield (
                    f'results are not comparable, {about[0]} differ: runs {first.run!r} '
                    f'({named(first.key)}) and {trial.run!r} ({named(trial.key)}).'
                )


def _comparable(trial: Trial) -> Iterator[tuple[tuple, Any]]:
    """Facts of a trial that are equal wherever their keys are: a name, and what shares it."""
    if trial.stage == SINGLE:
        yield ('run', trial.key, trial.seed, trial.settings), None
    yield ('parameters or config', trial.key), (trial.parameters, trial.config)
    for split, documents in trial.documents.items() if trial.stage != SCREENING else ():
        group = trial.key.size, trial.key.corpus
        yield (f'documents of {split}', *group), (documents.names, documents.tokens_C.tobytes())
    for name, metric in outside(trial.declared_metrics).items():
        yield (f'descriptions of metric {name!r}',), metric
    for metric in trial.declared_metrics.values():
        for name, kind in metric.details.items():
            for prefix in metric.prefixes:
                if (value := trial.metrics[field := f'{prefix}_{name}']) is not None:
                    yield (name if kind is str else field,), value
