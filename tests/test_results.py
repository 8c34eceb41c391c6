"""The committed verdicts, worked out again from the trials with nothing of the package.

`experiments.verify` holds what is printed against the logs with the package's own code, and
launch/test.sh runs it before the tests. Here the numbers of the headline are made with numpy and
scipy alone, so that an error in that code shows. And no committed number depends on the processor:
all are made again with the last bits disturbed, see tests/disturbed.py.
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from qkattn.claims import catalogue, export
from qkattn.claims.decided import read_claims
from qkattn.claims.deciding import decide
from qkattn.claims.pages import BLOCKS
from qkattn.claims.results import Results
from qkattn.report import tables, verify
from qkattn.study import stored
from qkattn.verdict import load_findings
from tests.disturbed import disturbed
from tests.lanes import only
from tests.studies import beat_yardsticks

pytestmark = pytest.mark.stored

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / 'experiments/results'
STUDIES = sorted(path.parent.name for path in RESULTS.glob('*/study.json'))
FAIR, PAGE = RESULTS / 'fair_small', ROOT / 'docs/protocol.md'
CLAIMS = RESULTS / 'claims/cpu'
SCALING, SINGLE = CLAIMS / 'scaling', CLAIMS / 'single_head'


LINES = (stored.opened(FAIR) / 'results.jsonl').read_text().splitlines()
TRIALS = list(map(json.loads, LINES))


@pytest.mark.slow
@pytest.mark.parametrize('name', STUDIES)
def test_committed_reports_are_what_their_logs_give(name):
    assert verify.check_study(RESULTS / name) > 50


@pytest.mark.slow
def test_the_headline_of_the_protocol_is_what_its_study_gives():
    assert verify.check_page(PAGE) == 1


def test_the_disturbance_reaches_every_derived_number_and_no_other(tmp_path):
    scaling = shutil.copytree(SCALING, tmp_path / 'scaling')
    beat_yardsticks(scaling)

    def numbers():
        found = load_findings(scaling)[1]
        return found.scaling, [arm.difference for arm in found.arms], found.arms[0].example.metrics

    laws, differences, logged = numbers()
    with disturbed():
        others = numbers()
    assert laws and logged == others[2]
    for law, other in zip(laws, others[0], strict=True):
        for one, two in ((law.fit.a, other.fit.a), (law.multiplier, other.multiplier)):
            if one is not None and one.value is not None:
                assert 0 < abs(one.value / two.value - 1) < 1e-6
    for one, other in zip(differences, others[1], strict=True):
        if one is not None:
            assert one.p == pytest.approx(other.p, rel=1e-9)
            assert one.low != other.low and (one.p != other.p or one.p == 1)
    assert differences[1].bootstrap_low != others[1][1].bootstrap_low


@pytest.mark.parametrize(
    'directory',
    only([SCALING, SINGLE], sorted(path.parent for path in RESULTS.glob('**/study.json'))),
    ids=lambda path: path.name,
)
def test_reports_agree_where_the_last_bits_differ(directory):
    with disturbed():
        assert verify.check_study(directory) > 50


@pytest.mark.slow
def test_claims_and_pages_agree_where_the_last_bits_differ():
    """Claims without exact checks, which are XLA's."""
    declared, stored = catalogue.declared(), read_claims(CLAIMS)
    compared = [of for of in stored if not (declared[of.name].checks or declared[of.name].premises)]
    assert len(compared) > 10
    with disturbed():
        for page in ('README.md', *(f'docs/{p}.md' for p in ('claims', 'claims_b', 'protocol'))):
            assert verify.check_page(ROOT / page, BLOCKS) > 0
        results = Results(CLAIMS)
        for claim in compared:
            again = decide(declared[claim.name], claim.scale, results)
            assert export.mismatch(claim, again) is None


@pytest.fixture(scope='module')
def headline(tmp_path_factory) -> dict[str, list[str]]:
    """The table of the protocol's page, by arm, with the words that a yardstick may withhold."""
    study = shutil.copytree(FAIR, tmp_path_factory.mktemp('results') / 'fair_small')
    beat_yardsticks(study)
    block = tables.headline(*load_findings(study))
    rows = [line.strip('| ').split(' | ') for line in block.splitlines() if line.startswith('|')]
    return {runs[0]: runs[1:] for runs in rows[2:]}


