"""Verdicts: every number recomputed by hand, every decision with the codes of its reasons."""

import itertools
import json

import numpy as np
import pytest
from scipy import stats

from qkattn.stats import decision, inference
from qkattn.storage import ledger
from qkattn.study.arm_key import EXPECTED
from qkattn.verdict import Decision, ReasonCode, RemarkCode, find, load_study
from tests.studies import edit_plan, run_name, tuned_arm, write_documents, write_tuned

BETTER, BETTER_BELOW, EQUIVALENT, WORSE_BELOW, WORSE, UNDECIDED, NO_VERDICT = Decision
SIZE = 'd_model=128'
BASE = 2 + 0.05 * np.arange(8)
NOISE = 0.001 * np.array([3, -1, 2, 0, -2, 1, -3, 1])
ERROR = NOISE.std(ddof=1) / 8**0.5


def arm(variant, delta, validation=None, noise=NOISE, **keywords):
    """Verdict losses that are `delta` above the baseline's on test, `validation` on validation."""
    records = tuned_arm(variant, losses=list(BASE + delta + noise * (delta != 0)), **keywords)
    for record in records:
        if validation is not None and record['stage'] == 'verdict':
            record['val_loss'] += validation - delta
    return records


def found_in(directory, *arms, **changes):
    return find(load_study(write_tuned(directory, sum(arms, []), **changes)))


def decisions(found):
    return {a.variant: a.verdict.decision for a in found.arms if a.verdict}


def codes(reasons):
    return [reason.code.name for reason in reasons]


def test_verdicts_by_hand(study_dir):
    deltas = {'b/vo': -0.03, 'c/vo': 0.02, 'd/vo': 0.0004}
    found = found_in(study_dir, arm('qk/vo', 0), *(arm(*item) for item in deltas.items()))
    assert decisions(found) == {'b/vo': BETTER, 'c/vo': WORSE, 'd/vo': EQUIVALENT}
    b = found.arms[1]
    assert b.differences == pytest.approx((NOISE - 0.03).tolist())
    half, mean = stats.t.ppf(0.975, 7) * ERROR, (NOISE - 0.03).mean()
    assert (b.difference.low, b.difference.high) == pytest.approx((mean - half, mean + half))
    raw = [2 * stats.t.sf(abs((NOISE + d).mean()) / ERROR, 7) for d in deltas.values()]
    # Holm: the smallest times 3, the next times 2, the largest as it is.
    holm = [3 * raw[0], 2 * raw[1], raw[2]]
    assert [a.verdict.p_holm for a in found.arms[1:]] == pytest.approx(holm, rel=1e-6)
    assert found.num_comparisons == 3 and found.arms[0].verdict is None and found.scaling == ()
    different, beyond = b.verdict.reasons
    assert codes(b.verdict.reasons) == ['DIFFERENT', 'BEYOND_MARGIN']
    assert different.data == {'p': b.verdict.p_holm}
    assert beyond.data == {'margin': 0.005, 'p': b.verdict.p_margin_holm}
    assert (b.verdict.alpha, b.verdict.num_seeds) == (pytest.approx(0.05), 8)
    (same,) = found.arms[3].verdict.reasons
    assert codes([same]) == ['EQUIVALENT']
    assert same.data == {'p': found.arms[3].verdict.p_equivalence_holm}


@pytest.mark.parametrize(
    ('test', 'validation', 'decided'),
    [
        (-0.03, -0.001, BETTER),
        (-0.03, 0.001, None),
        (-0.003, -0.001, BETTER_BELOW),
        (-0.003, 0.001, None),
        (0.03, 0.001, WORSE),
        (0.03, -0.001, None),
        (0.0004, -0.004, EQUIVALENT),
        (0.0004, -0.006, None),
    ],
)
def test_the_test_split_decides_and_validation_supports_it(study_dir, test, validation, decided):
    noise = (1.5 if test == -0.003 else 1.0) * (NOISE - NOISE.mean())
    found = found_in(study_dir, arm('qk/vo', 0), arm('b/vo', test, validation, noise))
    verdict, compared = found.arms[1].verdict, found.arms[1].comparison
    assert compared.difference.mean == pytest.approx(test) and found.split == 'test'
    assert compared.validation == pytest.approx(validation)
    assert verdict.decision is (decided or UNDECIDED)
    if decided is None:
        reason = verdict.reasons[-1]
        assert reason.code is ReasonCode.SPLITS_DISAGREE
        means = {'test': compared.difference.mean, 'validation': compared.validation}
        assert {name: reason.data[name] for name in means} == means


