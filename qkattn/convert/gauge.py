"""Gauge fixing: the H^2 redundant parameters of each head removed from either circuit.

W_Q M^T and W_K M^-1 have the same product for every invertible M, and so have W_V M and M^-1 W_O. M
is a block of H rows of W_K, or of H columns of W_O, which becomes the identity and is not stored.
With W_K = Q R and orthonormal Q, W_K M^-1 = Q Q_block^-1: no condition of W_K itself matters. As
W_Q M^T holds columns of A[n], rounding both factors by eps changes A[n] by at most about
eps |W_K M^-1| of its norm, where |W_K M^-1| = 1 / (smallest singular value of Q_block).
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from qkattn.attention.attention import Attention
from qkattn.attention.scores.rank import fixed_first, fixed_slices
from qkattn.convert.factors import Factors, extract_factors
from qkattn.convert.preconditions import qk_factors, require_score
from qkattn.convert.target import dtype_of, empty_layer, fill, respecified
from qkattn.errors import ConversionError

Picks = tuple[tuple[int, ...], ...]


def gauge_fix_qk(layer: Attention, *, pivot: bool = True, rows: Picks | None = None) -> Attention:
    """`qk` -> `gauge_fixed`: W_Q M^T and W_K M^-1, which holds an identity block. Exact.

    b_K adds the same to all logits of a query and becomes 0.

    Args:
      pivot: True picks the rows of each key head that keep W_K M^-1 small; they are an option of
        the target. False takes the rows that `gauge_fixed` fixes by default.
      rows: the rows of each key head; None is those of `pivot`.

    Raises:
      ConversionError: as for `merge`; a Score other than qk; or a block so close to singular that
        half of the digits of the parameters' dtype would be lost.
    """
    rows = shared_rows([layer], pivot=pivot, rows=rows)['rows']
    factors, spec = _with_qk(layer), layer.spec
    D, N, H, K = spec.d_model, spec.num_heads, spec.head_size, factors.w_k_DKH.shape[1]
    w_q, b_q, free = factors.w_q_DNH.copy(), factors.b_q_NH.copy(), []
    for k, order_D in enumerate(fixed_first(rows or fixed_slices(spec, K), D)):
        w_DH = factors.w_k_DKH[:, k]
        free.append(_in_gauge(w_DH, order_D, layer, f'W_K of key head {k}'))
        heads, M_HH = slice(k * N // K, (k + 1) * N // K), w_DH[order_D[:H]]
        w_q[:, heads], b_q[heads] = w_q[:, heads] @ M_HH.T, b_q[heads] @ M_HH.T
    score = 'gauge_fixed' if rows is None else f'gauge_fixed(rows={rows})'
    arrays = {'w_q_DNH': w_q, 'b_q_NH': b_q, 'b_k_KH': np.zeros((K, H))}
    if H < D:
        arrays['w_k_free_CKH'] = np.stack(free, axis=1)
    return fill(empty_layer(respecified(spec, score=score), layer), layer, score=arrays)


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
    factors, spec = _with_vo(layer), layer.spec
    w_v, b_v, free = factors.w_v_DKH, factors.b_v_KH, []
    for n, fixed in enumerate(columns or fixed_slices(spec, spec.num_heads)):
        w_DH = factors.w_o_NHD[n].T
        order_D = np.append(fixed, np.setdiff1d(np.arange(len(w_DH)), fixed))
        free.append(_in_gauge(w_DH, order_D, layer, f'W_O of head {n}').T)
        M_HH = w_DH[list(fixed)].T
        w_v[:, n], b_v[n] = w_v[:, n] @ M_HH, b_v[n] @ M_HH
    value = 'gauge_fixed' if columns is None else f'gauge_fixed(columns={columns})'
    arrays = {'w_v_DNH': w_v, 'w_o_NHC': np.stack(free), 'b_v_NH': b_v, 'b_o_D': factors.b_o_D}
    return fill(empty_layer(respecified(spec, value=value), layer), layer, value=arrays)


def shared_rows(
    layers: Sequence[Attention], *, pivot: bool = True, rows: Picks | None = None
) -> dict[str, Any]:
    """Options of gauge_fix_qk with which all layers become one variant."""
    if pivot and rows is None:
        w_LDKH = np.stack([_with_qk(layer).w_k_DKH for layer in layers])
        rows = tuple(_best_rows(w_LDKH[:, :, k]) for k in range(w_LDKH.shape[2]))
    return {'rows': rows, 'pivot': pivot}


def shared_columns(
    layers: Sequence[Attention], *, pivot: bool = True, columns: Picks | None = None
) -> dict[str, Any]:
    """Options of gauge_fix_vo with which all layers become one variant."""
    if pivot and columns is None:
        w_LNHD = np.stack([_with_vo(layer).w_o_NHD for layer in layers])
        w_LDNH = np.moveaxis(w_LNHD, 3, 1)
        columns = tuple(_best_rows(w_LDNH[:, :, n]) for n in range(w_LDNH.shape[2]))
    return {'columns': columns, 'pivot': pivot}


def _with_qk(layer: Attention) -> Factors:
    factors = qk_factors(layer, 'gauge_fix_qk')
    require_score(layer, 'qk', 'gauge_fix_qk')
    return factors


def _with_vo(layer: Attention) -> Factors:
    spec = layer.spec
    if spec.value != 'vo':
        raise ConversionError(f'gauge_fix_vo starts from the value vo, not {spec.value}')
    if spec.head_size >= spec.d_model:
        raise ConversionError(
            f'gauge_fix_vo at head_size={spec.head_size} and d_model={spec.d_model} would leave no '
            'parameter of W_O free; convert to no_o by hand'
        )
    return extract_factors(layer).with_kv_heads(spec.num_heads)


def _best_rows(w_LDH: np.ndarray) -> tuple[int, ...]:
    """H rows at which all L matrices, made orthonormal, have blocks far from singular.

    Greedy: the next row has the largest product, over the matrices, of its distances from the span
    of the rows before. For L = 1 this is QR with column pivoting (Businger & Golub 1965).
    """
    rest_LDH = np.linalg.qr(w_LDH)[0]
    rows: list[int] = []
    for _ in range(w_LDH.shape[2]):
        length_LD = np.linalg.norm(rest_LDH, axis=-1)
        length_LD[:, rows] = 0
        with np.errstate(divide='ignore'):
            row = int(np.log(length_LD).sum(0).argmax())
        rows.append(row)
        unit_LH = rest_LDH[:, row] / length_LD[:, row, None]
        rest_LDH -= np.einsum('LDH,LH,LG->LDG', rest_LDH, unit_LH, unit_LH, optimize=True)
    return tuple(sorted(rows))


def _in_gauge(w_DH: np.ndarray, order_D: np.ndarray, layer: Attention, what: str) -> np.ndarray:
    """The free rows of W M^-1, in that order, where M holds the first H rows of the order."""
    H, dtype = w_DH.shape[1], dtype_of(layer)
    ordered_DH = np.linalg.qr(w_DH)[0][order_D]
    smallest = np.linalg.svd(ordered_DH[:H], compute_uv=False)[-1]
    limit = float(jnp.finfo(dtype).eps) ** -0.5
    if not smallest * limit > 1:
        raise ConversionError(
            f'the block of {what} that becomes the identity is too close to singular: it would '
            f'multiply rounding errors by {1 / max(smallest, 1e-300):.1e}, and the limit for '
            f'{dtype} is {limit:.1e}; use pivot=True'
        )
    return ordered_DH[H:] @ np.linalg.inv(ordered_DH[:H])
