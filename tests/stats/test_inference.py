"""Differences: closed forms against scipy, and coverage in simulations."""

import dataclasses
import functools
import math
import warnings

import numpy as np
import pytest
from scipy import stats as scipy_stats

from qkattn.stats import inference

SEEDS = 8

# Closed forms.


def test_an_estimate_is_the_t_interval_of_scipy():
    values = [2.31, 2.35, 2.28, 2.40]
    found = inference.estimate(values)
    interval = scipy_stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx(tuple(interval))
    assert (found.mean, found.n, found.sd) == pytest.approx((2.335, 4, np.std(values, ddof=1)))
    assert inference.estimate([2.0]) == inference.Estimate(2.0, 1, None, None, None)


@pytest.mark.parametrize('mean', [-0.02, -0.004, 0.0, 0.003, 0.009])
@pytest.mark.parametrize(('n_arm', 'n_baseline'), [(9, None), (8, 8), (4, 11), (12, 3)])
def test_a_difference_is_scipys_t_test_and_its_two_one_sided_ones(mean, n_arm, n_baseline):
    """Paired, or of unequal variances (Welch) where the baseline has seeds of its own."""
    margin, rng = 0.006, np.random.default_rng(4)  # whose values lie together
    arm, baseline = rng.normal(mean, 0.004, n_arm), rng.normal(0.0, 0.002, n_baseline or n_arm)
    if n_baseline is None:
        found = inference.paired(arm - baseline, margin, resamples=None)
        test, sd = scipy_stats.ttest_rel, np.std(arm - baseline, ddof=1)
    else:
        found = inference.welch(arm, baseline, margin, resamples=None)
        test = functools.partial(scipy_stats.ttest_ind, equal_var=False)
        sd = (np.var(arm, ddof=1) + np.var(baseline, ddof=1)) ** 0.5
    expected = test(arm, baseline)
    above = test(arm + margin, baseline, alternative='greater').pvalue
    below = test(arm - margin, baseline, alternative='less').pvalue
    ends = tuple(expected.confidence_interval(0.95))
    assert (found.low, found.high, found.df) == pytest.approx((*ends, expected.df))
    assert (found.p, found.p_equivalence) == pytest.approx((expected.pvalue, max(above, below)))
    assert (found.mean, found.sd) == pytest.approx((np.mean(arm) - np.mean(baseline), sd))
    assert (found.n, found.margin) == (min(n_arm, n_baseline or n_arm), margin)
    assert found.paired == (n_baseline is None)


def test_a_finding_holds_with_and_without_the_values_that_lie_apart():
    values = [-0.012, -0.008, -0.015, -0.006, -0.011, -0.009, -0.010]
    alone = inference.paired(values, resamples=None)
    assert alone.typical is None and alone.p < 0.001
    found = inference.paired([*values, 0.06], resamples=None)
    assert found.typical == alone and (found.n, alone.n) == (8, 7)
    assert found.p == pytest.approx(scipy_stats.ttest_1samp([*values, 0.06], 0).pvalue)
    assert found.p > 0.5 and found.detectable > alone.detectable
    # The other way round: a shift that a few of many values make is no finding.
    rng = np.random.default_rng(0)
    shifted = [*rng.normal(0, 0.01, 72), *rng.normal(0.2, 0.01, 8)]
    found = inference.paired(shifted, resamples=None)
    assert scipy_stats.ttest_1samp(shifted, 0).pvalue < 0.01 < 0.1 < found.p == found.typical.p
    assert found.low == found.typical.low < 0 < found.typical.high < found.high
    # Sides must agree.
    turned = inference.paired([-1.01, -1.0, -0.99, -1.0, -0.98, 9.0, 9.1], resamples=None)
    assert turned.mean > 0 > turned.typical.mean and (turned.p, turned.p_margin) == (1.0, 1.0)
    # Samples that are not paired each lose theirs.
    both = inference.welch([*values, 0.06], [v + 0.001 for v in values], resamples=None)
    assert (both.n, both.typical.n) == (7, 7) and both.typical.mean == pytest.approx(-0.001)


