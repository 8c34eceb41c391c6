"""Values W_V W_O: of rank H or another, over-parameterized, merged, without redundancy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qkattn.attention.maps import STREAM, Projection
from qkattn.attention.parameters import affine, bias, grouped, output_projection, weight
from qkattn.attention.scores.qk import Channels, fixed_slices
from qkattn.attention.scores.score import Score
from qkattn.attention.spec import AttentionSpec, fixed_channels, one_of, whole
from qkattn.attention.values.value import Factored
from qkattn.errors import SpecError


class VO(Factored):
    """B[n] = W_V[n] W_O[n], rank <= H: standard multi-head attention."""

    equation = 'W_V[n] W_O[n]'
    parameter_count = 'D*K*H + N*H*D'
    source = 'Vaswani et al. 2017'
    uses_kv_heads = True
    value_map = Projection('w_v_DKH', 'b_v_KH', 'v_BSKH')

    def __init__(self, spec: AttentionSpec, score: Score, *, key: jax.Array):
        self.w_v_DKH, self.b_v_KH = affine(spec, key, 'w_v_DKH')
        self.w_o_NHD, self.b_o_D = output_projection(spec, key)


class LowRank(Factored):
    """B[n] = W_V[n] W_O[n] of rank <= R, where R is independent of the head size of the Score.

    R = H is `vo`; in the source, queries and keys have rank R too. `rank` None is
    max(1, H // 2) or D, whichever is less.
    """

    equation = 'W_V[n] W_O[n], rank R'
    parameter_count = 'D*K*R + N*R*D'
    source = 'Bhojanapalli et al. 2020, arXiv 2002.07028'
    options = {'rank': whole(1, 'd_model')}
    uses_kv_heads = True
    value_map = Projection('w_v_DKR', 'b_v_KR', 'v_BSKR')

    def __init__(
        self, spec: AttentionSpec, score: Score, *, key: jax.Array, rank: int | None = None
    ):
        R = min(max(1, spec.head_size // 2), spec.d_model) if rank is None else rank
        self.w_v_DKR, self.b_v_KR = affine(spec, key, 'w_v_DKR', R=R)
        self.w_o_NRD, self.b_o_D = output_projection(spec, key, 'w_o_NRD', R=R)

    def output_matrix(self, score: Score) -> jax.Array:
        return self.w_o_NRD[...]


class GaugeFixed(Factored):
    """B[n] = W_V[n] [I, W_O[n]]: H of the D columns of each W_O[n] are the identity.

    W_V[n] M and M^-1 W_O[n] have the same product for every invertible M, so H^2 parameters of each
    head of `vo` are redundant, with any positions. M is free per head only where the head has its
    own W_V, so there are always N value heads. `columns` are fixed, by default `fixed_slices`.

    init='dense' draws the free columns with std H^-1/2, which gives them the norm of the fixed
    ones, 1, and W_V with std residual_gain (D N)^-1/2; 'product' starts from the parameters of
    `vo` under the same seed (the same function; the inverse of a random block can be large).
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
                f'gauge_fixed fixes head_size={H} of d_model={D} columns, which leaves none '
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
            vo = VO(spec, score, key=key)
            order_ND = fixed_columns_first(self.columns, D)
            w_o_NHD = jnp.take_along_axis(vo.w_o_NHD[...], order_ND[:, None, :], axis=-1)
            # W_V W_O = (W_V M) (M^-1 W_O), where M is the block of W_O in the fixed columns.
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
        # The argsort of an order is its inverse: where column d of W_O lies in w_o_NHD.
        column_ND = np.argsort(fixed_columns_first(self.columns, w_o_NHD.shape[-1]), axis=-1)
        return jnp.take_along_axis(w_o_NHD, column_ND[:, None, :], axis=-1)


def fixed_columns_first(columns: Channels, d_model: int) -> np.ndarray:
    """order_ND: the fixed columns of a head as given, then the free ones in ascending order."""
    free = [np.setdiff1d(np.arange(d_model), fixed) for fixed in columns]
    return np.concatenate([columns, free], axis=1)


class Double(Factored):
    """B[n] = O_V W_V[n] W_O[n]: all heads read one shared projection, then their own.

    O_V and W_V[n] fold into one matrix, so that with R >= D the functions are those of `vo` and
    only training differs. W_V has std R^-1/2. `size` is R, by default D.
    """

    equation = 'O_V W_V[n] W_O[n]'
    parameter_count = 'D*R + R*K*H + N*H*D'
    source = 'over-parameterization: Arora et al. 2018, arXiv 1802.06509'
    options = {'size': whole(1)}
    uses_kv_heads = True
    value_map = Projection(
        'w_v_RKH', 'b_v_KH', 'v_BSKH', inner=Projection('w_v_outer_DR', 'b_v_outer_R')
    )

    def __init__(
        self, spec: AttentionSpec, score: Score, *, key: jax.Array, size: int | None = None
    ):
        R = spec.d_model if size is None else size
        self.w_v_outer_DR, self.b_v_outer_R = affine(spec, key, 'w_v_outer_DR', R=R)
        self.w_v_RKH, self.b_v_KH = affine(spec, key, 'w_v_RKH', R=R)
        self.w_o_NHD, self.b_o_D = output_projection(spec, key)


class MergedVO(Factored):
    """B[n] = W_OV[n], one D x D matrix of full rank per head; the values are the stream itself.

    The cache holds the stream, shared with a Score that caches it too. init='dense' draws W_OV with
    std residual_gain (D N)^-1/2, since N heads of D channels add up; 'product' starts from
    W_V[n] W_O[n] of `vo` under the same seed, of rank H, and lets the rank grow in training.
    """

    equation = 'W_OV[n]'
    parameter_count = 'N*D*D'
    source = (
        'Elhage et al. 2021, "Splitting Attention Head terms into Query-Key and Output-Value '
        'Circuits"'
    )
    options = {'init': one_of('dense', 'product')}
    value_map = STREAM

    def __init__(self, spec: AttentionSpec, score: Score, *, key: jax.Array, init: str = 'dense'):
        D = spec.d_model
        N = spec.num_heads
        if init == 'dense':
            std = (D * N) ** -0.5
            self.w_ov_NDE = weight(key, 'w_ov_NDE', (N, D, D), std, spec.residual_gain)
        else:
            vo = VO(spec, score, key=key)
            v_DNH = grouped(vo.w_v_DKH[...], N)
            self.w_ov_NDE = nnx.Param(jnp.einsum('DNH,NHE->NDE', v_DNH, vo.w_o_NHD[...]))
        self.b_o_D = bias(spec, (D,))

    def output(self, o_BTND: jax.Array, score: Score, x_BTD: jax.Array) -> jax.Array:
        out_BTE = jnp.einsum('BTND,NDE->BTE', o_BTND, self.w_ov_NDE[...])
        if self.b_o_D is None:
            return out_BTE
        return out_BTE + self.b_o_D[...]

    def matrix(self, score: Score) -> jax.Array:
        B_NDE = self.w_ov_NDE[...]
        if self.b_o_D is None:
            return B_NDE
        B_NDE = jnp.pad(B_NDE, ((0, 0), (0, 1), (0, 0)))  # values have no bias
        return B_NDE.at[0, -1].add(self.b_o_D[...])
