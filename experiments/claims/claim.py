"""Declared claims, rows of evidence, and decided claims."""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from qkattn.errors import ConfigError
from qkattn.stats.decision import Decision
from qkattn.stats.inference import Difference
from qkattn.verdict.judging import ABOVE_ZERO, BELOW_ZERO

# A one-sided finding on an undecided arm: its difference in loss lies above minus the margin.
NOT_BETTER = 'not better by the margin'
# A one-sided finding on an undecided arm: its difference in loss lies below the margin.
NOT_WORSE = 'not worse by the margin'
# The verdicts and findings that imply NOT_BETTER.
_AT_LEAST_AS_HIGH = (Decision.EQUIVALENT, *ABOVE_ZERO, NOT_BETTER)
# The verdicts and findings that imply NOT_WORSE.
_AT_MOST_AS_HIGH = (Decision.EQUIVALENT, *BELOW_ZERO, NOT_WORSE)


@dataclasses.dataclass(frozen=True)
class Relation:
    """A relation between two arms. Verdicts and findings that are not listed leave it open."""

    true: tuple[Decision | str, ...]  # the verdicts and one-sided findings that make it true
    false: tuple[Decision | str, ...]  # the verdicts and one-sided findings that make it false


RELATIONS = {
    'better': Relation(true=(Decision.BETTER,), false=_AT_LEAST_AS_HIGH),
    'worse': Relation(true=(Decision.WORSE,), false=_AT_MOST_AS_HIGH),
    'different': Relation(true=(Decision.BETTER, Decision.WORSE), false=(Decision.EQUIVALENT,)),
    'equivalent': Relation(true=(Decision.EQUIVALENT,), false=(Decision.BETTER, Decision.WORSE)),
    'not_better': Relation(true=_AT_LEAST_AS_HIGH, false=(Decision.BETTER,)),
    'not_worse': Relation(true=_AT_MOST_AS_HIGH, false=(Decision.WORSE,)),
}
# A further relation: the 95 % interval of a difference lies within the range that a source reports.
AS_REPORTED = 'as_reported'
UNIT = 'nats/token'


class ClaimVerdict(enum.StrEnum):
    """The verdict on a claim at one scale.

    A claim that training decides needs two settings to hold or fail. With results of one setting
    only, it is HOLDS_HERE or FAILS_HERE.
    """

    HOLDS = 'holds'
    HOLDS_HERE = 'holds in this setting'
    HOLDS_ONLY_IF = 'holds only if'
    FAILS = 'fails'
    FAILS_HERE = 'fails in this setting'
    UNDECIDED = 'undecided'


class Kind(enum.StrEnum):
    """The kind of value that a row holds."""

    EXACT = 'exact'  # an algebraic check
    SAME_SHAPE = 'removed'  # the arm at the same shape minus the baseline
    REINVESTED = 'reinvested'  # the arm at equal parameter count minus the arm at that shape
    MATCHED = 'matched'  # the arm at equal parameter count minus the baseline: the sum of both
    LONGER = 'longer'  # the same difference in a study that trains both longer
    MEASURED = 'measured'  # anything else


