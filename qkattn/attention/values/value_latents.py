"""The value side of multi-head latent attention."""

import jax
import jax.numpy as jnp

from qkattn.attention.maps import Cache
from qkattn.attention.parameters import affine, composed, homogeneous, output_projection, project
from qkattn.attention.scores.key_latents import absorbing_is_cheaper
from qkattn.attention.scores.score import Score
from qkattn.attention.spec import AttentionSpec
from qkattn.attention.values.value import Factored, Output


class Latent(Factored):
    """B[n] = W_D W_UV[n] W_O[n]: values are computed from the latent that the Score caches.

    W_UV has std R^-1/2, the latent's size in place of D. The absorbed form, with the latent as its
    only value head and W_UV after the average, is cheaper in decoding.
    """

    equation = 'W_D W_UV[n] W_O[n]'
    parameter_count = 'R*N*H + N*H*D'
    source = 'DeepSeek-AI 2024, arXiv 2405.04434, section 2.1.2'
    shares = ('latent',)
    partner = 'latent'

    def __init__(self, spec: AttentionSpec, score: Score, *, key: jax.Array):
        w_down_DR, _ = score.shared('latent')
        R = w_down_DR.shape[1]
        self.w_up_v_RNH, self.b_v_NH = affine(spec, key, 'w_up_v_RNH', R=R)
        self.w_o_NHD, self.b_o_D = output_projection(spec, key)

    def cached(self, y_BSD: jax.Array, score: Score) -> Cache:
        return {}

    def values(self, cache: Cache, score: Score) -> jax.Array:
        return project(cache['latent_BSR'], self.w_up_v_RNH, self.b_v_NH)

    def values_and_output(
        self, cache: Cache, score: Score, num_queries: int
    ) -> tuple[jax.Array, Output]:
        # The other form is used with a bias b_V: not all normalizers have probabilities of sum 1.
        cheaper = absorbing_is_cheaper(num_queries, cache['latent_BSR'], self.w_up_v_RNH)
        if not cheaper or self.b_v_NH is not None:
            return super().values_and_output(cache, score, num_queries)
        return cache['latent_BSR'][:, :, None, :], self._absorbed_output

    def _absorbed_output(self, o_BTNR: jax.Array, score: Score, x_BTD: jax.Array) -> jax.Array:
        o_BTNH = jnp.einsum('BTNR,RNH->BTNH', o_BTNR, self.w_up_v_RNH[...])
        return self.output(o_BTNH, score, x_BTD)

    def value_matrix(self, score: Score) -> jax.Array:
        return composed(homogeneous(*score.shared('latent')), self.w_up_v_RNH, self.b_v_NH)
