"""Quantities of attention patterns against values worked out by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.analysis import patterns
from qkattn.analysis.patterns import Pattern

CAUSAL = np.tri(4, dtype=bool)[None]
# One row, two heads: equal attention to all visible keys; all to the previous token.
EQUAL = np.tril(np.ones((4, 4))) / np.arange(1, 5)[:, None]
PREVIOUS = np.eye(4)[[0, 0, 1, 2]]


def pattern(*heads, logits=None, mask=CAUSAL):
    p_BNTS = jnp.asarray(np.stack(heads)[None], jnp.float32)
    s_BNTS = jnp.zeros_like(p_BNTS) if logits is None else jnp.asarray(logits, jnp.float32)
    return Pattern(s_BNTS, p_BNTS, jnp.asarray(mask))


BOTH = pattern(EQUAL, PREVIOUS)


def test_entropy_is_that_of_the_distributions_in_nats():
    np.testing.assert_allclose(patterns.entropy(BOTH), [np.log([1, 2, 3, 4]).mean(), 0], atol=1e-6)
    # Probabilities that do not sum to 1, as of sigmoid attention, are divided by their sum.
    np.testing.assert_allclose(
        patterns.entropy(pattern(0.5 * EQUAL)), np.log([1, 2, 3, 4]).mean(), atol=1e-6
    )


def test_mass_on_the_diagonal_and_on_the_previous_token():
    np.testing.assert_allclose(
        patterns.diagonal_mass(BOTH), [(1 + 1 / 2 + 1 / 3 + 1 / 4) / 4, 1 / 4]
    )
    # The first token has no previous one.
    previous = patterns.previous_token_mass(BOTH)
    np.testing.assert_allclose(previous, [(1 / 2 + 1 / 3 + 1 / 4) / 3, 1], rtol=1e-6)


def test_queries_of_padding_do_not_count():
    valid = np.array([True, True, True, False])
    mask = CAUSAL & valid[:, None] & valid
    got = patterns.entropy(pattern(EQUAL * mask[0], mask=mask))
    np.testing.assert_allclose(got, np.log([1, 2, 3]).mean(), atol=1e-6)
    got = patterns.previous_token_mass(pattern(EQUAL * mask[0], mask=mask))
    np.testing.assert_allclose(got, (1 / 2 + 1 / 3) / 2, rtol=1e-6)


def test_a_hidden_diagonal_has_no_mass():
    mask = np.tri(4, k=-1, dtype=bool)[None]
    assert float(patterns.diagonal_mass(pattern(PREVIOUS, mask=mask))[0]) == 0


def test_a_mass_on_keys_that_no_query_sees_is_undefined():
    alone = pattern(np.eye(4), mask=np.eye(4, dtype=bool)[None])
    assert float(patterns.diagonal_mass(alone)[0]) == 1
    assert np.isnan(patterns.previous_token_mass(alone)).all()


def test_the_induction_score_is_the_mass_after_the_previous_occurrence():
    """Tokens a b a b: position 2 looks at 1, position 3 at 2."""
    head = np.zeros((4, 4))
    head[0, 0], head[1, 1], head[2, 1], head[2, 2], head[3, 2] = 1, 1, 0.75, 0.25, 0.5
    score = patterns.induction_score(pattern(head, EQUAL), 2)
    np.testing.assert_allclose(score, [(0.75 + 0.5) / 2, (1 / 3 + 1 / 4) / 2], rtol=1e-6)


def test_the_size_of_logits_ignores_what_softmax_ignores():
    logits = np.array([[0, 9, 9], [1, 3, 9], [10, 10, 16]], float)[None, None]
    mask = np.tri(3, dtype=bool)[None]
    got = pattern(np.zeros((3, 3)), logits=logits, mask=mask)
    # Variances 0, 1 and 8.
    assert float(patterns.logit_deviation(got)[0]) == pytest.approx(3**0.5)
    assert float(patterns.largest_logit(got)[0]) == 16
    shifted = got._replace(logits_BNTS=got.logits_BNTS + 5)
    assert float(patterns.logit_deviation(shifted)[0]) == pytest.approx(3**0.5)
