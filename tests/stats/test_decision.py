"""Holm's correction and the decisions, against their definitions and simulated studies."""

import itertools

import numpy as np
import pytest

from qkattn.stats import inference
from qkattn.stats.decision import Decision, Judgement, holm, judge, spending
from tests.stats.simulations import is_false
from tests.stats.test_inference import paired, within

SEEDS = 8
ARMS = 6
BETTER, BETTER_BELOW_MARGIN, EQUIVALENT, WORSE_BELOW_MARGIN, WORSE, UNDECIDED, _ = Decision

# Closed forms.


def test_holm_on_a_worked_example():
    # Four tests: 4 x 0.005; 3 x 0.01 ; 2 x 0.03; then 1 x 0.04 raised to its predecessor's 0.06.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


def test_holm_rejects_what_its_definition_rejects():
    """Step down: reject while p_(k) <= alpha / (m - k + 1), and nothing after the first failure."""
    rng = np.random.default_rng(6)
    for _ in range(300):
        p_values = rng.beta(0.3, 3.0, rng.integers(1, 8)).tolist()
        adjusted = holm(p_values)
        for alpha in (0.01, 0.05, 0.3):
            ascending = sorted(p_values)
            steps = [p <= alpha / (len(ascending) - k) for k, p in enumerate(ascending)]
            rejected = ascending[: len(list(itertools.takewhile(bool, steps)))]
            assert [p in rejected for p in p_values] == [p <= alpha for p in adjusted]


# Decisions.


def _difference(mean, spread=0.001, n=8):
    """Differences of the given mean with alternating deviations of `spread`."""
    return inference.paired([mean + spread * (-1) ** i for i in range(n)], resamples=None)


def test_the_words():
    arms = {
        'lower': (_difference(-0.02), BETTER),
        'higher': (_difference(0.02), WORSE),
        'rather lower': (_difference(-0.006, spread=0.003), BETTER_BELOW_MARGIN),
        'rather higher': (_difference(0.006, spread=0.003), WORSE_BELOW_MARGIN),
        'same': (_difference(0.0), EQUIVALENT),
        'near': (_difference(0.003), EQUIVALENT),
        'noisy': (_difference(0.001, spread=0.05), UNDECIDED),
    }
    differences = {arm: difference for arm, (difference, _) in arms.items()}
    judged = judge(differences)
    for arm, (_, decision) in arms.items():
        assert judged[arm].decision is decision
    assert judged['near'].p_holm < 0.001
    # 'lower' and 'higher' differ by more than the margin: the others are five.
    assert [judged[arm].p_margin_holm for arm in arms] == pytest.approx(
        holm([difference.p_margin for difference in differences.values()])
    )
    for arm in ('rather lower', 'near', 'noisy'):
        assert judged[arm].p_holm == pytest.approx(min(1.0, 5 * differences[arm].p))
        expected = min(1.0, 5 * differences[arm].p_equivalence)
        assert judged[arm].p_equivalence_holm == pytest.approx(expected)
    error = np.std([0.05, -0.05] * 4, ddof=1) / 8**0.5
    detectable = inference.detectable_difference(error, 7, 0.05 / 7)
    assert judged['noisy'].detectable == pytest.approx(detectable)
    assert detectable > differences['noisy'].detectable


def test_the_error_rate_of_the_look_decides():
    difference = {'arm': inference.paired([0.01, 0.02, 0.005, 0.03, 0.012], resamples=None)}
    assert 0.01 < difference['arm'].p < 0.05 < difference['arm'].p_margin
    assert judge(difference)['arm'].decision is WORSE_BELOW_MARGIN
    early = judge(difference, alpha_of_look=0.01)['arm']
    assert early.decision is UNDECIDED
    assert early.detectable > judge(difference)['arm'].detectable


def test_an_arm_leaves_the_family_when_it_differs_by_more_than_the_margin():
    """At each alpha, the arms left are those whose margin tests Holm's method does not find."""
    rng = np.random.default_rng(11)
    for _ in range(100):
        means = rng.choice([-0.03, -0.01, 0.0, 0.004], 5)
        arms = {
            i: inference.paired(rng.normal(m, 0.01, 8), resamples=None) for i, m in enumerate(means)
        }
        judged = judge(arms)
        margins = holm([d.p_margin for d in arms.values()])
        for alpha in (0.01, 0.05, 0.2):
            left = sum(p > alpha for p in margins)
            for arm, p_margin in enumerate(margins):
                assert judged[arm].p_margin_holm == p_margin
                if p_margin > alpha:
                    assert (judged[arm].p_holm <= alpha) == (arms[arm].p <= alpha / left)
                    found = judged[arm].p_equivalence_holm <= alpha
                    assert found == (arms[arm].p_equivalence <= alpha / left)
                else:
                    assert judged[arm].p_holm <= alpha < judged[arm].p_equivalence_holm


def test_what_the_optimum_may_be_missed_by_withholds_words():
    values = [-0.02 + 0.001 * (-1) ** i for i in range(8)]

    def judged(low, high):
        arm = inference.paired(values, tuning=(low, high), resamples=None)
        return judge({'arm': arm})['arm']

    assert judged(0.1, 0.0).decision is BETTER  # better settings of the arm make it better still
    assert judged(0.0, 0.012).decision is BETTER
    assert judged(0.0, 0.016).decision is BETTER_BELOW_MARGIN
    assert judged(0.0, 0.03).decision is judged(0.0, np.inf).decision is UNDECIDED
    assert judged(0.01, 0.02).detectable == pytest.approx(judged(0.0, 0.0).detectable + 0.03)


