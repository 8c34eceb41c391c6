"""Families: sets of comparisons that are decided together, each p value corrected for all of them.

Both that decide on comparisons collect them in a `Family`: the plan of a study, which trains the
decided arms longer, and its verdicts.
"""

from collections.abc import Hashable, Iterable

from qkattn.stats import decision
from qkattn.stats.decision import Judgement
from qkattn.stats.inference import Difference
from qkattn.study.arm_key import SAME_SHAPE, ArmKey, Expected


class Family:
    """Comparisons that are decided together.

    `size` is the number of comparisons of the finished study. Those that are not added, as they
    have no results yet, are corrected for all the same.
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
        """Adds a comparison; `difference` is None if no seed finished in both arms.

        `diverged` has the numbers of diverged trials of the arm and of its baseline. `look` is 1
        for a question that no earlier study has asked.
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
    """Whether an arm belongs to the family of primary arms: no control, and no baseline."""
    return key.control is None and key.variant != baseline


def primary_arms(keys: Iterable[ArmKey], baseline: str) -> list[ArmKey]:
    """The arms whose comparisons with the baseline are the main family of a study."""
    return [key for key in keys if is_compared(key, baseline)]


def expected_arms(keys: Iterable[ArmKey], expected: Expected) -> list[ArmKey]:
    """The arms that a positive control is about: one for each size and corpus."""
    control = SAME_SHAPE if expected.same_shape else None
    return [key for key in keys if (key.variant, key.control) == (expected.variant, control)]
