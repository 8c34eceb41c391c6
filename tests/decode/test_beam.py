"""Beam search against greedy decoding, plain Python, and every hypothesis there is."""

import functools
import itertools
import queue

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.decode import beam
from qkattn.errors import ConfigError
from tests.lanes import only

V, T, SEPARATOR = 3, 4, 1


def random_tree(seed, batch=3, vocab=V, length=T, scale=2.0):
    """Logits after every prefix of every row; see `child` for the numbers of the prefixes."""
    nodes = sum(vocab**t for t in range(length))
    return np.random.default_rng(seed).normal(size=(batch, nodes, vocab)).astype('f4') * scale


def child(node, token, vocab):
    return node * vocab + token + 1


@functools.partial(jax.jit, static_argnames=('counted', 'separator', 'options'))
def _search(tree_BNV, counted, separator, options):
    B, _, vocab = tree_BNV.shape

    def step(tokens_M, cache):
        row_M, node_M = cache
        if counted is not None:
            jax.debug.callback(counted.put, tokens_M.shape[0])
        node_M = child(node_M, tokens_M, vocab)
        return tree_BNV[row_M, node_M], (row_M, node_M)

    def reorder(cache, rows_M):
        return jax.tree.map(lambda a: a[rows_M], cache)

    cache = (jnp.arange(B), jnp.zeros(B, jnp.int32))
    return beam.beam_search(
        tree_BNV[:, 0], cache, step, reorder, separator=separator, **dict(options)
    )


def search(tree_BNV, separator=SEPARATOR, counted=None, **options):
    options = tuple(({'num_tokens': T} | options).items())
    return jax.tree.map(np.asarray, _search(jnp.asarray(tree_BNV), counted, separator, options))


def nats(logits_V):
    """Log-probabilities; -inf where all logits are."""
    largest = logits_V.max()
    if largest == -np.inf:
        return np.float64(logits_V)
    shifted_V = np.float64(logits_V) - largest
    return shifted_V - np.log(np.exp(shifted_V).sum())


def every_hypothesis(tree_NV, length_penalty, num_tokens=T):
    """(score, tokens) of all hypotheses that have a probability, best first."""
    found = []
    for tokens in itertools.product(range(V), repeat=num_tokens):
        length = tokens.index(SEPARATOR) + 1 if SEPARATOR in tokens else num_tokens
        if any(token != SEPARATOR for token in tokens[length:]):
            continue
        node, total = 0, 0.0
        for token in tokens[:length]:
            total += nats(tree_NV[node])[token]
            node = child(node, token, V)
        if total > -np.inf:
            found.append((total / length**length_penalty, list(tokens)))
    return sorted(found, reverse=True)


def plain_search(tree_NV, beam_size, length_penalty, num_tokens=T):
    """What `beam_search` does, one row and one hypothesis at a time, without stopping early."""
    vocab = tree_NV.shape[1]
    alive, finished = [(0.0, 0, [])], []
    for t in range(num_tokens):
        grown = [
            (total + nats(tree_NV[node])[token], child(node, token, vocab), [*tokens, token])
            for total, node, tokens in alive
            for token in range(vocab)
        ]
        grown = sorted(grown, key=lambda one: -one[0])[: 2 * beam_size]
        if len(finished) < beam_size:
            finished += [
                (total / (t + 1) ** length_penalty, tokens)
                for total, _, tokens in grown[:beam_size]
                if tokens[-1] == SEPARATOR
            ]
        alive = [one for one in grown if one[2][-1] != SEPARATOR][:beam_size]
    if len(finished) < beam_size:
        finished += [(total / num_tokens**length_penalty, tokens) for total, _, tokens in alive]
    return sorted(finished, key=lambda one: -one[0])[:beam_size]


def check(found, b, expected):
    """Row b of the hypotheses found is the list of (score, tokens) `expected`, and nothing more."""
    num_tokens = found.tokens_BKT.shape[2]
    assert np.all(found.scores_BK[b, len(expected) :] == -np.inf)
    assert np.all(found.lengths_BK[b, len(expected) :] == 0)
    assert np.all(found.tokens_BKT[b, len(expected) :] == SEPARATOR)
    for k, (score, tokens) in enumerate(expected):
        padded = tokens + [SEPARATOR] * (num_tokens - len(tokens))
        assert found.tokens_BKT[b, k].tolist() == padded
        length = padded.index(SEPARATOR) + 1 if SEPARATOR in padded else num_tokens
        assert found.lengths_BK[b, k] == length
        np.testing.assert_allclose(found.scores_BK[b, k], score, rtol=2e-5)


@pytest.mark.parametrize('length_penalty', only([-2.0, 0.6], [-2.0, 0.0, 0.6, 2.0]))
def test_a_wide_beam_finds_every_hypothesis_in_order(length_penalty):
    tree_BNV = random_tree(0, batch=12)
    found = search(tree_BNV, beam=V**T, length_penalty=length_penalty)
    for b in range(12):
        expected = every_hypothesis(tree_BNV[b], length_penalty)
        assert len(expected) == 1 + 2 + 4 + 8 + 16
        check(found, b, expected)


NARROW = [(2, 0.0), (5, 1.7), (1, 1.0), (3, 1.0)]


@pytest.mark.parametrize(('beam_size', 'length_penalty'), only(NARROW[:2], NARROW))
def test_a_narrow_beam_is_the_plain_algorithm_run_to_the_end(beam_size, length_penalty):
    tree_BNV = random_tree(7, batch=40, vocab=5, length=5)
    found = search(tree_BNV, beam=beam_size, num_tokens=5, length_penalty=length_penalty)
    assert len(np.unique(found.lengths_BK)) == 5
    for b in range(40):
        check(found, b, plain_search(tree_BNV[b], beam_size, length_penalty, 5))


