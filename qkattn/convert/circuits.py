"""Conversions of one circuit: W_Q and W_K, or W_V and W_O, are merged or factored.

Conversions of the QK circuit rewrite A[n] in the logits s = scale * x A[n] y^T, and keep the Value.
Their preconditions are those of `qk_factors`. Conversions of the OV circuit rewrite B[n] and keep
the Score. They work with any positions, QK-norm and mask, because nothing acts between W_V and W_O.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from qkattn.attention.attention import Attention
from qkattn.convert.factors import (
    balanced_factors,
    dtype_of,
    empty_layer,
    extract_factors,
    fill,
    logit_scale,
    qk_factors,
    require,
)


def merge(layer: Attention) -> Attention:
    """Converts any bilinear Score to `merged`, exactly.

    In each of the N heads, the logits without their scale are

        (x W_Q + b_Q) (y W_K + b_K)^T = (x W_QK + b_Q W_K^T) y^T + terms without y

    with W_QK = W_Q W_K^T. The terms without y are dropped, because softmax ignores them.
    """
    factors = qk_factors(layer)
    target = empty_layer(layer, score='merged')
    # The matrix [[W_QK, W_Q b_K^T], [b_Q W_K^T, b_Q b_K^T]] of each head has R = D + 1 rows and
    # C = D + 1 columns. It includes the scale of `layer`, but the target applies its own scale.
    A_NRC = factors.logit_matrices() / logit_scale(target)
    w_qk_NDE = A_NRC[:, :-1, :-1]  # E = D
    b_q_NE = A_NRC[:, -1, :-1]  # b_Q W_K^T
    w_qk_DNE = np.moveaxis(w_qk_NDE, 0, 1)
    return fill(target, layer, score={'w_qk_DNE': w_qk_DNE, 'b_q_NE': b_q_NE})


def unmerge(layer: Attention, *, rank: int | None = None) -> Attention:
    """Converts any bilinear Score to `qk` or `low_rank(rank=)`, exactly.

    W_Q[n] and W_K[n] get the same norm.

    Args:
        layer: The layer to convert.
        rank: The rank of the new Score. None or the head size gives `qk`.

    Raises:
        ConversionError: A[n] has a higher rank; `truncate` is an approximation.
    """
    return _lossless(truncate, layer, rank, matrix_name='A[n]')


def truncate(layer: Attention, *, rank: int) -> tuple[Attention, float]:
    """Converts any bilinear Score to the closest `qk` or `low_rank(rank=)`.

    Each A[n] keeps its `rank` largest singular values. If the layer has biases, A[n] has an
    additional row for b_Q. The key bias is dropped, because softmax ignores it.

    Args:
        layer: The layer to convert.
        rank: The rank of the new Score. The head size gives `qk`.

    Returns:
        layer: The converted layer.
        error: The norm of the dropped singular values, divided by the norm of A.
    """
    factors = qk_factors(layer)
    variant, letter = _variant_of_rank('qk', rank, layer)  # such as 'low_rank(rank=8)' and 'R'
    target = empty_layer(layer, score=variant)

    # Row D of A comes from b_Q. Column D comes from b_K and is dropped.
    D = layer.spec.d_model
    num_rows = D + 1 if layer.spec.biases else D
    A_NED = factors.logit_matrices()[:, :num_rows, :D]
    q_ENR, k_DNR, error = balanced_factors(A_NED, rank)

    # A includes the scale, but the target multiplies q k^T by its own scale again.
    root_of_scale = logit_scale(target) ** 0.5
    q_ENR = q_ENR / root_of_scale
    k_DNR = k_DNR / root_of_scale
    zeros_NR = np.zeros(k_DNR.shape[1:])
    # The names end in axis letters: w_q_DNH for `qk`, w_q_DNR for `low_rank`.
    score = {
        f'w_q_DN{letter}': q_ENR[:D],
        f'w_k_DK{letter}': k_DNR,
        f'b_q_N{letter}': q_ENR[D] if layer.spec.biases else zeros_NR,
        f'b_k_K{letter}': zeros_NR,
    }
    return fill(target, layer, score=score), error


def merge_vo(layer: Attention) -> Attention:
    """Converts any Value to `merged_vo`, exactly.

    W_OV[n] is W_V[n] W_O[n], and sum_n b_V[n] W_O[n] is added to b_O.
    """
    factors = extract_factors(layer, of_qk=False)
    B_NDE, b_E = factors.output_matrices()
    target = empty_layer(layer, value='merged_vo')
    return fill(target, layer, value={'w_ov_NDE': B_NDE, 'b_o_D': b_E})


def unmerge_vo(layer: Attention, *, rank: int | None = None) -> Attention:
    """Converts any Value to `vo` or `low_rank(rank=)`, exactly.

    Args:
        layer: The layer to convert.
        rank: The rank of the new Value. None or the head size gives `vo`.

    Raises:
        ConversionError: B[n] has a higher rank; `truncate_vo` is an approximation.
    """
    return _lossless(truncate_vo, layer, rank, matrix_name='B[n]')


def truncate_vo(layer: Attention, *, rank: int) -> tuple[Attention, float]:
    """Converts any Value to the closest `vo` or `low_rank(rank=)`.

    Each B[n] keeps its `rank` largest singular values. The value bias moves into the output bias.

    Args:
        layer: The layer to convert.
        rank: The rank of the new Value. The head size gives `vo`.

    Returns:
        layer: The converted layer.
        error: The norm of the dropped singular values, divided by the norm of B.
    """
    variant, letter = _variant_of_rank('vo', rank, layer)  # such as 'low_rank(rank=8)' and 'R'
    target = empty_layer(layer, value=variant)
    factors = extract_factors(layer, of_qk=False)
    B_NDE, b_E = factors.output_matrices()
    v_DNR, o_ENR, error = balanced_factors(B_NDE, rank)
    # The names end in axis letters: w_v_DKH for `vo`, w_v_DKR for `low_rank`.
    value = {
        f'w_v_DK{letter}': v_DNR,
        f'w_o_N{letter}D': np.moveaxis(o_ENR, 0, -1),
        f'b_v_K{letter}': np.zeros(v_DNR.shape[1:]),
        'b_o_D': b_E,
    }
    return fill(target, layer, value=value), error


def _variant_of_rank(standard: str, rank: int, layer: Attention) -> tuple[str, str]:
    """Returns the Score or Value of a given rank, and the rank's axis letter in parameter names.

    - (`standard`, 'H') if the rank is the head size, with parameters such as w_q_DNH.
    - ('low_rank(rank=8)', 'R') for another rank, with parameters such as w_q_DNR.

    Args:
        standard: The Score or Value whose rank is the head size, 'qk' or 'vo'.
        layer: The layer to convert.

    Raises:
        ConversionError: Query heads share key heads.
    """
    N = layer.spec.num_heads
    K = layer.spec.num_kv_heads
    # The factors have a key head for each query head.
    require(
        N == K,
        f'every query head gets its own key head, and num_kv_heads={K} are shared among {N}; '
        'apply gqa_to_mha first',
    )
    if rank == layer.spec.head_size:
        return standard, 'H'
    return f'low_rank(rank={rank})', 'R'


def _lossless(
    truncate_function: Callable[..., tuple[Attention, float]],
    layer: Attention,
    rank: int | None,
    matrix_name: str,
) -> Attention:
    """Truncates A[n] or B[n] of a layer, and requires that only rounding errors are lost.

    Args:
        truncate_function: `truncate` or `truncate_vo`.
        layer: The layer to convert.
        rank: The rank; None is the head size.
        matrix_name: 'A[n]' or 'B[n]', for the error.

    Raises:
        ConversionError: The relative error is above 256 times the epsilon of the dtype.
    """
    if rank is None:
        rank = layer.spec.head_size
    converted_layer, error = truncate_function(layer, rank=rank)
    tolerance = 256 * float(jnp.finfo(dtype_of(layer)).eps)
    require(
        error <= tolerance,
        f'{matrix_name} has a rank above {rank}: cutting it there loses {error:.2e} of its norm; '
        f'use a higher rank, or {truncate_function.__name__}, which reports the error',
    )
    return converted_layer
