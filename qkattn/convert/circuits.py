"""Conversions of one circuit: W_Q and W_K, or W_V and W_O, merged, factored anew, gauge-fixed.

Those of the QK circuit rewrite A[n] in s = scale x A[n] y^T and keep the Value; all of them require
what `qk_factors` does. Nothing acts between W_V and W_O, so those of the OV circuit, which keep the
Score, allow any positions, QK-norm and mask.

Gauge fixing removes the H^2 redundant parameters of each head. W_Q M^T and W_K M^-1 have the same
product for every invertible M, and so have W_V M and M^-1 W_O. M is a block of H rows of W_K, or of
H columns of W_O, which becomes the identity and is not stored. With W_K = Q R and orthonormal Q,
W_K M^-1 = Q Q_block^-1: no condition of W_K itself matters. As W_Q M^T holds columns of A[n],
rounding both factors by eps changes A[n] by at most about eps |W_K M^-1| of its norm, where
|W_K M^-1| = 1 / (smallest singular value of Q_block).
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from qkattn.attention.attention import Attention
from qkattn.attention.scores.qk import fixed_first, fixed_slices
from qkattn.convert.factors import (
    Factors,
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

    The factors are balanced: of all, those with the smallest sum of squares. Refused where A[n] of
    a head has a higher rank (use `truncate`).
    """
    rank = layer.spec.head_size if rank is None else rank
    return _lossless(*truncate(layer, rank=rank), f'A[n] has a rank above {rank}', 'truncate')


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


def to_collaborative(layer: Attention) -> Attention:
    """`qk` -> `collaborative`, R = N H: W_Q side by side, mixing = indicators. Exact."""
    N, H = layer.spec.num_heads, layer.spec.head_size
    factors, target = _factors_of_qk(layer), empty_layer(layer, score='collaborative')
    ratio, factors = factors.scale / logit_scale(target), factors.with_kv_heads(N)
    arrays = {
        'w_q_DR': ratio * factors.w_q_DNH.reshape(-1, N * H),
        'w_k_DR': factors.w_k_DKH.reshape(-1, N * H),
        'w_mixing_NR': np.repeat(np.eye(N), H, axis=1),
        'b_q_R': ratio * factors.b_q_NH.reshape(-1),
        'b_k_R': factors.b_k_KH.reshape(-1),
    }
    return fill(target, layer, score=arrays)


