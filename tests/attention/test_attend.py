"""Attention probabilities and products against the plain equation, forward and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.attention import Mask, attend
from qkattn.attention.parameters import project

B, T, N, H = 2, 5, 4, 3


def normals(*shapes):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def assert_close(actual, expected):
    for one, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-13)


def plain(q_BTNH, k_BSKH, v_BSKH):
    """The equation of `attend`, with every shared head repeated."""
    k_BSNH, v_BSNH = (jnp.repeat(a, N // a.shape[2], axis=2) for a in (k_BSKH, v_BSKH))
    s_BNTS = jnp.einsum('BTNH,BSNH->BNTS', q_BTNH, k_BSNH) * 0.7
    s_BNTS = jnp.where(jnp.tril(jnp.ones((T, T), bool)), s_BNTS, -jnp.inf)
    return jnp.einsum('BNTS,BSNH->BTNH', jax.nn.softmax(s_BNTS), v_BSNH)


@pytest.mark.parametrize('heads', [(4, 4), (2, 1), (1, 4)])
def test_attention_equals_the_equation_forward_and_backward(heads):
    with jax.enable_x64(True):
        shapes = (B, T, N, H), (B, T, heads[0], H), (B, T, heads[1], 6), (B, T, N, 6)
        *inputs, g_BTNH = normals(*shapes)
        mask = Mask(causal=True)
        pairs = []
        for function in (functools.partial(attend, mask=mask, scale=0.7), plain):
            o_BTNH, backward = jax.vjp(lambda q, k, v, f=function: f(q, k, v), *inputs)
            pairs.append((o_BTNH, backward(g_BTNH)))
        assert_close(*pairs)


@pytest.mark.parametrize('axes', [1, 2])
@pytest.mark.parametrize('outer', [(7,), (N, 2)])
def test_products_equal_the_contraction_forward_and_backward(axes, outer):
    with jax.enable_x64(True):
        inner = (6, 3)[-axes:]
        x, w, b, g = normals((B, T, *inner), (*inner, *outer), outer, (B, T, *outer))

        def contraction(x, w, b):
            return jnp.tensordot(x, w, axes=axes) + b

        pairs = []
        for function in (functools.partial(project, axes=axes), contraction):
            out, backward = jax.vjp(function, x, w, b)
            pairs.append((out, backward(g)))
        assert_close(*pairs)
        one_row = x[0, 0]  # no row axes at all
        assert_close(project(one_row, w, axes=axes), jnp.tensordot(one_row, w, axes))
