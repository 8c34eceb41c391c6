"""The slow reference in float64 numpy: attention from its two equations, head by head.

It shares no code with the fast path: it reads A[n], B[n], the scale and slow normalizers only.
"""

import numpy as np

from qkattn.attention.normalizers import Normalizer, Softmax


def logits(A_NDE: np.ndarray, x_BTD: np.ndarray, y_BSD: np.ndarray, *, scale: float) -> np.ndarray:
    """s_BNTS = scale * x_t A[n] y_s^T. Matrices with D + 1 rows act on (x, 1) and (y, 1)."""
    A_NDE = np.asarray(A_NDE, np.float64)
    x_BTE, y_BSE = (with_ones(z, A_NDE.shape[1]) for z in (x_BTD, y_BSD))
    s_BNTS = np.zeros((len(x_BTE), len(A_NDE), x_BTE.shape[1], y_BSE.shape[1]))
    for b, n, t, s in np.ndindex(*s_BNTS.shape):
        s_BNTS[b, n, t, s] = scale * x_BTE[b, t] @ A_NDE[n] @ y_BSE[b, s]
    return s_BNTS


def probabilities(
    s_BNTS: np.ndarray, mask_BTS: np.ndarray, normalizer: Normalizer | None = None
) -> np.ndarray:
    """p_BNTS = normalizer_s(s[n, t, s]) over visible s, 0 at the others; None is softmax."""
    s_BNTS = np.asarray(s_BNTS, np.float64)
    B, N, T, S = s_BNTS.shape
    mask_BTS = np.broadcast_to(mask_BTS, (B, T, S))
    p_BNTS = np.zeros_like(s_BNTS)
    for b, n, t in np.ndindex(B, N, T):
        read = mask_BTS[b, t]
        p_BNTS[b, n, t, read] = (normalizer or Softmax()).reference(s_BNTS[b, n, t, read])
    return p_BNTS


def mix(
    p_BNTS: np.ndarray, B_NDE: np.ndarray, y_BSD: np.ndarray, b_o_D: np.ndarray | None = None
) -> np.ndarray:
    """out_BTD = sum_n sum_s p[n, t, s] y_s B[n]; b_o_D, part of B[0], counts once for any p."""
    p_BNTS = np.asarray(p_BNTS, np.float64)
    B_NDE = np.asarray(B_NDE, np.float64)
    y_BSE = with_ones(y_BSD, B_NDE.shape[1])
    B, N, T, _ = p_BNTS.shape
    out_BTD = np.zeros((B, T, B_NDE.shape[2]))
    for b, n, t in np.ndindex(B, N, T):
        out_BTD[b, t] += p_BNTS[b, n, t] @ y_BSE[b] @ B_NDE[n]
    if b_o_D is not None:
        out_BTD += (1 - p_BNTS[:, 0].sum(-1))[..., None] * np.asarray(b_o_D, np.float64)
    return out_BTD


def attention(
    A_NDE: np.ndarray,
    B_NDE: np.ndarray,
    x_BTD: np.ndarray,
    y_BSD: np.ndarray,
    mask_BTS: np.ndarray,
    *,
    scale: float,
) -> np.ndarray:
    """out_BTD with softmax: `logits`, `probabilities`, `mix`."""
    s_BNTS = logits(A_NDE, x_BTD, y_BSD, scale=scale)
    return mix(probabilities(s_BNTS, mask_BTS), B_NDE, y_BSD)


def with_ones(z_BTD: np.ndarray, width: int) -> np.ndarray:
    """(z, 1) in float64 where a matrix of `width` rows acts on it, z itself where it has D rows."""
    z_BTD = np.asarray(z_BTD, np.float64)
    if z_BTD.shape[-1] == width:
        return z_BTD
    return np.concatenate([z_BTD, np.ones((*z_BTD.shape[:-1], 1))], -1)
