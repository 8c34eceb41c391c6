"""Claims decided on committed studies."""

import dataclasses
import shutil

import pytest

from qkattn.claims.claim import Claim, ClaimVerdict, Expectation, Kind, Measure, Row, Speaks, exact
from qkattn.claims.deciding import decide, evidence, needed, number_of_rows
from qkattn.claims.studies import UNIT, Results
from qkattn.errors import ConfigError
from qkattn.storage.records import write_json
from qkattn.verdict import Decision

pytestmark = pytest.mark.stored
PLAIN, REFORMER = 'shared_qk/vo', 'shared_qk(key_norm=True,self_mask=True)/vo'
PARTS = (Kind.REMOVED, Kind.REINVESTED, Kind.MATCHED)
WORSE_HERE, FAILS_HERE = ClaimVerdict.HOLDS_HERE, ClaimVerdict.FAILS_HERE
UNDECIDED = ClaimVerdict.UNDECIDED


def claim(*expectations, **parts):
    texts = {'title': 'a', 'statement': 'A.', 'source': 'source', 'rule': 'Rule.'}
    return Claim(name='Z1', **texts, expectations=expectations, **parts)


def expect(variant, relation, study='fair_small', **options):
    return Expectation(study, variant, relation, **options)


def deciding(rows):
    return [row for row in rows if row.speaks != Speaks.BESIDE]


@pytest.fixture(scope='module')
def results(committed):
    return Results(committed)


@pytest.fixture(scope='module')
def sharing(committed):
    return Results(committed / 'claims/cpu')


def test_verdicts_follow_from_those_of_arms(sharing):
    for relation, verdict in (('worse', WORSE_HERE), ('not_worse', FAILS_HERE)):
        shared = claim(expect('shared_qk/k_is_v', relation, study='sharing'))
        assert decide(shared, 'cpu', sharing).verdict is verdict
        open_one = claim(expect('qk/vo?num_kv_heads=2', relation, study='sharing'))
        assert decide(open_one, 'cpu', sharing).verdict is UNDECIDED


def test_rows_tell_what_was_removed_from_what_was_reinvested(results):
    expected = expect(PLAIN, 'worse', at='removed', reported=(0.1, 0.15))
    rows = decide(claim(expected), 'cpu', results).rows
    removed, reinvested, matched = rows
    assert tuple(row.kind for row in rows) == PARTS
    assert matched.value == pytest.approx(removed.value + reinvested.value)
    assert (removed.speaks, removed.decision, removed.relation) == (Speaks.FOR, 'worse', 'worse')
    assert deciding(rows) == [removed]
    assert (removed.expected, removed.tolerance) == pytest.approx((0.125, 0.025))
    assert removed.low < removed.value < removed.high and removed.unit == UNIT
    context = {'model': 'decoder', 'size': 'd_model=48', 'corpus': 'stdlib', 'steps': '500'}
    assert removed.context == context


def test_beside_a_pair_stand_both_against_the_baseline_once(results):
    pair = [expect('qk/k_is_v', 'worse', at=at, versus='qk/no_o') for at in ('removed', 'matched')]
    rows = decide(claim(*pair), 'cpu', results).rows
    assert {row.quantity for row in deciding(rows)} == {'qk/k_is_v - qk/no_o'}
    beside = [(row.arm, row.kind) for row in rows if row.speaks == Speaks.BESIDE]
    assert sorted(beside) == sorted((arm, k) for arm in ('qk/k_is_v', 'qk/no_o') for k in PARTS)
    first, reverse = (
        decide(claim(expect(one, 'worse', versus=other)), 'cpu', results)
        for one, other in (('qk/k_is_v', 'qk/no_v'), ('qk/no_v', 'qk/k_is_v'))
    )
    assert first.verdict is ClaimVerdict.HOLDS and reverse.verdict is ClaimVerdict.FAILS
    assert first.rows[0].value == pytest.approx(0.0672, abs=1e-4)


def test_the_points_of_a_curve_are_of_one_arm_and_named_by_their_place(results):
    place = {'x': 8.0, 'x_label': 'rank', 'curve': 'rank r'}
    decided = decide(claim(expect('query_free/vo', 'equivalent', **place)), 'cpu', results)
    assert {(row.quantity, row.arm, row.x) for row in decided.rows} == {('rank r', None, 8.0)}
    assert 'in rank r at rank 8 at d_model=48 on stdlib' in decided.needed


def test_a_premise_speaks_against_a_claim_only(sharing):
    worse = expect('shared_qk/k_is_v', 'worse', study='sharing')
    for value, speaks, verdict in (
        (1, Speaks.BESIDE, WORSE_HERE),
        (2, Speaks.AGAINST, ClaimVerdict.HOLDS_ONLY_IF),
    ):
        premise = claim(worse, premises=(lambda v=value: [exact('one', v, 1, a='rank')],))
        decided = decide(premise, 'cpu', sharing)
        assert (decided.rows[0].speaks, decided.verdict) == (speaks, verdict)


