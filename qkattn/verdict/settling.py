"""Whether a difference lasts when models are trained at least four times as long.

A difference is compared with the same difference after at least `TIMES` times the steps. It is
settled if both have the same sign and their distance is at most the margin, or at most `ERRORS`
standard errors of the distance if these are larger. For an equivalent arm, the sign does not
matter, but the longer difference has to be within the margin. A difference that is not settled
holds only at its own length of training.
"""

import dataclasses
import enum
import math

TIMES = 4
ERRORS = 3.0


class Length(enum.Enum):
    """What a longer training says about a difference."""

    SETTLED = 'settled'
    SHRINKS = 'shrinks'
    GROWS = 'grows'
    TURNS = 'turns sign'
    ONE_LENGTH = 'at this length'  # nothing is trained longer


@dataclasses.dataclass(frozen=True)
class Trained:
    """A difference after some number of steps, nats/token; below zero is better."""

    steps: int
    mean: float
    error: float  # standard error


@dataclasses.dataclass(frozen=True)
class Settling:
    """What a longer training says about a difference. The numbers are None without one."""

    code: Length
    times: float | None = None  # steps of the longer training / steps of the short one
    short: float | None = None  # the difference after the short training
    longer: float | None = None  # the difference after the longer training
    limit: float | None = None  # a settled difference changes by no more than this

    @property
    def towards(self) -> str | None:
        """Where the longer training moves the difference: 'better' or 'worse'."""
        if self.longer is None or self.short is None:
            return None
        return 'better' if self.longer < self.short else 'worse'


def settle(
    short: Trained | None, longer: Trained | None, margin: float, *, equivalent: bool = False
) -> Settling:
    """Says whether the loss of an arm minus that of its baseline lasts when both train longer.

    For example, an arm is 0.050 nats/token better than its baseline after 1,000 steps, a difference
    of -0.050. The margin is 0.010, and standard errors are small. After 4,000 steps, a difference
    of

        -0.045   is SETTLED: it has the same sign, and has changed by at most 0.010
        -0.030   SHRINKS
        -0.070   GROWS
        +0.005   TURNS

    Args:
        short: The difference after the short training; None if it is not known.
        longer: The difference after the longer training; None if nothing is trained longer.
        margin: Differences below it do not matter, nats/token.
        equivalent: Whether the verdict on the short difference is 'equivalent'. The difference is
            then near zero, so its sign means nothing: it is settled if it stays within the margin.

    Returns:
        The comparison. Its code is ONE_LENGTH unless the longer training has at least TIMES times
        the steps.
    """
    if short is None or longer is None:
        return Settling(Length.ONE_LENGTH)
    if longer.steps < TIMES * short.steps:
        return Settling(Length.ONE_LENGTH)

    # A change is tolerated if it is too small to matter (margin), or may be chance (errors).
    error_of_change = math.hypot(short.error, longer.error)
    limit = max(margin, ERRORS * error_of_change)
    is_change_tolerated = abs(longer.mean - short.mean) <= limit

    has_same_sign = short.mean * longer.mean > 0
    has_opposite_sign = short.mean * longer.mean < 0
    is_still_equivalent = equivalent and abs(longer.mean) < margin
    is_still_on_one_side = not equivalent and has_same_sign
    verdict_holds = is_still_equivalent or is_still_on_one_side

    if verdict_holds and is_change_tolerated:
        code = Length.SETTLED
    elif has_opposite_sign:
        code = Length.TURNS
    elif abs(longer.mean) > abs(short.mean):
        code = Length.GROWS
    else:
        code = Length.SHRINKS
    return Settling(code, longer.steps / short.steps, short.mean, longer.mean, limit)
