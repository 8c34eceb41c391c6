"""Values W_V W_O of another rank, without redundant parameters, or with a third matrix."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qkattn.attention.options import require_fixed, require_one_of, require_whole
from qkattn.attention.parameters import bias, composed, grouped, homogeneous, project, weight
from qkattn.attention.scores.rank import fixed_slices
from qkattn.attention.scores.score import Cache, Score
from qkattn.attention.spec import AttentionSpec
from qkattn.attention.values.value import Factored
from qkattn.attention.values.vo import VO
from qkattn.errors import SpecError


class LowRank(Factored):
    """B[n] = W_V[n] W_O[n] of rank <= R, where R is independent of the head size of the Score.

    Parameters: D K R + N R D; the cache holds K R floats per token. R = H is `vo`.
    Bhojanapalli et al. 2020, arXiv 2002.07028 (head size set apart from D / N, there for queries
    and keys as well).

    Args:
      rank: R, 1 to D; None is H // 2, but at least 1.
    """

    equation = 'W_V[n] W_O[n], rank R'
    parameter_count = 'D*K*R + N*R*D'
    source = 'Bhojanapalli et al. 2020, arXiv 2002.07028'
    uses_kv_heads = True

    @classmethod
    def check(cls, spec: AttentionSpec, *, rank: int | None = None) -> None:
        if rank is not None:
            require_whole('low_rank', 'rank', rank, 1, spec.d_model, 'd_model')

    def __init__(
        self, spec: AttentionSpec, score: Score, *, key: jax.Array, rank: int | None = None
    ):
        D, N, K = spec.d_model, spec.num_heads, spec.num_kv_heads
        R = min(max(1, spec.head_size // 2), D) if rank is None else rank
        self.w_v_DKR = weight(key, 'w_v_DKR', (D, K, R), D**-0.5)
        self.w_o_NRD = weight(key, 'w_o_NRD', (N, R, D), (N * R) ** -0.5, spec.residual_gain)
        self.b_v_KR = bias(spec, (K, R))
        self.b_o_D = bias(spec, (D,))

    def cached(self, y_BSD: jax.Array, score: Score) -> Cache:
        return {'v_BSKR': project(y_BSD, self.w_v_DKR, self.b_v_KR)}

    def values(self, cache: Cache, score: Score) -> jax.Array:
        return cache['v_BSKR']

    def value_matrix(self, score: Score) -> jax.Array:
        return homogeneous(self.w_v_DKR, self.b_v_KR)

    def output_matrix(self, score: Score) -> jax.Array:
        return self.w_o_NRD[...]


class GaugeFixed(Factored):
    """B[n] = W_V[n] [I, W_O[n]]: H of the D columns of each W_O[n] are the identity.

    Parameters: D N H + N H (D - H); only the C = D - H free columns are stored. W_V[n] M and
    M^-1 W_O[n] have the same product for every invertible H x H matrix M, so H^2 parameters of each
    head of `vo` are redundant: this form has the same functions (where that block of W_O[n] is
    invertible) without them, with any positions. M is free per head only where the head has its own
    W_V, so there are always N value heads, N H floats per token in the cache.
    Graef et al., MatShrink (transformer-tricks), there as a rewrite of trained parameters.

    Args:
      init: 'dense' draws the free columns with std H^-1/2, which gives them the norm of the fixed
        ones, 1, and W_V with std residual_gain (D N)^-1/2; 'product' starts from the parameters of
        `vo` under the same seed (the same function; the inverse of a random block can be large).
      columns: the H fixed columns of each head; None is, for head n, the H that start at n H,
        modulo D.
    """

    equation = 'W_V[n] [I, W_O[n]]'
    parameter_count = 'D*N*H + N*H*(D-H)'
    source = 'OpenMachine transformer-tricks, "MatShrink"'

    @classmethod
    def check(
        cls,
        spec: AttentionSpec,
        *,
        init: str = 'dense',
        columns: tuple[tuple[int, ...], ...] | None = None,
    ) -> None:
        D, H = spec.d_model, spec.head_size
        require_one_of('gauge_fixed', 'init', init, ('dense', 'product'))
        if H >= D:
            raise SpecError(
                f'gauge_fixed fixes head_size={H} of d_model={D} columns, which leaves no free '
                'one; head_size must be below d_model (without free columns it is no_o)'
            )
        require_fixed('gauge_fixed', 'columns', columns, spec)

    def __init__(
        self,
        spec: AttentionSpec,
        score: Score,
        *,
        key: jax.Array,
        init: str = 'dense',
        columns: tuple[tuple[int, ...], ...] | None = None,
    ):
        D, N, H = spec.d_model, spec.num_heads, spec.head_size
        self.columns = columns or fixed_slices(spec, spec.num_heads)
        if init == 'dense':
            w_v_DNH = weight(key, 'w_v_DNH', (D, N, H), (D * N) ** -0.5, spec.residual_gain)
            self.w_v_DNH = w_v_DNH
            self.w_o_NHC = weight(key, 'w_o_NHC', (N, H, D - H), H**-0.5)
        else:
            vo = VO(spec, score, key=key)
            block_NHH, rest_NHC = split_columns(vo.w_o_NHD[...], self.columns)
            v_DNH = grouped(vo.w_v_DKH[...], N)
            self.w_v_DNH = nnx.Param(jnp.einsum('DNH,NHG->DNG', v_DNH, block_NHH))
            self.w_o_NHC = nnx.Param(jnp.linalg.solve(block_NHH, rest_NHC))
        self.b_v_NH = bias(spec, (N, H))
        self.b_o_D = bias(spec, (D,))

    def cached(self, y_BSD: jax.Array, score: Score) -> Cache:
        return {'v_BSNH': project(y_BSD, self.w_v_DNH, self.b_v_NH)}

    def values(self, cache: Cache, score: Score) -> jax.Array:
        return cache['v_BSNH']

    def value_matrix(self, score: Score) -> jax.Array:
        return homogeneous(self.w_v_DNH, self.b_v_NH)

    def output_matrix(self, score: Score) -> jax.Array:
        free_NHC = self.w_o_NHC[...]
        N, H, _ = free_NHC.shape
        identity_NHH = jnp.broadcast_to(jnp.eye(H, dtype=free_NHC.dtype), (N, H, H))
        ordered_NHD = jnp.concatenate([identity_NHH, free_NHC], axis=-1)
        place_ND = np.argsort(_order_ND(self.columns, ordered_NHD.shape[-1]), axis=-1)
        return jnp.take_along_axis(ordered_NHD, place_ND[:, None, :], axis=-1)


def split_columns(
    w_o_NHD: jax.Array, columns: tuple[tuple[int, ...], ...]
) -> tuple[jax.Array, jax.Array]:
    """The fixed block_NHH and the free rest_NHC of W_O."""
    order_ND = _order_ND(columns, w_o_NHD.shape[-1])
    ordered_NHD = jnp.take_along_axis(w_o_NHD, order_ND[:, None, :], axis=-1)
    return ordered_NHD[..., : len(columns[0])], ordered_NHD[..., len(columns[0]) :]


def _order_ND(columns: tuple[tuple[int, ...], ...], d_model: int) -> np.ndarray:
    """Per head the fixed columns as given, then the free ones in ascending order."""
    everything = np.arange(d_model)
    return np.stack([np.append(fixed, np.setdiff1d(everything, fixed)) for fixed in columns])


class Double(Factored):
    """B[n] = O_V W_V[n] W_O[n]: all heads read one shared projection, then their own.

    Parameters: D R + R K H + N H D, with O_V D x R and W_V[n] R x H; the cache holds K H floats per
    token. O_V W_V[n] folds into one matrix, so that with R >= D the functions are those of `vo` and
    only training differs. W_V has std R^-1/2, which keeps its output as large as its input.

    Args:
      size: R; None is D.
    """

    equation = 'O_V W_V[n] W_O[n]'
    parameter_count = 'D*R + R*K*H + N*H*D'
    source = 'over-parameterization: Arora et al. 2018, arXiv 1802.06509'
    uses_kv_heads = True

    @classmethod
    def check(cls, spec: AttentionSpec, *, size: int | None = None) -> None:
        if size is not None:
            require_whole('double', 'size', size, 1, None, '')

    def __init__(
        self, spec: AttentionSpec, score: Score, *, key: jax.Array, size: int | None = None
    ):
        D, N, K, H = spec.d_model, spec.num_heads, spec.num_kv_heads, spec.head_size
        R = D if size is None else size
        self.w_v_outer_DR = weight(key, 'w_v_outer_DR', (D, R), D**-0.5)
        self.w_v_RKH = weight(key, 'w_v_RKH', (R, K, H), R**-0.5)
        self.w_o_NHD = weight(key, 'w_o_NHD', (N, H, D), (N * H) ** -0.5, spec.residual_gain)
        self.b_v_outer_R = bias(spec, (R,))
        self.b_v_KH = bias(spec, (K, H))
        self.b_o_D = bias(spec, (D,))

    def cached(self, y_BSD: jax.Array, score: Score) -> Cache:
        outer_BSR = project(y_BSD, self.w_v_outer_DR, self.b_v_outer_R)
        return {'v_BSKH': project(outer_BSR, self.w_v_RKH, self.b_v_KH)}

    def values(self, cache: Cache, score: Score) -> jax.Array:
        return cache['v_BSKH']

    def value_matrix(self, score: Score) -> jax.Array:
        outer_DR = homogeneous(self.w_v_outer_DR, self.b_v_outer_R)
        return composed(outer_DR, self.w_v_RKH, self.b_v_KH)

    def output_matrix(self, score: Score) -> jax.Array:
        return self.w_o_NHD[...]
