"""What a study will cost, before it begins: tokens, FLOPs, and time from a measured warm-up."""

import dataclasses
import datetime
import time

from qkattn import budget, plan
from qkattn.config import Study
from qkattn.plan import Cell
from qkattn.study import Arm, grids, is_tuned
from qkattn.train import program

# A training step costs a forward pass and a backward pass of two.
STEP_PER_FORWARD = 3


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of some cells together: trials, training tokens, training FLOPs, seconds."""

    cells: int
    trials: int
    tokens: int
    flops: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Speed:
    """What the warm-up of one size measured: FLOP/s of training, seconds to compile."""

    flops_per_second: float
    compile_seconds: float


def flops(cell: Cell) -> float:
    """Training FLOPs of all trials of a cell, matrix products only."""
    return STEP_PER_FORWARD * budget.flops_per_token(cell.config.model) * cell.tokens


def measure(cell: Cell) -> Speed:
    """Compiles the cell's program and times two dispatches on rows of constants."""
    seconds, compile_seconds = program.warm_up(cell.config)
    per_step = flops(cell) / cell.config.train.num_steps
    return Speed(per_step / seconds, compile_seconds)


def cost(cells: list[Cell], speeds: dict[str, Speed]) -> Cost:
    """Of `cells`, at the speed (by size) of the baseline; evaluation is not in it."""
    return Cost(
        cells=len(cells),
        trials=sum(len(cell.config.trials.trials()) for cell in cells),
        tokens=sum(cell.tokens for cell in cells),
        flops=sum(flops(cell) for cell in cells),
        seconds=sum(
            flops(cell) / speeds[cell.arm.size].flops_per_second
            + speeds[cell.arm.size].compile_seconds
            for cell in cells
        ),
    )


def text(study: Study, arms: list[Arm]) -> str:
    """The plan's costs stage by stage, and what may be added; compiles one program per size."""
    least = plan.least(study, arms)
    first: dict[str, Cell] = {}
    for cell in sorted(least, key=lambda cell: cell.arm.variant != study.baseline):
        first.setdefault(cell.arm.size, cell)
    started = time.perf_counter()
    speeds = {size: measure(cell) for size, cell in first.items()}
    took = time.perf_counter() - started
    stages = list(dict.fromkeys((cell.stage, cell.knob) for cell in least))
    lines = []
    for stage, knob in stages:
        of_stage = [cell for cell in least if (cell.stage, cell.knob) == (stage, knob)]
        name = f'{stage} ({knob})' if knob else stage
        lines.append(f'{name:<28}{_said(cost(of_stage, speeds))}')
    total = cost(least, speeds)
    lines.append(f'{"total":<28}{_said(total)}')
    if is_tuned(study):
        seeds = len(study.tuning.seeds)
        of_trial = least[0].tokens // len(least[0].config.trials.trials())
        tuned = [values for values in grids(study, arms[0]).values() if len(values) > 1]
        more = sum(study.tuning.max_points - len(values) for values in tuned)
        lines.append(
            f'each value that a grid has to be extended by adds {seeds} trials, '
            f'{seeds * of_trial:.3g} tokens; at most {more} values per arm'
        )
    lines.append(
        f'time is for one worker on this machine, from a warm-up of {took:.0f} s'
        f' ({", ".join(f"{s.flops_per_second:.3g} FLOP/s at {z}" for z, s in speeds.items())}),'
        ' without evaluation'
    )
    return '\n'.join(lines)


def _said(found: Cost) -> str:
    duration = datetime.timedelta(seconds=round(found.seconds))
    return (
        f'{found.cells:>4} cells {found.trials:>5} trials  {found.tokens:>8.3g} tokens  '
        f'{found.flops:>8.3g} FLOPs  about {duration}'
    )
