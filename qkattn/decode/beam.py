"""Token-by-token decoding and beam search, for any model with a cache and a step function."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Cache = Any  # a pytree whose shapes and dtypes stay the same from step to step
# Maps (tokens_M, rows_M, cache) to the next (logits_MV, cache), for M rows. Token m continues row
# rows_M[m] of the cache, or row m if rows_M is None.
Step = Callable[[jax.Array, jax.Array | None, Cache], tuple[jax.Array, Cache]]


class Hypotheses(NamedTuple):
    """The K best hypotheses of each row, best first.

    If a row has fewer than K possible hypotheses, the last entries have score -inf and length 0.
    """

    tokens_BKT: jax.Array  # int32, padded with the separator
    lengths_BK: jax.Array  # including the separator; T for an unfinished hypothesis
    scores_BK: jax.Array  # log-probability in nats / length ** length_penalty


class Choice(NamedTuple):
    """The tokens chosen at one position, for M rows, and the state after them."""

    state: Any
    tokens_M: jax.Array
    rows_M: jax.Array | None  # the cache rows that the tokens continue; None if 0 ... M - 1


class _State(NamedTuple):
    """The K best unfinished and the K best finished hypotheses of each row, best first."""

    tokens_BKT: jax.Array  # the unfinished hypotheses
    nats_BK: jax.Array  # the log-probabilities of the unfinished hypotheses
    finished: Hypotheses


class _Carry(NamedTuple):
    """The loop carry of `decode`."""

    num_chosen: jax.Array  # the number of chosen tokens per row
    cache: Cache  # the cache of all chosen tokens except the last
    choice: Choice  # the last chosen token


def decode(
    logits_MV: jax.Array,
    cache: Cache,
    step: Step,
    choose: Callable[[jax.Array, jax.Array, Any], Choice],
    state: Any,
    num_tokens: int | jax.Array,
    not_done: Callable[[Any], jax.Array | bool] = lambda state: True,
) -> Any:
    """Decodes token by token, and returns the last state.

    Three tokens are computed as follows:

        first = choose(0, logits_MV, state)
        logits_MV, cache = step(first.tokens_M, first.rows_M, cache)
        second = choose(1, logits_MV, first.state)
        logits_MV, cache = step(second.tokens_M, second.rows_M, cache)
        third = choose(2, logits_MV, second.state)
        return third.state

    Args:
        logits_MV: The logits of the first token, for M rows and V ids.
        cache: The cache before the first token.
        step: Maps (tokens_M, rows_M, cache) to the next (logits_MV, cache). Token m continues row
            rows_M[m] of the cache, as in beam search. None continues row m.
        choose: Maps (t, logits_MV, state) to a Choice of the tokens at position t, from 0.
        state: The initial state, any pytree that `choose` takes and returns.
        num_tokens: The maximum number of tokens, at least 1.
        not_done: Maps the state after a token to whether decoding goes on.
    """

    def has_next(carry: _Carry) -> jax.Array:
        return (carry.num_chosen < num_tokens) & not_done(carry.choice.state)

    def next_token(carry: _Carry) -> _Carry:
        last = carry.choice
        next_logits_MV, next_cache = step(last.tokens_M, last.rows_M, carry.cache)
        t = carry.num_chosen
        next_choice = choose(t, next_logits_MV, last.state)
        return _Carry(num_chosen=t + 1, cache=next_cache, choice=next_choice)

    # The first token needs no step, so it is chosen before the loop.
    first_choice = choose(jnp.int32(0), logits_MV, state)
    start = _Carry(num_chosen=jnp.int32(1), cache=cache, choice=first_choice)
    end = jax.lax.while_loop(has_next, next_token, start)
    return end.choice.state


def beam_search(
    logits_MV: jax.Array,
    cache: Cache,
    step: Step,
    *,
    beam: int,
    num_tokens: int,
    separator: int,
    length_penalty: float,
) -> Hypotheses:
    """Searches for the best continuations of each row; compatible with jit.

    Each step extends the K = `beam` most probable unfinished hypotheses by every token. A separator
    among the K most probable extensions finishes a hypothesis. `beam` = 1 is greedy decoding.

    A hypothesis has the score log p / length ** length_penalty, as with lenpen in fairseq (Ott et
    al. 2019). Its probability p and its length include the separator.

    A row is done after K finished hypotheses, as with `early_stopping=True` in transformers. If a
    row has fewer after `num_tokens`, its unfinished hypotheses are ranked as well, by their scores
    without a separator.

    Ties between extensions go to the earlier hypothesis, then to the lower id. Ties between
    finished hypotheses go to the shorter hypothesis. Logits of -inf are never chosen. NaN and inf
    give NaN scores.

    Args:
        logits_MV: The logits of the first token, for M = B * K rows: K copies of each of B rows,
            one after another.
        cache: The cache of the M rows before the first token.
        step: Appends tokens to the cache; see `Step`.
        beam: K, the number of hypotheses.
        num_tokens: T, the maximum length of a hypothesis, including the separator.
        separator: The id that ends a hypothesis.
        length_penalty: 0 ranks hypotheses by probability; larger values favour long hypotheses.
    """
    K = beam
    T = num_tokens
    B = len(logits_MV) // K
    dtype = jnp.promote_types(logits_MV.dtype, jnp.float32)
    # The score of t + 1 tokens is their log-probability / divisors_T[t].
    lengths_T = np.arange(1, T + 1)
    divisors_T = jnp.asarray(lengths_T ** float(length_penalty), dtype)

    def is_any_row_not_done(state: _State) -> jax.Array:
        return _not_done(state).any()

    no_tokens_BKT = jnp.full((B, K, T), separator, jnp.int32)
    zeros_BK = jnp.zeros((B, K), jnp.int32)
    impossible_BK = jnp.full((B, K), -jnp.inf, dtype)
    # Start with one possible hypothesis per row. K copies would all have the same extensions.
    nats_BK = impossible_BK.at[:, 0].set(0)
    none_finished = Hypotheses(no_tokens_BKT, lengths_BK=zeros_BK, scores_BK=impossible_BK)
    state = decode(
        logits_MV,
        cache,
        step,
        choose=functools.partial(_extend, separator=separator, divisors_T=divisors_T),
        state=_State(no_tokens_BKT, nats_BK, none_finished),
        num_tokens=T,
        not_done=is_any_row_not_done,
    )

    # Unfinished hypotheses have T tokens, except in rows that are done.
    is_not_done_B1 = _not_done(state)[:, None]
    unfinished_scores_BK = jnp.where(is_not_done_B1, state.nats_BK / divisors_T[-1], -jnp.inf)
    unfinished = Hypotheses(
        state.tokens_BKT, lengths_BK=zeros_BK + T, scores_BK=unfinished_scores_BK
    )
    return _best(state.finished, unfinished)


def _extend(
    t: jax.Array, logits_MV: jax.Array, state: _State, *, separator: int, divisors_T: jax.Array
) -> Choice:
    """Extends the K unfinished hypotheses of each row by one token.

    Args:
        t: The position of the new token, counted from 0.
        logits_MV: The logits of the new token, for M = B * K hypotheses.
        state: The hypotheses so far.
        separator: The token that finishes a hypothesis.
        divisors_T: The score of t + 1 tokens is their log-probability / divisors_T[t].
    """
    B, K = state.nats_BK.shape
    V = logits_MV.shape[1]
    logits_BKV = logits_MV.astype(state.nats_BK.dtype).reshape(B, K, V)
    # The C >= K best extensions; parents_BC are the indices of the extended hypotheses.
    nats_BC, tokens_BC, parents_BC = _extensions(logits_BKV, state.nats_BK)
    is_separator_BC = tokens_BC == separator

    # A separator among the K best extensions finishes a hypothesis, unless the row is done.
    is_finished_BK = is_separator_BC[:, :K] & _not_done(state)[:, None]
    finished_scores_BK = jnp.where(is_finished_BK, nats_BC[:, :K] / divisors_T[t], -jnp.inf)
    newly_finished = Hypotheses(
        # Padding is the separator, so position t needs no update.
        tokens_BKT=_take(state.tokens_BKT, parents_BC[:, :K]),
        lengths_BK=jnp.full((B, K), t + 1, jnp.int32),
        scores_BK=finished_scores_BK,
    )
    finished = _best(state.finished, newly_finished)

    # The K best extensions by other tokens stay unfinished.
    unfinished_nats_BC = jnp.where(is_separator_BC, -jnp.inf, nats_BC)
    nats_BK, chosen_BK = jax.lax.top_k(unfinished_nats_BC, K)
    parents_BK = _take(parents_BC, chosen_BK)
    tokens_BK = _take(tokens_BC, chosen_BK)
    tokens_BKT = _take(state.tokens_BKT, parents_BK).at[:, :, t].set(tokens_BK)
    next_state = _State(tokens_BKT, nats_BK, finished)

    # Hypothesis k of row b is cache row b * K + k.
    cache_rows_BK = jnp.arange(B)[:, None] * K + parents_BK
    return Choice(next_state, tokens_M=tokens_BK.reshape(-1), rows_M=cache_rows_BK.reshape(-1))


def _extensions(
    logits_BKV: jax.Array, nats_BK: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the C most probable one-token extensions of each row, best first.

    C is 2 K, or less if there are fewer extensions. At most K extensions are by the separator, so
    at least K extensions can be extended further.

    Args:
        logits_BKV: The logits of the next token, for K hypotheses per row.
        nats_BK: The log-probabilities of the hypotheses.

    Returns:
        nats_BC: The log-probabilities of the extended hypotheses.
        tokens_BC: The new tokens.
        parents_BC: The indices of the extended hypotheses, from 0 to K - 1.
    """
    B, K, V = logits_BKV.shape
    # Preselect P extensions per hypothesis. Rank them by logits, as in greedy decoding, because
    # log-probabilities can lose small differences.
    P = min(2 * K, V)
    logits_BKP, tokens_BKP = jax.lax.top_k(logits_BKV, P)

    # If all logits are -inf, so is `total_BK1`, and the difference would be NaN.
    total_BK1 = jax.nn.logsumexp(logits_BKV, axis=-1, keepdims=True)
    token_nats_BKP = jnp.where(logits_BKP == -jnp.inf, -jnp.inf, logits_BKP - total_BK1)
    # top_k ranks negative NaNs last. Make all NaNs positive, so that NaNs reach the scores.
    token_nats_BKP = jnp.where(jnp.isnan(token_nats_BKP), jnp.nan, token_nats_BKP)

    nats_BKP = nats_BK[:, :, None] + token_nats_BKP
    C = min(2 * K, K * P)
    nats_BC, flat_index_BC = jax.lax.top_k(nats_BKP.reshape(B, K * P), C)
    tokens_BC = _take(tokens_BKP.reshape(B, K * P), flat_index_BC)
    parents_BC = flat_index_BC // P
    return nats_BC, tokens_BC, parents_BC


