"""Models: the decoder, the encoder and the encoder-decoder, and what they have in common."""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention import Attention, Mask
from qkattn.attention.parameters import (
    initialization,
    key_or_from_rngs,
    product,
    shapes_only,
    std_of,
    weight,
)
from qkattn.attention.rope import sinusoids
from qkattn.config import ModelConfig
from qkattn.config.setting import check_section
from qkattn.errors import ConfigError
from qkattn.model.blocks import Block, CrossBlock, Norm, drop, module_key, split_key
from qkattn.model.stack import apply_placement, layer_of, run_blocks, stack_blocks


class Stream(nnx.Module):
    """Embedding, positions, blocks and final norm: from tokens to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        key: jax.Array,
        block: type[Block] = Block,
        own_embedding: bool = True,
    ):
        """Initializes the parameters.

        `block` is the class of the layers. If `own_embedding` is False, there is no embedding
        matrix, and `embed` takes one as an argument.
        """
        D = config.d_model
        V = config.vocab_size
        T = config.context
        std = D**-0.5
        w_embedding_VD = None
        w_position_TD = None
        with initialization(config.init, config.init_embedding):
            if own_embedding:
                w_embedding_VD = weight(key, 'w_embedding_VD', (V, D), std)
            if config.positions == 'learned':
                w_position_TD = weight(key, 'w_position_TD', (T, D), std)
        self.config = config
        self.w_embedding_VD = w_embedding_VD
        self.w_position_TD = w_position_TD
        self.blocks = stack_blocks(config, key=key, kind=block)
        self.final_norm = Norm(config) if config.norm_position == 'pre' else None

    def embed(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        *,
        w_embedding_VD: jax.Array | None = None,
    ) -> jax.Array:
        """Returns x_BTD, the token embeddings plus learned or sinusoidal position embeddings.

        Args:
          tokens_BT: the ids of the tokens.
          positions_BT: their positions; by default they count from 0 in every row.
          w_embedding_VD: the embedding matrix, by default the Stream's own.
        """
        config = self.config
        if w_embedding_VD is None:
            w_embedding_VD = self.w_embedding_VD[...]
        x_BTD = apply_placement(w_embedding_VD, 'VD')[tokens_BT]
        _, T, D = x_BTD.shape

        if config.positions == 'learned':
            w_position_TD = apply_placement(self.w_position_TD[...], 'TD')
            if positions_BT is None:
                x_BTD = x_BTD + w_position_TD[:T]
            else:
                x_BTD = x_BTD + w_position_TD[positions_BT]
        elif config.positions == 'sinusoidal':
            # [B, T], or [T] if they are the same in every row.
            positions = jnp.arange(T) if positions_BT is None else positions_BT
            # Sinusoids have unit variance, and are scaled to the initial std of token embeddings.
            std = std_of(config.init, D**-0.5) * config.init_embedding
            x_BTD = x_BTD + (sinusoids(positions, D) * std).astype(x_BTD.dtype)

        if config.scale_embeddings:
            x_BTD = x_BTD * D**0.5
        return x_BTD

    def run(
        self, x_BTD: jax.Array, mask: Mask, dropout_key: jax.Array | None = None, **shared: Any
    ) -> jax.Array:
        """Passes the embedded tokens x through all blocks and the final norm.

        Every block gets the arguments in `shared`, such as the encoder's output.
        """
        embedding_key, blocks_key = split_key(dropout_key, 2)
        x_BTD = drop(x_BTD, self.config.dropout, embedding_key)
        x_BTD = run_blocks(
            self.blocks, x_BTD, mask, config=self.config, dropout_key=blocks_key, **shared
        )
        return self.normed(x_BTD)

    def normed(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the final norm of x; with post-norm there is none, and it returns x."""
        if self.final_norm is None:
            return x_BTD
        return self.final_norm(x_BTD)

    def layers(self, site: str = 'attention') -> list[Attention]:
        """Returns copies of the attention layers, first block to last.

        In a pre-norm model, the input of a layer is the normalized stream. An encoder-decoder
        returns its decoder layers; `encoder.layers()` returns its encoder layers.

        Args:
          site: the attribute of a block, 'attention' or 'cross_attention'.

        Raises:
          ValueError: the blocks have no attention layer at `site`.
        """
        blocks = [layer_of(self.blocks, index) for index in range(self.config.num_layers)]
        attributes = vars(blocks[0])
        sites = [name for name, module in attributes.items() if isinstance(module, Attention)]
        if site not in sites:
            raise ValueError(f'{site!r} names no layers; known: {", ".join(sites)}')
        return [getattr(block, site) for block in blocks]

    def check_length(self, tokens_BT: jax.Array, field: str = 'model.context') -> None:
        """Raises ValueError if a row has more tokens than config.context."""
        if tokens_BT.shape[1] > self.config.context:
            raise ValueError(
                f'{tokens_BT.shape[1]} tokens do not fit into {field}={self.config.context}'
            )


