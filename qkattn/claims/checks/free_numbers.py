"""What is free in A = W_Q W_K^T and B = W_V W_O: Q Q^T (C1), and 2 x 2 matrices (C7).

A = W W^T has D H - H (H - 1) / 2 free numbers, where W_Q W_K^T has 2 D H - H^2: a share of
1/2 + 1/(2 (2 D - H)) at every H. The pattern softmax(x A x^T) of T <= D tokens is free in T (T - 1)
numbers, and with W W^T in T (T + 1) / 2 - 1 of them, a share of (T + 2) / (2 T). A causal mask
hides one of s[t, s] and s[s, t], so that W W^T is free in all T (T - 1) / 2 that are left.

With D = 2, one head of H = 2 has 16 parameters: W_Q and W_K act through the 4 numbers of A and
choose where to attend, W_V and W_O through the 4 of B and choose what is moved. Any invertible M
leaves W_Q M, W_K M^-T and W_V M, M^-1 W_O the same function: H^2 redundant numbers in each circuit.
"""

import dataclasses
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize, stats

from qkattn.attention import Attention, AttentionSpec, Score
from qkattn.claims.checks.small_layers import (
    Options,
    count,
    float64,
    freedom,
    layer,
    output,
    same,
    same_output,
    softmax_input,
    stream,
)
from qkattn.claims.claim import Row, Speaks, exact
from qkattn.stats import inference

NAMES, SIZE = ('shared_qk', 'qk'), 'tokens and dimensions'
# Free numbers of A[n] over all heads, and of B[n], with one head of H = 2 and with two of H = 1.
FREE_A = {
    'qk': (4, 6),
    'merged': (4, 8),
    'full_size': (4, 8),
    'query_free_full': (4, 8),
    'gauge_fixed': (4, 6),
    'double': (4, 6),
    'pairwise': (4, 4),
    'symmetric_skew': (4, 4),
    'query_free': (4, 4),
    'key_free': (4, 4),
    'symmetric': (3, 4),
    'shared_qk': (3, 4),
    'neither': (0, 0),
}
FREE_B = {'vo': (4, 6), 'merged_vo': (4, 8), 'no_v': (4, 4), 'no_o': (4, 4), 'no_vo': (0, 0)}
# Integer matrices, and the A or B of layers with them, entry by entry.
GIVEN = {
    'w_q': np.array([[1, 2], [0, 1]]),
    'w_k': np.array([[1, 0], [1, 1]]),
    'w_v': np.array([[2, 0], [1, 1]]),
    'w_o': np.array([[1, 1], [0, 2]]),
}
BY_HAND = {
    'A, W_Q W_K^T': ('qk/vo', 0, [[1, 3], [0, 1]]),
    'A, W_Q W_Q^T': ('shared_qk/vo', 0, [[5, 2], [2, 1]]),
    'A, W_Q = I': ('query_free/vo', 0, [[1, 1], [0, 1]]),
    'A, W_K = I': ('key_free/vo', 0, [[1, 2], [0, 1]]),
    'A, both I': ('neither/vo', 0, [[1, 0], [0, 1]]),
    'B, W_V W_O': ('qk/vo', 1, [[2, 2], [1, 3]]),
    'B, W_V = I': ('qk/no_v', 1, [[1, 1], [0, 2]]),
    'B, W_O = I': ('qk/no_o', 1, [[2, 0], [1, 1]]),
}


@float64
def symmetry() -> Iterator[Row]:
    """A[n] and the softmax input equal their transposes."""
    attention = layer('shared_qk/vo')
    for name, matrix in (
        ('A[n]', np.asarray(attention.score.matrix())),
        ('the softmax input', softmax_input(attention, stream())),
    ):
        about: Options = {'tolerance': 1e-14, 'part': 'symmetry'}
        yield same(f'asymmetry of {name}', np.swapaxes(matrix, -1, -2), matrix, **about)


