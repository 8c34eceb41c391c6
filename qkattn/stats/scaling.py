"""Scaling laws: how loss falls with size, and how many baseline parameters one of an arm is worth.

The law is L(N) = E + A N^-a with E >= 0, A >= 0, a > 0: L the loss in nats per token, N the
parameters, E the irreducible loss (nats), A in nats * parameters^a. The power law in N is Kaplan et
al. 2020 ("Scaling laws for neural language models"); the floor E and its fit are Hoffmann et al.
2022 ("Training compute-optimal large language models"), section D. The three numbers trade off
against each other over the few sizes of a study, and published intervals were far narrower than the
data allow (Besiroglu et al. 2024, "Chinchilla scaling: a replication attempt"). Hence every number
has an interval, and none is given where the data do not determine it: `problem` holds the reason.

The fit is by least squares on the mean losses, with equal weights. It is not robust as Hoffmann's
Huber loss is: with so few sizes an outlier cannot be told from a wrong curve, and R^2 rejects both.
For a given exponent, E and A solve a linear problem in closed form, so only the exponent is
searched (variable projection, Golub and Pereyra 1973): on a grid over its whole range, which finds
the global minimum, then by scipy's bracketing minimizer, for many rows of losses at once.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import elementwise

from qkattn.stats.inference import LEVEL

MIN_SIZES = 4
MIN_SPAN = 4.0
MIN_R_SQUARED = 0.95
MIN_EXPONENT = 0.02
REACH = 2.0  # how far beyond the baseline's sizes its law is used, as a factor of parameters
REPLICATES = 2000
MAX_EXPONENT = 4.0

_LOG_EXPONENTS = np.log(np.geomspace(1e-3, MAX_EXPONENT, 48))
_SAME_SIZE = 0.05  # arms whose parameters differ by less than this fraction are of one size


class ProblemCode(enum.Enum):
    """Why there is no law or no multiplier; the members of `Problem.data` are in brackets."""

    FEW_SIZES = enum.auto()  # [sizes], fewer than [needed]
    NARROW_SPAN = enum.auto()  # the sizes span a [factor], [needed] at least
    NOT_FALLING = enum.auto()  # [losses] at [parameters], of the smallest and the largest size
    POOR_FIT = enum.auto()  # [r_squared], [needed] at least
    EXPONENT_NEAR_ZERO = enum.auto()  # [value], with an interval from [low] to [high]
    EXPONENT_LOOSE = enum.auto()  # the same
    # Of multipliers.
    NO_BASELINE_LAW = enum.auto()  # because of the baseline's own [problem]
    SINGLE_LOSS = enum.auto()  # the arm has one loss in all
    EXTRAPOLATED = enum.auto()  # [loss] at [parameters] is beyond [factor] times the [end] size
    INTERVAL_EXTRAPOLATED = enum.auto()  # the interval around [value] is


@dataclasses.dataclass(frozen=True)
class Problem:
    """A reason with its numbers."""

    code: ProblemCode
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Fit:
    """L(N) = E + A N^-a over `sizes` (parameters, ascending).

    E is in nats, A in nats * parameters^a; `r_squared` is of the mean losses. If there is a
    `problem`, these are all None.
    """

    sizes: tuple[float, ...]
    problem: Problem | None = None
    E: Interval | None = None
    A: Interval | None = None
    a: Interval | None = None
    r_squared: float | None = None

    def loss(self, parameters: float) -> float:
        """The law's loss in nats per token at `parameters`; ValueError if there is no law."""
        if not (self.E and self.A and self.a):
            raise ValueError(f'no law for {parameters:,.0f} parameters: {self.problem}')
        return self.E.value + self.A.value * parameters**-self.a.value


