"""The cost of a study before it starts: tokens, FLOPs, and time from a measured warm-up."""

import dataclasses
import datetime
import time

from qkattn.config import Study
from qkattn.model import cost as model_cost
from qkattn.study import plan
from qkattn.study.arms import MatchedArm, grids, is_tuned
from qkattn.study.local_workers import count
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


def cost(runs: list[PlannedRun], speeds: dict[str, Speed]) -> Cost:
    """The cost of `runs` at the baseline's speed, by size; without evaluation."""
    timed = [(flops(run), speeds[run.arm.size]) for run in runs]
    return Cost(
        runs=len(runs),
        trials=sum(len(run.config.trials.trials()) for run in runs),
        tokens=sum(run.tokens for run in runs),
        flops=sum(work for work, _ in timed),
        seconds=sum(work / speed.flops_per_second + speed.compile_seconds for work, speed in timed),
    )


def text(study: Study, arms: list[MatchedArm]) -> str:
    """The cost of the plan by stage, and what may be added; compiles one program per size.

    Controls that are trained longer are counted apart, as their number depends on results.
    """
    least = plan.least(study, arms)
    first: dict[str, PlannedRun] = {}
    for run in sorted(least, key=lambda run: run.arm.variant != study.baseline):
        first.setdefault(run.arm.size, run)
    started = time.perf_counter()
    speeds = {size: measure(run) for size, run in first.items()}
    took = time.perf_counter() - started
    stages: dict[str, list[PlannedRun]] = {}
    for run in least:
        knob = f'({run.knob})' if run.knob else None
        name = ' '.join(filter(None, (run.arm.key.control, run.stage, knob)))
        stages.setdefault(name, []).append(run)
    stages['total'] = least
    if longer := plan.lengthened(study, arms):
        stages['longer, if every arm is decided'] = longer
        stages['total with longer'] = least + longer
    width = max(map(len, stages)) + 2
    lines = []
    for name, runs in stages.items():
        of_stage = cost(runs, speeds)
        lines.append(
            f'{name:<{width}}{of_stage.runs:>4} runs {of_stage.trials:>5} trials  '
            f'{of_stage.tokens:>8.3g} tokens  {of_stage.flops:>8.3g} FLOPs  '
            f'about {datetime.timedelta(seconds=round(of_stage.seconds))}'
        )
    if is_tuned(study):
        seeds = len(study.tuning.seeds)
        of_trial = least[0].tokens // len(least[0].config.trials.trials())
        tuned = [values for values in grids(study, arms[0]).values() if len(values) > 1]
        more = sum(study.tuning.max_points - len(values) for values in tuned)
        lines.append(
            f'each value that extends a grid adds {count(seeds, "trial")}, '
            f'{seeds * of_trial:.3g} tokens; at most {count(more, "value")} per arm, and '
            f'{count(study.tuning.max_seeds - seeds, "further seed")} of each while an optimum is '
            'unclear'
        )
    measured = ', '.join(f'{s.flops_per_second:.3g} FLOP/s at {z}' for z, s in speeds.items())
    lines.append(
        f'time is for 1 worker on this machine, from a warm-up of {took:.0f} s ({measured}), '
        'without evaluation'
    )
    return '\n'.join(lines)
