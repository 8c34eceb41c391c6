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

# The settings that may be tuned, in the order of tuning. Each is tuned with the earlier ones at
# their chosen values and the later ones at the middle of their grids.
# The values of a trial's knob share a program.
TRIAL_KNOBS = ('learning_rate', 'weight_decay')
# Those of a model's field are compiled in.
MODEL_KNOBS = ('score_scale', 'init_embedding', 'init_qk', 'init_vo', 'init_mlp')
KNOBS = TRIAL_KNOBS + MODEL_KNOBS

# What a run is for: screening values of one knob.
SCREENING = 'screening'
# Training on the seeds of the verdict, at the chosen values.
VERDICT = 'verdict'
# Both at once, in a study without tuning.
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
        assert self.knob is not None
        return with_knob(self.settings, self.knob, value)


def tune(
    grids: Mapping[str, tuple[float, ...]], limits: TuningConfig, measured: Measured, decay: str
) -> Tuning:
    """Tunes one knob after the other, as far as the measured losses allow.

    `grids` has the first values of each knob, ascending by one factor; a knob with a single value
    is not tuned. A grid is extended first, until worse values stand on both sides of its best one.
    Then, while the best value is not significantly better than both sides, or the loss at the
    chosen value is not bounded by `limits.max_excess`, all values of the grid get further seeds, as
    many as at first. A value at which a seed diverged is worse than any other, so it gets no
    further seeds. `measured` may hold more settings and seeds than needed. `decay` is that of the
    optimizer: no run trains at a weight decay that it refuses.
    """
    settings = tuple(grids[knob][len(grids[knob]) // 2] for knob in KNOBS)
    sweeps: dict[str, Sweep] = {}
    for knob in KNOBS:
        values = grids[knob]
        if len(values) == 1:
            continue
        ratio = values[1] / values[0]
        end = math.inf
        if knob == 'weight_decay' and decay == 'independent':
            end = INDEPENDENT_END
        seeds = limits.seeds
        is_chosen = False
        while not is_chosen:
            losses_of_value = {}
            for value in values:
                loss_of_seed = measured.get(with_knob(settings, knob, value), {})
                losses_of_value[value] = _losses(loss_of_seed, seeds)
            missing = _missing(losses_of_value, seeds)
            if missing is not None:
                return Tuning(sweeps, settings, knob, *missing)
            swept = sweep.fit(losses_of_value, limits.choice)
            sweeps[knob] = swept
            further_values = sweep.next_values(swept, ratio, limits.max_points, end)
            if further_values:
                values += further_values
            elif len(seeds) < limits.max_seeds and _needs_seeds(swept, limits):
                number = min(len(seeds) + len(limits.seeds), limits.max_seeds)
                seeds = screening_seeds(limits, number)
            else:
                settings = with_knob(settings, knob, swept.chosen)
                is_chosen = True
    return Tuning(sweeps, settings, None, (), ())


def screening_seeds(limits: TuningConfig, number: int | None = None) -> tuple[int, ...]:
    """The first `number` seeds of the screening, by default all that it may draw.

    They are those of the settings, then the integers that follow the largest of these.
    """
    if number is None:
        number = limits.max_seeds
    first_drawn = max(limits.seeds) + 1
    num_drawn = number - len(limits.seeds)
    return (*limits.seeds, *range(first_drawn, first_drawn + num_drawn))


def _losses(
    loss_of_seed: Mapping[int, float | None], seeds: tuple[int, ...]
) -> dict[int, float | None]:
    """The losses of these seeds; once one has diverged, those not measured count as diverged."""
    losses = {seed: loss_of_seed[seed] for seed in seeds if seed in loss_of_seed}
    if None in losses.values():
        return {seed: losses.get(seed) for seed in seeds}
    return losses


def _missing(
    losses_of_value: Mapping[float, Mapping[int, float | None]], seeds: tuple[int, ...]
) -> tuple[tuple[float, ...], tuple[int, ...]] | None:
    """The values and seeds to screen next; None if every value has a loss of every seed.

    They are the seeds that the first unfinished value lacks, for all values that lack the same.
    """
    missing_of_value = {
        value: tuple(seed for seed in seeds if seed not in losses)
        for value, losses in losses_of_value.items()
    }
    for missing_seeds in missing_of_value.values():
        if missing_seeds:
            values = [v for v, missing in missing_of_value.items() if missing == missing_seeds]
            return tuple(values), missing_seeds
    return None


def _needs_seeds(swept: Sweep, limits: TuningConfig) -> bool:
    """Whether further seeds may show the best value, or bound its loss as the limits ask."""
    if swept.needs_seeds:
        return True
    if limits.max_excess is None or swept.at_worst is None:
        return False
    return swept.at_worst > limits.max_excess


def with_knob(settings: Settings, knob: str, value: float) -> Settings:
    """The settings with another value for `knob`."""
    index = KNOBS.index(knob)
    return (*settings[:index], value, *settings[index + 1 :])


def grids_around(
    grids: Mapping[str, tuple[float, ...]], settings: Settings
) -> dict[str, tuple[float, ...]]:
    """The grids of an arm that is trained longer, from those of its tuning and what it chose.

    The learning rate has three values with the chosen one in the middle, as far apart as those of
    its first grid; the other knobs have the chosen value alone.
    """
    grid_of_knob: dict[str, tuple[float, ...]] = {}
    for knob, chosen in zip(KNOBS, settings, strict=True):
        grid_of_knob[knob] = (chosen,)
    rates = grids['learning_rate']
    ratio = rates[1] / rates[0]
    (chosen_rate,) = grid_of_knob['learning_rate']
    around = [chosen_rate * ratio**power for power in (-1, 0, 1)]
    # Rounded as values of extended grids are.
    grid_of_knob['learning_rate'] = tuple(float(f'{rate:.10g}') for rate in around)
    return grid_of_knob
