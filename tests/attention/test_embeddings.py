"""Every variant with matrices is standard attention with W_Q, W_K, W_V, W_O of its parameters."""

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
EYE_DND = np.repeat(EYE_D1D, N, axis=1)
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


def gauge_fixed(free_CKH):
    """Head k has its identity in rows k H to (k + 1) H, and its free rows from there on."""
    heads = [
        jnp.roll(jnp.concatenate([jnp.eye(H), free_CH]), k * H, axis=0)
        for k, free_CH in enumerate(jnp.moveaxis(free_CKH, 1, 0))
    ]
    return jnp.stack(heads, axis=1)


def gauge_fixed_rows(free_NHC):
    """Head n has its identity in columns n H to (n + 1) H, among its free columns."""
    free = [jnp.split(free_HC, [n * H], axis=1) for n, free_HC in enumerate(free_NHC)]
    return jnp.stack([jnp.concatenate([a, jnp.eye(H), b], axis=1) for a, b in free])


def qk(s):
    return s['w_q'], s['w_k']


def vo(v):
    return v['w_v'], v['w_o']


# Score -> W_Q and W_K; Value -> W_V and W_O, from the parameters s of the Score and v of the Value.
SCORES = {
    'qk': qk,
    'merged': lambda s: (s['w_qk'], EYE_D1D),
    'shared_qk': lambda s: (s['w_q'], s['w_q']),
    'symmetric': lambda s: (s['w_q'] * s['g_sign'], s['w_q']),
    'pairwise': lambda s: (jnp.einsum('DNH,NHG->DNG', s['w_q'], s['w_form']), s['w_q']),
    'symmetric_skew(symmetric_rank=5, skew_rank=3)': lambda s: (
        jnp.concatenate([s['w_symmetric'] * s['g_sign'], s['w_left'], -s['w_right']], axis=-1),
        jnp.concatenate([s['w_symmetric'], s['w_right'], s['w_left']], axis=-1),
    ),
    'query_free': lambda s: (P_DNH, s['w_k']),
    'key_free': lambda s: (s['w_q'], P_DNH),
    'neither': lambda s: (P_DNH, P_DNH),
    'query_free_full': lambda s: (EYE_DND, s['w_k']),
    'neither_full': lambda s: (EYE_DND, EYE_D1D),
    'low_rank(rank=3)': qk,
    'full_size': qk,
    'gauge_fixed': lambda s: (s['w_q'], gauge_fixed(s['w_k_free'])),
    'double(size=11)': lambda s: (
        product(s['w_q_outer'], s['w_q']),
        product(s['w_k_outer'], s['w_k']),
    ),
    'double(size=11, which="k")': lambda s: (s['w_q'], product(s['w_k_outer'], s['w_k'])),
    'collaborative(size=9)': lambda s: (
        jnp.einsum('DR,NR->DNR', s['w_q'], s['w_mixing']),
        s['w_k'][:, None],
    ),
    'latent(size=6)': lambda s: (s['w_q'], product(s['w_down'], s['w_k'])),
    'latent(size=6, query_size=10)': lambda s: (
        product(s['w_q_down'], s['w_q']),
        product(s['w_down'], s['w_k']),
    ),
}
VALUES = {
    'qk/vo': lambda s, v: vo(v),
    'qk/no_v': lambda s, v: (P_DNH, v['w_o']),
    'qk/no_o': lambda s, v: (v['w_v'], outward(P_DNH)),
    'qk/no_vo': lambda s, v: (P_DNH, outward(P_DNH)),
    'qk/merged_vo': lambda s, v: (EYE_D1D, v['w_ov']),
    'qk/low_rank(rank=3)': lambda s, v: vo(v),
    'qk/gauge_fixed': lambda s, v: (v['w_v'], gauge_fixed_rows(v['w_o'])),
    'qk/double(size=5)': lambda s, v: (product(v['w_v_outer'], v['w_v']), v['w_o']),
    'qk/hadamard': lambda s, v: (v['w_v'], HADAMARD_NHD * v['g_o']),
    'qk/k_is_v': lambda s, v: (s['w_k'], v['w_o']),
    'shared_qk/k_is_v': lambda s, v: (s['w_q'], v['w_o']),
    'qk/q_is_v': lambda s, v: (s['w_q'], v['w_o']),
    'qk/v_is_k_transposed': lambda s, v: (transposed(s['w_k']), v['w_o']),
    'qk/o_is_v': lambda s, v: (v['w_v'], outward(v['w_v'])),
    'qk/o_is_k': lambda s, v: (v['w_v'], outward(s['w_k'])),
    'qk/o_is_q': lambda s, v: (v['w_v'], outward(s['w_q'])),
    'qk/subspace': lambda s, v: (s['w_k'], GAIN * outward(s['w_k'])),
    'shared_qk/subspace': lambda s, v: (s['w_q'], GAIN * outward(s['w_q'])),
    'latent(size=6)/latent': lambda s, v: (product(s['w_down'], v['w_up_v']), v['w_o']),
}
VARIANTS = [(text, N) for text in (*(f'{score}/vo' for score in SCORES), *VALUES)]
VARIANTS += [('qk/k_is_v', 2), ('gauge_fixed/vo', 2), ('qk/double(size=5)', 2)]


