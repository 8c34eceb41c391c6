"""From verdicts of arms to truths, from truths to verdicts, and how often these err."""

import dataclasses

import numpy as np
import pytest

from experiments.claims.claim import RELATIONS, ClaimVerdict, Kind, Row, Speaks
from experiments.claims.verdicts import condition_of, decide_relation, truths_by_context, verdict_on
from qkattn.stats import decision, inference
from qkattn.verdict import Decision
from qkattn.verdict.codes import Comparison, Reason, ReasonCode, Verdict
from tests.lanes import slow_except

FOR = Speaks.FOR
AGAINST = Speaks.AGAINST
OPEN = Speaks.OPEN
BESIDE = Speaks.BESIDE
# In the order of Decision: better, better below margin, equivalent, worse below, worse.
TRUTH_BY_DECISION = {
    'better': (FOR, OPEN, AGAINST, AGAINST, AGAINST),
    'worse': (AGAINST, AGAINST, AGAINST, OPEN, FOR),
    'different': (FOR, OPEN, AGAINST, OPEN, FOR),
    'equivalent': (AGAINST, OPEN, FOR, OPEN, AGAINST),
    'not_better': (AGAINST, OPEN, FOR, FOR, FOR),
    'not_worse': (FOR, FOR, FOR, OPEN, AGAINST),
}
DIVERGED = (Reason(ReasonCode.DIVERGED),)


def row(speaks, value=0.0, **context):
    return Row(quantity='arm', kind=Kind.MATCHED, context=context, value=value, speaks=speaks)


def compared(values, margin, validation=None):
    difference = inference.paired_test(list(values), margin)
    mean = difference.mean if validation is None else validation
    return Comparison('test', {}, difference, mean, None, 100)


def arm(mean, validation=None, *, sd=0.002, decision=Decision.UNDECIDED, **fields):
    """Verdict and comparison of an arm with 8 pairs around a mean difference."""
    fields = {'num_comparisons': 4} | fields
    return Verdict(decision, **fields), compared([mean - sd, mean + sd] * 4, 0.005, validation)


@pytest.mark.parametrize('relation', RELATIONS)
def test_a_decision_speaks_for_or_against_every_relation(relation):
    decided = [decision for decision in Decision if decision is not Decision.UNDECIDED]
    spoken = []
    for verdict in decided:
        _, speaks = decide_relation(row(OPEN), relation, *arm(9, decision=verdict))
        spoken.append(speaks)
    assert spoken == [*TRUTH_BY_DECISION[relation], OPEN]


def test_one_side_of_the_margin_decides_a_one_sided_relation():
    # Between 0 and the margin, closer than the errors allow to call it equivalent.
    assert arm(0.004)[1].difference.p_equivalence > 0.05 / 4
    # The mean difference, the claimed relation, the finding and what it says of the relation.
    for mean, relation, expected in (
        (0.004, 'not_better', ('not better by the margin', FOR)),
        (0.004, 'better', ('not better by the margin', AGAINST)),
        (-0.004, 'not_worse', ('not worse by the margin', FOR)),
        (-0.004, 'worse', ('not worse by the margin', AGAINST)),
        (0.004, 'not_worse', ('undecided', OPEN)),
        *((-0.004, name, ('undecided', OPEN)) for name in ('better', 'different', 'equivalent')),
    ):
        assert decide_relation(row(OPEN), relation, *arm(mean)) == expected
    # Each of these leaves the row open that the same mean decides above.
    for fields in (
        {'validation': 0.006},
        {'num_comparisons': 10**7},
        {'sd': 0.02},
        {'decision': Decision.NO_VERDICT},
        {'reasons': DIVERGED},
    ):
        assert decide_relation(row(OPEN), 'not_worse', *arm(-0.004, **fields))[1] == OPEN
    assert decide_relation(row(OPEN), 'not_better', *arm(0.004, validation=-0.006))[1] == OPEN


def test_a_reported_number_needs_the_validation_split():
    """The test split shows 0.0125; validation has to be within the reported interval as well."""
    diverged = {'reasons': DIVERGED}
    withheld = {'decision': Decision.NO_VERDICT}
    # The reported interval, the validation difference, changes of the arm, what the row says.
    for low, high, validation, fields, expected in (
        (0.011, 0.014, 0.012, {}, FOR),
        (0.011, 0.014, 0.016, {}, OPEN),
        (-0.02, -0.01, -0.02, {}, AGAINST),
        (-0.02, -0.01, 0.012, {}, OPEN),
        (0.02, 0.03, 0.02, {}, AGAINST),
        (0.001, 0.012, 0.012, {}, OPEN),
        (None, None, 0.012, {}, OPEN),
        *((0.011, 0.014, 0.012, fields, OPEN) for fields in (diverged, withheld)),
    ):
        reported = {'low': low, 'high': high, 'expected': 0.0125, 'tolerance': 0.0025}
        reported_row = dataclasses.replace(row(OPEN), **reported)
        _, speaks = decide_relation(reported_row, 'as_reported', *arm(0.0125, validation, **fields))
        assert speaks == expected


