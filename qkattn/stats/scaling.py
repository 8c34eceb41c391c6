"""Scaling laws: the loss as a function of model size, and parameter multipliers.

The law is L(N) = E + A N^-a with E, A, a >= 0, for the loss L in nats per token, the number of
parameters N and the irreducible loss E. The power law in N is from Kaplan et al. 2020 ("Scaling
laws for neural language models"), and the floor E from Hoffmann et al. 2022 ("Training
compute-optimal large language models"), section D.

A few sizes determine E, A and a poorly (Besiroglu et al. 2024, "Chinchilla scaling: a replication
attempt"). So estimates have intervals, and functions return a `Problem` if the data do not
determine an estimate.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import optimize

from qkattn.stats.inference import combined, t_quantile

# Minimum number of sizes for a law.
MIN_SIZES = 4
# Minimum ratio of the largest to the smallest size for a law.
MIN_SPAN = 4.0
# Minimum R^2 of a law.
MIN_R_SQUARED = 0.95
# Maximum factor by which a law is extrapolated beyond its sizes.
REACH = 2.0
# Search range of the exponent a.
MIN_EXPONENT = 1e-3
MAX_EXPONENT = 10.0
# An exponent within this fraction of an end of the range counts as being at the end.
AT_END = 0.01


class ProblemCode(enum.Enum):
    """Why there is no law or multiplier; [name] is an entry of `Problem.data`."""

    # There are [sizes] sizes spanning a factor of [factor]. A law needs [needed] sizes spanning a
    # factor of [span].
    FEW_SIZES = enum.auto()
    # R^2 is [r_squared]; a law needs [needed].
    POOR_FIT = enum.auto()
    # The interval [low] to [high] of the exponent [value] is too wide, or the exponent is at an end
    # of its search range.
    EXPONENT_LOOSE = enum.auto()
    # The baseline of a multiplier has no law.
    NO_BASELINE_LAW = enum.auto()
    # The arm and baseline of a multiplier share only one size.
    SINGLE_SIZE = enum.auto()
    # An arm with [parameters] parameters is worth a baseline more than [factor] times beyond the
    # sizes of the baseline's law.
    EXTRAPOLATED = enum.auto()


@dataclasses.dataclass(frozen=True)
class Problem:
    """The reason why there is no estimate, with the numbers behind the reason."""

    code: ProblemCode
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, eq=False)
class Law:
    """The fitted law L(N) = E + A N^-a = E + B (N / N_0)^-a."""

    sizes: tuple[float, ...]  # parameters, ascending
    middle: float  # N_0, the geometric mean of the sizes
    estimates_P: np.ndarray  # [E, B, a]
    covariance_PP: np.ndarray  # of the errors of [E, B, a]
    df: int  # degrees of freedom of the covariance
    E: Interval  # nats
    A: float  # nats * parameters^a
    a: Interval
    r_squared: float  # of the mean losses
    # Why E, A and a are poorly determined, although the curve between the sizes is well determined;
    # None if E, A and a are well determined.
    loose: Problem | None

    def loss(self, parameters: float) -> float:
        """Returns the loss in nats per token of a model with this many parameters."""
        E, B, a = self.estimates_P
        return float(_law(parameters / self.middle, E, B, a))


def _law(x: Any, E: Any, B: Any, a: Any) -> Any:
    """Returns E + B x^-a, with x = N / N_0."""
    return E + B * x**-a


def fit(
    parameters: Sequence[float], losses: Sequence[float], seeds: tuple[float, int] = (0.0, 1)
) -> Law | Problem:
    """Fits the law to the mean losses of V sizes by least squares.

    Intervals are t intervals of the linearized fit. Their variance is estimated from the residuals,
    with V - 3 degrees of freedom, or from the seeds if this gives wider intervals.

    Args:
        parameters: The number of parameters of each size.
        losses: The mean loss of each size over seeds, nats per token. Leave out sizes with a
            diverged seed, whose mean would be biased low.
        seeds: The variance of the mean losses due to the seeds, and its degrees of freedom.

    Returns:
        A Law, or a Problem if there are fewer than 4 sizes, the sizes span less than a factor of 4,
        R^2 is below 0.95, or the exponent is at an end of its search range. The law is `loose` if
        the interval of its exponent is wider than the exponent or exceeds the search range.
    """
    order = np.argsort(parameters)
    sizes_V = np.asarray(parameters, float)[order]
    losses_V = np.asarray(losses, float)[order]
    num_sizes = len(set(sizes_V.tolist()))
    span = float(sizes_V[-1] / sizes_V[0])
    if num_sizes < MIN_SIZES or span < MIN_SPAN:
        return Problem(
            ProblemCode.FEW_SIZES,
            {'sizes': num_sizes, 'factor': span, 'needed': MIN_SIZES, 'span': MIN_SPAN},
        )

    middle = float(np.exp(np.mean(np.log(sizes_V))))  # the geometric mean
    x_V = sizes_V / middle
    E, B, a, residual_norm = _least_squares(x_V, losses_V)
    squares_around_mean = float(np.sum((losses_V - losses_V.mean()) ** 2))
    r_squared = 0.0
    if squares_around_mean:
        r_squared = 1 - residual_norm**2 / squares_around_mean
    if r_squared < MIN_R_SQUARED:
        return Problem(ProblemCode.POOR_FIT, {'r_squared': r_squared, 'needed': MIN_R_SQUARED})

    # The Jacobian of the law: dL/dE, dL/dB and dL/da at each size.
    jacobian_VP = np.column_stack([np.ones_like(x_V), x_V**-a, -B * x_V**-a * np.log(x_V)])
    df_of_residuals = len(sizes_V) - 3
    residuals = (residual_norm**2 / df_of_residuals, df_of_residuals)
    # Both are pairs (variance, degrees of freedom).
    variance, df = max(residuals, seeds, key=_interval_width)
    covariance_PP = variance * np.linalg.inv(jacobian_VP.T @ jacobian_VP)
    half_width_P = t_quantile(df) * np.sqrt(np.diag(covariance_PP))
    half_width_of_E, _, half_width_of_a = half_width_P.tolist()
    floor = Interval(E, E - half_width_of_E, E + half_width_of_E)
    exponent = Interval(a, a - half_width_of_a, a + half_width_of_a)

    exponent_loose = Problem(ProblemCode.EXPONENT_LOOSE, vars(exponent))
    is_at_start = a <= (1 + AT_END) * MIN_EXPONENT
    is_at_end = a >= (1 - AT_END) * MAX_EXPONENT
    if is_at_start or is_at_end:
        return exponent_loose
    is_too_wide = exponent.high - exponent.low > a
    is_loose = is_too_wide or exponent.high > MAX_EXPONENT
    return Law(
        sizes=tuple(sizes_V.tolist()),
        middle=middle,
        estimates_P=np.array([E, B, a]),
        covariance_PP=covariance_PP,
        df=df,
        E=floor,
        A=B * middle**a,
        a=exponent,
        r_squared=r_squared,
        loose=exponent_loose if is_loose else None,
    )


def _least_squares(x_V: np.ndarray, losses_V: np.ndarray) -> tuple[float, float, float, float]:
    """Fits E + B x^-a to V losses; returns E, B, a and the norm of the residuals.

    For a given a, the fit of E and B is linear, so the search is only over a (variable projection,
    Golub and Pereyra 1973).
    """

    def fit_linear(a: float) -> tuple[np.ndarray, float]:
        """Fits E >= 0 and B >= 0 for a given a; returns [E, B] and the residual norm."""
        design_VP = np.column_stack([np.ones_like(x_V), x_V**-a])
        return optimize.nnls(design_VP, losses_V)

    def residual_norm(log_a: float) -> float:
        _, norm = fit_linear(np.exp(log_a))
        return norm

    search = optimize.minimize_scalar(
        residual_norm,
        bounds=np.log([MIN_EXPONENT, MAX_EXPONENT]),
        method='bounded',
        options={'xatol': 1e-9},
    )
    a = float(np.exp(search.x))
    (E, B), norm = fit_linear(a)
    return float(E), float(B), a, norm


def _interval_width(variance_and_df: tuple[float, float]) -> float:
    """Returns the half-width of the 95 % interval for a variance and its degrees of freedom."""
    variance, df = variance_and_df
    return t_quantile(df) * variance**0.5


def multiplier(
    law: Law | Problem, sizes: Sequence[tuple[float, float, float]]
) -> Interval | Problem:
    """Estimates how many parameters of the baseline one parameter of an arm is worth.

    At each of V sizes, an arm with N parameters has the loss that the baseline's law predicts for
    N_eq parameters. The estimate is the geometric mean of N_eq / N over sizes. Its interval
    includes the variation over sizes and the error of the law.

    Args:
        law: The law of the baseline, or the reason why there is none.
        sizes: For each size, the triple of the arm's parameters, the baseline's parameters, and
            the arm's loss minus the baseline's loss in nats per token.

    Returns:
        The estimate, or a Problem if the baseline has no law, there are fewer than 2 sizes, or an
        N_eq is not between half the smallest and twice the largest size of the law.
    """
    if isinstance(law, Problem):
        return Problem(ProblemCode.NO_BASELINE_LAW)
    if len(sizes) < 2:
        return Problem(ProblemCode.SINGLE_SIZE)
    arm_V, baseline_V, difference_V = np.array(sizes, float).T

    def log_equivalent_size(estimates_P: np.ndarray) -> np.ndarray:
        """Returns ln N_eq of each size; NaN if the arm's loss is below the floor E of the law."""
        E, B, a = estimates_P
        arm_loss_V = _law(baseline_V / law.middle, E, B, a) + difference_V
        above_floor_V = arm_loss_V - E
        # Solve E + B (N_eq / N_0)^-a = arm_loss for ln N_eq.
        with np.errstate(invalid='ignore', divide='ignore'):
            return np.log(law.middle) - np.log(above_floor_V / B) / a

    smallest = law.sizes[0] / REACH
    largest = law.sizes[-1] * REACH
    log_smallest, log_largest = np.log([smallest, largest])
    log_equivalent_V = log_equivalent_size(law.estimates_P)
    # Comparisons with NaN are false.
    is_inside_V = (log_smallest <= log_equivalent_V) & (log_equivalent_V <= log_largest)
    if not is_inside_V.all():
        first_outside = float(arm_V[is_inside_V.argmin()])
        return Problem(ProblemCode.EXTRAPOLATED, {'parameters': first_outside, 'factor': REACH})

    log_ratio_V = log_equivalent_V - np.log(arm_V)  # ln(N_eq / N)
    mean = float(log_ratio_V.mean())
    error_of_sizes = float(log_ratio_V.std(ddof=1)) / len(sizes) ** 0.5

    def mean_log_equivalent_size(estimates_P: np.ndarray) -> float:
        return log_equivalent_size(estimates_P).mean()

    # Propagate the errors of E, B and a by the gradient of the mean.
    gradient_P = optimize.approx_fprime(law.estimates_P, mean_log_equivalent_size)
    error_of_law = float(gradient_P @ law.covariance_PP @ gradient_P) ** 0.5
    error, df = combined([(error_of_sizes, len(sizes) - 1), (error_of_law, law.df)])

    half_width = t_quantile(df) * error
    value, low, high = np.exp([mean, mean - half_width, mean + half_width]).tolist()
    return Interval(value, low, high)
