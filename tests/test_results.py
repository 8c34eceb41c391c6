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
    """Returns the test losses of each variant in the committed study fair_small, by seed.

    The losses are those of the verdict runs, which are trained with fresh seeds after tuning.

    Args:
        control: None for the arms, at the baseline's parameter count. 'equal_shape' for variants
            with the widths of the baseline. 'longer' for arms that are trained for more steps.
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
    """Checks the decision on one of 8 arms of a study by a t test.

    Args:
        decision: 'better' and 'worse' say that the difference exceeds the margin of 0.005. With
            ' (margin open)' behind them, they say only that it is not 0. 'undecided' says nothing.
        differences: The loss of the arm minus that of the baseline, for each seed.
        num_arms_beyond_margin: The number of arms with a decision of the first kind.
    """
    if decision == Decision.UNDECIDED.value:
        return
    side = decision.removesuffix(' (margin open)')
    assert side in ('better', 'worse')

    # Lower losses are better. The distance is positive on the side of the decision.
    sign = -1 if side == 'better' else 1
    distance = sign * differences.mean()
    if decision in BEYOND_MARGIN:
        num_tested = NUM_ARMS
        assert distance > MARGIN
    else:
        # Arms that were found beyond the margin are not tested again.
        num_tested = NUM_ARMS - num_arms_beyond_margin
        assert distance > 0

    # The p value of a test is multiplied by the number of tests, as Bonferroni does.
    t_test = stats.ttest_1samp(differences, 0)
    corrected_p_value = t_test.pvalue * num_tested
    assert corrected_p_value <= LEVEL


def test_committed_verdicts_follow_from_the_losses(tmp_path):
    """Numpy and scipy alone find the differences, intervals and decisions of a committed study.

    Each arm of the study fair_small is an attention variant. It is compared with the baseline,
    unchanged attention `qk/vo`, seed by seed.
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

        # The interval of a t test has the spread of seeds alone. The package adds the errors of
        # evaluated documents and of tuning. These can only widen the interval.
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
    """Arms of a committed study get the same widths again as they were trained with.

    An arm is a variant, widened or narrowed to the parameter count of the baseline.
    Another shape would change the hashes by which the study finds its runs when it resumes.
    """
    study = load_study(RESULTS / name)
    settings = Study(
        variants=study.variants,
        sizes=study.sizes,
        tolerance=study.tolerance,
        base=study.base,
    )
    arms = build_arms(settings)

    # Controls have another shape, or that of an arm.
    trained_models = {}
    for run in study.runs:
        if not run.key.control:
            trained_models[run.key.variant, run.key.size] = run.config['model']

    for arm in arms:
        trained_model = trained_models[arm.key.variant, arm.key.size]
        for field in SHAPE:
            assert getattr(arm.model, field) == trained_model[field]
