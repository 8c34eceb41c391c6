"""Sweeps: loss against one positive setting (learning rate, weight decay, score scale).

Trials screen a setting on a geometric grid, with the same seeds at every value. Near the best value
the loss of seed s at value v is modelled as a parabola in x = ln(v / best) with one level per seed:

    L_s(v) = a_s + b x + c x^2 + noise.

The level a_s takes up what a seed adds at all values (data order, initialization). The optimum is
the vertex x* = -b / 2c. Losses are in nats per token, values in their own unit.

If the true curve is skewed, the parabola misses its optimum, and the residuals need not show it.
So `Sweep.excess` bounds how far a loss lies above the optimum, over a family of skewed curves,

    L_s(v) = a_s + C g_k(x - x0),   g_k(u) = u^2 / 2 (1 + k u),   |k| <= SKEW,

by the largest excess of any curve that the data do not contradict. Beyond its inflection, g_k
continues along its tangent, so that it is convex.

The grid grows, and further seeds are drawn, until a value on each side of the best one is worse by
more than the luck of the seeds explains (`Sweep.bracketed`).
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import scipy  # whose submodules are imported on first use

from qkattn.stats.inference import LEVEL, ROUNDING, t_quantile

# The parabola is fitted to at least this many grid steps on each side of the best value.
REACH = 2
# A parabola has three coefficients, and bracketing takes a best value between two worse ones.
MIN_VALUES = 3
# The losses of a single seed do not show their noise.
MIN_SEEDS = 2
# The largest skew k of the curves in a bound: the cubic part relative to the quadratic part, per
# unit of ln(value).
SKEW = 0.6
# A bound is evaluated on a grid of this many optima times as many skews.
POINTS = 41
# The grid is refined this many times around the curves that the data do not contradict.
ZOOMS = 4


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The screening of one setting: losses, best value, fitted optimum.

    The optimum is bracketed if there is a worse value on each side of the best one. A value is
    worse if a seed diverged there. It is also worse if a paired one-sided t test over seeds says so
    at 95 % confidence, with Bonferroni's correction for the number of values that are compared with
    the best one.

    With few seeds, a t test of two values has no power. So the test pools the residual variance,
    after one level per value and one per seed, over all values that are not worse. This is Hsu's
    (1981) comparison with the best: with 95 % confidence, the true best value of the grid is among
    those that are not worse, although the best one was selected by its mean.
    """

    # The grid, ascending.
    values: tuple[float, ...]
    # For each value, the losses of the seeds that finished, in the order of the seeds.
    losses: tuple[tuple[float, ...], ...]
    # Their means; infinite if a seed diverged, as the mean of the others would be biased low.
    means: tuple[float, ...]
    # The value with the lowest mean. Of several such values, or if all diverged, the smallest one.
    best: float
    # Whether values on both sides of `best` are worse. Takes two seeds or more.
    bracketed: bool
    # Whether further seeds may help, because the optimum is not bracketed or has no interval. They
    # do not help if all values diverged, or if `best` is at an end of the grid and its neighbour is
    # worse.
    needs_seeds: bool
    # The values that the parabola is fitted to: all within two grid steps of `best`, and further
    # ones up to the nearest worse value if noise hides the rise.
    fitted: tuple[float, ...]
    # How `chosen` is found: 'vertex' or 'minimax'.
    choice: str
    # 2c, the second derivative of the loss by ln(value); None with fewer than three fitted values.
    curvature: float | None = None
    # The vertex, and the fitted mean loss there. None without a parabola, if the parabola is not
    # convex, or if its vertex lies outside the fitted values.
    optimum: float | None = None
    loss: float | None = None
    # Whether the curvature is above zero by a t test at 95 %. One seed at three values leaves that
    # test no degree of freedom.
    bounded: bool = False

    @functools.cached_property
    def chosen(self) -> float:
        """The value to train at, rounded to three significant digits.

        With the choice 'vertex', this is the optimum of the parabola. With 'minimax', it is the
        value with the smallest `excess`, which bounds how far its loss lies above the lowest one.
        If there is no optimum, or if the value does not lie between the neighbours of `best` on the
        grid, `best` itself is chosen.
        """
        index = self.values.index(self.best)
        is_at_end = index in (0, len(self.values) - 1)
        if self.optimum is None or is_at_end:
            return self.best
        below = self.values[index - 1]
        above = self.values[index + 1]

        value = self.optimum
        if self.choice == 'minimax' and self._curves is not None:
            # Try values between the neighbours, but none outside of the fitted values.
            lowest = max(below, self.fitted[0])
            highest = min(above, self.fitted[-1])
            candidates = np.geomspace(lowest, highest, 2 * POINTS)[1:-1]  # without the ends
            value = min(candidates.tolist(), key=self.excess)

        rounded = float(f'{value:.3g}')
        if below < rounded < above:
            return rounded
        return self.best

    @functools.cached_property
    def at_worst(self) -> float | None:
        """The bound of `excess` at `chosen`; None if nothing bounds the optimum."""
        if self._curves is None:
            return None
        return self.excess(self.chosen)

    @property
    def optimum_low(self) -> float | None:
        """The smallest optimum of all possible curves (see `excess`); None if nothing bounds it."""
        if self._curves is None:
            return None
        return self.best * math.exp(self._curves.optimum_C.min())

    @property
    def optimum_high(self) -> float | None:
        """The largest optimum of all possible curves (see `excess`); None if nothing bounds it."""
        if self._curves is None:
            return None
        return self.best * math.exp(self._curves.optimum_C.max())

    def excess(self, value: float) -> float:
        """Bounds how far the loss at `value` lies above the lowest loss, in nats per token.

        The measured losses are noisy, so they fit many curves (`_curves`). Each curve has its own
        optimum, and rises from there to its own height at `value`. The bound is the greatest of
        these heights. It is infinite if the losses do not bound the optimum.
        """
        curves = self._curves
        if curves is None:
            return math.inf
        # ln(value / optimum) of each curve, as optimum_C is ln(optimum / best).
        from_optimum_C = math.log(value / self.best) - curves.optimum_C
        excess_C = curves.scale_C * _curve(from_optimum_C, curves.skew_C)
        return float(np.max(excess_C))

    @functools.cached_property
    def _curves(self) -> '_Curves | None':
        """The curves that the data do not contradict; None if nothing bounds the optimum."""
        if not self.bounded:
            return None
        x_V = np.log(np.array(self.fitted) / self.best)
        losses_VS = np.array([self.losses[self.values.index(value)] for value in self.fitted])
        return _possible_curves(x_V, losses_VS)


