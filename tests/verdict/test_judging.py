"""Arms, verdicts, scaling fits and the parts of a difference, recomputed by hand."""

import itertools
import json
import math

import numpy as np
import pytest
from scipy import stats

from qkattn.config import TuningConfig
from qkattn.stats import decision, inference
from qkattn.stats.sweep import fit
from qkattn.storage import ledger
from qkattn.study.arm_key import EQUAL_SHAPE, EXPECTED, LONGER
from qkattn.study.tuning import KNOBS, tune
from qkattn.verdict import Decision, NotScaled, ReasonCode, RemarkCode, find, judging, load_study
from tests.studies import (
    RATES,
    edit_plan,
    run_name,
    trial_record,
    tuned_arm,
    write_documents,
    write_study,
    write_tuned,
    write_yardsticks,
)

BETTER, BETTER_BELOW, EQUIVALENT, WORSE_BELOW, WORSE, UNDECIDED, NO_VERDICT = Decision
SIZE = 'd_model=128'
BASE = 2 + 0.05 * np.arange(8)
NOISE = 0.001 * np.array([3, -1, 2, 0, -2, 1, -3, 1])
ERROR = NOISE.std(ddof=1) / 8**0.5
PARTS = ('removing', 'reinvesting', 'longer')


def arm(variant, delta, validation=None, noise=NOISE, **keywords):
    """Verdict losses that are `delta` above the baseline's on test, `validation` on validation."""
    records = tuned_arm(variant, losses=list(BASE + delta + noise * (delta != 0)), **keywords)
    for record in records:
        if validation is not None and record['stage'] == 'verdict':
            record['val_loss'] += validation - delta
    return records


def findings_of(directory, *arms, **changes):
    return find(load_study(write_tuned(directory, sum(arms, []), **changes)))


def decisions(findings):
    return {a.variant: a.verdict.decision for a in findings.arms if a.verdict}


def codes(reasons):
    return [reason.code.name for reason in reasons]


def seeds_of(variant, losses, **changes):
    return [trial_record(variant, seed=s, val_loss=v, **changes) for s, v in losses.items()]


# Arms


def test_means_and_intervals_over_shared_seeds(study_dir):
    # The other variant's seeds come in another order than the baseline's.
    base, other = {0: 2.00, 1: 2.10, 2: 2.30}, {2: 2.38, 0: 2.05, 1: 2.12, 9: 1.0}
    records = seeds_of('qk/vo', base) + seeds_of('b/vo', other)
    records += seeds_of('dead/vo', {0: None, 1: None})
    baseline, arm, dead = find(load_study(write_study(study_dir, records))).arms
    assert baseline.is_baseline and baseline.difference is None
    assert baseline.val_loss.mean == pytest.approx(6.4 / 3) and arm.verdict is None
    assert baseline.over_seeds('val_bits_per_byte').mean == pytest.approx(6.4 / 3 / math.log(2))
    # Differences 0.05, 0.02, 0.08: mean 0.05, sd 0.03.
    assert arm.differences == pytest.approx((0.05, 0.02, 0.08))
    assert (arm.difference.mean, arm.difference.sd) == pytest.approx((0.05, 0.03))
    half = stats.t.ppf(0.975, 2) * 0.03 / math.sqrt(3)
    assert (arm.difference.low, arm.difference.high) == pytest.approx((0.05 - half, 0.05 + half))
    correlation = np.corrcoef([2.0, 2.1, 2.3], [2.05, 2.12, 2.38])[0, 1]
    assert arm.comparison.correlation == pytest.approx(correlation)
    assert dead.val_loss is dead.learning_rate is dead.difference is None
    assert dead.num_diverged == 2


