"""Coordinate-wise tuning: the settings of an arm one at a time, each bracketed on a geometric grid.

Tuning is a pure function of the grids and the losses measured so far. So a plan and a report derive
the same settings.
"""

import dataclasses
import math
from collections.abc import Mapping

from qkattn.config import INDEPENDENT_END, TuningConfig
from qkattn.stats import sweep
from qkattn.stats.sweep import Sweep

# A knob is a setting that may be tuned. Trials of one program may have different values of these.
TRIAL_KNOBS = ('learning_rate', 'weight_decay')
# The values of these knobs are compiled into a program.
MODEL_KNOBS = ('score_scale', 'init_embedding', 'init_qk', 'init_vo', 'init_mlp')
# All knobs, in the order of tuning. While a knob is tuned, earlier ones have their chosen values.
# Later ones have the middle of their grids.
KNOBS = TRIAL_KNOBS + MODEL_KNOBS

# What a run is for: screening values of one knob.
SCREENING = 'screening'
# Training on the seeds of the verdict, at the chosen values.
VERDICT = 'verdict'
# Both at once, in a study without tuning.
SINGLE = 'single'

# A value of every knob, in the order of KNOBS.
Settings = tuple[float, ...]
# The losses by settings and seed; None for a diverged trial.
Measured = Mapping[Settings, Mapping[int, float | None]]


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The state of an arm's tuning."""

    # The sweep of each knob that was screened so far. The last one may be unfinished.
    sweeps: dict[str, Sweep]
    # The chosen value of each tuned knob, and the middle of the grid of each other one.
    settings: Settings
    # The knob to screen next, with its values and seeds. None and () once tuning has ended.
    knob: str | None
    values: tuple[float, ...]
    seeds: tuple[int, ...]

    def at(self, value: float) -> Settings:
        """Returns the settings with `value` for the knob to screen next."""
        assert self.knob is not None
        return with_knob(self.settings, self.knob, value)


def tune(
    grids: Mapping[str, tuple[float, ...]], limits: TuningConfig, measured: Measured, decay: str
) -> Tuning:
    """Tunes one knob after the other, as far as the measured losses allow.

    First the grid of a knob grows until it has worse values on both sides of the best one. Then its
    values get further seeds, as many at a time as at first, for as long as one of these holds:

    - the best value is not significantly better than values on both sides;
    - the bound on the excess loss at the chosen value is above `limits.max_excess`.

    A value at which a seed diverged is worse than all others, so it gets no further seeds.

    Args:
        grids: The first values of each knob, ascending by one factor. A knob with a single value is
            not tuned.
        limits: The seeds of the screening, and how far grids and seeds may grow.
        measured: The losses so far. It may hold more settings and seeds than needed.
        decay: The optimizer's kind of weight decay. The optimizer refuses an 'independent' weight
            decay of INDEPENDENT_END or more, so grids stay below.

    Returns:
        What to screen next, or the chosen settings.
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
            # Are losses missing? Then they have to be measured before tuning goes on.
            losses_of_value = {}
            for value in values:
                loss_of_seed = measured.get(with_knob(settings, knob, value), {})
                losses_of_value[value] = _losses_at_value(loss_of_seed, seeds)
            next_to_screen = _next_to_screen(losses_of_value, seeds)
            if next_to_screen is not None:
                return Tuning(sweeps, settings, knob, *next_to_screen)

            # Do they ask for further values, or for further seeds? If not, they choose a value.
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
    """Returns the first `number` seeds of the screening, by default all that it may use.

    They are `limits.seeds`, followed by the integers after the largest of these.
    """
    if number is None:
        number = limits.max_seeds
    first_drawn = max(limits.seeds) + 1
    num_drawn = number - len(limits.seeds)
    return (*limits.seeds, *range(first_drawn, first_drawn + num_drawn))


def _losses_at_value(
    loss_of_seed: Mapping[int, float | None], seeds: tuple[int, ...]
) -> dict[int, float | None]:
    """Returns the losses of the given seeds at one value of a knob, such as learning_rate=0.003.

    The loss of a diverged seed is None. A seed that still has to be trained has no entry. With the
    seeds 0, 1 and 2, for example:

        loss_of_seed          returned
        {0: 2.9, 1: 3.0}      {0: 2.9, 1: 3.0}             seed 2 still has to be trained
        {0: 2.9, 1: None}     {0: 2.9, 1: None, 2: None}   seed 2 need not be trained

    A value of a knob with a diverged seed ranks behind all values without one. Further seeds would
    not change that, so they are not trained, and count as diverged.
    """
    measured = {seed: loss_of_seed[seed] for seed in seeds if seed in loss_of_seed}
    has_diverged_seed = None in measured.values()
    if not has_diverged_seed:
        return measured
    return {seed: measured.get(seed) for seed in seeds}


def _next_to_screen(
    losses_of_value: Mapping[float, Mapping[int, float | None]], seeds: tuple[int, ...]
) -> tuple[tuple[float, ...], tuple[int, ...]] | None:
    """Returns the values and the seeds to screen next; None if no loss is missing.

    One run trains the same seeds at all its values. For example, 0.001 and 0.004 lack seed 2, and
    0.008 lacks seeds 1 and 2. The result is ((0.001, 0.004), (2,)), and 0.008 has its turn later.
    """
    missing_of_value: dict[float, tuple[int, ...]] = {}
    for value, losses in losses_of_value.items():
        missing = tuple(seed for seed in seeds if seed not in losses)
        if missing:
            missing_of_value[value] = missing
    if not missing_of_value:
        return None
    # The seeds that the first such value lacks, and all values that lack the same ones.
    missing_first = list(missing_of_value.values())[0]
    values = [value for value, missing in missing_of_value.items() if missing == missing_first]
    return tuple(values), missing_first


def _needs_seeds(swept: Sweep, limits: TuningConfig) -> bool:
    """Returns whether further seeds may show the best value, or bound the excess of its loss."""
    if swept.needs_seeds:
        return True
    if limits.max_excess is None or swept.at_worst is None:
        return False
    return swept.at_worst > limits.max_excess


def with_knob(settings: Settings, knob: str, value: float) -> Settings:
    """Returns the settings with another value for `knob`."""
    values = list(settings)
    values[KNOBS.index(knob)] = value
    return tuple(values)


def grids_around(
    grids: Mapping[str, tuple[float, ...]], settings: Settings
) -> dict[str, tuple[float, ...]]:
    """Returns the grids of an arm that is trained longer, around its tuned settings.

    The learning rate has three values, with the tuned one in the middle. All other knobs keep their
    tuned value. For example, a tuned rate of 0.003 gives (0.0015, 0.003, 0.006) if neighbours in
    the first grid differ by a factor of 2.

    Args:
        grids: The first grids of the arm at the usual length.
        settings: Its tuned settings at the usual length.
    """
    grid_of_knob: dict[str, tuple[float, ...]] = {}
    for knob, tuned_value in zip(KNOBS, settings, strict=True):
        grid_of_knob[knob] = (tuned_value,)

    rates = grids['learning_rate']
    ratio = rates[1] / rates[0]
    tuned_rate = settings[KNOBS.index('learning_rate')]
    around = [tuned_rate * ratio**power for power in (-1, 0, 1)]
    # Rounded like the values of grids that have grown.
    grid_of_knob['learning_rate'] = tuple(float(f'{rate:.10g}') for rate in around)
    return grid_of_knob
