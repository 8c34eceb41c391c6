"""Initialization of parameters, and the operations of which Scores and Values consist."""

import contextlib
import contextvars
import functools
import math
import operator
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import get_opaque_trace_state

from qkattn.attention.spec import AttentionSpec
from qkattn.errors import SpecError

# The initialization in force, and its factor for the group of parameters that is built.
_initialization = contextvars.ContextVar('initialization', default=('fan_in', 1.0))
_shapes_only = contextvars.ContextVar('shapes_only', default=False)
# (stream, matrix, bias), trace and output of every `project` inside `products_once`.
_products: contextvars.ContextVar[list | None] = contextvars.ContextVar('products', default=None)

NANOGPT_STD = 0.02


@contextlib.contextmanager
def inside(variable: contextvars.ContextVar, value: Any) -> Iterator[None]:
    """The variable has the value inside, and its former one after."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def initialization(init: str, factor: float) -> AbstractContextManager[None]:
    """Inside, `weight` draws with this initialization and with `factor` times its std.

    'fan_in' is the std that a matrix asks for, 'nanogpt' 0.02 (Radford et al. 2019).
    """
    return inside(_initialization, (init, factor))


def std_of(init: str, std: float) -> float:
    """The std that an initialization gives what asks for `std`, before any factor."""
    return NANOGPT_STD if init == 'nanogpt' else std


def shapes_only() -> AbstractContextManager[None]:
    """Matrices are zeros inside, which `eval_shape` traces six times as fast as draws."""
    return inside(_shapes_only, True)


def products_once() -> AbstractContextManager[None]:
    """Inside, `project` computes the product of one stream and one parameter once.

    The compiler merges equal products, but not the two further products of each one's gradients.
    """
    return inside(_products, [])


def one_key(key: jax.Array | None, rngs: nnx.Rngs | None) -> jax.Array:
    """`key`, or the next key of the stream 'params' of `rngs`; SpecError unless one is given."""
    if (key is None) == (rngs is None):
        raise SpecError('give either key=jax.random.key(0) or rngs=nnx.Rngs(0)')
    return rngs.params() if key is None else key


def weight(
    key: jax.Array, name: str, shape: tuple[int, ...], std: float, gain: float = 1.0
) -> nnx.Param:
    """A matrix with entries from normal(0, (gain std)^2), in float32.

    The `initialization` in force may replace std, and multiplies it by its factor; `gain` is that
    of the last matrix of a residual branch. Entry (i, j, k) over its std depends on the key, the
    name and (i, j, k) alone, not on the shape: models of other widths, depths or head counts, and
    factorizations that share a tensor, begin alike where they overlap.
    """
    if _shapes_only.get():
        return nnx.Param(jnp.zeros(shape, jnp.float32))
    init, factor = _initialization.get()
    std = std_of(init, std)
    key = jax.random.fold_in(key, zlib.crc32(name.encode()))
    return nnx.Param(factor * (gain * std) * _normal(key, shape))


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


def affine(
    spec: AttentionSpec,
    key: jax.Array,
    name: str,
    std: float | None = None,
    gain: float = 1.0,
    **sizes: int,
) -> tuple[nnx.Param, nnx.Param | None]:
    """W and b of x W + b, in the shapes that the axes in the name of W say: see `weight`, `bias`.

    `std` None is D^-1/2, where D is the first axis; `sizes` are those that the spec lacks.
    """
    letters = spec.letters | sizes
    shape = tuple(letters[axis] for axis in name.rpartition('_')[2])
    w_DNH = weight(key, name, shape, shape[0] ** -0.5 if std is None else std, gain)
    return w_DNH, bias(spec, shape[1:])


def output_projection(
    spec: AttentionSpec, key: jax.Array, name: str = 'w_o_NHD', **sizes: int
) -> tuple[nnx.Param, nnx.Param | None]:
    """W_O and b_O of a Value: W_O, which adds up N H channels, has std residual_gain (N H)^-1/2."""
    N, H, D = ((spec.letters | sizes)[axis] for axis in name.rpartition('_')[2])
    return weight(key, name, (N, H, D), (N * H) ** -0.5, spec.residual_gain), bias(spec, (D,))


def project(
    x_BTD: jax.Array, w_DNH: jax.Array, b_NH: jax.Array | None = None, *, axes: int = 1
) -> jax.Array:
    """x W + b; see `product`."""
    # A product belongs to the trace that made it: an inner one cannot hand it to an outer one.
    factors, trace = (x_BTD, w_DNH, b_NH), get_opaque_trace_state()
    known = _products.get()
    for others, made_in, out_BTNH in known or ():
        if made_in == trace and all(map(operator.is_, factors, others)):
            return out_BTNH
    out_BTNH = product(x_BTD, w_DNH[...], axes=axes)
    if b_NH is not None:
        out_BTNH = out_BTNH + b_NH[...]
    if known is not None:
        known.append((factors, trace, out_BTNH))
    return out_BTNH


def product(
    x_BTD: jax.Array, w_DNH: jax.Array, *, axes: int = 1, dtype: jnp.dtype | None = None
) -> jax.Array:
    """x W: contracts the last `axes` axes of x with the first ones of W; `dtype` is of the sums.

    The other axes of x are flattened: with more than one of them, XLA's CPU backend transposes what
    it multiplies for the gradient of W, at the price of another product.
    """
    rows, inner, outer = x_BTD.shape[:-axes], w_DNH.shape[:axes], w_DNH.shape[axes:]
    first, last = tuple(range(axes)), tuple(range(-axes, 0))
    contracted = first
    if math.prod(inner) > math.prod(outer):
        # With W transposed its gradient is a product [outer, rows] [rows, inner], on a CPU up to
        # twice as fast as [inner, rows] [rows, outer]; the barrier keeps XLA from undoing it.
        w_DNH, contracted = jax.lax.optimization_barrier(jnp.moveaxis(w_DNH, first, last)), last
    x_RD = x_BTD.reshape(-1, *inner)
    out_RNH = jnp.tensordot(x_RD, w_DNH, axes=(last, contracted), preferred_element_type=dtype)
    return out_RNH.reshape(*rows, *outer)


def rms_norm(x_BTD: jax.Array, *, epsilon: float) -> jax.Array:
    """x / sqrt(mean(x^2) + epsilon) over the last axis, float32 or wider. Zhang & Sennrich 2019."""
    wide_BTD = x_BTD.astype(jnp.promote_types(x_BTD.dtype, jnp.float32))
    scale_BT1 = jax.lax.rsqrt(jnp.square(wide_BTD).mean(-1, keepdims=True) + epsilon)
    return (wide_BTD * scale_BT1).astype(x_BTD.dtype)


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
