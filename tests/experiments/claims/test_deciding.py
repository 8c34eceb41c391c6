"""Claims decided on committed studies."""

import dataclasses
import math
import shutil

import pytest

from experiments.claims import measures, studies
from experiments.claims.claim import Claim, ClaimVerdict, Expectation, Kind, Measure, Row, Speaks
from experiments.claims.deciding import cases, decide, evidence
from experiments.claims.needs import needed
from experiments.claims.studies import Results
from qkattn.errors import ConfigError
from qkattn.stats import decision, inference
from qkattn.verdict import ReasonCode, Remark, RemarkCode
from qkattn.verdict.codes import Reason
from tests.experiments.claims.conftest import CLAIMS, RESULTS

pytestmark = pytest.mark.stored
PLAIN = 'shared_qk/vo'
HOLDS_HERE, FAILS_HERE = ClaimVerdict.HOLDS_HERE, ClaimVerdict.FAILS_HERE
UNDECIDED = ClaimVerdict.UNDECIDED
DIVERGED, SPLITS_DISAGREE = ReasonCode.DIVERGED, ReasonCode.SPLITS_DISAGREE
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


def test_verdicts_follow_from_those_of_arms(added, results):
    for relation, verdict in (('worse', HOLDS_HERE), ('not_worse', FAILS_HERE)):
        doubled = claim(expect('double/double', relation, study='lm_added'))
        assert decide(doubled, 'cpu', added).verdict is verdict
        open_one = claim(expect('nonlinear_query/vo', relation, study='lm_added'))
        assert decide(open_one, 'cpu', added).verdict is UNDECIDED
    for low, high, verdict in ((0.2, 0.3, HOLDS_HERE), (0.1, 0.15, FAILS_HERE)):
        expected = expect(PLAIN, 'as_reported', at='removed', reported=(low, high))
        assert decide(claim(expected), 'cpu', results).verdict is verdict


def test_a_check_is_no_setting_and_a_part_of_its_own(added):
    worse = expect('double/double', 'worse', study='lm_added')
    sound, false = (
        lambda speaks=speaks: [Row('q', Kind.EXACT, {}, 0.0, speaks)]
        for speaks in (Speaks.FOR, Speaks.AGAINST)
    )
    assert decide(claim(worse, checks=(sound,)), 'cpu', added).verdict is HOLDS_HERE
    mixed = decide(claim(worse, checks=(false,)), 'cpu', added)
    assert mixed.verdict is ClaimVerdict.HOLDS_ONLY_IF and mixed.condition == 'model: decoder'
    other = expect('double/double', 'not_worse', study='lm_added')
    assert decide(claim(other, checks=(sound,)), 'cpu', added).condition == 'part: checks'


def test_a_claim_is_one_family(added):
    """All rows at once are tested at the error rate; to tell them apart, each at its share."""
    names = ('double/double', 'full_size/vo', 'nonlinear_query/vo')
    worse = [expect(name, 'worse', study='lm_added') for name in names]
    every = [case for expected in worse for case in cases(expected, added.study('lm_added'), added)]
    together, apart = ([*evidence(every, family)] for family in (1, 3))
    sizes = [arm.verdict.num_comparisons for _, arm in together + apart]
    assert sizes == [1, 1, 1, 3, 3, 3]
    assert together[0][1].verdict.p_holm < apart[0][1].verdict.p_holm
    # An open row makes the verdict one of selected rows, three here.
    decided = decide(claim(*worse), 'cpu', added)
    assert decided.rows[2] == apart[2][0] and decided.needed == needed(*apart[2])[1]


def test_rows_of_one_context_share_the_error_rate(added, monkeypatch):
    """Any of them makes it false."""
    families = []

    def recorded(every, family):
        families.append(family)
        return evidence(every, family)

    monkeypatch.setattr('experiments.claims.deciding.evidence', recorded)
    for relations, expected in ((('not_worse', 'equivalent'), [1, 2]), (('not_worse',), [1, 1])):
        families.clear()
        worse = (expect('double/double', relation, study='lm_added') for relation in relations)
        assert decide(claim(*worse), 'cpu', added).verdict is FAILS_HERE and families == expected