def test_longer_training_is_a_context_of_its_own(results):
    for study, variant, steps in (
        ('fair_small', 'qk/k_is_v', ['500', '2000']),
        ('initialization', 'qk/no_o', ['400']),
    ):
        rows = decide(claim(expect(variant, 'different', study)), 'cpu', results).rows
        assert [row.context['steps'] for row in deciding(rows)] == steps


def test_a_claim_that_holds_in_some_contexts_names_them(results):
    both = [
        expect(variant, 'worse', at='removed', context={'keys': keys})
        for variant, keys in ((PLAIN, 'plain'), (REFORMER, 'of unit length'))
    ]
    decided = decide(claim(*both), 'cpu', results)
    assert (decided.verdict, decided.condition) == (ClaimVerdict.HOLDS_ONLY_IF, 'keys: plain')
    assert decided.refuted is None and decided.decisive_row.context['keys'] == 'plain'
    worded = claim(*both, conditions={'keys: plain': 'keys have a length'})
    assert decide(worded, 'cpu', results).condition == 'keys have a length'


def test_a_reported_number_is_held_against_the_interval(results):
    for reported, verdict in (
        ((0.2, 0.3), WORSE_HERE),
        ((0.1, 0.15), FAILS_HERE),
        ((0.2, 0.25), UNDECIDED),
    ):
        expected = expect(PLAIN, 'as_reported', at='removed', reported=reported)
        assert decide(claim(expected), 'cpu', results).verdict is verdict


def test_a_claim_is_one_family(sharing):
    """All rows at once are tested at the error rate; to tell them apart, each at its share."""
    worse = [expect(name, 'worse', study='sharing') for name in (PLAIN, 'qk/k_is_v')]
    loaded = sharing.study('sharing')
    together, apart = ([evidence(e, loaded, n)[0].verdict for e in worse] for n in (1, 2))
    assert [verdict.num_comparisons for verdict in together + apart] == [1, 1, 2, 2]
    assert together[0].p_holm < apart[0].p_holm
    # An open row makes the verdict one of selected rows, three here.
    both = decide(claim(*worse, expect('qk/vo?num_kv_heads=2', 'worse', 'sharing')), 'cpu', sharing)
    (alone,) = evidence(expect('qk/vo?num_kv_heads=2', 'worse', 'sharing'), loaded, 3)
    assert both.rows[2] == alone.row and both.needed == needed([alone])[1]
    # Two sizes, two corpora, two lengths of training.
    decoder = expect(PLAIN, 'worse', study='decoder')
    numbers = number_of_rows(decoder, sharing.study('decoder')), number_of_rows(decoder, None)
    assert (number_of_rows(worse[0], loaded), *numbers) == (1, 8, 1)


def test_an_undecided_claim_says_where_it_is_false_and_what_would_decide_it(results):
    expected = [
        expect(variant, 'better', context={'removed': name})
        for variant, name in (('query_free/vo', 'W_Q'), ('qk/k_is_v', 'W_V'))
    ]
    decided = decide(claim(*expected), 'cpu', results)
    assert decided.verdict is UNDECIDED and decided.refuted == 'removed: W_V'
    assert 'in query_free/vo' in decided.needed
    assert decide(claim(expected[0]), 'cpu', results).refuted is None
    decided = decide(claim(expect('qk/k_is_v', 'worse')), 'cpu', results)
    parts = ('seeds in place of 6', '0.022 nats/token', '70,850 parameters', '2,048,000 tokens')
    assert decided.verdict is UNDECIDED and all(part in decided.needed for part in parts)


def test_below_the_margin_the_distance_from_it_is_what_is_needed(results):
    (item,) = evidence(expect('qk/no_o', 'better'), results.study('fair_small'))
    known = dataclasses.replace(item.difference, tuning_low=0.0, tuning_high=0.0)
    item = item._replace(difference=known)  # seeds alone do not make up for a coarse sweep
    text = 'a difference of -0.011 from the margin of 0.005 nats/token in qk/no_o'
    whole = needed([item])[1]
    verdict = dataclasses.replace(item.verdict, decision=Decision.BETTER_BELOW_MARGIN)
    short, below = needed([item._replace(verdict=verdict)])
    number = int(below.split()[0])
    assert text in below and text not in whole
    assert short == f'needs {number} seeds' and number > 2 * int(whole.split()[0])


def test_a_study_without_tuning_leaves_claims_open(results):
    decided = decide(claim(expect(PLAIN, 'worse', study='mlm_small')), 'cpu', results)
    assert decided.verdict is UNDECIDED and 'not tuned' in decided.needed
    assert decided.rows[0].value > 0.1 and decided.rows[0].decision == 'no verdict'


