"""Root mean square normalization."""

import jax
import jax.numpy as jnp


def rms_norm(x_BTD: jax.Array, *, epsilon: float) -> jax.Array:
    """x / sqrt(mean(x^2) + epsilon) over the last axis, without a gain.

    Computed in float32 or wider and returned in the dtype of x. Zhang & Sennrich 2019.
    """
    wide_BTD = x_BTD.astype(jnp.promote_types(x_BTD.dtype, jnp.float32))
    scale_BT1 = jax.lax.rsqrt(jnp.square(wide_BTD).mean(-1, keepdims=True) + epsilon)
    return (wide_BTD * scale_BT1).astype(x_BTD.dtype)
