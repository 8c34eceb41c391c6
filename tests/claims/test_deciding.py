"""Claims decided on committed studies."""

import dataclasses
import shutil

import pytest

from qkattn.claims.claim import Claim, Expectation, Measure, exact
from qkattn.claims.decided import ClaimVerdict, Kind, Row, Speaks
from qkattn.claims.deciding import decide, needed
from qkattn.claims.evidence import evidence, number_of_rows
from qkattn.claims.results import UNIT, Loaded, Results
from qkattn.errors import ConfigError
from qkattn.storage.records import write_json
from qkattn.verdict import Decision
from tests.claims.conftest import PLAIN, REFORMER

pytestmark = pytest.mark.stored


def claim(*expectations, checks=(), measures=()):
    return Claim('Z1', 'a', 'A.', 'source', 'Rule.', None, checks, expectations, measures)


def expect(variant, relation, study='fair_small', **options):
    return Expectation(study, variant, relation, **options)


def record(directory, scale):
    raise NotImplementedError


@pytest.fixture(scope='module')
def results(committed):
    return Results(committed)


@pytest.fixture(scope='module')
def of_claims(committed):
    return Results(committed / 'claims/cpu')


@pytest.mark.parametrize(
    ('relation', 'verdict'),
    [
        ('worse', ClaimVerdict.HOLDS_HERE),
        ('not_better', ClaimVerdict.HOLDS_HERE),
        ('not_worse', ClaimVerdict.FAILS_HERE),
        ('better', ClaimVerdict.FAILS_HERE),
        ('different', ClaimVerdict.HOLDS_HERE),
        ('equivalent', ClaimVerdict.FAILS_HERE),
    ],
)
def test_verdicts_follow_from_the_words_of_arms(of_claims, relation, verdict):
    shared = claim(expect('shared_qk/k_is_v', relation, study='sharing'))
    assert decide(shared, 'cpu', of_claims).verdict is verdict
    open_one = claim(expect('qk/vo?num_kv_heads=2', relation, study='sharing'))
    assert decide(open_one, 'cpu', of_claims).verdict is ClaimVerdict.UNDECIDED


def test_rows_tell_what_was_removed_from_what_was_reinvested(results):
    of = decide(claim(expect(PLAIN, 'worse', at='removed', reported=(0.1, 0.15))), 'cpu', results)
    removed, reinvested, matched = of.rows
    assert [row.kind for row in of.rows] == [Kind.REMOVED, Kind.REINVESTED, Kind.MATCHED]
    assert matched.value == pytest.approx(removed.value + reinvested.value)
    assert (removed.speaks, removed.word, removed.relation) == (Speaks.FOR, 'worse', 'worse')
    assert {row.speaks for row in (reinvested, matched)} == {Speaks.BESIDE}
    assert (removed.expected, removed.tolerance) == pytest.approx((0.125, 0.025))
    assert removed.low < removed.value < removed.high and removed.unit == UNIT
    assert removed.context == {
        'model': 'decoder',
        'size': 'd_model=48',
        'corpus': 'stdlib',
        'steps': '500',
    }


def test_beside_a_pair_stand_both_against_the_baseline(results):
    at = {'at': 'removed', 'versus': 'qk/no_o'}
    of = decide(claim(expect('qk/k_is_v', 'worse', **at)), 'cpu', results)
    assert [row.what for row in of.rows if row.speaks != Speaks.BESIDE] == ['qk/k_is_v - qk/no_o']
    beside = [(row.arm, row.kind) for row in of.rows if row.speaks == Speaks.BESIDE]
    kinds = (Kind.REMOVED, Kind.REINVESTED, Kind.MATCHED)
    assert sorted(beside) == sorted((arm, k) for arm in ('qk/k_is_v', 'qk/no_o') for k in kinds)
    both = claim(
        *(expect('qk/k_is_v', 'worse', **at | {'at': how}) for how in ('removed', 'matched'))
    )
    rows = decide(both, 'cpu', results).rows
    assert len([row for row in rows if row.speaks == Speaks.BESIDE]) == len(beside)


