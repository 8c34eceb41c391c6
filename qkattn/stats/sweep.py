"""Sweeps of a positive setting, such as the learning rate, over a geometric grid of values.

All values are trained with the same seeds. Near the best value, the loss of seed s at value v, in
nats per token, is modelled as a parabola in x = ln(v / best) with a level a_s for each seed:

    L_s(v) = a_s + b x + c x^2 + noise.

The optimum is the vertex x* = -b / 2c.

A skewed loss curve has another optimum than the parabola. So `Sweep.excess` bounds how far a loss
is above the optimum for all curves

    L_s(v) = a_s + C g_k(x - x0),   g_k(u) = u^2 / 2 (1 + k u),   |k| <= SKEW

that the data do not contradict. Beyond its inflection, g_k is a straight line, which keeps g_k
convex.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy  # whose submodules are imported on first use

from qkattn.stats.inference import LEVEL, ROUNDING, t_quantile

# Minimum number of grid steps on each side of the best value in the fit of the parabola.
REACH = 2
# Minimum number of values for a parabola.
MIN_VALUES = 3
# Minimum number of seeds for bracketing.
MIN_SEEDS = 2
# Maximum skew |k| of the curves in a bound.
SKEW = 0.6
# Number of optima, and of skews, in the search grid of possible curves.
POINTS = 41
# Number of times that this grid is refined.
ZOOMS = 4


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The losses of a sweep, its best value and its fitted optimum.

    A value is worse than the best value if a seed diverged there, or by a paired one-sided t test
    over seeds at 95 % with Bonferroni's correction. The test pools the residual variance over all
    values that are not worse. With 95 % confidence, the true best value of the grid is among the
    values that are not worse (comparison with the best, Hsu 1981).
    """

    # The grid, ascending.
    values: tuple[float, ...]
    # For each value, the losses of the seeds that finished.
    losses: tuple[tuple[float, ...], ...]
    # The mean loss of each value; infinite if a seed diverged.
    means: tuple[float, ...]
    # The value with the lowest mean; the smallest such value if there are several.
    best: float
    # Whether there is a worse value on each side of `best`. Always false for a single seed.
    bracketed: bool
    # Whether further seeds may help to bracket or bound the optimum.
    needs_seeds: bool
    # The values in the fit of the parabola.
    fitted: tuple[float, ...]
    # How `chosen` is found: 'vertex' or 'minimax'.
    choice: str
    # The second derivative of the loss by ln(value); None with fewer than three fitted values.
    curvature: float | None = None
    # The vertex of the parabola; None if it is not a minimum or is outside the fitted values.
    optimum: float | None = None
    # The mean loss of the parabola at the optimum.
    loss: float | None = None
    # Whether a t test at 95 % shows that the curvature is above zero.
    bounded: bool = False

    @functools.cached_property
    def chosen(self) -> float:
        """The value to train at, rounded to three significant digits.

        With the choice 'vertex', this is the optimum of the parabola; with 'minimax', the value
        with the smallest `excess`. The fallback is `best`, if there is no optimum or the value is
        not between the grid neighbours of `best`.
        """
        index = self.values.index(self.best)
        is_at_end = index in (0, len(self.values) - 1)
        if self.optimum is None or is_at_end:
            return self.best
        below = self.values[index - 1]
        above = self.values[index + 1]

        chosen = self.optimum
        if self.choice == 'minimax' and self._curves is not None:
            lowest = max(below, self.fitted[0])
            highest = min(above, self.fitted[-1])
            candidates = np.geomspace(lowest, highest, 2 * POINTS)[1:-1]  # without the ends
            chosen = min(candidates.tolist(), key=self.excess)

        rounded = float(f'{chosen:.3g}')
        if below < rounded < above:
            return rounded
        return self.best

    @functools.cached_property
    def at_worst(self) -> float | None:
        """The `excess` of `chosen`; None if the optimum is unbounded."""
        if self._curves is None:
            return None
        return self.excess(self.chosen)

    @property
    def optimum_low(self) -> float | None:
        """The smallest optimum of all possible curves; None if the optimum is unbounded."""
        if self._curves is None:
            return None
        return self.best * math.exp(self._curves.optimum_C.min())

    @property
    def optimum_high(self) -> float | None:
        """The largest optimum of all possible curves; None if the optimum is unbounded."""
        if self._curves is None:
            return None
        return self.best * math.exp(self._curves.optimum_C.max())

    def excess(self, value: float) -> float:
        """Bounds how far the loss at `value` is above the lowest loss, in nats per token.

        The bound is the maximum over all loss curves that the data do not contradict. The bound is
        infinite if the data do not bound the optimum.
        """
        curves = self._curves
        if curves is None:
            return math.inf
        x = math.log(value / self.best)
        excess_C = curves.scale_C * _curve(x - curves.optimum_C, curves.skew_C)
        return float(np.max(excess_C))

    @functools.cached_property
    def _curves(self) -> '_Curves | None':
        """The loss curves that the data do not contradict; None if the optimum is unbounded."""
        if not self.bounded:
            return None
        x_V = np.log(np.array(self.fitted) / self.best)
        losses_of_value = dict(zip(self.values, self.losses, strict=True))
        losses_VS = np.array([losses_of_value[value] for value in self.fitted])
        return _possible_curves(x_V, losses_VS)


