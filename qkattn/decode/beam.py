"""Decoding token by token, and beam search, with any model that has a state and a step."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Cache = Any  # a pytree whose shapes and dtypes stay the same from step to step
# A Step maps (tokens_M, rows_M, cache) to the next logits_MV and cache, for M rows. Token m
# continues row rows_M[m] of the cache, or row m if rows_M is None.
Step = Callable[[jax.Array, jax.Array | None, Cache], tuple[jax.Array, Cache]]


class Hypotheses(NamedTuple):
    """The K best hypotheses of each row, best first."""

    tokens_BKT: jax.Array  # int32; the places after a hypothesis hold the separator
    lengths_BK: jax.Array  # including the separator; T if a hypothesis is unfinished
    # Log-probabilities in nats, divided by length ** length_penalty. If fewer than K hypotheses
    # have a probability above zero, the others have score -inf and length 0.
    scores_BK: jax.Array


class Choice(NamedTuple):
    """The tokens that were chosen at one position, for M rows, and the state after them."""

    state: Any
    tokens_M: jax.Array
    # The row of the cache that each token continues. None if token m continues row m.
    rows_M: jax.Array | None


class _State(NamedTuple):
    """The state of a beam search: the K best unfinished and the K best finished hypotheses."""

    # The unfinished hypotheses, most probable first, and their log-probabilities.
    tokens_BKT: jax.Array
    nats_BK: jax.Array
    finished: Hypotheses


class _Carry(NamedTuple):
    """What the loop of `decode` carries from one token to the next."""

    num_chosen: jax.Array  # how many tokens of a row are chosen so far
    cache: Cache  # the cache of all these tokens except the last one
    choice: Choice  # the choice of the last one


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

    Three tokens are decoded in this way, and third.state is returned:

        first = choose(0, logits_MV, state)
        logits_MV, cache = step(first.tokens_M, first.rows_M, cache)
        second = choose(1, logits_MV, first.state)
        logits_MV, cache = step(second.tokens_M, second.rows_M, cache)
        third = choose(2, logits_MV, second.state)

    It stops after `num_tokens` tokens, or once `not_done(state)` is False.

    Args:
      logits_MV: the logits of the first token, for M rows.
      cache: the cache before that token.
      step: see `Step`.
      choose: maps (t, logits_MV, state) to a Choice: the tokens number t, counted from 0, the cache
        rows that they continue, and the next state.
      state: the state before the first token; its form is up to `choose`.
      num_tokens: the most tokens to choose.
      not_done: maps a state to whether decoding goes on.
    """

    def has_next(carry: _Carry) -> jax.Array:
        return (carry.num_chosen < num_tokens) & not_done(carry.choice.state)

    def next_token(carry: _Carry) -> _Carry:
        """Passes the last token to `step`, and chooses the next one from the logits."""
        last = carry.choice
        logits_MV, cache = step(last.tokens_M, last.rows_M, carry.cache)
        choice = choose(carry.num_chosen, logits_MV, last.state)
        return _Carry(carry.num_chosen + 1, cache, choice)

    first_choice = choose(jnp.int32(0), logits_MV, state)
    start = _Carry(jnp.int32(1), cache, first_choice)
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
    """Searches for the best continuations of each row; jit can trace it.

    Each step extends the `beam` most probable unfinished hypotheses by every token. An extension by
    the separator finishes a hypothesis, if it is among the `beam` most probable extensions. So
    `beam` = 1 is greedy decoding.

    A row is done once `beam` of its hypotheses are finished, even if an unfinished one could score
    higher, as in fairseq and with `early_stopping=True` in transformers. If fewer are finished
    after `num_tokens`, the unfinished ones are ranked among them by the same score, as in
    transformers. (fairseq ends them with a separator.)

    Ties go to the lower beam, then to the lower id, and to the hypothesis that finished first.
    Logits of -inf are never chosen. NaN and inf give NaN scores.

    Args:
      logits_MV: the logits of the first token, for `beam` copies of each row, one after another.
      cache: the cache of the copies before that token.
      step: see `Step`.
      beam: K, the number of hypotheses.
      num_tokens: the most tokens of a hypothesis, including the separator.
      separator: the id that ends a hypothesis.
      length_penalty: the score of a hypothesis is its log-probability, including the separator's,
        divided by length ** length_penalty, as with lenpen in fairseq (Ott et al. 2019). 0 ranks by
        probability.
    """
    K = beam
    T = num_tokens
    B = len(logits_MV) // K
    dtype = jnp.promote_types(logits_MV.dtype, jnp.float32)
    # What the log-probability of a hypothesis of t + 1 tokens is divided by.
    divisors_T = jnp.asarray(np.arange(1, T + 1) ** float(length_penalty), dtype)

    def not_done(state: _State) -> jax.Array:
        return _not_done(state).any()

    no_tokens_BKT = jnp.full((B, K, T), separator, jnp.int32)
    impossible_BK = jnp.full((B, K), -jnp.inf, dtype)
    zeros_BK = jnp.zeros((B, K), jnp.int32)
    # One empty hypothesis per row: K copies would all have the same extensions.
    nats_BK = impossible_BK.at[:, 0].set(0)
    none_finished = Hypotheses(no_tokens_BKT, zeros_BK, impossible_BK)
    state = _State(no_tokens_BKT, nats_BK, none_finished)
    extend = functools.partial(_extend, separator=separator, divisors_T=divisors_T)
    state = decode(logits_MV, cache, step, extend, state, T, not_done)

    # In rows that are not done, the unfinished hypotheses count too. They have T tokens.
    scores_BK = jnp.where(_not_done(state)[:, None], state.nats_BK / divisors_T[-1], -jnp.inf)
    unfinished = Hypotheses(state.tokens_BKT, zeros_BK + T, scores_BK)
    return _best(state.finished, unfinished)