def test_beside_a_pair_of_destinations_stand_both(results):
    names = {'qk/k_is_v': 'qk/k_is_v [d_model]', 'qk/no_v': 'qk/k_is_v [d_ff]'}
    study, found = results.study('fair_small')

    def renamed(place):
        return place._replace(variant=names.get(place.variant, place.variant))

    def of(items):
        return tuple(dataclasses.replace(item, key=renamed(item.key)) for item in items)

    study = dataclasses.replace(
        study, destinations=('d_model', 'd_ff'), arms=tuple(map(renamed, study.arms))
    )
    parts = {name: of(getattr(found, name)) for name in ('arms', 'controls', 'decomposition')}
    expected = expect('qk/k_is_v [d_ff]', 'different', versus='qk/k_is_v [d_model]')
    _, beside, _ = evidence(expected, Loaded(study, dataclasses.replace(found, **parts)))
    kinds = (Kind.REMOVED, Kind.REINVESTED, Kind.MATCHED)
    where = {(row.context['destination'], row.kind) for row in beside}
    assert where == {(name, kind) for name in ('d_model', 'd_ff') for kind in kinds}


def test_the_points_of_a_curve_are_of_one_arm_and_named_by_their_place(results):
    place = {'x': 8.0, 'x_label': 'rank', 'curve': 'rank r'}
    of = decide(claim(expect('query_free/vo', 'equivalent', **place)), 'cpu', results)
    assert {(row.what, row.arm, row.x) for row in of.rows} == {('rank r', None, 8.0)}
    assert 'in rank r at rank 8 at d_model=48 on stdlib' in of.needed


def test_a_premise_speaks_against_a_claim_only(of_claims):
    true, false = (lambda v=v: [exact('one', v, 1, of='rank')] for v in (1, 2))
    for check, said in ((true, Speaks.BESIDE), (false, Speaks.AGAINST)):
        worse = claim(expect('shared_qk/k_is_v', 'worse', study='sharing'))
        of = dataclasses.replace(worse, premises=(check,))
        decided = decide(of, 'cpu', of_claims)
        assert decided.rows[0].speaks == said
        holds = said == Speaks.BESIDE
        assert decided.verdict is (ClaimVerdict.HOLDS_HERE if holds else ClaimVerdict.HOLDS_ONLY_IF)


def test_a_study_without_results_is_what_is_needed_first(results):
    pair = (expect('query_free/vo', 'equivalent'), expect('qk/no_v', 'worse', study='masked'))
    of = decide(claim(*pair), 'cpu', results)
    assert of.needed.startswith('--scale=cpu: masked with ') and 'seeds in place' not in of.needed


def test_longer_training_is_a_context_of_its_own(results):
    of = decide(claim(expect('qk/k_is_v', 'worse')), 'cpu', results)
    decided = [row for row in of.rows if row.speaks != Speaks.BESIDE]
    assert [row.context['steps'] for row in decided] == ['500', '2000']


def test_a_study_without_longer_training_has_its_own_length_alone(results):
    of = decide(claim(expect('qk/no_o', 'different', study='initialization')), 'cpu', results)
    assert [row.context['steps'] for row in of.rows if row.speaks != Speaks.BESIDE] == ['400']


def test_two_swapped_arms_change_the_verdict(results, swapped):
    control = claim(expect(PLAIN, 'worse', at='removed'))
    assert decide(control, 'cpu', results).verdict is ClaimVerdict.HOLDS_HERE
    assert decide(control, 'cpu', Results(swapped)).verdict is ClaimVerdict.FAILS_HERE


def test_a_claim_that_holds_in_some_contexts_names_them(results):
    both = [
        expect(variant, 'worse', at='removed', context={'keys': keys})
        for variant, keys in ((PLAIN, 'plain'), (REFORMER, 'of unit length'))
    ]
    of = decide(claim(*both), 'cpu', results)
    assert (of.verdict, of.condition) == (ClaimVerdict.HOLDS_ONLY_IF, 'keys: plain')
    assert of.refuted is None
    assert of.decisive_row.context['keys'] == 'plain'


def test_arms_are_compared_with_each_other(results):
    of = decide(claim(expect('qk/k_is_v', 'worse', versus='qk/no_v')), 'cpu', results)
    assert of.verdict is ClaimVerdict.HOLDS and of.rows[0].value == pytest.approx(0.0672, abs=1e-4)
    reverse = decide(claim(expect('qk/no_v', 'worse', versus='qk/k_is_v')), 'cpu', results)
    assert reverse.verdict is ClaimVerdict.FAILS


def test_an_undecided_claim_states_the_scale_that_would_decide_it(results):
    of = decide(claim(expect('qk/k_is_v', 'worse')), 'cpu', results)
    assert of.verdict is ClaimVerdict.UNDECIDED
    parts = ('seeds in place of 6', '0.022 nats/token', '70,850 parameters', '2,048,000 tokens')
    for part in parts:
        assert part in of.needed


