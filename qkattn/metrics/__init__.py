"""The metrics of a trial: result files, tables and figures follow from one `Metric` for each.

Every run has the METRICS. `train.metrics` names more metrics, from outside the package.

An evaluated metric has a number for each target, and computes its value from the sums of these
numbers over rows. Other metrics are measured when a run ends, by `Rows.end_metrics` of the task.
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

# Where the data of a result describe the corpora of data.evaluate, by their entries there.
CORPORA = 'evaluate'
# The prefix of a split's fields in result files.
PREFIXES = {'validation': 'val', 'test': 'test'}


@dataclasses.dataclass(frozen=True)
class Predictions:
    """A model's predictions for one batch, or for a part of each row, as numpy or jax arrays."""

    logits_BTV: Any  # float32
    targets_BT: Any
    nats_BT: Any  # cross-entropy of the target
    correct_BT: Any  # whether the target is the argmax prediction


# The results of `row_sums` for R rows and X trials, each an array [R, X, ...] in float64.
Sums = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Metric:
    """A number that is measured for every trial of a run, and how it is printed."""

    name: str  # result files add the prefix of a split: 'loss' is val_loss and test_loss
    # A 'loss' is the objective in some unit. A 'score' is another result, a 'probe' a property of
    # the trained model, an 'error' the uncertainty of another metric.
    role: Literal['loss', 'score', 'probe', 'error']
    description: str
    _: dataclasses.KW_ONLY
    label: str = ''  # the name in tables and figures; by default `name`
    unit: str | None = None
    scale: float = 1.0  # factor on the value when it is printed
    decimals: int = 4
    # Which values are better. By default lower ones for a loss or an error, higher ones otherwise.
    direction: Literal['lower', 'higher'] | None = None
    prefixes: tuple[Literal['val', 'test'], ...] = ('val', 'test')  # the splits that it is for
    # Whether an evaluation during training writes val_NAME to metrics.jsonl. By default it does if
    # the metric has `per_target`.
    logged: bool | None = None
    for_text: bool = True  # whether reports show it for text, where they also show bits per byte
    # More fields that the same measurement gives, with their types.
    details: Mapping[str, type] = dataclasses.field(default_factory=dict)
    # Computes one or more numbers for each target, [B, T, ...], which do not depend on the other
    # targets; jittable. `row_sums` sums them.
    per_target: Callable[[Predictions], Any] | None = None
    # Called with the sums and, if the targets are text, the bytes per target. Returns the value of
    # every trial [X], or None if the value is not defined. The default is the mean over targets, or
    # nothing for a metric without `per_target`.
    value: Callable[[Sums, float | None], Any] | None = None

    def __post_init__(self) -> None:
        """Sets label, direction, logged and value to their defaults if they were left out.

        The default value is the mean over targets of the numbers that `per_target` computes.
        """
        lower_is_better = self.role in ('loss', 'error')
        has_number_per_target = self.per_target is not None
        defaults = {
            'label': self.name.replace('_', ' '),
            'direction': 'lower' if lower_is_better else 'higher',
            'logged': has_number_per_target,
            'value': functools.partial(_mean, self.name) if has_number_per_target else None,
        }
        for field, default in defaults.items():
            if getattr(self, field) in (None, ''):
                object.__setattr__(self, field, default)  # the dataclass is frozen

    def field(self, prefix: str) -> str:
        """Returns the name of its field in a result: 'val_loss' for the prefix 'val'.

        Raises ValueError if the metric is not measured on this split.
        """
        if prefix not in self.prefixes:
            raise ValueError(f'{self.name} has no prefix {prefix!r}, only {self.prefixes}')
        return f'{prefix}_{self.name}'

    def corpus_field(self, corpus: str) -> str:
        """Returns the name of its field for an entry of data.evaluate: 'loss[stdlib@test]'."""
        return f'{self.name}[{corpus}]'

    def text(self, value: float) -> str:
        """Returns a value as printed, with its label and unit: 'loss 3.2189 nats/token'."""
        text = f'{self.label} {self.scale * value:.{self.decimals}f}'
        if self.unit is None or self.unit == self.label:
            return text
        return f'{text} {self.unit}'


