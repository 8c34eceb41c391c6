"""Conversions of both circuits at once: standard form, folding, key and value heads."""

from typing import Any

import numpy as np

from qkattn.attention.attention import Attention
from qkattn.convert.factors import (
    Factors,
    empty_layer,
    extract_factors,
    fill,
    qk_factors,
    require,
    require_bilinear,
)


def to_standard(layer: Attention) -> Attention:
    """Any variant whose queries, keys and values are linear in the stream -> qk/vo. Exact.

    Tied matrices are copied, fixed ones written out, factors multiplied. The head size is that of
    the wider circuit, and the other one is padded with zeros: `merged` gets heads of size D, which
    `unmerge` makes smaller where the rank allows. ConversionError for a Score that is not linear or
    masks the diagonal; under RoPE or QK-norm, also if query heads would be widened or are rotated
    in part.
    """
    spec, score = layer.spec, layer.score
    require_bilinear(layer)
    factors = extract_factors(layer)
    G, H = factors.w_q_DNH.shape[-1], factors.w_v_DKH.shape[-1]
    size = max(G, H)
    if spec.positions == 'rope' or spec.qk_norm:
        require(
            score.rope_size in (None, G),
            f'{spec.score} rotates {score.rope_size} of {G} channels, and qk rotates all',
        )
        acts = 'RoPE rotates' if spec.positions == 'rope' else 'QK-norm normalizes'
        require(
            size == G,
            f'queries of size {G} would be widened to the {H} of the values, and {acts} them over '
            'their whole size',
        )
    K, same = factors.w_k_DKH.shape[1], factors.w_k_DKH.shape[1] == factors.w_v_DKH.shape[1]
    K = K if same else spec.num_heads
    factors = factors.with_kv_heads(K).with_head_size(size)
    ratio, scale = float(score.scale) * size**0.5, spec.score_scale
    if spec.qk_norm:  # divides the length of the queries out
        scale *= ratio
    else:
        factors.w_q_DNH[...] *= ratio
        factors.b_q_NH[...] *= ratio
    return _standard(layer, factors, num_kv_heads=K, head_size=size, score_scale=scale)


def fold_double(layer: Attention) -> Attention:
    """`double` -> qk, vo, or both: each pair of projections becomes its product. Exact."""
    of_qk = layer.spec.score.partition('(')[0] == 'double'
    factors, changes, arrays = extract_factors(layer, of_qk=of_qk), {}, {}
    if of_qk:
        changes['score'], arrays['score'] = 'qk', factors.qk()
    if layer.spec.value.partition('(')[0] == 'double':
        changes['value'], arrays['value'] = 'vo', factors.vo()
    require(bool(changes), f'{layer.spec.variant} has no double projection to fold')
    return fill(empty_layer(layer, **changes), layer, **arrays)


def fold_gains(layer: Attention, gain_D: np.ndarray, bias_D: np.ndarray) -> Attention:
    """Moves the gain and bias of the norm before self-attention into W_Q, W_K and W_V. Exact.

    layer(z * gain + bias) = result(z): W <- diag(gain) W, b <- b + bias W. Of qk/vo alone: where
    queries are slices of the stream (`query_free`), no matrix can take the gain.
    """
    factors = _factors_of_standard(layer)
    gain_D, bias_D = np.asarray(gain_D, np.float64), np.asarray(bias_D, np.float64)
    for w_DNH, b_NH in (
        (factors.w_q_DNH, factors.b_q_NH),
        (factors.w_k_DKH, factors.b_k_KH),
        (factors.w_v_DKH, factors.b_v_KH),
    ):
        b_NH[...] += np.tensordot(bias_D, w_DNH, axes=1)
        w_DNH[...] *= gain_D[:, None, None]
    return _standard(layer, factors, biases=layer.spec.biases or bool(bias_D.any()))


def fold_biases(layer: Attention) -> Attention:
    """qk/vo -> the same with b_V = 0, added to b_O, and b_K = 0. Exact.

    The probabilities of a head sum to 1 (without dropout), and b_K adds the same to all logits of
    a query; it is refused under RoPE, QK-norm or a logit cap, which act before the softmax.
    """
    factors = _factors_of_standard(layer)
    if factors.b_k_KH.any():
        qk_factors(layer)  # raises where the bias matters
    factors.b_k_KH[...] = 0
    factors.b_o_D[...] = factors.output_matrices()[1]
    factors.b_v_KH[...] = 0
    return _standard(layer, factors)


def gqa_to_mha(layer: Attention) -> Attention:
    """qk/vo with shared key and value heads -> one of each per query head, by copying. Exact."""
    N = layer.spec.num_heads
    return _standard(layer, _factors_of_standard(layer).with_kv_heads(N), num_kv_heads=N)


def gqa_to_latent(layer: Attention) -> Attention:
    """qk/vo with K key heads -> latent/latent: W_D = [W_K, W_V], and head selectors. Exact.

    The latent has R = 2 K H channels, so the key/value cache keeps its size. Keys keep their
    parameters, so QK-norm and caps may stay. Meng et al. 2025, arXiv 2502.07864, section 3.
    ConversionError for another variant, RoPE, or 2 K H > d_model, a latent wider than the stream.
    """
    spec, factors = layer.spec, _factors_of_standard(layer)
    D, N, K, H = spec.d_model, spec.num_heads, spec.num_kv_heads, spec.head_size
    R = 2 * K * H
    require(
        spec.positions != 'rope',
        'RoPE would have to rotate between the latent and W_K, where all heads share the latent',
    )
    width = f'2 * num_kv_heads * head_size = {R}'
    require(R <= D, f'the latent has size {width}, wider than the stream, d_model={D}')
    target = empty_layer(layer, score=f'latent(size={R})', value='latent', num_kv_heads=N)
    select_KN = np.repeat(np.eye(K), N // K, axis=1)  # the key head of each query head
    select_RNH = np.einsum('KN,HG->KHNG', select_KN, np.eye(H)).reshape(K * H, N, H)
    zeros_RNH, zeros_NH = np.zeros_like(select_RNH), np.zeros((N, H))
    keys_and_values = factors.w_k_DKH.reshape(D, -1), factors.w_v_DKH.reshape(D, -1)
    score = {
        'w_down_DR': np.concatenate(keys_and_values, axis=1),
        'b_down_R': np.concatenate([factors.b_k_KH.ravel(), factors.b_v_KH.ravel()]),
        'w_k_RNH': np.concatenate([select_RNH, zeros_RNH]),
        'b_k_NH': zeros_NH,
        'w_q_DNH': factors.w_q_DNH,
        'b_q_NH': factors.b_q_NH,
    }
    value = {
        'w_up_v_RNH': np.concatenate([zeros_RNH, select_RNH]),
        'b_v_NH': zeros_NH,
        'w_o_NHD': factors.w_o_NHD,
        'b_o_D': factors.b_o_D,
    }
    return fill(target, layer, score=score, value=value)


def _factors_of_standard(layer: Attention) -> Factors:
    variant = str(layer.spec.variant)
    require(variant == 'qk/vo', f'it starts from qk/vo, not {variant}; apply to_standard first')
    return extract_factors(layer)


def _standard(source: Attention, factors: Factors, **changes: Any) -> Attention:
    """A layer qk/vo with those factors, otherwise of the spec of `source` with changes."""
    layer = empty_layer(source, score='qk', value='vo', **changes)
    return fill(layer, source, score=factors.qk(), value=factors.vo())
