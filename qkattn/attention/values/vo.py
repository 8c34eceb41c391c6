"""Values with two matrices, W_V and W_O, or with their product as one."""

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention.options import require_one_of
from qkattn.attention.parameters import bias, grouped, homogeneous, project, weight
from qkattn.attention.scores.score import Cache, Score
from qkattn.attention.spec import AttentionSpec
from qkattn.attention.values.value import Factored, Value


class VO(Factored):
    """B[n] = W_V[n] W_O[n], rank <= H: standard. Weights D K H + N H D.

    Vaswani et al. 2017, section 3.2.2.
    """

    equation = 'W_V[n] W_O[n]'
    parameter_count = 'D*K*H + N*H*D'
    source = 'Vaswani et al. 2017'
    uses_kv_heads = True

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        D, N, K, H = spec.d_model, spec.num_heads, spec.num_kv_heads, spec.head_size
        self.w_v_DKH = weight(key, 'w_v_DKH', (D, K, H), D**-0.5)
        self.w_o_NHD = weight(key, 'w_o_NHD', (N, H, D), spec.residual_gain * (N * H) ** -0.5)
        self.b_v_KH = bias(spec, (K, H))
        self.b_o_D = bias(spec, (D,))

    def cached(self, y_BSD: jax.Array, score: Score) -> Cache:
        return {'v_BSKH': project(y_BSD, self.w_v_DKH, self.b_v_KH)}

    def values(self, cache: Cache, score: Score) -> jax.Array:
        return cache['v_BSKH']

    def value_matrix(self, score: Score) -> jax.Array:
        return homogeneous(self.w_v_DKH, self.b_v_KH)

    def output_matrix(self, score: Score) -> jax.Array:
        return self.w_o_NHD[...]


class MergedVO(Value):
    """B[n] = W_OV[n], full rank: one D x D matrix a head; the values are the stream itself.

    Weights N D^2, more than the factored 2 D N H whenever D > 2 H. The cache holds the stream
    once, D floats, shared with a Score that reads it too; all query heads read one value head of
    width D. Elhage et al. 2021 (the OV circuit).

    Args:
      init: 'dense' draws every entry; 'product' starts from W_V[n] W_O[n] of rank H, the very map
        with which `vo` starts under the same seed, and leaves the rank free to grow.
    """

    equation = 'W_OV[n]'
    parameter_count = 'N*D*D'
    source = 'Elhage et al. 2021, section "Splitting attention heads into circuits"'

    @classmethod
    def check(cls, spec: AttentionSpec, *, init: str = 'dense') -> None:
        require_one_of('merged_vo', 'init', init, ('dense', 'product'))

    def __init__(self, spec: AttentionSpec, *, key: jax.Array, init: str = 'dense'):
        D, N = spec.d_model, spec.num_heads
        if init == 'dense':
            std = spec.residual_gain * (D * N) ** -0.5
            self.w_ov_NDE = weight(key, 'w_ov_NDE', (N, D, D), std)
        else:
            factored = VO(spec, key=key)
            v_DNH = grouped(factored.w_v_DKH[...], N)
            self.w_ov_NDE = nnx.Param(jnp.einsum('DNH,NHE->NDE', v_DNH, factored.w_o_NHD[...]))
        self.b_o_D = bias(spec, (D,))

    def cached(self, y_BSD: jax.Array, score: Score) -> Cache:
        return {'x_BSD': y_BSD}

    def values(self, cache: Cache, score: Score) -> jax.Array:
        return cache['x_BSD'][:, :, None, :]

    def output(self, o_BTND: jax.Array, score: Score) -> jax.Array:
        out_BTE = jnp.einsum('BTND,NDE->BTE', o_BTND, self.w_ov_NDE[...])
        return out_BTE if self.b_o_D is None else out_BTE + self.b_o_D[...]

    def matrix(self, score: Score) -> jax.Array:
        B_NDE = self.w_ov_NDE[...]
        if self.b_o_D is None:
            return B_NDE
        return jnp.pad(B_NDE, ((0, 0), (0, 1), (0, 0))).at[0, -1].add(self.b_o_D[...])
