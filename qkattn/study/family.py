"""Families: comparisons that are decided together, with p values corrected for all of them."""

from collections.abc import Hashable, Iterable

from qkattn.stats import decision
from qkattn.stats.decision import Judgement
from qkattn.stats.inference import Difference
from qkattn.study.arm_key import SAME_SHAPE, ArmKey, Expected


class Family:
    """Comparisons that are decided together.

    Args:
        size: The number of comparisons in the finished study. P values are corrected for this
            number, even if fewer comparisons are added.
    """

    def __init__(self, size: int):
        self.size = size
        # Each dict has the names of the comparisons as keys.
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
            diverged: The numbers of diverged trials (arm, baseline).
            look: How many studies have made this comparison, including this study. Later looks are
                tested more strictly.
        """
        self.differences[name] = difference
        self.diverged[name] = diverged
        self.looks[name] = look

    def judge(self) -> dict[Hashable, Judgement]:
        """Returns the decision on each comparison, by name; see `decision.judge`.

        Its p values are corrected for `size` comparisons.
        """
        return decision.judge(
            self.differences, diverged=self.diverged, planned=self.size, looks=self.looks
        )


def is_compared(key: ArmKey, baseline: str) -> bool:
    """Returns whether an arm is compared with the baseline: neither a control nor the baseline."""
    return key.control is None and key.variant != baseline


def primary_arms(keys: Iterable[ArmKey], baseline: str) -> list[ArmKey]:
    """Returns the arms that a study compares with its baseline, without controls."""
    return [key for key in keys if is_compared(key, baseline)]


def expected_arms(keys: Iterable[ArmKey], expected: Expected) -> list[ArmKey]:
    """Returns the arms that a positive control names: one for each size and corpus."""
    control = SAME_SHAPE if expected.same_shape else None
    return [key for key in keys if key.variant == expected.variant and key.control == control]
