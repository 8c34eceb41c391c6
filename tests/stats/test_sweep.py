"""Sweeps of one setting: the parabola, its intervals, and how the grid grows."""

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from qkattn.stats import sweep

OPTIMUM = 0.0037
GRID = tuple(0.001 * 2.0**k for k in range(5))


def _loss(value, seed=0, curvature=0.06):
    """A parabola in ln(value) around OPTIMUM, plus a level per seed."""
    return 2.0 + 0.05 * seed + curvature / 2 * math.log(value / OPTIMUM) ** 2


def _losses(values=GRID, seeds=(0, 1, 2), loss=_loss):
    return {value: {seed: loss(value, seed) for seed in seeds} for value in values}


def _fit_means(*means, values=GRID, seeds=(0, 1)):
    """The sweep of seeds without noise, with these means at the first values of a grid."""
    means = [math.nan if mean is None else mean for mean in means]
    return sweep.fit({v: dict.fromkeys(seeds, m) for v, m in zip(values, means, strict=False)})


def _table(values, losses_VS):
    rows = zip(map(float, values), losses_VS.tolist(), strict=True)
    return {value: dict(enumerate(row)) for value, row in rows}


# The parabola.


def test_a_noiseless_parabola_is_recovered():
    losses = _losses()
    found = sweep.fit(losses)
    assert (found.values, found.best, found.bracketed, found.chosen) == (GRID, 0.004, True, 0.0037)
    assert (found.optimum, found.curvature) == pytest.approx((OPTIMUM, 0.06))
    assert found.loss.mean == pytest.approx(2.05)  # of seeds 0, 1, 2
    assert (found.loss.n, found.num_diverged) == (15, 0)
    assert (found.loss.sd, found.at_worst) == pytest.approx((0.0, 0.0), abs=1e-9)
    ends = (found.optimum_low, found.optimum_high)
    assert ends == pytest.approx((OPTIMUM, OPTIMUM), rel=1e-4)
    assert found.sensitivity == pytest.approx(np.mean([_loss(value) - 2.0 for value in GRID]))
    # The order of values and seeds does not matter.
    turned = {value: dict(reversed(seeds.items())) for value, seeds in losses.items()}
    assert sweep.fit(dict(reversed(turned.items()))) == found


def test_the_fit_is_least_squares_with_a_level_per_seed_and_fiellers_interval():
    """At its ends, the slope of the fitted parabola is the t quantile times its standard error."""
    rng = np.random.default_rng(1)
    found = sweep.fit(_losses(loss=lambda v, s: _loss(v, s) + rng.normal(0, 0.004)))
    means = np.array(found.losses)
    x = np.log(np.array(GRID) / 0.004)
    centred = (means - means.mean(axis=0)).ravel()  # removes the level of each seed
    design = np.column_stack([x - x.mean(), x**2 - np.mean(x**2)]).repeat(3, axis=0)
    (b, c), (residual,), _, _ = np.linalg.lstsq(design, centred)
    level = means.mean() - b * x.mean() - c * np.mean(x**2)
    assert found.curvature == pytest.approx(2 * c)
    assert found.optimum == pytest.approx(0.004 * math.exp(-b / (2 * c)))
    assert found.loss.mean == pytest.approx(level - b**2 / (4 * c))
    assert found.loss.sd == pytest.approx((residual / (15 - 5)) ** 0.5)
    covariance = residual / (15 - 5) * np.linalg.inv(design.T @ design)
    assert found.optimum_low < found.optimum < found.optimum_high
    for end in (found.optimum_low, found.optimum_high):
        slope = np.array([1.0, 2 * math.log(end / 0.004)])
        t = abs(slope @ (b, c)) / (slope @ covariance @ slope) ** 0.5
        assert t == pytest.approx(2.228139, rel=1e-5)  # the 97.5 % quantile at 10 degrees


