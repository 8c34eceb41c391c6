"""From words to truths, and from truths to verdicts."""

import dataclasses

import pytest

from qkattn.claims import rules
from qkattn.claims.decided import ClaimVerdict, Kind, Row, Speaks
from qkattn.stats import inference
from qkattn.verdict import Decision
from qkattn.verdict.codes import Comparison, Reason, ReasonCode, Verdict

FOR, AGAINST, OPEN, BESIDE = Speaks.FOR, Speaks.AGAINST, Speaks.OPEN, Speaks.BESIDE
# The words in the order of Decision: better, better below margin, equivalent, worse below, worse.
SAID = {
    'better': (FOR, OPEN, AGAINST, AGAINST, AGAINST),
    'worse': (AGAINST, AGAINST, AGAINST, OPEN, FOR),
    'different': (FOR, OPEN, AGAINST, OPEN, FOR),
    'equivalent': (AGAINST, OPEN, FOR, OPEN, AGAINST),
    'not_better': (AGAINST, OPEN, FOR, FOR, FOR),
    'not_worse': (FOR, FOR, FOR, OPEN, AGAINST),
}


def row(speaks, value=0.0, **context):
    return Row(what='arm', kind=Kind.MATCHED, context=context, value=value, speaks=speaks)


@pytest.mark.parametrize('relation', rules.RELATIONS)
def test_every_relation_of_every_word(relation):
    words = list(Decision)
    assert tuple(rules.speaks(relation, word) for word in words[:5]) == SAID[relation]
    assert {rules.speaks(relation, word) for word in words[5:]} == {OPEN}


def arm(mean, validation=None, *, sd=0.002, decision=Decision.UNDECIDED, **fields):
    """Verdict and comparison of an arm with 8 pairs around a mean difference."""
    found = inference.paired([mean - sd, mean + sd] * 4, 0.005, resamples=None)
    compared = Comparison('test', {}, found, mean if validation is None else validation, None, 9)
    fields = {'alpha': 0.05, 'num_comparisons': 4} | fields
    return Verdict(decision, **fields), compared


def test_one_side_of_the_margin_suffices():
    # Between 0 and the margin, closer than the errors allow to call it equivalent.
    verdict, compared = arm(0.004)
    assert compared.difference.p_equivalence > 0.05 / 4
    assert rules.one_sided('not_better', verdict, compared) == (rules.NOT_BETTER, FOR)
    assert rules.one_sided('better', verdict, compared) == (rules.NOT_BETTER, AGAINST)
    assert rules.one_sided('not_worse', verdict, compared) is None
    mirrored = arm(-0.004)
    assert rules.one_sided('not_worse', *mirrored) == (rules.NOT_WORSE, FOR)
    assert rules.one_sided('worse', *mirrored) == (rules.NOT_WORSE, AGAINST)
    assert rules.one_sided('better', *mirrored) is None


@pytest.mark.parametrize(
    ('relation', 'of'),
    [
        ('different', {}),
        ('equivalent', {}),
        ('as_reported', {}),
        ('not_worse', {'validation': 0.006}),
        ('not_worse', {'decision': Decision.NO_VERDICT}),
        ('not_worse', {'decision': Decision.WORSE_BELOW_MARGIN}),
        ('not_worse', {'reasons': (Reason(ReasonCode.DIVERGED),)}),
        ('not_worse', {'alpha': None}),
        ('not_worse', {'num_comparisons': 10**7}),
        ('not_worse', {'sd': 0.02}),
    ],
)
def test_no_side_is_excluded_otherwise(relation, of):
    assert rules.one_sided('not_worse', *arm(-0.004)) is not None
    assert rules.one_sided(relation, *arm(-0.004, **of)) is None


@pytest.mark.parametrize(
    ('low', 'high', 'validation', 'expected'),
    [
        (0.011, 0.014, 0.012, FOR),
        (0.011, 0.014, 0.016, OPEN),
        (-0.02, -0.01, -0.02, AGAINST),
        (-0.02, -0.01, 0.012, OPEN),
        (0.02, 0.03, 0.02, AGAINST),
        (0.02, 0.03, 0.012, OPEN),
        (0.001, 0.012, 0.012, OPEN),
    ],
)
def test_a_reported_number_needs_the_validation_split(low, high, validation, expected):
    verdict, compared = arm(0.0125, validation)
    of = dataclasses.replace(row(OPEN), low=low, high=high, expected=0.0125, tolerance=0.0025)
    assert rules.finding(of, 'as_reported', verdict, compared) == ('undecided', expected)
    diverged = dataclasses.replace(verdict, reasons=(Reason(ReasonCode.DIVERGED),))
    withheld = dataclasses.replace(verdict, decision=Decision.NO_VERDICT)
    for verdict in (diverged, withheld):
        assert rules.finding(of, 'as_reported', verdict, compared)[1] == OPEN


def test_every_relation_is_tested():
    assert SAID.keys() == rules.RELATIONS.keys()


