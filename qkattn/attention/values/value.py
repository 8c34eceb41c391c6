"""The interface of a Value, one way to write B[n] in out_t = sum_n sum_s p[n, t, s] y_s B[n].

Every method receives the Score of the layer. So a Value can use a projection that the Score owns,
as in K = V, and the projection is stored, counted and trained once.

At initialization, if every head attends to one y of unit variance, the sum of the outputs of all
heads has standard deviation `spec.residual_gain`, unless a Value says otherwise. If W_V or W_O is
the matrix of `shared_qk`, whose std is smaller, the deviation is (1 + H/D)^-1/4 times that.
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

    shares: ClassVar[tuple[str, ...]] = ()  # the projections of `Score.shareable` that it uses
    partner: ClassVar[str] = 'qk'  # the registered Score with which the Value is documented
    # Whether the output is sum_n sum_s p[n, t, s] y_s B[n]. If not, the Value defines
    # `reference_output` in place of `matrix`.
    linear: ClassVar[bool] = True

    def cached(self, y_BSD: jax.Array, score: Score) -> Cache:
        """Returns the arrays that `values` needs in addition to what the Score caches."""
        raise NotImplementedError

    def values(self, cache: Cache, score: Score) -> jax.Array:
        """Returns v_BSKH, where K divides N. The cache holds the arrays of Score and Value."""
        raise NotImplementedError

    def output(self, o_BTNH: jax.Array, score: Score, x_BTD: jax.Array) -> jax.Array:
        """Returns out_BTD. o is the average of the values of each head, x the queries' stream."""
        raise NotImplementedError

    def values_and_output(
        self, cache: Cache, score: Score, num_queries: int
    ) -> tuple[jax.Array, Output]:
        """Returns v_BSKH and `output`, or another pair that gives the same out_BTD and costs less.

        Which pair costs less may depend on the numbers of queries and keys.
        """
        return self.values(cache, score), self.output

    def matrix(self, score: Score) -> jax.Array:
        """Returns B_NDD; with biases (D + 1) x D, where the last row acts on the constant 1.

        The last row of B[0] includes an output bias `b_o_D`, which then counts once, because
        softmax probabilities sum to 1.
        """
        raise NotImplementedError

    def reference_output(
        self, p_BNTS: np.ndarray, x_BTD: np.ndarray, y_BSD: np.ndarray, score: Score
    ) -> np.ndarray:
        """Computes out_BTD from the probabilities again, in float64 and without `output`."""
        raise NotImplementedError


class Factored(Value):
    """A Value of the form B[n] = V[n] O[n], where the Score may own V or O.

    For V[n], a subclass declares `value_map`, or it defines `cached`, `values` and `value_matrix`.
    For O[n], it has a parameter w_o_NHD, or it defines `output_matrix`. It always has `b_o_D`.
    """

    value_map: Map
    w_o_NHD: nnx.Param
    b_o_D: nnx.Param | None

    def cached(self, y_BSD: jax.Array, score: Score) -> Cache:
        return self.value_map.cached(self, y_BSD)

    def values(self, cache: Cache, score: Score) -> jax.Array:
        return self.value_map.heads(self, cache)

    def value_matrix(self, score: Score) -> jax.Array:
        """Returns V_DKH, so that y V = values(cached(y)); it has D + 1 rows with biases."""
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
        return B_NDE.at[0, -1].add(self.b_o_D[...])
