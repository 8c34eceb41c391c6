"""Scaling laws and multipliers: closed forms, a general solver, coverage, what is refused."""

import numpy as np
import pytest
from scipy import optimize, stats

from qkattn.stats import scaling
from qkattn.stats.scaling import Problem, ProblemCode

E, A, EXPONENT = 1.2, 30.0, 0.3
SIZES = np.geomspace(1e5, 3.2e6, 5)
SD = 0.005
SIGNS = np.array([[-1], [0], [1]])  # three seeds around a mean


def law(parameters):
    return E + A * np.asarray(parameters) ** -EXPONENT


def noisy(rng, parameters, num_seeds=3, sd=SD, size_sd=0.0):
    sizes = size_sd * rng.normal(size=(len(parameters), 1))
    return law(parameters)[:, None] + sizes + sd * rng.normal(size=(len(parameters), num_seeds))


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(scaling, 'REPLICATES', 400)


def holds(interval, truth):
    return interval.low <= truth <= interval.high


def width(interval):
    return interval.high - interval.low


def solved(sizes, losses, start):
    """(E, A, a) of a general solver, and their covariance; A at sizes of 1e5."""
    return optimize.curve_fit(lambda n, E, A, a: E + A * n**-a, sizes / 1e5, losses, p0=start)


def test_a_noiseless_law_is_recovered_with_narrow_intervals_in_any_order_of_sizes():
    order = [3, 0, 4, 1, 2]
    fit = scaling.fit(SIZES[order], law(SIZES[order])[:, None])
    assert fit.problem is None and fit.r_squared == pytest.approx(1)
    for interval, truth in ((fit.E, E), (fit.A, A), (fit.a, EXPONENT)):
        assert interval.value == pytest.approx(truth, rel=1e-6)
        assert truth * 0.998 < interval.low <= interval.value <= interval.high < truth * 1.002
    assert (fit.loss(7e5), *fit.sizes) == pytest.approx((law(7e5), *SIZES))


def test_the_floor_is_never_negative():
    """Without the bound, a curve that bends down in ln N has a floor below zero."""
    losses = 20 * SIZES**-0.25 - 0.003 * np.log(SIZES / SIZES[0]) ** 2
    noise = 0.0005 * np.random.default_rng(0).normal(size=(5, 3))
    fit = scaling.fit(SIZES, losses[:, None] + noise)
    assert fit.problem is None and fit.E.value == fit.E.low == 0
    x, means = SIZES**-fit.a.value, losses + noise.mean(axis=1)
    assert fit.A.value == pytest.approx(x @ means / (x @ x))


@pytest.mark.slow
@pytest.mark.usefixtures('quick')
@pytest.mark.parametrize(
    ('num_sizes', 'seeds', 'size_sd'), [(5, 3, 0.0), (6, 1, 0.0), (6, 3, 8e-3)]
)
def test_intervals_of_the_exponent_hold_the_truth_in_most_studies(num_sizes, seeds, size_sd):
    rng, parameters = np.random.default_rng(0), np.geomspace(1e5, 1e7, num_sizes)
    tables = [noisy(rng, parameters, seeds, size_sd=size_sd) for _ in range(300)]
    fits = [scaling.fit(parameters, table) for table in tables]
    kept = [fit for fit in fits if fit.problem is None]
    assert len(kept) > 0.97 * 300
    assert 0.9 <= np.mean([holds(fit.a, EXPONENT) for fit in kept]) <= 0.99


@pytest.mark.usefixtures('quick')
def test_the_interval_of_the_multiplier_holds_the_truth_in_most_studies():
    rng, worths = np.random.default_rng(0), []
    for _ in range(150):
        arm = noisy(rng, 1.2 * SIZES, size_sd=0.002)
        baseline = noisy(rng, SIZES, size_sd=0.002)
        worths.append(scaling.multiplier((SIZES, arm), (SIZES, baseline)))
    assert 0.93 <= np.mean([holds(worth, 1.2) for worth in worths]) <= 0.995
    assert np.median([worth.high / worth.low for worth in worths]) < 1.15


