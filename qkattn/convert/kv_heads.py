"""Grouped-query attention rewritten as multi-head or as latent attention."""

import dataclasses

import numpy as np

from qkattn.attention.attention import Attention
from qkattn.convert.factors import extract_factors
from qkattn.convert.preconditions import require_standard
from qkattn.convert.target import empty_layer, fill, respecified, standard_layer
from qkattn.errors import ConversionError


def gqa_to_mha(layer: Attention) -> Attention:
    """qk/vo with shared key and value heads -> one of each per query head, by copying. Exact.

    Keys and values keep their numbers, so positions, QK-norm and caps may be any.

    Raises:
      ConversionError: another variant.
    """
    require_standard(layer, 'gqa_to_mha')
    N = layer.spec.num_heads
    factors = extract_factors(layer).with_kv_heads(N)
    return standard_layer(dataclasses.replace(layer.spec, num_kv_heads=N), layer, factors)


def gqa_to_latent(layer: Attention) -> Attention:
    """qk/vo with K key heads -> latent/latent: W_D = [W_K, W_V], and head selectors. Exact.

    The latent has R = 2 K H channels, so the key/value cache keeps its size. Keys keep their
    numbers, so QK-norm and caps may stay. Meng et al. 2025, arXiv 2502.07864, section 3.

    Raises:
      ConversionError: another variant; RoPE, which would have to act between W_D and W_K; or
        2 K H > d_model, a latent wider than the stream.
    """
    require_standard(layer, 'gqa_to_latent')
    spec, factors = layer.spec, extract_factors(layer)
    D, N, K, H = spec.d_model, spec.num_heads, spec.num_kv_heads, spec.head_size
    if spec.positions == 'rope':
        raise ConversionError(
            'gqa_to_latent under RoPE would have to rotate between the latent and W_K, where the '
            'latent is shared by all heads; only extra channels can be rotated there'
        )
    R = 2 * K * H
    if R > D:
        raise ConversionError(
            f'gqa_to_latent needs a latent of 2 * num_kv_heads * head_size = {R}, wider than the '
            f'stream, d_model={D}'
        )
    spec = respecified(spec, score=f'latent(size={R})', value='latent', num_kv_heads=N)
    select_KHNH = np.zeros((K, H, N, H))
    for n in range(N):
        select_KHNH[n * K // N, :, n] = np.eye(H)
    select_RNH = select_KHNH.reshape(K * H, N, H)
    zeros_RNH = np.zeros_like(select_RNH)
    return fill(
        empty_layer(spec, layer),
        layer,
        score={
            'w_down_DR': np.concatenate(
                [factors.w_k_DKH.reshape(D, -1), factors.w_v_DKH.reshape(D, -1)], axis=1
            ),
            'b_down_R': np.concatenate([factors.b_k_KH.reshape(-1), factors.b_v_KH.reshape(-1)]),
            'w_k_RNH': np.concatenate([select_RNH, zeros_RNH]),
            'b_k_NH': np.zeros((N, H)),
            'w_q_DNH': factors.w_q_DNH,
            'b_q_NH': factors.b_q_NH,
        },
        value={
            'w_up_v_RNH': np.concatenate([zeros_RNH, select_RNH]),
            'b_v_NH': np.zeros((N, H)),
            'w_o_NHD': factors.w_o_NHD,
            'b_o_D': factors.b_o_D,
        },
    )
