"""A claim as declared, its rows of evidence, and the claim as decided."""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from qkattn.errors import ConfigError
from qkattn.stats.decision import Decision
from qkattn.stats.inference import Difference
from qkattn.verdict.judging import ABOVE_ZERO, BELOW_ZERO

# One-sided findings on an undecided arm.
NOT_BETTER = 'not better by the margin'
NOT_WORSE = 'not worse by the margin'
_AT_LEAST_AS_HIGH = (Decision.EQUIVALENT, *ABOVE_ZERO, NOT_BETTER)
_AT_MOST_AS_HIGH = (Decision.EQUIVALENT, *BELOW_ZERO, NOT_WORSE)
# By relation of an arm to another, the verdicts and one-sided findings that make it true and those
# that make it false; all others leave it open.
RELATIONS: dict[str, tuple[tuple[Decision | str, ...], tuple[Decision | str, ...]]] = {
    'better': ((Decision.BETTER,), _AT_LEAST_AS_HIGH),
    'worse': ((Decision.WORSE,), _AT_MOST_AS_HIGH),
    'different': ((Decision.BETTER, Decision.WORSE), (Decision.EQUIVALENT,)),
    'equivalent': ((Decision.EQUIVALENT,), (Decision.BETTER, Decision.WORSE)),
    'not_better': (_AT_LEAST_AS_HIGH, (Decision.BETTER,)),
    'not_worse': (_AT_MOST_AS_HIGH, (Decision.WORSE,)),
}
UNIT = 'nats/token'
AS_REPORTED = 'as_reported'  # the interval lies within what is reported


class ClaimVerdict(enum.StrEnum):
    """The verdict on a claim at its scale; HERE: in one setting where two are needed."""

    HOLDS = 'holds'
    HOLDS_HERE = 'holds in this setting'
    HOLDS_ONLY_IF = 'holds only if'
    FAILS = 'fails'
    FAILS_HERE = 'fails in this setting'
    UNDECIDED = 'undecided'


class Kind(enum.StrEnum):
    """The kind of value that a row holds."""

    EXACT = 'exact'  # an algebraic check
    SAME_SHAPE = 'removed'  # an arm at the same shape minus the baseline
    REINVESTED = 'reinvested'  # the matched arm minus that
    MATCHED = 'matched'  # the matched arm minus the baseline: the sum of both
    MEASURED = 'measured'  # anything else


