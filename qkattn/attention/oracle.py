"""Reference implementation of attention in float64 numpy, which shares no code with the layers.

    logits:  s[n, t, s] = scale * x_t A[n] y_s^T
    output:  out_t = sum_n sum_s p[n, t, s] y_s B[n]

A[n] is the QK circuit of head n, and B[n] the OV circuit. With biases, both have D + 1 rows and act
on (x, 1) and (y, 1). The probabilities p come from `Normalizer.reference`.
"""

import numpy as np

from qkattn.attention.normalizers import Normalizer, Softmax


def logits(A_NDE: np.ndarray, x_BTD: np.ndarray, y_BSD: np.ndarray, *, scale: float) -> np.ndarray:
    """Returns s_BNTS = scale * x_t A[n] y_s^T."""
    A_NDE = np.asarray(A_NDE, np.float64)
    # With biases, A has D + 1 rows and columns, and a 1 is appended to x and y.
    x_BTE = with_ones(x_BTD, A_NDE.shape[1])
    y_BSE = with_ones(y_BSD, A_NDE.shape[1])
    s_BNTS = np.zeros((len(x_BTE), len(A_NDE), x_BTE.shape[1], y_BSE.shape[1]))
    for b, n, t, s in np.ndindex(*s_BNTS.shape):
        s_BNTS[b, n, t, s] = scale * x_BTE[b, t] @ A_NDE[n] @ y_BSE[b, s]
    return s_BNTS


def probabilities(
    s_BNTS: np.ndarray, mask_BTS: np.ndarray, normalizer: Normalizer | None = None
) -> np.ndarray:
    """Returns p_BNTS, normalized over the visible keys; hidden keys have p = 0.

    Args:
        s_BNTS: The logits.
        mask_BTS: True at visible keys; B may be 1.
        normalizer: The normalizer; None is softmax.
    """
    if normalizer is None:
        normalizer = Softmax()
    s_BNTS = np.asarray(s_BNTS, np.float64)
    B, N, T, S = s_BNTS.shape
    mask_BTS = np.broadcast_to(mask_BTS, (B, T, S))
    p_BNTS = np.zeros_like(s_BNTS)
    for b, n, t in np.ndindex(B, N, T):
        visible_S = mask_BTS[b, t]
        p_BNTS[b, n, t, visible_S] = normalizer.reference(s_BNTS[b, n, t, visible_S])
    return p_BNTS


def mix(
    p_BNTS: np.ndarray, B_NDE: np.ndarray, y_BSD: np.ndarray, b_o_D: np.ndarray | None = None
) -> np.ndarray:
    """Returns out_BTD = sum_n sum_s p[n, t, s] y_s B[n].

    Args:
        p_BNTS: The probabilities.
        B_NDE: The OV circuits.
        y_BSD: The stream of the values.
        b_o_D: The output bias, needed only if the probabilities do not sum to 1. B[0] contains it,
            and so scales it by the sum of head 0.
    """
    p_BNTS = np.asarray(p_BNTS, np.float64)
    B_NDE = np.asarray(B_NDE, np.float64)
    y_BSE = with_ones(y_BSD, B_NDE.shape[1])
    B, N, T, _ = p_BNTS.shape
    out_BTD = np.zeros((B, T, B_NDE.shape[2]))
    for b, n, t in np.ndindex(B, N, T):
        out_BTD[b, t] += p_BNTS[b, n, t] @ y_BSE[b] @ B_NDE[n]
    if b_o_D is not None:
        # Add the fraction of b_o that head 0 has left out.
        sum_of_head_0_BT = p_BNTS[:, 0].sum(-1)
        missing_BT1 = (1 - sum_of_head_0_BT)[..., None]
        out_BTD += missing_BT1 * np.asarray(b_o_D, np.float64)
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
    """Returns out_t = sum_n sum_s softmax_s(scale * x_t A[n] y_s^T) y_s B[n] as out_BTD.

    The sums over s are over the visible keys, where mask_BTS is True.
    """
    s_BNTS = logits(A_NDE, x_BTD, y_BSD, scale=scale)
    p_BNTS = probabilities(s_BNTS, mask_BTS)
    return mix(p_BNTS, B_NDE, y_BSD)


def with_ones(z_BTD: np.ndarray, width: int) -> np.ndarray:
    """Returns z if `width` is D, and (z, 1) if `width` is D + 1."""
    z_BTD = np.asarray(z_BTD, np.float64)
    if z_BTD.shape[-1] == width:
        return z_BTD
    ones_BT1 = np.ones((*z_BTD.shape[:-1], 1))
    return np.concatenate([z_BTD, ones_BT1], -1)