def test_one_seed_per_size_makes_the_interval_of_residuals_alone():
    """On 5 - 3 degrees of freedom, with the tails of t: wider than that of the means' seeds."""
    losses = noisy(np.random.default_rng(3), SIZES)
    means = losses.mean(axis=1, keepdims=True)
    alone, seeds = scaling.fit(SIZES, means), scaling.fit(SIZES, losses)
    (floor, _, exponent), covariance = solved(SIZES, means[:, 0], (1.2, 1.0, EXPONENT))
    expected = pytest.approx(2 * stats.t.ppf(0.975, 2) * covariance[2, 2] ** 0.5, rel=0.1)
    assert alone.a.value == pytest.approx(seeds.a.value) == pytest.approx(exponent, rel=1e-4)
    assert alone.E.value == pytest.approx(floor, rel=1e-4)
    assert width(alone.a) == expected != width(seeds.a)


def test_the_noise_of_seeds_is_unbiased_for_few_of_them():
    """Seeds at +-s: the variance of a mean is s^2 of two, s^2 / 3 of four (df 5 and 15)."""
    two, four = (
        width(scaling.fit(SIZES, law(SIZES)[:, None] + SD * np.array(signs)).a)
        for signs in ([-1, 1], [-1, 1, -1, 1])
    )
    expected = 3**0.5 * stats.t.ppf(0.975, 5) / stats.t.ppf(0.975, 15)
    assert two / four == pytest.approx(expected, rel=0.1)


def test_a_size_with_one_seed_borrows_the_deviations_of_the_others():
    """The residuals are zero here, so that the deviations of the seeds are all the noise."""
    rows = [law(n) + np.array([-SD, 0, SD]) for n in SIZES]
    ragged = [law(SIZES[:1]), *rows[1:-1], law(SIZES[-1:])]
    assert width(scaling.fit(SIZES, ragged).a) > 1.2 * width(scaling.fit(SIZES, rows).a)
    assert holds(scaling.multiplier((SIZES, ragged), (SIZES, rows)), 1.0)


def test_the_same_seeds_are_drawn_for_both_where_their_numbers_agree():
    """Common noise of a seed cancels when paired, and not in another order of the seeds."""
    seeds = 0.01 * np.random.default_rng(6).normal(size=(len(SIZES), 4))
    table = SIZES, law(SIZES)[:, None] + seeds - seeds.mean(axis=1, keepdims=True)
    paired = scaling.multiplier(table, table)
    apart = scaling.multiplier(table, (1.2 * SIZES, table[1]))
    fewer = scaling.multiplier(table, (SIZES, [[*row, row.mean()] for row in table[1]]))
    assert width(paired) < 0.6 * width(fewer)
    assert paired.high / paired.low - 1 < 0.6 * (apart.high / apart.low - 1)


@pytest.mark.parametrize('worth', [0.7, 1.0, 1.2])
def test_an_arm_that_is_the_baseline_at_another_size_is_worth_the_ratio(worth):
    exact = scaling.multiplier((SIZES, law(worth * SIZES)[:, None]), (SIZES, law(SIZES)[:, None]))
    assert exact.value == pytest.approx(worth, rel=1e-5)
    rng = np.random.default_rng(7)
    arm, baseline = noisy(rng, worth * SIZES), noisy(rng, SIZES)
    measured = scaling.multiplier((SIZES, arm), (SIZES, arm if worth == 1 else baseline))
    assert holds(measured, worth) and holds(measured, 1.0) == (worth == 1)
    sizes = np.array([2e5, 9e5])  # it may have other sizes, and fewer
    few = scaling.multiplier((sizes, noisy(rng, worth * sizes)), (SIZES, baseline))
    assert few.problem is None and holds(few, worth) and few.high > few.low


