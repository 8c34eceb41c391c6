"""One attention layer: a Score and a Value, with the options that all variants share."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention import registry
from qkattn.attention.attend import attend, visible
from qkattn.attention.norm import rms_norm
from qkattn.attention.parameters import one_key
from qkattn.attention.rope import linear_bias, rotate_last
from qkattn.attention.scores.score import Cache
from qkattn.attention.spec import AttentionSpec


class Attention(nnx.Module):
    """out_t = sum_n sum_s softmax_s(scale * x_t A[n] y_s^T + b[n, t - s]) y_s B[n].

    `spec.normalizer` may replace softmax. Between the projections and it act, in this order:
    QK-norm, rotary positions, the scale, the logit cap, position biases, the mask. The cache holds
    what the Score and the Value cache, before any of these.

    The parameters are drawn with a `key`, or with the stream 'params' of `rngs`.

    Raises:
      SpecError: an unknown name, or a variant that cannot be built with these sizes and options.
    """

    def __init__(
        self, spec: AttentionSpec, *, key: jax.Array | None = None, rngs: nnx.Rngs | None = None
    ):
        self.spec = spec
        self.score, self.value = registry.build(spec, key=one_key(key, rngs))
        size = 0
        if spec.qk_norm:
            x_BTD = jax.ShapeDtypeStruct((1, 1, spec.d_model), jnp.float32)
            size = jax.eval_shape(self.score.queries, x_BTD).shape[-1]
        self.g_q_H = nnx.Param(jnp.ones((size,), jnp.float32)) if spec.qk_norm else None
        self.g_k_H = nnx.Param(jnp.ones((size,), jnp.float32)) if spec.qk_norm else None

    def matrix(self) -> tuple[jax.Array, jax.Array]:
        """A_NDE and B_NDE of the equation above; see Score.matrix and Value.matrix.

        Raises:
          NotImplementedError: the Score is not bilinear, or the Value is not linear.
        """
        return self.score.matrix(), self.value.matrix(self.score)

    def at(self, layer: int | jax.Array) -> 'Attention':
        """The same attention as layer number `layer`, from 0, of a stack."""
        placed = jax.tree.map(lambda leaf: leaf, self)
        for circuit in (placed.score, placed.value):
            if circuit.uses_layer:
                circuit.layer = nnx.data(layer) if isinstance(layer, jax.Array) else layer
        return placed

    def cached(self, y_BSD: jax.Array) -> Cache:
        """The arrays [B, S, ...] from which keys and values are computed, for a decoding cache."""
        return {**self.score.cached(y_BSD), **self.value.cached(y_BSD, self.score)}

    def attend_to(
        self,
        x_BTD: jax.Array,
        cache: Cache,
        mask_BTS: jax.Array,
        *,
        first_query: int | jax.Array = 0,
        cross: bool = False,
        dropout: float = 0.0,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Attends from x to cached keys and values; returns out_BTD.

        Args:
          mask_BTS: True where a query may attend to a key.
          first_query: position of the first query; keys are at positions 0 to S - 1.
          cross: whether the cache is of another stream, so that no position is the query's own.
          dropout: rate at which attention probabilities are dropped; off without a key.
        """
        spec = self.spec
        q_BTNH, k_BSKH = self.score.queries(x_BTD), self.score.keys(cache)
        t_T = first_query + jnp.arange(q_BTNH.shape[1])
        s_S = jnp.arange(k_BSKH.shape[1])
        if spec.qk_norm:
            q_BTNH = rms_norm(q_BTNH, epsilon=1e-6) * self.g_q_H[...]
            k_BSKH = rms_norm(k_BSKH, epsilon=1e-6) * self.g_k_H[...]
        if spec.positions == 'rope':
            q_BTNH = rotate_last(q_BTNH, t_T, self.score.rope_size)
            k_BSKH = rotate_last(k_BSKH, s_S, self.score.rope_size)
        if self.score.hides_self and not cross:
            others_BTS = mask_BTS & (t_T[:, None] != s_S[None, :])
            mask_BTS = jnp.where(others_BTS.any(-1, keepdims=True), others_BTS, mask_BTS)
        biases = [linear_bias(spec.num_heads, t_T, s_S)] if spec.positions == 'alibi' else []
        learned_NTS = self.score.relative_bias(t_T[:, None] - s_S[None, :])
        if learned_NTS is not None and not cross:
            biases.append(learned_NTS)
        o_BTNH = attend(
            q_BTNH,
            k_BSKH,
            self.value.values(cache, self.score),
            mask_BTS,
            scale=self.score.scale * spec.score_scale,
            bias_NTS=functools.reduce(operator.add, biases) if biases else None,
            logit_cap=spec.logit_cap,
            normalizer=registry.find_normalizer(spec.normalizer),
            dropout=dropout,
            dropout_key=dropout_key,
        )
        return self.value.output(o_BTNH, self.score, x_BTD)

    def __call__(
        self,
        x_BTD: jax.Array,
        mask_BTS: jax.Array | None = None,
        *,
        y_BSD: jax.Array | None = None,
        **dropout: Any,
    ) -> jax.Array:
        """Self-attention, or cross-attention to y where it is given; `dropout` as in attend_to.

        Without a mask, self-attention is causal and within spec.window, and all of y is visible.
        """
        cross = y_BSD is not None
        y_BSD = y_BSD if cross else x_BTD
        if mask_BTS is None:
            window = None if cross else self.spec.window
            mask_BTS = visible(x_BTD.shape[1], y_BSD.shape[1], causal=not cross, window=window)
        cache = self.cached(y_BSD)
        return self.attend_to(x_BTD, cache, mask_BTS, cross=cross, **dropout)