def test_best_learning_rate_by_mean_val_loss(study_dir):
    records = seeds_of('b/vo', {0: 9.0, 1: 9.0}) + seeds_of('b/vo', {0: 2.4}, learning_rate=3e-2)
    for rate, values in {1e-3: (2.0, 2.4), 3e-3: (2.1, 2.2), 1e-2: (1.0, None)}.items():
        records += seeds_of('qk/vo', dict(enumerate(values)), learning_rate=rate)
    arm, other = find(load_study(write_study(study_dir, records))).arms
    # 1e-3 holds the lowest single loss that finished everywhere, 1e-2 a lucky seed: neither wins.
    assert arm.learning_rate == 3e-3 and arm.val_loss.mean == pytest.approx(2.15)
    assert arm.learning_rates == (1e-3, 3e-3, 1e-2)
    assert not arm.at_edge and arm.num_diverged == 1
    assert other.at_edge and other.difference.mean == pytest.approx(0.3)


def test_only_trials_of_the_stage_that_decides_count(study_dir):
    records = tuned_arm('qk/vo', losses=[2.0 + 0.01 * seed for seed in range(8)])
    for record in records[:10]:
        record['val_loss'] = 0.5  # far below the verdict's
    records += seeds_of('qk/vo', dict.fromkeys(range(8), 1.0))  # of no screening and no verdict
    (arm,) = findings_of(study_dir / 'a', records).arms
    assert {trial.stage for trial in arm.chosen} == {'verdict'} and len(arm.trials) == 26
    assert arm.val_loss.mean == pytest.approx(2.035) and arm.of_runs('train_seconds') == [12.5]
    (arm,) = find(load_study(write_study(study_dir / 'b', records))).arms
    assert arm.val_loss.mean == 1.0 and len(arm.chosen) == len(arm.verdict_trials) == 8


# Sweeps


TUNED = {'learning_rate': RATES, 'weight_decay': (0.05, 0.1, 0.2), 'score_scale': (0.5, 1.0, 2.0)}
GRIDS = dict.fromkeys(KNOBS, (1.0,)) | TUNED
OPTIMA = (4e-3, 0.3, 1.25)


def test_sweeps_and_settings_are_those_of_the_plan(study_dir):
    """A rate on the grid is chosen, so that one trial belongs to the sweeps of two knobs."""
    limits = TuningConfig(seeds=(100, 101), max_points=5, max_seeds=2)
    runs, measured, records = {}, {}, []
    while (tuned := tune(GRIDS, limits, measured)).knob:
        for at in map(tuned.at, tuned.values):
            away = sum(np.log(value / best) ** 2 for value, best in zip(at, OPTIMA, strict=False))
            measured[at] = {seed: 2 + 0.1 * away + 0.01 * seed for seed in (100, 101)}
            runs[at] = tuned.knob, measured[at]
    runs[tuned.settings] = None, dict(enumerate(BASE))
    for at, (knob, losses) in runs.items():
        about = {'stage': 'screening' if knob else 'verdict', 'knob': knob, 'run': f'run {at}'}
        for seed, loss in losses.items():
            trial = {'seed': seed, 'learning_rate': at[0], 'weight_decay': at[1]}
            records.append(trial_record('qk/vo', val_loss=loss, trial=trial, **about))
    grids = {f'tuning__{knob}s': values for knob, values in GRIDS.items()}
    write_tuned(study_dir, records, **grids)
    for at in runs:
        edit_plan(study_dir, f'run {at}', model__score_scale=at[2])
    (arm,) = find(load_study(study_dir)).arms
    assert arm.sweeps == tuned.sweeps and list(arm.sweeps) == list(TUNED)
    assert arm.sweeps['weight_decay'].values == (0.05, 0.1, 0.2, 0.4, 0.8)
    assert tuned.settings[:3] == pytest.approx(OPTIMA, rel=1e-2) and tuned.settings[0] == 4e-3
    assert arm.blocks == arm.not_bracketed == ()


