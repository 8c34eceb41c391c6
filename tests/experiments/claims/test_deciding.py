"""Claims decided on committed studies."""

import dataclasses
import math
import shutil

import pytest

from experiments.claims import measures, studies
from experiments.claims.claim import Claim, ClaimVerdict, Expectation, Kind, Measure, Row, Speaks
from experiments.claims.deciding import cases, decide, judge_cases
from experiments.claims.needs import needed
from experiments.claims.studies import Results
from qkattn.errors import ConfigError
from qkattn.stats import decision, inference
from qkattn.verdict import ReasonCode, Remark, RemarkCode
from qkattn.verdict.codes import Reason
from tests.experiments.claims.conftest import CLAIMS, RESULTS

pytestmark = pytest.mark.stored
SHARED_QK = 'shared_qk/vo'
HOLDS_HERE = ClaimVerdict.HOLDS_HERE
FAILS_HERE = ClaimVerdict.FAILS_HERE
UNDECIDED = ClaimVerdict.UNDECIDED
BLOCK = Remark(RemarkCode.OTHER_DECLARATION, blocks=True)


def make_claim(*expectations, **parts):
    texts = {'title': 'a', 'statement': 'A.', 'source': 'source', 'rule': 'Rule.'}
    return Claim(name='Z1', **texts, expectations=expectations, **parts)


def expect(variant, relation, study='fair_small', **options):
    return Expectation(study, variant, relation, **options)


@pytest.fixture(scope='module')
def results(committed):
    """The studies fair_small and quickstart."""
    return Results(committed)


@pytest.fixture(scope='module')
def added(committed):
    """The study lm_added."""
    return Results(committed / 'claims/cpu')


@pytest.mark.parametrize(
    ('relation', 'verdict'), [('worse', HOLDS_HERE), ('not_worse', FAILS_HERE)]
)
def test_the_verdict_on_an_arm_decides_a_relation(relation, verdict, added):
    claim = make_claim(expect('double/double', relation, study='lm_added'))
    assert decide(claim, 'cpu', added).verdict is verdict


@pytest.mark.parametrize('relation', ['worse', 'not_worse'])
def test_an_undecided_arm_leaves_a_claim_open(relation, added):
    claim = make_claim(expect('nonlinear_query/vo', relation, study='lm_added'))
    assert decide(claim, 'cpu', added).verdict is UNDECIDED


@pytest.mark.parametrize(
    ('reported', 'verdict'), [((0.2, 0.3), HOLDS_HERE), ((0.1, 0.15), FAILS_HERE)]
)
def test_an_interval_is_compared_with_the_reported_range(reported, verdict, results):
    expected = expect(SHARED_QK, 'as_reported', at=Kind.SAME_SHAPE, reported=reported)
    assert decide(make_claim(expected), 'cpu', results).verdict is verdict


def sound_check():
    return [Row('q', Kind.EXACT, {}, 0.0, Speaks.FOR)]


def false_check():
    return [Row('q', Kind.EXACT, {}, 0.0, Speaks.AGAINST)]


def test_a_check_does_not_add_a_setting_in_which_the_claim_holds(added):
    worse = expect('double/double', 'worse', study='lm_added')
    claim = make_claim(worse, checks=(sound_check,))
    assert decide(claim, 'cpu', added).verdict is HOLDS_HERE


def test_a_claim_that_only_the_study_supports_holds_only_if(added):
    worse = expect('double/double', 'worse', study='lm_added')
    decided = decide(make_claim(worse, checks=(false_check,)), 'cpu', added)
    assert decided.verdict is ClaimVerdict.HOLDS_ONLY_IF
    assert decided.condition == 'model: decoder'


def test_a_claim_that_only_the_check_supports_holds_for_the_checks(added):
    not_worse = expect('double/double', 'not_worse', study='lm_added')
    decided = decide(make_claim(not_worse, checks=(sound_check,)), 'cpu', added)
    assert decided.condition == 'part: checks'


