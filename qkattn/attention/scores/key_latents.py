"""The score side of multi-head latent attention: keys computed from a latent."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention.maps import Cache, Projection
from qkattn.attention.parameters import affine, homogeneous, project
from qkattn.attention.scores.score import Score
from qkattn.attention.spec import AttentionSpec, whole
from qkattn.errors import SpecError

_KEYS = Projection('w_k_RNH', 'b_k_NH', inner=Projection('w_down_DR', 'b_down_R'))
_QUERY_LATENT = Projection('w_q_down_DC', 'b_q_down_C')


class Latent(Score):
    """A[n] = W_Q[n] W_K[n]^T W_D^T: the keys of all heads are computed from one latent c = y W_D.

    `size` is R, 1 to D, by default D // 2; a query latent of query_size C, 1 to D, is optional.
    With rope_size G, even, every head has G more channels, which alone are rotated: one key for all
    heads, and queries of each. positions='rope' requires it and no other takes it: a rotation
    between W_Q and W_K would have to act on the latent. Matrices that act on a latent have std
    R^-1/2 or C^-1/2, its size in place of D.

    The cache holds c, R floats per token ('latent_BSR'), and the shared rotary key before rotation,
    G floats ('rope_BSG'). A layer takes the form with fewer multiplications: the keys of all heads,
    or the absorbed form, with the cache as its only key head and q W_K[n]^T as queries. QK-norm has
    no absorbed form: it divides content and rotary channels by one root mean square.

    With selectors for W_K and R = K H this is grouped `qk`. The norms on the latents of the source
    are left out, so that the form stays bilinear.
    """

    equation = 'W_Q[n] W_K[n]^T W_D^T'
    source = 'DeepSeek-AI 2024, arXiv 2405.04434, section 2.1'
    options = {
        'size': whole(1, 'd_model'),
        'query_size': whole(1, 'd_model'),
        'rope_size': whole(2),
    }
    shareable = {'latent': ('w_down_DR', 'b_down_R')}
    w_q_down_DC: nnx.Param | None = None

    @classmethod
    def check(cls, spec: AttentionSpec, *, rope_size: int | None = None, **sizes: Any) -> None:
        if spec.positions == 'rope' and rope_size is None:
            example = max(2, spec.head_size // 4 * 2)  # half a head, and even
            raise SpecError(
                'latent keys cannot be rotated themselves: positions=rope needs '
                f'latent(rope_size=G), an even number of extra channels, e.g. {example}'
            )
        if rope_size is not None and spec.positions != 'rope':
            raise SpecError(
                f'latent(rope_size={rope_size}) rotates channels, so it needs positions=rope, not '
                f'{spec.positions}; leave it out in cross-attention, which has no rope'
            )

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        key: jax.Array,
        size: int | None = None,
        query_size: int | None = None,
        rope_size: int | None = None,
    ):
        R = max(1, spec.d_model // 2) if size is None else size
        C = query_size
        G = rope_size
        self.w_down_DR, self.b_down_R = affine(spec, key, 'w_down_DR', R=R)
        self.w_k_RNH, self.b_k_NH = affine(spec, key, 'w_k_RNH', R=R)
        if C is None:
            self.w_q_DNH, self.b_q_NH = affine(spec, key, 'w_q_DNH')
        else:
            self.w_q_down_DC, self.b_q_down_C = affine(spec, key, 'w_q_down_DC', C=C)
            self.w_q_CNH, self.b_q_NH = affine(spec, key, 'w_q_CNH', C=C)
            self.equation = f'W_DQ {self.equation}'
        if G is not None:
            self.w_k_rope_DG, self.b_k_rope_G = affine(spec, key, 'w_k_rope_DG', G=G)
            if C is None:
                self.w_q_rope_DNG, self.b_q_rope_NG = affine(spec, key, 'w_q_rope_DNG', G=G)
            else:
                self.w_q_rope_CNG, self.b_q_rope_NG = affine(spec, key, 'w_q_rope_CNG', G=G, C=C)

        head_size = spec.head_size if G is None else spec.head_size + G
        self.scale = head_size**-0.5
        head = 'H' if G is None else '(H + G)'
        queries = f'D*N*{head}' if C is None else f'D*C + C*N*{head}'
        rotary_key = '' if G is None else ' + D*G'
        self.parameter_count = f'D*R + R*N*H + {queries}{rotary_key}'
        self.rope_size = G
        self.spec = spec

    def _query_maps(self) -> list[Projection]:
        """The map to the content channels and, with rope_size, the one to the rotary channels."""
        if self.w_q_down_DC is None:
            content = Projection('w_q_DNH', 'b_q_NH')
            rotary = Projection('w_q_rope_DNG', 'b_q_rope_NG')
        else:
            content = Projection('w_q_CNH', 'b_q_NH', inner=_QUERY_LATENT)
            rotary = Projection('w_q_rope_CNG', 'b_q_rope_NG', inner=_QUERY_LATENT)
        return [content] if self.rope_size is None else [content, rotary]

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        parts = [query_map(self, x_BTD) for query_map in self._query_maps()]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)

    def cached(self, y_BSD: jax.Array) -> Cache:
        cache = {'latent_BSR': project(y_BSD, self.w_down_DR, self.b_down_R)}
        if self.rope_size is not None:
            cache['rope_BSG'] = project(y_BSD, self.w_k_rope_DG, self.b_k_rope_G)
        return cache

    def keys(self, cache: Cache) -> jax.Array:
        k_BSNH = project(cache['latent_BSR'], self.w_k_RNH, self.b_k_NH)
        if self.rope_size is None:
            return k_BSNH
        rope_BS1G = cache['rope_BSG'][:, :, None, :]
        rope_BSNG = jnp.broadcast_to(rope_BS1G, (*k_BSNH.shape[:3], self.rope_size))
        return jnp.concatenate([k_BSNH, rope_BSNG], axis=-1)

    def queries_and_keys(self, x_BTD: jax.Array, cache: Cache) -> tuple[jax.Array, jax.Array]:
        cheaper = absorbing_is_cheaper(x_BTD.shape[1], cache['latent_BSR'], self.w_k_RNH)
        # Absorbed logits lack b_K, which a softmax alone ignores.
        if not cheaper or self.spec.biases or self.spec.qk_norm:
            return super().queries_and_keys(x_BTD, cache)
        H = self.spec.head_size
        q_BTNH = self.queries(x_BTD)  # content channels, then rotary ones
        q_BTNR = jnp.einsum('BTNH,RNH->BTNR', q_BTNH[..., :H], self.w_k_RNH[...])
        parts = [cache['latent_BSR']]
        if self.rope_size is not None:
            parts.append(cache['rope_BSG'])
        k_BSR = jnp.concatenate(parts, axis=-1)
        q_BTNR = jnp.concatenate([q_BTNR, q_BTNH[..., H:]], axis=-1)
        return q_BTNR, k_BSR[:, :, None, :]

    def matrix(self) -> jax.Array:
        """A_NDD, with the rotary channels at distance 0."""
        query_matrices = [query_map.matrix(self) for query_map in self._query_maps()]
        A_NDE = jnp.einsum('DNH,ENH->NDE', query_matrices[0], _KEYS.matrix(self))
        if self.rope_size is None:
            return A_NDE
        k_EG = homogeneous(self.w_k_rope_DG, self.b_k_rope_G)
        return A_NDE + jnp.einsum('DNG,EG->NDE', query_matrices[1], k_EG)


def absorbing_is_cheaper(num_queries: int, latent_BSR: jax.Array, w_RNH: jax.Array) -> bool:
    """Whether the absorbed form has fewer multiplications than writing out the keys (or values).

    Absorbed, T queries (or T averages) are multiplied with w and with S latents: N R (H + S) T.
    Written out, S keys (or values) are computed from their latents and T queries are multiplied
    with them: N H (R + T) S. In decoding T is 1.
    """
    T = num_queries
    S, R = latent_BSR.shape[1:]
    H = w_RNH.shape[-1]
    return R * (H + S) * T < H * (R + T) * S
