"""Differences and decisions: closed forms against scipy, and error rates in simulated studies."""

import dataclasses
import functools
import itertools
import warnings

import numpy as np
import pytest
from scipy import stats as scipy_stats

from qkattn.stats import inference
from qkattn.stats.inference import Decision, Judgement

SEEDS = 8
ARMS = 6
BETTER, WORSE, EQUIVALENT, UNDECIDED, _ = Decision

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
    margin, rng = 0.006, np.random.default_rng(3)
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


@pytest.mark.parametrize('df', [1, 2, 7, 14, 60])
@pytest.mark.parametrize('alpha', [0.05, 0.05 / 6])
def test_the_detectable_difference_has_the_power_of_the_noncentral_t(df, alpha):
    error = 0.003
    noncentrality = inference.detectable_difference(error, df, alpha) / error
    critical = scipy_stats.t.isf(alpha / 2, df)
    power = scipy_stats.nct.sf(critical, df, noncentrality)
    assert power == pytest.approx(inference.POWER, abs=1e-5)


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
    arms = {
        'lower': (_difference(-0.02), BETTER),
        'higher': (_difference(0.02), WORSE),
        'same': (_difference(0.0), EQUIVALENT),
        'near': (_difference(0.003), EQUIVALENT),
        'noisy': (_difference(0.001, spread=0.05), UNDECIDED),
    }
    differences = {arm: difference for arm, (difference, _) in arms.items()}
    judged = inference.judge(differences)
    for arm, (_, decision) in arms.items():
        assert judged[arm].decision is decision
    assert judged['near'].p_holm < 0.001
    # Differences and equivalence are two families.
    found = [(j.p_holm, j.p_equivalence_holm) for j in judged.values()]
    p_values = (
        [d.p for d in differences.values()],
        [d.p_equivalence for d in differences.values()],
    )
    assert found == list(zip(*map(inference.holm, p_values), strict=True))
    error = np.std([0.05, -0.05] * 4, ddof=1) / 8**0.5
    detectable = inference.detectable_difference(error, 7, 0.05 / 5)
    assert judged['noisy'].detectable == pytest.approx(detectable)
    assert detectable > differences['noisy'].detectable


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


# Simulated studies.


def _within(rate, expected, trials, errors=4.0):
    """Whether a simulated rate lies within `errors` binomial standard errors of the expected."""
    return abs(rate - expected) <= errors * (expected * (1 - expected) / trials) ** 0.5


def _paired(values):
    """`inference.paired` of every row, by scipy's tests of all rows at once."""
    n, sd, margin = values.shape[-1], values.std(axis=-1, ddof=1), inference.MARGIN
    test = scipy_stats.ttest_1samp(values, 0.0, axis=-1)
    above = scipy_stats.ttest_1samp(values, -margin, axis=-1, alternative='greater').pvalue
    below = scipy_stats.ttest_1samp(values, margin, axis=-1, alternative='less').pvalue
    detectable = inference.detectable_difference(1.0, n - 1) * sd / n**0.5
    spread = np.stack([sd, *test.confidence_interval(0.95)], axis=-1).tolist()
    tests = np.stack([test.pvalue, np.maximum(above, below), detectable], axis=-1).tolist()
    rows = [
        inference.Difference(mean, n, *spread, None, None, *tests, True, margin, n - 1)
        for mean, spread, tests in zip(values.mean(axis=-1).tolist(), spread, tests, strict=True)
    ]
    for row, found in zip(values[:3], rows, strict=False):
        expected = dataclasses.astuple(inference.paired(row, resamples=None))
        assert dataclasses.astuple(found) == pytest.approx(expected)
    return rows


def _decisions(count, true=(0.0,) * ARMS, sd=0.02):
    """Decisions on all arms of simulated studies, and on their first arms alone.

    The arms of a study share their baseline, seed by seed.
    """
    rng = np.random.default_rng(0)
    arms = rng.normal(0.0, sd / 2**0.5, (count, len(true), SEEDS)) + np.array(true)[:, None]
    arms -= rng.normal(0.0, sd / 2**0.5, (count, 1, SEEDS))
    rows = iter(_paired(arms.reshape(-1, SEEDS)))
    studies = [dict(enumerate(itertools.islice(rows, len(true)))) for _ in range(count)]
    whole = [[judged.decision for judged in inference.judge(study).values()] for study in studies]
    return whole, [inference.judge({0: study[0]})[0].decision for study in studies]


@pytest.mark.parametrize(
    ('true', 'sd', 'wrong', 'lowest'),
    [
        # Holm over arms that share a baseline costs power, not all of it.
        (0.0, 0.02, {BETTER, WORSE, EQUIVALENT}, 0.02),
        (inference.MARGIN, 0.003, {EQUIVALENT}, 0.0),
    ],
    ids=['no difference', 'at the margin'],
)
def test_studies_rarely_decide_wrongly(true, sd, wrong, lowest):
    count = 2000
    whole, alone = _decisions(count, (true,) * ARMS, sd)
    rate = np.mean([not wrong.isdisjoint(decisions) for decisions in whole])
    assert lowest <= rate <= 0.05 or _within(rate, 0.05, count)
    assert _within(np.mean([decision in wrong for decision in alone]), 0.05, count)


def test_equal_arms_with_little_noise_are_equivalent():
    decisions = sum(_decisions(200, sd=0.003)[0], [])
    assert decisions.count(EQUIVALENT) >= 0.95 * len(decisions)


def test_effects_of_the_detectable_size_are_found_four_times_in_five():
    count, sd = 3000, 0.01
    error = sd / SEEDS**0.5
    effect = inference.detectable_difference(error, SEEDS - 1)
    whole, _ = _decisions(count, true=(-effect,), sd=sd)
    assert _within(np.mean([decisions == [BETTER] for decisions in whole]), inference.POWER, count)
    # `detectable` of a judgement holds for the strictest level: one effect among arms without any.
    effect = inference.detectable_difference(error, SEEDS - 1, 0.05 / ARMS)
    whole, _ = _decisions(count, true=(effect,) + (0.0,) * (ARMS - 1), sd=sd)
    rate = np.mean([decisions[0] is WORSE for decisions in whole])
    assert _within(rate, inference.POWER, count)


def test_t_intervals_cover_the_truth():
    count, rng = 3000, np.random.default_rng(7)
    found = _paired(rng.normal(0.01, 0.02, (count, SEEDS)))
    assert _within(np.mean([d.low <= 0.01 <= d.high for d in found]), inference.LEVEL, count)
    arm, baseline = rng.normal(0.01, 0.04, (count, 5)), rng.normal(0, 0.01, (count, 9))
    low, high = scipy_stats.ttest_ind(arm, baseline, axis=1, equal_var=False).confidence_interval()
    first = inference.welch(arm[0], baseline[0], resamples=None)
    assert (first.low, first.high) == pytest.approx((low[0], high[0]))
    assert _within(np.mean((low <= 0.01) & (0.01 <= high)), inference.LEVEL, count)


@pytest.mark.parametrize(('n', 'expected'), [(8, 0.885), (30, 0.93)])
def test_bootstrap_intervals_cover_less_at_few_seeds(n, expected):
    count = 600
    values = np.random.default_rng(8).normal(0.01, 0.02, (count, n))
    ends = [inference.bootstrap(x, resamples=999) for x in values]
    assert _within(np.mean([low <= 0.01 <= high for low, high in ends]), expected, count, errors=3)
