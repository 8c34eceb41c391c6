"""Parameters (A2, A5) and multiply-adds (A3) of scores with two matrices and with one.

Per head, W_Q and W_K take 2 T D H + T^2 H and W_QK takes T D^2 + T^2 D for T tokens: merging adds
T D (D - 2 H) + T^2 (D - H). With D >= 2 H both terms are at least 0, so that one matrix never costs
less. With H < D < 2 H it does up to T = D (2 H - D) / (D - H); with D <= H it does at every T.
"""

import bisect
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.attention import Attention, AttentionSpec, oracle
from qkattn.claims.checks.small_layers import count, float64, layer, rank, softmax_input, stream
from qkattn.claims.claim import Row, exact
from qkattn.config import ModelConfig
from qkattn.model import cost

WIDTHS = (8, 12, 32, 64)


def added_parameters(D: int, H: int, N: int = 1, K: int = 1) -> int:
    """Parameters that one matrix per head has more than W_Q and W_K with K key heads."""
    sizes = {'d_model': D, 'num_heads': N, 'head_size': H}
    return count('merged/vo', 'score', **sizes) - count('qk/vo', 'score', num_kv_heads=K, **sizes)


def merged_against_factored() -> Iterator[Row]:
    """D^2 against 2 D H per head, and where the difference changes its sign."""
    for H in (8, 16, 24, 32, 40, 64):
        added = added_parameters(64, H)
        yield exact('parameters added by merging, D = 64', added, 64**2 - 128 * H, head_size=H)
    shapes = {
        (D, H, N): added_parameters(D, H, N, N)
        for D in WIDTHS
        for H in range(1, D + 2, max(1, D // 8))
        for N in (1, 3)
    }
    off = max(abs(more - N * (D * D - 2 * D * H)) for (D, H, N), more in shapes.items())
    yield exact(f'largest deviation from N (D^2 - 2 D H), {len(shapes)} shapes', off, 0)
    wrong = sum((more > 0) != (D > 2 * H) for (D, H, _), more in shapes.items())
    yield exact('shapes where merging adds and D <= 2 H, or the reverse', wrong, 0)
    shared = [added_parameters(D, H, N=4) for D in WIDTHS for H in range(1, D // 2)]
    less = sum(more <= 0 for more in shared)
    yield exact(f'shapes with one key head where it does not add, {len(shared)}', less, 0)


@float64
def heads_of_a_fixed_width() -> Iterator[Row]:
    """2 D^2 / N parameters per head of H = D / N, 2 D^2 for every N, which buy N patterns."""
    D, T = 64, 12
    for N in (1, 2, 4, 8):
        counted = count('qk/vo', 'score', d_model=D, num_heads=N)
        s_BNTS = softmax_input(layer(d_model=D, num_heads=N), stream(T, d_model=D))
        p_NBTS = np.moveaxis(oracle.probabilities(s_BNTS, np.ones((1, T, T), bool)), 1, 0)
        patterns = rank(p_NBTS.reshape(N, -1))
        yield exact('parameters of W_Q and W_K per head', counted / N, 2 * D**2 / N, num_heads=N)
        yield exact('parameters of W_Q and W_K of all heads', counted, 2 * D**2, num_heads=N)
        yield exact('linearly independent patterns', patterns, N, num_heads=N)


def merged(T: int, D: int) -> int:
    """x W_QK, and its product with the stream."""
    return T * D * D + T * T * D


def crossover(D: int, H: int) -> float:
    """The T at which both cost the same, for H < D < 2 H."""
    return D * (2 * H - D) / (D - H)


def compiled(score: str, T: int, D: int, H: int) -> int:
    """Multiply-adds of the compiled program of q k^T of one head, as XLA counts them."""

    def scores(layer: Attention, x_BTD: jax.Array) -> jax.Array:
        q_BTNH, k_BSNH = layer.score.queries(x_BTD), layer.score.keys(layer.score.cached(x_BTD))
        return jnp.einsum('BTH,BSH->BTS', q_BTNH[:, :, 0], k_BSNH[:, :, 0])

    spec = AttentionSpec(score=score, d_model=D, num_heads=1, head_size=H)
    layer = jax.eval_shape(lambda: Attention(spec, key=jax.random.key(0)))
    x_BTD = jax.ShapeDtypeStruct((1, T, D), jnp.float32)
    return int(jax.jit(scores).lower(layer, x_BTD).compile().cost_analysis()['flops']) // 2


@functools.cache
def added_by_merging(T: int, D: int, H: int) -> int:
    """Multiply-adds that a model with one layer and head has more with W_QK, by `model.cost`."""
    sizes: dict[str, Any] = {
        'd_model': D,
        'num_layers': 1,
        'num_heads': 1,
        'head_size': H,
        'context': T,
    }
    one, two = (ModelConfig(score=score, vocab_size=2, **sizes) for score in ('merged', 'qk'))
    return round(T * (cost.flops_per_token(one) - cost.flops_per_token(two)) / 2)


def multiply_adds() -> Iterator[Row]:
    """The formulas against the compiled program and against the traced model."""
    for T, D, H in ((16, 64, 16), (256, 64, 16), (64, 64, 48), (32, 24, 48)):
        shape, one = f'T = {T}, D = {D}, H = {H}', merged(T, D)
        two = 2 * T * D * H + T * T * H  # x W_Q, x W_K, and the product of queries and keys
        for score, formula in (('qk', two), ('merged', one)):
            quantity = f'multiply-adds of {score} compiled, {shape}'
            yield exact(quantity, compiled(score, T, D, H), formula)
        added = added_by_merging(T, D, H)
        yield exact(f'multiply-adds added by merging, {shape}', added, one - two)


def where_they_cross() -> Iterator[Row]:
    """The first T, up to 2048, at which one matrix costs more, on each side of D = 2 H."""
    D = 64
    for H in (60, 48, 40, 36, 32, 16, 8):
        costlier = bisect.bisect(range(1, 2048), 0, key=lambda T: added_by_merging(T, D, H))
        first = int(crossover(D, H)) + 1 if D < 2 * H else 1
        quantity = 'first T at which one matrix costs more, D = 64'
        yield exact(quantity, 1 + costlier, first, head_size=H)
    cheaper = added_by_merging(4096, D, D)
    yield exact('multiply-adds added by merging at T = 4096, H = D', cheaper, -4096 * D * D)
