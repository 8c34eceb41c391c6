"""Beam search over any model that reads one token at a time."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.errors import ConfigError

Cache = Any
"""Whatever a model keeps between steps: a pytree whose shapes and dtypes stay the same."""


class Hypotheses(NamedTuple):
    """The K best hypotheses of each row, best first.

    Attributes:
      tokens_BKT: token ids, int32; the separator from the end of a hypothesis on.
      lengths_BK: tokens, the separator included; T where a hypothesis never ended.
      scores_BK: nats, divided by length ** length_penalty. Where fewer than K hypotheses have a
        probability above zero, the places left over have score -inf and length 0.
    """

    tokens_BKT: jax.Array
    lengths_BK: jax.Array
    scores_BK: jax.Array


class _Alive(NamedTuple):
    """The hypotheses still growing, likeliest first, and the ones that they grew from."""

    tokens_BKT: jax.Array
    nats_BK: jax.Array
    parents_BK: jax.Array


def beam_search(
    logits_BV: jax.Array,
    cache: Cache,
    step: Callable[[jax.Array, Cache], tuple[jax.Array, Cache]],
    reorder: Callable[[Cache, jax.Array], Cache],
    *,
    beam: int,
    num_tokens: int,
    separator: int,
    length_penalty: float = 1.0,
    vocab_size: int | None = None,
) -> Hypotheses:
    """Searches for the likeliest continuations of each row; traceable.

    A finished hypothesis scores its log-probability, the separator's included, divided by
    length ** length_penalty, as fairseq's lenpen (Ott et al. 2019); Wu et al. 2016 divide by
    ((5 + length) / 6) ** length_penalty instead. 0 compares plain probabilities.

    Every step extends the `beam` likeliest hypotheses still growing. An extension by the separator
    finishes if it is among the `beam` likeliest extensions, so `beam` = 1 is greedy decoding. A row
    is over once `beam` of its hypotheses have finished, even if one still growing would score
    higher, as in fairseq and with `early_stopping=True` in transformers; the search is over when
    all rows are. Where fewer have finished at `num_tokens`, the unfinished ones compete with them
    by the same score, as in transformers; fairseq would end them with a separator.

    Equal scores go to the lower beam, then to the lower id; to the hypothesis that finished first.
    Rows do not depend on each other. Logits of -inf are never chosen; NaN and inf make scores NaN.

    Args:
      logits_BV: of the first token.
      cache: of B rows, which have read all that comes before the first token.
      step: reads one token a row; the logits of the next, and the cache. It runs with B * beam
        rows, those of row b from b * beam on, and not for the last token.
      reorder: the cache of the given rows: B * beam indices into the cache's B at first, from then
        on into its B * beam.
      num_tokens: the most tokens that a hypothesis can have, the separator included.
      separator: ends a hypothesis.
      vocab_size: ids from here on are never chosen, and probabilities add up to 1 without them;
        None is all that have logits.

    Raises:
      ConfigError: an option out of range.
    """
    B, V = logits_BV.shape[0], logits_BV.shape[1] if vocab_size is None else vocab_size
    K, T = beam, num_tokens
    _check_options(K, T, separator, length_penalty, V, logits_BV.shape[1])
    dtype = jnp.promote_types(logits_BV.dtype, jnp.float32)
    divisors_T = jnp.asarray(np.arange(1, T + 1) ** float(length_penalty), dtype)

    def extend(
        t: jax.Array, logits_MV: jax.Array, alive: _Alive, finished: Hypotheses
    ) -> tuple[_Alive, Hypotheses]:
        nats_BC, tokens_BC, parents_BC = _extensions(
            logits_MV[:, :V].astype(dtype).reshape(B, K, V), alive.nats_BK
        )
        ends_BC = tokens_BC == separator
        ending_BK = ends_BC[:, :K] & _growing(alive, finished)[:, None]
        finished = _best(
            finished,
            Hypotheses(
                # What a hypothesis has not reached yet holds separators already.
                _take(alive.tokens_BKT, parents_BC[:, :K]),
                jnp.full((B, K), t + 1, jnp.int32),
                jnp.where(ending_BK, nats_BC[:, :K] / divisors_T[t], -jnp.inf),
            ),
        )
        nats_BK, chosen_BK = jax.lax.top_k(jnp.where(ends_BC, -jnp.inf, nats_BC), K)
        parents_BK = _take(parents_BC, chosen_BK)
        tokens_BKT = _take(alive.tokens_BKT, parents_BK)
        tokens_BKT = tokens_BKT.at[:, :, t].set(_take(tokens_BC, chosen_BK))
        return _Alive(tokens_BKT, nats_BK, parents_BK), finished

    def unfinished(carry) -> jax.Array:
        t, _, alive, finished = carry
        return (t < T) & jnp.any(_growing(alive, finished))

    def body(carry):
        t, cache, alive, finished = carry
        cache = reorder(cache, _rows(alive.parents_BK))
        logits_MV, cache = step(alive.tokens_BKT[:, :, t - 1].reshape(-1), cache)
        return t + 1, cache, *extend(t, logits_MV, alive, finished)

    none_BKT = jnp.full((B, K, T), separator, jnp.int32)
    none_BK = jnp.full((B, K), -jnp.inf, dtype)
    zeros_BK = jnp.zeros((B, K), jnp.int32)
    # One empty hypothesis a row: were there K, all would grow alike.
    alive = _Alive(none_BKT, none_BK.at[:, 0].set(0), zeros_BK)
    finished = Hypotheses(none_BKT, zeros_BK, none_BK)
    copies_M = jnp.repeat(jnp.arange(B), K)
    state = extend(jnp.int32(0), logits_BV[copies_M], alive, finished)
    carry = (jnp.int32(1), reorder(cache, copies_M), *state)
    _, _, alive, finished = jax.lax.while_loop(unfinished, body, carry)
    # A row that still grows has T tokens; any other is over.
    scores_BK = jnp.where(
        _growing(alive, finished)[:, None], alive.nats_BK / divisors_T[-1], -jnp.inf
    )
    return _best(finished, Hypotheses(alive.tokens_BKT, zeros_BK + T, scores_BK))


def _extensions(
    logits_BKV: jax.Array, nats_BK: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The likeliest extensions of each row's hypotheses: log-probabilities, tokens, parents.

    There are twice as many as hypotheses, if the vocabulary allows, because as many as there are
    hypotheses may be by the separator.
    """
    B, K, V = logits_BKV.shape
    # Ranked by logits within a hypothesis, as greedy decoding does: differences between them can
    # be lost in log-probabilities.
    logits_BKC, tokens_BKC = jax.lax.top_k(logits_BKV, min(2 * K, V))
    total_BK1 = jax.nn.logsumexp(logits_BKV, axis=-1, keepdims=True)
    # All logits may be -inf, and so their total.
    gains_BKC = jnp.where(logits_BKC == -jnp.inf, -jnp.inf, logits_BKC - total_BK1)
    # NaN of either sign comes first, where it shows; -NaN would come last.
    gains_BKC = jnp.where(jnp.isnan(gains_BKC), jnp.nan, gains_BKC)
    flat_BC = (nats_BK[:, :, None] + gains_BKC).reshape(B, -1)
    nats_BC, flat_index_BC = jax.lax.top_k(flat_BC, min(2 * K, flat_BC.shape[1]))
    tokens_BC = _take(tokens_BKC.reshape(B, -1), flat_index_BC)
    return nats_BC, tokens_BC, flat_index_BC // logits_BKC.shape[-1]


