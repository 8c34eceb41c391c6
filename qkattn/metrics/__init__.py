"""Every metric of a trial, declared once: result files, tables and figures follow from METRICS.

An evaluated metric is one `Metric` with its sums and its line below. A metric that is measured when
a run ends is declared likewise, without sums, and computed by `train.results`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from qkattn.errors import ConfigError

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
        loss targets but measured by `train.results`.
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


def nats(p: Predictions) -> Any:
    return (p.nats_BT * p.loss_weights_BT).sum(-1)


def weight(p: Predictions) -> Any:
    return p.loss_weights_BT.sum(-1)


def rows(p: Predictions) -> Any:
    """1 for a row with at least one target."""
    return p.loss_weights_BT.any(-1)


def mean_loss(sums: Sums, bytes_per_target: float | None = None) -> np.ndarray:
    """Cross-entropy per target [X]."""
    return sums['nats'].sum(0) / sums['weight'].sum(0)


def standard_error(sums: Sums, bytes_per_target: float | None = None) -> np.ndarray:
    """Standard error of the loss [X] over rows; NaN for fewer than two rows.

    The loss is a ratio of two sums over R rows, of nats n and weights w, with the variance
    R / (R - 1) * sum (n - loss * w)^2 / (sum w)^2 (Cochran 1977, 'Sampling techniques', ch. 6),
    without the correction for a finite population: a split stands for all text of its kind.
    """
    excess_RX = sums['nats'] - mean_loss(sums) * sums['weight']
    rows_X = sums['rows'].sum(0)
    rows_X = np.where(rows_X > 1, rows_X, np.nan)
    return np.sqrt(rows_X / (rows_X - 1) * (excess_RX**2).sum(0)) / sums['weight'].sum(0)


def perplexity(nats_per_token: float) -> float:
    """exp(nats per token), of a mean over all tokens of a data set; inf beyond the largest float.

    The mean comes first: the mean of several batches' perplexities is larger.
    """
    with np.errstate(over='ignore'):
        return float(np.exp(np.float64(nats_per_token)))


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """nats_per_token / (ln 2 * bytes_per_token), which unlike nats does not depend on tokens.

    Raises:
      ConfigError: bytes_per_token is not above 0.
    """
    if not bytes_per_token > 0:
        raise ConfigError(f'bytes_per_token={bytes_per_token} must be above 0')
    return float(nats_per_token) / (math.log(2) * bytes_per_token)


def _bits_per_byte(sums: Sums, bytes_per_target: float | None) -> np.ndarray | None:
    if bytes_per_target is None:
        return None
    return np.array([bits_per_byte(loss, bytes_per_target) for loss in mean_loss(sums)])


def correct(p: Predictions) -> Any:
    return (p.correct_BT * p.loss_weights_BT).sum(-1)


def solved(p: Predictions) -> Any:
    right_B = (p.correct_BT | (p.loss_weights_BT == 0)).all(-1)
    return p.loss_weights_BT.any(-1) & right_B


# Each is a mean over layers and heads, null where there is none: a score that is not bilinear has
# no A[n], a value that is not linear no B[n]. Patterns are those of the first validation batch.
ATTENTION = {
    'qk_norm': 'Frobenius norm of A[n], with the scale of the logits',
    'qk_effective_rank': 'effective rank of A[n]',
    'qk_symmetric_share': 'share of the squared norm of A[n] in its symmetric part',
    'qk_factor_norm': 'norm of all parameters of the score of a layer',
    'ov_norm': 'Frobenius norm of B[n]',
    'ov_effective_rank': 'effective rank of B[n]',
    'ov_factor_norm': 'norm of all parameters of the value of a layer',
    'attention_entropy': 'entropy of attention probabilities, nats',
    'attention_logit_deviation': 'standard deviation of the logits of a query, nats',
    'attention_diagonal_mass': 'probability of the token itself',
    'attention_previous_token_mass': 'probability of the token before',
}


# Each is of the whole run, all its trials together.
TIMES = {
    'train_seconds': 'training steps, over all starts',
    'input_seconds': 'of these, waiting for the next batch on the devices',
    'gap_seconds': 'of these, devices without work between two dispatches',
    'logging_seconds': 'of these, writing metrics, mostly beside a step',
    'checkpoint_seconds': 'training waited for checkpoints, over all starts',
    'compile_seconds': 'compilation of the training program, in the last start',
    'tokens_per_second': 'training tokens per second of the last start',
}


# In the order in which they are printed: the main score first.
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            name='loss',
            label='loss',
            unit='nats/token',
            direction='lower',
            description='Mean cross-entropy of the targets.',
            role='loss',
            logged=True,
            sums=(nats, weight),
            value=mean_loss,
        ),
        Metric(
            name='bits_per_byte',
            label='bits/byte',
            unit='bits/byte',
            direction='lower',
            description='The loss per byte of text, which compares across tokenizers.',
            role='loss',
            logged=True,
            sums=(nats, weight),
            value=_bits_per_byte,
        ),
        Metric(
            name='perplexity',
            label='perplexity',
            direction='lower',
            description='Exponential of the loss.',
            role='loss',
            decimals=2,
            sums=(nats, weight),
            value=lambda sums, _: np.array([perplexity(loss) for loss in mean_loss(sums)]),
        ),
        Metric(
            name='loss_se',
            label='standard error of the loss',
            unit='nats/token',
            direction='lower',
            description='Standard error of the loss over the evaluated rows.',
            role='error',
            sums=(nats, weight, rows),
            value=standard_error,
        ),
        Metric(
            name='bleu',
            label='BLEU',
            direction='higher',
            description='Corpus BLEU of the translations, in percent (sacrebleu).',
            role='score',
            decimals=2,
            details={'num_sentences': int, 'bleu_signature': str},
        ),
        Metric(
            name='chrf',
            label='chrF',
            direction='higher',
            description='Corpus chrF2 of the translations, in percent (sacrebleu).',
            role='score',
            decimals=2,
            details={'chrf_signature': str},
        ),
        Metric(
            name='exact_match',
            label='exact match',
            unit='%',
            direction='higher',
            description='Fraction of the translations that are their reference, '
            'character by character.',
            role='score',
            scale=100.0,
            decimals=2,
        ),
        Metric(
            name='accuracy',
            label='accuracy',
            unit='%',
            direction='higher',
            description='Fraction of the targets that are the argmax prediction.',
            role='score',
            scale=100.0,
            decimals=2,
            logged=True,
            for_text=False,
            sums=(correct, weight),
            value=lambda sums, _: sums['correct'].sum(0) / sums['weight'].sum(0),
        ),
        Metric(
            name='solved',
            label='solved',
            unit='%',
            direction='higher',
            description='Fraction of the rows whose targets are all the argmax prediction.',
            role='score',
            scale=100.0,
            decimals=2,
            logged=True,
            for_text=False,
            sums=(solved, rows),
            value=lambda sums, _: sums['solved'].sum(0) / sums['rows'].sum(0),
        ),
        Metric(
            name='induction_gain',
            label='induction gain',
            unit='nats/token',
            direction='higher',
            description='How much lower the loss is on the second copy of random tokens than on '
            'the first.',
            role='probe',
            decimals=3,
            prefixes=('val',),
        ),
        Metric(
            name='induction_accuracy',
            label='induction accuracy',
            unit='%',
            direction='higher',
            description='Accuracy on the second copy of random tokens.',
            role='probe',
            scale=100.0,
            decimals=1,
            prefixes=('val',),
        ),
    )
}
EVALUATED = {name: metric for name, metric in METRICS.items() if metric.value is not None}
# The fields of an evaluation in metrics.jsonl, one value a trial.
LOGGED = tuple(metric.field('val') for metric in METRICS.values() if metric.logged)

_ROW_SUMS = {
    function.__name__: function
    for functions in ((weight, rows), *(metric.sums for metric in EVALUATED.values()))
    for function in functions
}


def row_sums(predictions: Predictions) -> dict[str, Any]:
    """What an evaluation needs of each row of a batch, [B], for all evaluated metrics, by name."""
    return {name: function(predictions) for name, function in _ROW_SUMS.items()}


def values(sums: Sums, bytes_per_target: float | None) -> dict[str, np.ndarray | None]:
    """Every evaluated metric for X trials, from the sums of R rows, each [R, X]."""
    return {
        name: value(sums, bytes_per_target)
        for name, metric in EVALUATED.items()
        if (value := metric.value) is not None
    }


def result_fields() -> dict[str, type]:
    """The fields that metrics may have in a result, and their types (null where not measured)."""
    return {
        f'{prefix}_{name}': kind
        for metric in METRICS.values()
        for prefix in metric.prefixes
        for name, kind in {metric.name: float, **metric.details}.items()
    }
