"""Conversions of both circuits: standard form, folding, and key and value heads."""

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

    Tied matrices are copied, fixed matrices are written out, and factors are multiplied. If heads
    of queries and values differ in size, the smaller ones are padded with zeros.

    Raises:
        ConversionError: The Score is not bilinear, or masks the diagonal. With RoPE or QK-norm,
            also if query heads would be padded, or if only a part of each head is rotated.
    """
    spec = layer.spec
    require_bilinear(layer)
    factors = extract_factors(layer)
    query_size = factors.w_q_DNH.shape[-1]
    value_size = factors.w_v_DKH.shape[-1]
    H = max(query_size, value_size)

    if spec.positions == 'rope' or spec.qk_norm:
        _require_same_queries(layer, query_size, value_size)

    # qk/vo has equal numbers of key heads and value heads.
    num_key_heads = factors.w_k_DKH.shape[1]
    num_value_heads = factors.w_v_DKH.shape[1]
    K = num_key_heads if num_key_heads == num_value_heads else spec.num_heads
    factors = factors.with_kv_heads(K).with_head_size(H)

    # The Score `qk` has the scale H^-1/2 instead of `layer.score.scale`.
    scale_ratio = float(layer.score.scale) * H**0.5
    score_scale = spec.score_scale
    if spec.qk_norm:
        score_scale *= scale_ratio  # QK-norm would undo a factor on W_Q
    else:
        factors.w_q_DNH[...] *= scale_ratio
        factors.b_q_NH[...] *= scale_ratio
    return _standard(layer, factors, num_kv_heads=K, head_size=H, score_scale=score_scale)


def _require_same_queries(layer: Attention, query_size: int, value_size: int) -> None:
    """Raises ConversionError if RoPE or QK-norm would act on other channels in the Score `qk`.

    Args:
        layer: A layer with RoPE or QK-norm.
        query_size: The size of its query heads. If they are smaller than value heads, they would be
            padded.
        value_size: The size of its value heads.
    """
    spec = layer.spec
    rope_size = layer.score.rope_size  # None if the whole head is rotated
    require(
        rope_size in (None, query_size),
        f'{spec.score} rotates {rope_size} of {query_size} channels, and qk rotates all',
    )
    subject_and_verb = 'RoPE rotates' if spec.positions == 'rope' else 'QK-norm normalizes'
    require(
        query_size >= value_size,
        f'queries of size {query_size} would be widened to the {value_size} of the '
        f'values, and {subject_and_verb} them over their whole size',
    )


def fold_double(layer: Attention) -> Attention:
    """`double` -> qk, vo, or both: each pair of projections becomes its product. Exact.

    A Score or Value that is not `double` is kept.
    """
    score_name, _, _ = layer.spec.score.partition('(')  # 'double(size=64)' -> 'double'
    value_name, _, _ = layer.spec.value.partition('(')
    folds_score = score_name == 'double'
    folds_value = value_name == 'double'
    require(folds_score or folds_value, f'{layer.spec.variant} has no double projection to fold')

    factors = extract_factors(layer, of_qk=folds_score)
    changes = {}  # of the spec
    arrays = {}  # the parameters of the Score and of the Value
    if folds_score:
        changes['score'] = 'qk'
        arrays['score'] = factors.qk()
    if folds_value:
        changes['value'] = 'vo'
        arrays['value'] = factors.vo()
    return fill(empty_layer(layer, **changes), layer, **arrays)


def fold_gains(layer: Attention, gain_D: np.ndarray, bias_D: np.ndarray) -> Attention:
    """Moves the gain and bias of the norm before self-attention into W_Q, W_K and W_V. Exact.

    A projection z -> z W + b becomes z -> z diag(gain) W + (bias W + b), so that
    converted(z) = layer(z * gain + bias).

    Args:
        layer: A layer of the variant qk/vo.
        gain_D: The gain of the norm.
        bias_D: The bias of the norm.

    Raises:
        ConversionError: The layer is of another variant, where the norm may have no matrix to move
            into.
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
        # Change the arrays of `factors`, the bias first, because it uses W without the gain.
        b_NH[...] += np.tensordot(bias_D, w_DNH, axes=1)
        w_DNH[...] *= gain_D[:, None, None]

    has_biases = layer.spec.biases or bool(bias_D.any())
    return _standard(layer, factors, biases=has_biases)


def fold_biases(layer: Attention) -> Attention:
    """qk/vo -> qk/vo with b_K = b_V = 0, by moving b_V into b_O and dropping b_K. Exact.

    b_V can move because attention probabilities sum to 1 without dropout. b_K can be dropped
    because it shifts all logits of a query equally, which softmax ignores.

    Raises:
        ConversionError: b_K is not zero and has an effect, because the layer has RoPE, QK-norm or a
            logit cap.
    """
    factors = _factors_of_standard(layer)
    if factors.b_k_KH.any():
        qk_factors(layer)  # raises ConversionError if b_K has an effect
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

    The latent has R = 2 K H channels, as many as the key/value cache before. Queries and keys do
    not change, so QK-norm and logit caps may stay.

    Source: Meng et al. 2025, arXiv 2502.07864, section 3.

    Raises:
        ConversionError: The layer is not qk/vo, has RoPE, or has 2 K H > d_model. A latent cannot
            be wider than the residual stream.
    """
    spec = layer.spec
    factors = _factors_of_standard(layer)
    D = spec.d_model
    N = spec.num_heads
    K = spec.num_kv_heads
    H = spec.head_size
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

    # select_KN[k, n] is 1 if query head n uses key head k, as in [[1, 1, 0, 0], [0, 0, 1, 1]].
    # select_CNH copies the C = K H channels of all key heads to the query heads.
    select_KN = np.repeat(np.eye(K), N // K, axis=1)
    select_KHNG = np.einsum('KN,HG->KHNG', select_KN, np.eye(H))  # G = H
    select_CNH = select_KHNG.reshape(K * H, N, H)
    zeros_CNH = np.zeros_like(select_CNH)
    zeros_NH = np.zeros((N, H))

    # The latent holds all keys and then all values.
    w_k_DC = factors.w_k_DKH.reshape(D, -1)
    w_v_DC = factors.w_v_DKH.reshape(D, -1)
    score = {
        'w_down_DR': np.concatenate([w_k_DC, w_v_DC], axis=1),
        'b_down_R': np.concatenate([factors.b_k_KH.ravel(), factors.b_v_KH.ravel()]),
        'w_k_RNH': np.concatenate([select_CNH, zeros_CNH]),
        'b_k_NH': zeros_NH,
        'w_q_DNH': factors.w_q_DNH,
        'b_q_NH': factors.b_q_NH,
    }
    value = {
        'w_up_v_RNH': np.concatenate([zeros_CNH, select_CNH]),
        'b_v_NH': zeros_NH,
        'w_o_NHD': factors.w_o_NHD,
        'b_o_D': factors.b_o_D,
    }
    return fill(target, layer, score=score, value=value)


def _factors_of_standard(layer: Attention) -> Factors:
    """Returns the factors of a qk/vo layer. Raises ConversionError for other variants."""
    variant = str(layer.spec.variant)
    require(variant == 'qk/vo', f'it starts from qk/vo, not {variant}; apply to_standard first')
    return extract_factors(layer)


def _standard(source: Attention, factors: Factors, **changes: Any) -> Attention:
    """Returns a qk/vo layer with these factors. Its spec is `source.spec` with `changes`."""
    layer = empty_layer(source, score='qk', value='vo', **changes)
    return fill(layer, source, score=factors.qk(), value=factors.vo())
