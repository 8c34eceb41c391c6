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
# Validation losses of the baseline, one per seed. Test losses are 0.1 higher.
BASE = 2 + 0.05 * np.arange(8)
NOISE = 0.001 * np.array([3, -1, 2, 0, -2, 1, -3, 1])
NOISE_OF_MEAN_ZERO = NOISE - NOISE.mean()
PARTS = ('same_shape', 'reinvesting', 'longer')


def records_of_arm(variant, delta, validation=None, noise=NOISE, **keywords):
    """Returns the screening and verdict trials of an arm with eight verdict seeds.

    Args:
        variant: Variant of the arm, such as 'b/vo'.
        delta: Test loss minus the baseline's, in nats/token. If it is 0, no noise is added.
        validation: Validation loss minus the baseline's; None means `delta`.
        noise: What is added to the loss of each seed.
        **keywords: Keywords of `studies.tuned_arm`.
    """
    losses = BASE + delta
    if delta != 0:
        losses = losses + noise
    records = studies.tuned_arm(variant, losses=list(losses), **keywords)

    # `tuned_arm` has added `delta` to the losses of both splits.
    for record in records:
        if validation is not None and record['stage'] == 'verdict':
            record['val_loss'] += validation - delta
    return records


def findings_of(directory, *arms, **changes):
    """Writes a study of these arms, each a list of records. Returns its findings."""
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
    """An arm has a difference for each seed that both arms have: its loss minus the baseline's."""
    baseline_losses = {0: 2.00, 1: 2.10, 2: 2.30}
    arm_losses = {2: 2.38, 0: 2.05, 1: 2.12, 9: 1.0}  # in another order, with one more seed
    records = records_by_seed('qk/vo', baseline_losses) + records_by_seed('b/vo', arm_losses)
    studies.write_study(study_dir, records)

    baseline, arm = find(load_study(study_dir)).arms

    assert baseline.is_baseline
    assert baseline.difference is None
    # A study without tuning has no verdicts.
    assert arm.verdict is None
    # The baseline has no seed 9, so that seed does not count.
    expected = {0: 2.05 - 2.00, 1: 2.12 - 2.10, 2: 2.38 - 2.30}
    assert list(arm.comparison.differences) == [0, 1, 2]
    assert arm.comparison.differences == pytest.approx(expected)


def test_without_tuning_the_best_rate_by_mean_is_chosen(study_dir):
    """A study without tuning chooses the learning rate with the lowest mean loss over seeds.

    A rate at which a seed diverged is not chosen.
    """
    records = [
        *records_by_seed('qk/vo', {0: 2.00, 1: 2.10, 2: 2.30}),
        # The lowest loss of a single seed, 2.0, but a mean of 2.2.
        *records_by_seed('swept/vo', {0: 2.0, 1: 2.4}, learning_rate=1e-3),
        # The lowest mean, 2.15.
        *records_by_seed('swept/vo', {0: 2.1, 1: 2.2}, learning_rate=3e-3),
        # Seed 1 diverged.
        *records_by_seed('swept/vo', {0: 1.0, 1: None}, learning_rate=1e-2),
    ]
    studies.write_study(study_dir, records)

    _, swept = find(load_study(study_dir)).arms

    assert swept.learning_rate == 3e-3
    assert swept.over_seeds('val_loss').mean == pytest.approx((2.1 + 2.2) / 2)
    # 3e-3 lies between the two other rates.
    assert not swept.at_edge
    assert swept.num_diverged == 1


