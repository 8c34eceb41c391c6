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

    The latent has size R, and W_UV has std R^-1/2.
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
        """Returns the values and the output function in the cheaper of two forms.

        In both forms, a head with probabilities p[s] and latents c[s] computes the same output:

            explicit: (sum_s p[s] (c[s] W_UV)) W_O, with the values c[s] W_UV
            absorbed: (sum_s p[s] c[s]) W_UV W_O, with the values c[s]
        """
        # The absorbed form has no place for the bias of the values.
        has_bias = self.b_v_NH is not None
        latent_BSR = cache['latent_BSR']
        is_absorbed_cheaper = absorbing_is_cheaper(num_queries, latent_BSR, self.w_up_v_RNH)
        if has_bias or not is_absorbed_cheaper:
            return super().values_and_output(cache, score, num_queries)  # the explicit form
        v_BS1R = latent_BSR[:, :, None, :]  # a single value head
        return v_BS1R, self._absorbed_output

    def _absorbed_output(self, o_BTNR: jax.Array, score: Score, x_BTD: jax.Array) -> jax.Array:
        """Applies W_UV to the averaged latents, and then `output`."""
        o_BTNH = jnp.einsum('BTNR,RNH->BTNH', o_BTNR, self.w_up_v_RNH[...])
        return self.output(o_BTNH, score, x_BTD)

    def value_matrix(self, score: Score) -> jax.Array:
        return composed(homogeneous(*score.shared('latent')), self.w_up_v_RNH, self.b_v_NH)
