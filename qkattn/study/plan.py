"""The plan of a study: its runs, and the files that list them.

    every arm: screening of the learning rate, with larger grids and further seeds until bracketed
    -> the same for the other settings that are tuned -> the verdict;
    then the controls that are trained longer.

The plan is a function of the study and of the results of finished runs, so all workers derive the
same plan.
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
from qkattn.study.arms import PlannedArm
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

# The results of a run, one per trial; None until it is finished.
Results = Callable[['PlannedRun'], list[dict[str, Any]] | None]
# FLOPs of a training step by those of its forward pass: a backward pass costs two forward passes.
STEP_PER_FORWARD = 3


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A run as it is planned: an arm at one stage, trained as one stack of trials."""

    arm: PlannedArm
    stage: str  # 'screening', 'verdict' at the tuned settings, or 'single' in an untuned study
    knob: str | None  # the setting that is screened
    config: Config  # resolved

    @property
    def id(self) -> str:
        """The digest of the config, by which results and leases are known."""
        return fingerprint(self.config)

    @property
    def directory(self) -> str:
        """Relative to the study: readable, and one per configuration.

        For example runs/qk-no_o-d_model=64-verdict-0123456789ab.
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
    """The grid of each setting that may be tuned; one with a single value is not tuned."""
    trials = study.base.trials
    grid_of_knob = {
        'learning_rate': trials.learning_rates,
        'weight_decay': trials.weight_decays,
    }
    for knob in MODEL_KNOBS:
        grid_of_knob[knob] = getattr(study.tuning, f'{knob}s') or (getattr(arm.model, knob),)
    return grid_of_knob


def runs(study: Study, arms: Sequence[PlannedArm], results: Results) -> list[PlannedRun]:
    """The runs of a study, as far as `results` determine them.

    Arm by arm, those of screening and, once it has ended, the run of the verdict; then the same for
    the arms that are trained longer: those whose verdict is decided, and their baselines. Without
    tuning, one run for each arm.
    """
    study = resolved(study)
    if not study.tuning.seeds:
        return [_run(study, arm, SINGLE, None, study.base.trials.seeds) for arm in arms]
    planned: list[PlannedRun] = []
    settings_of_arm: dict[ArmKey, Settings] = {}
    for arm in arms:
        runs_of_arm, settings = _tuned(study, results, arm, grids(study, arm))
        planned += runs_of_arm
        settings_of_arm[arm.key] = settings
    if study.controls.longer is None:
        return planned
    # Listed before the plan grows: arms that are trained longer decide no further ones.
    decided_arms = list(_decided(study, results, arms, planned))
    for arm in decided_arms:
        longer_arm = dataclasses.replace(arm, key=arm.key._replace(control=LONGER))
        longer_grids = grids_around(grids(study, arm), settings_of_arm[arm.key])
        runs_of_arm, _ = _tuned(study, results, longer_arm, longer_grids)
        planned += runs_of_arm
    return planned


def results_in(path: Path) -> Results:
    """The results of runs in a study's directory, each file read once, so all is of one moment."""

    @functools.cache
    def results(run: PlannedRun) -> list[dict[str, Any]] | None:
        file = path / run.directory / 'result.json'
        if not file.exists():
            return None
        return read_results(file, run.config)

    return results


def left(planned: Sequence[PlannedRun], results: Results) -> list[PlannedRun]:
    """The runs without results, the longest first, so that workers end at about the same time."""
    without_results = [run for run in planned if results(run) is None]
    return sorted(without_results, key=lambda run: -run.work)


def _tuned(
    study: Study, results: Results, arm: PlannedArm, grid_of: Mapping[str, tuple[float, ...]]
) -> tuple[list[PlannedRun], Settings]:
    """The runs of an arm as far as results determine them, and its settings.

    The settings are the chosen ones if the last run is that of the verdict. `grid_of` has the grid
    of each knob. Screening ends: a grid holds at most max_points values, each with at most
    max_seeds seeds.
    """
    planned: list[PlannedRun] = []
    measured: dict[Settings, dict[int, float | None]] = {}
    decay = study.base.optimizer.decay
    tuning = tune(grid_of, study.tuning, measured, decay)
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
        tuning = tune(grid_of, study.tuning, measured, decay)
    seeds = study.base.trials.seeds
    if arm.key.control == LONGER:
        seeds = study.controls.longer_seeds
    planned.append(_run(study, arm, VERDICT, None, seeds, [tuning.settings]))
    return planned, tuning.settings