def arm_with_differences(directory, test, validation, margin):
    """The arm b/vo of a study, with these mean differences from the baseline's losses.

    Differences within `margin` count as none. The noise over seeds is too small to hide any.
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
    # Validation agrees with 'better' or 'worse' if the difference has the same sign.
    # It agrees with 'equivalent' if the difference is within the margin.
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

    # The reason names the decision by test losses only, and the differences on both splits.
    reason = arm.verdict.reasons[-1]
    assert reason.code is ReasonCode.SPLITS_DISAGREE
    assert reason.data == {
        'decision': decision_on_test,
        'test': arm.comparison.difference.mean,
        'validation': arm.comparison.validation,
    }


@pytest.mark.parametrize(
    # `delta` is the difference of b/vo from the baseline in nats/token. Below zero is better.
    # A difference within 0.005 counts as none. `passing` are the expectations that come true.
    ('delta', 'noise', 'passing'),
    [
        pytest.param(0.03, NOISE_OF_MEAN_ZERO, {'worse', 'not better'}, id='worse'),
        pytest.param(-0.03, NOISE_OF_MEAN_ZERO, {'better', 'not worse'}, id='better'),
        # With a delta of 0, `records_of_arm` would add no noise.
        pytest.param(1e-9, NOISE_OF_MEAN_ZERO, {'not better', 'not worse'}, id='equal'),
        # The noise is too large for any decision.
        pytest.param(1e-9, 40 * NOISE, set(), id='undecided'),
    ],
)
def test_a_positive_control_passes_with_the_expected_verdict(study_dir, delta, noise, passing):
    """A positive control is an arm for which the study expects a decision, such as 'worse'.

    The control passes if its verdict agrees with that decision.
    """
    arms = [
        records_of_arm('qk/vo', 0),
        records_of_arm('b/vo', delta, noise=noise),
        records_of_arm('c/vo', 0.02),  # no positive control
        records_of_arm('b/vo', 0.03, control=SAME_SHAPE),
    ]
    # The decisions in EXPECTED are better, worse, not better and not worse.
    expected = [f'b/vo is {decision}' for decision in EXPECTED]
    expected.append('b/vo is worse at equal shape')
    # At a second size, b/vo is planned and has no results yet.
    declared = [('b/vo', 'd_model=64')]

    controls = findings_of(study_dir, *arms, expected=expected, declared=declared).positive

    # Controls without results are left out.
    *at_equal_cost, same_shape = controls
    passed = {control.expected.decision for control in at_equal_cost if control.passed}
    assert passed == passing

    # p values are corrected for every expectation, with or without results.
    num_sizes = 2
    num_at_equal_shape = 1
    num_comparisons = len(EXPECTED) * num_sizes + num_at_equal_shape
    for control in at_equal_cost:
        assert control.passed is not None
        assert control.verdict.num_comparisons == num_comparisons

    # The arm at the same shape is worse by 0.03 in every case, as expected.
    assert same_shape.passed is True
    assert same_shape.arm.key.control == SAME_SHAPE


def shift_documents(directory, variant, sd):
    """Writes documents.json of an arm again, with test losses that differ by document.

    Args:
        directory: Directory of the study.
        variant: Variant of the arm.
        sd: Standard deviation of the differences, in nats/token.

    Returns:
        What is added to the loss of each of 100 documents, in nats/token.
        The number of tokens of each document.
    """
    num_documents = 100
    run = studies.run_name(variant, SIZE, 'verdict')
    records = studies.read_lines(directory / 'results.jsonl')
    records_of_run = [record for record in records if record['run'] == run]
    shifts = np.random.default_rng(6).normal(0, sd, num_documents)
    studies.write_documents(directory / run, records_of_run, num_documents, shifts)

    documents = json.loads((directory / run / 'documents.json').read_text())
    tokens = np.array(documents['test']['tokens'])
    return shifts, tokens


def add_noise_to_screening(records):
    """Adds noise to each rate's losses, up for one seed and down for the other."""
    noise = np.random.default_rng(4).normal(0, 0.012, len(records) // 2)
    for index, record in enumerate(records):
        if record['stage'] == 'screening':
            record['val_loss'] += noise[index // 2] * (-1) ** index


@pytest.mark.parametrize(
    # The mean difference is -0.03. Only a small spread over documents shows that it is below zero.
    ('sd_over_documents', 'decision'),
    [(0.02, Decision.BETTER), (0.3, Decision.UNDECIDED)],
)
def test_an_interval_includes_errors_of_seeds_documents_and_tuning(
    study_dir, sd_over_documents, decision
):
    """The interval of a difference includes the errors over seeds and over documents.

    It also includes the loss that imperfect tuning may cost.
    """
    records = records_of_arm('qk/vo', 0) + records_of_arm('b/vo', -0.03)
    add_noise_to_screening(records)
    studies.write_tuned(study_dir, records)
    shifts, tokens = shift_documents(study_dir, 'b/vo', sd_over_documents)

    baseline, arm = find(load_study(study_dir)).arms

    # `at_worst` bounds the loss that imperfect tuning costs. The two bounds differ.
    arm_excess = arm.sweeps['learning_rate'].at_worst
    baseline_excess = baseline.sweeps['learning_rate'].at_worst
    assert arm_excess > 1e-4
    assert baseline_excess > 1e-4
    assert arm_excess != pytest.approx(baseline_excess)

    # Each document shifts the arm's loss by an amount that is the same for every seed.
    differences_of_seeds = -0.03 + NOISE
    nats_of_documents = shifts * tokens
    nats_by_seed_and_document = nats_of_documents[None]  # one row for all seeds
    expected = inference.paired_test(
        differences_of_seeds,
        evaluation=inference.evaluation_error(nats_by_seed_and_document, tokens),
        tuning=(arm_excess, baseline_excess),
    )
    assert arm.difference.low == pytest.approx(expected.low)
    assert arm.difference.high == pytest.approx(expected.high)
    assert arm.comparison.num_documents == 100
    assert arm.verdict.decision is decision


def test_the_family_is_the_widest_that_was_declared(study_dir):
    """An arm that is deleted from a study later on still counts as a comparison.

    The arms of a family share the error probability ALPHA. The ledger is a log of all declarations
    of the study, so it still has the deleted arm.
    """
    # First, two arms are compared with the baseline qk/vo.
    two_arms = records_of_arm('qk/vo', 0) + records_of_arm('b/vo', 0.003)
    third_arm = records_of_arm('c/vo', 0.03)
    assert findings_of(study_dir, two_arms, third_arm).num_comparisons == 2
    ledger_of_three_arms = (study_dir / ledger.NAME).read_bytes()

    # Then the study is written again without c/vo, and with its old ledger.
    studies.write_tuned(study_dir, two_arms)
    (study_dir / ledger.NAME).write_bytes(ledger_of_three_arms)

    # The ledger does not declare this smaller study, so every verdict is withheld.
    findings = find(load_study(study_dir))
    assert code_names(findings.blocks) == ['OTHER_DECLARATION']
    assert findings.num_comparisons == 2

    # Once the smaller study is declared, b/vo has a verdict, corrected for two comparisons.
    smaller_study = json.loads((study_dir / 'study.json').read_text())
    ledger.declare(study_dir, smaller_study)
    b = find(load_study(study_dir)).arms[1]
    assert b.verdict.num_comparisons == 2
    # A first look is tested at level(1). Its p value is scaled, to be compared with ALPHA.
    p_of_first_look = b.difference.p * ALPHA / level(look=1)
    assert b.verdict.p_holm == pytest.approx(2 * p_of_first_look)


@pytest.mark.parametrize(
    # A difference within the margin of 0.005 nats/token counts as none. Below zero is better.
    ('differences', 'decision', 'reasons', 'data_of_last_reason'),
    [
        # Every difference is close to 0.002, above zero and below the margin.
        pytest.param(
            [0.0023, 0.0019, 0.0022, 0.002, 0.0018, 0.0021, 0.0017, 0.0021],
            Decision.EQUIVALENT,
            ['EQUIVALENT', 'DIFFERENT_WITHIN_MARGIN'],
            {'side': Decision.WORSE},
            id='every seed is worse, by less than the margin',
        ),
        # The mean is zero, but seeds differ too much to show that it is within the margin.
        pytest.param(
            [0.01, -0.01, 0.01, -0.01, 0.01, -0.01, 0.01, -0.01],
            Decision.UNDECIDED,
            ['NOT_SHOWN'],
            {},
            id='better and worse seeds by turns',
        ),
        # The mean is +0.0326. Without the last seed, it is -0.03.
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
    """A reason is a code such as NOT_SHOWN, with numbers as data.

    `differences` are the losses of b/vo minus the baseline's, one for each seed.
    """
    records_of_baseline = studies.tuned_arm('qk/vo', losses=list(BASE))
    records_of_b = studies.tuned_arm('b/vo', losses=list(BASE + differences))

    _, b = findings_of(study_dir, records_of_baseline, records_of_b, margin=0.005).arms

    assert b.verdict.decision is decision
    assert code_names(b.verdict.reasons) == reasons
    last_reason = b.verdict.reasons[-1]
    for name, value in data_of_last_reason.items():
        assert last_reason.data[name] == value

    # Both arms have results for all 8 seeds, which are enough for a test.
    assert b.verdict.p_holm is not None
    assert b.verdict.detectable is not None


def test_an_arm_that_diverged_is_not_called_better(study_dir):
    """The arm b/vo is better by about 0.03 in 7 seeds. Its trial of the first seed diverged."""
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
    """The arm b/vo is better by about 0.03 in 7 seeds. The baseline diverged in the first seed."""
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
    # c/vo has results of its screening only.
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
    """The arm b/vo has results for only four of its eight seeds, so it has no verdict yet.

    The study expects b/vo to be worse. This expectation has neither passed nor failed.
    """
    complete = records_of_arm('b/vo', 0.02)
    # The last four seeds of b/vo are planned in a separate run.
    late_run = [record | {'run': 'late', 'config_hash': 'late'} for record in complete[-4:]]
    finished_runs = records_of_arm('qk/vo', 0) + complete[:-4]
    studies.write_tuned(study_dir, finished_runs + late_run, expected=['b/vo is worse'])
    # The late run has no results.
    studies.write_lines(study_dir / 'results.jsonl', finished_runs)

    (control,) = find(load_study(study_dir)).positive

    assert control.passed is None
    assert code_names(control.verdict.reasons) == ['NO_VERDICT_TRIALS']


def test_a_positive_control_whose_trials_all_diverged_fails_in_words(study_dir):
    diverged = studies.tuned_arm('b/vo', losses=[None] * 8)
    baseline = records_of_arm('qk/vo', 0)

    findings = findings_of(study_dir, baseline, diverged, expected=['b/vo is worse'])

    assert 'b/vo is expected to be worse' in ' '.join(tables.summary(findings))


def records_of_a_scaling_law(worth):
    """Returns trials of the baseline and of b/vo at five sizes, with eight seeds each.

    A parameter of b/vo is worth `worth` parameters of the baseline:

        loss of the baseline   1.5 + 40 * parameters ** -0.4
        loss of b/vo           1.5 + 40 * (worth * parameters) ** -0.4

    At d_model=128, the best learning rate of the baseline is the last rate of its grid. A higher
    rate could be better, so this baseline breaks a rule.
    """
    records = []
    for d_model in (32, 64, 128, 256, 512):
        parameters = studies.trial_record('qk/vo', d_model=d_model)['parameters']['total']
        for variant, factor in (('qk/vo', 1.0), ('b/vo', worth)):
            loss = 1.5 + 40 * (factor * parameters) ** -0.4
            losses = loss + 0.0002 * (np.arange(8) - 3.5)  # eight seeds around that mean
            is_unbracketed = variant == 'qk/vo' and d_model == 128
            optimum = 16e-3 if is_unbracketed else 4e-3
            size = f's{d_model}'
            records += studies.tuned_arm(variant, size, losses.tolist(), optimum, d_model=d_model)
    return records


def test_scaling_is_fitted_over_sound_sizes(study_dir):
    """A scaling law, loss against parameters, leaves out sizes at which an arm breaks a rule.

    Here the baseline breaks a rule at one of five sizes, d_model=128.
    """
    records = records_of_a_scaling_law(worth=1.5)

    findings = findings_of(study_dir, records)

    # b/vo is compared with the baseline at five sizes.
    assert findings.num_comparisons == 5
    baseline, arm = findings.scaling
    assert len(baseline.law.sizes) == 5 - 1
    assert len(arm.law.sizes) == 5
    assert arm.worth.value == pytest.approx(1.5, rel=0.01)

    # The mean losses lie on the law, so its error only comes from the spread over 8 seeds.
    assert baseline.law.df == 4 * (8 - 1)
    assert arm.law.df == 5 * (8 - 1)


def test_scaling_leaves_out_sizes_whose_baseline_misses_its_yardstick(study_dir):
    """A yardstick is a loss of n-grams, which the baseline of every size has to beat."""
    records = records_of_a_scaling_law(worth=1.5)
    findings = findings_of(study_dir, records)

    # Only the smallest baseline, which has the largest loss, does not beat this yardstick.
    largest_loss = max(arm.loss.mean for arm in findings.arms if arm.is_baseline)
    losses = {'test': {'5-gram': largest_loss - 1e-6}}
    studies.write_yardsticks(study_dir, records, losses=losses)
    baseline, arm = find(load_study(study_dir)).scaling

    # The baseline at d_model=128 breaks a rule too. Three sizes are too few for a law.
    assert baseline.law.data['sizes'] == 5 - 2
    # b/vo has no baseline at the smallest size, so its law leaves out that size too.
    assert len(arm.law.sizes) == 5 - 1


# Arms have controls at the same shape, and controls that train six seeds four times as long.
CONTROLS = {'equal_shape': True, 'longer': 4, 'longer_seeds': list(range(6))}


def records_with_controls():
    """Returns trials of a baseline, an arm with both of its controls, and the baseline's control.

    | arm                 | difference from the baseline | seeds |
    |---------------------|------------------------------|-------|
    | b/vo                | -0.03                        | 8     |
    | b/vo, same shape    | -0.02                        | 8     |
    | qk/vo, longer       | -0.3                         | 6     |
    | b/vo, longer        | -0.3 - 0.01                  | 6     |

    The control at the same shape has the baseline's widths. Longer controls train for 4 * 400
    steps. The losses of b/vo also have noise, which is doubled in its longer control.
    """
    longer = {'rates': (2e-3, 4e-3, 8e-3), 'control': LONGER, 'num_steps': 1600}
    longer_baseline = (BASE - 0.3)[:6]
    longer_arm = (BASE - 0.3 - 0.01 + 2 * NOISE)[:6]
    return [
        *records_of_arm('qk/vo', 0),
        *records_of_arm('b/vo', -0.03),
        *records_of_arm('b/vo', -0.02, control=SAME_SHAPE),
        *studies.tuned_arm('qk/vo', losses=list(longer_baseline), **longer),
        *studies.tuned_arm('b/vo', losses=list(longer_arm), **longer),
    ]


def test_controls_have_no_verdict(study_dir):
    """Controls explain the difference of an arm, and get no verdict themselves.

    One control has the baseline's shape. The other two are trained longer.
    """
    findings = findings_of(study_dir, records_with_controls(), controls=CONTROLS)

    same_shape, longer_baseline, longer_arm = findings.controls
    assert (same_shape.key.control, same_shape.is_baseline) == (SAME_SHAPE, False)
    assert (longer_baseline.key.control, longer_baseline.is_baseline) == (LONGER, True)
    assert (longer_arm.key.control, longer_arm.is_baseline) == (LONGER, False)
    for control in findings.controls:
        assert not control.verdict

    # Only b/vo itself is compared with the baseline.
    assert findings.num_comparisons == 1
    # No rule is broken. The only remark says how much text was evaluated.
    assert {remark.code for remark in findings.remarks} == {RemarkCode.EVALUATION}


def test_a_longer_arm_is_tuned_around_the_rate_of_the_primary_arm(study_dir):
    findings = findings_of(study_dir, records_with_controls(), controls=CONTROLS)

    # The grid of the study has five learning rates. Longer arms have the three around the best.
    same_shape, longer_baseline, longer_arm = findings.controls
    assert len(same_shape.sweeps['learning_rate'].values) == 5
    assert len(longer_baseline.sweeps['learning_rate'].values) == 3
    assert len(longer_arm.sweeps['learning_rate'].values) == 3


def test_a_longer_arm_is_compared_with_the_longer_baseline(study_dir):
    findings = findings_of(study_dir, records_with_controls(), controls=CONTROLS)

    # Longer arms have six seeds. The longer b/vo is 0.01 below the longer baseline, plus noise.
    differences = findings.arms[1].parts.longer.differences
    expected = -0.01 + 2 * NOISE[:6]
    assert list(differences.values()) == pytest.approx(list(expected))

    # A longer arm has no verdict, but a claim may compare it with the longer baseline.
    _, longer_baseline, longer_arm = findings.controls
    verdict = judging.verdict_on_pair(
        load_study(study_dir), longer_arm, longer_baseline, blocks=(), num_comparisons=1
    )
    assert verdict.decision is Decision.BETTER


def test_a_baseline_below_its_yardstick_withholds_the_verdict_but_no_part(study_dir):
    records = records_with_controls()
    studies.write_tuned(study_dir, records, controls=CONTROLS)
    # The loss of the baseline, about 2, does not beat a yardstick of 1.0.
    studies.write_yardsticks(study_dir, records, losses={'test': {'5-gram': 1.0}})

    arm = find(load_study(study_dir)).arms[1]

    assert arm.verdict.decision is Decision.NO_VERDICT
    for part in PARTS:
        assert getattr(arm.parts, part) is not None


def stop_annealing(directory, variant, control):
    """Plans a constant learning rate in the verdict run of an arm, or in every run for 'all'.

    This breaks the rule that the learning rate falls to zero.
    """
    if variant == 'all':
        runs = [run.name for run in load_study(directory).runs]
    else:
        runs = [studies.run_name(variant, SIZE, 'verdict', control)]
    for run in runs:
        studies.edit_plan(directory, run, optimizer__schedule='constant')


@pytest.mark.parametrize(
    # `variant` and `control` name the arm that breaks a rule. `lost` are the parts that need it.
    ('variant', 'control', 'lost', 'decision'),
    [
        pytest.param(
            'b/vo', SAME_SHAPE, {'same_shape', 'reinvesting'}, Decision.BETTER, id='same shape'
        ),
        pytest.param('qk/vo', LONGER, {'longer'}, Decision.BETTER, id='longer baseline'),
        pytest.param('b/vo', None, {'reinvesting'}, Decision.NO_VERDICT, id='the arm itself'),
        pytest.param(
            'all',
            None,
            {'same_shape', 'reinvesting', 'longer'},
            Decision.NO_VERDICT,
            id='every arm',
        ),
    ],
)
def test_parts_of_a_difference_leave_out_arms_that_break_a_rule(
    study_dir, variant, control, lost, decision
):
    """Each part of the difference of b/vo from the baseline is the difference of two arms.

    - `same_shape`: b/vo with the baseline's widths, minus the baseline.
    - `reinvesting`: b/vo, widened to the baseline's cost, minus b/vo with the baseline's widths.
    - `longer`: b/vo minus the baseline, both trained longer.
    """
    studies.write_tuned(study_dir, records_with_controls(), controls=CONTROLS)
    stop_annealing(study_dir, variant, control)

    b = find(load_study(study_dir)).arms[1]

    assert {part for part in PARTS if getattr(b.parts, part) is None} == lost
    # b/vo is better by 0.03. It keeps its verdict if only a control breaks a rule.
    assert b.verdict.decision is decision


@pytest.mark.parametrize(
    ('variant', 'control', 'num_withheld'),
    [
        pytest.param('b/vo', SAME_SHAPE, 1, id='same shape'),
        pytest.param('b/vo', None, 1, id='the arm itself'),
        # The longer b/vo then has another schedule than its baseline, which breaks another rule.
        pytest.param('qk/vo', LONGER, 2, id='longer baseline'),
    ],
)
def test_a_comparison_with_an_arm_that_breaks_a_rule_names_that_arm(
    study_dir, variant, control, num_withheld
):
    """A claim may compare the baseline with an arm that has no verdict of its own.

    If that arm breaks a rule, the reason of the verdict names the arm.
    """
    studies.write_tuned(study_dir, records_with_controls(), controls=CONTROLS)
    stop_annealing(study_dir, variant, control)

    findings = find(load_study(study_dir))

    all_arms = (*findings.arms, *findings.controls)
    withheld_arms = [arm for arm in all_arms if arm.blocks]
    assert len(withheld_arms) == num_withheld
    for withheld in withheld_arms:
        verdict = judging.verdict_on_pair(
            load_study(study_dir), findings.arms[0], withheld, blocks=(), num_comparisons=1
        )
        assert verdict.reasons[-1].data['baseline'] == withheld.variant
