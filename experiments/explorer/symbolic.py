"""Evaluates JAX functions on arrays of polynomials.

No equation of a variant is written twice: `evaluate` traces a function to a jaxpr, and applies its
operations to elements of a sympy ring.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.config.imports import load_extra
from qkattn.errors import ConfigError


@functools.cache
def sympy() -> ModuleType:
    """The package sympy, of the extra `explore`; ConfigError if it is not installed."""
    return load_extra('sympy', 'explore')


def generators(blocks: Mapping[str, Sequence[int]]) -> tuple[Any, list[np.ndarray]]:
    """A ring of polynomials with real coefficients, and its generators as an array of each block.

    `blocks` are shapes [head, ...] by name. A generator has the name of its block and its place,
    counted from 1: a12, or a[2]12 in head 2 of several.
    """
    names = []
    for block, shape in blocks.items():
        for head, *place in np.ndindex(*shape):
            name = block
            if shape[0] > 1:
                name += f'[{head + 1}]'
            name += ''.join(str(index + 1) for index in place)
            names.append(name)
    ring = sympy().polys.rings.PolyRing(names, sympy().RR)
    arrays = []
    first = 0
    for shape in blocks.values():
        flat = np.empty(math.prod(shape), object)
        flat[:] = ring.gens[first : first + flat.size]
        first += flat.size
        arrays.append(flat.reshape(shape))
    return ring, arrays


def rank(M_DE: np.ndarray) -> int:
    """The rank of a matrix of polynomials for almost all values of the symbols.

    It is that at one random point.
    """
    point = np.random.default_rng(0).uniform(0.5, 1.5, M_DE.flat[0].ring.ngens)
    return int(np.linalg.matrix_rank(numbers(M_DE, point)))


def numbers(polynomials: np.ndarray, point: np.ndarray) -> np.ndarray:
    """The values of polynomials where the generators of their ring are `point`."""
    # Calling a polynomial takes twelve times as long: it substitutes one generator after another.
    values = []
    for polynomial in polynomials.flat:
        terms = polynomial.terms()
        values.append(sum(float(number) * np.prod(point**powers) for powers, number in terms))
    return np.array(values, float).reshape(polynomials.shape)


def evaluate(function: Callable[..., Any], *arrays: np.ndarray) -> list[np.ndarray]:
    """The outputs of function(*arrays), arrays of polynomials; constants where none enters.

    The function is traced to a jaxpr, whose operations are evaluated one after the other:
    arithmetic on elements of the ring; operations that only move entries (slice, gather, ...) on
    the positions of the entries; operations on constants as they are.

    ConfigError if the function uses an operation that is unknown here.
    """
    shapes = [jax.ShapeDtypeStruct(array.shape, jnp.float64) for array in arrays]
    with jax.enable_x64(True), jax.disable_jit():  # functions inside are traced, too
        traced = jax.make_jaxpr(function)(*shapes)
        variables = [*traced.jaxpr.constvars, *traced.jaxpr.invars]
        values = dict(zip(variables, [*traced.consts, *arrays], strict=True))

        def read(atom: Any) -> Any:
            """The value of an operand: a literal, which holds it, or a variable."""
            return atom.val if hasattr(atom, 'val') else values[atom]

        for equation in traced.jaxpr.eqns:
            outputs = _apply(equation, [read(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, outputs, strict=True))
        return [np.asarray(read(atom)) for atom in traced.jaxpr.outvars]


_ALL = slice(None)
# Primitives that only move entries, with the operands that hold entries; the others are indices.
_MOVES = {
    'concatenate': _ALL,
    'convert_element_type': _ALL,
    'dynamic_slice': slice(1),
    'expand_dims': _ALL,
    'gather': slice(1),
    'pad': _ALL,
    'rev': _ALL,
    'select_n': slice(1, None),
    'slice': _ALL,
    'split': _ALL,
    'squeeze': _ALL,
    'tile': _ALL,
}


def _broadcast(array: np.ndarray, shape: Any, broadcast_dimensions: Any, **_: Any) -> np.ndarray:
    """broadcast_in_dim: axis i of the array becomes axis broadcast_dimensions[i] of the output."""
    new_axes = [axis for axis in range(len(shape)) if axis not in broadcast_dimensions]
    return np.broadcast_to(np.expand_dims(array, new_axes), shape)


def _product(left: np.ndarray, right: np.ndarray, dimension_numbers: Any, **_: Any) -> np.ndarray:
    """dot_general: batch axes, then the free axes of the left operand, then those of the right."""
    (left_summed, right_summed), (left_batch, right_batch) = dimension_numbers
    # Axes as np.einsum takes them, by number: axes of both operands that belong together have one.
    left_axes = list(range(left.ndim))
    right_axes = [left.ndim + axis for axis in range(right.ndim)]
    left_shared = [*left_summed, *left_batch]
    right_shared = [*right_summed, *right_batch]
    for axis, right_axis in zip(left_shared, right_shared, strict=True):
        right_axes[right_axis] = axis
    free = [axis for axis in left_axes if axis not in left_shared]
    free += [axis for axis in right_axes if axis >= left.ndim]
    return np.einsum(left, left_axes, right, right_axes, [*left_batch, *free])


# Primitives that compute, on arrays of symbols. Some move entries: on positions, as those of
# _MOVES, XLA would compile them for every shape.
_COMPUTED: dict[str, Callable[..., Any]] = {
    'add': lambda a, b, **_: a + b,
    'broadcast_in_dim': _broadcast,
    'dot_general': _product,
    'mul': lambda a, b, **_: a * b,
    'neg': lambda array, **_: -array,
    'reduce_sum': lambda array, axes, **_: array.sum(axis=tuple(axes)),
    'reshape': lambda array, new_sizes, **_: array.reshape(new_sizes),
    'square': lambda array, **_: array * array,
    'stop_gradient': lambda array, **_: array,
    'sub': lambda a, b, **_: a - b,
    'transpose': lambda array, permutation, **_: array.transpose(permutation),
}


def _apply(equation: Any, inputs: list[Any]) -> list[Any]:
    """The outputs of an equation of a jaxpr, whose operands have these values."""
    name = equation.primitive.name
    symbolic = [array for array in inputs if _is_symbolic(array)]
    if not symbolic:
        return _bind(equation, inputs)
    ring = symbolic[0].flat[0].ring
    if name in _MOVES:
        return _move(equation, inputs, _MOVES[name], ring)
    if name == 'div' and not _is_symbolic(inputs[1]):
        name = 'mul'
        inputs = [inputs[0], 1 / np.asarray(inputs[1])]
    operands = [_elements(array, ring) for array in inputs]
    if name == 'integer_pow' and equation.params['y'] > 0:
        return [operands[0] ** equation.params['y']]
    if name not in _COMPUTED:
        raise ConfigError(f'matrix() uses {name}; symbols have sums, products and positive powers')
    output = _COMPUTED[name](*operands, **equation.params)
    return [np.asarray(output, object)]


def _bind(equation: Any, inputs: Sequence[Any]) -> list[Any]:
    """The outputs of an equation on numbers, by the primitive itself."""
    arrays = [jnp.asarray(array) for array in inputs]
    outputs = equation.primitive.bind(*arrays, **equation.params)
    return list(outputs) if equation.primitive.multiple_results else [outputs]


def _move(equation: Any, inputs: list[Any], holders: slice, ring: Any) -> list[np.ndarray]:
    """The entries of operands where the primitive itself puts their positions.

    `holders` selects the operands that hold entries. Their entries are numbered, through all of
    these operands, and the primitive moves the numbers.
    """
    entries: list[Any] = []
    operands = list(inputs)
    for index in range(len(inputs))[holders]:
        array = _elements(inputs[index], ring)
        first = len(entries)
        entries.extend(array.flat)
        operands[index] = jnp.arange(first, len(entries), dtype=float).reshape(array.shape)
    table = np.empty(len(entries), object)
    table[:] = entries
    return [table[np.asarray(moved).astype(int)] for moved in _bind(equation, operands)]


def _is_symbolic(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype == object


def _elements(array: Any, ring: Any) -> np.ndarray:
    """The array as elements of a ring: as it is if it holds some, else its numbers as constants."""
    if _is_symbolic(array):
        return array
    # Of the domain's own type: it converts a float in milliseconds.
    real = ring.domain.dtype
    flat = np.empty(np.size(array), object)
    flat[:] = [ring.ground_new(real(float(value))) for value in np.ravel(array)]
    return flat.reshape(np.shape(array))
