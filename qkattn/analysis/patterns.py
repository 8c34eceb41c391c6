"""Quantities of attention patterns: functions from what a layer computes to one number a head [N].

Means are over the queries of all rows that see the key in question, or any key where there is none
in question, so that padding does not count. They are NaN where no query does.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import entr


class Pattern(NamedTuple):
    """What an attention layer computes for one batch.

    Attributes:
      logits_BNTS: after scale, cap and position biases; 0 at masked keys.
      probabilities_BNTS: of the normalizer, before a Value mixes heads; 0 at masked keys.
      mask_BTS: True where a query may attend to a key; B may be 1.
    """

    logits_BNTS: jax.Array
    probabilities_BNTS: jax.Array
    mask_BTS: jax.Array


def entropy(pattern: Pattern) -> jax.Array:
    """-sum_s p log p of p / sum_s p, nats: 0 where one key has all, log S where all S are equal."""
    p_BNTS, visible_BT = pattern.probabilities_BNTS, pattern.mask_BTS.any(-1)
    total_BNT1 = p_BNTS.sum(-1, keepdims=True)
    p_BNTS = p_BNTS / jnp.where(total_BNT1 > 0, total_BNT1, 1)
    return _mean(entr(p_BNTS).sum(-1), visible_BT)


def diagonal_mass(pattern: Pattern) -> jax.Array:
    """Mean of p[t, t], the probability with which a token attends to itself; 0 where it may not."""
    p_BNT = jnp.diagonal(pattern.probabilities_BNTS, axis1=-2, axis2=-1)
    return _mean(p_BNT, pattern.mask_BTS.any(-1))


def previous_token_mass(pattern: Pattern) -> jax.Array:
    """Mean of p[t, t - 1]; in a previous-token head it is near 1 (Olsson et al. 2022)."""
    return _shifted_mass(pattern, 1)


def logit_deviation(pattern: Pattern) -> jax.Array:
    """Standard deviation of the logits of a query over its visible keys, nats.

    The root of the mean variance. What is added to all logits of a query, softmax ignores.
    """
    mask_B1TS = pattern.mask_BTS[:, None]
    count_B1T1 = jnp.maximum(mask_B1TS.sum(-1, keepdims=True), 1)
    s_BNTS = jnp.where(mask_B1TS, pattern.logits_BNTS, 0)
    s_BNTS = s_BNTS - s_BNTS.sum(-1, keepdims=True) / count_B1T1
    variance_BNT = (jnp.where(mask_B1TS, s_BNTS, 0) ** 2).sum(-1) / count_B1T1[..., 0]
    return jnp.sqrt(_mean(variance_BNT, pattern.mask_BTS.any(-1)))


def largest_logit(pattern: Pattern) -> jax.Array:
    """max |logit| over visible keys, nats."""
    s_BNTS = jnp.where(pattern.mask_BTS[:, None], jnp.abs(pattern.logits_BNTS), 0)
    return s_BNTS.max((0, 2, 3))


def induction_score(pattern: Pattern, period: int) -> jax.Array:
    """Mean of p[t, t - period + 1] over t >= period, of tokens that repeat after `period`.

    The key is the token that followed the previous occurrence of token t, which an induction head
    attends to (Olsson et al. 2022, 'In-context learning and induction heads': prefix matching).
    Attention that is equal over S keys has 1 / S.
    """
    late = Pattern(*(a[..., period:, :] for a in pattern))
    return _shifted_mass(late, -1)


def _shifted_mass(pattern: Pattern, distance: int) -> jax.Array:
    """Mean of p[t, t - distance] over the rows of the pattern."""
    T, S = pattern.probabilities_BNTS.shape[-2:]
    t_T, s_T = jnp.arange(T), jnp.arange(T) - distance
    inside_T = (s_T >= 0) & (s_T < S)
    s_T = jnp.clip(s_T, 0, S - 1)
    visible_BT = pattern.mask_BTS[:, t_T, s_T] & inside_T
    return _mean(pattern.probabilities_BNTS[..., t_T, s_T], visible_BT)


def _mean(value_BNT: jax.Array, visible_BT: jax.Array) -> jax.Array:
    """Mean over rows and those queries that are visible; NaN without any."""
    weight_B1T = jnp.broadcast_to(visible_BT[:, None], value_BNT[:, :1].shape)
    return (value_BNT * weight_B1T).sum((0, 2)) / weight_B1T.sum()


# What an analysis measures of every head: where queries and keys have positions in common, and
# everywhere.
IN_ORDER: dict[str, Callable[[Pattern], jax.Array]] = {
    function.__name__: function for function in (diagonal_mass, previous_token_mass)
}
OF_PATTERNS: dict[str, Callable[[Pattern], jax.Array]] = {
    function.__name__: function for function in (entropy, logit_deviation, largest_logit)
}
