"""A value whose W_O starts as the identity: qk/examples.identity_start:OutputFromIdentity."""

import jax
from flax import nnx

from qkattn.attention import AttentionSpec, Score
from qkattn.attention.parameters import bias
from qkattn.attention.values.slices import NoO
from qkattn.attention.values.vo import VO


class OutputFromIdentity(VO):
    """B[n] = W_V[n] W_O[n], where W_O with its heads side by side, D x D, starts as the identity.

    So it starts as the function of `no_o` with the same seed, and trains W_O from there. A study of
    `vo`, `no_o` and this value tells what a missing W_O does from what its initialization does.
    """

    source = 'an initialization that separates two effects; no published use known'
    uses_slices = True

    def __init__(self, spec: AttentionSpec, score: Score, *, key: jax.Array):
        no_o = NoO(spec, score, key=key)
        self.w_v_DKH = no_o.w_v_DKH
        self.b_v_KH = no_o.b_v_KH
        self.w_o_NHD = nnx.Param(no_o.output_matrix(score))
        self.b_o_D = bias(spec, (spec.d_model,))
