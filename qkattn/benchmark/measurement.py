"""Timed rounds, and the numbers that are made of them; imports without jax."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One row of a table.

    Attributes:
      name: of the row within its group.
      settings: what it was built with.
      rounds: seconds per step, one number a round; round i of all rows of a race is interleaved.
      extra: 'tokens' and 'flops' per step and what else a column shows; 'failed' in place of
        rounds where it could not be measured.
    """

    name: str
    settings: Mapping[str, Any]
    rounds: Sequence[float]
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def median(self) -> float | None:
        return statistics.median(self.rounds) if self.rounds else None

    @property
    def quartiles(self) -> tuple[float, float] | None:
        """First and third; of one round, that round."""
        if not self.rounds:
            return None
        if len(self.rounds) == 1:
            return self.rounds[0], self.rounds[0]
        first, _, third = statistics.quantiles(self.rounds, n=4, method='inclusive')
        return first, third

    def ratios(self, reference: 'Measurement') -> 'Measurement':
        """Its seconds over those of the same rounds of `reference`."""
        pairs = zip(self.rounds, reference.rounds, strict=False)
        return dataclasses.replace(self, rounds=[own / other for own, other in pairs])

    def per_second(self, name: str) -> float | None:
        """extra[name] of a step over the median seconds of one."""
        amount = self.extra.get(name)
        return None if amount is None or self.median is None else amount / self.median


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows that were measured together, and are compared.

    Attributes:
      suite: that measured it.
      title: unique in its suite.
      reference: name of the row to which times are related; '' is none.
      x: the setting along the x axis of its panel; '' draws a line for each row.
    """

    suite: str
    title: str
    rows: Sequence[Measurement]
    reference: str = ''
    x: str = ''

    @property
    def name(self) -> str:
        return f'{self.suite}: {self.title}'

    def reference_row(self) -> Measurement | None:
        return next((row for row in self.rows if row.name == self.reference and row.rounds), None)


def group_from_json(values: Mapping[str, Any]) -> Group:
    return Group(**{**values, 'rows': [Measurement(**row) for row in values['rows']]})
