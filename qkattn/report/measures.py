"""Selects the metrics to show: those that the trials of a study have."""

import dataclasses
import functools
from collections.abc import Sequence

from qkattn.metrics import METRICS, Metric, shown
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
    def decimals(self) -> int:
        return self.metric.decimals

    @property
    def heading(self) -> str:
        return ', '.join((self.name, *self._units))

    @property
    def axis(self) -> str:
        return ' '.join((self.name, *(f'({unit})' for unit in self._units)))

    @property
    def _units(self) -> tuple[str, ...]:
        """The unit, unless there is none or it is the label."""
        unit = self.metric.unit
        return () if unit in (None, self.metric.label) else (unit,)

    def over_seeds(self, arm: Arm) -> Estimate | None:
        return arm.over_seeds(self.field, self.metric.scale)

    def of_seeds(self, arm: Arm) -> list[float]:
        """The values of all chosen trials that have it."""
        values = [trial.metrics.get(self.field) for trial in arm.chosen]
        return [self.metric.scale * value for value in values if value is not None]


VAL_LOSS = Measure(METRICS['loss'], 'val')


def losses(arms: Sequence[Arm]) -> tuple[Measure, ...]:
    """Validation loss, and test loss if there is one, in nats/token."""
    test = Measure(METRICS['loss'], 'test')
    return (VAL_LOSS, test) if _has(arms, test) else (VAL_LOSS,)


def _shown(arms: Sequence[Arm], role: str) -> tuple[Measure, ...]:
    """The metrics of a role, of the test split if there is one; the main one first."""
    trials = [trial for arm in arms for trial in arm.chosen]
    declared = {name: m for trial in trials for name, m in trial.declared_metrics.items()}
    measures: list[Measure] = []
    for metric in shown(declared, [trial.metrics for trial in trials]):
        if metric.role == role:
            on_splits = [Measure(metric, split) for split in reversed(metric.prefixes)]
            measures += [one for one in on_splits if _has(arms, one)][:1]
    return tuple(measures)


scores = functools.partial(_shown, role='score')
probes = functools.partial(_shown, role='probe')


def _has(arms: Sequence[Arm], measure: Measure) -> bool:
    return any(measure.of_seeds(arm) for arm in arms)
