"""Initialization of parameters, and the operations of which Scores and Values consist."""

import contextlib
import contextvars
import functools
import math
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import get_opaque_trace_state

from qkattn.attention.spec import AttentionSpec
from qkattn.errors import SpecError

# The initialization in force, and its factor for the group of parameters that is built.
_initialization = contextvars.ContextVar('initialization', default=('fan_in', 1.0))
_shapes_only = contextvars.ContextVar('shapes_only', default=False)


class _Product(NamedTuple):
    """One output of `project` inside `products_once`, and what it was computed from."""

    factors: tuple[Any, ...]  # stream, matrix and bias
    trace: Any  # the trace of JAX to which the output belongs
    out_BTNH: jax.Array


# The products inside `products_once`; None outside of it.
_products: contextvars.ContextVar[list[_Product] | None] = contextvars.ContextVar(
    'products', default=None
)

# The standard deviation of every matrix with init='nanogpt'.
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
    """The std of a matrix that asks for `std`, by initialization, before any factor."""
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
    """W and b of x W + b, drawn as in `weight` and `bias`.

    The name of W says its axes: 'w_q_DNH' has the shape [D, N, H], and b then has [N, H]. `sizes`
    are those of letters that the spec lacks, as in affine(spec, key, 'w_down_DR', R=8). `std` None
    is D^-1/2, where D is the first axis.
    """
    shape = _shape_of(name, spec, **sizes)
    if std is None:
        std = shape[0] ** -0.5
    w_DNH = weight(key, name, shape, std, gain)
    b_NH = bias(spec, shape[1:])
    return w_DNH, b_NH


def output_projection(
    spec: AttentionSpec, key: jax.Array, name: str = 'w_o_NHD', **sizes: int
) -> tuple[nnx.Param, nnx.Param | None]:
    """W_O and b_O of a Value: W_O, which adds up N H channels, has std residual_gain (N H)^-1/2."""
    N, H, D = _shape_of(name, spec, **sizes)
    w_o_NHD = weight(key, name, (N, H, D), (N * H) ** -0.5, spec.residual_gain)
    b_o_D = bias(spec, (D,))
    return w_o_NHD, b_o_D


def _shape_of(name: str, spec: AttentionSpec, **sizes: int) -> tuple[int, ...]:
    """The sizes of the letters at the end of a parameter's name: 'w_q_DNH' -> (D, N, H)."""
    letters = spec.letters | sizes
    return tuple(letters[letter] for letter in name.rpartition('_')[2])


def project(
    x_BTD: jax.Array, w_DNH: jax.Array, b_NH: jax.Array | None = None, *, axes: int = 1
) -> jax.Array:
    """x W + b; see `product`. Inside `products_once`, an equal product is not computed again."""
    factors = (x_BTD, w_DNH, b_NH)
    # A product belongs to one trace: that of an inner trace cannot be used in an outer one.
    trace = get_opaque_trace_state()
    products = _products.get()
    for earlier in products or ():
        same_factors = all(a is b for a, b in zip(earlier.factors, factors, strict=True))
        if same_factors and earlier.trace == trace:
            return earlier.out_BTNH
    out_BTNH = product(x_BTD, w_DNH[...], axes=axes)
    if b_NH is not None:
        out_BTNH = out_BTNH + b_NH[...]
    if products is not None:
        products.append(_Product(factors, trace, out_BTNH))
    return out_BTNH


def product(
    x_BTD: jax.Array, w_DNH: jax.Array, *, axes: int = 1, dtype: jnp.dtype | None = None
) -> jax.Array:
    """x W: contracts the last `axes` axes of x with the first ones of W; `dtype` is of the sums.

    The other axes of x are flattened: with more than one of them, XLA's CPU backend transposes what
    it multiplies for the gradient of W, at the price of another product.
    """
    rows = x_BTD.shape[:-axes]
    inner = w_DNH.shape[:axes]
    outer = w_DNH.shape[axes:]
    first_axes = tuple(range(axes))
    last_axes = tuple(range(-axes, 0))
    contracted = first_axes  # of W
    if math.prod(inner) > math.prod(outer):
        # With W transposed its gradient is a product [outer, rows] [rows, inner], on a CPU up to
        # twice as fast as [inner, rows] [rows, outer]; the barrier keeps XLA from undoing it.
        w_DNH = jax.lax.optimization_barrier(jnp.moveaxis(w_DNH, first_axes, last_axes))
        contracted = last_axes
    x_RD = x_BTD.reshape(-1, *inner)
    out_RNH = jnp.tensordot(x_RD, w_DNH, axes=(last_axes, contracted), preferred_element_type=dtype)
    return out_RNH.reshape(*rows, *outer)


def rms_norm(x_BTD: jax.Array, *, epsilon: float) -> jax.Array:
    """x / sqrt(mean(x^2) + epsilon) over the last axis, float32 or wider. Zhang & Sennrich 2019."""
    wide_BTD = x_BTD.astype(jnp.promote_types(x_BTD.dtype, jnp.float32))
    scale_BT1 = jax.lax.rsqrt(jnp.square(wide_BTD).mean(-1, keepdims=True) + epsilon)
    return (wide_BTD * scale_BT1).astype(x_BTD.dtype)


def homogeneous(w_DNH: jax.Array, b_NH: jax.Array | None) -> jax.Array:
    """[W; b], the matrix of x W + b in homogeneous coordinates (x, 1); W itself without a bias."""
    if b_NH is None:
        return w_DNH[...]
    return jnp.concatenate([w_DNH[...], b_NH[...][None]])


def composed(inner_DR: jax.Array, w_RNH: jax.Array, b_NH: jax.Array | None) -> jax.Array:
    """The homogeneous matrix of (x inner) W + b, where `inner_DR` is homogeneous itself."""
    product_DNH = jnp.tensordot(inner_DR, w_RNH[...], axes=1)
    if b_NH is None:
        return product_DNH
    return product_DNH.at[-1].add(b_NH[...])


def grouped(w_DKH: jax.Array, num_heads: int) -> jax.Array:
    """Repeats each of K heads N/K times: query head n uses key head n // (N/K)."""
    return jnp.repeat(w_DKH, num_heads // w_DKH.shape[1], axis=1)


def heads_of(x_BTD: jax.Array, num_heads: int) -> jax.Array:
    """Cuts the stream into N consecutive slices: [B, T, D] -> [B, T, N, D / N]."""
    return x_BTD.reshape(*x_BTD.shape[:-1], num_heads, -1)


def slices_DNH(spec: AttentionSpec) -> jax.Array:
    """The constant selectors P with heads_of(x) = x P; with biases one more row of zeros."""
    identity_DNH = jnp.eye(spec.d_model).reshape(spec.d_model, spec.num_heads, -1)
    if not spec.biases:
        return identity_DNH
    return jnp.concatenate([identity_DNH, jnp.zeros_like(identity_DNH[:1])])