@pytest.mark.parametrize('optimum', [GRID[-1] * (1 - 1e-14), GRID[-1], GRID[-1] * (1 + 1e-14)])
def test_an_optimum_at_the_end_of_the_grid_is_found_whatever_the_rounding(optimum):
    def loss(value, seed):
        return 2.0 + 0.01 * seed + 0.1 * math.log(value / optimum) ** 2

    found = sweep.fit(_losses(loss=loss))
    assert found.best == GRID[-1] and found.optimum == pytest.approx(GRID[-1], rel=1e-12)


def test_only_values_within_two_steps_of_the_best_are_fitted():
    far = {value: {0: 9.0} for value in (0.00025, 0.0005, 0.032, 0.064)}
    near = _losses(seeds=(0,))
    fitted, found = sweep.fit(near), sweep.fit(far | near)
    assert found.best == 0.004
    assert (found.optimum, found.loss) == (fitted.optimum, fitted.loss)
    assert found.sensitivity > fitted.sensitivity


def test_few_values_or_seeds_leave_blanks():
    found = sweep.fit(_losses(GRID[:2]))
    assert (found.optimum, found.curvature, found.loss, found.at_worst) == (None,) * 4
    assert found.chosen == found.best == 0.002
    assert found.sensitivity == pytest.approx((_loss(0.001) - _loss(0.002)) / 2)
    single = sweep.fit({0.1: {0: 2.0}})
    assert (single.best, single.sensitivity, single.bracketed) == (0.1, None, False)
    three = sweep.fit(_losses(GRID[1:4], seeds=(0,)))
    assert (three.optimum, three.loss.mean) == pytest.approx((OPTIMUM, 2.0))
    blank = (three.loss.low, three.loss.sd, three.optimum_low, three.at_worst)
    assert blank == (None,) * 4
    two = sweep.fit(_losses(GRID[1:4], seeds=(0, 1)))
    assert two.loss.low is not None and two.optimum_low is not None


def _allowed(found, value):
    """The largest excess at `value` of curves on a fixed grid of optima and skews."""
    x = np.log(np.array(found.fitted) / value)
    losses = np.array([found.losses[found.values.index(v)] for v in found.fitted])
    losses -= losses.mean(axis=0)
    means, seeds = losses.mean(axis=1), losses.shape[1]
    slopes = (x - x.mean()) @ losses / np.sum((x - x.mean()) ** 2) ** 0.5
    optimum = np.linspace(x[0], x[-1], 1001)[:, None, None]
    skew = np.linspace(-sweep.SKEW, sweep.SKEW, 121)[:, None]
    curve = sweep._curve(x - optimum, skew)
    curve -= curve.mean(axis=-1, keepdims=True)
    length = np.sum(curve**2, axis=-1)
    scale = np.maximum(np.sum(curve * means, axis=-1) / length, 0.0)
    square = np.sum((losses - (scale[..., None] * curve)[..., None]) ** 2, axis=(-2, -1))
    df = losses.size - seeds - 3
    variance = max(square.min() / df, np.var(slopes, ddof=1))
    spare = square.min() + scipy_stats.t.isf(0.025, df) ** 2 * variance - square
    largest = scale + np.sqrt(np.maximum(spare, 0) / (seeds * length))
    return np.max(np.where(spare >= 0, largest * sweep._curve(-optimum, skew)[..., 0], 0.0))


@pytest.mark.parametrize('choice', ['vertex', 'minimax'])
@pytest.mark.parametrize('noise', [0.01, 0.03])
def test_at_worst_is_the_largest_excess_of_the_curves_that_the_data_do_not_contradict(
    choice, noise
):
    rng = np.random.default_rng(1)
    losses = _losses(loss=lambda v, s: _loss(v, s, 0.2) + rng.normal(0, noise))
    found = sweep.fit(losses, choice)
    assert found.at_worst == found.excess(found.chosen)
    for value in (found.chosen, found.best, 0.003):
        assert found.excess(value) == pytest.approx(_allowed(found, value), rel=0.15)


