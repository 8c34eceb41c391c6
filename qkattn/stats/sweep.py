"""Sweeps: loss against one positive setting (learning rate, weight decay, score scale).

A setting is screened on a geometric grid, every value with the same seeds. Around the best value
the loss of seed s at value v is modelled as a parabola in x = ln(v / best) with a level per seed,

    L_s(v) = a_s + b x + c x^2 + noise,

so that the effect of a seed common to all values (data order, initialization) cancels. The
optimum is the vertex x* = -b / 2c. Losses are in nats per token, values in their own unit.

A parabola that is fitted to a skewed curve misses its optimum by a bias that no residual need show.
So how far the loss lies above the optimum is bounded over all curves of a family with skew,

    L_s(v) = a_s + C g_k(x - x0),   g_k(u) = u^2 / 2 (1 + k u),   |k| <= SKEW,

that the data do not contradict, where g_k goes on along its tangent beyond its inflection, so that
it is convex: see `Sweep.excess`. The grid grows, and further seeds are drawn, until on either side
a value is worse than the best by more than the luck of the seeds: see `Sweep.bracketed`.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import scipy  # whose submodules are imported on first use

from qkattn.stats.inference import LEVEL, ROUNDING, quantile

# Grid steps to either side of the best value that the parabola is fitted to, at least.
REACH = 2
# A parabola has three coefficients; a best value between two worse ones is bracketed.
MIN_VALUES = 3
# The losses of a single seed do not show their noise.
MIN_SEEDS = 2
# The largest relative cubic part of a curve, per unit of ln(value), that a bound allows.
SKEW = 0.6
# Optima, and skews, at which the bound of an excess is evaluated. This is repeated ZOOMS times,
# each time on a finer grid around the curves that the data do not contradict.
POINTS = 41
ZOOMS = 4


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The screening of one setting: losses, best value, fitted optimum.

    The optimum is bracketed if a value on either side of the best one is worse than it. A value at
    which a seed diverged is worse. Another one is worse at 95 % confidence by a paired one-sided t
    test over seeds, corrected (Bonferroni) for the number of values compared with the best. A few
    seeds leave a t test no power, so the variance of what a seed adds at one value (the residual of
    a level per value and one per seed) is pooled over all values that are no worse. This is Hsu's
    (1981) comparison with the best: the values that are not worse contain the best one of the grid
    with 95 % confidence, although the lowest mean was selected.
    """

    # The grid, ascending.
    values: tuple[float, ...]
    # For each value, the losses of the seeds that finished, in the order of the seeds.
    losses: tuple[tuple[float, ...], ...]
    # Their means; infinite where a seed diverged, as the mean of the others would be biased low.
    means: tuple[float, ...]
    # The value of the lowest mean: of ties the smallest, and the smallest if all diverged.
    best: float
    # Whether values on both sides of `best` are worse, which takes two seeds or more.
    bracketed: bool
    # Whether further seeds may help: the optimum is not bracketed, or has no interval. They do not
    # help if all values diverged, or if the best is at an end of the grid and its neighbour worse.
    needs_seeds: bool
    # The values of the parabola: those within two grid steps of the best, and further ones up to
    # the nearest worse value, where noise hides the rise.
    fitted: tuple[float, ...]
    # What `chosen` is: 'vertex' or 'minimax'.
    choice: str
    # 2c, the second derivative of the loss by ln(value); None with fewer than three fitted values.
    curvature: float | None = None
    # The vertex and the fitted mean loss there; None, too, if the parabola is not convex or has its
    # vertex outside the fitted values.
    optimum: float | None = None
    loss: float | None = None
    # Whether the curvature differs from zero by a t test at 95 %. One seed at three values leaves
    # that test no degree of freedom.
    bounded: bool = False

    @functools.cached_property
    def chosen(self) -> float:
        """The value to train at, between the neighbours of best, rounded to three digits.

        By `choice` it is the optimum of the parabola ('vertex'), or the value whose excess over the
        optimum has the least bound ('minimax'). `best` where there is none between its neighbours.
        """
        index = self.values.index(self.best)
        if self.optimum is None or index in (0, len(self.values) - 1):
            return self.best
        below = self.values[index - 1]
        above = self.values[index + 1]
        value = self.optimum
        if self.choice == 'minimax' and self._curves is not None:
            lowest = max(below, self.fitted[0])
            highest = min(above, self.fitted[-1])
            candidates = np.geomspace(lowest, highest, 2 * POINTS)[1:-1]
            value = min(candidates.tolist(), key=self.excess)
        rounded = float(f'{value:.3g}')
        if below < rounded < above:
            return rounded
        return self.best

    @functools.cached_property
    def at_worst(self) -> float | None:
        """The bound of `excess` at `chosen`; None where nothing bounds the optimum."""
        if self._curves is None:
            return None
        return self.excess(self.chosen)

    @property
    def optimum_low(self) -> float | None:
        """The smallest optimum of the curves of `excess`; None where nothing bounds it."""
        if self._curves is None:
            return None
        return self.best * math.exp(self._curves.optimum_C.min())

    @property
    def optimum_high(self) -> float | None:
        """The largest optimum of the curves of `excess`; None where nothing bounds it."""
        if self._curves is None:
            return None
        return self.best * math.exp(self._curves.optimum_C.max())

    def excess(self, value: float) -> float:
        """Nats by which the loss at `value` exceeds that of the optimum, at most, at 95 %.

        It is the largest excess of the curves C g_k(x - x0) that `_possible_curves` finds.
        Infinite if the data do not bound the optimum.
        """
        if self._curves is None:
            return math.inf
        curves = self._curves
        from_optimum_C = math.log(value / self.best) - curves.optimum_C
        return float(np.max(curves.scale_C * _curve(from_optimum_C, curves.skew_C)))

    @functools.cached_property
    def _curves(self) -> '_Curves | None':
        """The curves that the data do not contradict; None where nothing bounds the optimum."""
        if not self.bounded:
            return None
        x_V = np.log(np.array(self.fitted) / self.best)
        losses_VS = np.array([self.losses[self.values.index(value)] for value in self.fitted])
        return _possible_curves(x_V, losses_VS)


