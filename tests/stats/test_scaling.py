"""Scaling laws and multipliers: closed forms, a general solver, coverage, what is refused."""

import numpy as np
import pytest
from scipy import optimize, stats

from qkattn.stats import scaling
from qkattn.stats.scaling import Problem, ProblemCode

E = 1.2
A = 30.0
EXPONENT = 0.3
SIZES = np.geomspace(1e5, 3.2e6, 5)
SD = 0.005


def law(parameters):
    return E + A * np.asarray(parameters) ** -EXPONENT


def noisy_losses(rng, parameters, sd):
    return law(parameters) + sd * rng.normal(size=len(parameters))


def contains(interval, truth):
    return interval.low <= truth <= interval.high


def test_intervals_are_those_of_a_general_solver_in_any_order_of_sizes():
    """The fit of a scaling law has the same 95 % intervals as scipy's `curve_fit`.

    By the law, a model with n parameters has the loss E + A n^-a.
    """
    losses = noisy_losses(np.random.default_rng(3), SIZES, SD / 2)
    shuffled = [3, 0, 4, 1, 2]
    fit = scaling.fit(SIZES[shuffled], losses[shuffled])
    assert fit.sizes == tuple(SIZES)

    # Dividing the sizes by 1e5 helps the solver. It changes A, but not E and a.
    (E_value, _, a_value), covariance = optimize.curve_fit(
        lambda n, E, A, a: E + A * n**-a, SIZES / 1e5, losses, p0=(1.2, 1.0, EXPONENT)
    )
    variance_of_E = covariance[0, 0]
    variance_of_a = covariance[2, 2]
    t = stats.t.ppf(0.975, df=5 - 3)  # five losses, less three parameters

    half_of_E = t * variance_of_E**0.5
    assert fit.E.low == pytest.approx(E_value - half_of_E, rel=1e-4)
    assert fit.E.high == pytest.approx(E_value + half_of_E, rel=1e-4)
    half_of_a = t * variance_of_a**0.5
    assert fit.a.low == pytest.approx(a_value - half_of_a, rel=1e-4)
    assert fit.a.high == pytest.approx(a_value + half_of_a, rel=1e-4)


@pytest.mark.parametrize('shared_sd', [0.0, 0.002])
def test_intervals_from_four_sizes_contain_the_truth(shared_sd):
    """At most 7 % of the laws fitted to four sizes have intervals that miss the truth.

    Most simulations give no law. `shared_sd` is noise that all seeds of a size share, such as the
    noise of tuning. If intervals used only the residuals, 17 % would miss the truth.
    """
    true_floor = 1.0
    true_exponent = 0.25
    rng = np.random.default_rng(1)
    num_seeds = 8
    sizes = np.geomspace(1e5, 1.6e6, 4)
    are_held = []
    for _ in range(400):
        # Noisy losses of eight seeds S at four sizes V.
        law_V = true_floor + 0.6 * (sizes / 1e5) ** -true_exponent
        shared_V = law_V + shared_sd * rng.normal(size=4)
        losses_SV = shared_V + 0.003 * num_seeds**0.5 * rng.normal(size=(num_seeds, 4))

        # The variance of the mean losses is estimated from the seeds.
        variance_of_means = losses_SV.var(axis=0, ddof=1).mean() / num_seeds
        df = 4 * (num_seeds - 1)
        law = scaling.fit(sizes, losses_SV.mean(axis=0), (variance_of_means, df))
        if not isinstance(law, Problem):
            are_held.append(contains(law.a, true_exponent) and contains(law.E, true_floor))
    assert len(are_held) > 50
    assert np.mean(are_held) > 0.93


def test_the_floor_is_never_negative():
    """These losses bend down in ln N, so a fit without a bound would give E < 0."""
    losses = 20 * SIZES**-0.25 - 0.001 * np.log(SIZES / SIZES[0]) ** 2
    fit = scaling.fit(SIZES, losses)
    assert fit.E.value == 0
    # With E = 0, A is the least-squares factor of N^-a.
    powers = SIZES**-fit.a.value
    expected_A = (powers @ losses) / (powers @ powers)
    assert fit.A == pytest.approx(expected_A)


