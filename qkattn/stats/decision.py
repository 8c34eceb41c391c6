"""Decisions on the arms of a study, corrected for the number of comparisons."""

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from qkattn.stats.inference import MIN_PAIRS, Difference, detectable_difference

Arm = TypeVar('Arm')  # whatever identifies an arm
# A study and all its repeats decide any arm falsely with at most this probability.
ALPHA = 0.05
# Each look leaves this share of the remaining ALPHA to the looks after it.
LEFT_FOR_REPEATS = 0.2


def level(look: int = 1) -> float:
    """Returns the error rate at which look number `look` tests a question.

    A question is whether an arm differs from its baseline. If a study leaves it open, a later study
    may ask it again with further seeds. Each of these tests is a look. The first look tests at 4 %,
    the second at 0.8 %, the third at 0.16 %, and so on:

        level(k) = ALPHA (1 - r) r^(k - 1)  with r = LEFT_FOR_REPEATS

    Look k decides falsely with probability level(k) at most, and all levels sum to ALPHA. By
    Bonferroni, the probability of any false decision is therefore at most ALPHA, for any number of
    looks. This holds however the looks depend on each other, and whatever decides whether another
    look follows.

    This is the simplest form of alpha spending (Lan and DeMets 1983, Biometrika 70:659), for a
    number of looks that is not planned. Testing each of L looks at ALPHA / L would not work: nobody
    knows L at the first look.

    Args:
        look: 1 for a question that no earlier study has asked.

    Raises:
        ValueError: `look` is less than 1.
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
    """Returns Holm's (1979) adjusted p values, in the order of `p_values`.

    With m values in ascending order, p_(1) <= ... <= p_(m),

        adjusted p_(k) = min(1, max_{j <= k} (m - j + 1) p_(j)).

    For example, (0.01, 0.04, 0.03) becomes (0.03, 0.06, 0.06).

    Rejecting every test with an adjusted p value of alpha or less makes any false rejection with
    probability alpha at most, however the tests depend on each other.
    """
    m = len(p_values)
    order_M = np.argsort(p_values, kind='stable')
    ascending_M = np.asarray(p_values, float)[order_M]

    # m - j + 1 is m for the smallest value (j = 1), then m - 1, and so on.
    scaled_M = (m - np.arange(m)) * ascending_M
    largest_so_far_M = np.maximum.accumulate(scaled_M)  # the maximum over j <= k
    ascending_adjusted_M = np.minimum(largest_so_far_M, 1.0)

    adjusted_M = np.empty(m)
    adjusted_M[order_M] = ascending_adjusted_M  # back into the order of `p_values`
    return adjusted_M.tolist()


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The decision on an arm, and the numbers behind it. The numbers of an untested arm are None.

    `judge` has corrected the p values for the number of arms and looks; compare them with ALPHA.
    """

    # Follows from the tests alone. An arm with fewer than 3 pairs is UNDECIDED.
    decision: Decision
    # Tests whether the arm differs from the baseline.
    p_holm: float | None = None
    # Tests whether the arm differs from the baseline by more than the margin.
    p_margin_holm: float | None = None
    # Tests whether the arm differs from the baseline by less than the margin.
    p_equivalence_holm: float | None = None
    # The |difference|, in nats per token, that the strictest test of `judge` finds with probability
    # 0.8 or more. That test has the level level(look) / number of arms.
    detectable: float | None = None


