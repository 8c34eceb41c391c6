"""Scaling laws: how loss falls with size, and how many baseline parameters one of an arm is worth.

The law is L(N) = E + A N^-a with E, A, a >= 0. L is the loss in nats per token, N the number of
parameters and E the irreducible loss. The power law in N is from Kaplan et al. 2020 ("Scaling laws
for neural language models"). The floor E is from Hoffmann et al. 2022 ("Training compute-optimal
large language models"), section D.

Over the few sizes of a study, E, A and a trade off against each other, and published intervals were
far narrower than the data allow (Besiroglu et al. 2024, "Chinchilla scaling: a replication
attempt"). So every number has an interval. If the data do not determine a number, a `Problem` with
the reason stands in its place. The worth of parameters depends only on the curve between the sizes.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import optimize

from qkattn.stats.inference import combined, t_quantile

# A law needs this many sizes.
MIN_SIZES = 4
# The largest size needs this many times the parameters of the smallest one.
MIN_SPAN = 4.0
# The fit needs this R^2.
MIN_R_SQUARED = 0.95
# The baseline's law is used up to this factor of parameters beyond its sizes.
REACH = 2.0
# The range of exponents a that the fit searches.
MIN_EXPONENT = 1e-3
MAX_EXPONENT = 10.0
# An exponent within this fraction of an end of the range counts as being at the end.
AT_END = 0.01


class ProblemCode(enum.Enum):
    """Why there is no law or no multiplier; the members of `Problem.data` are in brackets."""

    # There are only [sizes] sizes, which span a factor of [factor]. A law needs [needed] sizes that
    # span a factor of [span].
    FEW_SIZES = enum.auto()
    # R^2 is only [r_squared]; a law needs [needed].
    POOR_FIT = enum.auto()
    # The exponent [value] has an interval from [low] to [high], which is too wide, or lies at an
    # end of the range that is searched.
    EXPONENT_LOOSE = enum.auto()
    # There is no multiplier because the baseline has no law.
    NO_BASELINE_LAW = enum.auto()
    # There is no multiplier because arm and baseline share only one size.
    SINGLE_SIZE = enum.auto()
    # There is no multiplier because an arm with [parameters] parameters is worth a baseline more
    # than [factor] times beyond the baseline's sizes.
    EXTRAPOLATED = enum.auto()


@dataclasses.dataclass(frozen=True)
class Problem:
    """The reason why there is no number, with the numbers behind the reason."""

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
    """L(N) = E + A N^-a = E + B (N / N_0)^-a, with N_0 the geometric mean of the sizes.

    `estimates_P` are E and B in nats and a; `covariance_PP` is that of their errors.
    """

    sizes: tuple[float, ...]  # parameters, ascending
    middle: float  # N_0
    estimates_P: np.ndarray
    covariance_PP: np.ndarray
    df: int  # the degrees of freedom of the covariance
    E: Interval
    A: float  # nats * parameters^a
    a: Interval
    r_squared: float  # of the mean losses
    # Why the data do not determine E, A and a; None if they do. The curve between the sizes is
    # determined in both cases.
    loose: Problem | None

    def loss(self, parameters: float) -> float:
        """Returns the nats per token of a model with this many parameters."""
        E, B, a = self.estimates_P
        return float(_law(parameters / self.middle, E, B, a))


def _law(x: Any, E: Any, B: Any, a: Any) -> Any:
    """Returns E + B x^-a, with x = N / N_0."""
    return E + B * x**-a


def fit(
    parameters: Sequence[float], losses: Sequence[float], seeds: tuple[float, int] = (0.0, 1)
) -> Law | Problem:
    """Fits the law to the mean losses of V sizes.

    The fit is by least squares with equal weights. For a given exponent, E and B solve a linear
    problem, so only the exponent is searched (variable projection, Golub and Pereyra 1973).

    Errors are those of the linearized fit, and t distributed. Their variance is that of the
    residuals, with V - 3 degrees of freedom. The residuals include noise of the seeds, deviations
    from a power law, and imperfect learning rates. By chance, a few residuals may all be small. So
    the variance that the seeds show replaces that of the residuals if it gives wider intervals.

    Args:
        parameters: The number of parameters of each size.
        losses: The mean loss over seeds of each size, nats per token. If a seed of a size diverged,
            leave out the size, since the mean of the other seeds is biased low.
        seeds: The variance of the mean losses due to the seeds, and its degrees of freedom.

    Returns:
        A Problem if there are fewer than 4 sizes, if they span less than a factor of 4, if R^2 is
        below 0.95, or if the exponent is at an end of the range that is searched. Otherwise a Law.
        The law is `loose` if the interval of its exponent is wider than the exponent or reaches
        beyond the largest exponent that is searched.
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

    # Fit the law to sizes divided by their geometric mean.
    middle = float(np.exp(np.mean(np.log(sizes_V))))
    x_V = sizes_V / middle
    E, B, a, residual_norm = _least_squares(x_V, losses_V)
    squares_around_mean = float(np.sum((losses_V - losses_V.mean()) ** 2))
    r_squared = 0.0
    if squares_around_mean:
        r_squared = 1 - residual_norm**2 / squares_around_mean
    if r_squared < MIN_R_SQUARED:
        return Problem(ProblemCode.POOR_FIT, {'r_squared': r_squared, 'needed': MIN_R_SQUARED})

    # The errors of E, B and a, from the slopes dL/dE, dL/dB and dL/da at each size.
    slopes_VP = np.column_stack([np.ones_like(x_V), x_V**-a, -B * x_V**-a * np.log(x_V)])
    df_of_residuals = len(sizes_V) - 3
    residuals = (residual_norm**2 / df_of_residuals, df_of_residuals)
    variance, df = max(residuals, seeds, key=_interval_width)
    covariance_PP = variance * np.linalg.inv(slopes_VP.T @ slopes_VP)
    half_width_P = t_quantile(df) * np.sqrt(np.diag(covariance_PP))
    half_width_of_E, _, half_width_of_a = half_width_P.tolist()
    floor = Interval(E, E - half_width_of_E, E + half_width_of_E)
    exponent = Interval(a, a - half_width_of_a, a + half_width_of_a)

    # Do the losses determine the exponent?
    exponent_loose = Problem(ProblemCode.EXPONENT_LOOSE, vars(exponent))
    is_at_start = a <= (1 + AT_END) * MIN_EXPONENT
    is_at_end = a >= (1 - AT_END) * MAX_EXPONENT
    if is_at_start or is_at_end:
        return exponent_loose
    is_loose = exponent.high - exponent.low > a or exponent.high > MAX_EXPONENT
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
    """Fits losses = E + B x^-a, with x = N / N_0; returns E, B, a and the norm of the residuals."""

    def fit_linear(a: float) -> tuple[np.ndarray, float]:
        """Fits E and B, both >= 0, for a given exponent; returns [E, B] and the residual norm."""
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


