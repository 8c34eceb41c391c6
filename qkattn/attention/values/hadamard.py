"""A Value whose output projection is a fixed orthogonal transform."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import scipy  # whose submodules are imported on first use
from flax import nnx

from qkattn.attention.options import require_one_of, require_slices
from qkattn.attention.parameters import bias, grouped, homogeneous, weight
from qkattn.attention.scores.score import Score
from qkattn.attention.spec import AttentionSpec
from qkattn.attention.values.value import Value
from qkattn.attention.values.vo import VO
from qkattn.errors import SpecError


class Hadamard(Value):
    """B[n] = W_V[n] T[n] diag(g): W_O is a fixed orthogonal transform T and a learned diagonal g.

    Parameters: D K H + D; the cache holds K H floats per token. T is the normalized Walsh-Hadamard
    matrix of the concatenated heads, applied as two small factors in D (D1 + D2) multiplications
    per token, D1 D2 = D. g starts at residual_gain. Needs N H = D and a D that is a power of two,
    which limits the d_model that can match a parameter count.
    Aggarwal & Kumar 2026, arXiv 2603.08343; their affine rescaling is g with the bias b_O.

    Args:
      odd: for D = 2^a m with an odd m > 1, 'refuse', or 'dct' for the Kronecker product of the
        Hadamard matrix of 2^a and the orthonormal cosine matrix of m: also fixed and orthogonal,
        with entries of several magnitudes.
    """

    equation = 'W_V[n] T[n] diag(g)'
    parameter_count = 'D*K*H + D'
    source = 'Aggarwal & Kumar 2026, arXiv 2603.08343'
    uses_kv_heads = True

    @classmethod
    def check(cls, spec: AttentionSpec, *, odd: str = 'refuse') -> None:
        require_slices(spec, 'hadamard')
        require_one_of('hadamard', 'odd', odd, ('refuse', 'dct'))
        power = 1 << (spec.d_model.bit_length() - 1)
        if odd == 'refuse' and power != spec.d_model:
            raise SpecError(
                f'hadamard needs a d_model that is a power of two, not {spec.d_model}; the nearest '
                f'are {power} and {2 * power}, and hadamard(odd="dct") takes every d_model'
            )

    def __init__(self, spec: AttentionSpec, score: Score, *, key: jax.Array, odd: str = 'refuse'):
        D, K, H = spec.d_model, spec.num_kv_heads, spec.head_size
        self.w_v_DKH = weight(key, 'w_v_DKH', (D, K, H), D**-0.5)
        self.b_v_KH = bias(spec, (K, H))
        self.g_o_D = nnx.Param(jnp.full((D,), spec.residual_gain, jnp.float32))
        self.b_o_D = bias(spec, (D,))
        self.num_heads = spec.num_heads

    cached = VO.cached
    values = VO.values

    def output(self, o_BTNH: jax.Array, score: Score, x_BTD: jax.Array) -> jax.Array:
        left, right = (jnp.asarray(f, o_BTNH.dtype) for f in factors(self.g_o_D.shape[0]))
        grid = o_BTNH.reshape(*o_BTNH.shape[:2], len(left), len(right))
        mixed = jnp.einsum('BTcd,ca,db->BTab', grid, left, right)
        out_BTD = mixed.reshape(*o_BTNH.shape[:2], -1) * self.g_o_D[...]
        return out_BTD if self.b_o_D is None else out_BTD + self.b_o_D[...]

    def matrix(self, score: Score) -> jax.Array:
        v_DNH = grouped(homogeneous(self.w_v_DKH, self.b_v_KH), self.num_heads)
        T_NHE = jnp.asarray(transform(self.g_o_D.shape[0]), v_DNH.dtype)
        T_NHE = T_NHE.reshape(self.num_heads, -1, T_NHE.shape[-1]) * self.g_o_D[...]
        B_NDE = jnp.einsum('DNH,NHE->NDE', v_DNH, T_NHE)
        return B_NDE if self.b_o_D is None else B_NDE.at[0, -1].add(self.b_o_D[...])


def transform(d_model: int) -> np.ndarray:
    """The orthogonal D x D matrix T, in float64."""
    return np.kron(*factors(d_model))


@functools.cache
def factors(d_model: int) -> tuple[np.ndarray, np.ndarray]:
    """T as a Kronecker product of two orthogonal matrices of about equal size, in float64."""
    twos = (d_model & -d_model).bit_length() - 1
    odd = d_model >> twos
    first = min(twos, round(np.log2(d_model) / 2))
    left, right = (scipy.linalg.hadamard(1 << n) / 2 ** (n / 2) for n in (first, twos - first))
    cosines = scipy.fft.dct(np.eye(odd), norm='ortho') if odd > 1 else np.eye(1)
    return left, np.kron(right, cosines)
