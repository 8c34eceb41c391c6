"""How an arm finds settings of its own: one after another, each bracketed on a geometric grid.

A pure function of the grids and of the losses measured so far, so that whoever plans the trials and
whoever reports on them come to the same settings.
"""

import dataclasses
from collections.abc import Mapping

from qkattn.stats import sweep
from qkattn.stats.sweep import Bowl

# In the order of tuning: each with the ones before it at what was found for them, and the ones
# behind it at the middle of their grids.
KNOBS = ('learning_rate', 'weight_decay', 'score_scale')

# What a cell is for: screening of a knob, the verdict at what was found, or, in a study that tunes
# nothing, both at once.
SCREENING, VERDICT, SINGLE = 'screening', 'verdict', 'single'
STAGES = (SCREENING, VERDICT, SINGLE)

# A value of every knob, in their order.
Settings = tuple[float, ...]
# Loss by seed at settings; None for a trial that diverged.
Measured = Mapping[Settings, Mapping[int, float | None]]


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How far the tuning of an arm has come.

    Attributes:
      bowls: of the knobs that have been screened at all, the last one maybe not to its end.
      settings: what has been found, and for the knobs still to come where they stand.
      knob, values: what is to be screened next, at `settings` otherwise; None and () once all is
        found.
    """

    bowls: dict[str, Bowl]
    settings: Settings
    knob: str | None
    values: tuple[float, ...]

    def at(self, value: float) -> Settings:
        """The settings with `value` for the knob that is screened next."""
        return _with(self.settings, self.knob, value)


def tune(grids: Mapping[str, tuple[float, ...]], max_points: int, measured: Measured) -> Tuning:
    """Follows the losses as far as they go.

    Args:
      grids: ascending values of each knob; of a single one there is nothing to be found.
      max_points: most values of a knob.
      measured: may hold more than what is asked for.
    """
    settings = tuple(grids[knob][len(grids[knob]) // 2] for knob in KNOBS)
    bowls: dict[str, Bowl] = {}
    for knob in KNOBS:
        tried: tuple[float, ...] = ()
        values = grids[knob] if len(grids[knob]) > 1 else ()
        while values:
            missing = tuple(v for v in values if _with(settings, knob, v) not in measured)
            if missing:
                return Tuning(bowls, settings, knob, missing)
            tried += values
            bowls[knob] = sweep.fit({v: measured[_with(settings, knob, v)] for v in tried})
            values = sweep.next_values(bowls[knob], grids[knob][1] / grids[knob][0], max_points)
        if tried:
            settings = _with(settings, knob, bowls[knob].chosen)
    return Tuning(bowls, settings, None, ())


def _with(settings: Settings, knob: str, value: float) -> Settings:
    place = KNOBS.index(knob)
    return (*settings[:place], value, *settings[place + 1 :])
