"""One attention layer: a cell of the Score x Value grid."""

import jax
from flax import nnx

from qkattn.attention import registry
from qkattn.attention.attend import attend
from qkattn.attention.score import Memory
from qkattn.attention.spec import AttentionSpec


class Attention(nnx.Module):
    """out_t = sum_n sum_s softmax_s(scale * x_t A[n] y_s^T) y_s B[n].

    Raises:
      SpecError: an unknown name, or a cell that these sizes do not allow.
    """

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        registry.check(spec)
        score, score_options = registry.find_score(spec.score)
        value, value_options = registry.find_value(spec.value)
        self.score = score(spec, key=key, **score_options)
        self.value = value(spec, key=key, **value_options)

    def remember(self, y_BSD: jax.Array) -> Memory:
        """All that later queries need of y: exactly what a decoding cache holds."""
        return {**self.score.remember(y_BSD), **self.value.remember(y_BSD, self.score)}

    def read(
        self,
        x_BTD: jax.Array,
        memory: Memory,
        mask_BTS: jax.Array,
        *,
        dropout: float = 0.0,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Answers the queries of x from the memory; out_BTD."""
        o_BTNH = attend(
            self.score.queries(x_BTD),
            self.score.keys(memory),
            self.value.values(memory, self.score),
            mask_BTS,
            scale=self.score.scale,
            dropout=dropout,
            dropout_key=dropout_key,
        )
        return self.value.output(o_BTNH, self.score)

    def __call__(
        self, x_BTD: jax.Array, mask_BTS: jax.Array, *, y_BSD: jax.Array | None = None, **dropout
    ) -> jax.Array:
        """Self-attention, or cross-attention to y where it is given."""
        memory = self.remember(x_BTD if y_BSD is None else y_BSD)
        return self.read(x_BTD, memory, mask_BTS, **dropout)
