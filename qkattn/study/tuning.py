"""Coordinate-wise tuning: the settings of an arm one at a time, each bracketed on a geometric grid.

A pure function of the grids and the losses measured so far, so that planning and reporting agree on
the settings.
"""

import dataclasses
from collections.abc import Mapping

from qkattn.stats import sweep
from qkattn.stats.sweep import Sweep

# In the order of tuning. Each is tuned with the earlier ones at their chosen values and the later
# ones at the middle of their grids.
KNOBS = ('learning_rate', 'weight_decay', 'score_scale')

# What a run is for: screening values of one knob, the verdict at the chosen ones, or, in a study
# without tuning, both.
SCREENING, VERDICT, SINGLE = 'screening', 'verdict', 'single'
STAGES = (SCREENING, VERDICT, SINGLE)

# A value of every knob, in the order of KNOBS.
Settings = tuple[float, ...]
# Loss by seed at settings; None for a diverged trial.
Measured = Mapping[Settings, Mapping[int, float | None]]


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The state of an arm's tuning.

    Attributes:
      sweeps: of the knobs screened so far; the last one may be unfinished.
      settings: the chosen values, and the middle of the grid for the knobs still to be tuned.
      knob, values: what to screen next, at `settings` otherwise; None and () if nothing is left.
    """

    sweeps: dict[str, Sweep]
    settings: Settings
    knob: str | None
    values: tuple[float, ...]

    def at(self, value: float) -> Settings:
        """The settings with `value` for the knob to screen next."""
        return with_knob(self.settings, self.knob, value)


def tune(grids: Mapping[str, tuple[float, ...]], max_points: int, measured: Measured) -> Tuning:
    """Tunes as far as the measured losses allow.

    Args:
      grids: ascending values of each knob; a knob with a single value is not tuned.
      max_points: most values of a knob.
      measured: may hold more settings than needed.
    """
    settings = tuple(grids[knob][len(grids[knob]) // 2] for knob in KNOBS)
    sweeps: dict[str, Sweep] = {}
    for knob in KNOBS:
        tried: tuple[float, ...] = ()
        values = grids[knob] if len(grids[knob]) > 1 else ()
        while values:
            missing = tuple(v for v in values if with_knob(settings, knob, v) not in measured)
            if missing:
                return Tuning(sweeps, settings, knob, missing)
            tried += values
            sweeps[knob] = sweep.fit({v: measured[with_knob(settings, knob, v)] for v in tried})
            values = sweep.next_values(sweeps[knob], grids[knob][1] / grids[knob][0], max_points)
        if tried:
            settings = with_knob(settings, knob, sweeps[knob].chosen)
    return Tuning(sweeps, settings, None, ())


def with_knob(settings: Settings, knob: str, value: float) -> Settings:
    """The settings with another value for `knob`."""
    place = KNOBS.index(knob)
    return (*settings[:place], value, *settings[place + 1 :])