@pytest.mark.parametrize(
    ('reported', 'verdict'),
    [
        ((0.2, 0.3), ClaimVerdict.HOLDS_HERE),
        ((0.1, 0.15), ClaimVerdict.FAILS_HERE),
        ((0.2, 0.25), ClaimVerdict.UNDECIDED),
    ],
)
def test_a_reported_number_is_held_against_the_interval(results, reported, verdict):
    of = expect(PLAIN, 'as_reported', at='removed', reported=reported)
    assert decide(claim(of), 'cpu', results).verdict is verdict


def test_a_claim_is_one_family(of_claims):
    """All rows at once are tested at the error rate; to tell them apart, each at its share."""
    worse = [expect(name, 'worse', study='sharing') for name in ('shared_qk/vo', 'qk/k_is_v')]
    together, apart = (
        [evidence(of, of_claims.study('sharing'), family)[0][0] for of in worse]
        for family in (1, 2)
    )
    assert [of.verdict.num_comparisons for of in together] == [1, 1]
    assert [of.verdict.num_comparisons for of in apart] == [2, 2]
    assert together[0].verdict.p_holm < apart[0].verdict.p_holm
    assert number_of_rows(worse[0], of_claims.study('sharing')) == 1
    # Two sizes, two corpora, two lengths of training.
    decoder = expect('shared_qk/vo', 'worse', study='decoder')
    assert number_of_rows(decoder, of_claims.study('decoder')) == 8
    assert number_of_rows(decoder, None) == 1


def test_the_models_behind_a_claim_are_named_beside_their_yardstick(of_claims):
    of = decide(claim(expect('shared_qk/vo', 'worse', study='sharing')), 'cpu', of_claims)
    (model,) = of.models
    assert model.startswith(
        'sharing, d_model=56 on stdlib: 93,464 parameters, 500 steps, 512,000 tokens, test loss '
    )
    assert '-gram' in model


def test_an_undecided_claim_says_where_it_is_false(results):
    expected = (('query_free/vo', 'W_Q'), ('qk/k_is_v', 'W_V'))
    of = [expect(variant, 'better', context={'removed': name}) for variant, name in expected]
    decided = decide(claim(*of), 'cpu', results)
    assert decided.verdict is ClaimVerdict.UNDECIDED and decided.refuted == 'removed: W_V'
    assert 'in query_free/vo' in decided.needed
    assert decide(claim(of[0]), 'cpu', results).refuted is None


def test_below_the_margin_the_distance_from_it_is_what_is_needed(results):
    (of,), _, _ = evidence(expect('qk/no_o', 'better'), results.study('fair_small'))
    known = dataclasses.replace(of.difference, tuning_low=0.0, tuning_high=0.0)
    of = of._replace(difference=known)  # seeds alone do not make up for a coarse sweep
    text = 'a difference of -0.011 from the margin of 0.005 nats/token in qk/no_o'
    _, whole = needed([of])
    assert text not in whole
    verdict = dataclasses.replace(of.verdict, decision=Decision.BETTER_BELOW_MARGIN)
    short, below = needed([of._replace(verdict=verdict)])
    number = int(below.split()[0])
    assert text in below and short == f'needs {number} seeds' and number > 2 * int(whole.split()[0])


def test_a_measure_that_its_logs_do_not_allow_is_missing(results):
    of = claim(expect('qk/k_is_v', 'worse'), measures=(Measure('fair_small', lambda path: []),))
    decided = decide(of, 'cpu', results)
    assert decided.verdict is ClaimVerdict.UNDECIDED
    assert decided.missing == ('the logs of study fair_small lack what a measurement reads',)


def test_a_study_that_cannot_be_read_is_not_called_untrained(tmp_path, committed):
    shutil.copytree(committed / 'fair_small', tmp_path / 'fair_small')
    (tmp_path / 'fair_small/study.json').write_text('{"a"')
    of = decide(claim(expect('qk/k_is_v', 'worse')), 'cpu', Results(tmp_path))
    (sentence,) = of.missing
    assert sentence.startswith('study fair_small cannot be used: ') and 'is not JSON' in sentence


def test_what_is_left_of_a_plan_is_needed_first(tmp_path, committed):
    shutil.copytree(committed / 'claims/cpu/full_heads', tmp_path / 'full_heads')
    path = tmp_path / 'full_heads/results.jsonl'
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(''.join(line for line in lines if '"variant": "full_size/vo"' not in line))
    of = decide(claim(expect('merged/vo', 'better', 'full_heads')), 'cpu', Results(tmp_path))
    assert of.rows[0].speaks == Speaks.OPEN and of.missing
    assert of.needed.startswith('--scale=cpu: full_heads with ')


