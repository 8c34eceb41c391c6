"""Reads a study directory, finished or not.

A directory has these files; a stored study (`qkattn.study.stored`) has its logs in an archive:

    study.json         the declared arms
    plan.jsonl         one line for each run planned so far
    results.jsonl      one line for each trial
    ledger.jsonl       what was declared and looked at, and when
    yardsticks.json    what the baselines have to beat
    RUN/metrics.jsonl, RUN/documents.json    the log and the losses by document of each run

If a file of the study is bad, reading fails. If a file of a run is bad, it is left out and named.
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
from qkattn.storage.records import check, parse_file, read_dataclass, read_lines
from qkattn.study import chain, stored
from qkattn.study.arm_key import CONTROLS, LONGER, ArmKey
from qkattn.study.chain import Earlier
from qkattn.study.tuning import KNOBS, SCREENING
from qkattn.study.yardstick_definitions import is_current
from qkattn.verdict.runs import (
    TrainedRun,
    Trial,
    parse_arm_key,
    parse_run,
    parse_trial,
    with_run_files,
)

# Workers write plan.jsonl and results.jsonl again from the runs.
_ADVICE = 'restore it from a copy, or remove it and resume the study, which makes it again'
# The fields of a trial in yardsticks.json, with their types.
_MEASURED = {'loss': float, **dict.fromkeys(('early', 'late', 'shuffled'), float | None)}


@dataclasses.dataclass(frozen=True)
class Yardstick:
    """What a baseline has to beat, and what was measured on its models.

    The two gains are means over the trials of verdict runs, measured from their checkpoints on the
    last split, in nats/token. They are None if no trial was measured or the task does not define
    them.
    """

    run: str  # the baseline's run on whose data the tokens were counted
    task: str
    seen: int  # the number of tokens that a model was trained on
    tokens: int | None  # the number of tokens that were counted, if any
    # Nats/token by split ('val', 'test') and name of the method; empty for a translation.
    losses: Mapping[str, Mapping[str, float]]
    # How far the loss falls from position 4 to the last half of the context.
    context_gain: float | None
    # How far the loss rises if sources are exchanged for those of other pairs.
    source_gain: float | None
    bleu: Mapping[str, float]  # of IBM model 1, by split; only for a translation
    is_current: bool  # whether it was recorded with this version's definition

    def best(self, split: str) -> tuple[str, float] | None:
        """Returns the name and the loss of the best method on a split; None if there is none."""
        loss_of_method = self.losses.get(split, {})
        if not loss_of_method:
            return None
        best_name = min(loss_of_method, key=lambda name: loss_of_method[name])
        return best_name, loss_of_method[best_name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedStudy(config.Study):
    """A study as its files describe it: its declared settings, its runs and their results.

    If there are several destinations of saved parameters, the names in `variants` contain them.
    """

    seeds: tuple[int, ...]  # the seeds of the verdict
    grids: Mapping[str, tuple[float, ...]]  # the initial grid of each knob; empty without tuning
    arms: tuple[ArmKey, ...]  # the declared arms and controls, without those trained longer
    command: str | None
    directory: Path  # where reports go
    files: Files  # the files of the logs, which may be in an archive
    declaration: str  # the digest of study.json
    ledger: Ledger
    # Runs that have changed since an earlier look at results, with the number of the look.
    altered: Mapping[str, int] = dataclasses.field(default_factory=dict)
    runs: tuple[TrainedRun, ...] = ()
    problems: tuple[str, ...] = ()  # sentences about files of runs that could not be read
    # By the key of the baseline; None if yardsticks.json is missing.
    yardsticks: Mapping[ArmKey, Yardstick] | None = None
    earlier: tuple[Earlier, ...] = ()  # the studies that it repeats, and those that they repeat

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
        """The declared and planned arms that have no results beyond screening."""
        with_results = {run.key for run in self.runs if run.trials and run.stage != SCREENING}
        planned_arms = [run.key for run in self.runs]
        all_arms = dict.fromkeys([*self.arms, *planned_arms])
        return tuple(arm for arm in all_arms if arm not in with_results)

    def verdict_seeds(self, key: ArmKey) -> tuple[int, ...]:
        """Returns the declared seeds of an arm's verdict run."""
        if key.control == LONGER and self.controls.longer_seeds:
            return self.controls.longer_seeds
        return self.seeds

    def question_of(self, key: ArmKey) -> ArmKey:
        """Returns the arm's key that is the same in all studies of a chain (`chain.question`)."""
        declared = {
            'baseline': self.baseline,
            'destinations': self.destinations,
            'matched': self.match,
        }
        return chain.question(key, declared)

    def look(self, key: ArmKey, other: ArmKey) -> int:
        """Counts the studies of the chain that compare two arms, this one included."""
        questions = {self.question_of(key), self.question_of(other)}
        earlier_looks = [
            earlier for earlier in self.earlier if questions.issubset(earlier.questions)
        ]
        return 1 + len(earlier_looks)

    def is_variant(self, label: str, variant: str) -> bool:
        """Returns whether `variant`, with or without a destination, names the arm with a label."""
        return variant in (label, self.bare(label))

    def bare(self, variant: str) -> str:
        """Removes the destination from the name of a variant: 'qk/no_o [d_ff]' -> 'qk/no_o'."""
        for destination in self.destinations:
            variant = variant.removesuffix(f' [{destination}]')
        return variant


