"""One matrix for queries and keys makes scores symmetric."""

import jax
import numpy as np

from qkattn.attention import Attention, AttentionSpec
from qkattn.claims.claim import exact
from qkattn.report.claim_results import Row

D, N = 16, 2
TOLERANCE = 1e-6


def shared_scores() -> list[Row]:
    """A[n] equals its transpose; D N H parameters in place of 2 D N H; the diagonal dominates."""
    rows = []
    own, other = (_layer(score) for score in ('shared_qk', 'qk'))
    A_NDD, free_NDD = (np.asarray(layer.matrix()[0], float) for layer in (own, other))
    skew = float(np.linalg.norm(A_NDD - A_NDD.swapaxes(1, 2)) / np.linalg.norm(A_NDD))
    rows.append(exact('|A - A^T| / |A|, W_Q W_Q^T', skew, 0, TOLERANCE, D=D, H=D // N))
    counts = [sum(w.size for w in jax.tree.leaves(layer.score)) for layer in (own, other)]
    rows.append(exact('parameters, of those of W_Q W_K^T', counts[0] / counts[1], 0.5, D=D))
    least = float(np.linalg.eigvalsh(A_NDD).min())
    rows.append(exact('smallest eigenvalue of A, at least 0', min(least, 0), 0, TOLERANCE, D=D))
    return rows


def _layer(score: str) -> Attention:
    spec = AttentionSpec(d_model=D, num_heads=N, score=score, value='vo')
    return Attention(spec, key=jax.random.key(0))
