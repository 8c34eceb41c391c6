"""Scores W_Q W_K^T: of rank H or another, over-parameterized, merged, without redundancy, fixed."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qkattn.attention.maps import STREAM, Cache, Projection
from qkattn.attention.parameters import affine, bias, homogeneous, project, weight
from qkattn.attention.scores.score import Score, TwoMaps
from qkattn.attention.spec import AttentionSpec, fixed_channels, one_of, whole
from qkattn.errors import SpecError

Channels = tuple[tuple[int, ...], ...]  # the fixed ones of each head


class QK(TwoMaps):
    """A[n] = W_Q[n] W_K[n]^T, rank <= H: standard multi-head attention.

    With K < N, groups of N / K query heads share a key head.
    """

    equation = 'W_Q[n] W_K[n]^T'
    parameter_count = 'D*N*H + D*K*H'
    source = 'Vaswani et al. 2017; Shazeer 2019; Ainslie et al. 2023'  # K = N, K = 1, K < N
    uses_kv_heads = True
    shareable = {'query': ('w_q_DNH', 'b_q_NH'), 'key': ('w_k_DKH', 'b_k_KH')}
    query_map = Projection('w_q_DNH', 'b_q_NH')
    key_map = Projection('w_k_DKH', 'b_k_KH', 'k_BSKH')

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        self.w_q_DNH, self.b_q_NH = affine(spec, key, 'w_q_DNH')
        self.w_k_DKH, self.b_k_KH = affine(spec, key, 'w_k_DKH')
        self.scale = spec.head_size**-0.5


class LowRank(TwoMaps):
    """A[n] = W_Q[n] W_K[n]^T of rank <= R, where R is independent of the head size of the values.

    R = H is `qk`. Rotary positions need an even R. `rank` is 1 to D; None is max(1, H // 2) or D,
    whichever is less.
    """

    equation = 'W_Q[n] W_K[n]^T, rank R'
    parameter_count = 'D*N*R + D*K*R'
    source = 'Bhojanapalli et al. 2020, arXiv 2002.07028'
    options = {'rank': whole(1, 'd_model')}
    uses_kv_heads = True
    query_map = Projection('w_q_DNR', 'b_q_NR')
    key_map = Projection('w_k_DKR', 'b_k_KR', 'k_BSKR')

    def __init__(self, spec: AttentionSpec, *, key: jax.Array, rank: int | None = None):
        R = min(max(1, spec.head_size // 2), spec.d_model) if rank is None else rank
        self.w_q_DNR, self.b_q_NR = affine(spec, key, 'w_q_DNR', R=R)
        self.w_k_DKR, self.b_k_KR = affine(spec, key, 'w_k_DKR', R=R)
        self.scale = R**-0.5


class FullSize(LowRank):
    """A[n] = W_Q[n] W_K[n]^T of rank D: the functions of `merged`, twice its parameters (K = N)."""

    equation = 'W_Q[n] W_K[n]^T, rank D'
    parameter_count = 'D*N*D + D*K*D'
    source = 'Vaswani et al. 2017 with d_k = d_model'
    key_map = Projection('w_k_DKR', 'b_k_KR', 'k_BSKD')

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        super().__init__(spec, key=key, rank=spec.d_model)


class Frozen(TwoMaps):
    """A[n] = W_Q[n] W_K[n]^T, fixed at the initial values of `qk` (same seed); biases do train."""

    equation = 'W_Q[n] W_K[n]^T, fixed'
    parameter_count = 'D*N*H + D*K*H'
    source = 'Dong et al. 2025, arXiv 2506.01115'
    uses_kv_heads = True
    query_map = Projection('w_q_DNH', 'b_q_NH')
    key_map = Projection('w_k_DKH', 'b_k_KH', 'k_BSKH')
    w_q_DNH = property(lambda self: jax.lax.stop_gradient(self.w_frozen_q_DNH[...]))
    w_k_DKH = property(lambda self: jax.lax.stop_gradient(self.w_frozen_k_DKH[...]))

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        self.w_frozen_q_DNH, self.b_q_NH = affine(spec, key, 'w_q_DNH')
        self.w_frozen_k_DKH, self.b_k_KH = affine(spec, key, 'w_k_DKH')
        self.scale = spec.head_size**-0.5


class GaugeFixed(TwoMaps):
    """A[n] = W_Q[n] [I; F[n]]^T: an H x H block of W_K[n] is the identity and is not stored.

    For any invertible M, W_Q M^T and W_K M^-1 have the same product, so H^2 parameters of each key
    head of `qk` are redundant (but with rotary positions, which do not commute with M). Keys have
    variance 2 - H / D at initialization, so W_Q has std D^-1/2 (2 - H / D)^-1/2. `rows` are the H
    fixed rows of each key head; None is `fixed_slices`, so that heads copy different coordinates.
    """

    equation = 'W_Q[n] [I; F[n]]^T'
    parameter_count = 'D*N*H + (D - H)*K*H'
    source = 'MatShrink, github.com/OpenMachine-ai/transformer-tricks'
    options = {'rows': fixed_channels('num_kv_heads')}
    uses_kv_heads = True
    supports_rope = False
    query_map = QK.query_map
    key_map = QK.key_map

    @classmethod
    def check(cls, spec: AttentionSpec, **options: Any) -> None:
        if spec.head_size > spec.d_model:
            raise SpecError(
                f'gauge_fixed needs an H x H block of a D x H matrix, so head_size='
                f'{spec.head_size} must be at most d_model={spec.d_model}'
            )

    def __init__(self, spec: AttentionSpec, *, key: jax.Array, rows: Channels | None = None):
        D = spec.d_model
        K = spec.num_kv_heads
        H = spec.head_size
        C = D - H  # free rows of W_K
        std = D**-0.5
        self.rows = rows or fixed_slices(spec, K)
        self.w_q_DNH, self.b_q_NH = affine(spec, key, 'w_q_DNH', std * (2 - H / D) ** -0.5)
        self.w_k_free_CKH = weight(key, 'w_k_free_CKH', (C, K, H), std) if C else None
        self.b_k_KH = bias(spec, (K, H))
        self.scale = H**-0.5
        self.spec = spec

    @property
    def w_k_DKH(self) -> jax.Array:
        """W_K with its identity blocks; the free rows of a head follow them, modulo D."""
        K = self.spec.num_kv_heads
        H = self.spec.head_size
        identity_HH = jnp.eye(H, dtype=self.w_q_DNH.dtype)
        w_DKH = jnp.broadcast_to(identity_HH[:, None], (H, K, H))
        if self.w_k_free_CKH is not None:
            w_DKH = jnp.concatenate([w_DKH, self.w_k_free_CKH[...]])
        # The argsort of an order is its inverse: where row d of W_K lies in w_DKH.
        row_KD = np.argsort(fixed_first(self.rows, len(w_DKH)), axis=-1)
        return jnp.take_along_axis(w_DKH, row_KD.T[:, :, None], axis=0)


def fixed_slices(spec: AttentionSpec, num_heads: int) -> Channels:
    """The default fixed channels: for head n the H that start at n H, modulo D.

    D = 6, H = 2 and 3 heads -> ((0, 1), (2, 3), (4, 5)).
    """
    D = spec.d_model
    H = spec.head_size
    channels = []
    for n in range(num_heads):
        channels.append(tuple((n * H + h) % D for h in range(H)))
    return tuple(channels)


def fixed_first(rows: Channels, d_model: int) -> np.ndarray:
    """order_KD: the fixed rows of a head, then the free ones that follow the first, modulo D."""
    orders = []
    for fixed in rows:
        cyclic_D = np.roll(np.arange(d_model), -fixed[0])  # from the first fixed row on
        free = cyclic_D[~np.isin(cyclic_D, fixed)]
        orders.append(np.append(fixed, free))
    return np.stack(orders)


class Double(TwoMaps):
    """A[n] = (O_Q W_Q[n]) (O_K W_K[n])^T: a matrix shared by all heads, then one per head.

    Each side folds into one matrix, O W[n], so that with R >= D the functions are those of `qk` and
    only training differs. W has std R^-1/2. `size` is R, by default D. `which` is the side with a
    shared matrix, 'q', 'k' or 'both'; a side without one is that of `qk`.
    """

    equation = 'O_Q W_Q[n] (O_K W_K[n])^T'
    source = 'over-parameterized linear maps, Arora et al. 2018, arXiv 1802.06509'
    options = {'size': whole(1), 'which': one_of('q', 'k', 'both')}
    uses_kv_heads = True

    def __init__(
        self, spec: AttentionSpec, *, key: jax.Array, size: int | None = None, which: str = 'both'
    ):
        R = spec.d_model if size is None else size
        if which == 'k':
            self.query_map = QK.query_map
            self.w_q_DNH, self.b_q_NH = affine(spec, key, 'w_q_DNH')
            queries = 'W_Q[n]'
            query_count = 'D*N*H'
        else:
            outer = Projection('w_q_outer_DR', 'b_q_outer_R')
            self.query_map = Projection('w_q_RNH', 'b_q_NH', inner=outer)
            self.w_q_outer_DR, self.b_q_outer_R = affine(spec, key, 'w_q_outer_DR', R=R)
            self.w_q_RNH, self.b_q_NH = affine(spec, key, 'w_q_RNH', R=R)
            queries = 'O_Q W_Q[n]'
            query_count = 'D*R + R*N*H'
        if which == 'q':
            self.key_map = QK.key_map
            self.w_k_DKH, self.b_k_KH = affine(spec, key, 'w_k_DKH')
            keys = 'W_K[n]^T'
            key_count = 'D*K*H'
        else:
            outer = Projection('w_k_outer_DR', 'b_k_outer_R')
            self.key_map = Projection('w_k_RKH', 'b_k_KH', 'k_BSKH', outer)
            self.w_k_outer_DR, self.b_k_outer_R = affine(spec, key, 'w_k_outer_DR', R=R)
            self.w_k_RKH, self.b_k_KH = affine(spec, key, 'w_k_RKH', R=R)
            keys = '(O_K W_K[n])^T'
            key_count = 'D*R + R*K*H'
        self.equation = f'{queries} {keys}'
        self.parameter_count = f'{query_count} + {key_count}'
        self.scale = spec.head_size**-0.5


class Merged(TwoMaps):
    """A[n] = W_QK[n], one D x D matrix of full rank per head; the keys are the stream itself.

    init='dense' draws every entry independently; 'product' starts from W_Q[n] W_K[n]^T of rank H,
    the initial logits of `qk` under the same seed, and lets the rank grow in training.
    """

    equation = 'W_QK[n]'
    parameter_count = 'N*D*D'
    source = 'Luong et al. 2015, section 3.1 ("general")'
    options = {'init': one_of('dense', 'product')}
    supports_rope = False
    query_map = Projection('w_qk_DNE', 'b_q_NE')
    key_map = STREAM

    def __init__(self, spec: AttentionSpec, *, key: jax.Array, init: str = 'dense'):
        D = spec.d_model
        N = spec.num_heads
        if init == 'product':
            A_NDE = QK(dataclasses.replace(spec, biases=False), key=key).matrix()
            rescale = (D / spec.head_size) ** 0.5  # from the scale H^-1/2 of qk to D^-1/2
            self.w_qk_DNE = nnx.Param(rescale * jnp.moveaxis(A_NDE, 0, 1))
        else:
            self.w_qk_DNE = weight(key, 'w_qk_DNE', (D, N, D), D**-0.5)
        self.b_q_NE = bias(spec, (N, D))
        self.scale = D**-0.5

    def matrix(self) -> jax.Array:
        A_NDE = jnp.moveaxis(homogeneous(self.w_qk_DNE, self.b_q_NE), 1, 0)
        if self.b_q_NE is None:
            return A_NDE
        return jnp.pad(A_NDE, ((0, 0), (0, 0), (0, 1)))  # keys have no bias


class Collaborative(Score):
    """A[n] = W_Q diag(m[n]) W_K^T: all heads share W_Q and W_K, and each has its own mixing m[n].

    The cache holds one key of width R for all heads (`size`, by default N H); the mixing acts on
    the queries. With R = N H and m[n] the indicator of the n-th block of H columns this is `qk`,
    with the scale (R / N)^-1/2; QK-norm, after the mixing, has R^-1/2. m starts as random signs
    times N^-1/2, with the norm of an indicator; the authors' library draws normal(0, 0.2^2).
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
        # QK-norm acts after the mixing and so undoes its factor N^-1/2.
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
