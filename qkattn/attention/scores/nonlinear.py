"""Scores whose queries are not linear in the stream."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy  # whose submodules are imported on first use
from flax import nnx

from qkattn.attention.norm import rms_norm
from qkattn.attention.options import require_one_of, require_slices, require_whole
from qkattn.attention.parameters import bias, heads_of, project, weight
from qkattn.attention.scores.score import Cache, Score
from qkattn.attention.spec import AttentionSpec

EPSILON = 1e-5  # in both norms


class NonlinearQuery(Score):
    """s[n] = Q(x) P[n] W_K[n]^T y^T with Q(x) = (x + f(x)) / 2: `query_free` with an MLP for W_Q.

    f(x) = LayerNorm(gelu(RMSNorm(x) W_1) W_2), both norms with a gain. Parameters:
    2 D R + 2 D + D K H; at R = D / 2 and K = N those of `qk` and 2 D gains. Needs N H = D. With
    form='residual', queries have variance 1/2 at initialization, so the scale is sqrt(2 / H).
    Karbevski 2026, arXiv 2603.13381.

    Args:
      form: 'residual', as above, or 'bottleneck', Q(x) = f(x).
      rank: R, the width of f, at least 1; None is D // 2.
    """

    equation = '(I + f)/2 P[n] W_K[n]^T'
    parameter_count = '2*D*R + 2*D + D*K*H'
    source = 'Karbevski 2026, arXiv 2603.13381'
    uses_kv_heads = True
    bilinear = False

    @classmethod
    def check(cls, spec: AttentionSpec, *, form: Any = 'residual', rank: Any = None) -> None:
        require_slices(spec, 'nonlinear_query')
        require_one_of('nonlinear_query', 'form', form, ('residual', 'bottleneck'))
        if rank is not None:
            require_whole('nonlinear_query', 'rank', rank, 1, None, '')

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        key: jax.Array,
        form: str = 'residual',
        rank: int | None = None,
    ):
        D, K, H = spec.d_model, spec.num_kv_heads, spec.head_size
        R = max(1, D // 2) if rank is None else rank
        self.w_in_DR = weight(key, 'w_q_in_DR', (D, R), D**-0.5)
        self.w_out_RD = weight(key, 'w_q_out_RD', (R, D), R**-0.5)
        self.w_k_DKH = weight(key, 'w_k_DKH', (D, K, H), D**-0.5)
        self.g_in_D = nnx.Param(jnp.ones((D,), jnp.float32))
        self.g_out_D = nnx.Param(jnp.ones((D,), jnp.float32))
        self.b_in_R = bias(spec, (R,))
        self.b_out_D = bias(spec, (D,))
        self.b_k_KH = bias(spec, (K, H))
        self.residual = form == 'residual'
        self.scale = (2 / H if self.residual else 1 / H) ** 0.5
        self.spec = spec

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        normed_BTD = rms_norm(x_BTD, epsilon=EPSILON) * self.g_in_D[...]
        hidden_BTR = project(normed_BTD, self.w_in_DR, self.b_in_R)
        f_BTD = jax.nn.gelu(hidden_BTR, approximate=False) @ self.w_out_RD[...]
        f_BTD = jax.nn.standardize(
            f_BTD.astype(jnp.promote_types(f_BTD.dtype, jnp.float32)), epsilon=EPSILON
        ).astype(x_BTD.dtype)
        f_BTD = f_BTD * self.g_out_D[...]
        if self.b_out_D is not None:
            f_BTD = f_BTD + self.b_out_D[...]
        return heads_of((x_BTD + f_BTD) / 2 if self.residual else f_BTD, self.spec.num_heads)

    def cached(self, y_BSD: jax.Array) -> Cache:
        return {'k_BSKH': project(y_BSD, self.w_k_DKH, self.b_k_KH)}

    def keys(self, cache: Cache) -> jax.Array:
        return cache['k_BSKH']

    def matrix(self) -> jax.Array:
        raise NotImplementedError('nonlinear_query is not bilinear and has no matrix')

    def reference_logits(self, x_BTD: np.ndarray, y_BSD: np.ndarray) -> np.ndarray:
        def array(parameter: nnx.Param | None) -> np.ndarray:
            return np.zeros(()) if parameter is None else np.asarray(parameter[...], np.float64)

        x_BTD, y_BSD = np.asarray(x_BTD, np.float64), np.asarray(y_BSD, np.float64)
        q_BTD = np.zeros_like(x_BTD)
        for b, t in np.ndindex(*x_BTD.shape[:2]):
            x_D = x_BTD[b, t]
            hidden_R = x_D / np.sqrt((x_D**2).mean() + EPSILON) * array(self.g_in_D)
            hidden_R = hidden_R @ array(self.w_in_DR) + array(self.b_in_R)
            f_D = (hidden_R * scipy.special.ndtr(hidden_R)) @ array(self.w_out_RD)
            f_D = (f_D - f_D.mean()) / np.sqrt(f_D.var() + EPSILON)
            f_D = f_D * array(self.g_out_D) + array(self.b_out_D)
            q_BTD[b, t] = (x_D + f_D) / 2 if self.residual else f_D
        N, H = self.spec.num_heads, self.spec.head_size
        k_BSKH = np.tensordot(y_BSD, array(self.w_k_DKH), axes=1) + array(self.b_k_KH)
        k_BSNH = np.repeat(k_BSKH, N // k_BSKH.shape[2], axis=2)
        heads = [
            q_BTD[..., n * H : (n + 1) * H] @ np.swapaxes(k_BSNH[:, :, n], 1, 2) for n in range(N)
        ]
        return np.stack(heads, axis=1)
