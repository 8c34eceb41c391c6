"""The metrics of a trial. A `Metric` defines how a metric is computed, stored and printed.

Every run has the METRICS. `train.metrics` names further metrics from outside the package.

Evaluated metrics are computed from sums over targets. The other metrics, such as BLEU, are measured
at the end of a run by `Rows.end_metrics`.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from qkattn.config.calls import accepts_arguments, call_with_config_errors, resolve
from qkattn.errors import ConfigError

# The key in the `data` of a result that has the corpora of data.evaluate.
CORPORA = 'evaluate'
# The prefixes of field names in result files, by split.
PREFIXES = {'validation': 'val', 'test': 'test'}


@dataclasses.dataclass(frozen=True)
class Predictions:
    """A model's predictions for a batch, or for a part of each row, as numpy or jax arrays."""

    logits_BTV: Any  # float32
    targets_BT: Any
    nats_BT: Any  # cross-entropy of the target
    correct_BT: Any  # whether the target is the argmax prediction


# The result of `row_sums` for R rows and X trials: arrays [R, X, ...] in float64, by name.
Sums = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Metric:
    """A number that is measured for each trial of a run."""

    name: str  # fields of result files add a prefix, as in 'val_loss' and 'test_loss'
    # 'loss': the training objective, in some unit. 'score': another measure of quality. 'probe': a
    # property of the trained model. 'error': the uncertainty of another metric.
    role: Literal['loss', 'score', 'probe', 'error']
    description: str
    _: dataclasses.KW_ONLY
    label: str = ''  # the name in tables and figures; by default `name`
    unit: str | None = None
    scale: float = 1.0  # a factor on printed values
    decimals: int = 4  # of printed values
    # Which values are better; by default 'lower' for a loss or an error, else 'higher'.
    direction: Literal['lower', 'higher'] | None = None
    prefixes: tuple[Literal['val', 'test'], ...] = ('val', 'test')  # the splits to measure
    # Whether evaluations during training log the metric; by default if it has `per_target`.
    logged: bool | None = None
    for_text: bool = True  # whether reports show the metric for text data
    # Further fields of result files, with their types.
    details: Mapping[str, type] = dataclasses.field(default_factory=dict)
    # A jittable function that returns one or more numbers for each target, [B, T, ...].
    per_target: Callable[[Predictions], Any] | None = None
    # Maps (sums, bytes per target) to the value of each trial [X], or to None if it is undefined.
    # The bytes per target are None if the targets are not text. By default, the value is the mean
    # of `per_target` over targets.
    value: Callable[[Sums, float | None], Any] | None = None

    def __post_init__(self) -> None:
        """Sets the defaults of label, direction, logged and value."""
        lower_is_better = self.role in ('loss', 'error')
        has_per_target = self.per_target is not None
        defaults = {
            'label': self.name.replace('_', ' '),
            'direction': 'lower' if lower_is_better else 'higher',
            'logged': has_per_target,
            'value': functools.partial(_mean, self.name) if has_per_target else None,
        }
        for field, default in defaults.items():
            is_left_out = getattr(self, field) in (None, '')
            if is_left_out:
                object.__setattr__(self, field, default)  # the dataclass is frozen

    def field(self, prefix: str) -> str:
        """Returns the name of the field in a result, such as 'val_loss' for the prefix 'val'.

        Raises:
            ValueError: The metric is not measured on this split.
        """
        if prefix not in self.prefixes:
            raise ValueError(f'{self.name} has no prefix {prefix!r}, only {self.prefixes}')
        return f'{prefix}_{self.name}'

    def corpus_field(self, corpus: str) -> str:
        """Returns the name of the field for an entry of data.evaluate: 'loss[stdlib@test]'."""
        return f'{self.name}[{corpus}]'

    def text(self, value: float) -> str:
        """Formats a value with label and unit, as in 'loss 3.2189 nats/token'."""
        text = f'{self.label} {self.scale * value:.{self.decimals}f}'
        if self.unit is None or self.unit == self.label:
            return text
        return f'{text} {self.unit}'


