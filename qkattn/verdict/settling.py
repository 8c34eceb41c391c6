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
    """Compares a difference with the same difference after a longer training.

    `equivalent` says whether the verdict on the short difference is 'equivalent'. Without a
    training of at least TIMES times the steps, the code is ONE_LENGTH.
    """
    if short is None or longer is None or longer.steps < TIMES * short.steps:
        return Settling(Length.ONE_LENGTH)

    limit = max(margin, ERRORS * math.hypot(short.error, longer.error))
    is_near = abs(longer.mean - short.mean) <= limit
    has_same_sign = short.mean * longer.mean > 0
    is_within_margin = abs(longer.mean) < margin
    is_confirmed = is_within_margin if equivalent else has_same_sign
    has_opposite_sign = short.mean * longer.mean < 0

    if is_near and is_confirmed:
        code = Length.SETTLED
    elif has_opposite_sign:
        code = Length.TURNS
    elif abs(longer.mean) > abs(short.mean):
        code = Length.GROWS
    else:
        code = Length.SHRINKS
    return Settling(code, longer.steps / short.steps, short.mean, longer.mean, limit)
