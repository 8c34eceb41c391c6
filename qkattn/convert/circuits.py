"""Conversions of one circuit: W_Q and W_K, or W_V and W_O, merged, factored anew, gauge-fixed.

Those of the QK circuit rewrite A[n] in s = scale x A[n] y^T, keep the Value, and require what
`qk_factors` does; those of the OV circuit keep the Score, with any positions,
QK-norm and mask, because nothing acts between W_V and W_O.

Gauge fixing removes the H^2 redundant parameters of each head: W_Q M^T and W_K M^-1 have the same
product for every invertible M, as do W_V M and M^-1 W_O. M is a block of H rows of W_K, or of H
columns of W_O, which becomes the identity and is not stored. With W_K = Q R, W_K M^-1 is
Q Q_block^-1; rounding both factors by eps changes A[n] by at most about eps |W_K M^-1| of its norm,
and |W_K M^-1| = 1 / (smallest singular value of Q_block).
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from qkattn.attention.attention import Attention
from qkattn.attention.scores.qk import fixed_first
from qkattn.attention.values.vo import fixed_columns_first
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

    b_Q becomes W_K b_Q, one vector per head; b_K, which softmax ignores, is dropped.
    """
    factors = qk_factors(layer)
    target = empty_layer(layer, score='merged')
    # Rows: the stream, then the bias of the queries.
    A_NED = factors.logit_matrices()[..., :-1] / logit_scale(target)
    score = {
        'w_qk_DNE': np.moveaxis(A_NED[:, :-1], 0, 1),
        'b_q_NE': A_NED[:, -1],
    }
    return fill(target, layer, score=score)


def unmerge(layer: Attention, *, rank: int | None = None) -> Attention:
    """Any bilinear Score -> `qk`, or `low_rank(rank=)` where `rank` is not the head size. Exact.

    The factors are balanced. Refused where A[n] of a head has a higher rank (use `truncate`).
    """
    return _lossless(truncate, layer, rank, 'A[n]')


def truncate(layer: Attention, *, rank: int) -> tuple[Attention, float]:
    """The best `qk` or `low_rank(rank=)` of that rank, and its error."""
    factors = qk_factors(layer)
    variant, letter = _variant_of_rank('qk', rank, layer)
    target = empty_layer(layer, score=variant)
    D = layer.spec.d_model
    A_NED = factors.logit_matrices()[..., :D]
    if not layer.spec.biases:
        A_NED = A_NED[:, :D]  # without the row of the bias of the queries
    q_ENR, k_DNR, lost = balanced_factors(A_NED, rank)
    root_of_scale = logit_scale(target) ** 0.5
    zeros_NR = np.zeros(k_DNR.shape[1:])
    b_q_NR = zeros_NR
    if layer.spec.biases:
        b_q_NR = q_ENR[D] / root_of_scale
    score = {
        f'w_q_DN{letter}': q_ENR[:D] / root_of_scale,
        f'w_k_DK{letter}': k_DNR / root_of_scale,
        f'b_q_N{letter}': b_q_NR,
        f'b_k_K{letter}': zeros_NR,
    }
    return fill(target, layer, score=score), lost


def gauge_fix_qk(layers: Sequence[Attention]) -> list[Attention]:
    """`qk` -> `gauge_fixed`: W_Q M^T and W_K M^-1, which holds an identity block. Exact.

    The rows of the block, an option of the variant, keep W_K M^-1 small in all layers of a model.
    b_K, which softmax ignores, becomes 0. ConversionError as `qk_factors`, for another Score, or if
    the block is so close to singular that half of the digits of the dtype would be lost.
    """
    factors = [qk_factors(layer) for layer in layers]
    variant = layers[0].spec.score
    require(variant == 'qk', f'it starts from the score qk, not {variant}')
    D, _, H = factors[0].w_k_DKH.shape
    rows = _best_rows(np.stack([of_layer.w_k_DKH for of_layer in factors]))
    orders_KD = fixed_first(rows, D)
    converted = []
    for index, (layer, of_layer) in enumerate(zip(layers, factors, strict=True)):
        w_q_DNH, b_q_NH, w_k_free_CKH = _in_gauge(
            of_layer.w_k_DKH,
            of_layer.w_q_DNH,
            of_layer.b_q_NH,
            orders_KD,
            dtype=dtype_of(layer),
            matrix=f'W_K, layer {index}',
        )
        score = {
            'w_q_DNH': w_q_DNH,
            'b_q_NH': b_q_NH,
            'b_k_KH': np.zeros_like(of_layer.b_k_KH),
        }
        if H < D:
            score['w_k_free_CKH'] = w_k_free_CKH
        target = empty_layer(layer, score=f'gauge_fixed(rows={rows})')
        converted.append(fill(target, layer, score=score))
    return converted