@pytest.mark.parametrize(
    ('delta', 'passes'),
    [
        (0.03, {'worse', 'not better'}),
        (-0.03, {'better', 'not worse'}),
        (0.0, {'not better', 'not worse'}),
        (None, set()),
    ],
)
def test_a_positive_control_passes_with_the_expected_verdict(study_dir, delta, passes):
    noise = 40 * NOISE if delta is None else NOISE - NOISE.mean()
    records = arm('b/vo', delta or 1e-9, noise=noise)
    expected = [f'b/vo is {name}' for name in EXPECTED]
    found = found_in(study_dir, arm('qk/vo', 0), records, arm('c/vo', 0.02), expected=expected)
    assert {control.expected.decision for control in found.positive if control.passed} == passes
    assert [control.passed is None for control in found.positive] == [False] * 4
    assert {control.verdict.num_comparisons for control in found.positive} == {4}


def test_a_positive_control_may_be_at_equal_shape_and_waits_for_results(study_dir):
    records = arm('qk/vo', 0) + arm('b/vo', 0.03, control='equal_shape') + arm('b/vo', -0.03)
    expected = ['b/vo is worse at equal shape', 'b/vo is worse']
    found = found_in(study_dir, records, expected=expected)
    outcomes = [(control.passed, control.arm.control) for control in found.positive]
    assert outcomes == [(True, 'equal_shape'), (False, None)]
    found = found_in(study_dir, records[:-8], expected=expected)
    assert [control.passed for control in found.positive] == [True, None]


def shifted(directory, variant, split, sd, corpus='stdlib'):
    """Adds differences by document to one arm, of mean zero; returns them and the tokens."""
    run = run_name(variant, SIZE, 'verdict', corpus=corpus)
    records = [json.loads(x) for x in (directory / 'results.jsonl').read_text().splitlines()]
    shifts = np.random.default_rng(len(corpus)).normal(0, sd, 100)
    of_run = [record for record in records if record['run'] == run]
    write_documents(directory / run, of_run, 100, {split: shifts})
    content = json.loads((directory / run / 'documents.json').read_text())
    return shifts, np.array(content[split]['tokens'])


@pytest.mark.parametrize(('sd', 'decided'), [(0.02, BETTER), (0.3, UNDECIDED)])
def test_documents_add_their_error_to_the_difference(study_dir, sd, decided):
    found_in(study_dir, arm('qk/vo', 0), arm('b/vo', -0.03))
    shifted(study_dir, 'b/vo', 'validation', 0.3)
    _, b = find(load_study(study_dir)).arms  # those of validation do not count
    assert b.difference.error_evaluation == pytest.approx(0, abs=1e-9)
    assert b.verdict.decision is BETTER
    shifts, tokens = shifted(study_dir, 'b/vo', 'test', sd)
    _, b = find(load_study(study_dir)).arms
    share = tokens / tokens.sum()
    away = shifts - share @ shifts
    expected = np.sqrt(np.sum(share**2 * away**2 / (1 - share)))
    assert b.difference.error_evaluation == pytest.approx(expected, rel=1e-6)
    assert b.difference.error_seeds == pytest.approx(ERROR) and b.comparison.num_documents == 100
    assert b.difference.df == pytest.approx(
        (ERROR**2 + expected**2) ** 2
        / (ERROR**4 / 7 + expected**4 / (np.sum(share**2) ** 2 / np.sum(share**4) - 1))
    )
    assert b.verdict.decision is decided


