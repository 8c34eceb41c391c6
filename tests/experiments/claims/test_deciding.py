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


def claim(*expectations, **parts):
    texts = {'title': 'a', 'statement': 'A.', 'source': 'source', 'rule': 'Rule.'}
    return Claim(name='Z1', **texts, expectations=expectations, **parts)


def expect(variant, relation, study='fair_small', **options):
    return Expectation(study, variant, relation, **options)


@pytest.fixture(scope='module')
def results(committed):
    return Results(committed)


@pytest.fixture(scope='module')
def added(committed):
    return Results(committed / 'claims/cpu')


@pytest.mark.parametrize(
    ('relation', 'verdict'), [('worse', HOLDS_HERE), ('not_worse', FAILS_HERE)]
)
def test_the_verdict_on_an_arm_decides_a_relation(relation, verdict, added):
    doubled = claim(expect('double/double', relation, study='lm_added'))
    assert decide(doubled, 'cpu', added).verdict is verdict


@pytest.mark.parametrize('relation', ['worse', 'not_worse'])
def test_an_undecided_arm_leaves_a_claim_open(relation, added):
    undecided = claim(expect('nonlinear_query/vo', relation, study='lm_added'))
    assert decide(undecided, 'cpu', added).verdict is UNDECIDED


@pytest.mark.parametrize(
    ('reported', 'verdict'), [((0.2, 0.3), HOLDS_HERE), ((0.1, 0.15), FAILS_HERE)]
)
def test_a_difference_is_as_reported_by_its_interval(reported, verdict, results):
    expected = expect(SHARED_QK, 'as_reported', at=Kind.SAME_SHAPE, reported=reported)
    assert decide(claim(expected), 'cpu', results).verdict is verdict


def sound_check():
    return [Row('q', Kind.EXACT, {}, 0.0, Speaks.FOR)]


def false_check():
    return [Row('q', Kind.EXACT, {}, 0.0, Speaks.AGAINST)]


def test_a_check_does_not_add_a_setting_in_which_the_claim_holds(added):
    worse = expect('double/double', 'worse', study='lm_added')
    assert decide(claim(worse, checks=(sound_check,)), 'cpu', added).verdict is HOLDS_HERE


def test_a_check_and_a_study_that_disagree_make_a_condition(added):
    # The study agrees with the claim and the check does not; then the reverse.
    worse = expect('double/double', 'worse', study='lm_added')
    mixed = decide(claim(worse, checks=(false_check,)), 'cpu', added)
    assert mixed.verdict is ClaimVerdict.HOLDS_ONLY_IF
    assert mixed.condition == 'model: decoder'
    not_worse = expect('double/double', 'not_worse', study='lm_added')
    mixed = decide(claim(not_worse, checks=(sound_check,)), 'cpu', added)
    assert mixed.condition == 'part: checks'


def test_the_rows_of_a_claim_are_tested_together_and_then_each_at_its_share(added):
    """Each row has the whole error rate where all must agree, and a third of it to tell them apart.

    A row of three has a smaller Holm-adjusted p-value in the first case.
    """
    names = ('double/double', 'full_size/vo', 'nonlinear_query/vo')
    worse = [expect(name, 'worse', study='lm_added') for name in names]
    every_case = []
    for expected in worse:
        every_case.extend(cases(expected, added.study('lm_added'), added))
    together = list(judge_cases(every_case, 1))
    apart = list(judge_cases(every_case, 3))
    assert [arm.verdict.num_comparisons for _, arm in together] == [1, 1, 1]
    assert [arm.verdict.num_comparisons for _, arm in apart] == [3, 3, 3]
    assert together[0][1].verdict.p_holm < apart[0][1].verdict.p_holm
    # An open row makes the verdict one of selected rows, three here.
    decided = decide(claim(*worse), 'cpu', added)
    row, arm = apart[2]
    assert decided.rows[2] == row
    assert decided.needed == needed(row, arm).text