@pytest.mark.parametrize(
    ('whose', 'delta', 'decided'),
    [
        ('arm', -0.003, BETTER_BELOW),
        ('baseline', -0.003, EQUIVALENT),
        ('arm', 0.003, EQUIVALENT),
        ('baseline', 0.003, WORSE_BELOW),
    ],
)
def test_the_interval_includes_what_tuning_may_have_missed(study_dir, whose, delta, decided):
    records = {'baseline': arm('qk/vo', 0), 'arm': arm('b/vo', delta)}
    noisy, losses = records[whose], {}
    for record, extra in zip(
        noisy[:10], np.random.default_rng(4).normal(0, 0.012, 10), strict=True
    ):
        record['val_loss'] += extra
        trial = record['trial']
        losses.setdefault(trial['learning_rate'], {})[trial['seed']] = record['val_loss']
    sweep = fit(losses)
    for record in noisy[10:]:
        record['trial']['learning_rate'] = sweep.chosen
    assert sweep.bracketed and 0.001 < sweep.at_worst < 0.01
    findings = findings_of(study_dir, records['baseline'], records['arm'])
    other = next(a for a in findings.arms if a.is_baseline == (whose == 'arm'))
    errors = [sweep.at_worst, other.sweeps['learning_rate'].at_worst]
    low, high = errors if whose == 'arm' else errors[::-1]
    difference = findings.arms[1].difference
    assert (difference.tuning_low, difference.tuning_high) == pytest.approx((low, high))
    half = stats.t.ppf(0.975, 7) * NOISE.std(ddof=1) / 8**0.5
    mean = delta + NOISE.mean()
    interval = mean - low - half, mean + high + half
    assert (difference.low, difference.high) == pytest.approx(interval)
    assert findings.arms[1].verdict.decision is decided


# Verdicts


def test_verdicts_by_hand(study_dir):
    deltas = {'b/vo': -0.03, 'c/vo': 0.02, 'd/vo': 0.0004}
    findings = findings_of(study_dir, arm('qk/vo', 0), *(arm(*item) for item in deltas.items()))
    assert decisions(findings) == {'b/vo': BETTER, 'c/vo': WORSE, 'd/vo': EQUIVALENT}
    b = findings.arms[1]
    assert b.differences == pytest.approx((NOISE - 0.03).tolist())
    half, mean = stats.t.ppf(0.975, 7) * ERROR, (NOISE - 0.03).mean()
    assert (b.difference.low, b.difference.high) == pytest.approx((mean - half, mean + half))
    raw = [2 * stats.t.sf(abs((NOISE + d).mean()) / ERROR, 7) for d in deltas.values()]
    # Holm: the smallest times 3, the next times 2, the largest as it is.
    holm = [3 * raw[0], 2 * raw[1], raw[2]]
    assert [a.verdict.p_holm for a in findings.arms[1:]] == pytest.approx(holm, rel=1e-6)
    assert (
        findings.num_comparisons == 3
        and findings.arms[0].verdict is None
        and findings.scaling == ()
    )
    different, beyond = b.verdict.reasons
    assert codes(b.verdict.reasons) == ['DIFFERENT', 'BEYOND_MARGIN']
    assert different.data == {'p': b.verdict.p_holm}
    assert beyond.data == {'margin': 0.005, 'p': b.verdict.p_margin_holm}
    assert (b.verdict.alpha, b.verdict.num_seeds) == (pytest.approx(0.05), 8)
    (same,) = findings.arms[3].verdict.reasons
    assert codes([same]) == ['EQUIVALENT']
    assert same.data == {'p': findings.arms[3].verdict.p_equivalence_holm}


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
    findings = findings_of(study_dir, arm('qk/vo', 0), arm('b/vo', test, validation, noise))
    verdict, compared = findings.arms[1].verdict, findings.arms[1].comparison
    assert compared.difference.mean == pytest.approx(test) and findings.split == 'test'
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
    findings = findings_of(
        study_dir, arm('qk/vo', 0), records, arm('c/vo', 0.02), expected=expected
    )
    assert {control.expected.decision for control in findings.positive if control.passed} == passes
    assert {(c.passed is None, c.verdict.num_comparisons) for c in findings.positive} == {
        (False, 4)
    }


