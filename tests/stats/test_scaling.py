import numpy as np
import pytest
from scipy import optimize, stats

from qkattn.stats import scaling
from qkattn.stats.scaling import Problem, ProblemCode

E, A, EXPONENT = 1.2, 30.0, 0.3
SIZES = np.geomspace(1e5, 3.2e6, 5)
SEEDS_SD = 0.005
SIGNS = np.array([[-1], [0], [1]])  # three seeds around a mean


def law(parameters):
    return E + A * np.asarray(parameters) ** -EXPONENT


def noisy(rng, parameters, num_seeds=3, sd=SEEDS_SD, size_sd=0.0):
    shape = (len(parameters), num_seeds)
    sizes = size_sd * rng.normal(size=(len(parameters), 1))
    return law(parameters)[:, None] + sd * rng.normal(size=shape) + sizes


def holds(interval, truth):
    return interval.low <= truth <= interval.high


def share_that_holds(num_sizes, num_seeds, size_sd, studies=300):
    """Share of simulated studies whose interval of the exponent holds the truth."""
    rng, parameters = np.random.default_rng(0), np.geomspace(1e5, 1e7, num_sizes)
    fits = [
        scaling.fit(parameters, noisy(rng, parameters, num_seeds, size_sd=size_sd), replicates=400)
        for _ in range(studies)
    ]
    kept = [fit for fit in fits if fit.problem is None]
    assert len(kept) > 0.97 * studies
    return np.mean([holds(fit.a, EXPONENT) for fit in kept])


def test_a_noiseless_law_is_recovered_with_narrow_intervals():
    fit = scaling.fit(SIZES, law(SIZES)[:, None])
    assert fit.problem is None
    for interval, truth in ((fit.E, E), (fit.A, A), (fit.a, EXPONENT)):
        assert interval.value == pytest.approx(truth, rel=1e-6)
        assert truth * 0.998 < interval.low <= interval.value <= interval.high < truth * 1.002
    assert fit.r_squared == pytest.approx(1)
    assert fit.loss(7e5) == pytest.approx(law(7e5))
    assert fit.sizes == pytest.approx(tuple(SIZES))
    assert fit.losses == pytest.approx(tuple(law(SIZES)))


@pytest.mark.parametrize('exponent', [0.08, 0.34, 1.5])
def test_the_optimum_is_that_of_a_general_solver(exponent):
    sizes = np.geomspace(1e4, 1e7, 8)
    scaled = sizes / 1e5
    rng = np.random.default_rng(1)
    losses = 0.7 + 1.5 * scaled**-exponent + 0.001 * rng.normal(size=len(sizes))
    (floor, _, found), _ = optimize.curve_fit(
        lambda n, E, A, a: E + A * n**-a, scaled, losses, p0=(0.7, 1.5, exponent)
    )
    fit = scaling.fit(sizes, losses[:, None])
    assert fit.a.value == pytest.approx(found, rel=1e-4)
    assert fit.E.value == pytest.approx(floor, rel=1e-3)


def test_the_floor_is_never_negative():
    """Without the bound, a curve that bends down in ln N has a floor below zero."""
    rng = np.random.default_rng(0)
    losses = 20 * SIZES**-0.25 - 0.003 * np.log(SIZES / SIZES[0]) ** 2
    fit = scaling.fit(SIZES, losses[:, None] + 0.0005 * rng.normal(size=(5, 3)))
    assert fit.problem is None
    assert fit.E.value == fit.E.low == 0
    x = SIZES**-fit.a.value
    assert fit.A.value == pytest.approx(x @ np.array(fit.losses) / (x @ x))
    slope = np.polyfit(np.log(SIZES), np.log(losses), 1)[0]
    assert fit.a.value == pytest.approx(-slope, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('num_sizes', 'num_seeds', 'size_sd'),
    [
        (5, 3, 0.0),
        (6, 1, 0.0),
        (6, 3, 0.008),
    ],
    ids=['noise of seeds', 'one seed per size', 'noise of sizes'],
)
def test_intervals_of_the_exponent_hold_the_truth_in_most_studies(num_sizes, num_seeds, size_sd):
    assert 0.9 <= share_that_holds(num_sizes, num_seeds, size_sd) <= 0.99


