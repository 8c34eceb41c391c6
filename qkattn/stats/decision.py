"""Decisions on the arms of a study, corrected for the number of comparisons."""

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from qkattn.stats.inference import MIN_PAIRS, Difference, detectable_difference

Arm = TypeVar('Arm')  # whatever identifies an arm
# The probability that a study and all its repeats decide any arm falsely, at most.
ALPHA = 0.05
# The share of what is left of ALPHA that a look leaves for the looks after it.
LEFT_FOR_REPEATS = 0.2


def level(look: int = 1) -> float:
    """The error rate of one look at a question: 4 % of the first, 0.8 % of the second, 0.16 %, ...

        level(k) = ALPHA (1 - r) r^(k - 1)  with r = LEFT_FOR_REPEATS

    A question that is left open may be asked again, with further seeds. If look k is false with a
    probability of level(k) at most, that of any false look is at most their sum (Bonferroni), which
    is ALPHA for any number of looks. How looks depend on each other does not matter, nor does what
    decides whether there is another one. So to spend ALPHA bit by bit is the simplest form of alpha
    spending (Lan and DeMets 1983, Biometrika 70:659), for a number of looks that is not planned. To
    test each of L looks at ALPHA / L would not do: before it is known that there is a second look,
    the first has spent ALPHA.

    `look` is 1 for a question that no earlier study has asked. ValueError if it is less.
    """
    if look < 1:
        raise ValueError(f'look={look} must be 1 or more')
    return ALPHA * (1 - LEFT_FOR_REPEATS) * LEFT_FOR_REPEATS ** (look - 1)


class Decision(enum.Enum):
    """The decision on an arm against the baseline, in the order in which arms are listed."""

    BETTER = 'better'
    BETTER_BELOW_MARGIN = 'better (below margin)'
    EQUIVALENT = 'equivalent'
    WORSE_BELOW_MARGIN = 'worse (below margin)'
    WORSE = 'worse'
    UNDECIDED = 'undecided'
    NO_VERDICT = 'no verdict'


BELOW_ZERO = (Decision.BETTER, Decision.BETTER_BELOW_MARGIN)
ABOVE_ZERO = (Decision.WORSE, Decision.WORSE_BELOW_MARGIN)
DECIDED = (*BELOW_ZERO, Decision.EQUIVALENT, *ABOVE_ZERO)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) adjusted p values, in the order given.

    With m values ascending p_(1) <= ... <= p_(m): adjusted p_(k) = max_{j <= k} (m - j + 1) p_(j),
    at most 1. To reject those at or below alpha keeps the probability of any false rejection at
    alpha, however the tests depend on each other.
    """
    order_M = np.argsort(p_values, kind='stable')
    m = len(p_values)
    ascending_M = np.asarray(p_values, float)[order_M]
    scaled_M = (m - np.arange(m)) * ascending_M  # (m - j + 1) p_(j), as j counts from 1
    adjusted_M = np.empty(m)
    adjusted_M[order_M] = np.minimum(np.maximum.accumulate(scaled_M), 1.0)
    return adjusted_M.tolist()


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The decision on an arm, and the numbers behind it, which are None if it was not tested."""

    decision: Decision  # from the tests alone; UNDECIDED with fewer than 3 pairs
    # P values after the correction of `judge` for arms and looks, to compare with ALPHA: of a
    # difference, of one larger than the margin, and of equivalence.
    p_holm: float | None = None
    p_margin_holm: float | None = None
    p_equivalence_holm: float | None = None
    # |difference| (nats per token) found with probability 0.8 or more at the strictest level of the
    # method, level(look) / number of arms.
    detectable: float | None = None