@dataclasses.dataclass(frozen=True)
class _Curves:
    """C curves scale * g_skew(x - optimum), with x = ln(value / best)."""

    scale_C: np.ndarray  # the largest scale that the data do not contradict
    optimum_C: np.ndarray
    skew_C: np.ndarray


def _possible_curves(x_V: np.ndarray, losses_VS: np.ndarray) -> _Curves | None:
    """Finds the curves that the losses of V values and S seeds do not contradict at 95 %.

    The curves are scale * g_k(x - x0), with g_k from `_curve` and x0 within the range of the
    values. A curve is possible if its residual sum of squares is at most the minimum over all
    curves plus t^2 times the variance. Returns None if the residuals have no degree of freedom.
    """
    V, S = losses_VS.shape
    df = V * S - S - min(V - 1, MIN_VALUES)
    if df < 1:
        return None
    centred_VS = losses_VS - losses_VS.mean(axis=0)  # without the level of each seed
    means_V = centred_VS.mean(axis=1)
    squares_around_means = float(np.sum((centred_VS - means_V[:, None]) ** 2))
    variance_of_slopes = _variance_of_slopes(x_V, centred_VS)
    t = t_quantile(df)

    optimum_range = (x_V[0], x_V[-1])
    skew_range = (-SKEW, SKEW)
    for _ in range(ZOOMS):
        # The C candidates are all combinations of P optima and P skews.
        optimum_P = np.linspace(*optimum_range, POINTS)
        skew_P = np.linspace(*skew_range, POINTS)
        optimum_PP, skew_PP = np.meshgrid(optimum_P, skew_P)
        optimum_C = optimum_PP.ravel()
        skew_C = skew_PP.ravel()
        uncentred_CV = _curve(x_V - optimum_C[:, None], skew_C[:, None])
        curve_CV = uncentred_CV - uncentred_CV.mean(axis=1, keepdims=True)

        # The least-squares scale of each candidate, and its residual sum of squares.
        squares_C = np.sum(curve_CV**2, axis=1)
        scale_C = np.maximum(np.sum(curve_CV * means_V, axis=1) / squares_C, 0)
        misfit_C = S * np.sum((means_V - scale_C[:, None] * curve_CV) ** 2, axis=1)

        # If seeds have different optima, their residuals are correlated, and only the slopes show
        # the whole variance.
        variance_of_residuals = (squares_around_means + misfit_C.min()) / df
        variance = max(variance_of_residuals, variance_of_slopes)

        # The largest scale with which each candidate is still possible.
        spare_C = misfit_C.min() + t**2 * variance - misfit_C
        largest_scale_C = scale_C + np.sqrt(np.maximum(spare_C, 0) / (S * squares_C))

        is_possible_C = spare_C >= 0
        curves = _Curves(
            scale_C=largest_scale_C[is_possible_C],
            optimum_C=optimum_C[is_possible_C],
            skew_C=skew_C[is_possible_C],
        )
        # Refine the grid around the possible curves.
        optimum_range = _finer_range(curves.optimum_C, optimum_P, optimum_range)
        skew_range = _finer_range(curves.skew_C, skew_P, skew_range)
    return curves


