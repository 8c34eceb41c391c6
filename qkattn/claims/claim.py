"""A claim: its statement, where it comes from, and what decides it."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from qkattn.claims.decided import Kind, Row, Speaks

Check = Callable[[], list[Row]]
"""An exact check, decided in seconds; verification runs it again."""

Recorder = Callable[[Path, str], None]
"""Writes the files of a measure, given the directory of its study and the scale."""


@dataclasses.dataclass(frozen=True)
class Expectation:
    """What a claim expects of an arm of a study, at each size, corpus and length of training.

    Attributes:
      study: the name of a file in configs/claims.
      variant: as written in the study; where the study has several destinations, the arms of all.
      relation: of the arm to the baseline, one of `qkattn.claims.rules.RELATIONS`.
      at: 'matched' for the arm at the baseline's parameter count; 'removed' for its control at the
        baseline's shape, which has fewer parameters.
      versus: another variant that takes the place of the baseline.
      context: what tells this expectation apart from others of the claim, factor by factor.
      reported: the lowest and the highest difference that was reported, nats/token.
      x, x_label: the place on a curve, whose points are the expectations of the same `curve`; also
        a factor of the context.
      curve: what is compared, in place of the variant.
      scales: at which the study has this variant; all if empty.
    """

    study: str
    variant: str
    relation: str
    at: str = 'matched'
    versus: str | None = None
    context: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reported: tuple[float, float] | None = None
    x: float | None = None
    x_label: str | None = None
    curve: str | None = None
    scales: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Measure:
    """Rows that are no differences between arms: curves, sweeps, drift, times.

    Attributes:
      study: a study of configs/claims; a name without such a config is a directory of the measure's
        own.
      read: the rows of an exported directory; does not train.
      record: called once with (directory, scale) after the study is trained, while its checkpoints
        are there; writes files into directory/'measures', which are exported. Its module names it:
        one a module.
    """

    study: str
    read: Callable[[Path], list[Row]]
    record: Recorder | None = None


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim and what decides it: exact checks, expectations of arms, measures.

    Attributes:
      name: 'B2'.
      title: the statement in a few words, for tables of all claims.
      statement, rule: a sentence each; the rule says in which case the claim holds.
      source: who says so.
      reported: the number that was reported, in words.
      premises: checks of what its studies presume; they can speak against it only.
    """

    name: str
    title: str
    statement: str
    source: str
    rule: str
    reported: str | None = None
    checks: tuple[Check, ...] = ()
    expectations: tuple[Expectation, ...] = ()
    measures: tuple[Measure, ...] = ()
    premises: tuple[Check, ...] = ()

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