def test_a_curve_is_convex_with_its_optimum_and_scale_at_zero():
    u = np.linspace(-4, 4, 801)
    for skew in (-sweep.SKEW, -0.2, 0.0, 0.3, sweep.SKEW):
        curve = sweep._curve(u, np.array(skew))
        assert curve.min() == curve[400] == 0 and np.all(np.diff(curve, 2) >= -1e-12)
        near = np.abs(u) < 0.5
        assert curve[near] == pytest.approx((u**2 / 2 * (1 + skew * u))[near])


def test_what_a_skewed_sweep_misses_is_within_the_bound():
    """The vertex misses its optimum by far more than Fieller's interval of the parabola."""

    def loss(value, seed):
        return float(0.2 * sweep._curve(math.log(value / OPTIMUM), np.array(0.46)))

    found, near = (sweep.fit(_losses(loss=loss), choice) for choice in ('vertex', 'minimax'))
    assert (
        found.at_worst == pytest.approx(loss(found.chosen, 0), rel=1e-3) and found.at_worst > 0.005
    )
    assert found.optimum_high < OPTIMUM  # outside Fieller's interval
    assert near.chosen == pytest.approx(OPTIMUM, rel=0.03) and near.at_worst < 0.001
    noisy = [
        sweep.fit(_noisy(np.random.default_rng(i), 0.2, 2), choice)
        for i in range(40)
        for choice in ('vertex', 'minimax')
    ]
    assert all(m.at_worst <= v.at_worst for v, m in zip(noisy[::2], noisy[1::2], strict=True))


def test_nothing_bounds_the_excess_without_an_optimum():
    with pytest.raises(ValueError, match='does not bound its optimum'):
        sweep.fit(_losses(GRID[:2])).excess(0.001)


@pytest.mark.parametrize(
    ('means', 'convex', 'chosen', 'bracketed'),
    [
        ((2.0, 2.2, 2.25, 2.2, 2.1), False, 0.001, False),  # a ridge
        ((2.30, 2.20, 2.12, 2.06, 2.02), True, 0.016, False),  # the vertex is beyond the values
    ],
)
def test_a_parabola_without_a_minimum_among_the_values_has_no_optimum(
    means, convex, chosen, bracketed
):
    found = _fit_means(*means)
    assert (found.curvature > 0) == convex
    assert (found.optimum, found.loss, found.optimum_low) == (None, None, None)
    assert found.chosen == found.best == chosen
    assert found.bracketed == bracketed


def test_an_optimum_that_the_data_do_not_bound_has_no_interval():
    found = _fit_means(2.05, 2.07, 2.00, 2.07, 2.06)  # a shallow parabola, far from the points
    assert found.curvature > 0 and found.optimum is not None
    assert (found.optimum_low, found.optimum_high) == (None, None)
    assert found.loss.low < found.loss.mean < found.loss.high


# Divergence and sensitivity.


def test_a_value_at_which_a_seed_diverged_is_worse_than_any_and_not_fitted():
    losses = _losses()
    losses[0.008][1] = None
    losses[0.016] = {0: None, 1: float('nan'), 2: float('inf')}
    losses[0.008][0] = losses[0.008][2] = 1.0  # the lucky seeds
    found = sweep.fit(losses)
    assert found.num_diverged == 2
    assert found.means[3:] == (math.inf, math.inf)
    assert found.losses[3:] == ((1.0, 1.0), ())
    assert (found.best, found.bracketed) == (0.004, True)
    assert found.optimum == pytest.approx(OPTIMUM)
    worst = found.means[0]
    expected = np.mean([worst, found.means[1], found.means[2], worst, worst]) - 2.05
    assert found.sensitivity == pytest.approx(expected)


def test_a_vertex_in_the_gap_towards_a_diverged_value_is_not_chosen():
    found = _fit_means(2.4, 2.2, 2.1, None)
    assert found.curvature > 0 and found.bracketed
    assert found.chosen == found.best == GRID[2]


