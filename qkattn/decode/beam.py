"""Decoding token by token, and beam search, with any model that has a state and a step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Cache = Any  # a pytree whose shapes and dtypes stay the same from step to step
# (tokens_M, rows_M, cache) -> the next logits_MV and cache, for M rows. Token m continues row
# rows_M[m] of the cache, or row m where rows_M is None.
Step = Callable[[jax.Array, jax.Array | None, Cache], tuple[jax.Array, Cache]]


class Hypotheses(NamedTuple):
    """The K best hypotheses of each row, best first."""

    tokens_BKT: jax.Array  # int32; the separator from the end of a hypothesis on
    lengths_BK: jax.Array  # including the separator; T where a hypothesis is unfinished
    # Log-probabilities in nats, divided by length ** length_penalty. Where fewer than K hypotheses
    # have a probability above zero, the others have score -inf and length 0.
    scores_BK: jax.Array


class _State(NamedTuple):
    """The unfinished hypotheses, most probable first, and the finished ones."""

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
    """Chooses up to `num_tokens` tokens while the state is `not_done`, and returns the last state.

    `choose(t, logits_MV, state)` returns the next state, the tokens number t, and the rows of the
    cache that they continue. `logits_MV` are those of the first token.
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
    """Searches for the best continuations of each row; traceable by jit.

    `logits_MV` are those of the first token, for `beam` copies of each row, one after another;
    `cache` is the state of the copies before it. A hypothesis has at most `num_tokens` tokens,
    including the separator. The score of a finished one is its log-probability, including the
    separator's, divided by length ** length_penalty, as fairseq's lenpen (Ott et al. 2019); 0 ranks
    by probability.

    Each step extends the `beam` most probable unfinished hypotheses. An extension by the separator
    finishes a hypothesis if it is among the `beam` most probable extensions, so `beam` = 1 is
    greedy decoding. A row is done once `beam` of its hypotheses are finished, even if an unfinished
    one could score higher, as in fairseq and with `early_stopping=True` in transformers. Where
    fewer are finished after `num_tokens`, the unfinished ones are ranked among them by the same
    score, as in transformers; fairseq ends them with a separator.

    Ties go to the lower beam, then to the lower id, and to the hypothesis that finished first.
    Logits of -inf are never chosen; NaN and inf give NaN scores.
    """
    K = beam
    T = num_tokens
    V = logits_MV.shape[1]
    B = len(logits_MV) // K
    dtype = jnp.promote_types(logits_MV.dtype, jnp.float32)
    divisors_T = jnp.asarray(np.arange(1, T + 1) ** float(length_penalty), dtype)

    def extend(t: jax.Array, logits_MV: jax.Array, state: _State) -> tuple:
        """The state after token number t; the tokens, and the rows of the cache they continue."""
        logits_BKV = logits_MV.astype(dtype).reshape(B, K, V)
        nats_BC, tokens_BC, parents_BC = _extensions(logits_BKV, state.nats_BK)
        ends_BC = tokens_BC == separator
        ending_BK = ends_BC[:, :K] & _not_done(state)[:, None]
        ended = Hypotheses(
            # Positions after the last token hold separators from the start.
            _take(state.tokens_BKT, parents_BC[:, :K]),
            jnp.full((B, K), t + 1, jnp.int32),
            jnp.where(ending_BK, nats_BC[:, :K] / divisors_T[t], -jnp.inf),
        )
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
    # Unfinished hypotheses of rows that are not done have T tokens.
    scores_BK = jnp.where(_not_done(state)[:, None], state.nats_BK / divisors_T[-1], -jnp.inf)
    return _best(state.finished, Hypotheses(state.tokens_BKT, zeros_BK + T, scores_BK))


def _extensions(
    logits_BKV: jax.Array, nats_BK: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The C most probable extensions of each row's hypotheses by one token, best first.

    nats_BC are their log-probabilities, tokens_BC the tokens, and parents_BC the hypotheses, from 0
    to K - 1, that they extend. C is 2 K, if the vocabulary allows, since up to K of the extensions
    may be by the separator.
    """
    B, K, V = logits_BKV.shape
    # Ranked by logits, as in greedy decoding: log-probabilities can lose their small differences.
    logits_BKC, tokens_BKC = jax.lax.top_k(logits_BKV, min(2 * K, V))
    total_BK1 = jax.nn.logsumexp(logits_BKV, axis=-1, keepdims=True)
    # If all logits are -inf, so is the total, and the difference would be NaN.
    gains_BKC = jnp.where(logits_BKC == -jnp.inf, -jnp.inf, logits_BKC - total_BK1)
    # top_k ranks NaN first and -NaN last; ranked first, it reaches the scores.
    gains_BKC = jnp.where(jnp.isnan(gains_BKC), jnp.nan, gains_BKC)
    flat_BC = (nats_BK[:, :, None] + gains_BKC).reshape(B, -1)
    nats_BC, flat_index_BC = jax.lax.top_k(flat_BC, min(2 * K, flat_BC.shape[1]))
    tokens_BC = _take(tokens_BKC.reshape(B, -1), flat_index_BC)
    parents_BC = flat_index_BC // logits_BKC.shape[-1]
    return nats_BC, tokens_BC, parents_BC


def _not_done(state: _State) -> jax.Array:
    """Rows with fewer than K finished hypotheses and some unfinished one; [B]."""
    incomplete_B = jnp.any(state.finished.scores_BK == -jnp.inf, axis=1)
    return incomplete_B & jnp.any(state.nats_BK != -jnp.inf, axis=1)


def _best(first: Hypotheses, second: Hypotheses) -> Hypotheses:
    """The K best hypotheses of both, best first; ties go to `first`."""
    K = first.scores_BK.shape[1]
    tokens_BCT = jnp.concatenate([first.tokens_BKT, second.tokens_BKT], axis=1)
    lengths_BC = jnp.concatenate([first.lengths_BK, second.lengths_BK], axis=1)
    scores_BC = jnp.concatenate([first.scores_BK, second.scores_BK], axis=1)
    scores_BK, chosen_BK = jax.lax.top_k(scores_BC, K)
    return Hypotheses(_take(tokens_BCT, chosen_BK), _take(lengths_BC, chosen_BK), scores_BK)


def _take(array_BC: jax.Array, index_BK: jax.Array) -> jax.Array:
    """array_BC[b, index_BK[b, k]], at [b, k]; the array may have further axes."""
    return jax.vmap(lambda array_C, index_K: array_C[index_K])(array_BC, index_BK)
