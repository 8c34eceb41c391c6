"""Values with an identity in place of W_V, of W_O, or of both."""

import jax
import jax.numpy as jnp

from qkattn.attention.options import require_slices
from qkattn.attention.parameters import bias, grouped, heads_of, homogeneous, slices_DNH, weight
from qkattn.attention.scores.score import Cache, Score
from qkattn.attention.spec import AttentionSpec
from qkattn.attention.values.value import Factored, Value
from qkattn.attention.values.vo import VO


class NoV(Factored):
    """B[n] = P[n] W_O[n]: no W_V; the value of head n is the n-th slice of the stream, y P[n].

    Parameters: N H D. Needs N H = D. Hosseini & Hosseini 2024, arXiv 2403.01643 ("optimised").
    """

    equation = 'P[n] W_O[n]'
    parameter_count = 'N*H*D'
    source = 'Hosseini & Hosseini 2024, arXiv 2403.01643'

    @classmethod
    def check(cls, spec: AttentionSpec) -> None:
        require_slices(spec, 'no_v')

    def __init__(self, spec: AttentionSpec, score: Score, *, key: jax.Array):
        D, N, H = spec.d_model, spec.num_heads, spec.head_size
        self.w_o_NHD = weight(key, 'w_o_NHD', (N, H, D), (N * H) ** -0.5, spec.residual_gain)
        self.b_o_D = bias(spec, (D,))
        self.spec = spec

    def cached(self, y_BSD: jax.Array, score: Score) -> Cache:
        return {'x_BSD': y_BSD}

    def values(self, cache: Cache, score: Score) -> jax.Array:
        return heads_of(cache['x_BSD'], self.spec.num_heads)

    def value_matrix(self, score: Score) -> jax.Array:
        return slices_DNH(self.spec)

    def output_matrix(self, score: Score) -> jax.Array:
        return self.w_o_NHD[...]


class NoO(Value):
    """B[n] = W_V[n] P[n]^T: no W_O; head n writes to the n-th slice of the stream.

    Parameters: D K H. Needs N H = D. W_V has std residual_gain D^-1/2, as the last matrix of the
    OV circuit.
    """

    equation = 'W_V[n] P[n]^T'
    parameter_count = 'D*K*H'
    source = 'Vaswani et al. 2017 without its last projection'
    uses_kv_heads = True

    @classmethod
    def check(cls, spec: AttentionSpec) -> None:
        require_slices(spec, 'no_o')

    def __init__(self, spec: AttentionSpec, score: Score, *, key: jax.Array):
        D, K, H = spec.d_model, spec.num_kv_heads, spec.head_size
        self.w_v_DKH = weight(key, 'w_v_DKH', (D, K, H), D**-0.5, spec.residual_gain)
        self.b_v_KH = bias(spec, (K, H))
        self.spec = spec

    cached = VO.cached
    values = VO.values

    def output(self, o_BTNH: jax.Array, score: Score, x_BTD: jax.Array) -> jax.Array:
        return o_BTNH.reshape(*o_BTNH.shape[:-2], -1)

    def matrix(self, score: Score) -> jax.Array:
        v_DNH = grouped(homogeneous(self.w_v_DKH, self.b_v_KH), self.spec.num_heads)
        return jnp.einsum('DNH,ENH->NDE', v_DNH, slices_DNH(self.spec)[: self.spec.d_model])


class NoVO(Value):
    """B[n] = P[n] P[n]^T: neither W_V nor W_O; head n copies the n-th slice of the stream.

    No parameters, and so no residual_gain. Needs N H = D.
    He & Hofmann 2024, arXiv 2311.01906, remove both, in a block of another shape.
    """

    equation = 'P[n] P[n]^T'
    parameter_count = '0'
    source = 'He & Hofmann 2024, arXiv 2311.01906'

    @classmethod
    def check(cls, spec: AttentionSpec) -> None:
        require_slices(spec, 'no_vo')

    def __init__(self, spec: AttentionSpec, score: Score, *, key: jax.Array):
        self.spec = spec

    cached = NoV.cached
    values = NoV.values
    output = NoO.output

    def matrix(self, score: Score) -> jax.Array:
        P_DNH = slices_DNH(self.spec)
        return jnp.einsum('DNH,ENH->NDE', P_DNH, P_DNH[: self.spec.d_model])
