"""Scaling laws: how loss falls with size, and how many baseline parameters one of an arm is worth.

The law is L(N) = E + A N^-a with E, A, a >= 0: L the loss in nats per token, N the parameters, E
the irreducible loss. The power law in N is Kaplan et al. 2020 ("Scaling laws for neural language
models"); the floor E is Hoffmann et al. 2022 ("Training compute-optimal large language models"),
section D. The three numbers trade off over the few sizes of a study, and published intervals were
far narrower than the data allow (Besiroglu et al. 2024, "Chinchilla scaling: a replication
attempt"). Hence no number is given without an interval, nor where the data do not determine it: a
`Problem` holds the reason. What parameters are worth depends on the curve between the sizes alone.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import optimize

from qkattn.stats.inference import combined, quantile

# What a law needs: sizes, the factor in parameters from the smallest to the largest, and R^2.
MIN_SIZES = 4
MIN_SPAN = 4.0
MIN_R_SQUARED = 0.95
# How far beyond the baseline's sizes its law is used, as a factor of parameters.
REACH = 2.0
# The exponents that are searched.
MIN_EXPONENT = 1e-3
MAX_EXPONENT = 10.0


class ProblemCode(enum.Enum):
    """Why there is no law or no multiplier; the members of `Problem.data` are in brackets."""

    FEW_SIZES = enum.auto()  # [sizes] that span a [factor]; [needed] and [span] at least
    POOR_FIT = enum.auto()  # [r_squared], [needed] at least
    EXPONENT_LOOSE = enum.auto()  # [value], with an interval from [low] to [high], or a bound
    # Of multipliers.
    NO_BASELINE_LAW = enum.auto()
    SINGLE_SIZE = enum.auto()  # of the arm and the baseline
    EXTRAPOLATED = enum.auto()  # at [parameters] beyond [factor] times the baseline's sizes


@dataclasses.dataclass(frozen=True)
class Problem:
    """A reason with its numbers."""

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
    df: int  # of that covariance
    E: Interval
    A: float  # nats * parameters^a
    a: Interval
    r_squared: float  # of the mean losses
    loose: Problem | None  # why E, A and a are no findings; the curve between the sizes is one

    def loss(self, parameters: float) -> float:
        """Nats per token at `parameters`."""
        return float(_law(parameters / self.middle, *self.estimates_P))


def _law(x: Any, E: Any, B: Any, a: Any) -> Any:
    return E + B * x**-a


def fit(
    parameters: Sequence[float], losses: Sequence[float], seeds: tuple[float, int] = (0.0, 1)
) -> Law | Problem:
    """Fits the law to mean losses over seeds (nats per token), one for each of `parameters`.

    The fit is by least squares with equal weights. For a given exponent, E and B solve a linear
    problem, so only the exponent is searched (variable projection, Golub and Pereyra 1973).

    Errors are those of the linearized fit, t distributed. Their variance is that of the residuals,
    with V - 3 degrees of freedom for V sizes: residuals hold what is left of the seeds' noise, a
    loss that is not quite a power law, and learning rates that are not quite tuned. A few residuals
    may all be small by chance. So the variance of the mean losses by their `seeds`, given with its
    degrees of freedom, takes its place where intervals are wider for it.

    Returns a Problem for fewer than 4 sizes or sizes within a factor of 4, for an R^2 below 0.95,
    and for an exponent at an end of those searched. A law is `loose` if the interval of its
    exponent is wider than the exponent or reaches beyond those searched.

    A diverged seed has no loss: leave out its size, since the mean of the others is biased low.
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
    middle = float(np.exp(np.mean(np.log(sizes_V))))
    x_V = sizes_V / middle
    E, B, a, norm = _least_squares(x_V, losses_V)
    total = float(np.sum((losses_V - losses_V.mean()) ** 2))
    r_squared = 1 - norm**2 / total if total else 0.0
    if r_squared < MIN_R_SQUARED:
        return Problem(ProblemCode.POOR_FIT, {'r_squared': r_squared, 'needed': MIN_R_SQUARED})

    # dL/dE, dL/dB and dL/da at each size.
    slopes_VP = np.column_stack([np.ones_like(x_V), x_V**-a, -B * x_V**-a * np.log(x_V)])
    df_of_residuals = len(sizes_V) - 3
    of_residuals = (norm**2 / df_of_residuals, df_of_residuals)
    variance, df = max(of_residuals, seeds, key=_interval_width)
    covariance_PP = variance * np.linalg.inv(slopes_VP.T @ slopes_VP)
    half_E, _, half_a = (quantile(df) * np.sqrt(np.diag(covariance_PP))).tolist()
    floor = Interval(E, E - half_E, E + half_E)
    exponent = Interval(a, a - half_a, a + half_a)

    exponent_loose = Problem(ProblemCode.EXPONENT_LOOSE, vars(exponent))
    is_at_end = not 1.01 * MIN_EXPONENT < a < 0.99 * MAX_EXPONENT
    if is_at_end:
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
    """E, B and a of the law with the least norm of residuals, and that norm; x is N / N_0."""

    def given_exponent(a: float) -> tuple[np.ndarray, float]:
        """E and B >= 0 of the least residual norm, and the norm."""
        return optimize.nnls(np.column_stack([np.ones_like(x_V), x_V**-a]), losses_V)

    searched = optimize.minimize_scalar(
        lambda log_a: given_exponent(np.exp(log_a))[1],
        bounds=np.log([MIN_EXPONENT, MAX_EXPONENT]),
        method='bounded',
        options={'xatol': 1e-9},
    )
    a = float(np.exp(searched.x))
    (E, B), norm = given_exponent(a)
    return float(E), float(B), a, norm


