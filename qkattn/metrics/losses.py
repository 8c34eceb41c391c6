"""Metrics of the loss."""

import math
from typing import Any

import numpy as np

from qkattn.errors import ConfigError
from qkattn.metrics.metric import Metric, Predictions, Sums


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
    sums=(nats, weight, rows),
    value=standard_error,
)
