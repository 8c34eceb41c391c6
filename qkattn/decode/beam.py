"""Decoding token by token, and beam search, with any model that has a state and a step."""

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

    It stops after `num_tokens` tokens, or once `not_done(state)` is False.

    Args:
      logits_MV: the logits of the first token, for M rows.
      cache: the cache before that token.
      step: see `Step`.
      choose: maps (t, logits_MV, state) to the choice of token number t, counted from 0.
      state: the state before the first token; its form is up to `choose`.
      num_tokens: the most tokens to choose.
      not_done: whether to go on after a state.
    """
    # The carry is (number of tokens chosen so far, cache without the last of them, last choice).

    def has_next(carry: tuple[jax.Array, Cache, Choice]) -> jax.Array:
        t, _, choice = carry
        return (t < num_tokens) & not_done(choice.state)

    def body(carry: tuple[jax.Array, Cache, Choice]) -> tuple[jax.Array, Cache, Choice]:
        t, cache, choice = carry
        logits_MV, cache = step(choice.tokens_M, choice.rows_M, cache)
        return t + 1, cache, choose(t, logits_MV, choice.state)

    first_choice = choose(jnp.int32(0), logits_MV, state)
    start = (jnp.int32(1), cache, first_choice)
    _, _, last_choice = jax.lax.while_loop(has_next, body, start)
    return last_choice.state


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
    V = logits_MV.shape[1]
    B = len(logits_MV) // K
    dtype = jnp.promote_types(logits_MV.dtype, jnp.float32)
    # What the log-probability of a hypothesis of t + 1 tokens is divided by.
    divisors_T = jnp.asarray(np.arange(1, T + 1) ** float(length_penalty), dtype)

    def extend(t: jax.Array, logits_MV: jax.Array, state: _State) -> Choice:
        """Chooses token number t of K unfinished hypotheses per row; M is B * K."""
        logits_BKV = logits_MV.astype(dtype).reshape(B, K, V)
        nats_BC, tokens_BC, parents_BC = _extensions(logits_BKV, state.nats_BK)
        ends_BC = tokens_BC == separator

        # Separators among the K best extensions finish hypotheses, in rows that are not done. Token
        # t of these hypotheses holds the separator already, as do all positions after the last
        # chosen token.
        ending_BK = ends_BC[:, :K] & _not_done(state)[:, None]
        ended = Hypotheses(
            tokens_BKT=_take(state.tokens_BKT, parents_BC[:, :K]),
            lengths_BK=jnp.full((B, K), t + 1, jnp.int32),
            scores_BK=jnp.where(ending_BK, nats_BC[:, :K] / divisors_T[t], -jnp.inf),
        )

        # The K best extensions by other tokens are the unfinished hypotheses of the next step.
        nats_BK, chosen_BK = jax.lax.top_k(jnp.where(ends_BC, -jnp.inf, nats_BC), K)
        parents_BK = _take(parents_BC, chosen_BK)
        tokens_BK = _take(tokens_BC, chosen_BK)
        tokens_BKT = _take(state.tokens_BKT, parents_BK).at[:, :, t].set(tokens_BK)

        # Hypothesis k of row b is row b * K + k of the cache.
        rows_BK = jnp.arange(B)[:, None] * K + parents_BK
        state = _State(tokens_BKT, nats_BK, _best(state.finished, ended))
        return Choice(state, tokens_BK.reshape(-1), rows_BK.reshape(-1))

    def not_done(state: _State) -> jax.Array:
        return _not_done(state).any()

    no_tokens_BKT = jnp.full((B, K, T), separator, jnp.int32)
    impossible_BK = jnp.full((B, K), -jnp.inf, dtype)
    zeros_BK = jnp.zeros((B, K), jnp.int32)
    # One empty hypothesis per row: K copies would all have the same extensions.
    nats_BK = impossible_BK.at[:, 0].set(0)
    none_finished = Hypotheses(no_tokens_BKT, zeros_BK, impossible_BK)
    state = _State(no_tokens_BKT, nats_BK, none_finished)
    state = decode(logits_MV, cache, step, extend, state, T, not_done)

    # In rows that are not done, the unfinished hypotheses count too. They have T tokens.
    scores_BK = jnp.where(_not_done(state)[:, None], state.nats_BK / divisors_T[-1], -jnp.inf)
    unfinished = Hypotheses(state.tokens_BKT, zeros_BK + T, scores_BK)
    return _best(state.finished, unfinished)


def _extensions(
    logits_BKV: jax.Array, nats_BK: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the C most probable extensions of each row's hypotheses by one token, best first.

    C is 2 K, or fewer if there are fewer extensions. At most K extensions end with the separator,
    one for each hypothesis. So at least K of 2 K extensions are left to go on as hypotheses.

    Args:
      logits_BKV: the logits of the next token of K hypotheses per row.
      nats_BK: the log-probabilities of the hypotheses.

    Returns:
      nats_BC: the log-probabilities of the extended hypotheses.
      tokens_BC: the tokens that extend them.
      parents_BC: the hypotheses that are extended, from 0 to K - 1.
    """
    B, K, V = logits_BKV.shape
    # The C best extensions of each hypothesis contain the C best of all. They are ranked by logits,
    # as in greedy decoding, because log-probabilities can lose small differences between logits.
    logits_BKC, tokens_BKC = jax.lax.top_k(logits_BKV, min(2 * K, V))
    total_BK1 = jax.nn.logsumexp(logits_BKV, axis=-1, keepdims=True)
    # If all logits are -inf, the total is -inf too, and the difference would be NaN.
    gains_BKC = jnp.where(logits_BKC == -jnp.inf, -jnp.inf, logits_BKC - total_BK1)
    # A NaN must be among the best, so that it reaches the scores. top_k ranks a NaN with a negative
    # sign last, so all NaNs get a positive sign.
    gains_BKC = jnp.where(jnp.isnan(gains_BKC), jnp.nan, gains_BKC)

    # The best extensions of all K hypotheses together, by log-probability.
    flat_BC = (nats_BK[:, :, None] + gains_BKC).reshape(B, -1)
    nats_BC, flat_index_BC = jax.lax.top_k(flat_BC, min(2 * K, flat_BC.shape[1]))
    tokens_BC = _take(tokens_BKC.reshape(B, -1), flat_index_BC)
    extensions_per_parent = logits_BKC.shape[-1]
    parents_BC = flat_index_BC // extensions_per_parent
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
