"""Families: sets of comparisons that are decided together, each p value corrected for all of them.

Comparisons are decided in two places, and both collect them in a `Family`: the plan of a study,
which trains the decided arms longer, and its verdicts.
"""

from collections.abc import Hashable, Iterable

from qkattn.stats import decision
from qkattn.stats.decision import Judgement
from qkattn.stats.inference import Difference
from qkattn.study.arm_key import SAME_SHAPE, ArmKey, Expected


class Family:
    """Comparisons that are decided together.

    `size` is the number of comparisons in the finished study. P values are corrected for all of
    them, also for those that have no results yet and are not added.
    """

    def __init__(self, size: int):
        self.size = size
        self.differences: dict[Hashable, Difference | None] = {}
        self.diverged: dict[Hashable, tuple[int, int]] = {}
        self.looks: dict[Hashable, int] = {}

    def add(
        self,
        name: Hashable,
        difference: Difference | None,
        diverged: tuple[int, int],
        look: int = 1,
    ) -> None:
        """Adds the comparison of an arm with its baseline.

        Args:
            name: Identifies the comparison.
            difference: The arm's loss minus the baseline's; None if no seed finished in both.
            diverged: The numbers of diverged trials, as (the arm's, the baseline's).
            look: How many studies have made this comparison, this one included. It is 1 for the
                first study. Each repeat of a study looks once more, and is tested more strictly.
        """
        self.differences[name] = difference
        self.diverged[name] = diverged
        self.looks[name] = look

    def judge(self) -> dict[Hashable, Judgement]:
        """The decision on each comparison, by its name; see `decision.judge`."""
        return decision.judge(
            self.differences, diverged=self.diverged, planned=self.size, looks=self.looks
        )


def is_compared(key: ArmKey, baseline: str) -> bool:
    """Returns whether an arm is a primary arm: neither a control nor a baseline."""
    return key.control is None and key.variant != baseline


def primary_arms(keys: Iterable[ArmKey], baseline: str) -> list[ArmKey]:
    """Returns the primary arms: those that a study compares with its baseline."""
    return [key for key in keys if is_compared(key, baseline)]


def expected_arms(keys: Iterable[ArmKey], expected: Expected) -> list[ArmKey]:
    """Returns the arms that a positive control is about: one for each size and corpus."""
    control = SAME_SHAPE if expected.same_shape else None
    return [key for key in keys if (key.variant, key.control) == (expected.variant, control)]
