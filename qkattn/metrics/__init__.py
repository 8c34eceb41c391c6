"""Every metric of a trial, declared once: result files, tables and figures follow from `Metric`.

METRICS are those of every run; `train.metrics` names further ones, from outside the package. An
evaluated metric has a number for each target, and a value from the sums of such numbers over rows.
One that is measured when a run ends has neither: `Rows.end_metrics` of the task computes it.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from qkattn.config.calls import called, resolve, takes
from qkattn.errors import ConfigError

# The prefix of a split's fields in result files.
PREFIXES = {'validation': 'val', 'test': 'test'}


@dataclasses.dataclass(frozen=True)
class Predictions:
    """What a model predicts for one batch, or for a part of each row; numpy or jax arrays."""

    logits_BTV: Any  # float32
    targets_BT: Any
    nats_BT: Any  # cross-entropy of the target
    correct_BT: Any  # whether the target is the argmax prediction


# `row_sums` of R rows and X trials, each [R, X, ...] in float64.
Sums = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Metric:
    """A number that is measured for every trial of a run, and how it is printed."""

    name: str  # in result files, after the prefix of a split: 'loss' is val_loss and test_loss
    # A 'score' is a result that is no loss, a 'probe' a property of the trained model, an 'error'
    # the uncertainty of another metric.
    role: Literal['loss', 'score', 'probe', 'error']
    description: str
    _: dataclasses.KW_ONLY
    label: str = ''  # in tables and figures; the name by default
    unit: str | None = None
    scale: float = 1.0
    decimals: int = 4
    # Which value is better; by default a higher one, of a loss or an error a lower one.
    direction: Literal['lower', 'higher'] | None = None
    prefixes: tuple[Literal['val', 'test'], ...] = ('val', 'test')
    # Whether an evaluation during training writes it to metrics.jsonl (val_ only); by default if it
    # has `per_target`.
    logged: bool | None = None
    for_text: bool = True  # reports show it for text, for which there are bits per byte
    # Further fields of the same measurement and their types.
    details: Mapping[str, type] = dataclasses.field(default_factory=dict)
    # A number, or several, of each target [B, T, ...], whatever the other targets are; jittable.
    # `row_sums` of them are the `Sums` of this name.
    per_target: Callable[[Predictions], Any] | None = None
    # (sums, bytes per target, if targets are text) -> value of every trial [X], or None where it is
    # not defined. By default the mean over targets; None for a metric without `per_target`.
    value: Callable[[Sums, float | None], Any] | None = None

    def __post_init__(self) -> None:
        is_evaluated = self.per_target is not None
        defaults = {
            'label': self.name.replace('_', ' '),
            'direction': 'lower' if self.role in ('loss', 'error') else 'higher',
            'logged': is_evaluated,
            'value': functools.partial(_mean, self.name) if is_evaluated else None,
        }
        for field, default in defaults.items():
            if getattr(self, field) in (None, ''):
                object.__setattr__(self, field, default)  # the dataclass is frozen

    def field(self, prefix: str) -> str:
        """Its field in a result, 'val_loss' for 'val'; ValueError if not measured on this split."""
        if prefix not in self.prefixes:
            raise ValueError(f'{self.name} has no prefix {prefix!r}, only {self.prefixes}')
        return f'{prefix}_{self.name}'

    def text(self, value: float) -> str:
        """The value as printed, with its label and unit: 'loss 3.2189 nats/token'."""
        text = f'{self.label} {self.scale * value:.{self.decimals}f}'
        if self.unit is None or self.unit == self.label:
            return text
        return f'{text} {self.unit}'


def row_sums(per_target: Mapping[str, Any], loss_weights_BT: Any) -> dict[str, Any]:
    """Sums over each row of a batch of what is measured on its targets, for numpy and jax.jit.

    Args:
      per_target: by metric, numbers of each target [B, T, ...].
      loss_weights_BT: the weight of each target in the loss; 0 where a position has no target.

    Returns by metric the weighted sums [B, ...], and 'weight', the sum of the weights [B], and
    'rows', whether a row has a target [B]. Numbers at positions without a target, perhaps NaN, do
    not count.
    """
    array_library = loss_weights_BT.__array_namespace__()
    sums = {}
    for name, values in per_target.items():
        trailing_axes = (1,) * (values.ndim - 2)
        weights = loss_weights_BT.reshape(loss_weights_BT.shape + trailing_axes)
        sums[name] = array_library.where(weights > 0, values * weights, 0).sum(1)
    sums['weight'] = loss_weights_BT.sum(-1)
    sums['rows'] = loss_weights_BT.any(-1)
    return sums


def _mean(name: str, sums: Sums, bytes_per_target: float | None = None) -> np.ndarray:
    """Mean over targets [X]."""
    return sums[name].sum(0) / sums['weight'].sum(0)


mean_loss = functools.partial(_mean, 'loss')  # cross-entropy per target [X]


def standard_error(sums: Sums, bytes_per_target: float | None = None) -> np.ndarray:
    """Standard error of the loss [X] over rows; NaN for fewer than two rows.

    The loss is a ratio of two sums over R rows, of nats n and weights w, with the variance
    R / (R - 1) * sum (n - loss * w)^2 / (sum w)^2 (Cochran 1977, 'Sampling techniques', ch. 6),
    without the correction for a finite population: a split stands for all text of its kind.
    """
    excess_RX = sums['loss'] - mean_loss(sums) * sums['weight']
    num_rows_X = sums['rows'].sum(0)
    num_rows_X = np.where(num_rows_X > 1, num_rows_X, np.nan)
    correction_X = num_rows_X / (num_rows_X - 1)
    return np.sqrt(correction_X * (excess_RX**2).sum(0)) / sums['weight'].sum(0)


def perplexity(nats_per_token: float) -> float:
    """exp(nats per token), of a mean over all tokens; inf beyond the largest float."""
    with np.errstate(over='ignore'):
        return float(np.exp(np.float64(nats_per_token)))


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """nats_per_token / (ln 2 * bytes_per_token); ConfigError unless bytes_per_token is above 0."""
    if not bytes_per_token > 0:
        raise ConfigError(f'bytes_per_token={bytes_per_token} must be above 0')
    return float(nats_per_token) / (math.log(2) * bytes_per_token)


def _bits_per_byte(sums: Sums, bytes_per_target: float | None) -> np.ndarray | None:
    """Bits per byte [X]; None where targets are no text."""
    if bytes_per_target is None:
        return None
    return np.array([bits_per_byte(loss, bytes_per_target) for loss in mean_loss(sums)])


def _perplexity(sums: Sums, bytes_per_target: float | None) -> np.ndarray:
    """Perplexity [X]."""
    return np.array([perplexity(loss) for loss in mean_loss(sums)])


def _solved(sums: Sums, bytes_per_target: float | None) -> np.ndarray:
    """Fraction of the rows with targets [X] without a wrong prediction, which `solved` counts."""
    solved_RX = sums['rows'] * (sums['solved'] == 0)
    return solved_RX.sum(0) / sums['rows'].sum(0)


# Each is of the whole run, all its trials together.
TIMES = {
    'train_seconds': 'training steps, over all starts',
    'input_seconds': 'of these, waiting for the next batch on the devices',
    'logging_seconds': 'of these, writing metrics, mostly beside a step',
    'checkpoint_seconds': 'training waited for checkpoints, over all starts',
    'compile_seconds': 'compilation of the training program, in the last start',
    'tokens_per_second': 'training tokens per second of the last start',
}
# Of a training record: of the whole run, all its trials together, over the steps since the record
# before, without evaluations and checkpoints. Other starts of a run measure others.
SPEEDS = {
    'tokens_per_second': 'training tokens per second',
    'mfu': 'model FLOPs per second over the peak rate of the devices; absent where it is unknown',
    'input_wait_fraction': 'fraction of the time in which training waits for the next batch',
}

NATS: dict[str, Any] = {'unit': 'nats/token'}
PERCENT: dict[str, Any] = {'unit': '%', 'scale': 100.0, 'decimals': 2}
OF_TARGETS: dict[str, Any] = {**PERCENT, 'for_text': False}
# In the order in which they are printed: the main score first.
_METRICS = (
    Metric(
        'loss',
        'loss',
        'Mean cross-entropy of the targets.',
        **NATS,
        per_target=lambda predictions: predictions.nats_BT,
    ),
    Metric(
        'bits_per_byte',
        'loss',
        'The loss per byte of text, which compares across tokenizers.',
        label='bits/byte',
        unit='bits/byte',
        logged=True,
        value=_bits_per_byte,
    ),
    Metric(
        'perplexity',
        'loss',
        'Exponential of the loss.',
        decimals=2,
        value=_perplexity,
    ),
    Metric(
        'loss_se',
        'error',
        'Standard error of the loss over the evaluated rows.',
        **NATS,
        label='standard error of the loss',
        value=standard_error,
    ),
    Metric(
        'bleu',
        'score',
        'Corpus BLEU of the translations, in percent (sacrebleu).',
        label='BLEU',
        decimals=2,
        details={'num_sentences': int, 'bleu_signature': str},
    ),
    Metric(
        'chrf',
        'score',
        'Corpus chrF2 of the translations, in percent (sacrebleu).',
        label='chrF',
        decimals=2,
        details={'chrf_signature': str},
    ),
    Metric(
        'exact_match',
        'score',
        'Fraction of the translations that equal their reference, character by character.',
        **PERCENT,
    ),
    Metric(
        'accuracy',
        'score',
        'Fraction of the targets that equal the argmax prediction.',
        **OF_TARGETS,
        per_target=lambda predictions: predictions.correct_BT,
    ),
    Metric(
        'solved',
        'score',
        'Fraction of the rows whose targets all equal the argmax prediction.',
        **OF_TARGETS,
        per_target=lambda predictions: ~predictions.correct_BT,
        value=_solved,
    ),
    Metric(
        'induction_gain',
        'probe',
        'How much lower the loss is on the second copy of random tokens than on the first.',
        **NATS,
        decimals=3,
        prefixes=('val',),
    ),
    Metric(
        'induction_accuracy',
        'probe',
        'Accuracy on the second copy of random tokens.',
        unit='%',
        scale=100.0,
        decimals=1,
        prefixes=('val',),
    ),
)
METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _METRICS}
# Names that metrics from outside cannot have: those of metrics, of other fields of a result, and
# of sums.
_TAKEN = {*METRICS, 'tokens', 'weight', 'rows'}
for _metric in _METRICS:
    _TAKEN.update(_metric.details)


def with_outside(outside: Iterable[Metric]) -> Mapping[str, Metric]:
    """METRICS and metrics from outside by name; ConfigError for one that cannot be among them."""
    metrics = dict(METRICS)
    for metric in outside:
        if not re.fullmatch('[a-z][a-z0-9_]*', metric.name) or metric.role != 'score':
            raise ConfigError(
                f'metric {metric.name!r} of role {metric.role!r} must have a name of lower-case '
                "letters, digits and underscores, and the role 'score'"
            )
        if metric.name in _TAKEN | metrics.keys():
            raise ConfigError(
                f'metric {metric.name!r} has the name of another; give it a name of its own'
            )
        metrics[metric.name] = metric
    return metrics


def named(texts: Sequence[str]) -> Mapping[str, Metric]:
    """METRICS and those that `train.metrics` names by import path, in order, by name.

    Raises ConfigError where a text names no metric.
    """
    return with_outside([_imported_metric(text) for text in texts])


def _imported_metric(text: str) -> Metric:
    """The metric of 'my_file:METRIC', or that a function returns, as in 'my_file:top(k=5)'."""
    target, options = resolve(
        text,
        {},
        'train.metrics',
        needs='a Metric, or a function (*, options) that returns one',
        fits=lambda target: isinstance(target, Metric) or takes()(target),
        call=lambda target: target if callable(target) else lambda: target,
    )
    if isinstance(target, Metric):
        return target
    metric = called('train.metrics', text, lambda: target(**options))
    if not isinstance(metric, Metric):
        raise ConfigError(f'train.metrics={text!r} must return a Metric, not {metric!r:.80}')
    return metric


def outside(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Those that are not in METRICS."""
    return {name: metric for name, metric in metrics.items() if name not in METRICS}


