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
from typing import Any

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
from qkattn.study.arms import MatchedArm, resolved
from qkattn.study.family import Family, primary_arms
from qkattn.study.tuning import (
    KNOBS,
    MODEL_KNOBS,
    SCREENING,
    SINGLE,
    TRIAL_KNOBS,
    VERDICT,
    Settings,
    grids_around,
    tune,
)
from qkattn.train import program

# The results of a run, one per trial; None until it is finished.
Results = Callable[['PlannedRun'], list[dict[str, Any]] | None]
STEP_PER_FORWARD = 3  # of FLOPs: a backward pass costs two forward passes


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A run: an arm at one stage, trained as one stack of trials."""

    arm: MatchedArm
    stage: str  # 'screening', 'verdict' at the tuned settings, or 'single' in an untuned study
    knob: str | None  # the setting that is screened
    config: Config  # resolved

    @property
    def id(self) -> str:
        return fingerprint(self.config)

    @property
    def directory(self) -> str:
        """Relative to the study: readable, and one per configuration."""
        stage = '' if self.stage == SINGLE else f' {self.stage}'
        title = re.sub(r'[^\w.=]+', '-', self.arm.title + stage).strip('-')
        return f'runs/{title}-{self.id}'

    @property
    def tokens(self) -> int:
        """Training tokens, summed over trials."""
        train = self.config.train
        of_trial = train.num_steps * train.batch_size * self.config.model.context
        return of_trial * len(self.config.trials.trials())

    @property
    def flops(self) -> float:
        """FLOPs of matrix products in training."""
        return STEP_PER_FORWARD * model_cost.flops_per_token(self.config.model) * self.tokens

    @property
    def work(self) -> float:
        """Proportional to training time: tokens x parameters."""
        return self.tokens * self.arm.target


def grids(study: Study, arm: MatchedArm) -> dict[str, tuple[float, ...]]:
    """The grid of each tuned setting; a single value is not tuned."""
    trials = study.base.trials
    return {'learning_rate': trials.learning_rates, 'weight_decay': trials.weight_decays} | {
        name: getattr(study.tuning, f'{name}s') or (getattr(arm.model, name),)
        for name in MODEL_KNOBS
    }


def runs(study: Study, arms: Sequence[MatchedArm], results: Results) -> list[PlannedRun]:
    """Every run known so far: screening and verdicts arm by arm, then longer runs."""
    study = resolved(study)
    if not study.tuning.seeds:
        return [_run(study, arm, SINGLE, None, study.base.trials.seeds) for arm in arms]
    known: list[PlannedRun] = []
    chosen: dict[ArmKey, Settings] = {}
    for arm in arms:
        of_arm, chosen[arm.key] = _tuned(study, results, arm, grids(study, arm))
        known += of_arm
    for arm in [*_decided(study, results, arms, known)] if study.controls.longer else ():
        longer = dataclasses.replace(arm, key=arm.key._replace(control=LONGER))
        grid_of = grids_around(grids(study, arm), chosen[arm.key])
        known += _tuned(study, results, longer, grid_of)[0]
    return known


def results_in(path: Path) -> Results:
    """Of the runs in the directory of a study; each file is read once, so all is of one moment."""

    @functools.cache
    def results(run: PlannedRun) -> list[dict[str, Any]] | None:
        file = path / run.directory / 'result.json'
        return read_results(file, run.config) if file.exists() else None

    return results


def left(known: Sequence[PlannedRun], results: Results) -> list[PlannedRun]:
    """The runs without results, the longest first, so that workers end at about the same time."""
    return sorted((run for run in known if results(run) is None), key=lambda run: -run.work)


def _tuned(
    study: Study, results: Results, arm: MatchedArm, grid_of: Mapping[str, tuple[float, ...]]
) -> tuple[list[PlannedRun], Settings]:
    """The runs of an arm known so far, and its settings, chosen once it has verdict runs.

    Screening ends: a grid holds at most max_points values, each with at most max_seeds seeds.
    """
    known: list[PlannedRun] = []
    measured: dict[Settings, dict[int, float | None]] = {}
    decay = study.base.optimizer.decay
    while (tuning := tune(grid_of, study.tuning, measured, decay)).knob is not None:
        stack = [tuning.at(value) for value in tuning.values]
        # The values of a trial's knob share a run; those of a model's field are compiled in.
        stacks = [stack] if tuning.knob in TRIAL_KNOBS else [[settings] for settings in stack]
        new = [_run(study, arm, SCREENING, tuning.knob, tuning.seeds, s) for s in stacks]
        known += new
        for run in new:
            if (trials := results(run)) is None:
                return known, tuning.settings
            for trial in trials:
                of_seed = measured.setdefault(_settings(run.config, trial['trial']), {})
                of_seed |= _losses([trial], 'val_loss')
    best = tuning.settings
    seeds = study.base.trials.seeds
    if arm.key.control == LONGER:
        seeds = study.controls.longer_seeds
    return [*known, _run(study, arm, VERDICT, None, seeds, [best])], best


def _run(
    study: Study,
    arm: MatchedArm,
    stage: str,
    knob: str | None,
    seeds: tuple[int, ...],
    stack: Sequence[Settings] = (),
) -> PlannedRun:
    """The run of a stack of settings, by default those of the study, each with these seeds."""
    base = study.base
    model = arm.model
    trials = dataclasses.replace(base.trials, seeds=seeds)
    if stack:
        columns = zip(KNOBS, zip(*stack, strict=True), strict=True)
        values = {name: tuple(dict.fromkeys(column)) for name, column in columns}
        fields = {f'{name}s': values[name] for name in TRIAL_KNOBS}
        trials = dataclasses.replace(trials, **fields)
        model = dataclasses.replace(model, **{name: values[name][0] for name in MODEL_KNOBS})
    data = dataclasses.replace(base.data, name=arm.key.corpus)
    config = dataclasses.replace(base, data=data, trials=trials, model=model)
    if arm.key.control == LONGER:
        times = study.controls.longer
        names = ('num_steps', 'eval_every', 'checkpoint_every')
        steps = {name: times * getattr(base.train, name) for name in names}
        warmup = times * base.optimizer.warmup_steps
        config = dataclasses.replace(
            config,
            train=dataclasses.replace(base.train, **steps),
            optimizer=dataclasses.replace(base.optimizer, warmup_steps=warmup),
        )
    return PlannedRun(arm, stage, knob, config)


def _decided(
    study: Study, results: Results, arms: Sequence[MatchedArm], known: Sequence[PlannedRun]
) -> Iterator[MatchedArm]:
    """The baseline and the decided arms of each size and corpus whose verdicts are finished.

    They are decided by the tests alone, on test losses paired over seeds, corrected for the
    comparisons of the whole study: other reasons are not known before the report.
    """
    primary = [arm for arm in arms if arm.key.control is None]
    size_of_family = len(primary_arms((arm.key for arm in primary), study.baseline))
    verdicts = {run.arm.key: run for run in known if run.stage == VERDICT}
    finished = {key: trials for key, run in verdicts.items() if (trials := results(run))}
    losses = {key: _losses(trials, 'test_loss') for key, trials in finished.items()}
    for corpus, size in dict.fromkeys((arm.key.corpus, arm.key.size) for arm in primary):
        group = [arm for arm in primary if (arm.key.corpus, arm.key.size) == (corpus, size)]
        (baseline,) = (arm for arm in group if arm.variant == study.baseline)
        if not losses.keys() >= {arm.key for arm in group}:
            continue
        family = Family(size_of_family)
        for arm in group:
            if arm is baseline:
                continue
            pairs = [(loss, losses[baseline.key][seed]) for seed, loss in losses[arm.key].items()]
            arm_losses, baseline_losses = zip(*pairs, strict=True)
            differences = [loss - other for loss, other in pairs if None not in (loss, other)]
            difference = inference.paired(differences, study.margin) if differences else None
            diverged = (arm_losses.count(None), baseline_losses.count(None))
            family.add(arm.key, difference, diverged)
        decided = {
            key
            for key, judgement in family.judge().items()
            if judgement.decision is not Decision.UNDECIDED
        }
        if decided:
            yield from (arm for arm in group if arm is baseline or arm.key in decided)


def imagined(study: Study, arms: Sequence[MatchedArm]) -> list[PlannedRun]:
    """The fewest runs that the study may have, but those trained longer as if all were decided.

    The best value of each setting is the middle one of its grid, without noise, and all arms are
    equivalent.
    """

    def results(run: PlannedRun) -> list[dict[str, Any]]:
        middle = [values[len(values) // 2] for values in grids(study, run.arm).values()]
        trials = []
        for trial in run.config.trials.trials():
            pairs = zip(_settings(run.config, trial), middle, strict=True)
            away = sum(math.log(one / other) ** 2 for one, other in pairs if one != other)
            losses = {'val_loss': away, 'test_loss': 0.0}
            trials.append({'trial': trial, 'status': FINISHED} | losses)
        return trials

    tuning = dataclasses.replace(study.tuning, choice='vertex', max_excess=None)
    return runs(dataclasses.replace(study, tuning=tuning), arms, results)


def cost(runs: Sequence[PlannedRun]) -> tuple[int, int, int, float]:
    """Number of runs and trials, tokens and FLOPs of training."""
    trials = sum(len(run.config.trials.trials()) for run in runs)
    return len(runs), trials, sum(run.tokens for run in runs), sum(run.flops for run in runs)


def estimate(study: Study, arms: Sequence[MatchedArm]) -> str:
    """A table of the least cost of the plan by stage; compiles one program per size.

    Time is that of compilation and training at the baseline's speed, by size; there is none if this
    machine lacks the memory or devices of a size.
    """
    planned = imagined(study, arms)
    note = 'time is for 1 worker on this machine, from a warm-up, without evaluation'
    speeds: dict[str, tuple[float, float]] = {}  # seconds for a FLOP and for compilation, by size
    seconds: dict[str, float] = {}  # by run
    try:
        for run in sorted(planned, key=lambda run: run.arm.variant != study.baseline):
            if (size := run.arm.key.size) not in speeds:
                per_step, compilation = program.warm_up(run.config)
                speeds[size] = per_step * run.config.train.num_steps / run.flops, compilation
            seconds[run.id] = run.flops * speeds[size][0] + speeds[size][1]
    except (ConfigError, JaxRuntimeError) as error:
        if (outcome := cli.outcome(error)) is None:
            raise
        seconds = {}
        note = f'no time, as this machine cannot train it: {outcome[0]}'
    stages: dict[str, list[PlannedRun]] = {}
    for run in planned:
        stage = ' '.join(filter(None, (run.arm.key.control, run.stage, run.knob)))
        if run.arm.key.control == LONGER:
            stage = 'longer, if every arm is decided'
        stages.setdefault(stage, []).append(run)
    rows = []
    for stage, members in (stages | {'total': planned}).items():
        number, trials, tokens, flops = cost(members)
        time = datetime.timedelta(seconds=round(sum(seconds.get(run.id, 0) for run in members)))
        figures = str(number), str(trials), f'{tokens:.3g}', f'{flops:.3g}'
        rows.append([stage, *figures, str(time) if seconds else '-'])
    if study.tuning.seeds:
        most = study.tuning.max_points
        seeds = study.tuning.max_seeds
        note += f'\nlower bounds: a grid may grow to {most} values, a value to {seeds} seeds'
    names = ('runs', 'trials', 'tokens', 'FLOPs', 'about')
    return text_table([('stage', True), *((name, False) for name in names)], rows) + f'\n{note}'


def _settings(config: Config, trial: Mapping[str, Any]) -> Settings:
    """The values of all knobs in a trial of a run."""
    compiled_in = (getattr(config.model, name) for name in MODEL_KNOBS)
    return (*(trial[name] for name in TRIAL_KNOBS), *compiled_in)


def _losses(trials: Iterable[Mapping[str, Any]], field: str) -> dict[int, float | None]:
    """A loss of results by seed; None for a diverged trial."""
    return {t['trial']['seed']: t[field] if t['status'] == FINISHED else None for t in trials}


def lines(study: Study, known: Sequence[PlannedRun]) -> str:
    """plan.jsonl: a line per run, with its resolved config."""
    records = (
        {
            'run': run.id,
            **_about(study, run),
            'destination': run.arm.destination,
            'directory': run.directory,
            'trials': len(run.config.trials.trials()),
            'config': to_json(run.config),
        }
        for run in known
    )
    return ''.join(json.dumps(to_jsonable(record)) + '\n' for record in records)


def _about(study: Study, run: PlannedRun) -> dict[str, Any]:
    """The fields of a run that are not in its directory."""
    arm = run.arm
    matched = study.match is not None
    return {
        **arm.key._asdict(),
        'stage': run.stage,
        'knob': run.knob,
        'target': arm.target if matched else None,
        'residual': arm.residual if matched else None,
    }


def result_lines(study: Study, known: Sequence[PlannedRun], results: Results) -> str:
    """results.jsonl: a line per trial of every finished run."""
    text = []
    for run in known:
        fields = {'study': study.name, 'run': run.id, **_about(study, run)}
        fields['target_parameters'] = fields.pop('target')
        text += [json.dumps({**fields, **trial}) + '\n' for trial in results(run) or []]
    return ''.join(text)
