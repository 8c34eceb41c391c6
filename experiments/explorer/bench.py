"""A bench: one attention layer on symbols, with a few tokens and dimensions."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.attention import Attention, AttentionSpec, parse_variant
from qkattn.attention.parameters import shapes_only
from qkattn.config.imports import load_extra
from qkattn.errors import ConfigError, SpecError

SIZES = range(2, 5)


@functools.cache
def sympy() -> ModuleType:
    """The package sympy, of the extra `explore`."""
    return load_extra('sympy', 'explore')


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A weight matrix or gain of a circuit."""

    circuit: str  # 'score' or 'value', which owns it
    attribute: str  # its name in the class, e.g. 'w_q_DNH'
    initial: np.ndarray  # of its shape: initial values of gains, zeros for matrices

    @property
    def stem(self) -> str:
        """Its role without prefix and axes, e.g. 'q'."""
        return re.sub(r'^[a-z]_|_[A-Z]+$', '', self.attribute)

    @property
    def name(self) -> str:
        """As in equations: W_Q, W_frozen_q, g_sign."""
        stem = self.stem.upper() if len(self.stem) < 3 else self.stem
        return ('W_' if self.attribute.startswith('w') else 'g_') + stem

    @property
    def by_head(self) -> np.ndarray:
        """The positions of its entries as [head, row, column]; of a vector, [head, column]."""
        positions = np.arange(self.initial.size).reshape(self.initial.shape)
        axes = self.attribute.rpartition('_')[2]
        head = next((axis for axis, letter in enumerate(axes) if letter in 'NK'), None)
        return positions[None] if head is None else np.moveaxis(positions, head, 0)


@dataclasses.dataclass(frozen=True)
class Bench:
    """A variant at sizes at which its equations can be read.

    ConfigError if a size is out of range, or the variant is unknown, cannot be built at these sizes
    or is not bilinear.
    """

    variant: str  # 'score/value', with options
    tokens: int = 2  # T, 2 to 4
    dims: int = 2  # d_model, 2 to 4
    heads: int = 1  # 1 to `dims`

    def __post_init__(self) -> None:
        ranges = {'tokens': SIZES, 'dims': SIZES, 'heads': range(1, self.dims + 1)}
        for field, valid in ranges.items():
            if (number := getattr(self, field)) not in valid:
                raise ConfigError(f'{field}={number} must be from {valid[0]} to {valid[-1]}')
        try:
            score = self.layer.score
            linear = self.layer.value.linear
        except SpecError as error:
            raise ConfigError(str(error)) from error
        if score.hides_self or not (score.bilinear and linear):
            raise ConfigError(
                f'{self.variant} has no matrices A and B that say all: a token does not attend to '
                'itself, or the scores are not bilinear, or the output is not linear, in the tokens'
            )

    @functools.cached_property
    def layer(self) -> Attention:
        score, value = parse_variant(self.variant)
        spec = AttentionSpec(score=score, value=value, d_model=self.dims, num_heads=self.heads)
        with shapes_only():
            return Attention(spec, key=jax.random.key(0))

    @functools.cached_property
    def parameters(self) -> list[Parameter]:
        """Parameters of the score, then those of the value, in reading order."""
        order = [*self.layer.score.__dict__, *self.layer.value.__dict__]
        leaves = jax.tree_util.tree_flatten_with_path(self.layer)[0]
        parameters = [Parameter(p[0].name, p[1].name, np.asarray(array)) for p, array in leaves]
        return sorted(parameters, key=lambda p: (p.circuit, order.index(p.attribute)))

    def parameters_of(self, circuit: str) -> list[Parameter]:
        """The parameters of 'score' or 'value'."""
        return [parameter for parameter in self.parameters if parameter.circuit == circuit]

    def filled(self, arrays: Sequence[Any]) -> Attention:
        """The layer with these arrays, in the order of `parameters`."""
        by_name = dict(zip((p.attribute for p in self.parameters), arrays, strict=True))
        return jax.tree_util.tree_map_with_path(lambda path, _: by_name[path[1].name], self.layer)

    @functools.cached_property
    def symbols(self) -> tuple[Any, list[np.ndarray]]:
        """A ring of polynomials, and its generators as an array of each parameter's shape.

        q12 is row 1 and column 2 of W_Q, q[2]12 that of head 2.
        """
        names = {p.stem.replace('_', ''): p.by_head.shape for p in self.parameters}
        ring, blocks = generators(names)
        arrays = []
        for parameter, block in zip(self.parameters, blocks, strict=True):
            flat = np.empty(parameter.initial.size, object)
            flat[parameter.by_head.ravel()] = block.ravel()
            arrays.append(flat.reshape(parameter.initial.shape))
        return ring, arrays

    @functools.cached_property
    def AB(self) -> tuple[np.ndarray, np.ndarray]:
        """A_NDE and B_NDE, polynomials in `symbols`: what the layer's own `matrix` computes."""
        ring, arrays = self.symbols

        def rounded(entry: Any) -> Any:
            """Removes the rounding errors of constants, so that equal entries compare equal."""
            real = ring.domain.dtype
            terms = ring(entry).terms()
            return ring.from_dict({powers: real(round(float(c), 14)) for powers, c in terms})

        matrices = evaluate(lambda *leaves: self.filled(leaves).matrix(), *arrays)
        A_NDE, B_NDE = (np.vectorize(rounded, otypes=[object])(matrix) for matrix in matrices)
        return A_NDE, B_NDE