def _interval_width(error: tuple[float, float]) -> float:
    """Returns the half-width of the 95 % interval for a pair (variance, degrees of freedom)."""
    variance, df = error
    return t_quantile(df) * variance**0.5


def multiplier(
    law: Law | Problem, sizes: Sequence[tuple[float, float, float]]
) -> Interval | Problem:
    """Estimates how many parameters of the baseline one parameter of an arm is worth.

    At each size, the baseline's law gives the number of parameters N_eq with which the baseline
    would reach the arm's loss. If the arm has N parameters, one of them is worth N_eq / N. The
    result is the geometric mean over sizes. Its interval includes the error over sizes, and thereby
    the noise of the seeds, and the error of the law.

    Args:
        law: The law of the baseline, or the reason why there is none.
        sizes: One triple for each size: the arm's parameters, the baseline's parameters, and the
            arm's loss minus the baseline's loss in nats per token.

    Returns:
        A Problem if the baseline has no law, if there are fewer than 2 sizes, or if an N_eq does
        not lie between half the smallest and twice the largest size of the law.
    """
    if isinstance(law, Problem):
        return Problem(ProblemCode.NO_BASELINE_LAW)
    if len(sizes) < 2:
        return Problem(ProblemCode.SINGLE_SIZE)
    arm_V, baseline_V, difference_V = np.array(sizes, float).T

    def log_equivalent_size(estimates_P: np.ndarray) -> np.ndarray:
        """Returns ln N_eq of each size; NaN if the arm's loss lies below the floor of the law."""
        E, B, a = estimates_P
        arm_loss_V = _law(baseline_V / law.middle, E, B, a) + difference_V
        above_floor_V = arm_loss_V - E
        with np.errstate(invalid='ignore', divide='ignore'):
            return np.log(law.middle) - np.log(above_floor_V / B) / a

    smallest = law.sizes[0] / REACH
    largest = law.sizes[-1] * REACH
    log_smallest, log_largest = np.log([smallest, largest])
    log_equivalent_V = log_equivalent_size(law.estimates_P)
    # NaN is not inside.
    is_inside_V = (log_smallest <= log_equivalent_V) & (log_equivalent_V <= log_largest)
    if not is_inside_V.all():
        first_outside = float(arm_V[is_inside_V.argmin()])
        return Problem(ProblemCode.EXTRAPOLATED, {'parameters': first_outside, 'factor': REACH})

    log_worth_V = log_equivalent_V - np.log(arm_V)  # ln of N_eq / N
    mean = float(log_worth_V.mean())
    error_of_sizes = float(log_worth_V.std(ddof=1)) / len(sizes) ** 0.5
    # The error of the law propagates by the slope of the mean in E, B and a.
    slope_P = optimize.approx_fprime(law.estimates_P, lambda p: log_equivalent_size(p).mean())
    error_of_law = float(slope_P @ law.covariance_PP @ slope_P) ** 0.5
    error, df = combined([(error_of_sizes, len(sizes) - 1), (error_of_law, law.df)])

    half_width = t_quantile(df) * error
    value, low, high = np.exp([mean, mean - half_width, mean + half_width]).tolist()
    return Interval(value, low, high)
