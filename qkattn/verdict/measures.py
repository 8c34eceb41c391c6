"""Selects the metrics to show: those that the trials of a study have."""

import dataclasses
from collections.abc import Iterator, Sequence

from qkattn.metrics import METRICS, Metric
from qkattn.stats.inference import Estimate
from qkattn.verdict.arms import Arm


@dataclasses.dataclass(frozen=True)
class Measure:
    """A metric on one split, 'val' or 'test', in the unit in which it is printed."""

    metric: Metric
    split: str

    @property
    def field(self) -> str:
        return self.metric.field(self.split)

    @property
    def name(self) -> str:
        """The label, with the split if the metric is measured on several."""
        label = self.metric.label
        return f'{self.split} {label}' if len(self.metric.prefixes) > 1 else label

    @property
    def unit(self) -> str | None:
        """None if there is none or if it is the label."""
        return None if self.metric.unit == self.metric.label else self.metric.unit

    @property
    def decimals(self) -> int:
        return self.metric.decimals

    @property
    def heading(self) -> str:
        return f'{self.name}, {self.unit}' if self.unit else self.name

    @property
    def axis(self) -> str:
        return f'{self.name} ({self.unit})' if self.unit else self.name

    def over_seeds(self, arm: Arm) -> Estimate | None:
        return arm.over_seeds(self.field, self.metric.scale)

    def of_seeds(self, arm: Arm) -> list[float]:
        """The values of all chosen trials that have it."""
        values = [trial.metrics[self.field] for trial in arm.chosen]
        return [self.metric.scale * value for value in values if value is not None]


def measure_of(field: str) -> Measure:
    """The measure of a field such as 'val_loss'."""
    split, _, name = field.partition('_')
    return Measure(METRICS[name], split)


def losses(arms: Sequence[Arm]) -> tuple[Measure, ...]:
    """Validation loss, and test loss if there is one.

    In bits/byte, which compares across tokenizers, or in nats/token if targets are not text.
    """
    metric = METRICS['bits_per_byte' if _is_text(arms) else 'loss']
    val, test = (Measure(metric, split) for split in ('val', 'test'))
    return (val, test) if _has(arms, test) else (val,)


def scores(arms: Sequence[Arm]) -> tuple[Measure, ...]:
    """Scores, of the test split if there is one; the main one first."""
    return tuple(_shown(arms, 'score'))


def probes(arms: Sequence[Arm]) -> tuple[Measure, ...]:
    """Probes of the trained models."""
    return tuple(_shown(arms, 'probe'))


def _shown(arms: Sequence[Arm], role: str) -> Iterator[Measure]:
    for metric in METRICS.values():
        if metric.role == role and (metric.for_text or not _is_text(arms)):
            on_splits = [Measure(metric, split) for split in reversed(metric.prefixes)]
            yield from [one for one in on_splits if _has(arms, one)][:1]


def _has(arms: Sequence[Arm], shown: Measure) -> bool:
    return any(shown.of_seeds(arm) for arm in arms)


def _is_text(arms: Sequence[Arm]) -> bool:
    return _has(arms, Measure(METRICS['bits_per_byte'], 'val'))
