"""The decoder-only language model."""

from typing import ClassVar

import jax

from qkattn.attention import Mask
from qkattn.model.transformer import Transformer


class Decoder(Transformer):
    """Causal transformer (Radford et al. 2019): logits of the next token at every position.

    Attributes:
      causal: whether position t attends to positions up to t only.
    """

    causal: ClassVar[bool] = True

    def stream(
        self,
        tokens_BT: jax.Array,
        *,
        valid_BT: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The normed stream x_BTD after the last block, of which `logits` are taken.

        Args:
          tokens_BT: token ids, T <= config.context.
          valid_BT: False on padding, to which no position attends.
          dropout_key: random key; without it dropout is off.

        Raises:
          ValueError: more tokens than config.context.
        """
        self.check_length(tokens_BT)
        mask = Mask(causal=self.causal, valid_BS=valid_BT, window=self.config.window)
        return self.run(self.embed(tokens_BT), mask, dropout_key)