def row_sums(per_target: Mapping[str, Any], loss_weights_BT: Any) -> dict[str, Any]:
    """Sums metrics over the targets of each row. Works with numpy and in jax.jit.

    Args:
        per_target: The numbers of each metric for each target, [B, T, ...].
        loss_weights_BT: The weight of each target; 0 at positions without a target.

    Returns:
        The weighted sums of each metric by name, [B, ...], and 'weight': the sum of the weights,
        [B]; 'rows': whether the row has any target, [B].
    """
    array_library = loss_weights_BT.__array_namespace__()  # numpy or jax.numpy
    sums = {}
    for name, values in per_target.items():
        # Weights [B, T] become [B, T, 1] for values [B, T, 5].
        trailing_axes = (1,) * (values.ndim - 2)
        weights = loss_weights_BT.reshape(loss_weights_BT.shape + trailing_axes)
        # `where` drops values without a target, which may be NaN.
        weighted_values = array_library.where(weights > 0, values * weights, 0)
        sums[name] = weighted_values.sum(1)
    sums['weight'] = loss_weights_BT.sum(-1)
    sums['rows'] = loss_weights_BT.any(-1)
    return sums


def _mean(name: str, sums: Sums, bytes_per_target: float | None = None) -> np.ndarray:
    """Returns the weighted mean of a metric over all targets, [X] for X trials.

    Args:
        name: The name of the metric.
        sums: The results of `row_sums`, [R, X] for R rows.
        bytes_per_target: Unused; every `Metric.value` function takes this argument.

    Raises:
        ConfigError: The metric has several numbers per target, so its sums are [R, X, ...].
    """
    has_several_numbers = sums[name].ndim > 2
    if has_several_numbers:
        raise ConfigError(
            f'per_target of metric {name!r} gives several numbers for each target, so it needs '
            'value, which makes one number of their sums'
        )
    total_X = sums[name].sum(0)
    total_weight_X = sums['weight'].sum(0)
    return total_X / total_weight_X


mean_loss = functools.partial(_mean, 'loss')  # cross-entropy per target [X]


def standard_error(sums: Sums, bytes_per_target: float | None = None) -> np.ndarray:
    """Returns the standard error of the loss over rows [X]; NaN for fewer than two rows.

    The loss is a ratio of sums over R rows, loss = sum(n) / sum(w), where a row has n nats and the
    weight w. Its standard error is

        sqrt(R / (R - 1) * sum((n - loss * w)^2)) / sum(w)

    Source: Cochran 1977, 'Sampling techniques', ch. 6, without the correction for a finite
    population.

    Args:
        sums: The results of `row_sums`, [R, X] for X trials.
        bytes_per_target: Unused; every `Metric.value` function takes this argument.
    """
    excess_RX = sums['loss'] - mean_loss(sums) * sums['weight']
    squares_X = (excess_RX**2).sum(0)
    num_rows_X = sums['rows'].sum(0)  # R, the number of rows with a target
    rows_or_nan_X = np.where(num_rows_X > 1, num_rows_X, np.nan)
    correction_X = rows_or_nan_X / (rows_or_nan_X - 1)
    total_weight_X = sums['weight'].sum(0)
    return np.sqrt(correction_X * squares_X) / total_weight_X


def perplexity(nats_per_token: float) -> float:
    """Returns exp(nats_per_token); infinity if that is too large for a float."""
    with np.errstate(over='ignore'):
        return float(np.exp(np.float64(nats_per_token)))


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """Converts nats per token to bits per byte: nats_per_token / (ln 2 * bytes_per_token).

    Raises:
        ConfigError: bytes_per_token is not above 0.
    """
    if not bytes_per_token > 0:
        raise ConfigError(f'bytes_per_token={bytes_per_token} must be above 0')
    return float(nats_per_token) / (math.log(2) * bytes_per_token)


def _bits_per_byte(sums: Sums, bytes_per_target: float | None) -> np.ndarray | None:
    """Returns the bits per byte [X], or None if the targets are not text."""
    if bytes_per_target is None:
        return None
    return np.array([bits_per_byte(loss, bytes_per_target) for loss in mean_loss(sums)])