def test_sensitivity_is_over_the_lowest_mean_where_the_parabola_passes_above():
    above = _fit_means(2.3, 2.2, 2.0, 2.2, 2.3)
    assert above.loss.mean > 2.0
    assert above.sensitivity == pytest.approx(0.2)


def test_a_sweep_where_everything_diverged():
    found = sweep.fit({0.1: {0: None, 1: None}, 0.2: {0: 3.0, 1: None}})
    assert (found.best, found.chosen, found.bracketed) == (0.1, 0.1, False)
    assert (found.num_diverged, found.sensitivity, found.optimum) == (2, None, None)
    assert sweep.next_values(found, 2.0, 9) == (0.05,)


@pytest.mark.parametrize(
    ('losses', 'message'),
    [
        ({}, 'losses is empty'),
        ({0.0: {0: 1.0}, 0.1: {0: 1.0}}, r'values are \(0.0, 0.1\)'),
        ({0.1: {0: 1.0}, 0.2: {0: 1.0, 1: 2.0}}, r'value 0.2 has seeds \[0, 1\]'),
        ({0.1: {}}, 'at least one'),
    ],
)
def test_bad_losses_are_refused(losses, message):
    with pytest.raises(ValueError, match=message):
        sweep.fit(losses)


# The grid.


@pytest.mark.parametrize(
    ('means', 'bracketed', 'expected'),
    [
        ((2.0,), False, (0.0005, 0.002)),
        ((2.0, 2.1), False, (0.0005,)),
        ((2.1, 2.0), False, (0.004,)),
        ((2.2, 2.1, 2.0), False, (0.008,)),
        ((2.2, 2.0, 2.1), True, ()),
        ((2.0, 2.1, 2.2), False, (0.0005,)),
        ((2.1, 2.0, None), True, ()),
        ((2.0, None, None), False, (0.0005,)),
        ((None, 2.0), False, (0.004,)),
        ((None, 2.0, 2.1), True, ()),
        ((None, None, None), False, (0.0005,)),
        ((2.1, 2.0, 2.0), False, (0.008,)),  # equals do not bracket
        ((2.0, 2.0, 2.1), False, (0.0005,)),
        ((2.0, 2.0), False, (0.0005, 0.004)),
        ((2.1, 2.0, 2.0, 2.1), True, ()),
    ],
)
def test_the_grid_grows_where_no_worse_value_stands(means, bracketed, expected):
    found = _fit_means(*means)
    assert found.bracketed == bracketed
    assert sweep.next_values(found, 2.0, 9) == expected
    assert sweep.next_values(found, 2.0, len(means)) == ()
    assert sweep.next_values(found, 2.0, len(means) + 1) == expected[:1]


def test_steps_are_the_ratio_without_rounding_noise():
    assert sweep.next_values(_fit_means(2.0, values=(0.1,)), 3.0, 9) == (0.03333333333, 0.3)
    with pytest.raises(ValueError, match='grid_ratio is 1.0'):
        sweep.next_values(_fit_means(2.0), 1.0, 9)


def _screen(loss, start, ratio=2.0, max_points=9):
    """Screens until there is nothing left to try; returns the sweep and every batch of values."""
    batches = [tuple(start)]
    losses = {value: loss(value) for value in start}
    while step := sweep.next_values(sweep.fit(losses), ratio, max_points):
        assert not set(step) & set(losses)
        batches.append(step)
        losses.update({value: loss(value) for value in step})
    return sweep.fit(losses), batches