@pytest.fixture(scope='module')
def three_expectations():
    """Three arms of lm_added are worse; the study leaves the third one open."""
    variants = ('double/double', 'full_size/vo', 'nonlinear_query/vo')
    return [expect(variant, 'worse', study='lm_added') for variant in variants]


@pytest.fixture(scope='module')
def three_cases(three_expectations, added):
    """The case of each of `three_expectations`."""
    study = added.study('lm_added')
    all_cases = []
    for expected in three_expectations:
        all_cases.extend(cases(expected, study, added))
    return all_cases


def test_p_values_are_corrected_for_the_rows_that_share_the_error_rate(three_cases):
    alone = list(judge_cases(three_cases, num_sharing=1))
    sharing = list(judge_cases(three_cases, num_sharing=3))

    assert [arm.verdict.num_comparisons for _, arm in alone] == [1, 1, 1]
    assert [arm.verdict.num_comparisons for _, arm in sharing] == [3, 3, 3]
    _, first_alone = alone[0]
    _, first_sharing = sharing[0]
    assert first_alone.verdict.p_holm < first_sharing.verdict.p_holm


def test_rows_share_the_error_rate_where_one_is_open(three_expectations, three_cases, added):
    decided = decide(make_claim(*three_expectations), 'cpu', added)

    sharing = list(judge_cases(three_cases, num_sharing=3))
    open_row, arm = sharing[2]
    assert decided.rows[2] == open_row
    assert decided.needed == needed(open_row, arm).text


@pytest.mark.parametrize(
    ('relations', 'expected_families'),
    [(('not_worse', 'equivalent'), [1, 2]), (('not_worse',), [1, 1])],
)
def test_relations_that_could_each_refute_a_claim_share_the_error_rate(
    relations, expected_families, added, monkeypatch
):
    """Two relations on one arm are a family of 2 tests, since either makes the claim false."""
    families = []

    def recorded(all_cases, num_sharing):
        families.append(num_sharing)
        return judge_cases(all_cases, num_sharing)

    monkeypatch.setattr('experiments.claims.deciding.judge_cases', recorded)
    false = [expect('double/double', relation, study='lm_added') for relation in relations]

    assert decide(make_claim(*false), 'cpu', added).verdict is FAILS_HERE
    assert families == expected_families


@pytest.fixture(scope='module')
def lm_dropped():
    """The findings of the committed study lm_dropped."""
    return Results(CLAIMS).study('lm_dropped')


def test_fractions_of_training_share_the_error_rate(lm_dropped, monkeypatch):
    """The study has evaluations at three fractions before the end."""
    num_comparisons = []
    judge = decision.judge

    def recorded(tested, planned, **options):
        num_comparisons.append(planned)
        return judge(tested, planned=planned, **options)

    monkeypatch.setattr(decision, 'judge', recorded)
    rows = measures.early(lm_dropped)

    # In each row, the number of arms whose difference still changes.
    assert [row.value for row in rows] == [2, 0, 0]
    assert num_comparisons == [3 * lm_dropped.num_comparisons] * 3


def test_arms_with_withheld_verdicts_do_not_count_as_changing(lm_dropped):
    blocked_arms = [dataclasses.replace(arm, remarks=(BLOCK,)) for arm in lm_dropped.arms]
    findings = dataclasses.replace(lm_dropped, arms=tuple(blocked_arms))

    rows = measures.early(findings)
    assert [row.value for row in rows] == [0, 0, 0]


@pytest.fixture(scope='module')
def no_o(results):
    """The row and the arm of an expectation that qk/no_o is better, which its study leaves open."""
    study = results.study('fair_small')
    judged = list(judge_cases(cases(expect('qk/no_o', 'better'), study, results)))
    assert len(judged) == 1
    return judged[0]


