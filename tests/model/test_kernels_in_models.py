"""Whole models compute the same with every kernel: stacks of trials, remat, packing, decoding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.attention.kernels import blockwise
from qkattn.config import ModelConfig
from qkattn.decode.kv_cache import decode_step, init_cache, prefill
from qkattn.model import build

T = 20
SIZES = {'d_model': 16, 'num_layers': 2, 'num_heads': 4, 'context': T, 'vocab_size': 11}
TOKENS = jax.random.randint(jax.random.key(0), (2, T), 0, 11)
SEGMENTS = jnp.array([[1] * 8 + [2] * 12, [1] * 13 + [2] * 4 + [0] * 3])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setitem(blockwise.BLOCK, 'cpu', 8)


def loss(inputs, model):
    weights_BT = inputs.get('segments_BT', jnp.ones_like(TOKENS)) > 0
    return (jnp.square(model(**inputs)).mean(-1) * weights_BT).sum()


def of_stack(config, inputs):
    """Losses and gradients of two trials."""
    models = jax.vmap(lambda key: build(config, key=key))(jax.random.split(jax.random.key(1)))
    run = jax.value_and_grad(functools.partial(loss, inputs))
    return jax.tree.leaves(jax.jit(jax.vmap(run))(models))


KINDS = {
    'decoder': ({'score': 'merged', 'positions': 'alibi', 'remat': 'full', 'window': 9}, {}),
    'encoder': ({'kind': 'encoder', 'value': 'no_v'}, {'valid_BT': jnp.arange(T) < 17}),
    'encoder_decoder': (
        {'kind': 'encoder_decoder', 'score': 'shared_qk(self_mask=True)', 'num_layers': 1},
        {'source_BS': TOKENS[:, ::-1], 'source_segments_BS': SEGMENTS, 'segments_BT': SEGMENTS},
    ),
}


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ('encoder', 'encoder_decoder')]


@pytest.mark.parametrize('kind', ['decoder', *SLOW])
def test_a_stack_of_models_equals_that_of_einsums(kind):
    fields, inputs = KINDS[kind]
    config = ModelConfig(**{**SIZES, **fields}, kernel='einsum')
    inputs = {'tokens_BT': TOKENS, **inputs}
    if 'valid_BT' in inputs:
        inputs['valid_BT'] = jnp.broadcast_to(inputs['valid_BT'], TOKENS.shape)
    want = of_stack(config, inputs)
    got = of_stack(dataclasses.replace(config, kernel='blockwise'), inputs)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(np.abs(b).max(), 1e-3))


@pytest.mark.slow
def test_decoding_equals_that_of_einsums():
    logits = []
    for kernel in ('einsum', 'blockwise'):
        config = ModelConfig(**SIZES, positions='rope', num_kv_heads=2, kernel=kernel)
        model = build(config, key=jax.random.key(2))
        cache = init_cache(model, 2, T)._replace(start_B=jnp.array([0, 3]))
        first_BV, cache = jax.jit(prefill)(model, TOKENS[:, :-1], cache)
        logits.append((first_BV, jax.jit(decode_step)(model, TOKENS[:, -1], cache)[0]))
    np.testing.assert_allclose(*logits, atol=1e-5)
