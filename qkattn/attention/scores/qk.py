"""Scores with two matrices, W_Q and W_K, or with their product as one matrix."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention.options import require_one_of
from qkattn.attention.parameters import bias, grouped, homogeneous, project, weight
from qkattn.attention.scores.score import Cache, Score
from qkattn.attention.spec import AttentionSpec


class QK(Score):
    """A[n] = W_Q[n] W_K[n]^T, rank <= H: standard multi-head attention.

    Parameters: D N H + D K H. With K < N, groups of N / K query heads share a key head.
    Vaswani et al. 2017, section 3.2.2; Shazeer 2019 (K = 1); Ainslie et al. 2023 (K < N).
    """

    equation = 'W_Q[n] W_K[n]^T'
    parameter_count = 'D*N*H + D*K*H'
    source = 'Vaswani et al. 2017; Shazeer 2019; Ainslie et al. 2023'
    uses_kv_heads = True
    shareable = {'query': ('w_q_DNH', 'b_q_NH'), 'key': ('w_k_DKH', 'b_k_KH')}

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        D, N, K, H = spec.d_model, spec.num_heads, spec.num_kv_heads, spec.head_size
        self.w_q_DNH = weight(key, 'w_q_DNH', (D, N, H), D**-0.5)
        self.w_k_DKH = weight(key, 'w_k_DKH', (D, K, H), D**-0.5)
        self.b_q_NH = bias(spec, (N, H))
        self.b_k_KH = bias(spec, (K, H))
        self.scale = H**-0.5

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        return project(x_BTD, self.w_q_DNH, self.b_q_NH)

    def cached(self, y_BSD: jax.Array) -> Cache:
        return {'k_BSKH': project(y_BSD, self.w_k_DKH, self.b_k_KH)}

    def keys(self, cache: Cache) -> jax.Array:
        return cache['k_BSKH']

    def matrix(self) -> jax.Array:
        q_DNH = homogeneous(self.w_q_DNH, self.b_q_NH)
        k_DNH = grouped(homogeneous(self.w_k_DKH, self.b_k_KH), q_DNH.shape[1])
        return jnp.einsum('DNH,ENH->NDE', q_DNH, k_DNH)


class Merged(Score):
    """A[n] = W_QK[n], one D x D matrix of full rank per head; the keys are the stream itself.

    Parameters: N D^2, more than the 2 D N H of `qk` (K = N) whenever D > 2 H. All query heads read
    one key head of width D. Luong et al. 2015, "general".

    Args:
      init: 'dense' draws every entry independently; 'product' starts from W_Q[n] W_K[n]^T of rank
        H, the initial logits of `qk` under the same seed, and lets the rank grow in training.
    """

    equation = 'W_QK[n]'
    parameter_count = 'N*D*D'
    source = 'Luong et al. 2015, eq. 8 ("general")'
    supports_rope = False

    @classmethod
    def check(cls, spec: AttentionSpec, *, init: str = 'dense') -> None:
        require_one_of('merged', 'init', init, ('dense', 'product'))

    def __init__(self, spec: AttentionSpec, *, key: jax.Array, init: str = 'dense'):
        D, N = spec.d_model, spec.num_heads
        if init == 'product':
            A_NDE = QK(dataclasses.replace(spec, biases=False), key=key).matrix()
            rescale = (D / spec.head_size) ** 0.5  # from the scale H^-1/2 of qk to D^-1/2
            self.w_qk_DNE = nnx.Param(rescale * jnp.moveaxis(A_NDE, 0, 1))
        else:
            self.w_qk_DNE = weight(key, 'w_qk_DNE', (D, N, D), D**-0.5)
        self.b_q_NE = bias(spec, (N, D))
        self.scale = D**-0.5

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        return project(x_BTD, self.w_qk_DNE, self.b_q_NE)

    def cached(self, y_BSD: jax.Array) -> Cache:
        return {'x_BSD': y_BSD}

    def keys(self, cache: Cache) -> jax.Array:
        return cache['x_BSD'][:, :, None, :]

    def matrix(self) -> jax.Array:
        A_NDE = jnp.moveaxis(homogeneous(self.w_qk_DNE, self.b_q_NE), 1, 0)
        if self.b_q_NE is None:
            return A_NDE
        return jnp.pad(A_NDE, ((0, 0), (0, 0), (0, 1)))  # keys have no bias
