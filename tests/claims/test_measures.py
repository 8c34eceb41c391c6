"""What claims read from the logs of committed studies, and what the drift records."""

import dataclasses
import json
import os
import re
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.claims import readings, recordings
from qkattn.claims.claim import Speaks
from qkattn.claims.studies import Results, load
from qkattn.errors import RunDirectoryError
from qkattn.model import with_params
from qkattn.train.step import init_trial
from tests.claims.conftest import CLAIMS

pytestmark = pytest.mark.stored


def counts(study):
    """Differences that change, verdicts that turn, verdicts gained or lost; what the first say."""
    rows = readings.early(study)
    about = {'arms': '8', 'fraction of the steps': '0.5'}
    assert all(row.context == about for row in rows)
    assert [row.speaks for row in rows[1:]] == [Speaks.BESIDE] * 2
    return *(row.value for row in rows), rows[0].speaks


def test_what_changes_after_an_early_reading_is_counted_by_fraction(committed, tmp_path):
    changed, turned, gained, speaks = counts(committed / 'fair_small')
    assert changed >= 1 and speaks == Speaks.FOR and turned == 0
    study = tmp_path / 'early'
    shutil.copytree(committed / 'fair_small', study)
    for run in load(study).study.runs:
        if run.key.variant == 'qk/k_is_v' and run.stage == 'verdict':
            path = study / run.directory / 'metrics.jsonl'
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            for line in lines:
                if line['kind'] == 'eval' and line['step'] == 250 and run.key.control is None:
                    line['val_loss'] = [loss - 1 for loss in line['val_loss']]
            path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    results = study / 'results.jsonl'
    os.utime(results, ns=(results.stat().st_mtime_ns + 1,) * 2)
    # qk/k_is_v is better until it is annealed, then worse.
    assert counts(study)[:2] == (changed + 1, 1)


def val_loss(arm):
    return arm.over_seeds('val_loss').mean


def test_growth_is_the_last_difference_minus_the_first(committed):
    (row,) = readings.growth(committed / 'fair_small', 'shared_qk/vo')
    findings = load(committed / 'fair_small').findings
    arms = {(arm.variant, arm.control): arm for arm in findings.controls}
    last = val_loss(arms['shared_qk/vo', 'equal_shape']) - val_loss(findings.arms[0])
    first = last - row.value
    assert 0.01 < first < 0.5 and row.low < row.value < row.high
    assert row.context['steps'] == '500'


def test_an_interval_speaks_by_its_ends():
    for low, high, bound, speaks in (
        (-2, -1, 0, Speaks.FOR),
        (1, 2, 0, Speaks.AGAINST),
        (-1, 1, 0, Speaks.OPEN),
        (-1, 1, 2, Speaks.FOR),
        (None, None, 0, Speaks.OPEN),
    ):
        assert readings._speaks(SimpleNamespace(low=low, high=high), bound) == speaks


def test_untuned_differences_are_paired_over_seeds_and_the_lowest_rate_decides(committed, tmp_path):
    (row,) = readings.at_one_rate(committed / 'quickstart', 'merged/vo')
    assert (row.context['learning rate'], row.context['baseline']) == ('0.004', 'untuned')
    arm, baseline = (arm for arm in load(committed / 'quickstart').findings.arms[:2][::-1])
    assert (arm.variant, baseline.variant) == ('merged/vo', 'qk/vo')
    assert row.value == pytest.approx(arm.loss.mean - baseline.loss.mean)
    assert (row.low, row.high) == pytest.approx((arm.difference.low, arm.difference.high))
    # Seed 2 of both arms at twice the rate: differences of two seeds and of one.
    study = tmp_path / 'two_rates'
    shutil.copytree(committed / 'quickstart', study)
    path = study / 'results.jsonl'
    text = path.read_text()
    changed = re.sub(r'("learning_rate": )0.004(?=[^{}]*"seed": 2)', r'\g<1>0.008', text)
    changed = re.sub(r'("seed": 2[^{}]*"learning_rate": )0.004', r'\g<1>0.008', changed)
    assert changed.count('0.008') > text.count('0.008')
    path.write_text(changed)
    rows = readings.at_one_rate(study, 'merged/vo')
    assert [row.context['learning rate'] for row in rows] == ['0.004', '0.008']
    assert rows[0].speaks != Speaks.BESIDE and rows[1].speaks == Speaks.BESIDE
    assert rows[0].low is not None and rows[1].low is None


