"""Scores W_Q W_K^T: standard, low-rank, full-rank, over-parameterized, or merged."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention.maps import STREAM, Projection
from qkattn.attention.parameters import affine, bias, homogeneous, weight
from qkattn.attention.scores.score import TwoMaps
from qkattn.attention.spec import AttentionSpec, one_of, whole


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

    With R = H this is `qk`. Rotary positions need an even R.

    Args:
        rank: R, from 1 to D; by default H // 2, but at least 1 and at most D.
    """

    equation = 'W_Q[n] W_K[n]^T, rank R'
    parameter_count = 'D*N*R + D*K*R'
    source = 'Bhojanapalli et al. 2020, arXiv 2002.07028'
    options = {'rank': whole(1, 'd_model')}
    uses_kv_heads = True
    query_map = Projection('w_q_DNR', 'b_q_NR')
    key_map = Projection('w_k_DKR', 'b_k_KR', 'k_BSKR')

    def __init__(self, spec: AttentionSpec, *, key: jax.Array, rank: int | None = None):
        half_head_size = max(1, spec.head_size // 2)
        R = min(half_head_size, spec.d_model) if rank is None else rank
        self.w_q_DNR, self.b_q_NR = affine(spec, key, 'w_q_DNR', R=R)
        self.w_k_DKR, self.b_k_KR = affine(spec, key, 'w_k_DKR', R=R)
        self.scale = R**-0.5


class FullSize(LowRank):
    """A[n] = W_Q[n] W_K[n]^T of rank D.

    This Score can represent the same functions as `merged`. With K = N it has twice the parameters.
    """

    equation = 'W_Q[n] W_K[n]^T, rank D'
    parameter_count = 'D*N*D + D*K*D'
    source = 'Vaswani et al. 2017 with d_k = d_model'
    key_map = Projection('w_k_DKR', 'b_k_KR', 'k_BSKD')

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        super().__init__(spec, key=key, rank=spec.d_model)


class Double(TwoMaps):
    """A[n] = (O_Q W_Q[n]) (O_K W_K[n])^T: a matrix shared by all heads, then one per head.

    With R >= D, this Score can represent the same functions as `qk`, and only training differs.
    W has std R^-1/2.

    Args:
        size: R, the width between the two matrices; by default D.
        which: Which side has a shared matrix O, 'q', 'k' or 'both'. The other side is as in `qk`.
    """

    equation = 'O_Q W_Q[n] (O_K W_K[n])^T'
    source = 'over-parameterized linear maps, Arora et al. 2018, arXiv 1802.06509'
    options = {'size': whole(1), 'which': one_of('q', 'k', 'both')}
    uses_kv_heads = True

    def __init__(
        self, spec: AttentionSpec, *, key: jax.Array, size: int | None = None, which: str = 'both'
    ):
        R = spec.d_model if size is None else size

        # Queries: x O_Q W_Q[n], or x W_Q[n] as in `qk`.
        if which in ('q', 'both'):
            self.w_q_outer_DR, self.b_q_outer_R = affine(spec, key, 'w_q_outer_DR', R=R)
            self.w_q_RNH, self.b_q_NH = affine(spec, key, 'w_q_RNH', R=R)
            o_q = Projection('w_q_outer_DR', 'b_q_outer_R')
            self.query_map = Projection('w_q_RNH', 'b_q_NH', inner=o_q)
            query_equation = 'O_Q W_Q[n]'
            query_count = 'D*R + R*N*H'
        else:
            self.w_q_DNH, self.b_q_NH = affine(spec, key, 'w_q_DNH')
            self.query_map = QK.query_map
            query_equation = 'W_Q[n]'
            query_count = 'D*N*H'

        # Keys: y O_K W_K[n], or y W_K[n] as in `qk`.
        if which in ('k', 'both'):
            self.w_k_outer_DR, self.b_k_outer_R = affine(spec, key, 'w_k_outer_DR', R=R)
            self.w_k_RKH, self.b_k_KH = affine(spec, key, 'w_k_RKH', R=R)
            o_k = Projection('w_k_outer_DR', 'b_k_outer_R')
            self.key_map = Projection('w_k_RKH', 'b_k_KH', cached_as='k_BSKH', inner=o_k)
            key_equation = '(O_K W_K[n])^T'
            key_count = 'D*R + R*K*H'
        else:
            self.w_k_DKH, self.b_k_KH = affine(spec, key, 'w_k_DKH')
            self.key_map = QK.key_map
            key_equation = 'W_K[n]^T'
            key_count = 'D*K*H'

        self.equation = f'{query_equation} {key_equation}'
        self.parameter_count = f'{query_count} + {key_count}'
        self.scale = spec.head_size**-0.5


class Merged(TwoMaps):
    """A[n] = W_QK[n], one D x D matrix of full rank per head; the keys are the stream itself.

    Args:
        init: 'dense' draws every entry independently. 'product' starts at W_Q[n] W_K[n]^T of `qk`
            with the same seed, of rank H. The rank may grow in training.
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
            # Start at A[n] = W_Q[n] W_K[n]^T of `qk`.
            spec_without_biases = dataclasses.replace(spec, biases=False)
            A_NDE = QK(spec_without_biases, key=key).matrix()
            # The scale of `qk` is H^-1/2, and the scale of this Score is D^-1/2.
            scale_ratio = (D / spec.head_size) ** 0.5
            self.w_qk_DNE = nnx.Param(scale_ratio * jnp.moveaxis(A_NDE, 0, 1))
        else:  # 'dense'
            self.w_qk_DNE = weight(key, 'w_qk_DNE', shape=(D, N, D), std=D**-0.5)
        self.b_q_NE = bias(spec, (N, D))
        self.scale = D**-0.5

    def matrix(self) -> jax.Array:
        A_NDE = jnp.moveaxis(homogeneous(self.w_qk_DNE, self.b_q_NE), 1, 0)
        if self.b_q_NE is None:
            return A_NDE
        # Keys have no bias: the last column of A, for the constant 1, is zero.
        return jnp.pad(A_NDE, ((0, 0), (0, 0), (0, 1)))
