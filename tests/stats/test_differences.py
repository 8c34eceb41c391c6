"""Differences, their intervals and the decisions on them: closed forms and scipy."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from qkattn.stats import inference
from qkattn.stats.decision import ALPHA, Decision, holm, judge, level
from qkattn.stats.inference import paired_test

BETTER = Decision.BETTER
BETTER_OPEN = Decision.BETTER_MARGIN_OPEN
EQUIVALENT = Decision.EQUIVALENT
WORSE_OPEN = Decision.WORSE_MARGIN_OPEN
WORSE = Decision.WORSE
UNDECIDED = Decision.UNDECIDED
VALUES = [-0.012, -0.008, -0.015, -0.006, -0.011, -0.009, -0.010]
TEST_MARGIN = 0.006
MEANS = [-0.02, -0.004, 0.003, 0.009]


def nine_values_around(mean):
    """Nine random values with a normal distribution around a mean."""
    return np.random.default_rng(4).normal(mean, 0.004, 9)


@pytest.mark.parametrize('mean', MEANS)
def test_an_interval_is_that_of_scipys_t_test(mean):
    """The 95 % interval of a mean equals the interval of scipy's t test."""
    values = nine_values_around(mean)
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)

    # The margin does not affect the interval.
    difference = paired_test(values, TEST_MARGIN)
    assert difference.low == pytest.approx(low)
    assert difference.high == pytest.approx(high)
    # Nine values, less one for the mean.
    assert difference.df == pytest.approx(9 - 1)

    estimate = inference.estimate(values.tolist())
    assert estimate.mean == pytest.approx(values.mean())
    assert estimate.n == 9
    assert estimate.sd == pytest.approx(np.std(values, ddof=1))
    assert estimate.low == pytest.approx(low)
    assert estimate.high == pytest.approx(high)


@pytest.mark.parametrize('mean', MEANS)
def test_equivalence_is_shown_by_scipys_two_one_sided_t_tests(mean):
    values = nine_values_around(mean)
    difference = paired_test(values, TEST_MARGIN)
    p_above = stats.ttest_1samp(values, -TEST_MARGIN, alternative='greater').pvalue
    p_below = stats.ttest_1samp(values, TEST_MARGIN, alternative='less').pvalue
    assert difference.p_not_better == pytest.approx(p_above)
    assert difference.p_not_worse == pytest.approx(p_below)
    assert difference.p_equivalence == pytest.approx(max(p_above, p_below))


@pytest.mark.parametrize('mean', MEANS)
def test_a_difference_is_shown_by_scipys_t_test_at_zero_or_the_margin(mean):
    """`p` tests whether the mean differs from zero, `p_margin` whether by more than the margin."""
    values = nine_values_around(mean)
    difference = paired_test(values, TEST_MARGIN)

    # The two-sided p value is twice the smaller one-sided p value.
    p_less = stats.ttest_1samp(values, 0, alternative='less').pvalue
    p_greater = 1 - p_less
    p_one_sided = min(p_less, p_greater)
    assert difference.p == pytest.approx(2 * p_one_sided)

    # `p_margin` is tested on the side of zero where the mean lies.
    t_beyond_margin = (abs(values.mean()) - TEST_MARGIN) / stats.sem(values)
    p_beyond_margin = stats.t.sf(t_beyond_margin, df=9 - 1)
    # A finding on the wrong side of zero is an error too, so its probability is added.
    expected = min(1.0, p_beyond_margin + p_one_sided)
    assert difference.p_margin == pytest.approx(expected)


def test_typical_values_are_tested_apart_from_an_outlier():
    """A finding must hold with and without outliers, so the larger p value counts."""
    # All seven values lie between -0.015 and -0.006, so there is no outlier.
    alone = paired_test(VALUES)
    assert alone.n == 7
    assert alone.typical is None
    assert alone.p < 0.001

    # 0.06 is an outlier, and `typical` is the difference without it.
    values = [*VALUES, 0.06]
    with_outlier = paired_test(values)
    assert with_outlier.n == 8
    assert with_outlier.typical == alone

    # The outlier moves the mean towards zero, so p is larger with the outlier.
    assert with_outlier.p == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    assert with_outlier.p > 0.5