def test_values_lie_apart_by_the_median_absolute_deviation():
    limit = 5 * 1.4826  # of 0 and +-1, whose median absolute deviation is 1
    for last, apart in ((limit - 0.01, False), (limit + 0.01, True)):
        sample = (-1.0, -1.0, 0.0, 1.0, 1.0, 0.0, -1.0, 0.0, last)
        assert inference.typical(sample) == (sample[:-1] if apart else sample)
    assert inference.typical((0.0, 0.1, 9.0)) == (0.0, 0.1, 9.0)  # too few
    assert inference.typical((1.0, 1.0, 1.0, 9.0)) == (1.0, 1.0, 1.0, 9.0)  # no spread to tell by


@pytest.mark.parametrize(('n', 'share'), [(4, 0.1), (8, 0.05), (16, 0.02), (80, 0.004)])
def test_normal_values_seldom_lie_apart(n, share):
    rng, count = np.random.default_rng(5), 4000
    apart = sum(len(inference.typical(row)) < n for row in rng.normal(0, 1, (count, n)).tolist())
    assert apart <= share * count + 4 * (share * count) ** 0.5


@pytest.mark.parametrize('df', [1, 2, 7, 14, 60])
@pytest.mark.parametrize('alpha', [0.05, 0.05 / 6])
def test_the_detectable_difference_has_the_power_of_the_noncentral_t(df, alpha):
    median = scipy_stats.chi(df).median() / df**0.5  # of an estimate of the error 1
    error = 0.003
    noncentrality = inference.detectable_difference(median * error, df, alpha) / error
    critical = scipy_stats.t.isf(alpha / 2, df)
    power = scipy_stats.nct.sf(critical, df, noncentrality)
    assert power == pytest.approx(inference.POWER, abs=1e-5)


def test_the_error_over_documents_adds_to_that_over_seeds():
    values, error, df = [-0.012, -0.008, -0.015, -0.006, -0.011], 0.0015, 20.0
    alone = inference.paired(values, resamples=None)
    found = inference.paired(values, evaluation_error=error, evaluation_df=df, resamples=None)
    assert (found.error_seeds, found.error_evaluation) == (alone.error_seeds, error)
    total = (alone.error_seeds**2 + error**2) ** 0.5
    own = total**4 / (alone.error_seeds**4 / 4 + error**4 / 20)  # Satterthwaite
    assert 4 < own < 24 and found.df == pytest.approx(own)
    expected = scipy_stats.t.interval(0.95, own, found.mean, total)
    assert (found.low, found.high) == pytest.approx(expected)
    assert found.p == pytest.approx(2 * scipy_stats.t.cdf(found.mean / total, own))
    # An error that is known exactly costs no degrees of freedom.
    exact = inference.paired(values, evaluation_error=error, resamples=None)
    assert exact.df == pytest.approx(total**4 / (alone.error_seeds**4 / 4))
    arm, baseline = [2.01, 2.03, 2.02], [2.0, 2.01, 1.99]
    apart = inference.welch(arm, baseline, evaluation_error=error, resamples=None)
    assert apart.error_seeds == pytest.approx((2 * np.var([1, 2, 3], ddof=1) / 3) ** 0.5 / 100)
    assert apart.error_evaluation == error and apart.df > 4


def test_documents_of_equal_size_are_a_sample_of_independent_values():
    nats_SC = np.random.default_rng(2).normal(0, 3.0, (4, 12))
    error, df = inference.evaluation_error(nats_SC, np.full(12, 500))
    assert error == pytest.approx(scipy_stats.sem(nats_SC.mean(axis=0) / 500))
    assert df == pytest.approx(11)
    # Two halves of a document are not two documents, and a large one counts for less than its size.
    tokens_C = np.array([4000, 500, 500, 1000])
    own_C = np.array([0.01, -0.02, 0.03, 0.0])
    share_C = tokens_C / 6000
    mean = share_C @ own_C
    expected = sum(w**2 * (d - mean) ** 2 / (1 - w) for w, d in zip(share_C, own_C, strict=True))
    error, df = inference.evaluation_error((own_C * tokens_C)[None], tokens_C)
    assert error == pytest.approx(expected**0.5)
    assert df == pytest.approx(np.sum(share_C**2) ** 2 / np.sum(share_C**4) - 1)
    assert 0 < df < 1


