"""Decoding with a cache: each layer keeps what it remembers of past tokens, nothing else.

The cache of a layer is exactly what `Attention.cached` returns, so its size is that of the cell:
keys and values, the stream itself where both are raw, a latent where that is all there is.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from qkattn.attention import Cache as LayerCache
from qkattn.attention import visible
from qkattn.model import Decoder, EncoderDecoder
from qkattn.model.blocks import Block


class Cache(NamedTuple):
    """What decoding keeps between steps.

    Attributes:
      memory: arrays [L, B, S, ...] by name, S slots for tokens; slots not filled yet hold zeros.
      start_B: the slot of each row's first token; slots before it are padding.
      length: slots filled.
      source: what the decoder's blocks remember of the encoder's output, arrays [L, B, S, ...];
        None without an encoder.
      valid_BS: False on the padding of the source; None without an encoder.
    """

    memory: LayerCache
    start_B: jax.Array
    length: jax.Array
    source: LayerCache | None = None
    valid_BS: jax.Array | None = None


def init_cache(model: Decoder | EncoderDecoder, batch: int, length: int) -> Cache:
    """An empty cache of `length` slots for `batch` rows; the model may be abstract."""

    def remember(model: Decoder | EncoderDecoder) -> LayerCache:
        layer = jax.tree.map(lambda stacked: stacked[0], model.blocks)
        return layer.attention.cached(model.embed(jnp.zeros((batch, 1), jnp.int32)))

    L = model.config.num_layers
    memory = {
        name: jnp.zeros((L, batch, length, *array.shape[2:]), array.dtype)
        for name, array in jax.eval_shape(remember, model).items()
    }
    return Cache(memory, jnp.zeros(batch, jnp.int32), jnp.int32(0))


def read_source(
    model: EncoderDecoder, source_BS: jax.Array, valid_BS: jax.Array, length: int
) -> Cache:
    """Encodes the source; a cache with `length` slots for target tokens.

    Args:
      valid_BS: False on padding, which stands behind the tokens of a row.
    """
    y_BSD = model.encode(source_BS, valid_BS.astype(jnp.int32))
    source = jax.vmap(lambda block: block.cross_attention.cached(y_BSD))(model.blocks)
    return init_cache(model, len(source_BS), length)._replace(source=source, valid_BS=valid_BS)


def prefill(
    model: Decoder | EncoderDecoder, tokens_BT: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Reads T tokens at once behind those in the cache.

    Rows of different lengths are padded on the left, `cache.start_B` slots each; a row's logits
    do not depend on its padding.

    Returns:
      logits_BV of the token after the last one, float32 or wider; and the longer cache. There must
      be room for T: slots beyond the last are not noticed inside jit.
    """
    T = tokens_BT.shape[1]
    S = next(iter(cache.memory.values())).shape[2]
    slots_T, first = cache.length + jnp.arange(T), cache.length
    positions_BT = jnp.maximum(slots_T - cache.start_B[:, None], 0)
    x_BTD = model.embed(tokens_BT, positions_BT)
    valid_BS = jnp.arange(S) >= cache.start_B[:, None]
    mask_BTS = visible(
        T, S, causal=True, valid_BS=valid_BS, first_query=first, window=model.config.window
    )

    def layer(carry, inputs):
        block, index, source = inputs
        asked = {}
        if source is not None:
            mask_B1S = cache.valid_BS[:, None]

            def ask(z_BTD: jax.Array) -> jax.Array:
                return block.cross_attention.attend_to(z_BTD, source, mask_B1S, cross=True)

            asked = {'ask': ask}
        return _extend(block, index, *carry, mask_BTS, first, **asked), None

    # The whole cache is carried and written in place; scanned over, all of it would be copied.
    layers = (model.blocks, jnp.arange(model.config.num_layers), cache.source)
    (x_BTD, memory), _ = jax.lax.scan(
        layer, (x_BTD, cache.memory), layers, unroll=model.config.unroll
    )
    logits_BV = model.logits(model.end(x_BTD[:, -1:]))[:, 0]
    return logits_BV, cache._replace(memory=memory, length=first + T)


def decode_step(
    model: Decoder | EncoderDecoder, tokens_B: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Reads one token a row; see `prefill`."""
    return prefill(model, tokens_B[:, None], cache)


def take_rows(cache: Cache, rows_M: jax.Array) -> Cache:
    """The cache with row rows_M[m] as its row m.

    Where the number of rows stays the same, a row has to come from one with the same source, which
    is then left where it is.
    """
    memory = jax.tree.map(lambda array: array[:, rows_M], cache.memory)
    taken = cache._replace(memory=memory, start_B=cache.start_B[rows_M])
    if cache.source is None or len(rows_M) == len(cache.start_B):
        return taken
    return taken._replace(
        source=jax.tree.map(lambda array: array[:, rows_M], cache.source),
        valid_BS=cache.valid_BS[rows_M],
    )


def _extend(
    block: Block,
    index: jax.Array,
    x_BTD: jax.Array,
    memory: LayerCache,
    mask_BTS: jax.Array,
    first: jax.Array,
    **asked,
) -> tuple[jax.Array, LayerCache]:
    """Block number `index`, whose attention reads the memory, x in its slots from `first` on."""
    written = {}

    def attend(y_BTD: jax.Array) -> jax.Array:
        for name, added in block.attention.cached(y_BTD).items():
            where = (index, 0, first) + (0,) * (added.ndim - 2)
            written[name] = jax.lax.dynamic_update_slice(memory[name], added[None], where)
        own = {
            name: jax.lax.dynamic_index_in_dim(a, index, keepdims=False)
            for name, a in written.items()
        }
        return block.attention.attend_to(y_BTD, own, mask_BTS, first_query=first)

    return block.around(attend, x_BTD, **asked), written