@pytest.mark.parametrize(
    ('relations', 'expected'), [(('not_worse', 'equivalent'), [1, 2]), (('not_worse',), [1, 1])]
)
def test_rows_of_one_context_that_could_each_refute_a_claim_share_the_error_rate(
    relations, expected, added, monkeypatch
):
    """Two relations on one arm are tested as a family of 2, since either makes the claim false."""
    families = []

    def recorded(every_case, family):
        families.append(family)
        return judge_cases(every_case, family)

    monkeypatch.setattr('experiments.claims.deciding.judge_cases', recorded)
    false = [expect('double/double', relation, study='lm_added') for relation in relations]
    assert decide(claim(*false), 'cpu', added).verdict is FAILS_HERE
    assert families == expected


def test_fractions_of_training_share_the_error_rate(monkeypatch):
    loaded = Results(CLAIMS).study('lm_dropped')
    families = []
    judge = decision.judge

    def recorded(tested, planned, **options):
        families.append(planned)
        return judge(tested, planned=planned, **options)

    monkeypatch.setattr(decision, 'judge', recorded)
    assert [row.value for row in measures.early(loaded)] == [2, 0, 0]
    assert families == [3 * loaded.num_comparisons] * 3
    # Arms whose verdicts a rule withholds decide nothing here either.
    blocked = [dataclasses.replace(arm, remarks=(BLOCK,)) for arm in loaded.arms]
    findings = dataclasses.replace(loaded, arms=tuple(blocked))
    assert [row.value for row in measures.early(findings)] == [0, 0, 0]


@pytest.fixture(scope='module')
def no_o(results):
    """The row and the arm of an expectation that qk/no_o is better, which its study leaves open."""
    of_study = results.study('fair_small')
    ((row, arm),) = judge_cases(cases(expect('qk/no_o', 'better'), of_study, results))
    return row, arm


def with_difference(arm, **fields):
    """The arm with these fields of its difference; tuning may miss 0 unless they say otherwise."""
    fields = {'tuning_low': 0.0, 'tuning_high': 0.0} | fields
    difference = dataclasses.replace(arm.difference, **fields)
    comparison = dataclasses.replace(arm.comparison, difference=difference)
    return dataclasses.replace(arm, comparison=comparison)


def test_seeds_do_not_make_up_for_a_coarse_sweep(no_o):
    assert needed(*no_o).text.startswith('a finer sweep (this one may miss')


@pytest.mark.parametrize(('tuning_high', 'is_advised'), [(0.01, True), (0.0, False)])
def test_a_finer_sweep_is_advised_where_tuning_takes_most_of_the_distance(
    tuning_high, is_advised, no_o
):
    """The difference is 0.016 from the bound; a sweep that may miss 0.01 takes most of that."""
    row, arm = no_o
    arm = with_difference(arm, tuning_high=tuning_high)
    text = needed(dataclasses.replace(row, relation='not_worse'), arm).text
    assert (', or fewer after a finer sweep (this one may miss 0.01' in text) == is_advised


def test_the_distance_from_the_bound_of_a_relation_decides(no_o):
    row, arm = no_o
    arm = with_difference(arm)
    # How many seeds are needed depends on how far -0.011 is from the bound.
    seeds = []
    for relation, bound in (('better', -0.005), ('equivalent', -0.005), ('not_worse', 0.005)):
        need = needed(dataclasses.replace(row, relation=relation), arm)
        assert f'a difference of -0.011 from {bound:+g} nats/token in qk/no_o' in need.text
        seeds.append(need.seeds)
    assert seeds[0] == seeds[1] > 2 * seeds[2]


def test_the_seeds_needed_are_those_of_a_one_sided_test_at_a_second_look(no_o):
    row, arm = no_o
    arm = with_difference(arm)
    alpha = 2 * decision.level(2) / arm.verdict.num_comparisons
    distance = 0.005 - arm.difference.mean
    seeds, _ = inference.to_find(arm.difference, distance, alpha)
    assert needed(dataclasses.replace(row, relation='not_worse'), arm).seeds == seeds


