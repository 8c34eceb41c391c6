"""Claims decided on committed studies."""

import dataclasses
import math
import re
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
from tests.processes import ROOT

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


MEANINGS = {'holds': 'it costs', 'holds only if': 'it depends', 'undecided': 'not known'}


def test_a_verdict_in_one_setting_says_so_in_its_meaning(added):
    worse = expect('double/double', 'worse', study='lm_added')
    decided = decide(make_claim(worse, meanings=MEANINGS), 'cpu', added)
    assert decided.meaning == 'in the one setting tried, it costs'


def test_an_undecided_claim_means_what_it_declares(added):
    worse = expect('nonlinear_query/vo', 'worse', study='lm_added')
    decided = decide(make_claim(worse, meanings=MEANINGS), 'cpu', added)
    assert decided.meaning == 'not known'


@pytest.mark.parametrize(
    ('of_contexts', 'meaning'),
    [({}, 'it depends'), ({'model: decoder': 'decoders pay'}, 'decoders pay')],
)
def test_a_meaning_of_the_contexts_precedes_that_of_holds_only_if(of_contexts, meaning, added):
    worse = expect('double/double', 'worse', study='lm_added')
    claim = make_claim(
        worse,
        checks=(false_check,),
        conditions={'model: decoder': 'the model is a decoder'},
        meanings=MEANINGS | of_contexts,
    )
    assert decide(claim, 'cpu', added).meaning == f'in the one setting tried, {meaning}'


def test_an_exact_verdict_means_what_it_declares(results):
    claim = make_claim(checks=(sound_check,), meanings=MEANINGS)
    assert decide(claim, 'cpu', results).meaning == 'it costs'


def test_a_claim_without_meanings_has_none(results):
    assert decide(make_claim(checks=(sound_check,)), 'cpu', results).meaning is None


@pytest.fixture(scope='module')
def three_expectations():
    """Expectations that three arms of lm_added are worse. The study leaves the third one open."""
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
    ('relations', 'expected_numbers_sharing'),
    [(('not_worse', 'equivalent'), [1, 2]), (('not_worse',), [1, 1])],
    ids=['two relations', 'one relation'],
)
def test_relations_that_could_each_refute_a_claim_share_the_error_rate(
    relations, expected_numbers_sharing, added, monkeypatch
):
    """If a claim fails, it is judged again, with the error rate divided among its relations.

    A relation is what the claim expects of an arm. The arm double/double is worse than the
    baseline, so both 'not_worse' and 'equivalent' are false.
    """
    numbers_sharing = []  # the divisor of the error rate, each time that the claim is judged

    def recorded(all_cases, num_sharing):
        """Calls judge_cases, and records the divisor of the error rate."""
        numbers_sharing.append(num_sharing)
        return judge_cases(all_cases, num_sharing)

    monkeypatch.setattr('experiments.claims.deciding.judge_cases', recorded)
    false = [expect('double/double', relation, study='lm_added') for relation in relations]

    assert decide(make_claim(*false), 'cpu', added).verdict is FAILS_HERE

    # In the first round, each test has the whole error rate. The second round divides the error
    # rate by the number of relations.
    assert numbers_sharing == expected_numbers_sharing


@pytest.fixture(scope='module')
def lm_dropped():
    """The findings of the committed study lm_dropped."""
    return Results(CLAIMS).study('lm_dropped')


def test_fractions_of_training_share_the_error_rate(lm_dropped, monkeypatch):
    """All tests of `measures.early` share one error rate.

    The study lm_dropped has evaluations at 3 steps before the last one. A test asks whether an
    arm's difference in loss changes by more than the margin after such a step.
    """
    planned_comparisons = []  # how many comparisons share the error rate, in each call
    judge = decision.judge

    def recorded(tested, planned, **options):
        """Calls decision.judge, and records how many comparisons share the error rate."""
        planned_comparisons.append(planned)
        return judge(tested, planned=planned, **options)

    monkeypatch.setattr(decision, 'judge', recorded)
    rows = measures.early(lm_dropped)

    # There is a row for each early step. Its value is the number of arms that still change.
    assert [row.value for row in rows] == [2, 0, 0]

    # `judge` is called once for each step. Each call corrects for the tests at all 3 steps.
    num_fractions = 3
    num_sharing = num_fractions * lm_dropped.num_comparisons
    assert planned_comparisons == [num_sharing, num_sharing, num_sharing]


def test_arms_with_withheld_verdicts_do_not_count_as_changing(lm_dropped):
    blocked_arms = [dataclasses.replace(arm, remarks=(BLOCK,)) for arm in lm_dropped.arms]
    findings = dataclasses.replace(lm_dropped, arms=tuple(blocked_arms))

    rows = measures.early(findings)
    assert [row.value for row in rows] == [0, 0, 0]


