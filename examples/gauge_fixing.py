"""Conversions to the variants of `gauge_fixed.py`: examples.gauge_fixing:GAUGE_FIX_QK.

Gauge fixing removes the H^2 redundant parameters of each head: W_Q M^T and W_K M^-1 have the same
product for every invertible M, as do W_V M and M^-1 W_O. M is a block of H rows of W_K, or of H
columns of W_O, which becomes the identity and is not stored. With W_K = Q R, W_K M^-1 is
Q Q_block^-1; rounding both factors by eps changes A[n] by at most about eps |W_K M^-1| of its norm,
and |W_K M^-1| = 1 / (smallest singular value of Q_block).
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from examples.gauge_fixed import fixed_columns_first, fixed_first
from qkattn.attention import Attention
from qkattn.convert.conversions import Conversion
from qkattn.convert.factors import (
    dtype_of,
    empty_layer,
    extract_factors,
    fill,
    qk_factors,
    require,
)


def gauge_fix_qk(layers: Sequence[Attention]) -> list[Attention]:
    """`qk` -> `GaugeFixedQK`: W_Q M^T and W_K M^-1, which holds an identity block. Exact.

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
        target = empty_layer(layer, score=f'examples.gauge_fixed:GaugeFixedQK(rows={rows})')
        converted.append(fill(target, layer, score=score))
    return converted


def gauge_fix_vo(layers: Sequence[Attention]) -> list[Attention]:
    """`vo` -> `GaugeFixedVO`: W_V M and M^-1 W_O, which holds an identity block. Exact.

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
        target = empty_layer(layer, value=f'examples.gauge_fixed:GaugeFixedVO(columns={columns})')
        converted.append(fill(target, layer, value=value))
    return converted


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


GAUGE_FIX_QK = Conversion(gauge_fix_qk, 'QK', of_stack=True)
GAUGE_FIX_VO = Conversion(gauge_fix_vo, 'OV', of_stack=True)