def losses_of(control: str | None, num_seeds: int = 12) -> dict[str, np.ndarray]:
    """Test losses of the verdict trials by arm, in the order of seeds."""
    losses: dict[str, dict[int, float]] = {}
    for result in TRIALS:
        if result['stage'] == 'verdict' and result['control'] == control:
            assert result['status'] == 'finished'
            losses.setdefault(result['variant'], {})[result['trial']['seed']] = result['test_loss']
    assert all(sorted(of) == list(range(num_seeds)) for of in losses.values())
    return {arm: np.array([of[seed] for seed in sorted(of)]) for arm, of in losses.items()}


def test_differences_and_words(headline):
    losses, controls = losses_of(None), losses_of('equal_shape')
    baseline = losses.pop('qk/vo')
    said = f'{baseline.mean():.4f} ± {baseline.std(ddof=1):.4f}'
    assert headline['qk/vo'][0] == f'baseline, test loss {said}'
    assert len(losses) == 8 and {'qk/vo', *losses} == headline.keys()
    for arm, of in losses.items():
        d = of - baseline
        mean, low, high = map(float, re.findall(r'[-+]\d\.\d+', headline[arm][0]))
        assert mean == round(d.mean(), 4), arm
        # The errors of the evaluated documents and of tuning can only widen the seeds' interval.
        own = stats.ttest_1samp(d, 0).confidence_interval()
        assert low < own.low + 1e-3 and high > own.high - 1e-3, arm
        word = headline[arm][1]
        side = word.removesuffix(' (below margin)')
        assert side in ('better', 'worse', 'undecided'), arm
        if side != 'undecided':
            assert (side == 'better') == (mean < 0) and (abs(mean) > 0.005 or side != word)
            # Arms beyond the margin leave the family that the others are corrected for.
            beyond = sum(row[1] in ('better', 'worse') for row in headline.values())
            family = len(losses) - (0 if side == word else beyond)
            assert stats.ttest_1samp(d, 0).pvalue * family <= 0.05, arm
        removing, reinvesting = (float(cell.split()[0]) for cell in headline[arm][3:])
        assert removing == pytest.approx((controls[arm] - baseline).mean(), abs=5e-5)
        assert reinvesting == pytest.approx((of - controls[arm]).mean(), abs=5e-5)


def test_what_is_left_after_a_longer_training():
    losses = losses_of('longer', num_seeds=6)
    baseline = losses.pop('qk/vo')
    text = (PAGE).read_text()
    (said,) = re.findall(r'Trained 4 times as long, difference from qk/vo: (.*?\])\. ', text)
    found = dict(re.findall(r'(\S+) ([-+][\d.]+) \[', said))
    assert {arm: f'{(of - baseline).mean():+.4f}' for arm, of in losses.items()} == found


def test_verdict_trials_ran_at_the_vertices_of_their_sweeps_and_at_equal_parameter_counts():
    sweeps: dict[tuple, dict[float, list[float]]] = {}
    ran: dict[tuple, set[float]] = {}
    parameters = {}
    for result in TRIALS:
        arm, rate = (result['variant'], result['control']), result['trial']['learning_rate']
        if result['stage'] == 'screening':
            sweeps.setdefault(arm, {}).setdefault(rate, []).append(result['val_loss'])
        else:
            ran.setdefault(arm, set()).add(rate)
        if result['control'] is None:
            parameters[arm] = result['parameters']['total']
    assert all(abs(total / parameters['qk/vo', None] - 1) <= 1e-3 for total in parameters.values())
    assert ran.keys() == sweeps.keys() and len(ran) == 23
    for arm, of in sweeps.items():
        rates = sorted(of)
        means = [np.mean(of[rate]) for rate in rates]
        best = int(np.argmin(means))
        assert 0 < best < len(rates) - 1, arm
        # The vertex lies between the neighbours of the best rate.
        (rate,) = ran[arm]
        assert rates[best - 1] < rate < rates[best + 1], arm