def generators(blocks: Mapping[str, Sequence[int]]) -> tuple[Any, list[np.ndarray]]:
    """A ring of polynomials with real coefficients, and its generators as arrays [head, ...].

    A generator has the name of its block and its place, counted from 1: a12, or a[2]12 in head 2 of
    several.
    """
    names = [
        name + (f'[{n + 1}]' if shape[0] > 1 else '') + ''.join(str(i + 1) for i in place)
        for name, shape in blocks.items()
        for n, *place in np.ndindex(*shape)
    ]
    ring = sympy().polys.rings.PolyRing(names, sympy().RR)
    left = iter(ring.gens)
    arrays = []
    for shape in blocks.values():
        arrays.append(np.empty(shape, object))
        arrays[-1].reshape(-1)[:] = list(itertools.islice(left, arrays[-1].size))
    return ring, arrays


def rank(M_DE: np.ndarray) -> int:
    """The rank for almost all values of the symbols: at one random point."""
    point = np.random.default_rng(0).uniform(0.5, 1.5, M_DE.flat[0].ring.ngens)
    return int(np.linalg.matrix_rank(numbers(M_DE, point)))


def numbers(polynomials: np.ndarray, point: np.ndarray) -> np.ndarray:
    """The values of polynomials where the generators of their ring are `point`."""
    # Calling a polynomial takes twelve times as long: it substitutes one generator after another.
    terms = ([(float(c), powers) for powers, c in entry.terms()] for entry in polynomials.flat)
    values = [sum(c * np.prod(point**powers) for c, powers in one) for one in terms]
    return np.array(values, float).reshape(polynomials.shape)


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
    left_axes = [*range(left.ndim)]
    right_axes = [left.ndim + axis for axis in range(right.ndim)]
    for axis, other in zip((*left_sum, *left_batch), (*right_sum, *right_batch), strict=True):
        right_axes[other] = axis
    free = [axis for axis in left_axes if axis not in (*left_sum, *left_batch)]
    free += [axis for axis in right_axes if axis >= left.ndim]
    return np.einsum(left, left_axes, right, right_axes, [*left_batch, *free])


# Primitives on arrays of symbols; the moves are those that XLA would compile for every shape.
COMPUTED: dict[str, Callable[..., Any]] = {
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


def evaluate(function: Callable[..., Any], *arrays: np.ndarray) -> list[np.ndarray]:
    """The outputs of function(*arrays), arrays of polynomials; constants where none enters.

    No equation of a variant is written twice: the function is traced to a jaxpr, whose operations
    are evaluated on elements of a sympy ring. Operations that only move entries (slice, gather,
    ...) run unchanged on the positions of the entries; operations on constants run unchanged.

    ConfigError if the function uses an operation that is unknown here.
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
    name = equation.primitive.name
    parameters = equation.params
    if not any(map(_is_symbolic, inputs)):
        return _bound(equation, inputs)
    ring = next(filter(_is_symbolic, inputs)).flat[0].ring
    if name in MOVES:
        return _moved(equation, inputs, MOVES[name], ring)
    if name == 'div' and not _is_symbolic(inputs[1]):
        name = 'mul'
        inputs = [inputs[0], 1 / np.asarray(inputs[1])]
    operands = [_elements(array, ring) for array in inputs]
    if name == 'integer_pow' and parameters['y'] > 0:
        return [operands[0] ** parameters['y']]
    if name not in COMPUTED:
        raise ConfigError(f'matrix() uses {name}; symbols have sums, products and positive powers')
    return [np.asarray(COMPUTED[name](*operands, **parameters), object)]


def _bound(equation: Any, inputs: Sequence[Any]) -> list[Any]:
    outputs = equation.primitive.bind(*map(jnp.asarray, inputs), **equation.params)
    return list(outputs) if equation.primitive.multiple_results else [outputs]


def _moved(equation: Any, inputs: list[Any], which: slice, ring: Any) -> list[np.ndarray]:
    """The operands' entries where the primitive itself puts their positions."""
    entries: list[Any] = []
    operands = list(inputs)
    for index in range(len(inputs))[which]:
        array = _elements(inputs[index], ring)
        first = len(entries)
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
