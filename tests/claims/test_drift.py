"""Two factorizations of one function: rewriting, curves, and what they say."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.claims.decided import Speaks
from qkattn.claims.measures import drift
from qkattn.model import with_params
from qkattn.storage.records import parse_file, write_json
from qkattn.train.step import init_trial


def test_the_rewrite_is_the_same_function():
    config = drift.settings('smoke')
    params = init_trial(config, jnp.uint32(3))['params']
    free = dataclasses.replace(config.model, score='query_free')
    tokens_BT = np.random.default_rng(0).integers(0, 256, (2, config.model.context))
    logits = jax.jit(lambda params, model: with_params(model, params)(tokens_BT), static_argnums=1)
    want = logits(params, config.model)
    got = logits(drift.as_query_free(params), free)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_one_product_and_two_differ_by_rounding_alone():
    rng = np.random.default_rng(0)
    x_LBTD = rng.standard_normal((1, 2, 5, 8))
    factors = {name: rng.standard_normal((1, 8, 1, 8)) for name in ('w_q_DNH', 'w_k_DKH')}
    q, k = (x_LBTD[0] @ factors[name][0, :, 0] for name in ('w_q_DNH', 'w_k_DKH'))
    want = (q @ k.swapaxes(1, 2))[:, np.tri(5, dtype=bool)]
    for dtype, most in (('float64', 1e-14), ('float32', 1e-5), ('bfloat16', 0.05)):
        for products in (1, 2):
            got = drift._logits(x_LBTD, factors, dtype, products=products)[0]
            error = np.linalg.norm(got - want) / np.linalg.norm(want)
            assert error < most and (dtype == 'float64' or error > 1e-9)


@pytest.mark.slow
def test_models_train_apart_by_more_than_rounding(tmp_path, data_dir, monkeypatch):
    settings = drift.settings

    def small(scale):
        config = settings(scale)
        train = dataclasses.replace(config.train, num_steps=4)
        data = dataclasses.replace(config.data, data_dir=data_dir)
        return dataclasses.replace(config, train=train, data=data)

    monkeypatch.setattr(drift, 'settings', small)
    drift.record(tmp_path, 'smoke')
    rows = drift.read(tmp_path)
    value = {(row.what, row.context['precision'], row.x): row.value for row in rows}
    apart, products = drift.CURVES['apart'], drift.CURVES['products']
    assert value[apart, 'float64', 0] < 1e-14 < 1e-3 < value[apart, 'float64', 4]
    assert value[products, 'float64', 4] < 1e-14 < value[products, 'float32', 4] < 1e-5
    assert 1e-4 < value[products, 'bfloat16', 4] < 0.1
    # The same in all precisions: gradients, not rounding.
    assert value[apart, 'float32', 4] == pytest.approx(value[apart, 'float64', 4], rel=1e-3)
    decided = [row for row in rows if row.speaks != Speaks.BESIDE]
    assert [(r.speaks, r.x, r.what) for r in decided] == [(Speaks.AGAINST, 4, apart)] * 3

    # What is there is not trained again; a precision that is missing is, alone.
    path = tmp_path / drift.FILE
    found = parse_file(path, {})
    lost = found['dtypes'].pop('bfloat16')
    write_json(path, found)
    trained = []
    original = drift._trained
    monkeypatch.setattr(
        drift, '_trained', lambda *args: trained.append(args[2:]) or original(*args)
    )
    drift.record(tmp_path, 'smoke')
    assert trained == [('qk', 'float64'), ('qk', 'bfloat16'), ('query_free', 'bfloat16')]
    assert json.loads(path.read_text())['dtypes']['bfloat16'] == lost
    drift.record(tmp_path, 'smoke')
    assert len(trained) == 3


def test_what_rounding_explains_speaks_for_the_claim(tmp_path):
    curves = {'products': [1e-7, 1e-7], 'rounding': [0, 1e-3], 'apart': [1e-7, 2e-3]}
    path = tmp_path / drift.FILE
    path.parent.mkdir()
    found = {'scale': 'cpu', 'steps': [0, 500], 'dtypes': {'float32': curves}}
    path.write_text(json.dumps(found))
    assert [r.speaks for r in drift.read(tmp_path)][-1] == Speaks.FOR
    curves['apart'][-1] = 4e-3
    path.write_text(json.dumps(found))
    assert [r.speaks for r in drift.read(tmp_path)][-1] == Speaks.AGAINST
    assert drift.read(tmp_path / 'empty') == []


def test_samples_are_twice_as_far_apart_each_time():
    assert drift.sampled(20) == [0, 1, 2, 4, 8, 16, 20] and drift.sampled(16)[-2:] == [8, 16]
    assert not jax.config.jax_enable_x64
