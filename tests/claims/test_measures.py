"""What claims read from the logs of committed studies, and what measures record."""

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
from qkattn.config import ModelConfig
from qkattn.errors import RunDirectoryError
from qkattn.model import build, with_params
from qkattn.train.step import init_trial
from tests.claims.conftest import CLAIMS

pytestmark = pytest.mark.stored


def counts(study):
    """Differences that change, verdicts that turn, verdicts gained or lost; what the first say."""
    rows = readings.early(study)
    assert {row.x for row in rows} == {0.5} and {row.context['arms'] for row in rows} == {'8'}
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


def test_growth_is_the_last_difference_minus_the_first(committed):
    (row,) = readings.growth(committed / 'fair_small', 'shared_qk/vo')
    findings = load(committed / 'fair_small').findings
    arms = {(arm.variant, arm.control): arm for arm in findings.controls}
    last = arms['shared_qk/vo', 'equal_shape'].val_loss.mean - findings.arms[0].val_loss.mean
    first = last - row.value
    assert 0.01 < first < 0.5 and row.low < row.value < row.high
    assert row.arm == 'shared_qk/vo' and row.context['steps'] == '500'


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
    assert (row.x, row.context['baseline']) == (0.004, 'untuned')
    arm, baseline = (arm for arm in load(committed / 'quickstart').findings.arms[:2][::-1])
    assert (arm.variant, baseline.variant) == ('merged/vo', 'qk/vo')
    assert row.value == pytest.approx(arm.test_loss.mean - baseline.test_loss.mean)
    assert (row.low, row.high) == pytest.approx((arm.difference.low, arm.difference.high))
    # Seed 2 of both arms at twice the rate: points of two seeds and of one.
    study = tmp_path / 'two_rates'
    shutil.copytree(committed / 'quickstart', study)
    path = study / 'results.jsonl'
    text = path.read_text()
    changed = re.sub(r'("learning_rate": )0.004(?=[^{}]*"seed": 2)', r'\g<1>0.008', text)
    changed = re.sub(r'("seed": 2[^{}]*"learning_rate": )0.004', r'\g<1>0.008', changed)
    assert changed.count('0.008') > text.count('0.008')
    path.write_text(changed)
    rows = readings.at_one_rate(study, 'merged/vo')
    assert [row.x for row in rows] == [0.004, 0.008]
    assert rows[0].speaks != Speaks.BESIDE and rows[1].speaks == Speaks.BESIDE
    assert rows[0].low is not None and rows[1].low is None


def test_what_is_recorded_is_read_unless_it_was_edited(tmp_path):
    for measure in (recordings.DRIFT, recordings.TIMES, recordings.NORMS):
        assert Results(tmp_path).rows(measure) == []
        file = f'{measure.study}/measures/{measure.name}.json'
        (tmp_path / file).parent.mkdir(parents=True)
        text = (CLAIMS / file).read_text()
        (tmp_path / file).write_text(text)
        assert len(Results(tmp_path).rows(measure)) > 10
    edited = text.replace('0.', '0.5', 1)
    for damaged, reason in (('{"a"', 'it is not JSON'), ('{}', 'field'), (edited, 'checksum')):
        (tmp_path / file).write_text(damaged)
        with pytest.raises(RunDirectoryError, match=f'{file} is damaged .*{reason}.*; restore it'):
            Results(tmp_path).rows(measure)


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
def test_models_train_apart_by_more_than_rounding(tmp_path, data_dir, monkeypatch):
    config = recordings.drift_config('smoke')
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, num_steps=4),
        data=dataclasses.replace(config.data, data_dir=data_dir),
    )
    monkeypatch.setattr(recordings, 'drift_config', lambda scale: config)
    rows = recordings.read_drift(recordings.record_drift(tmp_path, 'smoke'))
    value = {(row.quantity, row.context['precision'], row.x): row.value for row in rows}
    apart, products = recordings.CURVES['apart'], recordings.CURVES['products']
    assert value[apart, 'float64', 0] < 1e-14 < 1e-3 < value[apart, 'float64', 4]
    assert value[products, 'float64', 4] < 1e-14 < value[products, 'float32', 4] < 1e-5
    assert 1e-4 < value[products, 'bfloat16', 4] < 0.1
    # The same in all precisions: gradients, not rounding.
    assert value[apart, 'float32', 4] == pytest.approx(value[apart, 'float64', 4], rel=1e-3)
    decided = [row for row in rows if row.speaks != Speaks.BESIDE]
    assert [(r.speaks, r.x, r.quantity) for r in decided] == [(Speaks.AGAINST, 4, apart)] * 3


