"""A bench: one attention layer on symbols, with a few tokens and dimensions."""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from experiments.explorer.symbolic import evaluate, generators
from qkattn.attention import Attention, AttentionSpec, parse_variant
from qkattn.attention.parameters import shapes_only
from qkattn.errors import ConfigError, SpecError

SIZES = range(2, 5)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A weight matrix or gain of a score or value."""

    circuit: str  # the owner, 'score' or 'value'
    attribute: str  # the name in the class, e.g. 'w_q_DNH'
    initial: np.ndarray  # initial values of gains, zeros for matrices

    @property
    def stem(self) -> str:
        """The attribute without prefix and axes: 'q' of 'w_q_DNH'."""
        return re.sub(r'^[a-z]_|_[A-Z]+$', '', self.attribute)

    @property
    def name(self) -> str:
        """The name in equations: W_Q, W_frozen_q, g_sign."""
        letter = 'W' if self.attribute.startswith('w') else 'g'
        stem = self.stem.upper() if len(self.stem) < 3 else self.stem
        return f'{letter}_{stem}'

    @property
    def by_head(self) -> np.ndarray:
        """Indices into the flat parameter, as [head, row, column], or [head, column] of a vector.

        Example: w_q_DNH with D = 2, N = 2 heads and H = 1 is stored as [row, head, column]. The
        index of [head, row, 0] is 2 * row + head. A number of each head is a vector of size 1.
        """
        positions = np.arange(self.initial.size).reshape(self.initial.shape)
        _, _, axes = self.attribute.rpartition('_')  # 'DNH' of 'w_q_DNH'
        if axes in ('N', 'K'):  # a number of each head
            return positions[:, None]
        # N or K is the axis of heads. A parameter without the axis has a single head.
        for axis, letter in enumerate(axes):
            if letter in 'NK':
                return np.moveaxis(positions, axis, 0)
        return positions[None]


@dataclasses.dataclass(frozen=True)
class Bench:
    """A variant at small sizes, so that its equations are readable.

    Raises:
        ConfigError: A size is out of range, or the variant is unknown, cannot be built at these
            sizes or is not bilinear.
    """

    variant: str  # 'score/value', with options
    tokens: int = 2  # T, 2 to 4
    dims: int = 2  # d_model, 2 to 4
    heads: int = 1  # 1 to `dims`

    def __post_init__(self) -> None:
        valid_sizes = {'tokens': SIZES, 'dims': SIZES, 'heads': range(1, self.dims + 1)}
        for field, valid in valid_sizes.items():
            size = getattr(self, field)
            if size not in valid:
                raise ConfigError(f'{field}={size} must be from {valid[0]} to {valid[-1]}')
        try:
            score = self.layer.score
            value = self.layer.value
        except SpecError as error:
            raise ConfigError(str(error)) from error
        if score.hides_self or not score.bilinear or not value.linear:
            raise ConfigError(
                f'{self.variant} has no matrices A and B that say all: a token does not attend to '
                'itself, or the scores are not bilinear, or the output is not linear, in the tokens'
            )

    @functools.cached_property
    def layer(self) -> Attention:
        """The attention layer, with zeros as matrices. Raises SpecError if it cannot be built."""
        score, value = parse_variant(self.variant)
        spec = AttentionSpec(score=score, value=value, d_model=self.dims, num_heads=self.heads)
        with shapes_only():
            return Attention(spec, key=jax.random.key(0))

    @functools.cached_property
    def parameters(self) -> list[Parameter]:
        """The parameters of the score, then of the value, in the order of the class attributes."""
        parameters = []
        leaves, _ = jax.tree_util.tree_flatten_with_path(self.layer)
        for path, array in leaves:
            circuit = path[0].name  # of layer.score.w_q_DNH: 'score'
            attribute = path[1].name  # 'w_q_DNH'
            parameters.append(Parameter(circuit, attribute, initial=np.asarray(array)))
        # JAX sorts attributes by name.
        attributes = [*vars(self.layer.score), *vars(self.layer.value)]
        parameters.sort(key=lambda p: (p.circuit, attributes.index(p.attribute)))
        return parameters

    def parameters_of(self, circuit: str) -> list[Parameter]:
        """The parameters of 'score' or 'value'."""
        return [parameter for parameter in self.parameters if parameter.circuit == circuit]

    def filled(self, arrays: Sequence[Any]) -> Attention:
        """Returns the layer with other parameters, given in the order of `parameters`."""
        array_by_name = {}
        for parameter, array in zip(self.parameters, arrays, strict=True):
            array_by_name[parameter.attribute] = array

        def array_at(path: Any, _: Any) -> Any:
            attribute = path[1].name  # 'w_q_DNH' of layer.score.w_q_DNH
            return array_by_name[attribute]

        return jax.tree_util.tree_map_with_path(array_at, self.layer)

    @functools.cached_property
    def symbols(self) -> tuple[Any, list[np.ndarray]]:
        """The ring of polynomials, and an array of symbols for each parameter, in its shape.

        The symbol q12 is row 1 and column 2 of W_Q. With several heads, the entry of head 2 is
        q[2]12.
        """
        shapes = {}
        for parameter in self.parameters:
            symbol_name = parameter.stem.replace('_', '')
            shapes[symbol_name] = parameter.by_head.shape
        ring, arrays_by_head = generators(shapes)

        # From the order [head, row, column] into that of the parameter.
        arrays = []
        for parameter, symbols_by_head in zip(self.parameters, arrays_by_head, strict=True):
            flat_symbols = np.empty(parameter.initial.size, object)
            flat_symbols[parameter.by_head.ravel()] = symbols_by_head.ravel()
            arrays.append(flat_symbols.reshape(parameter.initial.shape))
        return ring, arrays

    @functools.cached_property
    def AB(self) -> tuple[np.ndarray, np.ndarray]:
        """A_NDE and B_NDE, whose entries are polynomials in `symbols`; N heads, D = E = d_model."""
        ring, arrays = self.symbols
        coefficient_type = ring.domain.dtype

        def round_coefficients(entry: Any) -> Any:
            """Removes rounding errors from a polynomial, so that equal entries compare equal."""
            rounded_terms = {}
            for powers, coefficient in ring(entry).terms():
                rounded_terms[powers] = coefficient_type(round(float(coefficient), 14))
            return ring.from_dict(rounded_terms)

        def matrices(*parameters: Any) -> Any:
            return self.filled(parameters).matrix()

        A_NDE, B_NDE = evaluate(matrices, *arrays)
        round_entries = np.vectorize(round_coefficients, otypes=[object])
        return round_entries(A_NDE), round_entries(B_NDE)

    def matrix_of(self, circuit: str) -> np.ndarray:
        """Returns A_NDE of 'score' or B_NDE of 'value', polynomials in `symbols`."""
        A_NDE, B_NDE = self.AB
        return A_NDE if circuit == 'score' else B_NDE
