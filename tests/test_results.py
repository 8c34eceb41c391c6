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
from tests.lanes import only
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


def test_verdicts_follow_from_the_losses(tmp_path):
    """Verdicts are those that a yardstick does not withhold."""
    beat_yardsticks(study := shutil.copytree(FAIR, tmp_path / 'fair_small'))
    found = load_findings(study)
    losses = losses_of(None)
    controls = losses_of('equal_shape')
    longer = losses_of('longer', 6)
    baseline = losses.pop('qk/vo')
    baseline_longer = longer.pop('qk/vo')
    decided = {arm.key.variant: arm for arm in found.arms if not arm.is_baseline}
    assert decided.keys() == losses.keys() == controls.keys() - {'qk/vo'} and len(losses) == 8
    sides = {'better': -1, 'worse': 1}
    beyond = sum(arm.verdict.decision.value in sides for arm in decided.values())
    for name, arm in decided.items():
        d = losses[name] - baseline
        difference = arm.difference
        decision = arm.verdict.decision.value
        assert [*arm.comparison.differences.values()] == pytest.approx(d, rel=1e-12), name
        # The errors of the evaluated documents and of tuning can only widen the seeds' interval.
        of_seeds = stats.ttest_1samp(d, 0)
        interval = of_seeds.confidence_interval()
        assert difference.mean == pytest.approx(d.mean(), rel=1e-12)
        assert difference.low < interval.low + 1e-3 and difference.high > interval.high - 1e-3, name
        side = decision.removesuffix(' (below margin)')
        assert side in sides or decision == Decision.UNDECIDED.value, name
        if side in sides:
            assert d.mean() * sides[side] > (0.005 if side == decision else 0), name
            # Arms beyond the margin leave the family that the others are corrected for.
            family = len(losses) - (0 if side == decision else beyond)
            assert of_seeds.pvalue * family <= 0.05, name
    for name, arm in decided.items():
        parts = arm.parts
        assert parts.same_shape.difference.mean == pytest.approx((controls[name] - baseline).mean())
        expected = (losses[name] - controls[name]).mean()
        assert parts.reinvesting.difference.mean == pytest.approx(expected)
        if parts.longer is not None:
            expected = (longer.pop(name) - baseline_longer).mean()
            assert parts.longer.difference.mean == pytest.approx(expected)
    assert not longer


@pytest.mark.parametrize('name', only(KINDS, [*KINDS, *CPU]))
def test_arms_have_the_shapes_that_were_trained(name):
    """The hash of a run, by which a study resumes, is that of its shape."""
    study = load_study(RESULTS / name)
    fields = {field: getattr(study, field) for field in ('variants', 'sizes', 'tolerance')}
    arms = build_arms(Study(**fields, base=study.base))
    trained = {run.key[:2]: run.config['model'] for run in study.runs if not run.key.control}
    for arm in arms:
        assert vars(arm.model).items() >= {n: trained[arm.key[:2]][n] for n in SHAPE}.items()