def _not_done(state: _State) -> jax.Array:
    """Returns not_done_B: fewer than K hypotheses are finished, and some are unfinished."""
    # A score or log-probability of -inf marks a place without a hypothesis.
    has_free_place_B = jnp.any(state.finished.scores_BK == -jnp.inf, axis=1)
    has_unfinished_B = jnp.any(state.nats_BK != -jnp.inf, axis=1)
    return has_free_place_B & has_unfinished_B


def _best(first: Hypotheses, second: Hypotheses) -> Hypotheses:
    """Merges two sets of hypotheses into the K best, best first; ties go to `first`."""
    K = first.scores_BK.shape[1]
    tokens_BCT = jnp.concatenate([first.tokens_BKT, second.tokens_BKT], axis=1)
    lengths_BC = jnp.concatenate([first.lengths_BK, second.lengths_BK], axis=1)
    scores_BC = jnp.concatenate([first.scores_BK, second.scores_BK], axis=1)
    scores_BK, chosen_BK = jax.lax.top_k(scores_BC, K)
    return Hypotheses(
        tokens_BKT=_take(tokens_BCT, chosen_BK),
        lengths_BK=_take(lengths_BC, chosen_BK),
        scores_BK=scores_BK,
    )


def _take(array_BC: jax.Array, index_BK: jax.Array) -> jax.Array:
    """Returns array_BC[b, index_BK[b, k]] for all b and k. The array may have further axes."""
    return jax.vmap(lambda array_C, index_K: array_C[index_K])(array_BC, index_BK)