def test_the_interval_of_the_multiplier_holds_the_truth_in_most_studies():
    rng, held, widths = np.random.default_rng(0), [], []
    for _ in range(150):
        arm = noisy(rng, 1.2 * SIZES, size_sd=0.002)
        baseline = noisy(rng, SIZES, size_sd=0.002)
        found = scaling.multiplier((SIZES, arm), (SIZES, baseline), replicates=400)
        held.append(holds(found, 1.2))
        widths.append(found.high / found.low)
    assert 0.93 <= np.mean(held) <= 0.995
    assert np.median(widths) < 1.15


def test_one_seed_per_size_makes_the_interval_of_residuals_alone():
    """Residuals on 5 - 3 degrees of freedom: t tails, wider than those of the same means' seeds."""
    losses = noisy(np.random.default_rng(3), SIZES)
    means = losses.mean(axis=1, keepdims=True)
    alone, seeds = scaling.fit(SIZES, means), scaling.fit(SIZES, losses)
    assert alone.a.value == pytest.approx(seeds.a.value)
    # Ten times the residuals are ten times the interval: nothing else is in it.
    fitted = np.array([alone.loss(n) for n in SIZES])[:, None]
    tenth = scaling.fit(SIZES, fitted + (means - fitted) / 10)
    width = alone.a.high - alone.a.low
    assert (tenth.a.high - tenth.a.low) / width == pytest.approx(0.1, rel=0.1)
    assert (seeds.a.high - seeds.a.low) / width != pytest.approx(1, rel=0.1)


def test_the_noise_of_seeds_is_unbiased_for_few_of_them():
    """Seeds at +-s: the variance of a mean is s^2 of two, s^2 / 3 of four (df 5 and 15)."""
    two, four = (
        scaling.fit(SIZES, law(SIZES)[:, None] + SEEDS_SD * np.array(signs))
        for signs in ([-1, 1], [-1, 1, -1, 1])
    )
    ratio = (two.a.high - two.a.low) / (four.a.high - four.a.low)
    assert ratio == pytest.approx(3**0.5 * stats.t.ppf(0.975, 5) / stats.t.ppf(0.975, 15), rel=0.1)


def test_a_size_with_one_seed_borrows_the_deviations_of_the_others():
    """The residuals are zero here, so that the deviations of the seeds are all the noise."""
    spread = np.array([-SEEDS_SD, 0, SEEDS_SD])
    rows = [law(n) + spread for n in SIZES]
    full = scaling.fit(SIZES, rows)
    ragged = [law(SIZES[:1]), *rows[1:-1], law(SIZES[-1:])]
    one_each_end = scaling.fit(SIZES, ragged)
    assert one_each_end.losses == pytest.approx([row.mean() for row in ragged])
    assert one_each_end.a.high - one_each_end.a.low > 1.2 * (full.a.high - full.a.low)
    assert holds(scaling.multiplier((SIZES, ragged), (SIZES, rows)), 1.0)


def test_the_order_of_sizes_does_not_matter():
    losses = noisy(np.random.default_rng(4), SIZES)
    order = [3, 0, 4, 1, 2]
    assert scaling.fit(SIZES[order], losses[order]) == scaling.fit(SIZES, losses)
    shuffled = scaling.multiplier((SIZES[order], losses[order]), (SIZES, losses))
    assert shuffled == scaling.multiplier((SIZES, losses), (SIZES, losses))


def test_the_same_seeds_are_drawn_for_both_where_their_numbers_agree():
    """Common noise of a seed cancels when paired, and not in another order of the seeds."""
    seeds = 0.01 * np.random.default_rng(6).normal(size=(len(SIZES), 4))
    losses = law(SIZES)[:, None] + seeds - seeds.mean(axis=1, keepdims=True)
    paired = scaling.multiplier((SIZES, losses), (SIZES, losses))
    apart = scaling.multiplier((SIZES, losses), (1.2 * SIZES, losses))
    fewer = scaling.multiplier(
        (SIZES, losses), (SIZES, [row.tolist() + [row.mean()] for row in losses])
    )
    assert paired.high - paired.low < 0.6 * (fewer.high - fewer.low)
    assert paired.high / paired.low - 1 < 0.6 * (apart.high / apart.low - 1)


