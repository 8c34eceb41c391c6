"""Attention by hand: defaults, keys or rngs, what is computed once, and masks by definition."""

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
from tests.attention.layers import T, causal, in_float64, make, stream
from tests.lanes import slow_except

SPEC = AttentionSpec(d_model=32, num_heads=4)


@pytest.fixture(scope='module')
def layer() -> Attention:
    return Attention(SPEC, rngs=nnx.Rngs(0))


def test_sizes_have_defaults():
    assert SPEC.num_kv_heads == 4
    assert SPEC.head_size == 8
    other = AttentionSpec(d_model=32, num_heads=4, num_kv_heads=2, head_size=6)
    assert other.head_size == 6
    with pytest.raises(SpecError, match='d_model=30 must be a multiple of num_heads=4'):
        AttentionSpec(d_model=30, num_heads=4)


def test_sizes_may_be_numpy_integers():
    spec = AttentionSpec(d_model=np.int64(32), num_heads=np.int32(4), window=np.int64(3))
    assert spec == dataclasses.replace(SPEC, window=3)


WHOLE = 'a whole number of at least 1'
FINITE = 'a finite number above 0'
# Fields, wrong values of each, and what the refusal says that the value must be.
WRONG_NUMBERS = [
    ('d_model', [True, 32.0, 0, 'a'], WHOLE),
    ('window', [2.5, True, 0], f'{WHOLE}, or None'),
    ('score_scale', ['a', True, 0, None, math.nan, math.inf], FINITE),
    ('logit_cap', [0.0], f'{FINITE}, or None'),
    ('residual_gain', [-0.5], 'a finite number at least 0'),
]


@pytest.mark.parametrize(('field', 'wrong_values', 'must_be'), WRONG_NUMBERS)
def test_a_wrong_number_is_refused_by_its_field(field, wrong_values, must_be):
    for value in wrong_values:
        with pytest.raises(SpecError, match=f'^{field}={value!r} must be {must_be}$'):
            dataclasses.replace(SPEC, **{field: value})


@pytest.mark.parametrize('window', [None, 2])
def test_self_attention_is_causal_with_the_window_by_default(layer, window):
    windowed = Attention(dataclasses.replace(SPEC, window=window), rngs=nnx.Rngs(0))
    x_BTD = stream()
    mask_BTS = visible(T, T, causal=True, window=window)
    np.testing.assert_array_equal(windowed(x_BTD), layer(x_BTD, mask_BTS))


@pytest.mark.parametrize('window', [None, 2])
def test_cross_attention_sees_every_key_by_default(layer, window):
    windowed = Attention(dataclasses.replace(SPEC, window=window), rngs=nnx.Rngs(0))
    x_BTD = stream()
    y_BSD = stream(5, seed=6)
    mask_BTS = visible(T, 5, causal=False)
    out_BTD = layer(x_BTD, mask_BTS, y_BSD=y_BSD)
    np.testing.assert_array_equal(windowed(x_BTD, y_BSD=y_BSD), out_BTD)


def test_a_layer_takes_a_key_or_rngs_that_it_draws_from_as_in_nnx(layer):
    """A layer draws its parameters with a given key, or with the next key of an nnx.Rngs."""
    rngs = nnx.Rngs(0)
    first = Attention(SPEC, rngs=rngs)
    second = Attention(SPEC, rngs=rngs)
    by_key = Attention(SPEC, key=nnx.Rngs(0).params())

    # `layer`, `first` and `by_key` use the first key of Rngs(0).
    w_q_DNH = layer.score.w_q_DNH[...]
    np.testing.assert_array_equal(first.score.w_q_DNH[...], w_q_DNH)
    np.testing.assert_array_equal(by_key.score.w_q_DNH[...], w_q_DNH)

    # `second` uses the second key.
    assert not (second.score.w_q_DNH[...] == w_q_DNH).any()


