"""The findings of a study: differences from the baseline, verdicts, scaling fits, remarks."""

import dataclasses

from qkattn.stats import scaling
from qkattn.verdict.codes import TEST, VALIDATION, Remark
from qkattn.verdict.judging import PositiveControl
from qkattn.verdict.trained_arm import Decomposition, TrainedArm
from qkattn.verdict.trained_study import TrainedStudy

PARTS = tuple(field.name for field in dataclasses.fields(Decomposition))


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Loss against parameters over the sizes of one variant on one corpus."""

    variant: str
    corpus: str
    law: scaling.Law | scaling.Problem
    # How many baseline parameters one parameter of the variant is worth. None for the baseline, and
    # if the baseline has no results.
    worth: scaling.Interval | scaling.Problem | None


@dataclasses.dataclass(frozen=True)
class Findings:
    """A study with what its results show."""

    study: TrainedStudy
    # The primary arms: size by size, corpus by corpus, the baseline first.
    arms: tuple[TrainedArm, ...]
    controls: tuple[TrainedArm, ...]  # the others, in the same order, without a verdict
    remarks: tuple[Remark, ...]  # of the study and of all arms, those that block first
    # One fit for each variant and corpus, over the arms that a fit may use (`TrainedArm.scales`).
    # Empty for fewer than two sizes, and if a remark blocks every arm.
    scaling: tuple[Scaling, ...] = ()
    num_comparisons: int = 0  # the family of Holm's correction; 0 in a study without tuning
    positive: tuple[PositiveControl, ...] = ()  # decided as a family of their own

    @property
    def every_arm(self) -> tuple[TrainedArm, ...]:
        """The primary arms, then the controls."""
        return (*self.arms, *self.controls)

    @property
    def blocks(self) -> tuple[Remark, ...]:
        """The remarks that withhold every verdict."""
        return tuple(remark for remark in self.remarks if remark.blocks and remark.arm is None)

    @property
    def has_intervals(self) -> bool:
        """Whether the difference of any arm from the baseline has an interval."""
        differences = [arm.difference for arm in self.arms if arm.difference]
        return any(difference.low is not None for difference in differences)

    @property
    def has_part_intervals(self) -> bool:
        """Whether any part of the difference of any arm has an interval."""
        for arm in self.arms:
            for name in PARTS:
                part = getattr(arm.parts, name)
                if part is not None and part.difference.low is not None:
                    return True
        return False

    @property
    def has_parts(self) -> bool:
        """Whether a part of the difference of any arm is known."""
        return any(arm.parts != Decomposition() for arm in self.arms)

    @property
    def split(self) -> str:
        """The split of the differences: TEST, or VALIDATION if trials have no test loss."""
        splits = {arm.comparison.split for arm in self.arms if arm.comparison}
        return VALIDATION if VALIDATION in splits else TEST
