"""The committed verdicts, worked out again from the trials with nothing of the package.

`experiments.verify` holds what is printed against the logs with the package's own code; here the
numbers of the headline are made with numpy and scipy alone, so that an error in that code shows.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from qkattn.report import verify

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / 'experiments/results'
STUDIES = sorted(path.parent.name for path in RESULTS.glob('*/study.json'))
FAIR = RESULTS / 'fair_small'


TRIALS = [json.loads(line) for line in (FAIR / 'results.jsonl').read_text().splitlines()]


@pytest.mark.parametrize('name', STUDIES)
def test_committed_reports_are_what_their_logs_give(name):
    assert verify.check_study(RESULTS / name) > 50


def test_the_headline_of_the_readme_is_what_its_study_gives():
    assert verify.check_page(ROOT / 'README.md') == 1


@pytest.fixture(scope='module')
def headline() -> dict[str, list[str]]:
    """The README's table, by arm."""
    text = (ROOT / 'README.md').read_text()
    (block,) = re.findall(r'<!-- headline: \S+ -->\n(.*?)<!-- end -->', text, re.DOTALL)
    rows = [line.strip('| ').split(' | ') for line in block.splitlines() if line.startswith('|')]
    return {runs[0]: runs[1:] for runs in rows[2:]}


def holm(p: dict[str, float]) -> dict[str, float]:
    """By the definition: reject in order while p <= alpha / (number left)."""
    adjusted, largest = {}, 0.0
    for place, arm in enumerate(sorted(p, key=p.__getitem__)):
        largest = max(largest, (len(p) - place) * p[arm])
        adjusted[arm] = min(largest, 1.0)
    return adjusted


def test_differences_intervals_and_words(headline):
    losses: dict[str, dict[int, float]] = {}
    for result in TRIALS:
        if result['stage'] == 'verdict':
            assert result['status'] == 'finished'
            losses.setdefault(result['variant'], {})[result['trial']['seed']] = result['val_loss']
    seeds = sorted(losses['qk/vo'])
    assert len(seeds) == 16 and all(sorted(of) == seeds for of in losses.values())
    baseline = np.array([losses['qk/vo'][seed] for seed in seeds])
    said = f'{baseline.mean():.4f} ± {baseline.std(ddof=1):.4f}'
    assert headline['qk/vo'][0] == f'baseline, val loss {said}'

    difference = {
        arm: np.array([of[seed] for seed in seeds]) - baseline
        for arm, of in losses.items()
        if arm != 'qk/vo'
    }
    assert len(difference) == 7
    p_differ, p_same = {}, {}
    for arm, d in difference.items():
        test = stats.ttest_1samp(d, 0)
        low, high = test.confidence_interval()
        assert headline[arm][0] == f'{d.mean():+.4f} [{low:+.4f}, {high:+.4f}]', arm
        p_differ[arm] = test.pvalue
        p_same[arm] = max(
            stats.ttest_1samp(d, 0.005, alternative='less').pvalue,
            stats.ttest_1samp(d, -0.005, alternative='greater').pvalue,
        )
    p_differ, p_same = holm(p_differ), holm(p_same)
    for arm, d in difference.items():
        word = 'undecided'
        if p_same[arm] <= 0.05:
            word = 'equivalent'
        elif p_differ[arm] <= 0.05:
            word = 'better' if d.mean() < 0 else 'worse'
        assert headline[arm][1] == word, (arm, p_differ[arm], p_same[arm])


def test_rates_are_the_vertices_of_their_fitted_sweeps(headline):
    sweeps: dict[str, dict[float, dict[int, float]]] = {}
    for result in TRIALS:
        if result['stage'] == 'screening':
            rate, seed = result['trial']['learning_rate'], result['trial']['seed']
            sweeps.setdefault(result['variant'], {}).setdefault(rate, {})[seed] = result['val_loss']
    assert sweeps.keys() == headline.keys()
    for arm, of in sweeps.items():
        rates = sorted(of)
        means = np.array([np.mean(list(of[rate].values())) for rate in rates])
        best = int(means.argmin())
        assert 0 < best < len(rates) - 1, arm  # bracketed
        near = slice(max(best - 2, 0), best + 3)
        # With the same seeds at every rate, the mean's parabola has the vertex of the seeds' own.
        c, b, _ = np.polyfit(np.log(rates[near]), means[near], 2)
        assert float(headline[arm][2].split()[0]) == pytest.approx(
            np.exp(-b / (2 * c)), rel=5e-3
        ), arm


def test_verdict_trials_ran_at_the_rates_and_weights_that_are_printed(headline):
    parameters = {}
    for result in TRIALS:
        parameters[result['variant']] = result['parameters']['total']
        if result['stage'] == 'verdict':
            assert (
                f'{result["trial"]["learning_rate"]:g}' == headline[result['variant']][2].split()[0]
            )
    target = parameters['qk/vo']
    assert all(abs(total / target - 1) <= 1e-3 for total in parameters.values())