def test_the_verdict_on_a_claim_follows_from_the_truths_of_its_contexts():
    # What the row of each context says of the claim, and the verdict.
    for spoken, expected in (
        ((FOR, FOR), ClaimVerdict.HOLDS),
        ((AGAINST, AGAINST), ClaimVerdict.FAILS),
        ((FOR, AGAINST, OPEN), ClaimVerdict.HOLDS_ONLY_IF),
        ((FOR, OPEN), ClaimVerdict.UNDECIDED),
        ((AGAINST, OPEN), ClaimVerdict.UNDECIDED),
        ((FOR, BESIDE), ClaimVerdict.HOLDS_HERE),
        ((AGAINST,), ClaimVerdict.FAILS_HERE),
        ((BESIDE,), ClaimVerdict.UNDECIDED),
    ):
        rows = [row(speaks, size=str(place)) for place, speaks in enumerate(spoken)]
        assert verdict_on(rows) is expected
        if expected is not ClaimVerdict.HOLDS_ONLY_IF:
            assert verdict_on(rows, complete=False) is ClaimVerdict.UNDECIDED


def test_a_second_variant_is_no_second_setting_and_an_exact_row_needs_none():
    """Trained rows of one size hold "here" only; exact rows alone hold without a setting."""
    rows = [row(FOR, size='a', variant=name) for name in 'bc']
    exact = [dataclasses.replace(trained, kind=Kind.EXACT) for trained in rows]
    assert verdict_on(rows) is ClaimVerdict.HOLDS_HERE
    assert verdict_on([*exact, *rows]) is ClaimVerdict.HOLDS_HERE
    assert verdict_on(exact) is ClaimVerdict.HOLDS


def test_a_row_that_speaks_against_decides_its_context():
    for_row, open_row, against_row = (row(speaks, size='a') for speaks in (FOR, OPEN, AGAINST))
    assert truths_by_context([for_row, open_row, against_row]) == {(('size', 'a'),): AGAINST}
    assert verdict_on([for_row, open_row]) is ClaimVerdict.UNDECIDED


def test_the_condition_names_contexts_where_no_factor_separates():
    for cases, expected in (
        # A factor does not separate where a context is open.
        ({'8 a': FOR, '1 a': OPEN, '1 b': AGAINST}, 'size: 8'),
        # The contexts, where no factor separates, without what they all share.
        ({'8 a': FOR, '1 b': FOR, '1 a': AGAINST}, 'size: 8, corpus: a; size: 1, corpus: b'),
    ):
        contexts = [dict(zip(('size', 'corpus'), case.split(), strict=True)) for case in cases]
        rows = [
            row(speaks, **{'model': 'decoder'} | context)
            for speaks, context in zip(cases.values(), contexts, strict=True)
        ]
        assert condition_of(rows) == expected


MARGIN = 0.01
SD = 0.006
SEEDS = 8
NUM_CLAIMS = 300
# Three standard errors of a share of 0.05.
SLACK = 3 * (0.05 * 0.95 / NUM_CLAIMS) ** 0.5


def simulated(losses, size, relation, family):
    """The row of a context whose arm has these differences, tested in a family of this size."""
    comparison = compared(losses, MARGIN)
    judged = decision.judge({0: comparison.difference}, planned=family)[0]
    verdict = Verdict(judged.decision, num_comparisons=family)
    return row(decide_relation(row(OPEN), relation, verdict, comparison)[1], size=str(size))


# Differences by context, the claimed relation, the least and the largest shares of its verdicts.
CONTEXTS = [
    # True in all contexts: the claim can hold.
    ((0.0,) * 6, 'not_better', {'holds': 0.8}, {'fails': 0.01, 'holds only if': 0.05}),
    # False in one context, at the edge of what is false there.
    ((*(0.0,) * 5, -MARGIN), 'not_better', {}, {'holds': 0.05, 'fails': 0.01}),
    ((*(0.03,) * 5, MARGIN), 'worse', {}, {'holds': 0.05, 'fails': 0.01}),
    # False in all of them; at the edge, a row for the claim errs whichever it is.
    ((-0.03,) * 6, 'not_better', {'fails': 0.9}, {'holds': 0.01, 'holds only if': 0.05}),
    ((-MARGIN,) * 6, 'not_better', {}, {'a row': 0.05}),
]


@pytest.mark.parametrize(
    ('means', 'relation', 'least', 'most'), slow_except(CONTEXTS[:2], CONTEXTS)
)
def test_how_often_a_claim_in_six_contexts_is_decided(means, relation, least, most):
    """Rows have the whole error rate first; where they do not agree, each has a sixth of it.

    `least` and `most` bound the shares of verdicts over `NUM_CLAIMS` simulated claims; 'a row' is
    the share of claims in which any row of a sixth speaks for the claim.
    """
    rng = np.random.default_rng(0)
    verdicts = []
    for _ in range(NUM_CLAIMS):
        losses = [rng.normal(mean, SD, SEEDS) for mean in means]
        together = [simulated(x, size, relation, 1) for size, x in enumerate(losses)]
        apart = [simulated(x, size, relation, len(means)) for size, x in enumerate(losses)]
        verdict = verdict_on(together)
        if verdict in (ClaimVerdict.HOLDS_ONLY_IF, ClaimVerdict.UNDECIDED):
            verdict = verdict_on(apart)
        verdicts.append(verdict)
        if any(row.speaks == FOR for row in apart):
            verdicts.append('a row')
    shares = {name: verdicts.count(name) / NUM_CLAIMS for name in (*ClaimVerdict, 'a row')}
    assert all(shares[name] >= share for name, share in least.items()), shares
    assert all(shares[name] <= share + SLACK for name, share in most.items()), shares