@dataclasses.dataclass(frozen=True)
class _Curves:
    """C curves scale * g_skew(x - optimum), with x = ln(value / best)."""

    scale_C: np.ndarray  # the largest scale that the data do not contradict
    optimum_C: np.ndarray
    skew_C: np.ndarray


def _possible_curves(x_V: np.ndarray, losses_VS: np.ndarray) -> _Curves | None:
    """Finds the curves that the losses of V values and S seeds do not refute at 95 %.

    A curve is scale * g_k(x - x0) with g_k(u) = u^2 / 2 (1 + k u) (`_curve`) and its optimum x0 in
    the range of the values. It is possible if its residual sum of squares exceeds the smallest one
    of all curves by at most t^2 times the variance.

    The variance is estimated from the residuals and from the slopes of the seeds, and the larger
    estimate is used. If the seeds have different optima, the residuals of a seed are correlated,
    and only the slopes show the whole variance. Returns None if there is no degree of freedom.
    """
    V, S = losses_VS.shape
    df = V * S - S - min(V - 1, MIN_VALUES)
    if df < 1:
        return None
    losses_VS = losses_VS - losses_VS.mean(axis=0)  # without the level of each seed
    means_V = losses_VS.mean(axis=1)
    squares_around_means = float(np.sum((losses_VS - means_V[:, None]) ** 2))
    variance_of_slopes = _variance_of_slopes(x_V, losses_VS)
    t = t_quantile(df)

    optimum_range = (x_V[0], x_V[-1])
    skew_range = (-SKEW, SKEW)
    for _ in range(ZOOMS):
        # The candidates are all combinations of P optima and P skews.
        optimum_P = np.linspace(*optimum_range, POINTS)
        skew_P = np.linspace(*skew_range, POINTS)
        optimum_PP, skew_PP = np.meshgrid(optimum_P, skew_P)
        optimum_C = optimum_PP.ravel()
        skew_C = skew_PP.ravel()
        curve_CV = _curve(x_V - optimum_C[:, None], skew_C[:, None])
        curve_CV -= curve_CV.mean(axis=1, keepdims=True)  # the losses have mean 0, too

        # The least-squares scale of each candidate, and its residual sum of squares.
        squares_C = np.sum(curve_CV**2, axis=1)
        scale_C = np.maximum(np.sum(curve_CV * means_V, axis=1) / squares_C, 0)
        misfit_C = S * np.sum((means_V - scale_C[:, None] * curve_CV) ** 2, axis=1)

        # How far the misfit may still rise until the losses refute the curve, and the largest scale
        # at which it has risen that far.
        variance = max((squares_around_means + misfit_C.min()) / df, variance_of_slopes)
        spare_C = misfit_C.min() + t**2 * variance - misfit_C
        largest_scale_C = scale_C + np.sqrt(np.maximum(spare_C, 0) / (S * squares_C))

        is_possible_C = spare_C >= 0
        curves = _Curves(
            largest_scale_C[is_possible_C], optimum_C[is_possible_C], skew_C[is_possible_C]
        )
        # Refine the grid around the possible curves.
        optimum_range = _finer_range(curves.optimum_C, optimum_P, optimum_range)
        skew_range = _finer_range(curves.skew_C, skew_P, skew_range)
    return curves