def test_fractions_of_training_share_the_error_rate(monkeypatch):
    loaded, families, judge = Results(CLAIMS).study('lm_dropped'), [], decision.judge

    def recorded(tested, planned, **given):
        families.append(planned)
        return judge(tested, planned=planned, **given)

    monkeypatch.setattr(decision, 'judge', recorded)
    assert [row.value for row in measures.early(loaded)] == [2, 0, 0]
    assert families == [3 * loaded.findings.num_comparisons] * 3
    # What a rule withholds the verdict of decides nothing here either.
    blocked = [dataclasses.replace(arm, remarks=(BLOCK,)) for arm in loaded.findings.arms]
    findings = dataclasses.replace(loaded.findings, arms=tuple(blocked))
    assert [row.value for row in measures.early(loaded._replace(findings=findings))] == [0, 0, 0]


def test_the_distance_from_the_bound_of_a_relation_decides(results):
    """Seeds do not make up for a coarse sweep."""
    ((row, arm),) = evidence(
        cases(expect('qk/no_o', 'better'), results.study('fair_small'), results)
    )
    assert needed(row, arm)[1].startswith('a finer sweep (this one may miss')
    known = dataclasses.replace(arm.difference, tuning_low=0.0, tuning_high=0.0)
    coarse = dataclasses.replace(known, tuning_high=0.01)  # of 0.016 to the bound
    for difference, advised in ((coarse, True), (known, False)):
        comparison = dataclasses.replace(arm.comparison, difference=difference)
        arm = dataclasses.replace(arm, comparison=comparison)
        text = needed(dataclasses.replace(row, relation='not_worse'), arm)[1]
        assert (', or fewer after a finer sweep (this one may miss 0.01' in text) == advised
    seeds = []
    for relation, bound in (('better', -0.005), ('equivalent', -0.005), ('not_worse', 0.005)):
        number, text = needed(dataclasses.replace(row, relation=relation), arm)
        assert f'a difference of -0.011 from {bound:+g} nats/token in qk/no_o' in text
        seeds.append(number)
    assert seeds[0] == seeds[1] > 2 * seeds[2]
    # Seeds find what they find with probability 0.8 by a one-sided test.
    alpha = 2 * decision.level(2) / arm.verdict.num_comparisons  # a repeat is the second look
    assert seeds[2] == inference.to_find(known, 0.005 - known.mean, alpha)[0]
    reported = dataclasses.replace(row, relation='as_reported', expected=0.02, tolerance=0.01)
    number, text = needed(reported, arm)
    assert 'from +0.01 nats/token' in text  # of a 95 % interval
    assert number == inference.to_find(known, 0.01 - known.mean, decision.ALPHA)[0]
    one = dataclasses.replace(known, sd=None, n=1)
    arm = dataclasses.replace(arm, comparison=dataclasses.replace(arm.comparison, difference=one))
    assert needed(row, arm)[1].startswith('more seeds than 1, to tell')
    for code, lacking in ((DIVERGED, 'trials that'), (SPLITS_DISAGREE, 'a validation split')):
        verdict = dataclasses.replace(arm.verdict, reasons=(Reason(code),))
        number, text = needed(row, dataclasses.replace(arm, verdict=verdict))
        assert number == math.inf and text.startswith(lacking)


def test_missing_results_are_named_and_needed_first(results, committed, tmp_path):
    pair = expect('qk/k_is_v', 'worse'), expect('qk/no_v', 'worse', study='masked_lm')
    decided = decide(claim(*pair), 'cpu', results)
    assert decided.verdict is UNDECIDED and decided.studies == ('fair_small',)
    assert decided.missing == ('study masked_lm has no results',)
    assert decided.needed == 'the results of masked_lm at scale cpu'
    removed = expect('merged/vo', 'worse', study='quickstart', at='removed')
    decided = decide(claim(pair[0], removed), 'cpu', results)
    assert decided.verdict is UNDECIDED and 'merged/vo has no control' in decided.missing[0]
    # Results of a run, then the declaration.
    study = shutil.copytree(committed / 'claims/cpu/lm_added', tmp_path / 'lm_added')
    full_size = claim(expect('full_size/vo', 'better', 'lm_added'))
    lines = (study / 'results.jsonl').read_text().splitlines(keepends=True)
    kept = (line for line in lines if '"variant": "full_size/vo"' not in line)
    (study / 'results.jsonl').write_text(''.join(kept))
    decided = decide(full_size, 'cpu', Results(tmp_path))
    assert (decided.verdict, decided.rows) == (UNDECIDED, ())
    assert 'lacks the results of' in decided.missing[0]
    assert 'full_size/vo at d_model=96 on stdlib has no difference from the' in decided.missing[1]
    assert decided.needed == 'the results of lm_added at scale cpu'
    other = claim(expect('double/double', 'worse', 'lm_added', versus='full_size/vo'))
    lacks = decide(other, 'cpu', Results(tmp_path)).missing[1]
    assert lacks.endswith('on stdlib has no difference from full_size/vo yet')
    lines = [line.replace('"git": {', '"other": {') for line in lines]  # no record of a commit
    (study / 'results.jsonl').write_text(''.join(lines))
    assert decide(full_size, 'cpu', Results(tmp_path)).commit == 'not recorded'
    (study / 'study.json').write_text('{"a"')
    decided = decide(full_size, 'cpu', Results(tmp_path))
    assert decided.missing[0].startswith('study lm_added cannot be used: ')