def test_documents_that_differ_by_rounding_alone_have_no_error():
    tokens_C = np.arange(1, 13) * 137.0
    nats_SC = np.outer([0.1, 0.1], tokens_C) / 3
    assert len(set((nats_SC.mean(axis=0) / tokens_C).tolist())) > 1
    assert inference.evaluation_error(nats_SC, tokens_C)[0] == 0
    assert inference.evaluation_error(nats_SC * (1 + 1e-9 * tokens_C), tokens_C)[0] > 0


@pytest.mark.parametrize('sign', [1, -1])
def test_what_tuning_may_have_missed_widens_the_interval_and_weakens_the_tests(sign):
    values = [sign * (0.02 + 0.001 * (-1) ** i) for i in range(8)]
    plain = inference.paired(values, resamples=None)
    low, high = (0.004, 0.007)[::sign]
    found = inference.paired(values, tuning=(low, high), resamples=None)
    assert (found.low, found.high) == pytest.approx((plain.low - low, plain.high + high))
    assert (found.tuning_low, found.tuning_high) == (low, high)
    # Towards zero by 0.004, away from it by 0.007.
    nearer = inference.paired([value - sign * 0.004 for value in values], resamples=None)
    assert found.p == pytest.approx(nearer.p) and found.p_margin == pytest.approx(nearer.p_margin)
    farther = inference.paired([v + sign * 0.007 for v in values], 0.03, resamples=None)
    wide = inference.paired(values, 0.03, tuning=(low, high), resamples=None)
    assert wide.p_equivalence == pytest.approx(farther.p_equivalence)
    assert found.detectable == pytest.approx(plain.detectable + 0.011)
    # More than the difference: nothing is shown; nothing bounds it: neither.
    for miss in (0.03, np.inf):
        lost = inference.paired(values, tuning=(miss, miss), resamples=None)
        assert (lost.p, lost.p_margin) == (1.0, 1.0) and lost.p_equivalence > 0.99
        assert lost.low < 0 < lost.high


def test_a_margin_test_counts_a_wrong_sign_as_false():
    """Its p value is that of the difference for no margin, and one-sided for a wide one."""
    values = [-0.012, -0.008, -0.015, -0.006, -0.011]
    found = [inference.paired(values, margin, resamples=None) for margin in (1e-9, 0.005, 0.01)]
    assert found[0].p_margin == pytest.approx(found[0].p, rel=1e-4)
    error, mean = found[0].error_seeds, found[0].mean
    beyond = scipy_stats.t.sf((-mean - 0.005) / error, 4)
    assert found[1].p_margin == pytest.approx(beyond + found[1].p / 2)
    assert found[0].p_margin < found[1].p_margin < found[2].p_margin


def test_few_seeds_leave_blanks():
    single = inference.paired([0.01])
    assert (single.mean, single.n, single.paired) == (0.01, 1, True)
    blank = ('sd', 'low', 'high', 'p', 'p_equivalence', 'detectable', 'df', 'bootstrap_low')
    assert all(getattr(single, field) is None for field in blank)
    assert all(getattr(inference.welch([0.01], [0.0, 0.1]), field) is None for field in blank)
    two = inference.paired([0.01, 0.02])
    assert two.bootstrap_low is None and two.p is not None


# The same number but for its last bits; numpy's mean of three 0.1 is not 0.1.
NEARLY = [0.1, 0.1, 0.1], [0.25, 0.25 + 2**-54, 0.25 - 2**-54, 0.25], [3.3, 3.3 + 2**-51, 3.3]


