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
    factors, target = qk_factors(layer), empty_layer(layer, score='merged')
    A_NED = factors.logit_matrices()[..., :-1] / logit_scale(target)
    arrays = {'w_qk_DNE': np.moveaxis(A_NED[:, :-1], 0, 1), 'b_q_NE': A_NED[:, -1]}
    return fill(target, layer, score=arrays)


def unmerge(layer: Attention, *, rank: int | None = None) -> Attention:
    """Any bilinear Score -> `qk`, or `low_rank(rank=)` where `rank` is not the head size. Exact.

    The factors are balanced. Refused where A[n] of a head has a higher rank (use `truncate`).
    """
    return _lossless(truncate, layer, rank, 'A[n]')


def truncate(layer: Attention, *, rank: int) -> tuple[Attention, float]:
    """The best `qk` or `low_rank(rank=)` of that rank, and its error."""
    factors, (score, letter) = qk_factors(layer), _of_rank('qk', rank, layer)
    target, D = empty_layer(layer, score=score), layer.spec.d_model
    A_NED, root = factors.logit_matrices()[..., :D], logit_scale(target) ** 0.5
    q_ENR, k_DNR, lost = balanced_factors(A_NED[:, : D + layer.spec.biases], rank)
    arrays = {f'w_q_DN{letter}': q_ENR[:D] / root, f'w_k_DK{letter}': k_DNR / root}
    zeros_NR = np.zeros(k_DNR.shape[1:])
    b_q_NR = q_ENR[D] / root if layer.spec.biases else zeros_NR
    arrays |= {f'b_q_N{letter}': b_q_NR, f'b_k_K{letter}': zeros_NR}
    return fill(target, layer, score=arrays), lost


def gauge_fix_qk(layers: Sequence[Attention]) -> list[Attention]:
    """`qk` -> `gauge_fixed`: W_Q M^T and W_K M^-1, which holds an identity block. Exact.

    The rows of the block, an option of the variant, keep W_K M^-1 small in all layers of a model.
    b_K, which softmax ignores, becomes 0. ConversionError as `qk_factors`, for another Score, or if
    the block is so close to singular that half of the digits of the dtype would be lost.
    """
    factors, score = [qk_factors(layer) for layer in layers], layers[0].spec.score
    require(score == 'qk', f'it starts from the score qk, not {score}')
    D, _, H = factors[0].w_k_DKH.shape
    rows, fixed = _best_rows(np.stack([old.w_k_DKH for old in factors])), []
    orders_KD = fixed_first(rows, D)
    for index, (layer, old) in enumerate(zip(layers, factors, strict=True)):
        matrix = f'W_K, layer {index}'
        new = _in_gauge(old.w_k_DKH, old.w_q_DNH, old.b_q_NH, orders_KD, layer, matrix)
        arrays = {'w_q_DNH': new[0], 'b_q_NH': new[1], 'b_k_KH': np.zeros_like(old.b_k_KH)}
        arrays |= {'w_k_free_CKH': new[2]} if H < D else {}
        target = empty_layer(layer, score=f'gauge_fixed(rows={rows})')
        fixed.append(fill(target, layer, score=arrays))
    return fixed


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
    value, letter = _of_rank('vo', rank, layer)
    target = empty_layer(layer, value=value)
    B_NDE, b_E = extract_factors(layer, of_qk=False).output_matrices()
    left_DNR, right_ENR, lost = balanced_factors(B_NDE, rank)
    arrays = {f'w_v_DK{letter}': left_DNR, f'w_o_N{letter}D': np.moveaxis(right_ENR, 0, -1)}
    arrays |= {f'b_v_K{letter}': np.zeros(left_DNR.shape[1:]), 'b_o_D': b_E}
    return fill(target, layer, value=arrays), lost