def values(
    sums: Sums, bytes_per_target: float | None, metrics: Mapping[str, Metric] = METRICS
) -> dict[str, np.ndarray | None]:
    """The value of every evaluated metric [X] by name, from the sums of R rows, [R, X, ...]."""
    return {
        name: metric.value(sums, bytes_per_target)
        for name, metric in metrics.items()
        if metric.value is not None
    }


def result_fields(metrics: Mapping[str, Metric] = METRICS) -> dict[str, type]:
    """The fields that metrics may have in a result, and their types (null where not measured)."""
    fields: dict[str, type] = {}
    for metric in metrics.values():
        for prefix in metric.prefixes:
            fields[f'{prefix}_{metric.name}'] = float
            for detail, kind in metric.details.items():
                fields[f'{prefix}_{detail}'] = kind
    return fields


def logged_fields(metrics: Mapping[str, Metric]) -> tuple[str, ...]:
    """The fields of an evaluation in metrics.jsonl, one value a trial."""
    return tuple(
        metric.field('val')
        for metric in metrics.values()
        if metric.logged and 'val' in metric.prefixes
    )


def shown(metrics: Mapping[str, Metric], results: Iterable[Mapping[str, Any]]) -> list[Metric]:
    """The metrics that reports show of results, by field: of text, those that are for text."""
    is_text = any(result.get('val_bits_per_byte') is not None for result in results)
    return [metric for metric in metrics.values() if metric.for_text or not is_text]