def test_a_shift_that_a_few_of_many_values_make_is_no_finding():
    """Eight outliers around 0.2 among 80 values do not show a difference from zero."""
    rng = np.random.default_rng(0)
    typical_values = rng.normal(0, 0.01, 72)
    outliers = rng.normal(0.2, 0.01, 8)
    shifted = paired_test([*typical_values, *outliers])

    # A plain t test of all 80 values would be significant.
    t = shifted.mean / shifted.error_seeds
    assert t > 2.6

    # `typical` is the difference without outliers. The larger of the two p values counts.
    assert shifted.p > 0.1
    assert shifted.p == shifted.typical.p

    # The interval covers both samples. Its low end comes from the values without outliers.
    assert shifted.low == shifted.typical.low
    assert shifted.low < 0
    assert 0 < shifted.typical.high < shifted.high


def test_a_difference_whose_sign_depends_on_outliers_is_no_finding():
    difference = paired_test([-1.01, -1.0, -0.99, -1.0, -0.98, 9.0, 9.1])
    assert difference.mean > 0
    assert difference.typical.mean < 0
    assert difference.p == 1.0
    assert difference.p_margin == 1.0


@pytest.mark.parametrize(('beyond', 'is_apart'), [(-0.01, False), (0.01, True)])
def test_values_lie_apart_by_the_median_absolute_deviation(beyond, is_apart):
    """An outlier is more than five standard deviations from the median.

    A standard deviation is estimated as 1.4826 median absolute deviations.
    """
    others = (-1.0, -1.0, 0.0, 1.0, 1.0, 0.0, -1.0, 0.0)  # with `last`: median 0, MAD 1
    last = 5 * 1.4826 + beyond
    values = (*others, last)
    expected = others if is_apart else values
    assert inference.typical(values) == expected


@pytest.mark.parametrize('values', [(0.0, 0.1, 9.0), (1.0, 1.0, 1.0, 9.0)])
def test_no_value_lies_apart_of_few_values_or_without_a_spread(values):
    assert inference.typical(values) == values


# The sign of values around 0.02, and the bounds of tuning below and above their mean.
MISSES = pytest.mark.parametrize(
    ('sign', 'low', 'high'), [(1, 0.004, 0.007), (-1, 0.007, 0.004)], ids=['above', 'below']
)


def eight_values_around_0_02(sign):
    """Eight values with this sign, which alternate between 0.021 and 0.019."""
    return sign * np.array([0.021, 0.019] * 4)


@MISSES
def test_the_bound_of_tuning_widens_the_interval(sign, low, high):
    values = eight_values_around_0_02(sign)
    plain = paired_test(values)
    tuned = paired_test(values, tuning=(low, high))
    assert tuned.low == pytest.approx(plain.low - low)
    assert tuned.high == pytest.approx(plain.high + high)


@MISSES
def test_the_bound_of_tuning_weakens_the_tests(sign, low, high):
    """A finding must hold at every mean that perfect tuning could give.

    With perfect tuning, the mean could be lower by up to `low` or higher by up to `high`. The bound
    is 0.004 towards zero and 0.007 away from zero.
    """
    values = eight_values_around_0_02(sign)

    # To show a difference, the worst case is a mean nearer to zero.
    tuned = paired_test(values, tuning=(low, high))
    nearer_to_zero = paired_test(values - sign * 0.004)
    assert tuned.p == pytest.approx(nearer_to_zero.p)
    assert tuned.p_margin == pytest.approx(nearer_to_zero.p_margin)

    # To show equivalence, the worst case is a mean farther from zero.
    margin = 0.03
    tuned = paired_test(values, margin, tuning=(low, high))
    farther_from_zero = paired_test(values + sign * 0.007, margin)
    assert tuned.p_equivalence == pytest.approx(farther_from_zero.p_equivalence)


@pytest.mark.parametrize('sign', [1, -1])
@pytest.mark.parametrize('miss', [0.03, np.inf])
def test_nothing_is_shown_where_tuning_may_miss_more_than_the_difference(sign, miss):
    difference = paired_test(eight_values_around_0_02(sign), tuning=(miss, miss))
    assert difference.p == 1.0
    assert difference.p_margin == 1.0
    assert difference.p_equivalence > 0.99
    assert difference.low < 0
    assert difference.high > 0


