"""Norms of factors and ranks of products: by hand, and from the checkpoints of a study."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from qkattn.claims.decided import Speaks
from qkattn.claims.measures import factor_norms
from qkattn.config import ModelConfig
from qkattn.model import build

SIZES = {'d_model': 8, 'num_layers': 1, 'num_heads': 1, 'context': 4, 'vocab_size': 5}


def make(score, seed=0):
    return build(ModelConfig(**SIZES, score=score), key=jax.random.key(seed))


def test_norms_and_rank_are_those_of_the_factors_and_their_product():
    model = make('double')
    score = jax.tree.map(lambda w: np.asarray(w[0], np.float64), model.blocks.attention.score)
    names = ('w_q_outer_DR', 'w_q_RNH', 'w_k_outer_DR', 'w_k_RKH')
    o_q, w_q, o_k, w_k = (np.asarray(getattr(score, name)).reshape(8, 8) for name in names)
    got = factor_norms.measured(model)
    squares = sum((w**2).sum() for w in (o_q, w_q, o_k, w_k))
    assert got['qk_factor_norm'] == pytest.approx(squares**0.5, rel=1e-5)
    A = 8**-0.5 * (o_q @ w_q) @ (o_k @ w_k).T
    assert got['qk_norm'] == pytest.approx(np.linalg.norm(A), rel=1e-4)
    p = np.linalg.svd(A, compute_uv=False)
    p /= p.sum()
    assert got['qk_effective_rank'] == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-3)
    assert np.isnan(factor_norms.measured(make('nonlinear_query'))['qk_norm'])


def test_a_study_has_a_row_for_each_arm_and_quantity(tmp_path, monkeypatch):
    # Runs of a study without tuning have no stage.
    runs = {'double-vo-d_model=8-1': 'double', 'qk-vo-d_model=8-verdict-2': 'qk'}
    for name in (*runs, 'qk-vo-d_model=8-screening-3', 'qk-vo-d_model=8-verdict-4'):
        (tmp_path / 'runs' / name).mkdir(parents=True)
        if not name.endswith('4'):  # which is not finished
            (tmp_path / 'runs' / name / 'result.json').touch()

    def load(path):
        models = [make(runs[path.name], seed) for seed in range(3)]
        return SimpleNamespace(models=models, alive=[True, True, False], model=models[0])

    monkeypatch.setattr(factor_norms.loading, 'load', load)
    factor_norms.record(tmp_path, 'cpu')
    rows = factor_norms.read(tmp_path)
    assert len(rows) == 2 * len(factor_norms.QUANTITIES) and {r.speaks for r in rows} == {
        Speaks.BESIDE
    }
    row = next(r for r in rows if r.arm == 'qk/vo' and r.what == 'norm of A[n]')
    both = [factor_norms.measured(make('qk', seed))['qk_norm'] for seed in range(2)]
    assert row.value == pytest.approx(np.mean(both), rel=1e-6)
    assert row.low < min(both) and max(both) < row.high  # two seeds tell little
    assert factor_norms.read(tmp_path / 'absent') == []