def _extend(
    t: jax.Array, logits_MV: jax.Array, state: _State, *, separator: int, divisors_T: jax.Array
) -> Choice:
    """Extends the K unfinished hypotheses of each row by one token.

    Args:
      t: the position of the new token, counted from 0.
      logits_MV: the logits of the new token, for the M = B * K hypotheses of B rows.
      state: the hypotheses so far.
      separator: the token that finishes a hypothesis.
      divisors_T: divisors_T[t] divides the log-probability of t + 1 tokens to give its score.
    """
    B, K = state.nats_BK.shape
    V = logits_MV.shape[1]
    logits_BKV = logits_MV.astype(state.nats_BK.dtype).reshape(B, K, V)
    # The C best extensions (C >= K): their log-probabilities, tokens and extended hypotheses.
    nats_BC, tokens_BC, parents_BC = _extensions(logits_BKV, state.nats_BK)
    is_separator_BC = tokens_BC == separator

    # A separator among the K best extensions finishes a hypothesis, except in rows that are done.
    is_finished_BK = is_separator_BC[:, :K] & _not_done(state)[:, None]
    finished_scores_BK = jnp.where(is_finished_BK, nats_BC[:, :K] / divisors_T[t], -jnp.inf)
    newly_finished = Hypotheses(
        # Unused positions hold the separator, so position t needs no update.
        tokens_BKT=_take(state.tokens_BKT, parents_BC[:, :K]),
        lengths_BK=jnp.full((B, K), t + 1, jnp.int32),
        scores_BK=finished_scores_BK,
    )
    finished = _best(state.finished, newly_finished)

    # The K best extensions without a separator stay unfinished.
    unfinished_nats_BC = jnp.where(is_separator_BC, -jnp.inf, nats_BC)
    nats_BK, chosen_BK = jax.lax.top_k(unfinished_nats_BC, K)
    parents_BK = _take(parents_BC, chosen_BK)
    tokens_BK = _take(tokens_BC, chosen_BK)
    tokens_BKT = _take(state.tokens_BKT, parents_BK).at[:, :, t].set(tokens_BK)
    next_state = _State(tokens_BKT, nats_BK, finished)

    # Hypothesis k of row b is row b * K + k of the cache.
    cache_rows_BK = jnp.arange(B)[:, None] * K + parents_BK
    return Choice(next_state, tokens_M=tokens_BK.reshape(-1), rows_M=cache_rows_BK.reshape(-1))


