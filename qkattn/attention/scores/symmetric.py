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

    W has std D^-1/2 (1 + H/D)^-1/4, so that logits start with variance 1.

    A token's logit with itself is |x W|^2 * scale, about sqrt(H) / sqrt(1 + H/D). So at
    initialization, every token attends mostly to itself. The options reduce this effect. Reformer
    uses key_norm and self_mask.

    Args:
        key_norm: Whether keys have length 1, k = q / |q|. The logits are then not bilinear.
        self_mask: Whether a token attends to itself only if it sees no other token.
        temperature: A number that divides the logits, or 'learned' for a learned factor on the
            logits of each head, which starts at 1.
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
        """Raises SpecError for an invalid temperature, and for options that QK-norm undoes."""
        is_number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
        if is_number:
            is_valid = 0 < temperature < 1e38
        else:
            is_valid = temperature is None or temperature == 'learned'
        if not is_valid:
            raise SpecError(
                f"shared_qk(temperature={temperature!r}) must be a number above 0, 'learned' "
                'or None'
            )

        # QK-norm would undo a change of the length of queries or keys.
        changes_length = key_norm or temperature == 'learned'
        if spec.qk_norm and changes_length:
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
        # q . k has variance D^2 std^4 H (1 + H/D), which is H for this std.
        std = D**-0.5 * (1 + H / D) ** -0.25
        self.w_q_DNH, self.b_q_NH = affine(spec, key, 'w_q_DNH', std=std)
        self.key_norm = key_norm
        self.bilinear = not key_norm
        self.hides_self = self_mask

        # The scale is 1 / sqrt(variance of q . k), so that logits start with variance 1.
        if key_norm:
            self.scale = (1 + H / D) ** -0.25  # the variance is (1 + H/D)^1/2
        elif spec.qk_norm:
            self.scale = H**-0.5 * (1 + H / D) ** -0.5  # the variance is H (1 + H/D)
        else:
            self.scale = H**-0.5  # the variance is H

        if temperature == 'learned':
            self.g_temperature_N = nnx.Param(jnp.ones((N,), jnp.float32))
            self.equation = 'g[n] W_Q[n] W_Q[n]^T'
            self.parameter_count = 'D*N*H + N'
        else:
            self.g_temperature_N = None
        if isinstance(temperature, (int, float)):
            self.scale = self.scale / temperature

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        q_BTNH = super().queries(x_BTD)
        if self.g_temperature_N is None:
            return q_BTNH
        return q_BTNH * self.g_temperature_N[:, None]

    def keys(self, cache: Cache) -> jax.Array:
        k_BSNH = super().keys(cache)
        if not self.key_norm:
            return k_BSNH
        # Divide keys by their length, in float32 or wider.
        wide_BSNH = k_BSNH.astype(jnp.promote_types(k_BSNH.dtype, jnp.float32))
        squared_length_BSN1 = jnp.square(wide_BSNH).sum(-1, keepdims=True)
        unit_BSNH = wide_BSNH * jax.lax.rsqrt(squared_length_BSN1 + 1e-12)
        return unit_BSNH.astype(k_BSNH.dtype)

    def matrix(self) -> jax.Array:
        if self.key_norm:
            raise NotImplementedError('shared_qk(key_norm=True) is not bilinear and has no matrix')
        w_DNH = homogeneous(self.w_q_DNH, self.b_q_NH)
        A_NDE = jnp.einsum('DNH,ENH->NDE', w_DNH, w_DNH)
        if self.g_temperature_N is None:
            return A_NDE
        return A_NDE * self.g_temperature_N[:, None, None]

    def reference_logits(self, x_BTD: np.ndarray, y_BSD: np.ndarray) -> np.ndarray:
        """Computes s_BNTS / scale in float64, without `queries` and `keys`."""
        # E is D, or D + 1 with biases: x becomes (x, 1), and the last row of w is the bias.
        w_ENH = np.asarray(homogeneous(self.w_q_DNH, self.b_q_NH), np.float64)
        E = len(w_ENH)
        x_BTE = oracle.with_ones(x_BTD, E)
        y_BSE = oracle.with_ones(y_BSD, E)
        q_BTNH = np.einsum('BTE,ENH->BTNH', x_BTE, w_ENH)
        k_BSNH = np.einsum('BSE,ENH->BSNH', y_BSE, w_ENH)
        if self.key_norm:
            squared_length_BSN1 = (k_BSNH**2).sum(-1, keepdims=True)
            k_BSNH = k_BSNH / np.sqrt(squared_length_BSN1 + 1e-12)
        if self.g_temperature_N is not None:
            q_BTNH = q_BTNH * np.asarray(self.g_temperature_N[...], np.float64)[:, None]
        return np.einsum('BTNH,BSNH->BNTS', q_BTNH, k_BSNH)


class Symmetric(Tied):
    """A[n] = W[n] L[n] W[n]^T, symmetric but not definite: L[n] is a learned signed diagonal.

    Every symmetric A[n] of rank <= H has this form. L starts as +1, -1, +1, ..., so that a token's
    logit with itself has mean 0 (H even) and variance 2. Rotary positions are not supported,
    because A[n] would not stay symmetric.
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

    F has no bias, and std H^-1/2. The source's code has std 1, which makes the logits sqrt(H) times
    as large.
    """

    equation = 'W[n] F[n] W[n]^T'
    parameter_count = 'D*N*H + N*H*H'
    source = 'Courtois et al. 2024, arXiv 2406.06366 ("pairwise")'

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        N = spec.num_heads
        H = spec.head_size
        self.w_q_DNH, self.b_q_NH = affine(spec, key, 'w_q_DNH')
        self.w_form_NHG = weight(key, 'w_form_NHG', shape=(N, H, H), std=H**-0.5)
        self.scale = H**-0.5

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        return jnp.einsum('BTNH,NHG->BTNG', super().queries(x_BTD), self.w_form_NHG[...])

    def matrix(self) -> jax.Array:
        w_DNH = homogeneous(self.w_q_DNH, self.b_q_NH)
        return jnp.einsum('DNH,NHG,ENG->NDE', w_DNH, self.w_form_NHG[...], w_DNH)


def _signs(num_heads: int, size: int) -> jax.Array:
    """Returns signs_NH in float32: +1, -1, +1, ... for each head."""
    signs_H = (-1.0) ** jnp.arange(size, dtype=jnp.float32)
    return jnp.tile(signs_H, (num_heads, 1))
