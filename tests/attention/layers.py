"""Small attention layers, their inputs, and the slow reference that they are compared with."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.attention import Attention, AttentionSpec, oracle, visible

D, N, H, T = 32, 4, 8, 7
SIZES = {'d_model': D, 'num_heads': N, 'num_kv_heads': N, 'head_size': H}


def make(
    variant: tuple[str, str], *, seed: int = 0, moved: bool = True, **options: Any
) -> Attention:
    """A layer; where `moved`, every parameter is off its initial value so that biases count."""
    spec = AttentionSpec(score=variant[0], value=variant[1], **{**SIZES, **options})
    layer = Attention(spec, key=jax.random.key(seed))
    leaves, tree = jax.tree.flatten(layer)
    if not moved or not leaves:
        return layer
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    leaves = [a + 0.1 * jax.random.normal(k, a.shape) for a, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, leaves)


def wide(tree: Any) -> Any:
    """The same arrays in float64; only under jax.enable_x64."""
    return jax.tree.map(lambda a: a.astype(jnp.float64), tree)


def stream(length: int = T, seed: int = 5, d_model: int = D) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (2, length, d_model))


def causal(length: int = T) -> jax.Array:
    return visible(length, length, causal=True)


def hide_self(score: Any, mask_BTS: jax.Array) -> jax.Array:
    """The mask with the diagonal hidden where the Score hides it and others are visible."""
    if not score.hides_self:
        return mask_BTS
    others_BTS = mask_BTS & ~jnp.eye(mask_BTS.shape[-1], dtype=bool)
    return jnp.where(others_BTS.any(-1, keepdims=True), others_BTS, mask_BTS)


def reference(layer: Attention, x_BTD: Any, y_BSD: Any, mask_BTS: jax.Array) -> np.ndarray:
    """out_BTD from A[n] and B[n]."""
    score = layer.score
    if x_BTD is y_BSD:
        mask_BTS = hide_self(score, mask_BTS)
    if score.bilinear:
        s_BNTS = oracle.logits(np.asarray(score.matrix()), x_BTD, y_BSD, scale=score.scale)
    else:
        s_BNTS = score.scale * score.reference_logits(np.asarray(x_BTD), np.asarray(y_BSD))
    return oracle.mix(s_BNTS, np.asarray(layer.value.matrix(score)), y_BSD, mask_BTS)


def error(got: Any, want: Any) -> float:
    """Largest difference relative to the largest element."""
    want = np.asarray(want, np.float64)
    return float(np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max())


def assert_equals_oracle_in_float64(layer: Attention) -> None:
    """Self-attention and cross-attention; only under jax.enable_x64."""
    layer, x_BTD, y_BSD = wide((layer, stream(), stream(5, seed=6)))
    got = layer(x_BTD, causal())
    assert got.dtype == jnp.float64
    assert error(got, reference(layer, x_BTD, x_BTD, causal())) < 1e-12
    across_BTS = visible(T, 5, causal=False)
    got = layer(x_BTD, across_BTS, y_BSD=y_BSD)
    assert error(got, reference(layer, x_BTD, y_BSD, across_BTS)) < 1e-12