@float64
def half_the_numbers() -> Iterator[Row]:
    """Parameters and free numbers of W W^T over those of W_Q W_K^T."""
    D = 16
    for H in (4, 16):
        sizes: Options = {'d_model': D, 'num_heads': 1, 'head_size': H}
        scores = [layer(f'{name}/vo', **sizes).score for name in NAMES]
        tied, free = (freedom(lambda score: score.matrix(), score) for score in scores)
        stored = [count(f'{name}/vo', 'score', **sizes) for name in NAMES]
        about: Options = {'part': 'half of A', 'head_size': H}
        yield exact('share of the parameters', stored[0] / stored[1], 1 / 2, **about)
        yield exact('share of the free numbers', tied / free, 1 / 2, 0.1, **about)
        yield exact('free numbers of W W^T', tied, D * H - H * (H - 1) / 2, **about)
        yield exact('free numbers of W_Q W_K^T', free, 2 * D * H - H**2, **about)


@float64
def half_the_pattern() -> Iterator[Row]:
    """Free numbers of the patterns of T tokens, of W W^T over those of W_Q W_K^T, at D = H = 8."""
    for mask, causal in (('', False), (', causal mask', True)):
        for T in (2, 8, 24):
            tied, free = (pattern_freedom(name, T, causal=causal) for name in NAMES)
            part = f'half of the pattern, T {"<=" if T <= 8 else ">"} D{mask}'
            quantity = 'share of the free numbers of a pattern'
            yield exact(quantity, tied / free, 1 / 2, 0.1, part=part, tokens=T)


def pattern_freedom(name: str, T: int, *, causal: bool) -> int:
    """Independent directions of softmax(x A x^T) of T tokens."""
    attention, x_BTD = layer(f'{name}/vo', d_model=8, num_heads=1), stream(T, d_model=8)[:1]
    seen_TS = jnp.tri(T, dtype=bool) if causal else jnp.ones((T, T), bool)

    def pattern(score: Score) -> jax.Array:
        s_BNTS = jnp.einsum('BTD,NDE,BSE->BNTS', x_BTD, score.matrix(), x_BTD)
        return jax.nn.softmax(jnp.where(seen_TS, score.scale * s_BNTS, -jnp.inf))

    return freedom(pattern, attention.score)


def dominant_diagonal() -> Iterator[Row]:
    """How often a token scores itself highest, at initialization, T = 64."""
    T = 64
    for H in (2, 4, 16, 64):
        shares = np.array([diagonal_shares('shared_qk', H, T, seed) for seed in range(8)])
        mean = inference.estimate(list(shares[:, 0]))
        part = f'diagonal the largest of its row, H {"<" if H < np.log(T) else "> 2"} ln T'
        expected = expected_share(H, T)
        row = exact('share of rows', mean.mean, expected, 0.05, part=part, head_size=H)
        speaks = Speaks.FOR if mean.low > 1 / 2 else Speaks.AGAINST
        yield dataclasses.replace(row, low=mean.low, high=mean.high, speaks=speaks)
    untied = statistics.mean(diagonal_shares('qk', 16, T, seed)[0] for seed in range(8))
    row = exact('share of rows, W_Q W_K^T, H = 16', untied, 1 / T, 0.02, part=part)
    yield dataclasses.replace(row, speaks=Speaks.BESIDE)
    largest, above = shares[:, 1].mean(), shares[:, 2].mean()
    yield exact('share of sequences', largest, 1, part='diagonal has the largest score of all')
    yield exact('share of rows, H = 64', above, 1, part='diagonal above the sum of its row')


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


def small(variant: str = 'qk/vo', **options: Any) -> Attention:
    return layer(variant, **{'d_model': 2, 'num_heads': 1} | options)


def with_matrices(attention: Attention, given: Mapping[str, np.ndarray]) -> Attention:
    """The layer with one head and these of its matrices."""
    for circuit in (attention.score, attention.value):
        for name, w in vars(circuit).items():
            if name[:3] in given:
                w[...] = given[name[:3]].reshape(w.shape)
    return attention


@float64
def worked_by_hand() -> Iterator[Row]:
    """A and B of layers with integer matrices, entry by entry."""
    for name, (variant, circuit, expected) in BY_HAND.items():
        matrix_DE = np.asarray(with_matrices(small(variant), GIVEN).matrix()[circuit][0])
        yield exact(f'entries of {name} that differ', (matrix_DE != expected).sum(), 0)


