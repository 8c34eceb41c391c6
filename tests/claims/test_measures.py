"""Measures on a committed study."""

import json
import os
import shutil

import pytest

from qkattn.claims.measures.curves import flips, growth
from qkattn.claims.measures.untuned import at_one_rate
from qkattn.claims.results import load
from qkattn.report.claim_results import Speaks
from tests.claims.conftest import PLAIN


def test_words_that_flip_are_counted_by_fraction(committed, tmp_path):
    (row,) = flips(committed / 'fair_small')
    assert row.x == 0.5 and row.context == {}
    assert (row.value, row.speaks) == (0, Speaks.AGAINST) and 'words of 8 arms' in row.what
    study = tmp_path / 'early'
    shutil.copytree(committed / 'fair_small', study)
    for run in load(study).study.runs:
        if run.place.variant == 'qk/no_o' and run.stage == 'verdict':
            path = study / run.directory / 'metrics.jsonl'
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            for line in lines:
                if line['kind'] == 'eval' and line['step'] == 250 and run.place.control is None:
                    line['val_loss'] = [loss + 1 for loss in line['val_loss']]
            path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    results = study / 'results.jsonl'
    os.utime(results, ns=(results.stat().st_mtime_ns + 1,) * 2)
    (row,) = flips(study)
    assert row.value >= 1 and row.speaks == Speaks.FOR


def test_growth_is_the_last_difference_minus_the_first(committed):
    (row,) = growth(committed / 'fair_small', PLAIN)
    found = load(committed / 'fair_small').found
    (arm,) = (a for a in found.controls if (a.variant, a.control) == (PLAIN, 'equal_shape'))
    baseline = found.arms[0]
    last = arm.val_loss.mean - baseline.val_loss.mean
    first = last - row.value
    assert row.context == {
        'model': 'decoder',
        'size': 'd_model=48',
        'corpus': 'stdlib',
        'steps': '500',
    }
    assert 0.01 < first < 0.5 and row.low < row.value < row.high


def test_untuned_differences_are_at_rates_of_both(committed):
    rows = at_one_rate(committed / 'fair_small', 'qk/k_is_v')
    assert [row.x for row in rows][:4] == [0.004, 0.008, 0.016, 0.032]
    assert [row.speaks for row in rows[1:]] == [Speaks.BESIDE] * (len(rows) - 1)
    assert rows[0].context['baseline'] == 'untuned' and rows[0].speaks != Speaks.BESIDE
    losses = {}
    for arm in load(committed / 'fair_small').found.arms:
        for trial in arm.screening_trials:
            if arm.variant in ('qk/vo', 'qk/k_is_v') and trial.learning_rate == 0.004:
                losses.setdefault(arm.variant, []).append(trial.val_loss)
    means = [sum(losses[v]) / len(losses[v]) for v in ('qk/k_is_v', 'qk/vo')]
    assert rows[0].value == pytest.approx(means[0] - means[1])
