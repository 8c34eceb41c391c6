"""Coordinate-wise tuning: the settings of an arm one at a time, each bracketed on a geometric grid.

A pure function of the grids and the losses measured so far, so that planning and reporting agree on
the settings.
"""

import dataclasses
import math
from collections.abc import Mapping

from qkattn.config import INDEPENDENT_END, TuningConfig
from qkattn.stats import sweep
from qkattn.stats.sweep import Sweep

# In the order of tuning. Each is tuned with the earlier ones at their chosen values and the later
# ones at the middle of their grids. The values of a trial's knob share a program; those of a
# model's field are compiled in.
TRIAL_KNOBS = ('learning_rate', 'weight_decay')
MODEL_KNOBS = ('score_scale', 'init_embedding', 'init_qk', 'init_vo', 'init_mlp')
KNOBS = TRIAL_KNOBS + MODEL_KNOBS

# What a run is for: screening values of one knob, the verdict at the chosen ones, or, in a study
# without tuning, both.
SCREENING = 'screening'
VERDICT = 'verdict'
SINGLE = 'single'

# A value of every knob, in the order of KNOBS.
Settings = tuple[float, ...]
# Loss by seed at settings; None for a diverged trial.
Measured = Mapping[Settings, Mapping[int, float | None]]


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The state of an arm's tuning."""

    sweeps: dict[str, Sweep]  # of the knobs screened so far; the last one may be unfinished
    settings: Settings  # chosen, and the middle of the grid for the knobs still to be tuned
    # What to screen next, at `settings` otherwise; None and () if nothing is left.
    knob: str | None
    values: tuple[float, ...]
    seeds: tuple[int, ...]

    def at(self, value: float) -> Settings:
        """The settings with `value` for the knob to screen next."""
        return with_knob(self.settings, self.knob, value)


def tune(
    grids: Mapping[str, tuple[float, ...]], limits: TuningConfig, measured: Measured, decay: str
) -> Tuning:
    """Tunes as far as the measured losses allow.

    A grid is extended first; then, while its best value is not significantly better than both
    sides, or the loss at the chosen value is not bounded by `limits.max_excess`, as many further
    seeds as at first are drawn for all its values. A value at which a seed
    diverged is worse than any other, so it gets no further seeds. A knob with a single value
    is not tuned; other grids ascend. `measured` may hold more settings and seeds than needed.
    `decay` is that of the optimizer: no run trains at a weight decay that it refuses.
    """
    settings = tuple(grids[knob][len(grids[knob]) // 2] for knob in KNOBS)
    sweeps: dict[str, Sweep] = {}
    for knob in KNOBS:
        values = grids[knob]
        seeds = limits.seeds
        while len(grids[knob]) > 1:
            losses = {
                v: _losses(measured.get(with_knob(settings, knob, v), {}), seeds) for v in values
            }
            missing = {v: tuple(s for s in seeds if s not in of_v) for v, of_v in losses.items()}
            if open_seeds := next(filter(None, missing.values()), ()):
                together = tuple(v for v in values if missing[v] == open_seeds)
                return Tuning(sweeps, settings, knob, together, open_seeds)
            swept = sweeps[knob] = sweep.fit(losses, limits.choice)
            ratio = grids[knob][1] / grids[knob][0]
            end = INDEPENDENT_END if (knob, decay) == ('weight_decay', 'independent') else math.inf
            further = sweep.next_values(swept, ratio, limits.max_points, end)
            if further:
                values += further
            elif len(seeds) < limits.max_seeds and (
                swept.needs_seeds or (swept.at_worst or 0.0) > (limits.max_excess or math.inf)
            ):
                number = min(len(seeds) + len(limits.seeds), limits.max_seeds)
                seeds = screening_seeds(limits, number)
            else:
                settings = with_knob(settings, knob, swept.chosen)
                break
    return Tuning(sweeps, settings, None, (), ())


def screening_seeds(limits: TuningConfig, number: int | None = None) -> tuple[int, ...]:
    """The first `number` seeds of the screening, or all that it may draw."""
    more = (limits.max_seeds if number is None else number) - len(limits.seeds)
    return (*limits.seeds, *range(max(limits.seeds) + 1, max(limits.seeds) + 1 + more))


def _losses(
    measured: Mapping[int, float | None], seeds: tuple[int, ...]
) -> dict[int, float | None]:
    """The losses of these seeds; once one has diverged, those not measured count as diverged."""
    losses = {seed: measured[seed] for seed in seeds if seed in measured}
    return dict.fromkeys(seeds) | losses if None in losses.values() else losses


def with_knob(settings: Settings, knob: str, value: float) -> Settings:
    """The settings with another value for `knob`."""
    place = KNOBS.index(knob)
    return (*settings[:place], value, *settings[place + 1 :])


def grids_around(
    grids: Mapping[str, tuple[float, ...]], settings: Settings
) -> dict[str, tuple[float, ...]]:
    """The grids of an arm that is trained longer, from those of its tuning and what it chose.

    The learning rate has three values with the chosen one in the middle; other knobs stay put.
    """
    rates = grids['learning_rate']
    chosen = settings[KNOBS.index('learning_rate')]
    around = tuple(float(f'{chosen * (rates[1] / rates[0]) ** i:.10g}') for i in (-1, 0, 1))
    return {knob: (v,) for knob, v in zip(KNOBS, settings, strict=True)} | {'learning_rate': around}