@pytest.mark.parametrize(
    'start', [(0.001,), (0.0001, 0.0002), (0.02, 0.04), (0.05, 0.1), (0.002, 0.004, 0.008)]
)
def test_screening_ends_bracketed_around_the_optimum(start):
    """Also from where everything diverges, down to values that are stable."""
    stable = 0.01 if start == (0.05, 0.1) else math.inf
    found, _ = _screen(lambda v: {s: _loss(v, s) if v < stable else None for s in (0, 1)}, start)
    assert found.bracketed
    i = found.values.index(found.best)
    assert found.values[i - 1] < OPTIMUM < found.values[i + 1]
    ratios = np.array(found.values[1:]) / np.array(found.values[:-1])
    assert ratios == pytest.approx(np.full(len(ratios), 2.0))
    assert found.chosen == 0.0037


def test_screening_stops_at_max_points_and_at_a_cliff():
    found, batches = _screen(lambda v: {0: _loss(v)}, (1.0, 2.0), max_points=5)
    assert found.values == (0.125, 0.25, 0.5, 1.0, 2.0)
    assert batches[1:] == [(0.5,), (0.25,), (0.125,)]
    assert (found.bracketed, found.chosen) == (False, 0.125)
    flat, _ = _screen(lambda v: {0: 2.0}, (1.0,), max_points=6)
    assert (len(flat.values), flat.bracketed, flat.chosen) == (6, False, flat.best)
    cliff, _ = _screen(lambda v: dict.fromkeys((0, 1), _loss(v) if v < 0.002 else None), (0.0008,))
    assert (cliff.best, cliff.bracketed, cliff.chosen) == (0.0016, True, 0.0016)


# Worse values, and seeds.


def _noisy(rng, curvature, seeds, noise=0.0097, values=GRID):
    return _losses(values, range(seeds), lambda v, s: _loss(v, s, curvature) + rng.normal(0, noise))


def test_a_value_is_worse_by_a_paired_t_test_over_seeds_with_pooled_variance():
    losses_VS = np.array([[2.005, 2.106], [2.0, 2.1], [2.11, 2.2], [2.3, 2.42], [3.4, 2.6]])

    def critical(values):
        """Of a difference of means, with the residual of a level per value and one per seed."""
        table = losses_VS[values] - losses_VS[values].mean(axis=1, keepdims=True)
        square, df = np.sum((table - table.mean(axis=0)) ** 2), len(values) - 1
        return scipy_stats.t.isf(0.05 / 4, df) * (square / df * 2 / 2) ** 0.5

    # The variance is that of the values no worse: the noisy last one does not hide the others.
    rises = losses_VS.mean(axis=1) - 2.05
    assert rises[0] < critical([1, 0]) < critical([1, 0, 2]) < rises[2]
    assert rises[4] < critical([1, 0, 2, 3, 4])
    found = sweep.fit(_table(GRID, losses_VS))
    assert found.best == 0.002 and not found.bracketed and found.needs_seeds
    assert sweep.next_values(found, 2.0, 9) == (0.0005,)
    losses_VS[0] += critical([1, 0]) - rises[0] + 1e-6
    assert sweep.fit(_table(GRID, losses_VS)).bracketed
    losses_VS[0] -= 2e-6
    assert not sweep.fit(_table(GRID, losses_VS)).bracketed


@pytest.mark.parametrize('seeds', [2, 6])
def test_the_luck_of_the_seeds_seldom_brackets(seeds):
    """Values not found worse contain the best with 95 %; in a flat bowl more than one is left."""
    rng, count = np.random.default_rng(9), 1000
    constant = [sweep.fit(_noisy(rng, 0.0, seeds)) for _ in range(count)]
    assert np.mean([found.bracketed for found in constant]) <= 0.05
    outside = bracketed = 0
    for _ in range(count):
        found = sweep.fit(_noisy(rng, 0.01, seeds))
        below, above = sweep._nearest_worse(found.losses, found.means, GRID.index(found.best))
        low, high = -1 if below is None else below, len(GRID) if above is None else above
        outside += not low < GRID.index(0.004) < high
        bracketed += found.bracketed
    assert outside <= 0.05 * count and bracketed < 0.3 * count


