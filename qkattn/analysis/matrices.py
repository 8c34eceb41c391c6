"""Quantities of the circuit matrices A[n] and B[n] (Elhage et al. 2021).

Each quantity maps square matrices [..., D, D] to one number each, without unit. A zero matrix gives
NaN, except for `norm`.

Stack matrices to measure several of them. On CPUs, a program of jaxlib 0.10.2 with two independent
LAPACK calls may hang.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import entr

Array = TypeVar('Array', jax.Array, np.ndarray)


def singular_values(a_NDD: jax.Array) -> jax.Array:
    """Returns the singular values s_ND, largest first."""
    return jnp.linalg.svd(a_NDD, compute_uv=False)


def effective_rank(a_NDD: jax.Array) -> jax.Array:
    """exp(H(p)), with the entropy H of p = s / sum(s) for singular values s (Roy & Vetterli 2007).

    The result is from 1 (rank 1) to D (equal singular values).
    """
    s_ND = singular_values(a_NDD)
    p_ND = s_ND / s_ND.sum(-1, keepdims=True)
    return jnp.exp(entr(p_ND).sum(-1))


def norm(a_NDD: jax.Array) -> jax.Array:
    """The Frobenius norm |A|_F."""
    return jnp.sqrt(_energy(a_NDD))


def symmetric_share(a_NDD: jax.Array) -> jax.Array:
    """|(A + A^T) / 2|_F^2 / |A|_F^2, which is 1 if A is symmetric, and 0 if A is skew-symmetric.

    A random A with independent entries has about 1/2. Saponati et al. 2025, arXiv 2502.10927,
    report 2 * symmetric_share - 1, for the sum of A[n] over the heads.
    """
    symmetric_NDD = (a_NDD + jnp.swapaxes(a_NDD, -1, -2)) / 2
    return _energy(symmetric_NDD) / _energy(a_NDD)


def directionality(a_NDD: jax.Array) -> jax.Array:
    """(c - r) / (c + r): 1 if only columns of A have outlier norms, -1 if only rows have.

        r = sum_i max(0, |row i| - bound)
        bound = mean + 2 standard deviations of |row i| over i

    c is the same for columns. The result is 0 without outliers, and NaN for a zero matrix.

    Rows of A act on queries, columns on keys. Saponati et al. 2025, arXiv 2502.10927, find positive
    values in autoregressive models.
    """

    def excess(norms_ND: jax.Array) -> jax.Array:
        bound_N = norms_ND.mean(-1) + 2 * norms_ND.std(-1, ddof=1)
        return jnp.maximum(norms_ND - bound_N[..., None], 0).sum(-1)

    row_norms_ND = jnp.sqrt((a_NDD**2).sum(-1))
    column_norms_ND = jnp.sqrt((a_NDD**2).sum(-2))
    r_N = excess(row_norms_ND)
    c_N = excess(column_norms_ND)
    total_N = c_N + r_N
    nonzero_total_N = jnp.where(total_N > 0, total_N, 1)
    directionality_N = (c_N - r_N) / nonzero_total_N
    return jnp.where(_energy(a_NDD) > 0, directionality_N, jnp.nan)


def drift(reference: Array, other: Array) -> Array:
    """|other - reference| / |reference| in the Frobenius norm."""
    return (((other - reference) ** 2).sum() / (reference**2).sum()) ** 0.5


def _energy(a_NDD: jax.Array) -> jax.Array:
    """The squared Frobenius norm |A|_F^2."""
    return (a_NDD**2).sum((-2, -1))


# The quantities of A[n] and B[n] in an analysis, by name.
MATRIX_QUANTITIES: dict[str, Callable[[jax.Array], jax.Array]] = {
    function.__name__: function
    for function in (norm, effective_rank, symmetric_share, directionality)
}
