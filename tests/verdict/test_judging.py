"""Arms, verdicts, scaling fits and the parts of a difference, recomputed by hand."""

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

SIZE = 'd_model=128'
# Test losses of the baseline, one per seed.
BASE = 2 + 0.05 * np.arange(8)
NOISE = 0.001 * np.array([3, -1, 2, 0, -2, 1, -3, 1])
NOISE_OF_MEAN_ZERO = NOISE - NOISE.mean()
PARTS = ('same_shape', 'reinvesting', 'longer')


def records_of_arm(variant, delta, validation=None, noise=NOISE, **keywords):
    """Trials of an arm whose test losses are `delta` above the baseline's, with noise.

    A `delta` of 0 has no noise. Validation losses are `validation` above the baseline's; None means
    `delta` as well.
    """
    losses = BASE + delta
    if delta != 0:
        losses = losses + noise
    records = studies.tuned_arm(variant, losses=list(losses), **keywords)
    for record in records:
        if validation is not None and record['stage'] == 'verdict':
            record['val_loss'] += validation - delta
    return records


def findings_of(directory, *arms, **changes):
    """Writes a study of these arms, each a list of records; returns its findings."""
    records = []
    for records_of_one in arms:
        records += records_of_one
    studies.write_tuned(directory, records, **changes)
    return find(load_study(directory))


def code_names(reasons):
    return [reason.code.name for reason in reasons]


def records_by_seed(variant, losses, **changes):
    """Trials without tuning, whose losses are given by seed."""
    records = []
    for seed, loss in losses.items():
        records.append(studies.trial_record(variant, seed=seed, val_loss=loss, **changes))
    return records


def test_arms_are_compared_over_the_seeds_that_they_share(study_dir):
    baseline_losses = {0: 2.00, 1: 2.10, 2: 2.30}
    arm_losses = {2: 2.38, 0: 2.05, 1: 2.12, 9: 1.0}  # in another order, with one more seed
    records = records_by_seed('qk/vo', baseline_losses) + records_by_seed('b/vo', arm_losses)
    studies.write_study(study_dir, records)

    baseline, arm = find(load_study(study_dir)).arms

    assert baseline.is_baseline
    assert baseline.difference is None
    assert arm.verdict is None  # without tuning
    assert list(arm.comparison.differences.values()) == pytest.approx([0.05, 0.02, 0.08])


def test_without_tuning_the_best_rate_by_mean_is_chosen(study_dir):
    """One rate has the lowest loss of a single seed; another one has a lower, but diverged."""
    records = [
        *records_by_seed('qk/vo', {0: 2.00, 1: 2.10, 2: 2.30}),
        *records_by_seed('swept/vo', {0: 2.0, 1: 2.4}, learning_rate=1e-3),
        *records_by_seed('swept/vo', {0: 2.1, 1: 2.2}, learning_rate=3e-3),
        *records_by_seed('swept/vo', {0: 1.0, 1: None}, learning_rate=1e-2),
    ]
    studies.write_study(study_dir, records)

    _, swept = find(load_study(study_dir)).arms

    assert swept.learning_rate == 3e-3
    assert swept.over_seeds('val_loss').mean == pytest.approx(2.15)
    assert not swept.at_edge
    assert swept.num_diverged == 1


def arm_with_differences(directory, test, validation, margin):
    """The arm b/vo of a study, with these mean differences from the baseline's losses.

    `margin` is the margin of equivalence. The noise over seeds hides none of the differences.
    """
    baseline = records_of_arm('qk/vo', 0)
    records = records_of_arm('b/vo', test, validation, noise=NOISE_OF_MEAN_ZERO)
    return findings_of(directory, baseline, records, margin=margin).arms[1]


@pytest.mark.parametrize(
    # Mean differences of losses from the baseline. Lower is better.
    ('test', 'validation', 'decision'),
    [
        pytest.param(-0.03, -0.001, Decision.BETTER, id='lower on both splits'),
        pytest.param(0.03, 0.001, Decision.WORSE, id='higher on both splits'),
        pytest.param(0.0004, -0.004, Decision.EQUIVALENT, id='within the margin on both splits'),
    ],
)
def test_the_test_split_decides_where_validation_agrees(study_dir, test, validation, decision):
    arm = arm_with_differences(study_dir, test, validation, margin=0.005)

    assert arm.comparison.difference.mean == pytest.approx(test)
    assert arm.comparison.validation == pytest.approx(validation)
    # Validation agrees with 'better' or 'worse' by its sign alone, however small it is.
    # It agrees with 'equivalent' by a difference within the margin.
    assert arm.verdict.decision is decision


