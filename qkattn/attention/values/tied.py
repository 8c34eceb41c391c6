"""Values that read a matrix of their Score: K = V, Q = V, transposes, and all in one.

The Score owns the matrix. It is stored, counted and trained once: its gradient is the sum of both
uses. A Score names what it can lend in two class attributes, `key_weight` and `query_weight`: the
parameter W_DKH (or W_DNH) with keys(cached(y)) = y W + b, and likewise for queries.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp

from qkattn.attention.options import require_slices
from qkattn.attention.parameters import bias, grouped, homogeneous, project, weight
from qkattn.attention.scores.score import Cache, Score
from qkattn.attention.spec import AttentionSpec
from qkattn.attention.values.value import Factored
from qkattn.errors import SpecError


def lent_by(score: type[Score] | Score, which: str) -> str | None:
    """Name of the parameter that a Score lends as its 'key_weight' or 'query_weight'."""
    return getattr(score, which, None)


def lent(score: Score, which: str) -> jax.Array:
    """The lent matrix w_DKH without its bias."""
    return getattr(score, lent_by(score, which))[...]


def lent_with_bias(score: Score, which: str) -> tuple[jax.Array, jax.Array | None]:
    """The lent matrix w_DKH and its bias b_KH, None without biases."""
    name = lent_by(score, which)
    return getattr(score, name), getattr(score, 'b' + name[1:].replace('_D', '_', 1))


class Tied(Factored):
    """Base of the Values that read a matrix of their Score.

    Attributes:
      shares: which of the Score's matrices is read.
      partner: a Score that lends it.
    """

    shares: ClassVar[tuple[str, ...]]
    partner: ClassVar[str] = 'qk'

    @classmethod
    def check(cls, spec: AttentionSpec) -> None:
        from qkattn.attention import registry

        score, _ = registry.find_score(spec.score)
        for which in cls.shares:
            if lent_by(score, which) is None:
                able = [name for name, known in registry.SCORES.items() if lent_by(known, which)]
                raise SpecError(
                    f'{spec.value} reads the {which.partition("_")[0]} matrix of its score, and '
                    f'{spec.score} lends none; scores that do are {", ".join(able)}'
                )
        twice = lent_by(score, 'query_weight') == lent_by(score, 'key_weight')
        if twice and cls.shares == ('query_weight',):
            raise SpecError(
                f'in {spec.score} the query matrix is the key matrix: write '
                f'{spec.value.replace("q", "k", 1)} in place of {spec.value}'
            )


class KIsV(Tied):
    """B[n] = W_K[n] W_O[n]: the values are the keys, as they are cached (K = V).

    Weights N H D beside the Score's; the cache is the Score's alone. Keys are remembered before
    they are rotated or normed, so the values are never rotated. With the score shared_qk this is
    Q = K = V, in which W_Q, W_K and W_V are one matrix (the form that CRATE's code trains, Yu et
    al. 2023, arXiv 2306.01129). Kayyam et al. 2026, arXiv 2606.04032 (Q-K=V and Q=K=V).
    """

    equation = 'W_K[n] W_O[n]'
    parameter_count = 'N*H*D'
    source = 'Kayyam et al. 2026, arXiv 2606.04032'
    shares = ('key_weight',)

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        D, N, H = spec.d_model, spec.num_heads, spec.head_size
        self.w_o_NHD = weight(key, 'w_o_NHD', (N, H, D), spec.residual_gain * (N * H) ** -0.5)
        self.b_o_D = bias(spec, (D,))

    def cached(self, y_BSD: jax.Array, score: Score) -> Cache:
        return {}

    def values(self, cache: Cache, score: Score) -> jax.Array:
        return score.keys(cache)

    def value_matrix(self, score: Score) -> jax.Array:
        return homogeneous(*lent_with_bias(score, 'key_weight'))

    def output_matrix(self, score: Score) -> jax.Array:
        return self.w_o_NHD[...]


class QIsV(KIsV):
    """B[n] = W_Q[n] W_O[n]: the values are what the memory would ask (Q = V).

    Weights N H D beside the Score's; cache N H. The taxonomy's fourth pair: no published run.
    """

    equation = 'W_Q[n] W_O[n]'
    source = 'mirror image of k_is_v'
    shares = ('query_weight',)

    def cached(self, y_BSD: jax.Array, score: Score) -> Cache:
        return {'v_BSNH': project(y_BSD, *lent_with_bias(score, 'query_weight'))}

    def values(self, cache: Cache, score: Score) -> jax.Array:
        return cache['v_BSNH']

    def value_matrix(self, score: Score) -> jax.Array:
        return homogeneous(*lent_with_bias(score, 'query_weight'))


class VIsKTransposed(Tied):
    """B[n] = W_V[n] W_O[n] with W_V = W_K^T: the D x D matrices of all heads are transposes.

    Weights N H D beside the Score's; cache N H. Needs N H = D and a key head for each query head.
    """

    equation = '(W_K^T)[n] W_O[n]'
    parameter_count = 'N*H*D'
    source = 'transpose-tied counterpart of k_is_v'
    shares = ('key_weight',)

    @classmethod
    def check(cls, spec: AttentionSpec) -> None:
        super().check(spec)
        require_slices(spec, 'v_is_k_transposed')
        if spec.num_kv_heads != spec.num_heads:
            raise SpecError(
                f'v_is_k_transposed needs a square key matrix, so num_kv_heads must be '
                f'num_heads={spec.num_heads}, not {spec.num_kv_heads}'
            )

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        D, N, H = spec.d_model, spec.num_heads, spec.head_size
        self.w_o_NHD = weight(key, 'w_o_NHD', (N, H, D), spec.residual_gain * (N * H) ** -0.5)
        self.b_v_NH = bias(spec, (N, H))
        self.b_o_D = bias(spec, (D,))

    def cached(self, y_BSD: jax.Array, score: Score) -> Cache:
        return {'v_BSNH': project(y_BSD, _transposed(score), self.b_v_NH)}

    def values(self, cache: Cache, score: Score) -> jax.Array:
        return cache['v_BSNH']

    def value_matrix(self, score: Score) -> jax.Array:
        return homogeneous(_transposed(score), self.b_v_NH)

    def output_matrix(self, score: Score) -> jax.Array:
        return self.w_o_NHD[...]


def _transposed(score: Score) -> jax.Array:
    """W_K^T of all heads, cut into heads again."""
    w_k_DNH = lent(score, 'key_weight')
    return w_k_DNH.reshape(len(w_k_DNH), -1).T.reshape(w_k_DNH.shape)


class OIsV(Factored):
    """B[n] = W_V[n] W_V[n]^T, symmetric and positive semi-definite: a head writes where it reads.

    Weights D K H; cache K H. The standard deviation below gives the output the variance that it
    has in `vo`; the part along y itself is about sqrt(H / (D + H)) of it.
    """

    equation = 'W_V[n] W_V[n]^T'
    parameter_count = 'D*K*H'
    source = 'OV counterpart of shared_qk; Yu et al. 2023, arXiv 2306.01129 (MSSA)'
    uses_kv_heads = True

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        D, N, K, H = spec.d_model, spec.num_heads, spec.num_kv_heads, spec.head_size
        std = (spec.residual_gain**2 / (N * H * (D + H))) ** 0.25
        self.w_v_DKH = weight(key, 'w_v_DKH', (D, K, H), std)
        self.b_v_KH = bias(spec, (K, H))
        self.b_o_D = bias(spec, (D,))
        self.num_heads = N

    def cached(self, y_BSD: jax.Array, score: Score) -> Cache:
        return {'v_BSKH': project(y_BSD, self.w_v_DKH, self.b_v_KH)}

    def values(self, cache: Cache, score: Score) -> jax.Array:
        return cache['v_BSKH']

    def value_matrix(self, score: Score) -> jax.Array:
        return homogeneous(self.w_v_DKH, self.b_v_KH)

    def output_matrix(self, score: Score) -> jax.Array:
        return jnp.moveaxis(grouped(self.w_v_DKH[...], self.num_heads), 0, -1)


class OIsK(Tied):
    """B[n] = W_V[n] W_K[n]^T: a head writes into the directions that its keys read.

    Weights D K H beside the Score's; cache K H.
    """

    equation = 'W_V[n] W_K[n]^T'
    parameter_count = 'D*K*H'
    source = 'transpose-tied W_O and W_K'
    uses_kv_heads = True
    shares = ('key_weight',)

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        D, N, K, H = spec.d_model, spec.num_heads, spec.num_kv_heads, spec.head_size
        self.w_v_DKH = weight(key, 'w_v_DKH', (D, K, H), spec.residual_gain * (N * H) ** -0.5)
        self.b_v_KH = bias(spec, (K, H))
        self.b_o_D = bias(spec, (D,))
        self.num_heads = N

    cached = OIsV.cached
    values = OIsV.values
    value_matrix = OIsV.value_matrix

    def output_matrix(self, score: Score) -> jax.Array:
        return jnp.moveaxis(grouped(lent(score, self.shares[0]), self.num_heads), 0, -1)


class OIsQ(OIsK):
    """B[n] = W_V[n] W_Q[n]^T: a head writes into the directions that its queries read.

    Weights D K H beside the Score's; cache K H.
    """

    equation = 'W_V[n] W_Q[n]^T'
    source = 'transpose-tied W_O and W_Q'
    shares = ('query_weight',)


class Subspace(Tied):
    """B[n] = c W_K[n] W_K[n]^T: keys, values and output are one matrix, which the Score owns.

    No weights and no cache of its own. With the score shared_qk all four are one: the multi-head
    subspace attention of CRATE, Yu et al. 2023, arXiv 2306.01129 (MSSA), which contracts the
    stream onto the subspaces U[n]. c is the fixed number `residual_gain`, there the step size.
    """

    equation = 'c W_K[n] W_K[n]^T'
    parameter_count = '0'
    source = 'Yu et al. 2023, arXiv 2306.01129 (MSSA)'
    shares = ('key_weight',)
    partner = 'shared_qk'

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        self.b_o_D = bias(spec, (spec.d_model,))
        self.num_heads = spec.num_heads
        self.step = spec.residual_gain

    cached = KIsV.cached
    values = KIsV.values
    value_matrix = KIsV.value_matrix

    def output_matrix(self, score: Score) -> jax.Array:
        w_k_DNH = grouped(lent(score, 'key_weight'), self.num_heads)
        return self.step * jnp.moveaxis(w_k_DNH, 0, -1)
