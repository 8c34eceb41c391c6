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

MIN_SIZES = 4
MIN_SPAN = 4.0  # from the smallest to the largest size, as a factor of parameters
MIN_R_SQUARED = 0.95
REACH = 2.0  # how far beyond the baseline's sizes its law is used, as a factor of parameters
_EXPONENTS = 1e-3, 10.0  # that are searched


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

    By least squares with equal weights: for a given exponent, E and B solve a linear problem, so
    only the exponent is searched (variable projection, Golub and Pereyra 1973). Errors are those of
    the linearized fit, t distributed; their variance is that of the residuals, with V - 3 degrees
    of freedom for V sizes. The residuals hold what is left of the seeds' noise, a loss that is not
    quite a power law, and learning rates that are not quite tuned. A few may all be small by
    chance, so the variance of the mean losses by their `seeds`, given with its degrees of freedom,
    takes its place where intervals are wider for it. A Problem: fewer than 4 sizes, or within a
    factor of 4; R^2 below 0.95; an exponent at an end of those searched. If the interval of the
    exponent is wider than itself or reaches beyond those searched, the law is `loose`.

    A diverged seed has no loss: leave out its size, since the mean of the others is biased low.
    """
    order = np.argsort(parameters)
    sizes, losses_V = np.asarray(parameters, float)[order], np.asarray(losses, float)[order]
    number, factor = len(set(sizes.tolist())), float(sizes[-1] / sizes[0])
    if number < MIN_SIZES or factor < MIN_SPAN:
        needed = {'needed': MIN_SIZES, 'span': MIN_SPAN}
        return Problem(ProblemCode.FEW_SIZES, {'sizes': number, 'factor': factor} | needed)
    middle = float(np.exp(np.mean(np.log(sizes))))
    x, df = sizes / middle, len(sizes) - 3

    def linear(a: float) -> tuple[np.ndarray, float]:
        """E and B >= 0 of the least residual norm, and the norm."""
        return optimize.nnls(np.column_stack([np.ones_like(x), x**-a]), losses_V)

    searched = optimize.minimize_scalar(
        lambda log_a: linear(np.exp(log_a))[1],
        bounds=np.log(_EXPONENTS),
        method='bounded',
        options={'xatol': 1e-9},
    )
    a = float(np.exp(searched.x))
    (E, B), norm = linear(a)
    total = float(np.sum((losses_V - losses_V.mean()) ** 2))
    r_squared = 1 - norm**2 / total if total else 0.0
    if r_squared < MIN_R_SQUARED:
        return Problem(ProblemCode.POOR_FIT, {'r_squared': r_squared, 'needed': MIN_R_SQUARED})
    slopes_VP = np.column_stack([np.ones_like(x), x**-a, -B * x**-a * np.log(x)])
    errors = (norm**2 / df, df), seeds
    variance, df = max(errors, key=lambda error: quantile(error[1]) * error[0] ** 0.5)
    covariance_PP = variance * np.linalg.inv(slopes_VP.T @ slopes_VP)
    half_P = quantile(df) * np.sqrt(np.diag(covariance_PP))
    floor, _, exponent = (
        Interval(value, value - half, value + half)
        for value, half in zip((float(E), float(B), a), half_P.tolist(), strict=True)
    )
    problem = Problem(ProblemCode.EXPONENT_LOOSE, vars(exponent))
    if not 1.01 * _EXPONENTS[0] < a < 0.99 * _EXPONENTS[1]:
        return problem
    loose = problem if exponent.high - exponent.low > a or exponent.high > _EXPONENTS[1] else None
    fitted = tuple(sizes.tolist()), middle, np.array([E, B, a]), covariance_PP, df
    return Law(*fitted, floor, float(B) * middle**a, exponent, r_squared, loose)


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
    if (number := len(sizes)) < 2:
        return Problem(ProblemCode.SINGLE_SIZE)
    arm_V, baseline_V, difference_V = np.array(sizes, float).T

    def equivalent(estimates_P: np.ndarray) -> np.ndarray:
        """ln N_eq; not a number where the loss lies below the floor."""
        E, B, a = estimates_P
        above_V = _law(baseline_V / law.middle, E, B, a) + difference_V - E
        with np.errstate(invalid='ignore', divide='ignore'):
            return np.log(law.middle) - np.log(above_V / B) / a

    ends = np.log([law.sizes[0] / REACH, law.sizes[-1] * REACH])
    equivalent_V = equivalent(law.estimates_P)
    inside_V = (ends[0] <= equivalent_V) & (equivalent_V <= ends[1])
    if not inside_V.all():
        data = {'parameters': float(arm_V[inside_V.argmin()]), 'factor': REACH}
        return Problem(ProblemCode.EXTRAPOLATED, data)
    worth_V = equivalent_V - np.log(arm_V)
    slope_P = optimize.approx_fprime(law.estimates_P, lambda p: equivalent(p).mean())
    of_law = float(slope_P @ law.covariance_PP @ slope_P) ** 0.5
    of_sizes = float(worth_V.std(ddof=1)) / number**0.5
    error, df = combined([(of_sizes, number - 1), (of_law, law.df)])
    mean, half = float(worth_V.mean()), quantile(df) * error
    return Interval(*np.exp([mean, mean - half, mean + half]).tolist())
