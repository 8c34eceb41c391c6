"""The cost of a study before it starts: tokens, FLOPs, and time from a measured warm-up."""

import datetime
import time
from collections.abc import Sequence
from typing import NamedTuple

from qkattn.config import Study
from qkattn.model import cost as model_cost
from qkattn.study import plan
from qkattn.study.arm_key import LONGER
from qkattn.study.arms import MatchedArm
from qkattn.study.plan import PlannedRun
from qkattn.train import program

# A training step costs a forward pass and a backward pass of two.
STEP_PER_FORWARD = 3


class Cost(NamedTuple):
    """Sums over runs, of training alone."""

    runs: int
    trials: int
    tokens: int
    flops: float  # of matrix products


def cost(runs: Sequence[PlannedRun]) -> Cost:
    trials = sum(len(run.config.trials.trials()) for run in runs)
    return Cost(len(runs), trials, sum(run.tokens for run in runs), sum(map(_flops, runs)))


def _flops(run: PlannedRun) -> float:
    return STEP_PER_FORWARD * model_cost.flops_per_token(run.config.model) * run.tokens


def text(study: Study, arms: Sequence[MatchedArm]) -> str:
    """The least cost of the plan by stage; compiles one program per size.

    Controls that are trained longer are counted apart, as their number depends on results. Time is
    that of compilation and training at the baseline's speed, by size.
    """
    runs = plan.imagined(study, arms)
    first: dict[str, PlannedRun] = {}
    for run in sorted(runs, key=lambda run: run.arm.variant != study.baseline):
        first.setdefault(run.arm.size, run)
    started = time.perf_counter()
    compiling: dict[str, float] = {}  # seconds, by size
    speeds: dict[str, float] = {}  # FLOP/s
    for size, run in first.items():
        seconds, compiling[size] = program.warm_up(run.config)
        speeds[size] = _flops(run) / run.config.train.num_steps / seconds
    took = time.perf_counter() - started
    stages: dict[str, list[PlannedRun]] = {}
    for run in runs:
        knob = f'({run.knob})' if run.knob else None
        stage = ' '.join(filter(None, (run.arm.key.control, run.stage, knob)))
        if run.arm.key.control == LONGER:
            stage = 'longer, if every arm is decided'
        stages.setdefault(stage, []).append(run)
    lines = []
    for stage, of_stage in (stages | {'total': runs}).items():
        total = cost(of_stage)
        seconds = sum(_flops(r) / speeds[r.arm.size] + compiling[r.arm.size] for r in of_stage)
        lines.append(
            f'{stage:<33}{total.runs:>4} runs {total.trials:>5} trials  '
            f'{total.tokens:>8.3g} tokens  {total.flops:>8.3g} FLOPs  '
            f'about {datetime.timedelta(seconds=round(seconds))}'
        )
    if study.tuning.seeds:
        limits = study.tuning
        lines.append(
            f'at least; a grid grows to at most {limits.max_points} values, and each value to '
            f'{limits.max_seeds} seeds, while its optimum is unclear'
        )
    measured = ', '.join(f'{speed:.3g} FLOP/s at {size}' for size, speed in speeds.items())
    lines.append(
        f'time is for 1 worker on this machine, from a warm-up of {took:.0f} s ({measured}), '
        'without evaluation'
    )
    return '\n'.join(lines)