def test_a_beam_of_one_is_greedy_to_the_last_bit():
    tree_BNV = random_tree(1, batch=50, vocab=6, scale=0.1)
    # Differences that are gone once the probabilities are normalized; and exact ties.
    tree_BNV[:25] = (np.round(tree_BNV[:25] * 10) + 0) * np.float32(2**-30)
    found = search(tree_BNV, beam=1)
    for b in range(50):
        node, greedy = 0, []
        while SEPARATOR not in greedy and len(greedy) < T:
            greedy.append(int(tree_BNV[b, node].argmax()))
            node = child(node, greedy[-1], 6)
        assert found.tokens_BKT[b, 0].tolist() == greedy + [SEPARATOR] * (T - len(greedy))
    assert len(np.unique(found.lengths_BK)) == T


COUNTED = queue.SimpleQueue()  # one for all searches, so that each shape compiles once


@pytest.mark.parametrize(('beam_size', 'steps'), [(1, 0), (2, 1)])
def test_the_search_stops_when_all_rows_are_done(beam_size, steps):
    tree_BNV = random_tree(0)
    tree_BNV[:, :, SEPARATOR] += 20
    # The logits of the first token are given; where row 1 never ends, the last is not decoded from.
    for lengths, num_steps in ([1, 1, 1], steps), ([1, T, 1], T - 1):
        found = search(tree_BNV, beam=beam_size, counted=COUNTED)
        jax.effects_barrier()
        rows = [int(COUNTED.get()) for _ in range(COUNTED.qsize())]
        assert rows == [3 * beam_size] * num_steps
        assert found.lengths_BK[:, 0].tolist() == lengths
        tree_BNV[1, :, SEPARATOR] -= 40


def test_minus_infinity_is_never_chosen_and_never_nan():
    tree_BNV = random_tree(3, batch=12)
    rng = np.random.default_rng(3)
    tree_BNV[rng.random(tree_BNV.shape) < 0.4] = -np.inf
    tree_BNV[0, 0] = -np.inf
    for beam_size in (1, 2, V**T):
        found = search(tree_BNV, beam=beam_size, length_penalty=0.5)
        for b in range(12):
            expected = plain_search(tree_BNV[b], beam_size, 0.5)
            check(found, b, [one for one in expected if one[0] > -np.inf])
        assert np.all(found.lengths_BK[0] == 0)
    for wrong in (np.nan, -np.nan, np.inf):
        tree_BNV = random_tree(3, batch=2)
        tree_BNV[1, 0, 0] = wrong
        found = search(tree_BNV, beam=2)
        assert np.all(np.isfinite(found.scores_BK[0])) and np.all(np.isnan(found.scores_BK[1]))


def test_ties_go_to_the_lower_beam_then_to_the_lower_id():
    flat_BNV = np.zeros((1, 13, V), np.float32)
    found = search(flat_BNV, separator=2, beam=2, num_tokens=2)
    assert found.tokens_BKT[0].tolist() == [[0, 0], [0, 1]]
    found = search(flat_BNV, separator=0, beam=2, num_tokens=2, length_penalty=0.0)
    assert found.tokens_BKT[0].tolist() == [[0, 0], [1, 0]]
    # -log 3 a token, whatever the length: those that finished first come first.
    found = search(flat_BNV, separator=0, beam=3, num_tokens=3)
    assert found.tokens_BKT[0].tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]
    assert np.ptp(found.scores_BK) == 0


def test_ids_beyond_the_tokenizer_are_left_out_and_bfloat16_is_added_up_in_float32():
    tree_BNV = jnp.asarray(random_tree(5, vocab=6), jnp.bfloat16).at[:, :, V:].set(50)
    found = search(tree_BNV, beam=4, vocab_size=V)
    assert found.scores_BK.dtype == np.float32 and found.tokens_BKT.dtype == np.int32
    tree_BNV = np.float32(tree_BNV.at[:, :, V:].set(-np.inf))
    for b in range(3):
        check(found, b, plain_search(tree_BNV[b], 4, 1.0))


def test_one_token_and_a_vocabulary_of_one():
    found = search(random_tree(0), beam=5, num_tokens=1)
    for b in range(3):
        check(found, b, every_hypothesis(random_tree(0)[b], 1.0, num_tokens=1))
    found = search(np.zeros((1, 4, 1), np.float32), separator=0, beam=2)
    assert found.lengths_BK.tolist() == [[1, 0]] and found.scores_BK.tolist() == [[0, -np.inf]]


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'beam': 0}, 'beam=0 must be at least 1'),
        ({'num_tokens': 0}, 'num_tokens=0 must be at least 1'),
        ({'length_penalty': float('nan')}, 'length_penalty=nan must be finite'),
        ({'vocab_size': 4}, 'vocab_size=4 must be from 1 to the 3 logits'),
        ({'vocab_size': 0}, 'vocab_size=0 must be from 1'),
        ({'separator': 3}, 'separator=3 must be an id from 0 to 2'),
        ({'vocab_size': 1}, 'separator=1 must be an id from 0 to 0'),
    ],
)
def test_bad_input_is_one_sentence(change, message):
    with pytest.raises(ConfigError, match=message):
        search(random_tree(0), **{'beam': 2} | change)
