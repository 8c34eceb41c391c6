"""Models: decoder, encoder and encoder-decoder."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention import Attention, Mask
from qkattn.attention.kernels.choice import LIBRARIES
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
    """The part of a transformer from token ids to the residual stream, without the logits."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        key: jax.Array,
        block: type[Block] = Block,
        own_embedding: bool = True,
    ):
        """Initializes the parameters.

        Args:
            config: The settings of the model.
            key: The random key.
            block: The class of the layers.
            own_embedding: Whether to have an embedding matrix. If not, `embed` needs one.
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
        """Returns x_BTD: token embeddings plus learned or sinusoidal position embeddings.

        Args:
            tokens_BT: Token ids.
            positions_BT: Token positions, by default 0, 1, 2, ... in every row.
            w_embedding_VD: The embedding matrix, by default that of the model.
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
            # [T] if all rows have the same positions, else [B, T].
            positions = jnp.arange(T) if positions_BT is None else positions_BT
            # Sinusoids get the initial std of token embeddings.
            std = std_of(config.init, D**-0.5) * config.init_embedding
            x_BTD = x_BTD + (sinusoids(positions, D) * std).astype(x_BTD.dtype)

        if config.scale_embeddings:
            x_BTD = x_BTD * D**0.5
        return x_BTD

    def run(
        self, x_BTD: jax.Array, mask: Mask, dropout_key: jax.Array | None = None, **shared: Any
    ) -> jax.Array:
        """Passes token embeddings through all blocks and the final norm.

        `shared` are further arguments of every block, such as the encoder's output.
        """
        embedding_key, blocks_key = split_key(dropout_key, 2)
        x_BTD = drop(x_BTD, self.config.dropout, embedding_key)
        x_BTD = run_blocks(
            self.blocks, x_BTD, mask, config=self.config, dropout_key=blocks_key, **shared
        )
        return self.normed(x_BTD)

    def normed(self, x_BTD: jax.Array) -> jax.Array:
        """Applies the final norm, which only pre-norm models have."""
        if self.final_norm is None:
            return x_BTD
        return self.final_norm(x_BTD)

    def layers(self, site: str = 'attention') -> list[Attention]:
        """Returns copies of the attention layers, first block to last.

        In a pre-norm model, the input of a layer is the normalized stream. For an encoder-decoder,
        these are the decoder's layers; `model.encoder.layers()` returns the encoder's.

        Args:
            site: 'attention' or 'cross_attention'.

        Raises:
            ValueError: The blocks have no layer at `site`.
        """
        blocks = [layer_of(self.blocks, index) for index in range(self.config.num_layers)]
        first_block = blocks[0]
        attributes = vars(first_block)
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
    """A Stream with logits."""

    kind: ClassVar[str]  # the required value of `ModelConfig.kind`

    def __init__(
        self,
        config: ModelConfig,
        *,
        key: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
        block: type[Block] = Block,
    ):
        """Initializes the parameters.

        Args:
            config: The settings of the model.
            key: The random key.
            rngs: Random number generators, in place of `key`.
            block: The class of the layers.

        Raises:
            ConfigError: A setting is out of bounds, or `config.kind` is not the kind of the class.
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
            self.w_output_DV = None  # the output matrix is the transposed embedding
        else:
            with initialization(config.init, config.init_embedding):
                self.w_output_DV = weight(key, 'w_output_DV', (D, V), D**-0.5)

    def stream(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Returns the normalized stream x_BTD after the last block, the input of `logits`."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Returns float32 logits_BTV. The arguments are those of `stream`."""
        return self.logits(self.stream(*args, **kwargs))

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Returns logits_BTV of the normalized stream, in float32 or wider."""
        is_tied = self.w_output_DV is None
        w_output_DV = self.w_embedding_VD[...].T if is_tied else self.w_output_DV
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
        """Returns the normalized stream x_BTD after the last block.

        Args:
            tokens_BT: Token ids.
            valid_BT: False on padding, to which no token attends.
            segments_BT: The document number of each token, with 0 for padding: [1, 1, 2, 2, 2, 0].
                A token attends only to its document, in which positions count from 0. By default a
                row is one document.
            dropout_key: The key of all dropout. None is no dropout.

        Raises:
            ValueError: A row has more tokens than config.context.
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
    """Encoder-decoder (Vaswani et al. 2017): logits of the next target token, given a source."""

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
        """Returns the normalized decoder stream x_BTD after the last block.

        A row may hold several sentence pairs. A token attends only to its pair, in which positions
        count from 0.

        Args:
            tokens_BT: Target token ids.
            source_BS: Source token ids.
            source_segments_BS: The pair number of each source token, with 0 for padding: [1, 1, 2,
                2, 2, 0]. By default a row is one pair.
            segments_BT: The pair number of each target token. By default a row is one pair.
            dropout_key: The key of all dropout. None is no dropout.

        Raises:
            ValueError: A row has more tokens than config.context, or more source tokens than
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
        self.encoder.check_length(source_BS, field='model.source_context')
        segments_BS = source_segments_BS
        if segments_BS is None:
            segments_BS = jnp.ones_like(source_BS)
        # None selects the encoder's embedding matrix.
        shared_VD = self.w_embedding_VD[...] if self.config.shared_embeddings else None
        x_BSD = self.encoder.embed(source_BS, positions_of(segments_BS), w_embedding_VD=shared_VD)
        window = self.config.window
        mask = Mask(window=window, segments_BT=segments_BS, segments_BS=segments_BS)
        return self.encoder.run(x_BSD, mask, dropout_key)


def positions_of(segments_BT: jax.Array) -> jax.Array:
    """Returns each token's position in its own segment: [1, 1, 1, 2, 2] -> [0, 1, 2, 0, 1]."""
    _, T = segments_BT.shape
    index_BT = jnp.broadcast_to(jnp.arange(T), segments_BT.shape)
    is_first_BT = jnp.diff(segments_BT, axis=1, prepend=-1) != 0
    # cummax carries the index of a segment's first token to the tokens after it.
    first_index_BT = jax.lax.cummax(jnp.where(is_first_BT, index_BT, 0), axis=1)
    return index_BT - first_index_BT