def _variance_of_slopes(x_V: np.ndarray, losses_VS: np.ndarray) -> float:
    """Returns the variance between seeds of the slope of the loss; 0 for one seed.

    With u_v = x_v - mean(x), the slope of seed s is

        slope_s = sum_v u_v loss_vs / sqrt(sum_v u_v^2).

    The root scales slopes so that they have the same variance as independent losses.
    """
    num_seeds = losses_VS.shape[1]
    if num_seeds == 1:
        return 0.0
    u_V = x_V - x_V.mean()
    slope_S = u_V @ losses_VS / (u_V @ u_V) ** 0.5
    return float(np.var(slope_S, ddof=1))


def _finer_range(
    possible_C: np.ndarray, grid_P: np.ndarray, limits: tuple[float, float]
) -> tuple[float, float]:
    """Returns the range of a refined grid: the possible values and one grid step on each side.

    Args:
        possible_C: The optimum (or skew) of each possible curve.
        grid_P: The present grid of optima (or skews).
        limits: The minimum and maximum of the range.
    """
    step = grid_P[1] - grid_P[0]
    lower_limit, upper_limit = limits
    lowest = max(lower_limit, possible_C.min() - step)
    highest = min(upper_limit, possible_C.max() + step)
    return lowest, highest


def _curve(u: np.ndarray, skew: np.ndarray) -> np.ndarray:
    """Returns g(u), a convex loss curve with its optimum at u = 0.

        g(u) = u^2 / 2 (1 + skew u)         where g''(u) = 1 + 3 skew u >= 0,
        g(u) = g(u0) + g'(u0) (u - u0)      elsewhere.

    The second line is the tangent at the inflection u0 = -1 / (3 skew). `u` and `skew` broadcast.
    """
    cubic = u**2 / 2 * (1 + skew * u)
    is_convex = 1 + 3 * skew * u >= 0

    # Without skew, g is a parabola and the tangent is not used. A skew of 1 avoids a division by 0.
    nonzero_skew = np.where(skew == 0, 1.0, skew)
    inflection = -1 / (3 * nonzero_skew)
    height = inflection**2 / 2 * (1 + skew * inflection)
    slope = inflection / 2  # g'(u0) = u0 + 3/2 skew u0^2, and skew u0 = -1/3
    tangent = height + slope * (u - inflection)
    return np.where(is_convex, cubic, tangent)


def fit(losses: Mapping[float, Mapping[int, float | None]], choice: str = 'vertex') -> Sweep:
    """Fits the losses of a sweep.

    Args:
        losses: The loss of each seed at each value of the setting, {value: {seed: loss}}. Values
            are above 0 and have the same seeds. None or a non-finite loss means that the seed
            diverged.
        choice: 'vertex' or 'minimax' (see `Sweep.chosen`).
    """
    values = tuple(sorted(losses))
    seeds = sorted(losses[values[0]])
    finished = tuple(_finished_losses(losses[value], seeds) for value in values)
    means = tuple(_mean_or_inf(finished_losses, len(seeds)) for finished_losses in finished)
    best = means.index(min(means))
    # Indices of values, like `best`, or None.
    below, above = _nearest_worse(finished, means, best)

    in_reach = _range_to_fit(best, below, above, num_values=len(values))
    fitted = [index for index in in_reach if math.isfinite(means[index])]
    fitted_values = tuple(values[index] for index in fitted)
    parabola: dict[str, Any] = {}
    if len(fitted) >= MIN_VALUES:
        losses_VS = np.array([finished[index] for index in fitted])
        parabola = _parabola(fitted_values, losses_VS, values[best])

    # Further seeds do not help if the optimum is bracketed and bounded, or if the best value is at
    # an end of the grid and its neighbour is worse.
    bracketed = len(seeds) >= MIN_SEEDS and below is not None and above is not None
    is_bounded = bracketed and parabola.get('bounded', False)
    is_lowest_beside_worse = best == 0 and above == 1
    is_highest_beside_worse = best == len(values) - 1 and below == best - 1
    is_clear = is_bounded or is_lowest_beside_worse or is_highest_beside_worse
    return Sweep(
        values=values,
        losses=finished,
        means=means,
        best=values[best],
        bracketed=bracketed,
        needs_seeds=not is_clear and math.isfinite(means[best]),
        fitted=fitted_values,
        choice=choice,
        **parabola,  # curvature, optimum, loss and bounded
    )


