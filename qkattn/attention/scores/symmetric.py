"""Scores that tie queries to keys: shared, symmetric, pairwise."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qkattn.attention import oracle
from qkattn.attention.maps import Cache, Projection
from qkattn.attention.parameters import affine, homogeneous, weight
from qkattn.attention.scores.score import TwoMaps
from qkattn.attention.spec import AttentionSpec, one_of
from qkattn.errors import SpecError


class Tied(TwoMaps):
    """A Score whose queries are computed from its keys, y W[n] + b[n]."""

    w_q_DNH: nnx.Param
    b_q_NH: nnx.Param | None
    shareable = {'key': ('w_q_DNH', 'b_q_NH')}
    query_map = key_map = Projection('w_q_DNH', 'b_q_NH', 'k_BSNH')


class SharedQK(Tied):
    """A[n] = W[n] W[n]^T, symmetric and positive semi-definite: one matrix for queries and keys.

    x W W^T y has variance H (1 + H/D) std^4 D^2 for independent x and y, hence
    std = D^-1/2 (1 + H/D)^-1/4. A token's logit with itself is |x W|^2 * scale, about
    sqrt(H) / sqrt(1 + H/D), so that at initialization every token attends to itself first; the
    options counter that. Reformer uses key_norm and self_mask.

    Args:
      key_norm: whether keys are divided by their length, k = q / |q|, after the cache, which holds
        q. A token's logit with itself stays as large, but no key is longer than another. Not
        bilinear in x and y.
      self_mask: whether a token attends to itself only where nothing else is visible.
      temperature: a number that divides the logits; 'learned' multiplies those of head n by a gain
        that starts at 1; None is off.
    """

    equation = 'W_Q[n] W_Q[n]^T'
    parameter_count = 'D*N*H'
    source = 'Kitaev et al. 2020, section 2; Courtois et al. 2024 ("symmetric")'
    options = {'key_norm': one_of(False, True), 'self_mask': one_of(False, True)}
    shareable = {'query': ('w_q_DNH', 'b_q_NH'), 'key': ('w_q_DNH', 'b_q_NH')}

    @classmethod
    def check(
        cls, spec: AttentionSpec, *, key_norm: Any = False, temperature: Any = None, **_: Any
    ) -> None:
        valid = temperature is None or temperature == 'learned'
        if isinstance(temperature, (int, float)) and not isinstance(temperature, bool):
            valid = 0 < temperature < 1e38
        if not valid:
            raise SpecError(
                f"shared_qk(temperature={temperature!r}) must be a number above 0, 'learned' "
                'or None'
            )
        if spec.qk_norm and (key_norm or temperature == 'learned'):
            raise SpecError(
                'qk_norm=True undoes key_norm and a learned temperature of shared_qk; leave it out'
            )

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        key: jax.Array,
        key_norm: bool = False,
        self_mask: bool = False,
        temperature: float | str | None = None,
    ):
        D = spec.d_model
        N = spec.num_heads
        H = spec.head_size
        std = D**-0.5 * (1 + H / D) ** -0.25
        self.w_q_DNH, self.b_q_NH = affine(spec, key, 'w_q_DNH', std)
        if temperature == 'learned':
            self.g_temperature_N = nnx.Param(jnp.ones((N,), jnp.float32))
            self.equation = 'g[n] W_Q[n] W_Q[n]^T'
            self.parameter_count = 'D*N*H + N'
        else:
            self.g_temperature_N = None
        self.key_norm = key_norm
        self.bilinear = not key_norm
        self.hides_self = self_mask
        # With key_norm, x W W^T y / |y W| has variance sqrt(1 + H/D); with QK-norm, H (1 + H/D).
        self.scale = (1 + H / D) ** -0.25 if key_norm else H**-0.5
        if spec.qk_norm:
            self.scale *= (1 + H / D) ** -0.5
        if isinstance(temperature, (int, float)):
            self.scale = self.scale / temperature

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        q_BTNH = super().queries(x_BTD)
        return q_BTNH if self.g_temperature_N is None else q_BTNH * self.g_temperature_N[:, None]

    def keys(self, cache: Cache) -> jax.Array:
        k_BSNH = super().keys(cache)
        if not self.key_norm:
            return k_BSNH
        wide_BSNH = k_BSNH.astype(jnp.promote_types(k_BSNH.dtype, jnp.float32))
        square_BSN1 = jnp.square(wide_BSNH).sum(-1, keepdims=True)
        return (wide_BSNH * jax.lax.rsqrt(square_BSN1 + 1e-12)).astype(k_BSNH.dtype)

    def matrix(self) -> jax.Array:
        if self.key_norm:
            raise NotImplementedError('shared_qk(key_norm=True) is not bilinear and has no matrix')
        w_DNH = homogeneous(self.w_q_DNH, self.b_q_NH)
        A_NDE = jnp.einsum('DNH,ENH->NDE', w_DNH, w_DNH)
        if self.g_temperature_N is None:
            return A_NDE
        return A_NDE * self.g_temperature_N[:, None, None]

    def reference_logits(self, x_BTD: np.ndarray, y_BSD: np.ndarray) -> np.ndarray:
        # One matrix for queries and keys, with the bias as a row for the coordinate 1 of (x, 1).
        w_ENH = np.asarray(homogeneous(self.w_q_DNH, self.b_q_NH), np.float64)
        x_BTE = oracle.with_ones(x_BTD, len(w_ENH))
        y_BSE = oracle.with_ones(y_BSD, len(w_ENH))
        q_BTNH = np.einsum('BTE,ENH->BTNH', x_BTE, w_ENH)
        k_BSNH = np.einsum('BSE,ENH->BSNH', y_BSE, w_ENH)
        if self.key_norm:
            k_BSNH = k_BSNH / np.sqrt((k_BSNH**2).sum(-1, keepdims=True) + 1e-12)
        if self.g_temperature_N is not None:
            q_BTNH = q_BTNH * np.asarray(self.g_temperature_N[...], np.float64)[:, None]
        return np.einsum('BTNH,BSNH->BNTS', q_BTNH, k_BSNH)


class Symmetric(Tied):
    """A[n] = W[n] L[n] W[n]^T, symmetric but not definite: L[n] is a learned signed diagonal.

    L starts as +1, -1, +1, ..., so that a token does not prefer itself: its logit with itself has
    mean 0 (H even) and variance 2. Every symmetric A[n] of rank <= H has this form. Rotary
    positions keep it symmetric only where L is equal on the two channels of a pair.
    """

    equation = 'W[n] L[n] W[n]^T'
    parameter_count = 'D*N*H + N*H'
    source = 'Courtois et al. 2024, arXiv 2406.06366, with a signed diagonal'
    supports_rope = False

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        self.w_q_DNH, self.b_q_NH = affine(spec, key, 'w_q_DNH')
        self.g_sign_NH = nnx.Param(_signs(spec.num_heads, spec.head_size))
        self.scale = spec.head_size**-0.5

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        return super().queries(x_BTD) * self.g_sign_NH[...]

    def matrix(self) -> jax.Array:
        w_DNH = homogeneous(self.w_q_DNH, self.b_q_NH)
        return jnp.einsum('DNH,NH,ENH->NDE', w_DNH, self.g_sign_NH[...], w_DNH)


class Pairwise(Tied):
    """A[n] = W[n] F[n] W[n]^T with a free H x H form F[n]: neither symmetric nor definite.

    F has std H^-1/2, which makes W F as large as W; with std 1, as in the source's code, logits are
    sqrt(H) times as large. F has no bias.
    """

    equation = 'W[n] F[n] W[n]^T'
    parameter_count = 'D*N*H + N*H*H'
    source = 'Courtois et al. 2024, arXiv 2406.06366 ("pairwise")'

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        N = spec.num_heads
        H = spec.head_size
        self.w_q_DNH, self.b_q_NH = affine(spec, key, 'w_q_DNH')
        self.w_form_NHG = weight(key, 'w_form_NHG', (N, H, H), H**-0.5)
        self.scale = H**-0.5

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        return jnp.einsum('BTNH,NHG->BTNG', super().queries(x_BTD), self.w_form_NHG[...])

    def matrix(self) -> jax.Array:
        w_DNH = homogeneous(self.w_q_DNH, self.b_q_NH)
        return jnp.einsum('DNH,NHG,ENG->NDE', w_DNH, self.w_form_NHG[...], w_DNH)


def _signs(num_heads: int, size: int) -> jax.Array:
    """+1, -1, +1, ... for each head, as floats."""
    return jnp.tile((-1.0) ** jnp.arange(size, dtype=jnp.float32), (num_heads, 1))