EVALUATION_ERROR = 0.0015


def test_the_error_over_documents_adds_to_that_over_seeds():
    """The errors over seeds and over documents are independent, so their squares add."""
    df_of_seeds = len(VALUES) - 1
    df_of_documents = 20.0
    alone = paired_test(VALUES)
    both = paired_test(VALUES, evaluation=(EVALUATION_ERROR, df_of_documents))
    assert both.error_seeds == alone.error_seeds
    assert both.error_evaluation == EVALUATION_ERROR

    total = math.hypot(alone.error_seeds, EVALUATION_ERROR)
    # Satterthwaite (1946): df = (a^2 + b^2)^2 / (a^4 / df_a + b^4 / df_b).
    # Here a is the error over seeds, and b is the error over documents.
    from_seeds = alone.error_seeds**4 / df_of_seeds
    from_documents = EVALUATION_ERROR**4 / df_of_documents
    df = total**4 / (from_seeds + from_documents)
    low, high = stats.t.interval(0.95, df, both.mean, total)
    assert both.df == pytest.approx(df)
    assert both.low == pytest.approx(low)
    assert both.high == pytest.approx(high)

    # The mean is below zero, so the two-sided p value is twice the lower tail.
    assert both.p == pytest.approx(2 * stats.t.cdf(both.mean / total, df))


def test_an_error_that_is_known_exactly_costs_no_degrees_of_freedom():
    exact = paired_test(VALUES, evaluation=(EVALUATION_ERROR, None))
    total = math.hypot(exact.error_seeds, EVALUATION_ERROR)
    assert exact.df == pytest.approx(total**4 / (exact.error_seeds**4 / 6))


def test_an_error_that_is_not_known_leaves_the_mean_alone():
    unknown = paired_test(VALUES, evaluation=None)
    assert unknown.mean == paired_test(VALUES).mean
    assert unknown.p is None
    assert unknown.low is None


def test_the_error_over_equal_documents_is_that_of_their_mean():
    """Four seeds and 12 documents of 500 tokens."""
    nats_SC = np.random.default_rng(2).normal(0, 3.0, (4, 12))
    error, df = inference.evaluation_error(nats_SC, np.full(12, 500))
    nats_per_token_C = nats_SC.mean(axis=0) / 500
    assert error == pytest.approx(stats.sem(nats_per_token_C))
    assert df == pytest.approx(12 - 1)


def test_the_error_over_documents_is_cluster_robust():
    """The error of a mean over tokens counts each document as one cluster of tokens.

    Bell and McCaffrey (2002) give the formulas for clusters of unequal size. With the share w_C of
    document C in all tokens, its difference D_C and the mean D = sum_C w_C D_C, they are

        variance = sum_C w_C^2 (D_C - D)^2 / (1 - w_C)
        df = (sum_C w_C^2)^2 / sum_C w_C^4 - 1
    """
    # Four documents. The difference of arm and baseline is in nats per token.
    tokens_C = np.array([2000, 1000, 1500, 1500])
    difference_C = np.array([0.01, -0.02, 0.03, 0.0])
    nats_of_document_C = difference_C * tokens_C
    nats_SC = nats_of_document_C[None]  # of a single seed
    error, df = inference.evaluation_error(nats_SC, tokens_C)

    share_C = tokens_C / 6000  # of all tokens
    mean = share_C @ difference_C
    deviation_C = difference_C - mean
    variance = np.sum(share_C**2 * deviation_C**2 / (1 - share_C))
    assert error == pytest.approx(variance**0.5)

    # The ratio would be the number of documents if all documents had the same size. Documents of
    # unequal size count as fewer.
    num_equal_documents = np.sum(share_C**2) ** 2 / np.sum(share_C**4)
    assert df == pytest.approx(num_equal_documents - 1)


def test_a_document_with_most_tokens_leaves_one_degree_of_freedom():
    """Five documents, of which the first has nine of ten tokens."""
    tokens_C = np.array([9000, 250, 250, 250, 250])
    nats_SC = np.random.default_rng(2).normal(0, 0.02, (8, 5)) * tokens_C
    error, df = inference.evaluation_error(nats_SC, tokens_C)
    # The formula for many documents gives 0.006, with which a t quantile exceeds 1e100. In effect,
    # the first document is compared with the others together, as in a sample of two.
    assert df == 1

    means_S = nats_SC.sum(axis=1) / tokens_C.sum()
    difference = paired_test(means_S, evaluation=(error, df))
    # The wide end of the interval of two values is 12.7 errors from their mean.
    largest_half_width = stats.t.isf(0.025, 1) * math.hypot(difference.error_seeds, error)
    assert 0 < difference.high - difference.mean <= largest_half_width