def with_difference(arm, **fields):
    """The arm with changed fields of its difference.

    By default, tuning adds no uncertainty.
    """
    fields = {'tuning_low': 0.0, 'tuning_high': 0.0} | fields
    difference = dataclasses.replace(arm.difference, **fields)
    comparison = dataclasses.replace(arm.comparison, difference=difference)
    return dataclasses.replace(arm, comparison=comparison)


def test_seeds_do_not_make_up_for_a_coarse_sweep(no_o):
    row, arm = no_o
    assert needed(row, arm).text.startswith('a finer sweep (this one may miss')


@pytest.mark.parametrize(('tuning_high', 'is_advised'), [(0.01, True), (0.0, False)])
def test_a_finer_sweep_is_advised_if_tuning_is_most_of_the_distance(tuning_high, is_advised, no_o):
    """The difference is 0.016 from the bound, and the sweep may miss `tuning_high`."""
    row, arm = no_o
    arm = with_difference(arm, tuning_high=tuning_high)

    text = needed(dataclasses.replace(row, relation='not_worse'), arm).text

    advice = ', or fewer after a finer sweep (this one may miss 0.01'
    assert (advice in text) == is_advised


def test_a_bound_farther_away_needs_fewer_seeds(no_o):
    row, arm = no_o
    arm = with_difference(arm)

    seeds = {}
    for relation, bound in (('better', -0.005), ('equivalent', -0.005), ('not_worse', 0.005)):
        need = needed(dataclasses.replace(row, relation=relation), arm)
        assert f'a difference of -0.011 from {bound:+g} nats/token in qk/no_o' in need.text
        seeds[relation] = need.seeds

    assert seeds['better'] == seeds['equivalent']
    assert seeds['better'] > 2 * seeds['not_worse']


def test_the_seeds_needed_are_those_of_a_one_sided_test_at_a_second_look(no_o):
    row, arm = no_o
    arm = with_difference(arm)
    row = dataclasses.replace(row, relation='not_worse')

    second_look = 2
    one_sided_alpha = decision.level(second_look) / arm.verdict.num_comparisons
    distance = 0.005 - arm.difference.mean
    # `to_find` takes the error rate of a two-sided test.
    seeds, _ = inference.to_find(arm.difference, distance, 2 * one_sided_alpha)
    assert needed(row, arm).seeds == seeds


def test_the_seeds_for_a_reported_range_are_those_of_a_95_percent_interval(no_o):
    """The claim reports 0.02 +- 0.01, so the nearer bound of the range is 0.01."""
    row, arm = no_o
    arm = with_difference(arm)
    row = dataclasses.replace(row, relation='as_reported', expected=0.02, tolerance=0.01)

    need = needed(row, arm)

    assert 'from +0.01 nats/token' in need.text
    distance = 0.01 - arm.difference.mean
    seeds, _ = inference.to_find(arm.difference, distance, decision.ALPHA)
    assert need.seeds == seeds


def test_one_seed_has_no_spread_so_more_are_needed(no_o):
    row, arm = no_o
    arm = with_difference(arm, sd=None, n=1)
    assert needed(row, arm).text.startswith('more seeds than 1, to tell')


@pytest.mark.parametrize(
    ('code', 'start'),
    [
        (ReasonCode.DIVERGED, 'trials that'),
        (ReasonCode.SPLITS_DISAGREE, 'a validation split'),
    ],
)
def test_seeds_do_not_make_up_for_divergence_or_disagreeing_splits(code, start, no_o):
    row, arm = no_o
    verdict = dataclasses.replace(arm.verdict, reasons=(Reason(code),))
    arm = dataclasses.replace(arm, verdict=verdict)

    need = needed(row, arm)

    assert need.seeds == math.inf
    assert need.text.startswith(start)


def test_a_claim_first_needs_the_results_of_its_studies(results):
    with_results = expect('qk/k_is_v', 'worse', study='fair_small')
    without_results = expect('qk/no_v', 'worse', study='masked_lm')

    decided = decide(make_claim(with_results, without_results), 'cpu', results)

    assert decided.verdict is UNDECIDED
    assert decided.studies == ('fair_small',)
    assert decided.missing == ('study masked_lm has no results',)
    assert decided.needed == 'the results of masked_lm at scale cpu'


