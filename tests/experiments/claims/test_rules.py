"""From verdicts of arms to truths, from truths to verdicts, and how often these err."""

import collections
import dataclasses

import numpy as np
import pytest

from experiments.claims.claim import RELATIONS, ClaimVerdict, Kind, Row, Speaks
from experiments.claims.verdicts import condition_of, decide_relation, truths_by_context, verdict_on
from qkattn.stats import inference
from qkattn.stats.decision import judge
from qkattn.verdict import Decision
from qkattn.verdict.codes import Comparison, Reason, ReasonCode, Verdict

FOR = Speaks.FOR
AGAINST = Speaks.AGAINST
OPEN = Speaks.OPEN
BESIDE = Speaks.BESIDE
DECISIONS = (
    Decision.BETTER,
    Decision.BETTER_MARGIN_OPEN,
    Decision.EQUIVALENT,
    Decision.WORSE_MARGIN_OPEN,
    Decision.WORSE,
)
# By relation: whether an arm with each of `DECISIONS` speaks for or against the relation.
TRUTH_BY_DECISION = {
    'better': (FOR, OPEN, AGAINST, AGAINST, AGAINST),
    'worse': (AGAINST, AGAINST, AGAINST, OPEN, FOR),
    'different': (FOR, OPEN, AGAINST, OPEN, FOR),
    'equivalent': (AGAINST, OPEN, FOR, OPEN, AGAINST),
    'not_better': (AGAINST, OPEN, FOR, FOR, FOR),
    'not_worse': (FOR, FOR, FOR, OPEN, AGAINST),
}
# Arguments of `decide_arm`.
DIVERGED = {'reasons': (Reason(ReasonCode.DIVERGED),)}
WITHHELD = {'decision': Decision.NO_VERDICT}


def make_row(speaks, **context):
    return Row(quantity='arm', kind=Kind.MATCHED, context=context, value=0.0, speaks=speaks)


def comparison_of(differences, margin, validation=None):
    """A comparison of an arm with its baseline, from a difference in loss for each seed.

    Args:
        differences: The arm's loss minus the baseline's loss, on the test split.
        margin: A difference below the margin does not matter.
        validation: The mean difference on the validation split. By default, the mean of
            `differences`.
    """
    difference = inference.paired_test(list(differences), margin)
    if validation is None:
        validation = difference.mean
    return Comparison(
        split='test',
        differences={},  # not used here
        difference=difference,
        validation=validation,
        correlation=None,
        num_documents=100,
    )


def decide_arm(
    relation,
    mean,
    *,
    row=None,
    sd=0.002,
    validation=None,
    decision=Decision.UNDECIDED,
    num_comparisons=4,
    reasons=(),
):
    """Decides whether a claim's relation is true of an arm with 8 seeds, at a margin of 0.005.

    Args:
        relation: What the claim expects, such as 'not_worse'.
        mean: The mean difference in loss from the baseline.
        row: The row of the arm. By default, a row without an interval.
        sd: The distance of each seed's difference from the mean.
        validation: The mean difference on the validation split. By default `mean`.
        decision: The decision on the arm.
        num_comparisons: How many comparisons share the error rate.
        reasons: Why the arm is undecided.

    Returns:
        (finding, speaks), where the finding is a text such as 'not worse by the margin'. `speaks`
        is FOR, AGAINST or OPEN.
    """
    if row is None:
        row = make_row(OPEN)
    verdict = Verdict(decision, num_comparisons=num_comparisons, reasons=reasons)
    # 4 seeds lie below the mean, and 4 above it.
    differences = [mean - sd, mean + sd] * 4
    comparison = comparison_of(differences, margin=0.005, validation=validation)
    return decide_relation(row, relation, verdict, comparison)


@pytest.mark.parametrize('relation', RELATIONS)
def test_a_decision_speaks_for_or_against_every_relation(relation):
    for decision, expected in zip(DECISIONS, TRUTH_BY_DECISION[relation], strict=True):
        _, speaks = decide_arm(relation, mean=9, decision=decision)
        assert speaks == expected, decision


@pytest.mark.parametrize('relation', RELATIONS)
def test_an_arm_without_verdict_leaves_every_relation_open(relation):
    _, speaks = decide_arm(relation, mean=9, decision=Decision.NO_VERDICT)
    assert speaks == OPEN


def test_every_decision_is_tested():
    assert {*DECISIONS, Decision.NO_VERDICT, Decision.UNDECIDED} == set(Decision)


def test_a_difference_near_the_margin_is_not_shown_to_be_equivalent():
    """The tests below need an arm that is undecided. `decide_arm` has the same differences."""
    differences = [0.004 - 0.002, 0.004 + 0.002] * 4
    comparison = comparison_of(differences, margin=0.005)
    assert comparison.difference.p_equivalence > 0.05 / 4  # for 4 comparisons