def _finished_losses(
    loss_by_seed: Mapping[int, float | None], seeds: list[int]
) -> tuple[float, ...]:
    """Returns the losses of the seeds that finished, in the order of `seeds`."""
    losses = [loss_by_seed[seed] for seed in seeds]
    return tuple(loss for loss in losses if loss is not None and math.isfinite(loss))


def _mean_or_inf(finished_losses: tuple[float, ...], num_seeds: int) -> float:
    """Returns the mean loss over seeds, or infinity if not all seeds finished."""
    if len(finished_losses) < num_seeds:
        return math.inf
    return math.fsum(finished_losses) / num_seeds


def _range_to_fit(best: int, below: int | None, above: int | None, num_values: int) -> range:
    """Returns the indices of the values between the nearest worse values, which are included.

    The range covers at least REACH values on each side of `best`. On a side without a worse value,
    the range extends to the end of the grid.
    """
    first = 0
    if below is not None:
        first = max(min(below, best - REACH), 0)
    last = num_values - 1
    if above is not None:
        last = min(max(above, best + REACH), num_values - 1)
    return range(first, last + 1)


def next_values(sweep: Sweep, ratio: float, max_points: int, end: float) -> tuple[float, ...]:
    """Returns the values to try next, in ascending order.

    The grid grows by one value on each side of the best value without a worse value (`Sweep`). For
    example, if 0.004 is the best of (0.001, 0.002, 0.004) and 0.002 is worse, 0.008 is next. If
    every value diverged, the grid only grows downwards.

    Args:
        sweep: The present sweep.
        ratio: The ratio of neighbouring values of the grid, above 1.
        max_points: The maximum number of values in the grid.
        end: An upper limit that no value reaches.

    Returns:
        Up to two values; () if the best value is between worse values or the grid is full.
    """
    best = sweep.values.index(sweep.best)
    below, above = _nearest_worse(sweep.losses, sweep.means, best)
    all_diverged = not math.isfinite(sweep.means[best])
    candidates = []
    if below is None:
        candidates.append(sweep.values[0] / ratio)
    if above is None and not all_diverged:
        candidates.append(sweep.values[-1] * ratio)
    # Drop rounding errors: 0.1 * 3 becomes 0.3.
    rounded = [float(f'{value:.10g}') for value in candidates]
    below_end = [value for value in rounded if value < end]
    num_allowed = max(max_points - len(sweep.values), 0)
    return tuple(below_end[:num_allowed])


def _nearest_worse(
    losses: tuple[tuple[float, ...], ...], means: tuple[float, ...], best: int
) -> tuple[int | None, int | None]:
    """Returns the indices of the nearest worse values below and above the best value, or None.

    With several seeds, a value is worse by the test of `Sweep`. With a single seed, a value is
    worse if its loss is larger.

    Args:
        losses: For each value of the grid, the losses of the seeds that finished.
        means: The mean loss of each value; infinite if a seed diverged.
        best: The index of the value with the lowest mean.
    """
    # A value is worse if its mean exceeds the best mean by more than its critical difference. This
    # is 0 for a single seed, and for values where a seed diverged, whose mean is infinite.
    critical = [0.0] * len(means)
    num_seeds = len(losses[best])
    finished = [index for index, mean in enumerate(means) if math.isfinite(mean)]
    if num_seeds > 1 and finished:
        best_first = sorted(finished, key=lambda index: means[index])
        losses_best_first = [losses[index] for index in best_first]
        num_comparisons = len(means) - 1
        critical_best_first = _critical_differences(losses_best_first, num_comparisons).tolist()
        for index, critical_difference in zip(best_first, critical_best_first, strict=True):
            critical[index] = critical_difference
    is_worse = [mean - means[best] > critical[index] for index, mean in enumerate(means)]

    below = [index for index in range(best) if is_worse[index]]
    above = [index for index in range(best + 1, len(means)) if is_worse[index]]
    return max(below, default=None), min(above, default=None)