@dataclasses.dataclass(frozen=True)
class _Curves:
    """Curves scale g_skew(x - optimum) with x = ln(value / best); the scale is the largest one."""

    scale_C: np.ndarray
    optimum_C: np.ndarray
    skew_C: np.ndarray


def _possible_curves(x_V: np.ndarray, losses_VS: np.ndarray) -> _Curves | None:
    """The curves whose misfit to the losses of V values and S seeds is not refuted at 95 %.

    A curve C g_k(x - x0), where g_k(u) = u^2 / 2 (1 + k u) (`_curve`) and the optimum x0 is among
    the values, is possible if its residual sum of squares exceeds the least of any curve by at most
    t^2 times the variance. The variance is that of the residuals, or that between the slopes of the
    seeds if it is larger: where the optima of seeds differ, the losses of a seed err together. None
    without a degree of freedom.
    """
    V, S = losses_VS.shape
    df = V * S - S - min(V - 1, MIN_VALUES)
    if df < 1:
        return None
    losses_VS = losses_VS - losses_VS.mean(axis=0)  # without the level of each seed
    means_V = losses_VS.mean(axis=1)
    scatter = float(np.sum((losses_VS - means_V[:, None]) ** 2))
    variance_of_slopes = _variance_of_slopes(x_V, losses_VS)
    t = quantile(df)

    optimum_range = (x_V[0], x_V[-1])
    skew_range = (-SKEW, SKEW)
    for _ in range(ZOOMS):
        optimum_P = np.linspace(*optimum_range, POINTS)
        skew_P = np.linspace(*skew_range, POINTS)
        # Candidates: every optimum with every skew.
        optimum_C, skew_C = (grid.ravel() for grid in np.meshgrid(optimum_P, skew_P))
        curve_CV = _curve(x_V - optimum_C[:, None], skew_C[:, None])
        curve_CV -= curve_CV.mean(axis=1, keepdims=True)
        squares_C = np.sum(curve_CV**2, axis=1)
        # The scale of least squares, and how far it may rise until the misfit is refuted.
        scale_C = np.maximum(np.sum(curve_CV * means_V, axis=1) / squares_C, 0)
        misfit_C = S * np.sum((means_V - scale_C[:, None] * curve_CV) ** 2, axis=1)
        variance = max((scatter + misfit_C.min()) / df, variance_of_slopes)
        spare_C = misfit_C.min() + t**2 * variance - misfit_C
        largest_scale_C = scale_C + np.sqrt(np.maximum(spare_C, 0) / (S * squares_C))
        is_possible_C = spare_C >= 0
        curves = _Curves(
            largest_scale_C[is_possible_C], optimum_C[is_possible_C], skew_C[is_possible_C]
        )
        optimum_range = _zoomed(curves.optimum_C, optimum_P, optimum_range)
        skew_range = _zoomed(curves.skew_C, skew_P, skew_range)
    return curves