def _perplexity(sums: Sums, bytes_per_target: float | None) -> np.ndarray:
    """Returns the perplexity [X]."""
    return np.array([perplexity(loss) for loss in mean_loss(sums)])


def _solved(sums: Sums, bytes_per_target: float | None) -> np.ndarray:
    """Returns the fraction of rows [X] whose predictions are all correct."""
    has_target_RX = sums['rows']
    num_wrong_RX = sums['solved']
    is_solved_RX = has_target_RX * (num_wrong_RX == 0)
    return is_solved_RX.sum(0) / has_target_RX.sum(0)


# The times of a run and their descriptions. The trials of a run are timed together.
TIMES = {
    'train_seconds': 'training steps, over all starts',
    'input_seconds': 'of these, waiting for the next batch on the devices',
    'logging_seconds': 'of these, writing metrics, mostly beside a step',
    'checkpoint_seconds': 'training waited for checkpoints, over all starts',
    'compile_seconds': 'compilation of the training program, in the last start',
    'tokens_per_second': 'training tokens per second of the last start',
}
# The speeds in a training record and their descriptions. A speed is of all trials together, over
# the steps since the previous record, without evaluations and checkpoints.
SPEEDS = {
    'tokens_per_second': 'training tokens per second',
    'mfu': 'model FLOPs per second over the peak rate of the devices; absent where it is unknown',
    'input_wait_fraction': 'fraction of the time in which training waits for the next batch',
}

NATS: dict[str, Any] = {'unit': 'nats/token'}
PERCENT: dict[str, Any] = {'unit': '%', 'scale': 100.0, 'decimals': 2}
OF_TARGETS: dict[str, Any] = {**PERCENT, 'for_text': False}
# Tables and figures list metrics in this order.
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
# Names that metrics from outside the package cannot have.
_RESERVED_NAMES = {*METRICS, 'tokens', 'weight', 'rows'}
for _metric in _METRICS:
    _RESERVED_NAMES.update(_metric.details)


def with_outside(outside: Iterable[Metric]) -> Mapping[str, Metric]:
    """Returns METRICS and metrics from outside the package, by name.

    Raises:
        ConfigError: A field of a metric from outside is not valid, or its name is taken.
    """
    metrics = dict(METRICS)
    for metric in outside:
        _check_fields(metric)
        if metric.name in _RESERVED_NAMES or metric.name in metrics:
            raise ConfigError(
                f'metric {metric.name!r} has the name of another; give it a name of its own'
            )
        metrics[metric.name] = metric
    return metrics


def _check_fields(metric: Metric) -> None:
    """Raises ConfigError for the first field of a metric from outside that is not valid."""
    if not re.fullmatch('[a-z][a-z0-9_]*', metric.name):
        raise ConfigError(
            f'name={metric.name!r} of a metric must be lower-case letters, digits and underscores, '
            'with a letter first'
        )
    if metric.role != 'score':
        raise ConfigError(f"role={metric.role!r} of metric {metric.name!r} must be 'score'")
    if metric.direction not in ('lower', 'higher'):
        raise ConfigError(
            f"direction={metric.direction!r} of metric {metric.name!r} must be 'lower' or 'higher'"
        )
    valid_prefixes = set(PREFIXES.values())  # 'val' and 'test'
    if not metric.prefixes or not valid_prefixes.issuperset(metric.prefixes):
        raise ConfigError(
            f'prefixes={metric.prefixes!r} of metric {metric.name!r} must be '
            "('val', 'test'), ('val',) or ('test',)"
        )


def named(texts: Sequence[str]) -> Mapping[str, Metric]:
    """Returns METRICS and the metrics that the import paths `texts` name, by name.

    Raises:
        ConfigError: A text does not name a metric.
    """
    return with_outside([_imported_metric(text) for text in texts])


