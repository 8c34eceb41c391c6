"""Beam search against greedy decoding and plain Python."""

import functools
import queue
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.decode.beam import beam_search
from tests.lanes import slow_except

# vocabulary size, number of tokens
V = 3
T = 4
SEPARATOR = 1


def random_tree(seed, batch=3, vocab=V, length=T, scale=2.0):
    """Random logits tree_BNV after every prefix of fewer than `length` tokens.

    Prefixes are nodes of a tree: node 0 is the empty prefix, and `child_node` appends a token.
    """
    num_nodes = sum(vocab**t for t in range(length))
    rng = np.random.default_rng(seed)
    return rng.normal(size=(batch, num_nodes, vocab)).astype(np.float32) * scale


def child_node(node, token, vocab):
    """The index of the prefix that appends a token to the prefix `node`."""
    return node * vocab + token + 1


@functools.partial(
    jax.jit, static_argnames=('beam', 'separator', 'num_tokens', 'length_penalty', 'batch_sizes')
)
def _search(
    tree_BNV, *, beam, separator=SEPARATOR, num_tokens=T, length_penalty=1.0, batch_sizes=None
):
    """Runs `beam_search` with logits from a tree instead of a model.

    tree_BNV[b, n] are the logits of row b after prefix n, a node of the tree. There are M = batch *
    beam hypotheses. The cache of the search holds the row and the prefix of each hypothesis.

    If there is a queue `batch_sizes`, each step puts its number of hypotheses on it.
    """
    batch, _, vocab = tree_BNV.shape
    row_M = jnp.repeat(jnp.arange(batch), beam)
    empty_prefix_M = jnp.zeros(batch * beam, jnp.int32)

    def step(tokens_M, rows_M, cache):
        """Appends token m to hypothesis rows_M[m], and returns the next logits and cache."""
        row_M, node_M = cache
        row_M = row_M[rows_M]
        node_M = child_node(node_M[rows_M], tokens_M, vocab)
        if batch_sizes is not None:
            jax.debug.callback(batch_sizes.put, len(tokens_M))
        next_logits_MV = tree_BNV[row_M, node_M]
        return next_logits_MV, (row_M, node_M)

    return beam_search(
        tree_BNV[row_M, empty_prefix_M],
        (row_M, empty_prefix_M),
        step,
        separator=separator,
        beam=beam,
        num_tokens=num_tokens,
        length_penalty=length_penalty,
    )


def search(tree_BNV, **options):
    return jax.tree.map(np.asarray, _search(tree_BNV, **options))


def log_probabilities(logits_V):
    """Log-probabilities in float64. They are -inf if all logits are -inf."""
    logits_V = np.float64(logits_V)
    if np.all(logits_V == -np.inf):
        return logits_V
    return logits_V - np.logaddexp.reduce(logits_V)


class Hypothesis(NamedTuple):
    nats: float  # the log-probability
    node: int
    tokens: list[int]

    @property
    def is_finished(self) -> bool:
        return self.tokens[-1] == SEPARATOR

    def score(self, length_penalty: float) -> float:
        return self.nats / len(self.tokens) ** length_penalty


def plain_search(tree_NV, beam, length_penalty, num_tokens=T):
    """Beam search on one row in plain Python, without stopping early.

    A hypothesis is finished if its last token is the separator. Its score is its log-probability /
    length ** length_penalty.

    Args:
        tree_NV: The logits of the next token after each prefix, a node of a tree. Node 0 is the
            empty prefix.
        beam: The number of hypotheses.
        length_penalty: The exponent of the length in the score.
        num_tokens: The maximum length of a hypothesis.

    Returns:
        (score, tokens) of the `beam` best hypotheses, best first.
    """
    vocab = tree_NV.shape[1]
    alive = [Hypothesis(nats=0.0, node=0, tokens=[])]
    finished = []
    for _ in range(num_tokens):
        # Each hypothesis is extended by every token.
        candidates = []
        for parent in alive:
            nats_V = parent.nats + log_probabilities(tree_NV[parent.node])
            for token in range(vocab):
                node = child_node(parent.node, token, vocab)
                candidates.append(Hypothesis(nats_V[token], node, [*parent.tokens, token]))
        candidates.sort(key=lambda hypothesis: hypothesis.nats, reverse=True)

        # Only the `beam` best candidates may finish, and only the 2 * beam best may go on.
        if len(finished) < beam:
            finished += [hypothesis for hypothesis in candidates[:beam] if hypothesis.is_finished]
        best = candidates[: 2 * beam]
        alive = [hypothesis for hypothesis in best if not hypothesis.is_finished][:beam]

    # Hypotheses of full length count if fewer than `beam` are finished.
    if len(finished) < beam:
        finished += alive
    scored = [(hypothesis.score(length_penalty), hypothesis.tokens) for hypothesis in finished]
    scored.sort(key=lambda pair: pair[0], reverse=True)
    return scored[:beam]