def test_a_positive_control_may_be_at_equal_shape_and_waits_for_results(study_dir):
    records = arm('qk/vo', 0) + arm('b/vo', 0.03, control=EQUAL_SHAPE) + arm('b/vo', -0.03)
    expected = ['b/vo is worse at equal shape', 'b/vo is worse']
    for results, second in ((records, False), (records[:-8], None)):
        findings = findings_of(study_dir, results, expected=expected)
        outcomes = [(control.passed, control.arm.control) for control in findings.positive]
        assert outcomes == [(True, EQUAL_SHAPE), (second, None)]


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
    findings_of(study_dir, arm('qk/vo', 0), arm('b/vo', -0.03))
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
    return findings_of(directory, records, looks=list(looks))


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
    findings = at_looks(study_dir / 'b', losses, results={'b/vo': 1, 'qk/vo': 1})
    assert (findings.arms[1].verdict.decision, findings.arms[1].verdict.num_seeds) == (UNDECIDED, 4)


def test_a_look_in_progress_is_a_remark_and_seeds_are_those_of_looks(study_dir):
    losses = {'qk/vo': BASE, 'b/vo': BASE - 0.002 + 3 * NOISE, 'c/vo': BASE - 0.002 + 3 * NOISE}
    findings = at_looks(study_dir / 'a', losses, results={'c/vo': 1})
    assert [a.verdict.num_seeds for a in findings.arms[1:]] == [8, 4] and not findings.blocks
    (remark,) = [r for r in findings.remarks if r.code is RemarkCode.LOOK_IN_PROGRESS]
    assert remark.data == {'look': 2, 'looks': 2, 'seeds': 8, 'reached': 2, 'arms': 3}
    records = [r for v, of_arm in losses.items() for r in tuned_arm(v, losses=of_arm[:6])]
    findings = findings_of(study_dir / 'b', records, looks=[4, 8])
    assert codes(findings.blocks) == ['OTHER_SEEDS'] and set(decisions(findings).values()) == {
        NO_VERDICT
    }


def test_the_family_is_the_widest_that_was_declared(study_dir):
    """Arms that are deleted from a study later on are corrected for, and withhold its verdicts."""
    records = arm('qk/vo', 0) + arm('b/vo', 0.003), arm('c/vo', 0.03)
    assert findings_of(study_dir, *records).num_comparisons == 2
    entries = (study_dir / ledger.NAME).read_bytes()
    write_tuned(study_dir, records[0])
    (study_dir / ledger.NAME).write_bytes(entries)
    findings = find(load_study(study_dir))
    assert codes(findings.blocks) == ['OTHER_DECLARATION'] and findings.num_comparisons == 2
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
    findings = findings_of(study_dir, corpora({'stdlib': -0.03, 'packages': 0.012}, noises))
    assert [a.verdict.decision for a in findings.arms if a.verdict] == [BETTER, WORSE]
    assert findings.num_comparisons == 2
    (overall,) = findings.overall
    assert (overall.variant, overall.size) == ('b/vo', SIZE)
    assert [a.corpus for a in overall.arms] == ['stdlib', 'packages']
    means = (-0.03 + NOISE + 0.012 - NOISE / 2) / 2
    assert list(overall.comparison.differences.values()) == pytest.approx(means.tolist())
    p = stats.ttest_1samp(means, 0).pvalue
    assert overall.comparison.difference.p == pytest.approx(p) == overall.verdict.p_holm
    assert overall.verdict.decision is BETTER and overall.verdict.num_comparisons == 1
    for corpus in ('stdlib', 'packages'):
        shifted(study_dir, 'b/vo', 'test', 0.1, corpus)
    findings = find(load_study(study_dir))
    errors = [a.difference.error_evaluation for a in findings.arms if not a.is_baseline]
    (overall,) = findings.overall
    assert overall.comparison.difference.error_evaluation == pytest.approx(np.hypot(*errors) / 2)
    assert min(errors) > 0.005 and overall.comparison.num_documents == 200
    # What blocks one corpus blocks the verdict over all.
    run = run_name('b/vo', SIZE, 'verdict', corpus='packages')
    edit_plan(study_dir, run, optimizer__schedule='constant')
    (overall,) = find(load_study(study_dir)).overall
    assert overall.verdict.decision is NO_VERDICT
    assert 'NOT_ANNEALED' in codes(overall.verdict.reasons)


