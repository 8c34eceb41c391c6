"""Text generation from token ids: sampling, greedy decoding and beam search."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.config import ModelConfig
from qkattn.decode.beam import Choice, Hypotheses, Step, beam_search, decode
from qkattn.decode.kv_cache import KVCache, encode_source, init_cache, prefill, take_rows
from qkattn.errors import ConfigError
from qkattn.model import Decoder, EncoderDecoder


def choose(logits_BV: jax.Array, keys_B: jax.Array, *, temperature: float) -> jax.Array:
    """Samples the next token of each row from softmax(logits / temperature).

    Temperature 0 takes the argmax, and the lowest id of a tie.
    """
    if temperature == 0:
        return jnp.argmax(logits_BV, -1)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV / temperature)


def _with_checked_ids(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates `generate` or `search` to check the ids of prompts and source.

    The ids are checked before the call, because a compiled function cannot see their values.
    """

    @functools.wraps(compiled)
    def checked(
        model: Any, prompts_BT: Any, num_tokens: int, source: Any = None, **options: Any
    ) -> Any:
        vocab_size = model.config.vocab_size
        if source is not None:
            source_BS, valid_BS = source
            # `generate` has no argument `source`, so it is passed on only if it is given.
            options['source'] = (_checked_ids('source_BS', source_BS, vocab_size), valid_BS)
        prompts_BT = _checked_ids('prompts_BT', prompts_BT, vocab_size)
        return compiled(model, prompts_BT, num_tokens, **options)

    return checked


def _checked_ids(name: str, ids: Any, vocab_size: int) -> Any:
    """Returns the ids as a jax array.

    Raises ConfigError, with the argument name `name`, if an id is not in 0 .. vocab_size - 1.
    """
    is_traced = isinstance(ids, jax.core.Tracer)
    if is_traced:  # the values are not known
        return ids
    ids_as_numpy = np.asarray(ids)
    if ids_as_numpy.size:
        dtype = ids_as_numpy.dtype
        require(dtype.kind in 'iu', f'{name} holds {dtype}; it must hold whole numbers')
        low = ids_as_numpy.min()
        high = ids_as_numpy.max()
        require(
            0 <= low and high < vocab_size,
            f'{name} has ids from {low} to {high}; they must be from 0 to {vocab_size - 1}, '
            'below model.vocab_size',
        )
    return ids if isinstance(ids, jax.Array) else jnp.asarray(ids_as_numpy, jnp.int32)


@_with_checked_ids
@functools.partial(jax.jit, static_argnames=('num_tokens', 'temperature', 'vocab_size'))
def generate(
    model: Decoder,
    prompts_BT: jax.Array,
    num_tokens: int,
    *,
    key: jax.Array | None = None,
    temperature: float = 0.0,
    vocab_size: int | None = None,
) -> jax.Array:
    """Continues each prompt by `num_tokens` tokens, sampled or greedy.

    Compiles one program per shape and set of options. A row depends only on its own prompt, its
    index and the key.

    Args:
        model: A decoder.
        prompts_BT: B prompts of T tokens.
        num_tokens: The number of new tokens.
        key: The random key; greedy decoding needs none.
        temperature: Divides the logits; 0 is greedy decoding.
        vocab_size: Ids from here on are never generated; by default model.vocab_size.

    Returns:
        The new tokens, int32 of shape [B, num_tokens].

    Raises:
        ConfigError: An option or an id is out of range, a prompt is empty, the model is not a
            decoder, or prompt and new tokens exceed model.context by more than one token. (The
            model does not read the last token.)
    """
    is_valid_temperature = 0 <= temperature < math.inf
    require(is_valid_temperature, f'{temperature=} must be 0 (greedy) or above, and finite')
    require(not temperature or key is not None, f'key is required to sample at {temperature=}')
    if key is None:
        key = jax.random.key(0)  # unused in greedy decoding

    def next_tokens(t: jax.Array, logits_BV: jax.Array, tokens_BT: jax.Array) -> Choice:
        """Chooses the new token at position t of every row; the state is all new tokens."""
        step_key = jax.random.fold_in(key, t)
        keys_B = jax.vmap(jax.random.fold_in, (None, 0))(step_key, jnp.arange(B))
        tokens_B = choose(logits_BV, keys_B, temperature=temperature).astype(jnp.int32)
        all_tokens_BT = tokens_BT.at[:, t].set(tokens_B)
        return Choice(state=all_tokens_BT, tokens_M=tokens_B, rows_M=None)

    logits_BV, cache, step = _prefill_prompts(model, prompts_BT, num_tokens, vocab_size)
    B = len(logits_BV)
    return decode(
        logits_BV,
        cache,
        step,
        choose=next_tokens,
        state=jnp.zeros((B, num_tokens), jnp.int32),
        num_tokens=num_tokens,
    )


