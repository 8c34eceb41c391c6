"""Conversions of the QK circuit: W_Q and W_K merged, factored anew, or shared by all heads.

All of them rewrite A[n] in s = scale x A[n] y^T and keep the Value. They require positions that do
not act between W_Q and W_K (none, added to the stream, or linear biases), no QK-norm, a bilinear
Score, and a Value that does not share a matrix of the Score.
"""

import numpy as np

from qkattn.attention.attention import Attention
from qkattn.convert.factors import repeat_heads
from qkattn.convert.preconditions import qk_factors, require_multi_head, require_score
from qkattn.convert.target import empty_layer, fill, respecified, tolerance
from qkattn.convert.truncation import Truncation, balanced_factors, relative_error
from qkattn.errors import ConversionError


def merge(layer: Attention) -> Attention:
    """Any bilinear Score -> `merged`: W_QK[n] = W_Q[n] W_K[n]^T. Exact.

    b_Q becomes W_K b_Q, one vector per head. b_K adds the same to all logits of a query and is
    dropped.

    Raises:
      ConversionError: RoPE, QK-norm, a Score that is not bilinear or masks the diagonal, a Value
        that shares a matrix of the Score, or a logit cap together with a bias of the keys.
    """
    factors = qk_factors(layer, 'merge')
    target = empty_layer(respecified(layer.spec, score='merged'), layer)
    A_NED = factors.logit_matrices() / (target.score.scale * layer.spec.score_scale)
    return fill(
        target, layer, score={'w_qk_DNE': np.moveaxis(A_NED[:, :-1], 0, 1), 'b_q_NE': A_NED[:, -1]}
    )


def unmerge(layer: Attention, *, rank: int | None = None) -> Attention:
    """Any bilinear Score -> `qk`, or `low_rank(rank=)` where `rank` is not the head size. Exact.

    The factors are balanced, W_Q = U S^1/2 and W_K = V S^1/2 with A[n] = U S V^T: of all
    factorizations the one with the smallest sum of squares.

    Raises:
      ConversionError: as for `merge`; or A[n] of a head has a higher rank (use `truncate`).
    """
    target, lost = _factored(layer, rank, 'unmerge')
    if lost.relative > tolerance(layer):
        raise ConversionError(
            f'A[n] has a rank above {lost.rank}: cutting it there loses {lost.relative:.2e} of its '
            'norm; use a higher rank, or truncate, which reports the error'
        )
    return target


def truncate(layer: Attention, *, rank: int) -> tuple[Attention, Truncation]:
    """The best `qk` or `low_rank(rank=)` of that rank, and its error.

    Raises:
      ConversionError: as for `merge`.
    """
    return _factored(layer, rank, 'truncate')


def _factored(layer: Attention, rank: int | None, conversion: str) -> tuple[Attention, Truncation]:
    factors = qk_factors(layer, conversion)
    require_multi_head(layer, conversion)
    spec = layer.spec
    rank = spec.head_size if rank is None else rank
    score = 'qk' if rank == spec.head_size else f'low_rank(rank={rank})'
    target = empty_layer(respecified(spec, score=score), layer)
    scale = target.score.scale * spec.score_scale
    D, N, letter = spec.d_model, spec.num_heads, 'H' if score == 'qk' else 'R'
    A_NED = factors.logit_matrices()[:, : D + spec.biases] / scale
    q_ENR, k_DNR, frobenius_N = balanced_factors(A_NED, rank)
    lost = Truncation(
        rank=rank,
        frobenius_N=frobenius_N * scale,
        relative=float(np.linalg.norm(frobenius_N) / np.linalg.norm(A_NED)),
        measured=_logit_error(A_NED, q_ENR, k_DNR),
    )
    arrays = {
        f'w_q_DN{letter}': q_ENR[:D],
        f'w_k_DK{letter}': k_DNR,
        f'b_q_N{letter}': q_ENR[D] if spec.biases else np.zeros((N, rank)),
        f'b_k_K{letter}': np.zeros((N, rank)),
    }
    return fill(target, layer, score=arrays), lost


def _logit_error(A_NED: np.ndarray, q_ENR: np.ndarray, k_DNR: np.ndarray) -> float:
    """Relative error of the logits of unit-normal x and y."""
    rng = np.random.default_rng(0)
    x_TE = rng.normal(size=(128, A_NED.shape[1]))
    x_TE[:, A_NED.shape[2] :] = 1
    y_SD = rng.normal(size=(128, A_NED.shape[2]))
    exact_NTS = np.einsum('TE,NED,SD->NTS', x_TE, A_NED, y_SD, optimize=True)
    truncated_NTS = np.einsum('TE,ENR,DNR,SD->NTS', x_TE, q_ENR, k_DNR, y_SD, optimize=True)
    return relative_error(truncated_NTS, exact_NTS)


def to_collaborative(layer: Attention) -> Attention:
    """`qk` -> `collaborative`, R = N H: W_Q side by side, mixing = indicators. Exact.

    Raises:
      ConversionError: as for `merge`; or a Score other than qk.
    """
    factors = qk_factors(layer, 'to_collaborative')
    require_score(layer, 'qk', 'to_collaborative')
    D, N, H = layer.spec.d_model, layer.spec.num_heads, layer.spec.head_size
    target = empty_layer(respecified(layer.spec, score='collaborative'), layer)
    ratio = factors.scale / (target.score.scale * layer.spec.score_scale)
    arrays = {
        'w_q_DR': ratio * factors.w_q_DNH.reshape(D, -1),
        'w_k_DR': repeat_heads(factors.w_k_DKH, N).reshape(D, -1),
        'w_mixing_NR': np.repeat(np.eye(N), H, axis=1),
        'b_q_R': ratio * factors.b_q_NH.reshape(-1),
        'b_k_R': repeat_heads(factors.b_k_KH[None], N).reshape(-1),
    }
    return fill(target, layer, score=arrays)
