"""Coordinate-wise tuning: the settings of an arm are tuned one at a time, on geometric grids.

Tuning is a pure function of the first grids and of the losses measured so far.
"""

import dataclasses
import math
from collections.abc import Mapping

from qkattn.config import INDEPENDENT_END, TuningConfig
from qkattn.stats import sweep
from qkattn.stats.sweep import Sweep

# Knobs are settings that may be tuned. The values of these knobs may differ between the trials of a
# run.
TRIAL_KNOBS = ('learning_rate', 'weight_decay')
# The values of these knobs are compiled into the program of a run.
MODEL_KNOBS = ('score_scale', 'init_embedding', 'init_qk', 'init_vo', 'init_mlp')
# All knobs, in the order of tuning.
KNOBS = TRIAL_KNOBS + MODEL_KNOBS

# The stage of a run that screens values of one knob.
SCREENING = 'screening'
# The stage of a run at the tuned settings.
VERDICT = 'verdict'
# The stage of a run in a study without tuning.
SINGLE = 'single'

# A value of each knob, in the order of KNOBS.
Settings = tuple[float, ...]
# The losses by settings and seed; None for a diverged trial.
Measured = Mapping[Settings, Mapping[int, float | None]]


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The state of an arm's tuning, and what to screen next."""

    sweeps: dict[str, Sweep]  # by knob; the last one may be unfinished
    settings: Settings  # the chosen value of each tuned knob, else the middle of the grid
    knob: str | None  # to screen next; None once tuning has ended
    values: tuple[float, ...]  # the values of `knob` to screen next
    seeds: tuple[int, ...]  # the seeds to screen next

    def at(self, value: float) -> Settings:
        """Returns the settings with `value` for `knob`."""
        assert self.knob is not None
        return with_knob(self.settings, self.knob, value)


