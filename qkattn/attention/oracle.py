"""The slow reference: attention from its two equations, one head and one query at a time.

It shares no code with the fast path and reads only A[n], B[n] and the scale, in float64 numpy.
"""

import numpy as np


def attention(
    A_NDE: np.ndarray,
    B_NDE: np.ndarray,
    x_BTD: np.ndarray,
    y_BSD: np.ndarray,
    mask_BTS: np.ndarray,
    *,
    scale: float,
) -> np.ndarray:
    """out_BTD. Matrices with D + 1 rows act on (x, 1): the homogeneous form of biases."""
    A_NDE, B_NDE, x_BTD, y_BSD = (np.asarray(a, np.float64) for a in (A_NDE, B_NDE, x_BTD, y_BSD))
    D = x_BTD.shape[-1]
    ones = [np.concatenate([z, np.ones((*z.shape[:-1], 1))], -1) for z in (x_BTD, y_BSD)]
    x_score, y_score = ones if A_NDE.shape[1] > D else (x_BTD, y_BSD)
    y_value = ones[1] if B_NDE.shape[1] > D else y_BSD
    mask_BTS = np.broadcast_to(mask_BTS, (len(x_BTD), x_BTD.shape[1], y_BSD.shape[1]))
    out_BTD = np.zeros_like(x_BTD)
    for b, t in np.ndindex(*x_BTD.shape[:2]):
        read = mask_BTS[b, t]
        for A_DE, B_DE in zip(A_NDE, B_NDE, strict=True):
            s_S = scale * (x_score[b, t] @ A_DE @ y_score[b, read].T)
            p_S = np.exp(s_S - s_S.max())
            out_BTD[b, t] += (p_S / p_S.sum()) @ y_value[b, read] @ B_DE
    return out_BTD
