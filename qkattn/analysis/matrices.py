"""Quantities of A[n] and B[n]: functions from square matrices [..., D, D] to one number each.

They depend on the matrix only, not on how it is factored (Elhage et al. 2021, 'A mathematical
framework for transformer circuits'). They have no unit. A zero matrix has NaN, except for its norm.

No program may decompose more than one array, so all matrices are stacked into one. On CPUs, a
program of jaxlib 0.10.2 with two independent LAPACK calls may wait for ever.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import entr

Array = TypeVar('Array', jax.Array, np.ndarray)


def singular_values(a_NDD: jax.Array) -> jax.Array:
    """Returns the singular values s_ND, the largest first."""
    return jnp.linalg.svd(a_NDD, compute_uv=False)


def effective_rank(a_NDD: jax.Array) -> jax.Array:
    """exp(H(p)) with the entropy H of p = s / sum(s), s the singular values. Roy & Vetterli 2007.

    It ranges from 1 (rank 1) to D (equal singular values).
    """
    s_ND = singular_values(a_NDD)
    p_ND = s_ND / s_ND.sum(-1, keepdims=True)
    return jnp.exp(entr(p_ND).sum(-1))


def norm(a_NDD: jax.Array) -> jax.Array:
    """|A|_F, the root of the sum of squares."""
    return jnp.sqrt(_energy(a_NDD))


def symmetric_share(a_NDD: jax.Array) -> jax.Array:
    """|(A + A^T) / 2|_F^2 / |A|_F^2, which is 1 if A is symmetric and 0 if it is skew.

    It is about 1/2 if the entries of A, or of its factors, are independent. Saponati et al. 2025,
    arXiv 2502.10927, report 2 * share - 1 for the sum of A[n] over the heads.
    """
    symmetric_NDD = (a_NDD + jnp.swapaxes(a_NDD, -1, -2)) / 2
    return _energy(symmetric_NDD) / _energy(a_NDD)


def directionality(a_NDD: jax.Array) -> jax.Array:
    """Whether some rows of A are far longer than the others (-1), or some columns (1).

    The result is (c - r) / (c + r). r is by how much long rows exceed a bound, summed over rows:
    sum_i max(0, |row i| - bound). The bound is the mean length of the rows plus two standard
    deviations. c is the same sum for columns. Without any such row or column, the result is 0. If A
    is zero, it is NaN.

    Rows of A act on queries, columns on keys. A long column is a direction of the keys that all
    queries look for. Saponati et al. 2025, arXiv 2502.10927, find values above 0 in autoregressive
    models.
    """

    def excess(norms_ND: jax.Array) -> jax.Array:
        """Returns r from the lengths of the rows, or c from the lengths of the columns."""
        bound_N = norms_ND.mean(-1) + 2 * norms_ND.std(-1, ddof=1)
        return jnp.maximum(norms_ND - bound_N[..., None], 0).sum(-1)

    row_norms_ND = jnp.sqrt((a_NDD**2).sum(-1))
    column_norms_ND = jnp.sqrt((a_NDD**2).sum(-2))
    r_N = excess(row_norms_ND)
    c_N = excess(column_norms_ND)
    total_N = c_N + r_N
    share_N = (c_N - r_N) / jnp.where(total_N > 0, total_N, 1)
    return jnp.where(_energy(a_NDD) > 0, share_N, jnp.nan)


def drift(reference: Array, other: Array) -> Array:
    """|other - reference| / |reference| in the Frobenius norm."""
    return (((other - reference) ** 2).sum() / (reference**2).sum()) ** 0.5


def _energy(a_NDD: jax.Array) -> jax.Array:
    """|A|_F^2."""
    return (a_NDD**2).sum((-2, -1))


# The quantities of every A[n] and B[n] in an analysis.
MATRIX_QUANTITIES: dict[str, Callable[[jax.Array], jax.Array]] = {
    function.__name__: function
    for function in (norm, effective_rank, symmetric_share, directionality)
}