def test_documents_that_differ_by_rounding_alone_have_no_error():
    tokens_C = np.arange(1, 13) * 137.0
    nats_SC = np.outer([0.1, 0.1], tokens_C) / 3  # equal per token, except rounding
    error, _ = inference.evaluation_error(nats_SC, tokens_C)
    assert error == 0

    slightly_different_SC = nats_SC * (1 + 1e-9 * tokens_C)
    error, _ = inference.evaluation_error(slightly_different_SC, tokens_C)
    assert error > 0


@pytest.mark.parametrize('df', [1, 2, 7, 14, 60])
@pytest.mark.parametrize('alpha', [0.05, 0.05 / 6])
def test_the_detectable_difference_has_the_power_of_the_noncentral_t(df, alpha):
    """A two-sided t test finds the detectable difference with the probability `POWER`.

    The difference is computed from an estimated error. Here the estimate is the median one.
    """
    error = 0.003
    median_factor = stats.chi(df).median() / df**0.5  # median estimate / error
    detectable = inference.detectable_difference(median_factor * error, df, alpha)
    critical_t = stats.t.isf(alpha / 2, df)
    power = stats.nct.sf(critical_t, df, detectable / error)
    assert power == pytest.approx(inference.POWER, abs=1e-5)


# Values that differ only in their last bits. The mean of three 0.1 in numpy is not 0.1.
NEARLY_EQUAL = [
    [0.1, 0.1, 0.1],
    [0.25, 0.25 + 2**-54, 0.25 - 2**-54, 0.25],
    [3.3, 3.3 + 2**-51, 3.3],
]


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('values', [[0.0] * 4, *NEARLY_EQUAL], ids=str)
def test_a_spread_of_rounding_errors_is_zero(values):
    """Values that differ only in their last bits count as equal, so their spread is 0."""
    estimate = inference.estimate(values)
    difference = paired_test(values, margin=0.005)
    assert estimate.sd == 0.0
    assert difference.sd == 0.0

    # Both ends of the interval are the mean itself.
    mean = values[0]
    assert estimate.low == estimate.high == pytest.approx(mean, abs=1e-14)
    assert difference.low == difference.high == estimate.low

    # Without a spread, a p value is either 0 or 1.
    if mean == 0:
        # The mean is exactly zero, which is within the margin of 0.005.
        assert difference.p == 1.0
        assert difference.p_equivalence == 0.0
    else:
        # The mean is 0.1 or more, which is beyond the margin of 0.005.
        assert difference.p == 0.0
        assert difference.p_equivalence == 1.0


def test_a_single_seed_leaves_blanks():
    """One value has no standard deviation, so it has no interval and no test."""
    difference = paired_test([0.01])
    known = {name: field for name, field in vars(difference).items() if field is not None}
    # Apart from `mean` and `n`, only the defaults of the arguments are known.
    assert known == {
        'mean': 0.01,
        'n': 1,
        'margin': inference.MARGIN,
        'tuning_low': 0,
        'tuning_high': 0,
    }

    estimate = inference.estimate([2.0])
    assert estimate == inference.Estimate(mean=2.0, n=1, sd=None, low=None, high=None)


@pytest.mark.parametrize('differences', [[], [0.1, math.nan], [math.inf]])
def test_differences_are_finite(differences):
    with pytest.raises(ValueError, match='must be one or more finite'):
        paired_test(differences)


EIGHT = [0.01, 0.03, -0.01, 0.02, 0.0, 0.01, 0.02, -0.02]


def test_the_detectable_difference_needs_as_many_pairs_as_there_are():
    eight = paired_test(EIGHT)
    detectable = inference.detectable_difference(eight.error_seeds, eight.df)
    pairs, documents = inference.to_find(eight, detectable * (1 + 1e-9))
    assert pairs == 8
    assert documents == 1.0


