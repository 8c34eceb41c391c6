"""Codes of findings, each with its numbers; `qkattn.report` turns them into prose.

The members of `data` of a code are the arguments of its macro in report/templates/clauses.j2.
"""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from qkattn.stats.decision import Decision

# Variant and size of an arm.
Place = tuple[str, str]


class RemarkCode(enum.Enum):
    """A hygiene finding."""

    # Of the study: its seeds, its evaluation, the software of its runs.
    LEARNING_RATE_NOT_TUNED, SHARED_SEEDS, FEW_SEEDS, DIVERGED, EVALUATION = range(5)
    DIFFERS, SOFTWARE_DIFFERS, UNCOMMITTED_CHANGES = range(5, 8)
    # Of an arm: its training, its matching, its seeds and settings.
    STOPPED_EARLY, NOT_ANNEALED, MISSING_RESULTS = range(8, 11)
    OVER_TOLERANCE, OTHER_PARAMETER_COUNT, DIFFERS_FROM_BASELINE = range(11, 14)
    OTHER_SEEDS, OTHER_SETTING, SEVERAL_SETTINGS = range(14, 17)
    NOT_BRACKETED, SCREENING_INCOMPLETE = range(17, 19)


class ReasonCode(enum.Enum):
    """The reason of a verdict."""

    # The outcome of the tests.
    DIVERGED, FEW_PAIRS, EQUIVALENT, DIFFERENT, NOT_SHOWN = range(5)
    DIFFERENT_WITHIN_MARGIN, DIFFERENT_BUT_DIVERGED = range(5, 7)
    # Missing results.
    NO_VERDICT_TRIALS, NO_BASELINE_TRIALS, BASELINE_BLOCKED = range(7, 10)
    # Caveats: uncertainty of the tuning.
    NOT_BRACKETED, BEYOND_GRID, IMPRECISE_OPTIMUM = range(10, 13)


class NotScaled(enum.Enum):
    """Why the mean loss of an arm is not used in a scaling fit."""

    NO_LOSSES, DIVERGED, BLOCKED, NOT_BRACKETED = range(4)


@dataclasses.dataclass(frozen=True)
class Remark:
    """A hygiene finding about an arm (variant, size), or about the study where `arm` is None.

    A remark that `blocks` withholds the verdict of the arm, or of every arm where `arm` is None.
    With `every_arm` the finding holds for each arm by itself.
    """

    code: RemarkCode
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    blocks: bool = False
    arm: Place | None = None
    every_arm: bool = False


@dataclasses.dataclass(frozen=True)
class Reason:
    """One reason of a verdict, or one caveat."""

    code: ReasonCode
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A decision about one arm against the baseline of its size.

    Attributes:
      decision: better, worse, equivalent, undecided or no verdict.
      reasons: the outcome of the tests; without a verdict, what is missing and the remarks that
        block it.
      caveats: uncertainty that remains from the tuning of the arm or of the baseline.
      p_holm, p_margin_holm, p_equivalence_holm: corrected p values; None where nothing was tested.
      detectable: |difference| (nats/token) found with probability 0.8 after that correction.
      num_comparisons: the size of the family that Holm's correction is for.
    """

    decision: Decision
    reasons: tuple[Reason | Remark, ...] = ()
    caveats: tuple[Reason, ...] = ()
    p_holm: float | None = None
    p_margin_holm: float | None = None
    p_equivalence_holm: float | None = None
    detectable: float | None = None
    num_comparisons: int = 0
