"""Differences and decisions: closed forms against scipy, and error rates in simulated studies."""

import itertools
import warnings

import numpy as np
import pytest
from scipy import stats as scipy_stats

from qkattn.stats import inference
from qkattn.stats.inference import Decision, Judgement

SEEDS = 8
ARMS = 6


def _within(rate, expected, trials, errors=4.0):
    """Whether a simulated rate lies within `errors` binomial standard errors of the expected."""
    return abs(rate - expected) <= errors * (expected * (1 - expected) / trials) ** 0.5


def _studies(count, true=(0.0,) * ARMS, sd=0.02, rng_seed=0):
    """Simulated studies: arms' losses minus those of a baseline that they share, by seed."""
    rng = np.random.default_rng(rng_seed)
    arms = rng.normal(0.0, sd / 2**0.5, (count, len(true), SEEDS)) + np.array(true)[:, None]
    baseline = rng.normal(0.0, sd / 2**0.5, (count, 1, SEEDS))
    return arms - baseline


BETTER, WORSE, EQUIVALENT, UNDECIDED, _ = Decision


def _decisions(study):
    """The decisions on all arms of a study, and on its first arm alone."""
    differences = {i: inference.paired(arm, resamples=None) for i, arm in enumerate(study)}
    whole = [judged.decision for judged in inference.judge(differences).values()]
    return whole, inference.judge({0: differences[0]})[0].decision


# Closed forms.


def test_an_estimate_is_the_t_interval_of_scipy():
    values = [2.31, 2.35, 2.28, 2.40]
    found = inference.estimate(values)
    interval = scipy_stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx(tuple(interval))
    assert (found.mean, found.n, found.sd) == pytest.approx((2.335, 4, np.std(values, ddof=1)))
    assert inference.estimate([2.0]) == inference.Estimate(2.0, 1, None, None, None)


def test_a_paired_difference_is_the_paired_t_test_of_scipy():
    rng = np.random.default_rng(1)
    arm, baseline = rng.normal(2.01, 0.02, 7), rng.normal(2.0, 0.02, 7)
    found = inference.paired(arm - baseline, resamples=None)
    expected = scipy_stats.ttest_rel(arm, baseline)
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert (found.df, found.n, found.paired) == (6, 7, True)
    assert found.mean == pytest.approx(np.mean(arm) - np.mean(baseline))


@pytest.mark.parametrize(('n_arm', 'n_baseline'), [(8, 8), (4, 11), (12, 3)])
def test_an_unpaired_difference_is_the_welch_test_of_scipy(n_arm, n_baseline):
    rng = np.random.default_rng(2)
    arm, baseline = rng.normal(2.01, 0.04, n_arm), rng.normal(2.0, 0.01, n_baseline)
    found = inference.welch(arm, baseline, resamples=None)
    expected = scipy_stats.ttest_ind(arm, baseline, equal_var=False)
    assert found.p == pytest.approx(expected.pvalue)
    assert found.df == pytest.approx(expected.df)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert (found.n, found.paired) == (min(n_arm, n_baseline), False)
    assert found.sd == pytest.approx((np.var(arm, ddof=1) + np.var(baseline, ddof=1)) ** 0.5)


@pytest.mark.parametrize('mean', [-0.02, -0.004, 0.0, 0.003, 0.009])
def test_equivalence_is_two_one_sided_tests(mean):
    rng = np.random.default_rng(3)
    arm, baseline = rng.normal(mean, 0.004, 9), rng.normal(0.0, 0.002, 6)
    margin = 0.006
    above = scipy_stats.ttest_1samp(arm, -margin, alternative='greater').pvalue
    below = scipy_stats.ttest_1samp(arm, margin, alternative='less').pvalue
    found = inference.paired(arm, margin, resamples=None)
    assert found.p_equivalence == pytest.approx(max(above, below))
    assert found.margin == margin
    above = scipy_stats.ttest_ind(
        arm + margin, baseline, equal_var=False, alternative='greater'
    ).pvalue
    below = scipy_stats.ttest_ind(
        arm - margin, baseline, equal_var=False, alternative='less'
    ).pvalue
    found = inference.welch(arm, baseline, margin, resamples=None)
    assert found.p_equivalence == pytest.approx(max(above, below))


def test_equivalence_at_5_percent_is_the_90_percent_interval_inside_the_margin():
    for differences in np.random.default_rng(4).normal(0.002, 0.004, (200, 6)):
        found = inference.paired(differences, resamples=None)
        ends = scipy_stats.ttest_1samp(differences, 0.0).confidence_interval(0.9)
        assert (found.p_equivalence < 0.05) == (-0.005 < ends.low and ends.high < 0.005)


@pytest.mark.parametrize('df', [1, 2, 7, 14, 60])
@pytest.mark.parametrize('alpha', [0.05, 0.05 / 6])
def test_the_detectable_difference_has_the_power_of_the_noncentral_t(df, alpha):
    error = 0.003
    noncentrality = inference.detectable_difference(error, df, alpha) / error
    critical = scipy_stats.t.isf(alpha / 2, df)
    assert scipy_stats.nct.sf(critical, df, noncentrality) == pytest.approx(
        inference.POWER, abs=1e-5
    )


