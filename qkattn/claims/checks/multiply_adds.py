"""Multiply-adds of the scores with two matrices and with one, and where they cost the same.

Per head, W_Q and W_K take 2 T D H + T^2 H and W_QK takes T D^2 + T^2 D for T tokens: merging adds
T D (D - 2 H) + T^2 (D - H). With D >= 2 H both terms are at least 0, so that one matrix never costs
less. With H < D < 2 H it does up to T = D (2 H - D) / (D - H); with D <= H it does at every T.
"""

import bisect
import functools

import jax
import jax.numpy as jnp

from qkattn.attention import Attention, AttentionSpec
from qkattn.claims.checks.small_layers import curve
from qkattn.claims.claim import exact
from qkattn.claims.decided import Row
from qkattn.config import ModelConfig
from qkattn.model import cost

WHERE = 'first T at which one matrix costs more, D = 64'


def factored(T: int, D: int, H: int) -> int:
    """x W_Q, x W_K, and the product of queries and keys."""
    return 2 * T * D * H + T * T * H


def merged(T: int, D: int) -> int:
    """x W_QK, and its product with the stream."""
    return T * D * D + T * T * D


def crossover(D: int, H: int) -> float:
    """The T at which both cost the same, for H < D < 2 H."""
    return D * (2 * H - D) / (D - H)


def scores(layer: Attention, x_BTD: jax.Array) -> jax.Array:
    """q k^T of a layer with one head."""
    q_BTNH, k_BSNH = layer.score.queries(x_BTD), layer.score.keys(layer.score.cached(x_BTD))
    return jnp.einsum('BTH,BSH->BTS', q_BTNH[:, :, 0], k_BSNH[:, :, 0])


def compiled(variant: str, T: int, D: int, H: int) -> int:
    """Multiply-adds of the compiled program of the scores, as XLA counts them."""
    spec = AttentionSpec(score=variant, d_model=D, num_heads=1, head_size=H)
    layer = jax.eval_shape(lambda: Attention(spec, key=jax.random.key(0)))
    x_BTD = jax.ShapeDtypeStruct((1, T, D), jnp.float32)
    return int(jax.jit(scores).lower(layer, x_BTD).compile().cost_analysis()['flops']) // 2


@functools.cache
def traced(variant: str, T: int, D: int, H: int) -> int:
    """Multiply-adds of a forward pass of a model with one layer and head, by `model.cost`."""
    config = ModelConfig(
        score=variant, d_model=D, num_layers=1, num_heads=1, head_size=H, context=T, vocab_size=2
    )
    return round(T * cost.flops_per_token(config) / 2)


def added_by_merging(T: int, D: int, H: int) -> int:
    return traced('merged', T, D, H) - traced('qk', T, D, H)


def counted_twice() -> list[Row]:
    """The formulas against the compiled program and against the traced model."""
    rows = []
    for T, D, H in ((16, 64, 16), (256, 64, 16), (64, 64, 48), (32, 24, 48)):
        shape = f'T = {T}, D = {D}, H = {H}'
        for name, formula in (('qk', factored(T, D, H)), ('merged', merged(T, D))):
            found = compiled(name, T, D, H)
            rows.append(exact(f'multiply-adds of {name} compiled, {shape}', found, formula))
        added = merged(T, D) - factored(T, D, H)
        found = added_by_merging(T, D, H)
        rows.append(exact(f'multiply-adds added by merging, {shape}', found, added))
    return rows


def where_they_cross() -> list[Row]:
    """The first T at which one matrix costs more, by the traced counts, on each side of D = 2 H."""
    rows, D = [], 64
    for H in (60, 48, 40, 36):
        row = exact(WHERE, first_costlier(D, H), int(crossover(D, H)) + 1)
        rows.append(curve(row, H, 'head_size'))
    for H in (32, 16, 8):
        row = exact(WHERE, first_costlier(D, H), 1)
        rows.append(curve(row, H, 'head_size'))
    cheaper = added_by_merging(4096, D, D)
    rows.append(exact('multiply-adds added by merging at T = 4096, H = D', cheaper, -4096 * D * D))
    return rows


def first_costlier(D: int, H: int) -> int:
    """The smallest T, up to 2048, from which on one matrix costs more."""
    return 1 + bisect.bisect(range(1, 2048), 0, key=lambda T: added_by_merging(T, D, H))