def test_half_a_difference_takes_four_times_as_many_pairs():
    eight = paired_test(EIGHT)
    pairs, documents = inference.to_find(eight, 2e-5)  # above a million pairs
    more_pairs, more_documents = inference.to_find(eight, 1e-5)
    assert more_pairs / pairs == pytest.approx(4, rel=0.01)
    assert documents == 1
    assert more_documents == 1


def test_further_documents_are_needed_where_no_number_of_pairs_suffices():
    """More pairs do not reduce the error over documents, so more documents may be needed."""
    noisy = paired_test(EIGHT, evaluation=(0.01, 100))
    pairs, documents = inference.to_find(noisy, 0.01)  # `documents` is a factor
    assert documents > 1
    error = math.hypot(noisy.sd / pairs**0.5, 0.01 / documents**0.5)
    # 0.01 = (1.96 + 0.84) error: normal quantiles of the two-sided 5 % level and of 80 % power.
    assert error == pytest.approx(0.01 / (1.96 + 0.84), rel=0.02)


def rejected_by_definition(p_values, alpha):
    """The p values that Holm's method rejects, in ascending order.

    The k-th smallest of m p values has the bound alpha / (m - k + 1). The method stops at the first
    p value above its bound.
    """
    rejected = []
    m = len(p_values)
    for k, p in enumerate(sorted(p_values), start=1):
        if p > alpha / (m - k + 1):
            break
        rejected.append(p)
    return rejected


def test_no_number_of_pairs_finds_a_difference_that_tuning_may_hide():
    eight = paired_test(EIGHT)
    tuned = dataclasses.replace(eight, tuning_low=0.01)
    assert inference.to_find(tuned, -0.01) is None
    assert inference.to_find(tuned, 0.01) == inference.to_find(eight, -0.01)


def test_a_single_pair_gives_no_number_of_pairs():
    assert inference.to_find(paired_test([0.1]), 0.01) is None


def test_holm_rejects_what_its_definition_rejects():
    rng = np.random.default_rng(6)
    for _ in range(300):
        num_tests = rng.integers(1, 8)
        p_values = rng.beta(0.3, 3.0, num_tests).tolist()
        adjusted_p_values = holm(p_values)
        for alpha in (0.01, 0.05, 0.3):
            rejected = rejected_by_definition(p_values, alpha)
            for p, adjusted_p in zip(p_values, adjusted_p_values, strict=True):
                assert (adjusted_p <= alpha) == (p in rejected)


