"""How loss falls with size, and how many of the baseline's parameters one of an arm's is worth.

The law is L(N) = E + A N^-a with E >= 0, A >= 0, a > 0: L the loss in nats per token, N the
parameters, E the loss that no size removes (nats), A in nats * parameters^a. The power law in N is
Kaplan et al. 2020 ("Scaling laws for neural language models"); the floor E and its fit are Hoffmann
et al. 2022 ("Training compute-optimal large language models"), section D. The three numbers trade off
against each other over the few sizes a study can afford, and published intervals were far narrower
than the data allow (Besiroglu et al. 2024, "Chinchilla scaling: a replication attempt"). Hence no
number here without its interval, and none where the data do not fix it: `problem` says why.

Least squares on the mean losses, every size counting alike. Given the exponent, E and A are a
nonnegative linear problem with a closed form, so only the exponent is searched, over its whole
range (variable projection, Golub and Pereyra 1973): no starting point, no local minimum, and all
bootstrap replicates are fitted at once. Hoffmann's Huber loss is of no use here: among so few sizes
an outlier and a wrong curve cannot be told apart, and R^2 refuses both.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy import optimize

from qkattn.stats.inference import LEVEL

MIN_SIZES = 4
MIN_SPAN = 4.0
MIN_R_SQUARED = 0.95
MIN_EXPONENT = 0.02
REACH = 2.0  # how far past the baseline's sizes its law is read, as a factor of parameters
REPLICATES = 2000

_EXPONENTS = np.geomspace(1e-3, 4.0, 240)
_SAME_SIZE = 0.05  # parameters that differ by less than this share belong to one size of a study


@dataclasses.dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Fit:
    """L(N) = E + A N^-a over `sizes` (parameters, ascending) with mean `losses` (nats per token).

    E is in nats, A in nats * parameters^a, `residual_rms` (root mean square of mean loss minus law)
    in nats; `r_squared` is of the mean losses. Where `problem` is a sentence, these are all None.
    """

    E: Interval | None
    A: Interval | None
    a: Interval | None
    sizes: tuple[float, ...]
    losses: tuple[float, ...]
    residual_rms: float | None
    r_squared: float | None
    problem: str | None

    def loss(self, parameters: float) -> float:
        """The law's loss in nats per token at `parameters`; ValueError where there is no law."""
        if self.problem:
            raise ValueError(f'no loss at {parameters:,.0f} parameters: {self.problem}')
        return self.E.value + self.A.value * parameters**-self.a.value


@dataclasses.dataclass(frozen=True)
class Multiplier:
    """How many of the baseline's parameters one of the arm's is worth, with a 95 % interval.

    `by_size` holds the ratio at each of the arm's sizes, ascending; `value` is their median. Where
    `problem` is a sentence, the numbers are None and `by_size` is empty.
    """

    value: float | None
    low: float | None
    high: float | None
    by_size: tuple[float, ...]
    problem: str | None


def fit(
    parameters: Sequence[float], losses: Sequence[Sequence[float]], *, replicates: int = REPLICATES
) -> Fit:
    """Fits the law to `losses[i]`, one loss per seed (nats per token), at `parameters[i]`.

    Refused, by a sentence in `problem`: fewer than 4 sizes; sizes within a factor of 4; a loss not
    lower at the largest size than at the smallest; R^2 below 0.95; an exponent that the data do not
    fix: its interval goes down to 0.02, or up to 4, or is wider than the exponent itself.

    Intervals are percentiles of refits to bootstrapped mean losses. To the law, at every size, each
    replicate adds (1) the mean of as many seeds' deviations from that size's mean, drawn with
    replacement, and (2) one of the fit's residuals, scaled to the variance by which the residuals,
    on sizes - 3 degrees of freedom, exceed what the seeds explain: a law that is not quite a power
    law, a learning rate not quite tuned. Either part is multiplied by sqrt(df / chi2(df)) once per
    replicate, which gives a bootstrap of so few points the t tails that it lacks. A size with one
    seed borrows the deviations of the others; where every size has one seed, part 1 is absent, and
    the residuals, which then hold the seeds' noise too, make the interval alone.

    In simulations of 4 to 8 sizes and 1 to 5 seeds the intervals held the truth in 90 to 98 % of
    the studies. What is lucky enough to look precise is less often refused, so among those that
    are not refused it is fewer: down to 85 % where a third or more are refused.

    A diverged seed has no loss: leave out its size, since the mean of the others flatters it.
    Raises ValueError for parameters or losses that are no table of positive and finite numbers.
    """
    return _fit(_table('fit', parameters, losses), replicates)[0]