KINDS: dict[str, type[Transformer]] = {
    'decoder': Decoder,
    'encoder': Encoder,
    'encoder_decoder': EncoderDecoder,
}


def build(
    config: ModelConfig, *, key: jax.Array | None = None, rngs: nnx.Rngs | None = None
) -> Transformer:
    """Initializes a model of `config.kind`.

    Args:
        config: The settings of the model.
        key: The random key.
        rngs: Random number generators, in place of `key`.

    Raises:
        ConfigError: A setting is out of bounds.
    """
    # For an unknown kind, which may be unhashable, any class raises ConfigError.
    transformer = KINDS[config.kind] if config.kind in list(KINDS) else Decoder
    return transformer(config, key=key, rngs=rngs)


@functools.lru_cache(maxsize=4096)
def abstract_model(config: ModelConfig) -> Transformer:
    """Returns a model with shapes in place of arrays, without allocating arrays."""
    with shapes_only():
        return nnx.eval_shape(lambda: build(config, key=jax.random.key(0)))


def with_params(config: ModelConfig, params: dict) -> Transformer:
    """Returns the model with the given parameters."""
    return nnx.merge(nnx.graphdef(abstract_model(config)), params)


def inference_model(config: ModelConfig, params: dict) -> Transformer:
    """Returns the model to run outside of training, with parameters in the compute dtype."""
    dtype = jnp.dtype(config.compute_dtype)
    cast_params = jax.tree.map(lambda array: jnp.asarray(array, dtype), params)
    return with_params(on_any_device(config), cast_params)


def on_any_device(config: ModelConfig) -> ModelConfig:
    """Returns the settings with a kernel that computes rows of any length on any device."""
    if config.kernel not in LIBRARIES:
        return config
    # A library needs devices, lengths and a dtype that only training is sure to have.
    return dataclasses.replace(config, kernel='auto')


def inputs_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a batch's model inputs: all arrays except targets and loss weights."""
    loss_arrays = ('targets_BT', 'loss_weights_BT')
    return {name: array for name, array in batch.items() if name not in loss_arrays}


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Returns the cross-entropy -log softmax(logits)[target] in nats, [B, T]."""
    V = logits_BTV.shape[-1]
    # A mask, because an index would copy all logits to every device if V is sharded (fsdp).
    is_target_BTV = targets_BT[..., None] == jnp.arange(V)
    target_logits_BT = jnp.where(is_target_BTV, logits_BTV, 0).sum(-1)
    return jax.nn.logsumexp(logits_BTV, -1) - target_logits_BT


def loss(model: Transformer, batch: Mapping[str, Any]) -> jax.Array:
    """Returns the weighted mean cross-entropy of a batch, in nats per target."""
    nats_BT = cross_entropy(model(**inputs_of(batch)), batch['targets_BT'])
    return jnp.average(nats_BT, weights=batch['loss_weights_BT'])
