"""The encoder-decoder for translation."""

import jax
import jax.numpy as jnp

from qkattn.attention import visible
from qkattn.config import ModelConfig
from qkattn.model.blocks import CrossBlock, key_of_part, split_key
from qkattn.model.transformer import Stream, Transformer


class EncoderDecoder(Transformer):
    """Encodes a source, then predicts each target token from it and from those before it.

    Vaswani et al. 2017. Source and target rows may hold several sentence pairs, numbered by
    segments; a position reads its own pair only and counts positions from its pair's beginning.

    Weights: a Transformer's, whose blocks have a second attention (with its norm) for the encoder's
    output, and the encoder's Stream, without an embedding where the two are shared.
    """

    def __init__(self, config: ModelConfig, *, key: jax.Array):
        super().__init__(config, key=key, block=CrossBlock)
        self.encoder = Stream(
            config.encoder,
            key=key_of_part(key, 'encoder'),
            own_embedding=not config.shared_embeddings,
        )

    def __call__(
        self,
        tokens_BT: jax.Array,
        *,
        source_BS: jax.Array,
        source_segments_BS: jax.Array | None = None,
        segments_BT: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Float32 logits_BTV of the next target token.

        Args:
          tokens_BT: target tokens, T <= config.context.
          source_BS: source tokens, S <= config.encoder.context.
          source_segments_BS, segments_BT: the pair that a token belongs to, from 1; 0 is padding.
            The pairs of a row follow one another without gaps. None is one pair a row.
          dropout_key: random key; without it dropout is off.

        Raises:
          ValueError: more positions than there is room for.
        """
        self.require_room(tokens_BT)
        encoder_key, decoder_key = split_key(dropout_key, 2)
        source_segments_BS = _one_pair(source_BS, source_segments_BS)
        segments_BT = _one_pair(tokens_BT, segments_BT)
        y_BSD = self.encode(source_BS, source_segments_BS, dropout_key=encoder_key)
        T = tokens_BT.shape[1]
        mask_BTS = visible(T, T, causal=True, window=self.config.window)
        return self.logits(
            self.run(
                self.embed(tokens_BT, positions_of(segments_BT)),
                mask_BTS & same_pair(segments_BT, segments_BT),
                decoder_key,
                y_BSD=y_BSD,
                cross_mask_BTS=same_pair(segments_BT, source_segments_BS),
            )
        )

    def encode(
        self,
        source_BS: jax.Array,
        source_segments_BS: jax.Array | None = None,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The encoder's output y_BSD; see __call__."""
        self.encoder.require_room(source_BS, 'model.source_context')
        segments_BS = _one_pair(source_BS, source_segments_BS)
        S = source_BS.shape[1]
        shared_VD = self.w_embedding_VD[...] if self.config.shared_embeddings else None
        x_BSD = self.encoder.embed(source_BS, positions_of(segments_BS), w_embedding_VD=shared_VD)
        mask_BSS = visible(S, S, causal=False, window=self.config.window)
        return self.encoder.run(x_BSD, mask_BSS & same_pair(segments_BS, segments_BS), dropout_key)


def same_pair(segments_BT: jax.Array, segments_BS: jax.Array) -> jax.Array:
    """mask_BTS: True where query and key belong to the same pair; padding belongs to none."""
    same_BTS = segments_BT[:, :, None] == segments_BS[:, None, :]
    return same_BTS & (segments_BS > 0)[:, None, :]


def positions_of(segments_BT: jax.Array) -> jax.Array:
    """Each token's position within its own segment."""
    t_BT = jnp.broadcast_to(jnp.arange(segments_BT.shape[1]), segments_BT.shape)
    begins_BT = jnp.diff(segments_BT, axis=1, prepend=-1) != 0
    return t_BT - jax.lax.cummax(jnp.where(begins_BT, t_BT, 0), axis=1)


def _one_pair(tokens_BT: jax.Array, segments_BT: jax.Array | None) -> jax.Array:
    return jnp.ones_like(tokens_BT) if segments_BT is None else segments_BT
