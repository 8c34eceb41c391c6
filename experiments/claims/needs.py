"""What would decide an arm whose row leaves a claim open."""

import math
from typing import NamedTuple

from experiments.claims.claim import AS_REPORTED, Row
from qkattn.report.prose import reasons
from qkattn.stats.decision import Decision, level
from qkattn.stats.inference import LEVEL, Difference, to_find
from qkattn.verdict.codes import ReasonCode
from qkattn.verdict.trained_arm import TrainedArm

# What stands for the seeds where the error of tuning alone may reach the bound: more than any
# number of seeds that decides, less than where no further training decides.
_FINER_SWEEP = 1e9
# By relation, the side of zero of the margin on which it turns. The others turn on both margins.
_SIDES = {'better': -1, 'not_better': -1, 'worse': 1, 'not_worse': 1}


class Need(NamedTuple):
    """What would decide an arm; of several needs, the largest is that of the claim."""

    seeds: float  # infinity where no number of seeds decides
    text: str  # in short before the first comma


def needed(row: Row, arm: TrainedArm) -> Need:
    """What would decide an arm, of which `row` is the evidence and `arm.verdict` the verdict.

    Mostly this is a number of seeds. They tell the measured difference, at the errors measured,
    with probability 0.8 from the bound on which the relation of the row turns.
    """
    trial = arm.example
    verdict = arm.verdict
    difference = arm.difference
    where = (
        f'{row.quantity} at {arm.size} on {arm.corpus}, {trial.parameters["total"]:,} '
        f'parameters and {trial.num_tokens:,} tokens a run'
    )
    # More seeds do not make up for these.
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
        alpha = 1 - LEVEL  # what was reported is compared with an interval
    else:
        # Tests at a bound are one-sided. Further seeds are those of a repeat, another look.
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
    # Where tuning takes most of the distance, a sweep is the cheaper way.
    if error_of_tuning > abs(distance) / 2:
        text += f', or fewer after {finer_sweep}'
    return Need(seeds, f'{text}, {task}')


def _bound(row: Row, difference: Difference) -> float:
    """The difference in loss, nats/token, on which the relation of a row turns.

    This is the margin below or above zero, on the nearer side where both count; for AS_REPORTED the
    nearer end of the reported range.
    """
    if row.relation == AS_REPORTED:
        ends = (row.expected - row.tolerance, row.expected + row.tolerance)
        return min(ends, key=lambda end: abs(end - difference.mean))
    nearer_side = math.copysign(1, difference.mean)
    return _SIDES.get(row.relation or '', nearer_side) * difference.margin