def judge(
    differences: Mapping[Arm, Difference | None],
    *,
    diverged: Mapping[Arm, tuple[int, int]] | None = None,
    planned: int = 0,
    looks: Mapping[Arm, int] | None = None,
) -> dict[Arm, Judgement]:
    """Decides on every arm with at least 3 pairs against the same baseline.

    An arm's true difference delta lies in one of three cells: zero, between zero and the margin,
    or the margin and beyond. In each, one of the three tests alone can decide falsely: that of a
    difference (a side is named), of a difference beyond the margin, and of equivalence. So one arm
    tested at level a is decided falsely with probability a at most, without a correction for the
    number of tests. Over m arms, each is tested at alpha / m, in order of their margin tests' p
    values: an arm that is shown to differ by more than the margin can get no other decision and
    leaves the family, and those left share alpha. For the margin tests this is Holm's (1979)
    method; the others profit from the arms that left, not from those shown equivalent, which may
    still be equal. So any false decision among all arms has a probability of alpha at most, up to a
    term in alpha^2 for differences that equal the margin; tests/stats/test_simulations.py
    holds it against simulated studies.

    | decision | shown at alpha |
    |---|---|
    | better, worse | differs from zero by the margin or more |
    | equivalent | differs by less than the margin, perhaps by nothing |
    | better, worse (below margin) | differs from zero, neither of the above |

    Each test has to hold with and without outlying seeds (`inference.Difference`), which can only
    withhold a decision. Divergence never helps: an arm with diverged trials is worse or
    undecided; if trials of its baseline diverged, it is better or undecided.

    An arm's difference is None if no seed finished in both. `diverged` holds the numbers of
    diverged verdict trials (the arm's, the baseline's) of the arms that had any. `planned` is the
    number of comparisons of the finished study: missing ones are corrected for as p = 1, so that no
    decision is lost when further arms finish. `looks` holds the number of the look at each arm, 1
    where it is left out: an arm that an earlier study has compared is tested at `level(look)`. Its
    p values are multiplied by ALPHA / level(look), so that all are compared with ALPHA.
    """
    diverged = diverged or {}
    looks = looks or {}
    # Any: no field of a difference of so many pairs is None, where all errors are known.
    tested: dict[Arm, Any] = {}
    for arm, difference in differences.items():
        if difference is not None and difference.n >= MIN_PAIRS and difference.p is not None:
            tested[arm] = difference
    num_comparisons = max(planned, len(tested))
    level_of_arm = {arm: level(looks.get(arm, 1)) for arm in differences}

    def for_look(arm: Arm, p: float) -> float:
        """The p value, to be compared with ALPHA whatever the look at the arm."""
        return min(1.0, p * ALPHA / level_of_arm[arm])

    p_margins = [for_look(arm, difference.p_margin) for arm, difference in tested.items()]
    p_margins += [1.0] * (num_comparisons - len(tested))
    p_margins_holm = holm(p_margins)

    judgements = dict.fromkeys(differences, Judgement(Decision.UNDECIDED))
    for number, (arm, difference) in enumerate(tested.items()):
        p_holm = _corrected(for_look(arm, difference.p), p_margins_holm)
        p_margin_holm = p_margins_holm[number]
        p_equivalence_holm = _corrected(for_look(arm, difference.p_equivalence), p_margins_holm)

        is_different = p_holm <= ALPHA
        is_beyond_margin = p_margin_holm <= ALPHA
        is_equivalent = p_equivalence_holm <= ALPHA
        arm_diverged, baseline_diverged = diverged.get(arm, (0, 0))
        decision = Decision.UNDECIDED
        if is_equivalent and not arm_diverged and not baseline_diverged:
            decision = Decision.EQUIVALENT
        elif is_different and difference.mean < 0 and not arm_diverged:
            decision = Decision.BETTER if is_beyond_margin else Decision.BETTER_BELOW_MARGIN
        elif is_different and difference.mean >= 0 and not baseline_diverged:
            decision = Decision.WORSE if is_beyond_margin else Decision.WORSE_BELOW_MARGIN
        judgements[arm] = Judgement(
            decision=decision,
            p_holm=p_holm,
            p_margin_holm=p_margin_holm,
            p_equivalence_holm=p_equivalence_holm,
            detectable=_detectable(difference, level_of_arm[arm] / num_comparisons),
        )
    return judgements


def _corrected(p: float, p_margins_holm: Sequence[float]) -> float:
    """The p value of a test, corrected for the arms that share alpha with its arm (see `judge`).

    It is the lowest alpha to reject at, where p <= alpha / (number of arms that have not left at
    alpha). An arm leaves at the adjusted p value of its margin test; `p_margins_holm` has that of
    every arm of the family.
    """
    family = len(p_margins_holm)
    leaving = [0.0, *sorted(p_margins_holm)]  # k arms have left from alpha = leaving[k] on
    lowest = 1.0
    for num_left in range(family):
        at_least = min(1.0, (family - num_left) * p)
        lowest = min(lowest, max(leaving[num_left], at_least))
    return lowest


def _detectable(difference: Any, alpha: float) -> float:
    """|difference| found at `alpha` with and without outlying seeds, whatever tuning may hide."""
    samples = [difference]
    if difference.typical is not None:
        samples.append(difference.typical)
    of_samples = []
    for sample in samples:
        error = math.hypot(sample.error_seeds, sample.error_evaluation)
        of_samples.append(detectable_difference(error, sample.df, alpha))
    return max(of_samples) + (difference.tuning_low + difference.tuning_high)
