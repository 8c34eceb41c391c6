"""The sizes at which implementations are compared; imports without jax and torch."""

import dataclasses
from typing import Any

from qkattn.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    TrialsConfig,
    to_json,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder and its batch: pre-norm, learned positions, tied embeddings, no biases.

    Attributes:
      layers, width, heads, context, vocabulary: L, D, N, T, V; heads of size D / N, an MLP of 4 D.
      batch: sequences per step, B.
      dtype: of all products; parameters are in float32.
      gelu: 'tanh' or 'none' (exact).
      dispatch: steps of a program call, where several are compiled into one.
    """

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int
    batch: int
    dtype: str = 'float32'
    gelu: str = 'none'
    dispatch: int = 10

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.context

    @property
    def flops_by_part(self) -> dict[str, int]:
        """FLOPs of all matrix products in a step, forward and backward, masked positions included.

        Two per multiply-add; twice as many backward as forward.
        """
        D, L, T, V = self.width, self.layers, self.context, self.vocabulary
        forward = {
            'attention': L * (8 * D**2 + 4 * T * D),
            'mlp': L * 16 * D**2,
            'logits': 2 * D * V,
        }
        return {part: 3 * self.tokens * flops for part, flops in forward.items()}

    @property
    def flops(self) -> int:
        return sum(self.flops_by_part.values())

    @property
    def parameters(self) -> int:
        D, L = self.width, self.layers
        return 12 * D**2 * L + (self.vocabulary + self.context) * D + (2 * L + 1) * D

    @property
    def least_bytes(self) -> int:
        """Bytes of parameters, gradients and moments that a step moves at least, activations apart.

        In float32: parameters are read forward, backward and for the update, gradients are written,
        read for their norm and for the update, both moments are read; parameters and moments are
        written.
        """
        return 4 * 11 * self.parameters

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    def __str__(self) -> str:
        sizes = f'{self.layers} x {self.width} x context {self.context}'
        return f'{sizes}, batch {self.batch}, {self.dtype}'

    def config(
        self,
        *,
        steps_per_dispatch: int | None = None,
        seeds: int = 1,
        lifting: str = 'auto',
        **model: Any,
    ) -> dict[str, Any]:
        """The JSON of the run that trains it: AdamW with clipping, `seeds` trials.

        Args:
          model: further settings of ModelConfig.
        """
        own = {
            'd_model': self.width,
            'num_layers': self.layers,
            'num_heads': self.heads,
            'context': self.context,
            'vocab_size': self.vocabulary,
            'compute_dtype': self.dtype,
            'activation': 'gelu' if self.gelu == 'none' else 'gelu_tanh',
        }
        dispatch = self.dispatch if steps_per_dispatch is None else steps_per_dispatch
        every = 10 * dispatch
        config = Config(
            model=ModelConfig(**own | model),  # type: ignore[arg-type]
            data=DataConfig(name='tiny_shakespeare', tokenizer='characters'),
            optimizer=OptimizerConfig(decay='coupled'),
            train=TrainConfig(
                num_steps=1_000_000,
                batch_size=self.batch,
                steps_per_dispatch=dispatch,
                log_every=every,
                eval_every=every,
                checkpoint_every=every,
                lifting=lifting,  # type: ignore[arg-type]
            ),
            trials=TrialsConfig(
                seeds=tuple(range(seeds)), learning_rates=(1e-3,), weight_decays=(0.1,)
            ),
        )
        return to_json(config)


# nanoGPT's README, "I only have a macbook", and the shape of its character model for a GPU.
RECIPE = Shape(layers=4, width=128, heads=4, context=64, vocabulary=67, batch=12)
MEDIUM = Shape(layers=6, width=384, heads=6, context=256, vocabulary=67, batch=4, dispatch=2)
# GPT-2 124M (Radford et al. 2019), its vocabulary rounded up to a multiple of 128.
GPT2 = Shape(
    layers=12,
    width=768,
    heads=12,
    context=1024,
    vocabulary=50304,
    batch=8,
    dtype='bfloat16',
    gelu='tanh',
)
TINY = Shape(layers=1, width=16, heads=2, context=8, vocabulary=11, batch=2)
