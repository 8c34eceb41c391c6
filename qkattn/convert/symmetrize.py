"""Conversions of a symmetric QK circuit into one matrix for queries and keys."""

import numpy as np

from qkattn.attention.attention import Attention
from qkattn.convert.parts import (
    Factors,
    blank,
    dtype_of,
    fill,
    keep,
    own_logits,
    repeated,
    respecified,
    tolerance,
)
from qkattn.errors import ConversionError


def to_symmetric(layer: Attention) -> Attention:
    """A Score with symmetric A[n] of rank <= H -> `symmetric`: W = U |L|^1/2, signs of L. Exact.

    Raises:
      ConversionError: as for `merge`; A[n] is not symmetric, or of higher rank.
    """
    parts = own_logits(layer, 'to_symmetric')
    target = blank(respecified(layer.spec, score='symmetric'), layer)
    w_ENH, sign_NH = _eigenforms(layer, parts, target.score.scale)
    fill(
        target.score,
        dtype_of(layer),
        w_q_DNH=w_ENH[: layer.spec.d_model],
        b_q_NH=_last_row(w_ENH, layer),
        g_sign_NH=sign_NH,
    )
    keep(target.value, layer.value)
    return target


def to_shared(layer: Attention) -> Attention:
    """A Score with symmetric positive semi-definite A[n] of rank <= H -> `shared_qk`. Exact.

    Raises:
      ConversionError: as for `to_symmetric`; or an eigenvalue is negative.
    """
    parts = own_logits(layer, 'to_shared')
    target = blank(respecified(layer.spec, score='shared_qk'), layer)
    w_ENH, sign_NH = _eigenforms(layer, parts, target.score.scale)
    if (sign_NH < 0).any():
        raise ConversionError(
            'A[n] has negative eigenvalues, and W W^T has none; use to_symmetric, which keeps them'
        )
    fill(
        target.score,
        dtype_of(layer),
        w_q_DNH=w_ENH[: layer.spec.d_model],
        b_q_NH=_last_row(w_ENH, layer),
    )
    keep(target.value, layer.value)
    return target


def _eigenforms(layer: Attention, parts: Factors, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """w_ENH and sign_NH with A[n] = w[n] diag(sign[n]) w[n]^T; with biases on (x, 1) and (y, 1)."""
    N, H = layer.spec.num_heads, layer.spec.head_size
    q_ENH, k_ENH = parts.w_q_DNH, repeated(parts.w_k_DKH, N)
    if layer.spec.biases:
        q_ENH = np.concatenate([q_ENH, parts.b_q_NH[None]])
        k_ENH = np.concatenate([k_ENH, repeated(parts.b_k_KH[None], N)])
    A_NEF = np.einsum('ENH,FNH->NEF', q_ENH, k_ENH) * (
        parts.scale / (scale * layer.spec.score_scale)
    )
    A_NFE = np.swapaxes(A_NEF, 1, 2)
    off = np.linalg.norm(A_NEF - A_NFE) / np.linalg.norm(A_NEF)
    if off > tolerance(layer):
        raise ConversionError(
            f'A[n] is not symmetric: |A - A^T| is {off:.2e} of |A|; only symmetric forms can be '
            'written W L W^T'
        )
    values_NE, vectors_NEF = np.linalg.eigh((A_NEF + A_NFE) / 2)
    order_NE = np.argsort(-np.abs(values_NE), axis=-1)
    values_NE = np.take_along_axis(values_NE, order_NE, -1)
    vectors_NEF = np.take_along_axis(vectors_NEF, order_NE[:, None], -1)
    cut = np.abs(values_NE[:, H:]).max(initial=0) / np.abs(values_NE).max()
    if cut > tolerance(layer):
        raise ConversionError(f'A[n] has a rank above head_size={H}: {cut:.2e} of it would be lost')
    kept_NH = values_NE[:, :H]
    # An eigenvalue that is rounding has no sign.
    sign_NH = np.where(kept_NH < -tolerance(layer) * np.abs(values_NE).max(), -1.0, 1.0)
    return np.moveaxis(vectors_NEF[..., :H] * np.sqrt(np.abs(kept_NH))[:, None], 0, 1), sign_NH


def _last_row(w_ENH: np.ndarray, layer: Attention) -> np.ndarray:
    return w_ENH[-1] if layer.spec.biases else np.zeros(w_ENH.shape[1:])
