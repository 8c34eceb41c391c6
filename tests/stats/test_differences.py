"""Differences, their intervals and the decisions on them: closed forms and scipy."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy import stats

from qkattn.stats import inference
from qkattn.stats.decision import ALPHA, Decision, holm, judge, level
from qkattn.stats.inference import paired_test

BETTER = Decision.BETTER
BETTER_BELOW = Decision.BETTER_BELOW_MARGIN
EQUIVALENT = Decision.EQUIVALENT
WORSE_BELOW = Decision.WORSE_BELOW_MARGIN
WORSE = Decision.WORSE
UNDECIDED = Decision.UNDECIDED
VALUES = [-0.012, -0.008, -0.015, -0.006, -0.011, -0.009, -0.010]
TEST_MARGIN = 0.006
MEANS = [-0.02, -0.004, 0.003, 0.009]


def sample(mean):
    """Nine normal values around a mean."""
    return np.random.default_rng(4).normal(mean, 0.004, 9)


@pytest.mark.parametrize('mean', MEANS)
def test_an_interval_is_that_of_scipys_t_test(mean):
    values = sample(mean)
    difference = paired_test(values, TEST_MARGIN)
    interval = tuple(stats.ttest_1samp(values, 0).confidence_interval(0.95))
    assert (difference.low, difference.high) == pytest.approx(interval)
    assert difference.df == pytest.approx(8)
    sd = np.std(values, ddof=1)
    estimate = inference.Estimate(values.mean(), 9, sd, *interval)
    assert vars(inference.estimate(values.tolist())) == pytest.approx(vars(estimate))


@pytest.mark.parametrize('mean', MEANS)
def test_equivalence_is_shown_by_scipys_two_one_sided_t_tests(mean):
    values = sample(mean)
    difference = paired_test(values, TEST_MARGIN)
    above = stats.ttest_1samp(values, -TEST_MARGIN, alternative='greater').pvalue
    below = stats.ttest_1samp(values, TEST_MARGIN, alternative='less').pvalue
    assert (difference.p_not_better, difference.p_not_worse) == pytest.approx((above, below))
    assert difference.p_equivalence == pytest.approx(max(above, below))


@pytest.mark.parametrize('mean', MEANS)
def test_a_difference_is_shown_by_scipys_t_test_at_zero_or_the_margin(mean):
    values = sample(mean)
    difference = paired_test(values, TEST_MARGIN)
    p_less = stats.ttest_1samp(values, 0, alternative='less').pvalue
    p_side = min(p_less, 1 - p_less)
    assert difference.p == pytest.approx(2 * p_side)
    beyond = stats.t.sf((abs(values.mean()) - TEST_MARGIN) / stats.sem(values), 8)
    assert difference.p_margin == pytest.approx(min(1.0, beyond + p_side))


def test_typical_values_are_tested_apart_from_an_outlier():
    alone = paired_test(VALUES)
    with_outlier = paired_test([*VALUES, 0.06])
    assert alone.typical is None
    assert alone.p < 0.001
    assert with_outlier.typical == alone
    assert (with_outlier.n, alone.n) == (8, 7)
    assert with_outlier.p == pytest.approx(stats.ttest_1samp([*VALUES, 0.06], 0).pvalue)
    assert with_outlier.p > 0.5


def test_a_shift_that_a_few_of_many_values_make_is_no_finding():
    rng = np.random.default_rng(0)
    shifted = paired_test([*rng.normal(0, 0.01, 72), *rng.normal(0.2, 0.01, 8)])
    assert shifted.mean / shifted.error_seeds > 2.6
    assert 0.1 < shifted.p == shifted.typical.p
    assert shifted.low == shifted.typical.low < 0 < shifted.typical.high < shifted.high


def test_a_difference_whose_sign_depends_on_outliers_is_no_finding():
    turned = paired_test([-1.01, -1.0, -0.99, -1.0, -0.98, 9.0, 9.1])
    assert turned.mean > 0 > turned.typical.mean
    assert (turned.p, turned.p_margin) == (1.0, 1.0)


@pytest.mark.parametrize(('beyond', 'is_apart'), [(-0.01, False), (0.01, True)])
def test_values_lie_apart_by_the_median_absolute_deviation(beyond, is_apart):
    others = (-1.0, -1.0, 0.0, 1.0, 1.0, 0.0, -1.0, 0.0)  # their deviation is 1
    last = 5 * 1.4826 + beyond
    expected = others if is_apart else (*others, last)
    assert inference.typical((*others, last)) == expected


@pytest.mark.parametrize('values', [(0.0, 0.1, 9.0), (1.0, 1.0, 1.0, 9.0)])
def test_no_value_lies_apart_of_few_values_or_without_a_spread(values):
    assert inference.typical(values) == values


# What tuning may have missed, and values around 0.02 that it moves, below zero or above.
MISSES = pytest.mark.parametrize(
    ('sign', 'low', 'high'), [(1, 0.004, 0.007), (-1, 0.007, 0.004)], ids=['above', 'below']
)


def alternating(sign):
    return np.array([sign * (0.02 + 0.001 * (-1) ** i) for i in range(8)])


@MISSES
def test_the_bound_of_tuning_widens_the_interval(sign, low, high):
    values = alternating(sign)
    plain = paired_test(values)
    missed = paired_test(values, tuning=(low, high))
    assert (missed.low, missed.high) == pytest.approx((plain.low - low, plain.high + high))


@MISSES
def test_the_bound_of_tuning_weakens_the_tests(sign, low, high):
    values = alternating(sign)
    # Tuning may have missed up to 0.004 on one side and 0.007 on the other.
    missed = paired_test(values, tuning=(low, high))
    nearer = paired_test(values - sign * 0.004)
    assert (missed.p, missed.p_margin) == pytest.approx((nearer.p, nearer.p_margin))
    wide = paired_test(values, 0.03, tuning=(low, high))
    farther = paired_test(values + sign * 0.007, 0.03)
    assert wide.p_equivalence == pytest.approx(farther.p_equivalence)


@pytest.mark.parametrize('sign', [1, -1])
@pytest.mark.parametrize('miss', [0.03, np.inf])
def test_nothing_is_shown_where_tuning_may_miss_more_than_the_difference(sign, miss):
    lost = paired_test(alternating(sign), tuning=(miss, miss))
    assert (lost.p, lost.p_margin) == (1.0, 1.0)
    assert lost.p_equivalence > 0.99
    assert lost.low < 0 < lost.high


EVALUATION_ERROR = 0.0015


def test_the_error_over_documents_adds_to_that_over_seeds():
    alone = paired_test(VALUES)
    both = paired_test(VALUES, evaluation=(EVALUATION_ERROR, 20.0))
    assert both.error_seeds == alone.error_seeds
    assert both.error_evaluation == EVALUATION_ERROR
    total = math.hypot(alone.error_seeds, EVALUATION_ERROR)
    df = total**4 / (alone.error_seeds**4 / 6 + EVALUATION_ERROR**4 / 20)  # Satterthwaite
    assert (both.low, both.high) == pytest.approx(stats.t.interval(0.95, df, both.mean, total))
    assert (both.df, both.p) == pytest.approx((df, 2 * stats.t.cdf(both.mean / total, df)))


def test_an_error_that_is_known_exactly_costs_no_degrees_of_freedom():
    exact = paired_test(VALUES, evaluation=(EVALUATION_ERROR, None))
    total = math.hypot(exact.error_seeds, EVALUATION_ERROR)
    assert exact.df == pytest.approx(total**4 / (exact.error_seeds**4 / 6))


def test_an_error_that_is_not_known_leaves_the_mean_alone():
    unknown = paired_test(VALUES, evaluation=None)
    assert unknown.mean == paired_test(VALUES).mean
    assert unknown.p is unknown.low is None


def test_the_error_over_equal_documents_is_that_of_their_mean():
    nats_SC = np.random.default_rng(2).normal(0, 3.0, (4, 12))
    error, df = inference.evaluation_error(nats_SC, np.full(12, 500))
    assert (error, df) == pytest.approx((stats.sem(nats_SC.mean(axis=0) / 500), 11))


def test_the_error_over_documents_is_cluster_robust():
    """The error of a mean over tokens whose documents are clusters of unequal size."""
    tokens_C = np.array([4000, 500, 500, 1000])
    difference_C = np.array([0.01, -0.02, 0.03, 0.0])
    share_C = tokens_C / 6000
    mean = share_C @ difference_C
    variance = sum(
        share**2 * (difference - mean) ** 2 / (1 - share)
        for share, difference in zip(share_C, difference_C, strict=True)
    )
    error, df = inference.evaluation_error((difference_C * tokens_C)[None], tokens_C)
    assert error == pytest.approx(variance**0.5)
    assert df == pytest.approx(np.sum(share_C**2) ** 2 / np.sum(share_C**4) - 1)


def test_documents_that_differ_by_rounding_alone_have_no_error():
    tokens_C = np.arange(1, 13) * 137.0
    nats_SC = np.outer([0.1, 0.1], tokens_C) / 3
    assert inference.evaluation_error(nats_SC, tokens_C)[0] == 0
    assert inference.evaluation_error(nats_SC * (1 + 1e-9 * tokens_C), tokens_C)[0] > 0


@pytest.mark.parametrize('df', [1, 2, 7, 14, 60])
@pytest.mark.parametrize('alpha', [0.05, 0.05 / 6])
def test_the_detectable_difference_has_the_power_of_the_noncentral_t(df, alpha):
    """At this true difference, the two-sided t test of half of all experiments has the power."""
    error = 0.003
    median = stats.chi(df).median() / df**0.5  # the median estimate of an error of 1
    noncentrality = inference.detectable_difference(median * error, df, alpha) / error
    power = stats.nct.sf(stats.t.isf(alpha / 2, df), df, noncentrality)
    assert power == pytest.approx(inference.POWER, abs=1e-5)


# The same number but for its last bits; numpy's mean of three 0.1 is not 0.1.
NEARLY = [
    [0.1, 0.1, 0.1],
    [0.25, 0.25 + 2**-54, 0.25 - 2**-54, 0.25],
    [3.3, 3.3 + 2**-51, 3.3],
]


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('values', [[0.0] * 4, *NEARLY], ids=str)
def test_a_spread_of_rounding_errors_is_zero(values):
    estimate = inference.estimate(values)
    difference = paired_test(values)
    is_zero = float(values[0] == 0)
    mean = pytest.approx(values[0], abs=1e-14)
    assert (estimate.sd, difference.sd) == (0.0, 0.0)
    assert (difference.p, difference.p_equivalence) == (is_zero, 1.0 - is_zero)
    assert estimate.low == estimate.high == difference.low == difference.high == mean


def test_a_single_seed_leaves_blanks():
    known = {'mean': 0.01, 'n': 1, 'margin': inference.MARGIN, 'tuning_low': 0, 'tuning_high': 0}
    assert {
        n: value for n, value in vars(paired_test([0.01])).items() if value is not None
    } == known
    assert inference.estimate([2.0]) == inference.Estimate(2.0, 1, None, None, None)


@pytest.mark.parametrize('differences', [[], [0.1, math.nan], [math.inf]])
def test_differences_are_finite(differences):
    with pytest.raises(ValueError, match='must be one or more finite'):
        paired_test(differences)


EIGHT = [0.01, 0.03, -0.01, 0.02, 0.0, 0.01, 0.02, -0.02]


def test_the_detectable_difference_needs_as_many_pairs_as_there_are():
    eight = paired_test(EIGHT)
    detectable = inference.detectable_difference(eight.error_seeds, eight.df)
    assert inference.to_find(eight, detectable * (1 + 1e-9)) == (8, 1.0)


def test_half_a_difference_takes_four_times_as_many_pairs():
    eight = paired_test(EIGHT)
    many, documents = inference.to_find(eight, 2e-5)  # above a million
    more, documents_of_more = inference.to_find(eight, 1e-5)
    assert documents == documents_of_more == 1
    assert more / many == pytest.approx(4, rel=0.01)


def test_further_documents_are_needed_where_no_number_of_pairs_suffices():
    noisy = paired_test(EIGHT, evaluation=(0.01, 100))
    pairs, documents = inference.to_find(noisy, 0.01)
    error = math.hypot(noisy.sd / pairs**0.5, 0.01 / documents**0.5)
    assert documents > 1
    assert error == pytest.approx(0.01 / (1.96 + 0.84), rel=0.02)


def test_no_number_of_pairs_finds_a_difference_that_tuning_may_hide():
    eight = paired_test(EIGHT)
    tuned = dataclasses.replace(eight, tuning_low=0.01)
    assert inference.to_find(tuned, -0.01) is None
    assert inference.to_find(tuned, 0.01) == inference.to_find(eight, -0.01)


def test_a_single_pair_gives_no_number_of_pairs():
    assert inference.to_find(paired_test([0.1]), 0.01) is None


def test_holm_rejects_what_its_definition_rejects():
    """Step down: reject while p_(k) <= alpha / (m - k + 1), and nothing after the first failure."""
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
    rng = np.random.default_rng(6)
    for _ in range(300):
        p_values = rng.beta(0.3, 3.0, rng.integers(1, 8)).tolist()
        for alpha in (0.01, 0.05, 0.3):
            rejected = []
            for k, p in enumerate(sorted(p_values)):
                if p > alpha / (len(p_values) - k):
                    break
                rejected.append(p)
            assert [p in rejected for p in p_values] == [p <= alpha for p in holm(p_values)]


def difference_around(mean, spread=0.001, n=8, **keywords):
    """The difference of n pairs that lie `spread` above and below the mean by turns."""
    return paired_test([mean + spread * (-1) ** i for i in range(n)], **keywords)


@pytest.mark.parametrize(
    # A difference, its decision, and its decision where trials of the arm, or of the baseline,
    # diverged.
    ('compared', 'decided', 'arm_diverged', 'baseline_diverged'),
    [
        (difference_around(-0.02), BETTER, UNDECIDED, BETTER),
        (difference_around(0.02), WORSE, WORSE, UNDECIDED),
        (difference_around(-0.006, spread=0.003), BETTER_BELOW, UNDECIDED, BETTER_BELOW),
        (difference_around(0.006, spread=0.003), WORSE_BELOW, WORSE_BELOW, UNDECIDED),
        (difference_around(0.0), EQUIVALENT, UNDECIDED, UNDECIDED),
        (difference_around(0.003), EQUIVALENT, WORSE_BELOW, UNDECIDED),
        (difference_around(0.001, spread=0.05), UNDECIDED, UNDECIDED, UNDECIDED),
        # By what the optimum may be missed, of the arm and of the baseline.
        (difference_around(-0.02, tuning=(0.1, 0.0)), BETTER, UNDECIDED, BETTER),
        (difference_around(-0.02, tuning=(0.0, 0.016)), BETTER_BELOW, UNDECIDED, BETTER_BELOW),
        (difference_around(-0.02, tuning=(0.0, np.inf)), UNDECIDED, UNDECIDED, UNDECIDED),
    ],
)
def test_a_decision_is_never_better_for_an_arm_that_diverged(
    compared, decided, arm_diverged, baseline_diverged
):
    counts = {(0, 0): decided, (1, 0): arm_diverged, (0, 2): baseline_diverged, (1, 1): UNDECIDED}
    for diverged, expected in counts.items():
        assert judge({0: compared}, diverged={0: diverged})[0].decision is expected


def test_an_arm_leaves_the_family_when_it_differs_by_more_than_the_margin():
    """The other arms then share the error rate among themselves.

    At each alpha, arms stay in the family whose margin tests Holm's method does not reject.
    Adjusted p-values are compared at the level of a first look, a fraction of alpha.
    """
    rng = np.random.default_rng(11)
    first = level(1) / ALPHA
    for _ in range(100):
        means = rng.choice([-0.03, -0.01, 0.0, 0.004], 5)
        differences = {i: paired_test(rng.normal(mean, 0.01, 8)) for i, mean in enumerate(means)}
        judged = judge(differences)
        p_margins = holm([difference.p_margin for difference in differences.values()])
        for alpha, (arm, p_margin) in itertools.product((0.01, 0.05, 0.2), enumerate(p_margins)):
            num_remaining = sum(p > alpha for p in p_margins)
            assert judged[arm].p_margin_holm == pytest.approx(min(1.0, p_margin / first))
            differs = first * judged[arm].p_holm
            same = first * judged[arm].p_equivalence_holm
            if p_margin > alpha:
                assert (differs <= alpha) == (differences[arm].p <= alpha / num_remaining)
                assert (same <= alpha) == (differences[arm].p_equivalence <= alpha / num_remaining)
            else:
                assert differs <= alpha < same
