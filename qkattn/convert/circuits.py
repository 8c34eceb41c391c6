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
from typing import Any

import jax.numpy as jnp
import numpy as np

from qkattn.attention.attention import Attention
from qkattn.attention.scores.qk import fixed_first, fixed_slices
from qkattn.convert.factors import (
    Factors,
    Truncation,
    balanced_factors,
    extract_factors,
    relative_error,
    repeat_heads,
)
from qkattn.convert.target import (
    dtype_of,
    empty_layer,
    fill,
    logit_scale,
    qk_factors,
    require,
    require_multi_head,
    tolerance,
)

# Rows or columns of each head.
Picks = tuple[tuple[int, ...], ...]


def merge(layer: Attention) -> Attention:
    """Any bilinear Score -> `merged`: W_QK[n] = W_Q[n] W_K[n]^T. Exact.

    b_Q becomes W_K b_Q, one vector per head. b_K adds the same to all logits of a query and is
    dropped.

    Raises:
      ConversionError: as `qk_factors`.
    """
    factors = qk_factors(layer)
    target = empty_layer(layer, score='merged')
    A_NED = factors.logit_matrices() / logit_scale(target)
    arrays = {'w_qk_DNE': np.moveaxis(A_NED[:, :-1], 0, 1), 'b_q_NE': A_NED[:, -1]}
    return fill(target, layer, score=arrays)


def unmerge(layer: Attention, *, rank: int | None = None) -> Attention:
    """Any bilinear Score -> `qk`, or `low_rank(rank=)` where `rank` is not the head size. Exact.

    The factors are balanced, W_Q = U S^1/2 and W_K = V S^1/2 with A[n] = U S V^T: of all
    factorizations the one with the smallest sum of squares.

    Raises:
      ConversionError: as `qk_factors`; or A[n] of a head has a higher rank (use `truncate`).
    """
    target, lost = truncate(layer, rank=layer.spec.head_size if rank is None else rank)
    return _lossless(target, lost, 'A[n]', 'truncate')


def truncate(layer: Attention, *, rank: int) -> tuple[Attention, Truncation]:
    """The best `qk` or `low_rank(rank=)` of that rank, and its error.

    Raises:
      ConversionError: as `qk_factors`, or shared key heads.
    """
    factors, spec = qk_factors(layer), layer.spec
    require_multi_head(layer)
    score = 'qk' if rank == spec.head_size else f'low_rank(rank={rank})'
    target = empty_layer(layer, score=score)
    D, N, E, scale = spec.d_model, spec.num_heads, spec.d_model + spec.biases, logit_scale(target)
    rng = np.random.default_rng(0)
    x_TE, y_SD = rng.normal(size=(128, E)), rng.normal(size=(128, D))
    x_TE[:, D:] = 1
    q_ENR, k_DNR, lost = _truncated(factors.logit_matrices()[:, :E], rank, x_TE, y_SD)
    letter = 'H' if score == 'qk' else 'R'
    arrays = {
        f'w_q_DN{letter}': q_ENR[:D] / scale**0.5,
        f'w_k_DK{letter}': k_DNR / scale**0.5,
        f'b_q_N{letter}': q_ENR[D] / scale**0.5 if spec.biases else np.zeros((N, rank)),
        f'b_k_K{letter}': np.zeros((N, rank)),
    }
    return fill(target, layer, score=arrays), lost


def to_collaborative(layer: Attention) -> Attention:
    """`qk` -> `collaborative`, R = N H: W_Q side by side, mixing = indicators. Exact.

    Raises:
      ConversionError: as `qk_factors`; or a Score other than qk.
    """
    factors = _factors_of_qk(layer)
    D, N, H = layer.spec.d_model, layer.spec.num_heads, layer.spec.head_size
    target = empty_layer(layer, score='collaborative')
    ratio = factors.scale / logit_scale(target)
    arrays = {
        'w_q_DR': ratio * factors.w_q_DNH.reshape(D, -1),
        'w_k_DR': repeat_heads(factors.w_k_DKH, N).reshape(D, -1),
        'w_mixing_NR': np.repeat(np.eye(N), H, axis=1),
        'b_q_R': ratio * factors.b_q_NH.reshape(-1),
        'b_k_R': repeat_heads(factors.b_k_KH, N).reshape(-1),
    }
    return fill(target, layer, score=arrays)


