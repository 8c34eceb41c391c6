"""Conversions of the QK circuit: one matrix or two, with fewer redundant weights, or shared.

All act on s = scale x A[n] y^T and leave the Value alone. What they need: positions that do not
act between W_Q and W_K (none, added to the stream, or linear biases), no QK-norm, a bilinear Score,
and a Value that does not read the Score.
"""

import dataclasses

import numpy as np
import scipy.linalg

from qkattn.attention.attention import Attention
from qkattn.convert.parts import (
    blank,
    dtype_of,
    fill,
    keep,
    own_logits,
    repeated,
    require_one_kv_head_each,
    respecified,
    tolerance,
)
from qkattn.errors import ConversionError


@dataclasses.dataclass(frozen=True)
class Truncation:
    """What was lost by keeping only `rank` singular values of each head.

    Attributes:
      rank: singular values kept.
      frobenius_N: norm of what was cut from A[n] (with its scale) or B[n], the least that any
        matrix of this rank can lose (Eckart & Young 1936).
      relative: the same over all heads, relative to the norm of all heads.
      measured: root mean square error of logits (or of single-head outputs) of unit-normal
        streams, relative to theirs.
    """

    rank: int
    frobenius_N: np.ndarray
    relative: float
    measured: float


def merge(layer: Attention) -> Attention:
    """Any bilinear Score -> `merged`: W_QK[n] = W_Q[n] W_K[n]^T. Exact.

    b_Q becomes W_K b_Q, a vector per head; b_K adds the same to all logits of a query and goes.

    Raises:
      ConversionError: RoPE, QK-norm, a Score that is not bilinear or hides the diagonal, a Value
        that reads the Score, or a logit cap beside a bias on the keys.
    """
    parts = own_logits(layer, 'merge')
    target = blank(respecified(layer.spec, score='merged'), layer)
    A_NED = parts.logit_matrices() / (target.score.scale * layer.spec.score_scale)
    fill(
        target.score,
        dtype_of(layer),
        w_qk_DNE=np.moveaxis(A_NED[:, :-1], 0, 1),
        b_q_NE=A_NED[:, -1],
    )
    keep(target.value, layer.value)
    return target


def unmerge(layer: Attention, rank: int | None = None) -> Attention:
    """Any bilinear Score -> `qk`, or `low_rank(rank=)` where `rank` is not the head size. Exact.

    The two factors are balanced, W_Q = U S^1/2 and W_K = V S^1/2 from the singular values of A[n]:
    of all factorizations the one with the smallest sum of squares.

    Raises:
      ConversionError: as for `merge`; or A[n] of a head has a higher rank (use `truncate`).
    """
    target, lost = _unmerged(layer, rank, 'unmerge')
    if lost.relative > tolerance(layer):
        raise ConversionError(
            f'A[n] has a rank above {lost.rank}: cutting it there loses {lost.relative:.2e} of its '
            'norm; ask for a higher rank, or for the error with truncate'
        )
    return target


def truncate(layer: Attention, rank: int) -> tuple[Attention, Truncation]:
    """The best `qk` or `low_rank(rank=)` of that rank, and what it loses.

    Raises:
      ConversionError: as for `merge`.
    """
    return _unmerged(layer, rank, 'truncate')


def _unmerged(layer: Attention, rank: int | None, who: str) -> tuple[Attention, Truncation]:
    parts = own_logits(layer, who)
    require_one_kv_head_each(layer, who)
    spec = layer.spec
    rank = spec.head_size if rank is None else rank
    score = 'qk' if rank == spec.head_size else f'low_rank(rank={rank})'
    target = blank(respecified(spec, score=score), layer)
    scale = target.score.scale * spec.score_scale
    D, N, letter = spec.d_model, spec.num_heads, 'H' if score == 'qk' else 'R'
    A_NED = parts.logit_matrices()[:, : D + spec.biases] / scale
    q_ENR, k_DNR, lost = balanced(A_NED, rank)
    measured = _logit_error(A_NED, q_ENR, k_DNR)
    lost = dataclasses.replace(lost, frobenius_N=lost.frobenius_N * scale, measured=measured)
    fill(
        target.score,
        dtype_of(layer),
        **{
            f'w_q_DN{letter}': q_ENR[:D],
            f'w_k_DK{letter}': k_DNR,
            f'b_q_N{letter}': q_ENR[D] if spec.biases else np.zeros((N, rank)),
            f'b_k_K{letter}': np.zeros((N, rank)),
        },
    )
    keep(target.value, layer.value)
    return target, lost


def balanced(A_NED: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, Truncation]:
    """left_ENR and right_DNR with A[n] = left[n] right[n]^T up to the singular values cut off."""
    left_NER, s_NR, right_NRD = np.linalg.svd(A_NED, full_matrices=False)
    frobenius_N = np.sqrt((s_NR[:, rank:] ** 2).sum(-1))
    relative = float(np.sqrt((frobenius_N**2).sum() / (s_NR**2).sum()))
    root_NR = np.sqrt(s_NR[:, :rank])
    left_ENR = np.moveaxis(left_NER[..., :rank] * root_NR[:, None], 0, 1)
    right_DNR = np.moveaxis(right_NRD[:, :rank], -1, 0) * root_NR
    missing = rank - root_NR.shape[1]  # more columns asked for than the stream is wide
    if missing > 0:
        left_ENR, right_DNR = (
            np.pad(a, ((0, 0), (0, 0), (0, missing))) for a in (left_ENR, right_DNR)
        )
    return left_ENR, right_DNR, Truncation(rank, frobenius_N, relative, 0.0)