def test_a_layer_needs_either_a_key_or_rngs():
    refusal = r'either key=jax.random.key\(0\) or rngs=nnx.Rngs\(0\)'
    with pytest.raises(SpecError, match=refusal):
        Attention(SPEC)
    with pytest.raises(SpecError, match=refusal):
        Attention(SPEC, key=jax.random.key(0), rngs=nnx.Rngs(0))


def sum_of_squares(layer, x_BTD, dropout=0.0):
    out_BTD = layer(x_BTD, causal(), dropout=dropout, dropout_key=jax.random.key(1))
    return jnp.square(out_BTD).sum()


@pytest.mark.parametrize(
    ('dropout', 'most_heads'),
    [
        pytest.param(0.0, 1, id='one array for all heads'),
        pytest.param(0.5, 4, id='dropout draws for each of the 4 heads'),
    ],
)
def test_logits_that_all_heads_have_in_common_are_computed_once(dropout, most_heads):
    """All 4 heads of the Score neither_full have the logits x x^T, so one array is enough."""
    layer = make(('neither_full', 'vo'), num_heads=4, num_kv_heads=2)
    program = functools.partial(sum_of_squares, dropout=dropout)

    equations = jax.make_jaxpr(program)(layer, stream()).jaxpr.eqns

    # Logits and probabilities have the shape [B, heads, T, T], where T is the number of tokens.
    numbers_of_heads = set()
    for equation in equations:
        for output in equation.outvars:
            shape = output.aval.shape
            if len(shape) == 4 and shape[2:] == (T, T):
                numbers_of_heads.add(shape[1])
    assert max(numbers_of_heads) == most_heads


@pytest.mark.slow
def test_logits_in_common_have_the_gradients_of_a_query_for_each_head(monkeypatch):
    """The shortcut of the Score neither_full has the gradients of the general method.

    All heads have the logits x x^T. The shortcut computes these logits once, with a single head of
    queries.
    """
    compute_gradients = jax.grad(sum_of_squares, (0, 1))
    with jax.enable_x64(True):
        layer, x_BTD = in_float64((make(('neither_full', 'vo'), num_kv_heads=2), stream()))
        got = compute_gradients(layer, x_BTD)

        # The general method has a query for each head.
        monkeypatch.setattr(NeitherFull, 'queries_and_keys', Score.queries_and_keys)
        want = compute_gradients(layer, x_BTD)

        got_leaves = jax.tree.leaves(got)
        want_leaves = jax.tree.leaves(want)
        for got_leaf, want_leaf in zip(got_leaves, want_leaves, strict=True):
            np.testing.assert_allclose(got_leaf, want_leaf, rtol=1e-9, atol=1e-9)


COLLABORATIVE = 'examples.collaborative:Collaborative'
SHARED = [(('qk', 'vo'), {'num_kv_heads': 1})]
SHARED += [((score, 'merged_vo'), {}) for score in ('merged', COLLABORATIVE, 'neither_full')]


@pytest.mark.parametrize(('variant', 'options'), slow_except(SHARED[1:2], SHARED), ids=str)
def test_no_shared_key_or_value_head_is_copied_to_the_query_heads(variant, options):
    """A key or value head that query heads share is never copied to each query head.

    A copy would have axes of S keys and N query heads, but no axis of T queries. Logits have all
    three axes.
    """
    # S, N and T = 7 differ from all other sizes, so each size identifies its axis.
    S = 13
    N = 4
    layer = make(variant, head_size=5, **options)
    x_BTD = stream()
    y_BSD = stream(S, seed=6)

    def run(layer, x_BTD, y_BSD):
        return jnp.square(layer(x_BTD, y_BSD=y_BSD)).sum()

    compiled = jax.jit(jax.grad(run, (0, 1, 2))).lower(layer, x_BTD, y_BSD).compile()
    # The text of the program has shapes such as f32[2,4,7,13].
    texts = set(re.findall(r'f32\[([\d,]+)\]', compiled.as_text()))
    shapes = [{int(size) for size in text.split(',')} for text in texts]

    # The search finds the logits, so it would find a copy as well.
    assert any(S in shape and T in shape for shape in shapes)
    for shape in shapes:
        is_copied = S in shape and N in shape and T not in shape
        assert not is_copied, shape


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
    """Whether query t may attend to key s in row b of a mask.

    Every field of the mask must allow the pair. Query t has the position first_query + t.
    """
    position = t + int(mask.first_query or 0)
    if mask.causal and s > position:
        return False
    if mask.window is not None and abs(position - s) >= mask.window:
        return False
    if mask.valid_BS is not None and not mask.valid_BS[b, s]:
        return False
    if mask.mask_BTS is not None and not mask.mask_BTS[b, t, s]:
        return False
    if mask.segments_BT is not None:
        segment = mask.segments_BS[b, s]  # 0 is padding
        return segment != 0 and mask.segments_BT[b, t] == segment
    return True


