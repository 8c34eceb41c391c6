"""Arms, verdicts, scaling fits and the parts of a difference, recomputed by hand."""

import itertools
import json

import numpy as np
import pytest

from qkattn.report import tables
from qkattn.stats import inference
from qkattn.stats.decision import ALPHA, level
from qkattn.storage import ledger
from qkattn.study.arm_key import EXPECTED, LONGER, SAME_SHAPE
from qkattn.verdict import Decision, ReasonCode, RemarkCode, find, judging, load_study
from tests import studies

BETTER, BETTER_BELOW, EQUIVALENT, WORSE_BELOW, WORSE, UNDECIDED, NO_VERDICT = Decision
SIZE = 'd_model=128'
BASE = 2 + 0.05 * np.arange(8)
NOISE = 0.001 * np.array([3, -1, 2, 0, -2, 1, -3, 1])
PARTS = ('same_shape', 'reinvesting', 'longer')


def records_of_arm(variant, delta, validation=None, noise=NOISE, **keywords):
    """Trials of an arm whose test losses are `delta` above the baseline's.

    Its validation losses are `validation` above them, by default `delta` as well.
    """
    losses = list(BASE + delta + noise * (delta != 0))
    records = studies.tuned_arm(variant, losses=losses, **keywords)
    for record in records:
        if validation is not None and record['stage'] == 'verdict':
            record['val_loss'] += validation - delta
    return records


def findings_of(directory, *arms, **changes):
    return find(load_study(studies.write_tuned(directory, sum(arms, []), **changes)))


def code_names(reasons):
    return [reason.code.name for reason in reasons]


def records_by_seed(variant, losses, **changes):
    return [studies.trial_record(variant, seed=s, val_loss=v, **changes) for s, v in losses.items()]


def test_without_tuning_the_best_rate_by_mean_is_compared_over_shared_seeds(study_dir):
    base = {0: 2.00, 1: 2.10, 2: 2.30}
    other = {2: 2.38, 0: 2.05, 1: 2.12, 9: 1.0}  # in another order
    records = records_by_seed('qk/vo', base) + records_by_seed('b/vo', other)
    # 1e-3 holds the lowest single loss that finished everywhere, 1e-2 a lucky seed: neither wins.
    for rate, values in {1e-3: (2.0, 2.4), 3e-3: (2.1, 2.2), 1e-2: (1.0, None)}.items():
        records += records_by_seed('swept/vo', dict(enumerate(values)), learning_rate=rate)
    baseline, arm, swept = find(load_study(studies.write_study(study_dir, records))).arms
    assert baseline.is_baseline
    assert baseline.difference is arm.verdict is None
    assert list(arm.comparison.differences.values()) == pytest.approx([0.05, 0.02, 0.08])
    assert swept.learning_rate == 3e-3
    assert swept.over_seeds('val_loss').mean == pytest.approx(2.15)
    assert not swept.at_edge
    assert swept.num_diverged == 1


@pytest.mark.parametrize(
    ('test', 'validation', 'decided'),
    [
        # Mean differences on the two splits, and the verdict (None: undecided).
        (-0.03, -0.001, BETTER),
        (-0.03, 0.001, None),
        (0.03, 0.001, WORSE),
        (0.03, -0.001, None),
        (0.0004, -0.004, EQUIVALENT),
        (0.0004, -0.006, None),
    ],
)
def test_the_test_split_decides_where_validation_agrees(study_dir, test, validation, decided):
    records = (
        records_of_arm('qk/vo', 0),
        records_of_arm('b/vo', test, validation, NOISE - NOISE.mean()),
    )
    findings = findings_of(study_dir, *records)
    verdict = findings.arms[1].verdict
    compared = findings.arms[1].comparison
    means = {'test': compared.difference.mean, 'validation': compared.validation}
    assert means == pytest.approx({'test': test, 'validation': validation})
    assert verdict.decision is (decided or UNDECIDED)
    if decided is None:
        reason = verdict.reasons[-1]
        assert reason.code is ReasonCode.SPLITS_DISAGREE
        assert reason.data.items() >= means.items()


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
    records = [
        records_of_arm('qk/vo', 0),
        records_of_arm('b/vo', delta or 1e-9, noise=noise),
        records_of_arm('c/vo', 0.02),
    ]
    records.append(records_of_arm('b/vo', 0.03, control=SAME_SHAPE))
    expected = [f'b/vo is {name}' for name in EXPECTED] + ['b/vo is worse at equal shape']
    # Arms that have no results yet are of the family.
    declared = [('b/vo', 'd_model=64')]
    changes = {'expected': expected, 'declared': declared}
    *positive, same_shape = findings_of(study_dir, *records, **changes).positive
    assert {control.expected.decision for control in positive if control.passed} == passes
    assert {(c.passed is None, c.verdict.num_comparisons) for c in positive} == {(False, 9)}
    assert (same_shape.passed, same_shape.arm.key.control) == (True, SAME_SHAPE)