@pytest.mark.parametrize('worth', [0.7, 1.0, 1.2])
def test_an_arm_that_is_the_baseline_at_another_size_is_worth_the_ratio(worth):
    exact = scaling.multiplier((SIZES, law(worth * SIZES)[:, None]), (SIZES, law(SIZES)[:, None]))
    assert exact.value == pytest.approx(worth, rel=1e-5)
    assert exact.by_size == pytest.approx([worth] * len(SIZES), rel=1e-5)
    rng = np.random.default_rng(7)
    arm, baseline = noisy(rng, worth * SIZES), noisy(rng, SIZES)
    found = scaling.multiplier((SIZES, arm), (SIZES, arm if worth == 1 else baseline))
    assert holds(found, worth)
    assert holds(found, 1.0) == (worth == 1)
    assert found.value == pytest.approx(np.median(found.by_size))
    assert worth != 1 or 0.97 < found.low < 1 < found.high < 1.03


def test_an_arm_may_have_other_sizes_and_fewer_of_them():
    rng = np.random.default_rng(8)
    baseline = (SIZES, noisy(rng, SIZES))
    for sizes in (np.array([3e5]), np.array([2e5, 9e5])):
        found = scaling.multiplier((sizes, noisy(rng, 1.2 * sizes)), baseline)
        assert found.problem is None
        assert holds(found, 1.2)
        assert found.high > found.low


def test_an_arm_whose_worth_differs_by_size_has_a_wider_interval():
    rng = np.random.default_rng(9)
    baseline = (SIZES, noisy(rng, SIZES, sd=0.001))
    deviations = noisy(rng, SIZES, sd=0.001) - law(SIZES)[:, None]
    constant = law(1.2 * SIZES)[:, None] + deviations
    growing = law(np.array([0.8, 1.0, 1.2, 1.4, 1.6]) * SIZES)[:, None] + deviations
    one, many = (scaling.multiplier((SIZES, arm), baseline) for arm in (constant, growing))
    assert one.value == pytest.approx(many.value, rel=0.02)
    assert many.high - many.low > 3 * (one.high - one.low)


ROUGH = (2.0, 1.6, 1.9, 1.5, 1.7)
NOISE = 0.01 * np.random.default_rng(0).normal(size=5)
TWICE = np.array([1e5, 1e5, 2e5, 9e5])
FALLING = {'losses': law(SIZES[[-1, 0]]).tolist(), 'parameters': [1e5, 3.2e6]}


@pytest.mark.parametrize(
    ('sizes', 'losses', 'code', 'data'),
    [
        (SIZES[:3], law(SIZES[:3]), ProblemCode.FEW_SIZES, {'sizes': 3, 'needed': 4}),
        (TWICE, law(TWICE), ProblemCode.FEW_SIZES, {'sizes': 3, 'needed': 4}),
        (SIZES**0.3, law(SIZES), ProblemCode.NARROW_SPAN, {'factor': 32**0.3, 'needed': 4}),
        (SIZES, law(SIZES[::-1]), ProblemCode.NOT_FALLING, FALLING),
        (SIZES, np.full(5, 1.5), ProblemCode.NOT_FALLING, {}),
        (SIZES, ROUGH, ProblemCode.POOR_FIT, {'needed': 0.95}),
        (SIZES, 3 - np.log(SIZES / 1e5) * 0.1 + NOISE, ProblemCode.EXPONENT_LOOSE, {}),
        (SIZES, (2.0, 1.2, 1.2, 1.2, 1.2), ProblemCode.EXPONENT_LOOSE, {'value': 4.0}),
        (SIZES, 3 * SIZES**-0.015, ProblemCode.EXPONENT_NEAR_ZERO, {'value': 0.015}),
        # With seeds that differ by less, these means determine the exponent.
        (SIZES, law(SIZES) + 0.06 * SIGNS, ProblemCode.EXPONENT_LOOSE, {'value': EXPONENT}),
    ],
    ids=['sizes', 'twice', 'span', 'rising', 'flat', 'rough', 'log', 'step', 'slow', 'seeds'],
)
def test_losses_that_determine_no_law_are_refused(sizes, losses, code, data):
    rows = np.atleast_2d(losses).T
    fit = scaling.fit(sizes, rows)
    assert fit.problem.code is code
    for name, value in data.items():
        assert fit.problem.data[name] == pytest.approx(value, rel=1e-4)
    with pytest.raises(ValueError, match='no law for 100,000 parameters'):
        fit.loss(1e5)
    assert fit.E is fit.A is fit.a is fit.r_squared is None
    assert fit.losses == pytest.approx(tuple(rows.mean(axis=1)))
    found = scaling.multiplier((SIZES, law(SIZES)[:, None]), (sizes, rows))
    assert found.problem == Problem(ProblemCode.NO_BASELINE_LAW, {'problem': fit.problem})
    assert found.value is found.low is found.high is None
    assert found.by_size == ()


