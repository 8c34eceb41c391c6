"""A claim: its statement, where it comes from, and what decides it."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from qkattn.claims.decided import Kind, Row, Speaks
from qkattn.claims.rules import AS_REPORTED, RELATIONS
from qkattn.errors import ConfigError

KNOWN = (*RELATIONS, AS_REPORTED)  # relations of an arm to another

Check = Callable[[], list[Row]]  # exact, decided in seconds; verification runs it again
Recorder = Callable[[Path, str], None]  # writes a measure's files: (directory of its study, scale)


@dataclasses.dataclass(frozen=True)
class Expectation:
    """What a claim expects of an arm of a study, at each size, corpus and length of training."""

    study: str  # the name of a file in configs/claims
    variant: str  # as written in the study; with several destinations, the arms of all
    relation: str  # to the baseline: of `qkattn.claims.rules.RELATIONS`, or 'as_reported'
    # 'matched': at the baseline's parameter count; 'removed': at its shape, which has fewer.
    at: str = 'matched'
    versus: str | None = None  # another variant, in place of the baseline
    # What tells it apart from other expectations of the claim, factor by factor.
    context: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reported: tuple[float, float] | None = None  # lowest and highest difference, nats/token
    x: float | None = None  # the place on `curve`, a factor of the context
    x_label: str | None = None
    curve: str | None = None  # what is compared, in place of the variant; points share it
    scales: tuple[str, ...] = ()  # at which the study has this variant; all if empty

    def __post_init__(self) -> None:
        for field, known in (('relation', KNOWN), ('at', ('matched', 'removed'))):
            if (value := getattr(self, field)) not in known:
                raise ConfigError(
                    f'{field}={value!r} of an expectation must be one of {", ".join(known)}'
                )


@dataclasses.dataclass(frozen=True)
class Measure:
    """Rows that are no differences between arms: curves, sweeps, drift, times.

    `record` is called once, after training, while the study's checkpoints are there; it writes into
    directory/'measures', which is exported. Its module names it: one a module.
    """

    study: str  # of configs/claims; without a config there, a directory of the measure's own
    read: Callable[[Path], list[Row]]  # the rows of an exported directory; does not train
    record: Recorder | None = None


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim and what decides it: exact checks, expectations of arms, measures."""

    name: str  # 'B2'
    title: str  # the statement in a few words, for tables of all claims
    statement: str  # a sentence
    source: str  # who says so
    rule: str  # a sentence: in which case the claim holds
    reported: str | None = None  # the number that was reported, in words
    checks: tuple[Check, ...] = ()
    expectations: tuple[Expectation, ...] = ()
    measures: tuple[Measure, ...] = ()
    # Clauses after 'holds only if', in place of the contexts that `rules.condition` names.
    conditions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    premises: tuple[Check, ...] = ()  # what its studies presume: can speak against it only

    @property
    def studies(self) -> tuple[str, ...]:
        """The names of its studies, in the order of its declaration."""
        expected = (expectation.study for expectation in self.expectations)
        measured = (measure.study for measure in self.measures)
        return tuple(dict.fromkeys((*expected, *measured)))

    def expected_at(self, scale: str) -> tuple[Expectation, ...]:
        """The expectations that a scale has arms for."""
        return tuple(e for e in self.expectations if not e.scales or scale in e.scales)


def exact(
    what: str,
    value: float,
    expected: float,
    tolerance: float = 0.0,
    unit: str = '',
    **context: object,
) -> Row:
    """The row of an exact check, for the claim if |value - expected| <= tolerance."""
    return Row(
        what=what,
        kind=Kind.EXACT,
        context={name: str(value) for name, value in context.items()},
        value=float(value),
        speaks=Speaks.FOR if abs(value - expected) <= tolerance else Speaks.AGAINST,
        unit=unit,
        expected=float(expected),
        tolerance=float(tolerance),
    )
