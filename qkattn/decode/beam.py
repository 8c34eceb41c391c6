"""Beam search over any model that decodes one token at a time."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.errors import ConfigError

Cache = Any
"""State of a model between steps: a pytree whose shapes and dtypes stay the same."""


class Hypotheses(NamedTuple):
    """The K best hypotheses of each row, best first.

    Attributes:
      tokens_BKT: token ids, int32; the separator from the end of a hypothesis on.
      lengths_BK: tokens, including the separator; T where a hypothesis is unfinished.
      scores_BK: log-probability in nats, divided by length ** length_penalty. Where fewer than K
        hypotheses have a probability above zero, the others have score -inf and length 0.
    """

    tokens_BKT: jax.Array
    lengths_BK: jax.Array
    scores_BK: jax.Array


class _Alive(NamedTuple):
    """The unfinished hypotheses, most probable first, and the indices of their parents."""

    tokens_BKT: jax.Array
    nats_BK: jax.Array
    parents_BK: jax.Array


_Carry = tuple[jax.Array, Cache, _Alive, Hypotheses]


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
    """Searches for the best continuations of each row; traceable by jit.

    The score of a finished hypothesis is its log-probability, including the separator's, divided
    by length ** length_penalty, as fairseq's lenpen (Ott et al. 2019). (Wu et al. 2016 divide by
    ((5 + length) / 6) ** length_penalty.) A length_penalty of 0 ranks by probability.

    Each step extends the `beam` most probable unfinished hypotheses. An extension by the separator
    finishes a hypothesis if it is among the `beam` most probable extensions, so `beam` = 1 is
    greedy decoding. A row is done once `beam` of its hypotheses are finished, even if an unfinished
    one could score higher, as in fairseq and with `early_stopping=True` in transformers; the search
    stops when all rows are done. Where fewer are finished after `num_tokens`, the unfinished ones
    are ranked among them by the same score, as in transformers; fairseq ends them with a separator.

    Ties go to the lower beam, then to the lower id, and to the hypothesis that finished first. Rows
    are independent. Logits of -inf are never chosen; NaN and inf give NaN scores.

    Args:
      logits_BV: of the first token.
      cache: the state of B rows after all tokens before the first one.
      step: appends one token per row and returns the logits of the next one and the state. It is
        called with B * beam rows, those of row b from b * beam on; the last token is not appended.
      reorder: the state of the given rows: B * beam indices, into the B rows of `cache` in the
        first call and into the B * beam rows of its own result after that.
      num_tokens: maximum number of tokens of a hypothesis, including the separator.
      separator: the id that ends a hypothesis.
      vocab_size: ids from here on are never chosen and have no share of the probability; None
        allows all ids that have logits.

    Raises:
      ConfigError: an option out of range.
    """
    B, most = logits_BV.shape
    K, T, V = beam, num_tokens, most if vocab_size is None else vocab_size
    require(K >= 1, f'beam={K} must be at least 1')
    require(T >= 1, f'num_tokens={T} must be at least 1')
    require(math.isfinite(length_penalty), f'{length_penalty=} must be finite')
    require(1 <= V <= most, f'vocab_size={V} must be from 1 to the {most} logits')
    require(0 <= separator < V, f'{separator=} must be an id from 0 to {V - 1}')
    dtype = jnp.promote_types(logits_BV.dtype, jnp.float32)
    divisors_T = jnp.asarray(np.arange(1, T + 1) ** float(length_penalty), dtype)

    def extend(
        t: jax.Array, logits_MV: jax.Array, alive: _Alive, finished: Hypotheses
    ) -> tuple[_Alive, Hypotheses]:
        nats_BC, tokens_BC, parents_BC = _extensions(
            logits_MV[:, :V].astype(dtype).reshape(B, K, V), alive.nats_BK
        )
        ends_BC = tokens_BC == separator
        ending_BK = ends_BC[:, :K] & _not_done(alive, finished)[:, None]
        finished = _best(
            finished,
            Hypotheses(
                # Positions after the last token hold separators from the start.
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

    def not_done(carry: _Carry) -> jax.Array:
        t, _, alive, finished = carry
        return (t < T) & jnp.any(_not_done(alive, finished))

    def body(carry: _Carry) -> _Carry:
        t, cache, alive, finished = carry
        cache = reorder(cache, _rows(alive.parents_BK))
        logits_MV, cache = step(alive.tokens_BKT[:, :, t - 1].reshape(-1), cache)
        return t + 1, cache, *extend(t, logits_MV, alive, finished)

    none_BKT = jnp.full((B, K, T), separator, jnp.int32)
    none_BK = jnp.full((B, K), -jnp.inf, dtype)
    zeros_BK = jnp.zeros((B, K), jnp.int32)
    # One empty hypothesis per row: K copies would all have the same extensions.
    alive = _Alive(none_BKT, none_BK.at[:, 0].set(0), zeros_BK)
    finished = Hypotheses(none_BKT, zeros_BK, none_BK)
    copies_M = jnp.repeat(jnp.arange(B), K)
    state = extend(jnp.int32(0), logits_BV[copies_M], alive, finished)
    carry = (jnp.int32(1), reorder(cache, copies_M), *state)
    _, _, alive, finished = jax.lax.while_loop(not_done, body, carry)
    # Unfinished hypotheses of rows that are not done have T tokens.
    scores_BK = jnp.where(
        _not_done(alive, finished)[:, None], alive.nats_BK / divisors_T[-1], -jnp.inf
    )
    return _best(finished, Hypotheses(alive.tokens_BKT, zeros_BK + T, scores_BK))


def require(valid: Any, message: str) -> None:
    """Raises ConfigError with the message unless an argument is valid."""
    if not valid:
        raise ConfigError(message)


def _extensions(
    logits_BKV: jax.Array, nats_BK: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The most probable extensions of each row's hypotheses: log-probabilities, tokens, parents.

    There are 2 K, if the vocabulary allows, since up to K of them may be by the separator.
    """
    B, K, V = logits_BKV.shape
    # Ranked by logits within a hypothesis, as in greedy decoding: small differences of logits can
    # be lost in log-probabilities.
    logits_BKC, tokens_BKC = jax.lax.top_k(logits_BKV, min(2 * K, V))
    total_BK1 = jax.nn.logsumexp(logits_BKV, axis=-1, keepdims=True)
    # If all logits are -inf, so is the total, and the difference would be NaN.
    gains_BKC = jnp.where(logits_BKC == -jnp.inf, -jnp.inf, logits_BKC - total_BK1)
    # top_k ranks NaN first and -NaN last; ranked first, it reaches the scores.
    gains_BKC = jnp.where(jnp.isnan(gains_BKC), jnp.nan, gains_BKC)
    flat_BC = (nats_BK[:, :, None] + gains_BKC).reshape(B, -1)
    nats_BC, flat_index_BC = jax.lax.top_k(flat_BC, min(2 * K, flat_BC.shape[1]))
    tokens_BC = _take(tokens_BKC.reshape(B, -1), flat_index_BC)
    return nats_BC, tokens_BC, flat_index_BC // logits_BKC.shape[-1]