def multiplier(
    arm: tuple[Sequence[float], Sequence[Sequence[float]]],
    baseline: tuple[Sequence[float], Sequence[Sequence[float]]],
    *,
    replicates: int = REPLICATES,
) -> Multiplier:
    """Median over the arm's sizes of N_eq / N, where the baseline's law at N_eq has the arm's loss.

    Both are (parameters, losses per size and seed) as in `fit`; above 1, the arm makes more of a
    weight. The interval is that of the median over bootstrap replicates: the baseline's as in
    `fit`, the arm's means with noise of both parts, part 2 being the arm's departures from one
    multiplier for all sizes (with one size only, the baseline's from its law). Where a size of arm
    and baseline (parameters within 5 %) has equally many seeds, the i-th losses are taken to be the
    same seed's, and both draw the same seeds. It errs to the wide side: in simulations as those of
    `fit` it held the truth in 97 % of the studies or more.

    Refused, by a sentence in `problem`: a baseline whose own fit has a problem; an arm of a single
    loss; an equivalent size, at any of the arm's sizes or at an end of the interval, that is not
    between half the smallest and twice the largest size of the baseline, whose law is extrapolated
    there. Raises ValueError as `fit`.
    """
    table, other = _table('arm', *arm), _table('baseline', *baseline)
    curve, replica = _fit(other, replicates)
    if curve.problem:
        return _no_multiplier(f'no multiplier without a fit of the baseline: {curve.problem}')
    if not table.df and len(table.parameters) == 1:
        return _no_multiplier('a multiplier from a single loss of the arm has no interval')
    low, high = np.log(other.parameters[0] / REACH), np.log(other.parameters[-1] * REACH)
    equivalent_N = replica.law.log_weights(table.means)
    for parameters, loss, equivalent in zip(
        table.parameters, table.means, equivalent_N, strict=True
    ):
        if not low <= equivalent <= high:
            far = f'less than 1/{REACH:g} of' if equivalent < low else f'more than {REACH:g} times'
            end = 'smallest' if equivalent < low else 'largest'
            return _no_multiplier(
                f'the loss of {loss:.4f} nats at {parameters:,.0f} parameters is that of a baseline '
                f'of {far} its {end} size, where its law is extrapolated'
            )
    ratio_N = equivalent_N - np.log(table.parameters)
    value = float(np.median(ratio_N))

    noise_XN = _arm_noise(table, other, replica, np.exp(value))
    equivalent_XN = replica.laws.log_weights(table.means + noise_XN)
    equivalent_XN = np.where(equivalent_XN < low, -np.inf, equivalent_XN)
    equivalent_XN = np.where(equivalent_XN > high, np.inf, equivalent_XN)
    with np.errstate(invalid='ignore'):
        value_X = np.median(equivalent_XN - np.log(table.parameters), axis=1)
    ends = _interval(value, np.where(np.isnan(value_X), np.inf, value_X))
    if not np.isfinite([ends.low, ends.high]).all():
        return _no_multiplier(
            f'the interval around a multiplier of {np.exp(value):.3g} reaches sizes at which the '
            "baseline's law is extrapolated"
        )
    value, low, high = (float(np.exp(end)) for end in (ends.value, ends.low, ends.high))
    return Multiplier(value, low, high, tuple(np.exp(ratio_N).tolist()), None)