def test_an_arm_whose_worth_differs_by_size_has_a_wider_interval():
    rng = np.random.default_rng(9)
    baseline = (SIZES, noisy(rng, SIZES, sd=0.001))
    deviations = noisy(rng, SIZES, sd=0.001) - law(SIZES)[:, None]
    one, many = (
        scaling.multiplier((SIZES, law(worth * SIZES)[:, None] + deviations), baseline)
        for worth in (1.2, np.array([0.8, 1.0, 1.2, 1.4, 1.6]))
    )
    assert one.value == pytest.approx(many.value, rel=0.02) and width(many) > 3 * width(one)


NOISE = 0.01 * np.random.default_rng(0).normal(size=5)
FALLING = {'losses': law(SIZES[[-1, 0]]).tolist(), 'parameters': [1e5, 3.2e6]}


@pytest.mark.parametrize(
    ('sizes', 'losses', 'code', 'data'),
    [
        (SIZES[:3], law(SIZES[:3]), 'FEW_SIZES', {'sizes': 3, 'needed': 4}),
        (SIZES**0.3, law(SIZES), 'NARROW_SPAN', {'factor': 32**0.3, 'needed': 4}),
        (SIZES, law(SIZES[::-1]), 'NOT_FALLING', FALLING),
        (SIZES, (2.0, 1.6, 1.9, 1.5, 1.7), 'POOR_FIT', {'needed': 0.95}),
        (SIZES, 3 - np.log(SIZES / 1e5) * 0.1 + NOISE, 'EXPONENT_LOOSE', {}),
        (SIZES, (2.0, 1.2, 1.2, 1.2, 1.2), 'EXPONENT_LOOSE', {'value': 4.0}),
        (SIZES, 3 * SIZES**-0.015, 'EXPONENT_NEAR_ZERO', {'value': 0.015}),
        # With seeds that differ by less, these means determine the exponent.
        (SIZES, law(SIZES) + 0.06 * SIGNS, 'EXPONENT_LOOSE', {'value': EXPONENT}),
        (SIZES, law(SIZES) + 0.002 * SIGNS, None, {}),
    ],
)
def test_losses_that_determine_no_law_are_refused(sizes, losses, code, data):
    rows = np.atleast_2d(losses).T
    fit = scaling.fit(sizes, rows)
    if code is None:
        assert fit.problem is None
        return
    assert fit.problem.code is ProblemCode[code]
    for name, value in data.items():
        assert fit.problem.data[name] == pytest.approx(value, rel=1e-4)
    with pytest.raises(ValueError, match='no law for 100,000 parameters'):
        fit.loss(1e5)
    assert fit.E is fit.A is fit.a is fit.r_squared is None
    worth = scaling.multiplier((SIZES, law(SIZES)[:, None]), (sizes, rows))
    assert worth.problem == Problem(ProblemCode.NO_BASELINE_LAW, {'problem': fit.problem})


@pytest.mark.parametrize(
    ('sizes', 'losses', 'code', 'data'),
    [
        (SIZES, law(2.1 * SIZES), 'EXTRAPOLATED', {'end': 'largest', 'factor': 2.0}),
        (SIZES, law(0.45 * SIZES), 'EXTRAPOLATED', {'end': 'smallest', 'factor': 0.5}),
        (SIZES, law(SIZES) - 1, 'EXTRAPOLATED', {'end': 'largest'}),  # below the floor
        (SIZES[-1:], law(1.9 * SIZES[-1:]) + 0.01 * SIGNS, 'INTERVAL_EXTRAPOLATED', {}),
        (SIZES[:1], law(SIZES[:1]), 'SINGLE_LOSS', {}),
    ],
)
def test_no_multiplier_where_the_baseline_is_extrapolated(sizes, losses, code, data):
    baseline = (SIZES, noisy(np.random.default_rng(0), SIZES, sd=0.001))
    worth = scaling.multiplier((sizes, np.atleast_2d(losses).T), baseline)
    assert worth.problem.code is ProblemCode[code] and worth.problem.data.items() >= data.items()
    assert worth.value is worth.low is worth.high is None
    if code == 'EXTRAPOLATED':
        assert worth.problem.data['loss'] in losses
