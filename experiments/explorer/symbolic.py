"""Evaluates JAX functions on arrays of polynomials.

`evaluate` traces a function to a jaxpr, and applies its operations to elements of a sympy ring.
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
    """Returns the package sympy. Raises ConfigError if it is not installed."""
    return load_extra('sympy', 'explore')


def generators(blocks: Mapping[str, Sequence[int]]) -> tuple[Any, list[np.ndarray]]:
    """Makes a ring of polynomials with real coefficients, and arrays of its symbols (generators).

    For example, {'a': (1, 2, 2)} gives an array of the symbols a11, a12, a21 and a22. With two
    heads, {'a': (2, 2, 2)} gives a[1]11 to a[2]22.

    Args:
        blocks: The shape [head, ...] of each array, by name.

    Returns:
        The ring, and the arrays.
    """
    symbol_names = []
    for block_name, shape in blocks.items():
        num_heads = shape[0]
        for head, *indices in np.ndindex(*shape):
            symbol_name = block_name
            if num_heads > 1:
                symbol_name += f'[{head + 1}]'
            symbol_name += ''.join(str(index + 1) for index in indices)
            symbol_names.append(symbol_name)
    ring = sympy().polys.rings.PolyRing(symbol_names, sympy().RR)

    arrays = []
    start = 0  # of the array in ring.gens
    for shape in blocks.values():
        size = math.prod(shape)
        flat_symbols = np.empty(size, object)
        flat_symbols[:] = ring.gens[start : start + size]
        arrays.append(flat_symbols.reshape(shape))
        start += size
    return ring, arrays


def rank(M_DE: np.ndarray) -> int:
    """Returns the rank of a matrix of polynomials at a random point."""
    num_symbols = M_DE.flat[0].ring.ngens
    point = np.random.default_rng(0).uniform(0.5, 1.5, num_symbols)
    numbers_DE = numbers(M_DE, point)
    return int(np.linalg.matrix_rank(numbers_DE))


def numbers(polynomials: np.ndarray, point: np.ndarray) -> np.ndarray:
    """Evaluates polynomials at a point, which has a value for each generator of the ring."""
    # This is much faster than calling a polynomial.
    values = []
    for polynomial in polynomials.flat:
        values_of_terms = []
        for powers, coefficient in polynomial.terms():
            values_of_terms.append(float(coefficient) * np.prod(point**powers))
        values.append(sum(values_of_terms))
    return np.array(values, float).reshape(polynomials.shape)


def evaluate(function: Callable[..., Any], *arrays: np.ndarray) -> list[np.ndarray]:
    """Returns the outputs of a JAX function whose inputs are arrays of polynomials.

    The function is traced to a jaxpr, whose operations are executed one by one.

    Raises:
        ConfigError: The function uses an operation that is not supported.
    """
    shapes = [jax.ShapeDtypeStruct(array.shape, jnp.float64) for array in arrays]
    with jax.enable_x64(True), jax.disable_jit():  # the jaxpr then has no nested jit
        traced = jax.make_jaxpr(function)(*shapes)
        variables = [*traced.jaxpr.constvars, *traced.jaxpr.invars]
        value_by_variable = dict(zip(variables, [*traced.consts, *arrays], strict=True))

        def read(operand: Any) -> Any:
            """Returns the value of a literal or variable."""
            is_literal = hasattr(operand, 'val')
            return operand.val if is_literal else value_by_variable[operand]

        for equation in traced.jaxpr.eqns:
            inputs = [read(operand) for operand in equation.invars]
            outputs = _apply(equation, inputs)
            value_by_variable.update(zip(equation.outvars, outputs, strict=True))
        return [np.asarray(read(operand)) for operand in traced.jaxpr.outvars]


_ALL = slice(None)
# Primitives that only move entries, with a slice of the operands that hold entries. All other
# operands are indices.
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
    """Implements broadcast_in_dim: axis i of the array becomes axis broadcast_dimensions[i]."""
    new_axes = [axis for axis in range(len(shape)) if axis not in broadcast_dimensions]
    return np.broadcast_to(np.expand_dims(array, new_axes), shape)


def _product(left: np.ndarray, right: np.ndarray, dimension_numbers: Any, **_: Any) -> np.ndarray:
    """Implements dot_general as an einsum with integer labels in place of letters.

    The comments show the labels of 'BTD,BSD->BTS'. An axis of `left` is its own label.
    """
    (left_summed, right_summed), (left_batch, right_batch) = dimension_numbers
    left_shared = [*left_summed, *left_batch]  # D and B: [2, 0]
    right_shared = [*right_summed, *right_batch]
    left_labels = list(range(left.ndim))  # [0, 1, 2]
    right_labels = list(range(left.ndim, left.ndim + right.ndim))  # [3, 4, 5]
    for left_axis, right_axis in zip(left_shared, right_shared, strict=True):
        right_labels[right_axis] = left_axis  # in the end [0, 4, 2]
    left_free = [axis for axis in left_labels if axis not in left_shared]  # T: [1]
    right_free = [label for label in right_labels if label not in left_labels]  # S: [4]
    output_labels = [*left_batch, *left_free, *right_free]  # [0, 1, 4]
    return np.einsum(left, left_labels, right, right_labels, output_labels)


# Primitives that compute on arrays of symbols. Some only move entries, but would be slow in _MOVES,
# because XLA would compile them for every shape.
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
    """Executes an equation of a jaxpr, that is one operation, and returns its outputs."""
    name = equation.primitive.name
    symbolic_inputs = [array for array in inputs if _is_symbolic(array)]
    if not symbolic_inputs:
        return _bind(equation, inputs)

    ring = symbolic_inputs[0].flat[0].ring
    if name in _MOVES:  # it only moves entries
        return _move(equation, inputs, _MOVES[name], ring)
    if name == 'div' and not _is_symbolic(inputs[1]):
        # Multiply by the reciprocal. A division by a polynomial is not supported.
        dividend, divisor = inputs
        name = 'mul'
        inputs = [dividend, 1 / np.asarray(divisor)]
    operands = [_elements(array, ring) for array in inputs]
    if name == 'integer_pow' and equation.params['y'] > 0:
        return [operands[0] ** equation.params['y']]
    if name not in _COMPUTED:
        raise ConfigError(f'matrix() uses {name}; symbols have sums, products and positive powers')
    output = _COMPUTED[name](*operands, **equation.params)
    return [np.asarray(output, object)]


def _bind(equation: Any, inputs: Sequence[Any]) -> list[Any]:
    """Executes an equation of a jaxpr on numbers, and returns its outputs."""
    primitive = equation.primitive
    arrays = [jnp.asarray(array) for array in inputs]
    output = primitive.bind(*arrays, **equation.params)
    return list(output) if primitive.multiple_results else [output]


def _move(equation: Any, inputs: list[Any], holders: slice, ring: Any) -> list[np.ndarray]:
    """Executes an operation that only moves entries, such as slice, on arrays of polynomials.

    JAX moves the positions of the entries instead. For example, to reverse [p, q], JAX reverses
    [0, 1] to [1, 0], which selects [q, p].

    Args:
        equation: The operation.
        holders: A slice of `inputs` that selects the arrays of polynomials.
        ring: The ring of the polynomials.
    """
    entries: list[Any] = []  # of all `holders`
    position_inputs = list(inputs)  # with positions in `entries` in place of polynomials
    for index in range(len(inputs))[holders]:
        array = _elements(inputs[index], ring)
        first_position = len(entries)
        entries.extend(array.flat)
        positions = jnp.arange(first_position, len(entries), dtype=float)
        position_inputs[index] = positions.reshape(array.shape)

    entry_array = np.empty(len(entries), object)
    entry_array[:] = entries
    outputs = []
    for moved_positions in _bind(equation, position_inputs):
        outputs.append(entry_array[np.asarray(moved_positions).astype(int)])
    return outputs


def _is_symbolic(array: Any) -> bool:
    """Returns whether an operand is an array of polynomials, not of numbers."""
    return isinstance(array, np.ndarray) and array.dtype == object


def _elements(array: Any, ring: Any) -> np.ndarray:
    """Converts numbers to constants of the ring. An array of polynomials is returned as it is."""
    if _is_symbolic(array):
        return array
    # Converting to the ring's coefficient type first is faster.
    coefficient_type = ring.domain.dtype
    coefficients = [coefficient_type(float(number)) for number in np.ravel(array)]
    flat = np.empty(np.size(array), object)
    flat[:] = [ring.ground_new(coefficient) for coefficient in coefficients]
    return flat.reshape(np.shape(array))