def test_seeds_that_differ_little_determine_the_exponent():
    assert scaling.fit(SIZES, (law(SIZES) + 0.002 * SIGNS).T).problem is None


@pytest.mark.parametrize(
    ('arm_sizes', 'losses', 'code', 'data'),
    [
        (SIZES, law(2.1 * SIZES), ProblemCode.EXTRAPOLATED, {'end': 'largest', 'factor': 2.0}),
        (SIZES, law(0.45 * SIZES), ProblemCode.EXTRAPOLATED, {'end': 'smallest', 'factor': 0.5}),
        # Below the floor.
        (SIZES, law(SIZES) - 1, ProblemCode.EXTRAPOLATED, {'end': 'largest', 'factor': 2.0}),
        (SIZES[-1:], law(1.9 * SIZES[-1:]) + 0.01 * SIGNS, ProblemCode.INTERVAL_EXTRAPOLATED, {}),
        (SIZES[:1], law(SIZES[:1]), ProblemCode.SINGLE_LOSS, {}),
    ],
    ids=['above', 'below', 'floor', 'interval', 'single'],
)
def test_no_multiplier_where_the_baseline_is_extrapolated(arm_sizes, losses, code, data):
    baseline = (SIZES, noisy(np.random.default_rng(0), SIZES, sd=0.001))
    found = scaling.multiplier((arm_sizes, np.atleast_2d(losses).T), baseline)
    assert found.problem.code is code
    assert found.value is found.low is found.high is None
    assert found.problem.data.items() >= data.items()
    if code is ProblemCode.EXTRAPOLATED:
        assert found.problem.data['loss'] in losses
    elif code is ProblemCode.INTERVAL_EXTRAPOLATED:
        assert found.problem.data['value'] == pytest.approx(1.9, rel=0.02)


@pytest.mark.parametrize(
    ('parameters', 'losses', 'sentence'),
    [
        ([1e5, 2e5], [[2.0]], 'not 2 parameters and 1 rows of losses'),
        ([], [], 'not 0 parameters'),
        ([1e5, 0.0], [[2.0], [1.0]], 'parameters must be positive and finite, not 0.0'),
        ([1e5, np.inf], [[2.0], [1.0]], 'parameters must be positive and finite, not inf'),
        ([1e5, 2e5], [[2.0], []], r'losses at 200,000 parameters must be .* not \[\]'),
        ([1e5, 2e5], [[2.0], [np.nan]], r'one finite number per seed, not \[nan\]'),
        ([1e5, 2e5], [2.0, 1.0], 'one finite number per seed, not 2.0'),
    ],
)
def test_no_table_of_numbers_is_an_error(parameters, losses, sentence):
    with pytest.raises(ValueError, match=f'fit: .*{sentence}'):
        scaling.fit(parameters, losses)
    good = (SIZES, law(SIZES)[:, None])
    with pytest.raises(ValueError, match=f'arm: .*{sentence}'):
        scaling.multiplier((parameters, losses), good)
    with pytest.raises(ValueError, match=f'baseline: .*{sentence}'):
        scaling.multiplier(good, (parameters, losses))
