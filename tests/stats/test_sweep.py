"""Sweeps of one setting: the parabola, its intervals, and how the grid and its seeds grow."""

import math
from typing import NamedTuple

import numpy as np
import pytest
from scipy import stats

from qkattn.stats import sweep
from tests.lanes import slow_except

OPTIMUM = 0.0037
GRID = tuple(0.001 * 2.0**k for k in range(5))
WIDE = tuple(0.004 * 2.0**k for k in range(-4, 5))


def loss(value, seed=0, curvature=0.06):
    """A parabola in ln(value) around OPTIMUM, plus a level per seed."""
    return 2.0 + 0.05 * seed + curvature / 2 * math.log(value / OPTIMUM) ** 2


def losses_by_value(values=GRID, seeds=3, rng=None, noise=0.0, curvature=0.06):
    """Losses by value and seed, with noise if there is a random generator."""
    losses_of_value = {}
    for value in values:
        of_seed = {seed: loss(value, seed, curvature) for seed in range(seeds)}
        if rng is not None:
            of_seed = {seed: of_seed[seed] + rng.normal(0, noise) for seed in of_seed}
        losses_of_value[value] = of_seed
    return losses_of_value


def sweep_of_means(*means, values=GRID, seeds=2):
    """The sweep of seeds without noise, with these means (None: diverged) at the first values."""
    losses_of_value = {}
    for value, mean in zip(values, means, strict=False):
        losses_of_value[value] = dict.fromkeys(range(seeds), mean)
    return sweep.fit(losses_of_value)


def indices_of_nearest_worse(swept):
    """The indices of the nearest worse values below and above the best."""
    return sweep._nearest_worse(swept.losses, swept.means, swept.values.index(swept.best))


@pytest.mark.parametrize('noise', [0.004, 0.06, 0.07])
def test_the_fit_is_least_squares_with_a_level_per_seed(noise):
    table = losses_by_value(rng=np.random.default_rng(1), noise=noise)
    swept = sweep.fit(dict(reversed(table.items())))
    losses_VS = np.array(swept.losses)
    # The same fit by numpy: level + b x + c x^2, with x the logarithm of a rate over 0.004.
    x_V = np.log(np.array(GRID) / 0.004)
    centred_N = (losses_VS - losses_VS.mean(axis=0)).ravel()  # removes the level of each seed
    columns_VP = np.column_stack([x_V - x_V.mean(), x_V**2 - np.mean(x_V**2)])
    design_NP = columns_VP.repeat(3, axis=0)
    (b, c), (residual,), _, _ = np.linalg.lstsq(design_NP, centred_N)
    level = losses_VS.mean() - b * x_V.mean() - c * np.mean(x_V**2)
    expected = (2 * c, 0.004 * math.exp(-b / (2 * c)), level - b**2 / (4 * c))
    assert (swept.curvature, swept.optimum, swept.loss) == pytest.approx(expected)
    # The standard error of c, with 15 losses and 5 parameters, and a t test of c > 0.
    error = (residual / (15 - 5) * np.linalg.inv(design_NP.T @ design_NP)[1, 1]) ** 0.5
    assert swept.bounded == (c / error > 2.228139) == (noise < 0.065)  # the 97.5 % quantile


@pytest.mark.parametrize('optimum', [GRID[-1] * (1 - 1e-14), GRID[-1], GRID[-1] * (1 + 1e-14)])
def test_an_optimum_at_the_end_of_the_grid_is_kept_whatever_the_rounding(optimum):
    swept = sweep_of_means(*(2.0 + 0.1 * math.log(value / optimum) ** 2 for value in GRID))
    assert swept.best == GRID[-1]
    assert swept.optimum == pytest.approx(GRID[-1], rel=1e-12)


def excess_on_a_grid_of_curves(swept, value):
    """The excess at `value` and the interval of the optimum, by trying curves on a fixed grid.

    A curve is allowed if its residuals are not too large by an F test. Returns the largest excess
    of allowed curves, and the least and the largest of their optima. The axes of arrays are, in
    this order, optima, skews, values and seeds.
    """
    x_V = np.log(np.array(swept.fitted) / value)
    losses_VS = np.array([swept.losses[swept.values.index(fitted)] for fitted in swept.fitted])
    losses_VS -= losses_VS.mean(axis=0)
    means_V = losses_VS.mean(axis=1)
    num_seeds = losses_VS.shape[1]
    centred_V = x_V - x_V.mean()
    slopes_S = centred_V @ losses_VS / np.sum(centred_V**2) ** 0.5

    optimum = np.linspace(x_V[0], x_V[-1], 1001)[:, None, None]
    skew = np.linspace(-sweep.SKEW, sweep.SKEW, 121)[:, None]
    curve = sweep._curve(x_V - optimum, skew)
    curve -= curve.mean(axis=-1, keepdims=True)
    length = np.sum(curve**2, axis=-1)
    scale = np.maximum(np.sum(curve * means_V, axis=-1) / length, 0.0)
    residuals = losses_VS - (scale[..., None] * curve)[..., None]
    square = np.sum(residuals**2, axis=(-2, -1))
    df = losses_VS.size - num_seeds - 3
    variance = max(square.min() / df, np.var(slopes_S, ddof=1))
    spare = square.min() + stats.t.isf(0.025, df) ** 2 * variance - square
    largest = scale + np.sqrt(np.maximum(spare, 0) / (num_seeds * length))
    excess_at_value = largest * sweep._curve(-optimum, skew)[..., 0]
    excess = np.max(np.where(spare >= 0, excess_at_value, 0.0))
    optima = value * np.exp(optimum[np.any(spare >= 0, axis=1)])
    return excess, optima.min(), optima.max()