def row_sums(per_target: Mapping[str, Any], loss_weights_BT: Any) -> dict[str, Any]:
    """Sums the numbers of each metric over the targets of a row; works with numpy and in jax.jit.

    Args:
      per_target: for each metric its numbers of each target, [B, T, ...].
      loss_weights_BT: the weight of each target in the loss; 0 if a position has no target.

    Returns:
      For each metric its weighted sums, [B, ...]. Numbers at positions without a target do not
        count, even if they are NaN.
      'weight': the sum of the weights, [B].
      'rows': whether the row has a target, [B]. Its sum over rows is the number of such rows.
    """
    array_library = loss_weights_BT.__array_namespace__()  # numpy or jax.numpy
    sums = {}
    for name, values in per_target.items():
        # The weights get the axes that values have after B and T: [B, T, 1] for values [B, T, 5].
        trailing_axes = (1,) * (values.ndim - 2)
        weights = loss_weights_BT.reshape(loss_weights_BT.shape + trailing_axes)
        weighted_values = array_library.where(weights > 0, values * weights, 0)
        sums[name] = weighted_values.sum(1)
    sums['weight'] = loss_weights_BT.sum(-1)
    sums['rows'] = loss_weights_BT.any(-1)
    return sums


def _mean(name: str, sums: Sums, bytes_per_target: float | None = None) -> np.ndarray:
    """Returns the weighted mean of a metric over all targets, [X] for X trials.

    Args:
      name: the name of the metric.
      sums: the results of `row_sums`, [R, X] for R rows.
      bytes_per_target: unused; every `Metric.value` function takes this argument.

    Raises:
      ConfigError: the metric has several numbers per target, so its sums are [R, X, ...].
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

    `bytes_per_target` has no effect, but every `Metric.value` takes it. The loss is the ratio
    sum(n) / sum(w) over R rows, with n the nats and w the weight of a row. The variance of this
    ratio is

        R / (R - 1) * sum (n - loss * w)^2 / (sum w)^2

    (Cochran 1977, 'Sampling techniques', ch. 6), without the correction for a finite population,
    because a split is a sample of all text of its kind.
    """
    excess_RX = sums['loss'] - mean_loss(sums) * sums['weight']
    squares_X = (excess_RX**2).sum(0)
    num_rows_X = sums['rows'].sum(0)  # R, without rows that have no target
    num_rows_X = np.where(num_rows_X > 1, num_rows_X, np.nan)
    correction_X = num_rows_X / (num_rows_X - 1)
    return np.sqrt(correction_X * squares_X) / sums['weight'].sum(0)


def perplexity(nats_per_token: float) -> float:
    """Returns exp(nats_per_token); infinity if that is too large for a float."""
    with np.errstate(over='ignore'):
        return float(np.exp(np.float64(nats_per_token)))


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """Returns nats_per_token / (ln 2 * bytes_per_token).

    Raises ConfigError unless bytes_per_token is above 0.
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
    """Returns the fraction of rows whose predictions are all right [X].

    sums['solved'] counts the wrong predictions of a row. Rows without a target do not count.
    """
    is_solved_RX = sums['rows'] * (sums['solved'] == 0)
    return is_solved_RX.sum(0) / sums['rows'].sum(0)


# Times of a run with their descriptions. Each covers all trials of the run together.
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
# Tables and figures keep this order, with the main score first.
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
# Names that metrics from outside the package cannot have: names of metrics, of other fields of a
# result, and of sums.
_RESERVED_NAMES = {*METRICS, 'tokens', 'weight', 'rows'}
for _metric in _METRICS:
    _RESERVED_NAMES.update(_metric.details)


def with_outside(outside: Iterable[Metric]) -> Mapping[str, Metric]:
    """Returns METRICS and metrics from outside the package, by name.

    Raises ConfigError if a metric from outside has a role other than 'score', a malformed name, or
    the name of another metric, field or sum.
    """
    metrics = dict(METRICS)
    for metric in outside:
        is_valid_name = re.fullmatch('[a-z][a-z0-9_]*', metric.name)
        if not is_valid_name or metric.role != 'score':
            raise ConfigError(
                f'metric {metric.name!r} of role {metric.role!r} must have a name of lower-case '
                "letters, digits and underscores, and the role 'score'"
            )
        if metric.name in _RESERVED_NAMES or metric.name in metrics:
            raise ConfigError(
                f'metric {metric.name!r} has the name of another; give it a name of its own'
            )
        metrics[metric.name] = metric
    return metrics


def named(texts: Sequence[str]) -> Mapping[str, Metric]:
    """Returns METRICS and the metrics that `train.metrics` names by import path, by name.

    Raises ConfigError if a text does not name a metric.
    """
    return with_outside([_imported_metric(text) for text in texts])


def _imported_metric(text: str) -> Metric:
    """Imports the metric that an entry of train.metrics names.

    `text` is the import path of a Metric, as in 'my_file:METRIC', or of a function that returns
    one. Options of the function may follow, as in 'my_file:top(k=5)'. Raises ConfigError if this
    gives no Metric.
    """
    # Import the Metric or function, and check that it takes the options, such as {'k': 5}.
    target, options = resolve(
        text,
        {},
        'train.metrics',
        needs='a Metric, or a function (*, options) that returns one',
        is_valid=_is_metric_or_function,
        call=_as_function,
    )
    # The function is not ours, so its exceptions become ConfigErrors that blame train.metrics.
    metric = call_with_config_errors('train.metrics', text, lambda: _as_function(target)(**options))
    if not isinstance(metric, Metric):
        raise ConfigError(f'train.metrics={text!r} must return a Metric, not {metric!r:.80}')
    return metric


def _is_metric_or_function(target: Any) -> bool:
    """Returns whether an object is a Metric, or can be called without positional arguments."""
    can_be_called = accepts_arguments()  # a check that takes the object
    return isinstance(target, Metric) or can_be_called(target)


def _as_function(target: Any) -> Callable[..., Any]:
    """Returns the function that gives the metric. For a Metric, it takes no options."""
    if isinstance(target, Metric):
        return lambda: target
    return target


def outside(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Returns the metrics that are not in METRICS."""
    return {name: metric for name, metric in metrics.items() if name not in METRICS}


