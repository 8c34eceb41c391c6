"""Scores that tie queries to keys: shared, symmetric, pairwise, symmetric plus skew."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qkattn.attention.options import require_one_of, require_whole
from qkattn.attention.parameters import bias, homogeneous, project, weight
from qkattn.attention.scores.score import Cache, Score
from qkattn.attention.spec import AttentionSpec
from qkattn.errors import SpecError


class SharedQK(Score):
    """A[n] = W[n] W[n]^T, symmetric and positive semi-definite: one matrix for queries and keys.

    Weights D N H. Off the diagonal x W W^T y has variance H (1 + H/D) std^4 D^2, hence the
    standard deviation below. On the diagonal the logit is |x W|^2 * scale, about
    sqrt(H) / sqrt(1 + H/D): every token first reads itself. Kitaev et al. 2020 (Reformer) hide
    the diagonal for that reason; here it is visible.
    """

    equation = 'W_Q[n] W_Q[n]^T'
    parameter_count = 'D*N*H'
    source = 'Kitaev et al. 2020, section 2; Courtois et al. 2024 ("symmetric")'
    query_weight = 'w_q_DNH'
    key_weight = 'w_q_DNH'

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        D, N, H = spec.d_model, spec.num_heads, spec.head_size
        self.w_q_DNH = weight(key, 'w_q_DNH', (D, N, H), D**-0.5 * (1 + H / D) ** -0.25)
        self.b_q_NH = bias(spec, (N, H))
        self.scale = H**-0.5

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        return project(x_BTD, self.w_q_DNH, self.b_q_NH)

    def cached(self, y_BSD: jax.Array) -> Cache:
        return {'k_BSNH': self.queries(y_BSD)}

    def keys(self, cache: Cache) -> jax.Array:
        return cache['k_BSNH']

    def matrix(self) -> jax.Array:
        w_DNH = homogeneous(self.w_q_DNH, self.b_q_NH)
        return jnp.einsum('DNH,ENH->NDE', w_DNH, w_DNH)


class FairSharedQK(SharedQK):
    """`SharedQK` with what may make up for its heavy diagonal; all off is SharedQK itself.

    Weights D N H, and N more with temperature='learned'. Kitaev et al. 2020, section 2, use
    key_norm and self_mask.

    Args:
      key_norm: keys of length 1, k = q / |q| (the cache still holds q). A token reads itself
        with |q| * scale, sqrt(H) / sqrt(1 + H/D) as without it, but no key is longer than another.
        Not bilinear in x and y.
      self_mask: a token reads itself only where nothing else is visible.
      temperature: a number divides the logits (1 / temperature is then their standard deviation
        at birth); 'learned' multiplies those of head n by a gain that starts at 1; None is off.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        key: jax.Array,
        key_norm: bool = False,
        self_mask: bool = False,
        temperature: float | str | None = None,
    ):
        super().__init__(spec, key=key)
        H, D, N = spec.head_size, spec.d_model, spec.num_heads
        self.key_norm = key_norm
        self.bilinear = not key_norm
        self.hides_self = self_mask
        learned = temperature == 'learned'
        self.g_temperature_N = nnx.Param(jnp.ones((N,), jnp.float32)) if learned else None
        if learned:
            self.parameter_count = f'{SharedQK.parameter_count} + N'
        if key_norm:  # x W W^T y / |y W| has variance sqrt(1 + H/D)
            self.scale = (1 + H / D) ** -0.25
        if temperature is not None and not learned:
            self.scale = self.scale / temperature

    @classmethod
    def check(
        cls,
        spec: AttentionSpec,
        *,
        key_norm: Any = False,
        self_mask: Any = False,
        temperature: Any = None,
    ) -> None:
        from qkattn.attention.registry import find_value

        require_one_of('shared_qk', 'key_norm', key_norm, (False, True))
        require_one_of('shared_qk', 'self_mask', self_mask, (False, True))
        number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
        positive = number and 0 < temperature < math.inf
        if not (temperature is None or temperature == 'learned' or positive):
            raise SpecError(
                f"shared_qk(temperature={temperature!r}) must be a number above 0, 'learned' "
                'or None'
            )
        if key_norm and 'key_weight' in getattr(find_value(spec.value)[0], 'shares', ()):
            raise SpecError(
                f'the keys of shared_qk(key_norm=True) are not linear in the stream, so the value '
                f'{spec.value} cannot use them'
            )

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        q_BTNH = super().queries(x_BTD)
        return q_BTNH if self.g_temperature_N is None else q_BTNH * self.g_temperature_N[:, None]

    def cached(self, y_BSD: jax.Array) -> Cache:
        return {'k_BSNH': super().queries(y_BSD)}

    def keys(self, cache: Cache) -> jax.Array:
        k_BSNH = cache['k_BSNH']
        if not self.key_norm:
            return k_BSNH
        wide_BSNH = k_BSNH.astype(jnp.promote_types(k_BSNH.dtype, jnp.float32))
        square_BSN1 = jnp.square(wide_BSNH).sum(-1, keepdims=True)
        return (wide_BSNH * jax.lax.rsqrt(square_BSN1 + 1e-12)).astype(k_BSNH.dtype)

    def matrix(self) -> jax.Array:
        if self.key_norm:
            raise NotImplementedError('shared_qk(key_norm=True) is not bilinear and has no matrix')
        A_NDE = super().matrix()
        return (
            A_NDE if self.g_temperature_N is None else A_NDE * self.g_temperature_N[:, None, None]
        )

    def reference_logits(self, x_BTD: jax.Array, y_BSD: jax.Array) -> np.ndarray:
        """s_BNTS without the scale, in float64, one head at a time."""
        w_DNH = np.asarray(self.w_q_DNH[...], np.float64)
        N, H = w_DNH.shape[1:]
        b_NH = np.zeros((N, H)) if self.b_q_NH is None else np.asarray(self.b_q_NH[...], np.float64)
        gain_N = np.ones(N)
        if self.g_temperature_N is not None:
            gain_N = np.asarray(self.g_temperature_N[...], np.float64)
        x_BTD, y_BSD = np.asarray(x_BTD, np.float64), np.asarray(y_BSD, np.float64)
        heads = []
        for n in range(N):
            q_BTH = x_BTD @ w_DNH[:, n] + b_NH[n]
            k_BSH = y_BSD @ w_DNH[:, n] + b_NH[n]
            if self.key_norm:
                k_BSH = k_BSH / np.sqrt((k_BSH**2).sum(-1, keepdims=True) + 1e-12)
            heads.append(gain_N[n] * (q_BTH @ np.swapaxes(k_BSH, 1, 2)))
        return np.stack(heads, axis=1)


