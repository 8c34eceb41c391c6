"""One attention layer: a Score and a Value, with the options that all variants share."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention import registry
from qkattn.attention.kernels.choice import attend
from qkattn.attention.kernels.einsum import Bias
from qkattn.attention.maps import Cache
from qkattn.attention.mask import Mask
from qkattn.attention.parameters import one_key, products_once, rms_norm
from qkattn.attention.rope import linear_bias, rotate_last
from qkattn.attention.spec import AttentionSpec


class Attention(nnx.Module):
    """out_t = sum_n sum_s softmax_s(scale * x_t A[n] y_s^T + b[n, t - s]) y_s B[n].

    Between the projections and softmax, or `spec.normalizer`, act in this order: QK-norm, rotary
    positions, the scale, the logit cap, position biases, the mask. The parameters are drawn with a
    `key`, or with the stream 'params' of `rngs`; SpecError where `spec` cannot be built.
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
        """A_NDE and B_NDE; NotImplementedError without a bilinear Score and a linear Value."""
        return self.score.matrix(), self.value.matrix(self.score)

    def at(self, layer: int | jax.Array) -> 'Attention':
        """The same attention as layer number `layer`, from 0, of a model."""
        placed = jax.tree.map(lambda leaf: leaf, self)
        for circuit in (placed.score, placed.value):
            if circuit.uses_layer:
                circuit.layer = nnx.data(layer) if isinstance(layer, jax.Array) else layer
        return placed

    def cached(self, y_BSD: jax.Array, first: int | jax.Array = 0) -> Cache:
        """The arrays [B, S, ...] from which keys and values are computed, for a decoding cache.

        Keys that serve as nothing else have their norm and rotation. y begins at position `first`.
        """
        cache = {**self.score.cached(y_BSD), **self.value.cached(y_BSD, self.score)}
        finished = {name: self._finish_keys(cache[name], first) for name in self._finished(cache)}
        return {**cache, **finished}

    def _finished(self, cache: Cache) -> list[str]:
        """The name of the array that is the keys and nothing else: it is cached ready for use."""
        if 'key' in self.value.shares or not (self.spec.qk_norm or self.spec.positions == 'rope'):
            return []
        k_BSKH = self.score.keys(cache)
        return [name for name, array in cache.items() if array is k_BSKH]

    def _finish_keys(self, k_BSKH: jax.Array, first: int | jax.Array) -> jax.Array:
        if self.spec.qk_norm:
            k_BSKH = rms_norm(k_BSKH, epsilon=1e-6) * self.g_k_H[...]
        if self.spec.positions == 'rope':
            s_S = first + jnp.arange(k_BSKH.shape[1])
            k_BSKH = rotate_last(k_BSKH, s_S, self.score.rope_size)
        return k_BSKH

    def attend_to(
        self,
        x_BTD: jax.Array,
        cache: Cache,
        mask: Mask | jax.Array,
        *,
        cross: bool = False,
        dropout: float = 0.0,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """out_BTD of queries from x and cached keys and values; a mask_BTS is True at visible keys.

        With `cross`, the cache is of another stream: no position in it is the query's own.
        `dropout` is the rate at which attention probabilities are dropped; off without a key.
        """
        spec, mask = self.spec, Mask.from_array(mask)
        q_BTNH, k_BSKH = self.score.queries_and_keys(x_BTD, cache)
        v_BSKH, output = self.value.values_and_output(cache, self.score, x_BTD.shape[1])
        if spec.qk_norm:
            q_BTNH = rms_norm(q_BTNH, epsilon=1e-6) * self.g_q_H[...]
        if spec.positions == 'rope':
            q_BTNH = rotate_last(q_BTNH, mask.queries(x_BTD.shape[1]), self.score.rope_size)
        if not self._finished(cache):
            k_BSKH = self._finish_keys(k_BSKH, 0)
        if self.score.hides_self and not cross:
            mask = dataclasses.replace(mask, hides_self=True)
        bias, (B, S, K, H) = self.bias(cross), v_BSKH.shape
        common = q_BTNH.shape[2] < spec.num_heads
        if common and (bias is not None or (dropout and dropout_key is not None)):
            q_BTNH, common = jnp.repeat(q_BTNH, spec.num_heads, axis=2), False
        o_BTNH = attend(
            q_BTNH,
            k_BSKH,
            v_BSKH.reshape(B, S, 1, K * H) if common else v_BSKH,
            mask,
            scale=self.score.scale * spec.score_scale,
            bias=bias,
            logit_cap=spec.logit_cap,
            normalizer=registry.find_normalizer(spec.normalizer),
            dropout=dropout,
            dropout_key=dropout_key,
            kernel=spec.kernel,
        )
        if common:  # one pattern of attention over the values of all heads
            o_BTNH = jnp.repeat(o_BTNH.reshape(B, -1, K, H), spec.num_heads // K, axis=2)
        return output(o_BTNH, self.score, x_BTD)

    def bias(self, cross: bool) -> Bias | None:
        """b_NTS of the distances t - s, from ALiBi and from the Score; None without."""
        biases: list[Bias] = []
        if self.spec.positions == 'alibi':
            biases.append(functools.partial(linear_bias, self.spec.num_heads))
        if not cross and self.score.relative_bias(jnp.zeros((1, 1), int)) is not None:
            biases.append(self.score.relative_bias)
        if len(biases) < 2:
            return biases[0] if biases else None
        return lambda distance_TS: biases[0](distance_TS) + biases[1](distance_TS)

    def __call__(
        self,
        x_BTD: jax.Array,
        mask: Mask | jax.Array | None = None,
        *,
        y_BSD: jax.Array | None = None,
        **dropout: Any,
    ) -> jax.Array:
        """Self-attention, or cross-attention to y where it is given; `dropout` as in attend_to.

        Without a mask, self-attention is causal and within spec.window, and all of y is visible; a
        mask replaces both causality and spec.window.
        """
        cross = y_BSD is not None
        y_BSD = y_BSD if cross else x_BTD
        if mask is None:
            mask = Mask(causal=not cross, window=None if cross else self.spec.window)
        with products_once():
            return self.attend_to(x_BTD, self.cached(y_BSD), mask, cross=cross, **dropout)