@dataclasses.dataclass(frozen=True)
class _Table:
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
        """Of a mean loss by its seeds, nats^2, averaged over sizes; 0 where every size has one."""
        squares = sum(np.square(values - values.mean()).sum() for values in self.losses)
        return squares / max(self.df, 1) * np.mean([1 / len(values) for values in self.losses])

    def deviations(self) -> list[np.ndarray]:
        """From the mean, unbiased in variance, by size; all sizes' where a size has one seed."""
        own = [(v - v.mean()) * np.sqrt(len(v) / max(len(v) - 1, 1)) for v in self.losses]
        pool = [values for values in own if len(values) > 1] or [np.zeros(1)]
        return [values if len(values) > 1 else np.concatenate(pool) for values in own]


@dataclasses.dataclass(frozen=True)
class _Law:
    """E + A (N / reference)^-a; scalars, or columns with one row per replicate."""

    E: np.ndarray
    A: np.ndarray
    a: np.ndarray
    log_reference: float

    @property
    def coefficient(self) -> np.ndarray:
        """A in nats * parameters^a."""
        return self.A * np.exp(self.a * self.log_reference)

    def loss(self, parameters: np.ndarray) -> np.ndarray:
        return self.E + self.A * np.exp(-self.a * (np.log(parameters) - self.log_reference))

    def log_weights(self, loss: np.ndarray) -> np.ndarray:
        """ln N at which the law has `loss`: inf at and below E, -inf where the law is flat."""
        above = loss - self.E
        with np.errstate(divide='ignore', invalid='ignore'):
            log_ratio = np.where(above > 0, np.log(self.A / above), np.inf)
        return self.log_reference + log_ratio / self.a


@dataclasses.dataclass(frozen=True)
class _Replica:
    """A law, its refits, and the draws of seeds that an arm shares with them."""

    law: _Law
    laws: _Law
    residuals: np.ndarray
    picks: list[np.ndarray]
    tail_X: np.ndarray
    rng: np.random.Generator


def _fit(table: _Table, replicates: int) -> tuple[Fit, _Replica | None]:
    means_N = table.means
    given = {'sizes': tuple(table.parameters.tolist()), 'losses': tuple(means_N.tolist())}
    nothing = dict.fromkeys(('E', 'A', 'a', 'residual_rms', 'r_squared'))
    if problem := _too_little(table):
        return Fit(**given, **nothing, problem=problem), None
    law = _least_squares(table)
    residuals = means_N - law.loss(table.parameters)
    r_squared = float(1 - np.square(residuals).sum() / np.square(means_N - means_N.mean()).sum())
    if r_squared < MIN_R_SQUARED:
        problem = f'the law explains too little: R^2 is {r_squared:.3f}, below {MIN_R_SQUARED:g}'
        return Fit(**given, **nothing, problem=problem), None

    rng = np.random.default_rng(0)
    picks, tail_X = _picks(table, replicates, rng), _tail(table.df, replicates, rng)
    noise_XN = tail_X[:, None] * _seeds_noise(table, picks)
    noise_XN += _size_noise(residuals, len(residuals) - 3, table.variance(), noise_XN.shape, rng)
    log_N = np.log(table.parameters) - law.log_reference
    E_X, A_X, a_X = _search(log_N, law.loss(table.parameters) + noise_XN)
    laws = _Law(E_X[:, None], A_X[:, None], a_X[:, None], law.log_reference)

    a = _interval(law.a, a_X)
    if a.low <= MIN_EXPONENT or a.high >= 0.99 * _EXPONENTS[-1] or a.high - a.low > a.value:
        doubt = 'tell the exponent from zero' if a.low <= MIN_EXPONENT else 'fix the exponent'
        problem = (
            f'the sizes do not {doubt}: {a.value:.3g}, with a 95 % interval from {a.low:.2g} to '
            f'{a.high:.2g}'
        )
        return Fit(**given, **nothing, problem=problem), None
    E, A = _interval(law.E, E_X), _interval(law.coefficient, laws.coefficient[:, 0])
    rms = float(np.sqrt(np.square(residuals).mean()))
    result = Fit(E, A, a, **given, residual_rms=rms, r_squared=r_squared, problem=None)
    return result, _Replica(law, laws, residuals, picks, tail_X, rng)