def merge_vo(layer: Attention) -> Attention:
    """Any Value -> `merged_vo`: W_OV[n] = W_V[n] W_O[n], and b_V W_O is added to b_O. Exact."""
    B_NDE, b_E = extract_factors(layer, of_qk=False).output_matrices()
    target = empty_layer(layer, value='merged_vo')
    return fill(target, layer, value={'w_ov_NDE': B_NDE, 'b_o_D': b_E})


def unmerge_vo(layer: Attention, *, rank: int | None = None) -> Attention:
    """Any Value -> `vo`, or `low_rank(rank=)` where `rank` is not the head size. Exact."""
    return _lossless(truncate_vo, layer, rank, 'B[n]')


def truncate_vo(layer: Attention, *, rank: int) -> tuple[Attention, float]:
    """The best `vo` or `low_rank(rank=)` of that rank, and its error."""
    variant, letter = _variant_of_rank('vo', rank, layer)
    target = empty_layer(layer, value=variant)
    B_NDE, b_E = extract_factors(layer, of_qk=False).output_matrices()
    v_DNR, o_ENR, lost = balanced_factors(B_NDE, rank)
    value = {
        f'w_v_DK{letter}': v_DNR,
        f'w_o_N{letter}D': np.moveaxis(o_ENR, 0, -1),
        f'b_v_K{letter}': np.zeros(v_DNR.shape[1:]),
        'b_o_D': b_E,
    }
    return fill(target, layer, value=value), lost


def gauge_fix_vo(layers: Sequence[Attention]) -> list[Attention]:
    """`vo` -> `gauge_fixed`: W_V M and M^-1 W_O, which holds an identity block. Exact.

    As `gauge_fix_qk`, with the columns of each head of W_O in place of the rows of W_K.
    """
    spec = layers[0].spec
    require(spec.value == 'vo', f'it starts from the value vo, not {spec.value}')
    factors = [
        extract_factors(layer, of_qk=False).with_kv_heads(spec.num_heads) for layer in layers
    ]
    w_o_LDNH = np.stack([np.moveaxis(of_layer.w_o_NHD, 2, 0) for of_layer in factors])
    columns = _best_rows(w_o_LDNH)
    orders_ND = fixed_columns_first(columns, spec.d_model)
    converted = []
    for index, (layer, of_layer) in enumerate(zip(layers, factors, strict=True)):
        w_v_DNH, b_v_NH, w_o_free_CNH = _in_gauge(
            w_o_LDNH[index],
            of_layer.w_v_DKH,
            of_layer.b_v_KH,
            orders_ND,
            dtype=dtype_of(layer),
            matrix=f'W_O, layer {index}',
        )
        value = {
            'w_v_DNH': w_v_DNH,
            'b_v_NH': b_v_NH,
            'w_o_NHC': np.moveaxis(w_o_free_CNH, 0, 2),
            'b_o_D': of_layer.b_o_D,
        }
        target = empty_layer(layer, value=f'gauge_fixed(columns={columns})')
        converted.append(fill(target, layer, value=value))
    return converted


def _variant_of_rank(full: str, rank: int, layer: Attention) -> tuple[str, str]:
    """The Score or Value of that rank, and the letter of the rank in its parameters' names.

    It is `full`, 'qk' or 'vo', where the rank is the head size.
    """
    N = layer.spec.num_heads
    K = layer.spec.num_kv_heads
    require(
        N == K,
        f'every query head gets its own key head, and num_kv_heads={K} are shared among {N}; '
        'apply gqa_to_mha first',
    )
    if rank == layer.spec.head_size:
        return full, 'H'
    return f'low_rank(rank={rank})', 'R'


