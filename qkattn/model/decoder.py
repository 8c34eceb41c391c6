"""The decoder-only language model."""

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention import visible
from qkattn.attention.rope import sinusoids
from qkattn.attention.spec import weight
from qkattn.config import ModelConfig
from qkattn.model.blocks import Norm, drop, run_blocks, stack_blocks


class Decoder(nnx.Module):
    """Causal pre-norm transformer (Radford et al. 2019): tokens to next-token logits.

    Weights: V D (embedding) + T D (learned positions) + L blocks + D (final norm), and D V more
    where the output matrix is not the transposed embedding.
    """

    def __init__(self, config: ModelConfig, *, key: jax.Array):
        D, V = config.d_model, config.vocab_size
        self.config = config
        self.w_embedding_VD = weight(key, 'w_embedding_VD', (V, D), D**-0.5)
        learned = config.positions == 'learned'
        self.w_position_TD = (
            weight(key, 'w_position_TD', (config.context, D), D**-0.5) if learned else None
        )
        self.blocks = stack_blocks(config, key=key)
        self.final_norm = Norm(config)
        tied = config.tied_embeddings
        self.w_output_DV = None if tied else weight(key, 'w_output_DV', (D, V), D**-0.5)

    def __call__(
        self,
        tokens_BT: jax.Array,
        *,
        valid_BT: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Float32 logits_BTV; position t sees tokens up to t.

        Args:
          tokens_BT: token ids, T <= config.context.
          valid_BT: False on padding, which no position reads.
          dropout_key: random key; without it dropout is off.

        Raises:
          ValueError: more positions than config.context.
        """
        T = tokens_BT.shape[1]
        if T > self.config.context:
            raise ValueError(f'{T} tokens do not fit into model.context={self.config.context}')
        embedding_key, blocks_key = (
            (None, None) if dropout_key is None else jax.random.split(dropout_key)
        )
        x_BTD = self.embed(tokens_BT)
        x_BTD = drop(x_BTD, self.config.dropout, embedding_key)
        mask_BTS = visible(T, T, causal=True, valid_BS=valid_BT, window=self.config.window)
        x_BTD = run_blocks(self.blocks, x_BTD, mask_BTS, config=self.config, dropout_key=blocks_key)
        return self.logits(x_BTD)

    def embed(self, tokens_BT: jax.Array, first: int | jax.Array = 0) -> jax.Array:
        """Token embeddings plus the positions that are added to the stream, from `first` on."""
        x_BTD = self.w_embedding_VD[...][tokens_BT]
        T, D = x_BTD.shape[1:]
        if self.w_position_TD is not None:
            x_BTD = x_BTD + jax.lax.dynamic_slice_in_dim(self.w_position_TD[...], first, T)
        elif self.config.positions == 'sinusoidal':
            # Scaled like the token embeddings, whose elements have variance 1 / D.
            x_BTD = x_BTD + (sinusoids(first + jnp.arange(T), D) * D**-0.5).astype(x_BTD.dtype)
        return x_BTD

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Final norm and output matrix; float32 logits_BTV."""
        x_BTD = self.final_norm(x_BTD)
        w_output_DV = self.w_embedding_VD[...].T if self.w_output_DV is None else self.w_output_DV
        dtype = jnp.promote_types(x_BTD.dtype, jnp.float32)
        return jnp.dot(x_BTD, w_output_DV[...], preferred_element_type=dtype)
