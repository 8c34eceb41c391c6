"""Families of comparisons: which arms belong to them, and what each decision is corrected for."""

from qkattn.stats import inference
from qkattn.stats.decision import ALPHA, Decision, level
from qkattn.study.arm_key import LONGER, SAME_SHAPE, ArmKey, parse_expected
from qkattn.study.family import Family, expected_arms, primary_arms

BASELINE = ArmKey('qk/vo', 'd_model=64', 'stdlib')
ARM = BASELINE._replace(variant='b/vo')
LARGER_ARM = ARM._replace(size='d_model=128')
ARM_AT_SAME_SHAPE = ARM._replace(control=SAME_SHAPE)
LONGER_ARM = ARM._replace(control=LONGER)
KEYS = [BASELINE, ARM, ARM_AT_SAME_SHAPE, LONGER_ARM, LARGER_ARM]
DIFFERENCE = inference.paired_test(
    [0.011, 0.02, 0.014, 0.025], evaluation=(0.001, 99.0), tuning=(0.0, 0.0)
)


def test_primary_arms_are_neither_baselines_nor_controls():
    assert primary_arms(KEYS, baseline='qk/vo') == [ARM, LARGER_ARM]


def test_a_positive_control_is_about_an_arm_of_each_size():
    expected = parse_expected('b/vo is worse')
    assert expected_arms(KEYS, expected) == [ARM, LARGER_ARM]


def test_a_positive_control_may_have_options_with_spaces():
    variant = 'shared_qk(key_norm=True, self_mask=True)/vo'
    # The label ends before ' is not worse', whatever comes before.
    assert parse_expected(f'{variant} [d_ff] is not worse').variant == f'{variant} [d_ff]'


def test_a_positive_control_at_the_same_shape_is_about_the_control():
    expected = parse_expected('b/vo is worse at equal shape')
    assert expected_arms(KEYS, expected) == [ARM_AT_SAME_SHAPE]


def test_comparisons_without_results_are_corrected_for():
    family = Family(size=3)
    family.add('b/vo', DIFFERENCE, diverged=(0, 0))

    verdict = family.judge()['b/vo']

    # p is multiplied by the 3 comparisons. The factor ALPHA / level(1) scales it from the level of
    # a first look to ALPHA.
    p_holm = min(1.0, 3 * DIFFERENCE.p * ALPHA / level(look=1))
    assert abs(verdict.p_holm - p_holm) < 1e-12


def test_a_later_look_is_tested_at_its_own_level():
    family = Family(size=1)
    family.add('b/vo', DIFFERENCE, diverged=(0, 0), look=2)

    verdict = family.judge()['b/vo']

    p_holm = min(1.0, DIFFERENCE.p * ALPHA / level(look=2))
    assert abs(verdict.p_holm - p_holm) < 1e-12


def test_a_comparison_without_pairs_is_undecided():
    family = Family(size=1)
    family.add('b/vo', None, diverged=(3, 0))
    assert family.judge()['b/vo'].decision is Decision.UNDECIDED