def gauge_fix_qk(layers: Sequence[Attention], *, pivot: bool = True) -> list[Attention]:
    """`qk` -> `gauge_fixed`: W_Q M^T and W_K M^-1, which holds an identity block. Exact.

    b_K, which softmax ignores, becomes 0.

    Args:
      layers: those of a model, which become one variant.
      pivot: True picks the rows of each key head that keep W_K M^-1 small in all layers; they are
        an option of the target. False takes the rows that `gauge_fixed` fixes by default.

    Raises:
      ConversionError: as `qk_factors`; a Score other than qk; or a block so close to singular that
        half of the digits of the parameters' dtype would be lost.
    """
    factors = [_factors_of_qk(layer) for layer in layers]
    (D, K, H), spec = factors[0].w_k_DKH.shape, layers[0].spec
    score, rows = 'gauge_fixed', fixed_slices(spec, K)
    if pivot:
        rows = _best_rows(np.stack([layer.w_k_DKH for layer in factors]))
        score = f'gauge_fixed(rows={rows})'
    fixed = []
    for layer, old in zip(layers, factors, strict=True):
        M_KHH, free_CKH = _in_gauge(old.w_k_DKH, fixed_first(rows, D), layer, 'W_K of key head')
        M_NHH = np.repeat(M_KHH, spec.num_heads // K, axis=0)
        arrays = {
            'w_q_DNH': np.einsum('DNH,NGH->DNG', old.w_q_DNH, M_NHH),
            'b_q_NH': np.einsum('NH,NGH->NG', old.b_q_NH, M_NHH),
            'b_k_KH': np.zeros((K, H)),
        } | ({'w_k_free_CKH': free_CKH} if H < D else {})
        fixed.append(fill(empty_layer(layer, score=score), layer, score=arrays))
    return fixed


def merge_vo(layer: Attention) -> Attention:
    """Any Value -> `merged_vo`: W_OV[n] = W_V[n] W_O[n], and b_V W_O is added to b_O. Exact."""
    B_NDE, b_E = extract_factors(layer).output_matrices()
    target = empty_layer(layer, value='merged_vo')
    return fill(target, layer, value={'w_ov_NDE': B_NDE, 'b_o_D': b_E})


def unmerge_vo(layer: Attention, *, rank: int | None = None) -> Attention:
    """Any Value -> `vo`, or `low_rank(rank=)` where `rank` is not the head size. Exact.

    As `unmerge`; b_V is 0.
    """
    rank = layer.spec.head_size if rank is None else rank
    return _lossless(*truncate_vo(layer, rank=rank), f'B[n] has a rank above {rank}', 'truncate_vo')


def truncate_vo(layer: Attention, *, rank: int) -> tuple[Attention, float]:
    """The best `vo` or `low_rank(rank=)` of that rank, and its error."""
    value, letter = _of_rank('vo', rank, layer)
    target = empty_layer(layer, value=value)
    B_NDE, b_E = extract_factors(layer).output_matrices()
    left_DNR, right_ENR, lost = balanced_factors(B_NDE, rank)
    arrays = {f'w_v_DK{letter}': left_DNR, f'w_o_N{letter}D': np.moveaxis(right_ENR, 0, -1)}
    arrays |= {f'b_v_K{letter}': np.zeros(left_DNR.shape[1:]), 'b_o_D': b_E}
    return fill(target, layer, value=arrays), lost


def gauge_fix_vo(layers: Sequence[Attention], *, pivot: bool = True) -> list[Attention]:
    """`vo` -> `gauge_fixed`: W_V M and M^-1 W_O, which holds an identity block. Exact.

    As `gauge_fix_qk`, with the columns of each head of W_O in place of the rows of W_K.

    Raises:
      ConversionError: a Value other than vo; head_size = d_model; or a block too close to singular.
    """
    spec = layers[0].spec
    D, N, H = spec.d_model, spec.num_heads, spec.head_size
    require(spec.value == 'vo', f'it starts from the value vo, not {spec.value}')
    require(
        H < D,
        f'head_size={H} at d_model={D} would leave no parameter of W_O free; convert to no_o by '
        'hand',
    )
    factors = [extract_factors(layer).with_kv_heads(N) for layer in layers]
    w_o_LDNH = np.stack([np.moveaxis(layer.w_o_NHD, 2, 0) for layer in factors])
    value, columns = 'gauge_fixed', fixed_slices(spec, N)
    if pivot:
        columns = _best_rows(w_o_LDNH)
        value = f'gauge_fixed(columns={columns})'
    orders_ND = np.stack([np.append(c, np.setdiff1d(np.arange(D), c)) for c in columns])
    fixed = []
    for layer, old, w_o_DNH in zip(layers, factors, w_o_LDNH, strict=True):
        M_NHH, free_CNH = _in_gauge(w_o_DNH, orders_ND, layer, 'W_O of head')
        arrays = {
            'w_v_DNH': np.einsum('DNH,NGH->DNG', old.w_v_DKH, M_NHH),
            'w_o_NHC': np.moveaxis(free_CNH, 0, 2),
            'b_v_NH': np.einsum('NH,NGH->NG', old.b_v_KH, M_NHH),
            'b_o_D': old.b_o_D,
        }
        fixed.append(fill(empty_layer(layer, value=value), layer, value=arrays))
    return fixed


def _factors_of_qk(layer: Attention) -> Factors:
    factors, score = qk_factors(layer), layer.spec.score
    require(score == 'qk', f'it starts from the score qk, not {score}')
    return factors


def _of_rank(full: str, rank: int, layer: Attention) -> tuple[str, str]:
    """The variant of that rank of a circuit with its own key heads, and its letter for the rank."""
    N, K = layer.spec.num_heads, layer.spec.num_kv_heads
    require(
        N == K,
        f'every query head gets its own key head, and num_kv_heads={K} are shared among {N}; '
        'apply gqa_to_mha first',
    )
    return (full, 'H') if rank == layer.spec.head_size else (f'low_rank(rank={rank})', 'R')


def _lossless(layer: Attention, lost: float, reason: str, lossy: str) -> Attention:
    """The layer, where cutting its matrices lost rounding error only: 256 ulp of the parameters."""
    require(
        lost <= 256 * float(jnp.finfo(dtype_of(layer)).eps),
        f'{reason}: cutting it there loses {lost:.2e} of its norm; use a higher rank, or {lossy}, '
        'which reports the error',
    )
    return layer


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
    w_DNH: np.ndarray, orders_ND: np.ndarray, layer: Attention, matrix: str
) -> tuple[np.ndarray, np.ndarray]:
    """M_NHH, the H first rows of each W[n] in an order, and the other rows of W[n] M[n]^-1, CNH."""
    H, dtype, blocks, free = w_DNH.shape[2], dtype_of(layer), [], []
    limit = float(jnp.finfo(dtype).eps) ** -0.5
    for n, order_D in enumerate(orders_ND):
        q_DH = np.linalg.qr(w_DNH[:, n])[0][order_D]
        smallest = np.linalg.svd(q_DH[:H], compute_uv=False)[-1]
        require(
            bool(smallest * limit > 1),
            f'the block of {matrix} {n} that becomes the identity is too close to singular: it '
            f'would multiply rounding errors by {1 / max(smallest, 1e-300):.1e}, and the limit for '
            f'{dtype} is {limit:.1e}; use pivot=True',
        )
        blocks.append(w_DNH[order_D[:H], n])
        free.append(q_DH[H:] @ np.linalg.inv(q_DH[:H]))
    return np.stack(blocks), np.stack(free, axis=1)
