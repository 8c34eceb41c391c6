"""W_Q = I by a change of basis, in small networks written out in numpy."""

import dataclasses

import numpy as np
import pytest

from qkattn.convert import BareLayer, BareNetwork, queries_to_identity
from qkattn.errors import ConversionError
from tests.attention.layers import error

D, N, K, H, F, V, T, L = 32, 4, 2, 8, 40, 11, 9, 3


def network(*, orthogonal: bool = False, shared: bool = False, **options) -> BareNetwork:
    """Random; W_Q may be orthogonal in every layer, or the same in all."""
    draw = np.random.default_rng(0)

    def weight(*shape):
        return draw.normal(size=shape) / shape[0] ** 0.5

    def queries():
        w_q_DD = weight(D, D)
        return (np.linalg.qr(w_q_DD)[0] if orthogonal else w_q_DD).reshape(D, N, H)

    first_DNH = queries()
    layers = tuple(
        BareLayer(
            w_q_DNH=first_DNH if shared else queries(),
            w_k_DKH=weight(D, K, H),
            w_v_DKH=weight(D, K, H),
            w_o_NHD=weight(N, H, D) / 2,
            w_in_DF=weight(D, F),
            w_out_FD=weight(F, D),
        )
        for _ in range(L)
    )
    return BareNetwork(
        embedding_VD=weight(V, D) * 3, layers=layers, w_output_DV=weight(D, V), **options
    )


def rotate(x_TNH):
    half = x_TNH.shape[-1] // 2
    z = x_TNH[..., :half] + 1j * x_TNH[..., half:]
    z = z * np.exp(1j * np.arange(T)[:, None, None] * 10_000.0 ** (-np.arange(half) / half))
    return np.concatenate([z.real, z.imag], -1)


def normed(x_TD, norm):
    if norm == 'none':
        return x_TD
    if norm == 'layernorm':
        x_TD = x_TD - x_TD.mean(-1, keepdims=True)
    return x_TD / np.sqrt((x_TD**2).mean(-1, keepdims=True))


def logits(net: BareNetwork, *, rope: bool = False, qk_norm: bool = False) -> np.ndarray:
    x_TD = net.embedding_VD[np.random.default_rng(1).integers(0, V, T)]
    for layer in net.layers:
        z_TD = normed(x_TD, net.norm)
        q_TNH = np.tensordot(z_TD, layer.w_q_DNH, 1)
        k_SNH = np.repeat(np.tensordot(z_TD, layer.w_k_DKH, 1), N // K, 1)
        v_SNH = np.repeat(np.tensordot(z_TD, layer.w_v_DKH, 1), N // K, 1)
        if qk_norm:
            q_TNH, k_SNH = (normed(a, 'rmsnorm') for a in (q_TNH, k_SNH))
        if rope:
            q_TNH, k_SNH = rotate(q_TNH), rotate(k_SNH)
        s_NTS = np.einsum('TNH,SNH->NTS', q_TNH, k_SNH) / H**0.5
        s_NTS = np.where(np.tri(T, dtype=bool), s_NTS, -np.inf)
        p_NTS = np.exp(s_NTS - s_NTS.max(-1, keepdims=True))
        p_NTS /= p_NTS.sum(-1, keepdims=True)
        o_TNH = np.einsum('NTS,SNH->TNH', p_NTS, v_SNH)
        out_TD = np.tensordot(o_TNH, layer.w_o_NHD, 2)
        x_TD = out_TD + x_TD if net.attention_skip else out_TD
        hidden_TF = np.tanh(normed(x_TD, net.norm) @ layer.w_in_DF)
        x_TD = hidden_TF @ layer.w_out_FD + (x_TD if net.mlp_skip else 0)
    return x_TD @ net.w_output_DV


@pytest.mark.parametrize('options', [{}, {'rope': True}, {'rope': True, 'qk_norm': True}], ids=str)
@pytest.mark.parametrize(
    'network_options',
    [
        {'attention_skip': True},
        {'attention_skip': False},
        {'norm': 'rmsnorm', 'orthogonal': True},
        {'mlp_skip': True, 'shared': True},
    ],
    ids=str,
)
def test_every_query_matrix_becomes_the_identity(network_options, options):
    net = network(**network_options)
    changed = queries_to_identity(net)
    for layer in changed.layers:
        np.testing.assert_array_equal(layer.w_q_DNH.reshape(D, D), np.eye(D))
    assert error(logits(changed, **options), logits(net, **options)) < 1e-12


@pytest.mark.parametrize(
    ('options', 'reason'),
    [
        ({'mlp_skip': True}, 'one basis of the stream through all layers'),
        ({'norm': 'rmsnorm'}, 'RMSNorm commutes with orthogonal maps only'),
        ({'norm': 'layernorm', 'orthogonal': True}, 'LayerNorm subtracts the mean'),
    ],
    ids=str,
)
def test_what_is_refused_would_not_be_the_same_function(options, reason):
    net = network(**options)
    with pytest.raises(ConversionError, match=reason):
        queries_to_identity(net)
    allowed = dataclasses.replace(net, norm='none', mlp_skip=False)
    forced = dataclasses.replace(queries_to_identity(allowed), norm=net.norm, mlp_skip=net.mlp_skip)
    assert error(logits(forced), logits(net)) > 1e-2


def test_a_query_matrix_that_is_no_change_of_basis_is_refused():
    net = network()
    first, second, third = net.layers
    thin = dataclasses.replace(first, w_q_DNH=first.w_q_DNH[:, :3])
    singular = dataclasses.replace(second, w_q_DNH=np.ones((D, N, H)))
    for layers, reason in (
        ((thin, second, third), 'layer 0 is 32 x 24, and only a square one'),
        ((first, singular, third), 'layer 1 cannot be inverted'),
    ):
        with pytest.raises(ConversionError, match=reason):
            queries_to_identity(dataclasses.replace(net, layers=layers))
