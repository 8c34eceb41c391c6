"""Declared claims, rows of evidence, and decided claims."""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from qkattn.errors import ConfigError
from qkattn.stats.decision import Decision
from qkattn.stats.inference import Difference
from qkattn.verdict.judging import ABOVE_ZERO, BELOW_ZERO

# One-sided findings on an undecided arm. Its difference is its loss minus the baseline's.
NOT_BETTER = 'not better by the margin'  # the difference is above -margin
NOT_WORSE = 'not worse by the margin'  # the difference is below +margin
# The decisions and findings that imply NOT_BETTER.
_IMPLY_NOT_BETTER = (Decision.EQUIVALENT, *ABOVE_ZERO, NOT_BETTER)
# The decisions and findings that imply NOT_WORSE.
_IMPLY_NOT_WORSE = (Decision.EQUIVALENT, *BELOW_ZERO, NOT_WORSE)


@dataclasses.dataclass(frozen=True)
class Relation:
    """When a relation between two arms is true or false. All other decisions leave it open."""

    true: tuple[Decision | str, ...]  # decisions and one-sided findings
    false: tuple[Decision | str, ...]  # decisions and one-sided findings


RELATIONS = {
    'better': Relation(true=(Decision.BETTER,), false=_IMPLY_NOT_BETTER),
    'worse': Relation(true=(Decision.WORSE,), false=_IMPLY_NOT_WORSE),
    'different': Relation(true=(Decision.BETTER, Decision.WORSE), false=(Decision.EQUIVALENT,)),
    'equivalent': Relation(true=(Decision.EQUIVALENT,), false=(Decision.BETTER, Decision.WORSE)),
    'not_better': Relation(true=_IMPLY_NOT_BETTER, false=(Decision.BETTER,)),
    'not_worse': Relation(true=_IMPLY_NOT_WORSE, false=(Decision.WORSE,)),
}
# A further relation: the difference's 95 % interval lies within the range that a source reports.
AS_REPORTED = 'as_reported'
UNIT = 'nats/token'


class ClaimVerdict(enum.StrEnum):
    """The verdict on a claim at one scale.

    A claim about trained models holds or fails if it was tested in two settings, such as two model
    sizes. After one setting, the verdict is HOLDS_HERE or FAILS_HERE.
    """

    HOLDS = 'holds'
    HOLDS_HERE = 'holds in this setting'
    HOLDS_ONLY_IF = 'holds only if'
    FAILS = 'fails'
    FAILS_HERE = 'fails in this setting'
    UNDECIDED = 'undecided'


# What a verdict in one setting would be in several. `Claim.meanings` has one sentence for both.
_IN_SEVERAL_SETTINGS = {
    ClaimVerdict.HOLDS_HERE: ClaimVerdict.HOLDS,
    ClaimVerdict.FAILS_HERE: ClaimVerdict.FAILS,
}


class Kind(enum.StrEnum):
    """The kind of value that a row holds. MATCHED = SAME_SHAPE + REINVESTED."""

    EXACT = 'exact'  # an algebraic check
    SAME_SHAPE = 'removed'  # arm at the baseline's shape - baseline
    REINVESTED = 'reinvested'  # arm at equal parameter count - arm at the baseline's shape
    MATCHED = 'matched'  # arm at equal parameter count - baseline
    LONGER = 'longer'  # like MATCHED, after longer training of both
    MEASURED = 'measured'  # anything else


class Speaks(enum.StrEnum):
    """Whether a row supports its claim."""

    FOR = 'for'
    AGAINST = 'against'
    OPEN = 'open'
    BESIDE = 'beside'  # shown only, not counted


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of evidence: one comparison or measurement of a claim or an answer."""

    quantity: str  # the compared variant, or a phrase for what is measured
    kind: str  # a value of `Kind`
    context: Mapping[str, str]  # by factor: model, size, corpus, steps, destination
    value: float
    speaks: str  # a value of `Speaks`
    unit: str = ''  # '' for a pure number
    low: float | None = None  # lower end of the 95 % interval
    high: float | None = None  # upper end of the 95 % interval
    expected: float | None = None  # an exact check passes if |value - expected| <= tolerance
    tolerance: float | None = None
    relation: str | None = None  # what the claim expects of the arm, e.g. 'not_better'
    decision: str | None = None  # the arm's verdict, or a one-sided finding
    study: str | None = None  # a directory beside claims.json
    tokens: int | None = None  # training tokens per model
    loss: float | None = None  # the arm's loss, nats/token
    yardstick: str | None = None  # what the arm's baseline has to beat, e.g. '5-gram 1.457'
    is_short: bool = False  # whether the arm falls short of the yardstick
    length: str | None = None  # 'settled' if longer training confirms it, else 'at this length ...'

    def __post_init__(self) -> None:
        # Both raise ValueError for an unknown value.
        Kind(self.kind)
        Speaks(self.speaks)


def exact_row(
    quantity: str, value: float, expected: float, tolerance: float = 0.0, **context: Any
) -> Row:
    """Returns the row of an exact check: FOR if |value - expected| <= tolerance, else AGAINST.

    The `context` is stored as text: `head_size=8` becomes {'head_size': '8'}.
    """
    agrees = abs(value - expected) <= tolerance
    return Row(
        quantity,
        Kind.EXACT,
        context={name: str(setting) for name, setting in context.items()},
        value=float(value),
        speaks=Speaks.FOR if agrees else Speaks.AGAINST,
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

    By default, the row is only shown (BESIDE). `fields` are further fields of `Row`.
    """
    return Row(
        quantity,
        kind,
        context,
        value=difference.mean,
        speaks=speaks,
        unit=UNIT,
        low=difference.low,
        high=difference.high,
        **fields,
    )


