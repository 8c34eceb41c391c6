"""Initialization of parameters, and the operations of Scores and Values."""

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

# (init, factor) of `initialization`, for the parameters that are being built.
_initialization = contextvars.ContextVar('initialization', default=('fan_in', 1.0))
_shapes_only = contextvars.ContextVar('shapes_only', default=False)


class _Product(NamedTuple):
    """A cached output of `project`."""

    factors: tuple[Any, ...]  # stream, matrix and bias
    trace: Any  # the JAX trace of the output
    out_BTNH: jax.Array


# The cache of `project` inside `products_once`, else None.
_products: contextvars.ContextVar[list[_Product] | None] = contextvars.ContextVar(
    'products', default=None
)

# The standard deviation of every matrix with init='nanogpt'.
NANOGPT_STD = 0.02


@contextlib.contextmanager
def set_context_variable(variable: contextvars.ContextVar, value: Any) -> Iterator[None]:
    """Sets a context variable inside the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def initialization(init: str, factor: float) -> AbstractContextManager[None]:
    """Sets the initialization of all matrices that `weight` draws inside the block.

    Args:
        init: 'fan_in' for the `std` argument of `weight`, 'nanogpt' for std 0.02 in its place
            (Radford et al. 2019).
        factor: Multiplies every std.
    """
    return set_context_variable(_initialization, (init, factor))


def std_of(init: str, std: float) -> float:
    """Returns the std of a matrix: `std` with init='fan_in', 0.02 with init='nanogpt'."""
    return NANOGPT_STD if init == 'nanogpt' else std


def shapes_only() -> AbstractContextManager[None]:
    """Makes `weight` return zeros inside the block, which trace faster than random draws."""
    return set_context_variable(_shapes_only, True)


def products_once() -> AbstractContextManager[None]:
    """Makes `project` reuse equal products inside the block.

    The compiler would merge equal products, but not the products of their gradients.
    """
    return set_context_variable(_products, [])


def key_or_from_rngs(key: jax.Array | None, rngs: nnx.Rngs | None) -> jax.Array:
    """Returns `key`, or the next key of the stream 'params' in `rngs`.

    Raises SpecError if both or neither are given.
    """
    if (key is None) == (rngs is None):
        raise SpecError('give either key=jax.random.key(0) or rngs=nnx.Rngs(0)')
    return rngs.params() if key is None else key


def weight(
    key: jax.Array, name: str, shape: tuple[int, ...], std: float, gain: float = 1.0
) -> nnx.Param:
    """Draws a normal float32 matrix with mean 0 and standard deviation gain * std.

    The underlying standard normal entry (i, j, k) depends only on the key and the name. Matrices
    of different shapes therefore start from the same random numbers.

    Args:
        key: The random key, the same for all matrices of a layer.
        name: The name of the parameter, e.g. 'w_q_DNH'.
        shape: The shape of the matrix.
        std: The standard deviation, which `initialization` may replace or multiply.
        gain: A further factor, for the last matrix of a residual branch.
    """
    if _shapes_only.get():
        return nnx.Param(jnp.zeros(shape, jnp.float32))
    init, factor = _initialization.get()
    std = std_of(init, std)
    name_hash = zlib.crc32(name.encode())  # the same in every process
    key_of_name = jax.random.fold_in(key, name_hash)
    return nnx.Param(factor * (gain * std) * _normal(key_of_name, shape))


@functools.partial(jax.jit, static_argnames='shape')
def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draws standard normal numbers; entry (i, j, k) does not depend on the shape."""
    if len(shape) == 1:
        # A longer draw begins with the numbers of a shorter one (jax_threefry_partitionable).
        return jax.random.normal(key, shape, jnp.float32)

    # Every index along the first axis has a key of its own, which draws the other axes.
    def draw_row(row: jax.Array) -> jax.Array:
        return _normal(jax.random.fold_in(key, row), shape[1:])

    rows = jnp.arange(shape[0], dtype=jnp.uint32)
    return jax.vmap(draw_row)(rows)


