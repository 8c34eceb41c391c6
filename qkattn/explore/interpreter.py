"""Evaluates a jax function on symbols, so that no equation of a variant is written twice.

The function is traced to a jaxpr, whose operations are then computed on arrays of symbols. What
only moves entries (reshape, gather, ...) runs as it is on the entries' positions; what acts on
constants alone runs as it is.
"""

import operator
import string
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.errors import SpecError

# Primitives that move entries, and which operands hold them; the others are indices.
MOVES = {
    **dict.fromkeys(('concatenate', 'convert_element_type', 'copy', 'expand_dims'), slice(None)),
    **dict.fromkeys(('optimization_barrier', 'pad', 'rev', 'slice', 'split'), slice(None)),
    **dict.fromkeys(('squeeze', 'tile'), slice(None)),
    **{'dynamic_slice': slice(1), 'gather': slice(1), 'select_n': slice(1, None)},
}


def _broadcast(array: np.ndarray, shape: Any, broadcast_dimensions: Any, **_: Any) -> np.ndarray:
    others = [axis for axis in range(len(shape)) if axis not in broadcast_dimensions]
    return np.broadcast_to(np.expand_dims(array, others), shape)


# The most frequent moves, by numpy: XLA would compile one for every shape.
QUICK: dict[str, Callable[..., Any]] = {
    'broadcast_in_dim': _broadcast,
    'reshape': lambda array, new_sizes, **_: array.reshape(new_sizes),
    'transpose': lambda array, permutation: array.transpose(permutation),
}
ARITHMETIC: dict[str, Callable[..., Any]] = {
    **{'add': operator.add, 'add_any': operator.add, 'sub': operator.sub, 'mul': operator.mul},
    **{'neg': operator.neg, 'stop_gradient': operator.pos, 'square': lambda array: array * array},
}
# Primitives that run their function once; others, such as scan, repeat it.
CALLS = ('jit', 'remat2', 'custom_jvp_call', 'custom_vjp_call')


def evaluate(
    function: Callable[..., Any], *arrays: np.ndarray, number: Callable[[float], Any]
) -> list[np.ndarray]:
    """The outputs of function(*arrays) as arrays of objects; arrays of symbols have dtype object.

    `number` turns a constant of the function into what is added to symbols and multiplied.
    SpecError if the function uses an operation that is unknown here.
    """
    with jax.enable_x64(True):
        traced = jax.make_jaxpr(function)(
            *(jax.ShapeDtypeStruct(array.shape, jnp.float64) for array in arrays)
        )
        outputs = _run(traced.jaxpr, traced.consts, arrays, number)
    return [_symbols(array, number) for array in outputs]


def _run(
    jaxpr: Any, consts: Sequence[Any], arrays: Sequence[Any], number: Callable[[float], Any]
) -> list[Any]:
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arrays], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, 'val') else known[atom]  # a literal is no key

    for equation in jaxpr.eqns:
        outputs = _apply(equation, [read(atom) for atom in equation.invars], number)
        known |= dict(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(equation: Any, inputs: list[Any], number: Callable[[float], Any]) -> list[Any]:
    name, parameters = equation.primitive.name, equation.params
    if name in CALLS:
        inner = parameters['call_jaxpr' if name.startswith('custom') else 'jaxpr']
        return _run(getattr(inner, 'jaxpr', inner), getattr(inner, 'consts', ()), inputs, number)
    if name in QUICK:
        return [QUICK[name](np.asarray(inputs[0]), **parameters)]
    if not any(map(_is_symbolic, inputs)):
        outputs = equation.primitive.bind(*map(jnp.asarray, inputs), **parameters)
        return list(outputs) if equation.primitive.multiple_results else [outputs]
    if name in MOVES:
        return _moved(equation, inputs, MOVES[name], number)
    if name == 'div' and not _is_symbolic(inputs[1]):
        name, inputs = 'mul', [inputs[0], 1 / np.asarray(inputs[1])]
    operands = [_symbols(array, number) for array in inputs]
    if name == 'integer_pow' and parameters['y'] > 0:
        return [np.asarray(operands[0] ** parameters['y'], object)]
    if name == 'dot_general':
        return [_product(*operands, *parameters['dimension_numbers'])]
    if name == 'reduce_sum':
        return [np.asarray(operands[0].sum(axis=tuple(parameters['axes'])), object)]
    if name not in ARITHMETIC:
        raise SpecError(f'the operation {name} is not known for symbols')
    return [np.asarray(ARITHMETIC[name](*operands), object)]


def _moved(
    equation: Any, inputs: list[Any], which: slice, number: Callable[[float], Any]
) -> list[np.ndarray]:
    """The operands' entries where the primitive itself puts their positions."""
    entries: list[Any] = []
    operands = list(inputs)
    for index in range(len(inputs))[which]:
        array = _symbols(inputs[index], number)
        first = len(entries)
        entries.extend(array.flat)
        operands[index] = jnp.arange(first, len(entries), dtype=float).reshape(array.shape)
    outputs = equation.primitive.bind(*map(jnp.asarray, operands), **equation.params)
    outputs = outputs if equation.primitive.multiple_results else [outputs]
    table = np.empty(len(entries), object)
    table[:] = entries
    return [table[np.asarray(positions).astype(int)] for positions in outputs]


def _product(left: np.ndarray, right: np.ndarray, contracted: Any, batch: Any) -> np.ndarray:
    """dot_general: batch axes, then the free axes of the left operand, then those of the right."""
    letters = iter(string.ascii_letters)
    names = [[next(letters) for _ in range(array.ndim)] for array in (left, right)]
    for pairs in (contracted, batch):
        for one, other in zip(*pairs, strict=True):
            names[1][other] = names[0][one]
    bound = [{*contracted[side], *batch[side]} for side in (0, 1)]
    free = [n for side in (0, 1) for i, n in enumerate(names[side]) if i not in bound[side]]
    out = [names[0][axis] for axis in batch[0]] + free
    text = f'{"".join(names[0])},{"".join(names[1])}->{"".join(out)}'
    return np.asarray(np.einsum(text, left, right), object)


def _is_symbolic(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype == object


def _symbols(array: Any, number: Callable[[float], Any]) -> np.ndarray:
    """The array with dtype object, its constants as `number` writes them."""
    if _is_symbolic(array):
        return array
    out = np.empty(np.size(array), object)
    out[:] = [number(float(value)) for value in np.ravel(array)]
    return out.reshape(np.shape(array))