def test_the_seeds_that_a_reported_range_needs_are_those_of_a_95_percent_interval(no_o):
    # The claim reports 0.02 +- 0.01, so the nearer bound of the range is 0.01.
    row, arm = no_o
    arm = with_difference(arm)
    row = dataclasses.replace(row, relation='as_reported', expected=0.02, tolerance=0.01)
    seeds, _ = inference.to_find(arm.difference, 0.01 - arm.difference.mean, decision.ALPHA)
    need = needed(row, arm)
    assert 'from +0.01 nats/token' in need.text
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
def test_no_number_of_seeds_makes_up_for_divergence_or_disagreeing_splits(code, start, no_o):
    row, arm = no_o
    verdict = dataclasses.replace(arm.verdict, reasons=(Reason(code),))
    need = needed(row, dataclasses.replace(arm, verdict=verdict))
    assert need.seeds == math.inf
    assert need.text.startswith(start)


def test_a_study_without_results_is_what_a_claim_needs_first(results):
    expected = [expect('qk/k_is_v', 'worse'), expect('qk/no_v', 'worse', study='masked_lm')]
    decided = decide(claim(*expected), 'cpu', results)
    assert decided.verdict is UNDECIDED
    assert decided.studies == ('fair_small',)
    assert decided.missing == ('study masked_lm has no results',)
    assert decided.needed == 'the results of masked_lm at scale cpu'


def test_a_control_that_a_study_does_not_train_is_missing(results):
    removed = expect('merged/vo', 'worse', study='quickstart', at=Kind.SAME_SHAPE)
    decided = decide(claim(expect('qk/k_is_v', 'worse'), removed), 'cpu', results)
    assert decided.verdict is UNDECIDED
    assert 'merged/vo has no control' in decided.missing[0]


@pytest.fixture
def lm_added(committed, tmp_path):
    """A copy of the study lm_added, whose files may be changed."""
    return shutil.copytree(committed / 'claims/cpu/lm_added', tmp_path / 'lm_added')


FULL_SIZE = claim(expect('full_size/vo', 'better', 'lm_added'))


def test_an_arm_without_results_is_missing(lm_added):
    # The study lacks the results of the arm full_size/vo.
    lines = (lm_added / 'results.jsonl').read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"variant": "full_size/vo"' not in line]
    (lm_added / 'results.jsonl').write_text(''.join(kept))
    results = Results(lm_added.parent)
    decided = decide(FULL_SIZE, 'cpu', results)
    assert (decided.verdict, decided.rows) == (UNDECIDED, ())
    assert 'lacks the results of' in decided.missing[0]
    assert 'full_size/vo at d_model=96 on stdlib has no difference from the' in decided.missing[1]
    assert decided.needed == 'the results of lm_added at scale cpu'

    # The same where the claim compares another arm with it.
    pair = claim(expect('double/double', 'worse', 'lm_added', versus='full_size/vo'))
    missing = decide(pair, 'cpu', results).missing[1]
    assert missing.endswith('on stdlib has no difference from full_size/vo yet')


def test_a_commit_that_no_run_recorded_is_said_to_be_not_recorded(lm_added):
    text = (lm_added / 'results.jsonl').read_text()
    (lm_added / 'results.jsonl').write_text(text.replace('"git": {', '"other": {'))
    assert decide(FULL_SIZE, 'cpu', Results(lm_added.parent)).commit == 'not recorded'


def test_a_study_that_cannot_be_read_is_missing(lm_added):
    (lm_added / 'study.json').write_text('{"a"')
    decided = decide(FULL_SIZE, 'cpu', Results(lm_added.parent))
    assert decided.missing[0].startswith('study lm_added cannot be used: ')


@pytest.mark.parametrize(
    'expected', [expect('qk/v', 'worse'), expect('qk/no_v', 'worse', versus='qk/v')]
)
def test_an_arm_that_the_study_does_not_declare_is_refused(expected, results):
    with pytest.raises(ConfigError, match="'fair_small' has no matched arm of variant 'qk/v'"):
        decide(claim(expected), 'cpu', results)