def values(
    sums: Sums, bytes_per_target: float | None, metrics: Mapping[str, Metric] = METRICS
) -> dict[str, np.ndarray | None]:
    """Computes the value [X] of every evaluated metric, by name.

    Args:
      sums: the sums of R rows and X trials, [R, X, ...], from `row_sums`.
      bytes_per_target: the mean number of bytes of a target; None if the targets are not text.
      metrics: the metrics. Those without a `value` are not evaluated, and are left out.
    """
    value_by_name = {}
    for name, metric in metrics.items():
        if metric.value is not None:
            value_by_name[name] = metric.value(sums, bytes_per_target)
    return value_by_name


def result_fields(
    metrics: Mapping[str, Metric] = METRICS, corpora: Iterable[str] = ()
) -> dict[str, type]:
    """Returns the fields that metrics have in a result, with their types.

    The metric 'bleu' has the fields 'val_bleu' and 'test_bleu', further ones for its details, such
    as 'val_num_sentences', and one for each of `corpora`, such as 'bleu[wmt@test]'. These are
    entries of data.evaluate. A field may also be null, if the metric was not measured.
    """
    fields: dict[str, type] = {}
    for metric in metrics.values():
        for prefix in metric.prefixes:  # 'val' and 'test'
            fields[metric.field(prefix)] = float
            for detail, detail_type in metric.details.items():
                fields[f'{prefix}_{detail}'] = detail_type
    for corpus in corpora:
        for metric in metrics.values():
            fields[metric.corpus_field(corpus)] = float
    return fields


def logged(metrics: Mapping[str, Metric]) -> list[Metric]:
    """Returns the metrics that an evaluation writes to metrics.jsonl."""
    return [metric for metric in metrics.values() if metric.logged and 'val' in metric.prefixes]


def logged_fields(metrics: Mapping[str, Metric], corpora: Iterable[str] = ()) -> tuple[str, ...]:
    """Returns the fields that an evaluation writes to metrics.jsonl, with a value per trial.

    `corpora` are entries of data.evaluate.
    """
    fields = [metric.field('val') for metric in logged(metrics)]
    for corpus in corpora:
        fields += [metric.corpus_field(corpus) for metric in logged(metrics)]
    return tuple(fields)


def shown(metrics: Mapping[str, Metric], results: Iterable[Mapping[str, Any]]) -> list[Metric]:
    """Returns the metrics that reports show for some results.

    Results on text have bits per byte. For them, reports leave out metrics that are not `for_text`.
    """
    is_text = any(result.get('val_bits_per_byte') is not None for result in results)
    return [metric for metric in metrics.values() if metric.for_text or not is_text]