def test_few_seeds_leave_blanks_and_no_spread_leaves_no_nan():
    single = inference.paired([0.01])
    assert (single.mean, single.n, single.paired) == (0.01, 1, True)
    blank = ('sd', 'low', 'high', 'p', 'p_equivalence', 'detectable', 'df', 'bootstrap_low')
    assert all(getattr(single, field) is None for field in blank)
    assert all(getattr(inference.welch([0.01], [0.0, 0.1]), field) is None for field in blank)
    two = inference.paired([0.01, 0.02])
    assert two.bootstrap_low is None and two.p is not None
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        same, apart = inference.paired([0.0] * 4), inference.paired([0.25] * 4)
        unpaired = inference.welch([2.25] * 3, [2.0] * 5)
    assert (same.p, same.p_equivalence, same.low, same.high) == (1.0, 0.0, 0.0, 0.0)
    assert (same.bootstrap_low, same.bootstrap_high, same.detectable) == (0.0, 0.0, 0.0)
    for found in (apart, unpaired):
        assert (found.p, found.p_equivalence) == (0.0, 1.0)
        assert (found.low, found.high, found.bootstrap_low) == (0.25, 0.25, 0.25)


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


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda: inference.paired([]), 'differences is'),
        (lambda: inference.paired([0.1, float('nan')]), 'differences is'),
        (lambda: inference.welch([0.1], []), 'baseline is'),
        (lambda: inference.paired([0.1], margin=0.0), 'margin is 0.0'),
        (lambda: inference.holm([0.1, 1.2]), 'p_values holds 1.2'),
        (lambda: inference.holm([float('nan')]), 'p_values holds nan'),
        (lambda: inference.judge({'a': None}, diverged={'b': (1, 0)}), r"diverged names \['b'\]"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Holm.


def test_holm_on_a_worked_example():
    # Four tests: 4 x 0.005; 3 x 0.01 ; 2 x 0.03; then 1 x 0.04 raised to its predecessor's 0.06.
    assert inference.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert inference.holm([0.5, 0.9]) == [1.0, 1.0]
    assert inference.holm([0.02]) == [0.02]
    assert inference.holm([]) == []


def test_holm_rejects_what_its_definition_rejects():
    """Step down: reject while p_(k) <= alpha / (m - k + 1), and nothing after the first failure."""
    rng = np.random.default_rng(6)
    for _ in range(300):
        p_values = rng.beta(0.3, 3.0, rng.integers(1, 8)).tolist()
        adjusted = inference.holm(p_values)
        for alpha in (0.01, 0.05, 0.3):
            ascending = sorted(p_values)
            steps = [p <= alpha / (len(ascending) - k) for k, p in enumerate(ascending)]
            rejected = ascending[: len(list(itertools.takewhile(bool, steps)))]
            assert [p in rejected for p in p_values] == [p <= alpha for p in adjusted]


# Decisions.


def _difference(mean, spread=0.001, n=8):
    """Differences of the given mean with alternating deviations of `spread`."""
    return inference.paired([mean + spread * (-1) ** i for i in range(n)], resamples=None)


def test_the_decisions():
    noisy = _difference(0.001, spread=0.05)
    judged = inference.judge(
        {
            'lower': _difference(-0.02),
            'higher': _difference(0.02),
            'same': _difference(0.0),
            'near': _difference(0.003),
            'noisy': noisy,
        }
    )
    assert [judgement.decision for judgement in judged.values()] == [
        BETTER,
        WORSE,
        EQUIVALENT,
        EQUIVALENT,
        UNDECIDED,
    ]
    assert judged['near'].p_holm < 0.001
    error = np.std([0.05, -0.05] * 4, ddof=1) / 8**0.5
    assert judged['noisy'].detectable == pytest.approx(
        inference.detectable_difference(error, 7, 0.05 / 5)
    )
    assert judged['noisy'].detectable > noisy.detectable
    assert inference.judge({'lower': _difference(-0.02)})['lower'].decision is BETTER


def test_p_values_are_adjusted_apart_for_differences_and_for_equivalence():
    differences = {str(i): _difference(0.002 * i, spread=0.006) for i in range(5)}
    verdicts = inference.judge(differences)
    expected = inference.holm([d.p for d in differences.values()])
    assert [v.p_holm for v in verdicts.values()] == expected
    expected = inference.holm([d.p_equivalence for d in differences.values()])
    assert [v.p_equivalence_holm for v in verdicts.values()] == expected


def test_the_level_decides():
    difference = {'arm': inference.paired([0.01, 0.02, 0.005, 0.03, 0.012], resamples=None)}
    assert 0.01 < difference['arm'].p < 0.05
    assert inference.judge(difference)['arm'].decision is WORSE
    assert inference.judge(difference, level=0.99)['arm'].decision is UNDECIDED


def test_fewer_than_three_pairs_decide_nothing_and_do_not_count_as_a_test():
    arm = _difference(0.02)
    judged = inference.judge({'a': arm, 'two': _difference(0.02, 1e-9, n=2), 'none': None})
    assert judged['a'].p_holm == arm.p
    assert judged['two'] == judged['none'] == Judgement(UNDECIDED, None, None, None)
    assert inference.judge({'three': _difference(0.02, 1e-4, n=3)})['three'].decision is WORSE


@pytest.mark.parametrize(
    ('mean', 'diverged', 'decision'),
    [
        (-0.02, (1, 0), UNDECIDED),
        (0.02, (1, 0), WORSE),
        (0.0, (1, 0), UNDECIDED),
        (0.003, (1, 0), WORSE),  # not equivalent any more, and significantly above zero
        (-0.02, (0, 2), BETTER),
        (0.02, (0, 2), UNDECIDED),
        (0.0, (0, 2), UNDECIDED),
        (-0.02, (1, 1), UNDECIDED),
        (0.02, (1, 1), UNDECIDED),
        (0.0, (0, 0), EQUIVALENT),
    ],
)
def test_divergence_never_helps(mean, diverged, decision):
    judged = inference.judge({'arm': _difference(mean)}, diverged={'arm': diverged})
    assert judged['arm'].decision is decision


# Simulated studies.


def test_studies_without_a_difference_rarely_find_one():
    count = 1000
    decided = [_decisions(study) for study in _studies(count)]
    rate = np.mean([bool({BETTER, WORSE} & set(whole)) for whole, _ in decided])
    assert rate <= 0.05 or _within(rate, 0.05, count)
    assert rate >= 0.02  # Holm over arms that share a baseline costs power, not all of it
    assert _within(np.mean([alone is not UNDECIDED for _, alone in decided]), 0.05, count)


def test_studies_at_the_margin_are_rarely_equivalent():
    count = 1000
    studies = _studies(count, true=(inference.MARGIN,) * ARMS, sd=0.003)
    decided = [_decisions(study) for study in studies]
    rate = np.mean([EQUIVALENT in whole for whole, _ in decided])
    assert rate <= 0.05 or _within(rate, 0.05, count)
    assert _within(np.mean([alone is EQUIVALENT for _, alone in decided]), 0.05, count)


def test_equal_arms_with_little_noise_are_equivalent():
    decisions = [d for study in _studies(200, sd=0.003) for d in _decisions(study)[0]]
    assert decisions.count(EQUIVALENT) >= 0.95 * len(decisions)


def test_effects_of_the_detectable_size_are_found_four_times_in_five():
    count, sd = 1000, 0.01
    error = sd / SEEDS**0.5
    effect = inference.detectable_difference(error, SEEDS - 1)
    studies = _studies(count, true=(-effect,), sd=sd)
    rate = np.mean([_decisions(study)[0] == [BETTER] for study in studies])
    assert _within(rate, inference.POWER, count)
    # `detectable` of a judgement holds for the strictest level: one effect among arms without any.
    effect = inference.detectable_difference(error, SEEDS - 1, 0.05 / ARMS)
    studies = _studies(count, true=(effect,) + (0.0,) * (ARMS - 1), sd=sd)
    rate = np.mean([_decisions(study)[0][0] is WORSE for study in studies])
    assert _within(rate, inference.POWER, count)


def test_t_intervals_cover_the_truth():
    count = 2000
    rng = np.random.default_rng(7)
    found = [inference.paired(x, resamples=None) for x in rng.normal(0.01, 0.02, (count, SEEDS))]
    assert _within(np.mean([d.low <= 0.01 <= d.high for d in found]), inference.LEVEL, count)
    pairs = zip(rng.normal(0.01, 0.04, (count, 5)), rng.normal(0, 0.01, (count, 9)), strict=True)
    found = [inference.welch(*pair, resamples=None) for pair in pairs]
    assert _within(np.mean([d.low <= 0.01 <= d.high for d in found]), inference.LEVEL, count)


@pytest.mark.parametrize(('n', 'expected'), [(8, 0.885), (30, 0.93)])
def test_bootstrap_intervals_cover_less_at_few_seeds(n, expected):
    count = 600
    values = np.random.default_rng(8).normal(0.01, 0.02, (count, n))
    ends = [inference.bootstrap(x, resamples=999) for x in values]
    assert _within(np.mean([low <= 0.01 <= high for low, high in ends]), expected, count, errors=3)


def test_comparisons_that_are_still_missing_are_corrected_for():
    differences = {'a': inference.paired([0.010, 0.012, 0.011, 0.013, 0.008], resamples=None)}
    alone = inference.judge(differences)['a']
    among = inference.judge(differences, planned=7)['a']
    assert among.p_holm == pytest.approx(7 * alone.p_holm)
    assert among.detectable > alone.detectable
    # The others come, and find nothing: the decision stays what it was.
    nothing = inference.paired([0.02, -0.02, 0.01, -0.01, 0.0], resamples=None)
    whole = inference.judge(differences | {str(i): nothing for i in range(6)}, planned=7)
    assert whole['a'] == among
