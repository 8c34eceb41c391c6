"""Continuations of prompts by a language model: sampling, greedy decoding, beam search."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.decode.beam import Hypotheses, beam_search, require
from qkattn.decode.kv_cache import KVCache, decode_step, init_cache, prefill, take_rows
from qkattn.errors import ConfigError
from qkattn.model import Decoder


def choose(
    logits_BV: jax.Array,
    keys_B: jax.Array,
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
) -> jax.Array:
    """The next token of each row; ties go to the lower id.

    Args:
      logits_BV: of the next token.
      keys_B: a random key for each row.
      temperature: divides the logits; 0 takes the argmax.
      top_k: samples from the k most probable tokens only (Fan et al. 2018).
      top_p: samples, after top_k, from the smallest set of tokens whose renormalized probabilities
        sum to at least p (nucleus sampling, Holtzman et al. 2020).
    """
    if temperature == 0:
        return jnp.argmax(logits_BV, -1)
    order_BV = jnp.argsort(-logits_BV, axis=-1, stable=True)
    sorted_BV = jnp.take_along_axis(logits_BV, order_BV, -1) / temperature
    if top_k is not None:
        sorted_BV = jnp.where(jnp.arange(sorted_BV.shape[-1]) < top_k, sorted_BV, -jnp.inf)
    if top_p is not None:
        p_BV = jax.nn.softmax(sorted_BV, -1)
        before_BV = jnp.cumsum(p_BV, -1) - p_BV
        # Rounding of the sum before it must not exclude the most probable token.
        kept_BV = (before_BV < top_p).at[:, 0].set(True)
        sorted_BV = jnp.where(kept_BV, sorted_BV, -jnp.inf)
    ranks_B = jax.vmap(jax.random.categorical)(keys_B, sorted_BV)
    return jnp.take_along_axis(order_BV, ranks_B[:, None], -1)[:, 0]


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]] | np.ndarray,
    num_tokens: int,
    *,
    key: jax.Array | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    vocab_size: int | None = None,
) -> jax.Array:
    """Continues each prompt by `num_tokens` tokens; int32 tokens_BT without the prompts.

    Compiles one program per shape and set of options. A row depends on its own prompt, its index
    and the key only, not on the rest of the batch.

    Args:
      prompts: token ids of each row; rows may differ in length.
      key: required unless the temperature is 0.
      temperature, top_k, top_p: see `choose`; temperature 0 is greedy decoding.
      vocab_size: ids from here on are never generated; None allows all ids of the model.

    Raises:
      ConfigError: a model that is no decoder, an option out of range, an id outside the vocabulary,
        or more tokens than model.context. The last generated token needs no position, since it is
        not fed back.
    """
    finite = 0 <= temperature < math.inf
    require(finite, f'{temperature=} must be 0 (greedy) or above, and finite')
    require(not temperature or key is not None, f'key is required to sample at {temperature=}')
    plain = (top_k, top_p) == (None, None)
    require(temperature or plain, 'top_k and top_p have no effect at temperature=0; leave them out')
    require(top_k is None or top_k >= 1, f'{top_k=} must be at least 1, or None')
    require(top_p is None or 0 < top_p <= 1, f'{top_p=} must be above 0 and at most 1, or None')
    tokens_BT, start_B, V = _prepare(model, prompts, num_tokens, vocab_size)
    return _generate(
        model,
        tokens_BT,
        start_B,
        jax.random.key(0) if key is None else key,
        num_tokens=num_tokens,
        temperature=float(temperature),
        top_k=None if top_k is None else min(top_k, V),
        top_p=top_p,
        vocab_size=V,
    )


@functools.partial(
    jax.jit, static_argnames=('num_tokens', 'temperature', 'top_k', 'top_p', 'vocab_size')
)
def _generate(
    model: Decoder,
    tokens_BT: jax.Array,
    start_B: jax.Array,
    key: jax.Array,
    *,
    num_tokens: int,
    vocab_size: int,
    **options: Any,
) -> jax.Array:
    B, T = tokens_BT.shape

    def next_tokens(logits_BV: jax.Array, i: jax.Array) -> jax.Array:
        keys_B = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, i), jnp.arange(B))
        return choose(logits_BV[:, :vocab_size], keys_B, **options).astype(jnp.int32)

    def step(
        carry: tuple[jax.Array, KVCache], i: jax.Array
    ) -> tuple[tuple[jax.Array, KVCache], jax.Array]:
        tokens_B, cache = carry
        logits_BV, cache = decode_step(model, tokens_B, cache)
        tokens_B = next_tokens(logits_BV, i)
        return (tokens_B, cache), tokens_B

    cache = init_cache(model, B, T + num_tokens - 1)._replace(start_B=start_B)
    logits_BV, cache = prefill(model, tokens_BT, cache)
    first_B = next_tokens(logits_BV, jnp.int32(0))
    _, rest_TB = jax.lax.scan(step, (first_B, cache), jnp.arange(1, num_tokens))
    return jnp.concatenate([first_B[:, None], rest_TB.T], axis=1)


def search(
    model: Decoder,
    prompts: Sequence[Sequence[int]] | np.ndarray,
    num_tokens: int,
    *,
    separator: int,
    beam: int,
    length_penalty: float = 1.0,
    vocab_size: int | None = None,
) -> Hypotheses:
    """The best continuations of each prompt by beam search, up to `num_tokens` tokens.

    Args:
      separator, beam, length_penalty: see `beam_search`.
      vocab_size: see `generate`.

    Raises:
      ConfigError: as for `generate` and `beam_search`.
    """
    tokens_BT, start_B, V = _prepare(model, prompts, num_tokens, vocab_size)
    return _search(
        model,
        tokens_BT,
        start_B,
        num_tokens=num_tokens,
        separator=separator,
        beam=beam,
        length_penalty=length_penalty,
        vocab_size=V,
    )


@functools.partial(
    jax.jit,
    static_argnames=('num_tokens', 'separator', 'beam', 'length_penalty', 'vocab_size'),
)
def _search(
    model: Decoder, tokens_BT: jax.Array, start_B: jax.Array, *, num_tokens: int, **options: Any
) -> Hypotheses:
    B, T = tokens_BT.shape
    cache = init_cache(model, B, T + num_tokens - 1)._replace(start_B=start_B)
    logits_BV, cache = prefill(model, tokens_BT, cache)
    step = functools.partial(decode_step, model)
    return beam_search(logits_BV, cache, step, take_rows, num_tokens=num_tokens, **options)


def _prepare(
    model: Decoder,
    prompts: Sequence[Sequence[int]] | np.ndarray,
    num_tokens: int,
    vocab_size: int | None,
) -> tuple[np.ndarray, np.ndarray, int]:
    """The prompts, aligned on the last column, the column where each begins, and the vocabulary.

    Checks that the prompts and `num_tokens` more fit.
    """
    kind, most, context = model.config.kind, model.config.vocab_size, model.config.context
    V, rows = most if vocab_size is None else vocab_size, [np.asarray(prompt) for prompt in prompts]
    require(kind == 'decoder', f'model.kind={kind!r} does not continue text; it must be decoder')
    require(num_tokens >= 1, f'{num_tokens=} must be at least 1')
    require(1 <= V <= most, f'vocab_size={V} must be from 1 to model.vocab_size={most}')
    require(
        rows and all(row.ndim == 1 and row.size for row in rows),
        'prompts must hold at least one row, each of at least one token id',
    )
    for i, row in enumerate(rows):
        whole = np.issubdtype(row.dtype, np.integer)
        require(whole, f'prompts[{i}] is of {row.dtype}, but token ids are integers')
        for unknown in row[(row < 0) | (row >= most)]:
            raise ConfigError(f'prompts[{i}] holds id {unknown}; ids are 0 to {most - 1}')
    T = max(len(row) for row in rows)
    needed = T + num_tokens - 1
    require(
        needed <= context,
        f'a prompt of {T} tokens and {num_tokens=} need {needed} positions, more than '
        f'model.context={context}',
    )
    tokens_BT = np.stack([np.pad(row.astype(np.int32), (T - len(row), 0)) for row in rows])
    return tokens_BT, np.array([T - len(row) for row in rows], np.int32), V
