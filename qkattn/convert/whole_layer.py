"""Conversions of both circuits at once: standard form, folding, key and value heads."""

import numpy as np

from qkattn.attention.attention import Attention
from qkattn.convert.factors import extract_factors
from qkattn.convert.target import (
    empty_layer,
    fill,
    qk_factors,
    require,
    require_bilinear,
    require_standard,
    standard_layer,
)


def to_standard(layer: Attention) -> Attention:
    """Any variant whose queries, keys and values are linear in the stream -> qk/vo. Exact.

    Tied matrices are copied, fixed ones written out, factors multiplied. The head size is that of
    the wider circuit, and the other one is padded with zeros: `merged` gets heads of size D, which
    `unmerge` makes smaller where the rank allows. Where keys and values have the same number of
    heads, it stays.

    Raises:
      ConversionError: a Score that is not linear or masks the diagonal; under RoPE or QK-norm, also
        query heads that would have to be widened or that are rotated in part.
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
    return standard_layer(layer, factors, num_kv_heads=K, head_size=size, score_scale=scale)


def fold_double(layer: Attention) -> Attention:
    """`double` -> qk, vo, or both: each pair of projections becomes its product. Exact.

    Positions and QK-norm may be any.

    Raises:
      ConversionError: neither circuit is double.
    """
    spec, changes, arrays = layer.spec, {}, {}
    if spec.score.partition('(')[0] == 'double':
        changes['score'], arrays['score'] = 'qk', extract_factors(layer).qk()
    if spec.value.partition('(')[0] == 'double':
        changes['value'], arrays['value'] = 'vo', extract_factors(layer).vo()
    require(bool(changes), f'{spec.variant} has no double projection to fold')
    return fill(empty_layer(layer, **changes), layer, **arrays)


def fold_gains(layer: Attention, gain_D: np.ndarray, bias_D: np.ndarray | None = None) -> Attention:
    """Moves the gain and bias of the norm before self-attention into W_Q, W_K and W_V. Exact.

    layer(z * gain + bias) = result(z): W <- diag(gain) W, b <- b + bias W. The result has biases
    where the norm has one. Positions, QK-norm and caps may be any.

    Raises:
      ConversionError: another variant than qk/vo. Where queries are slices of the stream
        (`query_free`), no matrix can take the gain.
    """
    require_standard(layer)
    factors = extract_factors(layer)
    gain_D = np.asarray(gain_D, np.float64)
    bias_D = np.zeros_like(gain_D) if bias_D is None else np.asarray(bias_D, np.float64)
    for w_DNH, b_NH in (
        (factors.w_q_DNH, factors.b_q_NH),
        (factors.w_k_DKH, factors.b_k_KH),
        (factors.w_v_DKH, factors.b_v_KH),
    ):
        b_NH[...] += np.tensordot(bias_D, w_DNH, axes=1)
        w_DNH[...] *= gain_D[:, None, None]
    return standard_layer(layer, factors, biases=layer.spec.biases or bool(bias_D.any()))


def fold_biases(layer: Attention, *, keys: bool = True) -> Attention:
    """qk/vo -> the same with b_V = 0, added to b_O, and with `keys` also b_K = 0. Exact.

    b_V always folds: the probabilities of a head sum to 1 (so not with dropout on them). b_K adds
    the same to all logits of a query, unless something acts between q k^T and the softmax.

    Raises:
      ConversionError: another variant; or, with `keys`, a b_K together with RoPE, QK-norm or a
        logit cap.
    """
    require_standard(layer)
    factors = extract_factors(layer)
    if keys and factors.b_k_KH.any():
        qk_factors(layer)  # raises where the bias matters
        factors.b_k_KH[...] = 0
    factors.b_o_D[...] = factors.output_matrices()[1]
    factors.b_v_KH[...] = 0
    return standard_layer(layer, factors)


def gqa_to_mha(layer: Attention) -> Attention:
    """qk/vo with shared key and value heads -> one of each per query head, by copying. Exact.

    Keys and values keep their numbers, so positions, QK-norm and caps may be any.

    Raises:
      ConversionError: another variant.
    """
    require_standard(layer)
    N = layer.spec.num_heads
    return standard_layer(layer, extract_factors(layer).with_kv_heads(N), num_kv_heads=N)


def gqa_to_latent(layer: Attention) -> Attention:
    """qk/vo with K key heads -> latent/latent: W_D = [W_K, W_V], and head selectors. Exact.

    The latent has R = 2 K H channels, so the key/value cache keeps its size. Keys keep their
    numbers, so QK-norm and caps may stay. Meng et al. 2025, arXiv 2502.07864, section 3.

    Raises:
      ConversionError: another variant; RoPE, which would have to act between W_D and W_K; or
        2 K H > d_model, a latent wider than the stream.
    """
    require_standard(layer)
    spec, factors = layer.spec, extract_factors(layer)
    D, N, K, H = spec.d_model, spec.num_heads, spec.num_kv_heads, spec.head_size
    R = 2 * K * H
    require(
        spec.positions != 'rope',
        'RoPE would have to rotate between the latent and W_K, where the latent is shared by all '
        'heads; only extra channels can be rotated there',
    )
    require(
        R <= D,
        f'the latent has size 2 * num_kv_heads * head_size = {R}, wider than the stream, '
        f'd_model={D}',
    )
    target = empty_layer(layer, score=f'latent(size={R})', value='latent', num_kv_heads=N)
    select_KHNH = np.zeros((K, H, N, H))
    for n in range(N):
        select_KHNH[n * K // N, :, n] = np.eye(H)
    select_RNH, zeros_RNH = select_KHNH.reshape(K * H, N, H), np.zeros((K * H, N, H))
    keys_and_values = factors.w_k_DKH.reshape(D, -1), factors.w_v_DKH.reshape(D, -1)
    biases = factors.b_k_KH.reshape(-1), factors.b_v_KH.reshape(-1)
    return fill(
        target,
        layer,
        score={
            'w_down_DR': np.concatenate(keys_and_values, axis=1),
            'b_down_R': np.concatenate(biases),
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
