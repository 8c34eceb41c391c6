"""What claims measure; the stored claims B3, B6 and E2 hold the values."""

import dataclasses
import json
import shutil

import pytest

from qkattn.claims import measures
from qkattn.claims.claim import Speaks
from qkattn.claims.studies import Results, load
from qkattn.errors import RunDirectoryError
from tests.claims.conftest import CLAIMS

pytestmark = pytest.mark.stored


def test_an_untuned_difference_speaks_by_the_ends_of_its_interval(committed, monkeypatch):
    arm = load(committed / 'quickstart').findings.arms[1]
    for low, high, speaks in ((-2, -1, Speaks.FOR), (1, 2, Speaks.AGAINST), (-1, 1, Speaks.OPEN)):
        difference = dataclasses.replace(arm.difference, low=low, high=high)
        comparison = dataclasses.replace(arm.comparison, difference=difference)
        monkeypatch.setattr(measures, 'compare', lambda *_, made=comparison: made)
        assert measures.at_one_rate(committed / 'quickstart', 'merged/vo')[0].speaks == speaks


def test_the_drift_is_read_unless_it_was_edited(tmp_path):
    assert Results(tmp_path).rows(measures.DRIFT) == []
    shutil.copytree(CLAIMS / 'drift', tmp_path / 'drift')
    spoken = [row.speaks for row in Results(tmp_path).rows(measures.DRIFT)]
    assert spoken == 3 * [*[Speaks.BESIDE] * 5, Speaks.AGAINST]
    path = tmp_path / 'drift/measures/drift.json'
    text = path.read_text()
    for last, speaks in ((2e-3, Speaks.FOR), (4e-3, Speaks.AGAINST)):
        values = {'products': [1e-7, 1e-7], 'rounding': [0.0, 1e-3], 'apart': [1e-7, last]}
        path.write_text(json.dumps({'steps': [0, 500], 'dtypes': {'float32': values}}))
        assert Results(tmp_path).rows(measures.DRIFT)[-1].speaks == speaks
    path.write_text(text.replace('0.', '0.5', 1))
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
