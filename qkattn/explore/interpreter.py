"""Evaluates JAX functions on polynomials, so that no equation of a variant is written twice.

Polynomials are elements of a sympy ring, in object arrays. The function is traced to a jaxpr, whose
operations are evaluated on these arrays. Operations that only move entries (slice, gather, ...) run
unchanged on the positions of the entries; operations on constants run unchanged.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.errors import SpecError

# Primitives that move entries, and which operands hold them; the others are indices.
MOVES = {
    **dict.fromkeys(('concatenate', 'convert_element_type', 'expand_dims', 'pad'), slice(None)),
    **dict.fromkeys(('rev', 'slice', 'split', 'squeeze', 'tile'), slice(None)),
    **{'dynamic_slice': slice(1), 'gather': slice(1), 'select_n': slice(1, None)},
}


def _broadcast(array: np.ndarray, shape: Any, broadcast_dimensions: Any, **_: Any) -> np.ndarray:
    others = [axis for axis in range(len(shape)) if axis not in broadcast_dimensions]
    return np.broadcast_to(np.expand_dims(array, others), shape)


def _product(left: np.ndarray, right: np.ndarray, dimension_numbers: Any, **_: Any) -> np.ndarray:
    """dot_general: batch axes, then the free axes of the left operand, then those of the right."""
    (left_sum, right_sum), (left_batch, right_batch) = dimension_numbers
    left_axes, right_axes = [*range(left.ndim)], [left.ndim + axis for axis in range(right.ndim)]
    for axis, other in zip((*left_sum, *left_batch), (*right_sum, *right_batch), strict=True):
        right_axes[other] = axis
    free = [axis for axis in left_axes if axis not in (*left_sum, *left_batch)]
    free += [axis for axis in right_axes if axis >= left.ndim]
    return np.einsum(left, left_axes, right, right_axes, [*left_batch, *free])


# Primitives on arrays of symbols; the moves are those that XLA would compile for every shape.
COMPUTED: dict[str, Callable[..., Any]] = {
    'add': lambda a, b, **_: a + b,
    'add_any': lambda a, b, **_: a + b,
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


def evaluate(function: Callable[..., Any], *arrays: np.ndarray) -> list[np.ndarray]:
    """The outputs of function(*arrays); constants where no polynomial enters.

    SpecError if the function uses an operation that is unknown here.
    """
    shapes = [jax.ShapeDtypeStruct(array.shape, jnp.float64) for array in arrays]
    with jax.enable_x64(True), jax.disable_jit():  # functions inside are traced, too
        traced = jax.make_jaxpr(function)(*shapes)
        inputs = [*traced.jaxpr.constvars, *traced.jaxpr.invars]
        known = dict(zip(inputs, [*traced.consts, *arrays], strict=True))

        def read(atom: Any) -> Any:
            return atom.val if hasattr(atom, 'val') else known[atom]  # a literal is no key

        for equation in traced.jaxpr.eqns:
            outputs = _apply(equation, [read(atom) for atom in equation.invars])
            known |= dict(zip(equation.outvars, outputs, strict=True))
        return [np.asarray(read(atom)) for atom in traced.jaxpr.outvars]


def _apply(equation: Any, inputs: list[Any]) -> list[Any]:
    name, parameters = equation.primitive.name, equation.params
    if not any(map(_is_symbolic, inputs)):
        return _bound(equation, inputs)
    ring = next(filter(_is_symbolic, inputs)).flat[0].ring
    if name in MOVES:
        return _moved(equation, inputs, MOVES[name], ring)
    if name == 'div' and not _is_symbolic(inputs[1]):
        name, inputs = 'mul', [inputs[0], 1 / np.asarray(inputs[1])]
    operands = [_elements(array, ring) for array in inputs]
    if name == 'integer_pow' and parameters['y'] > 0:
        return [operands[0] ** parameters['y']]
    if name not in COMPUTED:
        raise SpecError(f'the operation {name} is not known for symbols')
    return [np.asarray(COMPUTED[name](*operands, **parameters), object)]


def _bound(equation: Any, inputs: Sequence[Any]) -> list[Any]:
    outputs = equation.primitive.bind(*map(jnp.asarray, inputs), **equation.params)
    return list(outputs) if equation.primitive.multiple_results else [outputs]


def _moved(equation: Any, inputs: list[Any], which: slice, ring: Any) -> list[np.ndarray]:
    """The operands' entries where the primitive itself puts their positions."""
    entries: list[Any] = []
    operands = list(inputs)
    for index in range(len(inputs))[which]:
        array, first = _elements(inputs[index], ring), len(entries)
        entries.extend(array.flat)
        operands[index] = jnp.arange(first, len(entries), dtype=float).reshape(array.shape)
    table = np.empty(len(entries), object)
    table[:] = entries
    return [table[np.asarray(places).astype(int)] for places in _bound(equation, operands)]


def _is_symbolic(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype == object


def _elements(array: Any, ring: Any) -> np.ndarray:
    """The array in a ring, its constants too."""
    if _is_symbolic(array):
        return array
    out = np.empty(np.shape(array), object)
    # Of the domain's own type: it converts a float in milliseconds.
    out.reshape(-1)[:] = [
        ring.ground_new(ring.domain.dtype(float(value))) for value in np.ravel(array)
    ]
    return out