def test_what_is_recorded_is_read_unless_it_was_edited(tmp_path):
    assert Results(tmp_path).rows(recordings.DRIFT) == []
    path = tmp_path / 'drift/measures/drift.json'
    path.parent.mkdir(parents=True)
    text = (CLAIMS / 'drift/measures/drift.json').read_text()
    path.write_text(text)
    assert len(Results(tmp_path).rows(recordings.DRIFT)) == 18
    edited = text.replace('0.', '0.5', 1)
    for damaged, reason in (('{"a"', 'it is not JSON'), ('{}', 'field'), (edited, 'checksum')):
        path.write_text(damaged)
        with pytest.raises(RunDirectoryError, match=f'is damaged .*{reason}.*; restore it'):
            Results(tmp_path).rows(recordings.DRIFT)


def test_the_rewrite_of_the_drift_is_the_same_function():
    config = recordings.drift_config('smoke')
    params = init_trial(config, jnp.uint32(3))['params']
    free = dataclasses.replace(config.model, score='query_free')
    tokens_BT = np.random.default_rng(0).integers(0, 256, (2, config.model.context))
    logits = jax.jit(lambda params, model: with_params(model, params)(tokens_BT), static_argnums=1)
    got = logits(recordings.as_query_free(params), free)
    np.testing.assert_allclose(got, logits(params, config.model), atol=1e-5)


def test_one_product_and_two_differ_by_rounding_alone():
    rng = np.random.default_rng(0)
    x_LBTD = rng.standard_normal((1, 2, 5, 8))
    factors = {name: rng.standard_normal((1, 8, 1, 8)) for name in ('w_q_DNH', 'w_k_DKH')}
    q, k = (x_LBTD[0] @ factors[name][0, :, 0] for name in ('w_q_DNH', 'w_k_DKH'))
    want = (q @ k.swapaxes(1, 2))[:, np.tri(5, dtype=bool)]
    for dtype, most in (('float64', 1e-14), ('float32', 1e-5), ('bfloat16', 0.05)):
        for products in (1, 2):
            got = recordings.logits(x_LBTD, factors, dtype, products)[0]
            error = np.linalg.norm(got - want) / np.linalg.norm(want)
            assert error < most and (dtype == 'float64' or error > 1e-9)


@pytest.mark.slow
def test_models_train_apart_by_more_than_rounding(data_dir, monkeypatch):
    config = recordings.drift_config('smoke')
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, num_steps=4),
        data=dataclasses.replace(config.data, data_dir=data_dir),
    )
    monkeypatch.setattr(recordings, 'drift_config', lambda scale: config)
    rows = recordings.read_drift(recordings.record_drift('smoke'))
    value = {(r.quantity, r.context['precision'], r.context['step']): r.value for r in rows}
    apart, products = recordings.COMPARED['apart'], recordings.COMPARED['products']
    assert value[apart, 'float64', '0'] < 1e-14 < 1e-3 < value[apart, 'float64', '4']
    assert value[products, 'float64', '4'] < 1e-14 < value[products, 'float32', '4'] < 1e-5
    assert 1e-4 < value[products, 'bfloat16', '4'] < 0.1
    # The same in all precisions: gradients, not rounding.
    assert value[apart, 'float32', '4'] == pytest.approx(value[apart, 'float64', '4'], rel=1e-3)
    decided = [row for row in rows if row.speaks != Speaks.BESIDE]
    assert [(r.speaks, r.quantity) for r in decided] == [(Speaks.AGAINST, apart)] * 3


def test_what_rounding_explains_speaks_for_the_claim():
    for last, speaks in ((2e-3, Speaks.FOR), (4e-3, Speaks.AGAINST)):
        values = {'products': [1e-7, 1e-7], 'rounding': [0, 1e-3], 'apart': [1e-7, last]}
        recorded = {'steps': [0, 500], 'dtypes': {'float32': values}}
        assert recordings.read_drift(recorded)[-1].speaks == speaks
