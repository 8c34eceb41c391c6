"""The plan of a study: its runs, and the files that list them.

Each arm goes through these stages:

1. Screening of the learning rate. The grid and the seeds grow until the best value is bracketed.
2. The same for each other setting that is tuned.
3. The verdict: fresh seeds at the tuned settings.

Then follow the controls that are trained longer.

The plan is a pure function of the study and of the results of finished runs, so all workers derive
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
from qkattn.storage.records import FINISHED, read_results, to_jsonable
from qkattn.study.arm_key import LONGER, ArmKey
from qkattn.study.arms import PlannedArm, row_title
from qkattn.study.family import Family, primary_arms
from qkattn.study.protocol import resolved
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

# Returns the results of a run, one per trial, or None until the run is finished.
Results = Callable[['PlannedRun'], list[dict[str, Any]] | None]
# A training step costs as much as three forward passes, as its backward pass costs two.
STEP_PER_FORWARD = 3


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A planned run: one arm at one stage, trained as one stack of trials."""

    arm: PlannedArm
    stage: str  # 'screening', 'verdict' at the tuned settings, or 'single' in an untuned study
    knob: str | None  # the setting that the run screens; None outside screening
    config: Config  # resolved

    @property
    def id(self) -> str:
        """The digest of the config. Results and leases refer to the run by it."""
        return fingerprint(self.config)

    @property
    def directory(self) -> str:
        """The run's directory, relative to the study's directory.

        The name is readable and unique to the configuration, for example
        runs/qk-no_o-d_model=64-verdict-0123456789ab.
        """
        title = self.arm.title
        if self.stage != SINGLE:
            title += f' {self.stage}'
        readable = re.sub(r'[^\w.=]+', '-', title).strip('-')
        return f'runs/{readable}-{self.id}'

    @property
    def tokens(self) -> int:
        """Training tokens, summed over trials."""
        train = self.config.train
        tokens_of_trial = train.num_steps * train.batch_size * self.config.model.context
        return tokens_of_trial * len(self.config.trials.trials())

    @property
    def flops(self) -> float:
        """FLOPs of matrix products in training."""
        return STEP_PER_FORWARD * model_cost.flops_per_token(self.config.model) * self.tokens

    @property
    def work(self) -> float:
        """Proportional to training time: tokens x parameters."""
        return self.tokens * self.arm.target


def grids(study: Study, arm: PlannedArm) -> dict[str, tuple[float, ...]]:
    """Returns the grid of each setting that may be tuned. A setting with one value is not tuned."""
    trials = study.base.trials
    grid_of_knob = {
        'learning_rate': trials.learning_rates,
        'weight_decay': trials.weight_decays,
    }
    for knob in MODEL_KNOBS:
        grid_of_knob[knob] = getattr(study.tuning, f'{knob}s') or (getattr(arm.model, knob),)
    return grid_of_knob


def runs(study: Study, arms: Sequence[PlannedArm], results: Results) -> list[PlannedRun]:
    """Returns the runs of a study that can be planned from the results of finished runs.

    - An arm of a study without tuning has a single run.
    - An arm of a tuned study has its screening runs and, once screening has ended, a verdict run.
    - If the study has controls that are trained longer, the decided arms and their baselines have
      the same runs again, with more steps.
    """
    study = resolved(study)
    if not study.tuning.seeds:
        return [_run(study, arm, SINGLE, None, study.base.trials.seeds) for arm in arms]

    # Screening and verdict of each arm.
    planned: list[PlannedRun] = []
    settings_of_arm: dict[ArmKey, Settings] = {}
    for arm in arms:
        runs_of_arm, settings = _runs_and_settings(study, results, arm, grids(study, arm))
        planned += runs_of_arm
        settings_of_arm[arm.key] = settings
    if study.controls.longer is None:
        return planned

    # The same for the decided arms, trained longer. All decided arms are listed first, because
    # longer runs in `planned` would be judged as well.
    decided_arms = list(_decided(study, results, arms, planned))
    for arm in decided_arms:
        longer_arm = dataclasses.replace(arm, key=arm.key._replace(control=LONGER))
        longer_grids = grids_around(grids(study, arm), settings_of_arm[arm.key])
        runs_of_arm, _ = _runs_and_settings(study, results, longer_arm, longer_grids)
        planned += runs_of_arm
    return planned


