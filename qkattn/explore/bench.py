"""A bench of a few tokens and dimensions: one attention layer on symbols, and what it fixes."""

import dataclasses
import functools
import random
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import ModuleType
from typing import Any

import jax
import numpy as np

from qkattn.attention import Attention, AttentionSpec, parse_variant
from qkattn.attention.parameters import shapes_only
from qkattn.config.calls import load_extra
from qkattn.errors import ConfigError, SpecError
from qkattn.explore.interpreter import evaluate

SIZES = range(2, 5)


@functools.cache
def sympy() -> ModuleType:
    """The package sympy, of the extra `explore`."""
    return load_extra('sympy', 'explore')


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A weight matrix or gain of a circuit."""

    attribute: str  # its name in the class, e.g. 'w_q_DNH'
    circuit: str  # 'score' or 'value', which owns it
    initial: np.ndarray  # of its shape: initial values of gains, zeros for matrices

    @property
    def axes(self) -> str:
        """The letters of its axes, e.g. 'DNH'."""
        return self.attribute.rpartition('_')[2]

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
    def heads(self) -> int | None:
        """The axis that counts heads; None where all heads share the matrix."""
        return next((axis for axis, letter in enumerate(self.axes) if letter in 'NK'), None)

    @property
    def is_vector(self) -> bool:
        """Whether it is a vector, in each head if it has heads."""
        return self.initial.ndim - (self.heads is not None) < 2

    @property
    def by_head(self) -> np.ndarray:
        """The positions of its entries as [head, row, column]; one row for a vector."""
        positions = np.arange(self.initial.size).reshape(self.initial.shape)
        heads = [positions] if self.heads is None else list(np.moveaxis(positions, self.heads, 0))
        return np.stack([np.atleast_2d(head) for head in heads])

    @functools.cached_property
    def symbols(self) -> np.ndarray:
        """q12 for row 1 and column 2, q[1]12 where there are several heads."""
        flat = np.empty(self.initial.size, object)
        for (n, row, column), position in np.ndenumerate(self.by_head):
            head = f'[{n + 1}]' if len(self.by_head) > 1 else ''
            place = f'{column + 1}' if self.is_vector else f'{row + 1}{column + 1}'
            flat[position] = sympy().Symbol(f'{self.stem.replace("_", "")}{head}{place}')
        return flat.reshape(self.initial.shape)


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
        for field, valid in (
            ('tokens', SIZES),
            ('dims', SIZES),
            ('heads', range(1, self.dims + 1)),
        ):
            if (number := getattr(self, field)) not in valid:
                raise ConfigError(f'{field}={number} must be from {valid[0]} to {valid[-1]}')
        try:
            bilinear = self.layer.score.bilinear and self.layer.value.linear
        except SpecError as error:
            raise ConfigError(str(error)) from error
        if not bilinear:
            raise ConfigError(
                f'{self.variant} has no matrices A and B: the scores are not bilinear, or the '
                'output is not linear, in the tokens'
            )

    @functools.cached_property
    def layer(self) -> Attention:
        score, value = parse_variant(self.variant)
        spec = AttentionSpec(score=score, value=value, d_model=self.dims, num_heads=self.heads)
        with shapes_only():
            return Attention(spec, key=jax.random.key(0))

    @functools.cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """In the order of the layer's leaves."""
        leaves = jax.tree_util.tree_flatten_with_path(self.layer)[0]
        return tuple(
            Parameter(path[1].name, path[0].name, np.asarray(array)) for path, array in leaves
        )

    def of(self, circuit: str) -> list[Parameter]:
        """The parameters of 'score' or 'value' in the order of reading."""
        order = [*self.layer.score.__dict__, *self.layer.value.__dict__]
        own = [parameter for parameter in self.parameters if parameter.circuit == circuit]
        return sorted(own, key=lambda parameter: order.index(parameter.attribute))

    def matrices(
        self, arrays: list[np.ndarray], number: Callable[[float], Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        """A_NDE and B_NDE of the layer's own `matrix` on arrays of symbols, one per parameter.

        ConfigError if `matrix` has an operation that is unknown for symbols.
        """
        tree = jax.tree.structure(self.layer)
        try:
            A_NDE, B_NDE = evaluate(
                lambda *leaves: jax.tree.unflatten(tree, leaves).matrix(), *arrays, number=number
            )
        except SpecError as error:
            raise ConfigError(f'{self.variant}: {error}') from error
        return A_NDE, B_NDE

    @functools.cached_property
    def AB(self) -> tuple[np.ndarray, np.ndarray]:
        """A_NDE and B_NDE on the parameters' symbols, expanded."""
        symbols = [parameter.symbols for parameter in self.parameters]
        A_NDE, B_NDE = self.matrices(symbols, exact)
        return _expanded(A_NDE), _expanded(B_NDE)

    @functools.cached_property
    def x_TD(self) -> np.ndarray:
        """The tokens: x12 is dimension 2 of token 1."""
        return grid('x', self.tokens, self.dims)

    @property
    def scale(self) -> Any:
        """The factor on x A x^T."""
        return exact(float(self.layer.score.scale))

    def scores(self, A_NDE: np.ndarray) -> np.ndarray:
        """s_NTS = x_t A[n] x_s^T, without the scale."""
        return _expanded(np.einsum('td,nde,se->nts', self.x_TD, A_NDE, self.x_TD))

    def output(self, p_NTS: np.ndarray, B_NDE: np.ndarray) -> np.ndarray:
        """out_TE = sum_n sum_s p[n, t, s] x_s B[n]."""
        return _expanded(np.einsum('nts,sd,nde->te', p_NTS, self.x_TD, B_NDE))


def exact(value: float) -> Any:
    """The number as a rational or the square root of one, where it is so to float64."""
    square = Fraction(value * value).limit_denominator(10_000)
    if abs(float(square) - value * value) > 1e-12:
        return sympy().Float(value)
    root = sympy().sqrt(sympy().Rational(square.numerator, square.denominator))
    return root if value >= 0 else -root


def grid(name: str, rows: int, columns: int, head: str = '') -> np.ndarray:
    """Symbols x11, x12, ...; with a head x[1]11, x[1]12, ..."""
    flat = [
        sympy().Symbol(f'{name}{head}{row + 1}{column + 1}')
        for row, column in np.ndindex(rows, columns)
    ]
    return np.array(flat, object).reshape(rows, columns)


def _expanded(array: np.ndarray) -> np.ndarray:
    return np.vectorize(sympy().expand, otypes=[object])(array)


# What the equations of a variant fix: equal entries, kinds of matrices, ranks, dimensions


def named(name: str, M_NDE: np.ndarray) -> np.ndarray:
    """The matrices with a name for each entry; equal entries share one, numbers stay numbers."""
    known: dict[Any, Any] = {}
    out = np.empty_like(M_NDE)
    for (n, row, column), entry in np.ndenumerate(M_NDE):
        head = f'[{n + 1}]' if len(M_NDE) > 1 else ''
        if -entry in known:
            out[n, row, column] = -known[-entry]
        elif entry.is_number:
            out[n, row, column] = entry
        else:
            symbol = sympy().Symbol(f'{name}{head}{row + 1}{column + 1}')
            out[n, row, column] = known.setdefault(entry, symbol)
    return out


def ties(M_NTS: np.ndarray) -> list[list[tuple[int, int, int]]]:
    """Places (head, row, column) of entries that are equal for all values, in groups."""
    groups: dict[Any, list[tuple[int, int, int]]] = {}
    for (n, row, column), entry in np.ndenumerate(M_NTS):
        groups.setdefault(entry, []).append((n, row, column))
    return [places for places in groups.values() if len(places) > 1]


def kind(M_DE: np.ndarray) -> str:
    """'identity', 'diagonal', 'symmetric', 'skew' or 'general', for all values of the symbols."""
    on = np.eye(len(M_DE), dtype=bool)
    if (M_DE[~on] == 0).all():
        return 'identity' if (M_DE[on] == 1).all() else 'diagonal'
    if (M_DE == M_DE.T).all():
        return 'symmetric'
    return 'skew' if (M_DE + M_DE.T == 0).all() else 'general'


def point(*expressions: np.ndarray) -> Mapping[Any, Any]:
    """A rational value for each symbol, the same at every call; ranks there are generic."""
    symbols = {s for array in expressions for entry in array.flat for s in entry.free_symbols}
    rng = random.Random(0)
    return {
        symbol: sympy().Rational(rng.randint(-999, 999), 997) for symbol in sorted(symbols, key=str)
    }


def rank(M_DE: np.ndarray) -> int:
    """The rank for almost all values of the symbols."""
    return int(sympy().Matrix(M_DE).subs(point(M_DE)).rank())


def dimension(*matrices: np.ndarray) -> int:
    """In how many independent directions the matrices move when their symbols do."""
    at = point(*matrices)
    entries = [entry for array in matrices for entry in array.flat]
    jacobian = sympy().Matrix([[entry.diff(symbol) for symbol in at] for entry in entries])
    return int(jacobian.subs(at).rank()) if at else 0
