"""The power law with a floor, L(N) = E + A N^-a, and its least-squares fit.

For a given exponent, E >= 0 and A >= 0 solve a linear problem in closed form, so only the exponent
is searched (variable projection, Golub and Pereyra 1973): on a grid over its whole range, which
finds the global minimum, then by scipy's bracketing minimizer, for many rows of losses at once.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy.optimize import elementwise

MAX_EXPONENT = 4.0

_LOG_EXPONENTS = np.log(np.geomspace(1e-3, MAX_EXPONENT, 48))


@dataclasses.dataclass(frozen=True)
class Table:
    """Losses by size, ascending in parameters; `df`: degrees of freedom of the seeds' variance."""

    parameters: np.ndarray
    losses: tuple[np.ndarray, ...]

    @property
    def means(self) -> np.ndarray:
        return np.array([values.mean() for values in self.losses])

    @property
    def df(self) -> int:
        return sum(len(values) - 1 for values in self.losses)

    def variance(self) -> float:
        """Of a mean loss over seeds, nats^2, averaged over sizes; 0 if every size has one seed."""
        squares = sum(np.square(values - values.mean()).sum() for values in self.losses)
        return squares / max(self.df, 1) * np.mean([1 / len(values) for values in self.losses])

    def deviations(self) -> list[np.ndarray]:
        """From the mean, unbiased in variance, by size; those of all sizes for a single seed."""
        own = [(v - v.mean()) * np.sqrt(len(v) / max(len(v) - 1, 1)) for v in self.losses]
        pool = [values for values in own if len(values) > 1] or [np.zeros(1)]
        return [values if len(values) > 1 else np.concatenate(pool) for values in own]


@dataclasses.dataclass(frozen=True)
class Law:
    """E + A (N / reference)^-a; columns with one row per fitted row of losses."""

    E: np.ndarray
    A: np.ndarray
    a: np.ndarray
    log_reference: float

    @property
    def numbers(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """E in nats, A in nats * parameters^a, a."""
        return self.E, self.A * np.exp(self.a * self.log_reference), self.a

    def loss(self, parameters: np.ndarray) -> np.ndarray:
        return self.E + self.A * np.exp(-self.a * (np.log(parameters) - self.log_reference))

    def log_parameters(self, loss: np.ndarray) -> np.ndarray:
        """ln N at which the law has `loss`: inf at and below E, -inf where the law is flat."""
        above = loss - self.E
        with np.errstate(divide='ignore', invalid='ignore'):
            log_ratio = np.where(above > 0, np.log(self.A / above), np.inf)
        return self.log_reference + log_ratio / self.a


def least_squares(parameters: np.ndarray, losses_XN: np.ndarray) -> Law:
    """The law of every row, one column each: the best exponent of a grid, then refined."""
    log_reference = float(np.log(parameters).mean())
    log_N = np.log(parameters) - log_reference

    def error(log_a: np.ndarray, *y: np.ndarray) -> np.ndarray:
        x, y_N = np.exp(-np.exp(log_a)[..., None] * log_N), np.stack(y, -1)
        E, A = _linear(x, y_N)
        return np.square(y_N - E[..., None] - A[..., None] * x).sum(-1)

    columns = tuple(losses_XN.T)
    best_X = error(_LOG_EXPONENTS[:, None], *columns).argmin(0)
    log_a_X = _LOG_EXPONENTS[best_X]
    inner = (best_X > 0) & (best_X < len(_LOG_EXPONENTS) - 1)
    if inner.any():
        bracket = tuple(_LOG_EXPONENTS[best_X[inner] + step] for step in (-1, 0, 1))
        refined = elementwise.find_minimum(error, bracket, args=tuple(y[inner] for y in columns))
        log_a_X[inner] = np.where(refined.success, refined.x, log_a_X[inner])
    a_X = np.exp(log_a_X)
    E_X, A_X = _linear(np.exp(-a_X[:, None] * log_N), losses_XN)
    return Law(E_X[:, None], A_X[:, None], a_X[:, None], log_reference)


def _linear(x_N: np.ndarray, y_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E >= 0, A >= 0 with the least squared error of E + A x over the last axis."""
    centred_N = x_N - x_N.mean(-1, keepdims=True)
    A = (y_N * centred_N).sum(-1) / np.square(centred_N).sum(-1)
    E = y_N.mean(-1) - A * x_N.mean(-1)
    A = np.where(E < 0, (x_N * y_N).sum(-1) / np.square(x_N).sum(-1), A)
    return np.where(A < 0, y_N.mean(-1), np.maximum(E, 0)), np.maximum(A, 0)


def table(name: str, sizes: Sequence[float], losses: Sequence[Sequence[float]]) -> Table:
    """Checks parameters and losses per size and seed; ValueError begins with `name`."""
    if len(sizes) != len(losses) or not len(sizes):
        raise ValueError(
            f'{name}: every size needs parameters and losses, not {len(sizes)} parameters and '
            f'{len(losses)} rows of losses'
        )
    parameters, rows = np.asarray(sizes, float), [np.asarray(row, float) for row in losses]
    for number, row in zip(parameters, rows, strict=True):
        if not (np.isfinite(number) and number > 0):
            raise ValueError(f'{name}: parameters must be positive and finite, not {number}')
        if row.ndim != 1 or not row.size or not np.isfinite(row).all():
            raise ValueError(
                f'{name}: losses at {number:,.0f} parameters must be one finite number per seed, '
                f'not {row.tolist()}'
            )
    order = np.argsort(parameters, kind='stable')
    return Table(parameters[order], tuple(rows[i] for i in order))
