"""A Mask against its definition, pair by pair, and in blocks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.attention import Mask

T, S = 5, 7
SEGMENTS = {
    'segments_BT': jnp.array([[1, 1, 2, 2, 0], [1, 2, 3, 3, 3]]),
    'segments_BS': jnp.array([[1, 2, 2, 2, 2, 0, 0], [1, 1, 2, 3, 3, 3, 0]]),
}
VALID = jnp.arange(S) < jnp.array([[6], [4]])
MASKS = {
    'everything': Mask(),
    'causal': Mask(causal=True, window=3),
    'decoding': Mask(causal=True, first_query=jnp.int32(2), valid_BS=VALID, window=4),
    'packed': Mask(causal=True, **SEGMENTS),
    'dense': Mask(mask_BTS=jax.random.bernoulli(jax.random.key(0), 0.6, (2, T, S)), valid_BS=VALID),
}


def allowed(mask: Mask, b: int, t: int, s: int) -> bool:
    position = t + int(mask.first_query or 0)
    return not (
        (mask.causal and s > position)
        or (mask.window is not None and abs(position - s) >= mask.window)
        or (mask.valid_BS is not None and not mask.valid_BS[b, s])
        or (mask.mask_BTS is not None and not mask.mask_BTS[b, t, s])
        or (
            mask.segments_BS is not None
            and (mask.segments_BT[b, t] != mask.segments_BS[b, s] or mask.segments_BS[b, s] == 0)
        )
    )


@pytest.mark.parametrize('name', MASKS)
def test_every_field_allows_what_it_says(name):
    mask = MASKS[name]
    want_BTS = np.zeros((2, T, S), bool)
    for b, t, s in np.ndindex(2, T, S):
        want_BTS[b, t, s] = allowed(mask, b, t, s)
    got_BTS = np.asarray(mask.dense(T, S))
    np.testing.assert_array_equal(np.broadcast_to(got_BTS, want_BTS.shape), want_BTS)
    block_BTS = jax.jit(lambda mask, t, s: mask.block(t, 2, s, 3))(mask, 3, 4)
    np.testing.assert_array_equal(block_BTS, got_BTS[:, 3:5, 4:7])


def test_a_query_attends_to_itself_where_it_may_to_no_other():
    mask = Mask(causal=True, window=2, valid_BS=VALID[:, :T])
    open_BTS = np.asarray(mask.dense(T, T))
    got_BTS = np.asarray(dataclasses.replace(mask, hides_self=True).dense(T, T))
    for b, t in np.ndindex(2, T):
        others_S = open_BTS[b, t] & (np.arange(T) != t)
        want_S = others_S if others_S.any() else open_BTS[b, t]
        np.testing.assert_array_equal(got_BTS[b, t], want_S)
