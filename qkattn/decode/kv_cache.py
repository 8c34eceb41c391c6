"""Decoding with a key/value cache. It holds what `Attention.cached` returns for each layer.

A model may have a pattern: its layers then have several variants of attention in turn. Variants may
cache arrays of different shapes, so layers of one variant are stacked, and each variant has a stack
of its own.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qkattn.attention import Cache, Mask
from qkattn.model import Decoder, EncoderDecoder
from qkattn.model.blocks import Block, Branch, CrossBlock
from qkattn.model.stack import layer_of, scan_layers, stacks_of


class KVCache(NamedTuple):
    """The cached keys and values of all layers. Slots that are not filled yet are zero."""

    # One entry per variant, so a single entry without a pattern: arrays [L, B, S, ...] by name,
    # where L is the number of layers that have the variant.
    layers: tuple[Cache, ...]
    length: jax.Array  # the number of filled slots
    # Only for an encoder-decoder: what cross-attention caches of the encoder's output, as arrays
    # [L, B, S, ...], and False on the padding of the source.
    source: Cache | None = None
    source_valid_BS: jax.Array | None = None


def init_cache(model: Decoder | EncoderDecoder, batch: int, length: int) -> KVCache:
    """Returns an empty cache with `length` slots, one for each token, for `batch` rows.

    The parameters of the model may be ShapeDtypeStructs, because they are used only for shapes.
    """
    # In a model with a pattern, P variants of attention take turns: with P = 2, layers 0, 2, 4 ...
    # have variant 0, and layers 1, 3, 5 ... have variant 1. Without a pattern, P is 1.
    L = model.config.num_layers
    P = len(stacks_of(model.blocks))

    def cached(model: Decoder | EncoderDecoder) -> list[Cache]:
        """Returns what the first layer of each variant caches for one token."""
        x_BTD = model.embed(jnp.zeros((batch, 1), jnp.int32))
        return [layer_of(model.blocks, index).attention.cached(x_BTD) for index in range(P)]

    # For each variant, arrays of zeros: [B, 1, ...] of one token in one layer becomes
    # [layers, B, slots, ...].
    caches = []
    for variant, arrays in enumerate(jax.eval_shape(cached, model)):
        num_layers = len(range(variant, L, P))  # variant, variant + P, variant + 2 P ... below L
        slots: Cache = {}
        for name, array in arrays.items():
            shape = (num_layers, batch, length, *array.shape[2:])
            slots[name] = jnp.zeros(shape, array.dtype)
        caches.append(slots)
    return KVCache(tuple(caches), length=jnp.int32(0))


def encode_source(
    model: EncoderDecoder, source_BS: jax.Array, valid_BS: jax.Array, length: int
) -> KVCache:
    """Runs the encoder, and returns a cache of its keys and values for cross-attention.

    The cache has `length` empty slots for target tokens. valid_BS is False on padding, which
    follows the tokens of a row.
    """
    segments_BS = valid_BS.astype(jnp.int32)  # a row is one segment, number 1; padding is 0
    y_BSD = model.encode(source_BS, segments_BS)

    def cached(block: CrossBlock, layer: jax.Array) -> Cache:
        """Returns the keys and values of one layer."""
        return block.at(layer).cross_attention.cached(y_BSD)

    layers_L = jnp.arange(model.config.num_layers)
    source = jax.vmap(cached)(model.blocks, layers_L)
    cache = init_cache(model, len(source_BS), length)
    return cache._replace(source=source, source_valid_BS=valid_BS)


def prefill(
    model: Decoder | EncoderDecoder, tokens_BT: jax.Array, cache: KVCache
) -> tuple[jax.Array, KVCache]:
    """Appends T tokens in one pass; returns the next token's logits_BV and the longer cache.

    Logits are float32 or wider. The cache must have T free slots; jit cannot detect an overflow.
    """
    T = tokens_BT.shape[1]
    first = cache.length  # position of the first token
    positions_BT = jnp.broadcast_to(first + jnp.arange(T), tokens_BT.shape)
    x_BTD = model.embed(tokens_BT, positions_BT)
    mask = Mask(causal=True, first_query=first, window=model.config.window)

    def layer(
        carry: tuple[jax.Array, tuple[Cache, ...]],
        block: Block,
        layer_index: tuple[int, jax.Array],
        source: Cache | None,
    ) -> tuple[jax.Array, tuple[Cache, ...]]:
        """Runs one layer on the new tokens, and stores their keys and values in its cache.

        Args:
          carry: the residual stream x_BTD, and the caches of all layers (`KVCache.layers`).
          block: the layer.
          layer_index: (variant, index); the layer is number `index` of those of its variant.
          source: what its cross-attention caches; None in a decoder.

        Returns:
          The stream after the layer, and the updated caches of all layers.
        """
        x_BTD, caches = carry
        variant, index = layer_index
        cache_of_variant = caches[variant]  # arrays [L, B, S, ...] of all its layers
        # The same with the new tokens. `attend` fills it, when `block.run_branches` calls it below.
        updated_cache: Cache = {}

        def attend(z_BTD: jax.Array) -> jax.Array:
            """Stores the keys and values of the new tokens, then attends to the whole cache."""
            new_arrays = block.attention.cached(z_BTD, first)
            updated_cache.update(_with_new_tokens(cache_of_variant, new_arrays, index, first))
            layer_cache: Cache = {}  # arrays [B, S, ...] of this layer
            for name, array in updated_cache.items():
                layer_cache[name] = jax.lax.dynamic_index_in_dim(array, index, keepdims=False)
            return block.attention.attend_to(z_BTD, layer_cache, mask)

        attention_branches: list[Branch] = [attend]
        if isinstance(block, CrossBlock):
            cross_attention = block.cross_attention
            source_mask = Mask(valid_BS=cache.source_valid_BS)

            def cross_attend(z_BTD: jax.Array) -> jax.Array:
                """Attends to the source, whose keys and values are cached."""
                return cross_attention.attend_to(z_BTD, source, source_mask, cross=True)

            attention_branches.append(cross_attend)

        out_BTD = block.run_branches(attention_branches, x_BTD)
        updated_caches = list(caches)
        updated_caches[variant] = updated_cache
        return out_BTD, tuple(updated_caches)

    # The scan carries the whole cache, which it updates in place. It would copy an input.
    x_BTD, layers = scan_layers(
        layer, (x_BTD, cache.layers), model.blocks, cache.source, config=model.config
    )
    last_B1D = model.normed(x_BTD[:, -1:])
    logits_BV = model.logits(last_B1D)[:, 0]
    return logits_BV, cache._replace(layers=layers, length=first + T)


def _with_new_tokens(stack: Cache, new_arrays: Cache, index: jax.Array, first: jax.Array) -> Cache:
    """Returns the cache of a variant's layers after new tokens are stored in one of them.

    An array [B, T, ...] of T new tokens replaces [index, :, first : first + T] in the array
    [L, B, S, ...] of the same name in `stack`.
    """
    # The indices of a slice must have one dtype. Under x64, a literal 0 would be an int64.
    zero = jnp.zeros_like(first)
    updated: Cache = {}
    for name, array in new_arrays.items():
        start = (index, zero, first) + (zero,) * (array.ndim - 2)
        updated[name] = jax.lax.dynamic_update_slice(stack[name], array[None], start)
    return updated


def take_rows(cache: KVCache, rows_M: jax.Array) -> KVCache:
    """Returns a cache whose row m is row rows_M[m] of `cache`.

    What is cached of an encoder's source is not copied if there are as many rows as before. So row
    m and row rows_M[m] must have the same source then. In a beam search they do: it exchanges rows
    only among the hypotheses of one source.
    """

    def take(arrays: Any) -> Any:
        """Takes the rows of arrays [L, B, ...]."""
        return jax.tree.map(lambda array: array[:, rows_M], arrays)

    taken = cache._replace(layers=take(cache.layers))
    if cache.source is None:
        return taken
    keeps_sources = len(rows_M) == len(cache.source_valid_BS)
    if keeps_sources:
        return taken
    return taken._replace(source=take(cache.source), source_valid_BS=cache.source_valid_BS[rows_M])
