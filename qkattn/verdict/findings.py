"""What a study found: differences from the baseline, verdicts, scaling fits, remarks."""

import dataclasses

from qkattn.stats import scaling
from qkattn.verdict.codes import TEST, VALIDATION, Remark
from qkattn.verdict.judging import PositiveControl
from qkattn.verdict.trained_arm import Decomposition, TrainedArm
from qkattn.verdict.trained_study import TrainedStudy

PARTS = tuple(field.name for field in dataclasses.fields(Decomposition))


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The scaling law of one variant on one corpus: loss against parameters."""

    variant: str
    corpus: str
    law: scaling.Law | scaling.Problem
    # How many baseline parameters one parameter of the variant is worth. None for the baseline
    # itself, and for all variants if no arm of the baseline can be fitted.
    worth: scaling.Interval | scaling.Problem | None


@dataclasses.dataclass(frozen=True)
class Findings:
    """A study with its results."""

    study: TrainedStudy
    # Baselines and the arms compared with them, ordered by size and corpus, baselines first.
    arms: tuple[TrainedArm, ...]
    controls: tuple[TrainedArm, ...]  # in the same order as `arms`; they have no verdict
    remarks: tuple[Remark, ...]  # about the study and its arms, blocking remarks first
    # By variant and corpus. Empty for fewer than two sizes, and if all verdicts are withheld.
    scaling: tuple[Scaling, ...] = ()
    # How many comparisons Holm's method corrects the verdicts for; 0 in a study without tuning.
    num_comparisons: int = 0
    positive: tuple[PositiveControl, ...] = ()  # corrected separately from the verdicts on `arms`

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
        """Whether any arm's difference from the baseline has an interval."""
        differences = [arm.difference for arm in self.arms if arm.difference]
        return any(difference.low is not None for difference in differences)

    @property
    def has_part_intervals(self) -> bool:
        """Whether any part of any arm's difference has an interval."""
        for arm in self.arms:
            for part_name in PARTS:  # such as 'same_shape'
                comparison = getattr(arm.parts, part_name)
                if comparison is None:
                    continue
                has_interval = comparison.difference.low is not None
                if has_interval:
                    return True
        return False

    @property
    def has_parts(self) -> bool:
        """Whether any part of any arm's difference is known."""
        no_parts = Decomposition()
        return any(arm.parts != no_parts for arm in self.arms)

    @property
    def split(self) -> str:
        """The split of the differences: TEST, or VALIDATION if trials have no test loss."""
        splits = {arm.comparison.split for arm in self.arms if arm.comparison}
        return VALIDATION if VALIDATION in splits else TEST