def at_looks(directory, losses, looks=(4, 8), results=None):
    """A study whose verdict runs hold the seeds of one look each, as many as have `results`."""
    records = []
    for variant, of_arm in losses.items():
        screened, finished = tuned_arm(variant)[:10], tuned_arm(variant, losses=of_arm)[10:]
        records += screened
        for number, (start, end) in enumerate(itertools.pairwise((0, *looks))):
            if number < (results or {}).get(variant, len(looks)):
                name = f'{variant[0]}{number}'
                run = {'run': name, 'config_hash': name}
                records += [record | run for record in finished[start:end]]
    return found_in(directory, records, looks=list(looks))


def test_the_first_look_that_decides_decides_at_its_own_level(study_dir):
    """b is decided at the first look, which later seeds do not change; c at the second one."""
    late = np.where(np.arange(8) < 4, NOISE * 20, 0.03 + NOISE)
    losses = {'qk/vo': BASE, 'b/vo': BASE - 0.05 + NOISE / 50, 'c/vo': BASE + late}
    losses['b/vo'][4:] = BASE[4:] + 0.4
    verdicts = {a.variant: a.verdict for a in at_looks(study_dir / 'a', losses).arms}
    first, second = decision.spending((4, 8))
    assert first < 0.006 and first + second == pytest.approx(0.05)
    assert verdicts['b/vo'].decision is BETTER
    assert (verdicts['b/vo'].num_seeds, verdicts['b/vo'].alpha) == (4, first)
    assert (verdicts['c/vo'].num_seeds, verdicts['c/vo'].alpha) == (8, second)
    difference = inference.paired((losses['b/vo'] - BASE)[:4].tolist(), 0.005)
    assert verdicts['b/vo'].p_holm <= 2 * difference.p * (1 + 1e-9) <= first
    # A p value between the first look's level and 0.05 does not decide at the look.
    small = -0.0035 + 0.001 * np.array([1, -1, 1, -1, 0, 0, 0, 0])
    assert first < inference.paired(small[:4].tolist(), 0.005).p < 0.05
    losses = {'qk/vo': BASE, 'b/vo': BASE + small}
    found = at_looks(study_dir / 'b', losses, results={'b/vo': 1, 'qk/vo': 1})
    assert (found.arms[1].verdict.decision, found.arms[1].verdict.num_seeds) == (UNDECIDED, 4)


def test_a_look_in_progress_is_a_remark_and_seeds_are_those_of_looks(study_dir):
    losses = {'qk/vo': BASE, 'b/vo': BASE - 0.002 + 3 * NOISE, 'c/vo': BASE - 0.002 + 3 * NOISE}
    found = at_looks(study_dir / 'a', losses, results={'c/vo': 1})
    assert [a.verdict.num_seeds for a in found.arms[1:]] == [8, 4] and not found.blocks
    (remark,) = [r for r in found.remarks if r.code is RemarkCode.LOOK_IN_PROGRESS]
    assert remark.data == {'look': 2, 'looks': 2, 'seeds': 8, 'reached': 2, 'arms': 3}
    records = [r for v, of_arm in losses.items() for r in tuned_arm(v, losses=of_arm[:6])]
    found = found_in(study_dir / 'b', records, looks=[4, 8])
    assert codes(found.blocks) == ['OTHER_SEEDS'] and set(decisions(found).values()) == {NO_VERDICT}


def test_the_family_is_the_widest_that_was_declared(study_dir):
    """Arms that are deleted from a study later on are corrected for, and withhold its verdicts."""
    records = arm('qk/vo', 0) + arm('b/vo', 0.003), arm('c/vo', 0.03)
    assert found_in(study_dir, *records).num_comparisons == 2
    entries = (study_dir / ledger.NAME).read_bytes()
    write_tuned(study_dir, records[0])
    (study_dir / ledger.NAME).write_bytes(entries)
    found = find(load_study(study_dir))
    assert codes(found.blocks) == ['OTHER_DECLARATION'] and found.num_comparisons == 2
    ledger.declare(study_dir, json.loads((study_dir / 'study.json').read_text()))
    b = find(load_study(study_dir)).arms[1]
    assert b.verdict.num_comparisons == 2
    assert b.verdict.p_holm == pytest.approx(2 * b.difference.p)


