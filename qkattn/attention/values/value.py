"""Values: ways to write B[n] in  out_t = sum_n sum_s p[n, t, s] y_s B[n]  (OV circuit).

Every method receives the layer's Score, so that a Value may read a matrix that the Score owns
(K = V and the like) without a second copy of it.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention.scores.score import Memory, Score
from qkattn.attention.spec import (
    AttentionSpec,
    bias,
    grouped,
    heads_of,
    homogeneous,
    project,
    require_slices,
    slices_DNH,
    weight,
)


class Value(nnx.Module):
    """Interface of a factorization of B[n]; class attributes as in Score."""

    equation: ClassVar[str]
    weights: ClassVar[str]
    source: ClassVar[str]
    uses_kv_heads: ClassVar[bool] = False

    @classmethod
    def check(cls, spec: AttentionSpec, **options) -> None:
        """Raises SpecError where this Value cannot be built with `spec` and its own options."""

    def remember(self, y_BSD: jax.Array, score: Score) -> Memory:
        """What a decoding cache must hold of y for `values`, beyond what the Score holds."""
        raise NotImplementedError

    def values(self, memory: Memory, score: Score) -> jax.Array:
        """v_BSKH from what is remembered."""
        raise NotImplementedError

    def output(self, o_BTNH: jax.Array, score: Score) -> jax.Array:
        """out_BTD from the mixed values."""
        raise NotImplementedError

    def matrix(self, score: Score) -> jax.Array:
        """B_NDD; (D+1) x D with biases, the last row acting on the constant 1."""
        raise NotImplementedError


def _with_output_bias(B_NDE: jax.Array, b_o_D: nnx.Param | None) -> jax.Array:
    """Adds b_O to the constant row of one head: the probabilities of a head sum to 1."""
    return B_NDE if b_o_D is None else B_NDE.at[0, -1].add(b_o_D[...])


class VO(Value):
    """B[n] = W_V[n] W_O[n], rank <= H: standard. Weights D K H + N H D.

    Vaswani et al. 2017, section 3.2.2.
    """

    equation = 'W_V[n] W_O[n]'
    weights = 'D*K*H + N*H*D'
    source = 'Vaswani et al. 2017'
    uses_kv_heads = True

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        D, N, K, H = spec.d_model, spec.num_heads, spec.num_kv_heads, spec.head_size
        self.w_v_DKH = weight(key, 'w_v_DKH', (D, K, H), D**-0.5)
        self.w_o_NHD = weight(key, 'w_o_NHD', (N, H, D), spec.residual_gain * (N * H) ** -0.5)
        self.b_v_KH = bias(spec, (K, H))
        self.b_o_D = bias(spec, (D,))

    def remember(self, y_BSD: jax.Array, score: Score) -> Memory:
        return {'v_BSKH': project(y_BSD, self.w_v_DKH, self.b_v_KH)}

    def values(self, memory: Memory, score: Score) -> jax.Array:
        return memory['v_BSKH']

    def output(self, o_BTNH: jax.Array, score: Score) -> jax.Array:
        out_BTD = jnp.einsum('BTNH,NHD->BTD', o_BTNH, self.w_o_NHD[...])
        return out_BTD if self.b_o_D is None else out_BTD + self.b_o_D[...]

    def matrix(self, score: Score) -> jax.Array:
        w_o_NHD = self.w_o_NHD[...]
        v_DNH = grouped(homogeneous(self.w_v_DKH, self.b_v_KH), w_o_NHD.shape[0])
        return _with_output_bias(jnp.einsum('DNH,NHE->NDE', v_DNH, w_o_NHD), self.b_o_D)


class NoV(Value):
    """B[n] = P[n] W_O[n]: no W_V; head n moves the n-th slice of the memory.

    Weights N H D; needs N H = D. Hosseini & Hosseini 2024, arXiv 2403.01643 ("optimised").
    """

    equation = 'P[n] W_O[n]'
    weights = 'N*H*D'
    source = 'Hosseini & Hosseini 2024, arXiv 2403.01643'

    @classmethod
    def check(cls, spec: AttentionSpec, **options) -> None:
        require_slices(spec, 'no_v')

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        D, N, H = spec.d_model, spec.num_heads, spec.head_size
        self.w_o_NHD = weight(key, 'w_o_NHD', (N, H, D), spec.residual_gain * (N * H) ** -0.5)
        self.b_o_D = bias(spec, (D,))
        self.spec = spec

    def remember(self, y_BSD: jax.Array, score: Score) -> Memory:
        return {'x_BSD': y_BSD}

    def values(self, memory: Memory, score: Score) -> jax.Array:
        return heads_of(memory['x_BSD'], self.spec.num_heads)

    output = VO.output

    def matrix(self, score: Score) -> jax.Array:
        B_NDE = jnp.einsum('DNH,NHE->NDE', slices_DNH(self.spec), self.w_o_NHD[...])
        return _with_output_bias(B_NDE, self.b_o_D)


class NoO(Value):
    """B[n] = W_V[n] P[n]^T: no W_O; head n writes to the n-th slice of the stream.

    Weights D K H; needs N H = D.
    """

    equation = 'W_V[n] P[n]^T'
    weights = 'D*K*H'
    source = 'Vaswani et al. 2017 without its last projection'
    uses_kv_heads = True

    @classmethod
    def check(cls, spec: AttentionSpec, **options) -> None:
        require_slices(spec, 'no_o')

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        D, K, H = spec.d_model, spec.num_kv_heads, spec.head_size
        self.w_v_DKH = weight(key, 'w_v_DKH', (D, K, H), spec.residual_gain * D**-0.5)
        self.b_v_KH = bias(spec, (K, H))
        self.spec = spec

    remember = VO.remember
    values = VO.values

    def output(self, o_BTNH: jax.Array, score: Score) -> jax.Array:
        return o_BTNH.reshape(*o_BTNH.shape[:-2], -1)

    def matrix(self, score: Score) -> jax.Array:
        v_DNH = grouped(homogeneous(self.w_v_DKH, self.b_v_KH), self.spec.num_heads)
        return jnp.einsum('DNH,ENH->NDE', v_DNH, slices_DNH(self.spec)[: self.spec.d_model])


class NoVO(Value):
    """B[n] = P[n] P[n]^T: neither W_V nor W_O; head n copies the n-th slice. No weights.

    Needs N H = D. He & Hofmann 2024, arXiv 2311.01906 remove both (in a block of another shape).
    """

    equation = 'P[n] P[n]^T'
    weights = '0'
    source = 'He & Hofmann 2024, arXiv 2311.01906'

    @classmethod
    def check(cls, spec: AttentionSpec, **options) -> None:
        require_slices(spec, 'no_vo')

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        self.spec = spec

    remember = NoV.remember
    values = NoV.values
    output = NoO.output

    def matrix(self, score: Score) -> jax.Array:
        P_DNH = slices_DNH(self.spec)
        return jnp.einsum('DNH,ENH->NDE', P_DNH, P_DNH[: self.spec.d_model])