def _logit_error(A_NED: np.ndarray, q_ENR: np.ndarray, k_DNR: np.ndarray) -> float:
    """Relative error of the logits of unit-normal x and y."""
    draw = np.random.default_rng(0)
    x_TE = draw.normal(size=(128, A_NED.shape[1]))
    x_TE[:, A_NED.shape[2] :] = 1
    y_SD = draw.normal(size=(128, A_NED.shape[2]))
    want_NTS = np.einsum('TE,NED,SD->NTS', x_TE, A_NED, y_SD, optimize=True)
    got_NTS = np.einsum('TE,ENR,DNR,SD->NTS', x_TE, q_ENR, k_DNR, y_SD, optimize=True)
    return float(np.linalg.norm(got_NTS - want_NTS) / np.linalg.norm(want_NTS))


def gauge_fix_qk(layer: Attention, *, pivot: bool = False) -> Attention:
    """`qk` -> W_K with an H x H block that is the identity: W_K M^-1 and W_Q M^T. Exact.

    M is the block of W_K that becomes the identity; it is inverted in float64. Without `pivot` it
    has the rows that the Score `gauge_fixed` fixes, and this is the target. With `pivot` it has the
    rows that a QR factorization with column pivoting picks, and the target is a `qk` whose W_K
    holds that identity: far smaller numbers, fit for low precision, but the block is stored.

    Raises:
      ConversionError: as for `merge`; a Score other than qk; or M is singular to working precision.
    """
    parts = own_logits(layer, 'gauge_fix_qk')
    _require_score(layer, 'qk', 'gauge_fix_qk')
    spec = layer.spec
    D, H = spec.d_model, spec.head_size
    K, N = parts.w_k_DKH.shape[1], spec.num_heads
    w_q, w_k = parts.w_q_DNH.copy(), parts.w_k_DKH.copy()
    b_q, b_k = parts.b_q_NH.copy(), parts.b_k_KH.copy()
    for k in range(K):
        fixed = (k * H + np.arange(H)) % D
        if pivot:
            fixed = scipy.linalg.qr(w_k[:, k].T, mode='r', pivoting=True)[1][:H]
        M_HH = w_k[fixed, k]
        inverse_HH = inverted(M_HH, f'the block of W_K of key head {k}')
        w_k[:, k], b_k[k] = w_k[:, k] @ inverse_HH, b_k[k] @ inverse_HH
        w_k[fixed, k] = np.eye(H)
        heads = slice(k * N // K, (k + 1) * N // K)
        w_q[:, heads], b_q[heads] = w_q[:, heads] @ M_HH.T, b_q[heads] @ M_HH.T
    target = blank(respecified(spec, score='qk' if pivot else 'gauge_fixed'), layer)
    weights = {'w_k_DKH': w_k}
    if not pivot:
        blocks_first_DKH = np.stack([np.roll(w_k[:, k], -k * H, axis=0) for k in range(K)], axis=1)
        weights = {'w_k_free_CKH': blocks_first_DKH[H:]} if H < D else {}
    fill(target.score, dtype_of(layer), w_q_DNH=w_q, b_q_NH=b_q, b_k_KH=b_k, **weights)
    keep(target.value, layer.value)
    return target


def inverted(M_HH: np.ndarray, what: str) -> np.ndarray:
    """M^-1; refused where half of float64's digits would be lost."""
    condition = np.linalg.cond(M_HH)
    if not condition < 1e8:
        raise ConversionError(f'{what} cannot be inverted: its condition number is {condition:.1e}')
    return np.linalg.inv(M_HH)


def to_collaborative(layer: Attention) -> Attention:
    """`qk` -> `collaborative` with R = N H: all W_Q side by side, mixing = block indicators. Exact.

    Raises:
      ConversionError: as for `merge`; or a Score other than qk.
    """
    parts = own_logits(layer, 'to_collaborative')
    _require_score(layer, 'qk', 'to_collaborative')
    D, N, H = layer.spec.d_model, layer.spec.num_heads, layer.spec.head_size
    target = blank(respecified(layer.spec, score='collaborative'), layer)
    ratio = parts.scale / (target.score.scale * layer.spec.score_scale)
    fill(
        target.score,
        dtype_of(layer),
        w_q_DR=ratio * parts.w_q_DNH.reshape(D, -1),
        w_k_DR=repeated(parts.w_k_DKH, N).reshape(D, -1),
        w_mixing_NR=np.repeat(np.eye(N), H, axis=1),
        b_q_R=ratio * parts.b_q_NH.reshape(-1),
        b_k_R=repeated(parts.b_k_KH[None], N).reshape(-1),
    )
    keep(target.value, layer.value)
    return target


def _require_score(layer: Attention, name: str, who: str) -> None:
    if layer.spec.score != name:
        raise ConversionError(f'{who} starts from the score {name}, not {layer.spec.score}')
