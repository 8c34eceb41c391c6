"""Conversions to the variants of `gauge_fixed.py`: examples.gauge_fixing:GAUGE_FIX_QK.

Gauge fixing removes the H^2 redundant parameters of each head. W_Q M^T and W_K M^-1 have the same
product for every invertible M, and so do W_V M and M^-1 W_O. Here M is a block of H rows of W_K, or
of H columns of W_O. The block becomes the identity and is not stored.

Let W_K = Q R with orthonormal Q, and let Q_block be the block of Q. Then W_K M^-1 = Q Q_block^-1,
and its norm is 1 / (smallest singular value of Q_block). Rounding both factors by eps changes A[n]
by at most about eps |W_K M^-1| of its norm.
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

    The rows of the block are the same in all layers, because they are an option of the variant.
    They are chosen to keep W_K M^-1 small in every layer. b_K becomes 0, because softmax ignores
    it.

    Raises ConversionError as `qk_factors` does, for a Score other than `qk`, or if a block is so
    close to singular that half of the digits of the dtype would be lost.
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

    It works as `gauge_fix_qk` does, with columns of W_O in place of rows of W_K.
    """
    spec = layers[0].spec
    require(spec.value == 'vo', f'it starts from the value vo, not {spec.value}')
    factors = []
    for layer in layers:
        of_layer = extract_factors(layer, of_qk=False)
        factors.append(of_layer.with_kv_heads(spec.num_heads))
    # The columns of W_O are the rows of its transpose.
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
    """Chooses H rows for each head, so that the blocks of all L matrices are far from singular.

    The matrices are made orthonormal first. The choice is greedy: each next row has the largest
    product, over the L matrices, of its distances from the span of the rows chosen so far. For
    L = 1 this is QR with column pivoting (Businger & Golub 1965).
    """
    orthonormal_NLDH, _ = np.linalg.qr(np.moveaxis(w_LDNH, 2, 0))
    rows_of_heads = []
    for remainder_LDH in orthonormal_NLDH:
        # `remainder` is the part of each row that is orthogonal to the rows chosen so far.
        rows: list[int] = []
        for _ in range(remainder_LDH.shape[2]):
            distance_LD = np.linalg.norm(remainder_LDH, axis=-1)
            distance_LD[:, rows] = 0
            with np.errstate(divide='ignore'):
                log_product_D = np.log(distance_LD).sum(0)
            row = int(log_product_D.argmax())
            rows.append(row)

            # Removes the direction of the chosen row from all rows.
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
    """Rewrites two factors so that a block of one of them becomes the identity.

    Args:
        w_DKH: The factor W that gets the identity. The block M[k] of head k consists of the first H
            rows in the order orders_KD[k].
        other_DNH: The other factor, which becomes other M^T.
        b_NH: The bias of the other factor, which becomes b M^T.
        orders_KD: An order of the rows of W for each head.
        dtype: The dtype of the parameters. A block close to singular multiplies its rounding
            errors.
        matrix: The name of W, for errors.

    Returns:
        Other M^T, b M^T, and the C = D - H rows of W M^-1 outside of the block, [C, K, H].

    Raises:
        ConversionError: If a block is too close to singular.
    """
    H = w_DKH.shape[2]
    # A factor of eps^-1/2 on rounding errors loses half of the digits.
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

    # The query heads that share a key head have the same M.
    num_query_heads = other_DNH.shape[1]
    M_NHH = np.repeat(np.stack(blocks), num_query_heads // len(blocks), axis=0)
    return (
        np.einsum('DNH,NGH->DNG', other_DNH, M_NHH),
        np.einsum('NH,NGH->NG', b_NH, M_NHH),
        np.stack(free, axis=1),
    )


GAUGE_FIX_QK = Conversion(gauge_fix_qk, 'QK', of_stack=True)
GAUGE_FIX_VO = Conversion(gauge_fix_vo, 'OV', of_stack=True)