def _imported_metric(text: str) -> Metric:
    """Imports the metric that an entry of train.metrics names.

    Args:
        text: The import path of a Metric, as in 'my_file:METRIC', or of a function that returns a
            Metric, perhaps with options, as in 'my_file:top(k=5)'.

    Raises:
        ConfigError: The import fails, or gives no Metric.
    """
    metric_or_function, options = resolve(
        text,
        known={},  # no short names, only import paths
        field='train.metrics',
        needs='a Metric, or a function (*, options) that returns one',
        is_valid=_is_metric_or_function,
        call=_taker_of_options,
    )
    if isinstance(metric_or_function, Metric):
        return metric_or_function

    def make_metric() -> Any:
        return metric_or_function(**options)

    # Code from outside the package may raise anything, which becomes a ConfigError.
    metric = call_with_config_errors('train.metrics', text, make_metric)
    if not isinstance(metric, Metric):
        raise ConfigError(f'train.metrics={text!r} must return a Metric, not {metric!r:.80}')
    return metric


def _is_metric_or_function(target: Any) -> bool:
    """Returns whether an object is a Metric, or can be called without positional arguments."""
    accepts_no_arguments = accepts_arguments()
    return isinstance(target, Metric) or accepts_no_arguments(target)


def _taker_of_options(metric_or_function: Any) -> Callable[..., Any]:
    """Returns the function that takes the options of an entry; a Metric takes no options."""
    if isinstance(metric_or_function, Metric):
        return lambda: metric_or_function
    return metric_or_function


def outside(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Returns the metrics that are not in METRICS."""
    return {name: metric for name, metric in metrics.items() if name not in METRICS}


def values(
    sums: Sums, bytes_per_target: float | None, metrics: Mapping[str, Metric] = METRICS
) -> dict[str, np.ndarray | None]:
    """Computes the value [X] of each metric that has a `value` function, by name.

    Args:
        sums: The results of `row_sums` for R rows and X trials, [R, X, ...].
        bytes_per_target: The mean number of bytes of a target; None if the targets are not text.
        metrics: The metrics by name.
    """
    value_by_name = {}
    for name, metric in metrics.items():
        if metric.value is not None:
            value_by_name[name] = metric.value(sums, bytes_per_target)
    return value_by_name


def result_fields(
    metrics: Mapping[str, Metric] = METRICS, corpora: Iterable[str] = ()
) -> dict[str, type]:
    """Returns the fields of metrics in a result, with their types.

    For example, the metric 'bleu' has the fields 'val_bleu', 'val_num_sentences' (a detail) and, if
    'wmt@test' is in `corpora`, 'bleu[wmt@test]'. The value of a metric that was not measured is
    None.

    Args:
        metrics: The metrics by name.
        corpora: Entries of data.evaluate.
    """
    fields: dict[str, type] = {}
    for metric in metrics.values():
        for prefix in metric.prefixes:
            fields[metric.field(prefix)] = float
            for detail, detail_type in metric.details.items():
                fields[f'{prefix}_{detail}'] = detail_type
    for corpus in corpora:
        for metric in metrics.values():
            fields[metric.corpus_field(corpus)] = float
    return fields


def logged(metrics: Mapping[str, Metric]) -> list[Metric]:
    """Returns the metrics that evaluations write to metrics.jsonl."""
    return [metric for metric in metrics.values() if metric.logged and 'val' in metric.prefixes]


def logged_fields(metrics: Mapping[str, Metric], corpora: Iterable[str] = ()) -> tuple[str, ...]:
    """Returns the fields that evaluations write to metrics.jsonl.

    Args:
        metrics: The metrics by name.
        corpora: Entries of data.evaluate.
    """
    fields = [metric.field('val') for metric in logged(metrics)]
    for corpus in corpora:
        fields += [metric.corpus_field(corpus) for metric in logged(metrics)]
    return tuple(fields)


def shown(metrics: Mapping[str, Metric], results: Iterable[Mapping[str, Any]]) -> list[Metric]:
    """Returns the metrics that reports show, given the results that they are about.

    If any result has bits per byte, the data are text, and metrics need `for_text`.
    """
    is_text = any(result.get('val_bits_per_byte') is not None for result in results)
    return [metric for metric in metrics.values() if metric.for_text or not is_text]
