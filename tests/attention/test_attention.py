"""Attention by hand: defaults, keys or rngs, what is computed once; masks by their definition."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qkattn.attention import Attention, AttentionSpec, Mask, SpecError, visible
from qkattn.attention.parameters import products_once, project
from qkattn.attention.scores.identity import NeitherFull
from qkattn.attention.scores.score import Score
from tests.attention.layers import T, causal, make, stream, wide
from tests.lanes import slow_except

SPEC = AttentionSpec(d_model=32, num_heads=4)


@pytest.fixture(scope='module')
def layer() -> Attention:
    return Attention(SPEC, rngs=nnx.Rngs(0))


def test_sizes_have_defaults_and_wrong_numbers_are_refused_by_field():
    assert (SPEC.num_kv_heads, SPEC.head_size) == (4, 8)
    assert AttentionSpec(d_model=32, num_heads=4, num_kv_heads=2, head_size=6).head_size == 6
    with pytest.raises(SpecError, match='d_model=30 must be a multiple of num_heads=4'):
        AttentionSpec(d_model=30, num_heads=4)

    # Whole numbers may be those of numpy.
    numpy_sizes = {'d_model': np.int64(32), 'num_heads': np.int32(4), 'window': np.int64(3)}
    assert AttentionSpec(**numpy_sizes) == dataclasses.replace(SPEC, window=3)

    # The field, a wrong value, and what the refusal says it must be.
    finite = 'a finite number above 0'
    for field, number, words in (
        *(('d_model', n, 'a whole number of at least 1') for n in (True, 32.0, 0, 'a')),
        *(('window', n, 'a whole number of at least 1, or None') for n in (2.5, True, 0)),
        *(('score_scale', n, finite) for n in ('a', True, 0, None, math.nan, math.inf)),
        ('logit_cap', 0.0, 'a finite number above 0, or None'),
        ('residual_gain', -0.5, 'a finite number at least 0'),
    ):
        with pytest.raises(SpecError, match=f'^{field}={number!r} must be {words}$'):
            dataclasses.replace(SPEC, **{field: number})


def test_the_mask_is_causal_with_the_window_unless_given(layer):
    near = Attention(dataclasses.replace(SPEC, window=2), rngs=nnx.Rngs(0))
    x_BTD = stream()
    y_BSD = stream(5, seed=6)
    for one, window in ((layer, None), (near, 2)):
        # Within a sequence; then across to another, where no mask is the default.
        mask_BTS = visible(7, 7, causal=True, window=window)
        np.testing.assert_array_equal(one(x_BTD), layer(x_BTD, mask_BTS))
        across_BTD = layer(x_BTD, visible(7, 5, causal=False), y_BSD=y_BSD)
        np.testing.assert_array_equal(one(x_BTD, y_BSD=y_BSD), across_BTD)


def test_a_layer_takes_a_key_or_rngs_that_it_draws_from_as_in_nnx(layer):
    rngs = nnx.Rngs(0)
    first = Attention(SPEC, rngs=rngs)
    second = Attention(SPEC, rngs=rngs)
    by_key = Attention(SPEC, key=nnx.Rngs(0).params())

    # `layer` was made from key 0, as were the first draw and `by_key`.
    for other, same in ((first, True), (by_key, True), (second, False)):
        equal = layer.score.w_q_DNH[...] == other.score.w_q_DNH[...]
        assert equal.all() if same else not equal.any()

    # Neither, or both.
    for given in ({}, {'key': jax.random.key(0), 'rngs': rngs}):
        with pytest.raises(
            SpecError, match=r'either key=jax.random.key\(0\) or rngs=nnx.Rngs\(0\)'
        ):
            Attention(SPEC, **given)


def sum_of_squares(layer, x_BTD, dropout=0.0):
    out_BTD = layer(x_BTD, causal(), dropout=dropout, dropout_key=jax.random.key(1))
    return jnp.square(out_BTD).sum()


def test_logits_that_all_heads_have_in_common_are_computed_once():
    """No array of logits has all 4 heads, unless dropout draws for each head."""
    layer = make(('neither_full', 'vo'), num_kv_heads=2)
    for dropout in (0.0, 0.5):
        program = functools.partial(sum_of_squares, dropout=dropout)
        jaxpr = jax.make_jaxpr(program)(layer, stream()).jaxpr
        logits = (
            v.aval.shape for e in jaxpr.eqns for v in e.outvars if v.aval.shape[-2:] == (T, T)
        )
        assert (4 in {shape[1] for shape in logits}) == bool(dropout)


@pytest.mark.slow
def test_logits_in_common_have_the_gradients_of_a_query_for_each_head(monkeypatch):
    gradients = jax.grad(sum_of_squares, (0, 1))
    with jax.enable_x64(True):
        inputs = wide((make(('neither_full', 'vo'), num_kv_heads=2), stream()))
        got = gradients(*inputs)
        # The general method, with a query for each head.
        monkeypatch.setattr(NeitherFull, 'queries_and_keys', Score.queries_and_keys)
        for a, b in zip(*map(jax.tree.leaves, (got, gradients(*inputs))), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


COLLABORATIVE = 'examples.collaborative:Collaborative'
SHARED = [(('qk', 'vo'), {'num_kv_heads': 1})]
SHARED += [((score, 'merged_vo'), {}) for score in ('merged', COLLABORATIVE, 'neither_full')]


@pytest.mark.parametrize(('variant', 'options'), slow_except(SHARED[1:2], SHARED), ids=str)
def test_no_shared_key_or_value_head_is_copied_to_the_query_heads(variant, options):
    """In the compiled gradient, no array but logits has both the S = 13 keys and the N = 4 heads.

    Logits also have an axis of T queries.
    """
    layer = make(variant, head_size=5, **options)
    x_BTD = stream()
    y_BSD = stream(13, seed=6)

    def run(layer, x_BTD, y_BSD):
        return jnp.square(layer(x_BTD, y_BSD=y_BSD)).sum()

    compiled = jax.jit(jax.grad(run, (0, 1, 2))).lower(layer, x_BTD, y_BSD).compile()
    sizes = set(re.findall(r'f32\[([\d,]+)\]', compiled.as_text()))
    shapes = [{*map(int, numbers.split(','))} for numbers in sizes]
    assert any({13, T} <= shape for shape in shapes)
    assert not [shape for shape in shapes if {13, 4} <= shape and T not in shape]


def test_a_product_made_in_an_inner_trace_is_not_reused_outside_of_it():
    x_BTD = stream()
    w_DNH = jnp.ones((32, 4, 8))
    with products_once():
        # A traced value of the inner function would be an error outside of it.
        inner = jax.jit(lambda: project(x_BTD, w_DNH))()
        outer = project(x_BTD, w_DNH)
        assert project(x_BTD, w_DNH) is outer
    np.testing.assert_allclose(inner, outer, rtol=1e-5, atol=1e-5)


# A mask, pair by pair and in blocks

Q, S = 5, 7  # queries and keys of a mask
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
    'dense': Mask(mask_BTS=jax.random.bernoulli(jax.random.key(0), 0.6, (2, Q, S)), valid_BS=VALID),
}


def allowed(mask: Mask, b: int, t: int, s: int) -> bool:
    """Whether query t may attend to key s in row b, by the definition of each field."""
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
    want_BTS = np.zeros((2, Q, S), bool)
    for b, t, s in np.ndindex(2, Q, S):
        want_BTS[b, t, s] = allowed(mask, b, t, s)
    got_BTS = np.asarray(mask.dense(Q, S))
    np.testing.assert_array_equal(np.broadcast_to(got_BTS, want_BTS.shape), want_BTS)
    # A block: 2 queries from position 3 on, and 3 keys from position 4 on.
    block_BTS = jax.jit(lambda mask, t, s: mask.block(t, 2, s, 3))(mask, 3, 4)
    np.testing.assert_array_equal(block_BTS, got_BTS[:, 3:5, 4:7])


def test_a_mask_that_does_not_fit_is_refused(layer):
    seen_BTS = jnp.ones((2, T, T), bool)
    both = 'both segments_BT and segments_BS'
    # A batch of 1 is valid: it holds for both rows.
    assert jnp.array_equal(layer(stream(), seen_BTS), layer(stream(), seen_BTS[:1]))
    # Fields of a mask for 2 rows of T = 7, and what the refusal says.
    for fields, words in (
        ({'segments_BT': SEGMENTS['segments_BT']}, both),
        ({'segments_BS': SEGMENTS['segments_BS']}, both),
        (SEGMENTS, r'segments_BT is int32 of shape \(2, 5\); it must be of shape \(2, 7\), where'),
        ({'valid_BS': jnp.ones((3, T), bool)}, r'valid_BS is bool of shape \(3, 7\)'),
        ({'valid_BS': jnp.ones((2, T))}, 'valid_BS is float32 .* must be boolean and of shape'),
        *(
            ({'mask_BTS': seen_BTS[index]}, 'mask_BTS')
            for index in (0, np.s_[:, 1:], np.s_[..., 1:])
        ),
        ({'mask_BTS': jnp.ones((2, T, T + 1), bool)}, r'mask_BTS is bool of shape \(2, 7, 8\)'),
    ):
        with pytest.raises(SpecError, match=words):
            layer(stream(), Mask(causal=True, **fields))


def test_a_query_attends_to_itself_where_it_may_to_no_other():
    mask = Mask(causal=True, window=2, valid_BS=VALID[:, :Q])
    open_BTS = np.asarray(mask.dense(Q, Q))
    got_BTS = np.asarray(dataclasses.replace(mask, hides_self=True).dense(Q, Q))
    for b, t in np.ndindex(2, Q):
        others_S = open_BTS[b, t] & (np.arange(Q) != t)
        want_S = others_S if others_S.any() else open_BTS[b, t]
        np.testing.assert_array_equal(got_BTS[b, t], want_S)