@pytest.mark.parametrize('values', [[0.0] * 4, [0.25] * 4, *NEARLY], ids=str)
def test_a_spread_that_is_only_rounding_is_none_and_warns_of_nothing(values):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        estimated, found = inference.estimate(values), inference.paired(values)
        unpaired = inference.welch([2 + value for value in values], [2.0] * 5)
        one_sided = inference.welch(values, [0.1, 0.2, 0.3])
    zero = float(values[0] == 0)
    mean = pytest.approx(values[0], abs=1e-14)
    assert (estimated.sd, found.sd, unpaired.sd, unpaired.detectable) == (0.0, 0.0, 0.0, 0.0)
    assert estimated.low == estimated.high == mean
    for one in (found, unpaired):
        assert (one.p, one.p_equivalence, one.detectable) == (zero, 1.0 - zero, 0.0)
        assert one.low == one.high == one.mean == mean
        assert (one.bootstrap_low, one.bootstrap_high) == (mean, mean)
    # The spread of the other group alone: of three values 0.1 apart.
    assert (one_sided.sd, one_sided.df) == pytest.approx((0.1, 2.0))


def test_the_bootstrap_is_scipys_bca_and_repeats():
    rng = np.random.default_rng(5)
    arm, baseline = rng.exponential(1.0, 12), rng.exponential(1.0, 10)
    one = inference.paired(arm)
    assert one == inference.paired(arm)
    expected = scipy_stats.bootstrap((arm,), np.mean, method='BCa', rng=np.random.default_rng(9))
    ends = (one.bootstrap_low, one.bootstrap_high)
    assert ends == pytest.approx(tuple(expected.confidence_interval), abs=0.03)
    assert ends[1] - one.mean > one.mean - ends[0]  # skewed as the values are
    two = inference.welch(arm, baseline)
    assert two.bootstrap_low < two.mean < two.bootstrap_high
    assert (two.bootstrap_low, two.bootstrap_high) == pytest.approx((two.low, two.high), abs=0.35)


def test_the_bootstrap_does_not_depend_on_how_means_of_permutations_are_rounded():
    """With three values, two of nine resamples have the mean of the sample itself."""
    values = np.array([0.031, 0.0274, 0.0402])
    expected = inference.bootstrap(values)
    for shift in range(1, 9):
        ends = np.subtract(inference.bootstrap(values + shift), shift)
        assert tuple(ends) == pytest.approx(expected, abs=1e-12), shift
        apart = np.add(values, shift), [float(shift)] * 3
        assert inference.bootstrap(*apart) == pytest.approx(expected, abs=1e-12), shift


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda: inference.paired([]), 'differences is'),
        (lambda: inference.paired([0.1, float('nan')]), 'differences is'),
        (lambda: inference.welch([0.1], []), 'baseline is'),
        (lambda: inference.paired([0.1], margin=0.0), 'margin is 0.0'),
        (lambda: inference.paired([0.1], evaluation_error=-1.0), 'evaluation_error, tuning are -1'),
        (
            lambda: inference.paired([0.1], tuning=(0.0, float('nan'))),
            r'tuning are 0.0, \(0.0, nan',
        ),
        (lambda: inference.evaluation_error(np.ones((2, 3)), np.ones(2)), r'\(2, 3\) and \(2,\)'),
        (lambda: inference.evaluation_error(np.ones((2, 1)), np.ones(1)), 'at least two documents'),
        (lambda: inference.evaluation_error(np.ones((2, 2)), np.zeros(2)), 'must have tokens'),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Holm.


def within(rate, expected, trials, errors=4.0):
    """Whether a simulated rate lies within `errors` binomial standard errors of the expected."""
    return abs(rate - expected) <= errors * (expected * (1 - expected) / trials) ** 0.5