def _too_little(table: _Table) -> str | None:
    """What forbids any law of these losses, as a sentence."""
    number, small, large = (
        len(np.unique(table.parameters)),
        table.parameters[0],
        table.parameters[-1],
    )
    if number < MIN_SIZES:
        return f'a law of size needs {MIN_SIZES} sizes or more, there are {number}'
    if large < MIN_SPAN * small:
        return f'the sizes span a factor of {large / small:.3g}, a law of size needs {MIN_SPAN:g}'
    if table.means[-1] >= table.means[0]:
        return (
            f'the loss does not fall with size: {table.means[0]:.4f} nats at {small:,.0f} '
            f'parameters, {table.means[-1]:.4f} at {large:,.0f}'
        )
    return None


def _least_squares(table: _Table) -> _Law:
    """The law with the least squared error, its exponent refined between grid neighbours."""
    log_reference = float(np.log(table.parameters).mean())
    log_N = np.log(table.parameters) - log_reference

    def error(log_a: float) -> float:
        x_N = np.exp(-np.exp(log_a) * log_N)
        E, A = _linear(x_N, table.means)
        return float(np.square(table.means - E - A * x_N).sum())

    start = np.log(_search(log_N, table.means[None])[2][0])
    step = np.log(_EXPONENTS[1] / _EXPONENTS[0])
    bounds = np.clip([start - step, start + step], *np.log(_EXPONENTS[[0, -1]]))
    options = {'xatol': 1e-10}
    best = optimize.minimize_scalar(error, bounds=bounds, method='bounded', options=options)
    a = np.exp(best.x)
    return _Law(*_linear(np.exp(-a * log_N), table.means), a, log_reference)