CHOICES = pytest.mark.parametrize('choice', ['vertex', 'minimax'])


def assert_excess_of_allowed_curves(swept, value):
    """The excess at a value and the interval of the optimum are those of the allowed curves.

    With 'minimax' the chosen value lies in that interval.
    """
    excess, *ends = excess_on_a_grid_of_curves(swept, value)
    assert swept.excess(value) == pytest.approx(excess, rel=0.15)
    assert (swept.optimum_low, swept.optimum_high) == pytest.approx(ends, rel=0.03)
    assert swept.choice == 'vertex' or ends[0] < swept.chosen < ends[1]


@CHOICES
@pytest.mark.parametrize('noise', [0.01, 0.03])
def test_an_excess_is_bounded_by_the_curves_that_the_data_do_not_contradict(choice, noise):
    table = losses_by_value(rng=np.random.default_rng(1), noise=noise, curvature=0.2)
    swept = sweep.fit(table, choice)
    assert swept.at_worst == swept.excess(swept.chosen)
    assert_excess_of_allowed_curves(swept, swept.chosen)
    assert_excess_of_allowed_curves(swept, 0.003)


@CHOICES
def test_an_excess_counts_the_variance_between_seeds_whose_optima_differ(choice):
    shifts = (0.7, 1, 1.4)
    table = {}
    for value in GRID:
        table[value] = {seed: loss(value * shifts[seed], seed, 0.2) for seed in range(3)}
    assert_excess_of_allowed_curves(sweep.fit(table, choice), 0.003)


SPREADS = [(2, 0.15, 0.83, 0.94), (2, 0.0, 0.95, 1.0), (2, 0.4, 0.65, 0.84), (4, 0.15, 0.95, 1.0)]


@pytest.mark.parametrize(('seeds', 'spread', 'low', 'high'), slow_except(SPREADS[:1], SPREADS))
def test_a_bound_from_two_seeds_is_too_small_where_their_optima_differ(seeds, spread, low, high):
    """The share of sweeps whose chosen value misses no more than they say, as in docs/limits.md."""
    rng = np.random.default_rng(0)
    are_held = []
    for _ in range(200):
        shifts = np.exp(spread * rng.standard_normal(seeds))
        table = {}
        for value in GRID:
            table[value] = {}
            for seed in range(seeds):
                noise = rng.normal(0, 0.002)
                table[value][seed] = loss(value / shifts[seed], seed, 0.4) + noise
        swept = sweep.fit(table, 'minimax')
        if swept.bracketed and swept.at_worst is not None:
            are_held.append(loss(swept.chosen, 0, 0.4) - loss(OPTIMUM) <= swept.at_worst)
    assert len(are_held) > 50
    assert low <= np.mean(are_held) <= high


@pytest.fixture
def diverged_sweep():
    """A sweep in which some seeds diverged at its last two values."""
    table = losses_by_value()
    table[0.008] = {0: 1.0, 1: None, 2: 1.0}  # the lucky seeds
    table[0.016] = {0: None, 1: math.nan, 2: math.inf}
    return sweep.fit(table)


def test_a_value_at_which_a_seed_diverged_is_worse_than_any(diverged_sweep):
    assert diverged_sweep.means[3:] == (math.inf, math.inf)
    assert diverged_sweep.losses[3:] == ((1.0, 1.0), ())
    assert (diverged_sweep.best, diverged_sweep.bracketed) == (0.004, True)


def test_a_value_at_which_a_seed_diverged_is_not_fitted(diverged_sweep):
    assert diverged_sweep.optimum == pytest.approx(OPTIMUM)


class Screening(NamedTuple):
    """Mean losses at the first values of a grid, and what follows from them."""

    means: tuple
    seeds: int
    estimates: int  # how many of ESTIMATES are known, each of which needs those before it
    bracketed: bool
    needs_seeds: bool
    further: tuple  # values to screen next

    def sweep(self):
        return sweep_of_means(*self.means, seeds=self.seeds)


