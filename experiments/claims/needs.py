"""Says what would decide an arm whose row leaves a claim open."""

import math
from typing import NamedTuple

from experiments.claims.claim import AS_REPORTED, Row
from qkattn.report.prose import reasons
from qkattn.stats.decision import Decision, level
from qkattn.stats.inference import LEVEL, Difference, to_find
from qkattn.verdict.codes import ReasonCode
from qkattn.verdict.trained_arm import TrainedArm

# The `seeds` of a need for a finer sweep. It sorts after any number of seeds, and before infinity.
_FINER_SWEEP = 1e9
# The sign of the margin that decides a relation: 'better' depends on the bound -margin. Relations
# that are not listed depend on both margins.
_SIGN_OF_MARGIN = {'better': -1, 'not_better': -1, 'worse': 1, 'not_worse': 1}


class Need(NamedTuple):
    """What would decide an arm. Needs are sorted by their number of seeds."""

    seeds: float  # infinity if no number of seeds decides
    text: str  # the part before the first comma is a short form


def needed(row: Row, arm: TrainedArm) -> Need:
    """Returns what would decide the relation in `row`, usually a number of seeds.

    The number of seeds gives the test a power of 0.8, if the measured difference and errors are the
    true ones.

    Args:
        row: The row of the arm.
        arm: The arm, with its difference and verdict.
    """
    trial = arm.example
    verdict = arm.verdict
    difference = arm.difference
    where = (
        f'{row.quantity} at {arm.size} on {arm.corpus}, {trial.parameters["total"]:,} '
        f'parameters and {trial.num_tokens:,} tokens a run'
    )
    need_beside_seeds = _need_beside_seeds(arm, where)
    if need_beside_seeds is not None:
        return Need(math.inf, need_beside_seeds)

    bound = _bound(row, difference)
    distance = bound - difference.mean
    task = f'to tell a difference of {difference.mean:+.2g} from {bound:+g} nats/token in {where}'
    if difference.sd is None:
        return Need(math.inf, f'more seeds than {difference.n}, {task}')
    if row.relation == AS_REPORTED:
        # The reported range is compared with the 95 % interval.
        two_sided_alpha = 1 - LEVEL
    else:
        # The test is one-sided. More seeds need a repeat of the study, whose level is smaller.
        one_sided_alpha = level(verdict.look + 1) / max(1, verdict.num_comparisons)
        two_sided_alpha = 2 * one_sided_alpha
    tuning_error = difference.tuning_high if distance > 0 else difference.tuning_low
    finer_sweep = f'a finer sweep (this one may miss {tuning_error:.2g} nats/token)'
    sample_size = to_find(difference, distance, two_sided_alpha)
    if sample_size is None:  # imperfect tuning alone may reach the bound
        return Need(_FINER_SWEEP, f'{finer_sweep}, {task}')
    seeds, times_documents = sample_size
    text = f'{seeds:,} seeds in place of {difference.n}'
    if times_documents > 1:
        text += f' and {times_documents:.2g} times as many held-out documents'
    # A finer sweep may be cheaper if the tuning error is most of the distance.
    if tuning_error > abs(distance) / 2:
        text += f', or fewer after {finer_sweep}'
    return Need(seeds, f'{text}, {task}')


def _need_beside_seeds(arm: TrainedArm, where: str) -> str | None:
    """Returns what an arm needs if more seeds alone would not decide it; None if they would.

    `where` names the arm in the text.
    """
    verdict = arm.verdict
    if verdict.decision is Decision.NO_VERDICT:
        why = reasons(arm) or 'not tuned'
        return (
            f'runs that qualify for a verdict, for {where}. The stored runs do not qualify: {why}'
        )
    reason_codes = {reason.code for reason in verdict.reasons}
    if ReasonCode.DIVERGED in reason_codes:
        return f'trials that do not diverge, for {where}'
    if ReasonCode.SPLITS_DISAGREE in reason_codes:
        return f'a validation split that agrees, for {where}'
    return None


def _bound(row: Row, difference: Difference) -> float:
    """Returns the bound at which a relation changes between true and false, in nats/token.

    With a margin of 0.01, 'better' is true below -0.01, so its bound is -0.01. Of two bounds, such
    as -0.01 and 0.01 for 'equivalent', the one nearer to the measured difference is returned.
    """
    if row.relation == AS_REPORTED:
        reported_range = (row.expected - row.tolerance, row.expected + row.tolerance)
        return min(reported_range, key=lambda bound: abs(bound - difference.mean))
    sign: float | None = _SIGN_OF_MARGIN.get(row.relation or '')
    if sign is None:
        # Both -margin and margin are bounds. The nearer one has the sign of the difference.
        sign = math.copysign(1, difference.mean)
    return sign * difference.margin
