"""Values with an identity in place of W_V or W_O or both."""

import jax
import jax.numpy as jnp

from qkattn.attention.maps import SLICES, Map
from qkattn.attention.parameters import affine, output_projection, slices_DNH
from qkattn.attention.scores.score import Score
from qkattn.attention.spec import AttentionSpec
from qkattn.attention.values.value import Factored
from qkattn.attention.values.vo import VO


class NoV(Factored):
    """B[n] = P[n] W_O[n]: no W_V; the value of head n is the n-th slice of the stream, y P[n]."""

    equation = 'P[n] W_O[n]'
    parameter_count = 'N*H*D'
    source = 'Hosseini & Hosseini 2024, arXiv 2403.01643'  # "optimised"
    uses_slices = True
    value_map = SLICES

    def __init__(self, spec: AttentionSpec, score: Score, *, key: jax.Array):
        self.w_o_NHD, self.b_o_D = output_projection(spec, key)
        self.spec = spec


class NoO(Factored):
    """B[n] = W_V[n] P[n]^T: no W_O; head n writes to slice n. W_V has std residual_gain D^-1/2."""

    equation = 'W_V[n] P[n]^T'
    parameter_count = 'D*K*H'
    source = 'Vaswani et al. 2017 without its last projection'
    uses_kv_heads = True
    uses_slices = True
    value_map: Map = VO.value_map
    b_o_D = None

    def __init__(self, spec: AttentionSpec, score: Score, *, key: jax.Array):
        self.w_v_DKH, self.b_v_KH = affine(spec, key, 'w_v_DKH', gain=spec.residual_gain)
        self.spec = spec

    def output(self, o_BTNH: jax.Array, score: Score, x_BTD: jax.Array) -> jax.Array:
        return o_BTNH.reshape(*o_BTNH.shape[:-2], -1)  # the heads side by side

    def output_matrix(self, score: Score) -> jax.Array:
        D = self.spec.d_model
        p_DNH = slices_DNH(self.spec)[:D]  # without the row for the constant 1
        return jnp.moveaxis(p_DNH, 0, -1)  # P^T


class NoVO(NoO):
    """B[n] = P[n] P[n]^T: neither W_V nor W_O; head n copies the n-th slice of the stream.

    Without parameters, residual_gain has no effect. The source has no W_V and W_O either, in a
    block of another form.
    """

    equation = 'P[n] P[n]^T'
    parameter_count = '0'
    source = 'He & Hofmann 2024, arXiv 2311.01906'
    uses_kv_heads = False
    value_map = SLICES

    def __init__(self, spec: AttentionSpec, score: Score, *, key: jax.Array):
        self.spec = spec
