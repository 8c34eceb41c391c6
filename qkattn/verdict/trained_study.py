"""Reads a study directory, finished or not.

    study.json                what the study declares, such as its arms
    plan.jsonl                one line for each run planned so far
    results.jsonl             one line for each trial
    ledger.jsonl              what was declared and looked at, and when
    yardsticks.json           what the baselines have to beat
    RUN/metrics.jsonl         the log of a run
    RUN/documents.json        the losses by document of a run

In a stored study (`qkattn.study.stored`), the files of runs are in an archive.
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

# Workers can write plan.jsonl and results.jsonl again.
_ADVICE = 'restore it from a copy, or remove it and resume the study, which makes it again'
# The fields of a trial in yardsticks.json, with their types.
_MEASURED = {
    'loss': float,
    'early': float | None,
    'late': float | None,
    'shuffled': float | None,
}


@dataclasses.dataclass(frozen=True)
class Yardstick:
    """What a baseline has to beat: the results of methods that only count, such as n-grams."""

    run: str  # the baseline's run, whose training data the methods counted
    task: str
    seen: int  # number of tokens that a model was trained on
    tokens: int | None  # number of tokens that the methods counted
    # Losses of the methods, nats/token, by split ('val', 'test') and name. Empty for translation.
    losses: Mapping[str, Mapping[str, float]]
    # How much the baseline's loss falls from position 4 to the last half of the context, in
    # nats/token; None if it was not measured.
    context_gain: float | None
    # How much the baseline's loss rises if source sentences are exchanged with each other, in
    # nats/token; None if it was not measured.
    source_gain: float | None
    bleu: Mapping[str, float]  # BLEU of IBM model 1, by split; only for translation
    is_current: bool  # whether this version defines the methods in the same way

    def best(self, split: str) -> tuple[str, float] | None:
        """Returns the name and loss of the method with the lowest loss on a split.

        Returns None if no method has a loss on the split.
        """
        loss_by_method = self.losses.get(split, {})
        if not loss_by_method:
            return None
        best_method = min(loss_by_method, key=lambda method: loss_by_method[method])
        return best_method, loss_by_method[best_method]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedStudy(config.Study):
    """A study with its runs and results, as its files describe it.

    With several destinations of saved parameters, each name in `variants` contains one.
    """

    seeds: tuple[int, ...]  # the seeds of verdict runs
    grids: Mapping[str, tuple[float, ...]]  # the initial grid of each knob; empty without tuning
    arms: tuple[ArmKey, ...]  # the declared arms and controls, without arms trained longer
    command: str | None
    directory: Path  # where reports go
    files: Files  # the files of runs, which may be in an archive
    declaration: str  # the digest of study.json
    ledger: Ledger
    # The names of runs that have changed since a look at results, with the number of the look.
    altered: Mapping[str, int] = dataclasses.field(default_factory=dict)
    runs: tuple[TrainedRun, ...] = ()
    problems: tuple[str, ...] = ()  # sentences about files of runs that could not be read
    # By the key of the baseline; None if yardsticks.json is missing.
    yardsticks: Mapping[ArmKey, Yardstick] | None = None
    earlier: tuple[Earlier, ...] = ()  # all earlier studies that it repeats, directly or not

    @property
    def tuned(self) -> bool:
        """Whether the arms are tuned; a study has verdicts only if they are."""
        return bool(self.tuning.seeds)  # the seeds of screening runs

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
        planned_arms = [run.key for run in self.runs]
        all_arms = dict.fromkeys([*self.arms, *planned_arms])  # each arm once, in this order
        beyond_screening = [run for run in self.runs if run.stage != SCREENING]
        arms_with_results = {run.key for run in beyond_screening if run.trials}
        return tuple(arm for arm in all_arms if arm not in arms_with_results)

    def verdict_seeds(self, key: ArmKey) -> tuple[int, ...]:
        """Returns the declared seeds of an arm's verdict run.

        Arms that are trained longer, as a control, may have seeds of their own.
        """
        is_trained_longer = key.control == LONGER
        if is_trained_longer and self.controls.longer_seeds:
            return self.controls.longer_seeds
        return self.seeds

    def question_of(self, key: ArmKey) -> ArmKey:
        """Returns a key for the arm that is the same in all studies (`chain.question`).

        The key of an arm in its study lacks what the study's arms have in common. For example,
        'qk/no_o' becomes 'qk/no_o [d_ff]' if all arms spend the saved parameters on d_ff.
        """
        declared = {
            'baseline': self.baseline,
            'destinations': self.destinations,
            'matched': self.match,
        }
        return chain.question(key, declared)

    def look(self, key: ArmKey, other: ArmKey) -> int:
        """Counts the studies that compare two arms: this study and those that it repeats."""
        # The keys of the two arms that are the same in all studies.
        questions = {self.question_of(key), self.question_of(other)}
        num_studies = 1  # this study
        for earlier in self.earlier:
            has_both_arms = questions.issubset(earlier.questions)
            if has_both_arms:
                num_studies += 1
        return num_studies

    def is_variant(self, label: str, variant: str) -> bool:
        """Returns whether `variant` is the label of an arm, with or without its destination.

        For example, both 'qk/no_o [d_ff]' and 'qk/no_o' are the variant with the label
        'qk/no_o [d_ff]'.
        """
        return variant in (label, self.bare(label))

    def bare(self, variant: str) -> str:
        """Removes the destination from a variant's label: 'qk/no_o [d_ff]' -> 'qk/no_o'."""
        for destination in self.destinations:
            variant = variant.removesuffix(f' [{destination}]')
        return variant


