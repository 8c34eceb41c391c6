"""Numpy and scipy recompute the committed verdicts from the trials, and find the same numbers.

`experiments.verify` also compares printed numbers with the logs, but with the package's own code.
An error in that code would show here. A further test solves for the shapes of models again.
"""

import shutil

import numpy as np
import pytest
from scipy import stats

from qkattn.config import Study
from qkattn.stats.decision import Decision
from qkattn.study import stored
from qkattn.study.arms import build_arms
from qkattn.verdict import load_findings, load_study
from tests.lanes import slow_except
from tests.studies import RESULTS, beat_yardsticks, read_lines

pytestmark = pytest.mark.stored

FAIR = RESULTS / 'fair_small'
QUICK = ['quickstart', 'translation_small']  # a study of language models, and one of translation
CPU = [f'claims/cpu/lm_{name}' for name in ('added', 'dropped', 'rank', 'sharing')]
SHAPE = ('d_model', 'd_ff', 'num_heads', 'head_size')
TRIALS = read_lines(stored.open_files(FAIR) / stored.RESULTS)


def losses_of(control: str | None, num_seeds: int = 12) -> dict[str, np.ndarray]:
    """Returns test losses of verdict runs in the committed study fair_small, by variant.

    Verdict runs are trained after tuning, with fresh seeds. Each array has a loss for each seed.

    Args:
        control: None for the arms, which have the baseline's number of parameters. 'equal_shape'
            for variants with the widths of the baseline. 'longer' for arms with longer training.
        num_seeds: The seeds are 0, 1, ..., num_seeds - 1.
    """
    losses: dict[str, dict[int, float]] = {}  # by variant and seed
    for result in TRIALS:
        if result['stage'] == 'verdict' and result['control'] == control:
            assert result['status'] == 'finished'
            seed = result['trial']['seed']
            loss_by_seed = losses.setdefault(result['variant'], {})
            loss_by_seed[seed] = result['test_loss']

    sorted_losses = {}
    for variant, loss_by_seed in losses.items():
        seeds = sorted(loss_by_seed)
        assert seeds == list(range(num_seeds))
        sorted_losses[variant] = np.array([loss_by_seed[seed] for seed in seeds])
    return sorted_losses


def arms_of_fair_study(tmp_path):
    """The arms of fair_small by variant, without its baseline.

    A study gets no verdicts unless it beats its yardsticks, so they are replaced by easy ones.
    """
    study = shutil.copytree(FAIR, tmp_path / 'fair_small')
    beat_yardsticks(study)
    return {arm.key.variant: arm for arm in load_findings(study).arms if not arm.is_baseline}


NUM_ARMS = 8
MARGIN = 0.005
LEVEL = 0.05
BEYOND_MARGIN = ('better', 'worse')


def check_decision(decision: str, differences: np.ndarray, num_arms_beyond_margin: int) -> None:
    """Checks the decision on one of 8 arms of a study by a t test.

    Args:
        decision: 'better' or 'worse' if the difference exceeds the margin of 0.005.
            'better (margin open)' or 'worse (margin open)' if the difference is only shown not to
            be 0. 'undecided' if nothing is shown, so nothing is checked.
        differences: The loss of the arm minus the loss of the baseline, for each seed.
        num_arms_beyond_margin: The number of arms with the decision 'better' or 'worse'.
    """
    if decision == Decision.UNDECIDED.value:
        return
    side = decision.removesuffix(' (margin open)')
    assert side in ('better', 'worse')

    # Lower losses are better. The distance is positive if the mean is on the decided side of 0.
    sign = -1 if side == 'better' else 1
    distance = sign * differences.mean()
    if decision in BEYOND_MARGIN:
        num_tested = NUM_ARMS
        assert distance > MARGIN
    else:
        # The arms beyond the margin leave the family of tests.
        num_tested = NUM_ARMS - num_arms_beyond_margin
        assert distance > 0

    # Bonferroni correction: p is multiplied by the number of tests.
    t_test = stats.ttest_1samp(differences, 0)
    corrected_p_value = t_test.pvalue * num_tested
    assert corrected_p_value <= LEVEL


