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

    Tied matrices are copied, fixed ones are written out, and factors are multiplied. Both circuits
    get the head size of the wider one; the other is padded with zeros. So `merged` gets heads of
    size D, which `unmerge` makes smaller if the rank allows.

    Raises ConversionError for a Score that is not linear or masks the diagonal. Under RoPE or
    QK-norm it also raises one if padding would widen the query heads, or if only part of a query
    is rotated.
    """
    spec = layer.spec
    require_bilinear(layer)
    factors = extract_factors(layer)
    size_of_queries = factors.w_q_DNH.shape[-1]
    size_of_values = factors.w_v_DKH.shape[-1]
    size = max(size_of_queries, size_of_values)

    if spec.positions == 'rope' or spec.qk_norm:
        rope_size = layer.score.rope_size
        require(
            rope_size in (None, size_of_queries),
            f'{spec.score} rotates {rope_size} of {size_of_queries} channels, and qk rotates all',
        )
        acts = 'RoPE rotates' if spec.positions == 'rope' else 'QK-norm normalizes'
        require(
            size == size_of_queries,
            f'queries of size {size_of_queries} would be widened to the {size_of_values} of the '
            f'values, and {acts} them over their whole size',
        )

    # `vo` has as many value heads as `qk` has key heads.
    num_key_heads = factors.w_k_DKH.shape[1]
    num_value_heads = factors.w_v_DKH.shape[1]
    K = num_key_heads if num_key_heads == num_value_heads else spec.num_heads
    factors = factors.with_kv_heads(K).with_head_size(size)

    # The Score `qk` multiplies its logits by size^-1/2. The ratio makes up for the difference.
    ratio = float(layer.score.scale) * size**0.5
    score_scale = spec.score_scale
    if spec.qk_norm:
        # A factor on W_Q would have no effect, because QK-norm divides by the length of queries.
        score_scale *= ratio
    else:
        factors.w_q_DNH[...] *= ratio
        factors.b_q_NH[...] *= ratio
    return _standard(layer, factors, num_kv_heads=K, head_size=size, score_scale=score_scale)


def fold_double(layer: Attention) -> Attention:
    """`double` -> qk, vo, or both: each pair of projections becomes its product. Exact.

    If only the Score or only the Value is `double`, the other one stays as it is.
    """
    score_name, _, _ = layer.spec.score.partition('(')  # 'double(size=64)' -> 'double'
    value_name, _, _ = layer.spec.value.partition('(')
    folds_score = score_name == 'double'
    folds_value = value_name == 'double'
    require(folds_score or folds_value, f'{layer.spec.variant} has no double projection to fold')

    # A Score that stays need not be linear, so its factors are not extracted.
    factors = extract_factors(layer, of_qk=folds_score)
    changes = {}
    arrays = {}
    if folds_score:
        changes['score'] = 'qk'
        arrays['score'] = factors.qk()
    if folds_value:
        changes['value'] = 'vo'
        arrays['value'] = factors.vo()
    return fill(empty_layer(layer, **changes), layer, **arrays)


def fold_gains(layer: Attention, gain_D: np.ndarray, bias_D: np.ndarray) -> Attention:
    """Moves the gain and bias of the norm before self-attention into W_Q, W_K and W_V. Exact.

    The result satisfies result(z) = layer(z * gain + bias), where z is the normalized stream. Each
    projection W, b of the layer becomes diag(gain) W, b + bias W.

    Raises ConversionError for all variants but qk/vo. In `query_free`, for example, there is no
    query matrix that could absorb the gain.
    """
    factors = _factors_of_standard(layer)
    gain_D = np.asarray(gain_D, np.float64)
    bias_D = np.asarray(bias_D, np.float64)
    projections = (
        (factors.w_q_DNH, factors.b_q_NH),
        (factors.w_k_DKH, factors.b_k_KH),
        (factors.w_v_DKH, factors.b_v_KH),
    )
    for w_DNH, b_NH in projections:
        # The arrays of `factors` are changed in place, the bias before its matrix changes.
        b_NH[...] += np.tensordot(bias_D, w_DNH, axes=1)
        w_DNH[...] *= gain_D[:, None, None]

    biases = layer.spec.biases or bool(bias_D.any())
    return _standard(layer, factors, biases=biases)


def fold_biases(layer: Attention) -> Attention:
    """qk/vo -> qk/vo with b_K = b_V = 0, by moving b_V into b_O and dropping b_K. Exact.

    b_V can move because the probabilities of a head sum to 1 (without dropout). b_K can be dropped
    because it adds the same number to all logits of a query, which softmax ignores.

    Raises ConversionError if b_K is not zero and the layer has RoPE, QK-norm or a logit cap. They
    act before the softmax, so b_K has an effect.
    """
    factors = _factors_of_standard(layer)
    if factors.b_k_KH.any():
        # Called only for its checks: it raises ConversionError where b_K has an effect.
        qk_factors(layer)
    factors.b_k_KH[...] = 0

    _, total_bias_D = factors.output_matrices()  # b_O + sum_n b_V[n] W_O[n]
    factors.b_o_D[...] = total_bias_D
    factors.b_v_KH[...] = 0
    return _standard(layer, factors)


def gqa_to_mha(layer: Attention) -> Attention:
    """qk/vo with shared key and value heads -> one of each for every query head. Exact."""
    N = layer.spec.num_heads
    factors = _factors_of_standard(layer).with_kv_heads(N)
    return _standard(layer, factors, num_kv_heads=N)


def gqa_to_latent(layer: Attention) -> Attention:
    """qk/vo with K key heads -> latent/latent: W_D = [W_K, W_V], and head selectors. Exact.

    The latent has R = 2 K H channels, so the key/value cache keeps its size. The keys are the same
    as before, so QK-norm and caps may stay. Meng et al. 2025, arXiv 2502.07864, section 3.

    Raises ConversionError for another variant, for RoPE, and if 2 K H > d_model, because a latent
    cannot be wider than the stream.
    """
    spec = layer.spec
    factors = _factors_of_standard(layer)
    D, N, K, H = spec.d_model, spec.num_heads, spec.num_kv_heads, spec.head_size
    R = 2 * K * H
    require(
        spec.positions != 'rope',
        'RoPE would have to rotate between the latent and W_K, where all heads share the latent',
    )
    require(
        R <= D,
        f'the latent has size 2 * num_kv_heads * head_size = {R}, wider than the stream, '
        f'd_model={D}',
    )
    target = empty_layer(layer, score=f'latent(size={R})', value='latent', num_kv_heads=N)

    # select_KN is 1 if query head n uses key head k: with K = 2 and N = 4, [[1 1 0 0], [0 0 1 1]].
    # select_RNH is the same for each channel of a head.
    select_KN = np.repeat(np.eye(K), N // K, axis=1)
    select_RNH = np.einsum('KN,HG->KHNG', select_KN, np.eye(H)).reshape(K * H, N, H)
    zeros_RNH = np.zeros_like(select_RNH)
    zeros_NH = np.zeros((N, H))

    # The first K H channels of the latent are the keys, the others are the values.
    w_k_DR = factors.w_k_DKH.reshape(D, -1)
    w_v_DR = factors.w_v_DKH.reshape(D, -1)
    score = {
        'w_down_DR': np.concatenate([w_k_DR, w_v_DR], axis=1),
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
    """Returns the factors of a layer qk/vo; raises ConversionError for another variant."""
    variant = str(layer.spec.variant)
    require(variant == 'qk/vo', f'it starts from qk/vo, not {variant}; apply to_standard first')
    return extract_factors(layer)


def _standard(source: Attention, factors: Factors, **changes: Any) -> Attention:
    """Returns a layer qk/vo with these factors; its spec is that of `source` with changes."""
    layer = empty_layer(source, score='qk', value='vo', **changes)
    return fill(layer, source, score=factors.qk(), value=factors.vo())