def results_in(path: Path) -> Results:
    """Returns a function that reads the results of runs in a study's directory.

    The function remembers its answer for a run: a result that another worker writes later does not
    change the plan between two calls.
    """

    @functools.cache
    def results(run: PlannedRun) -> list[dict[str, Any]] | None:
        file = path / run.directory / 'result.json'
        if not file.exists():
            return None
        return read_results(file, run.config)

    return results


def without_result(planned: Sequence[PlannedRun], results: Results) -> list[PlannedRun]:
    """Returns the runs without results, longest first: workers then end at about the same time."""
    without_results = [run for run in planned if results(run) is None]
    return sorted(without_results, key=lambda run: -run.work)


def _runs_and_settings(
    study: Study, results: Results, arm: PlannedArm, grid_of_knob: Mapping[str, tuple[float, ...]]
) -> tuple[list[PlannedRun], Settings]:
    """Plans the runs of one arm: runs that screen its settings, then a verdict run.

    A setting that is tuned is called a knob. For example, the first run screens three learning
    rates. If its results show that the middle one is best, the next run screens the next knob.
    Otherwise it screens a further learning rate or further seeds. `tune` decides this from the
    losses so far. When it has chosen a value for every knob, the verdict run trains at these.

    The plan ends early at the first run without results, because they decide what follows. The loop
    ends, as a grid has at most max_points values and a value at most max_seeds seeds.

    Args:
        study: The study, resolved.
        results: Returns the results of a run, or None if it is not finished.
        arm: The arm to plan.
        grid_of_knob: The values of each knob to start from.

    Returns:
        The runs, and the settings of the arm: the chosen ones if the last run is the verdict run,
        provisional ones if the plan ends early.
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
                loss_of_seed = measured.setdefault(settings, {})
                loss_of_seed.update(_losses([trial], 'val_loss'))
        tuning = tune(grid_of_knob, study.tuning, measured, decay)

    # All knobs are tuned.
    seeds = study.base.trials.seeds
    if arm.key.control == LONGER:
        seeds = study.controls.longer_seeds
    verdict_run = _run(study, arm, VERDICT, None, seeds, [tuning.settings])
    planned.append(verdict_run)
    return planned, tuning.settings


def _screening_runs(study: Study, arm: PlannedArm, tuning: Tuning) -> list[PlannedRun]:
    """Returns the runs that screen the next knob of a tuning, at `tuning.values`.

    The trials of one run may have different learning rates or weight decays, so one run screens all
    values of these knobs. The other knobs are fields of the model. Their values are compiled into
    the program, so each value has its own run.
    """
    settings_to_screen = [tuning.at(value) for value in tuning.values]
    if tuning.knob in TRIAL_KNOBS:
        settings_of_runs = [settings_to_screen]
    else:
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
    """Returns the run of an arm at a stage: one trial for each pair of a seed and settings.

    Settings have one value for each of KNOBS, the settings that may be tuned. For example, a run
    that screens three learning rates on two seeds has six trials. Its settings differ only in the
    learning rate.

    Args:
        study: The study.
        arm: The arm, with its model.
        stage: SCREENING, VERDICT or SINGLE.
        knob: The knob that is screened; None at other stages.
        seeds: The seeds of the run.
        settings_of_run: The settings of its trials. They differ in at most one knob, one of
            TRIAL_KNOBS. If empty, the trials have the settings that the study gives.
    """
    base = study.base
    model = arm.model
    trials = dataclasses.replace(base.trials, seeds=seeds)
    if settings_of_run:
        # The values of each knob in this run, such as
        # {'learning_rate': (0.001, 0.002, 0.004), 'weight_decay': (0.1,), ...}.
        values_of_knob: dict[str, tuple[float, ...]] = {}
        for index, name in enumerate(KNOBS):
            values = [settings[index] for settings in settings_of_run]
            values_of_knob[name] = tuple(dict.fromkeys(values))  # without repetitions

        # The config of trials has a tuple of values in a field with the plural name, such as
        # `learning_rates`. The config of the model has one value.
        trial_fields: dict[str, Any] = {f'{name}s': values_of_knob[name] for name in TRIAL_KNOBS}
        trials = dataclasses.replace(trials, **trial_fields)
        model_fields: dict[str, Any] = {name: values_of_knob[name][0] for name in MODEL_KNOBS}
        model = dataclasses.replace(model, **model_fields)

    data = dataclasses.replace(base.data, name=arm.key.corpus)
    config = dataclasses.replace(base, data=data, trials=trials, model=model)
    if arm.key.control == LONGER:
        assert study.controls.longer is not None
        config = _trained_longer(config, study.controls.longer)
    return PlannedRun(arm, stage, knob, config)


def _trained_longer(config: Config, times: int) -> Config:
    """Returns a config that trains `times` as long.

    Warm-up and the steps between evaluations and between checkpoints are as much longer.
    """
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
    """Yields the arms whose verdict is better, worse or equivalent, and their baselines.

    Arms of one size and corpus are judged together, once all their verdict runs are finished. If
    none of them is decided, their baseline is not yielded either.

    The tests compare test losses paired over seeds. They are corrected for the number of
    comparisons in the whole study. A report may later withhold the verdict of an arm for other
    reasons.
    """
    primary = [arm for arm in arms if arm.key.control is None]
    num_compared = len(primary_arms((arm.key for arm in primary), study.baseline))

    # The losses of each arm whose verdict run is finished, by seed.
    losses_by_arm: dict[ArmKey, dict[Any, float | None]] = {}
    for run in planned:
        if run.stage != VERDICT:
            continue
        trials = results(run)
        if trials:
            losses_by_arm[run.arm.key] = _losses(trials, 'test_loss')

    # A group has the arms of one corpus and size.
    arms_by_group: dict[tuple[str, str], list[PlannedArm]] = {}
    for arm in primary:
        arms_by_group.setdefault((arm.key.corpus, arm.key.size), []).append(arm)
    for group in arms_by_group.values():
        if not all(arm.key in losses_by_arm for arm in group):
            continue
        (baseline,) = [arm for arm in group if arm.variant == study.baseline]
        others = [arm for arm in group if arm is not baseline]

        # Compare each arm with the baseline.
        family = Family(num_compared)
        baseline_losses = losses_by_arm[baseline.key]
        for arm in others:
            difference, diverged = _paired(losses_by_arm[arm.key], baseline_losses, study.margin)
            family.add(arm.key, difference, diverged)

        judgement_of_arm = family.judge()
        decided: list[PlannedArm] = []
        for arm in others:
            if judgement_of_arm[arm.key].decision is not Decision.UNDECIDED:
                decided.append(arm)
        if decided:
            for arm in group:  # in the order of the study
                if arm is baseline or arm in decided:
                    yield arm


def _paired(
    losses: Mapping[Any, float | None], baseline_losses: Mapping[Any, float | None], margin: float
) -> tuple[inference.Difference | None, tuple[int, int]]:
    """Compares the losses of an arm with the losses of its baseline, seed by seed.

    Args:
        losses: The losses of the arm by seed; None for a diverged trial.
        baseline_losses: The losses of the baseline, at the same seeds.
        margin: Arms that differ by less are equivalent, nats per token.

    Returns:
        A pair of
        - the difference over the seeds at which both finished; None if there is no such seed;
        - the numbers of diverged trials (arm, baseline).
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
    """Returns the fewest runs that the study may need if every arm is decided.

    It is the plan for ideal results (`_ideal_results`): tuning finds a best value in each first
    grid, and all arms are equivalent. Equivalent arms are decided, so every arm is also trained
    longer if the study asks for that.
    """
    # A parabola fits ideal results exactly, and its vertex is the middle value of the grid. The
    # bound on the excess loss is made for noisy losses, so it must not ask for further seeds.
    tuning = dataclasses.replace(study.tuning, choice='vertex', max_excess=None)
    tuned_study = dataclasses.replace(study, tuning=tuning)
    return runs(tuned_study, arms, lambda run: _ideal_results(study, run))


