"""What a metric declares, and what an evaluated metric is computed from."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

# The prefix of a split's fields in result files.
PREFIXES = {'validation': 'val', 'test': 'test'}


@dataclasses.dataclass(frozen=True)
class Predictions:
    """What a model predicts for one batch; numpy or jax arrays.

    Attributes:
      targets_BT: target tokens.
      loss_weights_BT: 0 where a position has no target.
      nats_BT: cross-entropy of each target.
      correct_BT: whether the target is the argmax prediction.
    """

    targets_BT: Any
    loss_weights_BT: Any
    nats_BT: Any
    correct_BT: Any


# Sums over each row of a batch, [B], with array methods only: runs on numpy and inside jax.jit.
RowSum = Callable[[Predictions], Any]
# Sums of R rows and X trials by the name of the RowSum, each [R, X] in float64.
Sums = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric:
    """A number that is measured for every trial of a run, and how it is printed.

    Attributes:
      name: in result files, after the prefix of a split: 'loss' is val_loss and test_loss.
      label: in tables and figures.
      unit: of the printed number; None where it has none.
      direction: whether a lower or a higher value is better.
      description: one line for documentation and captions.
      role: 'loss'; 'score' (a result that is no loss); 'probe' (a property of the trained model);
        'error' (the uncertainty of another metric).
      scale: factor on the stored value where it is printed.
      decimals: digits after the point where it is printed.
      prefixes: the splits that it is measured on.
      logged: whether an evaluation during training writes it to metrics.jsonl (val_ only).
      for_text: whether reports show it for text, for which there are bits per byte.
      details: further fields of the same measurement and their types.
      sums: what `value` needs of every row. Empty where the metric is not an evaluation of the
        loss targets but an output of one of `train.measurements.MEASUREMENTS`.
      value: (sums, bytes per target, if targets are text) -> value of every trial [X], or None
        where it is not defined.
    """

    name: str
    label: str
    unit: str | None = None
    direction: Literal['lower', 'higher']
    description: str
    role: Literal['loss', 'score', 'probe', 'error']
    scale: float = 1.0
    decimals: int = 4
    prefixes: tuple[str, ...] = ('val', 'test')
    logged: bool = False
    for_text: bool = True
    details: Mapping[str, type] = dataclasses.field(default_factory=dict)
    sums: tuple[RowSum, ...] = ()
    value: Callable[[Sums, float | None], np.ndarray | None] | None = None

    def field(self, prefix: str) -> str:
        """The metric's field in a result: field('val') is 'val_loss'.

        Raises:
          ValueError: the metric is not measured on this split.
        """
        if prefix not in self.prefixes:
            raise ValueError(f'{self.name} has no prefix {prefix!r}, only {self.prefixes}')
        return f'{prefix}_{self.name}'

    @property
    def fields(self) -> tuple[str, ...]:
        """Its fields on all splits."""
        return tuple(map(self.field, self.prefixes))

    def text(self, value: float) -> str:
        """The value as printed, with its label and unit: 'loss 3.2189 nats/token'."""
        unit = '' if self.unit in (None, self.label) else f' {self.unit}'
        return f'{self.label} {self.scale * value:.{self.decimals}f}{unit}'
