"""Factors without redundant parameters: a block of W_K or of W_O is the identity.

The variants are examples.gauge_fixed:GaugeFixedQK/vo and qk/examples.gauge_fixed:GaugeFixedVO.
`gauge_fixing.py` converts trained models to them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qkattn.attention import (
    AttentionSpec,
    Factored,
    Score,
    SpecError,
    TwoMaps,
    bias,
    grouped,
    weight,
)
from qkattn.attention.maps import Projection
from qkattn.attention.parameters import affine
from qkattn.attention.scores.qk import QK
from qkattn.attention.spec import Check, one_of
from qkattn.attention.values.vo import VO

# The fixed rows of W_K, or columns of W_O, of each head: ((0, 1), (2, 3)) for two heads of size 2.
Channels = tuple[tuple[int, ...], ...]


def fixed_channels(heads: str) -> Check:
    """Returns a check that an option is None, or `Channels` that fit the spec.

    Each head must have H different indices below D. `heads` is the field of the spec that holds the
    number of heads.
    """

    def check(spec: AttentionSpec, name: str, option: str, fixed: Any) -> None:
        if fixed is None:
            return
        D = spec.d_model
        H = spec.head_size
        if H > D:
            return  # The `check` of the class refuses such a head, whatever the option is.
        num_heads = getattr(spec, heads)

        def fits(channels: Any) -> bool:
            """Whether these are the fixed channels of a head."""
            if not isinstance(channels, list | tuple) or len(channels) != H:
                return False
            if any(type(channel) is not int for channel in channels):
                return False
            return len(set(channels)) == H and all(0 <= channel < D for channel in channels)

        valid = isinstance(fixed, list | tuple) and len(fixed) == num_heads
        if not valid or not all(fits(channels) for channels in fixed):
            raise SpecError(
                f'{name}({option}={fixed!r}) must hold, for each of {heads}={num_heads} heads, '
                f'head_size={H} different {option} below d_model={D}'
            )

    return check


class GaugeFixedQK(TwoMaps):
    """A[n] = W_Q[n] [I; F[n]]^T: an H x H block of W_K[n] is the identity and is not stored.

    For any invertible M, W_Q M^T and W_K M^-1 have the same product. So H^2 parameters of each key
    head of `qk` are redundant. (With rotary positions they are not, because a rotation does not
    commute with M.)

    Keys have variance 2 - H / D at initialization, so W_Q has std D^-1/2 (2 - H / D)^-1/2.

    `rows` are the H rows of each key head that form the identity. By default they are
    `fixed_slices`, so that heads copy different coordinates.
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
                f'GaugeFixedQK needs an H x H block of a D x H matrix, so head_size='
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
        """W_K, assembled from the identity blocks and the free rows."""
        K = self.spec.num_kv_heads
        H = self.spec.head_size

        # First the identity of every head, then its free rows.
        identity_HH = jnp.eye(H, dtype=self.w_q_DNH.dtype)
        w_DKH = jnp.broadcast_to(identity_HH[:, None], (H, K, H))
        if self.w_k_free_CKH is not None:
            w_DKH = jnp.concatenate([w_DKH, self.w_k_free_CKH[...]])

        # Then every row goes to its place. The argsort of an order is its inverse, so place_KD says
        # where row d of W_K lies in w_DKH.
        order_KD = fixed_first(self.rows, len(w_DKH))
        place_KD = np.argsort(order_KD, axis=-1)
        return jnp.take_along_axis(w_DKH, place_KD.T[:, :, None], axis=0)


def fixed_slices(spec: AttentionSpec, num_heads: int) -> Channels:
    """Returns the default fixed channels: for head n the H channels from n H on, modulo D.

    D = 6, H = 2 and 3 heads -> ((0, 1), (2, 3), (4, 5)).
    """
    D = spec.d_model
    H = spec.head_size
    channels = []
    for n in range(num_heads):
        channels.append(tuple((n * H + h) % D for h in range(H)))
    return tuple(channels)


def fixed_first(rows: Channels, d_model: int) -> np.ndarray:
    """Returns an order of all D rows for each head: the fixed ones, then the free ones.

    The free rows are in cyclic order from the first fixed row on. For D = 4, the fixed rows (2, 0)
    give (2, 0, 3, 1).
    """
    orders = []
    for fixed in rows:
        cyclic_D = np.roll(np.arange(d_model), -fixed[0])  # from the first fixed row on
        free = cyclic_D[~np.isin(cyclic_D, fixed)]
        orders.append(np.append(fixed, free))
    return np.stack(orders)


