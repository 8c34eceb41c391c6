"""The plan of a study: its runs, and the files that list them.

Each arm has these runs:

1. Screening runs, which tune the learning rate and then the other settings.
2. A verdict run, which trains fresh seeds at the tuned settings.
3. The same runs with more training steps, if the study has controls that are trained longer.

The plan is a pure function of the study and of the results of finished runs. So all workers derive
the same plan.
"""

import dataclasses
import datetime
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.errors import JaxRuntimeError

from qkattn.config import Config, Study, fingerprint, to_json
from qkattn.errors import ConfigError
from qkattn.jobs import cli
from qkattn.jobs.output import text_table
from qkattn.model import cost as model_cost
from qkattn.stats import inference
from qkattn.stats.decision import Decision
from qkattn.storage.records import (
    ARM_KEY,
    FINISHED,
    check,
    check_config_hash,
    damaged_file_error,
    read_json,
    read_lines,
    read_results,
    to_jsonable,
)
from qkattn.study.arm_key import LONGER, ArmKey
from qkattn.study.arms import PlannedArm, row_title
from qkattn.study.family import Family, primary_arms
from qkattn.study.protocol import resolved
from qkattn.study.stored import PLAN, check_run_directory
from qkattn.study.tuning import (
    KNOBS,
    MODEL_KNOBS,
    SCREENING,
    SINGLE,
    TRIAL_KNOBS,
    VERDICT,
    Settings,
    Tuning,
    grids_around,
    tune,
)
from qkattn.train import program

