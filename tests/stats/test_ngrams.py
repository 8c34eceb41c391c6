"""N-grams against dictionaries of counts, one token at a time."""

import collections
import math

import numpy as np
import pytest

from qkattn.stats import ngrams

V = 5


def slow_probability(rows, context, target, order):
    """P(target | the `order` tokens before it) by the definition, with Witten-Bell smoothing.

    Counts are mixed with the probability of the order below. Order -1 is the uniform distribution.
    `context` has the nearest token first.
    """
    if order < 0:
        return 1 / V
    lower = slow_probability(rows, context, target, order - 1)
    if len(context) < order:
        return lower

    # The tokens that follow this context anywhere in the rows.
    followers = collections.Counter()
    for row in rows:
        for t in range(max(order, 1), len(row)):
            nearest_first = row[t - 1 :: -1]
            if nearest_first[:order] == context[:order]:
                followers[row[t]] += 1
    if not followers:
        return lower
    num_types = len(followers)
    return (followers[target] + num_types * lower) / (followers.total() + num_types)


def text():
    """Rows to count, and rows to evaluate. Token 4 and some contexts are never counted."""
    rng = np.random.default_rng(0)
    counted_RL = rng.choice(V - 1, (30, 9), p=(0.5, 0.3, 0.15, 0.05))
    rows_RL = rng.integers(V, size=(6, 9))
    return counted_RL, rows_RL


def test_losses_are_those_of_counts_in_dictionaries():
    """The losses of n-grams equal a slow count in dictionaries, for every target and order.

    An n-gram of order k predicts a token from the k tokens before it.
    """
    counted_RL, rows_RL = text()  # 6 rows of 9 tokens are evaluated
    contexts, targets = ngrams.preceding(counted_RL, 3)
    (nats_OM,) = ngrams.losses(contexts, targets, [ngrams.preceding(rows_RL, 3)], V)

    # Orders 0 to 3. Each of 6 rows has 8 targets, since its first token is no target.
    nats_ORT = nats_OM.reshape(4, 6, 8)
    counted_rows = counted_RL.tolist()
    for r, row in enumerate(rows_RL.tolist()):
        for t in range(1, 9):
            context = row[t - 1 :: -1]  # nearest token first
            for order in range(4):
                p = slow_probability(counted_rows, context, row[t], order)
                # Target t has the index t - 1.
                assert nats_ORT[order, r, t - 1] == pytest.approx(-math.log(p))


def test_probabilities_of_all_tokens_sum_to_one():
    counted_RL, rows_RL = text()
    counted_contexts, counted_targets = ngrams.preceding(counted_RL, 3)
    contexts, targets = ngrams.preceding(rows_RL, 3)
    # One set for each token, in which it is the target of all contexts.
    evaluated = [(contexts, np.full(len(targets), token)) for token in range(V)]
    nats_VOM = np.stack(ngrams.losses(counted_contexts, counted_targets, evaluated, V))
    np.testing.assert_allclose(np.exp(-nats_VOM).sum(axis=0), 1)


def has_neighbours(row, t, chain):
    """Whether position t has all neighbours of the chain, a list of (offset, token)."""
    for offset, token in chain:
        s = t + offset
        if not 0 <= s < len(row) or row[s] != token:
            return False
    return True


def slow_masked_probability(rows, chain, target):
    """P(target | neighbours) by the definition, with Witten-Bell smoothing.

    `chain` is a list of neighbours as (offset, token). Counts are mixed with the probability
    without the last neighbour. Counts without neighbours are mixed with the uniform distribution.
    """
    lower = slow_masked_probability(rows, chain[:-1], target) if chain else 1 / V

    # The tokens that occur with these neighbours anywhere in the rows.
    fillers = collections.Counter()
    for row in rows:
        for t, token in enumerate(row):
            if has_neighbours(row, t, chain):
                fillers[token] += 1
    if not fillers:
        return lower
    num_types = len(fillers)
    return (fillers[target] + num_types * lower) / (fillers.total() + num_types)


def slow_chain(shown, t, length):
    """The nearest visible neighbours of position t as (offset, token), nearest first.

    Args:
        shown: The tokens of a row, negative where they are hidden.
        t: The position in the row.
        length: The largest number of neighbours to return.
    """
    neighbours = []
    for s, token in enumerate(shown):
        is_visible = token >= 0
        if is_visible and s != t:
            neighbours.append((s - t, token))

    def distance_and_side(neighbour):
        """The sort key. At equal distance, the left neighbour is first."""
        offset, _ = neighbour
        return abs(offset), offset

    return sorted(neighbours, key=distance_and_side)[:length]


def masked_text():
    """Rows to count, and the shown tokens, all tokens and hidden places of rows to evaluate."""
    rng = np.random.default_rng(1)
    counted_RT = rng.choice(V - 1, (40, 8), p=(0.5, 0.3, 0.15, 0.05))
    rows_RT = rng.integers(V, size=(9, 8))  # some contexts are never counted
    hidden_RT = rng.random(rows_RT.shape) < 0.5
    hidden_RT[0] = True  # nothing is visible
    shown_RT = np.where(hidden_RT, ngrams.MISSING, rows_RT)
    return counted_RT, (shown_RT, rows_RT, hidden_RT)


def test_masked_losses_are_those_of_counts_at_the_nearest_visible_offsets():
    """A hidden token is predicted from its nearest visible neighbours, up to three of them.

    The losses equal a slow count of the tokens that occur with the same neighbours.
    """
    counted_RT, (shown_RT, rows_RT, hidden_RT) = masked_text()
    # The evaluated rows are given as two sets.
    first_set = (shown_RT[:4], rows_RT[:4], hidden_RT[:4])
    second_set = (shown_RT[4:], rows_RT[4:], hidden_RT[4:])
    losses = ngrams.masked_losses(counted_RT, [first_set, second_set], 3, V, rare=0)
    nats_OM = np.concatenate(losses, axis=1)

    # Losses with 0 to 3 neighbours, of each hidden token (row r, position t).
    targets = np.argwhere(hidden_RT)
    assert nats_OM.shape == (4, len(targets))
    counted_rows = counted_RT.tolist()
    for (r, t), nats_O in zip(targets, nats_OM.T, strict=True):
        shown = shown_RT[r].tolist()
        for num_neighbours in range(4):
            chain = slow_chain(shown, t, num_neighbours)
            p = slow_masked_probability(counted_rows, chain, rows_RT[r, t])
            assert nats_O[num_neighbours] == pytest.approx(-math.log(p)), (r, t, num_neighbours)


def test_a_rare_chain_of_offsets_has_the_probability_of_the_depth_before():
    counted_RT, evaluated = masked_text()
    (all_nats_OM,) = ngrams.masked_losses(counted_RT, [evaluated], 3, V, rare=0)
    (nats_OM,) = ngrams.masked_losses(counted_RT, [evaluated], 3, V, rare=0.2)

    # A chain is the offsets of the neighbours. Chains of fewer than 20 % of the targets are not
    # counted. From depth_M neighbours on, the loss of a target stays the same.
    depth_M = np.argmax(nats_OM == nats_OM[-1], axis=0)
    assert 0 < depth_M.mean() < 3
    is_counted_OM = np.arange(4)[:, None] <= depth_M
    np.testing.assert_array_equal(nats_OM[is_counted_OM], all_nats_OM[is_counted_OM])
