"""A score whose heads share W_Q and W_K: examples.collaborative:Collaborative/vo."""

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention import AttentionSpec, Cache, Score, homogeneous, project, weight
from qkattn.attention.parameters import affine
from qkattn.attention.spec import whole


class Collaborative(Score):
    """A[n] = W_Q diag(m[n]) W_K^T: all heads share W_Q and W_K, and each has its own mixing m[n].

    The mixing acts on the queries. So the cache holds one key of width R for all heads. `size` is
    R, by default N H.

    If R = N H and m[n] is 1 in the n-th block of H columns and 0 elsewhere, this is `qk`. Here m
    starts as random signs times N^-1/2, which gives m[n] the same norm. (The authors' library draws
    m from normal(0, 0.2^2).) The scale is (R / N)^-1/2, and R^-1/2 with QK-norm.
    """

    equation = 'W_Q diag(m[n]) W_K^T'
    parameter_count = '2*D*R + N*R'
    source = 'Cordonnier et al. 2020, arXiv 2006.16362'
    options = {'size': whole(1)}
    supports_rope = False

    def __init__(self, spec: AttentionSpec, *, key: jax.Array, size: int | None = None):
        N = spec.num_heads
        R = N * spec.head_size if size is None else size
        self.w_q_DR, self.b_q_R = affine(spec, key, 'w_q_DR', R=R)
        self.w_k_DR, self.b_k_R = affine(spec, key, 'w_k_DR', R=R)
        signs_NR = jnp.sign(weight(key, 'w_mixing_NR', (N, R), 1.0)[...])
        self.w_mixing_NR = nnx.Param(N**-0.5 * signs_NR)
        # QK-norm acts after the mixing, so it undoes the factor N^-1/2.
        mixing_gain = 1 if spec.qk_norm else N
        self.scale = (mixing_gain / R) ** 0.5

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
