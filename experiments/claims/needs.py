"""Says what would decide an arm whose row leaves a claim open."""

import math
from typing import NamedTuple

from experiments.claims.claim import AS_REPORTED, Row
from qkattn.report.prose import reasons
from qkattn.stats.decision import Decision, level
from qkattn.stats.inference import LEVEL, Difference, to_find
from qkattn.verdict.codes import ReasonCode
from qkattn.verdict.trained_arm import TrainedArm

# Needs are sorted by their number of seeds. This number stands for a finer sweep of the settings.
# It is larger than any number of seeds that may decide, and smaller than infinity, which stands for
# needs that no further training meets.
_FINER_SWEEP = 1e9
# These relations depend on whether the difference lies above one margin: minus the margin (-1) or
# plus the margin (1). The other relations depend on both.
_SIDES = {'better': -1, 'not_better': -1, 'worse': 1, 'not_worse': 1}


class Need(NamedTuple):
    """What would decide an arm. The largest need of a claim's arms is the need of the claim."""

    seeds: float  # infinity if no number of seeds decides
    text: str  # the part before the first comma is a short form


def needed(row: Row, arm: TrainedArm) -> Need:
    """Returns what would decide an arm. `row` is its evidence and `arm.verdict` its verdict.

    This is usually a number of seeds. If the measured difference and errors are the true ones, that
    many seeds distinguish the difference from the bound of the relation with probability 0.8.
    """
    trial = arm.example
    verdict = arm.verdict
    difference = arm.difference
    where = (
        f'{row.quantity} at {arm.size} on {arm.corpus}, {trial.parameters["total"]:,} '
        f'parameters and {trial.num_tokens:,} tokens a run'
    )
    # Further seeds do not help in these cases.
    if verdict.decision is Decision.NO_VERDICT:
        why = reasons(arm) or 'not tuned'
        return Need(math.inf, f'runs that qualify for a verdict, of {where}: {why}')
    codes = {reason.code for reason in verdict.reasons}
    if ReasonCode.DIVERGED in codes:
        return Need(math.inf, f'trials that do not diverge, of {where}')
    if ReasonCode.SPLITS_DISAGREE in codes:
        return Need(math.inf, f'a validation split that agrees, of {where}')

    bound = _bound(row, difference)
    distance = bound - difference.mean
    task = f'to tell a difference of {difference.mean:+.2g} from {bound:+g} nats/token in {where}'
    if difference.sd is None:
        return Need(math.inf, f'more seeds than {difference.n}, {task}')
    if row.relation == AS_REPORTED:
        # The reported range is compared with the 95 % interval.
        alpha = 1 - LEVEL
    else:
        # The test at a bound is one-sided. Further seeds are trained by a repeat of the study, so
        # the level is that of the next look.
        alpha = 2 * level(verdict.look + 1) / max(1, verdict.num_comparisons)
    error_of_tuning = difference.tuning_high if distance > 0 else difference.tuning_low
    finer_sweep = f'a finer sweep (this one may miss {error_of_tuning:.2g} nats/token)'
    sample = to_find(difference, distance, alpha)
    if sample is None:
        return Need(_FINER_SWEEP, f'{finer_sweep}, {task}')
    seeds, times_documents = sample
    text = f'{seeds:,} seeds in place of {difference.n}'
    if times_documents > 1:
        text += f' and {times_documents:.2g} times as many held-out documents'
    # If tuning takes up most of the distance, a finer sweep may be cheaper.
    if error_of_tuning > abs(distance) / 2:
        text += f', or fewer after {finer_sweep}'
    return Need(seeds, f'{text}, {task}')


def _bound(row: Row, difference: Difference) -> float:
    """Returns the difference in loss, in nats/token, up to which a row's relation is true or false.

    With a margin of 0.01, 'better' is true below -0.01 and false above, so its bound is -0.01. The
    bound of 'worse' is +0.01. The relations 'equivalent' and 'different' have both bounds. Of
    these, the result is the one nearer to the measured difference. AS_REPORTED has the ends of the
    reported range as bounds, of which the result is also the nearer one.
    """
    if row.relation == AS_REPORTED:
        ends = (row.expected - row.tolerance, row.expected + row.tolerance)
        return min(ends, key=lambda end: abs(end - difference.mean))
    side: float | None = _SIDES.get(row.relation or '')
    if side is None:
        side = math.copysign(1, difference.mean)  # the nearer one
    return side * difference.margin