LOWER = BASE - 0.03 + NOISE
FAR = LOWER + np.array([0] * 7 + [0.5])


@pytest.mark.parametrize(
    ('base', 'losses', 'decided', 'reasons'),
    [
        (BASE, BASE + 0.002 + NOISE / 10, EQUIVALENT, ['EQUIVALENT', 'DIFFERENT_WITHIN_MARGIN']),
        (BASE, BASE + 0.01 * (-1) ** np.arange(8), UNDECIDED, ['NOT_SHOWN']),
        # Seven of eight seeds are better, one is worse by far.
        (BASE, FAR, UNDECIDED, ['NOT_SHOWN', 'SEEDS_APART']),
        ([2.0, 2.1, *[None] * 6], BASE + 0.02 + NOISE, UNDECIDED, ['DIVERGED', 'FEW_PAIRS']),
        # Divergence never helps: the arm is not better without the trial that it lost.
        (BASE, [None, *LOWER[1:]], UNDECIDED, ['DIVERGED', 'DIFFERENT_BUT_DIVERGED']),
        ([None, *BASE[1:]], LOWER, BETTER, ['DIVERGED', 'DIFFERENT', 'BEYOND_MARGIN']),
    ],
)
def test_reasons_of_small_noisy_few_and_diverged_differences(
    study_dir, base, losses, decided, reasons
):
    arms = tuned_arm('qk/vo', losses=list(base)), tuned_arm('b/vo', losses=list(losses))
    verdict = findings_of(study_dir, *arms).arms[1].verdict
    assert verdict.decision is decided and codes(verdict.reasons) == reasons
    p, p_same, detectable = verdict.p_holm, verdict.p_equivalence_holm, verdict.detectable
    assert (p is None) == (detectable is None) == (reasons[-1] == 'FEW_PAIRS')
    expected = {
        'DIFFERENT_WITHIN_MARGIN': {'side': WORSE, 'margin': 0.005, 'p': p},
        'NOT_SHOWN': {'p': p, 'p_equivalence': p_same, 'detectable': detectable},
        'SEEDS_APART': {'apart': 1, 'n': 8},
        'FEW_PAIRS': {'n': 2, 'needed': 3},
        'DIFFERENT_BUT_DIVERGED': {'side': BETTER, 'p': p},
        'BEYOND_MARGIN': {'margin': 0.005, 'p': verdict.p_margin_holm},
    }[reasons[-1]]
    assert verdict.reasons[-1].data.items() >= expected.items()
    if reasons[0] == 'DIVERGED':
        counts = {'arm': list(losses).count(None), 'baseline': list(base).count(None)}
        assert verdict.reasons[0].data == counts


def test_arms_without_their_verdict_run_or_a_shared_seed(study_dir):
    baseline, complete = arm('qk/vo', 0), arm('b/vo', 0.02)
    findings = findings_of(study_dir / 'a', baseline, complete, arm('c/vo', 0.02)[:10])
    assert decisions(findings) == {'b/vo': WORSE, 'c/vo': NO_VERDICT}
    assert codes(findings.arms[2].verdict.reasons) == ['NO_VERDICT_TRIALS']
    # The arm that is still to come is corrected for already.
    b = findings.arms[1]
    assert b.verdict.num_comparisons == 2 and b.verdict.p_holm == pytest.approx(2 * b.difference.p)
    (reason,) = findings_of(study_dir / 'b', baseline[:10], complete).arms[1].verdict.reasons
    assert (codes([reason]), reason.data) == (['NO_BASELINE_TRIALS'], {'baseline': 'qk/vo'})
    b = findings_of(study_dir / 'c', baseline, arm('b/vo', 0.5, seeds=range(20, 28))).arms[1]
    assert b.difference is None and b.differences == () and b.val_loss is not None