def test_committed_verdicts_follow_from_the_losses(tmp_path):
    """Numpy and scipy confirm the differences, intervals and decisions of the study fair_small.

    Each arm is an attention variant. Seed by seed, it is compared with the baseline `qk/vo`,
    unchanged attention.
    """
    arms = arms_of_fair_study(tmp_path)
    losses = losses_of(control=None)  # arrays over seeds, by variant
    baseline = losses.pop('qk/vo')
    assert arms.keys() == losses.keys()
    assert len(arms) == NUM_ARMS

    decisions = [arm.verdict.decision.value for arm in arms.values()]
    num_arms_beyond_margin = sum(decision in BEYOND_MARGIN for decision in decisions)
    for name, arm in arms.items():
        differences = losses[name] - baseline
        differences_of_package = list(arm.comparison.differences.values())
        assert differences_of_package == pytest.approx(differences, rel=1e-12), name
        assert arm.difference.mean == pytest.approx(differences.mean(), rel=1e-12)

        # A t test has only the spread of seeds. The package adds errors of documents and of tuning,
        # which widen the interval. But documents also add degrees of freedom, which lower the t
        # quantile. So the interval may be narrower by up to 1e-3.
        interval = stats.ttest_1samp(differences, 0).confidence_interval()
        assert arm.difference.low < interval.low + 1e-3, name
        assert arm.difference.high > interval.high - 1e-3, name

        check_decision(arm.verdict.decision.value, differences, num_arms_beyond_margin)


def test_committed_parts_of_a_difference_follow_from_the_losses(tmp_path):
    """An arm's difference from the baseline is (control - baseline) plus (arm - control).

    An arm is a variant that is widened until it has as many parameters as the baseline. Its control
    is the same variant with the widths of the baseline.
    """
    # Each dictionary has an array of losses over seeds for each variant.
    losses = losses_of(control=None)
    controls = losses_of(control='equal_shape')
    longer = losses_of(control='longer', num_seeds=6)
    baseline = losses.pop('qk/vo')
    longer_baseline = longer.pop('qk/vo')
    arms = arms_of_fair_study(tmp_path)

    # Each arm has a control, and the baseline needs none.
    assert arms.keys() == controls.keys()
    for name, arm in arms.items():
        same_shape = (controls[name] - baseline).mean()
        reinvesting = (losses[name] - controls[name]).mean()
        assert arm.parts.same_shape.difference.mean == pytest.approx(same_shape)
        assert arm.parts.reinvesting.difference.mean == pytest.approx(reinvesting)

    # Arms with a decision were also trained longer, and so was the baseline.
    arms_trained_longer = {name: arm for name, arm in arms.items() if arm.parts.longer is not None}
    assert arms_trained_longer.keys() == longer.keys()
    for name, arm in arms_trained_longer.items():
        after_longer_training = (longer[name] - longer_baseline).mean()
        assert arm.parts.longer.difference.mean == pytest.approx(after_longer_training)


@pytest.mark.parametrize('name', slow_except(QUICK, [*QUICK, *CPU]))
def test_arms_are_matched_to_the_shapes_that_were_trained(name):
    """Arms of a committed study get the same widths again as in training.

    An arm is a variant that is widened or narrowed to the baseline's number of parameters. With
    other widths, its runs would have other hashes, and a resumed study would not find them.
    """
    study = load_study(RESULTS / name)
    settings = Study(
        variants=study.variants,
        sizes=study.sizes,
        tolerance=study.tolerance,
        base=study.base,
    )
    arms = build_arms(settings)

    # Controls are left out. They have the widths of the baseline, or repeat the widths of an arm.
    trained_models = {}
    for run in study.runs:
        if not run.key.control:
            trained_models[run.key.variant, run.key.size] = run.config['model']

    for arm in arms:
        trained_model = trained_models[arm.key.variant, arm.key.size]
        for field in SHAPE:
            assert getattr(arm.model, field) == trained_model[field]