@pytest.mark.parametrize(
    ('said', 'expected'),
    [
        ((FOR, FOR), ClaimVerdict.HOLDS),
        ((AGAINST, AGAINST), ClaimVerdict.FAILS),
        ((FOR, AGAINST, OPEN), ClaimVerdict.HOLDS_ONLY_IF),
        ((FOR, OPEN), ClaimVerdict.UNDECIDED),
        ((AGAINST, OPEN), ClaimVerdict.UNDECIDED),
        ((FOR, BESIDE), ClaimVerdict.HOLDS_HERE),
        ((AGAINST,), ClaimVerdict.FAILS_HERE),
        ((BESIDE,), ClaimVerdict.UNDECIDED),
        ((), ClaimVerdict.UNDECIDED),
    ],
)
def test_verdict_over_contexts(said, expected):
    rows = [row(of, size=str(place)) for place, of in enumerate(said)]
    assert rules.verdict(rows) is expected
    kept = (ClaimVerdict.HOLDS_ONLY_IF, ClaimVerdict.UNDECIDED)
    partial = expected if expected in kept else ClaimVerdict.UNDECIDED
    assert rules.verdict(rows, complete=False) is partial


def test_another_variant_or_shape_is_no_other_setting_and_theorems_need_none():
    rows = [row(FOR, size='a', variant=name) for name in 'bc']
    assert rules.verdict(rows) is ClaimVerdict.HOLDS_HERE
    assert rules.verdict([*rows, row(FOR, size='d')]) is ClaimVerdict.HOLDS
    theorem = [dataclasses.replace(of, kind=Kind.EXACT) for of in rows]
    assert rules.verdict(theorem) is ClaimVerdict.HOLDS
    assert rules.verdict([*theorem, *rows]) is ClaimVerdict.HOLDS_HERE


def test_rows_of_one_context_count_together():
    assert rules.truths([row(FOR, size='a'), row(OPEN, size='a'), row(AGAINST, size='a')]) == {
        (('size', 'a'),): AGAINST
    }
    assert rules.verdict([row(FOR, size='a'), row(OPEN, size='a')]) is ClaimVerdict.UNDECIDED


def test_the_place_on_a_curve_is_a_factor():
    rows = [dataclasses.replace(row(of), x=x, x_label='rank') for x, of in ((1, AGAINST), (8, FOR))]
    assert rules.verdict(rows) is ClaimVerdict.HOLDS_ONLY_IF
    assert rules.condition(rows) == 'rank: 8'
    assert rules.condition(rows, AGAINST) == 'rank: 1'


def test_the_condition_is_the_factor_that_separates():
    rows = [row(FOR, size='8', corpus='a'), row(FOR, size='16', corpus='a')]
    rows += [row(AGAINST, size='8', corpus='b'), row(OPEN, size='16', corpus='b')]
    assert rules.condition(rows) == 'corpus: a'


def test_a_factor_does_not_separate_where_a_context_is_open():
    rows = [row(FOR, size='8', corpus='a'), row(OPEN, size='16', corpus='a')]
    rows += [row(AGAINST, size='16', corpus='b')]
    assert rules.condition(rows) == 'size: 8'
    rows += [row(AGAINST, size='8', corpus='b')]
    assert rules.condition(rows) == 'size: 8, corpus: a'


def test_the_values_of_a_factor_may_hold_commas():
    rows = [row('for', part='half, T <= D'), row('for', part='symmetry'), row('against', part='c')]
    assert rules.condition(rows) == 'part: half, T <= D; symmetry'


def test_the_condition_lists_contexts_where_no_factor_separates():
    cases = {('8', 'a'): FOR, ('16', 'b'): FOR, ('16', 'a'): AGAINST, ('8', 'b'): AGAINST}
    rows = [row(of, model='decoder', size=size, corpus=c) for (size, c), of in cases.items()]
    assert rules.condition(rows) == 'size: 8, corpus: a; size: 16, corpus: b'


def test_the_condition_names_the_fewest_factors_that_leave_out_every_other_context():
    true = {('decoder', '500', 'C2'), ('decoder', '2000', 'C2'), ('decoder', '500', 'C3')}
    other = {('encoder', '500', 'C2'), ('encoder', '500', 'C3'), ('decoder', '2000', 'C3')}
    rows = [
        row(FOR if of in true else OPEN, corpus='a', model=of[0], steps=of[1], conclusion=of[2])
        for of in sorted(true | other)
    ]
    assert rules.condition(rows) == 'model: decoder, conclusion: C2; model: decoder, steps: 500'


def test_the_decisive_row_speaks_as_the_verdict():
    rows = [row(BESIDE), row(OPEN, size='1'), row(FOR, size='2'), row(AGAINST, size='3')]
    assert [rules.decisive(rows, of) for of in ClaimVerdict] == [2, 2, 2, 3, 3, 1]
    assert rules.decisive(rows[:1], ClaimVerdict.UNDECIDED) is None