# Scaling fits and the parts of a difference


def scaled(widths, loose=None):
    """Two arms by width on a scaling law; the baseline is not bracketed at the `loose` one."""
    records = []
    for d, (variant, worth) in itertools.product(widths, (('qk/vo', 1.0), ('b/vo', 1.5))):
        parameters = trial_record('qk/vo', d_model=d)['parameters']['total']
        law = 1.5 + 40 * (worth * parameters) ** -0.4
        losses = list(law + 0.0002 * (np.arange(8) - 3.5))
        optimum = 16e-3 if (variant, d) == ('qk/vo', loose) else 4e-3
        records += tuned_arm(variant, f's{d}', losses, optimum, d_model=d)
    return records


def test_scaling_over_sizes_that_are_bracketed_and_trained_enough(study_dir):
    records = scaled((32, 64, 128, 256, 512), loose=128)
    findings = findings_of(study_dir, records)
    base, other = findings.scaling
    assert (len(base.fit.sizes), len(other.fit.sizes)) == (4, 5) and findings.num_comparisons == 5
    assert base.fit.problem is None and base.multiplier is None
    assert base.fit.a.value == pytest.approx(0.4, rel=0.01)
    assert other.multiplier.value == pytest.approx(1.5, rel=0.01)
    (left_out,) = [a for a in findings.arms if a.not_scaled]
    assert (left_out.size, left_out.not_scaled) == ('s128', NotScaled.NOT_BRACKETED)
    worst = max(a.loss.mean for a in findings.arms if a.is_baseline)
    write_yardsticks(study_dir, records, losses={'test': {'5-gram': worst - 1e-6}})
    assert [len(scaling.fit.sizes) for scaling in find(load_study(study_dir)).scaling] == [3, 4]
    diverged = [r for d in (64, 128) for r in tuned_arm('qk/vo', f's{d}', [None, 2.0], d_model=d)]
    none = findings_of(study_dir / 'none', diverged)
    assert none.scaling == () and none.lacks_scaling


def test_why_an_arm_is_left_out_of_scaling_fits(study_dir):
    records = arm('qk/vo', 0) + tuned_arm('b/vo', losses=[None, *BASE[1:]])
    records += arm('d/vo', 0.1)[:10] + arm('e/vo', 0.1, learning_rate=1e-3)
    assert [a.not_scaled for a in findings_of(study_dir, records).arms] == [
        None,
        NotScaled.DIVERGED,
        NotScaled.NO_LOSSES,
        NotScaled.BLOCKED,
    ]


# Parts of a difference


def controlled(removing=-0.02, total=-0.03, longer=-0.01):
    """A baseline, an arm with both of its controls, and the baseline trained longer."""
    rates = {'rates': (2e-3, 4e-3, 8e-3), 'control': LONGER, 'num_steps': 1600}
    same_shape = arm('b/vo', removing, control=EQUAL_SHAPE)
    for record in same_shape:
        parameters = round(0.93 * record['target_parameters'])
        record['parameters'] = record['parameters'] | {'total': parameters}
        record['residual'] = parameters / record['target_parameters'] - 1
    records = arm('qk/vo', 0) + arm('b/vo', total) + same_shape
    records += tuned_arm('qk/vo', losses=list(BASE - 0.3), **rates)
    return records + tuned_arm('b/vo', losses=list(BASE - 0.3 + longer + 2 * NOISE), **rates)


