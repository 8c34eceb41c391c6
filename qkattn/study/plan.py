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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
# The fields of a line of plan.jsonl that `left_lines` reads, besides its directory.
_LEFT_RUN = {
    **ARM_KEY,
    'run': str,
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
        title = self.arm.title
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
        """An estimate of the training time, in an arbitrary unit."""
        return self.tokens * self.arm.target


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
    study = resolved(study)
    if not study.tuning.seeds:
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

    # Longer runs. `planned` grows, so all decided arms are listed first.
    decided_arms = list(_decided(study, results, arms, planned))
    for arm in decided_arms:
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
        grid_of_knob: The first values of each setting to screen.

    Returns:
        The runs.
        The settings, which are provisional if the last run is not a verdict run.
    """
    planned: list[PlannedRun] = []
    measured: dict[Settings, dict[int, float | None]] = {}  # losses by settings and seed
    decay = study.base.optimizer.decay
    tuning = tune(grid_of_knob, study.tuning, measured, decay)
    while tuning.knob is not None:
        screening_runs = _screening_runs(study, arm, tuning)
        planned += screening_runs
        for run in screening_runs:
            trials = results(run)
            if trials is None:
                return planned, tuning.settings
            for trial in trials:
                settings = _settings(run.config, trial['trial'])
                loss_by_seed = measured.setdefault(settings, {})
                loss_by_seed.update(_losses([trial], 'val_loss'))
        tuning = tune(grid_of_knob, study.tuning, measured, decay)

    seeds = study.base.trials.seeds
    if arm.key.control == LONGER:
        seeds = study.controls.longer_seeds
    verdict_run = _run(
        study, arm, VERDICT, knob=None, seeds=seeds, settings_of_run=[tuning.settings]
    )
    planned.append(verdict_run)
    return planned, tuning.settings


def _screening_runs(study: Study, arm: PlannedArm, tuning: Tuning) -> list[PlannedRun]:
    """Returns the runs that screen `tuning.values` of the setting `tuning.knob`."""
    settings_to_screen = [tuning.at(value) for value in tuning.values]
    if tuning.knob in TRIAL_KNOBS:
        # One run trains all values, such as several learning rates.
        settings_of_runs = [settings_to_screen]
    else:
        # The value is compiled into the model, so each value has its own run.
        settings_of_runs = [[settings] for settings in settings_to_screen]
    planned: list[PlannedRun] = []
    for settings_of_run in settings_of_runs:
        planned.append(_run(study, arm, SCREENING, tuning.knob, tuning.seeds, settings_of_run))
    return planned


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
    base = study.base
    model = arm.model
    trials = dataclasses.replace(base.trials, seeds=seeds)
    if settings_of_run:
        # For example {'learning_rate': (0.001, 0.002, 0.004), 'weight_decay': (0.1,), ...}.
        values_by_name: dict[str, tuple[float, ...]] = {}
        for index, name in enumerate(KNOBS):
            values = [settings[index] for settings in settings_of_run]
            values_by_name[name] = tuple(dict.fromkeys(values))  # unique values in order

        # A field of the trials has several values, such as `learning_rates`.
        trial_fields: dict[str, Any] = {f'{name}s': values_by_name[name] for name in TRIAL_KNOBS}
        trials = dataclasses.replace(trials, **trial_fields)
        model_fields: dict[str, Any] = {name: values_by_name[name][0] for name in MODEL_KNOBS}
        model = dataclasses.replace(model, **model_fields)

    data = dataclasses.replace(base.data, name=arm.key.corpus)
    config = dataclasses.replace(base, data=data, trials=trials, model=model)
    if arm.key.control == LONGER:
        assert study.controls.longer is not None
        config = _trained_longer(config, study.controls.longer)
    return PlannedRun(arm, stage, knob, config)


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
) -> Iterator[PlannedArm]:
    """Yields the decided arms and their baselines, in the order of the study.

    An arm is decided if it is significantly better or worse than its baseline, or equivalent. The
    tests compare test losses paired over seeds. Arms of one size and corpus are judged together,
    once all their verdict runs are finished.
    """
    primary = [arm for arm in arms if arm.key.control is None]
    num_compared = len(primary_arms((arm.key for arm in primary), study.baseline))

    # The test losses of each arm by seed, if the verdict run is finished.
    losses_by_arm: dict[ArmKey, dict[Any, float | None]] = {}
    for run in planned:
        if run.stage != VERDICT:
            continue
        trials = results(run)
        if trials:
            losses_by_arm[run.arm.key] = _losses(trials, 'test_loss')

    groups: dict[tuple[str, str], list[PlannedArm]] = {}  # by corpus and size
    for arm in primary:
        groups.setdefault((arm.key.corpus, arm.key.size), []).append(arm)
    for group in groups.values():
        if not all(arm.key in losses_by_arm for arm in group):
            continue
        (baseline,) = [arm for arm in group if arm.variant == study.baseline]
        compared = [arm for arm in group if arm is not baseline]

        # Compare each arm with the baseline.
        family = Family(num_compared)
        baseline_losses = losses_by_arm[baseline.key]
        for arm in compared:
            difference, diverged = _paired(losses_by_arm[arm.key], baseline_losses, study.margin)
            family.add(arm.key, difference, diverged)

        judgements = family.judge()  # by key
        decided: list[PlannedArm] = []
        for arm in compared:
            if judgements[arm.key].decision is not Decision.UNDECIDED:
                decided.append(arm)
        if decided:
            for arm in group:
                if arm is baseline or arm in decided:
                    yield arm


def _paired(
    losses: Mapping[Any, float | None], baseline_losses: Mapping[Any, float | None], margin: float
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
    """Returns made-up results for the trials of a run, by which a plan gets short.

    The validation loss is the squared distance from the middle of each grid, on a logarithmic
    scale. All test losses are equal, so all arms are equivalent.
    """
    best_settings = [values[len(values) // 2] for values in grids(study, run.arm).values()]
    results = []
    for trial in run.config.trials.trials():
        settings = _settings(run.config, trial)
        squares: list[float] = []
        for value, best in zip(settings, best_settings, strict=True):
            if value != best:  # both may be 0, so log(value / best) would fail
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
    seconds_by_run: dict[str, float] | None = None
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
            unknown, and the column has '-'.
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
            time = '-'
            if seconds_by_run:
                seconds = sum(seconds_by_run[run.id] for run in runs_of_row)
                time = str(datetime.timedelta(seconds=round(seconds)))
            row.append(time)
        rows.append(row)
    return text_table(columns, rows)


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
    """Returns the row of a run in the table by stage, such as 'screening learning_rate'."""
    if run.arm.key.control == LONGER:
        return 'longer, if every arm is decided'
    parts = (run.arm.key.control, run.stage, run.knob)
    return ' '.join(part for part in parts if part is not None)


def _settings(config: Config, trial: Mapping[str, Any]) -> Settings:
    """Returns the settings of a trial, in the order of KNOBS."""
    trial_values = [trial[name] for name in TRIAL_KNOBS]
    model_values = [getattr(config.model, name) for name in MODEL_KNOBS]
    return (*trial_values, *model_values)


def _losses(trials: Iterable[Mapping[str, Any]], field: str) -> dict[int, float | None]:
    """Returns the loss of each trial by seed; None for a diverged trial.

    Args:
        trials: The results of the trials.
        field: The name of the loss, such as 'test_loss'.
    """
    loss_by_seed: dict[int, float | None] = {}
    for trial in trials:
        seed = trial['trial']['seed']
        loss_by_seed[seed] = trial[field] if trial['status'] == FINISHED else None
    return loss_by_seed


def left_runs(path: Path, planned: Sequence[PlannedRun]) -> list[dict[str, Any]]:
    """Returns the lines of plan.jsonl for finished runs that are no longer planned.

    Args:
        path: The directory of the study.
        planned: The runs that are planned now.

    Raises:
        RunDirectoryError: A line of plan.jsonl is damaged.
    """
    file = path / PLAN
    if not file.exists():
        return []
    planned_ids = {run.id for run in planned}
    schema = {'run': str, 'directory': str, 'control': str | None}
    left = []
    for run in read_lines(file, schema, _ADVICE, check_run_directory):
        is_planned = run['run'] in planned_ids
        if not is_planned and _result_file(path, run).exists():
            left.append(run)
    return left


def _result_file(path: Path, run: Mapping[str, Any]) -> Path:
    """Returns the path of a run's results; `run` is its line of plan.jsonl."""
    return path / run['directory'] / 'result.json'


def left_lines(study: Study, path: Path, left: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Returns the lines of plan.jsonl and of results.jsonl for runs that are no longer planned.

    Added arms may leave an arm undecided, which is then not trained longer. A look at the results
    may have seen its longer runs, so both files keep them.

    Args:
        study: The study.
        path: The directory of the study.
        left: The runs, from `left_runs`.

    Raises:
        RunDirectoryError: A line of plan.jsonl is damaged, or names another run than its results.
    """
    plan_text = ''
    results_text = ''
    for run in left:
        results = read_json(_result_file(path, run), [{'config_hash': str}])
        try:
            check(run, _LEFT_RUN)
            for result in results:
                check_config_hash(result, run['run'])
        except ValueError as error:
            raise damaged_file_error(path / PLAN, error, _ADVICE) from error

        fields = {name: run[name] for name in ('run', *ARM_KEY, 'stage', 'knob', 'residual')}
        # This file has another name for the target.
        fields['target_parameters'] = run['target']
        plan_text += json.dumps(run) + '\n'
        for result in results:
            results_text += json.dumps({'study': study.name, **fields, **result}) + '\n'
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
    lines = []
    for run in planned:
        fields = {'study': study.name, 'run': run.id, **_common_fields(study, run)}
        # This file has another name for the target.
        fields['target_parameters'] = fields.pop('target')
        for trial in results(run) or []:
            lines.append(json.dumps({**fields, **trial}) + '\n')
    return ''.join(lines)