# Returns the result of each trial of a run, or None if the run is not finished.
Results = Callable[['PlannedRun'], list[dict[str, Any]] | None]
# The FLOPs of a training step, as a multiple of a forward pass.
STEP_PER_FORWARD = 3
# The bytes of a directory's name before the hyphen and the hash of 12 digits. File systems allow
# names of 255 bytes.
MAX_READABLE_BYTES = 255 - 13
# What the user can do about a damaged plan.jsonl.
_ADVICE = 'restore it from a copy, or remove it: it is then made again from the results'
# The fields of a line of plan.jsonl that `unplanned_lines` reads, besides its directory.
_UNPLANNED_RUN = {
    'run': str,
    **ARM_KEY,
    'stage': str,
    'knob': str | None,
    'target': float | None,
    'residual': float | None,
}


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A run of one arm at one stage. All its trials are trained together."""

    arm: PlannedArm
    stage: str  # SCREENING, VERDICT, or SINGLE in an untuned study
    knob: str | None  # the setting that is screened, such as 'learning_rate'; else None
    config: Config

    @property
    def id(self) -> str:
        """The hash of the config, which identifies the run."""
        return fingerprint(self.config)

    @property
    def directory(self) -> str:
        """The directory in the study's directory: 'runs/qk-no_o-d_model=64-verdict-0123456789ab'.

        The last part of the name is `id`. The part before it is cut if it is too long.
        """
        title = self.arm.title  # such as 'qk/no_o d_model=64'
        if self.stage != SINGLE:
            title += f' {self.stage}'
        readable = re.sub(r'[^\w.=]+', '-', title).strip('-')
        # A cut may divide the last character, which is dropped.
        shortened = readable.encode()[:MAX_READABLE_BYTES].decode(errors='ignore')
        return f'runs/{shortened}-{self.id}'

    @property
    def tokens(self) -> int:
        """The number of training tokens, summed over trials."""
        train = self.config.train
        tokens_of_trial = train.num_steps * train.batch_size * self.config.model.context
        return tokens_of_trial * len(self.config.trials.trials())

    @property
    def flops(self) -> float:
        """The FLOPs of matrix products in training, summed over trials."""
        return STEP_PER_FORWARD * model_cost.flops_per_token(self.config.model) * self.tokens

    @property
    def work(self) -> float:
        """An estimate of the training time, in an arbitrary unit.

        The time per token is taken to grow with the baseline's cost, such as its parameters.
        """
        baseline_cost = self.arm.target
        return self.tokens * baseline_cost


def grids(study: Study, arm: PlannedArm) -> dict[str, tuple[float, ...]]:
    """Returns the values of each setting that may be tuned, such as 'learning_rate'.

    A setting with a single value is not tuned.
    """
    trials = study.base.trials
    values_by_setting = {
        'learning_rate': trials.learning_rates,
        'weight_decay': trials.weight_decays,
    }
    for name in MODEL_KNOBS:
        value_in_model = getattr(arm.model, name)
        values_to_tune = getattr(study.tuning, f'{name}s')  # () if not tuned
        values_by_setting[name] = values_to_tune or (value_in_model,)
    return values_by_setting


def runs(study: Study, arms: Sequence[PlannedArm], results: Results) -> list[PlannedRun]:
    """Returns the runs of a study, as far as the results of finished runs determine them.

    - Without tuning, each arm has one run.
    - With tuning, each arm has screening runs, followed by a verdict run.
    - With `study.controls.longer`, arms that are decided and their baselines have these runs once
      more, with more training steps.
    """
    study = resolved(study)  # its controls are explicit
    is_tuned = bool(study.tuning.seeds)
    if not is_tuned:
        seeds = study.base.trials.seeds
        return [_run(study, arm, SINGLE, knob=None, seeds=seeds) for arm in arms]

    # Screening and verdict runs.
    planned: list[PlannedRun] = []
    tuned_settings: dict[ArmKey, Settings] = {}
    for arm in arms:
        runs_of_arm, settings = _runs_and_settings(study, results, arm, grids(study, arm))
        planned += runs_of_arm
        tuned_settings[arm.key] = settings
    if study.controls.longer is None:
        return planned

    # Longer runs.
    for arm in _decided(study, results, arms, planned):
        longer_arm = dataclasses.replace(arm, key=arm.key._replace(control=LONGER))
        longer_grids = grids_around(grids(study, arm), tuned_settings[arm.key])
        runs_of_arm, _ = _runs_and_settings(study, results, longer_arm, longer_grids)
        planned += runs_of_arm
    return planned


def results_in(path: Path) -> Results:
    """Returns a function that reads the results of a run in a study's directory.

    The function caches what it returns, so results that are written later do not change a plan.
    """

    @functools.cache
    def results(run: PlannedRun) -> list[dict[str, Any]] | None:
        file = path / run.directory / 'result.json'
        if not file.exists():
            return None
        return read_results(file, run.config)

    return results


def without_result(planned: Sequence[PlannedRun], results: Results) -> list[PlannedRun]:
    """Returns the runs without results, longest first."""
    without_results = [run for run in planned if results(run) is None]
    return sorted(without_results, key=lambda run: -run.work)


def _runs_and_settings(
    study: Study, results: Results, arm: PlannedArm, grid_of_knob: Mapping[str, tuple[float, ...]]
) -> tuple[list[PlannedRun], Settings]:
    """Returns the runs of one arm, and its tuned settings.

    `tune` chooses what to screen next from the losses so far. The verdict run follows when all
    settings are tuned. The plan ends early at the first run without results.

    Args:
        study: The resolved study.
        results: Returns the results of a run, or None if the run is not finished.
        arm: The arm.
        grid_of_knob: The first values of each setting to screen.

    Returns:
        The runs.
        The settings, which are provisional if the last run is not a verdict run.
    """
    planned: list[PlannedRun] = []
    measured: dict[Settings, dict[int, float | None]] = {}  # losses by settings and seed
    weight_decay_kind = study.base.optimizer.decay  # such as 'independent'
    tuning = tune(grid_of_knob, study.tuning, measured, weight_decay_kind)
    while tuning.knob is not None:  # the setting to screen next
        screening_runs = _screening_runs(study, arm, tuning)
        planned += screening_runs
        for run in screening_runs:
            trial_results = results(run)
            if trial_results is None:
                return planned, tuning.settings
            _add_losses(measured, run, trial_results)
        tuning = tune(grid_of_knob, study.tuning, measured, weight_decay_kind)

    seeds = study.base.trials.seeds
    if arm.key.control == LONGER:
        seeds = study.controls.longer_seeds
    verdict_run = _run(
        study, arm, VERDICT, knob=None, seeds=seeds, settings_of_run=[tuning.settings]
    )
    planned.append(verdict_run)
    return planned, tuning.settings


def _add_losses(
    measured: dict[Settings, dict[int, float | None]],
    run: PlannedRun,
    trial_results: Iterable[Mapping[str, Any]],
) -> None:
    """Adds the validation losses of the trials of a screening run to `measured`.

    `measured` has the losses by settings and seed; None for a diverged trial.
    """
    for result in trial_results:
        settings = _settings(run.config, result['trial'])
        loss_by_seed = measured.setdefault(settings, {})
        loss_by_seed.update(_losses([result], 'val_loss'))


def _screening_runs(study: Study, arm: PlannedArm, tuning: Tuning) -> list[PlannedRun]:
    """Returns the runs that screen the values `tuning.values` of the setting `tuning.knob`."""
    settings_to_screen = [tuning.at(value) for value in tuning.values]
    if tuning.knob in TRIAL_KNOBS:
        # One run trains all values, such as several learning rates.
        settings_of_runs = [settings_to_screen]
    else:
        # The value is compiled into the model, so each value has its own run.
        settings_of_runs = [[settings] for settings in settings_to_screen]
    return [
        _run(study, arm, SCREENING, tuning.knob, tuning.seeds, settings_of_run)
        for settings_of_run in settings_of_runs
    ]


def _run(
    study: Study,
    arm: PlannedArm,
    stage: str,
    knob: str | None,
    seeds: tuple[int, ...],
    settings_of_run: Sequence[Settings] = (),
) -> PlannedRun:
    """Returns a run of an arm, with a trial for each combination of seed and settings.

    For example, a run that screens three learning rates on two seeds has six trials.

    Args:
        stage: SCREENING, VERDICT or SINGLE.
        knob: The setting that is screened, such as 'learning_rate'; None at other stages.
        settings_of_run: The settings to train, which differ in at most one of TRIAL_KNOBS. If
            empty, the study's own settings are trained.
    """
    data = dataclasses.replace(study.base.data, name=arm.key.corpus)
    trials = dataclasses.replace(study.base.trials, seeds=seeds)
    config = dataclasses.replace(study.base, data=data, trials=trials, model=arm.model)
    if settings_of_run:
        config = _with_settings(config, settings_of_run)
    if arm.key.control == LONGER:
        assert study.controls.longer is not None
        config = _trained_longer(config, study.controls.longer)
    return PlannedRun(arm, stage, knob, config)


def _with_settings(config: Config, settings_of_run: Sequence[Settings]) -> Config:
    """Returns the config of a run with other settings to train.

    `settings_of_run` has values of all KNOBS. For example, its values of 'learning_rate' become
    `trials.learning_rates`, and its one value of 'init_qk' becomes `model.init_qk`.
    """
    # For example {'learning_rate': (0.001, 0.002, 0.004), 'weight_decay': (0.1,), ...}.
    values_by_name: dict[str, tuple[float, ...]] = {}
    for index, name in enumerate(KNOBS):
        values = [settings[index] for settings in settings_of_run]
        values_by_name[name] = tuple(dict.fromkeys(values))  # unique values in order

    trial_fields: dict[str, Any] = {f'{name}s': values_by_name[name] for name in TRIAL_KNOBS}
    model_fields: dict[str, Any] = {name: values_by_name[name][0] for name in MODEL_KNOBS}
    trials = dataclasses.replace(config.trials, **trial_fields)
    model = dataclasses.replace(config.model, **model_fields)
    return dataclasses.replace(config, trials=trials, model=model)


def _trained_longer(config: Config, times: int) -> Config:
    """Returns the config with all numbers of steps multiplied by `times`."""
    train = dataclasses.replace(
        config.train,
        num_steps=times * config.train.num_steps,
        eval_every=times * config.train.eval_every,
        checkpoint_every=times * config.train.checkpoint_every,
    )
    warmup_steps = times * config.optimizer.warmup_steps
    optimizer = dataclasses.replace(config.optimizer, warmup_steps=warmup_steps)
    return dataclasses.replace(config, train=train, optimizer=optimizer)


def _decided(
    study: Study, results: Results, arms: Sequence[PlannedArm], planned: Sequence[PlannedRun]
) -> list[PlannedArm]:
    """Returns the decided arms and their baselines, in the order of the study.

    An arm is decided if it is significantly better or worse than its baseline, or equivalent. Arms
    of one size and corpus are judged together, once all their verdict runs are finished.
    """
    losses_by_arm: dict[ArmKey, dict[int, float | None]] = {}  # of finished verdict runs
    for run in planned:
        trial_results = results(run) if run.stage == VERDICT else None
        if trial_results:
            losses_by_arm[run.arm.key] = _losses(trial_results, 'test_loss')

    primary = [arm for arm in arms if arm.key.control is None]
    # P values are corrected for all comparisons of the study.
    num_compared = len(primary_arms([arm.key for arm in primary], study.baseline))
    groups: dict[tuple[str, str], list[PlannedArm]] = {}  # by corpus and size
    for arm in primary:
        groups.setdefault((arm.key.corpus, arm.key.size), []).append(arm)

    decided: list[PlannedArm] = []
    for group in groups.values():
        if all(arm.key in losses_by_arm for arm in group):
            decided += _decided_of_group(study, group, losses_by_arm, num_compared)
    return decided


def _decided_of_group(
    study: Study,
    group: Sequence[PlannedArm],
    losses_by_arm: Mapping[ArmKey, Mapping[int, float | None]],
    num_compared: int,
) -> list[PlannedArm]:
    """Returns the decided arms of one size and corpus, and their baseline if there are any.

    Args:
        study: The study.
        group: The arms of this size and corpus, with the baseline.
        losses_by_arm: The test losses of each arm by seed; None for a diverged trial.
        num_compared: The number of comparisons of the study, for which p values are corrected.
    """
    (baseline,) = [arm for arm in group if arm.variant == study.baseline]
    baseline_losses = losses_by_arm[baseline.key]
    compared = [arm for arm in group if arm is not baseline]
    family = Family(num_compared)
    for arm in compared:
        difference, diverged = _paired(losses_by_arm[arm.key], baseline_losses, study.margin)
        family.add(arm.key, difference, diverged)

    judgements = family.judge()  # by key
    decided: list[PlannedArm] = []
    for arm in compared:
        if judgements[arm.key].decision is not Decision.UNDECIDED:
            decided.append(arm)
    if not decided:
        return []
    return [arm for arm in group if arm is baseline or arm in decided]


def _paired(
    losses: Mapping[int, float | None], baseline_losses: Mapping[int, float | None], margin: float
) -> tuple[inference.Difference | None, tuple[int, int]]:
    """Compares the losses of an arm with the baseline's losses, paired over seeds.

    Args:
        losses: The losses of the arm by seed; None for a diverged trial.
        baseline_losses: The losses of the baseline, on the same seeds.
        margin: The margin of equivalence in nats per token.

    Returns:
        The difference over the seeds on which neither diverged; None if there is no such seed.
        The numbers of diverged trials (arm, baseline).
    """
    differences = []
    arm_diverged = 0
    baseline_diverged = 0
    for seed, loss in losses.items():
        baseline_loss = baseline_losses[seed]
        if loss is None:
            arm_diverged += 1
        if baseline_loss is None:
            baseline_diverged += 1
        if loss is not None and baseline_loss is not None:
            differences.append(loss - baseline_loss)
    difference = None
    if differences:
        difference = inference.paired_test(differences, margin)
    return difference, (arm_diverged, baseline_diverged)


def fewest_runs(study: Study, arms: Sequence[PlannedArm]) -> list[PlannedRun]:
    """Returns the shortest plan of a study in which every arm is decided.

    In this plan, tuning finds the best values in the first grids, and all arms are equivalent.
    """
    # With these settings, tuning chooses the middle of each grid and needs no further seeds.
    tuning = dataclasses.replace(study.tuning, choice='vertex', max_excess=None)
    tuned_study = dataclasses.replace(study, tuning=tuning)
    return runs(tuned_study, arms, lambda run: _ideal_results(study, run))


def _ideal_results(study: Study, run: PlannedRun) -> list[dict[str, Any]]:
    """Returns made-up results for the trials of a run, with which the plan of a study is short.

    The validation loss is the squared distance from the middle of each grid, on a logarithmic
    scale. All test losses are equal, so all arms are equivalent.
    """
    best_settings = [values[len(values) // 2] for values in grids(study, run.arm).values()]
    results = []
    for trial in run.config.trials.trials():  # such as {'seed': 0, 'learning_rate': 0.001, ...}
        settings = _settings(run.config, trial)
        squares: list[float] = []
        for value, best in zip(settings, best_settings, strict=True):
            if value != best:  # if both are 0, log(value / best) fails
                squares.append(math.log(value / best) ** 2)
        result = {
            'trial': trial,
            'status': FINISHED,
            'val_loss': sum(squares),
            'test_loss': 0.0,
        }
        results.append(result)
    return results


class PlanCost(NamedTuple):
    """The total cost of some runs."""

    runs: int
    trials: int
    tokens: int  # of training
    flops: float  # of training


def cost(planned: Sequence[PlannedRun]) -> PlanCost:
    """Returns the total cost of some runs."""
    return PlanCost(
        runs=len(planned),
        trials=sum(len(run.config.trials.trials()) for run in planned),
        tokens=sum(run.tokens for run in planned),
        flops=sum(run.flops for run in planned),
    )


def estimate(study: Study, arms: Sequence[PlannedArm], *, measure: bool = False) -> str:
    """Returns two tables of the least cost of a study, by arm and by stage, with notes below.

    Args:
        study: The study.
        arms: The arms of the study.
        measure: Whether to estimate the time as well. One run of each size is then compiled and
            timed for a few steps. A note says so if this machine cannot do that.
    """
    planned = fewest_runs(study, arms)
    keys = {run.arm.key for run in planned}
    notes: list[str] = []
    seconds_by_run: dict[str, float] | None = None  # None for a table without time
    if measure:
        seconds_by_run, note = _seconds_if_here(study, planned)
        notes.append(note)
    if study.tuning.seeds:
        notes.append(
            f'lower bounds: a grid may grow to {study.tuning.max_points} values, '
            f'a value to {study.tuning.max_seeds} seeds'
        )
    by_arm = _cost_table('arm', planned, lambda run: row_title(run.arm.key, keys))
    by_stage = _cost_table('stage', planned, _stage_title, seconds_by_run)
    return '\n'.join([by_arm, '', by_stage, *notes])


def _cost_table(
    title: str,
    planned: Sequence[PlannedRun],
    row_of: Callable[[PlannedRun], str],
    seconds_by_run: Mapping[str, float] | None = None,
) -> str:
    """Returns a table of the total cost of the runs in each row, with the total of all runs last.

    Args:
        title: The title of the first column, such as 'arm'.
        planned: The runs.
        row_of: Returns the row of a run: the text in its first column.
        seconds_by_run: The time of each run by its id, for a last column. If {}, the time is
            unknown, and the column has '-'. If None, there is no such column.
    """
    runs_by_row: dict[str, list[PlannedRun]] = {}
    for run in planned:
        runs_by_row.setdefault(row_of(run), []).append(run)

    # Pairs (title, whether the column is left-aligned).
    columns = [(title, True)]
    columns += [(name, False) for name in ('runs', 'trials', 'tokens', 'FLOPs')]
    if seconds_by_run is not None:
        columns.append(('about', False))
    rows: list[list[str]] = []
    for row_name, runs_of_row in [*runs_by_row.items(), ('total', planned)]:
        total = cost(runs_of_row)
        row = [row_name, f'{total.runs}', f'{total.trials}']
        row += [f'{total.tokens:.3g}', f'{total.flops:.3g}']
        if seconds_by_run is not None:
            row.append(_duration(runs_of_row, seconds_by_run))
        rows.append(row)
    return text_table(columns, rows)


def _duration(planned: Sequence[PlannedRun], seconds_by_run: Mapping[str, float]) -> str:
    """Returns the total time of some runs, such as '0:12:30'; '-' if `seconds_by_run` is {}."""
    if not seconds_by_run:
        return '-'
    seconds = sum(seconds_by_run[run.id] for run in planned)
    return str(datetime.timedelta(seconds=round(seconds)))


def _seconds_if_here(study: Study, planned: Sequence[PlannedRun]) -> tuple[dict[str, float], str]:
    """Returns the estimated seconds of each run by its id, and a note.

    If this machine cannot train the runs, the seconds are {}, and the note says why.
    """
    try:
        seconds_by_run = _measured_seconds(study, planned)
    except (ConfigError, JaxRuntimeError) as error:
        outcome = cli.outcome(error)
        if outcome is None:  # a bug, not a lack of memory or devices
            raise
        return {}, f'no time, as this machine cannot train it: {outcome.sentence}'
    note = 'time is for 1 worker on this machine, from a warm-up, without evaluation'
    return seconds_by_run, note


def _measured_seconds(study: Study, planned: Sequence[PlannedRun]) -> dict[str, float]:
    """Estimates the seconds of compilation and training of each run, by its id.

    One run of each size is compiled and timed for a few steps, if possible a run of the baseline.
    All runs of a size are assumed to have the same compilation time and FLOPs per second.
    """
    baseline_runs = [run for run in planned if run.arm.variant == study.baseline]
    other_runs = [run for run in planned if run.arm.variant != study.baseline]
    seconds_per_flop: dict[str, float] = {}  # by size
    compilation_seconds: dict[str, float] = {}  # by size
    seconds_by_run: dict[str, float] = {}
    for run in [*baseline_runs, *other_runs]:
        size = run.arm.key.size
        if size not in seconds_per_flop:
            seconds_per_step, compilation_seconds[size] = program.warm_up(run.config)
            seconds_per_flop[size] = seconds_per_step * run.config.train.num_steps / run.flops
        seconds_by_run[run.id] = run.flops * seconds_per_flop[size] + compilation_seconds[size]
    return seconds_by_run


def _stage_title(run: PlannedRun) -> str:
    """Returns the title of a run's row in the table by stage, as in 'screening learning_rate'."""
    if run.arm.key.control == LONGER:
        return 'longer, if every arm is decided'
    parts = (run.arm.key.control, run.stage, run.knob)
    return ' '.join(part for part in parts if part is not None)


