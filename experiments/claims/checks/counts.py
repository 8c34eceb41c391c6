"""Counts of parameters (A2, A5), multiply-adds (A3) and free parameters (C1).

Per head, W_Q and W_K take 2 T D H + T^2 H and W_QK takes T D^2 + T^2 D for T tokens: merging adds
T D (D - 2 H) + T^2 (D - H). With D >= 2 H both terms are at least 0, so that one matrix never costs
less. With H < D < 2 H it does up to T = D (2 H - D) / (D - H); with D <= H it does at every T.

A = W W^T has D H - H (H - 1) / 2 free parameters, where W_Q W_K^T has 2 D H - H^2: a share of
1/2 + 1/(2 (2 D - H)) at every H. The pattern softmax(x A x^T) of T <= D tokens is free in T (T - 1)
numbers, and with W W^T in T (T + 1) / 2 - 1 of them, a share of (T + 2) / (2 T). A causal mask
hides one of s[t, s] and s[s, t], so that W W^T is free in all T (T - 1) / 2 that are left.
"""

import bisect
import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from experiments.claims.checks.small_layers import (
    Options,
    count,
    freedom,
    layer,
    rank,
    same,
    shapes,
    softmax_input,
    stream,
)
from experiments.claims.claim import Row, Speaks, exact
from qkattn.attention import Attention, AttentionSpec, Score, oracle
from qkattn.stats import inference

SCORES = ('shared_qk', 'qk')  # W W^T and W_Q W_K^T


def added_parameters(D: int, H: int, N: int = 1) -> int:
    """How many more parameters N heads have with one matrix each than with W_Q and W_K."""
    sizes: Options = {'d_model': D, 'num_heads': N, 'head_size': H}
    return count('merged/vo', 'score', **sizes) - count('qk/vo', 'score', **sizes)


