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
    count_parameters,
    equality_row,
    layer_of_shapes,
    num_free_directions,
    random_layer,
    random_stream,
    rank,
    softmax_input,
)
from experiments.claims.claim import Row, Speaks, exact_row
from qkattn.attention import Attention, AttentionSpec, Score, oracle
from qkattn.stats import inference

# Names of scores.
SHARED = 'shared_qk'  # W W^T
SEPARATE = 'qk'  # W_Q W_K^T


def num_added_parameters(D: int, H: int, N: int = 1) -> int:
    """How many more parameters N heads have with one matrix each than with W_Q and W_K."""
    sizes: Options = {'d_model': D, 'num_heads': N, 'head_size': H}
    merged = count_parameters('merged/vo', 'score', **sizes)
    factored = count_parameters('qk/vo', 'score', **sizes)
    return merged - factored


def merged_against_factored() -> Iterator[Row]:
    """Checks that merging W_Q and W_K changes a head's parameters from 2 D H to D^2.

    The change is N (D^2 - 2 D H) for N heads; its sign depends on whether H is above D / 2.
    """
    # Three head sizes, below, at and above D / 2.
    for H in (8, 32, 64):
        added = num_added_parameters(64, H)
        yield exact_row('parameters added by merging, D = 64', added, 64**2 - 128 * H, head_size=H)
    # The formula at many other sizes.
    deviations = []
    for D in (8, 12, 32, 64):
        for H in range(1, D + 2, max(1, D // 8)):
            for N in (1, 3):
                formula = N * (D * D - 2 * D * H)
                deviations.append(abs(num_added_parameters(D, H, N) - formula))
    quantity = f'largest deviation from N (D^2 - 2 D H), {len(deviations)} shapes'
    yield exact_row(quantity, max(deviations), expected=0)


def heads_of_a_fixed_width() -> Iterator[Row]:
    """Checks that more heads of size H = D / N give more patterns with as many parameters.

    W_Q and W_K of all N heads have 2 D^2 parameters together, for every N. The N attention patterns
    are linearly independent.
    """
    D = 64
    T = 12
    for N in (1, 8):
        parameters = count_parameters('qk/vo', 'score', d_model=D, num_heads=N)
        s_BNTS = softmax_input(random_layer(d_model=D, num_heads=N), random_stream(T, d_model=D))
        p_BNTS = oracle.probabilities(s_BNTS, np.ones((1, T, T), bool))
        # With the patterns of each head in one row, the rank counts the independent heads.
        patterns_NX = np.moveaxis(p_BNTS, 1, 0).reshape(N, -1)
        num_independent = rank(patterns_NX)
        per_head = parameters / N
        yield exact_row('parameters of W_Q and W_K per head', per_head, 2 * D**2 / N, num_heads=N)
        yield exact_row('parameters of W_Q and W_K of all heads', parameters, 2 * D**2, num_heads=N)
        yield exact_row('linearly independent patterns', num_independent, N, num_heads=N)


def compiled_multiply_adds(score: str, T: int, D: int, H: int) -> int:
    """Counts the multiply-adds in the compiled program of q k^T for one head, as XLA reports them.

    `score` is the name of a Score, T the number of tokens, D is d_model and H the head size.
    """

    def scores(layer: Attention, x_BTD: jax.Array) -> jax.Array:
        q_BTNH = layer.score.queries(x_BTD)
        k_BSNH = layer.score.keys(layer.score.cached(x_BTD))
        return jnp.einsum('BTH,BSH->BTS', q_BTNH[:, :, 0], k_BSNH[:, :, 0])

    layer = layer_of_shapes(f'{score}/vo', d_model=D, num_heads=1, head_size=H)
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
            yield exact_row(quantity, compiled_multiply_adds(score, T, D, H), formula)


def where_they_cross() -> Iterator[Row]:
    """Checks from which number of tokens T on one matrix W_QK costs more than W_Q and W_K.

    By the formula at the top of this module, merging adds T D (D - 2 H) + T^2 (D - H) multiply-adds
    for T tokens. With D = 64 and H = 48, this is above 0 from T = 129 on. With H = 16, it is above
    0 for every T, and with H = D for none.
    """
    D = 64

    def added(H: int, T: int) -> int:
        """Returns how many more multiply-adds one matrix takes than two."""
        return compiled_multiply_adds('merged', T, D, H) - compiled_multiply_adds('qk', T, D, H)

    # For each head size H, the last T at which one matrix does not cost more. By the formula, this
    # is D (2 H - D) / (D - H), rounded down, or 0 if it is negative.
    last_cheaper_T = {48: D * (2 * 48 - D) // (D - 48), 16: 0}
    for H, expected_T in last_cheaper_T.items():
        # `added` grows with T, so bisection counts the T at which it is at most 0.
        num_cheaper = bisect.bisect(range(1, 2048), 0, key=functools.partial(added, H))
        quantity = 'first T at which one matrix costs more, D = 64'
        yield exact_row(quantity, 1 + num_cheaper, 1 + expected_T, head_size=H)
    quantity = 'multiply-adds added by merging at T = 4096, H = D'
    yield exact_row(quantity, added(D, 4096), -4096 * D * D)


def symmetry() -> Iterator[Row]:
    """Checks that A[n] = W W^T equals its transpose."""
    A_NDE = np.asarray(random_layer('shared_qk/vo').score.matrix())
    A_NED = np.swapaxes(A_NDE, -1, -2)
    yield equality_row('asymmetry of A[n]', A_NED, A_NDE, tolerance=1e-14, part='symmetry')


def half_the_numbers() -> Iterator[Row]:
    """Checks that W W^T has about half the parameters and free parameters of W_Q W_K^T."""

    def matrix(score: Score) -> jax.Array:
        return score.matrix()

    for H in (4, 16):
        sizes: Options = {'d_model': 16, 'num_heads': 1, 'head_size': H}
        context: Options = {'part': 'half of A', 'head_size': H}
        num_shared = count_parameters(f'{SHARED}/vo', 'score', **sizes)
        num_separate = count_parameters(f'{SEPARATE}/vo', 'score', **sizes)
        share = num_shared / num_separate
        yield exact_row('share of the parameters', share, expected=1 / 2, **context)

        free_of_shared = num_free_directions(matrix, random_layer(f'{SHARED}/vo', **sizes).score)
        free_of_separate = num_free_directions(
            matrix, random_layer(f'{SEPARATE}/vo', **sizes).score
        )
        share = free_of_shared / free_of_separate
        quantity = 'share of the free parameters'
        yield exact_row(quantity, share, expected=1 / 2, tolerance=0.1, **context)


def half_the_pattern() -> Iterator[Row]:
    """Checks whether patterns with W W^T have half the free numbers of those with W_Q W_K^T.

    The head has D = H = 8, with fewer and with more tokens than D, with and without a causal mask.
    """
    for causal in (False, True):
        for T, side in ((8, '<='), (24, '>')):
            part = f'half of the pattern, T {side} D'
            if causal:
                part += ', causal mask'
            free_of_shared = num_free_directions_of_pattern(SHARED, T, causal=causal)
            free_of_separate = num_free_directions_of_pattern(SEPARATE, T, causal=causal)
            share = free_of_shared / free_of_separate
            quantity = 'share of the free parameters of a pattern'
            yield exact_row(quantity, share, expected=1 / 2, tolerance=0.1, part=part, tokens=T)


def num_free_directions_of_pattern(name: str, T: int, *, causal: bool) -> int:
    """Counts the independent directions in which a Score can change the pattern softmax(x A x^T).

    The pattern has T tokens, and A is the matrix of the Score `name`, with D = H = 8.
    """
    attention = random_layer(f'{name}/vo', d_model=8, num_heads=1)
    x_BTD = random_stream(T, d_model=8)[:1]
    seen_TS = jnp.tri(T, dtype=bool) if causal else jnp.ones((T, T), bool)

    def pattern(score: Score) -> jax.Array:
        s_BNTS = jnp.einsum('BTD,NDE,BSE->BNTS', x_BTD, score.matrix(), x_BTD)
        return jax.nn.softmax(jnp.where(seen_TS, score.scale * s_BNTS, -jnp.inf))

    return num_free_directions(pattern, attention.score)


def dominant_diagonal() -> Iterator[Row]:
    """Checks how often a token scores itself highest at initialization with W_Q = W_K.

    T = 64 and D = 256. A query q scores its own token with |q|^2, which is chi-squared with H
    degrees of freedom. If D is much larger than H, its scores of the other tokens are normal with
    variance |q|^2. So its own score is the highest with probability E[Phi(|q|)^(T - 1)].
    """
    T = 64
    D = 256
    scores_by_head_size = {H: _initial_scores(T, D, H) for H in (4, 64)}
    for H, side in ((4, '< ln T'), (64, '> 2 ln T')):
        s_XBNTS = scores_by_head_size[H]
        diagonal_XBNT = np.diagonal(s_XBNTS, axis1=-2, axis2=-1)
        is_largest_XBNT = diagonal_XBNT == s_XBNTS.max(-1)
        shares_X = is_largest_XBNT.mean((1, 2, 3))  # of each seed
        share = inference.estimate(shares_X.tolist())  # mean and 95 % interval
        expected = stats.chi.expect(lambda q: stats.norm.cdf(q) ** (T - 1), args=(H,))
        part = f'diagonal the largest of its row, H {side}'
        quantity = 'share of rows; the claim needs more than 0.5'
        row = exact_row(quantity, share.mean, expected, tolerance=0.05, part=part, head_size=H)
        # The claim is about one half, and not about the formula.
        speaks = Speaks.FOR if share.low > 1 / 2 else Speaks.AGAINST
        yield dataclasses.replace(row, low=share.low, high=share.high, speaks=speaks)

    s_XBNTS = scores_by_head_size[64]
    diagonal_XBNT = np.diagonal(s_XBNTS, axis1=-2, axis2=-1)
    is_largest_XBN = diagonal_XBNT.max(-1) == s_XBNTS.max((-1, -2))
    part = 'diagonal has the largest score of all'
    yield exact_row('share of sequences', is_largest_XBN.mean(), expected=1, part=part)
    sum_of_others_XBNT = np.abs(s_XBNTS).sum(-1) - np.abs(diagonal_XBNT)
    is_above_XBNT = diagonal_XBNT >= sum_of_others_XBNT
    part = 'diagonal above the sum of its row'
    yield exact_row('share of rows, H = 64', is_above_XBNT.mean(), expected=1, part=part)


def _initial_scores(T: int, D: int, H: int) -> np.ndarray:
    """Returns the scores s_XBNTS of shared_qk at initialization, with X = 8 seeds and one head."""
    spec = AttentionSpec(score='shared_qk', d_model=D, num_heads=1, head_size=H)
    scores = []
    for seed in range(8):
        attention = Attention(spec, key=jax.random.key(seed))
        scores.append(softmax_input(attention, random_stream(T, d_model=D, seed=seed)))
    return np.stack(scores)
