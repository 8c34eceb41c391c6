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


class _State(NamedTuple):
    """The state of a beam search: K unfinished hypotheses, most probable first, and finished ones.

    `nats_BK` are the log-probabilities of the unfinished ones.
    """

    tokens_BKT: jax.Array
    nats_BK: jax.Array
    finished: Hypotheses


def decode(
    logits_MV: jax.Array,
    cache: Cache,
    step: Step,
    choose: Callable[[jax.Array, jax.Array, Any], tuple[Any, jax.Array, jax.Array | None]],
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
      choose: maps (t, logits_MV, state) to the next state, the chosen tokens number t, and the rows
        of the cache that they continue (None for row m at token m).
      state: the first state.
      num_tokens: the most tokens to choose.
      not_done: whether to go on after a state.
    """

    def has_next(carry: Any) -> jax.Array:
        t, _, choice = carry
        state, _, _ = choice
        return (t < num_tokens) & not_done(state)

    def body(carry: Any) -> Any:
        t, cache, choice = carry
        state, tokens_M, rows_M = choice
        logits_MV, cache = step(tokens_M, rows_M, cache)
        return t + 1, cache, choose(t, logits_MV, state)

    first_choice = choose(jnp.int32(0), logits_MV, state)
    _, _, last_choice = jax.lax.while_loop(has_next, body, (jnp.int32(1), cache, first_choice))
    state, _, _ = last_choice
    return state


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
    divisors_T = jnp.asarray(np.arange(1, T + 1) ** float(length_penalty), dtype)

    def extend(t: jax.Array, logits_MV: jax.Array, state: _State) -> tuple:
        """Chooses token number t: returns the state after it, the tokens, and their cache rows."""
        logits_BKV = logits_MV.astype(dtype).reshape(B, K, V)
        nats_BC, tokens_BC, parents_BC = _extensions(logits_BKV, state.nats_BK)
        ends_BC = tokens_BC == separator

        # Separators among the K best extensions finish hypotheses, in rows that are not done.
        ending_BK = ends_BC[:, :K] & _not_done(state)[:, None]
        ended = Hypotheses(
            # Positions after the last token hold separators from the start.
            _take(state.tokens_BKT, parents_BC[:, :K]),
            jnp.full((B, K), t + 1, jnp.int32),
            jnp.where(ending_BK, nats_BC[:, :K] / divisors_T[t], -jnp.inf),
        )

        # The K best extensions by other tokens are the unfinished hypotheses of the next step.
        nats_BK, chosen_BK = jax.lax.top_k(jnp.where(ends_BC, -jnp.inf, nats_BC), K)
        parents_BK = _take(parents_BC, chosen_BK)
        tokens_BK = _take(tokens_BC, chosen_BK)
        tokens_BKT = _take(state.tokens_BKT, parents_BK).at[:, :, t].set(tokens_BK)
        rows_BK = jnp.arange(B)[:, None] * K + parents_BK
        state = _State(tokens_BKT, nats_BK, _best(state.finished, ended))
        return state, tokens_BK.reshape(-1), rows_BK.reshape(-1)

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

    C is 2 K, or V if the vocabulary is smaller. The separator may end each of the K hypotheses, so
    up to K of the extensions are complete translations. With 2 K of them, at least K others are
    left, which go on as hypotheses.

    Returns:
      nats_BC: the log-probabilities of the extended hypotheses.
      tokens_BC: the tokens that extend them.
      parents_BC: the hypotheses that are extended, from 0 to K - 1.
    """
    B, K, V = logits_BKV.shape
    # The tokens of a hypothesis are ranked by logits, as in greedy decoding. Log-probabilities can
    # lose the small differences between logits.
    logits_BKC, tokens_BKC = jax.lax.top_k(logits_BKV, min(2 * K, V))
    total_BK1 = jax.nn.logsumexp(logits_BKV, axis=-1, keepdims=True)
    # If all logits are -inf, the total is -inf too, and the difference would be NaN.
    gains_BKC = jnp.where(logits_BKC == -jnp.inf, -jnp.inf, logits_BKC - total_BK1)
    # A NaN must reach the scores. top_k ranks NaN first but -NaN last, so all become NaN.
    gains_BKC = jnp.where(jnp.isnan(gains_BKC), jnp.nan, gains_BKC)

    # The best of all hypotheses' extensions, by log-probability.
    flat_BC = (nats_BK[:, :, None] + gains_BKC).reshape(B, -1)
    nats_BC, flat_index_BC = jax.lax.top_k(flat_BC, min(2 * K, flat_BC.shape[1]))
    tokens_BC = _take(tokens_BKC.reshape(B, -1), flat_index_BC)
    parents_BC = flat_index_BC // logits_BKC.shape[-1]
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
