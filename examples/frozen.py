"""A score whose matrices do not train: examples.frozen:Frozen/vo."""

import jax

from qkattn.attention import AttentionSpec, TwoMaps
from qkattn.attention.maps import Projection
from qkattn.attention.parameters import affine


class Frozen(TwoMaps):
    """A[n] = W_Q[n] W_K[n]^T, fixed at the initial values of `qk` under the same seed.

    Only biases train.
    """

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