def _settings(config: Config, trial: Mapping[str, Any]) -> Settings:
    """Returns the value of each setting in a trial, in the order of KNOBS."""
    trial_values = [trial[name] for name in TRIAL_KNOBS]
    model_values = [getattr(config.model, name) for name in MODEL_KNOBS]
    return (*trial_values, *model_values)


def _losses(trial_results: Iterable[Mapping[str, Any]], field: str) -> dict[int, float | None]:
    """Returns the loss of each trial by seed; None for a diverged trial.

    Args:
        trial_results: The results of the trials.
        field: The name of the loss, such as 'test_loss'.
    """
    loss_by_seed: dict[int, float | None] = {}
    for result in trial_results:
        seed = result['trial']['seed']
        is_finished = result['status'] == FINISHED
        loss_by_seed[seed] = result[field] if is_finished else None
    return loss_by_seed


def unplanned_runs(path: Path, planned: Sequence[PlannedRun]) -> list[dict[str, Any]]:
    """Returns the lines of plan.jsonl for finished runs that are not planned, each as a dict.

    Args:
        path: The directory of the study.
        planned: The planned runs.

    Raises:
        RunDirectoryError: A line of plan.jsonl is damaged.
    """
    file = path / PLAN
    if not file.exists():
        return []
    planned_ids = {run.id for run in planned}
    schema = {'run': str, 'directory': str, 'control': str | None}
    unplanned = []
    for run in read_lines(file, schema, _ADVICE, check_run_directory):
        is_planned = run['run'] in planned_ids
        is_finished = _result_file(path, run).exists()
        if is_finished and not is_planned:
            unplanned.append(run)
    return unplanned


