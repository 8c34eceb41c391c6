"""Parameters (A2, A5) and multiply-adds (A3) of scores with two matrices and with one.

Per head, W_Q and W_K take 2 T D H + T^2 H and W_QK takes T D^2 + T^2 D for T tokens: merging adds
T D (D - 2 H) + T^2 (D - H). With D >= 2 H both terms are at least 0, so that one matrix never costs
less. With H < D < 2 H it does up to T = D (2 H - D) / (D - H); with D <= H it does at every T.
"""

import bisect
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.attention import Attention, oracle
from qkattn.claims.checks.small_layers import count, layer, rank, shapes, softmax_input, stream
from qkattn.claims.claim import Row, exact


def added_parameters(D: int, H: int, N: int = 1) -> int:
    """Parameters that N heads have more with one matrix each than with W_Q and W_K."""
    merged, factored = (
        count(variant, 'score', d_model=D, num_heads=N, head_size=H)
        for variant in ('merged/vo', 'qk/vo')
    )
    return merged - factored


def merged_against_factored() -> Iterator[Row]:
    """D^2 against 2 D H per head, and where the difference changes its sign."""
    for H in (8, 32, 64):
        added = added_parameters(64, H)
        yield exact('parameters added by merging, D = 64', added, 64**2 - 128 * H, head_size=H)
    sizes = [
        (D, H, N) for D in (8, 12, 32, 64) for H in range(1, D + 2, max(1, D // 8)) for N in (1, 3)
    ]
    off = max(abs(added_parameters(D, H, N) - N * (D * D - 2 * D * H)) for D, H, N in sizes)
    yield exact(f'largest deviation from N (D^2 - 2 D H), {len(sizes)} shapes', off, 0)


def heads_of_a_fixed_width() -> Iterator[Row]:
    """2 D^2 / N parameters per head of H = D / N, 2 D^2 for every N, which buy N patterns."""
    D, T = 64, 12
    for N in (1, 8):
        counted = count('qk/vo', 'score', d_model=D, num_heads=N)
        s_BNTS = softmax_input(layer(d_model=D, num_heads=N), stream(T, d_model=D))
        p_NBTS = np.moveaxis(oracle.probabilities(s_BNTS, np.ones((1, T, T), bool)), 1, 0)
        patterns = rank(p_NBTS.reshape(N, -1))
        yield exact('parameters of W_Q and W_K per head', counted / N, 2 * D**2 / N, num_heads=N)
        yield exact('parameters of W_Q and W_K of all heads', counted, 2 * D**2, num_heads=N)
        yield exact('linearly independent patterns', patterns, N, num_heads=N)


def compiled(score: str, T: int, D: int, H: int) -> int:
    """Multiply-adds of the compiled program of q k^T of one head, as XLA counts them."""

    def scores(layer: Attention, x_BTD: jax.Array) -> jax.Array:
        q_BTNH, k_BSNH = layer.score.queries(x_BTD), layer.score.keys(layer.score.cached(x_BTD))
        return jnp.einsum('BTH,BSH->BTS', q_BTNH[:, :, 0], k_BSNH[:, :, 0])

    layer = shapes(f'{score}/vo', d_model=D, num_heads=1, head_size=H)
    x_BTD = jax.ShapeDtypeStruct((1, T, D), jnp.float32)
    return int(jax.jit(scores).lower(layer, x_BTD).compile().cost_analysis()['flops']) // 2


def multiply_adds() -> Iterator[Row]:
    """The formulas against the compiled programs."""
    for T, D, H in ((16, 64, 16), (64, 64, 48), (32, 24, 48)):
        # x W_Q, x W_K, and the product of queries and keys; x W_QK, and its product with x.
        formulas = {'qk': 2 * T * D * H + T * T * H, 'merged': T * D * D + T * T * D}
        for score, formula in formulas.items():
            quantity = f'multiply-adds of {score} compiled, T = {T}, D = {D}, H = {H}'
            yield exact(quantity, compiled(score, T, D, H), formula)


def where_they_cross() -> Iterator[Row]:
    """The first T, up to 2048, at which one matrix costs more, on each side of D = 2 H."""
    D = 64

    def added(H: int, T: int) -> int:
        return compiled('merged', T, D, H) - compiled('qk', T, D, H)

    for H, crossover in ((48, D * (2 * 48 - D) // (D - 48)), (16, 0)):
        costlier = bisect.bisect(range(1, 2048), 0, key=functools.partial(added, H))
        quantity = 'first T at which one matrix costs more, D = 64'
        yield exact(quantity, 1 + costlier, 1 + crossover, head_size=H)
    quantity = 'multiply-adds added by merging at T = 4096, H = D'
    yield exact(quantity, added(D, 4096), -4096 * D * D)