def merged_against_factored() -> Iterator[Row]:
    """Checks that merging W_Q and W_K changes a head's parameters from 2 D H to D^2.

    The change is N (D^2 - 2 D H) for N heads; its sign depends on whether H is above D / 2.
    """
    for H in (8, 32, 64):
        added = added_parameters(64, H)
        yield exact('parameters added by merging, D = 64', added, 64**2 - 128 * H, head_size=H)
    deviations = []
    for D in (8, 12, 32, 64):
        for H in range(1, D + 2, max(1, D // 8)):
            for N in (1, 3):
                formula = N * (D * D - 2 * D * H)
                deviations.append(abs(added_parameters(D, H, N) - formula))
    quantity = f'largest deviation from N (D^2 - 2 D H), {len(deviations)} shapes'
    yield exact(quantity, max(deviations), 0)


def heads_of_a_fixed_width() -> Iterator[Row]:
    """Checks that heads of H = D / N have 2 D^2 parameters in all, for every N, and N patterns."""
    D = 64
    T = 12
    for N in (1, 8):
        counted = count('qk/vo', 'score', d_model=D, num_heads=N)
        s_BNTS = softmax_input(layer(d_model=D, num_heads=N), stream(T, d_model=D))
        p_BNTS = oracle.probabilities(s_BNTS, np.ones((1, T, T), bool))
        # The patterns of each head in one row, so that the rank is the number of independent ones.
        patterns = rank(np.moveaxis(p_BNTS, 1, 0).reshape(N, -1))
        yield exact('parameters of W_Q and W_K per head', counted / N, 2 * D**2 / N, num_heads=N)
        yield exact('parameters of W_Q and W_K of all heads', counted, 2 * D**2, num_heads=N)
        yield exact('linearly independent patterns', patterns, N, num_heads=N)


def compiled(score: str, T: int, D: int, H: int) -> int:
    """Counts the multiply-adds in the compiled program of q k^T for one head, as XLA reports them.

    `score` is the name of a Score, T the number of tokens, D is d_model and H the head size.
    """

    def scores(layer: Attention, x_BTD: jax.Array) -> jax.Array:
        q_BTNH = layer.score.queries(x_BTD)
        k_BSNH = layer.score.keys(layer.score.cached(x_BTD))
        return jnp.einsum('BTH,BSH->BTS', q_BTNH[:, :, 0], k_BSNH[:, :, 0])

    layer = shapes(f'{score}/vo', d_model=D, num_heads=1, head_size=H)
    x_BTD = jax.ShapeDtypeStruct((1, T, D), jnp.float32)
    program = jax.jit(scores).lower(layer, x_BTD).compile()
    flops = int(program.cost_analysis()['flops'])
    return flops // 2  # a multiply-add counts as two FLOPs


def multiply_adds() -> Iterator[Row]:
    """Checks the formulas of the multiply-adds against the compiled programs."""
    for T, D, H in ((16, 64, 16), (64, 64, 48), (32, 24, 48)):
        # x W_Q, x W_K, and the product of queries and keys; x W_QK, and its product with x.
        formulas = {'qk': 2 * T * D * H + T * T * H, 'merged': T * D * D + T * T * D}
        for score, formula in formulas.items():
            quantity = f'multiply-adds of {score} compiled, T = {T}, D = {D}, H = {H}'
            yield exact(quantity, compiled(score, T, D, H), formula)


def where_they_cross() -> Iterator[Row]:
    """Checks from which number of tokens T on one matrix costs more than two.

    The head sizes lie on both sides of D = 2 H, and T is at most 2048.
    """
    D = 64

    def added(H: int, T: int) -> int:
        """Returns how many more multiply-adds one matrix takes than two."""
        return compiled('merged', T, D, H) - compiled('qk', T, D, H)

    # For each head size, the last T at which one matrix does not cost more.
    crossovers = {48: D * (2 * 48 - D) // (D - 48), 16: 0}
    for H, crossover in crossovers.items():
        # `added` grows with T, so bisection counts the T at which it is at most 0.
        num_cheaper = bisect.bisect(range(1, 2048), 0, key=functools.partial(added, H))
        quantity = 'first T at which one matrix costs more, D = 64'
        yield exact(quantity, 1 + num_cheaper, 1 + crossover, head_size=H)
    quantity = 'multiply-adds added by merging at T = 4096, H = D'
    yield exact(quantity, added(D, 4096), -4096 * D * D)


def symmetry() -> Iterator[Row]:
    """Checks that A[n] = W W^T equals its transpose."""
    A_NDE = np.asarray(layer('shared_qk/vo').score.matrix())
    A_NED = np.swapaxes(A_NDE, -1, -2)
    yield same('asymmetry of A[n]', A_NED, A_NDE, tolerance=1e-14, part='symmetry')


def half_the_numbers() -> Iterator[Row]:
    """Checks that W W^T has about half the parameters and free parameters of W_Q W_K^T."""
    for H in (4, 16):
        sizes: Options = {'d_model': 16, 'num_heads': 1, 'head_size': H}
        context: Options = {'part': 'half of A', 'head_size': H}
        counts = [count(f'{name}/vo', 'score', **sizes) for name in SCORES]
        yield exact('share of the parameters', counts[0] / counts[1], 1 / 2, **context)
        scores = [layer(f'{name}/vo', **sizes).score for name in SCORES]
        tied, free = [freedom(lambda score: score.matrix(), score) for score in scores]
        yield exact('share of the free parameters', tied / free, 1 / 2, 0.1, **context)


def half_the_pattern() -> Iterator[Row]:
    """Checks whether patterns with W W^T have half the free numbers of those with W_Q W_K^T.

    The head has D = H = 8, with fewer and with more tokens than D, with and without a causal mask.
    """
    for causal in (False, True):
        for T, side in ((8, '<='), (24, '>')):
            part = f'half of the pattern, T {side} D'
            if causal:
                part += ', causal mask'
            tied, free = [pattern_freedom(name, T, causal=causal) for name in SCORES]
            quantity = 'share of the free parameters of a pattern'
            yield exact(quantity, tied / free, 1 / 2, 0.1, part=part, tokens=T)


def pattern_freedom(name: str, T: int, *, causal: bool) -> int:
    """Counts the independent directions in which the pattern softmax(x A x^T) can move.

    The pattern is that of T tokens, and the parameters of a Score move it. D = H = 8, and `name` is
    the name of the Score.
    """
    attention = layer(f'{name}/vo', d_model=8, num_heads=1)
    x_BTD = stream(T, d_model=8)[:1]
    seen_TS = jnp.tri(T, dtype=bool) if causal else jnp.ones((T, T), bool)

    def pattern(score: Score) -> jax.Array:
        s_BNTS = jnp.einsum('BTD,NDE,BSE->BNTS', x_BTD, score.matrix(), x_BTD)
        return jax.nn.softmax(jnp.where(seen_TS, score.scale * s_BNTS, -jnp.inf))

    return freedom(pattern, attention.score)


def dominant_diagonal() -> Iterator[Row]:
    """Checks how often a token scores itself highest at initialization, with T = 64 and D = 256.

    For D >> H, a query q scores its own token with |q|^2 and the other tokens with normal values of
    variance |q|^2, and |q|^2 is chi-squared with H degrees of freedom. So the expected share is
    E[Phi(|q|)^(T - 1)].
    """
    T = 64
    D = 256
    for H, side in ((4, '< ln T'), (64, '> 2 ln T')):
        spec = AttentionSpec(score='shared_qk', d_model=D, num_heads=1, head_size=H)
        inputs = []
        for seed in range(8):
            attention = Attention(spec, key=jax.random.key(seed))
            inputs.append(softmax_input(attention, stream(T, d_model=D, seed=seed)))
        s_XBNTS = np.stack(inputs)
        diagonal_XBNT = np.diagonal(s_XBNTS, axis1=-2, axis2=-1)
        shares_X = (diagonal_XBNT == s_XBNTS.max(-1)).mean((1, 2, 3))
        mean = inference.estimate(shares_X.tolist())
        expected = stats.chi.expect(lambda q: stats.norm.cdf(q) ** (T - 1), args=(H,))
        part = f'diagonal the largest of its row, H {side}'
        quantity = 'share of rows, above 0.5 for the claim'
        row = exact(quantity, mean.mean, expected, 0.05, part=part, head_size=H)
        speaks = Speaks.FOR if mean.low > 1 / 2 else Speaks.AGAINST
        yield dataclasses.replace(row, low=mean.low, high=mean.high, speaks=speaks)
    # The remaining rows are for the last head size, H = 64.
    is_largest_XBN = diagonal_XBNT.max(-1) == s_XBNTS.max((-1, -2))
    part = 'diagonal has the largest score of all'
    yield exact('share of sequences', is_largest_XBN.mean(), 1, part=part)
    others_XBNT = np.abs(s_XBNTS).sum(-1) - np.abs(diagonal_XBNT)
    is_above_XBNT = diagonal_XBNT >= others_XBNT
    part = 'diagonal above the sum of its row'
    yield exact('share of rows, H = 64', is_above_XBNT.mean(), 1, part=part)