def multiplier_of(factor, rng, sizes=SIZES, sd=SD / 2):
    """The multiplier of an arm with the losses of a baseline with `factor` times its parameters."""
    baseline_losses = noisy_losses(rng, SIZES, sd)
    arm_losses = noisy_losses(rng, factor * sizes, sd)
    baseline_loss_of_size = dict(zip(SIZES, baseline_losses, strict=True))
    pairs = []
    for size, arm_loss in zip(sizes, arm_losses, strict=True):
        difference = arm_loss - baseline_loss_of_size[size]
        # Parameters of the arm, parameters of the baseline, loss difference.
        pairs.append((size, size, difference))
    return scaling.multiplier(scaling.fit(SIZES, baseline_losses), pairs)


def assert_intervals_cover(multipliers, truth):
    """Checks that about 95 % of the intervals hold the truth, and that intervals are narrow."""
    are_held = [contains(multiplier, truth) for multiplier in multipliers]
    assert 0.93 <= np.mean(are_held) <= 0.995
    widths = [multiplier.high / multiplier.low for multiplier in multipliers]
    assert np.median(widths) < 1.15


def test_a_multiplier_is_estimated_where_the_exponent_is_not_determined():
    """A multiplier says how many parameters of the baseline one parameter of an arm is worth.

    Five sizes within a factor of 4.5 do not determine the exponent of the baseline's law. The same
    sizes determine the multiplier, which is 0.8 here.
    """
    sizes = np.geomspace(1e5, 4.5e5, 5)
    factor = 0.8
    sd = SD / 2
    df = 5 * (5 - 1)  # five sizes with five seeds each
    rng = np.random.default_rng(0)
    multipliers = []
    for _ in range(200):
        # The arm has the losses of a baseline with 0.8 times its parameters.
        baseline_losses = noisy_losses(rng, sizes, sd)
        arm_losses = noisy_losses(rng, factor * sizes, sd)
        estimated_variance = sd**2 * rng.chisquare(df) / df
        fit = scaling.fit(sizes, baseline_losses, (estimated_variance, df))
        if fit.loose:
            differences = arm_losses - baseline_losses
            # Parameters of the arm, parameters of the baseline, loss difference. Arm and baseline
            # have the same number of parameters.
            pairs = list(zip(sizes, sizes, differences, strict=True))
            multipliers.append(scaling.multiplier(fit, pairs))

    # In the last simulation, the interval of the exponent is wider than the exponent.
    assert fit.loose.code is ProblemCode.EXPONENT_LOOSE
    width = fit.loose.data['high'] - fit.loose.data['low']
    assert width > fit.loose.data['value']

    # More than half of the laws are loose, and the intervals of their multipliers hold 0.8.
    assert len(multipliers) > 100
    assert_intervals_cover(multipliers, factor)


@pytest.mark.parametrize(
    'losses',
    [
        3 - np.log(SIZES / 1e5) * 0.1 + 0.01 * np.random.default_rng(0).normal(size=5),
        law(SIZES) + 0.02 * np.array([-1, 0, 1, 0, -1]),
        2 + (SIZES / 1e5) ** -9.5 + 2e-5 * np.array([0, -1, 1, 1, -1]),  # its interval exceeds 10
    ],
    ids=['logarithmic', 'noisy', 'steep'],
)
def test_an_exponent_is_no_finding_whose_interval_is_wide_or_leaves_those_searched(losses):
    assert scaling.fit(SIZES, losses).loose.code is ProblemCode.EXPONENT_LOOSE


def test_an_exponent_of_losses_without_noise_is_a_finding():
    assert scaling.fit(SIZES, law(SIZES)).loose is None


FACTORS = pytest.mark.parametrize('factor', [0.7, 1.0, 1.5])


@FACTORS
@pytest.mark.parametrize(
    ('sizes', 'tolerance'), [(SIZES, 1e-5), (SIZES[1:3], 1e-6)], ids=['all', 'some']
)
def test_losses_without_noise_give_the_multiplier(factor, sizes, tolerance):
    multiplier = multiplier_of(factor, np.random.default_rng(0), sizes, sd=0)
    assert multiplier.value == pytest.approx(factor, rel=tolerance)


@FACTORS
def test_the_interval_of_the_multiplier_holds_the_truth_in_most_studies(factor):
    rng = np.random.default_rng(0)
    results = [multiplier_of(factor, rng) for _ in range(200)]
    multipliers = [result for result in results if not isinstance(result, Problem)]
    assert len(multipliers) > 190
    assert_intervals_cover(multipliers, factor)


@pytest.fixture
def noisy_law():
    return scaling.fit(SIZES, noisy_losses(np.random.default_rng(1), SIZES, SD / 2))