@_with_checked_ids
@functools.partial(
    jax.jit, static_argnames=('num_tokens', 'separator', 'beam', 'length_penalty', 'vocab_size')
)
def search(
    model: Decoder | EncoderDecoder,
    prompts_BT: jax.Array,
    num_tokens: int,
    source: tuple[jax.Array, jax.Array] | None = None,
    *,
    separator: int,
    beam: int,
    length_penalty: float = 1.0,
    vocab_size: int | None = None,
) -> Hypotheses:
    """Returns the best continuations of each prompt by beam search; see `beam_search`.

    Args:
        model: A decoder or an encoder-decoder.
        prompts_BT: B prompts of T tokens.
        num_tokens: The maximum number of new tokens.
        source: (source_BS, valid_BS) as in `encode_source`, for an encoder-decoder.
        separator: The id that ends a continuation.
        beam: The number of continuations per prompt.
        length_penalty: See `beam_search`.
        vocab_size: Ids from here on are never chosen; by default model.vocab_size.

    Raises:
        ConfigError: As in `generate`, or the source is longer than model.source_context or has
            another number of rows than the prompts.
    """
    logits_BV, cache, step = _prefill_prompts(model, prompts_BT, num_tokens, vocab_size, source)
    B, V = logits_BV.shape
    require(beam >= 1, f'{beam=} must be at least 1')
    require(0 <= separator < V, f'{separator=} must be an id from 0 to {V - 1}')
    # `beam` copies of each row: 0 0 1 1 2 2 ... for a beam of 2.
    rows_M = jnp.repeat(jnp.arange(B), beam)
    return beam_search(
        logits_BV[rows_M],
        take_rows(cache, rows_M),
        step,
        beam=beam,
        num_tokens=num_tokens,
        separator=separator,
        length_penalty=length_penalty,
    )


def _prefill_prompts(
    model: Decoder | EncoderDecoder,
    prompts_BT: jax.Array,
    num_tokens: int,
    vocab_size: int | None,
    source: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, KVCache, Step]:
    """Checks the arguments, and runs the model over the prompts and the source, if any.

    Returns:
        logits_BV: The logits of the first new token.
        cache: A cache with the prompts, and with room for the new tokens.
        step: A function that appends one token to each row of the cache.
    """
    V = model.config.vocab_size if vocab_size is None else vocab_size
    _check_arguments(model.config, prompts_BT, num_tokens, V, source)
    B, T = prompts_BT.shape
    S = T + num_tokens - 1  # cache slots; the model does not read the last token
    if source is None:
        cache = init_cache(model, B, S)
    else:
        source_BS, valid_BS = source
        cache = encode_source(model, source_BS, valid_BS, S)
    logits_BV, cache = prefill(model, prompts_BT, cache)

    def step(
        tokens_M: jax.Array, rows_M: jax.Array | None, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """Appends a token to each of M rows; returns the next logits_MV and the new cache.

        Row m continues row rows_M[m] of `cache`, or row m if rows_M is None.
        """
        if rows_M is not None:
            cache = take_rows(cache, rows_M)
        logits_MV, cache = prefill(model, tokens_M[:, None], cache)
        return logits_MV[:, :V], cache

    return logits_BV[:, :V], cache, step


def _check_arguments(
    config: ModelConfig,
    prompts_BT: jax.Array,
    num_tokens: int,
    vocab_size: int,
    source: tuple[jax.Array, jax.Array] | None,
) -> None:
    """Raises ConfigError if the prompts, the new tokens or the source do not fit the model."""
    shape = prompts_BT.shape
    require(len(shape) == 2, f'prompts of shape {shape} must have two axes, rows and tokens')
    B, T = shape
    needed = 'decoder' if source is None else 'encoder_decoder'
    require(
        config.kind == needed,
        f'generation needs a model of kind {needed!r} here, not {config.kind!r}',
    )
    require(B * T > 0, f'prompts of shape {B, T} hold no token to continue')
    require(num_tokens >= 1, f'{num_tokens=} must be at least 1')
    require(
        1 <= vocab_size <= config.vocab_size,
        f'{vocab_size=} must be from 1 to model.vocab_size={config.vocab_size}',
    )
    if source is not None:
        source_BS, _ = source
        require(
            len(source_BS.shape) == 2 and len(source_BS) == B,
            f'source_BS has shape {source_BS.shape}; it must have two axes, and a row for each of '
            f'{B} prompts',
        )
        length = source_BS.shape[1]
        longest = config.encoder.context
        require(
            length <= longest,
            f'a source of {length} tokens does not fit into model.source_context={longest}',
        )
    num_positions = T + num_tokens - 1  # the model does not read the last token
    require(
        num_positions <= config.context,
        f'{T} tokens and {num_tokens=} need {num_positions} positions; '
        f'model.context={config.context}',
    )


def require(valid: Any, message: str) -> None:
    """Raises ConfigError with the message unless `valid` is true."""
    if not valid:
        raise ConfigError(message)