@pytest.mark.parametrize(
    ('mean', 'relation', 'finding', 'speaks'),
    [
        (0.004, 'not_better', 'not better by the margin', FOR),
        (0.004, 'better', 'not better by the margin', AGAINST),
        (-0.004, 'not_worse', 'not worse by the margin', FOR),
        (-0.004, 'worse', 'not worse by the margin', AGAINST),
        (0.004, 'not_worse', 'undecided', OPEN),
        (-0.004, 'better', 'undecided', OPEN),
        (-0.004, 'different', 'undecided', OPEN),
        (-0.004, 'equivalent', 'undecided', OPEN),
    ],
)
def test_one_side_of_the_margin_decides_a_one_sided_relation(mean, relation, finding, speaks):
    assert decide_arm(relation, mean) == (finding, speaks)


@pytest.mark.parametrize(
    ('relation', 'mean', 'change'),
    [
        pytest.param('not_worse', -0.004, {'validation': 0.006}, id='worse on validation'),
        pytest.param('not_worse', -0.004, {'num_comparisons': 10**7}, id='many comparisons'),
        pytest.param('not_worse', -0.004, {'sd': 0.02}, id='large spread'),
        pytest.param('not_worse', -0.004, WITHHELD, id='no verdict'),
        pytest.param('not_worse', -0.004, DIVERGED, id='diverged'),
        pytest.param('not_better', 0.004, {'validation': -0.006}, id='better on validation'),
    ],
)
def test_one_side_of_the_margin_needs_sound_evidence(relation, mean, change):
    """Each change leaves the relation open. Without the change, the arm speaks for the relation."""
    _, speaks = decide_arm(relation, mean, **change)
    assert speaks == OPEN


@pytest.mark.parametrize(
    ('low', 'high', 'validation', 'fields', 'expected'),
    [
        pytest.param(0.011, 0.014, 0.012, {}, FOR, id='both inside'),
        pytest.param(0.011, 0.014, 0.016, {}, OPEN, id='validation above'),
        pytest.param(-0.02, -0.01, -0.02, {}, AGAINST, id='both below'),
        pytest.param(-0.02, -0.01, 0.012, {}, OPEN, id='test below'),
        pytest.param(0.02, 0.03, 0.02, {}, AGAINST, id='both above'),
        pytest.param(0.001, 0.012, 0.012, {}, OPEN, id='test overlaps'),
        pytest.param(None, None, 0.012, {}, OPEN, id='no interval'),
        pytest.param(0.011, 0.014, 0.012, DIVERGED, OPEN, id='diverged'),
        pytest.param(0.011, 0.014, 0.012, WITHHELD, OPEN, id='no verdict'),
    ],
)
def test_both_splits_are_compared_with_the_reported_range(low, high, validation, fields, expected):
    """An arm agrees with a reported range only if both the test and the validation split agree.

    The interval on the test split is from `low` to `high`. The reported range is 0.0125 +- 0.0025.
    """
    row = dataclasses.replace(make_row(OPEN), low=low, high=high, expected=0.0125, tolerance=0.0025)
    _, speaks = decide_arm('as_reported', mean=0.0125, row=row, validation=validation, **fields)
    assert speaks == expected


# (what the rows of a claim say, the verdict on the claim). Each row has its own context.
VERDICTS = [
    ((FOR, FOR), ClaimVerdict.HOLDS),
    ((AGAINST, AGAINST), ClaimVerdict.FAILS),
    ((FOR, AGAINST, OPEN), ClaimVerdict.HOLDS_ONLY_IF),
    ((FOR, OPEN), ClaimVerdict.UNDECIDED),
    ((AGAINST, OPEN), ClaimVerdict.UNDECIDED),
    ((FOR, BESIDE), ClaimVerdict.HOLDS_HERE),
    ((AGAINST,), ClaimVerdict.FAILS_HERE),
    ((BESIDE,), ClaimVerdict.UNDECIDED),
]


def rows_in_different_sizes(spoken):
    """A row for each element of `spoken`. Each row has its own context, namely its size."""
    return [make_row(speaks, size=str(size)) for size, speaks in enumerate(spoken)]


@pytest.mark.parametrize(('spoken', 'verdict'), VERDICTS)
def test_the_verdict_follows_from_the_rows_of_all_contexts(spoken, verdict):
    assert verdict_on(rows_in_different_sizes(spoken)) is verdict


def test_an_incomplete_claim_is_undecided_unless_its_rows_disagree():
    for spoken, verdict in VERDICTS:
        if verdict is not ClaimVerdict.HOLDS_ONLY_IF:
            rows = rows_in_different_sizes(spoken)
            assert verdict_on(rows, complete=False) is ClaimVerdict.UNDECIDED


def test_a_second_variant_is_no_second_setting():
    """Two rows of the same setting count as one setting. Exact rows do not need a setting."""
    trained = [make_row(FOR, size='a', variant='b'), make_row(FOR, size='a', variant='c')]
    exact = [dataclasses.replace(row, kind=Kind.EXACT) for row in trained]

    assert verdict_on(trained) is ClaimVerdict.HOLDS_HERE
    assert verdict_on([*exact, *trained]) is ClaimVerdict.HOLDS_HERE
    assert verdict_on(exact) is ClaimVerdict.HOLDS