def standard(w_q_DNH, w_k_DKH, w_v_DKH, w_o_NHD, *, x_BTD, scale):
    q_BTNH, k_BSKH, v_BSKH = (jnp.tensordot(x_BTD, w, 1) for w in (w_q_DNH, w_k_DKH, w_v_DKH))
    o_BTNH = attend(q_BTNH, k_BSKH, v_BSKH, causal(), scale=scale)
    return jnp.einsum('BTNH,NHD->BTD', o_BTNH, w_o_NHD)


@pytest.mark.parametrize(('text', 'num_kv_heads'), thinned(VARIANTS, every=6))
def test_it_is_standard_attention_with_these_matrices(text, num_kv_heads):
    """The gradient of a matrix with several uses is the sum over all of them."""
    score, value = text.split('/')
    with jax.enable_x64(True):
        layer = wide(make((score, value), residual_gain=GAIN, num_kv_heads=num_kv_heads))
        x_BTD = wide(stream())

        def lifted(layer):
            s, v = arrays(layer.score), arrays(layer.value)
            matrices = *SCORES[score](s), *VALUES.get(text, VALUES['qk/vo'])(s, v)
            return standard(*matrices, x_BTD=x_BTD, scale=layer.score.scale)

        got_BTD, pull_back = jax.vjp(lambda layer: layer(x_BTD, causal()), layer)
        want_BTD, pull_back_lifted = jax.vjp(lifted, layer)
        assert error(got_BTD, want_BTD) < 1e-12
        gradients = (pull(jnp.cos(want_BTD)) for pull in (pull_back, pull_back_lifted))
        for got, want in zip(*map(jax.tree.leaves, gradients), strict=True):
            assert error(got, want) < 1e-12


@pytest.mark.parametrize('num_kv_heads', [2, 4])
def test_products_begin_as_their_factors(num_kv_heads):
    """The same function under the same seed, of rank H, and `frozen` as `qk`."""
    options = {'num_kv_heads': num_kv_heads, 'moved': False}
    standard, frozen = (make((s, 'vo'), **options) for s in ('qk', 'frozen'))
    A_NDE, B_NDE = (np.asarray(standard.score.scale * standard.matrix()[0]), standard.matrix()[1])
    np.testing.assert_array_equal(frozen.score.matrix(), standard.score.matrix())
    merged = make(('merged(init="product")', 'merged_vo(init="product")'), moved=False)
    fixed = make(('qk', 'gauge_fixed(init="product")'), **options).value
    if num_kv_heads == N:
        np.testing.assert_allclose(merged.score.scale * merged.score.matrix(), A_NDE, atol=1e-6)
        assert error(merged.value.matrix(None), B_NDE) < 1e-6
        for matrix in merged.matrix():
            assert np.linalg.matrix_rank(matrix, tol=1e-5).tolist() == [H] * N
    assert error(fixed.matrix(None), B_NDE) < 1e-3  # the inverse of a random block


def test_variants_start_from_the_same_shared_tensors():
    layer, tied = (make((score, 'vo'), moved=False) for score in ('qk', 'query_free'))
    np.testing.assert_array_equal(layer.score.w_k_DKH[...], tied.score.w_k_DKH[...])
    np.testing.assert_array_equal(layer.value.w_o_NHD[...], tied.value.w_o_NHD[...])
    assert jnp.abs(layer.score.w_k_DKH[...] - layer.value.w_v_DKH[...]).max() > 0.01
    double, qk = (make((s, 'vo'), moved=False).score for s in ('double(which="q")', 'qk'))
    np.testing.assert_array_equal(double.w_k_DKH[...], qk.w_k_DKH[...])