def _variance_of_slopes(x_V: np.ndarray, losses_VS: np.ndarray) -> float:
    """Returns the variance between seeds of the slope of the loss; 0 for one seed.

    The slopes are scaled so that their variance has the unit of the variance of one loss.
    """
    if losses_VS.shape[1] == 1:
        return 0.0
    centred_V = x_V - x_V.mean()
    slopes_S = centred_V @ losses_VS / (centred_V @ centred_V) ** 0.5
    return float(np.var(slopes_S, ddof=1))


def _finer_range(
    possible_C: np.ndarray, grid_P: np.ndarray, limits: tuple[float, float]
) -> tuple[float, float]:
    """Returns the range of a finer grid for a parameter of the curves: the optimum or the skew.

    For example, the present grid has steps of 0.1, and the optima of the possible curves lie
    between 0.3 and 0.5. Then the finer grid covers 0.2 to 0.6.

    Args:
        possible_C: The parameter of each possible curve.
        grid_P: The present grid.
        limits: The range that must not be left.
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
    # The slope is g'(u0) = u0 + 3/2 skew u0^2. Insert skew u0 = -1/3.
    slope = inflection / 2
    tangent = height + slope * (u - inflection)
    return np.where(is_convex, cubic, tangent)


def fit(losses: Mapping[float, Mapping[int, float | None]], choice: str = 'vertex') -> Sweep:
    """Fits the losses of a screening.

    Args:
        losses: For each value of the setting (one or more, above 0) the loss of each seed. All
            values have the same seeds. None or a non-finite loss means that the seed diverged.
        choice: 'vertex' or 'minimax' (see `Sweep.chosen`).
    """
    values = tuple(sorted(losses))
    seeds = sorted(losses[values[0]])
    finished = tuple(_finite(losses[value][seed] for seed in seeds) for value in values)
    means = tuple(_mean_or_inf(finished_losses, len(seeds)) for finished_losses in finished)
    best = means.index(min(means))
    below, above = _nearest_worse(finished, means, best)

    # On each side of the best value, the parabola is fitted up to the nearest worse value, or to
    # REACH values if that is further. Without a worse value, it is fitted to the end of the grid.
    last = len(values) - 1
    first_fitted = 0
    if below is not None:
        first_fitted = max(min(below, best - REACH), 0)
    last_fitted = last
    if above is not None:
        last_fitted = min(max(above, best + REACH), last)
    in_reach = range(first_fitted, last_fitted + 1)
    fitted = [index for index in in_reach if math.isfinite(means[index])]
    fitted_values = tuple(values[index] for index in fitted)
    parabola: dict[str, Any] = {}
    if len(fitted) >= MIN_VALUES:
        losses_VS = np.array([finished[index] for index in fitted])
        parabola = _parabola(fitted_values, losses_VS, values[best])

    # Further seeds do not help if the optimum is bounded, or if the best value is at an end of the
    # grid and the value beside it is worse.
    bracketed = len(seeds) >= MIN_SEEDS and below is not None and above is not None
    is_bounded = bracketed and parabola.get('bounded', False)
    is_lowest_beside_worse = best == 0 and above == 1
    is_highest_beside_worse = best == last and below == best - 1
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
        **parabola,
    )


def _finite(losses: Iterable[float | None]) -> tuple[float, ...]:
    """Returns the losses of the seeds that finished."""
    return tuple(loss for loss in losses if loss is not None and math.isfinite(loss))


def _mean_or_inf(finished_losses: tuple[float, ...], num_seeds: int) -> float:
    """Returns the mean loss of a value, or infinity if not all seeds finished."""
    if len(finished_losses) < num_seeds:
        return math.inf
    return math.fsum(finished_losses) / num_seeds


def next_values(sweep: Sweep, ratio: float, max_points: int, end: float) -> tuple[float, ...]:
    """Returns the values to screen next, in ascending order.

    The best value of a grid needs a worse value on each side. On a side without one, the grid grows
    by one value. For example, 0.004 is the best of (0.001, 0.002, 0.004) and 0.002 is worse, so
    0.008 is next. `_nearest_worse` says what worse means. If only one more value is allowed, or if
    every value diverged, the grid grows downwards.

    Args:
        sweep: The values that were screened.
        ratio: The ratio of neighbouring values of the grid, above 1.
        max_points: The largest number of values in the grid.
        end: All values are below it.

    Returns:
        Up to two values; () if the best value is bracketed or the grid is full.
    """
    best = sweep.values.index(sweep.best)
    below, above = _nearest_worse(sweep.losses, sweep.means, best)
    all_diverged = not math.isfinite(sweep.means[best])
    candidates = []
    if below is None:
        candidates.append(sweep.values[0] / ratio)
    if above is None and not all_diverged:
        candidates.append(sweep.values[-1] * ratio)
    # Ten digits drop rounding errors: 0.1 * 3 becomes 0.3.
    rounded = [float(f'{value:.10g}') for value in candidates]
    below_end = [value for value in rounded if value < end]
    room = max(max_points - len(sweep.values), 0)
    return tuple(below_end[:room])


def _nearest_worse(
    losses: tuple[tuple[float, ...], ...], means: tuple[float, ...], best: int
) -> tuple[int | None, int | None]:
    """Finds the nearest worse value below the best one, and the nearest worse value above it.

    A value is worse in these cases:

    - A seed diverged there, and none at the best value.
    - With several seeds, the t test that `Sweep` describes says so.
    - With a single seed, which allows no test, its loss is larger.

    Args:
        losses: For each value of the grid, the losses of the seeds that finished.
        means: The mean loss at each value; infinite if a seed diverged.
        best: The index of the value with the lowest mean.

    Returns:
        The indices of both values. An index is None if no value on that side is worse.
    """
    # How far the mean of a value has to exceed the best mean. With several seeds, the test says how
    # far, for the values at which every seed finished. Elsewhere, any excess counts.
    critical = [0.0] * len(means)
    num_seeds = len(losses[best])
    finished = [index for index, mean in enumerate(means) if math.isfinite(mean)]
    if num_seeds > 1 and finished:
        best_first = sorted(finished, key=lambda index: means[index])
        sorted_losses = [losses[index] for index in best_first]
        sorted_critical = _critical_differences(sorted_losses, len(means) - 1).tolist()
        for index, critical_difference in zip(best_first, sorted_critical, strict=True):
            critical[index] = critical_difference
    is_worse = [mean - means[best] > critical[index] for index, mean in enumerate(means)]

    below = [index for index in range(best) if is_worse[index]]
    above = [index for index in range(best + 1, len(means)) if is_worse[index]]
    return max(below, default=None), min(above, default=None)


def _critical_differences(losses: list[tuple[float, ...]], num_compared: int) -> np.ndarray:
    """Returns how far the mean of each value has to exceed the best mean to be worse at 95 %.

    The t test of the k-th best value takes its variance from the losses of the best k values. They
    are modelled as

        loss_vs = mean_v + level_s + residual_vs

    for value v and seed s. The variance is that of the residuals, with (k - 1) (S - 1) degrees of
    freedom.

    Args:
        losses: The losses of V values by seed, in ascending order of their means.
        num_compared: The number of comparisons in Bonferroni's correction.

    Returns:
        The critical difference of each of the V values. That of the first value, the best one, is
        not used.
    """
    losses_VS = np.array(losses)
    num_seeds = losses_VS.shape[1]
    # Entry k - 1 of each sum below runs over the best k values.
    k_V = np.arange(1, len(losses) + 1)

    # The squares of loss_vs - mean_v, summed over seeds and values.
    deviation_VS = losses_VS - losses_VS.mean(axis=1, keepdims=True)
    squares_V = np.cumsum(np.sum(deviation_VS**2, axis=1))

    # One part of them is due to the levels. The level of a seed is its mean deviation, so this part
    # is k sum_s level_s^2 = sum_s (summed deviation)^2 / k. The rest is due to the residuals.
    summed_deviation_VS = np.cumsum(deviation_VS, axis=0)
    squares_of_levels_V = np.sum(summed_deviation_VS**2, axis=1) / k_V
    squares_of_residuals_V = np.maximum(squares_V - squares_of_levels_V, 0)

    df_V = np.maximum((k_V - 1) * (num_seeds - 1), 1)
    variance_V = squares_of_residuals_V / df_V
    t_V = scipy.special.stdtrit(df_V, 1 - (1 - LEVEL) / max(num_compared, 1))
    # The difference of two means over seeds has twice the variance of one mean.
    return t_V * np.sqrt(variance_V * 2 / num_seeds)


def _parabola(values: tuple[float, ...], losses_VS: np.ndarray, best: float) -> dict[str, Any]:
    """Fits L_s(v) = a_s + b x + c x^2 with x = ln(v / best), by least squares.

    Returns the fields of `Sweep` that describe the parabola, by name: `curvature`, `optimum`,
    `loss` and `bounded`. If the parabola is not convex, or if its vertex lies outside `values`,
    there is only the curvature.
    """
    x_V = np.log(np.array(values) / best)
    V, S = losses_VS.shape
    # Each of the N = V S losses has a row of the design matrix: 1 for its own seed and 0 for the
    # others, then x and x^2. The coefficients are the level a_s of each seed, then b and c.
    x_N = np.repeat(x_V, S)
    losses_N = losses_VS.ravel()
    levels_NS = np.tile(np.eye(S), (V, 1))
    design_NP = np.column_stack([levels_NS, x_N, x_N**2])
    coefficients_P = np.linalg.lstsq(design_NP, losses_N)[0]
    level_S = coefficients_P[:S]
    b, c = coefficients_P[S:]

    parabola: dict[str, Any] = {'curvature': float(2 * c)}
    if not c > 0:
        return parabola
    vertex = -b / (2 * c)
    # Rounding may put a vertex at an end of the values slightly outside.
    is_inside = x_V[0] - ROUNDING <= vertex <= x_V[-1] + ROUNDING
    if not is_inside:
        return parabola
    parabola['optimum'] = float(best * math.exp(vertex))
    parabola['loss'] = float(np.mean(level_S) + b * vertex + c * vertex**2)

    # A t test of the coefficient c, which needs more losses than the S + 2 coefficients.
    df = V * S - (S + 2)
    if df > 0:
        residuals_N = losses_N - design_NP @ coefficients_P
        variance = float(np.sum(residuals_N**2)) / df
        inverse_PP = np.linalg.inv(design_NP.T @ design_NP)
        error_of_c = (variance * inverse_PP[-1, -1]) ** 0.5
        parabola['bounded'] = bool(c > t_quantile(df) * error_of_c)
    return parabola