def test_one_seed_brackets_nothing_and_asks_for_more():
    one = _fit_means(2.2, 2.0, 2.1, seeds=(0,))
    assert (one.bracketed, one.needs_seeds) == (False, True)
    assert sweep.next_values(one, 2.0, 9) == ()


def test_seeds_are_needed_only_where_they_can_help():
    assert not _fit_means(2.3, 2.1, 2.0, 2.1, 2.3).needs_seeds
    assert not _fit_means(2.0, 2.1, 2.2).needs_seeds  # at the end, beyond doubt
    assert not _fit_means(2.2, 2.1, 2.0).needs_seeds
    assert not _fit_means(None, None).needs_seeds
    rng = np.random.default_rng(2)
    flat = sweep.fit(_noisy(rng, 0.01, 2))
    assert flat.needs_seeds and not flat.bracketed
    assert set(sweep.next_values(flat, 2.0, 9)) <= {0.0005, 0.032} != set()
    unbounded = _fit_means(2.1, 2.0, None)  # two values, no parabola
    assert unbounded.bracketed and unbounded.at_worst is None and unbounded.needs_seeds


def test_the_parabola_reaches_to_the_nearest_worse_values_and_the_interval_not_beyond():
    rng = np.random.default_rng(2)
    grid = tuple(0.004 * 2.0**k for k in range(-4, 5))
    found = sweep.fit(_noisy(rng, 0.01, 3, values=grid))
    i = grid.index(found.best)
    below, above = sweep._nearest_worse(found.losses, found.means, i)
    assert found.bracketed and (above - below) > 4
    assert found.fitted == grid[min(below, i - 2) : max(above, i + 2) + 1]
    ended = 0
    for _ in range(60):
        found = sweep.fit(_noisy(rng, 0.01, 2, values=grid))
        if found.bracketed and found.at_worst is not None:
            i = grid.index(found.best)
            below, above = sweep._nearest_worse(found.losses, found.means, i)
            assert grid[below] <= found.optimum_low <= found.optimum_high <= grid[above]
            ended += grid[below] == found.optimum_low or grid[above] == found.optimum_high
    assert ended > 0
    steep = sweep.fit(_noisy(rng, 1.0, 2, values=grid))
    assert len(steep.fitted) == 5


# Simulated screenings.


def test_intervals_cover_the_optimum_and_the_loss_there():
    rng = np.random.default_rng(3)
    trials, curvature = 1500, 0.06
    true = np.array([[_loss(v, s, curvature) for s in range(3)] for v in GRID])
    covered, loss_covered, bounded = [], [], 0
    for losses in true + rng.normal(0, 0.006, (trials, *true.shape)):
        found = sweep.fit(_table(GRID, losses))
        loss_covered.append(found.loss.low <= 2.05 <= found.loss.high)
        if found.optimum_low is not None:
            bounded += 1
            covered.append(found.optimum_low <= OPTIMUM <= found.optimum_high)
    assert bounded >= 0.99 * trials
    slack = 4 * (0.05 * 0.95 / trials) ** 0.5
    assert np.mean(covered) == pytest.approx(0.95, abs=slack)
    assert np.mean(loss_covered) == pytest.approx(0.95, abs=slack)


def test_the_chosen_value_stays_between_the_neighbours_of_the_best():
    rng, vertices = np.random.default_rng(4), 0
    for _ in range(1500):
        count = int(rng.integers(1, 8))
        values = np.cumprod(rng.choice([1.01, 1.3, 2.0], count)) * 0.001
        level = rng.normal(2.0, 0.01, (count, 2)) + 0.02 * np.log(values / OPTIMUM)[:, None] ** 2
        level[rng.random((count, 2)) < 0.1] = np.nan
        found = sweep.fit(_table(values, level))
        i = found.values.index(found.best)
        if found.chosen != found.best:
            vertices += 1
            assert 0 < i < len(found.values) - 1
            assert found.values[i - 1] < found.chosen < found.values[i + 1]
    assert 100 < vertices < 1400
