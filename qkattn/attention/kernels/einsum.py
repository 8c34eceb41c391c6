"""Attention as two einsums, which hold the logits and the probabilities of all pairs at once."""

import jax
import jax.numpy as jnp

from qkattn.attention.kernels.call import Call


def einsum(call: Call) -> jax.Array:
    """o_BTNH as in `attend`, for every variant and option.

    A query whose keys are all masked returns the mean of the values (softmax, entmax) or 0.
    """
    q_BTNH, k_BSKH, v_BSKH = call.q_BTNH, call.k_BSKH, call.v_BSKH
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
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
    s_BNTS = s_BKQS.reshape(B, N, T, S) * call.scale
    if call.logit_cap is not None:
        s_BNTS = call.logit_cap * jnp.tanh(s_BNTS / call.logit_cap)
    if call.bias is not None:
        s_BNTS = s_BNTS + call.bias(call.mask.queries(T)[:, None] - jnp.arange(S))
    mask_B1TS = call.mask.dense(T, S)[:, None]
    s_BNTS = jnp.where(mask_B1TS, s_BNTS, jnp.finfo(logits_dtype).min / 2)
    p_BNTS = call.normalizer(s_BNTS, mask_B1TS).astype(v_BSKH.dtype)
    if call.dropout:
        keep_BNTS = jax.random.bernoulli(call.dropout_key, 1 - call.dropout, p_BNTS.shape)
        p_BNTS = jnp.where(keep_BNTS, p_BNTS / (1 - call.dropout), 0)
    p_BKQS = p_BNTS.reshape(B, v_BSKH.shape[2], -1, S)
    o_BKQH = jnp.einsum('BKQS,BKSH->BKQH', p_BKQS, jnp.swapaxes(v_BSKH, 1, 2))
    return jnp.swapaxes(o_BKQH.reshape(B, N, T, -1), 1, 2)
