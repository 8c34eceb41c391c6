"""Whether a difference in loss lasts when models are trained at least four times as long."""

import dataclasses
import enum
import math

# A longer training has at least this many times the steps.
TIMES = 4
# A difference may change by this many standard errors of the change.
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
    """What a longer training says about a difference. All numbers are None if there was none."""

    code: Length
    times: float | None = None  # steps of the longer training / steps of the short training
    short: float | None = None  # the difference after the short training, nats/token
    longer: float | None = None  # the difference after the longer training, nats/token
    limit: float | None = None  # the largest change that counts as none, nats/token

    @property
    def towards(self) -> str | None:
        """'better' if longer training lowers the difference, else 'worse'; None if unknown."""
        if self.longer is None or self.short is None:
            return None
        return 'better' if self.longer < self.short else 'worse'


def settle(
    short: Trained | None, longer: Trained | None, margin: float, *, equivalent: bool = False
) -> Settling:
    """Compares a difference from the baseline with the same difference after longer training.

    A difference is settled if it keeps its sign and changes by at most the margin, or at most
    ERRORS standard errors of the change. An equivalent arm may change sign, but has to stay within
    the margin. For example, if the margin is 0.010, standard errors are small, and the difference
    after the short training is -0.050, then after the longer training

        -0.045   is SETTLED
        -0.030   SHRINKS
        -0.070   GROWS
        +0.005   TURNS

    Args:
        short: The difference after the short training; None if it is not known.
        longer: The difference after the longer training; None if nothing is trained longer.
        margin: The largest difference that counts as none, nats/token.
        equivalent: Whether the verdict after the short training is 'equivalent'.

    Returns:
        The comparison. The code is ONE_LENGTH if a difference is missing, or if the longer training
        has less than TIMES times the steps.
    """
    if short is None or longer is None:
        return Settling(Length.ONE_LENGTH)
    if longer.steps < TIMES * short.steps:
        return Settling(Length.ONE_LENGTH)

    error_of_change = math.hypot(short.error, longer.error)
    limit = max(margin, ERRORS * error_of_change)
    is_within_limit = abs(longer.mean - short.mean) <= limit

    has_same_sign = short.mean * longer.mean > 0
    has_opposite_sign = short.mean * longer.mean < 0
    verdict_holds = abs(longer.mean) < margin if equivalent else has_same_sign

    if verdict_holds and is_within_limit:
        code = Length.SETTLED
    elif has_opposite_sign:
        code = Length.TURNS
    elif abs(longer.mean) > abs(short.mean):
        code = Length.GROWS
    else:
        code = Length.SHRINKS
    return Settling(
        code,
        times=longer.steps / short.steps,
        short=short.mean,
        longer=longer.mean,
        limit=limit,
    )