def tune(
    grids: Mapping[str, tuple[float, ...]], limits: TuningConfig, measured: Measured, decay: str
) -> Tuning:
    """Tunes one knob after the other, as far as the measured losses allow.

    The grid of a knob grows until it has worse values on both sides of the best value. Then the
    values get further seeds, up to `limits.max_seeds`, until both conditions hold:

    - the best value is significantly better than values on both sides;
    - the bound on the excess loss at the chosen value is at most `limits.max_excess`.

    Args:
        grids: The first values of each knob, ascending by one factor. A knob with a single value is
            not tuned.
        limits: The first seeds, and how far grids and seeds may grow.
        measured: The losses so far, by settings and seed.
        decay: The optimizer's kind of weight decay. The grid of 'independent' weight decay stays
            below INDEPENDENT_END.

    Returns:
        What to screen next, or the chosen settings.
    """
    middles = [grids[knob][len(grids[knob]) // 2] for knob in KNOBS]
    settings = tuple(middles)
    sweeps: dict[str, Sweep] = {}
    for knob in KNOBS:
        is_tuned = len(grids[knob]) > 1
        if not is_tuned:
            continue
        end = math.inf
        if knob == 'weight_decay' and decay == 'independent':
            end = INDEPENDENT_END
        swept, next_to_screen = _sweep(knob, grids[knob], settings, limits, measured, end)
        if swept is not None:
            sweeps[knob] = swept
        if next_to_screen is not None:
            next_values, next_seeds = next_to_screen
            return Tuning(sweeps, settings, knob, next_values, next_seeds)
        settings = with_knob(settings, knob, sweeps[knob].chosen)
    return Tuning(sweeps, settings, knob=None, values=(), seeds=())


def _sweep(
    knob: str,
    values: tuple[float, ...],
    settings: Settings,
    limits: TuningConfig,
    measured: Measured,
    end: float,
) -> tuple[Sweep | None, tuple[tuple[float, ...], tuple[int, ...]] | None]:
    """Sweeps one knob, as far as the measured losses allow.

    Args:
        knob: The knob.
        values: Its first values.
        settings: The values of the other knobs.
        limits: The first seeds, and how far the values and seeds may grow.
        measured: The losses so far, by settings and seed.
        end: An upper limit that no value reaches.

    Returns:
        The sweep over the measured values; None if losses of the first values are missing.
        The values and seeds to screen next; None if the sweep is complete.
    """
    swept = None
    ratio = values[1] / values[0]
    seeds = limits.seeds
    while True:
        losses_by_value = {}
        for value in values:
            loss_by_seed = measured.get(with_knob(settings, knob, value), {})
            losses_by_value[value] = _losses_at_value(loss_by_seed, seeds)
        next_to_screen = _next_to_screen(losses_by_value, seeds)
        if next_to_screen is not None:
            return swept, next_to_screen

        # All losses are measured. Add values, add seeds, or end the sweep.
        swept = sweep.fit(losses_by_value, limits.choice)
        further_values = sweep.next_values(swept, ratio, limits.max_points, end)
        if further_values:
            values += further_values
        elif len(seeds) < limits.max_seeds and _needs_seeds(swept, limits):
            num_seeds = min(len(seeds) + len(limits.seeds), limits.max_seeds)
            seeds = screening_seeds(limits, num_seeds)
        else:
            return swept, None


def screening_seeds(limits: TuningConfig, number: int | None = None) -> tuple[int, ...]:
    """Returns the first `number` screening seeds.

    For example, `limits.seeds` = (3, 5) continues as (3, 5, 6, 7, ...).

    Args:
        limits: The config of the tuning.
        number: The number of seeds; by default `limits.max_seeds`.
    """
    if number is None:
        number = limits.max_seeds
    first_added = max(limits.seeds) + 1
    num_added = number - len(limits.seeds)
    return (*limits.seeds, *range(first_added, first_added + num_added))


def _losses_at_value(
    loss_by_seed: Mapping[int, float | None], seeds: tuple[int, ...]
) -> dict[int, float | None]:
    """Returns the losses of the given seeds at one value of a knob, such as learning_rate=0.003.

    The loss of a diverged seed is None. Seeds that still have to be trained are left out. If any
    seed diverged, the value cannot be the best one, so no further seeds are trained. They count as
    diverged: {0: 2.9, 1: None} becomes {0: 2.9, 1: None, 2: None} for the seeds (0, 1, 2).
    """
    measured = {seed: loss_by_seed[seed] for seed in seeds if seed in loss_by_seed}
    has_diverged_seed = None in measured.values()
    if not has_diverged_seed:
        return measured
    return {seed: measured.get(seed) for seed in seeds}  # None for a seed that is not measured


def _next_to_screen(
    losses_by_value: Mapping[float, Mapping[int, float | None]], seeds: tuple[int, ...]
) -> tuple[tuple[float, ...], tuple[int, ...]] | None:
    """Returns the values and seeds to screen in the next run; None if no loss is missing.

    All values of a run have the same seeds. If seed 2 is missing at 0.001 and 0.004, and seeds 1
    and 2 are missing at 0.008, the result is ((0.001, 0.004), (2,)).
    """
    missing_by_value: dict[float, tuple[int, ...]] = {}
    for value, losses in losses_by_value.items():
        missing_seeds = tuple(seed for seed in seeds if seed not in losses)
        if missing_seeds:
            missing_by_value[value] = missing_seeds
    if not missing_by_value:
        return None
    next_seeds = next(iter(missing_by_value.values()))  # those missing at the first value
    next_values = [value for value, missing in missing_by_value.items() if missing == next_seeds]
    return tuple(next_values), next_seeds


def _needs_seeds(swept: Sweep, limits: TuningConfig) -> bool:
    """Returns whether further seeds may make the best value or its excess loss more certain."""
    if swept.needs_seeds:
        return True
    excess_bound = swept.at_worst  # of the chosen value's loss over the lowest loss
    if limits.max_excess is None or excess_bound is None:
        return False
    return excess_bound > limits.max_excess


def with_knob(settings: Settings, knob: str, value: float) -> Settings:
    """Returns the settings with another value for `knob`."""
    values = list(settings)
    values[KNOBS.index(knob)] = value
    return tuple(values)


def grids_around(
    grids: Mapping[str, tuple[float, ...]], settings: Settings
) -> dict[str, tuple[float, ...]]:
    """Returns the first grids of an arm that is trained longer.

    Only the learning rate is tuned again, on three values around the tuned value. For example,
    0.003 gives (0.0015, 0.003, 0.006) if the first grid ascends by a factor of 2.

    Args:
        grids: The first grids of the arm at the usual length of training.
        settings: The tuned settings at the usual length.
    """
    grid_by_knob: dict[str, tuple[float, ...]] = {}
    for knob, tuned_value in zip(KNOBS, settings, strict=True):
        grid_by_knob[knob] = (tuned_value,)

    first_rates = grids['learning_rate']
    ratio = first_rates[1] / first_rates[0]
    tuned_rate = settings[KNOBS.index('learning_rate')]
    rates = [tuned_rate * ratio**power for power in (-1, 0, 1)]
    # Drop rounding errors, so that 0.1 * 3.0 is 0.3.
    grid_by_knob['learning_rate'] = tuple(float(f'{rate:.10g}') for rate in rates)
    return grid_by_knob