def to_symmetric(layer: Attention) -> Attention:
    """Symmetric A[n] = U L U^T of rank <= H -> `symmetric`: W = U |L|^1/2, signs of L. Exact.

    Raises:
      ConversionError: as `qk_factors`; A[n] is not symmetric, or of higher rank.
    """
    w_ENH, sign_NH = _eigenfactors(layer)
    return _with_one_matrix(layer, 'symmetric', w_ENH, g_sign_NH=sign_NH)


def to_shared(layer: Attention) -> Attention:
    """Symmetric positive semi-definite A[n] of rank <= H -> `shared_qk`. Exact.

    Raises:
      ConversionError: as `to_symmetric`; or an eigenvalue is negative.
    """
    w_ENH, sign_NH = _eigenfactors(layer)
    require(
        bool((sign_NH > 0).all()),
        'A[n] has negative eigenvalues, and W W^T has none; use to_symmetric, which keeps them',
    )
    return _with_one_matrix(layer, 'shared_qk', w_ENH)


def gauge_fix_qk(layer: Attention, *, pivot: bool = True, rows: Picks | None = None) -> Attention:
    """`qk` -> `gauge_fixed`: W_Q M^T and W_K M^-1, which holds an identity block. Exact.

    b_K adds the same to all logits of a query and becomes 0.

    Args:
      pivot: True picks the rows of each key head that keep W_K M^-1 small; they are an option of
        the target. False takes the rows that `gauge_fixed` fixes by default.
      rows: the rows of each key head; None is those of `pivot`.

    Raises:
      ConversionError: as `qk_factors`; a Score other than qk; or a block so close to singular that
        half of the digits of the parameters' dtype would be lost.
    """
    rows = shared_rows([layer], pivot=pivot, rows=rows)['rows']
    factors, spec = _factors_of_qk(layer), layer.spec
    D, N, H, K = spec.d_model, spec.num_heads, spec.head_size, factors.w_k_DKH.shape[1]
    w_q, b_q, free = factors.w_q_DNH, factors.b_q_NH, []
    for k, order_D in enumerate(fixed_first(rows or fixed_slices(spec, K), D)):
        w_DH = factors.w_k_DKH[:, k]
        free.append(_in_gauge(w_DH, order_D, layer, f'W_K of key head {k}'))
        heads, M_HH = slice(k * N // K, (k + 1) * N // K), w_DH[order_D[:H]]
        w_q[:, heads], b_q[heads] = w_q[:, heads] @ M_HH.T, b_q[heads] @ M_HH.T
    score = 'gauge_fixed' if rows is None else f'gauge_fixed(rows={rows})'
    arrays = {'w_q_DNH': w_q, 'b_q_NH': b_q, 'b_k_KH': np.zeros((K, H))}
    if H < D:
        arrays['w_k_free_CKH'] = np.stack(free, axis=1)
    return fill(empty_layer(layer, score=score), layer, score=arrays)


def shared_rows(
    layers: Sequence[Attention], *, pivot: bool = True, rows: Picks | None = None
) -> dict[str, Any]:
    """Options of gauge_fix_qk with which all layers become one variant."""
    if pivot and rows is None:
        rows = _best_rows(np.stack([_factors_of_qk(layer).w_k_DKH for layer in layers]))
    return {'rows': rows, 'pivot': pivot}


def merge_vo(layer: Attention) -> Attention:
    """Any Value -> `merged_vo`: W_OV[n] = W_V[n] W_O[n], and b_V W_O is added to b_O. Exact."""
    B_NDE, b_E = extract_factors(layer).output_matrices()
    target = empty_layer(layer, value='merged_vo')
    return fill(target, layer, value={'w_ov_NDE': B_NDE, 'b_o_D': b_E})


def unmerge_vo(layer: Attention, *, rank: int | None = None) -> Attention:
    """Any Value -> `vo`, or `low_rank(rank=)` where `rank` is not the head size. Exact.

    The factors are balanced, W_V = U S^1/2 and W_O = S^1/2 V^T with B[n] = U S V^T; b_V is 0.

    Raises:
      ConversionError: shared key heads, or B[n] of a head has a higher rank (use `truncate_vo`).
    """
    target, lost = truncate_vo(layer, rank=layer.spec.head_size if rank is None else rank)
    return _lossless(target, lost, 'B[n]', 'truncate_vo')


def truncate_vo(layer: Attention, *, rank: int) -> tuple[Attention, Truncation]:
    """The best `vo` or `low_rank(rank=)` of that rank, and its error.

    Raises:
      ConversionError: shared key heads.
    """
    require_multi_head(layer)
    D = layer.spec.d_model
    value = 'vo' if rank == layer.spec.head_size else f'low_rank(rank={rank})'
    target = empty_layer(layer, value=value)
    B_NDE, b_E = extract_factors(layer).output_matrices()
    y_SD = np.random.default_rng(0).normal(size=(256, D))
    left_DNR, right_ENR, lost = _truncated(B_NDE, rank, y_SD, np.eye(D))
    letter = 'H' if value == 'vo' else 'R'
    arrays = {
        f'w_v_DK{letter}': left_DNR,
        f'w_o_N{letter}D': np.moveaxis(right_ENR, 0, -1),
        f'b_v_K{letter}': np.zeros(left_DNR.shape[1:]),
        'b_o_D': b_E,
    }
    return fill(target, layer, value=arrays), lost


def gauge_fix_vo(
    layer: Attention, *, pivot: bool = True, columns: Picks | None = None
) -> Attention:
    """`vo` -> `gauge_fixed`: W_V M and M^-1 W_O, which holds an identity block. Exact.

    Args:
      pivot: True picks the columns of each head that keep M^-1 W_O small; they are an option of the
        target. False takes the columns that `gauge_fixed` fixes by default.
      columns: the columns of each head; None is those of `pivot`.

    Raises:
      ConversionError: a Value other than vo; head_size = d_model; or a block so close to singular
        that half of the digits of the parameters' dtype would be lost.
    """
    columns = shared_columns([layer], pivot=pivot, columns=columns)['columns']
    factors, spec = _factors_of_vo(layer), layer.spec
    w_v, b_v, free = factors.w_v_DKH, factors.b_v_KH, []
    for n, fixed in enumerate(columns or fixed_slices(spec, spec.num_heads)):
        w_DH = factors.w_o_NHD[n].T
        order_D = np.append(fixed, np.setdiff1d(np.arange(len(w_DH)), fixed))
        free.append(_in_gauge(w_DH, order_D, layer, f'W_O of head {n}').T)
        M_HH = w_DH[list(fixed)].T
        w_v[:, n], b_v[n] = w_v[:, n] @ M_HH, b_v[n] @ M_HH
    value = 'gauge_fixed' if columns is None else f'gauge_fixed(columns={columns})'
    arrays = {'w_v_DNH': w_v, 'w_o_NHC': np.stack(free), 'b_v_NH': b_v, 'b_o_D': factors.b_o_D}
    return fill(empty_layer(layer, value=value), layer, value=arrays)


def shared_columns(
    layers: Sequence[Attention], *, pivot: bool = True, columns: Picks | None = None
) -> dict[str, Any]:
    """Options of gauge_fix_vo with which all layers become one variant."""
    if pivot and columns is None:
        w_LNHD = np.stack([_factors_of_vo(layer).w_o_NHD for layer in layers])
        columns = _best_rows(np.moveaxis(w_LNHD, 3, 1))
    return {'columns': columns, 'pivot': pivot}


def _factors_of_qk(layer: Attention) -> Factors:
    factors, score = qk_factors(layer), layer.spec.score
    require(score == 'qk', f'it starts from the score qk, not {score}')
    return factors


def _factors_of_vo(layer: Attention) -> Factors:
    spec = layer.spec
    require(spec.value == 'vo', f'it starts from the value vo, not {spec.value}')
    require(
        spec.head_size < spec.d_model,
        f'head_size={spec.head_size} at d_model={spec.d_model} would leave no parameter of W_O '
        'free; convert to no_o by hand',
    )
    return extract_factors(layer).with_kv_heads(spec.num_heads)


def _truncated(
    A_NED: np.ndarray, rank: int, x_TE: np.ndarray, y_SD: np.ndarray
) -> tuple[np.ndarray, np.ndarray, Truncation]:
    """Balanced factors left_ENR and right_DNR, and their error, measured on x A[n] y^T."""
    left_ENR, right_DNR, frobenius_N = balanced_factors(A_NED, rank)
    exact_NTS = np.einsum('TE,NED,SD->NTS', x_TE, A_NED, y_SD, optimize=True)
    cut_NTS = np.einsum('TE,ENR,DNR,SD->NTS', x_TE, left_ENR, right_DNR, y_SD, optimize=True)
    relative = float(np.linalg.norm(frobenius_N) / np.linalg.norm(A_NED))
    lost = Truncation(rank, frobenius_N, relative, relative_error(cut_NTS, exact_NTS))
    return left_ENR, right_DNR, lost


def _lossless(layer: Attention, lost: Truncation, matrix: str, lossy: str) -> Attention:
    """The layer, where cutting its matrices lost rounding error only."""
    require(
        lost.relative <= tolerance(layer),
        f'{matrix} has a rank above {lost.rank}: cutting it there loses {lost.relative:.2e} of its '
        f'norm; use a higher rank, or {lossy}, which reports the error',
    )
    return layer


def _with_one_matrix(
    layer: Attention, score: str, w_ENH: np.ndarray, **arrays: np.ndarray
) -> Attention:
    target = empty_layer(layer, score=score)
    w_ENH, D = w_ENH / logit_scale(target) ** 0.5, layer.spec.d_model
    bias_NH = w_ENH[D] if layer.spec.biases else np.zeros(w_ENH.shape[1:])
    return fill(target, layer, score={'w_q_DNH': w_ENH[:D], 'b_q_NH': bias_NH, **arrays})


def _eigenfactors(layer: Attention) -> tuple[np.ndarray, np.ndarray]:
    """w_ENH and sign_NH, scale A[n] = w[n] diag(sign[n]) w[n]^T; biases are a last row of w."""
    factors, N, H = qk_factors(layer), layer.spec.num_heads, layer.spec.head_size
    q_ENH, k_ENH = factors.w_q_DNH, repeat_heads(factors.w_k_DKH, N)
    if layer.spec.biases:
        q_ENH = np.concatenate([q_ENH, factors.b_q_NH[None]])
        k_ENH = np.concatenate([k_ENH, repeat_heads(factors.b_k_KH, N)[None]])
    A_NEF = np.einsum('ENH,FNH->NEF', q_ENH, k_ENH) * factors.scale
    A_NFE = np.swapaxes(A_NEF, 1, 2)
    asymmetry = np.linalg.norm(A_NEF - A_NFE) / np.linalg.norm(A_NEF)
    require(
        bool(asymmetry <= tolerance(layer)),
        f'A[n] is not symmetric: |A - A^T| is {asymmetry:.2e} of |A|; only symmetric forms can be '
        'written W L W^T',
    )
    values_NE, vectors_NEF = np.linalg.eigh((A_NEF + A_NFE) / 2)
    order_NE = np.argsort(-np.abs(values_NE), axis=-1)
    values_NE = np.take_along_axis(values_NE, order_NE, -1)
    vectors_NEF = np.take_along_axis(vectors_NEF, order_NE[:, None], -1)
    largest = np.abs(values_NE).max()
    cut = np.abs(values_NE[:, H:]).max(initial=0) / largest
    require(
        bool(cut <= tolerance(layer)),
        f'A[n] has a rank above head_size={H}: {cut:.2e} of it would be lost',
    )
    kept_NH = values_NE[:, :H]
    # The sign of an eigenvalue that is rounding error means nothing.
    sign_NH = np.where(kept_NH < -tolerance(layer) * largest, -1.0, 1.0)
    return np.moveaxis(vectors_NEF[..., :H] * np.sqrt(np.abs(kept_NH))[:, None], 0, 1), sign_NH


def _best_rows(w_LDNH: np.ndarray) -> Picks:
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


def _in_gauge(w_DH: np.ndarray, order_D: np.ndarray, layer: Attention, matrix: str) -> np.ndarray:
    """The free rows of W M^-1, in that order, where M holds the first H rows of the order."""
    H, dtype = w_DH.shape[1], dtype_of(layer)
    ordered_DH = np.linalg.qr(w_DH)[0][order_D]
    smallest = np.linalg.svd(ordered_DH[:H], compute_uv=False)[-1]
    limit = float(jnp.finfo(dtype).eps) ** -0.5
    require(
        bool(smallest * limit > 1),
        f'the block of {matrix} that becomes the identity is too close to singular: it would '
        f'multiply rounding errors by {1 / max(smallest, 1e-300):.1e}, and the limit for {dtype} '
        f'is {limit:.1e}; use pivot=True',
    )
    return ordered_DH[H:] @ np.linalg.inv(ordered_DH[:H])