@pytest.mark.parametrize(
    # Mean differences of losses from the baseline. Lower is better.
    ('test', 'validation', 'decision_on_test'),
    [
        pytest.param(-0.03, 0.001, Decision.BETTER, id='lower on test alone'),
        pytest.param(0.03, -0.001, Decision.WORSE, id='higher on test alone'),
        pytest.param(0.0004, -0.006, Decision.EQUIVALENT, id='within the margin on test alone'),
    ],
)
def test_an_arm_is_undecided_where_validation_disagrees(
    study_dir, test, validation, decision_on_test
):
    arm = arm_with_differences(study_dir, test, validation, margin=0.005)

    assert arm.comparison.difference.mean == pytest.approx(test)
    assert arm.comparison.validation == pytest.approx(validation)
    assert arm.verdict.decision is Decision.UNDECIDED

    # The reason tells what the test split alone would decide, and both differences.
    reason = arm.verdict.reasons[-1]
    assert reason.code is ReasonCode.SPLITS_DISAGREE
    assert reason.data == {
        'decision': decision_on_test,
        'test': arm.comparison.difference.mean,
        'validation': arm.comparison.validation,
    }


@pytest.mark.parametrize(
    ('delta', 'noise', 'passing'),
    [
        pytest.param(0.03, NOISE_OF_MEAN_ZERO, {'worse', 'not better'}, id='worse'),
        pytest.param(-0.03, NOISE_OF_MEAN_ZERO, {'better', 'not worse'}, id='better'),
        pytest.param(1e-9, NOISE_OF_MEAN_ZERO, {'not better', 'not worse'}, id='equal'),
        pytest.param(1e-9, 40 * NOISE, set(), id='undecided'),
    ],
)
def test_a_positive_control_passes_with_the_expected_verdict(study_dir, delta, noise, passing):
    arms = [
        records_of_arm('qk/vo', 0),
        records_of_arm('b/vo', delta, noise=noise),
        records_of_arm('c/vo', 0.02),
        records_of_arm('b/vo', 0.03, control=SAME_SHAPE),
    ]
    expected = [f'b/vo is {decision}' for decision in EXPECTED]
    expected.append('b/vo is worse at equal shape')
    # An arm that has no results yet.
    declared = [('b/vo', 'd_model=64')]

    controls = findings_of(study_dir, *arms, expected=expected, declared=declared).positive

    *positive, same_shape = controls
    passed = {control.expected.decision for control in positive if control.passed}
    assert passed == passing
    for control in positive:
        assert control.passed is not None
        # The four decisions at two sizes, and the one at equal shape.
        assert control.verdict.num_comparisons == 9
    assert same_shape.passed is True
    assert same_shape.arm.key.control == SAME_SHAPE


def shift_documents(directory, variant, sd):
    """Makes the test losses of an arm differ by document, with deviation `sd` in nats a token.

    Returns these differences and the numbers of tokens, one for each of 100 documents.
    """
    run = studies.run_name(variant, SIZE, 'verdict')
    records = studies.read_lines(directory / 'results.jsonl')
    records_of_run = [record for record in records if record['run'] == run]
    shifts = np.random.default_rng(6).normal(0, sd, 100)
    studies.write_documents(directory / run, records_of_run, 100, shifts)
    documents = json.loads((directory / run / 'documents.json').read_text())
    return shifts, np.array(documents['test']['tokens'])