def bias(spec: AttentionSpec, shape: tuple[int, ...]) -> nnx.Param | None:
    """Returns a vector of zeros if the spec has biases, else None."""
    return nnx.Param(jnp.zeros(shape, jnp.float32)) if spec.biases else None


def affine(
    spec: AttentionSpec,
    key: jax.Array,
    name: str,
    std: float | None = None,
    gain: float = 1.0,
    **sizes: int,
) -> tuple[nnx.Param, nnx.Param | None]:
    """Returns the parameters W and b of x W + b; b is None without biases.

    For example, `affine(spec, key, 'w_q_DNH')` returns W [D, N, H] and b [N, H].

    Args:
        spec: Gives the sizes D, N, K and H.
        key: The random key of W.
        name: The name of W, which ends in a letter for each axis.
        std: The standard deviation of W. The default is D^-1/2, where D is the first axis.
        gain: A further factor; see `weight`.
        sizes: The sizes of other letters, such as R=8 for 'w_down_DR'.
    """
    shape = _shape_of(name, spec, **sizes)
    if std is None:
        num_inputs = shape[0]
        std = num_inputs**-0.5
    w_DNH = weight(key, name, shape, std, gain)
    b_NH = bias(spec, shape[1:])
    return w_DNH, b_NH


def output_projection(
    spec: AttentionSpec, key: jax.Array, name: str = 'w_o_NHD', **sizes: int
) -> tuple[nnx.Param, nnx.Param | None]:
    """Returns W_O [N, H, D] and b_O [D] of a Value; b_O is None without biases.

    Args:
        spec: Gives the sizes N, H and D.
        key: The random key of W_O.
        name: The name of W_O, which ends in one letter for each of its three axes.
        sizes: The sizes of other letters, such as R=8 for 'w_o_NRD'.
    """
    N, H, D = _shape_of(name, spec, **sizes)
    num_inputs = N * H
    std = num_inputs**-0.5
    # The residual gain keeps the sum of all layers from growing with depth.
    w_o_NHD = weight(key, name, (N, H, D), std, gain=spec.residual_gain)
    b_o_D = bias(spec, (D,))
    return w_o_NHD, b_o_D


def _shape_of(name: str, spec: AttentionSpec, **sizes: int) -> tuple[int, ...]:
    """Returns the shape of a parameter from its name: 'w_q_DNH' -> (D, N, H)."""
    size_of_letter = spec.letters | sizes
    letters = name.rpartition('_')[2]  # 'DNH'
    for letter in letters:
        if letter not in size_of_letter:
            raise SpecError(
                f'axis {letter} of {name} has no size; the sizes are those of '
                f'{", ".join(size_of_letter)}, others are given as {letter}=8'
            )
    return tuple(size_of_letter[letter] for letter in letters)


def project(
    x_BTD: jax.Array, w_DNH: jax.Array, b_NH: jax.Array | None = None, *, axes: int = 1
) -> jax.Array:
    """Returns x W + b, a sum over the last `axes` axes of x and the first `axes` axes of W.

    Inside a `with products_once()` block, calls with the same arrays return the same result.
    """
    cache = _products.get()  # None outside of `products_once`
    factors = (x_BTD, w_DNH, b_NH)
    # An array from another trace, such as the body of a scan, must not be used here.
    trace = get_opaque_trace_state()
    for earlier in cache or ():
        has_same_factors = all(a is b for a, b in zip(earlier.factors, factors, strict=True))
        if has_same_factors and earlier.trace == trace:
            return earlier.out_BTNH

    out_BTNH = product(x_BTD, w_DNH[...], axes=axes)
    if b_NH is not None:
        out_BTNH = out_BTNH + b_NH[...]
    if cache is not None:
        cache.append(_Product(factors, trace, out_BTNH))
    return out_BTNH


