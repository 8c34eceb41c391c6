"""Attention measured during training: what is logged, and that nothing else changes."""

import itertools

import jax
import numpy as np
import pytest
from flax import nnx

from qkattn import metrics
from qkattn.analysis import analyze
from qkattn.config import Config, ModelConfig, TrainConfig, fingerprint
from qkattn.convert.loading import load
from qkattn.data.pipeline import eval_batches
from qkattn.data.tasks.task_registry import rows_of
from qkattn.errors import Lost
from qkattn.model import build
from qkattn.storage.metrics_log import read_metrics
from qkattn.train import attention_metrics, train
from qkattn.train.sharding import make_mesh


def test_the_setting_is_off_and_in_no_hash():
    assert not TrainConfig().attention_metrics
    assert fingerprint(Config()) == fingerprint(Config(train=TrainConfig(attention_metrics=False)))


def test_a_trial_has_the_numbers_of_an_analysis():
    config = Config(model=ModelConfig(d_model=16, num_layers=2, num_heads=2, context=8))
    model = build(config.model, key=jax.random.key(0))
    inputs = {'tokens_BT': np.random.default_rng(0).integers(0, 256, (2, 8))}
    params = nnx.to_pure_dict(nnx.state(model))
    got = jax.jit(lambda params: attention_metrics.measure(config, params, inputs))(params)
    found = analyze(model, inputs, induction=False)
    want = {
        'qk_norm': found.values('norm', 'A').mean(),
        'qk_effective_rank': found.values('effective_rank', 'A').mean(),
        'qk_symmetric_share': found.values('symmetric_share', 'A').mean(),
        'qk_factor_norm': norm_of(found, 'score/w_q_DNH', 'score/w_k_DKH'),
        'ov_norm': found.values('norm', 'B').mean(),
        'ov_effective_rank': found.values('effective_rank', 'B').mean(),
        'ov_factor_norm': norm_of(found, 'value/w_v_DKH', 'value/w_o_NHD'),
        'attention_entropy': found.values('entropy', 'pattern').mean(),
        'attention_logit_deviation': found.values('logit_deviation', 'pattern').mean(),
        'attention_diagonal_mass': found.values('diagonal_mass', 'pattern').mean(),
        'attention_previous_token_mass': found.values('previous_token_mass', 'pattern').mean(),
    }
    assert got.keys() == metrics.ATTENTION.keys()
    assert {name: float(value) for name, value in got.items()} == pytest.approx(want, rel=1e-4)


@pytest.mark.slow
def test_evaluations_log_them_and_nothing_else_changes(tiny, tmp_path):
    sizes = {'num_layers': 1, 'd_model': 16, 'num_heads': 2, 'context': 8}
    short = {'num_steps': 4, 'eval_every': 1, 'checkpoint_every': 2}
    config = tiny(model=sizes, train={**short, 'attention_metrics': True})
    train(config, tmp_path / 'on')
    train(tiny(model=sizes, train=short), tmp_path / 'off')
    on, off = (read_metrics(tmp_path / name / 'metrics.jsonl') for name in ('on', 'off'))
    # Losses, norms and results are bitwise those of a run without.
    assert [{n: v for n, v in r.items() if n not in metrics.ATTENTION} for r in on] == off
    evaluated = [record for record in on if record['kind'] == 'eval']
    assert all(len(record[name]) == 2 for record in evaluated for name in metrics.ATTENTION)
    assert [record['step'] for record in evaluated] == [1, 2, 3, 4]
    rows = rows_of(config)
    batch = next(eval_batches(rows, 'validation', batch_size=8, max_rows=8))
    for x, model in enumerate(load(tmp_path / 'on').models):
        found = analyze(model, {'tokens_BT': batch['tokens_BT']}, induction=False)
        want = found.values('entropy', 'pattern').mean()
        assert evaluated[-1]['attention_entropy'][x] == pytest.approx(want, rel=1e-4)

    # A run that is taken over after three steps and resumed at its checkpoint has the same lines.
    dispatches = itertools.count(1)
    with pytest.raises(Lost):
        train(config, tmp_path / 'again', lost=lambda: next(dispatches) >= 3)
    train(config, tmp_path / 'again')
    assert read_metrics(tmp_path / 'again/metrics.jsonl') == on


def test_rows_that_pad_a_batch_do_not_count():
    config = Config(model=ModelConfig(d_model=16, num_layers=1, num_heads=2, context=8))
    model = build(config.model, key=jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf[None], nnx.to_pure_dict(nnx.state(model)))
    tokens_BT = np.random.default_rng(0).integers(0, 256, (2, 8))
    batch = {'tokens_BT': tokens_BT, 'loss_weights_BT': np.eye(2, 8, dtype=np.float32)}
    padded = {name: np.concatenate([a, np.zeros_like(a)]) for name, a in batch.items()}
    program = jax.jit(attention_metrics.program(config, 'map', make_mesh(config.mesh)))
    got, want = (
        {name: value_X.item() for name, value_X in program(params, rows).items()}
        for rows in (padded, batch)
    )
    assert got == pytest.approx(want, rel=1e-5)


def norm_of(found, *factors):
    """Mean over layers of the norm of some factors together."""
    return np.sqrt(sum(found.values('parameter_norm', f) ** 2 for f in factors)).mean()


@pytest.mark.slow
def test_what_a_score_does_not_have_is_null(tiny, tmp_path):
    sizes = {'num_layers': 1, 'd_model': 16, 'score': 'nonlinear_query', 'context': 8}
    short = {'num_steps': 3, 'eval_every': 3, 'checkpoint_every': 3, 'attention_metrics': True}
    train(tiny(model=sizes, train=short, mesh={'data': min(2, jax.device_count())}), tmp_path / 'w')
    last = [r for r in read_metrics(tmp_path / 'w/metrics.jsonl') if r['kind'] == 'eval'][-1]
    assert last['qk_effective_rank'] == [None, None] and None not in last['ov_effective_rank']
    assert all(0 < value < 1 for value in last['attention_diagonal_mass'])