def _result_file(path: Path, run: Mapping[str, Any]) -> Path:
    """Returns the path of a run's results; `run` is its line of plan.jsonl."""
    return path / run['directory'] / 'result.json'


def unplanned_lines(
    study: Study, path: Path, unplanned: Sequence[Mapping[str, Any]]
) -> tuple[str, str]:
    """Returns the lines of plan.jsonl and of results.jsonl for finished runs that are not planned.

    Added arms may leave an arm undecided, which is then not trained longer. A look at the results
    may have seen its longer runs, so both files keep them.

    Args:
        study: The study.
        path: The directory of the study.
        unplanned: The runs, from `unplanned_runs`.

    Raises:
        RunDirectoryError: A line of plan.jsonl is damaged, or names another run than its results.
    """
    plan_text = ''
    results_text = ''
    for run in unplanned:
        results = read_json(_result_file(path, run), [{'config_hash': str}])
        try:
            check(run, _UNPLANNED_RUN)
            for result in results:
                check_config_hash(result, run['run'])
        except ValueError as error:
            raise damaged_file_error(path / PLAN, error, _ADVICE) from error

        plan_text += json.dumps(run) + '\n'
        fields_in_results = {name: run[name] for name in _UNPLANNED_RUN}
        results_text += _trial_lines(study, fields_in_results, results)
    return plan_text, results_text