def judge(
    differences: Mapping[Arm, Difference | None],
    *,
    diverged: Mapping[Arm, tuple[int, int]] | None = None,
    planned: int = 0,
    looks: Mapping[Arm, int] | None = None,
) -> dict[Arm, Judgement]:
    """Decides on every arm that has at least 3 pairs of seeds with the same baseline.

    | decision | what the tests show at alpha |
    |---|---|
    | better, worse | the arm differs from the baseline by the margin or more |
    | equivalent | the arm differs by less than the margin, perhaps by nothing |
    | better, worse (below margin) | the arm differs, and neither of the above is shown |

    Each test has to hold with and without outlying seeds (`inference.Difference`). Divergence never
    helps: an arm with diverged trials is worse or undecided, and an arm whose baseline has diverged
    trials is better or undecided.

    One arm. Three tests decide: of a difference, of a difference beyond the margin, and of
    equivalence. The true difference is zero, or between zero and the margin, or the margin or more.
    In each of these cases only one of the tests can decide falsely. So testing an arm at level a
    decides it falsely with probability a at most, without a correction for the number of tests.

    Several arms. The m arms of a study share alpha, and each is tested at alpha / m, in the order
    of their margin tests' p values. Once an arm is shown to differ by more than the margin, no
    other decision on it is possible. It leaves the family, and the remaining arms share alpha. For
    the margin tests this is Holm's (1979) method. An arm that is shown equivalent stays in the
    family, because the test of a difference may still err on it. Any false decision among all arms
    has a probability of at most alpha, plus a term in alpha^2 for differences that equal the
    margin. tests/stats/test_simulations.py checks this on simulated studies.

    Args:
        differences: The difference of each arm from the baseline; None if no seed finished in both.
        diverged: The numbers of diverged verdict trials, as (the arm's, the baseline's). Arms
            without diverged trials may be left out.
        planned: The number of comparisons in the finished study. A comparison that is still missing
            counts as p = 1, so no decision is lost when further arms finish.
        looks: The number of the look at each arm, 1 if left out. An arm that an earlier study has
            compared is tested at `level(look)`. Its p values are multiplied by ALPHA / level(look),
            so that all p values are compared with ALPHA.

    Returns:
        The judgement of each arm, in the order of `differences`.
    """
    diverged = diverged or {}
    looks = looks or {}
    # The type is Any because the fields of a tested difference are never None.
    tested: dict[Arm, Any] = {}
    for arm, difference in differences.items():
        if difference is not None and difference.n >= MIN_PAIRS and difference.p is not None:
            tested[arm] = difference
    num_comparisons = max(planned, len(tested))
    level_of_arm = {arm: level(looks.get(arm, 1)) for arm in differences}

    def for_look(arm: Arm, p: float) -> float:
        """Returns the p value scaled by ALPHA / level(look), to be compared with ALPHA."""
        return min(1.0, p * ALPHA / level_of_arm[arm])

    p_margins = [for_look(arm, difference.p_margin) for arm, difference in tested.items()]
    num_missing = num_comparisons - len(tested)
    p_margins_holm = holm(p_margins + [1.0] * num_missing)

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
    """Returns the p value of one arm's test, corrected for the arms that share alpha with it.

    For example, two arms share alpha, and p is 0.02. While both are tested, p is compared with
    alpha / 2, so alpha has to be 0.04. At an alpha of 0.03 or more, the margin test of one of them
    is rejected, and the other one is tested at all of alpha. So the corrected p value is 0.03.

    In general, an arm leaves the family at the alpha at which its margin test is rejected (see
    `judge`). The larger alpha is, the more arms have left. The corrected p value is the smallest
    alpha that satisfies

        p <= alpha / (number of arms still in the family at alpha),

    or 1 if there is none. `p_margins_holm` holds the adjusted p value of each arm's margin test,
    which is the alpha at which the arm leaves; in the example, these are 0.03 and 0.9.
    """
    num_arms = len(p_margins_holm)
    # From alpha = leaving_alphas[k] on, k arms have left.
    leaving_alphas = [0.0, *sorted(p_margins_holm)]
    smallest_alpha = 1.0
    for num_left in range(num_arms):
        # Alpha suffices if these arms have left at it, and the test is rejected among the others.
        num_remaining = num_arms - num_left
        bonferroni_p = min(1.0, num_remaining * p)
        sufficient_alpha = max(leaving_alphas[num_left], bonferroni_p)
        smallest_alpha = min(smallest_alpha, sufficient_alpha)
    return smallest_alpha


def _detectable(difference: Any, alpha: float) -> float:
    """Returns the |difference| (nats per token) that tests at level `alpha` find.

    A finding has to hold with all seeds, and without the outlying ones (`difference.typical`). So
    the larger |difference| of both samples counts. Settings that miss their optimum may hide up to
    tuning_low + tuning_high of a difference, so this is added.
    """
    samples = [difference]
    if difference.typical is not None:
        samples.append(difference.typical)
    detectable_by_sample = []
    for sample in samples:
        error = math.hypot(sample.error_seeds, sample.error_evaluation)
        detectable_by_sample.append(detectable_difference(error, sample.df, alpha))
    hidden_by_tuning = difference.tuning_low + difference.tuning_high
    return max(detectable_by_sample) + hidden_by_tuning