def assert_hypotheses(best, row, expected):
    """Checks the hypotheses of a row against a list of (score, tokens), and the padding."""
    _, beam, num_tokens = best.tokens_BKT.shape
    num_missing = beam - len(expected)
    expected = expected + [(-np.inf, [])] * num_missing
    for k, (score, tokens) in enumerate(expected):
        padding = [SEPARATOR] * (num_tokens - len(tokens))
        assert best.lengths_BK[row, k] == len(tokens)
        assert best.tokens_BKT[row, k].tolist() == tokens + padding
        np.testing.assert_allclose(best.scores_BK[row, k], score, rtol=2e-5)


@pytest.mark.parametrize(
    ('beam', 'length_penalty'), slow_except([(2, 0.0)], [(2, 0.0), (5, 1.7), (1, 1.0), (3, -2.0)])
)
def test_the_search_agrees_with_plain_python(beam, length_penalty):
    """`plain_search` computes the same in plain loops, for one row at a time."""
    num_tokens = 5
    # After every prefix of fewer than 5 tokens, the logits of the next token are random.
    tree_BNV = random_tree(7, batch=40, vocab=5, length=num_tokens)

    best = search(tree_BNV, beam=beam, num_tokens=num_tokens, length_penalty=length_penalty)

    # Hypotheses of every length from 1 to 5 occur.
    assert len(np.unique(best.lengths_BK)) == num_tokens
    for row, tree_NV in enumerate(tree_BNV):
        expected = plain_search(tree_NV, beam, length_penalty, num_tokens)
        assert_hypotheses(best, row, expected)


def greedy_tokens(tree_NV) -> list[int]:
    """The token with the largest logit after each prefix, to a separator or the length T."""
    vocab = tree_NV.shape[1]
    tokens = []
    node = 0  # the empty prefix
    while SEPARATOR not in tokens and len(tokens) < T:
        token = int(tree_NV[node].argmax())
        tokens.append(token)
        node = child_node(node, token, vocab)
    return tokens


def test_a_beam_of_one_is_greedy_to_the_last_bit():
    """A beam of one takes the largest logit, even if rounding makes probabilities equal."""
    tree_BNV = random_tree(1, batch=50, vocab=6, scale=0.1)
    # In rows 0 to 24, logits are equal, or so close that their probabilities are rounded to ties.
    whole_numbers_BNV = np.round(tree_BNV[:25] * 10) + 0  # -0 + 0 = 0
    tree_BNV[:25] = whole_numbers_BNV * np.float32(2**-30)

    best = search(tree_BNV, beam=1)

    # Hypotheses of every length from 1 to T occur.
    assert len(np.unique(best.lengths_BK)) == T
    for row, tree_NV in enumerate(tree_BNV):
        greedy = greedy_tokens(tree_NV)
        padding = [SEPARATOR] * (T - len(greedy))
        assert best.tokens_BKT[row, 0].tolist() == greedy + padding


def assert_steps_and_lengths(tree_BNV, *, num_steps, best_lengths):
    """Checks the number of steps of a search, and the length of the best hypothesis of each row."""
    beam = 2
    batch_sizes = queue.SimpleQueue()

    best = search(tree_BNV, beam=beam, batch_sizes=batch_sizes)
    jax.effects_barrier()  # waits until the callbacks of all steps have run

    # Each step puts its number of hypotheses on the queue.
    assert batch_sizes.qsize() == num_steps
    for _ in range(num_steps):
        assert batch_sizes.get() == len(tree_BNV) * beam
    assert best.lengths_BK[:, 0].tolist() == best_lengths