def load_study(directory: str | Path) -> TrainedStudy:
    """Reads the study in `directory`: what it declares, and the results of its runs.

    A bad file of a run is left out, and `problems` of the study names it. Raises ReportError if the
    directory, `study.json` or the ledger is missing, if a file of the study is bad, or if no trial
    has a result.
    """
    directory = as_path(directory)
    study_json = directory / 'study.json'
    files = stored.open_files(directory)  # the directory itself, or the archive of a stored study
    if not directory.is_dir():
        problem = 'is a file' if directory.exists() else 'does not exist'
        raise ReportError(f'study directory {str(directory)!r} {problem}.')
    if not study_json.exists():
        raise ReportError(f'{str(study_json)!r} does not exist, so this is not a study directory.')

    # What the study declares: `study` has no runs yet.
    study_ledger = ledger.read(directory / ledger.NAME)
    try:
        declared = parse_file(study_json, {})
        study = _declared_study(directory, files, study_ledger, declared)
    except ValueError as error:
        raise ReportError(f'{str(study_json)!r} cannot be read: {error}.') from error

    # Its runs with their trials, and then the log of each run. `with_run_files` adds a sentence to
    # `problems` for each bad file.
    problems = [*study.problems]
    try:
        planned = _read_runs(study)
        runs = [with_run_files(run, files, problems) for run in planned]
    except RunDirectoryError as error:
        raise ReportError(f'{error}') from error
    yardsticks = _read_yardsticks(directory / ledger.YARDSTICKS, study.baseline, planned)
    if not any(run.trials for run in runs):
        raise ReportError(f'study {str(directory)!r} has no results yet.')

    # The runs whose files have changed since results were first looked at, by their digests.
    altered = study_ledger.altered(ledger.run_digests(files))
    return dataclasses.replace(
        study,
        runs=tuple(runs),
        problems=tuple(problems),
        yardsticks=yardsticks,
        altered=altered,
        earlier=tuple(chain.earlier_studies(directory, study_ledger, declared)),
    )


def _declared_study(
    directory: Path, files: Files, study_ledger: Ledger, record: Any
) -> TrainedStudy:
    """Reads a study from `record`, the content of study.json. It has no runs and no results yet.

    Raises ValueError that names the bad field.
    """
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
    # A tuned study has a grid of each setting (knob), such as `learning_rates` for 'learning_rate'.
    tuning = record['tuning']
    grids: dict[str, tuple[float, ...]] = {}
    if tuning is not None:
        check(tuning, {f'{knob}s': tuple[float, ...] for knob in KNOBS})
        grids = {knob: tuple(tuning[f'{knob}s']) for knob in KNOBS}
    problems = []
    if record['base_hash'] != fingerprint_of(record['base']):
        problems.append('base_hash of study.json is not the hash of its base')

    # The fields that are not given here are read from the record as they are.
    study = read_dataclass(
        TrainedStudy,
        record | {'match': record['matched']},
        base=read_base(record),
        tuning=read_dataclass(TuningConfig, tuning or {}),
        controls=read_dataclass(ControlsConfig, record['controls']),
        grids=grids,
        arms=tuple(parse_arm_key(arm) for arm in record['arms']),
        problems=tuple(problems),
        directory=directory,
        files=files,
        declaration=ledger.declaration_digest(record),
        ledger=study_ledger,
        altered={},
        earlier=(),
    )
    _check_declared(study)
    return study


