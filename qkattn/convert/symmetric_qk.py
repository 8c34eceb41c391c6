"""Conversions of a symmetric A[n] into one matrix that gives both queries and keys."""

import numpy as np

from qkattn.attention.attention import Attention
from qkattn.convert.factors import Factors, repeat_heads
from qkattn.convert.preconditions import qk_factors
from qkattn.convert.target import empty_layer, fill, respecified, tolerance
from qkattn.errors import ConversionError


def to_symmetric(layer: Attention) -> Attention:
    """Symmetric A[n] = U L U^T of rank <= H -> `symmetric`: W = U |L|^1/2, signs of L. Exact.

    Raises:
      ConversionError: as for `merge`; A[n] is not symmetric, or of higher rank.
    """
    return _with_one_matrix(layer, 'symmetric', 'to_symmetric')


def to_shared(layer: Attention) -> Attention:
    """Symmetric positive semi-definite A[n] of rank <= H -> `shared_qk`. Exact.

    Raises:
      ConversionError: as for `to_symmetric`; or an eigenvalue is negative.
    """
    return _with_one_matrix(layer, 'shared_qk', 'to_shared')


def _with_one_matrix(layer: Attention, score: str, conversion: str) -> Attention:
    factors = qk_factors(layer, conversion)
    target = empty_layer(respecified(layer.spec, score=score), layer)
    w_ENH, sign_NH = _eigenfactors(layer, factors, target.score.scale)
    D, biases = layer.spec.d_model, layer.spec.biases
    arrays = {'w_q_DNH': w_ENH[:D], 'b_q_NH': w_ENH[-1] if biases else np.zeros(w_ENH.shape[1:])}
    if score == 'symmetric':
        arrays['g_sign_NH'] = sign_NH
    elif (sign_NH < 0).any():
        raise ConversionError(
            'A[n] has negative eigenvalues, and W W^T has none; use to_symmetric, which keeps them'
        )
    return fill(target, layer, score=arrays)


def _eigenfactors(
    layer: Attention, factors: Factors, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """w_ENH and sign_NH of A[n] = w[n] diag(sign[n]) w[n]^T; with biases, of (x, 1) and (y, 1)."""
    N, H = layer.spec.num_heads, layer.spec.head_size
    q_ENH, k_ENH = factors.w_q_DNH, repeat_heads(factors.w_k_DKH, N)
    if layer.spec.biases:
        q_ENH = np.concatenate([q_ENH, factors.b_q_NH[None]])
        k_ENH = np.concatenate([k_ENH, repeat_heads(factors.b_k_KH[None], N)])
    A_NEF = np.einsum('ENH,FNH->NEF', q_ENH, k_ENH) * (
        factors.scale / (scale * layer.spec.score_scale)
    )
    A_NFE = np.swapaxes(A_NEF, 1, 2)
    asymmetry = np.linalg.norm(A_NEF - A_NFE) / np.linalg.norm(A_NEF)
    if asymmetry > tolerance(layer):
        raise ConversionError(
            f'A[n] is not symmetric: |A - A^T| is {asymmetry:.2e} of |A|; only symmetric forms can '
            'be written W L W^T'
        )
    values_NE, vectors_NEF = np.linalg.eigh((A_NEF + A_NFE) / 2)
    order_NE = np.argsort(-np.abs(values_NE), axis=-1)
    values_NE = np.take_along_axis(values_NE, order_NE, -1)
    vectors_NEF = np.take_along_axis(vectors_NEF, order_NE[:, None], -1)
    largest = np.abs(values_NE).max()
    cut = np.abs(values_NE[:, H:]).max(initial=0) / largest
    if cut > tolerance(layer):
        raise ConversionError(f'A[n] has a rank above head_size={H}: {cut:.2e} of it would be lost')
    kept_NH = values_NE[:, :H]
    # The sign of an eigenvalue that is rounding error means nothing.
    sign_NH = np.where(kept_NH < -tolerance(layer) * largest, -1.0, 1.0)
    return np.moveaxis(vectors_NEF[..., :H] * np.sqrt(np.abs(kept_NH))[:, None], 0, 1), sign_NH
