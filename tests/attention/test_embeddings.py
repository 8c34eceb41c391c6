"""One factorization contains another: copied matrices give the same function and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from flax import nnx

from qkattn.attention import attend
from tests.attention.layers import D, H, N, causal, error, make, stream, wide
from tests.lanes import thinned

GAIN = 0.5  # a residual gain other than 1, which `subspace` applies as its step size
P_DNH = np.eye(D).reshape(D, N, H)
EYE_D1D = np.eye(D)[:, None]
HADAMARD_NHD = (scipy.linalg.hadamard(D) / D**0.5).reshape(N, H, D)


def arrays(circuit):
    """The parameters by their names without the axes: w_q_DNH is 'w_q'."""
    parameters = {name: p for name, p in vars(circuit).items() if isinstance(p, nnx.Param)}
    return {name.rpartition('_')[0]: p[...] for name, p in parameters.items()}


def transposed(w_DNH):
    return w_DNH.reshape(D, D).T.reshape(w_DNH.shape)


def outward(w_DKH):
    return jnp.moveaxis(jnp.repeat(w_DKH, N // w_DKH.shape[1], axis=1), 0, -1)


def product(w_DR, w_RNH):
    return jnp.einsum('DR,RNH->DNH', w_DR, w_RNH)


# variant -> W_Q, W_K, W_V, W_O of standard attention from the matrices s of Score and v of Value
LIFTS = {
    'shared_qk/vo': lambda s, v: (s['w_q'], s['w_q'], v['w_v'], v['w_o']),
    'merged/vo': lambda s, v: (s['w_qk'], EYE_D1D, v['w_v'], v['w_o']),
    'query_free/no_v': lambda s, v: (P_DNH, s['w_k'], P_DNH, v['w_o']),
    'key_free/no_o': lambda s, v: (s['w_q'], P_DNH, v['w_v'], outward(P_DNH)),
    'neither/no_vo': lambda s, v: (P_DNH, P_DNH, P_DNH, outward(P_DNH)),
    'qk/k_is_v': lambda s, v: (s['w_q'], s['w_k'], s['w_k'], v['w_o']),
    'shared_qk/k_is_v': lambda s, v: (s['w_q'], s['w_q'], s['w_q'], v['w_o']),
    'qk/q_is_v': lambda s, v: (s['w_q'], s['w_k'], s['w_q'], v['w_o']),
    'qk/v_is_k_transposed': lambda s, v: (s['w_q'], s['w_k'], transposed(s['w_k']), v['w_o']),
    'shared_qk/v_is_k_transposed': lambda s, v: (
        *(s['w_q'], s['w_q'], transposed(s['w_q']), v['w_o']),
    ),
    'qk/o_is_v': lambda s, v: (s['w_q'], s['w_k'], v['w_v'], outward(v['w_v'])),
    'qk/o_is_k': lambda s, v: (s['w_q'], s['w_k'], v['w_v'], outward(s['w_k'])),
    'qk/o_is_q': lambda s, v: (s['w_q'], s['w_k'], v['w_v'], outward(s['w_q'])),
    'qk/subspace': lambda s, v: (s['w_q'], s['w_k'], s['w_k'], GAIN * outward(s['w_k'])),
    'shared_qk/subspace': lambda s, v: (s['w_q'], s['w_q'], s['w_q'], GAIN * outward(s['w_q'])),
    'qk/low_rank(rank=3)': lambda s, v: (s['w_q'], s['w_k'], v['w_v'], v['w_o']),
    'qk/double': lambda s, v: (*(s['w_q'], s['w_k'], product(v['w_v_outer'], v['w_v']), v['w_o']),),
    'qk/merged_vo': lambda s, v: (s['w_q'], s['w_k'], EYE_D1D, v['w_ov']),
    'qk/hadamard': lambda s, v: (s['w_q'], s['w_k'], v['w_v'], HADAMARD_NHD * v['g_o']),
    'latent(size=6)/latent': lambda s, v: (
        s['w_q'],
        product(s['w_down'], s['w_k']),
        product(s['w_down'], v['w_up_v']),
        v['w_o'],
    ),
}


def standard(matrices, x_BTD, scale):
    w_q_DNH, w_k_DKH, w_v_DKH, w_o_NHD = matrices
    q_BTNH, k_BSKH, v_BSKH = (jnp.tensordot(x_BTD, w, 1) for w in (w_q_DNH, w_k_DKH, w_v_DKH))
    o_BTNH = attend(q_BTNH, k_BSKH, v_BSKH, causal(), scale=scale)
    return jnp.einsum('BTNH,NHD->BTD', o_BTNH, w_o_NHD)


@pytest.mark.parametrize(
    ('text', 'num_kv_heads'),
    [*thinned([(text, N) for text in LIFTS], every=2), ('qk/k_is_v', 2), ('qk/double', 2)],
)
def test_it_is_standard_attention_with_these_matrices(text, num_kv_heads):
    """The gradient of a matrix with several uses is the sum over all of them."""
    variant = tuple(text.split('/'))
    with jax.enable_x64(True):
        layer = wide(make(variant, residual_gain=GAIN, num_kv_heads=num_kv_heads))
        x_BTD = wide(stream())

        def lifted(layer):
            matrices = LIFTS[text](arrays(layer.score), arrays(layer.value))
            return standard(matrices, x_BTD, layer.score.scale)

        got_BTD, pull_back = jax.vjp(lambda layer: layer(x_BTD, causal()), layer)
        want_BTD, pull_back_lifted = jax.vjp(lifted, layer)
        assert error(got_BTD, want_BTD) < 1e-12
        gradients = (pull(jnp.cos(want_BTD)) for pull in (pull_back, pull_back_lifted))
        for got, want in zip(*map(jax.tree.leaves, gradients), strict=True):
            assert error(got, want) < 1e-12


def test_grouped_heads_are_repeated_heads():
    few = make(('qk', 'vo'), num_kv_heads=2)
    s, v, x_BTD = arrays(few.score), arrays(few.value), stream()
    matrices = s['w_q'], *(jnp.repeat(w, 2, axis=1) for w in (s['w_k'], v['w_v'])), v['w_o']
    assert error(few(x_BTD, causal()), standard(matrices, x_BTD, few.score.scale)) < 1e-5


def test_shared_logits_are_symmetric():
    attention = make(('shared_qk', 'vo'))
    A_NDE = attention.score.matrix()
    np.testing.assert_allclose(A_NDE, jnp.swapaxes(A_NDE, 1, 2), atol=1e-6)
    assert jnp.linalg.eigvalsh(A_NDE).min() > -1e-5


def test_variants_start_from_the_same_shared_tensors():
    layer, tied = (make((score, 'vo'), moved=False) for score in ('qk', 'query_free'))
    np.testing.assert_array_equal(layer.score.w_k_DKH[...], tied.score.w_k_DKH[...])
    np.testing.assert_array_equal(layer.value.w_o_NHD[...], tied.value.w_o_NHD[...])
    assert jnp.abs(layer.score.w_k_DKH[...] - layer.value.w_v_DKH[...]).max() > 0.01
