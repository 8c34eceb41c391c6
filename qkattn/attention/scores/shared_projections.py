"""Scores whose heads share a projection: double projections and collaborative heads."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention.options import require_one_of, require_whole
from qkattn.attention.parameters import bias, composed, grouped, homogeneous, project, weight
from qkattn.attention.scores.score import Cache, Score
from qkattn.attention.spec import AttentionSpec


class Double(Score):
    """A[n] = (O_Q W_Q[n]) (O_K W_K[n])^T: a matrix shared by all heads, then one per head.

    Parameters: D R + R N H for the queries and D R + R K H for the keys; a side that `which` leaves
    out is that of `qk`, D N H or D K H. Each side folds into one matrix, O W[n], so that with
    R >= D the functions are those of `qk` and only training differs; R < min(D, N H) also limits
    the rank across heads. W has std R^-1/2, which keeps its output as large as its input. The cache
    holds the finished keys.

    Args:
      size: R; None is D.
      which: 'q', 'k' or 'both', the sides that have a shared matrix.
    """

    equation = 'O_Q W_Q[n] (O_K W_K[n])^T'
    source = 'over-parameterized linear maps, Arora et al. 2018, arXiv 1802.06509'
    uses_kv_heads = True

    @classmethod
    def check(cls, spec: AttentionSpec, *, size: Any = None, which: Any = 'both') -> None:
        if size is not None:
            require_whole('double', 'size', size, 1, None, '')
        require_one_of('double', 'which', which, ('q', 'k', 'both'))

    def __init__(
        self, spec: AttentionSpec, *, key: jax.Array, size: int | None = None, which: str = 'both'
    ):
        D, N, K, H = spec.d_model, spec.num_heads, spec.num_kv_heads, spec.head_size
        R = D if size is None else size
        q, k = which != 'k', which != 'q'
        self.w_q_outer_DR = weight(key, 'w_q_outer_DR', (D, R), D**-0.5) if q else None
        self.w_q_RNH = weight(key, 'w_q_RNH', (R, N, H), R**-0.5) if q else None
        self.w_q_DNH = None if q else weight(key, 'w_q_DNH', (D, N, H), D**-0.5)
        self.w_k_outer_DR = weight(key, 'w_k_outer_DR', (D, R), D**-0.5) if k else None
        self.w_k_RKH = weight(key, 'w_k_RKH', (R, K, H), R**-0.5) if k else None
        self.w_k_DKH = None if k else weight(key, 'w_k_DKH', (D, K, H), D**-0.5)
        self.b_q_outer_R = bias(spec, (R,)) if q else None
        self.b_k_outer_R = bias(spec, (R,)) if k else None
        self.b_q_NH = bias(spec, (N, H))
        self.b_k_KH = bias(spec, (K, H))
        self.scale = H**-0.5

    @property
    def parameter_count(self) -> str:
        queries = 'D*N*H' if self.w_q_outer_DR is None else 'D*R + R*N*H'
        return queries + ' + ' + ('D*K*H' if self.w_k_outer_DR is None else 'D*R + R*K*H')

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        if self.w_q_outer_DR is None:
            return project(x_BTD, self.w_q_DNH, self.b_q_NH)
        x_BTR = project(x_BTD, self.w_q_outer_DR, self.b_q_outer_R)
        return project(x_BTR, self.w_q_RNH, self.b_q_NH)

    def cached(self, y_BSD: jax.Array) -> Cache:
        if self.w_k_outer_DR is None:
            return {'k_BSKH': project(y_BSD, self.w_k_DKH, self.b_k_KH)}
        y_BSR = project(y_BSD, self.w_k_outer_DR, self.b_k_outer_R)
        return {'k_BSKH': project(y_BSR, self.w_k_RKH, self.b_k_KH)}

    def keys(self, cache: Cache) -> jax.Array:
        return cache['k_BSKH']

    def folded(self) -> tuple[jax.Array, jax.Array]:
        """W_Q and W_K of the `qk` with the same function, homogeneous where there are biases."""
        if self.w_q_outer_DR is None:
            q_DNH = homogeneous(self.w_q_DNH, self.b_q_NH)
        else:
            outer_DR = homogeneous(self.w_q_outer_DR, self.b_q_outer_R)
            q_DNH = composed(outer_DR, self.w_q_RNH, self.b_q_NH)
        if self.w_k_outer_DR is None:
            return q_DNH, homogeneous(self.w_k_DKH, self.b_k_KH)
        outer_DR = homogeneous(self.w_k_outer_DR, self.b_k_outer_R)
        return q_DNH, composed(outer_DR, self.w_k_RKH, self.b_k_KH)

    def matrix(self) -> jax.Array:
        q_DNH, k_DKH = self.folded()
        return jnp.einsum('DNH,ENH->NDE', q_DNH, grouped(k_DKH, q_DNH.shape[1]))


class Collaborative(Score):
    """A[n] = W_Q diag(m[n]) W_K^T: all heads share W_Q and W_K, and each has its own mixing m[n].

    Parameters: 2 D R + N R. The cache holds one key of width R for all heads; the mixing acts on
    the queries. With R = N H and m[n] the indicator of the n-th block of H columns this is `qk`,
    parameter for parameter, since the scale is (R / N)^-1/2 as in the authors' library (their
    translation code keeps H^-1/2 at every R). m starts as random signs times N^-1/2, which gives
    every head the sum of squares of an indicator and logits of the same size; the library draws
    normal(0, 0.2^2). It commutes with rotary positions only where m[n] is equal on the two channels
    of a pair. Their content bias is a bias on the queries here.
    Cordonnier et al. 2020, arXiv 2006.16362, section 3; github.com/epfml/collaborative-attention.

    Args:
      size: R; None is N H.
    """

    equation = 'W_Q diag(m[n]) W_K^T'
    parameter_count = '2*D*R + N*R'
    source = 'Cordonnier et al. 2020, arXiv 2006.16362'
    supports_rope = False

    @classmethod
    def check(cls, spec: AttentionSpec, *, size: Any = None) -> None:
        if size is not None:
            require_whole('collaborative', 'size', size, 1, None, '')

    def __init__(self, spec: AttentionSpec, *, key: jax.Array, size: int | None = None):
        D, N = spec.d_model, spec.num_heads
        R = N * spec.head_size if size is None else size
        self.w_q_DR = weight(key, 'w_q_DR', (D, R), D**-0.5)
        self.w_k_DR = weight(key, 'w_k_DR', (D, R), D**-0.5)
        signs_NR = jnp.sign(weight(key, 'w_mixing_NR', (N, R), 1.0)[...])
        self.w_mixing_NR = nnx.Param(N**-0.5 * signs_NR)
        self.b_q_R = bias(spec, (R,))
        self.b_k_R = bias(spec, (R,))
        self.scale = (N / R) ** 0.5

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        q_BTR = project(x_BTD, self.w_q_DR, self.b_q_R)
        return q_BTR[:, :, None, :] * self.w_mixing_NR[...]

    def cached(self, y_BSD: jax.Array) -> Cache:
        return {'k_BSR': project(y_BSD, self.w_k_DR, self.b_k_R)}

    def keys(self, cache: Cache) -> jax.Array:
        return cache['k_BSR'][:, :, None, :]

    def matrix(self) -> jax.Array:
        q_DR = homogeneous(self.w_q_DR, self.b_q_R)
        k_DR = homogeneous(self.w_k_DR, self.b_k_R)
        return jnp.einsum('DR,NR,ER->NDE', q_DR, self.w_mixing_NR[...], k_DR)