def test_the_search_stops_when_all_rows_are_done():
    tree_BNV = random_tree(0)
    tree_BNV[:, :, SEPARATOR] += 20  # every row ends at once
    assert_steps_and_lengths(tree_BNV, num_steps=1, best_lengths=[1, 1, 1])

    tree_BNV[1, :, SEPARATOR] -= 40  # row 1 never ends
    # The first token needs no step, because its logits are given. So T tokens need T - 1 steps.
    assert_steps_and_lengths(tree_BNV, num_steps=T - 1, best_lengths=[1, T, 1])


@pytest.mark.parametrize('beam', [2, V**T], ids=['two hypotheses', 'all sequences of T tokens'])
def test_a_token_with_logit_minus_infinity_is_never_chosen(beam):
    # The axes are B = 12 rows, N prefixes, and V next tokens.
    tree_BNV = random_tree(3, batch=12)
    is_impossible_BNV = np.random.default_rng(3).random(tree_BNV.shape) < 0.4
    tree_BNV[is_impossible_BNV] = -np.inf
    # Row 0 has no possible first token.
    empty_prefix = 0
    tree_BNV[0, empty_prefix] = -np.inf

    best = search(tree_BNV, beam=beam, length_penalty=0.6)

    # In plain Python, a hypothesis with an impossible token has the score -inf.
    for row, tree_NV in enumerate(tree_BNV):
        possible = []
        for score, tokens in plain_search(tree_NV, beam, length_penalty=0.6):
            if score > -np.inf:
                possible.append((score, tokens))
        # The other places of the beam must have the score -inf and no tokens.
        assert_hypotheses(best, row, possible)

    # No hypothesis is possible in row 0, so all its places are empty.
    assert np.all(best.lengths_BK[0] == 0)


@pytest.mark.parametrize('wrong', [np.nan, -np.nan, np.inf])
def test_a_logit_that_is_not_finite_affects_its_row_alone(wrong):
    tree_BNV = random_tree(3, batch=2)
    tree_BNV[1, 0, 0] = wrong

    best = search(tree_BNV, beam=2)

    assert np.all(np.isfinite(best.scores_BK[0]))
    assert np.all(np.isnan(best.scores_BK[1]))


def test_ties_go_to_the_lower_beam_then_to_the_lower_id():
    equal_logits_BNV = np.zeros((1, 13, V), np.float32)

    best = search(equal_logits_BNV, separator=2, beam=2, num_tokens=2)

    assert best.tokens_BKT[0].tolist() == [[0, 0], [0, 1]]


def test_ties_of_finished_hypotheses_go_to_the_first_one():
    # There are 1 + 3 + 9 = 13 prefixes of fewer than 3 tokens.
    equal_logits_BNV = np.zeros((1, 13, V), np.float32)

    # A score is (-length * log 3) / length, so every hypothesis has the score -log 3.
    best = search(equal_logits_BNV, separator=0, beam=3, num_tokens=3)

    assert best.tokens_BKT[0].tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]
    assert np.ptp(best.scores_BK) == 0


def test_scores_of_bfloat16_logits_are_summed_in_float32():
    tree_BNV = jnp.asarray(random_tree(5), jnp.bfloat16)

    best = search(tree_BNV, beam=4, num_tokens=1)

    assert best.scores_BK.dtype == np.float32
    assert best.tokens_BKT.dtype == np.int32
    for row, tree_NV in enumerate(np.float32(tree_BNV)):
        expected = plain_search(tree_NV, beam=4, length_penalty=1.0, num_tokens=1)
        assert_hypotheses(best, row, expected)


def test_a_vocabulary_may_be_one_token():
    best = search(np.zeros((1, 4, 1), np.float32), separator=0, beam=2)

    assert best.lengths_BK.tolist() == [[1, 0]]
    assert best.scores_BK.tolist() == [[0, -np.inf]]
