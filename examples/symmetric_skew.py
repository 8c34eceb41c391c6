"""A score split into a symmetric and a skew part: examples.symmetric_skew:SymmetricSkew/vo."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention import AttentionSpec, Cache, Score, SpecError, homogeneous, project
from qkattn.attention.parameters import affine
from qkattn.attention.spec import whole


class SymmetricSkew(Score):
    """A[n] = W L W^T + (U V^T - V U^T): a symmetric part, rank <= R, and a skew one, rank <= 2 C.

    Every A[n] has this form with R = D and C = D / 2. A `qk` head of size H has it with R = 2 H and
    C = H. L is a diagonal that starts as +1, -1, +1, ... There is no rotary form, because rotary
    positions would mix the two parts.

    Args:
        symmetric_rank: R, from 0 to D; by default min(H, D).
        skew_rank: C, from 0 to D // 2; by default min(H, D) // 2. With both defaults, and H even
            and at most D, the parameter count is that of `qk` with K = N, plus N R signs.
    """

    equation = 'W[n] L[n] W[n]^T + U[n] V[n]^T - V[n] U[n]^T'  # each part only where it has rank
    source = 'the split of a matrix into its symmetric and skew parts; no published use known'
    options = {'symmetric_rank': whole(0, 'd_model'), 'skew_rank': whole(0, 'd_model // 2')}
    supports_rope = False
    w_symmetric_DNR: nnx.Param | None = None
    w_left_DNC: nnx.Param | None = None

    @classmethod
    def check(
        cls, spec: AttentionSpec, *, symmetric_rank: Any = None, skew_rank: Any = None
    ) -> None:
        if cls._ranks(spec, symmetric_rank, skew_rank) == (0, 0):
            raise SpecError('SymmetricSkew needs symmetric_rank or skew_rank above 0')

    @staticmethod
    def _ranks(
        spec: AttentionSpec, symmetric_rank: int | None, skew_rank: int | None
    ) -> tuple[int, int]:
        """Returns R and C; a rank of None gets its default."""
        most = min(spec.head_size, spec.d_model)
        R = most if symmetric_rank is None else symmetric_rank
        C = most // 2 if skew_rank is None else skew_rank
        return R, C

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        key: jax.Array,
        symmetric_rank: int | None = None,
        skew_rank: int | None = None,
    ):
        R, C = self._ranks(spec, symmetric_rank, skew_rank)
        equations = []
        counts = []
        if R > 0:
            self.w_symmetric_DNR, self.b_symmetric_NR = affine(spec, key, 'w_symmetric_DNR', R=R)
            signs_R = (-1.0) ** jnp.arange(R, dtype=jnp.float32)  # +1, -1, +1, ...
            self.g_sign_NR = nnx.Param(jnp.tile(signs_R, (spec.num_heads, 1)))
            equations.append('W[n] L[n] W[n]^T')
            counts.append('D*N*R + N*R')
        if C > 0:
            self.w_left_DNC, self.b_left_NC = affine(spec, key, 'w_left_DNC', C=C)
            self.w_right_DNC, self.b_right_NC = affine(spec, key, 'w_right_DNC', C=C)
            equations.append('U[n] V[n]^T - V[n] U[n]^T')
            counts.append('2*D*N*C')
        self.equation = ' + '.join(equations)
        self.parameter_count = ' + '.join(counts)
        self.scale = (R + 2 * C) ** -0.5

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        """Returns [x W L, x U, -x V]; the logits are the products with the keys [y W, y V, y U]."""
        projections = self.cached(x_BTD)
        parts = []
        if self.w_symmetric_DNR is not None:
            parts.append(projections['symmetric_BSNR'] * self.g_sign_NR[...])
        if self.w_left_DNC is not None:
            parts.append(projections['left_BSNC'])
            parts.append(-projections['right_BSNC'])
        return jnp.concatenate(parts, axis=-1)

    def cached(self, y_BSD: jax.Array) -> Cache:
        cache = {}
        if self.w_symmetric_DNR is not None:
            cache['symmetric_BSNR'] = project(y_BSD, self.w_symmetric_DNR, self.b_symmetric_NR)
        if self.w_left_DNC is not None:
            cache['left_BSNC'] = project(y_BSD, self.w_left_DNC, self.b_left_NC)
            cache['right_BSNC'] = project(y_BSD, self.w_right_DNC, self.b_right_NC)
        return cache

    def keys(self, cache: Cache) -> jax.Array:
        parts = []
        if self.w_symmetric_DNR is not None:
            parts.append(cache['symmetric_BSNR'])
        if self.w_left_DNC is not None:
            parts.append(cache['right_BSNC'])
            parts.append(cache['left_BSNC'])
        return jnp.concatenate(parts, axis=-1)

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
        return sum(parts[1:], start=parts[0])