def plan_lines(study: Study, planned: Sequence[PlannedRun]) -> str:
    """Returns the content of plan.jsonl: one line for each run."""
    lines = []
    for run in planned:
        record = {
            'run': run.id,
            **_common_fields(study, run),
            'destination': run.arm.destination,
            'directory': run.directory,
            'trials': len(run.config.trials.trials()),
            'config': to_json(run.config),
        }
        lines.append(json.dumps(to_jsonable(record)) + '\n')
    return ''.join(lines)


def _common_fields(study: Study, run: PlannedRun) -> dict[str, Any]:
    """Returns the fields of a run that plan.jsonl and results.jsonl have in common."""
    arm = run.arm
    is_matched = study.match is not None
    return {
        **arm.key._asdict(),
        'stage': run.stage,
        'knob': run.knob,
        'target': arm.target if is_matched else None,
        'residual': arm.residual if is_matched else None,
    }


def result_lines(study: Study, planned: Sequence[PlannedRun], results: Results) -> str:
    """Returns the content of results.jsonl: one line for each trial of every finished run."""
    lines_of_runs = []
    for run in planned:
        trial_results = results(run)
        if trial_results is not None:
            run_fields = {'run': run.id, **_common_fields(study, run)}
            lines_of_runs.append(_trial_lines(study, run_fields, trial_results))
    return ''.join(lines_of_runs)


def _trial_lines(
    study: Study, run_fields: Mapping[str, Any], trial_results: Iterable[Mapping[str, Any]]
) -> str:
    """Returns the lines of results.jsonl for the trials of one run.

    Args:
        study: The study.
        run_fields: The fields of the run: 'run' and those of `_common_fields`.
        trial_results: The results of the trials.
    """
    fields = {'study': study.name, **run_fields}
    # results.jsonl has another name for the target than plan.jsonl.
    fields['target_parameters'] = fields.pop('target')
    return ''.join(json.dumps({**fields, **result}) + '\n' for result in trial_results)
