"""The exact GELU against JAX's, forward and backward, and logits in bfloat16."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.config import ModelConfig
from qkattn.model import build
from qkattn.model.blocks import gelu

exact = functools.partial(jax.nn.gelu, approximate=False)


def test_gelu_equals_jax_forward_and_backward():
    with jax.enable_x64(True):
        x_F = jnp.linspace(-9, 9, 2001)
        for order in (lambda f: f, jax.grad):
            expected_F = jax.vmap(order(exact))(x_F)
            np.testing.assert_allclose(jax.vmap(order(gelu))(x_F), expected_F, rtol=0, atol=1e-14)
            narrow_F = jax.vmap(order(gelu))(x_F.astype(jnp.float32))
            np.testing.assert_allclose(narrow_F, expected_F, rtol=0, atol=2e-6)


def test_gelu_of_bfloat16_is_rounded_once():
    x_F = jnp.linspace(-4, 4, 257).astype(jnp.bfloat16)
    for order in (lambda f: f, jax.grad):
        expected_F = jax.vmap(order(exact))(x_F.astype(jnp.float32))
        found_F = jax.vmap(order(gelu))(x_F)
        assert found_F.dtype == jnp.bfloat16
        np.testing.assert_allclose(found_F.astype(jnp.float32), expected_F, rtol=2**-8, atol=1e-6)


def test_logits_in_bfloat16_are_summed_in_float32():
    config = ModelConfig(d_model=8, num_layers=1, num_heads=2, vocab_size=11, context=4)
    model = build(config, key=jax.random.key(0))
    model = jax.tree.map(lambda p: p.astype(jnp.bfloat16), model)
    x_BTD = jax.random.normal(jax.random.key(1), (2, 4, 8)).astype(jnp.bfloat16)
    w_VD = model.w_embedding_VD[...].astype(jnp.float32)
    expected_BTV = x_BTD.astype(jnp.float32) @ w_VD.T
    assert model.logits(x_BTD).dtype == jnp.float32
    np.testing.assert_allclose(model.logits(x_BTD), expected_BTV, rtol=0, atol=1e-5)