def _extensions(
    logits_BKV: jax.Array, nats_BK: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the C most probable extensions of each row's hypotheses by one token, best first.

    C is 2 K, or fewer if there are fewer extensions. Each of the K hypotheses has one extension by
    the separator, the token that ends a text. So at least K of 2 K extensions are by other tokens
    and can be extended further.

    Args:
      logits_BKV: the logits of the next token of K hypotheses per row.
      nats_BK: the log-probabilities of the hypotheses.

    Returns:
      nats_BC: the log-probabilities of the extended hypotheses.
      tokens_BC: the tokens that extend them.
      parents_BC: the hypotheses that are extended, from 0 to K - 1.
    """
    B, K, V = logits_BKV.shape
    # First the C best extensions of each hypothesis: the C best of all are among them. They are
    # ranked by logits, as in greedy decoding, because log-probabilities can lose small differences
    # between logits.
    num_per_parent = min(2 * K, V)
    logits_BKC, tokens_BKC = jax.lax.top_k(logits_BKV, num_per_parent)

    # The log-probabilities of their last tokens. If all logits are -inf, so is the total, and the
    # difference would be NaN.
    total_BK1 = jax.nn.logsumexp(logits_BKV, axis=-1, keepdims=True)
    token_nats_BKC = jnp.where(logits_BKC == -jnp.inf, -jnp.inf, logits_BKC - total_BK1)
    # A NaN must be among the best, so that it reaches the scores. top_k ranks a NaN with a negative
    # sign last, so all NaNs get a positive sign.
    token_nats_BKC = jnp.where(jnp.isnan(token_nats_BKC), jnp.nan, token_nats_BKC)

    # Then the best extensions of all K hypotheses together. With 4 extensions for each hypothesis,
    # number 6 of the flat array extends hypothesis 6 // 4 = 1.
    flat_nats_BC = (nats_BK[:, :, None] + token_nats_BKC).reshape(B, -1)
    nats_BC, flat_index_BC = jax.lax.top_k(flat_nats_BC, min(2 * K, flat_nats_BC.shape[1]))
    tokens_BC = _take(tokens_BKC.reshape(B, -1), flat_index_BC)
    parents_BC = flat_index_BC // num_per_parent
    return nats_BC, tokens_BC, parents_BC


def _not_done(state: _State) -> jax.Array:
    """Returns [B], True for rows with fewer than K finished hypotheses and some unfinished one."""
    incomplete_B = jnp.any(state.finished.scores_BK == -jnp.inf, axis=1)
    has_unfinished_B = jnp.any(state.nats_BK != -jnp.inf, axis=1)
    return incomplete_B & has_unfinished_B


def _best(first: Hypotheses, second: Hypotheses) -> Hypotheses:
    """Returns the K best hypotheses of both, best first; ties go to `first`."""
    K = first.scores_BK.shape[1]
    tokens_BCT = jnp.concatenate([first.tokens_BKT, second.tokens_BKT], axis=1)
    lengths_BC = jnp.concatenate([first.lengths_BK, second.lengths_BK], axis=1)
    scores_BC = jnp.concatenate([first.scores_BK, second.scores_BK], axis=1)
    scores_BK, chosen_BK = jax.lax.top_k(scores_BC, K)
    return Hypotheses(_take(tokens_BCT, chosen_BK), _take(lengths_BC, chosen_BK), scores_BK)


def _take(array_BC: jax.Array, index_BK: jax.Array) -> jax.Array:
    """Returns array_BC[b, index_BK[b, k]] for all b and k. The array may have further axes."""
    return jax.vmap(lambda array_C, index_K: array_C[index_K])(array_BC, index_BK)