def _critical_differences(losses: list[tuple[float, ...]], num_comparisons: int) -> np.ndarray:
    """Returns how far the mean of each value must exceed the best mean to be worse at 95 %.

    The test of the k-th best value estimates the variance from the residuals of the best k values
    in the model

        loss_vs = mean_v + level_s + residual_vs

    for value v and seed s, with (k - 1) (S - 1) degrees of freedom.

    Args:
        losses: The losses of V values by seed, in ascending order of their means.
        num_comparisons: The number of comparisons in Bonferroni's correction.

    Returns:
        The critical difference of each value; ignore the first.
    """
    losses_VS = np.array(losses)
    num_seeds = losses_VS.shape[1]
    # Entry k - 1 of each cumulative sum is over the best k values.
    k_V = np.arange(1, len(losses) + 1)

    # sum_vs (loss_vs - mean_v)^2
    deviation_VS = losses_VS - losses_VS.mean(axis=1, keepdims=True)
    squares_V = np.cumsum(np.sum(deviation_VS**2, axis=1))

    # Of these, the levels account for sum_vs level_s^2 = k sum_s level_s^2. The level of a seed is
    # its summed deviation divided by k.
    summed_deviation_VS = np.cumsum(deviation_VS, axis=0)
    squares_of_levels_V = np.sum(summed_deviation_VS**2, axis=1) / k_V
    squares_of_residuals_V = np.maximum(squares_V - squares_of_levels_V, 0)

    df_V = np.maximum((k_V - 1) * (num_seeds - 1), 1)
    variance_V = squares_of_residuals_V / df_V
    t_V = scipy.special.stdtrit(df_V, 1 - (1 - LEVEL) / max(num_comparisons, 1))
    # The difference of two means over seeds has twice the variance of one mean.
    return t_V * np.sqrt(variance_V * 2 / num_seeds)


def _parabola(values: tuple[float, ...], losses_VS: np.ndarray, best: float) -> dict[str, Any]:
    """Fits L_s(v) = a_s + b x + c x^2 with x = ln(v / best) to V values and S seeds.

    Returns:
        The fields `curvature`, `optimum`, `loss` and `bounded` of `Sweep`. If the parabola has no
        minimum within `values`, only `curvature`.
    """
    V, S = losses_VS.shape
    # N = V S losses: all seeds of the first value, then all seeds of the next value.
    losses_N = losses_VS.ravel()
    x_V = np.log(np.array(values) / best)
    x_N = np.repeat(x_V, S)
    seed_N = np.tile(np.arange(S), V)
    one_hot_seed_NS = np.eye(S)[seed_N]

    # Least squares for the P = S + 2 coefficients a_1 .. a_S, b and c.
    design_NP = np.column_stack([one_hot_seed_NS, x_N, x_N**2])
    coefficients_P, *_ = np.linalg.lstsq(design_NP, losses_N)
    a_S = coefficients_P[:S]
    b, c = coefficients_P[S:]

    parabola: dict[str, Any] = {'curvature': float(2 * c)}
    is_convex = c > 0
    if not is_convex:
        return parabola
    x_of_vertex = -b / (2 * c)
    # The margin is for rounding errors.
    is_within_values = x_V[0] - ROUNDING <= x_of_vertex <= x_V[-1] + ROUNDING
    if not is_within_values:
        return parabola
    parabola['optimum'] = float(best * math.exp(x_of_vertex))
    parabola['loss'] = float(np.mean(a_S) + b * x_of_vertex + c * x_of_vertex**2)

    num_coefficients = S + 2
    df = V * S - num_coefficients
    if df > 0:
        residuals_N = losses_N - design_NP @ coefficients_P
        # The optimum is bounded if the 95 % interval of c is above 0.
        half_width = t_quantile(df) * _error_of_last(design_NP, residuals_N, df)
        parabola['bounded'] = bool(c > half_width)
    return parabola


def _error_of_last(design_NP: np.ndarray, residuals_N: np.ndarray, df: int) -> float:
    """Returns the standard error of the last coefficient of a least-squares fit.

    The covariance of all P coefficients is

        sum_N residuals_N^2 / df * inverse(design^T design).
    """
    variance = float(np.sum(residuals_N**2)) / df
    inverse_PP = np.linalg.inv(design_NP.T @ design_NP)
    variance_of_last = variance * inverse_PP[-1, -1]
    return variance_of_last**0.5