def test_a_study_without_tuning_leaves_claims_open(results):
    of = decide(claim(expect(PLAIN, 'worse', study='mlm_small')), 'cpu', results)
    assert of.verdict is ClaimVerdict.UNDECIDED and 'not tuned' in of.needed
    assert of.rows[0].value > 0.1 and of.rows[0].word == 'no verdict'


def test_a_missing_study_is_named_with_the_command_that_trains_it(results):
    of = decide(claim(expect('qk/k_is_v', 'worse'), expect('a', 'worse', 'b')), 'cpu', results)
    assert of.verdict is ClaimVerdict.UNDECIDED and of.studies == ('fair_small',)
    (sentence,) = of.missing
    assert sentence.startswith(
        'study b has no results; python -m experiments.claims Z1 --scale=cpu'
    )


def test_an_unfinished_study_is_named(tmp_path, committed):
    shutil.copytree(committed / 'fair_small', tmp_path / 'fair_small')
    path = tmp_path / 'fair_small/results.jsonl'
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(''.join(line for line in lines if '"variant": "qk/k_is_v"' not in line))
    of = decide(claim(expect('qk/k_is_v', 'worse')), 'cpu', Results(tmp_path))
    assert of.verdict is ClaimVerdict.UNDECIDED and not of.rows
    assert 'lacks the results of' in of.missing[0]
    assert 'qk/k_is_v at d_model=48 on stdlib has no difference' in of.missing[1]


def test_a_damaged_study_is_named_and_its_claims_stay_undecided(tmp_path, committed):
    shutil.copytree(committed / 'fair_small', tmp_path / 'fair_small')
    (documents,) = tmp_path.glob('fair_small/runs/qk-k_is_v-d_model=48-verdict-*/documents.json')
    documents.unlink()
    of = decide(claim(expect('qk/k_is_v', 'worse')), 'cpu', Results(tmp_path))
    assert of.verdict is ClaimVerdict.UNDECIDED
    (sentence,) = of.missing
    assert sentence == (
        f'study fair_small is damaged: {documents.parent.relative_to(tmp_path / "fair_small")} '
        'has results, but documents.json is missing'
    )


def test_an_arm_that_the_study_does_not_declare_is_refused(results):
    with pytest.raises(
        ConfigError, match="study 'fair_small' has no matched arm of variant 'qk/v'"
    ):
        decide(claim(expect('qk/v', 'worse')), 'cpu', results)


def test_exact_checks_decide_alone_and_measures_beside(results, tmp_path):
    row = exact('one', 1, 1)
    of = decide(claim(checks=(lambda: [row],)), 'smoke', results)
    assert of.verdict is ClaimVerdict.HOLDS and of.rows == (row,) and of.hardware

    def read(directory):
        text = (directory / 'measures/a.txt').read_text()
        return [dataclasses.replace(row, value=float(text), study=directory.name)]

    measured = claim(measures=(Measure('own', read, record=record),))
    assert not decide(measured, 'cpu', Results(tmp_path)).rows
    (tmp_path / 'own/measures').mkdir(parents=True)
    (tmp_path / 'own/measures/a.txt').write_text('1')
    begun = decide(measured, 'cpu', Results(tmp_path))  # the process that records it was killed
    assert not begun.rows and 'study own lacks a measurement' in begun.missing[0]
    git, devices = {'commit': 'abc'}, {'kind': 'TPU v5', 'count': 4}
    start = {'git': git, 'python': '3.11', 'versions': {}, 'devices': devices}
    write_json(tmp_path / 'own/measures/test_deciding.done', {'start': start, 'seconds': 50.0})
    done = decide(measured, 'cpu', Results(tmp_path))
    assert done.verdict is ClaimVerdict.HOLDS and not done.missing
    assert (done.commit, done.hardware) == ('abc', '4 x TPU v5') and done.seconds >= 50
    assert decide(measured, 'smoke', Results(tmp_path)).verdict is ClaimVerdict.UNDECIDED


def test_at_smoke_scale_studies_decide_nothing(results):
    def read(directory):
        return [Row('x', Kind.MEASURED, {}, 1.0, Speaks.FOR, study=directory.name)]

    of = claim(measures=(Measure('fair_small', read),))
    assert decide(of, 'cpu', results).verdict is ClaimVerdict.HOLDS_HERE
    assert decide(of, 'smoke', results).verdict is ClaimVerdict.UNDECIDED
