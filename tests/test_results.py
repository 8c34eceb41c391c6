"""The committed verdicts, worked out again from the trials with nothing of the package.

`experiments.verify` holds what is printed against the logs with the package's own code, and
launch/test.sh runs it before the tests. Here the numbers of the headline are made with numpy and
scipy alone, so that an error in that code shows. And the shapes of models, solved again.
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
    """For each variant the test losses of its verdict trials, in the order of seeds."""
    losses: dict[str, dict[int, float]] = {}
    for result in TRIALS:
        if result['stage'] == 'verdict' and result['control'] == control:
            assert result['status'] == 'finished'
            loss_by_seed = losses.setdefault(result['variant'], {})
            loss_by_seed[result['trial']['seed']] = result['test_loss']

    sorted_losses = {}
    for variant, loss_by_seed in losses.items():
        seeds = sorted(loss_by_seed)
        assert seeds == list(range(num_seeds))
        sorted_losses[variant] = np.array([loss_by_seed[seed] for seed in seeds])
    return sorted_losses


def arms_of_fair_study(tmp_path):
    """The arms of fair_small by variant, without its baseline.

    Yardsticks are replaced by ones that the study beats, so that they withhold no verdict.
    """
    study = shutil.copytree(FAIR, tmp_path / 'fair_small')
    beat_yardsticks(study)
    return {arm.key.variant: arm for arm in load_findings(study).arms if not arm.is_baseline}


NUM_ARMS = 8
MARGIN = 0.005
LEVEL = 0.05
BEYOND_MARGIN = ('better', 'worse')


def check_decision(decision: str, differences: np.ndarray, num_arms_beyond_margin: int) -> None:
    """Checks a decision by a t test, corrected for the number of arms that are tested."""
    if decision == Decision.UNDECIDED.value:
        return
    side = decision.removesuffix(' (margin open)')
    assert side in ('better', 'worse')
    sign = -1 if side == 'better' else 1
    distance = sign * differences.mean()
    if decision in BEYOND_MARGIN:
        num_tested = NUM_ARMS
        assert distance > MARGIN
    else:
        # Arms that were found beyond the margin are not tested again.
        num_tested = NUM_ARMS - num_arms_beyond_margin
        assert distance > 0
    t_test = stats.ttest_1samp(differences, 0)
    assert t_test.pvalue * num_tested <= LEVEL


def test_committed_verdicts_follow_from_the_losses(tmp_path):
    """Checks the differences, intervals and decisions of all arms of fair_small."""
    arms = arms_of_fair_study(tmp_path)
    losses = losses_of(control=None)
    baseline = losses.pop('qk/vo')
    assert arms.keys() == losses.keys()
    assert len(arms) == NUM_ARMS

    decisions = [arm.verdict.decision.value for arm in arms.values()]
    num_arms_beyond_margin = sum(decision in BEYOND_MARGIN for decision in decisions)
    for name, arm in arms.items():
        differences = losses[name] - baseline
        stored_differences = list(arm.comparison.differences.values())
        assert stored_differences == pytest.approx(differences, rel=1e-12), name
        assert arm.difference.mean == pytest.approx(differences.mean(), rel=1e-12)

        # The errors of the evaluated documents and of tuning can only widen the seeds' interval.
        interval = stats.ttest_1samp(differences, 0).confidence_interval()
        assert arm.difference.low < interval.low + 1e-3, name
        assert arm.difference.high > interval.high - 1e-3, name

        check_decision(arm.verdict.decision.value, differences, num_arms_beyond_margin)


def test_committed_parts_of_a_difference_follow_from_the_losses(tmp_path):
    """An arm's difference from the baseline is (control - baseline) plus (arm - control).

    The control of an arm has the same shape as the baseline. The arm has reinvested the parameters
    that the control saves.
    """
    # Losses are arrays over seeds, by variant.
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

    # Arms that were decided also have a difference after longer training.
    arms_trained_longer = {name: arm for name, arm in arms.items() if arm.parts.longer is not None}
    assert arms_trained_longer.keys() == longer.keys()
    for name, arm in arms_trained_longer.items():
        after_longer_training = (longer[name] - longer_baseline).mean()
        assert arm.parts.longer.difference.mean == pytest.approx(after_longer_training)


@pytest.mark.parametrize('name', slow_except(QUICK, [*QUICK, *CPU]))
def test_arms_are_matched_to_the_shapes_that_were_trained(name):
    """A change of the matching would change the hashes by which committed studies resume."""
    study = load_study(RESULTS / name)
    arms = build_arms(
        Study(
            variants=study.variants,
            sizes=study.sizes,
            tolerance=study.tolerance,
            base=study.base,
        )
    )

    trained_models = {}
    for run in study.runs:
        if not run.key.control:
            trained_models[run.key.variant, run.key.size] = run.config['model']
    for arm in arms:
        trained_model = trained_models[arm.key.variant, arm.key.size]
        for field in SHAPE:
            assert getattr(arm.model, field) == trained_model[field]
