"""Position encodings: rotary embeddings, linear biases, sinusoids."""

import jax
import jax.numpy as jnp
import numpy as np

# The frequencies of rotations and of sinusoids are BASE^0 down to almost BASE^-1.
BASE = 10_000.0


def rotate(x_BTNH: jax.Array, positions_T: jax.Array) -> jax.Array:
    """Rotates the channels h and h + H/2 of position t by the angle t / BASE^(2 h / H).

    The inner product of a rotated query and a rotated key depends on their positions only through
    the distance t - s. Su et al. 2021 (RoFormer), section 3.2, in the half-split layout.
    """
    half = x_BTNH.shape[-1] // 2
    dtype = jnp.promote_types(x_BTNH.dtype, jnp.float32)
    frequency_H = jnp.asarray(BASE ** (-np.arange(half) / half), dtype)
    angle_T1H = positions_T[:, None, None].astype(dtype) * frequency_H
    cos_T1H = jnp.cos(angle_T1H)
    sin_T1H = jnp.sin(angle_T1H)
    # Channel h of the first half, a, and of the second, b, are the coordinates of one point.
    a_BTNH = x_BTNH[..., :half].astype(dtype)
    b_BTNH = x_BTNH[..., half:].astype(dtype)
    rotated = [
        a_BTNH * cos_T1H - b_BTNH * sin_T1H,
        a_BTNH * sin_T1H + b_BTNH * cos_T1H,
    ]
    return jnp.concatenate(rotated, axis=-1).astype(x_BTNH.dtype)


def rotate_last(x_BTNH: jax.Array, positions_T: jax.Array, size: int | None) -> jax.Array:
    """Applies `rotate` to the last `size` channels of each head, or to all if `size` is None."""
    if size is None or size == x_BTNH.shape[-1]:
        return rotate(x_BTNH, positions_T)
    rotated = rotate(x_BTNH[..., -size:], positions_T)
    return jnp.concatenate([x_BTNH[..., :-size], rotated], axis=-1)


def linear_bias(num_heads: int, distance_TS: jax.Array) -> jax.Array:
    """Returns the biases of ALiBi, b_NTS = -slope[n] |t - s| with slope[n] = 2^(-8 (n + 1) / N).

    `distance_TS` is t - s. Press et al. 2022, section 3, define these slopes for N a power of two;
    here every N has them.
    """
    slope_N = 2.0 ** (-8.0 * np.arange(1, num_heads + 1) / num_heads)
    return -jnp.asarray(slope_N, jnp.float32)[:, None, None] * jnp.abs(distance_TS)


def sinusoids(positions_T: jax.Array, d_model: int) -> jax.Array:
    """Returns fixed position embeddings [T, D]: sqrt(2) times sines, then cosines.

    The factor sqrt(2) gives them unit variance. Positions may have any shape: [B, T] gives
    [B, T, D]. Vaswani et al. 2017, section 3.5.
    """
    half = (d_model + 1) // 2  # For an odd d_model, the last cosine is cut off below.
    frequency_D = BASE ** (-np.arange(half) / half)
    angle_TD = positions_T[..., None].astype(jnp.float32) * jnp.asarray(frequency_D, jnp.float32)
    sin_cos_TD = jnp.concatenate([jnp.sin(angle_TD), jnp.cos(angle_TD)], axis=-1)
    return 2**0.5 * sin_cos_TD[..., :d_model]