@pytest.mark.parametrize('name', MASKS)
def test_every_field_allows_what_it_says(name):
    """A mask says whether query t may attend to key s in row b, like the function `allowed`."""
    mask = MASKS[name]
    want_BTS = np.zeros((2, Q, S), bool)
    for b, t, s in np.ndindex(2, Q, S):
        want_BTS[b, t, s] = allowed(mask, b, t, s)

    # A dense mask that is equal in all rows may have a single row.
    got_BTS = np.asarray(mask.dense(Q, S))
    np.testing.assert_array_equal(np.broadcast_to(got_BTS, want_BTS.shape), want_BTS)

    # A block: 2 queries from position 3 on, and 3 keys from position 4 on.
    block_BTS = jax.jit(lambda mask, t, s: mask.block(t, 2, s, 3))(mask, 3, 4)
    np.testing.assert_array_equal(block_BTS, got_BTS[:, 3:5, 4:7])


def test_a_mask_of_one_row_holds_for_every_row(layer):
    every_key_BTS = jnp.ones((2, T, T), bool)
    np.testing.assert_array_equal(
        layer(stream(), every_key_BTS), layer(stream(), every_key_BTS[:1])
    )


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'segments_BT': SEGMENTS['segments_BT']}, 'both segments_BT and segments_BS'),
        ({'segments_BS': SEGMENTS['segments_BS']}, 'both segments_BT and segments_BS'),
        (SEGMENTS, r'segments_BT is int32 of shape \(2, 5\); it must be of shape \(2, 7\), where'),
        ({'valid_BS': jnp.ones((3, T), bool)}, r'valid_BS is bool of shape \(3, 7\)'),
        ({'valid_BS': jnp.ones((2, T))}, 'valid_BS is float32 .* must be boolean and of shape'),
        ({'mask_BTS': jnp.ones((T, T), bool)}, 'mask_BTS'),
        ({'mask_BTS': jnp.ones((2, T - 1, T), bool)}, 'mask_BTS'),
        ({'mask_BTS': jnp.ones((2, T, T - 1), bool)}, 'mask_BTS'),
        ({'mask_BTS': jnp.ones((2, T, T + 1), bool)}, r'mask_BTS is bool of shape \(2, 7, 8\)'),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(layer, fields, message):
    """The input has 2 rows of T = 7 tokens."""
    with pytest.raises(SpecError, match=message):
        layer(stream(), Mask(causal=True, **fields))


def test_a_query_attends_to_itself_where_it_may_to_no_other():
    """With `hides_self`, a query does not see itself unless it would see nothing else."""
    mask = Mask(causal=True, window=2, valid_BS=VALID[:, :Q])
    visible_BTS = np.asarray(mask.dense(Q, Q))
    hiding = dataclasses.replace(mask, hides_self=True)
    got_BTS = np.asarray(hiding.dense(Q, Q))

    for b, t in np.ndindex(2, Q):
        visible_S = visible_BTS[b, t]
        others_S = visible_S.copy()
        others_S[t] = False
        want_S = others_S if others_S.any() else visible_S
        np.testing.assert_array_equal(got_BTS[b, t], want_S)
