"""Differences, their intervals and the decisions on them: closed forms and scipy."""

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
from scipy import stats

from qkattn.stats import inference
from qkattn.stats.decision import ALPHA, Decision, holm, judge, level
from qkattn.stats.inference import paired

BETTER, BETTER_BELOW, EQUIVALENT, WORSE_BELOW, WORSE, UNDECIDED, _ = Decision
VALUES = [-0.012, -0.008, -0.015, -0.006, -0.011, -0.009, -0.010]


@pytest.mark.parametrize('mean', [-0.02, -0.004, 0.003, 0.009])
def test_a_difference_is_scipys_t_test_and_its_two_one_sided_ones(mean):
    margin, values = 0.006, np.random.default_rng(4).normal(mean, 0.004, 9)
    difference, test = paired(values, margin), functools.partial(stats.ttest_1samp, values)
    interval = tuple(test(0).confidence_interval(0.95))
    assert (difference.low, difference.high, difference.df) == pytest.approx((*interval, 8))
    above, below = test(-margin, alternative='greater').pvalue, test(margin, alternative='less')
    one_sided = difference.p_not_better, difference.p_not_worse
    assert one_sided == pytest.approx((above, below.pvalue))
    assert difference.p_equivalence == pytest.approx(max(above, below.pvalue))
    side = min(test(0, alternative='less').pvalue, test(0, alternative='greater').pvalue)
    beyond = stats.t.sf((abs(values.mean()) - margin) / stats.sem(values), 8)
    margins = min(1.0, beyond + side)
    assert (difference.p, difference.p_margin) == pytest.approx((2 * side, margins))
    estimate = inference.Estimate(values.mean(), 9, np.std(values, ddof=1), *interval)
    assert vars(inference.estimate(values.tolist())) == pytest.approx(vars(estimate))


def test_a_finding_holds_with_and_without_the_values_that_lie_apart():
    alone, every = paired(VALUES), paired([*VALUES, 0.06])
    assert alone.typical is None and alone.p < 0.001
    assert every.typical == alone and (every.n, alone.n) == (8, 7)
    assert every.p == pytest.approx(stats.ttest_1samp([*VALUES, 0.06], 0).pvalue)
    assert every.p > 0.5
    # The other way round: a shift that a few of many values make is no finding.
    rng = np.random.default_rng(0)
    shifted = paired([*rng.normal(0, 0.01, 72), *rng.normal(0.2, 0.01, 8)])
    assert shifted.mean / shifted.error_seeds > 2.6 and 0.1 < shifted.p == shifted.typical.p
    assert shifted.low == shifted.typical.low < 0 < shifted.typical.high < shifted.high
    # Sides must agree.
    turned = paired([-1.01, -1.0, -0.99, -1.0, -0.98, 9.0, 9.1])
    assert turned.mean > 0 > turned.typical.mean and (turned.p, turned.p_margin) == (1.0, 1.0)


def test_values_lie_apart_by_the_median_absolute_deviation():
    limit = 5 * 1.4826  # of 0 and +-1, whose median absolute deviation is 1
    for last, apart in ((limit - 0.01, False), (limit + 0.01, True)):
        sample = (-1.0, -1.0, 0.0, 1.0, 1.0, 0.0, -1.0, 0.0, last)
        assert inference.typical(sample) == (sample[:-1] if apart else sample)
    for sample in ((0.0, 0.1, 9.0), (1.0, 1.0, 1.0, 9.0)):  # too few; no spread to tell by
        assert inference.typical(sample) == sample


@pytest.mark.parametrize('sign', [1, -1])
def test_what_tuning_may_have_missed_widens_the_interval_and_weakens_the_tests(sign):
    values = np.array([sign * (0.02 + 0.001 * (-1) ** i) for i in range(8)])
    low, high = (0.004, 0.007)[::sign]
    plain, missed = paired(values), paired(values, tuning=(low, high))
    assert (missed.low, missed.high) == pytest.approx((plain.low - low, plain.high + high))
    nearer, farther = paired(values - sign * 0.004), paired(values + sign * 0.007, 0.03)
    assert (missed.p, missed.p_margin) == pytest.approx((nearer.p, nearer.p_margin))
    wide = paired(values, 0.03, tuning=(low, high))
    assert wide.p_equivalence == pytest.approx(farther.p_equivalence)
    for miss in (0.03, np.inf):  # more than the difference: nothing is shown
        lost = paired(values, tuning=(miss, miss))
        assert (lost.p, lost.p_margin) == (1.0, 1.0) and lost.p_equivalence > 0.99
        assert lost.low < 0 < lost.high


