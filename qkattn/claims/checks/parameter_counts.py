"""Parameters of the QK circuit, counted on the parameters of real layers."""

import math
from typing import Any

import jax
import numpy as np
from flax import nnx

from qkattn.attention import Attention, AttentionSpec, oracle
from qkattn.attention.parameters import shapes_only
from qkattn.claims.checks.small_layers import (
    curve,
    float64,
    layer,
    rank,
    softmax_input,
    stream,
)
from qkattn.claims.claim import exact
from qkattn.claims.decided import Row
from qkattn.config.calls import Variant

WIDTHS = (8, 12, 32, 64)


def count(variant: str, *, circuit: str = 'score', **sizes: Any) -> int:
    """Parameters of one circuit of a layer; `sizes` are those of its spec."""
    score, value = Variant.parse(variant)
    spec = AttentionSpec(score=score, value=value, **sizes)
    with shapes_only():
        layer = nnx.eval_shape(lambda: Attention(spec, key=jax.random.key(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(getattr(layer, circuit)))


def added_by_merging(D: int, H: int, *, N: int = 1, K: int = 1) -> int:
    """Parameters that one matrix per head has more than W_Q and W_K with K key heads."""
    sizes: dict[str, Any] = {'d_model': D, 'num_heads': N, 'head_size': H}
    return count('merged/vo', **sizes) - count('qk/vo', **sizes, num_kv_heads=K)


def merged_against_factored() -> list[Row]:
    """D^2 against 2 D H per head, and where the difference changes its sign."""
    rows = []
    for H in (8, 16, 24, 32, 40, 64):
        row = exact('parameters added by merging, D = 64', added_by_merging(64, H), 64**2 - 128 * H)
        rows.append(curve(row, H, 'head_size'))
    added = {
        (D, H, N): added_by_merging(D, H, N=N, K=N)
        for D in WIDTHS
        for H in range(1, D + 2, max(1, D // 8))
        for N in (1, 3)
    }
    off = max(abs(found - N * (D * D - 2 * D * H)) for (D, H, N), found in added.items())
    rows.append(exact(f'largest deviation from N (D^2 - 2 D H), {len(added)} shapes', off, 0))
    wrong = sum((found > 0) != (D > 2 * H) for (D, H, _), found in added.items())
    rows.append(exact('shapes where merging adds and D <= 2 H, or the reverse', wrong, 0))
    shared = {(D, H): added_by_merging(D, H, N=4, K=1) for D in WIDTHS for H in range(1, D // 2)}
    wrong = sum(found <= 0 for found in shared.values())
    rows.append(exact(f'shapes with one key head where it does not add, {len(shared)}', wrong, 0))
    return rows


@float64
def heads_of_a_fixed_width() -> list[Row]:
    """2 D^2 / N parameters per head of H = D / N, 2 D^2 for every N, which buy N patterns."""
    D, rows, T = 64, [], 12
    for N in (1, 2, 4, 8):
        counted = count('qk/vo', d_model=D, num_heads=N)
        row = exact('parameters of W_Q and W_K per head', counted / N, 2 * D**2 / N)
        rows.append(curve(row, N, 'num_heads'))
        row = exact('parameters of W_Q and W_K of all heads', counted, 2 * D**2)
        rows.append(curve(row, N, 'num_heads'))
        s_BNTS = softmax_input(layer(d_model=D, num_heads=N), stream(T, d_model=D))
        patterns_NP = np.moveaxis(oracle.probabilities(s_BNTS, np.ones((1, T, T), bool)), 1, 0)
        row = exact('linearly independent patterns', rank(patterns_NP.reshape(N, -1)), N)
        rows.append(curve(row, N, 'num_heads'))
    return rows