def test_spending_is_obrien_flemings_and_adds_up():
    # Lan and DeMets (1983): 0.0056 spent at half the information, and the rest at the end.
    assert spending((8, 16)) == pytest.approx((0.00557, 0.04443), abs=1e-5)
    for looks in ((), (5,), (4, 8, 16), (3, 4, 5, 6)):
        assert sum(spending(looks)) == pytest.approx(0.05)
    assert np.diff(spending((4, 8, 12, 16))).min() > 0


def test_fewer_than_three_pairs_decide_nothing_and_do_not_count_as_a_test():
    arm = _difference(0.02)
    judged = judge({'a': arm, 'two': _difference(0.02, 1e-9, n=2), 'none': None})
    assert judged['a'].p_holm == arm.p
    assert judged['two'] == judged['none'] == Judgement(UNDECIDED)
    assert judge({'three': _difference(0.02, 1e-4, n=3)})['three'].decision is WORSE


@pytest.mark.parametrize(
    ('mean', 'diverged', 'decision'),
    [
        (-0.02, (1, 0), UNDECIDED),
        (0.02, (1, 0), WORSE),
        (0.0, (1, 0), UNDECIDED),
        (
            0.003,
            (1, 0),
            WORSE_BELOW_MARGIN,
        ),  # not equivalent any more, and significantly above zero
        (-0.02, (0, 2), BETTER),
        (0.02, (0, 2), UNDECIDED),
        (0.0, (0, 2), UNDECIDED),
        (-0.02, (1, 1), UNDECIDED),
        (0.02, (1, 1), UNDECIDED),
        (0.0, (0, 0), EQUIVALENT),
    ],
)
def test_divergence_never_helps(mean, diverged, decision):
    judged = judge({'arm': _difference(mean)}, diverged={'arm': diverged})
    assert judged['arm'].decision is decision


def test_comparisons_that_are_still_missing_are_corrected_for():
    differences = {'a': inference.paired([0.010, 0.012, 0.011, 0.013, 0.008], resamples=None)}
    alone = judge(differences)['a']
    among = judge(differences, planned=7)['a']
    assert among.p_holm == pytest.approx(7 * alone.p_holm)
    assert among.detectable > alone.detectable
    # The others come, and find nothing: the decision stays what it was.
    nothing = inference.paired([0.02, -0.02, 0.01, -0.01, 0.0], resamples=None)
    whole = judge(differences | {str(i): nothing for i in range(6)}, planned=7)
    assert whole['a'] == among


# Simulated studies.


def _decisions(count, true=(0.0,) * ARMS, sd=0.02):
    """Decisions on all arms of simulated studies, and on their first arms alone.

    The arms of a study share their baseline, seed by seed.
    """
    rng = np.random.default_rng(0)
    arms = rng.normal(0.0, sd / 2**0.5, (count, len(true), SEEDS)) + np.array(true)[:, None]
    arms -= rng.normal(0.0, sd / 2**0.5, (count, 1, SEEDS))
    rows = iter(paired(arms.reshape(-1, SEEDS)))
    studies = [dict(enumerate(itertools.islice(rows, len(true)))) for _ in range(count)]
    whole = [[judged.decision for judged in judge(study).values()] for study in studies]
    return whole, [judge({0: study[0]})[0].decision for study in studies]


@pytest.mark.parametrize(
    ('true', 'sd'),
    [
        ((0.0,) * ARMS, 0.02),
        ((0.999,) * ARMS, 0.003),
        ((1.0,) * ARMS, 0.003),
        ((0.0, 0.0, 0.999, 0.999, 1.0, 4.0), 0.006),
    ],
    ids=['no difference', 'below the margin', 'at the margin', 'all of these'],
)
def test_studies_rarely_decide_wrongly(true, sd):
    """Whatever the true differences, given here in margins."""
    count, true = 1000, tuple(inference.MARGIN * of for of in true)
    whole, alone = _decisions(count, true, sd)
    wrong = [any(map(is_false, words, true)) for words in whole]
    assert 0.02 <= np.mean(wrong) <= 0.05 or within(np.mean(wrong), 0.05, count)
    assert within(np.mean([is_false(word, true[0]) for word in alone]), 0.05, count)


def test_equal_arms_with_little_noise_are_equivalent():
    decisions = sum(_decisions(200, sd=0.002)[0], [])
    assert decisions.count(EQUIVALENT) >= 0.95 * len(decisions)


@pytest.mark.parametrize('arms', [1, ARMS])
def test_effects_of_the_size_called_detectable_are_found_four_times_in_five(arms):
    """By the strictest test: one effect among arms without any."""
    count, sd = 3000, 0.01
    rows = paired(np.random.default_rng(1).normal(0.0, sd, (2000, SEEDS)))
    claimed = [judge({0: row}, planned=arms)[0].detectable for row in rows]
    whole, _ = _decisions(count, true=(-np.median(claimed),) + (0.0,) * (arms - 1), sd=sd)
    found = [words[0] in (BETTER, BETTER_BELOW_MARGIN) for words in whole]
    assert within(np.mean(found), inference.POWER, count)


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda: holm([0.1, 1.2]), 'p_values holds 1.2'),
        (lambda: holm([float('nan')]), 'p_values holds nan'),
        (lambda: spending((8, 8)), r'looks are \(8, 8\)'),
        (lambda: judge({'a': None}, diverged={'b': (1, 0)}), r"diverged names \['b'\]"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
