"""What is free in A = W_Q W_K^T: half of it with Q Q^T (C1); what A and B = W_V W_O choose (C7).

A = W W^T has D H - H (H - 1) / 2 free numbers, where W_Q W_K^T has 2 D H - H^2: a share of
1/2 + 1/(2 (2 D - H)) at every H. The pattern softmax(x A x^T) of T <= D tokens is free in T (T - 1)
numbers, and with W W^T in T (T + 1) / 2 - 1 of them, a share of (T + 2) / (2 T). A causal mask
hides one of s[t, s] and s[s, t], so that W W^T is free in all T (T - 1) / 2 that are left.

W_Q and W_K choose where to attend, W_V and W_O what is moved. Any invertible M leaves W_Q M,
W_K M^-T and W_V M, M^-1 W_O the same function: H^2 redundant numbers in each circuit.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from qkattn.attention import Attention, AttentionSpec, Score
from qkattn.claims.checks.small_layers import (
    Options,
    count,
    freedom,
    layer,
    output,
    same,
    same_output,
    softmax_input,
    stream,
    with_matrices,
)
from qkattn.claims.claim import Row, Speaks, exact
from qkattn.stats import inference

NAMES, SIZE = ('shared_qk', 'qk'), 'tokens and dimensions'


def symmetry() -> Iterator[Row]:
    """A[n] equals its transpose."""
    A_NDE = np.asarray(layer('shared_qk/vo').score.matrix())
    about: Options = {'tolerance': 1e-14, 'part': 'symmetry'}
    yield same('asymmetry of A[n]', np.swapaxes(A_NDE, -1, -2), A_NDE, **about)


def half_the_numbers() -> Iterator[Row]:
    """Parameters and free numbers of W W^T over those of W_Q W_K^T."""
    for H in (4, 16):
        sizes: Options = {'d_model': 16, 'num_heads': 1, 'head_size': H}
        scores = [layer(f'{name}/vo', **sizes).score for name in NAMES]
        tied, free = (freedom(lambda score: score.matrix(), score) for score in scores)
        stored = [count(f'{name}/vo', 'score', **sizes) for name in NAMES]
        about: Options = {'part': 'half of A', 'head_size': H}
        yield exact('share of the parameters', stored[0] / stored[1], 1 / 2, **about)
        yield exact('share of the free numbers', tied / free, 1 / 2, 0.1, **about)


def half_the_pattern() -> Iterator[Row]:
    """Free numbers of the patterns of T tokens, of W W^T over those of W_Q W_K^T, at D = H = 8."""
    for mask, causal in (('', False), (', causal mask', True)):
        for T, side in ((8, '<='), (24, '>')):
            tied, free = (pattern_freedom(name, T, causal=causal) for name in NAMES)
            about: Options = {'part': f'half of the pattern, T {side} D{mask}', 'tokens': T}
            quantity = 'share of the free numbers of a pattern'
            yield exact(quantity, tied / free, 1 / 2, 0.1, **about)


def pattern_freedom(name: str, T: int, *, causal: bool) -> int:
    """Independent directions of softmax(x A x^T) of T tokens."""
    attention, x_BTD = layer(f'{name}/vo', d_model=8, num_heads=1), stream(T, d_model=8)[:1]
    seen_TS = jnp.tri(T, dtype=bool) if causal else jnp.ones((T, T), bool)

    def pattern(score: Score) -> jax.Array:
        s_BNTS = jnp.einsum('BTD,NDE,BSE->BNTS', x_BTD, score.matrix(), x_BTD)
        return jax.nn.softmax(jnp.where(seen_TS, score.scale * s_BNTS, -jnp.inf))

    return freedom(pattern, attention.score)


def dominant_diagonal() -> Iterator[Row]:
    """How often a token scores itself highest, at initialization, T = 64 and D = 256.

    Expected is E[Phi(|q|)^(T - 1)] with |q|^2 of chi-squared with H degrees of freedom, for D >> H:
    the other scores of a query q are normal with variance |q|^2, and its own is |q|^2.
    """
    T, D = 64, 256
    for H, side in ((4, '< ln T'), (64, '> 2 ln T')):
        spec = AttentionSpec(score='shared_qk', d_model=D, num_heads=1, head_size=H)
        layers = [Attention(spec, key=jax.random.key(seed)) for seed in range(8)]
        streams = [stream(T, d_model=D, seed=seed) for seed in range(8)]
        s_XBNTS = np.stack([softmax_input(*pair) for pair in zip(layers, streams, strict=True)])
        diagonal_XBNT = np.diagonal(s_XBNTS, axis1=-2, axis2=-1)
        shares_X = (diagonal_XBNT == s_XBNTS.max(-1)).mean((1, 2, 3))
        mean = inference.estimate(shares_X.tolist())
        expected = stats.chi.expect(lambda q: stats.norm.cdf(q) ** (T - 1), args=(H,))
        part = f'diagonal the largest of its row, H {side}'
        row = exact('share of rows', mean.mean, expected, 0.05, part=part, head_size=H)
        speaks = Speaks.FOR if mean.low > 1 / 2 else Speaks.AGAINST
        yield dataclasses.replace(row, low=mean.low, high=mean.high, speaks=speaks)
    largest = (diagonal_XBNT.max(-1) == s_XBNTS.max((-1, -2))).mean()
    above = (diagonal_XBNT >= np.abs(s_XBNTS).sum(-1) - np.abs(diagonal_XBNT)).mean()
    yield exact('share of sequences', largest, 1, part='diagonal has the largest score of all')
    yield exact('share of rows, H = 64', above, 1, part='diagonal above the sum of its row')


def small(variant: str = 'qk/vo', **options: Any) -> Attention:
    return layer(variant, **{'d_model': 2, 'num_heads': 1} | options)


def worked_by_hand() -> Iterator[Row]:
    """A and B of a layer with integer matrices, entry by entry."""
    given = {
        'w_q': np.array([[1, 2], [0, 1]]),
        'w_k': np.array([[1, 0], [1, 1]]),
        'w_v': np.array([[2, 0], [1, 1]]),
        'w_o': np.array([[1, 1], [0, 2]]),
    }
    (A_DE,), (B_DE,) = map(np.asarray, with_matrices(small(), given).matrix())
    yield exact('entries of A, W_Q W_K^T that differ', (A_DE != [[1, 3], [0, 1]]).sum(), 0)
    yield exact('entries of B, W_V W_O that differ', (B_DE != [[2, 2], [1, 3]]).sum(), 0)


def where_and_what() -> Iterator[Row]:
    """The pattern, solved from the output of T = D tokens: W_V and W_O have no part in it."""
    for D in (2, 4):
        attention, other, x_TD = small(d_model=D), small(d_model=D, seed=1), stream(D, d_model=D)[0]
        other.score = attention.score
        quantity, patterns = 'change of the pattern by another W_V and W_O', (other, attention)
        changed_TS, P_TS = (pattern(one, x_TD) for one in patterns)
        yield same(quantity, changed_TS, P_TS, tolerance=1e-10, **{SIZE: D})
        tied = softmax_input(small('shared_qk/vo', d_model=D), x_TD[None])[0, 0]
        pairs = np.isclose(tied, tied.T, rtol=1e-12)[np.triu_indices(D, 1)].sum()
        yield exact('tied pairs of scores, W_Q W_Q^T', pairs, D * (D - 1) / 2, **{SIZE: D})


def pattern(attention: Attention, x_TD: jax.Array) -> np.ndarray:
    """P_TS of a layer with one head, from out = P (x B), all positions visible."""
    out_TD = output(attention, x_TD[None], jnp.ones((1, len(x_TD), len(x_TD)), bool))[0]
    return np.linalg.solve((x_TD @ attention.matrix()[1][0]).T, out_TD.T).T


def gauge() -> Iterator[Row]:
    """W_Q M and W_K M^-T, or W_V M and M^-1 W_O, are the same function."""
    attention = small()
    arrays = {**vars(attention.score), **vars(attention.value)}
    w = {n[:3]: np.asarray(a[...]).reshape(2, 2) for n, a in arrays.items() if 'w_' in n}
    M_HH = np.array([[2.0, 1.0], [-1.0, 1.0]])
    inverse_HH = np.linalg.inv(M_HH)
    for change, given in (
        ('W_Q M and W_K M^-T', {'w_q': w['w_q'] @ M_HH, 'w_k': w['w_k'] @ inverse_HH.T}),
        ('W_V M and M^-1 W_O', {'w_v': w['w_v'] @ M_HH, 'w_o': inverse_HH @ w['w_o']}),
    ):
        yield same_output(f', {change}', with_matrices(small(), given), attention)
