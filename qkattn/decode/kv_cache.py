"""Decoding with a key/value cache, which holds the arrays of `Attention.cached`.

The layers of a model may alternate between variants of attention, whose arrays have different
shapes. So the cache has one stack of arrays per variant.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qkattn.attention import Cache, Mask
from qkattn.model import Decoder, EncoderDecoder
from qkattn.model.blocks import Block, CrossBlock
from qkattn.model.stack import layer_of, scan_layers, stacks_of


class KVCache(NamedTuple):
    """The cached keys and values of L layers, for B rows of S slots. Free slots are zero."""

    # For each variant of attention, arrays [L, B, S, ...] by name, of the variant's layers.
    layers: tuple[Cache, ...]
    length: jax.Array  # the number of filled slots
    # Arrays [L, B, S, ...] of cross-attention, for S source tokens. None in a decoder.
    source: Cache | None = None
    source_valid_BS: jax.Array | None = None  # False on padding of the source


def init_cache(model: Decoder | EncoderDecoder, batch: int, length: int) -> KVCache:
    """Returns an empty cache.

    Args:
        model: The model; its parameters may be ShapeDtypeStructs.
        batch: The number of rows.
        length: The number of slots, one for each token.
    """
    # P variants of attention alternate. For P = 2, layers 0, 2, 4 ... have variant 0.
    L = model.config.num_layers
    P = len(stacks_of(model.blocks))

    def cached(model: Decoder | EncoderDecoder) -> list[Cache]:
        """Returns the arrays [B, 1, ...] of one token in the first layer of each variant."""
        x_BTD = model.embed(jnp.zeros((batch, 1), jnp.int32))
        return [layer_of(model.blocks, index).attention.cached(x_BTD) for index in range(P)]

    layers = []
    for variant, arrays in enumerate(jax.eval_shape(cached, model)):
        num_layers = len(range(variant, L, P))  # layers variant, variant + P, variant + 2 P ...
        slots: Cache = {}
        for name, array in arrays.items():
            shape = (num_layers, batch, length, *array.shape[2:])
            slots[name] = jnp.zeros(shape, array.dtype)
        layers.append(slots)
    return KVCache(tuple(layers), length=jnp.int32(0))


def encode_source(
    model: EncoderDecoder, source_BS: jax.Array, valid_BS: jax.Array, length: int
) -> KVCache:
    """Runs the encoder, and returns a cache with its keys and values for cross-attention.

    Args:
        model: An encoder-decoder.
        source_BS: Source tokens, padded at the end of each row.
        valid_BS: False on padding.
        length: The number of empty slots for target tokens.
    """
    segments_BS = valid_BS.astype(jnp.int32)  # a row is segment 1, padding is segment 0
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
    first = cache.length  # position of the first new token
    positions_BT = jnp.broadcast_to(first + jnp.arange(T), tokens_BT.shape)
    x_BTD = model.embed(tokens_BT, positions_BT)
    mask = Mask(causal=True, first_query=first, window=model.config.window)

    def layer(
        carry: tuple[jax.Array, tuple[Cache, ...]],
        block: Block,
        layer_index: tuple[int, jax.Array],
        source: Cache | None,
    ) -> tuple[jax.Array, tuple[Cache, ...]]:
        """Runs one layer on the new tokens, and stores their keys and values in the cache.

        Args:
            carry: The residual stream x_BTD, and `KVCache.layers`.
            block: The layer.
            layer_index: (variant, index); `block` is number `index` of the variant's layers.
            source: The cached arrays of cross-attention; None in a decoder.

        Returns:
            The carry after the layer.
        """
        x_BTD, caches = carry
        variant, index = layer_index
        variant_cache = caches[variant]  # arrays [L, B, S, ...] of the variant's layers
        updated_cache: Cache = {}  # the same arrays with the new tokens, filled by `attend`

        def attend(z_BTD: jax.Array) -> jax.Array:
            """Stores the keys and values of the new tokens, then attends to the whole cache."""
            new_arrays = block.attention.cached(z_BTD, first)
            updated_cache.update(_with_new_tokens(variant_cache, new_arrays, index, first))
            layer_cache: Cache = {}  # arrays [B, S, ...] of this layer
            for name, array in updated_cache.items():
                layer_cache[name] = jax.lax.dynamic_index_in_dim(array, index, keepdims=False)
            return block.attention.attend_to(z_BTD, layer_cache, mask)

        x_BTD = block.add_branch(attend, block.attention_norm, x_BTD)
        if isinstance(block, CrossBlock):
            attend_to_source = functools.partial(
                block.cross_attention.attend_to,
                cache=source,
                mask=Mask(valid_BS=cache.source_valid_BS),
                cross=True,
            )
            x_BTD = block.add_branch(attend_to_source, block.cross_norm, x_BTD)
        x_BTD = block.add_mlp(x_BTD)

        updated_caches = list(caches)
        updated_caches[variant] = updated_cache
        return x_BTD, tuple(updated_caches)

    # The carry of a scan is updated in place. An input would be copied.
    x_BTD, layers = scan_layers(
        layer, (x_BTD, cache.layers), model.blocks, cache.source, config=model.config
    )
    last_B1D = model.normed(x_BTD[:, -1:])
    logits_BV = model.logits(last_B1D)[:, 0]
    return logits_BV, cache._replace(layers=layers, length=first + T)


def _with_new_tokens(stack: Cache, new_arrays: Cache, index: jax.Array, first: jax.Array) -> Cache:
    """Returns the arrays [L, B, S, ...] of a variant, with T new tokens in one layer.

    For each name, computes stack[name].at[index, :, first : first + T].set(new_arrays[name]).
    """
    # All start indices must have one dtype. A literal 0 would be int64 under x64.
    zero = jnp.zeros_like(first)
    updated: Cache = {}
    for name, array in new_arrays.items():  # [B, T, ...]
        start = (index, zero, first) + (zero,) * (array.ndim - 2)
        updated[name] = jax.lax.dynamic_update_slice(stack[name], array[None], start)
    return updated


def take_rows(cache: KVCache, rows_M: jax.Array) -> KVCache:
    """Returns a cache whose row m is row rows_M[m] of `cache`.

    If the number of rows stays the same, the arrays of the source are not copied. Then row m and
    row rows_M[m] must have the same source, as in a beam search.
    """

    def take(arrays: Any) -> Any:
        """Takes rows of arrays [L, B, ...]."""
        return jax.tree.map(lambda array: array[:, rows_M], arrays)

    taken = cache._replace(layers=take(cache.layers))
    if cache.source is None:
        return taken
    keeps_sources = len(rows_M) == len(cache.source_valid_BS)
    if keeps_sources:
        return taken
    return taken._replace(source=take(cache.source), source_valid_BS=cache.source_valid_BS[rows_M])