def _screening_runs(study: Study, arm: PlannedArm, tuning: Tuning) -> list[PlannedRun]:
    """The runs that measure the values of the knob that is screened next.

    The values of a trial's knob share one run; those of a model's field are compiled in, so each
    has a run of its own.
    """
    stack = [tuning.at(value) for value in tuning.values]
    stacks = [stack] if tuning.knob in TRIAL_KNOBS else [[settings] for settings in stack]
    return [_run(study, arm, SCREENING, tuning.knob, tuning.seeds, stack) for stack in stacks]


def _run(
    study: Study,
    arm: PlannedArm,
    stage: str,
    knob: str | None,
    seeds: tuple[int, ...],
    stack: Sequence[Settings] = (),
) -> PlannedRun:
    """The run of an arm at a stage: a stack of settings, each with these seeds.

    Settings hold a value of each of KNOBS, and those of a stack differ in a trial's knob at most.
    Without a stack they are those of the study.
    """
    base = study.base
    model = arm.model
    trials = dataclasses.replace(base.trials, seeds=seeds)
    if stack:
        values_of_knob: dict[str, tuple[float, ...]] = {}
        for index, name in enumerate(KNOBS):
            values = [settings[index] for settings in stack]
            values_of_knob[name] = tuple(dict.fromkeys(values))
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
    """The config with `times` as many steps, also of warm-up and between evaluations."""
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
    study: Study, results: Results, arms: Sequence[PlannedArm], known: Sequence[PlannedRun]
) -> Iterator[PlannedArm]:
    """The baseline and the decided arms of each size and corpus whose verdicts are finished.

    They are decided by the tests alone, on test losses paired over seeds, corrected for the
    comparisons of the whole study: other reasons are not known before the report.
    """
    primary = [arm for arm in arms if arm.key.control is None]
    num_compared = len(primary_arms((arm.key for arm in primary), study.baseline))
    losses_by_arm: dict[ArmKey, dict[Any, float | None]] = {}  # of finished runs, by seed
    for run in known:
        trials = results(run) if run.stage == VERDICT else None
        if trials:
            losses_by_arm[run.arm.key] = _losses(trials, 'test_loss')

    for corpus, size in dict.fromkeys((arm.key.corpus, arm.key.size) for arm in primary):
        group = [arm for arm in primary if (arm.key.corpus, arm.key.size) == (corpus, size)]
        if not all(arm.key in losses_by_arm for arm in group):
            continue
        (baseline,) = [arm for arm in group if arm.variant == study.baseline]
        baseline_losses = losses_by_arm[baseline.key]
        family = Family(num_compared)
        for arm in group:
            if arm is not baseline:
                family.add(arm.key, *_paired(losses_by_arm[arm.key], baseline_losses, study.margin))
        decided = [
            key
            for key, judgement in family.judge().items()
            if judgement.decision is not Decision.UNDECIDED
        ]
        if decided:
            yield from (arm for arm in group if arm is baseline or arm.key in decided)


def _paired(
    losses: Mapping[Any, float | None], baseline_losses: Mapping[Any, float | None], margin: float
) -> tuple[inference.Difference | None, tuple[int, int]]:
    """The difference over seeds at which neither diverged, and how many of each diverged.

    A loss is None where the trial diverged; the difference is None where no pair is left.
    """
    differences = []
    for seed, loss in losses.items():
        other = baseline_losses[seed]
        if loss is not None and other is not None:
            differences.append(loss - other)
    paired_with = [baseline_losses[seed] for seed in losses]
    diverged = (list(losses.values()).count(None), paired_with.count(None))
    return inference.paired(differences, margin) if differences else None, diverged


