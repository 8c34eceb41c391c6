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
    after = collections.Counter()
    for row in rows:
        for t in range(max(number, 1), len(row)):
            if row[t - 1 :: -1][:number] == context[:number]:
                after[row[t]] += 1
    if not after:
        return lower
    return (after[target] + len(after) * lower) / (after.total() + len(after))


def text():
    """Counted and evaluated rows; of these the last id is never counted, nor are some contexts."""
    rng = np.random.default_rng(0)
    counted_RL = rng.choice(V - 1, (30, 9), p=(0.5, 0.3, 0.15, 0.05))
    rows_RL = rng.integers(V, size=(6, 9))
    return counted_RL, rows_RL


def test_losses_are_those_of_counts_in_dictionaries():
    counted_RL, rows_RL = text()
    counted = ngrams.preceding(counted_RL, 3)
    (nats_OM,) = ngrams.losses(*counted, [ngrams.preceding(rows_RL, 3)], V)
    nats_ORT = nats_OM.reshape(4, 6, 8)
    counted_rows = counted_RL.tolist()
    for r, row in enumerate(rows_RL.tolist()):
        for t in range(1, 9):
            for order in range(4):
                p = slow_probability(counted_rows, row[t - 1 :: -1], row[t], order)
                assert nats_ORT[order, r, t - 1] == pytest.approx(-math.log(p))


def test_probabilities_of_all_tokens_sum_to_one():
    counted_RL, rows_RL = text()
    contexts_KM, targets_M = ngrams.preceding(rows_RL, 3)
    every_token = [(contexts_KM, np.full(len(targets_M), token)) for token in range(V)]
    nats_VOM = np.stack(ngrams.losses(*ngrams.preceding(counted_RL, 3), every_token, V))
    np.testing.assert_allclose(np.exp(-nats_VOM).sum(axis=0), 1)


def slow_masked_probability(rows, chain, target):
    """P of a target between the tokens of a chain, [(offset, token)], by the definition."""
    lower = slow_masked_probability(rows, chain[:-1], target) if chain else 1 / V
    between = collections.Counter()
    for row in rows:
        for t, token in enumerate(row):
            neighbours = [(t + offset, neighbour) for offset, neighbour in chain]
            if all(0 <= s < len(row) and row[s] == neighbour for s, neighbour in neighbours):
                between[token] += 1
    if not between:
        return lower
    return (between[target] + len(between) * lower) / (between.total() + len(between))


def slow_chain(shown, t, number):
    """The offsets and tokens of the nearest visible neighbours of position t, left ones first."""
    neighbours = [(s - t, token) for s, token in enumerate(shown) if token >= 0 and s != t]
    neighbours.sort(key=lambda neighbour: (abs(neighbour[0]), neighbour[0]))
    return neighbours[:number]


def masked_text():
    """Counted rows, and evaluated ones with what is shown and which tokens are targets."""
    rng = np.random.default_rng(1)
    counted_RT = rng.choice(V - 1, (40, 8), p=(0.5, 0.3, 0.15, 0.05))
    rows_RT = rng.integers(V, size=(9, 8))  # some contexts are never counted
    hidden_RT = rng.random(rows_RT.shape) < 0.5
    hidden_RT[0] = True  # nothing is visible
    return counted_RT, (np.where(hidden_RT, ngrams.MISSING, rows_RT), rows_RT, hidden_RT)


def test_masked_losses_are_those_of_counts_at_the_nearest_visible_offsets():
    counted_RT, (shown_RT, rows_RT, hidden_RT) = masked_text()
    sets = [
        (shown_RT[:4], rows_RT[:4], hidden_RT[:4]),
        (shown_RT[4:], rows_RT[4:], hidden_RT[4:]),
    ]
    nats_OM = np.concatenate(ngrams.masked_losses(counted_RT, sets, 3, V, rare=0), axis=1)
    places = np.argwhere(hidden_RT)
    assert nats_OM.shape == (4, len(places))
    for (r, t), nats_O in zip(places, nats_OM.T, strict=True):
        for order in range(4):
            chain = slow_chain(shown_RT[r].tolist(), t, order)
            p = slow_masked_probability(counted_RT.tolist(), chain, rows_RT[r, t])
            assert nats_O[order] == pytest.approx(-math.log(p)), (r, t, order)


def test_a_rare_chain_of_offsets_has_the_probability_of_the_depth_before():
    counted_RT, evaluated = masked_text()
    (every,) = ngrams.masked_losses(counted_RT, [evaluated], 3, V, rare=0)
    (common,) = ngrams.masked_losses(counted_RT, [evaluated], 3, V, rare=0.2)
    depth_M = np.argmax(common == common[-1], axis=0)  # where a target's chain ends
    assert 0 < depth_M.mean() < 3
    is_counted_OM = np.arange(4)[:, None] <= depth_M
    np.testing.assert_array_equal(common[is_counted_OM], every[is_counted_OM])
