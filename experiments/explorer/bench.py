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
    """A weight matrix or gain of a circuit."""

    circuit: str  # 'score' or 'value', which owns it
    attribute: str  # its name in the class, e.g. 'w_q_DNH'
    initial: np.ndarray  # of its shape: initial values of gains, zeros for matrices

    @property
    def stem(self) -> str:
        """Its role without prefix and axes: 'q' of 'w_q_DNH'."""
        return re.sub(r'^[a-z]_|_[A-Z]+$', '', self.attribute)

    @property
    def name(self) -> str:
        """As in equations: W_Q, W_frozen_q, g_sign."""
        stem = self.stem.upper() if len(self.stem) < 3 else self.stem
        return f'W_{stem}' if self.attribute.startswith('w') else f'g_{stem}'

    @property
    def by_head(self) -> np.ndarray:
        """The positions of its entries, as [head, row, column]; those of a vector, [head, column].

        For w_q_DNH with D = 2, two heads and H = 1, entry [head, row, 0] is 2 row + head: the
        parameter is stored with the axis of heads in the middle. The axis of heads is N or K. A
        parameter without it belongs to a single head.
        """
        positions = np.arange(self.initial.size).reshape(self.initial.shape)
        axes = self.attribute.rpartition('_')[2]  # 'DNH' of 'w_q_DNH'
        for axis, letter in enumerate(axes):
            if letter in 'NK':
                return np.moveaxis(positions, axis, 0)
        return positions[None]


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
            number = getattr(self, field)
            if number not in valid:
                raise ConfigError(f'{field}={number} must be from {valid[0]} to {valid[-1]}')
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
        """The layer of the variant, with zeros as matrices; SpecError if it cannot be built."""
        score, value = parse_variant(self.variant)
        spec = AttentionSpec(score=score, value=value, d_model=self.dims, num_heads=self.heads)
        with shapes_only():
            return Attention(spec, key=jax.random.key(0))

    @functools.cached_property
    def parameters(self) -> list[Parameter]:
        """Parameters of the score, then those of the value, in reading order."""
        parameters = []
        leaves, _ = jax.tree_util.tree_flatten_with_path(self.layer)
        for path, array in leaves:
            circuit = path[0].name
            attribute = path[1].name
            parameters.append(Parameter(circuit, attribute, np.asarray(array)))
        # JAX sorts attributes by name. Sort them as the classes define them, which is the order of
        # the equations. 'score' comes before 'value' in the alphabet, too.
        order = [*vars(self.layer.score), *vars(self.layer.value)]
        parameters.sort(key=lambda p: (p.circuit, order.index(p.attribute)))
        return parameters

    def parameters_of(self, circuit: str) -> list[Parameter]:
        """The parameters of 'score' or 'value'."""
        return [parameter for parameter in self.parameters if parameter.circuit == circuit]

    def filled(self, arrays: Sequence[Any]) -> Attention:
        """Returns the layer with other parameters, given in the order of `parameters`."""
        by_name = {}
        for parameter, array in zip(self.parameters, arrays, strict=True):
            by_name[parameter.attribute] = array
        return jax.tree_util.tree_map_with_path(lambda path, _: by_name[path[1].name], self.layer)

    @functools.cached_property
    def symbols(self) -> tuple[Any, list[np.ndarray]]:
        """The ring of polynomials, and an array of symbols for each parameter, in its shape.

        The symbol q12 stands for row 1 and column 2 of W_Q, and q[2]12 for those of head 2. A
        symbol is a generator of the ring.
        """
        shapes = {p.stem.replace('_', ''): p.by_head.shape for p in self.parameters}
        ring, symbols_by_head = generators(shapes)
        arrays = []
        for parameter, symbols in zip(self.parameters, symbols_by_head, strict=True):
            # Bring the symbols, which are ordered by head, into the order of the parameter.
            flat = np.empty(parameter.initial.size, object)
            flat[parameter.by_head.ravel()] = symbols.ravel()
            arrays.append(flat.reshape(parameter.initial.shape))
        return ring, arrays

    @functools.cached_property
    def AB(self) -> tuple[np.ndarray, np.ndarray]:
        """A_NDE and B_NDE, whose entries are polynomials in `symbols`.

        They are computed by the `matrix` of the layer, with symbols in place of its parameters.
        """
        ring, arrays = self.symbols
        real = ring.domain.dtype  # the type of a coefficient

        def round_coefficients(entry: Any) -> Any:
            """Removes rounding errors from a polynomial, so that equal entries compare equal."""
            rounded = {}
            for powers, coefficient in ring(entry).terms():
                rounded[powers] = real(round(float(coefficient), 14))
            return ring.from_dict(rounded)

        A_NDE, B_NDE = evaluate(lambda *leaves: self.filled(leaves).matrix(), *arrays)
        round_entries = np.vectorize(round_coefficients, otypes=[object])
        return round_entries(A_NDE), round_entries(B_NDE)

    def matrix_of(self, circuit: str) -> np.ndarray:
        """A_NDE of 'score' or B_NDE of 'value', polynomials in `symbols`."""
        A_NDE, B_NDE = self.AB
        return A_NDE if circuit == 'score' else B_NDE
