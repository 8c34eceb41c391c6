"""Beam search against greedy decoding and plain Python."""

import functools
import queue

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.decode.beam import beam_search
from tests.lanes import slow_except

V = 3
T = 4
SEPARATOR = 1


def random_tree(seed, batch=3, vocab=V, length=T, scale=2.0):
    """Logits after every prefix of every row; `child_node` numbers the prefixes, 0 is empty."""
    nodes = sum(vocab**t for t in range(length))
    return np.random.default_rng(seed).normal(size=(batch, nodes, vocab)).astype('f4') * scale


def child_node(node, token, vocab):
    """The number of the prefix that a token makes of the prefix `node`."""
    return node * vocab + token + 1


@functools.partial(
    jax.jit, static_argnames=('beam', 'separator', 'num_tokens', 'length_penalty', 'batch_sizes')
)
def _search(
    tree_BNV, *, beam, separator=SEPARATOR, num_tokens=T, length_penalty=1.0, batch_sizes=None
):
    """`beam_search` on a tree of logits; each step puts its number of hypotheses on the queue."""
    row_M = jnp.repeat(jnp.arange(len(tree_BNV)), beam)

    def step(tokens_M, rows_M, cache):
        row_M, node_M = (array[rows_M] for array in cache)
        if batch_sizes is not None:
            jax.debug.callback(batch_sizes.put, tokens_M.shape[0])
        node_M = child_node(node_M, tokens_M, tree_BNV.shape[2])
        return tree_BNV[row_M, node_M], (row_M, node_M)

    options = dict(beam=beam, num_tokens=num_tokens, length_penalty=length_penalty)
    cache = row_M, jnp.zeros(len(row_M), jnp.int32)
    return beam_search(tree_BNV[row_M, 0], cache, step, separator=separator, **options)


def search(tree_BNV, **options):
    return jax.tree.map(np.asarray, _search(tree_BNV, **options))


def log_probabilities(logits_V):
    """Log-probabilities; -inf where all logits are."""
    total = np.logaddexp.reduce(np.float64(logits_V))
    return np.float64(logits_V) - (0 if total == -np.inf else total)


def plain_search(tree_NV, beam, length_penalty, num_tokens=T):
    """What `beam_search` does, one row and one hypothesis at a time, without stopping early."""
    vocab = tree_NV.shape[1]
    alive = [(0.0, 0, [])]
    finished = []
    for t in range(num_tokens):
        # (log-probability, node, tokens) of every continuation by one token, the best ones first.
        grown = []
        for total, node, tokens in alive:
            nats_V = log_probabilities(tree_NV[node])
            for token in range(vocab):
                node_after = child_node(node, token, vocab)
                grown.append((total + nats_V[token], node_after, [*tokens, token]))
        grown = sorted(grown, key=lambda hypothesis: -hypothesis[0])[: 2 * beam]
        # Those among the best `beam` that end are finished; the others go on.
        if len(finished) < beam:
            for total, _, tokens in grown[:beam]:
                if tokens[-1] == SEPARATOR:
                    finished.append((total / (t + 1) ** length_penalty, tokens))
        alive = [hypothesis for hypothesis in grown if hypothesis[2][-1] != SEPARATOR][:beam]
    if len(finished) < beam:
        finished += [(total / num_tokens**length_penalty, tokens) for total, _, tokens in alive]
    return sorted(finished, key=lambda hypothesis: -hypothesis[0])[:beam]


def assert_hypotheses(best, b, expected):
    """The hypotheses of row b are the list of (score, tokens) `expected`, and nothing more."""
    K, num_tokens = best.tokens_BKT.shape[1:]
    for k, (score, tokens) in enumerate(expected + [(-np.inf, [])] * (K - len(expected))):
        assert best.lengths_BK[b, k] == len(tokens)
        padded = tokens + [SEPARATOR] * (num_tokens - len(tokens))
        assert best.tokens_BKT[b, k].tolist() == padded
        np.testing.assert_allclose(best.scores_BK[b, k], score, rtol=2e-5)


@pytest.mark.parametrize(
    ('beam', 'length_penalty'), slow_except([(2, 0.0)], [(2, 0.0), (5, 1.7), (1, 1.0), (3, -2.0)])
)
def test_the_search_finds_what_plain_python_finds_without_stopping_early(beam, length_penalty):
    tree_BNV = random_tree(7, batch=40, vocab=5, length=5)
    best = search(tree_BNV, beam=beam, num_tokens=5, length_penalty=length_penalty)
    assert len(np.unique(best.lengths_BK)) == 5
    for b in range(40):
        assert_hypotheses(best, b, plain_search(tree_BNV[b], beam, length_penalty, 5))


