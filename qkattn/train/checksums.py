"""Checksums of arrays, computed on the devices where they lie, whatever the mesh.

The sum of an array x of M elements with the bit patterns b_0 ... b_(M-1), in row-major order, is

    sum_i h(b_i xor h(i))  mod 2^32,     h: the finalizer of MurmurHash3

h permutes the 32-bit numbers, so that a change of one element always changes the sum; any other
change is missed with probability 2^-32. Integer addition is exact in any order: the sums do not
depend on mesh, devices or processes. Elements of 8 bytes count as two of 4 bytes.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding


def sums(tree: Any) -> jax.Array:
    """The sums of the arrays of a tree, uint32 [leaves] in the order of `names`, on every device.

    Takes arrays of numbers, booleans and keys that share one mesh, or lie on one device. The result
    is computed on the devices; nothing waits for it before it is read.
    """
    leaves = jax.tree.leaves(tree)
    return _program(replicated(leaves[0].sharding))(leaves)


def names(tree: Any) -> list[str]:
    """The paths of the leaves of a tree, as in 'trials/params/w_embedding_VD'."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator='/') for path, _ in leaves]


def replicated(placed: Sharding) -> Sharding:
    """All of an array on every device of the mesh, or on the one device, of `placed`."""
    return NamedSharding(placed.mesh, PartitionSpec()) if hasattr(placed, 'mesh') else placed


@functools.cache
def _program(placed: Sharding) -> Callable[[list[jax.Array]], jax.Array]:
    return jax.jit(lambda leaves: jnp.stack([array_sum(a) for a in leaves]), out_shardings=placed)


def array_sum(a: jax.Array) -> jax.Array:
    """The sum of one array, uint32 []; for use inside a program."""
    bits = _bits(a)
    position, stride = jnp.zeros(bits.shape, jnp.uint32), 1
    for axis in reversed(range(bits.ndim)):
        along = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        position += along * np.uint32(stride % 2**32)
        stride *= bits.shape[axis]
    return _mixed(bits ^ _mixed(position)).sum(dtype=jnp.uint32)


def _bits(a: jax.Array) -> jax.Array:
    """The bit patterns as uint32, with another axis for elements of 8 bytes."""
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a = jax.random.key_data(a)
    if a.dtype == jnp.bool:
        return a.astype(jnp.uint32)
    size = a.dtype.itemsize
    if size > 4:
        return jax.lax.bitcast_convert_type(a, jnp.uint32)
    return jax.lax.bitcast_convert_type(a, f'uint{8 * size}').astype(jnp.uint32)


def _mixed(h: jax.Array) -> jax.Array:
    """The finalizer of MurmurHash3 (Appleby 2011): a permutation that flips half of the bits."""
    h ^= h >> 16
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> 13
    h *= np.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
