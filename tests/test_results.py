"""The committed verdicts, worked out again from the trials with nothing of the package.

`experiments.verify` holds what is printed against the logs with the package's own code, and
launch/test.sh runs it before the tests. Here the numbers of the headline are made with numpy and
scipy alone, so that an error in that code shows. And no committed number depends on the processor:
all are made again from losses whose last bits are changed, as another processor may change them.
"""

import dataclasses
import functools
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from qkattn.claims import declared, export
from qkattn.claims.deciding import decide
from qkattn.claims.pages import BLOCKS
from qkattn.claims.studies import Results
from qkattn.report import verify
from qkattn.stats.decision import Decision
from qkattn.study import stored
from qkattn.verdict import findings, load_findings
from tests.lanes import only
from tests.studies import beat_yardsticks, read_lines

pytestmark = pytest.mark.stored

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / 'experiments/results'
FAIR, CLAIMS = RESULTS / 'fair_small', RESULTS / 'claims/cpu'
FIND = findings.find
QUICK = CLAIMS / 'single_head'
TRIALS = read_lines(stored.opened(FAIR) / 'results.jsonl')


def changed(study, random=np.random.default_rng(0)):  # noqa: B008, one sequence for all
    """The study with losses that are off by a few units in the last place."""

    def off(value):
        return value * (1 + 1e-15 * random.uniform(-1, 1)) if isinstance(value, float) else value

    def documents_off(losses):
        return dataclasses.replace(losses, nats_C=np.array([*map(off, losses.nats_C.tolist())]))

    def trial_off(trial):
        documents = {split: documents_off(losses) for split, losses in trial.documents.items()}
        metrics = {name: off(value) for name, value in trial.metrics.items()}
        return dataclasses.replace(trial, documents=documents, metrics=metrics)

    runs = (dataclasses.replace(run, trials=(*map(trial_off, run.trials),)) for run in study.runs)
    return dataclasses.replace(study, runs=(*runs,))


@pytest.fixture
def disturbed(monkeypatch):
    """Findings are those of a study that is `changed`, beside its trials as they were logged."""
    load = functools.lru_cache(maxsize=32)(findings._load.__wrapped__)
    monkeypatch.setattr(findings, '_load', load)
    monkeypatch.setattr(findings, 'find', lambda study: FIND(changed(study)))


def test_the_disturbance_reaches_every_interval(request):
    def bounds():
        differences = (arm.difference for arm in load_findings(QUICK)[1].arms)
        return [bound for d in differences if d for bound in (d.low, d.high)]

    before, _ = bounds(), request.getfixturevalue('disturbed')
    after = bounds()
    assert before and not {*before} & {*after} and after == pytest.approx(before, rel=1e-6)


@pytest.mark.usefixtures('disturbed')
@pytest.mark.parametrize(
    'directory',
    only([QUICK], sorted(path.parent for path in RESULTS.glob('**/study.json'))),
    ids=lambda path: path.name,
)
def test_reports_agree_where_the_last_bits_differ(directory):
    assert verify.check_study(directory) > 50


@pytest.mark.slow
def test_claims_and_pages_agree_where_the_last_bits_differ(disturbed, monkeypatch):
    """Claims without exact checks, which are XLA's; they read the trials of the study, too."""
    load = findings.load_study
    monkeypatch.setattr(findings, 'find', FIND)
    monkeypatch.setattr(findings, 'load_study', lambda directory: changed(load(directory)))
    known, results = declared.claims(), Results(CLAIMS)
    stored_claims = [claim for claim in export.read_claims(CLAIMS) if not known[claim.name].checks]
    assert len(stored_claims) > 10
    for claim in stored_claims:
        assert export.mismatch(claim, decide(known[claim.name], claim.scale, results)) is None
    for page in ('README.md', *(f'docs/{p}.md' for p in ('claims', 'claims_b', 'protocol'))):
        assert verify.check_page(ROOT / page, BLOCKS) > 0


def losses_of(control: str | None, num_seeds: int = 12) -> dict[str, np.ndarray]:
    """Test losses of the verdict trials by arm, in the order of seeds."""
    losses: dict[str, dict[int, float]] = {}
    for result in TRIALS:
        if result['stage'] == 'verdict' and result['control'] == control:
            assert result['status'] == 'finished'
            losses.setdefault(result['variant'], {})[result['trial']['seed']] = result['test_loss']
    assert all(sorted(by_seed) == list(range(num_seeds)) for by_seed in losses.values())
    return {arm: np.array([by_seed[n] for n in sorted(by_seed)]) for arm, by_seed in losses.items()}


def test_differences_and_verdicts(tmp_path):
    """Verdicts are those that a yardstick does not withhold."""
    beat_yardsticks(study := shutil.copytree(FAIR, tmp_path / 'fair_small'))
    found = load_findings(study)[1]
    losses, controls, longer = losses_of(None), losses_of('equal_shape'), losses_of('longer', 6)
    baseline, baseline_longer = losses.pop('qk/vo'), longer.pop('qk/vo')
    decided = {arm.key.variant: arm for arm in found.arms if not arm.is_baseline}
    assert decided.keys() == losses.keys() == controls.keys() - {'qk/vo'} and len(losses) == 8
    sides = {'better': -1, 'worse': 1}
    beyond = sum(arm.verdict.decision.value in sides for arm in decided.values())
    for name, arm in decided.items():
        d, difference = losses[name] - baseline, arm.difference
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
    for parts in found.decomposition:
        name = parts.key.variant
        assert parts.removing.difference.mean == pytest.approx((controls[name] - baseline).mean())
        expected = (losses[name] - controls[name]).mean()
        assert parts.reinvesting.difference.mean == pytest.approx(expected)
        if parts.longer is not None:
            expected = (longer.pop(name) - baseline_longer).mean()
            assert parts.longer.difference.mean == pytest.approx(expected)
    assert len(found.decomposition) == 8 and not longer
