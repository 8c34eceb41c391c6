"""Findings as codes with numbers, which `qkattn.report` turns into prose.

The items of `data` are the arguments of the code's macro in report/templates/clauses.j2.
"""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from qkattn.stats.decision import Judgement
from qkattn.stats.inference import Difference
from qkattn.study.arm_key import ArmKey

# Verdicts use the test split. Settings are chosen on the validation split.
TEST = 'test'
VALIDATION = 'val'


class RemarkCode(enum.Enum):
    """A reason to withhold verdicts, or a fact for the report."""

    # About the whole study.
    LEARNING_RATE_NOT_TUNED = enum.auto()
    SHARED_SEEDS = enum.auto()
    EVALUATION = enum.auto()
    SOFTWARE_DIFFERS = enum.auto()
    UNCOMMITTED_CHANGES = enum.auto()
    UNKNOWN_CODE = enum.auto()
    OTHER_DECLARATION = enum.auto()
    # About how an arm was trained.
    NOT_ANNEALED = enum.auto()
    MISSING_RESULTS = enum.auto()
    OVER_TOLERANCE = enum.auto()
    DIFFERS_FROM_BASELINE = enum.auto()
    OTHER_SEEDS = enum.auto()
    OTHER_SETTING = enum.auto()
    NOT_BRACKETED = enum.auto()
    UNBOUNDED_OPTIMUM = enum.auto()
    SCREENING_INCOMPLETE = enum.auto()
    # About an arm's evaluation and its records.
    NO_TEST = enum.auto()
    FEW_DOCUMENTS = enum.auto()
    POST_HOC = enum.auto()
    ALTERED = enum.auto()
    # About models that are not trained well enough to compare.
    NO_YARDSTICK = enum.auto()
    BELOW_YARDSTICK = enum.auto()
    LITTLE_CONTEXT = enum.auto()
    LOW_BLEU = enum.auto()
    SOURCES_UNUSED = enum.auto()
    BIMODAL_SEEDS = enum.auto()
    OUTDATED_YARDSTICK = enum.auto()
    # Remarks that withhold nothing.
    ARM_BELOW_YARDSTICK = enum.auto()
    ARM_LOW_BLEU = enum.auto()


# The remarks on an arm that does not beat the yardstick of its baseline.
SHORT_ARM = (RemarkCode.ARM_BELOW_YARDSTICK, RemarkCode.ARM_LOW_BLEU)


class ReasonCode(enum.Enum):
    """A reason for a verdict: the outcome of the tests, or missing results."""

    DIVERGED = enum.auto()
    FEW_PAIRS = enum.auto()
    EQUIVALENT = enum.auto()
    DIFFERENT = enum.auto()
    NOT_SHOWN = enum.auto()
    BEYOND_MARGIN = enum.auto()
    NOT_BEYOND_MARGIN = enum.auto()
    DIFFERENT_WITHIN_MARGIN = enum.auto()
    DIFFERENT_BUT_DIVERGED = enum.auto()
    SPLITS_DISAGREE = enum.auto()
    NO_VERDICT_TRIALS = enum.auto()
    NO_BASELINE_TRIALS = enum.auto()
    BASELINE_BLOCKED = enum.auto()
    NO_DOCUMENTS = enum.auto()
    # Some seeds are outliers. The tests have to agree with and without them.
    SEEDS_APART = enum.auto()


@dataclasses.dataclass(frozen=True)
class Remark:
    """A reason to withhold verdicts, or a fact for the report."""

    code: RemarkCode
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    blocks: bool = False  # withholds the verdict on `arm`, or every verdict if `arm` is None
    arm: ArmKey | None = None  # None for a remark about the study or about every arm
    every_arm: bool = False  # whether the remark is about every arm


@dataclasses.dataclass(frozen=True)
class Reason:
    """A reason for a verdict, with its numbers."""

    code: ReasonCode
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The loss of an arm minus the loss of another arm, nats/token."""

    split: str  # TEST, or VALIDATION if a trial has no test loss
    differences: Mapping[int, float]  # by seed, ascending
    difference: Difference  # the mean over seeds, with its tests
    validation: float  # the mean difference on the validation split
    # Pearson's correlation over seeds between the losses of the two arms, if it is defined.
    correlation: float | None
    num_documents: int | None  # of the split; None if losses by document are missing
    # The number of seeds pooled from each earlier study, by study name.
    pooled: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Verdict(Judgement):
    """The decision on an arm against its baseline, with reasons."""

    # For 'no verdict', what is missing and the remarks that withhold it.
    reasons: tuple[Reason | Remark, ...] = ()
    num_comparisons: int = 0  # for which the p values are corrected
    look: int = 1  # the number of studies that have made this comparison, with this one