def test_equal_losses_give_exactly_the_multiplier_1(noisy_law):
    multiplier = scaling.multiplier(noisy_law, [(n, n, 0.0) for n in SIZES])
    assert multiplier.low == pytest.approx(1)
    assert multiplier.value == pytest.approx(1)
    assert multiplier.high == pytest.approx(1)


def test_an_arm_may_have_other_sizes_than_the_baseline(noisy_law):
    fewer = scaling.multiplier(noisy_law, [(n / 2, n, 0.0) for n in SIZES])
    assert fewer.value == pytest.approx(2)


def test_the_interval_of_a_multiplier_that_all_sizes_share_is_that_of_the_law(noisy_law):
    differences = [noisy_law.loss(1.5 * n) - noisy_law.loss(n) for n in SIZES]
    equal = scaling.multiplier(noisy_law, list(zip(SIZES, SIZES, differences, strict=True)))
    assert equal.value == pytest.approx(1.5)
    assert equal.high / equal.low > 1.02


def test_a_worth_that_differs_by_size_widens_the_interval(noisy_law):
    apart = [(n, n, 0.01 * (-1) ** index) for index, n in enumerate(SIZES)]
    wide = scaling.multiplier(noisy_law, apart)
    assert contains(wide, 1)
    assert wide.high / wide.low > 1.1


@pytest.mark.parametrize(
    ('sizes', 'losses', 'code', 'data'),
    [
        pytest.param(SIZES[:3], law(SIZES[:3]), 'FEW_SIZES', {'sizes': 3}, id='3 sizes'),
        pytest.param(
            SIZES**0.3,
            law(SIZES),
            'FEW_SIZES',
            {'sizes': 5, 'factor': 32**0.3},
            id='sizes near each other',
        ),
        pytest.param(SIZES, law(SIZES[::-1]), 'POOR_FIT', {'r_squared': 0.0}, id='rising losses'),
        pytest.param(SIZES, (2.0,) * 5, 'POOR_FIT', {'r_squared': 0.0}, id='equal losses'),
        pytest.param(
            SIZES, (2.0, 1.6, 1.9, 1.5, 1.7), 'POOR_FIT', {'needed': 0.95}, id='noisy losses'
        ),
        pytest.param(
            SIZES,
            3 - np.log(SIZES / 1e5) * 0.001,
            'EXPONENT_LOOSE',
            {'value': 0.001},
            id='exponent at the lower bound',
        ),
        pytest.param(
            SIZES,
            (2.0, 1.2, 1.2, 1.2, 1.2),
            'EXPONENT_LOOSE',
            {'value': 10.0},
            id='exponent at the upper bound',
        ),
    ],
)
def test_losses_that_determine_no_law_are_refused(sizes, losses, code, data):
    problem = scaling.fit(sizes, losses)
    assert problem.code is ProblemCode[code]
    for name, expected in data.items():
        assert problem.data[name] == pytest.approx(expected, rel=1e-4, abs=1e-6)

    pairs = [(n, n, 0.0) for n in SIZES]
    assert scaling.multiplier(problem, pairs) == Problem(ProblemCode.NO_BASELINE_LAW)


def pairs_of(factor):
    """The pairs of an arm that is the baseline at `factor` times its parameters, without noise."""
    return [(n, n, law(factor * n) - law(n)) for n in SIZES]


@pytest.mark.parametrize(
    ('pairs', 'parameters'),
    [
        (pairs_of(2.1), SIZES[-1]),
        (pairs_of(0.45), SIZES[0]),
        ([*pairs_of(1.9), (1e6, 1e6, -9.0)], 1e6),  # below the floor
    ],
    ids=['above', 'below', 'floor'],
)
def test_no_multiplier_where_the_baseline_is_extrapolated(pairs, parameters):
    baseline = scaling.fit(SIZES, law(SIZES))
    data = {'parameters': parameters, 'factor': 2.0}
    assert scaling.multiplier(baseline, pairs) == Problem(ProblemCode.EXTRAPOLATED, data)


def test_a_multiplier_may_be_almost_twice_beyond_the_sizes():
    worth = scaling.multiplier(scaling.fit(SIZES, law(SIZES)), pairs_of(1.9))
    assert worth.value == pytest.approx(1.9)


def test_no_multiplier_of_a_single_size():
    worth = scaling.multiplier(scaling.fit(SIZES, law(SIZES)), pairs_of(1.9)[:1])
    assert worth == Problem(ProblemCode.SINGLE_SIZE)