def _not_done(alive: _Alive, finished: Hypotheses) -> jax.Array:
    """Rows with fewer than K finished hypotheses and some unfinished one; [B]."""
    incomplete_B = jnp.any(finished.scores_BK == -jnp.inf, axis=1)
    return incomplete_B & jnp.any(alive.nats_BK != -jnp.inf, axis=1)


def _best(first: Hypotheses, second: Hypotheses) -> Hypotheses:
    """The K best hypotheses of both, best first; ties go to `first`."""
    both = [jnp.concatenate(arrays, axis=1) for arrays in zip(first, second, strict=True)]
    scores_BK, chosen_BK = jax.lax.top_k(both[2], first.scores_BK.shape[1])
    return Hypotheses(_take(both[0], chosen_BK), _take(both[1], chosen_BK), scores_BK)


def _take(array: jax.Array, index_BK: jax.Array) -> jax.Array:
    """array[b, index_BK[b, k]] for every b and k."""
    return jax.vmap(lambda array, index_K: array[index_K])(array, index_BK)


def _rows(parents_BK: jax.Array) -> jax.Array:
    """Rows of the cache: hypothesis k of row b is row b * K + k."""
    B, K = parents_BK.shape
    return (jnp.arange(B)[:, None] * K + parents_BK).reshape(-1)