class Speaks(enum.StrEnum):
    """Whether a row supports its claim; a row BESIDE others decides nothing."""

    FOR = 'for'
    AGAINST = 'against'
    OPEN = 'open'
    BESIDE = 'beside'


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison or measurement."""

    quantity: str  # what is compared, as the variant, or a phrase for what is measured
    kind: str  # of `Kind`
    context: Mapping[str, str]  # by name: model, size, corpus, steps, destination
    value: float
    speaks: str  # of `Speaks`
    unit: str = ''  # '' for a pure number
    low: float | None = None  # with `high`, the 95 % interval
    high: float | None = None
    expected: float | None = None  # an exact check asks for |value - expected| <= tolerance
    tolerance: float | None = None
    relation: str | None = None  # what the claim expects of the arm, 'not_better'
    decision: str | None = None  # that of the arm's verdict in its study
    study: str | None = None  # the one it comes from, a directory beside claims.json
    tokens: int | None = None  # that each model of the arm is trained on
    loss: float | None = None  # of the arm, nats/token
    yardstick: str | None = None  # what its baseline has to beat, '5-gram 1.457'
    is_short: bool = False  # whether the arm falls short of that
    length: str | None = None  # whether the difference is settled, or holds at this length

    def __post_init__(self) -> None:
        Kind(self.kind), Speaks(self.speaks)


def exact(
    quantity: str, value: float, expected: float, tolerance: float = 0.0, **context: Any
) -> Row:
    """The row of an exact check, for the claim if |value - expected| <= tolerance."""
    speaks = Speaks.FOR if abs(value - expected) <= tolerance else Speaks.AGAINST
    texts = {name: str(value) for name, value in context.items()}
    about: dict[str, Any] = {'expected': float(expected), 'tolerance': float(tolerance)}
    return Row(quantity, Kind.EXACT, texts, float(value), speaks, **about)


def difference_row(
    quantity: str, kind: str, context: Mapping[str, str], difference: Difference, **fields: Any
) -> Row:
    """The row of a difference with its interval; it decides nothing unless `speaks` is given."""
    interval: dict[str, Any] = {'low': difference.low, 'high': difference.high}
    given = {'speaks': Speaks.BESIDE, 'unit': UNIT} | interval | fields
    return Row(quantity, kind, context, difference.mean, **given)


@dataclasses.dataclass(frozen=True)
class Expectation:
    """What a claim expects of an arm of a study, at each size, corpus and length of training."""

    # The name of a file in configs/claims. Its repeats decide, where they have the arm, too.
    study: str
    variant: str  # as written in the study; with several destinations, the arms of all
    relation: str  # to the baseline: of RELATIONS, or AS_REPORTED
    # MATCHED: at the baseline's parameter count; SAME_SHAPE: at its shape, with fewer parameters.
    at: str = Kind.MATCHED
    versus: str | None = None  # another variant, in place of the baseline
    # What tells it apart from other expectations of the claim, factor by factor.
    context: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reported: tuple[float, float] | None = None  # lowest and highest difference, nats/token
    label: str | None = None  # what is compared, in place of the variants
    scales: tuple[str, ...] = ()  # at which the study has this variant; all if empty

    def __post_init__(self) -> None:
        known = {'relation': (*RELATIONS, AS_REPORTED), 'at': (Kind.MATCHED, Kind.SAME_SHAPE)}
        for field, values in known.items():
            if (value := getattr(self, field)) not in values:
                valid = ', '.join(values)
                raise ConfigError(f'{field}={value!r} of an expectation must be one of {valid}')
        if self.relation == AS_REPORTED and self.reported is None:
            raise ConfigError(
                f'relation={AS_REPORTED!r} needs reported=(lowest, highest), in nats/token'
            )

    @property
    def variants(self) -> tuple[str, ...]:
        """Its variant, and the other one of a pair."""
        return tuple(filter(None, (self.variant, self.versus)))


@dataclasses.dataclass(frozen=True)
class Measure:
    """Rows that are not differences between arms, read from the findings of a study."""

    study: str
    read: Callable[[Any], list[Row]]


Check = Callable[[], Iterable[Row]]  # exact, in float64, for seconds; verification runs it again


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
    # Clauses after 'holds only if', in place of the contexts that `deciding.condition_of` names.
    conditions: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def studies(self) -> tuple[str, ...]:
        """Names of its studies, in declaration order."""
        parts: tuple[Expectation | Measure, ...] = (*self.expectations, *self.measures)
        return tuple(dict.fromkeys(part.study for part in parts))

    def expected_at(self, scale: str) -> tuple[Expectation, ...]:
        """The expectations that a scale has arms for."""
        return tuple(e for e in self.expectations if not e.scales or scale in e.scales)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClaimResult(Statement):
    """A claim as decided at one scale."""

    scale: str
    verdict: str  # of `ClaimVerdict`
    rows: tuple[Row, ...] = ()
    condition: str | None = None  # of a claim that holds only if it is met, a clause
    needed: str | None = None  # seeds, tokens and parameters that would decide an undecided claim
    missing: tuple[str, ...] = ()  # what is missing and how to get it, sentence by sentence
    studies: tuple[str, ...] = ()
    commit: str | None = None
    hardware: str | None = None
    seconds: float | None = None  # of training and checks together
    models: tuple[str, ...] = ()  # size, training and loss of baselines beside their yardsticks

    def __post_init__(self) -> None:
        ClaimVerdict(self.verdict)

    @property
    def decisive(self) -> Row | None:
        """The first row that speaks as the verdict does, whose number stands for the claim."""
        speaks = Speaks.OPEN if self.verdict == ClaimVerdict.UNDECIDED else Speaks.FOR
        if self.verdict in (ClaimVerdict.FAILS, ClaimVerdict.FAILS_HERE):
            speaks = Speaks.AGAINST
        return next((row for row in self.rows if row.speaks == speaks), None)
