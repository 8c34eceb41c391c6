"""Whether a difference is still moving: the same one after at least four times the steps.

A difference is settled if it and that of a training of at least `TIMES` times the steps agree in
sign and are no further apart than the larger of the margin and `ERRORS` standard errors of their
change. An equivalent arm needs no sign, but has to stay within the margin. Everything else holds at
its own length of training alone.
"""

import dataclasses
import enum
import math

from qkattn.stats.inference import Difference

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
    """What is known of a difference beyond its length of training."""

    code: Length
    times: float | None = None  # the steps of the longer training over its own
    short: float | None = None  # the difference at its own length
    longer: float | None = None  # and after the longer training
    limit: float | None = None  # what a settled one may change by

    @property
    def towards(self) -> str | None:
        """'better' or 'worse', where a longer training moves it to."""
        if self.longer is None or self.short is None:
            return None
        return 'better' if self.longer < self.short else 'worse'


def trained(steps: int, difference: Difference) -> Trained | None:
    """None where the error of the difference is not known."""
    if difference.error_seeds is None or difference.error_evaluation is None:
        return None
    error = math.hypot(difference.error_seeds, difference.error_evaluation)
    return Trained(steps, difference.mean, error)


def settle(
    short: Trained | None, longer: Trained | None, margin: float, *, equivalent: bool = False
) -> Settling:
    """Compares a difference with that after a longer training; `equivalent` is its verdict."""
    if short is None or longer is None or longer.steps < TIMES * short.steps:
        return Settling(Length.ONE_LENGTH)
    limit = max(margin, ERRORS * math.hypot(short.error, longer.error))
    is_near = abs(longer.mean - short.mean) <= limit
    agrees = short.mean * longer.mean > 0
    if equivalent:
        agrees = abs(longer.mean) < margin
    if is_near and agrees:
        code = Length.SETTLED
    elif short.mean * longer.mean < 0:
        code = Length.TURNS
    elif abs(longer.mean) > abs(short.mean):
        code = Length.GROWS
    else:
        code = Length.SHRINKS
    return Settling(code, longer.steps / short.steps, short.mean, longer.mean, limit)
