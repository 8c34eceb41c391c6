"""Values W_V W_O: standard, low-rank, over-parameterized, or merged."""

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention.maps import STREAM, Projection
from qkattn.attention.parameters import affine, bias, grouped, output_projection, weight
from qkattn.attention.scores.score import Score
from qkattn.attention.spec import AttentionSpec, one_of, whole
from qkattn.attention.values.value import Factored


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

    With R = H this is `vo`. In the source, queries and keys have rank R too.

    Args:
        rank: R, from 1 to D; by default H // 2, but at least 1 and at most D.
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
        half_head_size = max(1, spec.head_size // 2)
        R = min(half_head_size, spec.d_model) if rank is None else rank
        self.w_v_DKR, self.b_v_KR = affine(spec, key, 'w_v_DKR', R=R)
        self.w_o_NRD, self.b_o_D = output_projection(spec, key, 'w_o_NRD', R=R)

    def output_matrix(self, score: Score) -> jax.Array:
        return self.w_o_NRD[...]


class Double(Factored):
    """B[n] = O_V W_V[n] W_O[n]: all heads read one shared projection, then their own.

    With R >= D, this Value can represent the same functions as `vo`, and only training differs.
    W_V has std R^-1/2.

    Args:
        size: R, the width between the two matrices; by default D.
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

    The cache holds the stream, only once if the Score caches the stream too.

    Args:
        init: 'dense' draws every entry with std residual_gain (D N)^-1/2. 'product' starts at
            W_V[n] W_O[n] of `vo` with the same seed, of rank H. The rank may grow in training.
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
        if init == 'product':
            # Start at B[n] = W_V[n] W_O[n] of `vo`.
            vo = VO(spec, score, key=key)
            w_v_DNH = grouped(vo.w_v_DKH[...], N)  # a value head for each query head
            w_ov_NDE = jnp.einsum('DNH,NHE->NDE', w_v_DNH, vo.w_o_NHD[...])
            self.w_ov_NDE = nnx.Param(w_ov_NDE)
        else:  # 'dense'
            std = (D * N) ** -0.5
            self.w_ov_NDE = weight(
                key, 'w_ov_NDE', shape=(N, D, D), std=std, gain=spec.residual_gain
            )
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
        # Add a row for the constant 1: the output bias in head 0, and zero in the other heads.
        B_NDE = jnp.pad(B_NDE, ((0, 0), (0, 1), (0, 0)))
        return B_NDE.at[0, -1].add(self.b_o_D[...])