def _interval_width(error: tuple[float, float]) -> float:
    """The half-width of the 95 % interval of a (variance, degrees of freedom)."""
    variance, df = error
    return quantile(df) * variance**0.5


def multiplier(
    law: Law | Problem, sizes: Sequence[tuple[float, float, float]]
) -> Interval | Problem:
    """How many parameters of the baseline one of an arm is worth: the geometric mean over sizes.

    Each of `sizes` is (parameters of the arm, of the baseline, the arm's loss minus the baseline's
    in nats per token). With the baseline's `law`, an arm of N parameters is worth N_eq / N, where
    the law at N_eq lies that far from the law at the baseline's parameters. The interval includes
    the error over sizes, which holds the noise of their seeds, and that of the law.

    A Problem: a baseline without a law; fewer than 2 sizes; an N_eq that is not between half the
    smallest and twice the largest size of the law.
    """
    if isinstance(law, Problem):
        return Problem(ProblemCode.NO_BASELINE_LAW)
    if len(sizes) < 2:
        return Problem(ProblemCode.SINGLE_SIZE)
    arm_V, baseline_V, difference_V = np.array(sizes, float).T

    def equivalent(estimates_P: np.ndarray) -> np.ndarray:
        """ln N_eq of each size; not a number where the loss lies below the floor."""
        E, B, a = estimates_P
        above_floor_V = _law(baseline_V / law.middle, E, B, a) + difference_V - E
        with np.errstate(invalid='ignore', divide='ignore'):
            return np.log(law.middle) - np.log(above_floor_V / B) / a

    lowest, highest = np.log([law.sizes[0] / REACH, law.sizes[-1] * REACH])
    equivalent_V = equivalent(law.estimates_P)
    is_inside_V = (lowest <= equivalent_V) & (equivalent_V <= highest)
    if not is_inside_V.all():
        first_outside = float(arm_V[is_inside_V.argmin()])
        return Problem(ProblemCode.EXTRAPOLATED, {'parameters': first_outside, 'factor': REACH})

    worth_V = equivalent_V - np.log(arm_V)  # ln of N_eq / N
    mean = float(worth_V.mean())
    error_of_sizes = float(worth_V.std(ddof=1)) / len(sizes) ** 0.5
    slope_P = optimize.approx_fprime(law.estimates_P, lambda p: equivalent(p).mean())
    error_of_law = float(slope_P @ law.covariance_PP @ slope_P) ** 0.5
    error, df = combined([(error_of_sizes, len(sizes) - 1), (error_of_law, law.df)])
    half = quantile(df) * error
    return Interval(*np.exp([mean, mean - half, mean + half]).tolist())