def test_holm_adjusts_p_values_to_at_most_one():
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def difference_around(mean, spread=0.001, num_pairs=8, **keywords):
    """The difference of pairs that alternate between mean + spread and mean - spread."""
    values = [mean + spread, mean - spread] * (num_pairs // 2)
    return paired_test(values, **keywords)


@pytest.mark.parametrize(
    # `decided` is the decision without diverged trials. The other two are the decisions if trials
    # of the arm or of the baseline diverged. The margin is 0.005. Below zero is better.
    ('compared', 'decided', 'arm_diverged', 'baseline_diverged'),
    [
        pytest.param(
            difference_around(-0.02), BETTER, UNDECIDED, BETTER, id='below minus the margin'
        ),
        pytest.param(difference_around(0.02), WORSE, WORSE, UNDECIDED, id='above the margin'),
        pytest.param(
            difference_around(-0.006, spread=0.003),
            BETTER_OPEN,
            UNDECIDED,
            BETTER_OPEN,
            id='below zero, perhaps within the margin',
        ),
        pytest.param(
            difference_around(0.006, spread=0.003),
            WORSE_OPEN,
            WORSE_OPEN,
            UNDECIDED,
            id='above zero, perhaps within the margin',
        ),
        pytest.param(difference_around(0.0), EQUIVALENT, UNDECIDED, UNDECIDED, id='zero'),
        pytest.param(
            difference_around(0.003),
            EQUIVALENT,
            WORSE_OPEN,
            UNDECIDED,
            id='above zero within the margin',
        ),
        pytest.param(
            difference_around(0.001, spread=0.05),
            UNDECIDED,
            UNDECIDED,
            UNDECIDED,
            id='too noisy for any decision',
        ),
        # `tuning` bounds how far the losses of arm and baseline exceed their best losses.
        pytest.param(
            difference_around(-0.02, tuning=(0.1, 0.0)),
            BETTER,
            UNDECIDED,
            BETTER,
            id='the arm may be even better',
        ),
        pytest.param(
            difference_around(-0.02, tuning=(0.0, 0.016)),
            BETTER_OPEN,
            UNDECIDED,
            BETTER_OPEN,
            id='the baseline may be better by less than the difference',
        ),
        pytest.param(
            difference_around(-0.02, tuning=(0.0, np.inf)),
            UNDECIDED,
            UNDECIDED,
            UNDECIDED,
            id='the baseline may be better by any amount',
        ),
    ],
)
def test_a_decision_is_never_better_for_an_arm_that_diverged(
    compared, decided, arm_diverged, baseline_diverged
):
    """Diverged trials are left out of the mean, which makes the loss of their side too low.

    So an arm with diverged trials is never better. No arm is worse than a baseline with diverged
    trials. With diverged trials on either side, no arm is equivalent.
    """

    def decision_where_trials_diverged(of_arm, of_baseline):
        """The decision, given how many trials of the arm and of the baseline diverged."""
        judged = judge({'arm': compared}, diverged={'arm': (of_arm, of_baseline)})
        return judged['arm'].decision

    assert decision_where_trials_diverged(of_arm=0, of_baseline=0) is decided
    assert decision_where_trials_diverged(of_arm=1, of_baseline=0) is arm_diverged
    assert decision_where_trials_diverged(of_arm=0, of_baseline=2) is baseline_diverged
    assert decision_where_trials_diverged(of_arm=1, of_baseline=1) is UNDECIDED


def assert_judged_in_the_family(judged, difference, alpha, num_remaining):
    """Checks the three corrected p values of an arm against a level alpha.

    `p` tests for a difference from zero, and `p_margin` for a difference beyond the margin.
    `p_equivalence` tests for a difference within the margin. An arm with p_margin <= alpha leaves
    the family of arms that share alpha.

    Args:
        judged: The judgement of the arm among all arms, with corrected p values.
        difference: The difference of the arm, with p values that are not corrected.
        alpha: The level of all arms together.
        num_remaining: How many arms have not left the family.
    """
    # `judge` tests the first look at a study at 0.8 alpha, so it divides p values by 0.8.
    fraction = level(1) / ALPHA
    p = fraction * judged.p_holm
    p_equivalence = fraction * judged.p_equivalence_holm
    p_margin = fraction * judged.p_margin_holm

    has_left_family = p_margin <= alpha
    if has_left_family:
        # A difference beyond the margin is not zero, and is not within the margin.
        assert p <= alpha
        assert p_equivalence > alpha
    else:
        # The remaining arms have equal shares of alpha (Bonferroni).
        shared_alpha = alpha / num_remaining
        assert (p <= alpha) == (difference.p <= shared_alpha)
        assert (p_equivalence <= alpha) == (difference.p_equivalence <= shared_alpha)


def test_an_arm_leaves_the_family_when_it_differs_by_more_than_the_margin():
    """The arms of a study share alpha, the probability of any false decision.

    An arm that differs by more than the margin leaves the family. The other arms then share all of
    alpha. For the margin tests, this is Holm's method.
    """
    rng = np.random.default_rng(11)
    # `judge` tests the first look at a study at 0.8 alpha, so it divides p values by 0.8.
    fraction = level(1) / ALPHA
    for _ in range(100):
        means = rng.choice([-0.03, -0.01, 0.0, 0.004], 5)
        differences = {}
        for arm, mean in enumerate(means):
            values_of_seeds = rng.normal(mean, 0.01, 8)
            differences[arm] = paired_test(values_of_seeds)
        judged = judge(differences)

        p_margins = holm([difference.p_margin for difference in differences.values()])
        for arm, p_margin in enumerate(p_margins):
            expected = min(1.0, p_margin / fraction)
            assert judged[arm].p_margin_holm == pytest.approx(expected)

        for alpha in (0.01, 0.05, 0.2):
            num_remaining = sum(p_margin > alpha for p_margin in p_margins)
            for arm, difference in differences.items():
                assert_judged_in_the_family(judged[arm], difference, alpha, num_remaining)