def load_study(directory: str | Path) -> TrainedStudy:
    """Reads a study with its runs and results.

    Damaged files of single runs are left out and named in `problems` of the study.

    Raises:
        ReportError: The study has no results, or a file of the study is missing or damaged.
    """
    directory = as_path(directory)
    files = stored.open_files(directory)  # the directory itself, or the archive of a stored study
    study_json = directory / 'study.json'
    _require_study(directory, study_json)

    # Read what the study declares.
    study_ledger = ledger.read(directory / ledger.NAME)
    try:
        declared = parse_file(study_json, schema={})  # any object; its fields are checked next
        study = _declared_study(directory, files, study_ledger, declared)
    except ValueError as error:
        raise ReportError(f'{str(study_json)!r} cannot be read: {error}.') from error

    # Add its runs and their results.
    problems = list(study.problems)
    try:
        planned_runs = _read_runs(study)
        # This appends a sentence to `problems` for each damaged file.
        runs = [with_run_files(run, files, problems) for run in planned_runs]
    except RunDirectoryError as error:
        raise ReportError(str(error)) from error
    yardsticks_json = directory / ledger.YARDSTICKS
    yardsticks = _read_yardsticks(yardsticks_json, study.baseline, planned_runs)
    if not any(run.trials for run in runs):
        raise ReportError(f'study {str(directory)!r} has no results yet.')

    # The ledger has the digests of runs whose results somebody has looked at.
    altered_runs = study_ledger.altered(ledger.run_digests(files))
    earlier_studies = chain.earlier_studies(directory, study_ledger, declared)
    return dataclasses.replace(
        study,
        runs=tuple(runs),
        problems=tuple(problems),
        yardsticks=yardsticks,
        altered=altered_runs,
        earlier=tuple(earlier_studies),
    )


def _require_study(directory: Path, study_json: Path) -> None:
    """Raises ReportError if `directory` is not a directory with the file `study_json`."""
    if not directory.is_dir():
        problem = 'is a file' if directory.exists() else 'does not exist'
        raise ReportError(f'study directory {str(directory)!r} {problem}.')
    if not study_json.exists():
        raise ReportError(f'{str(study_json)!r} does not exist, so this is not a study directory.')


def _declared_study(
    directory: Path, files: Files, study_ledger: Ledger, record: Any
) -> TrainedStudy:
    """Reads a study, without runs and results, from `record`, the content of study.json.

    Raises:
        ValueError: A field is invalid. The message names the field.
    """
    schema = {
        'base': {'model': {'kind': str}},
        'base_hash': str,
        'controls': dict,
        'matched': str | None,
        'tuning': dict | None,
        'arms': tuple[dict, ...],
    }
    check(record, schema)
    tuning = record['tuning']  # None for a study without tuning
    grids = _initial_grids(tuning)
    problems = []
    if record['base_hash'] != fingerprint_of(record['base']):
        problems.append('base_hash of study.json is not the hash of its base')

    # Fields that are not given here are read from the record.
    fields = {**record, 'match': record['matched']}  # named `match` in a study
    study = read_dataclass(
        TrainedStudy,
        fields,
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
        altered={},  # this and `earlier` need further files
        earlier=(),
    )
    _check_declared(study)
    return study


def _initial_grids(tuning: Any) -> dict[str, tuple[float, ...]]:
    """Returns the initial grid of each tunable setting (knob).

    For example, {'learning_rate': (0.001, 0.002), ...} is read from the field `learning_rates`.

    Args:
        tuning: The section `tuning` of study.json; None for a study without tuning.

    Returns:
        The grids by knob; {} without tuning.

    Raises:
        ValueError: A grid is missing or invalid. The message names the field.
    """
    if tuning is None:
        return {}
    check(tuning, {f'{knob}s': tuple[float, ...] for knob in KNOBS})
    return {knob: tuple(tuning[f'{knob}s']) for knob in KNOBS}