def _lossless(
    truncate: Callable[..., tuple[Attention, float]],
    layer: Attention,
    rank: int | None,
    matrix: str,
) -> Attention:
    """The truncated layer, where that lost rounding error only: 256 ulp of the parameters."""
    if rank is None:
        rank = layer.spec.head_size
    target, lost = truncate(layer, rank=rank)
    require(
        lost <= 256 * float(jnp.finfo(dtype_of(layer)).eps),
        f'{matrix} has a rank above {rank}: cutting it there loses {lost:.2e} of its norm; use a '
        f'higher rank, or {truncate.__name__}, which reports the error',
    )
    return target


def _best_rows(w_LDNH: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """H rows of each head at which all L matrices, made orthonormal, have blocks far from singular.

    Greedy: the next row has the largest product, over the matrices, of its distances from the span
    of the rows before. For L = 1 this is QR with column pivoting (Businger & Golub 1965).
    """
    orthonormal_NLDH, _ = np.linalg.qr(np.moveaxis(w_LDNH, 2, 0))
    rows_of_heads = []
    for remainder_LDH in orthonormal_NLDH:  # without the span of the rows that are chosen
        rows: list[int] = []
        for _ in range(remainder_LDH.shape[2]):
            distance_LD = np.linalg.norm(remainder_LDH, axis=-1)
            distance_LD[:, rows] = 0
            with np.errstate(divide='ignore'):
                row = int(np.log(distance_LD).sum(0).argmax())
            rows.append(row)
            unit_LH = remainder_LDH[:, row] / distance_LD[:, row, None]
            remainder_LDH -= np.einsum(
                'LDH,LH,LG->LDG', remainder_LDH, unit_LH, unit_LH, optimize=True
            )
        rows_of_heads.append(tuple(sorted(rows)))
    return tuple(rows_of_heads)


def _in_gauge(
    w_DKH: np.ndarray,
    other_DNH: np.ndarray,
    b_NH: np.ndarray,
    orders_KD: np.ndarray,
    *,
    dtype: np.dtype,
    matrix: str,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The factors of a product in the gauge in which a block of one of them is the identity.

    Args:
      w_DKH: the factor W that gets the identity. Of head k, the block M[k] is made of the first H
        rows in the order orders_KD[k].
      other_DNH: the other factor, which becomes other M^T.
      b_NH: the bias of the other factor, which becomes b M^T.
      orders_KD: an order of the rows of W for each head.
      dtype: that of the parameters, whose rounding a block close to singular multiplies.
      matrix: the name of W, for errors.

    Returns other M^T, b M^T, and the rows of W M^-1 outside of the block, CKH with C = D - H.
    """
    H = w_DKH.shape[2]
    largest_factor = float(jnp.finfo(dtype).eps) ** -0.5
    blocks = []
    free = []
    for head, order_D in enumerate(orders_KD):
        orthonormal_DH, _ = np.linalg.qr(w_DKH[:, head])
        q_DH = orthonormal_DH[order_D]
        smallest = np.linalg.svd(q_DH[:H], compute_uv=False)[-1]
        require(
            bool(smallest * largest_factor > 1),
            f'the block of {matrix}, head {head}, that becomes the identity is too close to '
            f'singular for {dtype}: it would multiply rounding errors by '
            f'{1 / max(smallest, 1e-300):.1e}, more than {largest_factor:.1e}',
        )
        blocks.append(w_DKH[order_D[:H], head])
        free.append(q_DH[H:] @ np.linalg.inv(q_DH[:H]))
    num_query_heads = other_DNH.shape[1]
    M_NHH = np.repeat(np.stack(blocks), num_query_heads // len(blocks), axis=0)
    return (
        np.einsum('DNH,NGH->DNG', other_DNH, M_NHH),
        np.einsum('NH,NGH->NG', b_NH, M_NHH),
        np.stack(free, axis=1),
    )