def test_the_error_over_documents_adds_to_that_over_seeds():
    error, alone = 0.0015, paired(VALUES)
    both = paired(VALUES, evaluation=(error, 20.0))
    assert (both.error_seeds, both.error_evaluation) == (alone.error_seeds, error)
    total = math.hypot(alone.error_seeds, error)
    df = total**4 / (alone.error_seeds**4 / 6 + error**4 / 20)  # Satterthwaite
    assert (both.low, both.high) == pytest.approx(stats.t.interval(0.95, df, both.mean, total))
    assert (both.df, both.p) == pytest.approx((df, 2 * stats.t.cdf(both.mean / total, df)))
    # An error that is known exactly costs no degrees of freedom; one that is not leaves nothing.
    exact = paired(VALUES, evaluation=(error, None))
    assert exact.df == pytest.approx(total**4 / (alone.error_seeds**4 / 6))
    unknown = paired(VALUES, evaluation=None)
    assert unknown.mean == alone.mean and unknown.p is unknown.low is None


def test_the_error_over_documents_is_cluster_robust():
    nats_SC = np.random.default_rng(2).normal(0, 3.0, (4, 12))
    error, df = inference.evaluation_error(nats_SC, np.full(12, 500))
    assert (error, df) == pytest.approx((stats.sem(nats_SC.mean(axis=0) / 500), 11))
    # Two halves of a document are not two documents, and a large one counts for less than its size.
    tokens_C, each_C = np.array([4000, 500, 500, 1000]), np.array([0.01, -0.02, 0.03, 0.0])
    share_C = tokens_C / 6000
    mean = share_C @ each_C
    expected = sum(w**2 * (d - mean) ** 2 / (1 - w) for w, d in zip(share_C, each_C, strict=True))
    error, df = inference.evaluation_error((each_C * tokens_C)[None], tokens_C)
    assert error == pytest.approx(expected**0.5)
    assert df == pytest.approx(np.sum(share_C**2) ** 2 / np.sum(share_C**4) - 1)
    # Documents that differ by rounding alone have no error.
    tokens_C = np.arange(1, 13) * 137.0
    nats_SC = np.outer([0.1, 0.1], tokens_C) / 3
    assert inference.evaluation_error(nats_SC, tokens_C)[0] == 0
    assert inference.evaluation_error(nats_SC * (1 + 1e-9 * tokens_C), tokens_C)[0] > 0


@pytest.mark.parametrize('df', [1, 2, 7, 14, 60])
@pytest.mark.parametrize('alpha', [0.05, 0.05 / 6])
def test_the_detectable_difference_has_the_power_of_the_noncentral_t(df, alpha):
    median, error = stats.chi(df).median() / df**0.5, 0.003  # of an estimate of the error 1
    noncentrality = inference.detectable_difference(median * error, df, alpha) / error
    power = stats.nct.sf(stats.t.isf(alpha / 2, df), df, noncentrality)
    assert power == pytest.approx(inference.POWER, abs=1e-5)


# The same number but for its last bits; numpy's mean of three 0.1 is not 0.1.
NEARLY = [0.1, 0.1, 0.1], [0.25, 0.25 + 2**-54, 0.25 - 2**-54, 0.25], [3.3, 3.3 + 2**-51, 3.3]


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('values', [[0.0] * 4, *NEARLY], ids=str)
def test_a_spread_that_is_only_rounding_is_none(values):
    estimate, difference = inference.estimate(values), paired(values)
    zero, mean = float(values[0] == 0), pytest.approx(values[0], abs=1e-14)
    assert (estimate.sd, difference.sd) == (0.0, 0.0)
    assert (difference.p, difference.p_equivalence) == (zero, 1.0 - zero)
    assert estimate.low == estimate.high == difference.low == difference.high == mean


def test_a_single_seed_leaves_blanks():
    known = {'mean': 0.01, 'n': 1, 'margin': inference.MARGIN, 'tuning_low': 0, 'tuning_high': 0}
    assert {n: value for n, value in vars(paired([0.01])).items() if value is not None} == known
    assert inference.estimate([2.0]) == inference.Estimate(2.0, 1, None, None, None)


@pytest.mark.parametrize('differences', [[], [0.1, math.nan], [math.inf]])
def test_differences_are_finite(differences):
    with pytest.raises(ValueError, match='must be one or more finite'):
        paired(differences)