def test_a_control_that_a_study_does_not_train_is_missing(results):
    trained = expect('qk/k_is_v', 'worse')
    without_control = expect('merged/vo', 'worse', study='quickstart', at=Kind.SAME_SHAPE)

    decided = decide(make_claim(trained, without_control), 'cpu', results)

    assert decided.verdict is UNDECIDED
    assert 'merged/vo has no control' in decided.missing[0]


@pytest.fixture
def lm_added(committed, tmp_path):
    """A copy of the study lm_added that a test may change."""
    return shutil.copytree(committed / 'claims/cpu/lm_added', tmp_path / 'lm_added')


FULL_SIZE = make_claim(expect('full_size/vo', 'better', 'lm_added'))


def test_an_arm_without_results_is_missing(lm_added):
    """The study has lost the results of full_size/vo."""
    lines = (lm_added / 'results.jsonl').read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"variant": "full_size/vo"' not in line]
    (lm_added / 'results.jsonl').write_text(''.join(kept))
    results = Results(lm_added.parent)

    decided = decide(FULL_SIZE, 'cpu', results)

    assert decided.verdict is UNDECIDED
    assert decided.rows == ()
    assert 'lacks the results of' in decided.missing[0]
    assert 'full_size/vo at d_model=96 on stdlib has no difference from the' in decided.missing[1]
    assert decided.needed == 'the results of lm_added at scale cpu'

    # A claim that compares another arm with full_size/vo lacks this difference.
    versus_full_size = expect('double/double', 'worse', 'lm_added', versus='full_size/vo')
    decided = decide(make_claim(versus_full_size), 'cpu', results)
    end = 'on stdlib has no difference from full_size/vo yet'
    assert decided.missing[1].endswith(end)


def test_a_commit_that_no_run_recorded_is_named_so(lm_added):
    text = (lm_added / 'results.jsonl').read_text()
    text_without_commits = text.replace('"git": {', '"other": {')
    (lm_added / 'results.jsonl').write_text(text_without_commits)

    decided = decide(FULL_SIZE, 'cpu', Results(lm_added.parent))
    assert decided.commit == 'not recorded'


def test_a_study_that_cannot_be_read_is_missing(lm_added):
    (lm_added / 'study.json').write_text('{"a"')
    decided = decide(FULL_SIZE, 'cpu', Results(lm_added.parent))
    assert decided.missing[0].startswith('study lm_added cannot be used: ')


@pytest.mark.parametrize(
    'expected',
    [
        pytest.param(expect('qk/v', 'worse'), id='variant'),
        pytest.param(expect('qk/no_v', 'worse', versus='qk/v'), id='versus'),
    ],
)
def test_an_arm_that_the_study_does_not_declare_is_refused(expected, results):
    with pytest.raises(ConfigError, match="'fair_small' has no matched arm of variant 'qk/v'"):
        decide(make_claim(expected), 'cpu', results)


def raises_attribute_error(findings=None):
    """A check without an argument, or a measure that reads the findings of a study."""
    return 'a string'.absent


@pytest.mark.parametrize(
    'parts',
    [
        pytest.param({'checks': (raises_attribute_error,)}, id='check'),
        pytest.param({'measures': (Measure('fair_small', raises_attribute_error),)}, id='measure'),
    ],
)
def test_a_check_or_a_measure_that_raises_is_named_with_its_claim(parts, results):
    message = r"claim='Z1' fails, AttributeError in .*test_deciding\.py"
    with pytest.raises(ConfigError, match=message):
        decide(make_claim(**parts), 'cpu', results)


def read_name(findings):
    """A measure: one row that speaks for the claim, named after the study."""
    return [Row(findings.study.name, Kind.MEASURED, {}, 2.0, Speaks.FOR)]


