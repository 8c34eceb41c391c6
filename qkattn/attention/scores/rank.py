"""Scores W_Q W_K^T of another rank, without redundant parameters, or with fixed ones."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.attention.options import require_fixed, require_whole
from qkattn.attention.parameters import bias, grouped, homogeneous, project, weight
from qkattn.attention.scores.score import Cache, Score
from qkattn.attention.spec import AttentionSpec
from qkattn.errors import SpecError


class LowRank(Score):
    """A[n] = W_Q[n] W_K[n]^T of rank <= R, where R is independent of the head size of the values.

    Parameters: D N R + D K R. R < H gives thin keys, R > H keys wider than the values, R = H is
    `qk`. Zero columns extend a small R to a larger one exactly, up to the scale. Rotary positions
    need an even R. Bhojanapalli et al. 2020, arXiv 2002.07028 (head size set apart from D / N).

    Args:
      rank: R, 1 to D; None is H // 2, but at least 1.
    """

    equation = 'W_Q[n] W_K[n]^T, rank R'
    parameter_count = 'D*N*R + D*K*R'
    source = 'Bhojanapalli et al. 2020, arXiv 2002.07028'
    uses_kv_heads = True

    @classmethod
    def check(cls, spec: AttentionSpec, *, rank: int | None = None) -> None:
        if rank is not None:
            require_whole('low_rank', 'rank', rank, 1, spec.d_model, 'd_model')
        rank = cls.default_rank(spec) if rank is None else rank
        if spec.positions == 'rope' and rank % 2:
            raise SpecError(f'low_rank(rank={rank}) must have an even rank for positions=rope')

    @staticmethod
    def default_rank(spec: AttentionSpec) -> int:
        """Half the head size."""
        return min(max(1, spec.head_size // 2), spec.d_model)

    def __init__(self, spec: AttentionSpec, *, key: jax.Array, rank: int | None = None):
        D, N, K = spec.d_model, spec.num_heads, spec.num_kv_heads
        R = self.default_rank(spec) if rank is None else rank
        self.w_q_DNR = weight(key, 'w_q_DNR', (D, N, R), D**-0.5)
        self.w_k_DKR = weight(key, 'w_k_DKR', (D, K, R), D**-0.5)
        self.b_q_NR = bias(spec, (N, R))
        self.b_k_KR = bias(spec, (K, R))
        self.scale = R**-0.5

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        return project(x_BTD, self.w_q_DNR, self.b_q_NR)

    def cached(self, y_BSD: jax.Array) -> Cache:
        return {'k_BSKR': project(y_BSD, self.w_k_DKR, self.b_k_KR)}

    def keys(self, cache: Cache) -> jax.Array:
        return cache['k_BSKR']

    def matrix(self) -> jax.Array:
        q_DNR = homogeneous(self.w_q_DNR, self.b_q_NR)
        k_DNR = grouped(homogeneous(self.w_k_DKR, self.b_k_KR), q_DNR.shape[1])
        return jnp.einsum('DNR,ENR->NDE', q_DNR, k_DNR)


class FullSize(LowRank):
    """A[n] = W_Q[n] W_K[n]^T with query and key heads as wide as the stream, rank <= D.

    Parameters: D N D + D K D. The functions of `merged` at twice its parameters (K = N), with keys
    of width D for every key head in the cache. The same as low_rank(rank=D).
    """

    equation = 'W_Q[n] W_K[n]^T, rank D'
    parameter_count = 'D*N*D + D*K*D'
    source = 'Vaswani et al. 2017 with d_k = d_model'

    @classmethod
    def check(cls, spec: AttentionSpec, **options: Any) -> None:
        if spec.positions == 'rope' and spec.d_model % 2:
            raise SpecError(f'd_model={spec.d_model} must be even for full_size with rope')

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        super().__init__(spec, key=key, rank=spec.d_model)

    def cached(self, y_BSD: jax.Array) -> Cache:
        return {'k_BSKD': project(y_BSD, self.w_k_DKR, self.b_k_KR)}

    def keys(self, cache: Cache) -> jax.Array:
        return cache['k_BSKD']


class GaugeFixed(Score):
    """A[n] = W_Q[n] [I; F[n]]^T: an H x H block of W_K[n] is the identity and is not stored.

    Parameters: D N H + (D - H) K H. For any invertible M, W_Q M^T and W_K M^-1 have the same
    product, so H^2 parameters of each key head of `qk` are redundant: this form has the same
    functions (where the block is invertible) without them. Rotary positions do not commute with M,
    so with them the form would be a smaller class than `qk`. Keys have variance 2 - H / D at
    initialization, so W_Q has std D^-1/2 (2 - H / D)^-1/2.
    Graef et al., MatShrink (transformer-tricks), there as a rewrite of trained parameters.

    Args:
      rows: the H fixed rows of each key head; None is, for head n, the H that start at n H, modulo
        D, so that heads copy different coordinates.
    """

    equation = 'W_Q[n] [I; F[n]]^T'
    parameter_count = 'D*N*H + (D - H)*K*H'
    source = 'MatShrink, github.com/OpenMachine-ai/transformer-tricks'
    uses_kv_heads = True
    supports_rope = False

    @classmethod
    def check(cls, spec: AttentionSpec, *, rows: tuple[tuple[int, ...], ...] | None = None) -> None:
        if spec.head_size > spec.d_model:
            raise SpecError(
                f'gauge_fixed needs an H x H block of a D x H matrix, so head_size='
                f'{spec.head_size} must be at most d_model={spec.d_model}'
            )
        require_fixed('gauge_fixed', 'rows', rows, spec, 'num_kv_heads')

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        key: jax.Array,
        rows: tuple[tuple[int, ...], ...] | None = None,
    ):
        D, N, K, H = spec.d_model, spec.num_heads, spec.num_kv_heads, spec.head_size
        C = D - H  # free rows of W_K
        self.rows = rows or fixed_slices(spec, K)
        std = D**-0.5
        self.w_q_DNH = weight(key, 'w_q_DNH', (D, N, H), std * (2 - H / D) ** -0.5)
        self.w_k_free_CKH = weight(key, 'w_k_free_CKH', (C, K, H), std) if C else None
        self.b_q_NH = bias(spec, (N, H))
        self.b_k_KH = bias(spec, (K, H))
        self.scale = H**-0.5
        self.spec = spec

    def w_k_DKH(self) -> jax.Array:
        """W_K with its identity blocks; the free rows of a head follow them, modulo D."""
        K, H = self.spec.num_kv_heads, self.spec.head_size
        w_DKH = jnp.broadcast_to(jnp.eye(H, dtype=self.w_q_DNH.dtype)[:, None], (H, K, H))
        if self.w_k_free_CKH is not None:
            w_DKH = jnp.concatenate([w_DKH, self.w_k_free_CKH[...]])
        place_KD = np.argsort(fixed_first(self.rows, len(w_DKH)), axis=-1)
        return jnp.take_along_axis(w_DKH, place_KD.T[:, :, None], axis=0)

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        return project(x_BTD, self.w_q_DNH, self.b_q_NH)

    def cached(self, y_BSD: jax.Array) -> Cache:
        return {'k_BSKH': project(y_BSD, self.w_k_DKH(), self.b_k_KH)}

    def keys(self, cache: Cache) -> jax.Array:
        return cache['k_BSKH']

    def matrix(self) -> jax.Array:
        q_DNH = homogeneous(self.w_q_DNH, self.b_q_NH)
        k_DNH = grouped(homogeneous(self.w_k_DKH(), self.b_k_KH), q_DNH.shape[1])
        return jnp.einsum('DNH,ENH->NDE', q_DNH, k_DNH)


def fixed_slices(spec: AttentionSpec, num_heads: int) -> tuple[tuple[int, ...], ...]:
    """The default fixed channels: for head n the H that start at n H, modulo D."""
    D, H = spec.d_model, spec.head_size
    return tuple(tuple((n * H + h) % D for h in range(H)) for n in range(num_heads))


def fixed_first(rows: tuple[tuple[int, ...], ...], d_model: int) -> np.ndarray:
    """order_KD: the fixed rows of a head, then the free ones that follow the first, modulo D."""
    orders = []
    for fixed in rows:
        cyclic_D = np.roll(np.arange(d_model), -fixed[0])
        orders.append(np.append(fixed, cyclic_D[~np.isin(cyclic_D, fixed)]))
    return np.stack(orders)


class Frozen(Score):
    """A[n] = W_Q[n] W_K[n]^T with both matrices fixed at their initial values.

    Parameters: D N H + D K H, none trained; the initial values are those of `qk` under the same
    seed. Biases do train: a bias fixed at zero would be none. Dong et al. 2025, arXiv 2506.01115.
    """

    equation = 'W_Q[n] W_K[n]^T, fixed'
    parameter_count = 'D*N*H + D*K*H'
    source = 'Dong et al. 2025, arXiv 2506.01115'
    uses_kv_heads = True

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        D, N, K, H = spec.d_model, spec.num_heads, spec.num_kv_heads, spec.head_size
        self.w_frozen_q_DNH = weight(key, 'w_q_DNH', (D, N, H), D**-0.5)
        self.w_frozen_k_DKH = weight(key, 'w_k_DKH', (D, K, H), D**-0.5)
        self.b_q_NH = bias(spec, (N, H))
        self.b_k_KH = bias(spec, (K, H))
        self.scale = H**-0.5

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        w_q_DNH = jax.lax.stop_gradient(self.w_frozen_q_DNH[...])
        return project(x_BTD, w_q_DNH, self.b_q_NH)

    def cached(self, y_BSD: jax.Array) -> Cache:
        w_k_DKH = jax.lax.stop_gradient(self.w_frozen_k_DKH[...])
        return {'k_BSKH': project(y_BSD, w_k_DKH, self.b_k_KH)}

    def keys(self, cache: Cache) -> jax.Array:
        return cache['k_BSKH']

    def matrix(self) -> jax.Array:
        q_DNH = homogeneous(self.w_frozen_q_DNH, self.b_q_NH)
        k_DNH = grouped(homogeneous(self.w_frozen_k_DKH, self.b_k_KH), q_DNH.shape[1])
        return jnp.einsum('DNH,ENH->NDE', q_DNH, k_DNH)
