"""Decoding token by token, and beam search, with any model that has a state and a step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Cache = Any  # a pytree whose shapes and dtypes stay the same from step to step
# (tokens_M, rows_M, cache) to the next logits and cache; token m continues row rows_M[m], or m.
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
    num_tokens: int,
    not_done: Callable[[Any], jax.Array | bool] = lambda state: True,
) -> Any:
    """Chooses up to `num_tokens` tokens while the state is `not_done`, and returns the last state.

    `choose(t, logits_MV, state)` is the state, the tokens at t and the rows that they continue.
    """

    def more(carry: Any) -> jax.Array:
        t, _, (state, *_) = carry
        return (t < num_tokens) & not_done(state)

    def body(carry: Any) -> Any:
        t, cache, (state, tokens_M, rows_M) = carry
        logits_MV, cache = step(tokens_M, rows_M, cache)
        return t + 1, cache, choose(t, logits_MV, state)

    carry = jnp.int32(1), cache, choose(jnp.int32(0), logits_MV, state)
    return jax.lax.while_loop(more, body, carry)[2][0]


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
    K, T, V = beam, num_tokens, logits_MV.shape[1]
    B = len(logits_MV) // K
    dtype = jnp.promote_types(logits_MV.dtype, jnp.float32)
    divisors_T = jnp.asarray(np.arange(1, T + 1) ** float(length_penalty), dtype)

    def extend(t: jax.Array, logits_MV: jax.Array, state: _State) -> tuple:
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
        parents_BK, tokens_BK = _take(parents_BC, chosen_BK), _take(tokens_BC, chosen_BK)
        tokens_BKT = _take(state.tokens_BKT, parents_BK).at[:, :, t].set(tokens_BK)
        rows_BK = jnp.arange(B)[:, None] * K + parents_BK
        state = _State(tokens_BKT, nats_BK, _best(state.finished, ended))
        return state, tokens_BK.reshape(-1), rows_BK.reshape(-1)

    none_BKT = jnp.full((B, K, T), separator, jnp.int32)
    none_BK = jnp.full((B, K), -jnp.inf, dtype)
    zeros_BK = jnp.zeros((B, K), jnp.int32)
    # One empty hypothesis per row: K copies would all have the same extensions.
    state = _State(none_BKT, none_BK.at[:, 0].set(0), Hypotheses(none_BKT, zeros_BK, none_BK))
    state = decode(logits_MV, cache, step, extend, state, T, lambda state: _not_done(state).any())
    # Unfinished hypotheses of rows that are not done have T tokens.
    scores_BK = jnp.where(_not_done(state)[:, None], state.nats_BK / divisors_T[-1], -jnp.inf)
    return _best(state.finished, Hypotheses(state.tokens_BKT, zeros_BK + T, scores_BK))


def _extensions(
    logits_BKV: jax.Array, nats_BK: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The most probable extensions of each row's hypotheses: log-probabilities, tokens, parents.

    There are 2 K, if the vocabulary allows, since up to K of them may be by the separator.
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
    return nats_BC, tokens_BC, flat_index_BC // logits_BKC.shape[-1]


def _not_done(state: _State) -> jax.Array:
    """Rows with fewer than K finished hypotheses and some unfinished one; [B]."""
    incomplete_B = jnp.any(state.finished.scores_BK == -jnp.inf, axis=1)
    return incomplete_B & jnp.any(state.nats_BK != -jnp.inf, axis=1)


def _best(first: Hypotheses, second: Hypotheses) -> Hypotheses:
    """The K best hypotheses of both, best first; ties go to `first`."""
    both = [jnp.concatenate(arrays, axis=1) for arrays in zip(first, second, strict=True)]
    scores_BK, chosen_BK = jax.lax.top_k(both[2], first.scores_BK.shape[1])
    return Hypotheses(_take(both[0], chosen_BK), _take(both[1], chosen_BK), scores_BK)


_take = jax.vmap(lambda array, index_K: array[index_K])  # array[b, index_BK[b, k]]
