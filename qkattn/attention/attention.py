"""One attention layer: a Score and a Value, with the options that all variants share."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention import registry
from qkattn.attention.kernels.choice import attend
from qkattn.attention.kernels.einsum import Bias
from qkattn.attention.maps import Cache
from qkattn.attention.mask import Mask
from qkattn.attention.parameters import key_or_from_rngs, products_once, rms_norm
from qkattn.attention.rope import linear_bias, rotate_last
from qkattn.attention.spec import AttentionSpec

# The epsilon of RMS norm in QK-norm.
QK_NORM_EPSILON = 1e-6


class Attention(nnx.Module):
    """out_t = sum_n sum_s softmax_s(scale * x_t A[n] y_s^T + b[n, t - s]) y_s B[n].

    The logits pass these steps in order: QK-norm, rotary positions, scale, logit cap, position
    biases, mask. `spec.normalizer` may replace the softmax.

    Args:
        spec: The variant, its sizes and its options.
        key: The random key of the parameters.
        rngs: Gives the key from its stream 'params', in place of `key`.

    Raises:
        SpecError: `spec` cannot be built.
    """

    def __init__(
        self, spec: AttentionSpec, *, key: jax.Array | None = None, rngs: nnx.Rngs | None = None
    ):
        self.spec = spec
        self.score, self.value = registry.build(spec, key=key_or_from_rngs(key, rngs))
        if spec.qk_norm:
            # Trace the shape of the queries, because H may differ from spec.head_size.
            x_BTD = jax.ShapeDtypeStruct((1, 1, spec.d_model), jnp.float32)
            q_BTNH = jax.eval_shape(self.score.queries, x_BTD)
            H = q_BTNH.shape[-1]
            self.g_q_H = nnx.Param(jnp.ones((H,), jnp.float32))
            self.g_k_H = nnx.Param(jnp.ones((H,), jnp.float32))
        else:
            self.g_q_H = None
            self.g_k_H = None

    def matrix(self) -> tuple[jax.Array, jax.Array]:
        """Returns A_NDE and B_NDE.

        Raises:
            NotImplementedError: The Score is not bilinear, or the Value is not linear.
        """
        return self.score.matrix(), self.value.matrix(self.score)

    def at(self, layer: int | jax.Array) -> 'Attention':
        """Returns a copy for the layer with index `layer`, which holds the same arrays."""
        # Mapping the identity copies the modules, but not their arrays.
        copy = jax.tree.map(lambda array: array, self)
        for circuit in (copy.score, copy.value):
            if circuit.uses_layer:
                is_array = isinstance(layer, jax.Array)  # in a scan over layers
                circuit.layer = nnx.data(layer) if is_array else layer
        return copy

    def cached(self, y_BSD: jax.Array, first: int | jax.Array = 0) -> Cache:
        """Returns the arrays [B, S, ...] by name from which `attend_to` computes keys and values.

        Args:
            y_BSD: The stream of keys and values.
            first: The position of the first token of y.
        """
        cache_of_score = self.score.cached(y_BSD)
        cache_of_value = self.value.cached(y_BSD, self.score)
        cache = cache_of_score | cache_of_value

        # If possible, cache keys after QK-norm and rotation.
        keys_name = self._name_of_final_keys(cache)
        if keys_name is not None:
            cache[keys_name] = self._norm_and_rotate(cache[keys_name], self.g_k_H, first)
        return cache

    def _name_of_final_keys(self, cache: Cache) -> str | None:
        """Returns the cache name of keys after QK-norm and rotation, such as 'k_BSKH', or None."""
        has_norm_or_rotation = self.spec.qk_norm or self.spec.positions == 'rope'
        if not has_norm_or_rotation:
            return None
        # Values such as `k_is_v` are the cached keys, before QK-norm and rotation.
        if 'key' in self.value.shares:
            return None
        # If the Score caches its keys, `keys` returns an array of the cache itself.
        k_BSKH = self.score.keys(cache)
        for name, array in cache.items():
            if array is k_BSKH:
                return name
        return None

    def _norm_and_rotate(
        self, heads_BTNH: jax.Array, gain_H: nnx.Param | None, first: int | jax.Array
    ) -> jax.Array:
        """Applies QK-norm and rotary positions to queries or keys, if they are in the spec.

        Args:
            heads_BTNH: The queries or keys.
            gain_H: The gain of QK-norm, or None without QK-norm.
            first: The position of the first token.
        """
        if self.spec.qk_norm:
            heads_BTNH = rms_norm(heads_BTNH, epsilon=QK_NORM_EPSILON) * gain_H[...]
        if self.spec.positions == 'rope':
            positions_T = first + jnp.arange(heads_BTNH.shape[1])
            heads_BTNH = rotate_last(heads_BTNH, positions_T, self.score.rope_size)
        return heads_BTNH

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
        """Attends from x to cached keys and values, and returns out_BTD.

        Args:
            x_BTD: The stream of the queries.
            cache: The cache of the attended tokens, from `cached`.
            mask: A Mask, or a mask_BTS that is True at visible keys.
            cross: Whether the cache comes from another stream than x.
            dropout: The dropout rate of attention probabilities.
            dropout_key: The random key of the dropout; None disables it.
        """
        spec = self.spec
        mask = Mask.from_array(mask)
        if self.score.hides_self and not cross:
            mask = dataclasses.replace(mask, hides_self=True)

        q_BTNH, k_BSKH = self.score.queries_and_keys(x_BTD, cache)
        v_BSKH, project_output = self.value.values_and_output(cache, self.score, x_BTD.shape[1])
        q_BTNH = self._norm_and_rotate(q_BTNH, self.g_q_H, mask.start)
        # Cached keys may have passed QK-norm and rotation already.
        has_final_keys = self._name_of_final_keys(cache) is not None
        if not has_final_keys:
            k_BSKH = self._norm_and_rotate(k_BSKH, self.g_k_H, first=0)

        bias = self.bias(cross)
        uses_dropout = dropout_key is not None and dropout != 0
        # A Score may return one query head for all heads. Biases and dropout differ between heads.
        heads_share_logits = q_BTNH.shape[2] < spec.num_heads
        if heads_share_logits and (bias is not None or uses_dropout):
            q_BTNH = jnp.repeat(q_BTNH, spec.num_heads, axis=2)
            heads_share_logits = False

        B, S, K, H = v_BSKH.shape
        if heads_share_logits:
            # Concatenate the values of all heads into one wide head.
            v_BSKH = v_BSKH.reshape(B, S, 1, K * H)

        o_BTNH = attend(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            mask,
            scale=self.score.scale * spec.score_scale,
            bias=bias,
            logit_cap=spec.logit_cap,
            normalizer=registry.find_normalizer(spec.normalizer),
            dropout=dropout,
            dropout_key=dropout_key,
            kernel=spec.kernel,
        )

        if heads_share_logits:
            # Split the wide head.
            o_BTKH = o_BTNH.reshape(B, -1, K, H)
            o_BTNH = jnp.repeat(o_BTKH, spec.num_heads // K, axis=2)
        return project_output(o_BTNH, self.score, x_BTD)

    def bias(self, cross: bool) -> Bias | None:
        """Returns a function from distances t - s to logit biases b_NTS, or None without biases.

        The biases are the sum of ALiBi and, except in cross-attention, the biases of the Score.
        """
        alibi: Bias | None = None
        if self.spec.positions == 'alibi':
            alibi = functools.partial(linear_bias, self.spec.num_heads)

        score_bias: Bias | None = None
        if not cross:
            # A Score without biases returns None for any distance.
            distance_11 = jnp.zeros((1, 1), int)
            if self.score.relative_bias(distance_11) is not None:
                score_bias = self.score.relative_bias

        if score_bias is None:
            return alibi
        if alibi is None:
            return score_bias

        def alibi_plus_score_bias(distance_TS: jax.Array) -> jax.Array:
            return alibi(distance_TS) + score_bias(distance_TS)

        return alibi_plus_score_bias

    def __call__(
        self,
        x_BTD: jax.Array,
        mask: Mask | jax.Array | None = None,
        *,
        y_BSD: jax.Array | None = None,
        dropout: float = 0.0,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Computes self-attention of x, or cross-attention from x to y, and returns out_BTD.

        Args:
            x_BTD: The stream of the queries; in self-attention also of the keys and values.
            mask: A Mask, or a mask_BTS that is True at visible keys. The default is causal with
                spec.window in self-attention, and all keys in cross-attention.
            y_BSD: The stream of keys and values in cross-attention.
            dropout: The dropout rate of attention probabilities.
            dropout_key: The random key of the dropout; None disables it.
        """
        cross = y_BSD is not None
        if mask is None:
            mask = Mask() if cross else Mask(causal=True, window=self.spec.window)
        # `products_once` computes a projection once that keys and values share, as in `k_is_v`.
        with products_once():
            cache = self.cached(y_BSD if cross else x_BTD)
            return self.attend_to(
                x_BTD, cache, mask, cross=cross, dropout=dropout, dropout_key=dropout_key
            )
