"""From verdicts of arms to truths, from truths to verdicts, and how often these err."""

import dataclasses

import numpy as np
import pytest

from experiments.claims.claim import RELATIONS, ClaimVerdict, Kind, Row, Speaks
from experiments.claims.verdicts import condition_of, finding, truths, verdict_on
from qkattn.stats import decision, inference
from qkattn.verdict import Decision
from qkattn.verdict.codes import Comparison, Reason, ReasonCode, Verdict
from tests.lanes import only

FOR = Speaks.FOR
AGAINST = Speaks.AGAINST
OPEN = Speaks.OPEN
BESIDE = Speaks.BESIDE
# In the order of Decision: better, better below margin, equivalent, worse below, worse.
SPOKEN = {
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
def test_every_relation_of_every_decision(relation):
    decided = [decision for decision in Decision if decision is not Decision.UNDECIDED]
    spoken = [finding(row(OPEN), relation, *arm(9, decision=decision))[1] for decision in decided]
    assert spoken == [*SPOKEN[relation], OPEN]


def test_one_side_of_the_margin_suffices():
    # Between 0 and the margin, closer than the errors allow to call it equivalent.
    assert arm(0.004)[1].difference.p_equivalence > 0.05 / 4
    for mean, relation, expected in (
        (0.004, 'not_better', ('not better by the margin', FOR)),
        (0.004, 'better', ('not better by the margin', AGAINST)),
        (-0.004, 'not_worse', ('not worse by the margin', FOR)),
        (-0.004, 'worse', ('not worse by the margin', AGAINST)),
        (0.004, 'not_worse', ('undecided', OPEN)),
        *((-0.004, name, ('undecided', OPEN)) for name in ('better', 'different', 'equivalent')),
    ):
        assert finding(row(OPEN), relation, *arm(mean)) == expected
    for fields in (
        *({'validation': 0.006}, {'num_comparisons': 10**7}, {'sd': 0.02}),
        *({'decision': Decision.NO_VERDICT}, {'reasons': DIVERGED}),
    ):
        assert finding(row(OPEN), 'not_worse', *arm(-0.004, **fields))[1] == OPEN
    assert finding(row(OPEN), 'not_better', *arm(0.004, validation=-0.006))[1] == OPEN


def test_a_reported_number_needs_the_validation_split():
    diverged = {'reasons': DIVERGED}
    withheld = {'decision': Decision.NO_VERDICT}
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
        given = dataclasses.replace(row(OPEN), **reported)
        made = finding(given, 'as_reported', *arm(0.0125, validation, **fields))
        assert made[1] == expected


def test_verdict_over_contexts():
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
    # Another variant is no other setting, and theorems need none.
    rows = [row(FOR, size='a', variant=name) for name in 'bc']
    theorem = [dataclasses.replace(one, kind=Kind.EXACT) for one in rows]
    assert verdict_on(rows) is verdict_on([*theorem, *rows]) is ClaimVerdict.HOLDS_HERE
    assert verdict_on(theorem) is ClaimVerdict.HOLDS
    # Of one context, what speaks against it counts.
    same = [row(speaks, size='a') for speaks in (FOR, OPEN, AGAINST)]
    assert truths(same) == {(('size', 'a'),): AGAINST}
    assert verdict_on(same[:2]) is ClaimVerdict.UNDECIDED


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
NUMBER = 300
# Three standard errors of a share of 0.05.
SLACK = 3 * (0.05 * 0.95 / NUMBER) ** 0.5


def simulated(losses, size, relation, family):
    comparison = compared(losses, MARGIN)
    judged = decision.judge({0: comparison.difference}, planned=family)[0]
    verdict = Verdict(judged.decision, num_comparisons=family)
    return row(finding(row(OPEN), relation, verdict, comparison)[1], size=str(size))


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


@pytest.mark.parametrize(('means', 'relation', 'least', 'most'), only(CONTEXTS[:2], CONTEXTS))
def test_how_often_a_claim_in_six_contexts_is_decided(means, relation, least, most):
    """As `experiments.claims.deciding` does: all rows at once, then each at its share."""
    rng = np.random.default_rng(0)
    verdicts = []
    for _ in range(NUMBER):
        losses = [rng.normal(mean, SD, SEEDS) for mean in means]
        together, apart = (
            [simulated(one, size, relation, family) for size, one in enumerate(losses)]
            for family in (1, len(means))
        )
        verdict = verdict_on(together)
        if verdict in (ClaimVerdict.HOLDS_ONLY_IF, ClaimVerdict.UNDECIDED):
            verdict = verdict_on(apart)
        verdicts += [verdict] + ['a row'] * any(one.speaks == FOR for one in apart)
    shares = {name: verdicts.count(name) / NUMBER for name in (*ClaimVerdict, 'a row')}
    assert all(shares[name] >= share for name, share in least.items()), shares
    assert all(shares[name] <= share + SLACK for name, share in most.items()), shares
