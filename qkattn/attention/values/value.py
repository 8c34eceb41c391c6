"""Values: ways to write B[n] in  out_t = sum_n sum_s p[n, t, s] y_s B[n]  (OV circuit).

Every method receives the layer's Score, so that a Value may read a matrix that the Score owns
(K = V and the like) without a second copy of it.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention.parameters import grouped
from qkattn.attention.scores.score import Cache, Score
from qkattn.attention.spec import AttentionSpec


class Value(nnx.Module):
    """Interface of a factorization of B[n]; class attributes as in Score."""

    equation: ClassVar[str]
    parameter_count: ClassVar[str]
    source: ClassVar[str]
    uses_kv_heads: ClassVar[bool] = False

    @classmethod
    def check(cls, spec: AttentionSpec, **options) -> None:
        """Raises SpecError where this Value cannot be built with `spec` and its own options."""

    def cached(self, y_BSD: jax.Array, score: Score) -> Cache:
        """What a decoding cache must hold of y for `values`, beyond what the Score holds."""
        raise NotImplementedError

    def values(self, cache: Cache, score: Score) -> jax.Array:
        """v_BSKH from what is remembered."""
        raise NotImplementedError

    def output(self, o_BTNH: jax.Array, score: Score) -> jax.Array:
        """out_BTD from the mixed values."""
        raise NotImplementedError

    def matrix(self, score: Score) -> jax.Array:
        """B_NDD; (D+1) x D with biases, the last row acting on the constant 1."""
        raise NotImplementedError


class Factored(Value):
    """B[n] = V[n] O[n], for a subclass that says what V and O are; O may be owned by the Score.

    A subclass defines `remember`, `values`, `value_matrix` and `output_matrix`, and owns b_o_D.
    """

    b_o_D: nnx.Param | None

    def value_matrix(self, score: Score) -> jax.Array:
        """v_DKH with values(cached(y)) = y v; with biases one more row, for (y, 1)."""
        raise NotImplementedError

    def output_matrix(self, score: Score) -> jax.Array:
        """o_NHD, which maps the mixed values of head n to the stream."""
        raise NotImplementedError

    def output(self, o_BTNH: jax.Array, score: Score) -> jax.Array:
        out_BTD = jnp.einsum('BTNH,NHD->BTD', o_BTNH, self.output_matrix(score))
        return out_BTD if self.b_o_D is None else out_BTD + self.b_o_D[...]

    def matrix(self, score: Score) -> jax.Array:
        w_o_NHD = self.output_matrix(score)
        v_DNH = grouped(self.value_matrix(score), w_o_NHD.shape[0])
        B_NDE = jnp.einsum('DNH,NHE->NDE', v_DNH, w_o_NHD)
        # The probabilities of a head sum to 1, so one head carries the output bias of all.
        return B_NDE if self.b_o_D is None else B_NDE.at[0, -1].add(self.b_o_D[...])
