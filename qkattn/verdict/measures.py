"""What the trials of a study are measured by: which numbers they have decides what is shown."""

import dataclasses
from collections.abc import Sequence

from qkattn.stats.inference import Estimate
from qkattn.verdict.arms import Arm
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

    def over_seeds(self, arm: Arm) -> Estimate | None:
        return arm.over_seeds(self.field, self.scale)

    def of_seeds(self, arm: Arm) -> list[float]:
        """Of each chosen trial that has it."""
        values = [getattr(trial, self.field) for trial in arm.chosen]
        return [self.scale * value for value in values if value is not None]


def shown(arms: Sequence[Arm]) -> list[Trial]:
    """The trials that all means are over."""
    return [trial for arm in arms for trial in arm.chosen]


def has(arms: Sequence[Arm], field: str) -> bool:
    return any(getattr(trial, field) is not None for trial in shown(arms))


def losses(arms: Sequence[Arm]) -> tuple[Measure, ...]:
    """Validation loss, then that of the test split where there is one.

    In bits/byte, so that tokenizers compare, or in nats/token where targets are not text.
    """
    if has(arms, 'val_bits_per_byte'):
        both = [Measure(f'{s}_bits_per_byte', f'{s} bits/byte') for s in ('val', 'test')]
    else:
        both = [Measure(f'{s}_loss', f'{s} loss', 'nats/token') for s in ('val', 'test')]
    return tuple(both if has(arms, both[1].field) else both[:1])


def scores(arms: Sequence[Arm]) -> tuple[Measure, ...]:
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
        if name in ('accuracy', 'solved') and has(arms, 'val_bits_per_byte'):
            continue
        split = 'test' if has(arms, f'test_{name}') else 'val'
        if has(arms, f'{split}_{name}'):
            measure = Measure(f'{split}_{name}', f'{split} {label}', unit, scale, decimals=2)
            found.append(measure)
    return tuple(found)
