"""Decisions on the arms of a study, corrected for multiple comparisons."""

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from qkattn.stats.inference import MIN_PAIRS, Difference, detectable_difference

Arm = TypeVar('Arm')  # the type of an arm's key
# The maximum probability that a study and its repeats make any false decision on the study's arms.
ALPHA = 0.05
# The share of the remaining ALPHA that each look leaves for later looks.
LEFT_FOR_REPEATS = 0.2


def level(look: int = 1) -> float:
    """Returns the significance level of one look at an arm: 4 %, 0.8 %, 0.16 %, ...

    A look is a study that compares the arm with its baseline; later looks repeat the comparison
    with further seeds. The level of look k is

        level(k) = ALPHA (1 - r) r^(k - 1)    with r = LEFT_FOR_REPEATS.

    All levels sum to ALPHA. By Bonferroni's inequality, the probability of any false decision on
    the arms of a first study is at most ALPHA, for any number of looks. This is a form of alpha
    spending (Lan and DeMets 1983, Biometrika 70:659). Arms that a repeat adds are at look 1, too,
    and their false decisions come on top.

    Args:
        look: The number of the look, from 1.

    Raises:
        ValueError: `look` is less than 1.
    """
    if look < 1:
        raise ValueError(f'look={look} must be 1 or more')
    return ALPHA * (1 - LEFT_FOR_REPEATS) * LEFT_FOR_REPEATS ** (look - 1)


class Decision(enum.Enum):
    """The decision on an arm compared with the baseline, in the order of tables."""

    BETTER = 'better'
    BETTER_MARGIN_OPEN = 'better (margin open)'
    EQUIVALENT = 'equivalent'
    WORSE_MARGIN_OPEN = 'worse (margin open)'
    WORSE = 'worse'
    UNDECIDED = 'undecided'
    NO_VERDICT = 'no verdict'


BELOW_ZERO = (Decision.BETTER, Decision.BETTER_MARGIN_OPEN)
ABOVE_ZERO = (Decision.WORSE, Decision.WORSE_MARGIN_OPEN)
DECIDED = (*BELOW_ZERO, Decision.EQUIVALENT, *ABOVE_ZERO)


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns Holm's (1979) adjusted p values, in the order of `p_values`.

    For M values in ascending order, p_(1) <= ... <= p_(M),

        adjusted p_(k) = min(1, max_{j <= k} (M - j + 1) p_(j)).

    For example, (0.01, 0.04, 0.03) becomes (0.03, 0.06, 0.06). Rejecting all tests with an adjusted
    p value of at most alpha makes any false rejection with probability at most alpha.
    """
    M = len(p_values)
    order_M = np.argsort(p_values, kind='stable')
    ascending_M = np.asarray(p_values, float)[order_M]

    j_M = np.arange(1, M + 1)
    scaled_M = (M - j_M + 1) * ascending_M
    running_max_M = np.maximum.accumulate(scaled_M)
    ascending_adjusted_M = np.minimum(running_max_M, 1.0)

    adjusted_M = np.empty(M)
    adjusted_M[order_M] = ascending_adjusted_M  # undo the sorting
    return adjusted_M.tolist()


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The decision on an arm with its p values, to be compared with ALPHA.

    The p values are corrected for the number of arms and looks. An arm with fewer than 3 pairs of
    seeds is UNDECIDED, and its numbers are None.
    """

    decision: Decision
    # Tests whether the arm differs from the baseline.
    p_holm: float | None = None
    # Tests whether the arm differs from the baseline by more than the margin.
    p_margin_holm: float | None = None
    # Tests whether the arm differs from the baseline by less than the margin.
    p_equivalence_holm: float | None = None
    # The |difference|, in nats per token, that is found with probability 0.8 or more.
    detectable: float | None = None


