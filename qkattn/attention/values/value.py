"""The interface of a Value, one way to write B[n] in out_t = sum_n sum_s p[n, t, s] y_s B[n].

Every method receives the Score of the layer, so that a Value can use a projection that the Score
owns (K = V and the like): it is stored, counted and trained once.

Let every head attend to one y of unit variance. The sum of their outputs then has the standard
deviation `spec.residual_gain` at initialization, except where a Value says otherwise. Where W_V or
W_O is the matrix of `shared_qk`, whose std is smaller, it is (1 + H/D)^-1/4 times that.
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

# o_BTNH, the Score and x_BTD -> out_BTD.
Output = Callable[[jax.Array, Score, jax.Array], jax.Array]


class Value(Circuit):
    """A factorization of B[n], built by `__init__(spec, score, *, key, **options)`."""

    shares: ClassVar[tuple[str, ...]] = ()  # the projections that it uses, of `Score.shareable`
    partner: ClassVar[str] = 'qk'  # the registered Score with which the Value is documented
    # Whether the output is sum_n sum_s p[n, t, s] y_s B[n]; else reference_output replaces matrix.
    linear: ClassVar[bool] = True

    def cached(self, y_BSD: jax.Array, score: Score) -> Cache:
        """The arrays from which `values` are computed, beyond what the Score caches."""
        raise NotImplementedError

    def values(self, cache: Cache, score: Score) -> jax.Array:
        """v_BSKH, where K divides N, from the cache of Score and Value together."""
        raise NotImplementedError

    def output(self, o_BTNH: jax.Array, score: Score, x_BTD: jax.Array) -> jax.Array:
        """out_BTD from the values that each head has averaged, and the stream of the queries."""
        raise NotImplementedError

    def values_and_output(
        self, cache: Cache, score: Score, num_queries: int
    ) -> tuple[jax.Array, Output]:
        """v_BSKH and `output`, or others with the same map that are cheaper for this T and S."""
        return self.values(cache, score), self.output

    def matrix(self, score: Score) -> jax.Array:
        """B_NDD; (D+1) x D with biases, the last row acting on the constant 1.

        An output bias `b_o_D` is in the last row of B[0], as softmax probabilities sum to 1.
        """
        raise NotImplementedError

    def reference_output(
        self, p_BNTS: np.ndarray, x_BTD: np.ndarray, y_BSD: np.ndarray, score: Score
    ) -> np.ndarray:
        """out_BTD in float64 from the probabilities, computed independently of `output`."""
        raise NotImplementedError


class Factored(Value):
    """A Value of the form B[n] = V[n] O[n], where the Score may own V or O.

    A subclass declares V[n] as `value_map`, or defines `cached`, `values` and `value_matrix`. It
    owns w_o_NHD, or defines `output_matrix`, and b_o_D.
    """

    value_map: Map
    w_o_NHD: nnx.Param
    b_o_D: nnx.Param | None

    def cached(self, y_BSD: jax.Array, score: Score) -> Cache:
        return self.value_map.cached(self, y_BSD)

    def values(self, cache: Cache, score: Score) -> jax.Array:
        return self.value_map.heads(self, cache)

    def value_matrix(self, score: Score) -> jax.Array:
        """v_DKH with y v = values(cached(y)); (D+1) rows with biases."""
        return self.value_map.matrix(self)

    def output_matrix(self, score: Score) -> jax.Array:
        """o_NHD."""
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
