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
TEST, VALIDATION = 'test', 'val'


class RemarkCode(enum.Enum):
    """A hygiene finding: a rule of the protocol that results break, or what a report mentions."""

    # Of the study: its seeds, its evaluation, the software of its runs, its ledger.
    LEARNING_RATE_NOT_TUNED, SHARED_SEEDS, EVALUATION = range(3)
    SOFTWARE_DIFFERS, UNCOMMITTED_CHANGES, OTHER_DECLARATION = range(3, 6)
    # Of an arm: its training, its matching, its seeds and settings.
    NOT_ANNEALED, MISSING_RESULTS, OVER_TOLERANCE = range(6, 9)
    DIFFERS_FROM_BASELINE, OTHER_SEEDS, OTHER_SETTING = range(9, 12)
    NOT_BRACKETED, UNBOUNDED_OPTIMUM, SCREENING_INCOMPLETE = range(12, 15)
    # Of an arm: its splits, when it was declared, and whether a look has seen another run.
    NO_TEST, FEW_DOCUMENTS, POST_HOC, ALTERED = range(15, 19)
    # Of a baseline, or of the study: whether its models are trained enough to compare.
    NO_YARDSTICK, BELOW_YARDSTICK, LITTLE_CONTEXT = range(19, 22)
    LOW_BLEU, SOURCES_UNUSED, BIMODAL_SEEDS = range(22, 25)
    # The last two are of any other arm: they mark it, and withhold nothing.
    OUTDATED_YARDSTICK, ARM_BELOW_YARDSTICK, ARM_LOW_BLEU = range(25, 28)


# Of an arm whose models have learned less than what a baseline has to beat.
SHORT_ARM = (RemarkCode.ARM_BELOW_YARDSTICK, RemarkCode.ARM_LOW_BLEU)


class ReasonCode(enum.Enum):
    """The reason of a verdict: the outcome of the tests, or missing results."""

    DIVERGED, FEW_PAIRS, EQUIVALENT, DIFFERENT, NOT_SHOWN = range(5)
    BEYOND_MARGIN, NOT_BEYOND_MARGIN = range(5, 7)
    DIFFERENT_WITHIN_MARGIN, DIFFERENT_BUT_DIVERGED, SPLITS_DISAGREE = range(7, 10)
    NO_VERDICT_TRIALS, NO_BASELINE_TRIALS, BASELINE_BLOCKED, NO_DOCUMENTS = range(10, 14)
    SEEDS_APART = 14  # the tests without these seeds, which have to agree


@dataclasses.dataclass(frozen=True)
class Remark:
    """A hygiene finding about an arm, or about the study where `arm` is None."""

    code: RemarkCode
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    blocks: bool = False  # withholds the verdict of the arm, or of every arm where `arm` is None
    arm: ArmKey | None = None
    every_arm: bool = False  # whether it holds for each arm by itself


@dataclasses.dataclass(frozen=True)
class Reason:
    """One reason of a verdict."""

    code: ReasonCode
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Losses of an arm minus those of another, nats/token; below zero is better."""

    split: str  # of `differences`: TEST, or VALIDATION where a trial has no test loss
    differences: Mapping[int, float]  # by seed, ascending
    difference: Difference  # their mean, tested
    validation: float  # the mean difference on the validation split
    correlation: float | None  # Pearson's, over seeds, of the losses of both; None without spread
    num_documents: int | None  # behind the evaluation error; None without losses by document
    # The seeds of earlier studies among `differences`, by the name of the study.
    pooled: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Verdict(Judgement):
    """A decision on an arm against its baseline: the same size, corpus and length of training."""

    # The outcome of the tests, or what is missing and the remarks that block it.
    reasons: tuple[Reason | Remark, ...] = ()
    num_comparisons: int = 0  # the size of the family that the p values are corrected for
    look: int = 1  # how many studies have asked the question, this one included