def imagined(study: Study, arms: Sequence[PlannedArm]) -> list[PlannedRun]:
    """The fewest runs that the study may have, but those trained longer as if all were decided.

    They are the plan that follows from imagined results: the best value of each setting is the
    middle one of its grid, without noise, and all arms are equivalent.
    """

    def ideal_results(run: PlannedRun) -> list[dict[str, Any]]:
        best_settings = [values[len(values) // 2] for values in grids(study, run.arm).values()]
        results = []
        for trial in run.config.trials.trials():
            settings = _settings(run.config, trial)
            # The squared distance of each setting from its best value, on a logarithmic scale.
            squares = [
                math.log(value / best) ** 2
                for value, best in zip(settings, best_settings, strict=True)
                if value != best
            ]
            losses = {'val_loss': sum(squares), 'test_loss': 0.0}
            results.append({'trial': trial, 'status': FINISHED, **losses})
        return results

    tuning = dataclasses.replace(study.tuning, choice='vertex', max_excess=None)
    return runs(dataclasses.replace(study, tuning=tuning), arms, ideal_results)


class PlanCost(NamedTuple):
    """What the runs of a plan cost together."""

    runs: int
    trials: int
    tokens: int  # of training
    flops: float  # of training


def cost(planned: Sequence[PlannedRun]) -> PlanCost:
    """The cost of these runs together."""
    return PlanCost(
        runs=len(planned),
        trials=sum(len(run.config.trials.trials()) for run in planned),
        tokens=sum(run.tokens for run in planned),
        flops=sum(run.flops for run in planned),
    )


def estimate(study: Study, arms: Sequence[PlannedArm]) -> str:
    """A table of the least cost of the plan by stage; compiles one program per size.

    Time is that of compilation and training at the baseline's speed, by size; there is none if this
    machine lacks the memory or devices of a size.
    """
    planned = imagined(study, arms)
    seconds_of_run: dict[str, float] = {}
    note = 'time is for 1 worker on this machine, from a warm-up, without evaluation'
    try:
        seconds_of_run = _measured_seconds(study, planned)
    except (ConfigError, JaxRuntimeError) as error:
        outcome = cli.outcome(error)
        if outcome is None:
            raise
        note = f'no time, as this machine cannot train it: {outcome[0]}'

    runs_of_stage: dict[str, list[PlannedRun]] = {}
    for run in planned:
        runs_of_stage.setdefault(_stage_title(run), []).append(run)
    rows: list[list[str]] = []
    for title, members in [*runs_of_stage.items(), ('total', planned)]:
        total = cost(members)
        time = '-'
        if seconds_of_run:
            seconds = sum(seconds_of_run[run.id] for run in members)
            time = str(datetime.timedelta(seconds=round(seconds)))
        figures = [f'{total.runs}', f'{total.trials}', f'{total.tokens:.3g}', f'{total.flops:.3g}']
        rows.append([title, *figures, time])
    if study.tuning.seeds:
        note += (
            f'\nlower bounds: a grid may grow to {study.tuning.max_points} values, '
            f'a value to {study.tuning.max_seeds} seeds'
        )
    titles = [('stage', True)]  # flush left
    titles += [(name, False) for name in ('runs', 'trials', 'tokens', 'FLOPs', 'about')]
    return f'{text_table(titles, rows)}\n{note}'


def _measured_seconds(study: Study, planned: Sequence[PlannedRun]) -> dict[str, float]:
    """Seconds of each run, by its id: one run of each size is compiled and timed for a few steps.

    It is a run of the baseline where the size has one.
    """
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
    """The row of a run in the table of costs, such as 'screening learning_rate'."""
    if run.arm.key.control == LONGER:
        return 'longer, if every arm is decided'
    parts = (run.arm.key.control, run.stage, run.knob)
    return ' '.join(part for part in parts if part is not None)


def _settings(config: Config, trial: Mapping[str, Any]) -> Settings:
    """The values of all knobs in a trial of a run."""
    trial_values = [trial[name] for name in TRIAL_KNOBS]
    model_values = [getattr(config.model, name) for name in MODEL_KNOBS]
    return (*trial_values, *model_values)


def _losses(trials: Iterable[Mapping[str, Any]], field: str) -> dict[int, float | None]:
    """The losses in results, in the order of the trials, by seed; None for a diverged trial."""
    loss_of_seed: dict[int, float | None] = {}
    for trial in trials:
        seed = trial['trial']['seed']
        loss_of_seed[seed] = trial[field] if trial['status'] == FINISHED else None
    return loss_of_seed


def lines(study: Study, planned: Sequence[PlannedRun]) -> str:
    """plan.jsonl: a line per run, with its resolved config."""
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
    """The fields of a run that plan.jsonl and results.jsonl share."""
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
    """results.jsonl: a line per trial of every finished run."""
    text = []
    for run in planned:
        fields = {'study': study.name, 'run': run.id, **_common_fields(study, run)}
        # Moves to the end, where it has this name in files of all versions.
        fields['target_parameters'] = fields.pop('target')
        for trial in results(run) or []:
            text.append(json.dumps({**fields, **trial}) + '\n')
    return ''.join(text)