def product(
    x_BTD: jax.Array, w_DNH: jax.Array, *, axes: int = 1, dtype: jnp.dtype | None = None
) -> jax.Array:
    """Returns jnp.tensordot(x, W, axes), with a gradient that is faster on CPUs.

    Args:
        x_BTD: The left operand, summed over its last `axes` axes.
        w_DNH: The right operand, summed over its first `axes` axes.
        axes: Number of axes in the sum.
        dtype: Dtype of the sum and the result; None is the dtype of the operands.
    """
    row_sizes = x_BTD.shape[:-axes]  # B, T
    inner_sizes = w_DNH.shape[:axes]  # D
    outer_sizes = w_DNH.shape[axes:]  # N, H
    first_axes = tuple(range(axes))  # (0, 1) for axes=2
    last_axes = tuple(range(-axes, 0))  # (-2, -1)

    # With several row axes, XLA would transpose the operands of the gradient, which is slow.
    x_RD = x_BTD.reshape(-1, *inner_sizes)

    has_more_inputs = math.prod(inner_sizes) > math.prod(outer_sizes)
    if has_more_inputs:
        # Multiply by W^T, with the first axes of W at the end. Its gradient is up to twice as fast.
        # The barrier keeps XLA from transposing back.
        w_NHD = jnp.moveaxis(w_DNH, first_axes, last_axes)
        w_NHD = jax.lax.optimization_barrier(w_NHD)
        summed_axes = (last_axes, last_axes)  # of x, of W
        out_RNH = jnp.tensordot(x_RD, w_NHD, summed_axes, preferred_element_type=dtype)
    else:
        summed_axes = (last_axes, first_axes)
        out_RNH = jnp.tensordot(x_RD, w_DNH, summed_axes, preferred_element_type=dtype)
    return out_RNH.reshape(*row_sizes, *outer_sizes)


def rms_norm(x_BTD: jax.Array, *, epsilon: float) -> jax.Array:
    """Returns x / sqrt(mean(x^2) + epsilon) over the last axis (Zhang & Sennrich 2019).

    Computes in float32 or wider. The result has the dtype of x.
    """
    wide_BTD = x_BTD.astype(jnp.promote_types(x_BTD.dtype, jnp.float32))
    scale_BT1 = jax.lax.rsqrt(jnp.square(wide_BTD).mean(-1, keepdims=True) + epsilon)
    return (wide_BTD * scale_BT1).astype(x_BTD.dtype)


def homogeneous(w_DNH: jax.Array, b_NH: jax.Array | None) -> jax.Array:
    """Returns the matrix of x W + b: W if b is None, else [W; b], which acts on (x, 1)."""
    if b_NH is None:
        return w_DNH[...]
    return jnp.concatenate([w_DNH[...], b_NH[...][None]])


def composed(inner_DR: jax.Array, w_RNH: jax.Array, b_NH: jax.Array | None) -> jax.Array:
    """Returns the `homogeneous` matrix of inner(x) W + b, from that of `inner`."""
    product_DNH = jnp.tensordot(inner_DR, w_RNH[...], axes=1)
    if b_NH is None:
        return product_DNH
    return product_DNH.at[-1].add(b_NH[...])


def grouped(w_DKH: jax.Array, num_heads: int) -> jax.Array:
    """Repeats each of K heads N/K times: query head n uses key head n // (N/K)."""
    return jnp.repeat(w_DKH, num_heads // w_DKH.shape[1], axis=1)


def heads_of(x_BTD: jax.Array, num_heads: int) -> jax.Array:
    """Splits the channels into N slices: [B, T, D] -> [B, T, N, D / N]."""
    return x_BTD.reshape(*x_BTD.shape[:-1], num_heads, -1)


def slices_DNH(spec: AttentionSpec) -> jax.Array:
    """Returns P_DNH with heads_of(x) = x P; with biases, P has one more row of zeros."""
    identity_DNH = jnp.eye(spec.d_model).reshape(spec.d_model, spec.num_heads, -1)
    if not spec.biases:
        return identity_DNH
    return jnp.concatenate([identity_DNH, jnp.zeros_like(identity_DNH[:1])])
