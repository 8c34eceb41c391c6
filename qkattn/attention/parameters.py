"""Initialization and linear algebra of the parameters of Scores and Values."""

import functools
import zlib

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention.spec import AttentionSpec


def weight(key: jax.Array, name: str, shape: tuple[int, ...], std: float) -> nnx.Param:
    """A matrix with entries from normal(0, std^2), in float32.

    Entry (i, j, k) over std depends on the key, the name and (i, j, k) alone, not on the shape:
    tensors of one name and seed are slices of one draw, so that models of other widths, depths or
    head counts, and factorizations that share a tensor, begin alike where they overlap.
    """
    own_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
    return nnx.Param(std * _normal(own_key, shape))


@functools.partial(jax.jit, static_argnames='shape')
def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A corner of a draw that is unbounded along every axis."""
    if len(shape) == 1:
        # Counter-based bits (jax_threefry_partitionable): n + 1 numbers begin with the same n.
        return jax.random.normal(key, shape, jnp.float32)
    rows = jnp.arange(shape[0], dtype=jnp.uint32)
    return jax.vmap(lambda row: _normal(jax.random.fold_in(key, row), shape[1:]))(rows)


def bias(spec: AttentionSpec, shape: tuple[int, ...]) -> nnx.Param | None:
    """A zero vector where the spec has biases, else None."""
    return nnx.Param(jnp.zeros(shape, jnp.float32)) if spec.biases else None


def project(x_BTD: jax.Array, w_DNH: jax.Array, b_NH: jax.Array | None = None) -> jax.Array:
    """x W + b: contracts the last axis of x with the first axis of W."""
    out = jnp.tensordot(x_BTD, w_DNH[...], axes=1)
    return out if b_NH is None else out + b_NH[...]


def homogeneous(w_DNH: jax.Array, b_NH: jax.Array | None) -> jax.Array:
    """[W; b], the matrix of x W + b in homogeneous coordinates (x, 1); W itself without a bias."""
    return w_DNH[...] if b_NH is None else jnp.concatenate([w_DNH[...], b_NH[...][None]])


def composed(inner_DR: jax.Array, w_RNH: jax.Array, b_NH: jax.Array | None) -> jax.Array:
    """The homogeneous matrix of (x inner) W + b, where `inner_DR` is homogeneous itself."""
    both_DNH = jnp.tensordot(inner_DR, w_RNH[...], axes=1)
    return both_DNH if b_NH is None else both_DNH.at[-1].add(b_NH[...])


def grouped(w_DKH: jax.Array, num_heads: int) -> jax.Array:
    """Repeats each of K heads N/K times: query head n uses key head n // (N/K)."""
    return jnp.repeat(w_DKH, num_heads // w_DKH.shape[1], axis=1)


def heads_of(x_BTD: jax.Array, num_heads: int) -> jax.Array:
    """Cuts the stream into N consecutive slices: [B, T, D] -> [B, T, N, D / N]."""
    return x_BTD.reshape(*x_BTD.shape[:-1], num_heads, -1)


def slices_DNH(spec: AttentionSpec) -> jax.Array:
    """The constant selectors P with heads_of(x) = x P; with biases one more row of zeros."""
    d_model, num_heads = spec.d_model, spec.num_heads
    identity_DNH = jnp.eye(d_model).reshape(d_model, num_heads, -1)
    if not spec.biases:
        return identity_DNH
    return jnp.concatenate([identity_DNH, jnp.zeros_like(identity_DNH[:1])])
