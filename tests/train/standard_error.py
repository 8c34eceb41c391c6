"""The standard error of a mean over targets, in float64."""

import math

import numpy as np


def standard_error(nats_R, weights_R) -> float:
    """That of a ratio of sums over rows; rows without targets do not count."""
    nats_R, weights_R = np.asarray(nats_R, np.float64), np.asarray(weights_R, np.float64)
    used = weights_R > 0
    R, loss = used.sum(), nats_R.sum() / weights_R.sum()
    squares = (nats_R - loss * weights_R)[used] ** 2
    return math.sqrt(R / (R - 1) * squares.sum()) / weights_R.sum()