def judge(
    differences: Mapping[Arm, Difference | None],
    *,
    diverged: Mapping[Arm, tuple[int, int]] | None = None,
    planned: int = 0,
    looks: Mapping[Arm, int] | None = None,
) -> dict[Arm, Judgement]:
    """Decides on each arm of a study from its difference from the baseline.

    | decision | what the tests show at ALPHA |
    |---|---|
    | better, worse | the arm differs from the baseline by the margin or more |
    | equivalent | the arm differs by less than the margin, perhaps by nothing |
    | better, worse (margin open) | the arm differs, and neither of the above is shown |

    An arm with fewer than 3 pairs of seeds is undecided. An arm with diverged trials is worse or
    undecided. An arm whose baseline has diverged trials is better or undecided.

    Correction for several arms. The M arms share ALPHA, so each is tested at ALPHA / M. An arm that
    is shown to differ by more than the margin leaves the family, and the remaining arms share
    ALPHA. For the margin tests, this is Holm's (1979) method. The probability of any false decision
    is at most ALPHA, plus a term in ALPHA^2 for true differences equal to the margin.
    tests/stats/test_simulations.py checks this bound on simulated studies.

    The three tests of an arm need no correction. Whether its true difference is zero, below the
    margin or at least the margin, only one of the tests can decide falsely.

    Args:
        differences: The difference of each arm from the baseline; None if no seed finished in both.
        diverged: The numbers of diverged trials, (the arm's, the baseline's). A missing arm has
            none.
        planned: The number of comparisons in the finished study. A missing comparison counts as
            p = 1, so that further arms cannot revoke a decision.
        looks: The number of the look at each arm, by default 1. The p values of the arm are
            multiplied by ALPHA / level(look).

    Returns:
        The judgement of each arm, in the order of `differences`.
    """
    diverged = diverged or {}
    looks = looks or {}
    # Typed as Any because the optional fields of a tested difference are never None.
    tested: dict[Arm, Any] = {}
    for arm, difference in differences.items():
        if difference is not None and difference.n >= MIN_PAIRS and difference.p is not None:
            tested[arm] = difference
    num_comparisons = max(planned, len(tested))
    level_of_arm = {arm: level(looks.get(arm, 1)) for arm in differences}

    def scale_to_alpha(arm: Arm, p: float) -> float:
        """Returns p ALPHA / level(look), at most 1, to be compared with ALPHA."""
        return min(1.0, p * ALPHA / level_of_arm[arm])

    p_margins = [scale_to_alpha(arm, difference.p_margin) for arm, difference in tested.items()]
    num_missing = num_comparisons - len(tested)
    p_margins_holm = holm(p_margins + [1.0] * num_missing)

    judgements = dict.fromkeys(differences, Judgement(Decision.UNDECIDED))
    # `p_margins_holm` is longer than `tested` if comparisons are missing.
    for (arm, difference), p_margin_holm in zip(tested.items(), p_margins_holm, strict=False):
        p = scale_to_alpha(arm, difference.p)
        p_holm = _correct(p, p_margins_holm)
        p_equivalence = scale_to_alpha(arm, difference.p_equivalence)
        p_equivalence_holm = _correct(p_equivalence, p_margins_holm)

        is_different = p_holm <= ALPHA
        is_beyond_margin = p_margin_holm <= ALPHA
        is_equivalent = p_equivalence_holm <= ALPHA
        arm_diverged, baseline_diverged = diverged.get(arm, (0, 0))
        decision = Decision.UNDECIDED
        if is_equivalent and not arm_diverged and not baseline_diverged:
            decision = Decision.EQUIVALENT
        elif is_different and difference.mean < 0 and not arm_diverged:
            decision = Decision.BETTER if is_beyond_margin else Decision.BETTER_MARGIN_OPEN
        elif is_different and difference.mean >= 0 and not baseline_diverged:
            decision = Decision.WORSE if is_beyond_margin else Decision.WORSE_MARGIN_OPEN

        judgements[arm] = Judgement(
            decision=decision,
            p_holm=p_holm,
            p_margin_holm=p_margin_holm,
            p_equivalence_holm=p_equivalence_holm,
            detectable=_detectable(difference, level_of_arm[arm] / num_comparisons),
        )
    return judgements


def _correct(p: float, p_margins_holm: Sequence[float]) -> float:
    """Corrects the p value of one arm's test for the arms that share alpha.

    An arm leaves the family if its adjusted margin p value is at most alpha. The corrected p value
    is the smallest alpha, at most 1, for which

        p <= alpha / (number of arms in the family at alpha).

    For example, two arms have the margin p values 0.03 and 0.9, and p is 0.02. With both arms in
    the family, alpha must be 0.04. From alpha = 0.03 on, one arm has left, and p <= alpha / 1. So
    the corrected p value is 0.03.
    """
    num_arms = len(p_margins_holm)
    # For alpha >= leaving_alphas[k], k arms have left.
    leaving_alphas = [0.0, *sorted(p_margins_holm)]
    smallest_alpha = 1.0
    for num_left in range(num_arms):
        num_in_family = num_arms - num_left
        bonferroni_p = min(1.0, num_in_family * p)
        sufficient_alpha = max(leaving_alphas[num_left], bonferroni_p)
        smallest_alpha = min(smallest_alpha, sufficient_alpha)
    return smallest_alpha


def _detectable(difference: Any, alpha: float) -> float:
    """Returns the |difference|, in nats per token, that tests at level `alpha` find.

    The tests must succeed both with and without outlying seeds. A detectable difference also has to
    exceed what imperfect settings may hide.
    """
    samples = [difference]
    if difference.typical is not None:
        samples.append(difference.typical)  # without outlying seeds
    detectable_by_sample = []
    for sample in samples:
        error = math.hypot(sample.error_seeds, sample.error_evaluation)
        detectable_by_sample.append(detectable_difference(error, sample.df, alpha))
    hidden_by_tuning = difference.tuning_low + difference.tuning_high
    return max(detectable_by_sample) + hidden_by_tuning
