"""Decisions on the arms of a study, corrected for the number of comparisons."""

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from qkattn.stats.inference import MIN_PAIRS, Difference, detectable_difference

Arm = TypeVar('Arm')
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
    adjusted_M = np.empty(m)
    scaled_M = (m - np.arange(m)) * np.asarray(p_values, float)[order_M]
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
    # Any: no field of a difference of so many pairs is None, where all errors are known.
    tested: dict[Arm, Any] = {
        arm: d
        for arm, d in differences.items()
        if d is not None and d.n >= MIN_PAIRS and d.p is not None
    }
    family = max(planned, len(tested))
    levels = {arm: level((looks or {}).get(arm, 1)) for arm in differences}

    def for_look(arm: Arm, p: float) -> float:
        return min(1.0, p * ALPHA / levels[arm])

    p_margins = [for_look(arm, d.p_margin) for arm, d in tested.items()]
    margins = holm([*p_margins, *[1.0] * (family - len(tested))])
    leaving = [0.0, *sorted(margins)]

    def corrected(p: float) -> float:
        """The lowest alpha to reject at: p <= alpha / arms that have not left at alpha."""
        return min(max(left, min(1.0, (family - k) * p)) for k, left in enumerate(leaving[:-1]))

    judgements = dict.fromkeys(differences, Judgement(Decision.UNDECIDED))
    for (arm, d), p_margin in zip(tested.items(), margins, strict=False):
        p_differs = corrected(for_look(arm, d.p))
        p_same = corrected(for_look(arm, d.p_equivalence))
        differs, beyond, same = (p <= ALPHA for p in (p_differs, p_margin, p_same))
        arm_diverged, baseline_diverged = (diverged or {}).get(arm, (0, 0))
        decision = Decision.UNDECIDED
        if same and not arm_diverged and not baseline_diverged:
            decision = Decision.EQUIVALENT
        elif differs and d.mean < 0 and not arm_diverged:
            decision = Decision.BETTER if beyond else Decision.BETTER_BELOW_MARGIN
        elif differs and d.mean >= 0 and not baseline_diverged:
            decision = Decision.WORSE if beyond else Decision.WORSE_BELOW_MARGIN
        detectable = max(
            detectable_difference(
                math.hypot(one.error_seeds, one.error_evaluation), one.df, levels[arm] / family
            )
            for one in filter(None, (d, d.typical))
        )
        detectable += d.tuning_low + d.tuning_high
        judgements[arm] = Judgement(decision, p_differs, p_margin, p_same, detectable)
    return judgements
