"""Codes of findings, each with its numbers; `qkattn.report` turns them into prose.

The members of `data` of a code are the arguments of its macro in report/templates/clauses.j2.
"""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from qkattn.stats.decision import Judgement
from qkattn.stats.inference import Difference
from qkattn.study.arm_key import ArmKey

# The splits of a trial's losses: those that decide, and those that settings are chosen by.
TEST = 'test'
VALIDATION = 'val'


class RemarkCode(enum.Enum):
    """What a remark says: a reason to withhold verdicts, or a fact that a report mentions."""

    # About the study: its seeds, its evaluation, the software of its runs, its ledger.
    LEARNING_RATE_NOT_TUNED = enum.auto()
    SHARED_SEEDS = enum.auto()
    EVALUATION = enum.auto()
    SOFTWARE_DIFFERS = enum.auto()
    UNCOMMITTED_CHANGES = enum.auto()
    OTHER_DECLARATION = enum.auto()
    # About an arm: its training, its matching, its seeds and settings.
    NOT_ANNEALED = enum.auto()
    MISSING_RESULTS = enum.auto()
    OVER_TOLERANCE = enum.auto()
    DIFFERS_FROM_BASELINE = enum.auto()
    OTHER_SEEDS = enum.auto()
    OTHER_SETTING = enum.auto()
    NOT_BRACKETED = enum.auto()
    UNBOUNDED_OPTIMUM = enum.auto()
    SCREENING_INCOMPLETE = enum.auto()
    # About an arm: its splits, when it was declared, and whether an earlier look saw another run.
    NO_TEST = enum.auto()
    FEW_DOCUMENTS = enum.auto()
    POST_HOC = enum.auto()
    ALTERED = enum.auto()
    # About a baseline or the study: whether its models are trained enough to compare.
    NO_YARDSTICK = enum.auto()
    BELOW_YARDSTICK = enum.auto()
    LITTLE_CONTEXT = enum.auto()
    LOW_BLEU = enum.auto()
    SOURCES_UNUSED = enum.auto()
    BIMODAL_SEEDS = enum.auto()
    OUTDATED_YARDSTICK = enum.auto()
    # About any other arm. These withhold nothing.
    ARM_BELOW_YARDSTICK = enum.auto()
    ARM_LOW_BLEU = enum.auto()


# An arm with one of these does not beat what its baseline has to beat.
SHORT_ARM = (RemarkCode.ARM_BELOW_YARDSTICK, RemarkCode.ARM_LOW_BLEU)


class ReasonCode(enum.Enum):
    """The reason of a verdict: the outcome of the tests, or missing results."""

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
    """A reason to withhold verdicts, or a fact that a report mentions.

    It is about the arm `arm`, or about the whole study if `arm` is None.
    """

    code: RemarkCode
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    blocks: bool = False  # withholds the verdict of the arm, or every verdict if `arm` is None
    arm: ArmKey | None = None
    every_arm: bool = False  # stands for the same remark about each arm


@dataclasses.dataclass(frozen=True)
class Reason:
    """One reason of a verdict."""

    code: ReasonCode
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Losses of an arm minus those of another, nats/token; below zero is better."""

    split: str  # the split of `differences`: TEST, or VALIDATION if a trial has no test loss
    differences: Mapping[int, float]  # by seed, ascending
    difference: Difference  # the mean of `differences`, with its tests
    validation: float  # the mean difference on the validation split
    # Pearson's correlation over seeds of the losses of both arms; None if an arm has no spread.
    correlation: float | None
    # How many documents the evaluation error is over; None without losses by document.
    num_documents: int | None
    # How many seeds in `differences` are from each earlier study, by its name.
    pooled: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Verdict(Judgement):
    """A decision on an arm against its baseline: the same size, corpus and length of training."""

    # The outcome of the tests. Without a verdict: what is missing and the remarks that block it.
    reasons: tuple[Reason | Remark, ...] = ()
    num_comparisons: int = 0  # the size of the family that the p values are corrected for
    look: int = 1  # how many studies have asked the question, this one included