@pytest.fixture(scope='module')
def no_o(results):
    """The row and the arm for the expectation that qk/no_o is better, which stays open."""
    study = results.study('fair_small')
    judged = list(judge_cases(cases(expect('qk/no_o', 'better'), study, results)))
    assert len(judged) == 1
    return judged[0]


def with_difference(arm, **fields):
    """The arm with changed fields of its difference. By default, tuning adds no uncertainty."""
    fields = {'tuning_low': 0.0, 'tuning_high': 0.0} | fields
    difference = dataclasses.replace(arm.difference, **fields)
    comparison = dataclasses.replace(arm.comparison, difference=difference)
    return dataclasses.replace(arm, comparison=comparison)


def test_seeds_do_not_make_up_for_a_coarse_sweep(no_o):
    row, arm = no_o
    assert needed(row, arm).text.startswith('a finer sweep (this one may miss')


@pytest.mark.parametrize(('tuning_high', 'is_advised'), [(0.01, True), (0.0, False)])
def test_a_finer_sweep_is_advised_if_tuning_is_most_of_the_distance(tuning_high, is_advised, no_o):
    """A finer sweep is advised if `tuning_high` is above half of the distance to the bound.

    The distance is 0.005 - (-0.011) = 0.016, where 0.005 is the margin and -0.011 the difference.
    """
    row, arm = no_o
    arm = with_difference(arm, tuning_high=tuning_high)

    text = needed(dataclasses.replace(row, relation='not_worse'), arm).text

    advice = ', or fewer after a finer sweep (this one may miss 0.01'
    assert (advice in text) == is_advised


def test_a_bound_farther_away_needs_fewer_seeds(no_o):
    """`needed` says how many seeds would show on which side of a bound the difference lies.

    The loss of qk/no_o is 0.011 below the baseline's, and the margin is 0.005. 'equivalent' has two
    bounds, -0.005 and +0.005. Only the nearer one, -0.005, counts.
    """
    row, arm = no_o
    arm = with_difference(arm)  # without the uncertainty of tuning

    seeds = {}
    for relation, bound in (('better', -0.005), ('equivalent', -0.005), ('not_worse', 0.005)):
        row_of_relation = dataclasses.replace(row, relation=relation)
        need = needed(row_of_relation, arm)
        assert f'a difference of -0.011 from {bound:+g} nats/token in qk/no_o' in need.text
        seeds[relation] = need.seeds

    # distance to -0.005: 0.011 - 0.005 = 0.006
    # distance to +0.005: 0.011 + 0.005 = 0.016
    assert seeds['equivalent'] == seeds['better']
    assert seeds['better'] > 2 * seeds['not_worse']


def test_the_seeds_needed_are_those_of_a_one_sided_test_at_a_second_look(no_o):
    """The number of seeds is computed for a second look, whose test has a smaller level.

    A look is a study that tests the arm. More seeds need a second study, so a second look.
    """
    row, arm = no_o
    arm = with_difference(arm)  # without the uncertainty of tuning
    row = dataclasses.replace(row, relation='not_worse')

    # All comparisons of a study share the level of its look.
    second_look = 2
    one_sided_alpha = decision.level(second_look) / arm.verdict.num_comparisons
    # 'not_worse' needs a difference below the margin of 0.005.
    margin = 0.005
    distance = margin - arm.difference.mean
    # `to_find` takes the level of a two-sided test, which is twice the one-sided level.
    seeds, _ = inference.to_find(arm.difference, distance, 2 * one_sided_alpha)
    assert needed(row, arm).seeds == seeds


def test_the_seeds_for_a_reported_range_are_those_of_a_95_percent_interval(no_o):
    """The 95 % interval of an arm is compared with the range that a claim reports.

    The range is 0.02 +- 0.01. The difference of the arm is negative, so the nearer bound is 0.01.
    """
    row, arm = no_o
    arm = with_difference(arm)  # without the uncertainty of tuning
    row = dataclasses.replace(row, relation='as_reported', expected=0.02, tolerance=0.01)

    need = needed(row, arm)

    nearer_bound = 0.01
    assert f'from +{nearer_bound} nats/token' in need.text

    # A two-sided test at a level of 5 % corresponds to a 95 % interval.
    distance = nearer_bound - arm.difference.mean
    seeds, _ = inference.to_find(arm.difference, distance, alpha=0.05)
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


def remove_results(study, variant):
    """Removes all results of a variant from the directory of a study."""
    file = study / 'results.jsonl'
    lines = file.read_text().splitlines(keepends=True)
    lines_of_others = [line for line in lines if f'"variant": "{variant}"' not in line]
    file.write_text(''.join(lines_of_others))


FULL_SIZE = make_claim(expect('full_size/vo', 'better', 'lm_added'))


