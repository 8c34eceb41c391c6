"""What claims read from the logs of committed studies, and from the recording of the drift."""

import dataclasses
import json
import re
import shutil

import pytest

from qkattn.claims import measures
from qkattn.claims.claim import Measure, Speaks
from qkattn.claims.studies import Results, load
from qkattn.errors import RunDirectoryError
from tests.claims.conftest import CLAIMS

pytestmark = pytest.mark.stored
DRIFT = Measure('drift', measures.read_drift)


def test_differences_that_change_after_an_early_reading_are_counted(committed, tmp_path):
    (row,) = measures.early(committed / 'fair_small')
    assert row.value >= 1 and row.speaks == Speaks.FOR
    assert row.context == {'arms': '8', 'fraction of the steps': '0.5'}
    study = shutil.copytree(committed / 'fair_small', tmp_path / 'early')
    (path,) = study.glob('runs/qk-k_is_v-d_model=48-verdict-*/metrics.jsonl')
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line['kind'] == 'eval' and line['step'] == 250:
            line['val_loss'] = [loss - 1 for loss in line['val_loss']]
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    assert [changed.value for changed in measures.early(study)] == [row.value + 1]


def test_growth_is_the_last_difference_minus_the_first(committed):
    (row,) = measures.growth(committed / 'fair_small', 'shared_qk/vo')
    findings = load(committed / 'fair_small').findings
    arms = {(arm.variant, arm.control): arm for arm in findings.controls}
    both = arms['shared_qk/vo', 'equal_shape'], findings.arms[0]
    arm, baseline = (each.over_seeds('val_loss').mean for each in both)
    assert 0.01 < arm - baseline - row.value < 0.5 and row.low < row.value < row.high
    assert row.context['steps'] == '500'


def test_an_untuned_difference_decides_at_the_lowest_rate(committed, tmp_path, monkeypatch):
    (row,) = measures.at_one_rate(committed / 'quickstart', 'merged/vo')
    assert (row.context['learning rate'], row.context['baseline']) == ('0.004', 'untuned')
    arm = load(committed / 'quickstart').findings.arms[1]
    expected = arm.difference.mean, arm.difference.low, arm.difference.high
    assert (row.value, row.low, row.high) == pytest.approx(expected)
    # Seed 2 of both arms at twice the rate: differences of two seeds and of one.
    study = shutil.copytree(committed / 'quickstart', tmp_path / 'two_rates')
    path = study / 'results.jsonl'
    text = re.sub(r'("learning_rate": )0.004(?=[^{}]*"seed": 2)', r'\g<1>0.008', path.read_text())
    path.write_text(re.sub(r'("seed": 2[^{}]*"learning_rate": )0.004', r'\g<1>0.008', text))
    rows = measures.at_one_rate(study, 'merged/vo')
    assert [row.context['learning rate'] for row in rows] == ['0.004', '0.008']
    assert rows[0].speaks != Speaks.BESIDE and rows[1].speaks == Speaks.BESIDE
    assert rows[0].low is not None and rows[1].low is None
    # It speaks by the ends of its interval.
    for low, high, speaks in ((-2, -1, Speaks.FOR), (1, 2, Speaks.AGAINST), (-1, 1, Speaks.OPEN)):
        difference = dataclasses.replace(arm.difference, low=low, high=high)
        comparison = dataclasses.replace(arm.comparison, difference=difference)
        monkeypatch.setattr(measures, 'compare', lambda *_, made=comparison: made)
        assert measures.at_one_rate(committed / 'quickstart', 'merged/vo')[0].speaks == speaks


def test_the_drift_is_read_unless_it_was_edited(tmp_path):
    assert Results(tmp_path).rows(DRIFT) == []
    shutil.copytree(CLAIMS / 'drift', tmp_path / 'drift')
    spoken = [row.speaks for row in Results(tmp_path).rows(DRIFT)]
    assert spoken == 3 * [*[Speaks.BESIDE] * 5, Speaks.AGAINST]
    path = tmp_path / 'drift/measures/drift.json'
    text = path.read_text()
    for last, speaks in ((2e-3, Speaks.FOR), (4e-3, Speaks.AGAINST)):
        values = {'products': [1e-7, 1e-7], 'rounding': [0.0, 1e-3], 'apart': [1e-7, last]}
        path.write_text(json.dumps({'steps': [0, 500], 'dtypes': {'float32': values}}))
        assert Results(tmp_path).rows(DRIFT)[-1].speaks == speaks
    path.write_text(text.replace('0.', '0.5', 1))
    with pytest.raises(RunDirectoryError, match='is damaged .*checksum.*; restore it'):
        Results(tmp_path).rows(DRIFT)
