"""What all models share: embedding, positions, a stack of blocks, and the output matrix."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention import Attention, Mask
from qkattn.attention.parameters import initialization, one_key, product, weight
from qkattn.attention.rope import sinusoids
from qkattn.config import ModelConfig
from qkattn.model.blocks import Block, Norm, drop, split_key
from qkattn.model.stack import layer_of, placed, run_blocks, stack_blocks


class Stream(nnx.Module):
    """From tokens to the residual stream after the last block.

    Parameters: V D (embedding) + T D (learned positions) + L blocks + the final norm (with pre-norm
    only).
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        key: jax.Array,
        block: type[Block] = Block,
        own_embedding: bool = True,
    ):
        D, V = config.d_model, config.vocab_size
        self.config = config
        T = config.context if config.positions == 'learned' else None
        with initialization(config.init, config.init_embedding):
            self.w_embedding_VD = (
                weight(key, 'w_embedding_VD', (V, D), D**-0.5) if own_embedding else None
            )
            self.w_position_TD = weight(key, 'w_position_TD', (T, D), D**-0.5) if T else None
        self.blocks = stack_blocks(config, key=key, kind=block)
        self.final_norm = Norm(config) if config.norm_position == 'pre' else None

    def embed(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        *,
        w_embedding_VD: jax.Array | None = None,
    ) -> jax.Array:
        """Token embeddings plus learned or sinusoidal position embeddings.

        Args:
          positions_BT: position of each token; None counts from 0 in every row.
          w_embedding_VD: the embedding, where it is shared with another Stream.
        """
        table_VD = self.w_embedding_VD[...] if w_embedding_VD is None else w_embedding_VD
        x_BTD = placed(table_VD, 'VD')[tokens_BT]
        T, D = x_BTD.shape[1:]
        if self.w_position_TD is not None:
            w_position_TD = placed(self.w_position_TD[...], 'TD')
            x_BTD = x_BTD + (
                w_position_TD[:T] if positions_BT is None else w_position_TD[positions_BT]
            )
        elif self.config.positions == 'sinusoidal':
            t_BT = jnp.arange(T) if positions_BT is None else positions_BT
            # Scaled like the token embeddings, whose elements have variance 1 / D.
            x_BTD = x_BTD + (sinusoids(t_BT, D) * D**-0.5).astype(x_BTD.dtype)
        return x_BTD * D**0.5 if self.config.scale_embeddings else x_BTD

    def run(
        self,
        x_BTD: jax.Array,
        mask: Mask,
        dropout_key: jax.Array | None = None,
        **shared: Any,
    ) -> jax.Array:
        """The stream after all blocks and the final norm, from the embedded tokens."""
        embedding_key, blocks_key = split_key(dropout_key, 2)
        x_BTD = drop(x_BTD, self.config.dropout, embedding_key)
        x_BTD = run_blocks(
            self.blocks, x_BTD, mask, config=self.config, dropout_key=blocks_key, **shared
        )
        return self.normed(x_BTD)

    def normed(self, x_BTD: jax.Array) -> jax.Array:
        """The final norm of x; x itself with post-norm."""
        return x_BTD if self.final_norm is None else self.final_norm(x_BTD)

    def layers(self, site: str = 'attention') -> list[Attention]:
        """The attention layers of all blocks, first to last; changes to them stay out of the model.

        With pre-norm, x and y of a layer are the normed stream.

        Args:
          site: 'attention', or 'cross_attention' in the decoder of an encoder-decoder, whose
            `encoder` has layers of its own.
        """
        blocks = [layer_of(self.blocks, index) for index in range(self.config.num_layers)]
        sites = [name for name, part in vars(blocks[0]).items() if isinstance(part, Attention)]
        if site not in sites:
            raise ValueError(f'{site!r} names no layers; known are {", ".join(sites)}')
        return [getattr(block, site) for block in blocks]

    def check_length(self, tokens_BT: jax.Array, field: str = 'model.context') -> None:
        """Raises ValueError for more tokens than config.context."""
        if tokens_BT.shape[1] > self.config.context:
            raise ValueError(
                f'{tokens_BT.shape[1]} tokens do not fit into {field}={self.config.context}'
            )


class Transformer(Stream):
    """A Stream and an output matrix.

    Parameters: a Stream's, and D V more where the output matrix is not the transposed embedding.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        key: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
        block: type[Block] = Block,
    ):
        key = one_key(key, rngs)
        super().__init__(config, key=key, block=block)
        D, V = config.d_model, config.vocab_size
        tied = config.tied_embeddings
        with initialization(config.init, config.init_embedding):
            self.w_output_DV = None if tied else weight(key, 'w_output_DV', (D, V), D**-0.5)

    def stream(self, *args: Any, **kwargs: Any) -> jax.Array:
        """The normed stream x_BTD after the last block; every kind of model has its own inputs."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Float32 logits_BTV; the arguments are those of `stream`."""
        return self.logits(self.stream(*args, **kwargs))

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Float32 logits_BTV of the normed stream."""
        w_output_DV = self.w_embedding_VD[...].T if self.w_output_DV is None else self.w_output_DV
        dtype = jnp.promote_types(x_BTD.dtype, jnp.float32)
        logits_BTV = product(placed(x_BTD, 'BTD'), w_output_DV, dtype=dtype)
        return placed(logits_BTV, 'BTV')


def inputs_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a batch that a model takes: all but targets and loss weights."""
    return {n: a for n, a in batch.items() if n not in ('targets_BT', 'loss_weights_BT')}


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """-log softmax(logits)[target], nats_BT.

    The target's logit is selected by a mask: selected by index, as in optax, its gradient is a
    scatter, for which XLA copies all logits to every device where V is split (fsdp).
    """
    is_target_BTV = targets_BT[..., None] == jnp.arange(logits_BTV.shape[-1])
    target_logits_BT = jnp.where(is_target_BTV, logits_BTV, 0).sum(-1)
    return jax.nn.logsumexp(logits_BTV, -1) - target_logits_BT


def loss(model: Transformer, batch: Mapping[str, Any]) -> jax.Array:
    """Cross-entropy of the targets of a batch, nats per target, weighted by the loss weights."""
    nats_BT = cross_entropy(model(**inputs_of(batch)), batch['targets_BT'])
    return jnp.average(nats_BT, weights=batch['loss_weights_BT'])