def test_an_arm_without_results_is_missing(lm_added):
    """A claim on an arm without results is undecided, and names the missing results."""
    remove_results(lm_added, 'full_size/vo')

    # `FULL_SIZE` claims that full_size/vo is better than the baseline.
    decided = decide(FULL_SIZE, 'cpu', Results(lm_added.parent))

    assert decided.verdict is UNDECIDED
    assert decided.rows == ()
    # One message is about the study, and the other is about the difference in the claim.
    missing_of_study = decided.missing[0]
    missing_difference = decided.missing[1]
    assert 'lacks the results of' in missing_of_study
    assert 'full_size/vo at d_model=96 on stdlib has no difference from the' in missing_difference
    assert decided.needed == 'the results of lm_added at scale cpu'


def test_an_arm_whose_partner_has_no_results_is_missing(lm_added):
    """A comparison of two arms is missing if the second arm has no results."""
    remove_results(lm_added, 'full_size/vo')
    versus_full_size = expect('double/double', 'worse', 'lm_added', versus='full_size/vo')

    decided = decide(make_claim(versus_full_size), 'cpu', Results(lm_added.parent))

    # missing[0] is about the study, which lacks results.
    assert decided.missing[1].endswith('on stdlib has no difference from full_size/vo yet')


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
    """A check without an argument, and also a measure, which gets the findings of a study."""
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
    """A measure that gives one row: its quantity is the study's name, and it supports the claim."""
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
    """In the committed results of fair_small, the loss of the baseline is above its yardstick."""
    decided = decide(MEASURED, 'cpu', Results(RESULTS))
    assert decided.verdict is UNDECIDED
    assert decided.rows[0].speaks == Speaks.OPEN


def test_measures_at_scale_smoke_decide_nothing(results):
    assert decide(MEASURED, 'smoke', results).verdict is UNDECIDED


@pytest.mark.parametrize('blocked', ['baseline', 'study'])
def test_measures_decide_nothing_where_a_rule_withholds_verdicts(
    blocked, results, tmp_path, monkeypatch
):
    """A measure decides nothing if the study or its baseline has a remark that blocks verdicts.

    A remark says, for example, that the study breaks a rule. Without the remark, the claim
    `MEASURED` holds here.
    """
    findings = results.study('fair_small')
    if blocked == 'study':
        withheld = dataclasses.replace(findings, remarks=(BLOCK,))
    else:
        # The first arm is the baseline.
        baseline, *other_arms = findings.arms
        blocked_baseline = dataclasses.replace(baseline, remarks=(BLOCK,))
        withheld = dataclasses.replace(findings, arms=(blocked_baseline, *other_arms))
    # The results are read from an empty directory, so `load_findings` is replaced.
    monkeypatch.setattr(studies, 'load_findings', lambda path: withheld)

    assert decide(MEASURED, 'cpu', Results(tmp_path)).verdict is UNDECIDED


def test_measures_without_a_study_are_missing(tmp_path):
    decided = decide(MEASURED, 'cpu', Results(tmp_path))
    assert decided.verdict is UNDECIDED
    assert decided.missing == ('study fair_small has no results',)


@pytest.fixture(scope='module')
def committed_cpu():
    """The committed studies of claims at scale cpu, unchanged."""
    return Results(CLAIMS)


def test_the_claims_that_the_page_shows_are_decided(committed_cpu):
    """docs/claims.md shows a claim with an expectation, and one with a measure."""
    page = (ROOT / 'docs/claims.md').read_text()
    claims = []
    for source in re.findall(r'^```python\n(.*?)^```$', page, re.MULTILINE | re.DOTALL):
        names = {}
        exec(source, names)
        claims.append(names['CLAIM'])
    with_expectation, with_measure = claims

    # The study of the tutorial is beside those of the claims.
    rows = decide(with_expectation, 'cpu', Results(ROOT / 'experiments/results')).rows
    assert [row.relation for row in rows if row.speaks != Speaks.BESIDE] == ['worse']

    # The measure has a row for each width.
    rows = decide(with_measure, 'cpu', committed_cpu).rows
    sizes = [row.context['size'].partition('&')[0] for row in rows]
    assert sizes == [f'd_model={d_model}' for d_model in (64, 80, 96, 112, 144)]
    assert {row.speaks for row in rows} == {Speaks.FOR, Speaks.AGAINST}


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
    """If a later study repeats an arm with other seeds, the later study decides the arm.

    `look` is how many studies have tested the arm so far. lm_rank_12 repeats only the arm of rank
    12 of lm_rank, so this arm has look 2. `at` is the kind of comparison, such as equal parameter
    count ('matched').
    """
    expected = expect(variant, 'not_worse', study=study, at=at)
    findings = committed_cpu.study(study)

    # The variant has one arm, because the study has one size and one corpus.
    (case,) = cases(expected, findings, committed_cpu)
    ((row, arm),) = judge_cases([case])

    assert case.name == deciding_study
    assert row.study == deciding_study
    assert row.kind == at
    # If the verdict is withheld, looks are not counted.
    if arm.verdict.decision is not decision.Decision.NO_VERDICT:
        assert arm.verdict.look == look
