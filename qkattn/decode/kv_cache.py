"""Decoding with a key/value cache, which holds what `Attention.cached` returns for each layer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qkattn.attention import Cache, Mask
from qkattn.model import Decoder, EncoderDecoder
from qkattn.model.blocks import Block, Branch, CrossBlock
from qkattn.model.stack import layer_of, scan_layers, stacks_of


class KVCache(NamedTuple):
    """The cached keys and values of all layers. Slots that are not filled yet are zero."""

    # One entry per variant of the model's pattern, or a single entry without a pattern: arrays
    # [L, B, S, ...] by name, where L is the number of layers that have the variant.
    layers: tuple[Cache, ...]
    length: jax.Array  # the number of filled slots
    # In an encoder-decoder, what cross-attention caches of the encoder's output, and False on the
    # padding of the source.
    source: Cache | None = None
    source_valid_BS: jax.Array | None = None


def init_cache(model: Decoder | EncoderDecoder, batch: int, length: int) -> KVCache:
    """Returns an empty cache with `length` slots for `batch` rows.

    The model may have shapes in place of arrays, because only shapes are computed here.
    """
    # The layers have P variants in turn: layer l has variant l mod P. Without a pattern P is 1.
    L = model.config.num_layers
    P = len(stacks_of(model.blocks))

    def cached(model: Decoder | EncoderDecoder) -> list[Cache]:
        """Returns what layers 0 to P - 1, one of each variant, cache of one token."""
        x_BTD = model.embed(jnp.zeros((batch, 1), jnp.int32))
        return [layer_of(model.blocks, index).attention.cached(x_BTD) for index in range(P)]

    layers = []
    for variant, arrays in enumerate(jax.eval_shape(cached, model)):
        layers_of_variant = range(variant, L, P)
        num_layers = len(layers_of_variant)
        slots: Cache = {}
        for name, array in arrays.items():
            # The array of one token is [B, 1, ...].
            shape = (num_layers, batch, length, *array.shape[2:])
            slots[name] = jnp.zeros(shape, array.dtype)
        layers.append(slots)
    return KVCache(tuple(layers), jnp.int32(0))


def encode_source(
    model: EncoderDecoder, source_BS: jax.Array, valid_BS: jax.Array, length: int
) -> KVCache:
    """Runs the encoder, and returns a cache of its keys and values for cross-attention.

    The cache has `length` empty slots for target tokens. valid_BS is False on padding, which
    follows the tokens of a row.
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
    """Appends T tokens in one pass, and returns the next token's logits_BV and the longer cache.

    Logits are float32 or wider. The cache must have T free slots; jit cannot detect an overflow.
    """
    T = tokens_BT.shape[1]
    first = cache.length  # position of the first token
    # The indices of a slice must have one dtype. Under x64, a literal 0 would be an int64.
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
        """Computes one layer: the stream after it, and the caches with its keys and values."""
        x_BTD, layers = carry
        variant, index = layer_index  # the layer is number `index` of those with this variant
        updated: Cache = {}  # the cache of all layers of this variant, filled by `attend`

        def attend(z_BTD: jax.Array) -> jax.Array:
            """Writes the tokens' keys and values into the cache, then attends to the cache."""
            layer_cache: Cache = {}
            for name, array in block.attention.cached(z_BTD, first).items():
                # The array [B, T, ...] goes to [index, :, first : first + T].
                start = (index, zero, first) + (zero,) * (array.ndim - 2)
                updated[name] = jax.lax.dynamic_update_slice(
                    layers[variant][name], array[None], start
                )
            for name, array in updated.items():
                layer_cache[name] = jax.lax.dynamic_index_in_dim(array, index, keepdims=False)
            return block.attention.attend_to(z_BTD, layer_cache, mask)

        attends: list[Branch] = [attend]
        if isinstance(block, CrossBlock):
            cross_attention = block.cross_attention
            source_mask = Mask(valid_BS=cache.source_valid_BS)

            def cross_attend(z_BTD: jax.Array) -> jax.Array:
                return cross_attention.attend_to(z_BTD, source, source_mask, cross=True)

            attends.append(cross_attend)

        out_BTD = block.around(attends, x_BTD)
        caches = list(layers)
        caches[variant] = updated
        return out_BTD, tuple(caches)

    # The scan carries the whole cache, which it updates in place. It would copy an input.
    x_BTD, layers = scan_layers(
        layer, (x_BTD, cache.layers), model.blocks, cache.source, config=model.config
    )
    last_B1D = model.normed(x_BTD[:, -1:])
    logits_BV = model.logits(last_B1D)[:, 0]
    return logits_BV, cache._replace(layers=layers, length=first + T)


def take_rows(cache: KVCache, rows_M: jax.Array) -> KVCache:
    """Returns a cache whose row m is row rows_M[m] of `cache`.

    If the number of rows stays the same, the caches of the sources are not moved. Then a row may
    only be taken from a row with the same source, as among the hypotheses of a beam.
    """

    def take(arrays: Any) -> Any:
        return jax.tree.map(lambda array: array[:, rows_M], arrays)

    taken = cache._replace(layers=take(cache.layers))
    if cache.source is None or len(rows_M) == len(cache.source_valid_BS):
        return taken
    return taken._replace(source=take(cache.source), source_valid_BS=cache.source_valid_BS[rows_M])