MEASURED = make_claim(measures=(Measure('fair_small', read_name),))


def test_measures_decide_by_what_they_read_of_a_study(results):
    decided = decide(MEASURED, 'cpu', results)

    assert decided.verdict is HOLDS_HERE
    assert not decided.missing
    assert decided.studies == ('fair_small',)
    row = decided.rows[0]
    assert row.quantity == 'fair_small'
    assert row.study == 'fair_small'


def test_a_claim_has_the_provenance_of_its_training(results):
    decided = decide(MEASURED, 'cpu', results)

    trial = results.study('fair_small').study.trials[0]
    full_commit = trial.provenance['git']['commit']
    assert decided.commit == full_commit[:12]
    assert decided.seconds > 50


def test_measures_of_models_short_of_a_yardstick_decide_nothing():
    """In the results as they are committed, the baseline of fair_small is."""
    decided = decide(MEASURED, 'cpu', Results(RESULTS))
    assert decided.verdict is UNDECIDED
    assert decided.rows[0].speaks == Speaks.OPEN


def test_measures_at_scale_smoke_decide_nothing(results):
    assert decide(MEASURED, 'smoke', results).verdict is UNDECIDED


@pytest.mark.parametrize('blocked', ['baseline', 'study'])
def test_measures_decide_nothing_where_a_rule_withholds_verdicts(
    blocked, results, tmp_path, monkeypatch
):
    findings = results.study('fair_small')
    if blocked == 'study':
        withheld = dataclasses.replace(findings, remarks=(BLOCK,))
    else:
        baseline = dataclasses.replace(findings.arms[0], remarks=(BLOCK,))
        withheld = dataclasses.replace(findings, arms=(baseline, *findings.arms[1:]))
    monkeypatch.setattr(studies, 'load_findings', lambda path: withheld)

    assert decide(MEASURED, 'cpu', Results(tmp_path)).verdict is UNDECIDED


def test_measures_without_a_study_are_missing(tmp_path):
    decided = decide(MEASURED, 'cpu', Results(tmp_path))
    assert decided.verdict is UNDECIDED
    assert decided.missing == ('study fair_small has no results',)


@pytest.fixture(scope='module')
def committed_cpu():
    """The committed studies of claims at scale cpu, as they are."""
    return Results(CLAIMS)


def test_a_study_and_its_repeats_are_listed_newest_first(committed_cpu):
    assert committed_cpu.newest_first('lm_rank') == ['lm_rank_12', 'lm_rank']
    assert committed_cpu.newest_first('heads_depth') == ['lm_near_margin', 'heads_depth']


SHARED_ENCODER = 'qk/vo?encoder_variant=shared_qk/vo'


@pytest.mark.parametrize(
    ('study', 'variant', 'at', 'deciding_study', 'look'),
    [
        ('lm_rank', 'low_rank(rank=12)/vo', 'matched', 'lm_rank_12', 2),
        ('lm_rank', 'low_rank(rank=4)/vo', 'matched', 'lm_rank', 1),
        ('lm_rank_12', 'low_rank(rank=12)/vo', 'matched', 'lm_rank_12', 2),
        ('translation', SHARED_ENCODER, Kind.SAME_SHAPE, 'translation_shared', 2),
        ('translation', SHARED_ENCODER, 'matched', 'translation', 1),
    ],
)
def test_the_last_repeat_that_trained_an_arm_decides_it(
    study, variant, at, deciding_study, look, committed_cpu
):
    """For example, lm_rank_12 repeats lm_rank with rank 12 alone: its look is the second one."""
    expected = expect(variant, 'not_worse', study=study, at=at)
    findings = committed_cpu.study(study)

    (case,) = cases(expected, findings, committed_cpu)
    ((row, arm),) = judge_cases([case])

    assert case.name == deciding_study
    assert row.study == deciding_study
    assert row.kind == at
    if arm.verdict.decision is not decision.Decision.NO_VERDICT:
        assert arm.verdict.look == look
