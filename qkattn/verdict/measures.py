"""What the trials of a study are measured by: which numbers they have decides what is shown."""

import dataclasses
from collections.abc import Sequence

from qkattn.verdict.summary import Estimate, Row
from qkattn.verdict.trials import Trial


@dataclasses.dataclass(frozen=True)
class Measure:
    """A number of a trial and how it is printed: `scale` times it, with so many decimals."""

    field: str
    name: str
    unit: str | None = None
    scale: float = 1.0
    decimals: int = 4

    @property
    def heading(self) -> str:
        return f'{self.name}, {self.unit}' if self.unit else self.name

    @property
    def axis(self) -> str:
        return f'{self.name} ({self.unit})' if self.unit else self.name

    def over_seeds(self, row: Row) -> Estimate | None:
        return row.over_seeds(self.field, self.scale)

    def of_seeds(self, row: Row) -> list[float]:
        """Of each chosen trial that has it."""
        values = [getattr(trial, self.field) for trial in row.chosen]
        return [self.scale * value for value in values if value is not None]


def shown(rows: Sequence[Row]) -> list[Trial]:
    """The trials that all means are over."""
    return [trial for row in rows for trial in row.chosen]


def has(rows: Sequence[Row], field: str) -> bool:
    return any(getattr(trial, field) is not None for trial in shown(rows))


def losses(rows: Sequence[Row]) -> tuple[Measure, ...]:
    """Validation loss, then that of the test split where there is one.

    In bits/byte, so that tokenizers compare, or in nats/token where targets are not text.
    """
    if has(rows, 'val_bits_per_byte'):
        both = [Measure(f'{s}_bits_per_byte', f'{s} bits/byte') for s in ('val', 'test')]
    else:
        both = [Measure(f'{s}_loss', f'{s} loss', 'nats/token') for s in ('val', 'test')]
    return tuple(both if has(rows, both[1].field) else both[:1])


def scores(rows: Sequence[Row]) -> tuple[Measure, ...]:
    """What is better when higher, of the test split where there is one; the main one first.

    BLEU, chrF and exact match of translations; accuracy and solved rows where targets are not text.
    """
    found = []
    for name, label, unit, scale in (
        ('bleu', 'BLEU', None, 1.0),
        ('chrf', 'chrF', None, 1.0),
        ('exact_match', 'exact match', '%', 100.0),
        ('accuracy', 'accuracy', '%', 100.0),
        ('solved', 'solved', '%', 100.0),
    ):
        if name in ('accuracy', 'solved') and has(rows, 'val_bits_per_byte'):
            continue
        split = 'test' if has(rows, f'test_{name}') else 'val'
        if has(rows, f'{split}_{name}'):
            measure = Measure(f'{split}_{name}', f'{split} {label}', unit, scale, decimals=2)
            found.append(measure)
    return tuple(found)