def gauge_fix_vo(layers: Sequence[Attention]) -> list[Attention]:
    """`vo` -> `gauge_fixed`: W_V M and M^-1 W_O, which holds an identity block. Exact.

    As `gauge_fix_qk`, with the columns of each head of W_O in place of the rows of W_K.
    """
    D, N, value = layers[0].spec.d_model, layers[0].spec.num_heads, layers[0].spec.value
    require(value == 'vo', f'it starts from the value vo, not {value}')
    factors = [extract_factors(layer, of_qk=False).with_kv_heads(N) for layer in layers]
    w_o_LDNH = np.stack([np.moveaxis(old.w_o_NHD, 2, 0) for old in factors])
    columns, fixed = _best_rows(w_o_LDNH), []
    orders_ND = fixed_columns_first(columns, D)
    for index, (layer, old, w_o_DNH) in enumerate(zip(layers, factors, w_o_LDNH, strict=True)):
        target = empty_layer(layer, value=f'gauge_fixed(columns={columns})')
        matrix = f'W_O, layer {index}'
        new = _in_gauge(w_o_DNH, old.w_v_DKH, old.b_v_KH, orders_ND, layer, matrix)
        arrays = {'w_v_DNH': new[0], 'b_v_NH': new[1], 'w_o_NHC': np.moveaxis(new[2], 0, 2)}
        fixed.append(fill(target, layer, value=arrays | {'b_o_D': old.b_o_D}))
    return fixed


def _of_rank(full: str, rank: int, layer: Attention) -> tuple[str, str]:
    """The variant of that rank of a circuit with its own key heads, and its letter for the rank."""
    N, K = layer.spec.num_heads, layer.spec.num_kv_heads
    require(
        N == K,
        f'every query head gets its own key head, and num_kv_heads={K} are shared among {N}; '
        'apply gqa_to_mha first',
    )
    return (full, 'H') if rank == layer.spec.head_size else (f'low_rank(rank={rank})', 'R')


def _lossless(
    truncate: Callable[..., tuple[Attention, float]],
    layer: Attention,
    rank: int | None,
    matrix: str,
) -> Attention:
    """The truncated layer, where that lost rounding error only: 256 ulp of the parameters."""
    rank = layer.spec.head_size if rank is None else rank
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
    picks = []
    for rest_LDH in np.linalg.qr(np.moveaxis(w_LDNH, 2, 0))[0]:
        rows: list[int] = []
        for _ in range(rest_LDH.shape[2]):
            length_LD = np.linalg.norm(rest_LDH, axis=-1)
            length_LD[:, rows] = 0
            with np.errstate(divide='ignore'):
                row = int(np.log(length_LD).sum(0).argmax())
            rows.append(row)
            unit_LH = rest_LDH[:, row] / length_LD[:, row, None]
            rest_LDH -= np.einsum('LDH,LH,LG->LDG', rest_LDH, unit_LH, unit_LH, optimize=True)
        picks.append(tuple(sorted(rows)))
    return tuple(picks)


def _in_gauge(
    w_DKH: np.ndarray,
    w_DNH: np.ndarray,
    b_NH: np.ndarray,
    orders_KD: np.ndarray,
    layer: Attention,
    matrix: str,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """w M^T and b M^T, and the other rows of W M^-1, CKH; M[k] are the first H rows in an order."""
    H, dtype, blocks, free = w_DKH.shape[2], dtype_of(layer), [], []
    limit = float(jnp.finfo(dtype).eps) ** -0.5
    for k, order_D in enumerate(orders_KD):
        q_DH = np.linalg.qr(w_DKH[:, k])[0][order_D]
        smallest = np.linalg.svd(q_DH[:H], compute_uv=False)[-1]
        require(
            bool(smallest * limit > 1),
            f'the block of {matrix}, head {k}, that becomes the identity is too close to singular '
            f'for {dtype}: it would multiply rounding errors by {1 / max(smallest, 1e-300):.1e}, '
            f'more than {limit:.1e}',
        )
        blocks.append(w_DKH[order_D[:H], k])
        free.append(q_DH[H:] @ np.linalg.inv(q_DH[:H]))
    M_NHH = np.repeat(np.stack(blocks), w_DNH.shape[1] // len(blocks), axis=0)
    w_DNH, b_NH = np.einsum('DNH,NGH->DNG', w_DNH, M_NHH), np.einsum('NH,NGH->NG', b_NH, M_NHH)
    return w_DNH, b_NH, np.stack(free, axis=1)
