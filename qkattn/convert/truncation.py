"""Truncated singular value decompositions of A[n] and B[n]."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Truncation:
    """The error of keeping the `rank` largest singular values of each head.

    Attributes:
      rank: singular values kept.
      frobenius_N: norm of what is cut from A[n] (with its scale) or B[n], the least error of any
        matrix of this rank (Eckart & Young 1936).
      relative: the same over all heads, relative to the norm of all heads.
      measured: root mean square error of the logits (QK circuit) or of the single-head outputs (OV
        circuit) of unit-normal streams, relative to theirs.
    """

    rank: int
    frobenius_N: np.ndarray
    relative: float
    measured: float


def balanced_factors(A_NED: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """left_ENR = U S^1/2 and right_DNR = V S^1/2 of A[n] = U S V^T; and the norm_N of the rest.

    Of all factorizations, the balanced one has the smallest sum of squares. Where `rank` exceeds
    the size of A[n], zeros fill the last columns.
    """
    left_NER, s_NR, right_NRD = np.linalg.svd(A_NED, full_matrices=False)
    frobenius_N = np.sqrt((s_NR[:, rank:] ** 2).sum(-1))
    root_NR = np.sqrt(s_NR[:, :rank])
    left_ENR = np.moveaxis(left_NER[..., :rank] * root_NR[:, None], 0, 1)
    right_DNR = np.moveaxis(right_NRD[:, :rank], -1, 0) * root_NR
    padding = ((0, 0), (0, 0), (0, rank - root_NR.shape[1]))
    return np.pad(left_ENR, padding), np.pad(right_DNR, padding), frobenius_N


def relative_error(approximate: np.ndarray, exact: np.ndarray) -> float:
    """|approximate - exact| / |exact| in the Frobenius norm."""
    return float(np.linalg.norm(approximate - exact) / np.linalg.norm(exact))
