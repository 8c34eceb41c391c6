"""Conversions of one circuit: W_Q and W_K, or W_V and W_O, merged or factored anew.

Conversions of the QK circuit rewrite A[n] in s = scale x A[n] y^T and keep the Value. They have the
preconditions of `qk_factors`. Conversions of the OV circuit keep the Score. They work with any
positions, QK-norm and mask, because nothing acts between W_V and W_O.
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
    """Any bilinear Score -> `merged`: W_QK[n] = W_Q[n] W_K[n]^T. Exact.

    The bias of the queries becomes one vector of size D per head, W_K[n] b_Q[n]. The bias of the
    keys is dropped. It adds the same number to all logits of a query, and softmax ignores that.
    """
    factors = qk_factors(layer)
    target = empty_layer(layer, score='merged')
    # A[n] has D + 1 rows and columns. Its last row comes from b_Q. Its last column comes from b_K,
    # and is dropped:
    #
    #     [ W_QK  . ]
    #     [ b_Q   . ]
    A_NEF = factors.logit_matrices() / logit_scale(target)
    w_NDE = A_NEF[:, :-1, :-1]
    b_NE = A_NEF[:, -1, :-1]
    score = {'w_qk_DNE': np.moveaxis(w_NDE, 0, 1), 'b_q_NE': b_NE}
    return fill(target, layer, score=score)


def unmerge(layer: Attention, *, rank: int | None = None) -> Attention:
    """Any bilinear Score -> `qk`, or `low_rank(rank=)` if `rank` is not the head size. Exact.

    W_Q[n] and W_K[n] get the same norm. Raises ConversionError if A[n] of a head has a higher rank;
    `truncate` converts such a layer, too, with an error.
    """
    return _lossless(truncate, layer, rank, 'A[n]')


def truncate(layer: Attention, *, rank: int) -> tuple[Attention, float]:
    """Any bilinear Score -> the closest `qk` or `low_rank(rank=)` of a rank, and its error.

    Each A[n] keeps its `rank` largest singular values. The error is the norm of the others, divided
    by the norm of A. With biases, A has a last row for b_Q, which is truncated with it. The bias of
    the keys is dropped, because softmax ignores it.
    """
    factors = qk_factors(layer)
    variant, letter = _variant_of_rank('qk', rank, layer)
    target = empty_layer(layer, score=variant)

    # A[n] has D + 1 rows and columns. The last row comes from b_Q, and is kept if there are biases.
    # The last column comes from b_K, and is dropped.
    D = layer.spec.d_model
    num_rows = D + 1 if layer.spec.biases else D
    A_NED = factors.logit_matrices()[:, :num_rows, :D]
    q_ENR, k_DNR, lost = balanced_factors(A_NED, rank)

    # The target multiplies q k^T by a scale of its own. A includes the scale already, so each of
    # its two factors is divided by the root of the target's scale.
    root_of_scale = logit_scale(target) ** 0.5
    q_ENR = q_ENR / root_of_scale
    k_DNR = k_DNR / root_of_scale
    zeros_NR = np.zeros(k_DNR.shape[1:])
    score = {
        f'w_q_DN{letter}': q_ENR[:D],
        f'w_k_DK{letter}': k_DNR,
        f'b_q_N{letter}': q_ENR[D] if layer.spec.biases else zeros_NR,
        f'b_k_K{letter}': zeros_NR,
    }
    return fill(target, layer, score=score), lost


def merge_vo(layer: Attention) -> Attention:
    """Any Value -> `merged_vo`: W_OV[n] = W_V[n] W_O[n], and b_V W_O is added to b_O. Exact."""
    B_NDE, b_E = extract_factors(layer, of_qk=False).output_matrices()
    target = empty_layer(layer, value='merged_vo')
    return fill(target, layer, value={'w_ov_NDE': B_NDE, 'b_o_D': b_E})


def unmerge_vo(layer: Attention, *, rank: int | None = None) -> Attention:
    """Any Value -> `vo`, or `low_rank(rank=)` if `rank` is not the head size. Exact.

    Raises ConversionError if B[n] of a head has a higher rank.
    """
    return _lossless(truncate_vo, layer, rank, 'B[n]')


def truncate_vo(layer: Attention, *, rank: int) -> tuple[Attention, float]:
    """Any Value -> the closest `vo` or `low_rank(rank=)` of a rank, and its error.

    Each B[n] keeps its `rank` largest singular values. The error is the norm of the others, divided
    by the norm of B. The bias of the values moves into the output bias.
    """
    variant, letter = _variant_of_rank('vo', rank, layer)
    target = empty_layer(layer, value=variant)
    factors = extract_factors(layer, of_qk=False)  # The Score stays as it is.
    B_NDE, b_E = factors.output_matrices()
    v_DNR, o_ENR, lost = balanced_factors(B_NDE, rank)
    value = {
        f'w_v_DK{letter}': v_DNR,
        f'w_o_N{letter}D': np.moveaxis(o_ENR, 0, -1),
        f'b_v_K{letter}': np.zeros(v_DNR.shape[1:]),
        'b_o_D': b_E,
    }
    return fill(target, layer, value=value), lost


def _variant_of_rank(standard: str, rank: int, layer: Attention) -> tuple[str, str]:
    """Returns the Score or Value with this rank, and the letter of the rank in parameter names.

    If the rank is the head size, these are `standard`, which is 'qk' or 'vo', and 'H', as in
    w_q_DNH. If it is 8 in place of that, they are 'low_rank(rank=8)' and 'R', as in w_q_DNR. Raises
    ConversionError if query heads share key and value heads.
    """
    N = layer.spec.num_heads
    K = layer.spec.num_kv_heads
    require(
        N == K,
        f'every query head gets its own key head, and num_kv_heads={K} are shared among {N}; '
        'apply gqa_to_mha first',
    )
    if rank == layer.spec.head_size:
        return standard, 'H'
    return f'low_rank(rank={rank})', 'R'


def _lossless(
    truncate: Callable[..., tuple[Attention, float]],
    layer: Attention,
    rank: int | None,
    matrix: str,
) -> Attention:
    """Returns a layer with A[n] or B[n] factored at a rank, if that loses nothing but rounding.

    Args:
      truncate: the function `truncate` or `truncate_vo`.
      layer: the layer to convert.
      rank: the rank; None is the head size.
      matrix: 'A[n]' or 'B[n]', for the error.

    Raises ConversionError if the rank of the matrix is higher: if the lost share of its norm is
    more than 256 rounding errors of the parameters' dtype.
    """
    if rank is None:
        rank = layer.spec.head_size
    target, lost = truncate(layer, rank=rank)
    rounding_error = float(jnp.finfo(dtype_of(layer)).eps)
    require(
        lost <= 256 * rounding_error,
        f'{matrix} has a rank above {rank}: cutting it there loses {lost:.2e} of its norm; use a '
        f'higher rank, or {truncate.__name__}, which reports the error',
    )
    return target