@float64
def where_and_what() -> Iterator[Row]:
    """The pattern, solved from the output of T = D tokens: W_V and W_O have no part in it."""
    for D in (2, 3, 4):
        attention, other, x_TD = small(d_model=D), small(d_model=D, seed=1), stream(D, d_model=D)[0]
        other.score = attention.score
        changed_TS, P_TS, size = pattern(other, x_TD), pattern(attention, x_TD), {SIZE: D}
        quantity = 'change of the pattern by another W_V and W_O'
        yield same(quantity, changed_TS, P_TS, tolerance=1e-10, **size)
        yield exact('largest sum of a row of the pattern', P_TS.sum(-1).max(), 1, 1e-10, **size)
        tied = softmax_input(small('shared_qk/vo', d_model=D), x_TD[None])[0, 0]
        pairs = np.isclose(tied, tied.T, rtol=1e-12)[np.triu_indices(D, 1)].sum()
        yield exact('tied pairs of scores, W_Q W_Q^T', pairs, D * (D - 1) / 2, **size)


def pattern(attention: Attention, x_TD: jax.Array) -> np.ndarray:
    """P_TS of a layer with one head, from out = P (x B), all positions visible."""
    out_TD = output(attention, x_TD[None], jnp.ones((1, len(x_TD), len(x_TD)), bool))[0]
    return np.linalg.solve((x_TD @ attention.matrix()[1][0]).T, out_TD.T).T


@float64
def gauge() -> Iterator[Row]:
    """W_Q M and W_K M^-T, or W_V M and M^-1 W_O, are the same function."""
    attention, x_BTD = small(), stream(2, d_model=2)
    arrays = {**vars(attention.score), **vars(attention.value)}
    w = {n[:3]: np.asarray(a[...]).reshape(2, 2) for n, a in arrays.items() if 'w_' in n}
    M_HH = np.array([[2.0, 1.0], [-1.0, 1.0]])
    inverse_HH = np.linalg.inv(M_HH)
    for change, given in (
        ('W_Q M and W_K M^-T', {'w_q': w['w_q'] @ M_HH, 'w_k': w['w_k'] @ inverse_HH.T}),
        ('W_V M and M^-1 W_O', {'w_v': w['w_v'] @ M_HH, 'w_o': inverse_HH @ w['w_o']}),
    ):
        yield same_output(f', {change}', with_matrices(small(), given), attention, x_BTD)


@float64
def one_way() -> Iterator[Row]:
    """[[0, 1], [0, 0]], by which token 1 attends to token 2 and not the reverse, as W W^T."""
    attention, A_DE = small('shared_qk/vo'), np.array([[0.0, 1.0], [0.0, 0.0]])

    def squared_error(w_P: np.ndarray) -> float:
        fitted_DE = np.asarray(with_matrices(attention, {'w_q': w_P}).score.matrix()[0])
        return float(((fitted_DE - A_DE) ** 2).sum())

    least = optimize.minimize(squared_error, np.array([0.5, 0.1, 0.4, -0.2])).fun
    quantity = 'error of the best W W^T for A = [[0, 1], [0, 0]]'
    yield exact(quantity, least**0.5, 0.75**0.5, 1e-6)


@float64
def free_in_each_variant() -> Iterator[Row]:
    """The free numbers of A or B by variant; the parameters beyond them are redundant."""
    cases = [('A', 'score', name, f'{name}/vo', free) for name, free in FREE_A.items()]
    cases += [('B', 'value', name, f'qk/{name}', free) for name, free in FREE_B.items()]
    for letter, circuit, name, variant, numbers in cases:
        for heads, expected in zip((1, 2), numbers, strict=True):
            attention = small(variant, num_heads=heads)
            score, value = attention.score, attention.value
            free = freedom(lambda score: score.matrix(), score)
            if circuit == 'value':
                free = freedom(lambda value, score: value.matrix(score), value, score)
            stored = count(variant, circuit, d_model=2, num_heads=heads)
            quantity = f'free numbers of {letter}, {name}, N = {heads}, {stored} parameters'
            yield exact(quantity, free, expected)