def _variance_of_slopes(x_V: np.ndarray, losses_VS: np.ndarray) -> float:
    """The variance between seeds of the slope of the loss, in units of one loss; 0 for one seed."""
    if losses_VS.shape[1] == 1:
        return 0.0
    centred_V = x_V - x_V.mean()
    slopes_S = centred_V @ losses_VS / (centred_V @ centred_V) ** 0.5
    return float(np.var(slopes_S, ddof=1))


def _zoomed(
    possible_C: np.ndarray, grid_P: np.ndarray, limits: tuple[float, float]
) -> tuple[float, float]:
    """The range of the possible values of a grid, a step wider at both ends, within `limits`."""
    step = grid_P[1] - grid_P[0]
    return max(limits[0], possible_C.min() - step), min(limits[1], possible_C.max() + step)


def _curve(u: np.ndarray, skew: np.ndarray) -> np.ndarray:
    """u^2 / 2 (1 + skew u), along its tangent beyond the inflection at u = -1 / (3 skew)."""
    # The second derivative is 1 + 3 skew u. Where it is zero, the slope is u / 2.
    turn = np.where(1 + 3 * skew * u >= 0, u, -1 / np.where(skew, 3 * skew, np.inf))
    return turn**2 / 2 * (1 + skew * turn) + turn / 2 * (u - turn)


def fit(losses: Mapping[float, Mapping[int, float | None]], choice: str = 'vertex') -> Sweep:
    """Fits the losses of a screening.

    `losses` maps each value (one or more, above 0) to the loss of each seed, the same seeds for all
    values; None or a non-finite loss means that the seed diverged. `choice` is as in
    `Sweep.chosen`. The parabola is fitted to `Sweep.fitted` by least squares.
    """
    values = tuple(sorted(losses))
    seeds = sorted(losses[values[0]])
    finished = tuple(_finite(losses[value][seed] for seed in seeds) for value in values)
    means = tuple(
        math.fsum(of_value) / len(of_value) if len(of_value) == len(seeds) else math.inf
        for of_value in finished
    )
    best = means.index(min(means))
    below, above = _nearest_worse(finished, means, best)

    last = len(values) - 1
    first_fitted = 0 if below is None else max(min(below, best - REACH), 0)
    last_fitted = last if above is None else min(max(above, best + REACH), last)
    fitted = [
        index for index in range(first_fitted, last_fitted + 1) if math.isfinite(means[index])
    ]
    fitted_values = tuple(values[index] for index in fitted)
    parabola: dict[str, Any] = {}
    if len(fitted) >= MIN_VALUES:
        losses_VS = np.array([finished[index] for index in fitted])
        parabola = _parabola(fitted_values, losses_VS, values[best])

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
    """The losses of the seeds that finished."""
    return tuple(loss for loss in losses if loss is not None and math.isfinite(loss))


def next_values(sweep: Sweep, ratio: float, max_points: int, end: float) -> tuple[float, ...]:
    """The values to screen next, ascending; () if the best is bracketed or max_points are tried.

    On each side of the best that has no worse value (see `Sweep.bracketed`; with a single seed, no
    larger loss), the grid grows by one step of `ratio` (> 1) beyond its end, but stays below `end`;
    downwards first if `max_points` leaves room for one only, and if every value diverged.
    """
    best = sweep.values.index(sweep.best)
    below, above = _nearest_worse(sweep.losses, sweep.means, best)
    candidates = []
    if below is None:
        candidates.append(sweep.values[0] / ratio)
    if above is None and math.isfinite(sweep.means[best]):
        candidates.append(sweep.values[-1] * ratio)
    rounded = [float(f'{value:.10g}') for value in candidates]  # 0.1 * 3 is 0.3
    room = max(max_points - len(sweep.values), 0)
    return tuple(value for value in rounded if value < end)[:room]