def corpora(deltas, noises=None):
    """Arms of the baseline and b/vo, a corpus each with its own difference and noise."""
    records = []
    for corpus, delta in deltas.items():
        data = {'corpus': corpus, 'data': {'name': corpus, 'version': '1'}}
        noise = (noises or {}).get(corpus, NOISE)
        for variant, of_arm in (('qk/vo', 0), ('b/vo', delta)):
            records += arm(variant, of_arm, noise=noise, **data)
    return records


def test_several_corpora_give_a_verdict_each_and_one_over_all(study_dir):
    noises = {'stdlib': NOISE, 'packages': -NOISE / 2}
    found = found_in(study_dir, corpora({'stdlib': -0.03, 'packages': 0.012}, noises))
    assert [a.verdict.decision for a in found.arms if a.verdict] == [BETTER, WORSE]
    assert found.num_comparisons == 2
    (overall,) = found.overall
    assert (overall.variant, overall.size) == ('b/vo', SIZE)
    assert [a.corpus for a in overall.arms] == ['stdlib', 'packages']
    means = (-0.03 + NOISE + 0.012 - NOISE / 2) / 2
    assert list(overall.comparison.differences.values()) == pytest.approx(means.tolist())
    p = stats.ttest_1samp(means, 0).pvalue
    assert overall.comparison.difference.p == pytest.approx(p) == overall.verdict.p_holm
    assert overall.verdict.decision is BETTER and overall.verdict.num_comparisons == 1
    for corpus in ('stdlib', 'packages'):
        shifted(study_dir, 'b/vo', 'test', 0.1, corpus)
    found = find(load_study(study_dir))
    errors = [a.difference.error_evaluation for a in found.arms if not a.is_baseline]
    (overall,) = found.overall
    assert overall.comparison.difference.error_evaluation == pytest.approx(np.hypot(*errors) / 2)
    assert min(errors) > 0.005 and overall.comparison.num_documents == 200
    # What blocks one corpus blocks the verdict over all.
    run = run_name('b/vo', SIZE, 'verdict', corpus='packages')
    edit_plan(study_dir, run, optimizer__schedule='constant')
    (overall,) = find(load_study(study_dir)).overall
    assert overall.verdict.decision is NO_VERDICT
    assert 'NOT_ANNEALED' in codes(overall.verdict.reasons)


@pytest.mark.parametrize('whose', ['arm', 'baseline'])
@pytest.mark.parametrize('code', ['NOT_BRACKETED', 'UNBOUNDED_OPTIMUM'])
def test_an_optimum_that_is_not_known_withholds_the_verdict(study_dir, whose, code):
    """Beyond the grid, or bracketed by diverged values alone."""
    loose = {'NOT_BRACKETED': {'optimum': 16e-3}}
    loose['UNBOUNDED_OPTIMUM'] = {'diverged_rates': (1e-3, 2e-3, 8e-3, 16e-3)}
    changes = {'arm': {}, 'baseline': {}} | {whose: loose[code]}
    arms = arm('qk/vo', 0, **changes['baseline']), arm('b/vo', 0.0004, **changes['arm'])
    found = found_in(study_dir, *arms)
    assert decisions(found) == {'b/vo': NO_VERDICT}
    (unknown,) = [a for a in found.arms if a.blocks]
    assert unknown.is_baseline == (whose == 'baseline') and codes(unknown.blocks) == [code]
    expected = ['BASELINE_BLOCKED' if whose == 'baseline' else code]
    assert codes(found.arms[1].verdict.reasons) == expected


