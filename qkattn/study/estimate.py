"""The cost of a study before it starts: tokens, FLOPs, and time from a measured warm-up."""

import dataclasses
import datetime
import time
from collections.abc import Mapping, Sequence

from qkattn.config import Study
from qkattn.model import cost as model_cost
from qkattn.study import plan
from qkattn.study.arm_key import LONGER
from qkattn.study.arms import MatchedArm
from qkattn.study.plan import PlannedRun
from qkattn.train import program

# A training step costs a forward pass and a backward pass of two.
STEP_PER_FORWARD = 3


@dataclasses.dataclass(frozen=True)
class Cost:
    """Sums over runs: trials, training tokens, training FLOPs, seconds."""

    runs: int
    trials: int
    tokens: int
    flops: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Speed:
    """Measured by the warm-up of one size: FLOP/s of training, seconds to compile."""

    flops_per_second: float
    compile_seconds: float


def flops(run: PlannedRun) -> float:
    """Training FLOPs of all trials of a run, matrix products only."""
    return STEP_PER_FORWARD * model_cost.flops_per_token(run.config.model) * run.tokens


def measure(run: PlannedRun) -> Speed:
    """Compiles the run's program and times two dispatches on rows of constants."""
    seconds, compile_seconds = program.warm_up(run.config)
    per_step = flops(run) / run.config.train.num_steps
    return Speed(per_step / seconds, compile_seconds)


def cost(runs: Sequence[PlannedRun], speeds: Mapping[str, Speed]) -> Cost:
    """The cost of `runs` at the baseline's speed, by size; without evaluation."""
    timed = [(flops(run), speeds[run.arm.size]) for run in runs]
    return Cost(
        runs=len(runs),
        trials=sum(len(run.config.trials.trials()) for run in runs),
        tokens=sum(run.tokens for run in runs),
        flops=sum(work for work, _ in timed),
        seconds=sum(work / speed.flops_per_second + speed.compile_seconds for work, speed in timed),
    )


def text(study: Study, arms: Sequence[MatchedArm]) -> str:
    """The least cost of the plan by stage; compiles one program per size.

    Controls that are trained longer are counted apart, as their number depends on results.
    """
    runs = plan.imagined(study, arms)
    first: dict[str, PlannedRun] = {}
    for run in sorted(runs, key=lambda run: run.arm.variant != study.baseline):
        first.setdefault(run.arm.size, run)
    started = time.perf_counter()
    speeds = {size: measure(run) for size, run in first.items()}
    took = time.perf_counter() - started
    stages: dict[str, list[PlannedRun]] = {}
    for run in runs:
        knob = f'({run.knob})' if run.knob else None
        stage = ' '.join(filter(None, (run.arm.key.control, run.stage, knob)))
        stages.setdefault(
            'longer, if every arm is decided' if LONGER in stage else stage, []
        ).append(run)
    stages['total'] = runs
    lines = []
    for name, of_stage in stages.items():
        total = cost(of_stage, speeds)
        lines.append(
            f'{name:<33}{total.runs:>4} runs {total.trials:>5} trials  '
            f'{total.tokens:>8.3g} tokens  {total.flops:>8.3g} FLOPs  '
            f'about {datetime.timedelta(seconds=round(total.seconds))}'
        )
    if study.tuning.seeds:
        limits = study.tuning
        lines.append(
            f'at least; a grid grows to at most {limits.max_points} values, and each value to '
            f'{limits.max_seeds} seeds, while its optimum is unclear'
        )
    measured = ', '.join(f'{s.flops_per_second:.3g} FLOP/s at {z}' for z, s in speeds.items())
    lines.append(
        f'time is for 1 worker on this machine, from a warm-up of {took:.0f} s ({measured}), '
        'without evaluation'
    )
    return '\n'.join(lines)
