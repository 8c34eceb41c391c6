"""Decoding with a key/value cache, which holds what `Attention.cached` of each variant returns."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qkattn.attention import Cache, Mask
from qkattn.model import Decoder, EncoderDecoder
from qkattn.model.blocks import Block, Branch, CrossBlock
from qkattn.model.stack import layer_of, scan_layers, stacks_of


class KVCache(NamedTuple):
    """Keys and values of all layers, arrays [L, B, S, ...] by name; unfilled slots are zero."""

    # For each variant of a pattern, the arrays of the layers that have it; L is their number.
    layers: tuple[Cache, ...]
    length: jax.Array  # number of filled slots
    source: Cache | None = None  # of the encoder's output, for cross-attention; None without one
    source_valid_BS: jax.Array | None = None  # False on the padding of the source


def init_cache(model: Decoder | EncoderDecoder, batch: int, length: int) -> KVCache:
    """An empty cache of `length` slots for `batch` rows; the model may be abstract."""
    L = model.config.num_layers
    P = len(stacks_of(model.blocks))  # variants, of which layers 0 to P - 1 are the first ones

    def cached(model: Decoder | EncoderDecoder) -> list[Cache]:
        """What the first layer of each variant caches of one token."""
        x_BTD = model.embed(jnp.zeros((batch, 1), jnp.int32))
        return [layer_of(model.blocks, index).attention.cached(x_BTD) for index in range(P)]

    layers = []
    for first, arrays in enumerate(jax.eval_shape(cached, model)):
        num_layers = len(range(first, L, P))  # of this variant
        slots: Cache = {}
        for name, array in arrays.items():
            shape = (num_layers, batch, length, *array.shape[2:])
            slots[name] = jnp.zeros(shape, array.dtype)
        layers.append(slots)
    return KVCache(tuple(layers), jnp.int32(0))


def encode_source(
    model: EncoderDecoder, source_BS: jax.Array, valid_BS: jax.Array, length: int
) -> KVCache:
    """Runs the encoder and caches its keys and values, with `length` slots for target tokens.

    valid_BS is False on padding, which follows the tokens of a row.
    """
    y_BSD = model.encode(source_BS, valid_BS.astype(jnp.int32))

    def cached(block: CrossBlock, layer: jax.Array) -> Cache:
        return block.at(layer).cross_attention.cached(y_BSD)

    layers_L = jnp.arange(model.config.num_layers)
    source = jax.vmap(cached)(model.blocks, layers_L)
    cache = init_cache(model, len(source_BS), length)
    return cache._replace(source=source, source_valid_BS=valid_BS)


def prefill(
    model: Decoder | EncoderDecoder, tokens_BT: jax.Array, cache: KVCache
) -> tuple[jax.Array, KVCache]:
    """Appends T tokens in one pass; returns the next token's logits_BV and the longer cache.

    Logits are float32 or wider. The cache needs T free slots: jit does not detect an overflow.
    """
    T = tokens_BT.shape[1]
    first = cache.length  # position of the first token
    # Under x64 a literal would be an int64, and the indices of a slice are of one type.
    zero = jnp.zeros_like(first)
    positions_BT = jnp.broadcast_to(first + jnp.arange(T), tokens_BT.shape)
    x_BTD = model.embed(tokens_BT, positions_BT)
    mask = Mask(causal=True, first_query=first, window=model.config.window)

    def layer(
        carry: tuple[jax.Array, tuple[Cache, ...]],
        block: Block,
        layer_index: tuple[int, jax.Array],
        source: Cache | None,
    ) -> tuple[jax.Array, tuple[Cache, ...]]:
        """One layer: the stream after it, and the cache of all layers with its keys and values."""
        x_BTD, layers = carry
        number, index = layer_index  # of the variant, and of the layer among those that have it
        updated: Cache = {}  # the cache of all layers of this variant

        def attend(z_BTD: jax.Array) -> jax.Array:
            for name, array in block.attention.cached(z_BTD, first).items():
                start = (index, zero, first) + (zero,) * (array.ndim - 2)
                updated[name] = jax.lax.dynamic_update_slice(
                    layers[number][name], array[None], start
                )
            layer_cache = {
                name: jax.lax.dynamic_index_in_dim(array, index, keepdims=False)
                for name, array in updated.items()
            }
            return block.attention.attend_to(z_BTD, layer_cache, mask)

        attends: list[Branch] = [attend]
        if isinstance(block, CrossBlock):
            cross_attention = block.cross_attention
            source_mask = Mask(valid_BS=cache.source_valid_BS)

            def cross_attend(z_BTD: jax.Array) -> jax.Array:
                return cross_attention.attend_to(z_BTD, source, source_mask, cross=True)

            attends.append(cross_attend)
        out_BTD = block.around(attends, x_BTD)
        return out_BTD, (*layers[:number], updated, *layers[number + 1 :])

    # The whole cache is carried and updated in place; as an input of the scan it would be copied.
    x_BTD, layers = scan_layers(
        layer, (x_BTD, cache.layers), model.blocks, cache.source, config=model.config
    )
    logits_BV = model.logits(model.normed(x_BTD[:, -1:]))[:, 0]
    return logits_BV, cache._replace(layers=layers, length=first + T)


def take_rows(cache: KVCache, rows_M: jax.Array) -> KVCache:
    """The cache whose row m is row rows_M[m].

    Sources of equally many rows stay in place: a row may only come from one with the same source.
    """

    def take(arrays: Any) -> Any:
        return jax.tree.map(lambda array: array[:, rows_M], arrays)

    taken = cache._replace(layers=take(cache.layers))
    if cache.source is None or len(rows_M) == len(cache.source_valid_BS):
        return taken
    return taken._replace(source=take(cache.source), source_valid_BS=cache.source_valid_BS[rows_M])