@pytest.mark.parametrize('part', ['checks', 'measures'])
def test_a_check_or_a_measure_that_raises_is_named_with_its_claim(results, part):
    def raises_attribute_error(*loaded):
        return [row.absent for row in (*loaded, 1)]

    entry = raises_attribute_error
    if part == 'measures':
        entry = Measure('fair_small', raises_attribute_error)
    failing = claim(**{part: (entry,)})
    with pytest.raises(
        ConfigError, match=r"claim='Z1' fails, AttributeError in .*test_deciding\.py"
    ):
        decide(failing, 'cpu', results)


def read_name(loaded):
    return [Row(loaded.study.name, Kind.MEASURED, {}, 2.0, Speaks.FOR)]


MEASURED = claim(measures=(Measure('fair_small', read_name),))


def test_measures_decide_by_what_they_read_of_a_study(results):
    decided = decide(MEASURED, 'cpu', results)
    assert decided.verdict is HOLDS_HERE
    assert not decided.missing
    assert decided.studies == ('fair_small',)
    assert (decided.rows[0].quantity, decided.rows[0].study) == ('fair_small', 'fair_small')


def test_a_claim_has_the_provenance_of_its_training(results):
    decided = decide(MEASURED, 'cpu', results)
    trial = results.study('fair_small').study.trials[0]
    assert decided.commit == trial.provenance['git']['commit'][:12]
    assert decided.seconds > 50


def test_measures_of_models_short_of_a_yardstick_decide_nothing():
    decided = decide(MEASURED, 'cpu', Results(RESULTS))
    assert (decided.verdict, decided.rows[0].speaks) == (UNDECIDED, Speaks.OPEN)


def test_measures_at_scale_smoke_decide_nothing(results):
    assert decide(MEASURED, 'smoke', results).verdict is UNDECIDED


@pytest.mark.parametrize('blocked', ['baseline', 'study'])
def test_measures_decide_nothing_where_a_rule_withholds_verdicts(
    blocked, results, tmp_path, monkeypatch
):
    findings = results.study('fair_small')
    baseline, *others = findings.arms
    changes = {'remarks': (BLOCK,)}
    if blocked == 'baseline':
        changes = {'arms': (dataclasses.replace(baseline, remarks=(BLOCK,)), *others)}
    withheld = dataclasses.replace(findings, **changes)
    monkeypatch.setattr(studies, 'load_findings', lambda path: withheld)
    assert decide(MEASURED, 'cpu', Results(tmp_path)).verdict is UNDECIDED


def test_measures_without_a_study_are_missing(tmp_path):
    decided = decide(MEASURED, 'cpu', Results(tmp_path))
    assert decided.verdict is UNDECIDED
    assert decided.missing == ('study fair_small has no results',)


def test_the_last_repeat_that_trained_an_arm_decides_a_claim_on_the_first_study():
    """lm_rank_12 repeats lm_rank with rank 12 alone: it decides that arm, lm_rank all others."""
    committed = Results(CLAIMS)
    assert committed.newest_first('lm_rank') == ['lm_rank_12', 'lm_rank']
    assert committed.newest_first('heads_depth') == ['lm_near_margin', 'heads_depth']
    # Of each expectation: its study, its variant, its shape, and the study that decides it.
    for name, variant, at, decides in (
        ('lm_rank', 'low_rank(rank=12)/vo', 'matched', 'lm_rank_12'),
        ('lm_rank', 'low_rank(rank=4)/vo', 'matched', 'lm_rank'),
        ('lm_rank_12', 'low_rank(rank=12)/vo', 'matched', 'lm_rank_12'),
        (
            'translation',
            'qk/vo?encoder_variant=shared_qk/vo',
            Kind.SAME_SHAPE,
            'translation_shared',
        ),
        ('translation', 'qk/vo?encoder_variant=shared_qk/vo', 'matched', 'translation'),
    ):
        expected = expect(variant, 'not_worse', study=name, at=at)
        (case,) = cases(expected, committed.study(name), committed)
        assert case.name == decides
        ((row, arm),) = judge_cases([case])
        assert (row.study, row.kind) == (decides, at)
        if arm.verdict.decision is not decision.Decision.NO_VERDICT:
            assert arm.verdict.look == (1 if decides == name != 'lm_rank_12' else 2)