class GaugeFixedVO(Factored):
    """B[n] = W_V[n] [I, W_O[n]]: H of the D columns of each W_O[n] are the identity.

    W_V[n] M and M^-1 W_O[n] have the same product for every invertible M. So H^2 parameters of each
    head of `vo` are redundant, with any positions. Each head can have its own M only if it has its
    own W_V, so there are always N value heads.

    Args:
        init: 'dense' draws the free columns with std H^-1/2, which gives them norm 1 like the fixed
            ones, and W_V with std residual_gain (D N)^-1/2. 'product' starts as the same function
            as `vo` under the same seed. (The inverse of a random block, which it takes, can be
            large.)
        columns: The H columns of each W_O[n] that form the identity; by default `fixed_slices`.
    """

    equation = 'W_V[n] [I, W_O[n]]'
    parameter_count = 'D*N*H + N*H*(D-H)'
    source = 'OpenMachine transformer-tricks, "MatShrink"'
    options = {'init': one_of('dense', 'product'), 'columns': fixed_channels('num_heads')}
    value_map = Projection('w_v_DNH', 'b_v_NH', 'v_BSNH')

    @classmethod
    def check(cls, spec: AttentionSpec, **options: Any) -> None:
        D = spec.d_model
        H = spec.head_size
        if H >= D:
            raise SpecError(
                f'GaugeFixedVO fixes head_size={H} of d_model={D} columns, which leaves none '
                'free; head_size must be below d_model (without free columns it is no_o)'
            )

    def __init__(
        self,
        spec: AttentionSpec,
        score: Score,
        *,
        key: jax.Array,
        init: str = 'dense',
        columns: Channels | None = None,
    ):
        D = spec.d_model
        N = spec.num_heads
        H = spec.head_size
        self.columns = columns or fixed_slices(spec, N)
        if init == 'dense':
            self.w_v_DNH = weight(key, 'w_v_DNH', (D, N, H), (D * N) ** -0.5, spec.residual_gain)
            self.w_o_NHC = weight(key, 'w_o_NHC', (N, H, D - H), H**-0.5)
        else:
            # W_V W_O = (W_V M) (M^-1 W_O), where M is the block of W_O in the fixed columns.
            vo = VO(spec, score, key=key)
            order_ND = fixed_columns_first(self.columns, D)
            w_o_NHD = jnp.take_along_axis(vo.w_o_NHD[...], order_ND[:, None, :], axis=-1)
            block_NHH = w_o_NHD[..., :H]
            free_NHC = w_o_NHD[..., H:]
            v_DNH = grouped(vo.w_v_DKH[...], N)
            self.w_v_DNH = nnx.Param(jnp.einsum('DNH,NHG->DNG', v_DNH, block_NHH))
            self.w_o_NHC = nnx.Param(jnp.linalg.solve(block_NHH, free_NHC))
        self.b_v_NH = bias(spec, (N, H))
        self.b_o_D = bias(spec, (D,))

    def output_matrix(self, score: Score) -> jax.Array:
        free_NHC = self.w_o_NHC[...]
        N, H, _ = free_NHC.shape
        identity_NHH = jnp.broadcast_to(jnp.eye(H, dtype=free_NHC.dtype), (N, H, H))
        w_o_NHD = jnp.concatenate([identity_NHH, free_NHC], axis=-1)

        # The argsort of an order is its inverse, so place_ND says where column d of W_O lies in
        # w_o_NHD, which has the fixed columns first.
        order_ND = fixed_columns_first(self.columns, w_o_NHD.shape[-1])
        place_ND = np.argsort(order_ND, axis=-1)
        return jnp.take_along_axis(w_o_NHD, place_ND[:, None, :], axis=-1)


def fixed_columns_first(columns: Channels, d_model: int) -> np.ndarray:
    """Returns an order of all D columns for each head: the fixed ones, then the free ones.

    The free columns are in ascending order. For D = 4, the fixed columns (2, 0) give (2, 0, 1, 3).
    """
    free = [np.setdiff1d(np.arange(d_model), fixed) for fixed in columns]
    return np.concatenate([columns, free], axis=1)
