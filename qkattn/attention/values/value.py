"""The interface of a Value, one way to write B[n] in out_t = sum_n sum_s p[n, t, s] y_s B[n].

Every method receives the Score of the layer, so a Value can use a projection that the Score owns,
as in K = V.

At initialization, the output has standard deviation `spec.residual_gain` if every head attends to
one y of unit variance. It is (1 + H/D)^-1/4 times as large if W_V or W_O is the matrix of
`shared_qk`. Exceptions are documented in their classes.
"""

from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qkattn.attention.maps import Cache, Map
from qkattn.attention.parameters import grouped, project
from qkattn.attention.scores.score import Circuit, Score

# (o_BTNH, score, x_BTD) -> out_BTD, as `Value.output`.
Output = Callable[[jax.Array, Score, jax.Array], jax.Array]


class Value(Circuit):
    """A factorization of B[n], built by `__init__(spec, score, *, key, **options)`."""

    shares: ClassVar[tuple[str, ...]] = ()  # the keys of `Score.shareable` that this Value uses
    partner: ClassVar[str] = 'qk'  # the Score with which the Value is documented
    # Whether the output is sum_n sum_s p[n, t, s] y_s B[n]. If not, a subclass defines
    # `reference_output` instead of `matrix`.
    linear: ClassVar[bool] = True

    def cached(self, y_BSD: jax.Array, score: Score) -> Cache:
        """Returns the arrays to cache in decoding, in addition to the arrays of the Score."""
        raise NotImplementedError

    def values(self, cache: Cache, score: Score) -> jax.Array:
        """Returns v_BSKH, where K divides N; `cache` has the arrays of Score and Value."""
        raise NotImplementedError

    def output(self, o_BTNH: jax.Array, score: Score, x_BTD: jax.Array) -> jax.Array:
        """Returns out_BTD.

        Args:
            o_BTNH: The attention-weighted mean of the values, for each head.
            score: The Score of the layer.
            x_BTD: The normed stream of the queries.
        """
        raise NotImplementedError

    def values_and_output(
        self, cache: Cache, score: Score, num_queries: int
    ) -> tuple[jax.Array, Output]:
        """Returns v_BSKH and `output`, or a cheaper pair with the same results.

        Args:
            cache: The arrays of Score and Value.
            score: The Score of the layer.
            num_queries: T, on which the cheaper pair may depend.
        """
        return self.values(cache, score), self.output

    def matrix(self, score: Score) -> jax.Array:
        """Returns B_NDD; with biases, (D + 1) x D, where the last row acts on the constant 1.

        The output bias is part of the last row of B[0].
        """
        raise NotImplementedError

    def reference_output(
        self, p_BNTS: np.ndarray, x_BTD: np.ndarray, y_BSD: np.ndarray, score: Score
    ) -> np.ndarray:
        """Computes out_BTD in float64, without `values` and `output`."""
        raise NotImplementedError


class Factored(Value):
    """A Value of the form B[n] = V[n] O[n].

    A subclass has `b_o_D`, and

    - for V[n], `value_map`, or else `cached`, `values` and `value_matrix`;
    - for O[n], the parameter `w_o_NHD`, or else `output_matrix`.
    """

    value_map: Map
    w_o_NHD: nnx.Param
    b_o_D: nnx.Param | None

    def cached(self, y_BSD: jax.Array, score: Score) -> Cache:
        return self.value_map.cached(self, y_BSD)

    def values(self, cache: Cache, score: Score) -> jax.Array:
        return self.value_map.heads(self, cache)

    def value_matrix(self, score: Score) -> jax.Array:
        """Returns V_DKH, where values(cached(y)) = y V; with biases, it has D + 1 rows."""
        return self.value_map.matrix(self)

    def output_matrix(self, score: Score) -> jax.Array:
        """Returns O_NHD."""
        return self.w_o_NHD[...]

    def output(self, o_BTNH: jax.Array, score: Score, x_BTD: jax.Array) -> jax.Array:
        return project(o_BTNH, self.output_matrix(score), self.b_o_D, axes=2)

    def matrix(self, score: Score) -> jax.Array:
        w_o_NHD = self.output_matrix(score)
        v_DNH = grouped(self.value_matrix(score), w_o_NHD.shape[0])
        B_NDE = jnp.einsum('DNH,NHE->NDE', v_DNH, w_o_NHD)
        if self.b_o_D is None:
            return B_NDE
        return B_NDE.at[0, -1].add(self.b_o_D[...])  # the last row of head 0