def _check_declared(study: TrainedStudy) -> None:
    """Raises ValueError, which names the field, if a value of study.json is invalid."""
    check_section('tuning.', study.tuning)
    has_tuning = bool(study.grids)
    lacks_screening_seeds = has_tuning and not study.tuning.seeds
    if not study.seeds or lacks_screening_seeds:
        raise ValueError("field 'seeds' is [], expected at least one whole number")
    if study.margin <= 0:
        raise ValueError(f"field 'margin' is {study.margin}, expected nats per token above 0")

    valid_by_field = {
        'size': study.sizes,
        'corpus': study.corpora,
        'control': (None, *CONTROLS),
    }
    for arm in study.arms:
        for field, valid_values in valid_by_field.items():
            value = getattr(arm, field)
            if value not in valid_values:
                raise ValueError(
                    f'an arm has {field} {value!r}, which is not one of {list(valid_values)}'
                )


def read_base(record: Mapping[str, Any]) -> Config:
    """Reads the config that all arms of a study.json share; raises ValueError if it is invalid."""
    return from_json(Config, known_settings(Config, record['base']))


def known_settings(cls: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Drops the settings that the config class `cls` does not have.

    Results of another version may have such settings. Without them, the results can be read.
    """
    types = typing.get_type_hints(cls)
    known: dict[str, Any] = {}
    for name, value in values.items():
        if name not in types:
            continue
        is_section = dataclasses.is_dataclass(types[name]) and isinstance(value, dict)
        known[name] = known_settings(types[name], value) if is_section else value
    return known


def _read_runs(study: TrainedStudy) -> list[TrainedRun]:
    """Reads the runs of plan.jsonl, with their trials from results.jsonl, both in file order.

    A repeated line counts once. Raises RunDirectoryError that names a bad line, or a line that
    contradicts an earlier one.
    """
    run_by_name: dict[str, TrainedRun] = {}
    # The trials of each run, by its name; those of one run by seed and settings.
    trials_by_run: dict[str, dict[Hashable, Trial]] = {}

    def add_run(record: Any) -> None:
        """Adds the run of a line of plan.jsonl."""
        run = parse_run(record)
        if run.key.declared not in study.arms:
            raise ValueError(f'{run.key} is not an arm that study.json declares')
        earlier = run_by_name.get(run.name)
        if earlier is None:
            run_by_name[run.name] = run
        elif earlier != run:
            raise ValueError(f'run {run.name!r} is planned twice, differently')

    def add_trial(record: Any) -> None:
        """Adds the trial of a line of results.jsonl."""
        check(record, {'run': str})
        name = record['run']
        if name not in run_by_name:
            raise ValueError(f'run {name!r} is not in plan.jsonl')
        trial = parse_trial(record, run_by_name[name])
        trials_of_run = trials_by_run.setdefault(name, {})
        key = (trial.seed, trial.settings)
        earlier = trials_of_run.get(key)
        if earlier is None:
            trials_of_run[key] = trial
        elif earlier != trial:
            raise ValueError(f'run {name!r} seed {trial.seed} has two results, which differ')

    # The files are missing until a worker has planned.
    plan = study.files / 'plan.jsonl'
    if plan.exists():
        read_lines(plan, {}, _ADVICE, add_run)
    results = study.files / 'results.jsonl'
    if results.exists():
        read_lines(results, {}, _ADVICE, add_trial)

    runs = []
    for name, run in run_by_name.items():
        trials_of_run = trials_by_run.get(name, {})
        runs.append(dataclasses.replace(run, trials=tuple(trials_of_run.values())))
    return runs


def _read_yardsticks(
    path: Path, baseline: str, planned: Sequence[TrainedRun]
) -> dict[ArmKey, Yardstick] | None:
    """Reads yardsticks.json; returns None if it does not exist.

    Returns the yardsticks by the key of their baseline. Raises ReportError if the file is damaged
    or was recorded for other runs than the planned ones.
    """
    if not path.exists():
        return None
    try:
        record = parse_file(path, {'groups': tuple[dict, ...], 'runs': tuple[dict, ...]})
        return _yardsticks(record, baseline, {run.name: run.key for run in planned})
    except ValueError as error:
        raise ReportError(f'{str(path)!r} cannot be read: {error}.') from error


def _yardsticks(
    record: Mapping[str, Any], baseline: str, planned: Mapping[str, ArmKey]
) -> dict[ArmKey, Yardstick]:
    """Returns what each baseline has to beat, by the key of the baseline.

    Args:
        record: The content of yardsticks.json. An entry of 'runs' has the losses of the trials of a
            baseline, and an entry of 'groups' what this baseline has to beat.
        baseline: The variant that is the baseline.
        planned: The arms of the planned runs, by the name of the run.

    Raises:
        ValueError: A field is bad. The message names it.
    """
    # The measured trials of each baseline.
    trials_by_baseline: dict[ArmKey, list[dict[str, Any]]] = {}
    for run in record['runs']:
        check(run, {'run': str, 'trials': tuple[dict, ...] | None})
        key = parse_arm_key(run)
        _check_recorded(run['run'], key, planned)
        measured_trials = run['trials'] or ()  # None if the run could not be measured
        for trial in measured_trials:
            check(trial, _MEASURED)
            trials_by_baseline.setdefault(key, []).append(trial)

    # What each baseline has to beat, with the gains of its trials.
    yardsticks = {}
    for group in record['groups']:
        check(group, {'run': str, 'size': str, 'corpus': str, 'longer': bool})
        control = LONGER if group['longer'] else None
        key = ArmKey(baseline, group['size'], group['corpus'], control)
        _check_recorded(group['run'], key, planned)
        bleu = group.get('bleu', {})
        check(bleu, dict.fromkeys(bleu, float))
        context_gain, source_gain = _gains(trials_by_baseline.get(key, []))
        yardsticks[key] = read_dataclass(
            Yardstick,
            group,
            context_gain=context_gain,
            source_gain=source_gain,
            bleu=bleu,
            is_current=is_current(group),
        )
    return yardsticks


def _gains(trials: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Returns `context_gain` and `source_gain` of a yardstick from the losses of trials.

    A trial has its loss ('loss'), the losses early and late in the context ('early', 'late'), and
    the loss with the sources of other sentences ('shuffled'). All but the first may be None.
    """
    context_gains = []
    source_gains = []
    for trial in trials:
        if trial['early'] and trial['late']:
            context_gains.append(trial['early'] - trial['late'])
        if trial['shuffled']:
            source_gains.append(trial['shuffled'] - trial['loss'])
    context_gain = statistics.fmean(context_gains) if context_gains else None
    source_gain = statistics.fmean(source_gains) if source_gains else None
    return context_gain, source_gain


def _check_recorded(run: str, key: ArmKey, planned: Mapping[str, ArmKey]) -> None:
    """Raises ValueError unless a run in yardsticks.json belongs to the arm that it is recorded for.

    There is one exception. A baseline that is trained longer leaves the plan if no arm is decided
    any more, as may happen when arms are added: p values are then corrected for more comparisons.

    Args:
        run: The id of the run.
        key: The arm that yardsticks.json records it for.
        planned: The arms of the planned runs, by the id of the run.
    """
    if run not in planned and key.control == LONGER:
        return
    planned_arm = planned.get(run)
    if planned_arm != key:
        arm = planned_arm or 'no arm of this study'
        raise ValueError(f'run {run!r} is recorded for {key}, but planned for {arm}')
