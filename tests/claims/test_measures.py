"""What claims read from the logs of committed studies, and what the drift records."""

import dataclasses
import json
import re
import shutil

import pytest

from qkattn.claims import measures
from qkattn.claims.claim import Speaks
from qkattn.claims.studies import Results, load
from qkattn.errors import RunDirectoryError
from tests.claims.conftest import CLAIMS

pytestmark = pytest.mark.stored
DRIFT = CLAIMS / 'drift/measures/drift.json'


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
    def val_loss(arm):
        return arm.over_seeds('val_loss').mean

    (row,) = measures.growth(committed / 'fair_small', 'shared_qk/vo')
    findings = load(committed / 'fair_small').findings
    arms = {(arm.variant, arm.control): arm for arm in findings.controls}
    last = val_loss(arms['shared_qk/vo', 'equal_shape']) - val_loss(findings.arms[0])
    assert 0.01 < last - row.value < 0.5 and row.low < row.value < row.high
    assert row.context['steps'] == '500'


def test_an_untuned_difference_decides_at_the_lowest_rate(committed, tmp_path, monkeypatch):
    (row,) = measures.at_one_rate(committed / 'quickstart', 'merged/vo')
    assert (row.context['learning rate'], row.context['baseline']) == ('0.004', 'untuned')
    arm = load(committed / 'quickstart').findings.arms[1]
    assert (row.value, row.low, row.high) == pytest.approx(
        (arm.difference.mean, arm.difference.low, arm.difference.high)
    )
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
    assert Results(tmp_path).rows(measures.DRIFT) == []
    path = tmp_path / 'drift/measures/drift.json'
    path.parent.mkdir(parents=True)
    path.write_text(DRIFT.read_text())
    rows = Results(tmp_path).rows(measures.DRIFT)
    assert [row.speaks for row in rows] == 3 * [*[Speaks.BESIDE] * 5, Speaks.AGAINST]
    for last, speaks in ((2e-3, Speaks.FOR), (4e-3, Speaks.AGAINST)):
        values = {'products': [1e-7, 1e-7], 'rounding': [0.0, 1e-3], 'apart': [1e-7, last]}
        path.write_text(json.dumps({'steps': [0, 500], 'dtypes': {'float32': values}}))
        assert measures.read_drift(path.parents[1])[-1].speaks == speaks
    path.write_text(DRIFT.read_text().replace('0.', '0.5', 1))
    with pytest.raises(RunDirectoryError, match='is damaged .*checksum.*; restore it'):
        Results(tmp_path).rows(measures.DRIFT)


@pytest.mark.slow
def test_models_train_apart_by_more_than_rounding(data_dir, monkeypatch):
    config = measures.drift_config('smoke')
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, num_steps=4),
        data=dataclasses.replace(config.data, data_dir=data_dir),
    )
    monkeypatch.setattr(measures, 'drift_config', lambda scale: config)
    recorded = measures.record_drift('smoke')['dtypes']
    first, last = (
        {dtype: {name: steps[at] for name, steps in by.items()} for dtype, by in recorded.items()}
        for at in (0, -1)
    )
    assert first['float64']['apart'] < 1e-14 < 1e-3 < last['float64']['apart']
    assert last['float64']['products'] < 1e-14 < last['float32']['products'] < 1e-5
    assert 1e-4 < last['bfloat16']['products'] < 0.1
    # The same in all precisions: gradients, not rounding.
    assert last['float32']['apart'] == pytest.approx(last['float64']['apart'], rel=1e-3)
