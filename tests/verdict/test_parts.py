"""Removing and reinvesting: control arms, their intervals, and what they may not do."""

import numpy as np
import pytest
from scipy import stats

from qkattn.study.place import EQUAL_SHAPE, LONGER, Place
from qkattn.verdict import Decision, RemarkCode, find, load_study
from tests.studies import edit_plan, run_name, tuned_arm, write_tuned

SIZE = 'd_model=128'
BASE = 2 + 0.05 * np.arange(8)
NOISE = 0.001 * np.array([3, -1, 2, 0, -2, 1, -3, 1])
STEPS = {'num_steps': 1600}


def arm(variant, delta, **keywords):
    return tuned_arm(variant, losses=list(BASE + delta + NOISE * (delta != 0)), **keywords)


def controlled(removing=-0.02, total=-0.03, longer=-0.01):
    """A baseline, an arm with both of its controls, and the baseline trained longer."""
    rates = {'rates': (2e-3, 4e-3, 8e-3), 'control': LONGER, **STEPS}
    longer_baseline = tuned_arm('qk/vo', losses=list(BASE - 0.3), **rates)
    same_shape = arm('b/vo', removing, control=EQUAL_SHAPE)
    for record in same_shape:
        parameters = 0.93 * record['target_parameters']
        record['parameters'] = record['parameters'] | {'total': round(parameters)}
        record['residual'] = round(parameters) / record['target_parameters'] - 1
    return [
        *arm('qk/vo', 0),
        *arm('b/vo', total),
        *same_shape,
        *longer_baseline,
        *tuned_arm('b/vo', losses=list(BASE - 0.3 + longer + 2 * NOISE), **rates),
    ]


def test_the_difference_is_the_sum_of_removing_and_reinvesting(study_dir):
    found = find(load_study(write_tuned(study_dir, controlled())))
    (parts,) = found.decomposition
    assert parts.place == Place('b/vo', SIZE, 'stdlib')
    removing, reinvesting = parts.removing.difference, parts.reinvesting.difference
    assert removing.mean == pytest.approx(-0.02 + NOISE.mean())
    assert reinvesting.mean == pytest.approx(-0.01, abs=1e-12)
    total = found.arms[1].difference
    assert removing.mean + reinvesting.mean == pytest.approx(total.mean)
    sums = np.add(*(list(of.differences.values()) for of in (parts.removing, parts.reinvesting)))
    assert sums.tolist() == pytest.approx(found.arms[1].differences)
    longer = parts.longer.difference
    interval = stats.t.interval(0.95, 7, np.mean(2 * NOISE) - 0.01, stats.sem(2 * NOISE))
    assert (longer.low, longer.high) == pytest.approx(interval)


def test_controls_are_no_comparison_and_get_no_word(study_dir):
    alone = find(load_study(write_tuned(study_dir / 'alone', arm('qk/vo', 0) + arm('b/vo', -0.03))))
    found = find(load_study(write_tuned(study_dir / 'both', controlled())))
    assert found.num_comparisons == 1 and found.arms[1].verdict == alone.arms[1].verdict
    assert [a.place.control for a in found.controls] == [EQUAL_SHAPE, LONGER, LONGER]
    assert [a.is_baseline for a in found.controls] == [False, True, False]
    assert not any(a.verdict for a in found.controls)
    # The residual of a control of equal shape is what it saves, and may be over the tolerance.
    assert not any(remark.blocks for remark in found.remarks)
    assert alone.decomposition == ()


def test_a_longer_arm_is_tuned_around_the_rate_of_the_primary_one(study_dir):
    found = find(load_study(write_tuned(study_dir, controlled())))
    for of in found.controls:
        values = of.sweeps['learning_rate'].values
        assert len(values) == (3 if of.control == LONGER else 5)
        assert of.tuning.knob is None and of.learning_rate == 4e-3
    # Trained with other steps than the baseline, it is compared with the longer one alone.
    assert not any(r.code is RemarkCode.DIFFERS for r in found.remarks)


