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

# Added to the mean square of a query or key in QK-norm.
QK_NORM_EPSILON = 1e-6


class Attention(nnx.Module):
    """out_t = sum_n sum_s softmax_s(scale * x_t A[n] y_s^T + b[n, t - s]) y_s B[n].

    Several steps act between the projections and the softmax (or `spec.normalizer`), in this order:
    QK-norm, rotary positions, the scale, the logit cap, position biases, the mask.

    Args:
      spec: the variant, its sizes and its options.
      key: the random key that draws the parameters; `rngs` may replace it.
      rngs: random streams of flax; the key is the next one of its stream 'params'.

    Raises SpecError if `spec` cannot be built.
    """

    def __init__(
        self, spec: AttentionSpec, *, key: jax.Array | None = None, rngs: nnx.Rngs | None = None
    ):
        self.spec = spec
        self.score, self.value = registry.build(spec, key=key_or_from_rngs(key, rngs))
        if spec.qk_norm:
            # The gains have the size of queries and keys. It need not be the head size, so it is
            # read from the shape of the Score's queries; eval_shape computes nothing.
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

        Raises NotImplementedError unless the Score is bilinear and the Value is linear.
        """
        return self.score.matrix(), self.value.matrix(self.score)

    def at(self, layer: int | jax.Array) -> 'Attention':
        """Returns a copy that computes as layer number `layer` of a model, counted from 0.

        The copy holds the same arrays. Only circuits with `uses_layer` depend on the number.
        """
        copy = jax.tree.map(lambda leaf: leaf, self)
        for circuit in (copy.score, copy.value):
            if circuit.uses_layer:
                circuit.layer = nnx.data(layer) if isinstance(layer, jax.Array) else layer
        return copy

    def cached(self, y_BSD: jax.Array, first: int | jax.Array = 0) -> Cache:
        """Returns the arrays [B, S, ...] that decoding caches for the tokens y, by name.

        `attend_to` computes keys and values from these arrays. Where possible, keys are cached
        after QK-norm and rotation, so that later steps need not repeat them. `first` is the
        position of the first token of y.
        """
        cache_of_score = self.score.cached(y_BSD)
        cache_of_value = self.value.cached(y_BSD, self.score)
        cache = cache_of_score | cache_of_value

        keys_name = self._name_of_finished_keys(cache)
        if keys_name is not None:
            cache[keys_name] = self._norm_and_rotate(cache[keys_name], self.g_k_H, first)
        return cache

    def _name_of_finished_keys(self, cache: Cache) -> str | None:
        """Returns the name of the array that caches keys after QK-norm and rotation, as 'k_BSKH'.

        Returns None if the cache has no such array, for one of three reasons:

        - The spec asks for neither QK-norm nor rotation.
        - The Value needs the keys without them: `k_is_v` takes the keys as values.
        - The Score does not cache its keys, but the stream or a latent.
        """
        changes_keys = self.spec.qk_norm or self.spec.positions == 'rope'
        if not changes_keys:
            return None
        if 'key' in self.value.shares:
            return None
        # If the Score caches its keys, `keys` returns the cached array itself.
        k_BSKH = self.score.keys(cache)
        for name, array in cache.items():
            if array is k_BSKH:
                return name
        return None

    def _norm_and_rotate(
        self, heads_BTNH: jax.Array, gain_H: nnx.Param | None, first: int | jax.Array
    ) -> jax.Array:
        """Applies QK-norm and rotary positions to queries or keys, if the spec asks for them.

        `gain_H` is the gain of QK-norm. The tokens have the positions `first`, `first` + 1, ...
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
          x_BTD: the stream of the queries.
          cache: what `cached` returned for the attended tokens.
          mask: a Mask, or a mask_BTS that is True at visible keys.
          cross: True if the cache comes from another stream, which has no position of the query.
          dropout: the rate at which attention probabilities are dropped.
          dropout_key: the key of the dropout; without it nothing is dropped.
        """
        spec = self.spec
        mask = Mask.from_array(mask)
        if self.score.hides_self and not cross:
            mask = dataclasses.replace(mask, hides_self=True)

        q_BTNH, k_BSKH = self.score.queries_and_keys(x_BTD, cache)
        v_BSKH, output = self.value.values_and_output(cache, self.score, x_BTD.shape[1])
        q_BTNH = self._norm_and_rotate(q_BTNH, self.g_q_H, mask.start)
        if self._name_of_finished_keys(cache) is None:
            k_BSKH = self._norm_and_rotate(k_BSKH, self.g_k_H, 0)

        bias = self.bias(cross)
        drops = dropout_key is not None and dropout != 0
        # A Score whose heads all have the same logits returns one query head in place of N. Biases
        # and dropout differ between heads, so with either, every head needs its own logits.
        one_pattern = q_BTNH.shape[2] < spec.num_heads
        heads_differ = bias is not None or drops
        if one_pattern and heads_differ:
            q_BTNH = jnp.repeat(q_BTNH, spec.num_heads, axis=2)
            one_pattern = False

        B, S, K, H = v_BSKH.shape
        if one_pattern:
            # One wide head holds the values of all heads side by side.
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

        if one_pattern:
            # Separates the values of the heads again.
            o_BTKH = o_BTNH.reshape(B, -1, K, H)
            o_BTNH = jnp.repeat(o_BTKH, spec.num_heads // K, axis=2)
        return output(o_BTNH, self.score, x_BTD)

    def bias(self, cross: bool) -> Bias | None:
        """Returns a function that computes the biases b_NTS of the logits from distances t - s.

        ALiBi and the Score may each have biases. With both, the function returns their sum; with
        neither, the result is None.
        """
        alibi: Bias | None = None
        if self.spec.positions == 'alibi':
            alibi = functools.partial(linear_bias, self.spec.num_heads)

        # Cross-attention leaves out the biases of the Score: t and s count different sequences.
        relative: Bias | None = None
        if not cross:
            # Whether the Score has biases: if not, it returns None for any distance.
            distance_11 = jnp.zeros((1, 1), int)
            if self.score.relative_bias(distance_11) is not None:
                relative = self.score.relative_bias

        if relative is None:
            return alibi
        if alibi is None:
            return relative

        def sum_of_both(distance_TS: jax.Array) -> jax.Array:
            return alibi(distance_TS) + relative(distance_TS)

        return sum_of_both

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
          x_BTD: the stream of the queries; in self-attention also of the keys and values.
          mask: which keys a query may attend to. By default, self-attention is causal and within
            spec.window, and cross-attention sees all of y. A given mask replaces these limits.
          y_BSD: the stream of keys and values in cross-attention.
          dropout: the rate at which attention probabilities are dropped.
          dropout_key: the key of the dropout; without it nothing is dropped.
        """
        cross = y_BSD is not None
        if mask is None:
            mask = Mask() if cross else Mask(causal=True, window=self.spec.window)
        # In `k_is_v`, for example, keys and values have one projection, which is computed once.
        with products_once():
            cache = self.cached(y_BSD if cross else x_BTD)
            return self.attend_to(
                x_BTD, cache, mask, cross=cross, dropout=dropout, dropout_key=dropout_key
            )
