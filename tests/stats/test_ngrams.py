"""N-grams against dictionaries of counts, one token at a time."""

import collections
import math

import numpy as np
import pytest

from qkattn.stats import ngrams

V = 5


def slow_probability(rows, context, target, number):
    """P of a target after its context, nearest token first, by the definition."""
    if number < 0:
        return 1 / V
    lower = slow_probability(rows, context, target, number - 1)
    if len(context) < number:
        return lower
    after = collections.Counter(
        row[t]
        for row in rows
        for t in range(max(number, 1), len(row))
        if row[t - 1 :: -1][:number] == context[:number]
    )
    if not after:
        return lower
    return (after[target] + len(after) * lower) / (after.total() + len(after))


def test_losses_are_those_of_counts_in_dictionaries_and_probabilities_sum_to_one():
    rng = np.random.default_rng(0)
    counted_RL = rng.choice(V - 1, (30, 9), p=(0.5, 0.3, 0.15, 0.05))
    rows_RL = rng.integers(V, size=(6, 9))  # the last id is never counted, nor are some contexts
    contexts_KM, targets_M = ngrams.preceding(rows_RL, 3)
    every = [(contexts_KM, np.full(len(targets_M), token)) for token in range(V)]
    counted = ngrams.preceding(counted_RL, 3)
    nats_OM, *nats = ngrams.losses(*counted, [(contexts_KM, targets_M), *every], V)
    np.testing.assert_allclose(np.exp(-np.stack(nats)).sum(0), 1)
    nats_ORT, rows = nats_OM.reshape(4, 6, 8), counted_RL.tolist()
    for r, row in enumerate(rows_RL.tolist()):
        for t in range(1, 9):
            for order in range(4):
                p = slow_probability(rows, row[t - 1 :: -1], row[t], order)
                assert nats_ORT[order, r, t - 1] == pytest.approx(-math.log(p))


def test_a_hidden_neighbour_is_left_out_of_the_context():
    """Counts of (left, right) back off to the left one, and to none without it."""
    text_RT = np.array([[0, 1, 2, 0, 1, 3]])
    hidden = np.array([[0, 0, -1], [2, -1, 2]]), np.array([1, 1, 1])
    (nats_OM,) = ngrams.losses(ngrams.neighbours(text_RT), text_RT.ravel(), [hidden], V)
    unigram = (2 + 4 / V) / (6 + 4)
    after_left = (2 + unigram) / (2 + 1)
    between = (1 + after_left) / (1 + 1)
    expected = [[unigram] * 3, [after_left, after_left, unigram], [between, after_left, unigram]]
    np.testing.assert_allclose(np.exp(-nats_OM), expected)