@pytest.mark.parametrize(
    ('variant', 'control', 'lost'),
    [
        ('b/vo', EQUAL_SHAPE, {'removing', 'reinvesting'}),
        ('b/vo', LONGER, {'longer'}),
        ('qk/vo', LONGER, {'longer'}),
        ('b/vo', None, {'reinvesting'}),
    ],
)
def test_an_arm_that_breaks_a_rule_is_no_part(study_dir, variant, control, lost):
    write_tuned(study_dir, controlled())
    run = run_name(variant, SIZE, 'verdict', control=control)
    edit_plan(study_dir, run, optimizer__schedule='constant')
    found = find(load_study(study_dir))
    (parts,) = found.decomposition
    names = ('removing', 'reinvesting', 'longer')
    assert {name for name in names if getattr(parts, name) is None} == lost
    word = Decision.NO_VERDICT if control is None else Decision.BETTER
    assert found.arms[1].verdict.decision is word


def test_arms_that_all_break_a_rule_are_no_parts(study_dir):
    write_tuned(study_dir, controlled())
    for run in load_study(study_dir).runs:
        edit_plan(study_dir, run.name, optimizer__schedule='constant')
    found = find(load_study(study_dir))
    assert [(of.code, of.arm) for of in found.blocks] == [(RemarkCode.NOT_ANNEALED, None)]
    (parts,) = found.decomposition
    assert parts.removing is parts.reinvesting is parts.longer is None


def test_an_arm_that_is_known_badly_is_a_part(study_dir):
    records = controlled()
    for record in records:
        if record['control'] == EQUAL_SHAPE and record['stage'] == 'screening':
            record['val_loss'] = 2 - record['trial']['learning_rate']
    found = find(load_study(write_tuned(study_dir, records)))
    (parts,) = found.decomposition
    assert parts.removing is None and {r.code for r in found.controls[0].blocks} == {
        RemarkCode.NOT_BRACKETED,
        RemarkCode.OTHER_SETTING,
    }
    for record in records:
        if record['control'] == EQUAL_SHAPE and record['stage'] == 'verdict':
            record['trial']['learning_rate'] = 16e-3
    (parts,) = find(load_study(write_tuned(study_dir / 'at_edge', records))).decomposition
    assert parts.removing.difference.mean == pytest.approx(-0.02 + NOISE.mean())


def test_arms_of_several_destinations_share_a_control_of_equal_shape(study_dir):
    records = [*arm('qk/vo', 0), *arm('b/vo', -0.02, control=EQUAL_SHAPE)]
    for destination, delta in (('d_model', -0.03), ('d_ff', -0.01)):
        records += arm(f'b/vo [{destination}]', delta)
    write_tuned(study_dir, records, destinations=['d_model', 'd_ff'])
    found = find(load_study(study_dir))
    parts = {of.place.variant: of for of in found.decomposition}
    assert {name: round(of.reinvesting.difference.mean, 6) for name, of in parts.items()} == {
        'b/vo [d_model]': -0.01,
        'b/vo [d_ff]': 0.01,
    }
    assert len({of.removing.difference.mean for of in parts.values()}) == 1


def test_a_control_without_its_verdict_run_is_no_part(study_dir):
    records = [r for r in controlled() if (r['control'], r['stage']) != (EQUAL_SHAPE, 'verdict')]
    found = find(load_study(write_tuned(study_dir, records)))
    (parts,) = found.decomposition
    assert parts.removing is parts.reinvesting is None and parts.longer is not None
    missing = load_study(study_dir).missing
    assert [(of.place.control, of.stage) for of in missing] == [(EQUAL_SHAPE, 'verdict')]


def test_models_that_are_not_trained_enough_have_parts_without_a_word(study_dir):
    losses = {'test': {'5-gram': 1.0}}
    found = find(load_study(write_tuned(study_dir, controlled(), yardsticks={'losses': losses})))
    assert found.arms[1].verdict.decision is Decision.NO_VERDICT
    (parts,) = found.decomposition
    assert None not in (parts.removing, parts.reinvesting, parts.longer)
