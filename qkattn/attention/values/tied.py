"""Values that share a projection with their Score, or use one projection as W_V and W_O."""

import jax
import jax.numpy as jnp

from qkattn.attention.maps import Cache
from qkattn.attention.parameters import (
    affine,
    bias,
    grouped,
    homogeneous,
    output_projection,
    project,
)
from qkattn.attention.scores.score import Score
from qkattn.attention.spec import AttentionSpec
from qkattn.attention.values.value import Factored
from qkattn.attention.values.vo import VO
from qkattn.errors import SpecError


def _outward(w_DKH: jax.Array, num_heads: int) -> jax.Array:
    """Returns W[n]^T as o_NHD, with a head for each of the N query heads."""
    return jnp.moveaxis(grouped(w_DKH[...], num_heads), 0, -1)


class KIsV(Factored):
    """B[n] = W_K[n] W_O[n]: the values are the cached keys (K = V).

    The values are the keys before rotation and QK-norm. With the score `shared_qk` this is
    Q = K = V.
    """

    equation = 'W_K[n] W_O[n]'
    parameter_count = 'N*H*D'
    source = 'Kayyam et al. 2026, arXiv 2606.04032'  # Q-K=V and Q=K=V
    shares = ('key',)

    def __init__(self, spec: AttentionSpec, score: Score, *, key: jax.Array):
        self.w_o_NHD, self.b_o_D = output_projection(spec, key)

    def cached(self, y_BSD: jax.Array, score: Score) -> Cache:
        return {}

    def values(self, cache: Cache, score: Score) -> jax.Array:
        return score.keys(cache)

    def value_matrix(self, score: Score) -> jax.Array:
        return homogeneous(*score.shared('key'))


class QIsV(Factored):
    """B[n] = W_Q[n] W_O[n]: the values are the queries of the attended positions (Q = V)."""

    equation = 'W_Q[n] W_O[n]'
    parameter_count = 'N*H*D'
    source = 'mirror image of k_is_v'
    shares = ('query',)

    def __init__(self, spec: AttentionSpec, score: Score, *, key: jax.Array):
        self.w_o_NHD, self.b_o_D = output_projection(spec, key)

    def projection(self, score: Score) -> tuple[jax.Array, jax.Array | None]:
        """Returns W_V and b_V."""
        return score.shared('query')

    def cached(self, y_BSD: jax.Array, score: Score) -> Cache:
        return {'v_BSNH': project(y_BSD, *self.projection(score))}

    def values(self, cache: Cache, score: Score) -> jax.Array:
        return cache['v_BSNH']

    def value_matrix(self, score: Score) -> jax.Array:
        return homogeneous(*self.projection(score))


class VIsKTransposed(QIsV):
    """B[n] = (W_K^T)[n] W_O[n]: W_V, with its heads side by side D x D, is the transpose of W_K."""

    equation = '(W_K^T)[n] W_O[n]'
    source = 'transpose-tied counterpart of k_is_v'
    shares = ('key',)
    uses_slices = True

    @classmethod
    def check(cls, spec: AttentionSpec) -> None:
        if spec.num_kv_heads != spec.num_heads:
            raise SpecError(
                f'v_is_k_transposed needs a square key matrix, so num_kv_heads must be '
                f'num_heads={spec.num_heads}, not {spec.num_kv_heads}'
            )

    def __init__(self, spec: AttentionSpec, score: Score, *, key: jax.Array):
        super().__init__(spec, score, key=key)
        self.b_v_NH = bias(spec, (spec.num_heads, spec.head_size))

    def projection(self, score: Score) -> tuple[jax.Array, jax.Array | None]:
        parameter, _ = score.shared('key')
        w_k_DNH = parameter[...]
        D = len(w_k_DNH)
        w_k_DD = w_k_DNH.reshape(D, -1)  # the heads side by side, N H = D
        w_v_DNH = w_k_DD.T.reshape(w_k_DNH.shape)
        return w_v_DNH, self.b_v_NH


class OIsV(Factored):
    """B[n] = W_V[n] W_V[n]^T, symmetric and positive semi-definite: a head writes where it reads.

    W_V has std residual_gain^1/2 (N H (D + H))^-1/4. The output, which has variance
    N H (D + H) std^4, then has std residual_gain.
    """

    equation = 'W_V[n] W_V[n]^T'
    parameter_count = 'D*K*H'
    source = 'OV counterpart of shared_qk; Yu et al. 2023, arXiv 2306.01129 (MSSA)'
    uses_kv_heads = True
    value_map = VO.value_map

    def __init__(self, spec: AttentionSpec, score: Score, *, key: jax.Array):
        D = spec.d_model
        N = spec.num_heads
        H = spec.head_size
        # The output has variance N H (D + H) (gain * std)^4, which is residual_gain^2.
        std = (N * H * (D + H)) ** -0.25
        gain = spec.residual_gain**0.5
        self.w_v_DKH, self.b_v_KH = affine(spec, key, 'w_v_DKH', std=std, gain=gain)
        self.b_o_D = bias(spec, (D,))
        self.num_heads = N

    def output_matrix(self, score: Score) -> jax.Array:
        return _outward(self.w_v_DKH, self.num_heads)


class OIsK(Factored):
    """B[n] = W_V[n] W_K[n]^T: a head writes into the directions that its keys read.

    W_V has std residual_gain (N H)^-1/2.
    """

    equation = 'W_V[n] W_K[n]^T'
    parameter_count = 'D*K*H'
    source = 'transpose-tied W_O and W_K'
    uses_kv_heads = True
    shares = ('key',)
    value_map = VO.value_map

    def __init__(self, spec: AttentionSpec, score: Score, *, key: jax.Array):
        std = (spec.num_heads * spec.head_size) ** -0.5
        self.w_v_DKH, self.b_v_KH = affine(spec, key, 'w_v_DKH', std=std, gain=spec.residual_gain)
        self.b_o_D = bias(spec, (spec.d_model,))
        self.num_heads = spec.num_heads

    def output_matrix(self, score: Score) -> jax.Array:
        (projection,) = self.shares  # 'key', or 'query' in `OIsQ`
        w_DKH, _ = score.shared(projection)
        return _outward(w_DKH, self.num_heads)


class OIsQ(OIsK):
    """B[n] = W_V[n] W_Q[n]^T: a head writes into the directions that its queries read."""

    equation = 'W_V[n] W_Q[n]^T'
    source = 'transpose-tied W_O and W_Q'
    shares = ('query',)


class Subspace(KIsV):
    """B[n] = c W_K[n] W_K[n]^T: keys, values and output are one matrix, owned by the Score.

    With `shared_qk`, queries have the same matrix too, as in CRATE. c = residual_gain is the step
    size. The output has std c sqrt(N H / D) with `shared_qk`, and c sqrt(N H / D) sqrt(1 + H/D)
    with `qk`.
    """

    equation = 'c W_K[n] W_K[n]^T'
    parameter_count = '0'
    source = 'Yu et al. 2023, arXiv 2306.01129 (MSSA)'
    partner = 'shared_qk'

    def __init__(self, spec: AttentionSpec, score: Score, *, key: jax.Array):
        self.b_o_D = bias(spec, (spec.d_model,))
        self.num_heads = spec.num_heads
        self.step = spec.residual_gain

    def output_matrix(self, score: Score) -> jax.Array:
        w_k_DKH, _ = score.shared('key')
        return self.step * _outward(w_k_DKH, self.num_heads)