class Symmetric(SharedQK):
    """A[n] = W[n] L[n] W[n]^T, symmetric but not definite: L[n] a learned signed diagonal.

    Weights D N H + N H. L begins as +1, -1, +1, ..., so that a token does not prefer itself: logits
    on the diagonal have mean 0 (H even) and variance 2. Every symmetric A[n] of rank <= H can be
    written so. The form is symmetric under rotary positions only where L is equal on the two
    channels of a pair. The indefinite counterpart of Courtois et al. 2024 ("symmetric").
    """

    equation = 'W[n] L[n] W[n]^T'
    parameter_count = 'D*N*H + N*H'
    source = 'Courtois et al. 2024, arXiv 2406.06366, with a signed diagonal'
    supports_rope = False
    query_weight = None

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        D, N, H = spec.d_model, spec.num_heads, spec.head_size
        self.w_q_DNH = weight(key, 'w_q_DNH', (D, N, H), D**-0.5)
        self.g_sign_NH = nnx.Param(_signs(N, H))
        self.b_q_NH = bias(spec, (N, H))
        self.scale = H**-0.5

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        return super().queries(x_BTD) * self.g_sign_NH[...]

    def cached(self, y_BSD: jax.Array) -> Cache:
        return {'k_BSNH': super().queries(y_BSD)}

    def matrix(self) -> jax.Array:
        w_DNH = homogeneous(self.w_q_DNH, self.b_q_NH)
        return jnp.einsum('DNH,NH,ENH->NDE', w_DNH, self.g_sign_NH[...], w_DNH)


class Pairwise(SharedQK):
    """A[n] = W[n] F[n] W[n]^T with a free H x H form F[n]: neither symmetric nor definite.

    Weights D N H + N H^2. `qk` whose W_Q[n] = W[n] F[n] and W_K[n] = W[n] span the same columns.
    F has normal entries of standard deviation H^-1/2: F drawn with deviation 1, as in the paper's
    code, makes logits sqrt(H) times as large. F is a form, not a projection, and has no bias.
    Courtois et al. 2024, arXiv 2406.06366 ("pairwise").
    """

    equation = 'W[n] F[n] W[n]^T'
    parameter_count = 'D*N*H + N*H*H'
    source = 'Courtois et al. 2024, arXiv 2406.06366 ("pairwise")'
    query_weight = None

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        D, N, H = spec.d_model, spec.num_heads, spec.head_size
        self.w_q_DNH = weight(key, 'w_q_DNH', (D, N, H), D**-0.5)
        self.w_form_NHG = weight(key, 'w_form_NHG', (N, H, H), H**-0.5)
        self.b_q_NH = bias(spec, (N, H))
        self.scale = H**-0.5

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        return jnp.einsum('BTNH,NHG->BTNG', super().queries(x_BTD), self.w_form_NHG[...])

    def cached(self, y_BSD: jax.Array) -> Cache:
        return {'k_BSNH': super().queries(y_BSD)}

    def matrix(self) -> jax.Array:
        w_DNH = homogeneous(self.w_q_DNH, self.b_q_NH)
        return jnp.einsum('DNH,NHG,ENG->NDE', w_DNH, self.w_form_NHG[...], w_DNH)


