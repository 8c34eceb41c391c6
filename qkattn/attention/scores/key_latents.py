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

    The cache has R floats per token, the latent. The logits are computed in one of two forms:

    - explicit: the queries q with the keys c W_K[n] of each head;
    - absorbed: the queries q W_K[n]^T with the latent c as a single key head.

    The form with fewer multiplications is chosen. QK-norm and biases require the explicit form.

    Latent keys cannot be rotated. So positions='rope' requires `rope_size`, which adds G rotated
    channels to every head. All heads share the key in these channels. The cache has G more floats
    per token, this key before rotation.

    The std of a matrix that acts on a latent of size R is R^-1/2. The source also normalizes the
    latents. This Score does not, and so stays bilinear.

    Args:
        size: R, the size of the latent, from 1 to D; by default D // 2.
        query_size: C, the size of a second latent from which the queries are computed, from 1 to D.
            By default, queries are computed from the stream.
        rope_size: G, the even number of rotated channels; only for positions='rope'.
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
    def check(cls, spec: AttentionSpec, *, rope_size: int | None = None, **_: Any) -> None:
        """Raises SpecError if only one of positions='rope' and `rope_size` is given."""
        has_rope = spec.positions == 'rope'
        if has_rope and rope_size is None:
            even_half = spec.head_size // 4 * 2  # H / 2, rounded down to an even number
            example = max(2, even_half)
            raise SpecError(
                'latent keys cannot be rotated themselves: positions=rope needs '
                f'latent(rope_size=G), an even number of extra channels, e.g. {example}'
            )
        if rope_size is not None and not has_rope:
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

        # The latent of the keys, and the keys.
        self.w_down_DR, self.b_down_R = affine(spec, key, 'w_down_DR', R=R)
        self.w_k_RNH, self.b_k_NH = affine(spec, key, 'w_k_RNH', R=R)

        # The queries, computed from the stream, or from a latent of their own.
        if C is None:
            self.w_q_DNH, self.b_q_NH = affine(spec, key, 'w_q_DNH')
        else:
            self.w_q_down_DC, self.b_q_down_C = affine(spec, key, 'w_q_down_DC', C=C)
            self.w_q_CNH, self.b_q_NH = affine(spec, key, 'w_q_CNH', C=C)
            self.equation = f'W_DQ {self.equation}'

        # The rotated channels of keys and queries.
        if G is not None:
            self.w_k_rope_DG, self.b_k_rope_G = affine(spec, key, 'w_k_rope_DG', G=G)
            if C is None:
                self.w_q_rope_DNG, self.b_q_rope_NG = affine(spec, key, 'w_q_rope_DNG', G=G)
            else:
                self.w_q_rope_CNG, self.b_q_rope_NG = affine(spec, key, 'w_q_rope_CNG', G=G, C=C)

        # The channels of a query, and the number of parameters as text.
        if G is None:
            num_channels = spec.head_size
            channels_text = 'H'
            rotary_key_count = ''
        else:
            num_channels = spec.head_size + G
            channels_text = '(H + G)'
            rotary_key_count = ' + D*G'
        query_count = f'D*N*{channels_text}' if C is None else f'D*C + C*N*{channels_text}'
        self.parameter_count = f'D*R + R*N*H + {query_count}{rotary_key_count}'
        self.scale = num_channels**-0.5
        self.rope_size = G
        self.spec = spec

    def _query_maps(self) -> list[Projection]:
        """Returns the maps to the queries: [content], or [content, rotary] with rope_size."""
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
        rotary_BS1G = cache['rope_BSG'][:, :, None, :]
        rotary_BSNG = jnp.broadcast_to(rotary_BS1G, (*k_BSNH.shape[:3], self.rope_size))
        return jnp.concatenate([k_BSNH, rotary_BSNG], axis=-1)

    def queries_and_keys(self, x_BTD: jax.Array, cache: Cache) -> tuple[jax.Array, jax.Array]:
        """Returns q and k in the explicit or the absorbed form, whichever is cheaper.

        The forms have the same logits, q (c W_K)^T = (q W_K^T) c^T, where c is a latent. The
        absorbed form has one key head, [B, S, 1, R].
        """
        T = x_BTD.shape[1]
        is_absorbed_cheaper = absorbing_is_cheaper(T, cache['latent_BSR'], self.w_k_RNH)
        # The absorbed form has no place for the bias of keys, or for their norm.
        can_absorb = not self.spec.biases and not self.spec.qk_norm
        if not can_absorb or not is_absorbed_cheaper:
            return super().queries_and_keys(x_BTD, cache)  # the explicit form

        # The first H channels of a query are for the content. The last G channels are rotary.
        H = self.spec.head_size
        q_BTNX = self.queries(x_BTD)  # X = H + G
        content_BTNH = q_BTNX[..., :H]
        rotary_BTNG = q_BTNX[..., H:]
        # q W_K^T
        absorbed_BTNR = jnp.einsum('BTNH,RNH->BTNR', content_BTNH, self.w_k_RNH[...])
        q_BTNY = jnp.concatenate([absorbed_BTNR, rotary_BTNG], axis=-1)  # Y = R + G

        key_parts = [cache['latent_BSR']]
        if self.rope_size is not None:
            key_parts.append(cache['rope_BSG'])
        k_BSY = jnp.concatenate(key_parts, axis=-1)
        k_BS1Y = k_BSY[:, :, None, :]
        return q_BTNY, k_BS1Y

    def matrix(self) -> jax.Array:
        """Returns A_NDD for tokens at the same position, where the rotation has no effect."""
        query_matrices = [query_map.matrix(self) for query_map in self._query_maps()]
        content_DNH = query_matrices[0]
        A_NDE = jnp.einsum('DNH,ENH->NDE', content_DNH, _KEYS.matrix(self))
        if self.rope_size is None:
            return A_NDE
        # Add the logits of the rotary channels, whose keys all heads share.
        rotary_DNG = query_matrices[1]
        k_EG = homogeneous(self.w_k_rope_DG, self.b_k_rope_G)
        return A_NDE + jnp.einsum('DNG,EG->NDE', rotary_DNG, k_EG)


def absorbing_is_cheaper(num_queries: int, latent_BSR: jax.Array, w_RNH: jax.Array) -> bool:
    """Returns whether the absorbed form needs fewer multiplications than the explicit form.

    The explicit form computes keys or values c W from the latents c. The absorbed form applies W on
    the side of the queries. It is cheaper in decoding, where there is one query.

    Args:
        num_queries: T, the number of queries.
        latent_BSR: The latents, of which the shape is read.
        w_RNH: W, of which the shape is read.
    """
    T = num_queries
    S, R = latent_BSR.shape[1:]
    H = w_RNH.shape[-1]
    # Multiplications per head: products with W, plus products of queries and keys.
    num_explicit = S * R * H + T * S * H
    num_absorbed = T * R * H + T * S * R
    return num_absorbed < num_explicit