def _check_declared(study: TrainedStudy) -> None:
    """Raises ValueError, which names the field, if a value of study.json is invalid."""
    check_section('tuning.', study.tuning)  # the values of each field `tuning.*`
    has_tuning = bool(study.grids)
    lacks_screening_seeds = has_tuning and not study.tuning.seeds
    if not study.seeds or lacks_screening_seeds:
        raise ValueError("field 'seeds' is [], expected at least one whole number")
    is_margin_valid = study.margin > 0  # false for NaN
    if not is_margin_valid:
        raise ValueError(f"field 'margin' is {study.margin}, expected nats per token above 0")

    valid_by_field = {
        'size': study.sizes,
        'corpus': study.corpora,
        'control': (None, *CONTROLS),  # None for an arm that is not a control
    }
    for arm in study.arms:
        for field, valid_values in valid_by_field.items():
            value = getattr(arm, field)
            if value not in valid_values:
                raise ValueError(
                    f'an arm has {field} {value!r}, which is not one of {list(valid_values)}'
                )


def read_base(record: Mapping[str, Any]) -> Config:
    """Reads the base config in study.json; raises ValueError if it is invalid."""
    return from_json(Config, known_settings(Config, record['base']))


def known_settings(cls: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `values` without the settings that the config class `cls` does not have.

    Results of other versions may have such settings. `values` may contain sections, which are
    nested dicts.
    """
    type_by_field = typing.get_type_hints(cls)
    known: dict[str, Any] = {}
    for field, value in values.items():
        if field not in type_by_field:
            continue
        field_type = type_by_field[field]
        is_section = dataclasses.is_dataclass(field_type) and isinstance(value, dict)
        known[field] = known_settings(field_type, value) if is_section else value
    return known


def _read_runs(study: TrainedStudy) -> list[TrainedRun]:
    """Reads the runs in plan.jsonl, with their trials from results.jsonl.

    Repeated lines count once.

    Raises:
        RunDirectoryError: A line is invalid or contradicts an earlier line.
    """
    run_by_name = _read_plan(study)
    trials_by_run = _read_trials(study, run_by_name)
    runs = []
    for run_name, run in run_by_name.items():
        trials = trials_by_run.get(run_name, [])
        runs.append(dataclasses.replace(run, trials=tuple(trials)))
    return runs


def _read_plan(study: TrainedStudy) -> dict[str, TrainedRun]:
    """Reads the runs in plan.jsonl, by run name; {} if the file does not exist.

    A repeated line counts once.

    Raises:
        RunDirectoryError: A line is invalid or contradicts an earlier line.
    """
    run_by_name: dict[str, TrainedRun] = {}

    def add_run(record: Any) -> None:
        """Adds a run from a line of the file."""
        run = parse_run(record)
        # An arm that is trained longer is declared at the usual length.
        if run.key.declared not in study.arms:
            raise ValueError(f'{run.key} is not an arm that study.json declares')
        earlier_run = run_by_name.get(run.name)
        if earlier_run is None:
            run_by_name[run.name] = run
        elif earlier_run != run:
            raise ValueError(f'run {run.name!r} is planned twice, differently')

    plan = study.files / 'plan.jsonl'
    if plan.exists():
        read_lines(plan, schema={}, advice=_ADVICE, take=add_run)
    return run_by_name


def _read_trials(
    study: TrainedStudy, run_by_name: Mapping[str, TrainedRun]
) -> dict[str, list[Trial]]:
    """Reads the trials in results.jsonl, by run name; {} if the file does not exist.

    A repeated line counts once. `run_by_name` has the planned runs.

    Raises:
        RunDirectoryError: A line is invalid or contradicts an earlier line.
    """
    trials_by_run: dict[str, list[Trial]] = {}
    trial_by_identity: dict[Hashable, Trial] = {}  # by run name, seed and settings

    def add_trial(record: Any) -> None:
        """Adds a trial from a line of the file."""
        run_name = record['run']
        if run_name not in run_by_name:
            raise ValueError(f'run {run_name!r} is not in plan.jsonl')
        trial = parse_trial(record, run_by_name[run_name])
        identity = (run_name, trial.seed, trial.settings)
        earlier_trial = trial_by_identity.get(identity)
        if earlier_trial is None:
            trial_by_identity[identity] = trial
            trials_by_run.setdefault(run_name, []).append(trial)
        elif earlier_trial != trial:
            raise ValueError(f'run {run_name!r} seed {trial.seed} has two results, which differ')

    results = study.files / 'results.jsonl'
    if results.exists():
        read_lines(results, schema={'run': str}, advice=_ADVICE, take=add_trial)
    return trials_by_run


def _read_yardsticks(
    path: Path, baseline: str, planned: Sequence[TrainedRun]
) -> dict[ArmKey, Yardstick] | None:
    """Reads yardsticks.json: what each baseline of a study has to beat.

    Args:
        path: The file.
        baseline: The variant that is the baseline.
        planned: The planned runs of the study.

    Returns:
        The yardsticks by baseline key; None if the file does not exist.

    Raises:
        ReportError: The file is damaged or belongs to other runs.
    """
    if not path.exists():
        return None
    arm_by_run = {run.name: run.key for run in planned}
    try:
        record = parse_file(path, {'groups': tuple[dict, ...], 'runs': tuple[dict, ...]})
        return _yardsticks(record, baseline, arm_by_run)
    except ValueError as error:
        raise ReportError(f'{str(path)!r} cannot be read: {error}.') from error


def _yardsticks(
    record: Mapping[str, Any], baseline: str, arm_by_run: Mapping[str, ArmKey]
) -> dict[ArmKey, Yardstick]:
    """Returns the yardstick of each baseline, by baseline key.

    Args:
        record: The content of yardsticks.json. 'groups' has the results that each baseline has to
            beat, and 'runs' the losses of the baselines' trials.
        baseline: The variant that is the baseline.
        arm_by_run: The arms of the planned runs, by run name.

    Raises:
        ValueError: A field is invalid. The message names the field.
    """
    trials_by_baseline = _measured_trials(record['runs'], arm_by_run)
    yardsticks = {}
    for group in record['groups']:
        check(group, {'run': str, 'size': str, 'corpus': str, 'longer': bool})
        control = LONGER if group['longer'] else None
        key = ArmKey(baseline, group['size'], group['corpus'], control)
        _check_recorded(group['run'], key, arm_by_run)
        bleu = group.get('bleu', {})  # by split; only for translation
        check(bleu, dict.fromkeys(bleu, float))  # every value is a float
        trials = trials_by_baseline.get(key, [])
        context_gain, source_gain = _gains(trials)
        # The other fields of the yardstick are read from the group.
        yardsticks[key] = read_dataclass(
            Yardstick,
            group,
            context_gain=context_gain,
            source_gain=source_gain,
            bleu=bleu,
            is_current=is_current(group),
        )
    return yardsticks


def _measured_trials(
    runs: Sequence[Any], arm_by_run: Mapping[str, ArmKey]
) -> dict[ArmKey, list[dict[str, Any]]]:
    """Returns the losses of each baseline's trials, by baseline key.

    For example, a trial is {'loss': 4.1, 'early': 4.6, 'late': 4.0, 'shuffled': None}.

    Args:
        runs: The list 'runs' of yardsticks.json.
        arm_by_run: The arms of the planned runs, by run name.

    Raises:
        ValueError: A field is invalid. The message names the field.
    """
    trials_by_baseline: dict[ArmKey, list[dict[str, Any]]] = {}
    for run in runs:
        check(run, {'run': str, 'trials': tuple[dict, ...] | None})
        key = parse_arm_key(run)
        _check_recorded(run['run'], key, arm_by_run)
        measured_trials = run['trials'] or ()  # None if the run could not be measured
        for trial in measured_trials:
            check(trial, _MEASURED)
            trials_by_baseline.setdefault(key, []).append(trial)
    return trials_by_baseline


def _gains(trials: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Returns how much context and source sentences lower the loss, as means over trials.

    A trial has losses over all targets ('loss'), early and late in the context ('early', 'late'),
    and with exchanged source sentences ('shuffled'). All but 'loss' may be None. A gain is None if
    no trial has the losses for it.
    """
    context_gains = []
    source_gains = []
    for trial in trials:
        if trial['early'] is not None and trial['late'] is not None:
            context_gains.append(trial['early'] - trial['late'])
        if trial['shuffled'] is not None:
            source_gains.append(trial['shuffled'] - trial['loss'])
    context_gain = statistics.fmean(context_gains) if context_gains else None
    source_gain = statistics.fmean(source_gains) if source_gains else None
    return context_gain, source_gain


def _check_recorded(run: str, key: ArmKey, arm_by_run: Mapping[str, ArmKey]) -> None:
    """Raises ValueError if a run is not planned for the arm that yardsticks.json gives.

    Args:
        run: The name of the run.
        key: The arm in yardsticks.json.
        arm_by_run: The arms of the planned runs, by run name.
    """
    planned_arm = arm_by_run.get(run)
    is_trained_longer = key.control == LONGER
    if planned_arm is None and is_trained_longer:
        return  # longer training may leave the plan when arms are added
    if planned_arm != key:
        arm = planned_arm or 'no arm of this study'
        raise ValueError(f'run {run!r} is recorded for {key}, but planned for {arm}')
