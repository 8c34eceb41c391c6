"""Metrics of the loss."""

import math
from typing import Any

import numpy as np

from qkattn.errors import ConfigError
from qkattn.metrics.metric import Metric, Predictions, Sums


def nats(p: Predictions) -> Any:
    return (p.nats_BT * p.loss_weights_BT).sum(-1).sum()


def weight(p: Predictions) -> Any:
    return p.loss_weights_BT.sum(-1).sum()


def rows(p: Predictions) -> Any:
    """Rows with at least one target."""
    return p.loss_weights_BT.any(-1).sum()


def _excess_B(p: Predictions) -> Any:
    """Each row's nats above the batch's mean loss times the row's weight.

    Rows differ little from their mean: squares of nats themselves would cancel in float32.
    """
    nats_B, weight_B = (p.nats_BT * p.loss_weights_BT).sum(-1), p.loss_weights_BT.sum(-1)
    return nats_B - nats(p) / weight(p).clip(1) * weight_B


def excess_squared(p: Predictions) -> Any:
    return (_excess_B(p) ** 2).sum()


def excess_weight(p: Predictions) -> Any:
    return (_excess_B(p) * p.loss_weights_BT.sum(-1)).sum()


def weight_squared(p: Predictions) -> Any:
    return (p.loss_weights_BT.sum(-1) ** 2).sum()


def mean_loss(sums: Sums, bytes_per_target: float | None = None) -> np.ndarray:
    """Cross-entropy per target [X]."""
    return sums['nats'].sum(0) / sums['weight'].sum(0)


def standard_error(sums: Sums, bytes_per_target: float | None = None) -> np.ndarray:
    """Standard error of the loss [X] over rows; NaN for fewer than two rows.

    The loss is a ratio of two sums over R rows, of nats n and weights w, with the variance
    R / (R - 1) * sum (n - loss * w)^2 / (sum w)^2 (Cochran 1977, 'Sampling techniques', ch. 6),
    without the correction for a finite population: a split stands for all text of its kind.
    """
    total = {name: parts_PX.sum(0) for name, parts_PX in sums.items()}
    # Row excesses are over the mean of their own batch; shift_PX leads on to the overall mean.
    own_PX = sums['nats'] / np.maximum(sums['weight'], 1)
    shift_PX = total['nats'] / np.maximum(total['weight'], 1) - own_PX
    squares_PX = (
        sums['excess_squared']
        - 2 * shift_PX * sums['excess_weight']
        + shift_PX**2 * sums['weight_squared']
    )
    rows_X = np.where(total['rows'] > 1, total['rows'], np.nan)
    return np.sqrt(rows_X / (rows_X - 1) * squares_PX.sum(0)) / total['weight']


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


LOSS = Metric(
    name='loss',
    label='loss',
    unit='nats/token',
    direction='lower',
    description='Mean cross-entropy of the targets.',
    role='loss',
    logged=True,
    sums=(nats, weight),
    value=mean_loss,
)
BITS_PER_BYTE = Metric(
    name='bits_per_byte',
    label='bits/byte',
    unit='bits/byte',
    direction='lower',
    description='The loss per byte of text, which compares across tokenizers.',
    role='loss',
    logged=True,
    sums=(nats, weight),
    value=_bits_per_byte,
)
PERPLEXITY = Metric(
    name='perplexity',
    label='perplexity',
    direction='lower',
    description='Exponential of the loss.',
    role='loss',
    decimals=2,
    sums=(nats, weight),
    value=lambda sums, _: np.array([perplexity(loss) for loss in mean_loss(sums)]),
)
LOSS_SE = Metric(
    name='loss_se',
    label='standard error of the loss',
    unit='nats/token',
    direction='lower',
    description='Standard error of the loss over the evaluated rows.',
    role='error',
    sums=(nats, weight, rows, excess_squared, excess_weight, weight_squared),
    value=standard_error,
)
