"""W_Q = I by a change of basis, in small networks written out in numpy."""

import dataclasses

import numpy as np
import pytest

from qkattn.convert import BareLayer, BareNetwork, queries_to_identity
from qkattn.errors import ConversionError

D, N, K, H, F, V, T, L = 32, 4, 2, 8, 40, 11, 9, 3


def network(*, seed: int = 0, orthogonal: bool = False, **options) -> BareNetwork:
    draw = np.random.default_rng(seed)

    def weight(*shape):
        return draw.normal(size=shape) / shape[0] ** 0.5

    layers = []
    for _ in range(L):
        w_q_DD = weight(D, D)
        if orthogonal:
            w_q_DD = np.linalg.qr(w_q_DD)[0]
        layers.append(
            BareLayer(
                w_q_DNH=w_q_DD.reshape(D, N, H),
                w_k_DKH=weight(D, K, H),
                w_v_DKH=weight(D, K, H),
                w_o_NHD=weight(N, H, D) / 2,
                w_in_DF=weight(D, F),
                w_out_FD=weight(F, D),
            )
        )
    return BareNetwork(
        embedding_VD=weight(V, D) * 3, layers=tuple(layers), w_output_DV=weight(D, V), **options
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


def error(got, want) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


@pytest.mark.parametrize('options', [{}, {'rope': True}, {'rope': True, 'qk_norm': True}], ids=str)
@pytest.mark.parametrize('attention_skip', [True, False])
def test_every_query_matrix_becomes_the_identity(attention_skip, options):
    net = network(attention_skip=attention_skip)
    changed = queries_to_identity(net)
    for layer in changed.layers:
        np.testing.assert_array_equal(layer.w_q_DNH.reshape(D, D), np.eye(D))
    assert error(logits(changed, **options), logits(net, **options)) < 1e-12


def test_rmsnorm_allows_orthogonal_queries():
    net = network(norm='rmsnorm', orthogonal=True)
    assert error(logits(queries_to_identity(net)), logits(net)) < 1e-12


def test_a_skip_around_the_mlp_allows_shared_queries():
    net = network(mlp_skip=True)
    first = net.layers[0].w_q_DNH
    layers = tuple(dataclasses.replace(layer, w_q_DNH=first) for layer in net.layers)
    net = dataclasses.replace(net, layers=layers)
    assert error(logits(queries_to_identity(net)), logits(net)) < 1e-12


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
    allowed = {'norm': 'none', 'mlp_skip': False}
    forced = dataclasses.replace(queries_to_identity(dataclasses.replace(net, **allowed)))
    forced = dataclasses.replace(forced, norm=net.norm, mlp_skip=net.mlp_skip)
    assert error(logits(forced), logits(net)) > 1e-2


def test_a_query_matrix_that_is_no_change_of_basis_is_refused():
    net = network()
    first = net.layers[0]
    thin = dataclasses.replace(first, w_q_DNH=first.w_q_DNH[:, :3])
    with pytest.raises(ConversionError, match='layer 0 is 32 x 24, and only a square one'):
        queries_to_identity(dataclasses.replace(net, layers=(thin, *net.layers[1:])))
    w_q_DNH = first.w_q_DNH.copy()
    w_q_DNH[:, 0, 0] = w_q_DNH[:, 1, 1]
    flat = dataclasses.replace(first, w_q_DNH=w_q_DNH)
    with pytest.raises(ConversionError, match='layer 1 cannot be inverted'):
        queries_to_identity(dataclasses.replace(net, layers=(first, flat, net.layers[2])))