class Transformer(Stream):
    """A Stream and an output matrix, which may be the transposed embedding."""

    kind: ClassVar[str]  # the value of `ModelConfig.kind` that the class requires

    def __init__(
        self,
        config: ModelConfig,
        *,
        key: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
        block: type[Block] = Block,
    ):
        """Initializes the parameters with `key`, or with a key that is drawn from `rngs`.

        `block` is the class of the layers. Raises ConfigError for a setting that is out of its
        bounds, or for a kind of model that is not the kind of the class.
        """
        check_section('model.', config)
        if config.kind != self.kind:
            raise ConfigError(
                f'model.kind={config.kind!r} must be {self.kind!r} in {type(self).__name__}; '
                'qkattn.model.build takes any'
            )
        key = key_or_from_rngs(key, rngs)
        super().__init__(config, key=key, block=block)
        D = config.d_model
        V = config.vocab_size
        if config.tied_embeddings:
            self.w_output_DV = None
        else:
            with initialization(config.init, config.init_embedding):
                self.w_output_DV = weight(key, 'w_output_DV', (D, V), D**-0.5)

    def stream(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Returns the normed stream x_BTD after the last block, the argument of `logits`."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Returns float32 logits_BTV; the arguments are those of `stream`."""
        return self.logits(self.stream(*args, **kwargs))

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Returns float32 logits_BTV of the normed stream."""
        tied = self.w_output_DV is None
        w_output_DV = self.w_embedding_VD[...].T if tied else self.w_output_DV
        dtype = jnp.promote_types(x_BTD.dtype, jnp.float32)
        logits_BTV = product(apply_placement(x_BTD, 'BTD'), w_output_DV, dtype=dtype)
        return apply_placement(logits_BTV, 'BTV')


class Decoder(Transformer):
    """Causal transformer (Radford et al. 2019): logits of the next token at every position."""

    kind = 'decoder'
    causal: ClassVar[bool] = True

    def stream(
        self,
        tokens_BT: jax.Array,
        *,
        valid_BT: jax.Array | None = None,
        segments_BT: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the residual stream x_BTD after the last block, normalized, for `logits`.

        Args:
          tokens_BT: the ids of the tokens.
          valid_BT: False on padding, to which no token attends.
          segments_BT: the number of each token's document in its row, as in [1, 1, 2, 2, 2, 0],
            where 0 is padding. A token attends to its own document only, and its position counts
            from the start of the document. By default a row is one document.
          dropout_key: the key of all dropout. None is no dropout.

        Raises ValueError if a row has more tokens than config.context.
        """
        self.check_length(tokens_BT)
        positions_BT = None if segments_BT is None else positions_of(segments_BT)
        mask = Mask(
            causal=self.causal,
            valid_BS=valid_BT,
            window=self.config.window,
            segments_BT=segments_BT,
            segments_BS=segments_BT,
        )
        return self.run(self.embed(tokens_BT, positions_BT), mask, dropout_key)


class Encoder(Decoder):
    """Bidirectional transformer (Devlin et al. 2019): logits of the token at every position.

    The head is the output matrix alone, without BERT's dense layer before it.
    """

    kind = 'encoder'
    causal = False


class EncoderDecoder(Transformer):
    """Encodes a source, then predicts each target token from the source and the tokens before it.

    Vaswani et al. 2017. A row may hold several sentence pairs, which segment numbers tell apart. A
    token attends to its own pair only, and its position counts from the beginning of the pair.
    """

    kind = 'encoder_decoder'

    def __init__(
        self, config: ModelConfig, *, key: jax.Array | None = None, rngs: nnx.Rngs | None = None
    ):
        key = key_or_from_rngs(key, rngs)
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
        """Returns the residual stream x_BTD of the targets after the last block, normalized.

        The logits that `logits` computes from it predict the next target token.

        Args:
          tokens_BT: the ids of the target tokens.
          source_BS: the ids of the source tokens.
          source_segments_BS: the number of each source token's pair in its row, as in
            [1, 1, 2, 2, 2, 0], where 0 is padding. By default a row is one pair.
          segments_BT: the number of each target token's pair, in the same way.
          dropout_key: the key of all dropout. None is no dropout.

        Raises ValueError if a row has more tokens than config.context, or more source tokens than
        config.encoder.context.
        """
        self.check_length(tokens_BT)
        encoder_key, decoder_key = split_key(dropout_key, 2)
        if source_segments_BS is None:
            source_segments_BS = jnp.ones_like(source_BS)
        if segments_BT is None:
            segments_BT = jnp.ones_like(tokens_BT)
        y_BSD = self.encode(source_BS, source_segments_BS, dropout_key=encoder_key)
        x_BTD = self.embed(tokens_BT, positions_of(segments_BT))
        # A target token attends to the targets up to itself, and to all source tokens of its pair.
        window = self.config.window
        mask = Mask(causal=True, window=window, segments_BT=segments_BT, segments_BS=segments_BT)
        cross_mask = Mask(segments_BT=segments_BT, segments_BS=source_segments_BS)
        return self.run(x_BTD, mask, decoder_key, y_BSD=y_BSD, cross_mask=cross_mask)

    def encode(
        self,
        source_BS: jax.Array,
        source_segments_BS: jax.Array | None = None,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the encoder's output y_BSD. The arguments are those of `stream`."""
        self.encoder.check_length(source_BS, 'model.source_context')
        segments_BS = source_segments_BS
        if segments_BS is None:
            segments_BS = jnp.ones_like(source_BS)
        # With shared embeddings, the encoder has no embedding matrix of its own.
        shared_VD = self.w_embedding_VD[...] if self.config.shared_embeddings else None
        x_BSD = self.encoder.embed(source_BS, positions_of(segments_BS), w_embedding_VD=shared_VD)
        window = self.config.window
        mask = Mask(window=window, segments_BT=segments_BS, segments_BS=segments_BS)
        return self.encoder.run(x_BSD, mask, dropout_key)


def positions_of(segments_BT: jax.Array) -> jax.Array:
    """Returns each token's position in its own segment: [1, 1, 1, 2, 2] -> [0, 1, 2, 0, 1]."""
    t_BT = jnp.broadcast_to(jnp.arange(segments_BT.shape[1]), segments_BT.shape)
    begins_BT = jnp.diff(segments_BT, axis=1, prepend=-1) != 0
    # The greatest beginning so far is the index of the first token of the token's segment.
    first_BT = jax.lax.cummax(jnp.where(begins_BT, t_BT, 0), axis=1)
    return t_BT - first_BT


KINDS: dict[str, type[Transformer]] = {
    'decoder': Decoder,
    'encoder': Encoder,
    'encoder_decoder': EncoderDecoder,
}


def build(
    config: ModelConfig, *, key: jax.Array | None = None, rngs: nnx.Rngs | None = None
) -> Transformer:
    """Initializes a model of config.kind, with parameters drawn with `key` or `rngs`.

    Raises ConfigError for a setting that is out of its bounds.
    """
    # Every class checks all settings, so Decoder raises the error about an unknown kind.
    transformer = KINDS[config.kind] if config.kind in list(KINDS) else Decoder
    return transformer(config, key=key, rngs=rngs)


@functools.lru_cache(maxsize=4096)
def abstract_model(config: ModelConfig) -> Transformer:
    """Returns the model with shapes in place of arrays, without allocating any."""
    with shapes_only():
        return nnx.eval_shape(lambda: build(config, key=jax.random.key(0)))


def with_params(config: ModelConfig, params: dict) -> Transformer:
    """Returns the model with these parameters."""
    return nnx.merge(nnx.graphdef(abstract_model(config)), params)


def inputs_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arrays of a batch that a model takes: all except targets and loss weights."""
    of_loss = ('targets_BT', 'loss_weights_BT')
    return {name: array for name, array in batch.items() if name not in of_loss}


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Returns -log softmax(logits)[target] in nats, [B, T].

    The target's logit is selected by a mask, not by index as in optax. The gradient of an index is
    a scatter, for which XLA copies all logits to every device if V is split (fsdp).
    """
    is_target_BTV = targets_BT[..., None] == jnp.arange(logits_BTV.shape[-1])
    target_logits_BT = jnp.where(is_target_BTV, logits_BTV, 0).sum(-1)
    return jax.nn.logsumexp(logits_BTV, -1) - target_logits_BT


def loss(model: Transformer, batch: Mapping[str, Any]) -> jax.Array:
    """Returns the cross-entropy of a batch in nats per target, averaged with the loss weights."""
    nats_BT = cross_entropy(model(**inputs_of(batch)), batch['targets_BT'])
    return jnp.average(nats_BT, weights=batch['loss_weights_BT'])