def _nearest_worse(
    losses: tuple[tuple[float, ...], ...], means: tuple[float, ...], best: int
) -> tuple[int | None, int | None]:
    """The indices of the nearest values below and above the best one that are worse than it.

    None where there is none. With several seeds a value is worse if the test of `Sweep` says so, or
    if a seed diverged there. With a single seed, which has no test, every larger loss is worse.
    """
    is_worse = [mean > means[best] for mean in means]
    num_seeds = len(losses[best])
    finished = [index for index, mean in enumerate(means) if math.isfinite(mean)]
    if num_seeds > 1 and finished:
        from_the_best_on = sorted(finished, key=lambda index: means[index])
        losses_by_mean = [losses[index] for index in from_the_best_on]
        critical = _critical_differences(losses_by_mean, len(means) - 1).tolist()
        for rank, index in enumerate(from_the_best_on):
            if rank > 0:
                is_worse[index] = means[index] - means[best] > critical[rank]
    below = [index for index in range(best) if is_worse[index]]
    above = [index for index in range(best + 1, len(means)) if is_worse[index]]
    return max(below, default=None), min(above, default=None)


def _critical_differences(losses: list[tuple[float, ...]], num_compared: int) -> np.ndarray:
    """The differences from the best mean at which values are worse at 95 % confidence.

    `losses` are those of each value, in ascending order of their means. For the k-th value, the
    variance of what a seed adds at one value is pooled over the best k values.
    """
    table_VS = np.array(losses)
    num_seeds = table_VS.shape[1]
    table_VS -= table_VS.mean(axis=1, keepdims=True)
    # Residual squares of the best 1, 2, ... values, without levels of values and of seeds.
    number_V = np.arange(1, len(losses) + 1)
    squares_of_seeds_V = np.sum(np.cumsum(table_VS, axis=0) ** 2, axis=1) / number_V
    squares_V = np.maximum(np.cumsum(np.sum(table_VS**2, axis=1)) - squares_of_seeds_V, 0)
    df_V = np.maximum((number_V - 1) * (num_seeds - 1), 1)
    t_V = scipy.special.stdtrit(df_V, 1 - (1 - LEVEL) / max(num_compared, 1))
    return t_V * np.sqrt(squares_V / df_V * 2 / num_seeds)


def _parabola(values: tuple[float, ...], losses_VS: np.ndarray, best: float) -> dict[str, Any]:
    """The fields of a `Sweep` that a parabola through all losses gives."""
    x_V = np.log(np.array(values) / best)
    V, S = losses_VS.shape
    # Coefficients: the level of each seed, then b and c.
    x_N = np.repeat(x_V, S)
    losses_N = losses_VS.ravel()
    levels_NS = np.tile(np.eye(S), (V, 1))
    design_NP = np.column_stack([levels_NS, x_N, x_N**2])
    coefficients_P = np.linalg.lstsq(design_NP, losses_N)[0]
    b, c = coefficients_P[S:]
    parabola: dict[str, Any] = {'curvature': float(2 * c)}
    vertex = -b / (2 * c) if c > 0 else math.inf
    # A vertex at an end of the values is not lost to rounding.
    if not x_V[0] - ROUNDING <= vertex <= x_V[-1] + ROUNDING:
        return parabola
    level = np.mean(coefficients_P[:S])
    parabola['optimum'] = float(best * math.exp(vertex))
    parabola['loss'] = float(level + b * vertex + c * vertex**2)
    df = V * S - (S + 2)
    if df > 0:
        residuals_N = losses_N - design_NP @ coefficients_P
        variance = float(np.sum(residuals_N**2)) / df
        error_of_c = (variance * np.linalg.inv(design_NP.T @ design_NP)[-1, -1]) ** 0.5
        parabola['bounded'] = bool(c > quantile(df) * error_of_c)
    return parabola
