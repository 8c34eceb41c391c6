"""Singular values of W_QK: factors of rank r (B7), and what weight decay does to them (E5).

min over W_Q W_K^T = A of (|W_Q|^2 + |W_K|^2) / 2 is the sum of the singular values of A, reached by
balanced factors (Srebro et al. 2005, lemma 1). For the fit |A - target|^2 / 2 with L2 penalty
lambda / 2, factors then shrink every singular value d to max(0, d - lambda), which lowers the rank,
and one matrix to d / (1 + lambda). Kobayashi et al. 2024, arXiv 2410.23819.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import optimize

from qkattn.attention import Attention
from qkattn.claims.checks.small_layers import SAME, Options, float64, layer, rank, same
from qkattn.claims.claim import Row, exact, premise
from qkattn.convert.circuits import truncate, unmerge
from qkattn.convert.factors import balanced_factors

D = 16
FORM: Options = {'form': 'W_QK in factors of head size r'}
L2: Options = {'decay': 'in the loss'}
DECOUPLED: Options = {'decay': 'AdamW without gradient noise'}
SPECTRUM = np.array([1.0, 0.8, 0.6, 0.4, 0.2])


def of_rank(r: int) -> Attention:
    """A `merged` layer whose W_QK[n] have rank r."""
    attention = layer('merged/vo', d_model=D, num_heads=2)
    left_DNR, right_ENR = np.random.default_rng(r).normal(size=(2, D, 2, r))
    attention.score.w_qk_DNE[...] = jnp.einsum('DNR,ENR->DNE', left_DNR, right_ENR) / D
    return attention


@float64
def every_rank() -> list[Row]:
    """r from 1 to D: factors of head size r compute the function of a W_QK of rank r."""
    changes, others = [], 0
    for r in range(1, D + 1):
        attention = of_rank(r)
        factored = unmerge(attention, rank=r)
        after, before = (
            one.score.scale * np.asarray(one.score.matrix()) for one in (factored, attention)
        )
        changes.append(same('', after, before).value)
        others += rank(factored.score.matrix()) != r
    ranks = f'r = 1 to {D}'
    return [
        premise(exact(f'change of A by factors of size r, {ranks}', max(changes), 0, SAME, **FORM)),
        premise(exact(f'factors of size r that have another rank, {ranks}', others, 0, **FORM)),
    ]


@float64
def least_error() -> list[Row]:
    """The error of truncating a W_QK of full rank, which fitted factors reach and do not beat."""
    attention = layer('merged/vo', d_model=D, num_heads=2)
    A_NDE = attention.score.scale * np.asarray(attention.score.matrix())
    s_NR = np.linalg.svd(A_NDE, compute_uv=False)
    off = max(
        abs(truncate(attention, rank=r)[1] - np.linalg.norm(s_NR[:, r:]) / np.linalg.norm(s_NR))
        for r in range(1, D)
    )
    quantity = f'error of truncating W_QK to r, less that of singular values, r = 1 to {D - 1}'
    rows = [exact(quantity, float(off), 0, SAME, **FORM)]
    for r in (2, 8):
        least = float(np.linalg.norm(s_NR[0, r:]) / np.linalg.norm(s_NR[0]))
        error = fitted_error(A_NDE[0], r)
        rows.append(exact(f'error of fitted factors, r = {r}', error, least, 1e-6, **FORM))
    return [premise(row) for row in rows]


def fitted_error(A_DE: np.ndarray, r: int, num_steps: int = 2000) -> float:
    """|A - W_Q W_K^T| / |A| after alternating least squares from random factors."""
    k_DR = np.random.default_rng(0).normal(size=(len(A_DE), r))
    for _ in range(num_steps):
        q_DR = np.linalg.qr(A_DE @ k_DR)[0]
        k_DR = A_DE.T @ q_DR
    return float(np.linalg.norm(A_DE - q_DR @ k_DR.T) / np.linalg.norm(A_DE))


def penalty(matrices: Any) -> Any:
    """(|W_Q|^2 + |W_K|^2) / 2."""
    return sum((w**2).sum() for w in matrices) / 2


def least_penalty() -> list[Row]:
    """The penalty of balanced factors, and the least one that a search over factors of A finds."""
    q_DR, k_DR = np.random.default_rng(0).normal(size=(2, 8, 3))
    nuclear = np.linalg.svd(q_DR @ k_DR.T, compute_uv=False).sum()
    balanced = penalty(balanced_factors((q_DR @ k_DR.T)[None], 3)[:2])

    def regauged(M_P: np.ndarray) -> float:
        """The penalty of W_Q M and W_K M^-T, which have the product A."""
        M_RR = M_P.reshape(3, 3)
        return penalty((q_DR @ M_RR, k_DR @ np.linalg.inv(M_RR).T))

    least = optimize.minimize(regauged, np.eye(3).ravel()).fun
    return [
        exact('penalty of balanced factors over |A|_*', balanced / nuclear, 1, SAME, **L2),
        exact('least penalty of all factors over |A|_*', least / nuclear, 1, 1e-6, **L2),
    ]


@float64
def shrunk_spectra() -> list[Row]:
    """Singular values after descent on |A - target|^2 / 2 with decay, by the form of A."""
    rows = []
    for strength in (0.2, 0.4, 0.7):
        for context, adam in ((L2, False), (DECOUPLED, True)):
            for form, factored, expected in (
                ('W_Q W_K^T from max(0, d - lambda)', True, np.maximum(0, SPECTRUM - strength)),
                ('W_QK from d / (1 + lambda)', False, SPECTRUM / (1 + strength)),
            ):
                A_DD = fitted(strength, factored=factored, adam=adam)
                off = np.abs(np.linalg.svd(A_DD, compute_uv=False) - expected).max()
                quantity, about = f'singular values of {form}', context | {'lambda': strength}
                rows.append(exact(quantity, off, 0, 2e-3, **about))
    return rows


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

    def step(_: int, carried: tuple) -> tuple:
        matrices, state = carried
        updates, state = optimizer.update(jax.grad(loss)(matrices), state, matrices)
        return optax.apply_updates(matrices, updates), state

    start = tuple(jnp.asarray(w) for w in rng.normal(size=(1 + factored, 5, 5)))
    return form(jax.lax.fori_loop(0, 5000, step, (start, optimizer.init(start)))[0])