def test_an_arm_that_the_study_does_not_declare_is_refused(results):
    for expected in (expect('qk/v', 'worse'), expect('qk/no_v', 'worse', versus='qk/v')):
        with pytest.raises(ConfigError, match="'fair_small' has no matched arm of variant 'qk/v'"):
            decide(claim(expected), 'cpu', results)


@pytest.mark.parametrize('part', ['checks', 'measures'])
def test_a_check_or_a_measure_that_fails_is_named_with_its_claim(results, part):
    def absent(*loaded):
        return [row.absent for row in (*loaded, 1)]

    failing = claim(**{part: (absent if part == 'checks' else Measure('fair_small', absent),)})
    with pytest.raises(
        ConfigError, match=r"claim='Z1' fails, AttributeError in .*test_deciding\.py"
    ):
        decide(failing, 'cpu', results)


def test_measures_decide_by_what_they_read_of_a_study(results, tmp_path, monkeypatch):
    def read(loaded):
        return [Row(loaded.study.name, Kind.MEASURED, {}, 2.0, Speaks.FOR)]

    measured = claim(measures=(Measure('fair_small', read),))
    done = decide(measured, 'cpu', results)
    assert done.verdict is HOLDS_HERE and not done.missing and done.studies == ('fair_small',)
    assert (done.rows[0].quantity, done.rows[0].study) == ('fair_small', 'fair_small')
    trial = results.study('fair_small').study.trials[0]
    assert done.commit == trial.provenance['git']['commit'][:12] and done.seconds > 50
    # Models short of a yardstick decide nothing, nor do studies that only show that they run.
    short = decide(measured, 'cpu', Results(RESULTS))
    assert (short.verdict, short.rows[0].speaks) == (UNDECIDED, Speaks.OPEN)
    assert decide(measured, 'smoke', results).verdict is UNDECIDED
    study, findings = results.study('fair_small')
    first, *others = findings.arms
    blocked = {'arms': (dataclasses.replace(first, remarks=(BLOCK,)), *others)}
    for changes in (blocked, {'remarks': (BLOCK,)}):
        withheld = study, dataclasses.replace(findings, **changes)
        monkeypatch.setattr(studies, 'load_findings', lambda path, loaded=withheld: loaded)
        assert decide(measured, 'cpu', Results(tmp_path)).verdict is UNDECIDED
    monkeypatch.undo()
    absent = decide(measured, 'cpu', Results(tmp_path))
    assert absent.verdict is UNDECIDED and absent.missing == ('study fair_small has no results',)


def test_the_last_repeat_with_an_arm_decides_a_claim_on_the_first_study():
    """Whatever study of a chain a claim names, and only for arms that the repeat has."""
    committed = Results(CLAIMS)
    assert committed.newest_first('lm_rank') == ['lm_rank_12', 'lm_rank']
    assert committed.newest_first('heads_depth') == ['lm_near_margin', 'heads_depth']
    for name, variant, at, decides in (
        ('lm_rank', 'low_rank(rank=12)/vo', 'matched', 'lm_rank_12'),
        ('lm_rank', 'low_rank(rank=4)/vo', 'matched', 'lm_rank'),
        ('lm_rank_12', 'low_rank(rank=12)/vo', 'matched', 'lm_rank_12'),
        ('translation', 'qk/vo?encoder_variant=shared_qk/vo', 'removed', 'translation_shared'),
        ('translation', 'qk/vo?encoder_variant=shared_qk/vo', 'matched', 'translation'),
    ):
        expected = expect(variant, 'not_worse', study=name, at=at)
        (case,) = cases(expected, committed.study(name), committed)
        assert case.name == decides
        ((row, arm),) = evidence([case])
        assert (row.study, row.kind) == (decides, at)
        if arm.verdict.decision is not decision.Decision.NO_VERDICT:
            assert arm.verdict.look == (1 if decides == name != 'lm_rank_12' else 2)