@pytest.mark.parametrize(
    ('loser', 'delta', 'decided', 'reason'),
    [
        ('b/vo', -0.03, UNDECIDED, 'DIFFERENT_BUT_DIVERGED'),
        ('b/vo', 0.03, WORSE, 'DIFFERENT'),
        ('qk/vo', 0.03, UNDECIDED, 'DIFFERENT_BUT_DIVERGED'),
        ('qk/vo', -0.03, BETTER, 'DIFFERENT'),
    ],
)
def test_divergence_never_helps(study_dir, loser, delta, decided, reason):
    losses = {'qk/vo': list(BASE), 'b/vo': list(BASE + delta + NOISE)}
    losses[loser][0] = None
    found = found_in(study_dir, *(tuned_arm(v, losses=of_arm) for v, of_arm in losses.items()))
    assert decisions(found) == {'b/vo': decided} and found.arms[1].difference.n == 7
    reasons = found.arms[1].verdict.reasons
    beyond = ['BEYOND_MARGIN'] * (reason == 'DIFFERENT')
    assert codes(reasons) == ['DIVERGED', reason, *beyond]
    assert reasons[0].data == {'arm': int(loser == 'b/vo'), 'baseline': int(loser == 'qk/vo')}


FAR = BASE - 0.03 + NOISE + np.array([0] * 7 + [0.5])


@pytest.mark.parametrize(
    ('base', 'losses', 'decided', 'reasons'),
    [
        (BASE, BASE + 0.002 + NOISE / 10, EQUIVALENT, ['EQUIVALENT', 'DIFFERENT_WITHIN_MARGIN']),
        (BASE, BASE + 0.01 * (-1) ** np.arange(8), UNDECIDED, ['NOT_SHOWN']),
        # Seven of eight seeds are better, one is worse by far.
        (BASE, FAR, UNDECIDED, ['NOT_SHOWN', 'SEEDS_APART']),
        ([2.0, 2.1, *[None] * 6], BASE + 0.02 + NOISE, UNDECIDED, ['DIVERGED', 'FEW_PAIRS']),
    ],
)
def test_reasons_of_small_noisy_and_few_differences(study_dir, base, losses, decided, reasons):
    arms = tuned_arm('qk/vo', losses=list(base)), tuned_arm('b/vo', losses=list(losses))
    verdict = found_in(study_dir, *arms).arms[1].verdict
    assert verdict.decision is decided and codes(verdict.reasons) == reasons
    p, p_same, detectable = verdict.p_holm, verdict.p_equivalence_holm, verdict.detectable
    assert (p is None) == (detectable is None) == (reasons[-1] == 'FEW_PAIRS')
    expected = {
        'DIFFERENT_WITHIN_MARGIN': {'side': WORSE, 'margin': 0.005, 'p': p},
        'NOT_SHOWN': {'p': p, 'p_equivalence': p_same, 'detectable': detectable},
        'SEEDS_APART': {'apart': 1, 'n': 8},
        'FEW_PAIRS': {'n': 2, 'needed': 3},
    }[reasons[-1]]
    assert verdict.reasons[-1].data.items() >= expected.items()


def test_arms_without_their_verdict_run_or_a_shared_seed(study_dir):
    baseline, complete = arm('qk/vo', 0), arm('b/vo', 0.02)
    found = found_in(study_dir / 'a', baseline, complete, arm('c/vo', 0.02)[:10])
    assert decisions(found) == {'b/vo': WORSE, 'c/vo': NO_VERDICT}
    assert codes(found.arms[2].verdict.reasons) == ['NO_VERDICT_TRIALS']
    # The arm that is still to come is corrected for already.
    b = found.arms[1]
    assert b.verdict.num_comparisons == 2 and b.verdict.p_holm == pytest.approx(2 * b.difference.p)
    (reason,) = found_in(study_dir / 'b', baseline[:10], complete).arms[1].verdict.reasons
    assert (codes([reason]), reason.data) == (['NO_BASELINE_TRIALS'], {'baseline': 'qk/vo'})
    b = found_in(study_dir / 'c', baseline, arm('b/vo', 0.5, seeds=range(20, 28))).arms[1]
    assert not b.difference.paired and b.differences == ()
    p = stats.ttest_ind(BASE + 0.5 + NOISE, BASE, equal_var=False).pvalue
    assert b.difference.p == pytest.approx(p)
