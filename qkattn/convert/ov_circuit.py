"""Conversions of the OV circuit: W_V and W_O merged or factored anew.

Nothing acts between W_V and W_O, so any positions, QK-norm and masks stay. The Score is kept.
"""

import numpy as np

from qkattn.attention.attention import Attention
from qkattn.convert.factors import extract_factors
from qkattn.convert.preconditions import require_multi_head
from qkattn.convert.target import empty_layer, fill, respecified, tolerance
from qkattn.convert.truncation import Truncation, balanced_factors, relative_error
from qkattn.errors import ConversionError


def merge_vo(layer: Attention) -> Attention:
    """Any Value -> `merged_vo`: W_OV[n] = W_V[n] W_O[n], and b_V W_O is added to b_O. Exact."""
    B_NDE, b_E = extract_factors(layer).output_matrices()
    target = empty_layer(respecified(layer.spec, value='merged_vo'), layer)
    return fill(target, layer, value={'w_ov_NDE': B_NDE, 'b_o_D': b_E})


def unmerge_vo(layer: Attention, *, rank: int | None = None) -> Attention:
    """Any Value -> `vo`, or `low_rank(rank=)` where `rank` is not the head size. Exact.

    The factors are balanced, W_V = U S^1/2 and W_O = S^1/2 V^T with B[n] = U S V^T; b_V is 0.

    Raises:
      ConversionError: shared key heads, or B[n] of a head has a higher rank (use `truncate_vo`).
    """
    target, lost = truncate_vo(layer, rank=layer.spec.head_size if rank is None else rank)
    if lost.relative > tolerance(layer):
        raise ConversionError(
            f'B[n] has a rank above {lost.rank}: cutting it there loses {lost.relative:.2e} of its '
            'norm; use a higher rank, or truncate_vo, which reports the error'
        )
    return target


def truncate_vo(layer: Attention, *, rank: int) -> tuple[Attention, Truncation]:
    """The best `vo` or `low_rank(rank=)` of that rank, and its error.

    Raises:
      ConversionError: shared key heads.
    """
    require_multi_head(layer, 'unmerge_vo')
    spec = layer.spec
    value = 'vo' if rank == spec.head_size else f'low_rank(rank={rank})'
    target = empty_layer(respecified(spec, value=value), layer)
    B_NDE, b_E = extract_factors(layer).output_matrices()
    left_DNR, right_ENR, frobenius_N = balanced_factors(B_NDE, rank)
    y_SD = np.random.default_rng(0).normal(size=(256, spec.d_model))
    exact_NSE = np.einsum('SD,NDE->NSE', y_SD, B_NDE)
    truncated_NSE = np.einsum('SD,DNR,ENR->NSE', y_SD, left_DNR, right_ENR, optimize=True)
    lost = Truncation(
        rank=rank,
        frobenius_N=frobenius_N,
        relative=float(np.linalg.norm(frobenius_N) / np.linalg.norm(B_NDE)),
        measured=relative_error(truncated_NSE, exact_NSE),
    )
    letter = 'H' if value == 'vo' else 'R'
    arrays = {
        f'w_v_DK{letter}': left_DNR,
        f'w_o_N{letter}D': np.moveaxis(right_ENR, 0, -1),
        f'b_v_K{letter}': np.zeros(left_DNR.shape[1:]),
        'b_o_D': b_E,
    }
    return fill(target, layer, value=arrays), lost
