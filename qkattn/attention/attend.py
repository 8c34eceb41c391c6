"""Attention probabilities and the mix of values, which all variants share."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from qkattn.attention.mask import Mask
from qkattn.attention.normalizers import Normalizer, Softmax

SOFTMAX = Softmax()


# distance_TS -> b_NTS, what is added to the scaled and capped logits at distances t - s.
Bias = Callable[[jax.Array], jax.Array]


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask: Mask | jax.Array,
    *,
    scale: float | jax.Array,
    bias: Bias | None = None,
    logit_cap: float | None = None,
    normalizer: Normalizer = SOFTMAX,
    dropout: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """o[t, n] = sum_s softmax_s(scale * q[t, n] . k[s]) v[s]; probabilities in float32 or wider.

    Keys and values may have fewer heads than queries, each a number that divides N, and values may
    have another head size. A shared head is not copied to the N query heads. A query whose keys are
    all masked returns the mean of the values (softmax, entmax) or 0: finite, but without meaning.

    Args:
      q_BTNH, k_BSKH, v_BSKH: queries, keys and values; K and H may differ between k and v.
      mask: a Mask, or a mask_BTS, True where a query may attend to a key; B may be 1.
      scale: factor on the logits.
      bias: of the distances, added to the scaled (and capped) logits.
      logit_cap: c in c tanh(logit / c); None is off.
      normalizer: what stands in place of softmax.
      dropout: rate at which attention probabilities are dropped; off without a key.
      dropout_key: random key of dropout.

    Returns:
      o_BTNH with the head size and dtype of v.
    """
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    mask = Mask.of(mask)
    logits_dtype = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    # The query heads of a key head are further rows, Q = M T: XLA's CPU backend takes up to twice
    # the time for products with an axis M = N / K of their own, and for a softmax over five axes.
    q_BKMTH = jnp.moveaxis(q_BTNH.reshape(B, T, K, N // K, H), 1, 3)
    s_BKQS = jnp.einsum(
        'BKQH,BKSH->BKQS',
        q_BKMTH.reshape(B, K, -1, H),
        jnp.swapaxes(k_BSKH, 1, 2),
        preferred_element_type=logits_dtype,
    )
    s_BNTS = s_BKQS.reshape(B, N, T, S) * scale
    if logit_cap is not None:
        s_BNTS = logit_cap * jnp.tanh(s_BNTS / logit_cap)
    if bias is not None:
        s_BNTS = s_BNTS + bias(mask.queries(T)[:, None] - jnp.arange(S))
    mask_B1TS = mask.dense(T, S)[:, None]
    s_BNTS = jnp.where(mask_B1TS, s_BNTS, jnp.finfo(logits_dtype).min / 2)
    p_BNTS = normalizer(s_BNTS, mask_B1TS).astype(v_BSKH.dtype)
    if dropout and dropout_key is not None:
        keep_BNTS = jax.random.bernoulli(dropout_key, 1 - dropout, p_BNTS.shape)
        p_BNTS = jnp.where(keep_BNTS, p_BNTS / (1 - dropout), 0)
    p_BKQS = p_BNTS.reshape(B, v_BSKH.shape[2], -1, S)
    o_BKQH = jnp.einsum('BKQS,BKSH->BKQH', p_BKQS, jnp.swapaxes(v_BSKH, 1, 2))
    return jnp.swapaxes(o_BKQH.reshape(B, N, T, -1), 1, 2)