def test_a_beam_of_one_is_greedy_to_the_last_bit():
    tree_BNV = random_tree(1, batch=50, vocab=6, scale=0.1)
    # Differences that are gone once the probabilities are normalized; and exact ties.
    tree_BNV[:25] = (np.round(tree_BNV[:25] * 10) + 0) * np.float32(2**-30)
    best = search(tree_BNV, beam=1)
    for b in range(50):
        node = 0
        greedy = []
        while SEPARATOR not in greedy and len(greedy) < T:
            greedy.append(int(tree_BNV[b, node].argmax()))
            node = child_node(node, greedy[-1], 6)
        assert best.tokens_BKT[b, 0].tolist() == greedy + [SEPARATOR] * (T - len(greedy))
    assert len(np.unique(best.lengths_BK)) == T


def test_the_search_stops_when_all_rows_are_done():
    def steps_and_lengths(tree_BNV):
        """The number of steps of a search, and the lengths of the best hypotheses."""
        batch_sizes = queue.SimpleQueue()
        best = search(tree_BNV, beam=2, batch_sizes=batch_sizes)
        jax.effects_barrier()
        num_steps = batch_sizes.qsize()
        assert {int(batch_sizes.get()) for _ in range(num_steps)} == {3 * 2}
        return num_steps, best.lengths_BK[:, 0].tolist()

    tree_BNV = random_tree(0)
    tree_BNV[:, :, SEPARATOR] += 20  # every row ends at once
    assert steps_and_lengths(tree_BNV) == (1, [1, 1, 1])
    tree_BNV[1, :, SEPARATOR] -= 40  # row 1 never ends
    # The logits of the first of T tokens are given, so T - 1 steps choose all of them.
    assert steps_and_lengths(tree_BNV) == (T - 1, [1, T, 1])


def test_a_token_of_logit_minus_infinity_is_never_chosen():
    tree_BNV = random_tree(3, batch=12)
    rng = np.random.default_rng(3)
    tree_BNV[rng.random(tree_BNV.shape) < 0.4] = -np.inf
    # Row 0 has no possible first token.
    tree_BNV[0, 0] = -np.inf
    for beam in (2, V**T):
        best = search(tree_BNV, beam=beam, length_penalty=0.6)
        for b in range(12):
            expected = plain_search(tree_BNV[b], beam, 0.6)
            assert_hypotheses(best, b, [one for one in expected if one[0] > -np.inf])
        assert np.all(best.lengths_BK[0] == 0)


def test_a_logit_that_is_not_finite_affects_its_row_alone():
    for wrong in (np.nan, -np.nan, np.inf):
        tree_BNV = random_tree(3, batch=2)
        tree_BNV[1, 0, 0] = wrong
        best = search(tree_BNV, beam=2)
        assert np.all(np.isfinite(best.scores_BK[0]))
        assert np.all(np.isnan(best.scores_BK[1]))


def test_ties_go_to_the_lower_beam_then_to_the_lower_id():
    flat_BNV = np.zeros((1, 13, V), np.float32)
    best = search(flat_BNV, separator=2, beam=2, num_tokens=2)
    assert best.tokens_BKT[0].tolist() == [[0, 0], [0, 1]]
    # -log 3 a token, whatever the length: those that finished first come first.
    best = search(flat_BNV, separator=0, beam=3, num_tokens=3)
    assert best.tokens_BKT[0].tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]
    assert np.ptp(best.scores_BK) == 0


def test_scores_of_bfloat16_logits_are_summed_in_float32():
    tree_BNV = jnp.asarray(random_tree(5), jnp.bfloat16)
    best = search(tree_BNV, beam=4, num_tokens=1)
    assert best.scores_BK.dtype == np.float32
    assert best.tokens_BKT.dtype == np.int32
    for b in range(3):
        assert_hypotheses(best, b, plain_search(np.float32(tree_BNV[b]), 4, 1.0, num_tokens=1))


def test_a_vocabulary_may_be_one_token():
    best = search(np.zeros((1, 4, 1), np.float32), separator=0, beam=2)
    assert best.lengths_BK.tolist() == [[1, 0]]
    assert best.scores_BK.tolist() == [[0, -np.inf]]