def paired(values):
    """`inference.paired` of every row, by scipy's tests of all rows at once.

    Rows of which some values lie apart go through `inference.paired`.
    """
    n, sd, margin = values.shape[-1], values.std(axis=-1, ddof=1), inference.MARGIN
    mean, error = values.mean(axis=-1), sd / n**0.5
    test = functools.partial(scipy_stats.ttest_1samp, axis=-1)
    interval = test(values, 0.0).confidence_interval(0.95)
    above = test(values, -margin, alternative='greater').pvalue
    below = test(values, margin, alternative='less').pvalue
    p, beyond = test(values, 0.0).pvalue, scipy_stats.t.sf((abs(mean) - margin) / error, n - 1)
    columns = {
        **{'mean': mean, 'sd': sd, 'low': interval[0], 'high': interval[1], 'p': p},
        **{'p_margin': np.minimum(beyond + p / 2, 1), 'p_equivalence': np.maximum(above, below)},
        **{'p_not_better': above, 'p_not_worse': below},
        **{'detectable': inference.detectable_difference(1.0, n - 1) * error, 'error_seeds': error},
    }
    exact = {'n': n, 'bootstrap_low': None, 'bootstrap_high': None, 'error_evaluation': 0.0}
    exact |= {'tuning_low': 0.0, 'tuning_high': 0.0, 'paired': True, 'margin': margin, 'df': n - 1}
    rows = [
        inference.Difference(**exact, **dict(zip(columns, row, strict=True)))
        for row in np.stack(list(columns.values()), axis=-1).tolist()
    ]
    for i, row in enumerate(values):
        if len(inference.typical(row)) < n:
            rows[i] = inference.paired(row, resamples=None)
        elif i < 5:
            expected = dataclasses.astuple(inference.paired(row, resamples=None))
            assert dataclasses.astuple(rows[i]) == pytest.approx(expected)
    return rows


def test_t_intervals_cover_the_truth():
    count, rng = 3000, np.random.default_rng(7)
    found = paired(rng.normal(0.01, 0.02, (count, SEEDS)))
    assert within(np.mean([d.low <= 0.01 <= d.high for d in found]), inference.LEVEL, count)
    arm, baseline = rng.normal(0.01, 0.04, (count, 5)), rng.normal(0, 0.01, (count, 9))
    low, high = scipy_stats.ttest_ind(arm, baseline, axis=1, equal_var=False).confidence_interval()
    first = inference.welch(arm[0], baseline[0], resamples=None)
    assert (first.low, first.high) == pytest.approx((low[0], high[0]))
    assert within(np.mean((low <= 0.01) & (0.01 <= high)), inference.LEVEL, count)


@pytest.mark.parametrize(('n', 'expected'), [(8, 0.885), (30, 0.93)])
def test_bootstrap_intervals_cover_less_at_few_seeds(n, expected):
    count = 600
    values = np.random.default_rng(8).normal(0.01, 0.02, (count, n))
    ends = [inference.bootstrap(x, resamples=999) for x in values]
    assert within(np.mean([low <= 0.01 <= high for low, high in ends]), expected, count, errors=3)


# The seeds and documents that a difference takes

DIFFERENCES = [0.01, 0.03, -0.01, 0.02, 0.0, 0.01, 0.02, -0.02]
FOUND = inference.paired(DIFFERENCES, resamples=None)


def test_pairs_that_find_what_these_pairs_can_find_are_as_many():
    assert inference.to_find(FOUND, FOUND.detectable * (1 + 1e-9)) == (len(DIFFERENCES), 1.0)


def test_half_the_size_takes_about_four_times_as_many_pairs():
    many, documents = inference.to_find(FOUND, 0.001)
    more, _ = inference.to_find(FOUND, 0.0005)
    assert documents == 1 and more / many == pytest.approx(4, rel=0.01)


def test_documents_are_added_where_pairs_do_not_suffice():
    found = inference.paired(DIFFERENCES, evaluation_error=0.01, evaluation_df=100, resamples=None)
    pairs, documents = inference.to_find(found, 0.01)
    error = math.hypot(found.sd / pairs**0.5, 0.01 / documents**0.5)
    assert documents > 1 and error == pytest.approx(0.01 / (1.96 + 0.84), rel=0.02)


def test_nothing_finds_what_tuning_may_hide():
    assert inference.to_find(dataclasses.replace(FOUND, tuning_low=0.01), 0.01) is None
    assert inference.to_find(inference.paired([0.1], resamples=None), 0.01) is None
