"""Values with two matrices, W_V and W_O, or with their product as one matrix."""

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention.options import require_one_of
from qkattn.attention.parameters import bias, grouped, homogeneous, project, weight
from qkattn.attention.scores.score import Cache, Score
from qkattn.attention.spec import AttentionSpec
from qkattn.attention.values.value import Factored, Value


class VO(Factored):
    """B[n] = W_V[n] W_O[n], rank <= H: standard multi-head attention.

    Parameters: D K H + N H D. W_O has std residual_gain (N H)^-1/2, since it adds up N H channels.
    Vaswani et al. 2017, section 3.2.2.
    """

    equation = 'W_V[n] W_O[n]'
    parameter_count = 'D*K*H + N*H*D'
    source = 'Vaswani et al. 2017'
    uses_kv_heads = True

    def __init__(self, spec: AttentionSpec, score: Score, *, key: jax.Array):
        D, N, K, H = spec.d_model, spec.num_heads, spec.num_kv_heads, spec.head_size
        self.w_v_DKH = weight(key, 'w_v_DKH', (D, K, H), D**-0.5)
        self.w_o_NHD = weight(key, 'w_o_NHD', (N, H, D), (N * H) ** -0.5, spec.residual_gain)
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
    """B[n] = W_OV[n], one D x D matrix of full rank per head; the values are the stream itself.

    Parameters: N D^2, more than the 2 D N H of `vo` (K = N) whenever D > 2 H. The cache holds the
    stream, D floats per token, shared with a Score that caches it too; all query heads read one
    value head of width D. W_OV has std residual_gain (D N)^-1/2, since N heads of D channels add
    up. Elhage et al. 2021 (the OV circuit).

    Args:
      init: 'dense' draws every entry independently; 'product' starts from W_V[n] W_O[n] of rank H,
        the initial map of `vo` under the same seed, and lets the rank grow in training.
    """

    equation = 'W_OV[n]'
    parameter_count = 'N*D*D'
    source = 'Elhage et al. 2021, section "Splitting attention heads into circuits"'

    @classmethod
    def check(cls, spec: AttentionSpec, *, init: str = 'dense') -> None:
        require_one_of('merged_vo', 'init', init, ('dense', 'product'))

    def __init__(self, spec: AttentionSpec, score: Score, *, key: jax.Array, init: str = 'dense'):
        D, N = spec.d_model, spec.num_heads
        if init == 'dense':
            std = (D * N) ** -0.5
            self.w_ov_NDE = weight(key, 'w_ov_NDE', (N, D, D), std, spec.residual_gain)
        else:
            vo = VO(spec, score, key=key)
            v_DNH = grouped(vo.w_v_DKH[...], N)
            self.w_ov_NDE = nnx.Param(jnp.einsum('DNH,NHE->NDE', v_DNH, vo.w_o_NHD[...]))
        self.b_o_D = bias(spec, (D,))

    def cached(self, y_BSD: jax.Array, score: Score) -> Cache:
        return {'x_BSD': y_BSD}

    def values(self, cache: Cache, score: Score) -> jax.Array:
        return cache['x_BSD'][:, :, None, :]

    def output(self, o_BTND: jax.Array, score: Score, x_BTD: jax.Array) -> jax.Array:
        out_BTE = jnp.einsum('BTND,NDE->BTE', o_BTND, self.w_ov_NDE[...])
        return out_BTE if self.b_o_D is None else out_BTE + self.b_o_D[...]

    def matrix(self, score: Score) -> jax.Array:
        B_NDE = self.w_ov_NDE[...]
        if self.b_o_D is None:
            return B_NDE
        return jnp.pad(B_NDE, ((0, 0), (0, 1), (0, 0))).at[0, -1].add(self.b_o_D[...])