def _growing(alive: _Alive, finished: Hypotheses) -> jax.Array:
    """Which rows have a place left and a hypothesis that may take it; [B]."""
    places_B = jnp.any(finished.scores_BK == -jnp.inf, axis=1)
    return places_B & jnp.any(alive.nats_BK != -jnp.inf, axis=1)


def _best(first: Hypotheses, second: Hypotheses) -> Hypotheses:
    """As many as in `first` of both, best first; ties go to `first`."""
    both = [jnp.concatenate(arrays, axis=1) for arrays in zip(first, second, strict=True)]
    scores_BK, chosen_BK = jax.lax.top_k(both[2], first.scores_BK.shape[1])
    return Hypotheses(_take(both[0], chosen_BK), _take(both[1], chosen_BK), scores_BK)


def _take(array: jax.Array, index_BK: jax.Array) -> jax.Array:
    """array[b, index_BK[b, k]] for every b and k."""
    return jax.vmap(lambda array, index_K: array[index_K])(array, index_BK)


def _rows(parents_BK: jax.Array) -> jax.Array:
    """Hypotheses by number within their row as rows of the cache."""
    B, K = parents_BK.shape
    return (jnp.arange(B)[:, None] * K + parents_BK).reshape(-1)


def _check_options(
    beam: int, num_tokens: int, separator: int, length_penalty: float, vocab_size: int, known: int
) -> None:
    if beam < 1:
        raise ConfigError(f'beam={beam} must be at least 1')
    if num_tokens < 1:
        raise ConfigError(f'num_tokens={num_tokens} must be at least 1')
    if not math.isfinite(length_penalty):
        raise ConfigError(f'length_penalty={length_penalty} must be finite')
    if not 1 <= vocab_size <= known:
        raise ConfigError(f'vocab_size={vocab_size} must be from 1 to the {known} logits')
    if not 0 <= separator < vocab_size:
        raise ConfigError(f'separator={separator} must be an id from 0 to {vocab_size - 1}')
