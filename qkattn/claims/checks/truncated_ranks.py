"""W_QK of rank r as factors of head size r: exact if it has that rank, else the least error."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from qkattn.attention import Attention
from qkattn.claims.checks.small_layers import curve, difference, float64, layer, rank
from qkattn.claims.claim import exact
from qkattn.claims.decided import Row
from qkattn.convert.circuits import truncate, unmerge

D = 16
FORM: dict[str, Any] = {'form': 'W_QK in factors of head size r'}


def of_rank(r: int) -> Attention:
    """A `merged` layer whose W_QK[n] have rank r."""
    attention = layer('merged/vo', d_model=D, num_heads=2)
    left_DNR, right_ENR = np.random.default_rng(r).normal(size=(2, D, 2, r))
    attention.score.w_qk_DNE[...] = jnp.einsum('DNR,ENR->DNE', left_DNR, right_ENR) / D
    return attention


@float64
def every_rank() -> list[Row]:
    """r from 1 to D: factors of head size r compute the function of a W_QK of rank r."""
    rows = []
    for r in range(1, D + 1):
        attention = of_rank(r)
        factored = unmerge(attention, rank=r)
        A_NDE = np.asarray(factored.score.matrix())
        before_NDE = attention.score.scale * np.asarray(attention.score.matrix())
        change = difference(factored.score.scale * A_NDE, before_NDE)
        at_r = (
            exact('change of A by factors of size r', change, 0, 1e-12, **FORM),
            exact('rank of W_Q W_K^T', rank(A_NDE), r, **FORM),
        )
        rows += [curve(row, r, 'r') for row in at_r]
    return rows


@float64
def least_error() -> list[Row]:
    """The error of truncating a W_QK of full rank, which fitted factors reach and do not beat."""
    attention = layer('merged/vo', d_model=D, num_heads=2)
    A_NDE = attention.score.scale * np.asarray(attention.score.matrix())
    s_NR = np.linalg.svd(A_NDE, compute_uv=False)
    rows = []
    for r in range(1, D):
        lost = truncate(attention, rank=r)[1]
        least = float(np.linalg.norm(s_NR[:, r:]) / np.linalg.norm(s_NR))
        row = exact('error of truncating W_QK to rank r', lost, least, 1e-12, **FORM)
        rows.append(curve(row, r, 'r'))
    for r in (2, 8):
        fitted = fitted_error(A_NDE[0], r)
        least = float(np.linalg.norm(s_NR[0, r:]) / np.linalg.norm(s_NR[0]))
        rows.append(exact(f'error of fitted factors, r = {r}', fitted, least, 1e-6, **FORM))
    return rows


def fitted_error(A_DE: np.ndarray, r: int, num_steps: int = 2000) -> float:
    """|A - W_Q W_K^T| / |A| after alternating least squares from random factors."""
    k_DR = np.random.default_rng(0).normal(size=(len(A_DE), r))
    for _ in range(num_steps):
        q_DR = np.linalg.qr(A_DE @ k_DR)[0]
        k_DR = A_DE.T @ q_DR
    return float(np.linalg.norm(A_DE - q_DR @ k_DR.T) / np.linalg.norm(A_DE))
