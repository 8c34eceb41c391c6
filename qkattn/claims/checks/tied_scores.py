"""Q Q^T in place of Q K^T: what is symmetric, what half the information means, and the diagonal.

A = W W^T has D H - H (H - 1) / 2 free numbers, where W_Q W_K^T has 2 D H - H^2: a share of
1/2 + 1/(2 (2 D - H)) at every H. The pattern softmax(x A x^T) of T <= D tokens is free in T (T - 1)
numbers, and with W W^T in T (T + 1) / 2 - 1 of them, a share of (T + 2) / (2 T). A causal mask
hides one of s[t, s] and s[s, t], so that W W^T is free in all T (T - 1) / 2 that are left.
"""

import dataclasses
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from qkattn.attention import Attention, AttentionSpec, Score
from qkattn.claims.checks.parameter_counts import count
from qkattn.claims.checks.small_layers import (
    curve,
    float64,
    freedom,
    layer,
    softmax_input,
    stream,
)
from qkattn.claims.claim import exact
from qkattn.claims.decided import Row, Speaks
from qkattn.stats import inference

NAMES = ('shared_qk', 'qk')


@float64
def symmetry() -> list[Row]:
    """A[n] and the softmax input equal their transposes."""
    attention = layer('shared_qk/vo')
    A_NDE, s_BNTS = np.asarray(attention.score.matrix()), softmax_input(attention, stream())
    rows = []
    for what, found in (('A[n]', A_NDE), ('the softmax input', s_BNTS)):
        apart = np.abs(found - np.swapaxes(found, -1, -2)).max() / np.abs(found).max()
        rows.append(exact(f'asymmetry of {what}', apart, 0, 1e-14, part='symmetry'))
    return rows


@float64
def half_the_numbers() -> list[Row]:
    """Parameters and free numbers of W W^T over those of W_Q W_K^T."""
    rows, D = [], 16
    context: dict[str, Any] = {'part': 'half of A'}
    for H in (4, 16):
        sizes: dict[str, Any] = {'d_model': D, 'num_heads': 1, 'head_size': H}
        share = count('shared_qk/vo', **sizes) / count('qk/vo', **sizes)
        tied, free = (
            freedom(lambda score: score.matrix(), layer(f'{name}/vo', **sizes).score)
            for name in NAMES
        )
        at_H = (
            exact('share of the parameters', share, 1 / 2, 0, **context),
            exact('share of the free numbers', tied / free, 1 / 2, 0.1, **context),
            exact('free numbers of W W^T', tied, D * H - H * (H - 1) / 2, **context),
            exact('free numbers of W_Q W_K^T', free, 2 * D * H - H**2, **context),
        )
        rows += [curve(row, H, 'head_size') for row in at_H]
    return rows


@float64
def half_the_pattern() -> list[Row]:
    """Free numbers of the patterns of T tokens, of W W^T over those of W_Q W_K^T, at D = H = 8."""
    rows, what = [], 'share of the free numbers of a pattern'
    for mask, causal in (('', False), (', causal mask', True)):
        for T in (2, 8, 24):
            tied, free = (pattern_freedom(name, T, causal=causal) for name in NAMES)
            part = f'half of the pattern, T {"<=" if T <= 8 else ">"} D{mask}'
            rows.append(curve(exact(what, tied / free, 1 / 2, 0.1, part=part), T, 'tokens'))
    return rows


def pattern_freedom(name: str, T: int, *, causal: bool) -> int:
    """Independent directions of softmax(x A x^T) of T tokens."""
    attention, x_BTD = layer(f'{name}/vo', d_model=8, num_heads=1), stream(T, d_model=8)[:1]
    seen_TS = jnp.tri(T, dtype=bool) if causal else jnp.ones((T, T), bool)

    def pattern(score: Score) -> jax.Array:
        s_BNTS = jnp.einsum('BTD,NDE,BSE->BNTS', x_BTD, score.matrix(), x_BTD)
        return jax.nn.softmax(jnp.where(seen_TS, score.scale * s_BNTS, -jnp.inf))

    return freedom(pattern, attention.score)


def dominant_diagonal() -> list[Row]:
    """How often a token scores itself highest, at initialization, T = 64."""
    rows, T = [], 64
    for H in (2, 4, 16, 64):
        shares = np.array([diagonal_shares('shared_qk', H, T, seed) for seed in range(8)])
        found = inference.estimate(list(shares[:, 0]))
        part = f'diagonal the largest of its row, H {"<" if H < np.log(T) else "> 2"} ln T'
        row = exact('share of rows', found.mean, expected_share(H, T), 0.05, part=part)
        speaks = Speaks.FOR if found.low > 1 / 2 else Speaks.AGAINST
        row = dataclasses.replace(row, low=found.low, high=found.high, speaks=speaks)
        rows.append(curve(row, H, 'head_size'))
    untied = statistics.mean(diagonal_shares('qk', 16, T, seed)[0] for seed in range(8))
    row = exact('share of rows, W_Q W_K^T, H = 16', untied, 1 / T, 0.02, part=part)
    rows.append(dataclasses.replace(row, speaks=Speaks.BESIDE))
    largest, above = shares[:, 1].mean(), shares[:, 2].mean()
    part = 'diagonal has the largest score of all'
    rows.append(exact('share of sequences', largest, 1, part=part))
    part = 'diagonal above the sum of its row'
    return [*rows, exact('share of rows, H = 64', above, 1, part=part)]


def diagonal_shares(name: str, H: int, T: int, seed: int) -> tuple[float, float, float]:
    """The share of rows whose diagonal is the largest, of sequences whose largest score is on the
    diagonal, and of rows whose diagonal is at least the sum of the others, at D = 256.
    """
    spec = AttentionSpec(score=name, d_model=256, num_heads=1, head_size=H)
    attention = Attention(spec, key=jax.random.key(seed))
    s_BNTS = softmax_input(attention, stream(T, d_model=256, seed=seed))
    diagonal_BNT = np.diagonal(s_BNTS, axis1=2, axis2=3)
    others_BNT = np.abs(s_BNTS).sum(-1) - np.abs(diagonal_BNT)
    return (
        float((diagonal_BNT == s_BNTS.max(-1)).mean()),
        float((diagonal_BNT.max(-1) == s_BNTS.max((-1, -2))).mean()),
        float((diagonal_BNT >= others_BNT).mean()),
    )


def expected_share(H: int, T: int) -> float:
    """E[Phi(|q|)^(T - 1)] with |q|^2 of chi-squared with H degrees of freedom, for D >> H.

    The other scores of a query q are normal with variance |q|^2, and its own is |q|^2.
    """
    return float(stats.chi.expect(lambda q: stats.norm.cdf(q) ** (T - 1), args=(H,)))