@dataclasses.dataclass(frozen=True)
class Multiplier:
    """How many of the baseline's parameters one of the arm's is worth, with a 95 % interval.

    It is the median over the arm's sizes. If there is a `problem`, the numbers are None.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None
    problem: Problem | None = None


# Parameters, and by size the finite losses of one seed or more.
Losses = tuple[list[float], list[list[float]]]


def fit(parameters: Sequence[float], losses: Sequence[Sequence[float]]) -> Fit:
    """Fits the law to `losses[i]`, one loss per seed (nats per token), at `parameters[i]`.

    Refused with a `problem`: fewer than 4 sizes; sizes within a factor of 4; a loss not lower at
    the largest size than at the smallest; R^2 below 0.95; an exponent that the data do not
    determine: its interval reaches down to 0.02, or up to 4, or is wider than the exponent itself.

    Intervals are percentiles of refits to bootstrapped mean losses. To the law, at every size, each
    replicate adds (1) the mean of as many seeds' deviations from that size's mean, drawn with
    replacement, and (2) one of the fit's residuals, scaled to the variance by which the residuals,
    on sizes - 3 degrees of freedom, exceed what the seeds explain: a loss that is not quite a power
    law, a learning rate not quite tuned. Either part is multiplied by sqrt(df / chi2(df)) once per
    replicate, which gives a bootstrap of so few points the tails of a t distribution. A size with
    one seed borrows the deviations of the others; if every size has one seed, part 1 is absent and
    the residuals, which then contain the seeds' noise, make the interval alone.

    In simulations of 4 to 8 sizes and 1 to 5 seeds the intervals covered the truth in 90 to 98 % of
    the studies. Studies that look precise by chance are refused less often, so the coverage among
    those not refused is lower: down to 85 % where a third or more are refused.

    A diverged seed has no loss: leave out its size, since the mean of the others is biased low.
    """
    return _fit(_Sizes.ascending(parameters, losses))[0]


def multiplier(arm: Losses, baseline: Losses) -> Multiplier:
    """Median over the arm's sizes of N_eq / N, where the baseline's law at N_eq has the arm's loss.

    Both are (parameters, losses per size and seed) as in `fit`; above 1, the arm makes more of a
    parameter. The interval is that of the median over bootstrap replicates: the baseline's as in
    `fit`, the arm's means with noise of both parts, part 2 being the arm's departures from one
    multiplier for all sizes (with one size only, the baseline's from its law). Where a size of arm
    and baseline (parameters within 5 %) has equally many seeds, the i-th losses are taken to be of
    the same seed, and both draw the same seeds. It is conservative: in simulations as those of
    `fit` it covered the truth in 97 % of the studies or more.

    Refused with a `problem`: a baseline without a law; an arm with a single loss; an equivalent
    size, at any of the arm's sizes or at an end of the interval, that is not between half the
    smallest and twice the largest size of the baseline, where the law would be extrapolated.
    """
    sizes, others = _Sizes.ascending(*arm), _Sizes.ascending(*baseline)
    curve, replica = _fit(others)

    def refused(code: ProblemCode, **data: Any) -> Multiplier:
        return Multiplier(problem=Problem(code, data))

    if replica is None:
        return refused(ProblemCode.NO_BASELINE_LAW, problem=curve.problem)
    if not sizes.df and len(sizes.parameters) == 1:
        return refused(ProblemCode.SINGLE_LOSS)
    low, high = np.log(others.parameters[0] / REACH), np.log(others.parameters[-1] * REACH)
    equivalent_N = replica.law.log_parameters(sizes.means)[0]
    if (outside := (equivalent_N < low) | (equivalent_N > high)).any():
        i = int(outside.argmax())
        end, factor = ('smallest', 1 / REACH) if equivalent_N[i] < low else ('largest', REACH)
        at = {'loss': float(sizes.means[i]), 'parameters': float(sizes.parameters[i])}
        return refused(ProblemCode.EXTRAPOLATED, **at, end=end, factor=factor)
    value = float(np.median(equivalent_N - np.log(sizes.parameters)))

    noise_XN = _arm_noise(sizes, others, replica, np.exp(value))
    equivalent_XN = replica.laws.log_parameters(sizes.means + noise_XN)
    equivalent_XN = np.where(equivalent_XN < low, -np.inf, equivalent_XN)
    equivalent_XN = np.where(equivalent_XN > high, np.inf, equivalent_XN)
    with np.errstate(invalid='ignore'):
        value_X = np.median(equivalent_XN - np.log(sizes.parameters), axis=1)
    ends = _interval(value, np.where(np.isnan(value_X), np.inf, value_X))
    if not np.isfinite([ends.low, ends.high]).all():
        return refused(ProblemCode.INTERVAL_EXTRAPOLATED, value=float(np.exp(value)))
    number, lowest, highest = (float(np.exp(end)) for end in (ends.value, ends.low, ends.high))
    return Multiplier(number, lowest, highest)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Losses by size, ascending in parameters; `df`: degrees of freedom of the seeds' variance."""

    parameters: np.ndarray
    losses: list[np.ndarray]

    @classmethod
    def ascending(cls, parameters: Sequence[float], losses: Sequence[Sequence[float]]) -> '_Sizes':
        order = np.argsort(parameters, kind='stable')
        return cls(np.asarray(parameters, float)[order], [np.asarray(losses[i]) for i in order])

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
        scaled = [(v - v.mean()) * np.sqrt(len(v) / max(len(v) - 1, 1)) for v in self.losses]
        pool = [values for values in scaled if len(values) > 1] or [np.zeros(1)]
        return [values if len(values) > 1 else np.concatenate(pool) for values in scaled]

    def picks(self, rng: np.random.Generator) -> list[np.ndarray]:
        """The deviations that make the mean of each replicate, by size: (REPLICATES, seeds)."""
        numbers = zip(map(len, self.deviations()), map(len, self.losses), strict=True)
        return [rng.integers(pool, size=(REPLICATES, seeds)) for pool, seeds in numbers]

    def noise(self, picks: list[np.ndarray]) -> np.ndarray:
        """The mean of the deviations picked, (REPLICATES, sizes)."""
        sizes = zip(self.deviations(), picks, strict=True)
        return np.stack([pool[pick].mean(1) for pool, pick in sizes], axis=1)


@dataclasses.dataclass(frozen=True)
class _Law:
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


def _least_squares(parameters: np.ndarray, losses_XN: np.ndarray) -> _Law:
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
    return _Law(E_X[:, None], A_X[:, None], a_X[:, None], log_reference)


def _linear(x_N: np.ndarray, y_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E >= 0, A >= 0 with the least squared error of E + A x over the last axis."""
    centred_N = x_N - x_N.mean(-1, keepdims=True)
    A = (y_N * centred_N).sum(-1) / np.square(centred_N).sum(-1)
    E = y_N.mean(-1) - A * x_N.mean(-1)
    A = np.where(E < 0, (x_N * y_N).sum(-1) / np.square(x_N).sum(-1), A)
    return np.where(A < 0, y_N.mean(-1), np.maximum(E, 0)), np.maximum(A, 0)


@dataclasses.dataclass(frozen=True)
class _Replica:
    """A law, its refits, and the draws of seeds that an arm shares with them."""

    law: _Law
    laws: _Law
    residuals: np.ndarray
    picks: list[np.ndarray]
    tail_X: np.ndarray
    rng: np.random.Generator


def _fit(data: _Sizes) -> tuple[Fit, _Replica | None]:
    sizes, means_N = tuple(data.parameters.tolist()), data.means

    def refused(code: ProblemCode, **data: Any) -> tuple[Fit, None]:
        return Fit(sizes, Problem(code, data)), None

    if (number := len(set(sizes))) < MIN_SIZES:
        return refused(ProblemCode.FEW_SIZES, sizes=number, needed=MIN_SIZES)
    if (factor := sizes[-1] / sizes[0]) < MIN_SPAN:
        return refused(ProblemCode.NARROW_SPAN, factor=factor, needed=MIN_SPAN)
    if means_N[-1] >= means_N[0]:
        outer, ends = means_N[[0, -1]].tolist(), [sizes[0], sizes[-1]]
        return refused(ProblemCode.NOT_FALLING, losses=outer, parameters=ends)
    law = _least_squares(data.parameters, means_N[None])
    fitted_N = law.loss(data.parameters)[0]
    residuals = means_N - fitted_N
    r_squared = float(1 - np.square(residuals).sum() / np.square(means_N - means_N.mean()).sum())
    if r_squared < MIN_R_SQUARED:
        return refused(ProblemCode.POOR_FIT, r_squared=r_squared, needed=MIN_R_SQUARED)

    rng = np.random.default_rng(0)
    picks, tail_X = data.picks(rng), _tail(data.df, rng)
    noise_XN = tail_X[:, None] * data.noise(picks)
    noise_XN += _size_noise(residuals, len(residuals) - 3, data.variance(), len(means_N), rng)
    laws = _least_squares(data.parameters, fitted_N + noise_XN)
    E, A, a = (
        _interval(float(one[0, 0]), many[:, 0])
        for one, many in zip(law.numbers, laws.numbers, strict=True)
    )
    if a.low <= MIN_EXPONENT:
        return refused(ProblemCode.EXPONENT_NEAR_ZERO, **vars(a))
    if a.high >= 0.99 * MAX_EXPONENT or a.high - a.low > a.value:
        return refused(ProblemCode.EXPONENT_LOOSE, **vars(a))
    return Fit(sizes, None, E, A, a, r_squared), _Replica(law, laws, residuals, picks, tail_X, rng)


def _size_noise(
    residuals: np.ndarray, df: int, variance: float, num_sizes: int, rng: np.random.Generator
) -> np.ndarray:
    """Residuals drawn for (REPLICATES, sizes), scaled to their variance in excess of `variance`."""
    square = np.square(residuals).sum()
    excess = max(square / df - variance, 0)
    unit = residuals / np.sqrt(square / len(residuals)) if excess else residuals
    tail_X = _tail(df, rng)
    return np.sqrt(excess) * tail_X[:, None] * rng.choice(unit, (REPLICATES, num_sizes))


def _tail(df: int, rng: np.random.Generator) -> np.ndarray:
    """sqrt(df / chi2(df)), which turns a normal into a t variable; 1 for df = 0."""
    return np.sqrt(df / rng.chisquare(df, REPLICATES)) if df else np.ones(REPLICATES)


def _arm_noise(arm: _Sizes, baseline: _Sizes, replica: _Replica, value: float) -> np.ndarray:
    """Noise of the arm's means, nats, (REPLICATES, sizes); `value` is its multiplier."""
    picks = arm.picks(replica.rng)
    tails = [_tail(arm.df, replica.rng)] * len(picks)
    for i, (parameters, values) in enumerate(zip(arm.parameters, arm.losses, strict=True)):
        j = np.abs(np.log(baseline.parameters / parameters)).argmin()
        same_size = abs(baseline.parameters[j] / parameters - 1) < _SAME_SIZE
        if same_size and len(values) == len(baseline.losses[j]) > 1:
            picks[i], tails[i] = replica.picks[j], replica.tail_X
    noise_XN = np.stack(tails, axis=1) * arm.noise(picks)
    residuals, df = replica.residuals, len(replica.residuals) - 3
    variance = baseline.variance()
    if len(picks) > 1:
        residuals, df = arm.means - replica.law.loss(arm.parameters * value)[0], len(picks) - 1
        variance = arm.variance()
    return noise_XN + _size_noise(residuals, df, variance, len(picks), replica.rng)


def _interval(value: float, value_X: np.ndarray) -> Interval:
    """The central LEVEL of the replicates, widened to the estimate if it lies outside."""
    ends, cut = np.sort(value_X), int(len(value_X) * (1 - LEVEL) / 2)
    low, high = float(ends[cut]), float(ends[len(ends) - 1 - cut])
    return Interval(value, min(low, value), max(high, value))