def test_the_difference_is_the_sum_of_removing_and_reinvesting(study_dir):
    declared = {'equal_shape': True, 'longer': 4, 'longer_seeds': list(range(8))}
    findings = findings_of(study_dir, controlled(), controls=declared)
    (parts,) = findings.decomposition
    removing, reinvesting = parts.removing, parts.reinvesting
    assert removing.difference.mean == pytest.approx(-0.02 + NOISE.mean())
    assert reinvesting.difference.mean == pytest.approx(-0.01, abs=1e-12)
    sums = np.add(*(list(part.differences.values()) for part in (removing, reinvesting)))
    assert sums.tolist() == pytest.approx(findings.arms[1].differences)
    interval = stats.t.interval(0.95, 7, np.mean(2 * NOISE) - 0.01, stats.sem(2 * NOISE))
    longer = parts.longer.difference
    assert (longer.low, longer.high) == pytest.approx(interval)
    # Controls get no verdict, and their residual and steps are their own.
    assert findings.num_comparisons == 1 and not any(a.verdict for a in findings.controls)
    assert [a.key.control for a in findings.controls] == [EQUAL_SHAPE, LONGER, LONGER]
    assert [a.is_baseline for a in findings.controls] == [False, True, False]
    codes = {remark.code for remark in findings.remarks}
    assert codes == {RemarkCode.EVALUATION}
    # Claims decide on an arm that is trained longer, on the seeds that are declared for it.
    pair = {a.is_baseline: a for a in findings.controls if a.control == LONGER}
    verdict = judging.pair(load_study(study_dir), pair[False], pair[True], (), 1)
    assert (verdict.decision, verdict.num_seeds) == (BETTER, 8)
    # A longer arm is tuned around the rate of the primary one.
    assert [len(a.sweeps['learning_rate'].values) for a in findings.controls] == [5, 3, 3]
    # Baselines that are not trained enough leave parts without a verdict.
    write_yardsticks(study_dir, controlled(), losses={'test': {'5-gram': 1.0}})
    findings = find(load_study(study_dir))
    assert findings.arms[1].verdict.decision is NO_VERDICT
    assert None not in [getattr(findings.decomposition[0], name) for name in PARTS]


@pytest.mark.parametrize(
    ('variant', 'control', 'lost'),
    [
        ('b/vo', EQUAL_SHAPE, {'removing', 'reinvesting'}),
        ('qk/vo', LONGER, {'longer'}),
        ('b/vo', None, {'reinvesting'}),
        (None, None, set(PARTS)),
    ],
)
def test_an_arm_that_breaks_a_rule_is_no_part(study_dir, variant, control, lost):
    write_tuned(study_dir, controlled())
    one = run_name(variant, SIZE, 'verdict', control=control) if variant else None
    for run in load_study(study_dir).runs if one is None else ():
        edit_plan(study_dir, run.name, optimizer__schedule='constant')
    if one is not None:
        edit_plan(study_dir, one, optimizer__schedule='constant')
    findings = find(load_study(study_dir))
    (parts,) = findings.decomposition
    assert {name for name in PARTS if getattr(parts, name) is None} == lost
    decided = NO_VERDICT if control is None else BETTER
    assert findings.arms[1].verdict.decision is decided


def test_an_arm_that_is_known_badly_is_a_part(study_dir):
    records = controlled()
    for record in records:
        if record['control'] == EQUAL_SHAPE:
            if record['stage'] == 'screening':
                record['val_loss'] = 2 - record['trial']['learning_rate']
            else:
                record['trial']['learning_rate'] = 16e-3
    findings = findings_of(study_dir, records)
    assert [r.code for r in findings.controls[0].blocks] == [RemarkCode.NOT_BRACKETED]
    mean = findings.decomposition[0].removing.difference.mean
    assert mean == pytest.approx(-0.02 + NOISE.mean())


def test_arms_of_several_destinations_share_a_control_of_equal_shape(study_dir):
    records = [*arm('qk/vo', 0), *arm('b/vo', -0.02, control=EQUAL_SHAPE)]
    for destination, delta in (('d_model', -0.03), ('d_ff', -0.01)):
        records += arm(f'b/vo [{destination}]', delta)
    write_tuned(study_dir, records, destinations=['d_model', 'd_ff'])
    first, second = find(load_study(study_dir)).decomposition
    assert first.reinvesting.difference.mean == pytest.approx(-0.01)
    assert second.reinvesting.difference.mean == pytest.approx(0.01)
    assert first.removing.difference.mean == second.removing.difference.mean
