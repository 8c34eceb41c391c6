"""What weight decay does to the singular values of W_QK (E5).

min over W_Q W_K^T = A of (|W_Q|^2 + |W_K|^2) / 2 is the sum of the singular values of A, reached by
balanced factors (Srebro et al. 2005, lemma 1). For the fit |A - target|^2 / 2 with L2 penalty
lambda / 2, factors then shrink every singular value d to max(0, d - lambda), which lowers the rank,
and one matrix to d / (1 + lambda). Kobayashi et al. 2024, arXiv 2410.23819.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from qkattn.claims.checks.small_layers import SAME, Options, descended
from qkattn.claims.claim import Row, exact
from qkattn.convert.factors import balanced_factors

L2: Options = {'decay': 'in the loss'}
DECOUPLED: Options = {'decay': 'AdamW without gradient noise'}
SPECTRUM = np.array([1.0, 0.8, 0.6, 0.4, 0.2])


def penalty(matrices: Any) -> Any:
    """(|W_Q|^2 + |W_K|^2) / 2."""
    return sum((w**2).sum() for w in matrices) / 2


def least_penalty() -> Iterator[Row]:
    """The penalty of balanced factors, the least of all factors of A."""
    q_DR, k_DR = np.random.default_rng(0).normal(size=(2, 8, 3))
    nuclear = np.linalg.svd(q_DR @ k_DR.T, compute_uv=False).sum()
    balanced = penalty(balanced_factors((q_DR @ k_DR.T)[None], 3)[:2])
    yield exact('penalty of balanced factors over |A|_*', balanced / nuclear, 1, SAME, **L2)


def shrunk_spectra() -> Iterator[Row]:
    """Singular values after descent on |A - target|^2 / 2 with decay, by the form of A."""
    strength = 0.4
    for adam, decay in ((False, L2), (True, DECOUPLED)):
        for form, factored, expected in (
            ('W_Q W_K^T from max(0, d - lambda)', True, np.maximum(0, SPECTRUM - strength)),
            ('W_QK from d / (1 + lambda)', False, SPECTRUM / (1 + strength)),
        ):
            A_DD = fitted(strength, factored=factored, adam=adam)
            off = np.abs(np.linalg.svd(A_DD, compute_uv=False) - expected).max()
            about = decay | {'lambda': strength}
            yield exact(f'singular values of {form}', off, 0, 2e-3, **about)


@functools.partial(jax.jit, static_argnames=('factored', 'adam'))
def fitted(strength: float, *, factored: bool, adam: bool) -> jax.Array:
    """A after 5,000 steps of descent on |A - target|^2 / 2 with decay of that strength.

    `factored`: A = W_Q W_K^T with both decayed, else one matrix. `adam`: AdamW decays beside the
    gradient, else the penalty is part of the loss of SGD.
    """
    rng = np.random.default_rng(0)
    left_DD, right_DD = np.linalg.qr(rng.normal(size=(2, 5, 5)))[0]
    target_DD = left_DD * SPECTRUM @ right_DD
    optimizer = optax.adamw(0.01, weight_decay=strength) if adam else optax.sgd(0.1)

    def form(matrices: tuple[jax.Array, ...]) -> jax.Array:
        return matrices[0] @ matrices[1].T if factored else matrices[0]

    def loss(matrices: tuple[jax.Array, ...]) -> jax.Array:
        misfit = ((form(matrices) - target_DD) ** 2).sum() / 2
        return misfit + (0 if adam else strength) * penalty(matrices)

    start = tuple(jnp.asarray(w) for w in rng.normal(size=(1 + factored, 5, 5)))
    return form(descended(loss, start, optimizer, 5000))
