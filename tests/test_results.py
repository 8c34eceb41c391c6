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
KINDS = ['quickstart', 'translation_small']  # of a language model, and of translation
CPU = [f'claims/cpu/lm_{name}' for name in ('added', 'dropped', 'rank', 'sharing')]
SHAPE = ('d_model', 'd_ff', 'num_heads', 'head_size')
TRIALS = read_lines(stored.open_files(FAIR) / stored.RESULTS)


def losses_of(control: str | None, num_seeds: int = 12) -> dict[str, np.ndarray]:
    """Test losses of the verdict trials by arm, in the order of seeds."""
    losses: dict[str, dict[int, float]] = {}
    for result in TRIALS:
        if result['stage'] == 'verdict' and result['control'] == control:
            assert result['status'] == 'finished'
            losses.setdefault(result['variant'], {})[result['trial']['seed']] = result['test_loss']
    assert all(sorted(by_seed) == list(range(num_seeds)) for by_seed in losses.values())
    return {arm: np.array([by_seed[n] for n in sorted(by_seed)]) for arm, by_seed in losses.items()}


def arms_of_fair_study(tmp_path):
    """The arms of fair_small but its baseline, by variant, none of them short of a yardstick."""
    study = shutil.copytree(FAIR, tmp_path / 'fair_small')
    beat_yardsticks(study)
    return {arm.key.variant: arm for arm in load_findings(study).arms if not arm.is_baseline}


def test_committed_verdicts_follow_from_the_losses(tmp_path):
    """Differences, intervals and decisions of the eight arms, as if no yardstick withheld any."""
    arms = arms_of_fair_study(tmp_path)
    losses = losses_of(None)
    baseline = losses.pop('qk/vo')
    assert arms.keys() == losses.keys()
    assert len(losses) == 8

    signs = {'better': -1, 'worse': 1}
    num_beyond_margin = sum(arm.verdict.decision.value in signs for arm in arms.values())
    for name, arm in arms.items():
        differences = losses[name] - baseline
        mean = differences.mean()
        assert [*arm.comparison.differences.values()] == pytest.approx(differences, rel=1e-12), name
        assert arm.difference.mean == pytest.approx(mean, rel=1e-12)

        # The errors of the evaluated documents and of tuning can only widen the seeds' interval.
        t_test = stats.ttest_1samp(differences, 0)
        interval = t_test.confidence_interval()
        assert arm.difference.low < interval.low + 1e-3, name
        assert arm.difference.high > interval.high - 1e-3, name

        # A side is shown by a t test, corrected by the number of arms in the family: all, or those
        # that are left after the arms beyond the margin.
        decision = arm.verdict.decision.value
        side = decision.removesuffix(' (below margin)')
        is_beyond_margin = side == decision
        if side not in signs:
            assert decision == Decision.UNDECIDED.value, name
            continue
        assert mean * signs[side] > (0.005 if is_beyond_margin else 0), name
        num_in_family = len(losses) - (0 if is_beyond_margin else num_beyond_margin)
        assert t_test.pvalue * num_in_family <= 0.05, name


def test_committed_parts_of_a_difference_follow_from_the_losses(tmp_path):
    """A difference is that at the same shape plus that of reinvesting the parameters saved.

    Arms that were decided have a third part, their difference after longer training.
    """
    losses = losses_of(None)
    controls = losses_of('equal_shape')
    longer = losses_of('longer', 6)
    baseline = losses.pop('qk/vo')
    baseline_longer = longer.pop('qk/vo')
    arms = arms_of_fair_study(tmp_path)
    assert arms.keys() == controls.keys() - {'qk/vo'}
    for name, arm in arms.items():
        same_shape = (controls[name] - baseline).mean()
        assert arm.parts.same_shape.difference.mean == pytest.approx(same_shape)
        reinvesting = (losses[name] - controls[name]).mean()
        assert arm.parts.reinvesting.difference.mean == pytest.approx(reinvesting)
        if arm.parts.longer is not None:
            difference_of_longer = (longer.pop(name) - baseline_longer).mean()
            assert arm.parts.longer.difference.mean == pytest.approx(difference_of_longer)
    assert not longer  # every arm that was trained longer has this part


@pytest.mark.parametrize('name', slow_except(KINDS, [*KINDS, *CPU]))
def test_arms_are_matched_to_the_shapes_that_were_trained(name):
    """A change of the matching would change the hashes by which committed studies resume."""
    study = load_study(RESULTS / name)
    fields = {field: getattr(study, field) for field in ('variants', 'sizes', 'tolerance')}
    arms = build_arms(Study(**fields, base=study.base))
    trained = {run.key[:2]: run.config['model'] for run in study.runs if not run.key.control}
    for arm in arms:
        assert vars(arm.model).items() >= {n: trained[arm.key[:2]][n] for n in SHAPE}.items()