@dataclasses.dataclass(frozen=True)
class Expectation:
    """What a claim expects of a variant, at each size and on each corpus of a study.

    Example:
      `Expectation('lm_dropped', 'qk/no_v', 'not_worse')`: without W_V and at equal parameter count,
      the loss exceeds the baseline's by at most the margin.

    Raises:
        ConfigError: `relation` or `at` is unknown, or 'as_reported' lacks `reported`.
    """

    study: str  # the name of a file in configs/claims
    variant: str  # 'qk/no_v [d_ff]', or without '[d_ff]' for all destinations
    relation: str  # to the baseline: a key of RELATIONS, or AS_REPORTED
    at: str = Kind.MATCHED  # MATCHED: equal parameter count. SAME_SHAPE: the baseline's shape.
    versus: str | None = None  # a variant that replaces the baseline
    # Added to the context of the rows, to tell expectations of one claim apart.
    context: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reported: tuple[float, float] | None = None  # lowest and highest difference, nats/token
    label: str | None = None  # replaces the variants in the `quantity` of the rows
    scales: tuple[str, ...] = ()  # the scales whose study has this variant; () for all

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
        """The variant, and `versus` if given."""
        if self.versus is None:
            return (self.variant,)
        return (self.variant, self.versus)


@dataclasses.dataclass(frozen=True)
class Measure:
    """Evidence that is computed from the logs of a study rather than from verdicts on arms."""

    study: str  # the name of a file in configs/claims
    read: Callable[[Any], list[Row]]  # takes the study's findings


# An exact check in float64, which should take seconds.
Check = Callable[[], Iterable[Row]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statement:
    """The statement of a claim."""

    name: str  # 'B2' is in group B
    title: str  # the statement in a few words
    statement: str  # a sentence
    source: str  # who says so
    rule: str  # a sentence that says when the claim holds
    reported: str | None = None  # the reported number, in words


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim(Statement):
    """A claim with its evidence: exact checks, expectations of arms, measures."""

    checks: tuple[Check, ...] = ()
    expectations: tuple[Expectation, ...] = ()
    measures: tuple[Measure, ...] = ()
    # Replacements for the text after 'holds only if', by the text of `verdicts.condition_of`.
    conditions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # What each verdict means for the choice of an architecture, a sentence without its full stop.
    # A key of `conditions` takes the place of 'holds only if' in these contexts.
    meanings: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks the evidence and the meanings.

        Raises:
            ConfigError: The claim has no evidence, evidence that is not a tuple, or a meaning of
                something that is neither a verdict nor in `conditions`.
        """
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
        # The meaning of 'holds' is also that of 'holds in this setting', which is thus no key.
        verdicts = [str(verdict) for verdict in ClaimVerdict if verdict not in _IN_SEVERAL_SETTINGS]
        for key, meaning in self.meanings.items():
            if key not in verdicts and key not in self.conditions:
                raise ConfigError(
                    f'meanings of claim {self.name} has the key {key!r}, which must be one of '
                    f'{", ".join(verdicts)}, or a key of its conditions'
                )
            if not isinstance(meaning, str):
                raise ConfigError(
                    f'meanings[{key!r}] of claim {self.name} must be a text, not {meaning!r:.80}'
                )

    @property
    def studies(self) -> tuple[str, ...]:
        """The names of the claim's studies, each once, in the order of declaration."""
        evidence: tuple[Expectation | Measure, ...] = (*self.expectations, *self.measures)
        names = dict.fromkeys(item.study for item in evidence)
        return tuple(names)

    def meaning_of(self, verdict: ClaimVerdict, contexts: str | None = None) -> str | None:
        """Returns what a verdict means, if declared.

        Args:
            verdict: The verdict on the claim.
            contexts: The contexts in which it holds, as `verdicts.condition_of` describes them.
        """
        if contexts is not None and contexts in self.meanings:
            return self.meanings[contexts]
        # 'holds in this setting' means the same as 'holds'.
        verdict = _IN_SEVERAL_SETTINGS.get(verdict, verdict)
        return self.meanings.get(verdict)

    def expected_at(self, scale: str) -> tuple[Expectation, ...]:
        """Returns the expectations whose arms are trained at a scale."""
        expected = []
        for expectation in self.expectations:
            is_at_all_scales = not expectation.scales
            if is_at_all_scales or scale in expectation.scales:
                expected.append(expectation)
        return tuple(expected)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClaimResult(Statement):
    """A claim as decided at one scale."""

    scale: str
    verdict: str  # a value of `ClaimVerdict`
    rows: tuple[Row, ...] = ()
    condition: str | None = None  # what follows 'holds only if', such as 'size: d_model=64'
    meaning: str | None = None  # what the verdict means for the choice of an architecture
    needed: str | None = None  # what would decide an undecided claim, e.g. more seeds
    missing: tuple[str, ...] = ()  # a sentence for each missing result
    studies: tuple[str, ...] = ()
    commit: str | None = None
    hardware: str | None = None
    seconds: float | None = None  # training and checks together
    models: tuple[str, ...] = ()  # a text for each baseline: size, training, loss, yardstick

    def __post_init__(self) -> None:
        ClaimVerdict(self.verdict)  # raises ValueError for an unknown verdict

    @property
    def decisive(self) -> Row | None:
        """The first row that agrees with the verdict, if any. Its number stands for the claim."""
        if self.verdict in (ClaimVerdict.FAILS, ClaimVerdict.FAILS_HERE):
            agreeing = Speaks.AGAINST
        elif self.verdict == ClaimVerdict.UNDECIDED:
            agreeing = Speaks.OPEN
        else:
            agreeing = Speaks.FOR
        for row in self.rows:
            if row.speaks == agreeing:
                return row
        return None
