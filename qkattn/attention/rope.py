"""Position encodings: rotary embeddings, linear biases, sinusoids."""

import jax
import jax.numpy as jnp
import numpy as np

# The frequencies of rotations and sinusoids go from BASE^0 to almost BASE^-1.
BASE = 10_000.0


def rotate(x_BTNH: jax.Array, positions_T: jax.Array) -> jax.Array:
    """Applies rotary position embeddings in the half-split layout.

    Channels h and h + H/2 at position t are rotated by the angle t BASE^(-h / (H/2)). Su et al.
    2021 (RoFormer), section 3.2.
    """
    half = x_BTNH.shape[-1] // 2  # F, the number of frequencies
    dtype = jnp.promote_types(x_BTNH.dtype, jnp.float32)
    frequency_F = jnp.asarray(BASE ** (-np.arange(half) / half), dtype)
    angle_T1F = positions_T[:, None, None].astype(dtype) * frequency_F
    cos_T1F = jnp.cos(angle_T1F)
    sin_T1F = jnp.sin(angle_T1F)
    first_half_BTNF = x_BTNH[..., :half].astype(dtype)
    second_half_BTNF = x_BTNH[..., half:].astype(dtype)
    rotated_halves = [
        first_half_BTNF * cos_T1F - second_half_BTNF * sin_T1F,
        first_half_BTNF * sin_T1F + second_half_BTNF * cos_T1F,
    ]
    return jnp.concatenate(rotated_halves, axis=-1).astype(x_BTNH.dtype)


def rotate_last(x_BTNH: jax.Array, positions_T: jax.Array, size: int | None) -> jax.Array:
    """Applies `rotate` to the last `size` channels of each head, or to all if `size` is None."""
    if size is None or size == x_BTNH.shape[-1]:
        return rotate(x_BTNH, positions_T)
    unrotated = x_BTNH[..., :-size]
    rotated = rotate(x_BTNH[..., -size:], positions_T)
    return jnp.concatenate([unrotated, rotated], axis=-1)


def linear_bias(num_heads: int, distance_TS: jax.Array) -> jax.Array:
    """Returns the ALiBi biases b_NTS = -slope[n] |t - s|, where slope[n] = 2^(-8 (n + 1) / N).

    Press et al. 2022, section 3, where N is a power of 2.

    Args:
        num_heads: N, any number of heads.
        distance_TS: T - s.
    """
    slope_N = 2.0 ** (-8.0 * np.arange(1, num_heads + 1) / num_heads)
    slope_N11 = jnp.asarray(slope_N, jnp.float32)[:, None, None]
    return -slope_N11 * jnp.abs(distance_TS)


def sinusoids(positions_T: jax.Array, d_model: int) -> jax.Array:
    """Returns sinusoidal position embeddings, sines before cosines, with unit variance.

    Vaswani et al. 2017, section 3.5.

    Args:
        positions_T: The positions, of any shape.
        d_model: D, the size of an embedding.

    Returns:
        Embeddings [T, D], or [B, T, D] for positions [B, T].
    """
    half = (d_model + 1) // 2  # F, the number of frequencies
    frequency_F = jnp.asarray(BASE ** (-np.arange(half) / half), jnp.float32)
    angle_TF = positions_T[..., None].astype(jnp.float32) * frequency_F
    sin_cos = jnp.concatenate([jnp.sin(angle_TF), jnp.cos(angle_TF)], axis=-1)
    sin_cos_TD = sin_cos[..., :d_model]  # drops the last cosine if D is odd
    return 2**0.5 * sin_cos_TD