def add_noise_to_screening(records):
    """Adds noise to each rate's losses, up for one seed and down for the other."""
    noise = np.random.default_rng(4).normal(0, 0.012, len(records) // 2)
    for index, record in enumerate(records):
        if record['stage'] == 'screening':
            record['val_loss'] += noise[index // 2] * (-1) ** index


@pytest.mark.parametrize(
    ('sd_over_documents', 'decision'), [(0.02, Decision.BETTER), (0.3, Decision.UNDECIDED)]
)
def test_an_interval_includes_errors_of_seeds_documents_and_tuning(
    study_dir, sd_over_documents, decision
):
    records = records_of_arm('qk/vo', 0) + records_of_arm('b/vo', -0.03)
    add_noise_to_screening(records)
    studies.write_tuned(study_dir, records)
    shifts, tokens = shift_documents(study_dir, 'b/vo', sd_over_documents)

    baseline, arm = find(load_study(study_dir)).arms

    # The error of tuning: two bounds on the excess loss, which differ.
    arm_excess = arm.sweeps['learning_rate'].at_worst
    baseline_excess = baseline.sweeps['learning_rate'].at_worst
    assert arm_excess > 1e-4
    assert baseline_excess > 1e-4
    assert arm_excess != pytest.approx(baseline_excess)

    expected = inference.paired_test(
        NOISE - 0.03,
        evaluation=inference.evaluation_error((shifts * tokens)[None], tokens),
        tuning=(arm_excess, baseline_excess),
    )
    assert arm.difference.low == pytest.approx(expected.low)
    assert arm.difference.high == pytest.approx(expected.high)
    assert arm.comparison.num_documents == 100
    assert arm.verdict.decision is decision


def test_the_family_is_the_widest_that_was_declared(study_dir):
    """An arm that is deleted from a study later on still counts in the correction.

    Until the smaller study is declared as well, its verdicts are withheld.
    """
    two_arms = records_of_arm('qk/vo', 0) + records_of_arm('b/vo', 0.003)
    third_arm = records_of_arm('c/vo', 0.03)
    assert findings_of(study_dir, two_arms, third_arm).num_comparisons == 2
    entries = (study_dir / ledger.NAME).read_bytes()

    # The study is written again without its third arm, and with its old ledger.
    studies.write_tuned(study_dir, two_arms)
    (study_dir / ledger.NAME).write_bytes(entries)

    findings = find(load_study(study_dir))
    assert code_names(findings.blocks) == ['OTHER_DECLARATION']
    assert findings.num_comparisons == 2

    declared = json.loads((study_dir / 'study.json').read_text())
    ledger.declare(study_dir, declared)

    b = find(load_study(study_dir)).arms[1]
    assert b.verdict.num_comparisons == 2
    assert b.verdict.p_holm == pytest.approx(2 * b.difference.p * ALPHA / level(look=1))


@pytest.mark.parametrize(
    # The margin of equivalence is 0.005 nats/token, and a negative difference is better.
    ('differences', 'decision', 'reasons', 'data_of_last_reason'),
    [
        # The differences are close to 0.002, which is above zero and below the margin.
        pytest.param(
            [0.0023, 0.0019, 0.0022, 0.002, 0.0018, 0.0021, 0.0017, 0.0021],
            Decision.EQUIVALENT,
            ['EQUIVALENT', 'DIFFERENT_WITHIN_MARGIN'],
            {'side': Decision.WORSE},
            id='every seed is worse, by less than the margin',
        ),
        # The mean is zero, but seeds differ too much to show a difference below the margin.
        pytest.param(
            [0.01, -0.01, 0.01, -0.01, 0.01, -0.01, 0.01, -0.01],
            Decision.UNDECIDED,
            ['NOT_SHOWN'],
            {},
            id='better and worse seeds by turns',
        ),
        # The mean is above zero. Without the last seed, which stands apart, it is below zero.
        pytest.param(
            [-0.027, -0.031, -0.028, -0.03, -0.032, -0.029, -0.033, 0.471],
            Decision.UNDECIDED,
            ['NOT_SHOWN', 'SEEDS_APART'],
            {'apart': 1, 'n': 8},
            id='seven seeds are better and one is far worse',
        ),
    ],
)
def test_a_verdict_states_the_codes_and_numbers_of_its_reasons(
    study_dir, differences, decision, reasons, data_of_last_reason
):
    """The losses of b/vo differ from those of the baseline by `differences`, one for each seed."""
    records_of_baseline = studies.tuned_arm('qk/vo', losses=list(BASE))
    records_of_b = studies.tuned_arm('b/vo', losses=list(BASE + differences))

    _, b = findings_of(study_dir, records_of_baseline, records_of_b, margin=0.005).arms

    assert b.verdict.decision is decision
    assert code_names(b.verdict.reasons) == reasons
    last_reason = b.verdict.reasons[-1]
    for name, value in data_of_last_reason.items():
        assert last_reason.data[name] == value

    # All 8 seeds are pairs, which is enough for a test.
    assert b.verdict.p_holm is not None
    assert b.verdict.detectable is not None


def test_an_arm_that_diverged_is_not_called_better(study_dir):
    """The arm b/vo is better by about 0.03 in 7 seeds. Its first trial diverged."""
    better_losses = BASE - 0.03 + NOISE
    records_of_baseline = studies.tuned_arm('qk/vo', losses=list(BASE))
    records_of_b = studies.tuned_arm('b/vo', losses=[None, *better_losses[1:]])

    _, b = findings_of(study_dir, records_of_baseline, records_of_b).arms

    assert b.verdict.decision is Decision.UNDECIDED
    diverged, different_but_diverged = b.verdict.reasons
    assert diverged.code is ReasonCode.DIVERGED
    assert diverged.data == {'arm': 1, 'baseline': 0}
    assert different_but_diverged.code is ReasonCode.DIFFERENT_BUT_DIVERGED
    assert different_but_diverged.data['side'] is Decision.BETTER

    # The 7 seeds that finished in both arms are enough for a test.
    assert b.verdict.p_holm is not None
    assert b.verdict.detectable is not None


def test_an_arm_may_be_better_than_a_baseline_that_diverged(study_dir):
    """The arm b/vo is better by about 0.03 in 7 seeds. The baseline diverged in the first one."""
    better_losses = BASE - 0.03 + NOISE
    records_of_baseline = studies.tuned_arm('qk/vo', losses=[None, *BASE[1:]])
    records_of_b = studies.tuned_arm('b/vo', losses=list(better_losses))

    _, b = findings_of(study_dir, records_of_baseline, records_of_b, margin=0.005).arms

    assert b.verdict.decision is Decision.BETTER
    assert code_names(b.verdict.reasons) == ['DIVERGED', 'DIFFERENT', 'BEYOND_MARGIN']
    assert b.verdict.reasons[0].data == {'arm': 0, 'baseline': 1}

    # The 7 seeds that finished in both arms are enough for a test.
    assert b.verdict.p_holm is not None
    assert b.verdict.detectable is not None


def test_two_pairs_of_seeds_are_too_few_for_a_test(study_dir):
    """Six trials of the baseline diverged, so 2 pairs are left. A test needs 3."""
    baseline_losses = [2.0, 2.1, None, None, None, None, None, None]
    records_of_baseline = studies.tuned_arm('qk/vo', losses=baseline_losses)
    records_of_b = studies.tuned_arm('b/vo', losses=list(BASE + 0.02))

    _, b = findings_of(study_dir, records_of_baseline, records_of_b).arms

    assert b.verdict.decision is Decision.UNDECIDED
    diverged, few_pairs = b.verdict.reasons
    assert diverged.code is ReasonCode.DIVERGED
    assert diverged.data == {'arm': 0, 'baseline': 6}
    assert few_pairs.code is ReasonCode.FEW_PAIRS
    assert few_pairs.data == {'n': 2, 'needed': 3}
    # Nothing was tested.
    assert b.verdict.p_holm is None
    assert b.verdict.detectable is None


def screening_of(records):
    return [record for record in records if record['stage'] == 'screening']


def test_an_arm_whose_verdict_has_not_begun_counts_as_a_comparison(study_dir):
    baseline = records_of_arm('qk/vo', 0)
    finished = records_of_arm('b/vo', 0.02)
    begun = screening_of(records_of_arm('c/vo', 0.02))

    _, b, c = findings_of(study_dir, baseline, finished, begun).arms

    assert code_names(c.verdict.reasons) == ['NO_VERDICT_TRIALS']
    assert b.verdict.num_comparisons == 2


def test_an_arm_whose_baseline_has_not_begun_has_no_verdict(study_dir):
    baseline = screening_of(records_of_arm('qk/vo', 0))
    arm = records_of_arm('b/vo', 0.02)

    _, b = findings_of(study_dir, baseline, arm).arms

    assert code_names(b.verdict.reasons) == ['NO_BASELINE_TRIALS']
    assert b.verdict.reasons[0].data == {'baseline': 'qk/vo'}


def test_arms_without_a_shared_seed_have_losses_but_no_difference(study_dir):
    baseline = records_of_arm('qk/vo', 0)
    arm = records_of_arm('b/vo', 0.5, seeds=range(20, 28))

    _, b = findings_of(study_dir, baseline, arm).arms

    assert b.difference is None
    assert b.comparison is None
    assert b.loss is not None


def test_an_arm_is_not_judged_before_all_its_seeds_have_results(study_dir):
    complete = records_of_arm('b/vo', 0.02)
    # The last four seeds of b/vo are a run of their own, which has no results yet.
    late = [record | {'run': 'late', 'config_hash': 'late'} for record in complete[-4:]]
    finished = records_of_arm('qk/vo', 0) + complete[:-4]
    studies.write_tuned(study_dir, finished + late, expected=['b/vo is worse'])
    studies.write_lines(study_dir / 'results.jsonl', finished)

    (control,) = find(load_study(study_dir)).positive

    assert control.passed is None
    assert code_names(control.verdict.reasons) == ['NO_VERDICT_TRIALS']


def test_a_positive_control_whose_trials_all_diverged_fails_in_words(study_dir):
    diverged = studies.tuned_arm('b/vo', losses=[None] * 8)
    baseline = records_of_arm('qk/vo', 0)

    findings = findings_of(study_dir, baseline, diverged, expected=['b/vo is worse'])

    assert 'b/vo is expected to be worse' in ' '.join(tables.summary(findings))


def records_of_a_scaling_law(worth):
    """Arms at five sizes, in which a parameter of b/vo is worth that many of the baseline.

    The baseline is not bracketed at d_model=128: its optimum is the last rate of the grid.
    """
    records = []
    for d_model in (32, 64, 128, 256, 512):
        parameters = studies.trial_record('qk/vo', d_model=d_model)['parameters']['total']
        for variant, factor in (('qk/vo', 1.0), ('b/vo', worth)):
            loss = 1.5 + 40 * (factor * parameters) ** -0.4
            losses = loss + 0.0002 * (np.arange(8) - 3.5)
            is_unbracketed = variant == 'qk/vo' and d_model == 128
            optimum = 16e-3 if is_unbracketed else 4e-3
            size = f's{d_model}'
            records += studies.tuned_arm(variant, size, losses.tolist(), optimum, d_model=d_model)
    return records


def test_scaling_is_fitted_over_sound_sizes(study_dir):
    records = records_of_a_scaling_law(worth=1.5)

    findings = findings_of(study_dir, records)

    baseline, arm = findings.scaling
    assert findings.num_comparisons == 5
    assert len(baseline.law.sizes) == 4
    assert len(arm.law.sizes) == 5
    # Residuals are zero, but not the standard deviation over 8 seeds.
    assert baseline.law.df == 4 * (8 - 1)
    assert arm.law.df == 5 * (8 - 1)
    assert arm.worth.value == pytest.approx(1.5, rel=0.01)

    # A yardstick that the largest loss of a baseline does not beat leaves out its size.
    largest_loss = max(arm.loss.mean for arm in findings.arms if arm.is_baseline)
    losses = {'test': {'5-gram': largest_loss - 1e-6}}
    studies.write_yardsticks(study_dir, records, losses=losses)
    baseline, arm = find(load_study(study_dir)).scaling
    assert baseline.law.data['sizes'] == 3  # too few for a law
    assert len(arm.law.sizes) == 4


CONTROLS = {'equal_shape': True, 'longer': 4, 'longer_seeds': list(range(6))}


def records_with_controls():
    """A baseline, an arm with both of its controls, and the baseline trained longer.

    Differences to the baseline are -0.03 of the arm, -0.02 of the arm at the same shape, and -0.01
    of the arm trained longer.
    """
    longer = {'rates': (2e-3, 4e-3, 8e-3), 'control': LONGER, 'num_steps': 1600}
    longer_baseline = (BASE - 0.3)[:6]
    longer_arm = (BASE - 0.31 + 2 * NOISE)[:6]
    return [
        *records_of_arm('qk/vo', 0),
        *records_of_arm('b/vo', -0.03),
        *records_of_arm('b/vo', -0.02, control=SAME_SHAPE),
        *studies.tuned_arm('qk/vo', losses=list(longer_baseline), **longer),
        *studies.tuned_arm('b/vo', losses=list(longer_arm), **longer),
    ]


def test_controls_have_no_verdict(study_dir):
    findings = findings_of(study_dir, records_with_controls(), controls=CONTROLS)

    same_shape, longer_baseline, longer_arm = findings.controls
    assert (same_shape.key.control, same_shape.is_baseline) == (SAME_SHAPE, False)
    assert (longer_baseline.key.control, longer_baseline.is_baseline) == (LONGER, True)
    assert (longer_arm.key.control, longer_arm.is_baseline) == (LONGER, False)
    for control in findings.controls:
        assert not control.verdict
    assert findings.num_comparisons == 1
    assert {remark.code for remark in findings.remarks} == {RemarkCode.EVALUATION}

    # A longer arm is tuned at three rates around that of the primary arm.
    assert len(same_shape.sweeps['learning_rate'].values) == 5
    assert len(longer_baseline.sweeps['learning_rate'].values) == 3
    assert len(longer_arm.sweeps['learning_rate'].values) == 3

    # It is compared with the longer baseline, on the seeds that are declared for both.
    differences = findings.arms[1].parts.longer.differences
    assert list(differences.values()) == pytest.approx(list(-0.01 + 2 * NOISE[:6]))

    # Claims may judge it.
    verdict = judging.verdict_on_pair(
        load_study(study_dir), longer_arm, longer_baseline, blocks=(), num_comparisons=1
    )
    assert verdict.decision is Decision.BETTER


def test_a_baseline_below_its_yardstick_withholds_the_verdict_but_no_part(study_dir):
    records = records_with_controls()
    studies.write_tuned(study_dir, records, controls=CONTROLS)
    studies.write_yardsticks(study_dir, records, losses={'test': {'5-gram': 1.0}})

    arm = find(load_study(study_dir)).arms[1]

    assert arm.verdict.decision is Decision.NO_VERDICT
    for part in PARTS:
        assert getattr(arm.parts, part) is not None


@pytest.mark.parametrize(
    # The arm whose schedule does not anneal, or 'all'; and the parts that are lost by that.
    ('variant', 'control', 'lost', 'decision'),
    [
        ('b/vo', SAME_SHAPE, {'same_shape', 'reinvesting'}, Decision.BETTER),
        ('qk/vo', LONGER, {'longer'}, Decision.BETTER),
        ('b/vo', None, {'reinvesting'}, Decision.NO_VERDICT),
        ('all', None, {'same_shape', 'reinvesting', 'longer'}, Decision.NO_VERDICT),
    ],
)
def test_parts_of_a_difference_leave_out_arms_that_break_a_rule(
    study_dir, variant, control, lost, decision
):
    studies.write_tuned(study_dir, records_with_controls(), controls=CONTROLS)
    if variant == 'all':
        runs = [run.name for run in load_study(study_dir).runs]
    else:
        runs = [studies.run_name(variant, SIZE, 'verdict', control)]
    for run in runs:
        studies.edit_plan(study_dir, run, optimizer__schedule='constant')

    findings = find(load_study(study_dir))

    arm = findings.arms[1]
    assert {part for part in PARTS if getattr(arm.parts, part) is None} == lost
    assert arm.verdict.decision is decision

    # A claim that compares the baseline with a withheld arm names that arm.
    study = load_study(study_dir)
    for withheld in (*findings.arms, *findings.controls):
        if withheld.blocks:
            verdict = judging.verdict_on_pair(
                study, findings.arms[0], withheld, blocks=(), num_comparisons=1
            )
            assert verdict.reasons[-1].data['baseline'] == withheld.variant