ESTIMATES = ('curvature', 'optimum', 'loss', 'optimum_low', 'at_worst')
SCREENED = pytest.mark.parametrize(
    'screening',
    [
        Screening((2.0,), 2, 0, False, True, (0.0005, 0.002)),
        Screening((2.1, 2.0), 2, 0, False, False, (0.004,)),
        Screening((None, 2.0), 2, 0, False, False, (0.004,)),
        Screening((None, None, None), 2, 0, False, False, (0.0005,)),
        Screening((2.1, 2.0, 2.0), 2, 5, False, True, (0.008,)),  # equals do not bracket
        Screening((2.1, 2.0, 2.0, 2.1), 2, 5, True, False, ()),
        Screening((2.3, 2.1, 2.0, 2.1, 2.3), 2, 5, True, False, ()),
        Screening((2.2, 2.0, 2.1), 1, 3, False, True, ()),  # one seed brackets nothing
        Screening((2.0, 2.1, 2.2), 2, 1, False, False, (0.0005,)),  # at the end, beyond doubt
        Screening((2.1, 2.0, None), 2, 0, True, True, ()),  # two values, no parabola
        Screening((2.4, 2.2, 2.1, None), 2, 1, True, True, ()),  # its vertex in a gap
        Screening((2.0, 2.2, 2.25, 2.2, 2.1), 2, 1, False, False, (0.0005,)),  # a ridge
        Screening((2.05, 2.07, 2.00, 2.07, 2.06), 2, 3, True, True, ()),  # far from the points
    ],
    ids=lambda screening: str(screening.means),
)


@SCREENED
def test_a_sweep_estimates_what_its_values_determine(screening):
    swept = screening.sweep()
    estimates = [name for name in ESTIMATES if getattr(swept, name) is not None]
    assert estimates == list(ESTIMATES[: screening.estimates])
    assert (swept.excess(0.001) < math.inf) == (screening.estimates == len(ESTIMATES))
    assert swept.chosen == swept.best or screening.estimates >= 3


@SCREENED
def test_further_seeds_are_needed_where_they_could_bracket_the_optimum(screening):
    swept = screening.sweep()
    assert swept.bracketed == screening.bracketed
    assert swept.needs_seeds == screening.needs_seeds


@SCREENED
def test_the_grid_grows_on_the_side_that_has_no_worse_value(screening):
    swept = screening.sweep()
    number = len(screening.means)
    assert sweep.next_values(swept, 2.0, 9, math.inf) == screening.further
    assert sweep.next_values(swept, 2.0, number, math.inf) == ()
    assert sweep.next_values(swept, 2.0, number + 1, math.inf) == screening.further[:1]


@pytest.mark.parametrize(
    ('end', 'expected'), [(math.inf, (0.03333333333, 0.3)), (0.3, (0.03333333333,))]
)
def test_further_values_have_no_rounding_noise(end, expected):
    swept = sweep_of_means(2.0, values=(0.1,))
    assert sweep.next_values(swept, 3.0, 9, end) == expected


def test_a_value_is_worse_by_a_paired_t_test_over_seeds_with_pooled_variance():
    losses_VS = np.array([[2.005, 2.106], [2.0, 2.1], [2.11, 2.2], [2.3, 2.42], [3.4, 2.6]])

    def fitted():
        rows = zip(GRID, losses_VS.tolist(), strict=True)
        return sweep.fit({value: dict(enumerate(row)) for value, row in rows})

    def critical(values):
        """The largest difference of means that may be chance, at values with these indices.

        Its variance is that of the residuals from a level per value and one per seed.
        """
        table = losses_VS[values] - losses_VS[values].mean(axis=1, keepdims=True)
        square = np.sum((table - table.mean(axis=0)) ** 2)
        df = len(values) - 1
        return stats.t.isf(0.05 / 4, df) * (square / df * 2 / 2) ** 0.5

    # Only values that are no worse count in the variance, so that the noisy last one hides nothing.
    rises = losses_VS.mean(axis=1) - 2.05
    assert rises[0] < critical([1, 0]) < critical([1, 0, 2]) < rises[2]
    assert rises[4] < critical([1, 0, 2, 3, 4])
    assert fitted().best == 0.002
    assert not fitted().bracketed
    assert fitted().needs_seeds
    losses_VS[0] += critical([1, 0]) - rises[0] + 1e-6
    assert fitted().bracketed
    losses_VS[0] -= 2e-6
    assert not fitted().bracketed


def test_the_parabola_reaches_to_the_nearest_worse_values_or_two_steps():
    rng = np.random.default_rng(2)
    wide = sweep.fit(losses_by_value(WIDE, 3, rng, 0.0097, 0.01))
    below, above = indices_of_nearest_worse(wide)
    best = WIDE.index(wide.best)
    assert wide.bracketed
    assert (above - below) > 4
    assert wide.fitted == WIDE[min(below, best - 2) : max(above, best + 2) + 1]
    # In a steep curve, worse values are nearer than two steps.
    assert len(sweep.fit(losses_by_value(WIDE, 2, rng, 0.0097, 1.0)).fitted) == 5


def test_a_chosen_value_that_rounding_moves_past_a_neighbour_is_the_best_of_the_grid():
    values = [0.0010004 * 1.0002**k for k in range(3)]
    losses = {v: dict.fromkeys((0, 1), (k - 1.1) ** 2) for k, v in enumerate(values)}
    swept = sweep.fit(losses)
    assert values[1] < swept.optimum < values[2]
    assert swept.chosen == swept.best == values[1]