def test_pairs_and_documents_that_a_difference_takes():
    values = [0.01, 0.03, -0.01, 0.02, 0.0, 0.01, 0.02, -0.02]
    eight, noisy = paired(values), paired(values, evaluation=(0.01, 100))
    detectable = inference.detectable_difference(eight.error_seeds, eight.df)
    assert inference.to_find(eight, detectable * (1 + 1e-9)) == (8, 1.0)
    many, more = (inference.to_find(eight, size) for size in (2e-5, 1e-5))  # above a million
    assert many[1] == more[1] == 1 and more[0] / many[0] == pytest.approx(4, rel=0.01)
    pairs, documents = inference.to_find(noisy, 0.01)
    error = math.hypot(eight.sd / pairs**0.5, 0.01 / documents**0.5)
    assert documents > 1 and error == pytest.approx(0.01 / (1.96 + 0.84), rel=0.02)
    # Nothing finds what tuning may hide, on its side.
    tuned = dataclasses.replace(eight, tuning_low=0.01)
    assert inference.to_find(tuned, -0.01) is None
    assert inference.to_find(tuned, 0.01) == inference.to_find(eight, -0.01)
    assert inference.to_find(paired([0.1]), 0.01) is None


def test_holm_rejects_what_its_definition_rejects():
    """Step down: reject while p_(k) <= alpha / (m - k + 1), and nothing after the first failure."""
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []
    rng = np.random.default_rng(6)
    for _ in range(300):
        p_values = rng.beta(0.3, 3.0, rng.integers(1, 8)).tolist()
        for alpha in (0.01, 0.05, 0.3):
            ascending = sorted(p_values)
            steps = [p <= alpha / (len(ascending) - k) for k, p in enumerate(ascending)]
            rejected = ascending[: len(list(itertools.takewhile(bool, steps)))]
            assert [p in rejected for p in p_values] == [p <= alpha for p in holm(p_values)]


def difference(mean, spread=0.001, n=8, **keywords):
    """Alternates by `spread` around the mean."""
    return paired([mean + spread * (-1) ** i for i in range(n)], **keywords)


@pytest.mark.parametrize(
    ('compared', 'decided', 'arm_diverged', 'baseline_diverged'),
    [
        (difference(-0.02), BETTER, UNDECIDED, BETTER),
        (difference(0.02), WORSE, WORSE, UNDECIDED),
        (difference(-0.006, spread=0.003), BETTER_BELOW, UNDECIDED, BETTER_BELOW),
        (difference(0.006, spread=0.003), WORSE_BELOW, WORSE_BELOW, UNDECIDED),
        (difference(0.0), EQUIVALENT, UNDECIDED, UNDECIDED),
        (difference(0.003), EQUIVALENT, WORSE_BELOW, UNDECIDED),
        (difference(0.001, spread=0.05), UNDECIDED, UNDECIDED, UNDECIDED),
        # By what the optimum may be missed, of the arm and of the baseline.
        (difference(-0.02, tuning=(0.1, 0.0)), BETTER, UNDECIDED, BETTER),
        (difference(-0.02, tuning=(0.0, 0.016)), BETTER_BELOW, UNDECIDED, BETTER_BELOW),
        (difference(-0.02, tuning=(0.0, np.inf)), UNDECIDED, UNDECIDED, UNDECIDED),
    ],
)
def test_the_decisions_which_divergence_never_helps(
    compared, decided, arm_diverged, baseline_diverged
):
    counts = {(0, 0): decided, (1, 0): arm_diverged, (0, 2): baseline_diverged, (1, 1): UNDECIDED}
    for diverged, expected in counts.items():
        assert judge({0: compared}, diverged={0: diverged})[0].decision is expected


def test_an_arm_leaves_the_family_when_it_differs_by_more_than_the_margin():
    """At each alpha, the arms left are those whose margin tests Holm's method does not reject."""
    rng = np.random.default_rng(11)
    for _ in range(100):
        means = rng.choice([-0.03, -0.01, 0.0, 0.004], 5)
        arms = {i: paired(rng.normal(m, 0.01, 8)) for i, m in enumerate(means)}
        judged, margins = judge(arms), holm([d.p_margin for d in arms.values()])
        for alpha, (arm, p_margin) in itertools.product((0.01, 0.05, 0.2), enumerate(margins)):
            left = sum(p > alpha for p in margins)
            one = judged[arm]
            first = level(1) / ALPHA
            assert one.p_margin_holm == pytest.approx(min(1.0, p_margin / first))
            differs, same = first * one.p_holm, first * one.p_equivalence_holm
            if p_margin > alpha:
                assert (differs <= alpha) == (arms[arm].p <= alpha / left)
                assert (same <= alpha) == (arms[arm].p_equivalence <= alpha / left)
            else:
                assert differs <= alpha < same
