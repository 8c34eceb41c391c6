"""Parts of a block: GELU, and which branch each kind of dropout acts on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.attention import visible
from qkattn.config import ModelConfig
from qkattn.model.blocks import MLP, Block, gelu

exact = functools.partial(jax.nn.gelu, approximate=False)
SIZES = {'d_model': 16, 'num_layers': 2, 'num_heads': 2, 'd_ff': 16}
X_BTD = np.random.default_rng(1).standard_normal((2, 7, 16)).astype(np.float32)
KEY = jax.random.key(7)


@pytest.mark.parametrize('order', [lambda f: f, jax.grad], ids=['forward', 'backward'])
def test_gelu_is_exact_and_rounded_once_in_bfloat16(order):
    with jax.enable_x64(True):
        x_F = jnp.linspace(-9, 9, 2001)
        expected_F = jax.vmap(order(exact))(x_F)
        np.testing.assert_allclose(jax.vmap(order(gelu))(x_F), expected_F, rtol=0, atol=1e-14)
        narrow_F = jax.vmap(order(gelu))(x_F.astype(jnp.float32))
        np.testing.assert_allclose(narrow_F, expected_F, rtol=0, atol=2e-6)
    x_F = jnp.linspace(-4, 4, 257).astype(jnp.bfloat16)
    half_F = jax.vmap(order(gelu))(x_F)
    assert half_F.dtype == jnp.bfloat16
    expected_F = jax.vmap(order(exact))(x_F.astype(jnp.float32))
    np.testing.assert_allclose(half_F.astype(jnp.float32), expected_F, rtol=2**-8, atol=1e-6)


def branch(part: str, key=None, **fields):
    """What a block adds to the stream, with only the branch `part` at work."""
    block = Block(ModelConfig(**SIZES, **fields), key=jax.random.key(0))
    if part != 'attention':
        block.attention.value.w_o_NHD[...] *= 0
    block.mlp.w_out_FD[...] = jnp.eye(16) * (part == 'mlp')
    return np.asarray(block(X_BTD, visible(7, 7, causal=False), key)) - X_BTD


def is_a_part_of(got, want):
    """Which elements are left, each twice as large, and none other than that."""
    left = np.abs(got) > 1e-6
    np.testing.assert_allclose(got[left], 2 * want[left], rtol=1e-3, atol=1e-5)
    return left.mean()


def test_dropout_acts_on_whole_branches():
    for part in ('attention', 'mlp'):
        got = branch(part, KEY, dropout=0.5, attention_dropout=0.0)
        assert 0.3 < is_a_part_of(got, branch(part)) < 0.7
    # With probabilities dropped as well, what is left is not twice what it was.
    both = branch('attention', KEY, dropout=0.5)
    left = np.abs(both) > 1e-6
    assert np.abs(both[left] - 2 * branch('attention')[left]).max() > 1e-2


def test_dropout_of_probabilities_and_of_activations_act_on_one_branch_each():
    fields = {'dropout': 0.0, 'attention_dropout': 0.5}
    np.testing.assert_array_equal(branch('mlp', KEY, **fields), branch('mlp'))
    assert np.abs(branch('attention', KEY, **fields) - branch('attention')).max() > 1e-2
    fields = {'activation_dropout': 0.5}
    np.testing.assert_array_equal(branch('attention', KEY, **fields), branch('attention'))
    assert 0.3 < is_a_part_of(branch('mlp', KEY, **fields), branch('mlp')) < 0.7
    mlp = MLP(ModelConfig(**SIZES, **fields), key=jax.random.key(0))
    many = np.stack([mlp(X_BTD, jax.random.key(i)) for i in range(200)]).mean(0)
    np.testing.assert_allclose(many, mlp(X_BTD), atol=0.5)
    # Drawn apart from the branch's own: a quarter of the elements is left by both.
    both = branch('mlp', KEY, dropout=0.5, attention_dropout=0.0, **fields)
    assert 0.15 < (np.abs(both) > 1e-6).mean() < 0.35