def test_a_row_that_speaks_against_decides_its_context():
    for_row = make_row(FOR, size='a')
    open_row = make_row(OPEN, size='a')
    against_row = make_row(AGAINST, size='a')

    context = (('size', 'a'),)
    assert truths_by_context([for_row, open_row, against_row]) == {context: AGAINST}
    assert verdict_on([for_row, open_row]) is ClaimVerdict.UNDECIDED


def test_the_condition_names_the_factor_that_separates():
    """Size 8 separates the context where the claim holds from the other contexts.

    Corpus a does not, because one context of corpus a is open.
    """
    rows = [
        make_row(FOR, model='decoder', size='8', corpus='a'),
        make_row(OPEN, model='decoder', size='1', corpus='a'),
        make_row(AGAINST, model='decoder', size='1', corpus='b'),
    ]
    assert condition_of(rows) == 'size: 8'


def test_the_condition_names_contexts_where_no_factor_separates():
    rows = [
        make_row(FOR, model='decoder', size='8', corpus='a'),
        make_row(FOR, model='decoder', size='1', corpus='b'),
        make_row(AGAINST, model='decoder', size='1', corpus='a'),
    ]
    assert condition_of(rows) == 'size: 8, corpus: a; size: 1, corpus: b'


MARGIN = 0.01
SD = 0.006  # of the simulated differences of seeds
SEEDS = 8
NUM_CLAIMS = 300
# Three standard errors of a share of 0.05.
SLACK = 3 * (0.05 * 0.95 / NUM_CLAIMS) ** 0.5


def simulated_rows(differences, relation, num_comparisons):
    """Judges an arm in each context, and returns a row with FOR, AGAINST or OPEN for each arm.

    Args:
        differences: For each context, an arm's differences in loss, one for each seed.
        relation: What the claim expects of every arm, such as 'not_better'.
        num_comparisons: How many comparisons share the error rate of 5 %.
    """
    rows = []
    # The contexts differ in `size`.
    for size, differences_of_seeds in enumerate(differences):
        comparison = comparison_of(differences_of_seeds, MARGIN)
        # The study has a single arm, with the key 'arm'.
        judgements = judge({'arm': comparison.difference}, planned=num_comparisons)
        decision = judgements['arm'].decision
        verdict = Verdict(decision, num_comparisons=num_comparisons)
        _, speaks = decide_relation(make_row(OPEN), relation, verdict, comparison)
        rows.append(make_row(speaks, size=str(size)))
    return rows


# The parts of a case are the true mean difference in each context, and the relation to expect. Then
# come lower bounds for the shares of outcomes, and upper bounds.
CLAIMS = [
    pytest.param(
        (0.0,) * 6,
        'not_better',
        {'holds': 0.8},
        {'fails': 0.01, 'holds only if': 0.05},
        id='true in all contexts',
    ),
    pytest.param(
        (*(0.0,) * 5, -MARGIN),
        'not_better',
        {},
        {'holds': 0.05, 'fails': 0.01},
        id='just false in one context',
    ),
    pytest.param(
        (*(0.03,) * 5, MARGIN),
        'worse',
        {},
        {'holds': 0.05, 'fails': 0.01},
        id='just false in one context, worse',
        marks=pytest.mark.slow,
    ),
    pytest.param(
        (-0.03,) * 6,
        'not_better',
        {'fails': 0.9},
        {'holds': 0.01, 'holds only if': 0.05},
        id='false in all contexts',
        marks=pytest.mark.slow,
    ),
    pytest.param(
        (-MARGIN,) * 6,
        'not_better',
        {},
        {'a row is for it': 0.05},
        id='just false in all contexts',
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(('means', 'relation', 'least', 'most'), CLAIMS)
def test_a_claim_in_six_contexts_is_rarely_decided_wrongly(means, relation, least, most):
    """A claim about six contexts gets a wrong verdict with a probability of at most 5 %.

    The claim expects `relation` of an arm in each context, with true mean differences `means`. 300
    such claims are simulated. `least` and `most` have bounds for the shares of outcomes.
    """
    rng = np.random.default_rng(0)
    counts = collections.Counter()
    for _ in range(NUM_CLAIMS):
        # Each context has the differences of 8 seeds.
        differences = [rng.normal(mean, SD, SEEDS) for mean in means]

        # In the first round, each row has the whole error rate.
        rows = simulated_rows(differences, relation, num_comparisons=1)
        verdict = verdict_on(rows)

        # If the rows disagree or leave the claim open, all six rows share the error rate.
        strict_rows = simulated_rows(differences, relation, num_comparisons=len(means))
        if verdict in (ClaimVerdict.HOLDS_ONLY_IF, ClaimVerdict.UNDECIDED):
            verdict = verdict_on(strict_rows)
        counts[verdict] += 1

        if any(row.speaks == FOR for row in strict_rows):
            counts['a row is for it'] += 1

    for outcome, share in least.items():
        assert counts[outcome] / NUM_CLAIMS >= share, counts
    # `SLACK` is three standard errors of a share of 5 % of 300 claims.
    for outcome, share in most.items():
        assert counts[outcome] / NUM_CLAIMS <= share + SLACK, counts