def test_what_rounding_explains_speaks_for_the_claim():
    for last, speaks in ((2e-3, Speaks.FOR), (4e-3, Speaks.AGAINST)):
        curves = {'products': [1e-7, 1e-7], 'rounding': [0, 1e-3], 'apart': [1e-7, last]}
        recorded = {'steps': [0, 500], 'dtypes': {'float32': curves}}
        assert recordings.read_drift(recorded)[-1].speaks == speaks
    assert recordings.sampled(20) == [0, 1, 2, 4, 8, 16, 20]
    assert recordings.sampled(16)[-2:] == [8, 16]


def test_seconds_are_measured_in_pairs_and_stand_beside_the_counts(tmp_path, monkeypatch):
    small = {int: 4, tuple: (3,)}
    monkeypatch.setattr(recordings, 'pick', lambda scale, smoke, cpu, gpu: small[type(smoke)])
    measured = recordings.record_times(tmp_path, 'smoke')['measured']
    shapes = [(one['D'], one['H'], one['T']) for one in measured]
    assert shapes == [(4, 1, 3), (4, 3, 3), (4, 4, 3)]
    assert all(len(one['ratios']) == 4 and min(one['ratios']) > 0 for one in measured)
    shapes = [(16, 32, (1.9, 2.0, 2.1)), (16, 96, (2.9, 3.0, 3.1))]
    shapes += [(64, 32, (1.4, 1.5, 1.6)), (48, 32, (0.7, 1.0, 1.4))]  # the first counted 0.6
    measured = [{'D': 64, 'H': H, 'T': T, 'ratios': ratios} for H, T, ratios in shapes]
    *rows, order = recordings.read_times({'device': 'a device', 'measured': measured})
    assert [row.expected for row in rows] == pytest.approx([2.4, 20 / 7, 0.6, 0.8])
    assert [row.value for row in rows] == pytest.approx([2, 3, 1.5, 1], abs=0.01)
    assert (order.value, order.expected) == (1, 0) and 'of 3 with' in order.quantity
    assert {row.speaks for row in (*rows, order)} == {Speaks.BESIDE}


def make(score, seed=0):
    config = ModelConfig(d_model=8, num_layers=1, num_heads=1, context=4, vocab_size=5, score=score)
    return build(config, key=jax.random.key(seed))


def test_norms_and_rank_are_those_of_the_factors_and_their_product():
    model = make('double')
    score = jax.tree.map(lambda w: np.asarray(w[0], np.float64), model.blocks.attention.score)
    names = ('w_q_outer_DR', 'w_q_RNH', 'w_k_outer_DR', 'w_k_RKH')
    o_q, w_q, o_k, w_k = (np.asarray(getattr(score, name)).reshape(8, 8) for name in names)
    got = recordings.norms(model)
    squares = sum((w**2).sum() for w in (o_q, w_q, o_k, w_k))
    assert got['qk_factor_norm'] == pytest.approx(squares**0.5, rel=1e-5)
    A = 8**-0.5 * (o_q @ w_q) @ (o_k @ w_k).T
    assert got['qk_norm'] == pytest.approx(np.linalg.norm(A), rel=1e-4)
    p = np.linalg.svd(A, compute_uv=False)
    p /= p.sum()
    assert got['qk_effective_rank'] == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-3)
    assert np.isnan(recordings.norms(make('nonlinear_query'))['qk_norm'])


def test_norms_have_a_row_for_each_arm_and_quantity(tmp_path, monkeypatch):
    # Runs of a study without tuning have no stage.
    runs = {'double-vo-d_model=8-1': 'double', 'qk-vo-d_model=8-verdict-2': 'qk'}
    for name in (*runs, 'qk-vo-d_model=8-screening-3', 'qk-vo-d_model=8-verdict-4'):
        (tmp_path / 'runs' / name).mkdir(parents=True)
        if not name.endswith('4'):  # which is not finished
            (tmp_path / 'runs' / name / 'result.json').touch()

    def load(path):
        models = [make(runs[path.name], seed) for seed in range(3)]
        return SimpleNamespace(models=models, alive=[True, True, False], model=models[0])

    monkeypatch.setattr(recordings.loading, 'load', load)
    rows = recordings.read_norms(recordings.record_norms(tmp_path, 'cpu'))
    assert len(rows) == 2 * len(recordings.QUANTITIES)
    assert {row.speaks for row in rows} == {Speaks.BESIDE}
    row = next(r for r in rows if r.arm == 'qk/vo' and r.quantity == 'norm of A[n]')
    both = [recordings.norms(make('qk', seed))['qk_norm'] for seed in range(2)]
    assert row.value == pytest.approx(np.mean(both), rel=1e-6)
    assert row.low < min(both) and max(both) < row.high  # two seeds tell little
