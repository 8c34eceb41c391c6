"""Decisions on the arms of a study, corrected for the number of comparisons."""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from qkattn.stats.inference import LEVEL, MIN_PAIRS, Difference, detectable_difference

Arm = TypeVar('Arm')


class Decision(enum.Enum):
    """What is decided about an arm against the baseline, in the order in which arms are listed."""

    BETTER = 'better'
    WORSE = 'worse'
    EQUIVALENT = 'equivalent'
    UNDECIDED = 'undecided'
    NO_VERDICT = 'no verdict'


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) adjusted p values, in the order given.

    With m values ascending p_(1) <= ... <= p_(m): adjusted p_(k) = max_{j <= k} (m - j + 1) p_(j),
    at most 1. Calling those at or below alpha found keeps the probability of any false finding at
    alpha, however the tests depend on each other. Raises ValueError for a p value outside [0, 1].
    """
    for p in p_values:
        if not 0 <= p <= 1:
            raise ValueError(f'p_values holds {p}; a p value lies between 0 and 1.')
    m = len(p_values)
    adjusted, largest = [0.0] * m, 0.0
    for rank, i in enumerate(sorted(range(m), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (m - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The decision on one arm, with the p values behind it.

    Attributes:
      decision: from the tests alone; UNDECIDED with fewer than 3 pairs.
      p_holm, p_equivalence_holm: p values after Holm's correction; None if the arm was not tested.
      detectable: |difference| (nats per token) found with probability 0.8 at the strictest level of
        Holm's method, alpha / number of arms; None if the arm was not tested.
    """

    decision: Decision
    p_holm: float | None = None
    p_equivalence_holm: float | None = None
    detectable: float | None = None


def judge(
    differences: Mapping[Arm, Difference | None],
    *,
    diverged: Mapping[Arm, tuple[int, int]] | None = None,
    planned: int = 0,
    level: float = LEVEL,
) -> dict[Arm, Judgement]:
    """Decides on every arm against the same baseline.

    Holm's method is applied to the difference tests of all arms with at least 3 pairs, and
    separately to their equivalence tests: in each of the two families, a false decision has
    probability at most 1 - level. Equivalence takes precedence: a difference shown to be smaller
    than the margin is of no interest even if it is shown not to be zero. Divergence never helps: an
    arm with diverged trials is worse or undecided; if trials of its baseline diverged, it is better
    or undecided.

    Args:
      differences: by arm; None if no seed finished in both.
      diverged: by arm, numbers of diverged verdict trials (the arm's, the baseline's); others had
        none.
      planned: comparisons of the finished study. Missing ones are corrected for as p = 1, so that
        no decision is lost when further arms finish.

    Raises:
      ValueError: `diverged` names an arm that `differences` lacks.
    """
    diverged = diverged or {}
    if unknown := [arm for arm in diverged if arm not in differences]:
        raise ValueError(f'diverged names {unknown}; the arms are {list(differences)}.')
    # Any: no field of a difference of so many pairs is None.
    tested: dict[Arm, Any] = {
        arm: d for arm, d in differences.items() if d is not None and d.n >= MIN_PAIRS
    }
    family = max(planned, len(tested))
    missing = [1.0] * (family - len(tested))
    p_differ = holm([*(d.p for d in tested.values()), *missing])
    p_same = holm([*(d.p_equivalence for d in tested.values()), *missing])
    judgements = dict.fromkeys(differences, Judgement(Decision.UNDECIDED))
    for (arm, difference), differ, same in zip(tested.items(), p_differ, p_same, strict=False):
        error = difference.detectable / detectable_difference(1.0, difference.df)
        judgements[arm] = Judgement(
            _decide(difference, differ, same, 1 - level, *diverged.get(arm, (0, 0))),
            differ,
            same,
            detectable_difference(error, difference.df, (1 - level) / family),
        )
    return judgements


def _decide(
    difference: Difference,
    p_differ: float,
    p_same: float,
    alpha: float,
    arm_diverged: int,
    baseline_diverged: int,
) -> Decision:
    if p_same <= alpha and not arm_diverged and not baseline_diverged:
        return Decision.EQUIVALENT
    if p_differ > alpha:
        return Decision.UNDECIDED
    if difference.mean < 0:
        return Decision.UNDECIDED if arm_diverged else Decision.BETTER
    return Decision.UNDECIDED if baseline_diverged else Decision.WORSE
