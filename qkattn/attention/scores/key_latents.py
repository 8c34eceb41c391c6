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

    There are two ways to compute the logits, and a layer takes the one with fewer multiplications.
    One computes the keys of all heads from the latents. The other, the absorbed form, takes the
    latents as a single key head, and q W_K[n]^T as queries. QK-norm rules the absorbed form out:
    it divides all channels of a key by one root mean square.

    A rotation between W_Q and W_K would have to act on the latent. So positions='rope' requires
    `rope_size`: every head gets G more channels, and only these are rotated. Each head has its own
    queries there, and all heads share one key. Other positions do not allow `rope_size`.

    The cache holds the latent, R floats per token ('latent_BSR'), and the shared rotary key before
    its rotation, G floats ('rope_BSG').

    The std of a matrix that acts on a latent is R^-1/2 or C^-1/2, for the latent's size in place of
    D. If R = K H and W_K selects heads, this is `qk` with K key heads. The source also normalizes
    the latents; this Score does not, so that it stays bilinear.

    Args:
      size: R, the size of the latent, from 1 to D; by default D // 2.
      query_size: C, the size of a latent for the queries, from 1 to D; None is no such latent.
      rope_size: G, the even number of rotated channels; None is no such channels.
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
        """Raises SpecError unless positions=rope and `rope_size` come together."""
        # rope would rotate the keys of heads, which do not exist in the absorbed form. So it needs
        # extra channels, which are there only for it.
        if spec.positions == 'rope' and rope_size is None:
            example = max(2, spec.head_size // 4 * 2)  # about H / 2, and even
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

        # Keys: from the stream to the latent, and from the latent to the heads.
        self.w_down_DR, self.b_down_R = affine(spec, key, 'w_down_DR', R=R)
        self.w_k_RNH, self.b_k_NH = affine(spec, key, 'w_k_RNH', R=R)

        # Queries: from the stream, or through a latent of their own.
        if C is None:
            self.w_q_DNH, self.b_q_NH = affine(spec, key, 'w_q_DNH')
        else:
            self.w_q_down_DC, self.b_q_down_C = affine(spec, key, 'w_q_down_DC', C=C)
            self.w_q_CNH, self.b_q_NH = affine(spec, key, 'w_q_CNH', C=C)
            self.equation = f'W_DQ {self.equation}'

        # Rotated channels: one key for all heads, and queries of each head.
        if G is not None:
            self.w_k_rope_DG, self.b_k_rope_G = affine(spec, key, 'w_k_rope_DG', G=G)
            if C is None:
                self.w_q_rope_DNG, self.b_q_rope_NG = affine(spec, key, 'w_q_rope_DNG', G=G)
            else:
                self.w_q_rope_CNG, self.b_q_rope_NG = affine(spec, key, 'w_q_rope_CNG', G=G, C=C)

        # The rotated channels count for the size of a head.
        if G is None:
            channels = spec.head_size
            channels_text = 'H'
            rotary_key_count = ''
        else:
            channels = spec.head_size + G
            channels_text = '(H + G)'
            rotary_key_count = ' + D*G'
        query_count = f'D*N*{channels_text}' if C is None else f'D*C + C*N*{channels_text}'
        self.parameter_count = f'D*R + R*N*H + {query_count}{rotary_key_count}'
        self.scale = channels**-0.5
        self.rope_size = G
        self.spec = spec

    def _query_maps(self) -> list[Projection]:
        """Returns the maps to the content channels and, with rope_size, to the rotary channels."""
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
        """Returns the explicit or the absorbed form, whichever needs fewer multiplications.

        For a latent c, q (c W_K)^T = (q W_K^T) c^T. The explicit form has the queries q and the
        keys c W_K, the absorbed form the queries q W_K^T and the single key head c. Rotary channels
        are appended to either.
        """
        T = x_BTD.shape[1]
        is_cheaper = absorbing_is_cheaper(T, cache['latent_BSR'], self.w_k_RNH)
        # The absorbed form would drop the bias b_K, which only a softmax ignores. QK-norm needs
        # the explicit keys.
        is_possible = not self.spec.biases and not self.spec.qk_norm
        if not is_possible or not is_cheaper:
            return super().queries_and_keys(x_BTD, cache)

        # The first H channels of a query are for the content, the last G are rotary. G may be 0.
        H = self.spec.head_size
        q_BTNH = self.queries(x_BTD)
        content_BTNH = q_BTNH[..., :H]
        rotary_BTNG = q_BTNH[..., H:]
        absorbed_BTNR = jnp.einsum('BTNH,RNH->BTNR', content_BTNH, self.w_k_RNH[...])
        q_BTNX = jnp.concatenate([absorbed_BTNR, rotary_BTNG], axis=-1)  # X = R + G

        key_parts = [cache['latent_BSR']]
        if self.rope_size is not None:
            key_parts.append(cache['rope_BSG'])
        k_BSX = jnp.concatenate(key_parts, axis=-1)
        k_BS1X = k_BSX[:, :, None, :]
        return q_BTNX, k_BS1X

    def matrix(self) -> jax.Array:
        """Returns A_NDD for tokens at the same position, where the rotation has no effect."""
        query_matrices = [query_map.matrix(self) for query_map in self._query_maps()]
        A_NDE = jnp.einsum('DNH,ENH->NDE', query_matrices[0], _KEYS.matrix(self))
        if self.rope_size is None:
            return A_NDE
        k_EG = homogeneous(self.w_k_rope_DG, self.b_k_rope_G)
        return A_NDE + jnp.einsum('DNG,EG->NDE', query_matrices[1], k_EG)


def absorbing_is_cheaper(num_queries: int, latent_BSR: jax.Array, w_RNH: jax.Array) -> bool:
    """Returns whether the absorbed form needs fewer multiplications than the explicit one.

    The explicit form computes the keys (or values) c W from the S latents c, and then their
    products with T queries. The absorbed form multiplies the queries by W, and then multiplies
    the results with the latents. Decoding has T = 1, and absorbs: with S = 100, R = 16 and H = 8,
    it takes 1,728 multiplications in place of 13,600. Training has T = S, and as a rule does not.
    """
    T = num_queries
    S, R = latent_BSR.shape[1:]
    H = w_RNH.shape[-1]
    # Multiplications in each head: first those with W, then those of queries and keys.
    absorbed = T * (R * H + R * S)
    explicit = S * (R * H + T * H)
    return absorbed < explicit
