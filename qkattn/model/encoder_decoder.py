"""The encoder-decoder for translation."""

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention import Attention, Mask
from qkattn.attention.parameters import one_key
from qkattn.config import ModelConfig
from qkattn.model.blocks import Block, Norm, module_key, split_key
from qkattn.model.sites import attention_spec
from qkattn.model.transformer import Stream, Transformer


class CrossBlock(Block):
    """A Block that also cross-attends to the encoder's output, after its self-attention."""

    def __init__(self, config: ModelConfig, *, key: jax.Array):
        super().__init__(config, key=key)
        self.cross_norm = Norm(config, gain=config.attention_gain)
        self.cross_attention = Attention(
            attention_spec(config.cross), key=module_key(key, 'cross_attention')
        )

    def __call__(
        self,
        x_BTD: jax.Array,
        mask: Mask,
        dropout_key: jax.Array | None = None,
        *,
        y_BSD: jax.Array | None = None,
        cross_mask: Mask | None = None,
    ) -> jax.Array:
        """As Block; y_BSD is the encoder's output."""
        attention_key, cross_key, *keys = split_key(dropout_key, 5)
        rate = self.config.probability_dropout

        def attend(z_BTD: jax.Array) -> jax.Array:
            return self.attention(z_BTD, mask, dropout=rate, dropout_key=attention_key)

        def cross_attend(z_BTD: jax.Array) -> jax.Array:
            return self.cross_attention(
                z_BTD, cross_mask, y_BSD=y_BSD, dropout=rate, dropout_key=cross_key
            )

        return self.around([attend, cross_attend], x_BTD, keys)

    def attention_norms(self) -> list[Norm]:
        return [self.attention_norm, self.cross_norm]


class EncoderDecoder(Transformer):
    """Encodes a source, then predicts each target token from the source and the tokens before it.

    Vaswani et al. 2017. Source and target rows may hold several sentence pairs, numbered by
    segments; a token attends to its own pair only, and its position is counted from the beginning
    of the pair.

    Parameters: a Transformer's, with CrossBlocks, and the encoder's Stream, which has no embedding
    of its own with config.shared_embeddings.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        key: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        key = one_key(key, rngs)
        super().__init__(config, key=key, block=CrossBlock)
        self.encoder = Stream(
            config.encoder,
            key=module_key(key, 'encoder'),
            own_embedding=not config.shared_embeddings,
        )

    def stream(
        self,
        tokens_BT: jax.Array,
        *,
        source_BS: jax.Array,
        source_segments_BS: jax.Array | None = None,
        segments_BT: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The normed stream x_BTD of the targets after the last block; its logits are those of the
        next target token.

        Args:
          tokens_BT: target tokens, T <= config.context.
          source_BS: source tokens, S <= config.encoder.context.
          source_segments_BS, segments_BT: the pair that a token belongs to, from 1; 0 is padding.
            The pairs of a row follow one another without gaps. None is one pair a row.
          dropout_key: random key; without it dropout is off.

        Raises:
          ValueError: more tokens than config.context or config.encoder.context.
        """
        self.check_length(tokens_BT)
        encoder_key, decoder_key = split_key(dropout_key, 2)
        source_segments_BS = _one_pair(source_BS, source_segments_BS)
        segments_BT = _one_pair(tokens_BT, segments_BT)
        y_BSD = self.encode(source_BS, source_segments_BS, dropout_key=encoder_key)
        window = self.config.window
        return self.run(
            self.embed(tokens_BT, positions_of(segments_BT)),
            Mask(causal=True, window=window, segments_BT=segments_BT, segments_BS=segments_BT),
            decoder_key,
            y_BSD=y_BSD,
            cross_mask=Mask(segments_BT=segments_BT, segments_BS=source_segments_BS),
        )

    def encode(
        self,
        source_BS: jax.Array,
        source_segments_BS: jax.Array | None = None,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The encoder's output y_BSD; see `stream`."""
        self.encoder.check_length(source_BS, 'model.source_context')
        segments_BS = _one_pair(source_BS, source_segments_BS)
        shared_VD = self.w_embedding_VD[...] if self.config.shared_embeddings else None
        x_BSD = self.encoder.embed(source_BS, positions_of(segments_BS), w_embedding_VD=shared_VD)
        window = self.config.window
        mask = Mask(window=window, segments_BT=segments_BS, segments_BS=segments_BS)
        return self.encoder.run(x_BSD, mask, dropout_key)


def positions_of(segments_BT: jax.Array) -> jax.Array:
    """Each token's position within its own segment."""
    t_BT = jnp.broadcast_to(jnp.arange(segments_BT.shape[1]), segments_BT.shape)
    begins_BT = jnp.diff(segments_BT, axis=1, prepend=-1) != 0
    return t_BT - jax.lax.cummax(jnp.where(begins_BT, t_BT, 0), axis=1)


def _one_pair(tokens_BT: jax.Array, segments_BT: jax.Array | None) -> jax.Array:
    return jnp.ones_like(tokens_BT) if segments_BT is None else segments_BT
