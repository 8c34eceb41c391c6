"""A value with a fixed orthogonal W_O: qk/examples.hadamard:Hadamard."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from flax import nnx

from qkattn.attention import AttentionSpec, Factored, Score, SpecError, bias
from qkattn.attention.parameters import affine
from qkattn.attention.values.vo import VO


class Hadamard(Factored):
    """B[n] = W_V[n] T[n] diag(g): W_O is a fixed orthogonal transform T and a learned diagonal g.

    T is the normalized Walsh-Hadamard matrix, which acts on the concatenated heads. It is applied
    as two factors. D must be a power of two. g starts at residual_gain.
    """

    equation = 'W_V[n] T[n] diag(g)'
    parameter_count = 'D*K*H + D'
    source = 'Aggarwal & Kumar 2026, arXiv 2603.08343'
    uses_kv_heads = True
    uses_slices = True
    value_map = VO.value_map

    @classmethod
    def check(cls, spec: AttentionSpec) -> None:
        power = 1 << (spec.d_model.bit_length() - 1)  # the greatest power of two up to d_model
        if power != spec.d_model:
            raise SpecError(
                f'Hadamard needs a d_model that is a power of two, not {spec.d_model}; the nearest '
                f'are {power} and {2 * power}'
            )

    def __init__(self, spec: AttentionSpec, score: Score, *, key: jax.Array):
        self.w_v_DKH, self.b_v_KH = affine(spec, key, 'w_v_DKH')
        self.g_o_D = nnx.Param(jnp.full((spec.d_model,), spec.residual_gain, jnp.float32))
        self.b_o_D = bias(spec, (spec.d_model,))
        self.num_heads = spec.num_heads

    def output(self, o_BTNH: jax.Array, score: Score, x_BTD: jax.Array) -> jax.Array:
        # The concatenated heads are laid out as a matrix. One factor of the transform mixes its
        # rows (c to a), the other its columns (d to b).
        B, T, _, _ = o_BTNH.shape
        first, second = factors(self.g_o_D.shape[0])
        left = jnp.asarray(first, o_BTNH.dtype)
        right = jnp.asarray(second, o_BTNH.dtype)
        grid = o_BTNH.reshape(B, T, len(left), len(right))
        mixed = jnp.einsum('BTcd,ca,db->BTab', grid, left, right)

        out_BTD = mixed.reshape(B, T, -1) * self.g_o_D[...]
        if self.b_o_D is None:
            return out_BTD
        return out_BTD + self.b_o_D[...]

    def output_matrix(self, score: Score) -> jax.Array:
        left, right = factors(self.g_o_D.shape[0])
        T_DE = jnp.asarray(np.kron(left, right), self.w_v_DKH.dtype)
        T_NHE = T_DE.reshape(self.num_heads, -1, T_DE.shape[-1])
        return T_NHE * self.g_o_D[...]


@functools.cache
def factors(d_model: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns two orthogonal matrices in float64 whose Kronecker product is T.

    They are of about equal size: for D = 2^5 they are 4 x 4 and 8 x 8.
    """
    exponent = d_model.bit_length() - 1
    first = round(exponent / 2)
    second = exponent - first
    left = scipy.linalg.hadamard(1 << first) / 2 ** (first / 2)
    right = scipy.linalg.hadamard(1 << second) / 2 ** (second / 2)
    return left, right
