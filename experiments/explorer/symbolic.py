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
    """Makes a ring of polynomials with real coefficients, and arrays of its symbols (generators).

    `blocks` are shapes [head, ...] of arrays, by name. {'a': (1, 2, 2)} gives one array with the
    symbols a11, a12, a21 and a22. With two heads, {'a': (2, 2, 2)}, they are a[1]11 to a[2]22.

    Returns the ring and the arrays.
    """
    names = []
    for block, shape in blocks.items():
        num_heads = shape[0]
        for head, *indices in np.ndindex(*shape):
            name = block
            if num_heads > 1:
                name += f'[{head + 1}]'
            name += ''.join(str(index + 1) for index in indices)
            names.append(name)
    ring = sympy().polys.rings.PolyRing(names, sympy().RR)

    # Divide the symbols of the ring among the blocks.
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
    """Returns the outputs of a JAX function whose inputs are arrays of polynomials.

    JAX cannot compute with polynomials. The function is traced to a jaxpr, and its operations are
    executed one after the other. Sums and products are those of polynomials. Operations that only
    move entries, such as slice, move them. Operations on numbers are those of JAX.

    Raises ConfigError if the function uses an operation that is unknown here.
    """
    shapes = [jax.ShapeDtypeStruct(array.shape, jnp.float64) for array in arrays]
    with jax.enable_x64(True), jax.disable_jit():  # functions inside are traced, too
        traced = jax.make_jaxpr(function)(*shapes)
        variables = [*traced.jaxpr.constvars, *traced.jaxpr.invars]
        values = dict(zip(variables, [*traced.consts, *arrays], strict=True))

        def read(atom: Any) -> Any:
            """Returns the value of an operand: a literal holds it, a variable is looked up."""
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
    """dot_general: batch axes, then the free axes of the left operand, then those of the right.

    For example, the product of left_BTD and right_BSD over D is the einsum 'BTD,BSD->BTS'. A number
    stands for each letter here: left has the axes [0, 1, 2], right [0, 4, 2], the output [0, 1, 4].
    """
    (left_summed, right_summed), (left_batch, right_batch) = dimension_numbers
    left_shared = [*left_summed, *left_batch]
    right_shared = [*right_summed, *right_batch]
    left_letters = list(range(left.ndim))
    right_letters = list(range(left.ndim, left.ndim + right.ndim))
    # Axes that are summed or batch axes have the letter of the left operand in both.
    for left_axis, right_axis in zip(left_shared, right_shared, strict=True):
        right_letters[right_axis] = left_letters[left_axis]
    free = [letter for letter in left_letters if letter not in left_shared]
    free += [letter for letter in right_letters if letter >= left.ndim]
    return np.einsum(left, left_letters, right, right_letters, [*left_batch, *free])


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
    """Executes one operation (equation) of a jaxpr on its inputs; returns its outputs."""
    name = equation.primitive.name
    symbolic = [array for array in inputs if _is_symbolic(array)]
    if not symbolic:
        return _bind(equation, inputs)

    ring = symbolic[0].flat[0].ring
    if name in _MOVES:
        return _move(equation, inputs, _MOVES[name], ring)
    if name == 'div' and not _is_symbolic(inputs[1]):
        # A division by a number is a product. A division by a polynomial is not supported.
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
    """Executes an operation of a jaxpr on numbers, as JAX does."""
    arrays = [jnp.asarray(array) for array in inputs]
    outputs = equation.primitive.bind(*arrays, **equation.params)
    return list(outputs) if equation.primitive.multiple_results else [outputs]


def _move(equation: Any, inputs: list[Any], holders: slice, ring: Any) -> list[np.ndarray]:
    """Executes an operation that only moves entries, such as slice, on arrays of polynomials.

    JAX cannot move polynomials. So their entries are numbered, JAX moves the numbers, and each
    number is replaced by its entry. For example, to reverse [p, q], JAX reverses [0, 1] to [1, 0],
    which becomes [q, p].

    `holders` selects the inputs that hold entries. The others are indices, for example.
    """
    entries: list[Any] = []  # of all inputs that hold entries
    numbered_inputs = list(inputs)
    for index in range(len(inputs))[holders]:
        array = _elements(inputs[index], ring)
        first = len(entries)
        entries.extend(array.flat)
        numbers_of_entries = jnp.arange(first, len(entries), dtype=float)
        numbered_inputs[index] = numbers_of_entries.reshape(array.shape)

    entry_by_number = np.empty(len(entries), object)
    entry_by_number[:] = entries
    outputs = []
    for moved_numbers in _bind(equation, numbered_inputs):
        outputs.append(entry_by_number[np.asarray(moved_numbers).astype(int)])
    return outputs


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
