"""Codes of findings, each with its numbers; `qkattn.report` turns them into prose."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from qkattn.stats.inference import Decision

# Variant and size of an arm.
Place = tuple[str, str]


class RemarkCode(enum.Enum):
    """A hygiene finding; the members of `Remark.data` are in brackets."""

    LEARNING_RATE_NOT_TUNED = enum.auto()  # [learning_rates]: the only ones of the grid
    SHARED_SEEDS = enum.auto()  # [seeds] used for both screening and verdict
    STOPPED_EARLY = enum.auto()  # [stopped] of [trials] ended at [step] of [num_steps]
    NOT_ANNEALED = enum.auto()  # [schedule], [final_fraction] (None: no decay) above [limit]
    MISSING_RESULTS = enum.auto()  # [readable] of [planned] trials of [run] at [stage]
    OVER_TOLERANCE = enum.auto()  # [matched] quantity: [residual] exceeds [tolerance]
    OTHER_PARAMETER_COUNT = enum.auto()  # [parameters] in results; the plan: [residual] of [target]
    OTHER_SEEDS = enum.auto()  # [stage] ran on [actual], the study declares [declared]
    NOT_BRACKETED = enum.auto()  # [knob]: the [best] of [low] to [high]
    SCREENING_INCOMPLETE = enum.auto()  # [knob] lacks results at [values]
    OTHER_SETTING = enum.auto()  # [knob]: verdict at [actual], screening at [expected]; [tuned]
    SEVERAL_SETTINGS = enum.auto()  # among the verdict trials of one arm
    FEW_SEEDS = enum.auto()  # [counts] of finished seeds, fewer than [enough]; [arms], None: all
    DIVERGED = enum.auto()  # [arms]: (arm, ((stage or None, diverged, trials), ...)), ...
    EVALUATION = enum.auto()  # [tokens], [rows], [standard_error] (None: not recorded)
    # [name] at [size] (None: the only one), [values]: {value: variants}; [harmless]: not to results
    DIFFERS = enum.auto()
    DIFFERS_FROM_BASELINE = enum.auto()  # [name]: [value], the baseline's [baseline]
    SOFTWARE_DIFFERS = enum.auto()  # [name]: [values]: {value: ((variant, size, stage), ...)}
    UNCOMMITTED_CHANGES = enum.auto()


class ReasonCode(enum.Enum):
    """The reason of a verdict; the members of `Reason.data` are in brackets."""

    # Statistical tests.
    DIVERGED = enum.auto()  # [arm], [baseline]: numbers of diverged trials
    FEW_PAIRS = enum.auto()  # [n] seeds finished in both, [needed] are needed
    EQUIVALENT = enum.auto()  # [p] of equivalence
    DIFFERENT = enum.auto()  # [p]
    DIFFERENT_WITHIN_MARGIN = enum.auto()  # [side], [margin] and [p]: equivalent all the same
    DIFFERENT_BUT_DIVERGED = enum.auto()  # [side] on the seeds that are left, [p]
    NOT_SHOWN = enum.auto()  # [p], [p_equivalence]; [detectable] difference
    # Missing results.
    NO_VERDICT_TRIALS = enum.auto()
    NO_BASELINE_TRIALS = enum.auto()  # [baseline]
    BASELINE_BLOCKED = enum.auto()  # [baseline], [remarks] that block it
    # Caveats: uncertainty of the tuning.
    NOT_BRACKETED = enum.auto()  # [whose] ('arm' or 'baseline') [knobs]
    BEYOND_GRID = enum.auto()  # would be [decision], but a better value may lie beyond the grid
    IMPRECISE_OPTIMUM = enum.auto()  # [whose] [knob] may be off by [nats], more than the difference


class NotScaled(enum.Enum):
    """Why the mean loss of an arm is not used in a scaling fit."""

    NO_LOSSES = enum.auto()
    DIVERGED = enum.auto()
    BLOCKED = enum.auto()
    NOT_BRACKETED = enum.auto()


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

    @classmethod
    def of(
        cls, code: RemarkCode, arm: Place | None = None, blocks: bool = False, /, **data: Any
    ) -> 'Remark':
        return cls(code, data, blocks, arm)


@dataclasses.dataclass(frozen=True)
class Reason:
    """One reason of a verdict, or one caveat."""

    code: ReasonCode
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, code: ReasonCode, /, **data: Any) -> 'Reason':
        return cls(code, data)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A decision about one arm against the baseline of its size.

    Attributes:
      decision: better, worse, equivalent, undecided or no verdict.
      reasons: the outcome of the tests; without a verdict, what is missing and the remarks that
        block it.
      caveats: uncertainty that remains from the tuning of the arm or of the baseline.
      p_holm, p_equivalence_holm: p values after Holm's correction; None where nothing was tested.
      detectable: |difference| (nats/token) found with probability 0.8 after that correction.
      num_comparisons: the size of the family that Holm's correction is for.
    """

    decision: Decision
    reasons: tuple[Reason | Remark, ...] = ()
    caveats: tuple[Reason, ...] = ()
    p_holm: float | None = None
    p_equivalence_holm: float | None = None
    detectable: float | None = None
    num_comparisons: int = 0