def _linear(x_N: np.ndarray, y_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E >= 0, A >= 0 with the least squared error of E + A x over the last axis."""
    centred_N = x_N - x_N.mean(-1, keepdims=True)
    A = (y_N * centred_N).sum(-1) / np.square(centred_N).sum(-1)
    E = y_N.mean(-1) - A * x_N.mean(-1)
    A = np.where(E < 0, (x_N * y_N).sum(-1) / np.square(x_N).sum(-1), A)
    return np.where(A < 0, y_N.mean(-1), np.maximum(E, 0)), np.maximum(A, 0)


def _search(log_N: np.ndarray, y_XN: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """E, A, a of every row: the grid's best exponent, then the vertex of a parabola in ln a."""
    x_GN = np.exp(-_EXPONENTS[:, None] * log_N)
    centred_GN = x_GN - x_GN.mean(1, keepdims=True)
    mean_X1 = y_XN.mean(1, keepdims=True)
    square_X1 = np.square(y_XN - mean_X1).sum(1, keepdims=True)
    A_XG = (y_XN - mean_X1) @ centred_GN.T / np.square(centred_GN).sum(1)
    error_XG = square_X1 - np.square(A_XG) * np.square(centred_GN).sum(1)
    without_E_XG = np.square(y_XN @ x_GN.T) / np.square(x_GN).sum(1)
    without_E_XG = np.square(y_XN).sum(1, keepdims=True) - without_E_XG
    error_XG = np.where(mean_X1 < A_XG * x_GN.mean(1), without_E_XG, error_XG)
    error_XG = np.where(A_XG < 0, square_X1, error_XG)

    best_X = error_XG.argmin(1)
    inner_X = best_X.clip(1, len(x_GN) - 2)
    before, at, after = np.take_along_axis(error_XG, inner_X[:, None] + np.arange(-1, 2), 1).T
    bend = before - 2 * at + after
    shift = np.where(bend > 0, (before - after) / np.where(bend > 0, 2 * bend, 1), 0)
    shift = np.where(best_X == inner_X, shift.clip(-0.5, 0.5), 0)
    a_X = _EXPONENTS[best_X] * (_EXPONENTS[1] / _EXPONENTS[0]) ** shift
    return *_linear(np.exp(-a_X[:, None] * log_N), y_XN), a_X


def _picks(table: _Table, replicates: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Which deviations make the mean of each replicate, by size: (replicates, seeds)."""
    sizes = zip(table.losses, table.deviations(), strict=True)
    return [rng.integers(len(from_), size=(replicates, len(v))) for v, from_ in sizes]


def _seeds_noise(table: _Table, picks: list[np.ndarray]) -> np.ndarray:
    sizes = zip(table.deviations(), picks, strict=True)
    return np.stack([from_[pick].mean(1) for from_, pick in sizes], axis=1)


def _size_noise(
    residuals: np.ndarray,
    df: int,
    variance: float,
    shape: tuple[int, int],
    rng: np.random.Generator,
) -> np.ndarray:
    """Residuals drawn for (replicates, sizes), with what their variance exceeds `variance` by."""
    square = np.square(residuals).sum()
    excess = max(square / df - variance, 0)
    unit = residuals / np.sqrt(square / len(residuals)) if excess else residuals
    return np.sqrt(excess) * _tail(df, shape[0], rng)[:, None] * rng.choice(unit, shape)


def _tail(df: int, replicates: int, rng: np.random.Generator) -> np.ndarray:
    """sqrt(df / chi2(df)), which makes a t of a normal; 1 where nothing is estimated."""
    return np.sqrt(df / rng.chisquare(df, replicates)) if df else np.ones(replicates)


def _arm_noise(arm: _Table, baseline: _Table, replica: _Replica, value: float) -> np.ndarray:
    """Noise of the arm's means, nats, (replicates, sizes); `value` is its multiplier."""
    rng, replicates = replica.rng, len(replica.tail_X)
    picks = _picks(arm, replicates, rng)
    tails = [_tail(arm.df, replicates, rng)] * len(picks)
    for i, (parameters, values) in enumerate(zip(arm.parameters, arm.losses, strict=True)):
        j = np.abs(np.log(baseline.parameters / parameters)).argmin()
        same_size = abs(baseline.parameters[j] / parameters - 1) < _SAME_SIZE
        if same_size and len(values) == len(baseline.losses[j]) > 1:
            picks[i], tails[i] = replica.picks[j], replica.tail_X
    noise_XN = np.stack(tails, axis=1) * _seeds_noise(arm, picks)
    residuals, df = replica.residuals, len(replica.residuals) - 3
    variance = baseline.variance()
    if len(picks) > 1:
        residuals, df = arm.means - replica.law.loss(arm.parameters * value), len(picks) - 1
        variance = arm.variance()
    return noise_XN + _size_noise(residuals, df, variance, noise_XN.shape, rng)


def _interval(value: float, value_X: np.ndarray) -> Interval:
    """The central LEVEL of the replicates, widened to the estimate where it lies outside."""
    ends, cut = np.sort(value_X), int(len(value_X) * (1 - LEVEL) / 2)
    low, high = ends[cut], ends[len(ends) - 1 - cut]
    return Interval(float(value), float(min(low, value)), float(max(high, value)))


def _table(name: str, parameters: Sequence[float], losses: Sequence[Sequence[float]]) -> _Table:
    if len(parameters) != len(losses) or not len(parameters):
        raise ValueError(
            f'{name}: every size needs parameters and losses, not {len(parameters)} parameters and '
            f'{len(losses)} rows of losses'
        )
    parameters, rows = np.asarray(parameters, float), [np.asarray(row, float) for row in losses]
    for number, row in zip(parameters, rows, strict=True):
        if not (np.isfinite(number) and number > 0):
            raise ValueError(f'{name}: parameters must be positive and finite, not {number}')
        if row.ndim != 1 or not row.size or not np.isfinite(row).all():
            raise ValueError(
                f'{name}: losses at {number:,.0f} parameters must be one finite number per seed, '
                f'not {row.tolist()}'
            )
    order = np.argsort(parameters, kind='stable')
    return _Table(parameters[order], tuple(rows[i] for i in order))


def _no_multiplier(problem: str) -> Multiplier:
    return Multiplier(None, None, None, (), problem)