class Speaks(enum.StrEnum):
    """Whether a row supports its claim."""

    FOR = 'for'
    AGAINST = 'against'
    OPEN = 'open'
    BESIDE = 'beside'  # the row is shown, but takes no part in the decision


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of evidence: one comparison or measurement of a claim or an answer."""

    quantity: str  # the variant that is compared, or a phrase for what is measured
    kind: str  # a value of `Kind`
    context: Mapping[str, str]  # by factor: model, size, corpus, steps, destination
    value: float
    speaks: str  # a value of `Speaks`
    unit: str = ''  # '' for a pure number
    low: float | None = None  # the lower end of the 95 % interval
    high: float | None = None  # its upper end
    expected: float | None = None  # an exact check asks for |value - expected| <= tolerance
    tolerance: float | None = None
    relation: str | None = None  # what the claim expects of the arm, e.g. 'not_better'
    decision: str | None = None  # the arm's verdict, or a one-sided finding
    study: str | None = None  # the study it comes from, a directory beside claims.json
    tokens: int | None = None  # training tokens of each model of the arm
    loss: float | None = None  # of the arm, nats/token
    yardstick: str | None = None  # what the arm's baseline has to beat, e.g. '5-gram 1.457'
    is_short: bool = False  # whether the arm falls short of that yardstick
    length: str | None = None  # whether the difference is settled, or holds at this length

    def __post_init__(self) -> None:
        # A stored row holds text. These lines raise ValueError if the text is not valid.
        Kind(self.kind)
        Speaks(self.speaks)


def exact_row(
    quantity: str, value: float, expected: float, tolerance: float = 0.0, **context: Any
) -> Row:
    """Returns the row of an exact check.

    It is FOR the claim if |value - expected| <= tolerance, and otherwise AGAINST it. The `context`
    is stored as text: `head_size=8` becomes {'head_size': '8'}.
    """
    return Row(
        quantity,
        Kind.EXACT,
        context={name: str(setting) for name, setting in context.items()},
        value=float(value),
        speaks=Speaks.FOR if abs(value - expected) <= tolerance else Speaks.AGAINST,
        expected=float(expected),
        tolerance=float(tolerance),
    )


def difference_row(
    quantity: str,
    kind: str,
    context: Mapping[str, str],
    difference: Difference,
    *,
    speaks: Speaks = Speaks.BESIDE,
    **fields: Any,
) -> Row:
    """Returns the row of a difference in loss with its 95 % interval, in nats/token.

    It decides nothing unless `speaks` is given. `fields` are further fields of `Row`.
    """
    return Row(
        quantity,
        kind,
        context,
        difference.mean,
        speaks,
        unit=UNIT,
        low=difference.low,
        high=difference.high,
        **fields,
    )


@dataclasses.dataclass(frozen=True)
class Expectation:
    """What a claim expects of an arm of a study, at each size and on each corpus of the study.

    `Expectation('lm_dropped', 'qk/no_v', 'not_worse')` expects of the arm without W_V at equal
    parameter count: its loss is not higher than the baseline's loss by more than the margin.

    Raises ConfigError for an unknown `relation` or `at`, and for 'as_reported' without `reported`.
    """

    # The name of a file in configs/claims. If a repeat of the study has the arm, it decides.
    study: str
    # As written in the study. If the study has several destinations, all arms of the variant.
    variant: str
    relation: str  # to the baseline: a key of RELATIONS, or AS_REPORTED
    # MATCHED: at the baseline's parameter count. SAME_SHAPE: at the baseline's shape, with fewer
    # parameters.
    at: str = Kind.MATCHED
    versus: str | None = None  # the variant to compare with, instead of the baseline
    # Further factors of the context that distinguish it from other expectations of the claim.
    context: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reported: tuple[float, float] | None = None  # lowest and highest difference, nats/token
    label: str | None = None  # what is compared, in place of the variants
    scales: tuple[str, ...] = ()  # the scales at which the study has this variant; () for all

    def __post_init__(self) -> None:
        valid_values: dict[str, list[str]] = {
            'relation': [*RELATIONS, AS_REPORTED],
            'at': [Kind.MATCHED, Kind.SAME_SHAPE],
        }
        for field, valid in valid_values.items():
            value = getattr(self, field)
            if value not in valid:
                raise ConfigError(
                    f'{field}={value!r} of an expectation must be one of {", ".join(valid)}'
                )
        if self.relation == AS_REPORTED and self.reported is None:
            raise ConfigError(
                f'relation={AS_REPORTED!r} needs reported=(lowest, highest), in nats/token'
            )

    @property
    def variants(self) -> tuple[str, ...]:
        """The variant, and the variant that it is compared with instead of the baseline, if any."""
        if self.versus is None:
            return (self.variant,)
        return (self.variant, self.versus)


@dataclasses.dataclass(frozen=True)
class Measure:
    """Evidence other than verdicts on arms, computed from the logs of a study."""

    study: str  # the name of a file in configs/claims
    read: Callable[[Any], list[Row]]  # takes the findings of the study


# An exact check in float64. It should take seconds, because `experiments.verify` repeats it.
Check = Callable[[], Iterable[Row]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statement:
    """The statement of a claim."""

    name: str  # 'B2'; its letter is the group
    title: str  # the statement in a few words, for tables of all claims
    statement: str  # a sentence
    source: str  # who says so
    rule: str  # a sentence: in which case the claim holds
    reported: str | None = None  # the number that was reported, in words


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim(Statement):
    """A claim with its evidence: exact checks, expectations of arms, measures."""

    checks: tuple[Check, ...] = ()
    expectations: tuple[Expectation, ...] = ()
    measures: tuple[Measure, ...] = ()
    # Texts to show after 'holds only if'. Each key is the text of `verdicts.condition_of` that the
    # value replaces.
    conditions: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ConfigError for evidence that is no tuple, and for a claim without any."""
        for field in ('checks', 'expectations', 'measures'):
            evidence = getattr(self, field)
            if not isinstance(evidence, tuple):
                raise ConfigError(
                    f'{field} of claim {self.name} must be a tuple, not {evidence!r:.80}'
                )
        if not (self.checks or self.expectations or self.measures):
            raise ConfigError(
                f'claim {self.name} has no evidence; give it checks, expectations or measures'
            )

    @property
    def studies(self) -> tuple[str, ...]:
        """The names of the claim's studies, in the order of declaration, each once."""
        parts: tuple[Expectation | Measure, ...] = (*self.expectations, *self.measures)
        return tuple(dict.fromkeys(part.study for part in parts))

    def expected_at(self, scale: str) -> tuple[Expectation, ...]:
        """Returns the expectations whose arms are trained at a scale."""
        return tuple(
            expectation
            for expectation in self.expectations
            if not expectation.scales or scale in expectation.scales
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClaimResult(Statement):
    """A claim as decided at one scale."""

    scale: str
    verdict: str  # of `ClaimVerdict`
    rows: tuple[Row, ...] = ()
    condition: str | None = None  # a clause: where a claim that 'holds only if' is true
    needed: str | None = None  # what would decide an undecided claim: seeds, tokens, parameters
    missing: tuple[str, ...] = ()  # results that are missing, sentence by sentence
    studies: tuple[str, ...] = ()
    commit: str | None = None
    hardware: str | None = None
    seconds: float | None = None  # of training and checks together
    models: tuple[str, ...] = ()  # of each baseline: size, training, loss and yardstick

    def __post_init__(self) -> None:
        ClaimVerdict(self.verdict)

    @property
    def decisive(self) -> Row | None:
        """The row whose number stands for the claim: the first one that agrees with the verdict."""
        if self.verdict in (ClaimVerdict.FAILS, ClaimVerdict.FAILS_HERE):
            speaks = Speaks.AGAINST
        elif self.verdict == ClaimVerdict.UNDECIDED:
            speaks = Speaks.OPEN
        else:
            speaks = Speaks.FOR
        return next((row for row in self.rows if row.speaks == speaks), None)
