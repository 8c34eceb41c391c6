"""Patterns of layers, and quantities of them, worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.analysis import patterns
from qkattn.analysis.patterns import Pattern, pattern_of, walk
from qkattn.attention import Mask
from qkattn.config import ModelConfig
from qkattn.model import build
from tests.attention import layers

CAUSAL = np.tri(4, dtype=bool)[None]
# One row, two heads: equal attention to all visible keys; all to the previous token.
EQUAL = np.tril(np.ones((4, 4))) / np.arange(1, 5)[:, None]
PREVIOUS = np.eye(4)[[0, 0, 1, 2]]


def pattern(*heads, logits=None, mask=CAUSAL):
    p_BNTS = jnp.asarray(np.stack(heads)[None], jnp.float32)
    s_BNTS = jnp.zeros_like(p_BNTS) if logits is None else jnp.asarray(logits, jnp.float32)
    return Pattern(s_BNTS, p_BNTS, jnp.asarray(mask))


BOTH = pattern(EQUAL, PREVIOUS)
PADDED = CAUSAL & [True, True, True, False] & np.array([[True], [True], [True], [False]])
# Tokens a b a b: position 2 attends to 1, position 3 to 2.
REPEATS = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0.75, 0.25, 0], [0, 0, 0.5, 0]])


def test_a_quantity_has_the_value_worked_out_by_hand():
    for quantity, measured, expected in (
        ('entropy', BOTH, [np.log([1, 2, 3, 4]).mean(), 0]),
        # Probabilities that do not sum to 1, as of sigmoid attention, are divided by their sum.
        ('entropy', pattern(0.5 * EQUAL), [np.log([1, 2, 3, 4]).mean()]),
        ('entropy', pattern(EQUAL * PADDED[0], mask=PADDED), [np.log([1, 2, 3]).mean()]),
        ('diagonal_mass', BOTH, [(1 + 1 / 2 + 1 / 3 + 1 / 4) / 4, 1 / 4]),
        ('diagonal_mass', pattern(PREVIOUS, mask=np.tri(4, k=-1, dtype=bool)[None]), [0]),
        # The first token has no previous one.
        ('previous_token_mass', BOTH, [(1 / 2 + 1 / 3 + 1 / 4) / 3, 1]),
        ('previous_token_mass', pattern(EQUAL * PADDED[0], mask=PADDED), [(1 / 2 + 1 / 3) / 2]),
        ('previous_token_mass', pattern(np.eye(4), mask=np.eye(4, dtype=bool)[None]), [np.nan]),
    ):
        actual = getattr(patterns, quantity)(measured)
        np.testing.assert_allclose(actual, expected, atol=1e-6, err_msg=quantity)


def test_the_induction_score_is_the_mass_after_the_previous_occurrence():
    score = patterns.induction_score(pattern(REPEATS, EQUAL), 2)
    np.testing.assert_allclose(score, [(0.75 + 0.5) / 2, (1 / 3 + 1 / 4) / 2], rtol=1e-6)


def test_the_size_of_logits_ignores_what_softmax_ignores():
    logits = np.array([[0, 9, 9], [1, 3, 9], [10, 10, 16]], float)[None, None]
    for shift in (0, 5):  # variances 0, 1 and 8
        mask = np.tri(3, dtype=bool)[None]
        one = pattern(np.zeros((3, 3)), logits=logits + shift, mask=mask)
        assert float(patterns.logit_deviation(one)[0]) == pytest.approx(3**0.5)
        assert float(patterns.largest_logit(one)[0]) == 16 + shift


@pytest.mark.parametrize(
    ('score', 'options'),
    [
        ('nonlinear_query', {}),
        ('shared_qk(self_mask=True)', {}),
        ('qk', {'positions': 'alibi', 'logit_cap': 0.7, 'window': 3, 'kernel': 'blockwise'}),
        ('qk', {'normalizer': 'sigmoid', 'score_scale': 0.5}),
    ],
)
def test_the_pattern_is_that_of_the_slow_reference(score, options):
    layer, x_BTD = layers.make((score, 'vo'), **options), layers.stream()
    spec, value = layer.spec, layer.value
    for y_BSD in (None, layers.stream(length=5, seed=6)):
        cross, read_BSD = y_BSD is not None, x_BTD if y_BSD is None else y_BSD
        mask = Mask(causal=not cross, window=spec.window)
        measured = pattern_of(layer, x_BTD, mask, y_BSD)
        assert layer.spec is spec and layer.value is value
        mask_BTS = np.asarray(mask.dense(*measured.logits_BNTS.shape[2:]))
        p_BNTS = layers.expected_probabilities(layer, x_BTD, read_BSD, mask_BTS, cross=cross)
        np.testing.assert_allclose(measured.probabilities_BNTS, p_BNTS, atol=1e-5)
        mask_BTS = mask_BTS if cross else layers.hide_self(layer.score, mask_BTS)
        np.testing.assert_array_equal(measured.mask_BTS, mask_BTS)
        s_BNTS = layers.expected_logits(layer, x_BTD, read_BSD, cross=cross) * mask_BTS[:, None]
        np.testing.assert_allclose(measured.logits_BNTS, s_BNTS, atol=1e-4)


def test_a_walk_layer_by_layer_gives_what_the_model_computes():
    sizes = {'d_model': 16, 'num_heads': 2, 'num_layers': 2, 'context': 8, 'vocab_size': 30}
    config = ModelConfig(
        **sizes, kind='encoder_decoder', cross_variant='merged/vo', norm_position='post'
    )
    model, tokens = build(config, key=jax.random.key(0)), np.arange(16).reshape(2, 8)
    inputs, sites = {'tokens_BT': tokens, 'source_BS': tokens[:, :6]}, []
    walked = jax.jit(lambda m, i: walk(m, i, lambda *at: sites.append(at[:2])))(model, inputs)
    expected = jax.jit(lambda m, i: m.stream(**i))(model, inputs)
    np.testing.assert_allclose(walked, expected, atol=2e-5)
    assert sites[:2] == [('encoder/attention', 0), ('encoder/attention', 1)] and len(sites) == 6
