"""Conversions of the OV circuit, which nothing between W_V and W_O can disturb: any positions,
QK-norm and masks are left as they are. The Score is kept.
"""

import dataclasses

import numpy as np
import scipy.linalg

from qkattn.attention.attention import Attention
from qkattn.attention.values.factored import fixed_columns
from qkattn.convert.parts import (
    blank,
    dtype_of,
    factors,
    fill,
    keep,
    repeated,
    require_one_kv_head_each,
    respecified,
    tolerance,
)
from qkattn.convert.qk_circuit import Truncation, balanced, inverted
from qkattn.errors import ConversionError


def merge_vo(layer: Attention) -> Attention:
    """Any Value -> `merged_vo`: W_OV[n] = W_V[n] W_O[n], and b_V W_O joins b_O. Exact."""
    B_NDE, b_E = factors(layer).output_matrices()
    target = blank(respecified(layer.spec, value='merged_vo'), layer)
    fill(target.value, dtype_of(layer), w_ov_NDE=B_NDE, b_o_D=b_E)
    keep(target.score, layer.score)
    return target


def unmerge_vo(layer: Attention, rank: int | None = None) -> Attention:
    """Any Value -> `vo`, or `low_rank(rank=)` where `rank` is not the head size. Exact.

    Balanced factors from the singular values of B[n]; b_V is 0 in the result.

    Raises:
      ConversionError: shared key heads, or B[n] of a head has a higher rank (use `truncate_vo`).
    """
    target, lost = truncate_vo(layer, layer.spec.head_size if rank is None else rank)
    if lost.relative > tolerance(layer):
        raise ConversionError(
            f'B[n] has a rank above {lost.rank}: cutting it there loses {lost.relative:.2e} of its '
            'norm; ask for a higher rank, or for the error with truncate_vo'
        )
    return target


def truncate_vo(layer: Attention, rank: int) -> tuple[Attention, Truncation]:
    """The best `vo` or `low_rank(rank=)` of that rank, and what it loses.

    Raises:
      ConversionError: shared key heads.
    """
    require_one_kv_head_each(layer, 'unmerge_vo')
    spec = layer.spec
    value = 'vo' if rank == spec.head_size else f'low_rank(rank={rank})'
    target = blank(respecified(spec, value=value), layer)
    B_NDE, b_E = factors(layer).output_matrices()
    left_DNR, right_ENR, lost = balanced(B_NDE, rank)
    y_SD = np.random.default_rng(0).normal(size=(256, spec.d_model))
    want_NSE = np.einsum('SD,NDE->NSE', y_SD, B_NDE)
    got_NSE = np.einsum('SD,DNR,ENR->NSE', y_SD, left_DNR, right_ENR, optimize=True)
    measured = float(np.linalg.norm(got_NSE - want_NSE) / np.linalg.norm(want_NSE))
    letter = 'H' if value == 'vo' else 'R'
    fill(
        target.value,
        dtype_of(layer),
        **{
            f'w_v_DK{letter}': left_DNR,
            f'w_o_N{letter}D': np.moveaxis(right_ENR, 0, -1),
            f'b_v_K{letter}': np.zeros(left_DNR.shape[1:]),
            'b_o_D': b_E,
        },
    )
    keep(target.score, layer.score)
    return target, dataclasses.replace(lost, measured=measured)


def gauge_fix_vo(layer: Attention, *, pivot: bool = True) -> Attention:
    """`vo` -> `gauge_fixed`: W_V M and M^-1 W_O, where M^-1 W_O holds an identity block. Exact.

    M is the block of W_O that becomes the identity, inverted in float64. With `pivot` a QR
    factorization with column pivoting picks the columns of each head, which keeps M^-1 small and
    the numbers fit for low precision; the picks are part of the target's name, so layers with
    different picks cannot be stacked. Without, they are those that `gauge_fixed` fixes by itself.

    Raises:
      ConversionError: a Value other than vo, head_size = d_model, or M is singular to working
        precision.
    """
    spec = layer.spec
    if spec.value != 'vo':
        raise ConversionError(f'gauge_fix_vo starts from the value vo, not {spec.value}')
    if spec.head_size >= spec.d_model:
        raise ConversionError(
            f'gauge_fix_vo at head_size={spec.head_size} and d_model={spec.d_model} would leave no '
            'weight of W_O free; convert to no_o by hand'
        )
    parts = factors(layer)
    N, H = spec.num_heads, spec.head_size
    w_v, w_o = repeated(parts.w_v_DKH, N).copy(), parts.w_o_NHD
    b_v = repeated(parts.b_v_KH[None], N)[0].copy()
    columns = fixed_columns(spec)
    if pivot:
        picks = [scipy.linalg.qr(w, mode='r', pivoting=True)[1][:H] for w in w_o]
        columns = tuple(tuple(sorted(int(c) for c in pick)) for pick in picks)
    free = []
    for n in range(N):
        M_HH = w_o[n][:, columns[n]]
        rest_HC = np.delete(w_o[n], columns[n], axis=1)
        free.append(inverted(M_HH, f'the block of W_O of head {n}') @ rest_HC)
        w_v[:, n], b_v[n] = w_v[:, n] @ M_HH, b_v[n] @ M_HH
    value = f'gauge_fixed(columns={columns})' if pivot else 'gauge_fixed'
    target = blank(respecified(spec, value=value), layer)
    fill(
        target.value,
        dtype_of(layer),
        w_v_DNH=w_v,
        w_o_NHC=np.stack(free),
        b_v_NH=b_v,
        b_o_D=parts.b_o_D,
    )
    keep(target.score, layer.score)
    return target
