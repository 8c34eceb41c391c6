"""The value side of multi-head latent attention."""

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention.parameters import bias, composed, homogeneous, project, weight
from qkattn.attention.scores.score import Cache, Score
from qkattn.attention.spec import AttentionSpec
from qkattn.attention.values.value import Factored
from qkattn.errors import SpecError


def latent_size(spec: AttentionSpec) -> int | None:
    """R of the latent that the Score of `spec` keeps, None where it keeps none."""
    from qkattn.attention import registry

    cls, options = registry.find_score(spec.score)
    score = nnx.eval_shape(lambda: cls(spec, key=jax.random.key(0), **options))
    return score.w_down_DR.shape[1] if hasattr(score, 'w_down_DR') else None


class Latent(Factored):
    """B[n] = W_D W_UV[n] W_O[n]: values are read from the latent that the Score remembers.

    W_D (D x R) belongs to the score `latent`; here are W_UV[n] (R x H) and W_O[n]: weights
    R N H + N H D. No cache of its own: the Score holds the latent, R floats a token.
    `values` writes the values of all heads out; `absorbed_values` and `absorbed_output` are the
    same map with one value head that is the latent itself, the cheaper form in decoding.
    DeepSeek-AI 2024, arXiv 2405.04434, section 2.1.2.
    """

    equation = 'W_D W_UV[n] W_O[n]'
    parameter_count = 'R*N*H + N*H*D'
    source = 'DeepSeek-AI 2024, arXiv 2405.04434, section 2.1.2'
    shares = ('w_down_DR',)
    partner = 'latent'

    @classmethod
    def check(cls, spec: AttentionSpec) -> None:
        if latent_size(spec) is None:
            raise SpecError(
                f'the value latent reads the latent of its score, and {spec.score} keeps none; '
                'use it as latent/latent'
            )

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        D, N, H, R = spec.d_model, spec.num_heads, spec.head_size, latent_size(spec)
        self.w_up_v_RNH = weight(key, 'w_up_v_RNH', (R, N, H), R**-0.5)
        self.w_o_NHD = weight(key, 'w_o_NHD', (N, H, D), spec.residual_gain * (N * H) ** -0.5)
        self.b_v_NH = bias(spec, (N, H))
        self.b_o_D = bias(spec, (D,))

    def cached(self, y_BSD: jax.Array, score: Score) -> Cache:
        return {}

    def values(self, cache: Cache, score: Score) -> jax.Array:
        return project(cache['latent_BSR'], self.w_up_v_RNH, self.b_v_NH)

    def absorbed_values(self, cache: Cache, score: Score) -> jax.Array:
        """The one value head of the absorbed form, [B, S, 1, R]: what is remembered, as is."""
        return cache['latent_BSR'][:, :, None, :]

    def absorbed_output(self, o_BTNR: jax.Array, score: Score) -> jax.Array:
        """out_BTD from mixed latents.

        b_V is added after the mixing, which is the same where the probabilities of a query sum to
        1, that is without dropout on them.
        """
        o_BTNH = jnp.einsum('BTNR,RNH->BTNH', o_BTNR, self.w_up_v_RNH[...])
        return self.output(o_BTNH if self.b_v_NH is None else o_BTNH + self.b_v_NH[...], score)

    def value_matrix(self, score: Score) -> jax.Array:
        latent_DR = homogeneous(score.w_down_DR, score.b_down_R)
        return composed(latent_DR, self.w_up_v_RNH, self.b_v_NH)

    def output_matrix(self, score: Score) -> jax.Array:
        return self.w_o_NHD[...]