class SymmetricSkew(Score):
    """A[n] = W L W^T + (U V^T - V U^T): a symmetric part, rank <= R, and a skew one, rank <= 2 C.

    Weights D N (R + 2 C) + N R; the cache holds y W, y U and y V, N (R + 2 C) floats a token. Every
    A[n] is such a sum at R = D and C = D / 2; a `qk` head of size H is one at R = 2 H and C = H.
    L begins as +1, -1, ... as in `symmetric`; the skew part is 0 on the diagonal. Under rotary
    positions the two parts mix.

    Args:
      symmetric_rank: R, 0 to D; None is H.
      skew_rank: C, 0 to D // 2; None is H // 2, which gives the weights of `qk` (for even H).
    """

    equation = 'W[n] L[n] W[n]^T + U[n] V[n]^T - V[n] U[n]^T'
    parameter_count = 'D*N*R + N*R + 2*D*N*C'
    source = 'the split of a matrix into its symmetric and skew parts; no published use known'
    supports_rope = False

    @classmethod
    def check(
        cls, spec: AttentionSpec, *, symmetric_rank: Any = None, skew_rank: Any = None
    ) -> None:
        who, D = 'symmetric_skew', spec.d_model
        if symmetric_rank is not None:
            require_whole(who, 'symmetric_rank', symmetric_rank, 0, D, 'd_model')
        if skew_rank is not None:
            require_whole(who, 'skew_rank', skew_rank, 0, D // 2, 'd_model // 2')
        if cls._ranks(spec, symmetric_rank, skew_rank) == (0, 0):
            raise SpecError('symmetric_skew needs symmetric_rank or skew_rank above 0')

    @staticmethod
    def _ranks(spec: AttentionSpec, symmetric: int | None, skew: int | None) -> tuple[int, int]:
        D, H = spec.d_model, spec.head_size
        R = min(H, D) if symmetric is None else symmetric
        return R, (min(H, D) // 2 if skew is None else skew)

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        key: jax.Array,
        symmetric_rank: int | None = None,
        skew_rank: int | None = None,
    ):
        D, N = spec.d_model, spec.num_heads
        R, C = self._ranks(spec, symmetric_rank, skew_rank)
        std = D**-0.5
        self.w_symmetric_DNR = weight(key, 'w_symmetric_DNR', (D, N, R), std) if R else None
        self.g_sign_NR = nnx.Param(_signs(N, R)) if R else None
        self.w_left_DNC = weight(key, 'w_left_DNC', (D, N, C), std) if C else None
        self.w_right_DNC = weight(key, 'w_right_DNC', (D, N, C), std) if C else None
        self.b_symmetric_NR = bias(spec, (N, R)) if R else None
        self.b_left_NC = bias(spec, (N, C)) if C else None
        self.b_right_NC = bias(spec, (N, C)) if C else None
        self.scale = (R + 2 * C) ** -0.5
        parts = (R and 'D*N*R + N*R', C and '2*D*N*C')
        self.parameter_count = ' + '.join(part for part in parts if part)

    def _projections(self, x_BTD: jax.Array) -> list[jax.Array]:
        """x W, x U and x V, as far as there are any."""
        named = (
            (self.w_symmetric_DNR, self.b_symmetric_NR),
            (self.w_left_DNC, self.b_left_NC),
            (self.w_right_DNC, self.b_right_NC),
        )
        return [project(x_BTD, w, b) for w, b in named if w is not None]

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        parts = self._projections(x_BTD)
        if self.g_sign_NR is not None:
            parts[0] = parts[0] * self.g_sign_NR[...]
        if self.w_right_DNC is not None:
            parts[-1] = -parts[-1]
        return jnp.concatenate(parts, axis=-1)

    def cached(self, y_BSD: jax.Array) -> Cache:
        parts = self._projections(y_BSD)
        cache = {} if self.w_symmetric_DNR is None else {'symmetric_BSNR': parts[0]}
        if self.w_left_DNC is not None:
            cache['left_BSNC'], cache['right_BSNC'] = parts[-2:]
        return cache

    def keys(self, cache: Cache) -> jax.Array:
        order = ('symmetric_BSNR', 'right_BSNC', 'left_BSNC')
        return jnp.concatenate([cache[name] for name in order if name in cache], axis=-1)

    def matrix(self) -> jax.Array:
        parts = []
        if self.w_symmetric_DNR is not None:
            w_DNR = homogeneous(self.w_symmetric_DNR, self.b_symmetric_NR)
            parts.append(jnp.einsum('DNR,NR,ENR->NDE', w_DNR, self.g_sign_NR[...], w_DNR))
        if self.w_left_DNC is not None:
            u_DNC = homogeneous(self.w_left_DNC, self.b_left_NC)
            v_DNC = homogeneous(self.w_right_DNC, self.b_right_NC)
            half_NDE = jnp.einsum('DNC,ENC->NDE', u_DNC, v_DNC)
            parts.append(half_NDE - jnp.swapaxes(half_NDE, 1, 2))
        return sum(parts)


def _signs(num_heads: int, size: int) -> jax.Array:
    """+1, -1, +1, ... for each head, as floats."""
    return jnp.tile((-1.0) ** jnp.arange(size, dtype=jnp.float32), (num_heads, 1))