def test_a_missing_study_is_named_with_the_command_that_trains_it(results):
    pair = expect('qk/k_is_v', 'worse'), expect('qk/no_v', 'worse', study='masked')
    decided = decide(claim(*pair), 'cpu', results)
    assert decided.verdict is UNDECIDED and decided.studies == ('fair_small',)
    (sentence,) = decided.missing
    assert sentence.startswith('study masked has no results; python -m experiments.claims Z1 --sca')
    assert decided.needed == '--scale=cpu: masked'
    read = claim(expect('qk/k_is_v', 'worse'), measures=(Measure('fair_small', lambda path: []),))
    decided = decide(read, 'cpu', results)
    assert decided.verdict is UNDECIDED
    assert decided.missing == ('the logs of study fair_small lack what a measurement reads',)


def test_an_unfinished_study_is_named_and_needed_first(committed, tmp_path):
    shutil.copytree(committed / 'claims/cpu/full_heads', tmp_path / 'full_heads')
    path = tmp_path / 'full_heads/results.jsonl'
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(''.join(x for x in lines if '"variant": "full_size/vo"' not in x))
    results = Results(tmp_path)
    decided = decide(claim(expect('merged/vo', 'better', 'full_heads')), 'cpu', results)
    assert decided.rows[0].speaks == Speaks.OPEN and 'lacks the results of' in decided.missing[0]
    assert decided.needed == '--scale=cpu: full_heads'
    lacking = decide(claim(expect('full_size/vo', 'better', 'full_heads')), 'cpu', results)
    assert lacking.verdict is UNDECIDED and not lacking.rows
    assert 'full_size/vo at d_model=48 on stdlib has no difference' in lacking.missing[1]


def test_a_damaged_study_is_named_and_its_claims_stay_undecided(committed, tmp_path):
    shutil.copytree(committed / 'fair_small', tmp_path / 'fair_small')
    pattern = 'fair_small/runs/qk-k_is_v-d_model=48-verdict-*/documents.json'
    (documents,) = tmp_path.glob(pattern)
    documents.unlink()
    decided = decide(claim(expect('qk/k_is_v', 'worse')), 'cpu', Results(tmp_path))
    assert decided.verdict is UNDECIDED and len(decided.missing) == 1
    assert decided.missing[0].endswith('has results, but documents.json is missing')
    (tmp_path / 'fair_small/study.json').write_text('{"a"')
    decided = decide(claim(expect('qk/k_is_v', 'worse')), 'cpu', Results(tmp_path))
    assert decided.missing[0].startswith('study fair_small cannot be used: ')


def test_an_arm_that_the_study_does_not_declare_is_refused(results):
    for expected in (expect('qk/v', 'worse'), expect('qk/no_v', 'worse', versus='qk/v')):
        with pytest.raises(ConfigError, match="'fair_small' has no matched arm of variant 'qk/v'"):
            decide(claim(expected), 'cpu', results)


def test_exact_checks_decide_alone_and_measures_by_what_they_recorded(tmp_path):
    row = exact('one', 1, 1)
    decided = decide(claim(checks=(lambda: [row],)), 'smoke', Results(tmp_path))
    assert decided.verdict is ClaimVerdict.HOLDS and decided.rows == (row,) and decided.hardware

    def read(recorded):
        return [dataclasses.replace(row, value=recorded['value'])]

    measured = claim(measures=(Measure('own', read, 'a', lambda path, scale: {}),))
    assert not decide(measured, 'cpu', Results(tmp_path)).rows
    (tmp_path / 'own/measures').mkdir(parents=True)  # the process that records was killed
    begun = decide(measured, 'cpu', Results(tmp_path))
    assert not begun.rows and 'study own lacks a measurement' in begun.missing[0]
    devices = {'kind': 'TPU v5', 'count': 4}
    start = {'git': {'commit': 'abc'}, 'python': '3.11', 'versions': {}, 'devices': devices}
    recorded = {'value': 2.0, 'start': start, 'seconds': 50.0}
    write_json(tmp_path / 'own/measures/a.json', recorded)
    done = decide(measured, 'cpu', Results(tmp_path))
    assert done.verdict is ClaimVerdict.HOLDS and not done.missing and done.rows[0].value == 2
    assert (done.commit, done.hardware) == ('abc', '4 x TPU v5') and done.seconds >= 50
    assert decide(measured, 'smoke', Results(tmp_path)).verdict is UNDECIDED


def test_at_smoke_scale_studies_decide_nothing(results):
    def read(directory):
        return [Row('x', Kind.MEASURED, {}, 1.0, Speaks.FOR)]

    measured = claim(measures=(Measure('fair_small', read),))
    assert decide(measured, 'cpu', results).verdict is ClaimVerdict.HOLDS_HERE
    assert decide(measured, 'smoke', results).verdict is UNDECIDED