def shift_documents(directory, variant, sd):
    """Makes the test losses of an arm differ by document, with deviation `sd` in nats a token.

    Returns these differences and the numbers of tokens, one for each of 100 documents.
    """
    run = studies.run_name(variant, SIZE, 'verdict')
    records = map(json.loads, (directory / 'results.jsonl').read_text().splitlines())
    shifts = np.random.default_rng(6).normal(0, sd, 100)
    of_run = [record for record in records if record['run'] == run]
    studies.write_documents(directory / run, of_run, 100, shifts)
    content = json.loads((directory / run / 'documents.json').read_text())
    return shifts, np.array(content['test']['tokens'])


@pytest.mark.parametrize(('sd', 'decided'), [(0.02, BETTER), (0.3, UNDECIDED)])
def test_an_interval_includes_errors_of_seeds_documents_and_tuning(study_dir, sd, decided):
    records = records_of_arm('qk/vo', 0) + records_of_arm('b/vo', -0.03)
    draws = np.random.default_rng(4).normal(0, 0.012, len(records) // 2)
    # Noise in the screening, up for one seed and down for the other, makes tuning uncertain.
    for place, record in enumerate(records):
        extra = draws[place // 2] * (-1) ** place
        record['val_loss'] += extra if record['stage'] == 'screening' else 0.0
    baseline, _ = findings_of(study_dir, records).arms
    shifts, tokens = shift_documents(study_dir, 'b/vo', sd)
    _, b = find(load_study(study_dir)).arms
    tuning = [a.sweeps['learning_rate'].at_worst for a in (b, baseline)]
    assert min(tuning) > 1e-4
    assert tuning[0] != pytest.approx(tuning[1])
    evaluation = inference.evaluation_error((shifts * tokens)[None], tokens)
    expected = inference.paired_test(NOISE - 0.03, evaluation=evaluation, tuning=tuning)
    interval = b.difference.low, b.difference.high
    assert interval == pytest.approx((expected.low, expected.high))
    assert b.comparison.num_documents == 100
    assert b.verdict.decision is decided


def test_the_family_is_the_widest_that_was_declared(study_dir):
    """An arm that is deleted from a study later on still counts in the correction.

    Until the smaller study is declared as well, its verdicts are withheld.
    """
    records = (
        records_of_arm('qk/vo', 0) + records_of_arm('b/vo', 0.003),
        records_of_arm('c/vo', 0.03),
    )
    assert findings_of(study_dir, *records).num_comparisons == 2
    entries = (study_dir / ledger.NAME).read_bytes()
    studies.write_tuned(study_dir, records[0])
    (study_dir / ledger.NAME).write_bytes(entries)
    findings = find(load_study(study_dir))
    assert code_names(findings.blocks) == ['OTHER_DECLARATION']
    assert findings.num_comparisons == 2
    ledger.declare(study_dir, json.loads((study_dir / 'study.json').read_text()))
    b = find(load_study(study_dir)).arms[1]
    assert b.verdict.num_comparisons == 2
    assert b.verdict.p_holm == pytest.approx(2 * b.difference.p * ALPHA / level(1))


LOWER = BASE - 0.03 + NOISE
FAR = LOWER + np.array([0] * 7 + [0.5])
CLOSE = BASE + 0.002 + NOISE / 10
FEW = [2.0, 2.1, *[None] * 6]
LOST = [None, *LOWER[1:]]


@pytest.mark.parametrize(
    # Losses of the baseline and of the arm, its decision, and its reasons with data of the last.
    ('base', 'losses', 'decided', 'reasons', 'data'),
    [
        (BASE, CLOSE, EQUIVALENT, ['EQUIVALENT', 'DIFFERENT_WITHIN_MARGIN'], {'side': WORSE}),
        (BASE, BASE + 0.01 * (-1) ** np.arange(8), UNDECIDED, ['NOT_SHOWN'], {}),
        # Seven of eight seeds are better, one is worse by far.
        (BASE, FAR, UNDECIDED, ['NOT_SHOWN', 'SEEDS_APART'], {'apart': 1, 'n': 8}),
        (FEW, BASE + 0.02, UNDECIDED, ['DIVERGED', 'FEW_PAIRS'], {'n': 2, 'needed': 3}),
        # Divergence never helps: the arm is not better without the trial that it lost.
        (BASE, LOST, UNDECIDED, ['DIVERGED', 'DIFFERENT_BUT_DIVERGED'], {'side': BETTER}),
        ([None, *BASE[1:]], LOWER, BETTER, ['DIVERGED', 'DIFFERENT', 'BEYOND_MARGIN'], {}),
    ],
)
def test_a_verdict_states_the_codes_and_numbers_of_its_reasons(
    study_dir, base, losses, decided, reasons, data
):
    baseline = studies.tuned_arm('qk/vo', losses=list(base))
    other = studies.tuned_arm('b/vo', losses=list(losses))
    verdict = findings_of(study_dir, baseline, other).arms[1].verdict
    assert verdict.decision is decided
    assert code_names(verdict.reasons) == reasons
    assert verdict.reasons[-1].data.items() >= data.items()
    # Too few pairs give neither a p-value nor a detectable difference.
    are_few = 'FEW_PAIRS' in reasons
    assert (verdict.p_holm is None) == are_few
    assert (verdict.detectable is None) == are_few
    if reasons[0] == 'DIVERGED':
        counts = {'arm': list(losses).count(None), 'baseline': list(base).count(None)}
        assert verdict.reasons[0].data == counts


SCREENED = 10  # the records of an arm's screening, which stand before those of its verdict


def test_an_arm_whose_verdict_has_not_begun_counts_as_a_comparison(study_dir):
    begun = records_of_arm('c/vo', 0.02)[:SCREENED]
    _, b, c = findings_of(
        study_dir, records_of_arm('qk/vo', 0), records_of_arm('b/vo', 0.02), begun
    ).arms
    assert code_names(c.verdict.reasons) == ['NO_VERDICT_TRIALS']
    assert b.verdict.num_comparisons == 2


def test_an_arm_whose_baseline_has_not_begun_has_no_verdict(study_dir):
    baseline = records_of_arm('qk/vo', 0)[:SCREENED]
    _, b = findings_of(study_dir, baseline, records_of_arm('b/vo', 0.02)).arms
    (reason,) = b.verdict.reasons
    assert code_names([reason]) == ['NO_BASELINE_TRIALS']
    assert reason.data == {'baseline': 'qk/vo'}


def test_arms_without_a_shared_seed_have_losses_but_no_difference(study_dir):
    _, b = findings_of(
        study_dir, records_of_arm('qk/vo', 0), records_of_arm('b/vo', 0.5, seeds=range(20, 28))
    ).arms
    assert b.difference is b.comparison is None
    assert b.loss is not None


def test_an_arm_is_not_judged_before_all_its_seeds_have_results(study_dir):
    complete = records_of_arm('b/vo', 0.02)
    # The last four seeds of b/vo are a run of their own, which has no results yet.
    late = [record | {'run': 'late', 'config_hash': 'late'} for record in complete[-4:]]
    records = records_of_arm('qk/vo', 0) + complete[:-4] + late
    path = studies.write_tuned(study_dir, records, expected=['b/vo is worse'])
    studies.write_lines(path / 'results.jsonl', records[:-4])
    (control,) = find(load_study(path)).positive
    assert control.passed is None
    assert code_names(control.verdict.reasons) == ['NO_VERDICT_TRIALS']


def test_a_positive_control_whose_trials_all_diverged_fails_in_words(study_dir):
    lost = studies.tuned_arm('b/vo', losses=[None] * len(BASE))
    path = studies.write_tuned(
        study_dir, records_of_arm('qk/vo', 0) + lost, expected=['b/vo is worse']
    )
    study = load_study(path)
    assert 'b/vo is expected to be worse' in ' '.join(tables.summary(find(study)))


def test_scaling_is_fitted_over_sound_sizes(study_dir):
    """Two arms on a scaling law; the baseline is not bracketed at one size."""
    records = []
    for d, (variant, worth) in itertools.product(
        (32, 64, 128, 256, 512), (('qk/vo', 1.0), ('b/vo', 1.5))
    ):
        parameters = studies.trial_record('qk/vo', d_model=d)['parameters']['total']
        losses = 1.5 + 40 * (worth * parameters) ** -0.4 + 0.0002 * (np.arange(8) - 3.5)
        optimum = 16e-3 if (variant, d) == ('qk/vo', 128) else 4e-3
        records += studies.tuned_arm(variant, f's{d}', losses.tolist(), optimum, d_model=d)
    findings = findings_of(study_dir, records)
    base, other = findings.scaling
    assert findings.num_comparisons == 5
    assert len(base.law.sizes) == 4
    assert len(other.law.sizes) == 5
    # Residuals are zero, but not the standard deviation over seeds.
    assert base.law.df == 4 * 7
    assert other.law.df == 5 * 7
    assert other.worth.value == pytest.approx(1.5, rel=0.01)
    worst = max(a.loss.mean for a in findings.arms if a.is_baseline)
    studies.write_yardsticks(study_dir, records, losses={'test': {'5-gram': worst - 1e-6}})
    problem, law = (scaling.law for scaling in find(load_study(study_dir)).scaling)
    # A yardstick that the largest loss of a baseline does not beat leaves out its size.
    assert problem.data['sizes'] == 3
    assert len(law.sizes) == 4


CONTROLS = {'equal_shape': True, 'longer': 4, 'longer_seeds': list(range(6))}


def records_with_controls():
    """A baseline, an arm with both of its controls, and the baseline trained longer."""
    rates = {'rates': (2e-3, 4e-3, 8e-3), 'control': LONGER, 'num_steps': 1600}
    records = (
        records_of_arm('qk/vo', 0)
        + records_of_arm('b/vo', -0.03)
        + records_of_arm('b/vo', -0.02, control=SAME_SHAPE)
    )
    records += studies.tuned_arm('qk/vo', losses=list(BASE[:6] - 0.3), **rates)
    return records + studies.tuned_arm('b/vo', losses=list((BASE - 0.31 + 2 * NOISE)[:6]), **rates)


def test_controls_have_no_verdict(study_dir):
    findings = findings_of(study_dir, records_with_controls(), controls=CONTROLS)
    parts = findings.arms[1].parts
    assert list(parts.longer.differences.values()) == pytest.approx(list(2 * NOISE[:6] - 0.01))
    assert findings.num_comparisons == 1
    assert not any(a.verdict for a in findings.controls)
    kinds = [(a.key.control, a.is_baseline) for a in findings.controls]
    assert kinds == [(SAME_SHAPE, False), (LONGER, True), (LONGER, False)]
    assert {remark.code for remark in findings.remarks} == {RemarkCode.EVALUATION}
    # Claims may judge an arm that is trained longer, on the seeds that are declared for it.
    _, baseline, other = findings.controls
    assert judging.verdict_on_pair(load_study(study_dir), other, baseline, (), 1).decision is BETTER
    # A longer arm is tuned around the rate of the primary one.
    assert [len(a.sweeps['learning_rate'].values) for a in findings.controls] == [5, 3, 3]


def test_a_baseline_below_its_yardstick_withholds_the_verdict_but_no_part(study_dir):
    findings_of(study_dir, records_with_controls(), controls=CONTROLS)
    studies.write_yardsticks(study_dir, records_with_controls(), losses={'test': {'5-gram': 1.0}})
    findings = find(load_study(study_dir))
    assert findings.arms[1].verdict.decision is NO_VERDICT
    assert None not in [getattr(findings.arms[1].parts, name) for name in PARTS]


@pytest.mark.parametrize(
    ('variant', 'control', 'lost'),
    [
        ('b/vo', SAME_SHAPE, {'same_shape', 'reinvesting'}),
        ('qk/vo', LONGER, {'longer'}),
        ('b/vo', None, {'reinvesting'}),
        (None, None, set(PARTS)),
    ],
)
def test_parts_of_a_difference_leave_out_arms_that_break_a_rule(study_dir, variant, control, lost):
    studies.write_tuned(study_dir, records_with_controls(), controls=CONTROLS)
    one = [studies.run_name(variant, SIZE, 'verdict', control)] if variant else None
    for name in one or [run.name for run in load_study(study_dir).runs]:
        studies.edit_plan(study_dir, name, optimizer__schedule='constant')
    findings = find(load_study(study_dir))
    parts = findings.arms[1].parts
    assert {name for name in PARTS if getattr(parts, name) is None} == lost
    assert findings.arms[1].verdict.decision is (NO_VERDICT if control is None else BETTER)
    # A claim that compares another arm with one of these names the one that is withheld.
    broken = [a for a in (*findings.arms, *findings.controls) if a.blocks]
    verdicts = [
        judging.verdict_on_pair(load_study(study_dir), findings.arms[0], a, (), 1) for a in broken
    ]
    assert [v.reasons[-1].data['baseline'] for v in verdicts] == [a.variant for a in broken]