def _ideal_results(study: Study, run: PlannedRun) -> list[dict[str, Any]]:
    """Returns results that make a plan short, without noise; one for each trial of a run.

    The best value of each setting is the middle one of its grid. The validation loss is the squared
    distance of the settings from these values, on a logarithmic scale. All test losses are equal,
    so all arms are equivalent.
    """
    best_settings = [values[len(values) // 2] for values in grids(study, run.arm).values()]
    results = []
    for trial in run.config.trials.trials():
        settings = _settings(run.config, trial)
        squares: list[float] = []
        for value, best in zip(settings, best_settings, strict=True):
            if value != best:  # equal ones may be 0, which has no logarithm
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
    """What the runs of a plan cost together."""

    runs: int
    trials: int
    tokens: int  # of training
    flops: float  # of training


def cost(planned: Sequence[PlannedRun]) -> PlanCost:
    """Adds up the cost of these runs."""
    return PlanCost(
        runs=len(planned),
        trials=sum(len(run.config.trials.trials()) for run in planned),
        tokens=sum(run.tokens for run in planned),
        flops=sum(run.flops for run in planned),
    )


def estimate(study: Study, arms: Sequence[PlannedArm], *, measure: bool = False) -> str:
    """Returns two tables of what the plan costs at least, by arm and by stage, with notes.

    Nothing is compiled. With `measure`, the table by stage also has an estimate of the time: one
    run of each size is compiled and timed for a few steps. If this machine lacks the memory or the
    devices for a size, a note says why there is no time.
    """
    planned = fewest_runs(study, arms)
    keys = {run.arm.key for run in planned}
    notes: list[str] = []
    seconds_of_run: dict[str, float] | None = None
    if measure:
        seconds_of_run, note = _seconds_if_here(study, planned)
        notes.append(note)
    if study.tuning.seeds:
        notes.append(
            f'lower bounds: a grid may grow to {study.tuning.max_points} values, '
            f'a value to {study.tuning.max_seeds} seeds'
        )
    by_arm = _cost_table('arm', planned, lambda run: row_title(run.arm.key, keys))
    by_stage = _cost_table('stage', planned, _stage_title, seconds_of_run)
    return '\n'.join([by_arm, '', by_stage, *notes])


def _cost_table(
    title: str,
    planned: Sequence[PlannedRun],
    row_of: Callable[[PlannedRun], str],
    seconds_of_run: Mapping[str, float] | None = None,
) -> str:
    """Returns a table of what runs cost. Runs of the same row are added up; the last row has all.

    Args:
        title: The title of the first column, such as 'arm'.
        planned: The runs.
        row_of: Returns the title of the row that a run belongs to.
        seconds_of_run: The seconds of each run by its id, which add a last column with the time.
            If {}, the time is unknown, and the column has '-'.
    """
    runs_of_row: dict[str, list[PlannedRun]] = {}
    for run in planned:
        runs_of_row.setdefault(row_of(run), []).append(run)

    # Each column has a title, and whether it is flush left.
    titles = [(title, True)]
    titles += [(column, False) for column in ('runs', 'trials', 'tokens', 'FLOPs')]
    if seconds_of_run is not None:
        titles.append(('about', False))
    rows: list[list[str]] = []
    for name, members in [*runs_of_row.items(), ('total', planned)]:
        total = cost(members)
        row = [name, f'{total.runs}', f'{total.trials}']
        row += [f'{total.tokens:.3g}', f'{total.flops:.3g}']
        if seconds_of_run is not None:
            time = '-'
            if seconds_of_run:
                seconds = sum(seconds_of_run[run.id] for run in members)
                time = str(datetime.timedelta(seconds=round(seconds)))
            row.append(time)
        rows.append(row)
    return text_table(titles, rows)


def _seconds_if_here(study: Study, planned: Sequence[PlannedRun]) -> tuple[dict[str, float], str]:
    """Returns the estimated seconds of each run, by its id, and a note on them.

    If this machine cannot train the runs, the seconds are {} and the note says why.
    """
    try:
        seconds_of_run = _measured_seconds(study, planned)
    except (ConfigError, JaxRuntimeError) as error:
        outcome = cli.outcome(error)
        if outcome is None:  # a bug, not a lack of memory or devices
            raise
        return {}, f'no time, as this machine cannot train it: {outcome.sentence}'
    note = 'time is for 1 worker on this machine, from a warm-up, without evaluation'
    return seconds_of_run, note


def _measured_seconds(study: Study, planned: Sequence[PlannedRun]) -> dict[str, float]:
    """Estimates the seconds of compilation and training of each run, by its id.

    One run of each size is compiled and timed for a few steps: a run of the baseline if the size
    has one. All runs of the size are assumed to compile in the same time, and to train at the same
    FLOPs per second.
    """
    # The key is False for runs of the baseline, and False sorts before True.
    baseline_first = sorted(planned, key=lambda run: run.arm.variant != study.baseline)
    seconds_per_flop: dict[str, float] = {}  # by size
    compilation_seconds: dict[str, float] = {}  # by size
    seconds_of_run: dict[str, float] = {}
    for run in baseline_first:
        size = run.arm.key.size
        if size not in seconds_per_flop:
            seconds_per_step, compilation_seconds[size] = program.warm_up(run.config)
            seconds_per_flop[size] = seconds_per_step * run.config.train.num_steps / run.flops
        seconds_of_run[run.id] = run.flops * seconds_per_flop[size] + compilation_seconds[size]
    return seconds_of_run


def _stage_title(run: PlannedRun) -> str:
    """Returns the row of a run in the table of costs by stage, as in 'screening learning_rate'."""
    if run.arm.key.control == LONGER:
        return 'longer, if every arm is decided'
    parts = (run.arm.key.control, run.stage, run.knob)
    return ' '.join(part for part in parts if part is not None)


def _settings(config: Config, trial: Mapping[str, Any]) -> Settings:
    """Returns the settings of a trial: its value of each of KNOBS."""
    trial_values = [trial[name] for name in TRIAL_KNOBS]
    model_values = [getattr(config.model, name) for name in MODEL_KNOBS]
    return (*trial_values, *model_values)


def _losses(trials: Iterable[Mapping[str, Any]], field: str) -> dict[int, float | None]:
    """Returns the loss of each trial by seed; None for a diverged trial.

    `field` names the loss, such as 'test_loss'. The losses are in the order of the trials.
    """
    loss_of_seed: dict[int, float | None] = {}
    for trial in trials:
        seed = trial['trial']['seed']
        loss_of_seed[seed] = trial[field] if trial['status'] == FINISHED else None
    return loss_of_seed


def plan_lines(study: Study, planned: Sequence[PlannedRun]) -> str:
    """Returns the content of plan.jsonl: one line for each run, with its resolved config."""
    text = []
    for run in planned:
        record = {
            'run': run.id,
            **_common_fields(study, run),
            'destination': run.arm.destination,
            'directory': run.directory,
            'trials': len(run.config.trials.trials()),
            'config': to_json(run.config),
        }
        text.append(json.dumps(to_jsonable(record)) + '\n')
    return ''.join(text)


def _common_fields(study: Study, run: PlannedRun) -> dict[str, Any]:
    """Returns the fields that a run has in plan.jsonl and in results.jsonl."""
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
    text = []
    for run in planned:
        fields = {'study': study.name, 'run': run.id, **_common_fields(study, run)}
        # In this file, the target has another name and comes last, in all versions.
        fields['target_parameters'] = fields.pop('target')
        for trial in results(run) or []:
            text.append(json.dumps({**fields, **trial}) + '\n')
    return ''.join(text)
