"""One factorization contains another: copying parameters gives the same function."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.layers import D, H, N, causal, error, make, stream


def copied(into, source, copies):
    """`into` with parameters taken from functions of `source`."""
    for circuit, name, value in copies(source):
        parameter = getattr(getattr(into, circuit), name)
        assert parameter.shape == value.shape
        parameter[...] = value
    return into


P_DNH = jnp.eye(D).reshape(D, N, H)

# variant -> the parameters of standard attention that make it the same function
LIFTS = {
    ('shared_qk', 'vo'): lambda a: [
        ('score', 'w_q_DNH', a.score.w_q_DNH[...]),
        ('score', 'w_k_DKH', a.score.w_q_DNH[...]),
        ('value', 'w_v_DKH', a.value.w_v_DKH[...]),
        ('value', 'w_o_NHD', a.value.w_o_NHD[...]),
    ],
    ('query_free', 'no_v'): lambda a: [
        ('score', 'w_q_DNH', P_DNH),
        ('score', 'w_k_DKH', a.score.w_k_DKH[...]),
        ('value', 'w_v_DKH', P_DNH),
        ('value', 'w_o_NHD', a.value.w_o_NHD[...]),
    ],
    ('key_free', 'no_o'): lambda a: [
        ('score', 'w_q_DNH', a.score.w_q_DNH[...]),
        ('score', 'w_k_DKH', P_DNH),
        ('value', 'w_v_DKH', a.value.w_v_DKH[...]),
        ('value', 'w_o_NHD', jnp.moveaxis(P_DNH, 0, -1)),
    ],
}


@pytest.mark.parametrize('variant', LIFTS, ids='/'.join)
def test_standard_attention_contains(variant):
    tied = make(variant)
    standard = copied(make(('qk', 'vo'), seed=9), tied, LIFTS[variant])
    x_BTD = stream()
    assert error(standard(x_BTD, causal()), tied(x_BTD, causal())) < 1e-5


def test_merged_contains_standard():
    standard = make(('qk', 'vo'))
    rescale = (D / H) ** 0.5  # the two differ in their scale on the logits

    def merge(a):
        product_NDE = a.score.matrix() * rescale
        return [
            ('score', 'w_qk_DNE', jnp.moveaxis(product_NDE, 0, 1)),
            ('value', 'w_v_DKH', a.value.w_v_DKH[...]),
            ('value', 'w_o_NHD', a.value.w_o_NHD[...]),
        ]

    merged = copied(make(('merged', 'vo'), seed=9), standard, merge)
    x_BTD = stream()
    assert error(merged(x_BTD, causal()), standard(x_BTD, causal())) < 1e-5


def test_grouped_heads_are_repeated_heads():
    few = make(('qk', 'vo'), num_kv_heads=2)
    many = copied(
        make(('qk', 'vo'), seed=9),
        few,
        lambda a: [
            ('score', 'w_q_DNH', a.score.w_q_DNH[...]),
            ('score', 'w_k_DKH', jnp.repeat(a.score.w_k_DKH[...], 2, axis=1)),
            ('value', 'w_v_DKH', jnp.repeat(a.value.w_v_DKH[...], 2, axis=1)),
            ('value', 'w_o_NHD', a.value.w_o_NHD[...]),
        ],
    )
    x_BTD = stream()
    assert error(many(x_BTD, causal()), few(x_BTD, causal())) < 1e-5


def test_shared_logits_are_symmetric():
    attention = make(('shared_qk', 'vo'))
    A_NDE = attention.score.matrix()
    np.testing.assert_allclose(A_NDE, jnp.swapaxes(A_NDE, 1, 2), atol=1e-6)
    assert jnp.linalg.eigvalsh(A_NDE).min() > -1e-5
    other = make(('qk', 'vo')).score.matrix()
    assert jnp.abs(other - jnp.swapaxes(other, 1, 2)).max() > 0.1


def test_variants_start_from_the_same_shared_tensors():
    standard, tied = (make((score, 'vo'), moved=False) for score in ('qk', 'query_free'))
    np.testing.assert_array_equal(standard.score.w_k_DKH[...], tied.score.w_k_DKH[...])
    np.testing.assert_array_equal(standard.value.w_o_NHD[...], tied.value.w_o_NHD[...])
    assert jnp.abs(standard.score.w_k_DKH[...] - standard.value.w_v_DKH[...]).max() > 0.01
