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
from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy  # whose submodules are imported on first use

from qkattn.stats.inference import LEVEL, ROUNDING, quantile

REACH = 2  # grid steps to either side of the best value that the parabola is fitted to, at least
MIN_VALUES = 3  # a parabola has three coefficients, a bracketed value a worse one on both sides
MIN_SEEDS = 2  # one shows no noise
SKEW = 0.6  # the largest relative cubic part of a curve, per unit of ln(value), that a bound allows
POINTS = 41  # optima, and skews, at which the bound of an excess is evaluated, ...
ZOOMS = 4  # ... each time on a finer grid around those that the data do not contradict


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The screening of one setting: losses, best value, fitted optimum.

    `losses` holds, for each value, the losses of the seeds that finished, in the order of seeds;
    `means` is their mean, infinite where a seed diverged, since the mean of the others would be
    biased low. `best` is the grid value of the lowest mean (of ties the smallest; the smallest
    value if all diverged).

    `bracketed`: there is a worse value on both sides of the best, which takes two seeds or more. A
    diverged value is worse. Another is worse at 95 % confidence by a paired one-sided t test over
    seeds, corrected (Bonferroni) for the number of values compared with the best; since a few seeds
    leave a t test no power, the variance of what a seed adds at one value (the residual of a level
    per value and one per seed) is pooled over all values that are no worse. This is Hsu's (1981)
    comparison with the best: the values not found worse contain the best one of the grid with 95 %
    confidence, although the lowest mean was selected.

    `needs_seeds`: further seeds may help, because the values do not bracket the optimum or leave it
    without an interval. They do not help if all values diverged, or if the best one is at an end of
    the grid and its neighbour worse. `fitted` are the values of the parabola: within two grid steps
    of the best, and further, up to the nearest worse value, where the noise hides the rise.

    `curvature` is 2c, the second derivative of the loss by ln(value); None with fewer than three
    values to fit. `optimum` and the fitted mean `loss` there are also None if the parabola is not
    convex or its vertex lies outside the fitted values. `bounded`: the curvature differs from zero
    by a t test at 95 %, for which one seed at three values leaves no degrees of freedom.
    """

    values: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    means: tuple[float, ...]
    best: float
    bracketed: bool
    needs_seeds: bool
    fitted: tuple[float, ...]
    choice: str
    curvature: float | None = None
    optimum: float | None = None
    loss: float | None = None
    bounded: bool = False

    @functools.cached_property
    def chosen(self) -> float:
        """The value to train at, between the neighbours of best, rounded to three digits.

        By `choice` it is the optimum of the parabola ('vertex'), or the value whose excess over the
        optimum has the least bound ('minimax'). `best` where there is none between its neighbours.
        """
        i = self.values.index(self.best)
        if self.optimum is None or i in (0, len(self.values) - 1):
            return self.best
        below, above = self.values[i - 1], self.values[i + 1]
        value = self.optimum
        if self.choice == 'minimax' and self._curves is not None:
            ends = max(below, self.fitted[0]), min(above, self.fitted[-1])
            value = min(np.geomspace(*ends, 2 * POINTS)[1:-1].tolist(), key=self.excess)
        rounded = float(f'{value:.3g}')
        return rounded if below < rounded < above else self.best

    @functools.cached_property
    def at_worst(self) -> float | None:
        """The bound of `excess` at `chosen`; None where nothing bounds the optimum."""
        return None if self._curves is None else self.excess(self.chosen)

    @property
    def optimum_low(self) -> float | None:
        """The least optimum of the curves of `excess`; None where nothing bounds it."""
        return None if self._curves is None else self.best * math.exp(self._curves[1].min())

    @property
    def optimum_high(self) -> float | None:
        """The largest optimum of these curves."""
        return None if self._curves is None else self.best * math.exp(self._curves[1].max())

    def excess(self, value: float) -> float:
        """Nats by which the loss at `value` exceeds that of the optimum, at most, at 95 %.

        The largest of all curves C g_k(x - x0) with an optimum x0 among the fitted values, whose
        residual sum of squares exceeds the least of any of them by t^2 times the variance at most.
        The variance is that of the residuals, or that between the slopes of the seeds if it is
        larger: where the optima of seeds differ, the losses of a seed err together. Infinite if
        the data do not bound the optimum.
        """
        if self._curves is None:
            return math.inf
        scale_C, optimum_C, skew_C = self._curves
        return float(np.max(scale_C * _curve(math.log(value / self.best) - optimum_C, skew_C)))

    @functools.cached_property
    def _curves(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """The largest scale, the optimum ln(value / best) and the skew of each possible curve."""
        if not self.bounded:
            return None
        x_V = np.log(np.array(self.fitted) / self.best)
        losses_VS = np.array([self.losses[self.values.index(v)] for v in self.fitted])
        losses_VS -= losses_VS.mean(axis=0)
        V, S = losses_VS.shape
        if (df := V * S - S - min(V - 1, MIN_VALUES)) < 1:
            return None
        means_V = losses_VS.mean(axis=1)
        scatter = float(np.sum((losses_VS - means_V[:, None]) ** 2))
        x_V_centred = x_V - x_V.mean()
        slopes_S = x_V_centred @ losses_VS / (x_V_centred @ x_V_centred) ** 0.5
        between = float(np.var(slopes_S, ddof=1)) if S > 1 else 0.0
        t = quantile(df)
        ends = [(x_V[0], x_V[-1]), (-SKEW, SKEW)]
        for _ in range(ZOOMS):
            axes = [np.linspace(*end, POINTS) for end in ends]
            optimum_C, skew_C = (axis.ravel() for axis in np.meshgrid(*axes))
            curve_CV = _curve(x_V - optimum_C[:, None], skew_C[:, None])
            curve_CV -= curve_CV.mean(axis=1, keepdims=True)
            squares_C = np.sum(curve_CV**2, axis=1)
            scale_C = np.maximum(np.sum(curve_CV * means_V, axis=1) / squares_C, 0)
            misfit_C = S * np.sum((means_V - scale_C[:, None] * curve_CV) ** 2, axis=1)
            variance = max((scatter + misfit_C.min()) / df, between)
            spare_C = misfit_C.min() + t**2 * variance - misfit_C
            possible_C = spare_C >= 0
            scale_C = scale_C + np.sqrt(np.maximum(spare_C, 0) / (S * squares_C))
            kept = optimum_C[possible_C], skew_C[possible_C]
            steps = [axis[1] - axis[0] for axis in axes]
            ends = [
                (max(low, kept_C.min() - step), min(high, kept_C.max() + step))
                for kept_C, (low, high), step in zip(kept, ends, steps, strict=True)
            ]
        return scale_C[possible_C], *kept


def _curve(u: np.ndarray, skew: np.ndarray) -> np.ndarray:
    """u^2 / 2 (1 + skew u), along its tangent beyond the inflection at u = -1 / (3 skew)."""
    # The second derivative is 1 + 3 skew u. Where it is zero, the slope is u / 2.
    turn = np.where(1 + 3 * skew * u >= 0, u, -1 / np.where(skew, 3 * skew, np.inf))
    return turn**2 / 2 * (1 + skew * turn) + turn / 2 * (u - turn)


def fit(losses: Mapping[float, Mapping[int, float | None]], choice: str = 'vertex') -> Sweep:
    """Fits `losses`: value -> seed -> loss, where None or a non-finite loss means diverged.

    There is one value or more, above 0, all with the same seeds. The parabola is fitted to
    `Sweep.fitted` by least squares.
    """
    values = tuple(sorted(losses))
    seeds = sorted(losses[values[0]])
    finite = tuple(
        tuple(y for y in (losses[v][s] for s in seeds) if y is not None and math.isfinite(y))
        for v in values
    )
    means = tuple(math.fsum(ys) / len(ys) if len(ys) == len(seeds) else math.inf for ys in finite)
    i = means.index(min(means))
    below, above = _nearest_worse(finite, means, i)
    first = 0 if below is None else max(min(below, i - REACH), 0)
    last = len(values) - 1 if above is None else max(above, i + REACH)
    near = [j for j in range(len(values)) if first <= j <= last and math.isfinite(means[j])]
    fitted = tuple(values[j] for j in near)
    parabola: dict[str, Any] = {}
    if len(near) >= MIN_VALUES:
        parabola = _parabola(fitted, np.array([finite[j] for j in near]), values[i])
    bracketed = len(seeds) >= MIN_SEEDS and below is not None and above is not None
    at_end = (i == 0 and above == 1) or (i == len(values) - 1 and below == i - 1)
    is_clear = (bracketed and parabola.get('bounded')) or at_end
    return Sweep(
        values=values,
        losses=finite,
        means=means,
        best=values[i],
        bracketed=bracketed,
        needs_seeds=not is_clear and math.isfinite(means[i]),
        fitted=fitted,
        choice=choice,
        **parabola,
    )


def next_values(sweep: Sweep, ratio: float, max_points: int, end: float) -> tuple[float, ...]:
    """The values to screen next, ascending; () if the best is bracketed or max_points are tried.

    On each side of the best that has no worse value (see `Sweep.bracketed`; with a single seed, no
    larger loss), the grid grows by one step of `ratio` (> 1) beyond its end, but stays below `end`;
    downwards first if `max_points` leaves room for one only, and if every value diverged.
    """
    i = sweep.values.index(sweep.best)
    below, above = _nearest_worse(sweep.losses, sweep.means, i)
    steps = []
    if below is None:
        steps.append(sweep.values[0] / ratio)
    if above is None and math.isfinite(sweep.means[i]):
        steps.append(sweep.values[-1] * ratio)
    room = max(max_points - len(sweep.values), 0)
    rounded = (float(f'{value:.10g}') for value in steps)  # 0.1 * 3 is 0.3
    return tuple(value for value in rounded if value < end)[:room]


def _nearest_worse(
    losses: tuple[tuple[float, ...], ...], means: tuple[float, ...], i: int
) -> tuple[int | None, int | None]:
    """The nearest values that are worse than value i, the best, below and above it."""
    worse = [mean > means[i] for mean in means]
    by_mean = sorted((j for j, m in enumerate(means) if math.isfinite(m)), key=means.__getitem__)
    seeds = len(losses[i])
    if seeds > 1 and by_mean:
        table_VS = np.array([losses[j] for j in by_mean])
        table_VS -= table_VS.mean(axis=1, keepdims=True)
        # Residual squares of the best 1, 2, ... values, without levels of values and of seeds.
        number_V = np.arange(1, len(by_mean) + 1)
        of_seeds_V = np.sum(np.cumsum(table_VS, axis=0) ** 2, axis=1) / number_V
        squares_V = np.maximum(np.cumsum(np.sum(table_VS**2, axis=1)) - of_seeds_V, 0)
        df_V = np.maximum((number_V - 1) * (seeds - 1), 1)
        t_V = scipy.special.stdtrit(df_V, 1 - (1 - LEVEL) / max(len(means) - 1, 1))
        critical_V = t_V * np.sqrt(squares_V / df_V * 2 / seeds)
        for j, critical in zip(by_mean[1:], critical_V[1:].tolist(), strict=True):
            worse[j] = means[j] - means[i] > critical
    below = max((j for j in range(i) if worse[j]), default=None)
    return below, min((j for j in range(i + 1, len(means)) if worse[j]), default=None)


def _parabola(values: tuple[float, ...], losses_VS: np.ndarray, best: float) -> dict[str, Any]:
    """The fields of a `Sweep` that a parabola through all losses gives."""
    x = np.log(np.array(values) / best)
    V, S = losses_VS.shape
    x_N, losses_N = np.repeat(x, S), losses_VS.ravel()
    design_NP = np.column_stack([np.tile(np.eye(S), (V, 1)), x_N, x_N**2])
    coefficients_P = np.linalg.lstsq(design_NP, losses_N)[0]
    b, c = coefficients_P[S:]
    vertex = -b / (2 * c) if c > 0 else math.inf
    parabola: dict[str, Any] = {'curvature': float(2 * c)}
    # A vertex at an end of the values is not lost to rounding.
    if not x[0] - ROUNDING <= vertex <= x[-1] + ROUNDING:
        return parabola
    parabola['optimum'] = float(best * math.exp(vertex))
    parabola['loss'] = float(np.mean(coefficients_P[:S]) + b * vertex + c * vertex**2)
    if df := V * S - (S + 2):
        variance = float(np.sum((losses_N - design_NP @ coefficients_P) ** 2)) / df
        error = (variance * np.linalg.inv(design_NP.T @ design_NP)[-1, -1]) ** 0.5
        parabola['bounded'] = bool(c > quantile(df) * error)
    return parabola
