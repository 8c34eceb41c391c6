"""Continuations: sampling as defined; greedy and beam search as by the uncached model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.decode.generate import choose, generate, search
from tests.decode.test_kv_cache import PAIRS, TOKENS, make_model, uncached_logits
from tests.refusals import refused

# Two prompts of 4 tokens.
PROMPTS = TOKENS[:, :4]
CONTEXT = 12
VOCAB_SIZE = 50


@pytest.fixture(scope='module')
def model():
    return make_model()


@pytest.fixture(scope='module')
def uniform_model():
    """A model that gives all tokens the same probability."""
    model = make_model()
    model.w_output_DV[...] *= 0
    return model


def test_greedy_tokens_are_the_same_without_a_cache(model):
    """Without a cache, the model runs over the whole prefix for each token."""
    prompt_length = 4
    # The model does not read the last token, so one token more than its context is possible.
    num_tokens = CONTEXT + 1 - prompt_length
    prompts_BT = np.random.default_rng(1).integers(0, VOCAB_SIZE, (40, prompt_length))

    greedy_BT = np.asarray(generate(model, prompts_BT, num_tokens))

    # Attention is causal, so the zeros after position t - 1 do not affect its logits.
    tokens_BT = np.pad(prompts_BT, ((0, 0), (0, num_tokens)))
    for t in range(prompt_length, prompt_length + num_tokens):
        logits_BTV = uncached_logits(model, tokens_BT[:, :CONTEXT])
        tokens_BT[:, t] = logits_BTV[:, t - 1].argmax(-1)
    np.testing.assert_array_equal(greedy_BT, tokens_BT[:, prompt_length:])
    # More than 3 different tokens occur.
    assert len(np.unique(greedy_BT)) > 3


def test_samples_depend_on_the_key_and_the_row_alone(model):
    def sample(prompts_BT, seed):
        return generate(model, prompts_BT, 6, key=jax.random.key(seed), temperature=1.0)

    tokens_BT = sample(PROMPTS, seed=3)  # two prompts
    first_prompt_alone_BT = sample(PROMPTS[:1], seed=3)
    first_prompt_twice_BT = sample(PROMPTS[[0, 0]], seed=3)

    # The same key gives the same tokens, and another key gives others.
    np.testing.assert_array_equal(tokens_BT, sample(PROMPTS, seed=3))
    assert np.any(tokens_BT != sample(PROMPTS, seed=4))
    # Other rows of the batch do not affect row 0.
    np.testing.assert_array_equal(tokens_BT[:1], first_prompt_alone_BT)
    # Two rows with the same prompt are sampled independently.
    assert np.any(first_prompt_twice_BT[0] != first_prompt_twice_BT[1])


def test_each_step_of_sampling_has_its_own_key(uniform_model):
    tokens_BT = generate(uniform_model, PROMPTS[:1], 6, key=jax.random.key(3), temperature=1.0)

    assert len(np.unique(tokens_BT)) > 1


def test_samples_lie_below_vocab_size(uniform_model):
    tokens_BT = generate(
        uniform_model, PROMPTS, 8, key=jax.random.key(3), temperature=1.0, vocab_size=5
    )

    assert np.min(tokens_BT) >= 0
    assert np.max(tokens_BT) < 5
    assert len(np.unique(tokens_BT)) > 2


@pytest.mark.parametrize('temperature', [0.5, 2.0])
def test_draws_follow_the_softmax_of_the_logits(temperature):
    num_draws = 20_000
    logits_V = np.array([0.3, 2.0, -1.0, 1.1, 2.0, 0.9], np.float32)
    logits_BV = jnp.broadcast_to(logits_V, (num_draws, 6))
    keys_B = jax.random.split(jax.random.key(0), num_draws)

    tokens_B = choose(logits_BV, keys_B, temperature=temperature)

    frequencies_V = np.bincount(tokens_B, minlength=6) / num_draws
    weights_V = np.exp(np.float64(logits_V) / temperature)
    probabilities_V = weights_V / weights_V.sum()
    # A frequency has the standard error sqrt(p (1 - p) / num_draws), largest for p = 1/2.
    largest_standard_error = (0.25 / num_draws) ** 0.5
    np.testing.assert_allclose(frequencies_V, probabilities_V, atol=4 * largest_standard_error)


def log_probabilities(model, prompt, added_tokens, *, vocab_size):
    """The log-probability, without a cache, of each token that is added to a prompt.

    Only the first `vocab_size` ids of the model have a probability.
    """
    tokens_T = np.concatenate([prompt, added_tokens])
    padded_T = np.pad(tokens_T, (0, CONTEXT - len(tokens_T)))
    logits_BTV = uncached_logits(model, padded_T[None])
    logits_TV = np.asarray(logits_BTV[0, :, :vocab_size], np.float64)
    nats_TV = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))

    # A token is predicted at the position before it.
    nats = []
    for position, token in enumerate(added_tokens, start=len(prompt)):
        nats.append(nats_TV[position - 1, token])
    return nats


def test_scores_of_a_beam_are_those_of_the_uncached_model(model):
    """The score of a hypothesis is its log-probability / length ** length_penalty.

    There are B = 2 prompts, and the search returns K = 4 hypotheses for each, best first.
    """
    best = search(model, PROMPTS, 8, separator=3, beam=4, length_penalty=0.7, vocab_size=45)

    lengths_BK = np.asarray(best.lengths_BK)
    scores_BK = np.asarray(best.scores_BK)
    assert len(np.unique(lengths_BK)) > 1
    # Scores do not rise from one hypothesis to the next.
    assert np.all(np.diff(scores_BK, axis=1) <= 0)
    for b, k in np.ndindex(2, 4):
        length = lengths_BK[b, k]
        added_tokens = np.asarray(best.tokens_BKT[b, k, :length])
        # The model has 50 ids, and those from `vocab_size` on are never chosen.
        assert added_tokens.max() < 45
        nats = log_probabilities(model, PROMPTS[b], added_tokens, vocab_size=45)
        expected_score = sum(nats) / length**0.7
        np.testing.assert_allclose(scores_BK[b, k], expected_score, rtol=1e-4)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'num_tokens': 10}, '4 tokens and num_tokens=10 need 13 .*model.context=12'),
        ({'num_tokens': 0}, 'num_tokens=0 must be at least 1'),
        ({'vocab_size': 51}, 'vocab_size=51 must be from 1 to model.vocab_size=50'),
        ({'temperature': float('nan')}, 'temperature=nan'),
        ({'temperature': 1.0}, 'key is required'),
    ],
)
def test_wrong_options_of_generate_are_refused(model, options, message):
    options = {'num_tokens': 2, **options}

    with refused(message):
        generate(model, PROMPTS, **options)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'separator': 0, 'beam': 0}, 'beam=0 must be at least 1'),
        ({'separator': 9, 'beam': 2, 'vocab_size': 9}, 'separator=9 must be .* 0 to 8'),
    ],
)
def test_wrong_options_of_search_are_refused(model, options, message):
    with refused(message):
        search(model, PROMPTS, num_tokens=2, **options)


@pytest.mark.parametrize(
    ('prompts', 'message'),
    [
        (PROMPTS[0, 0], r'prompts of shape \(\) must have two axes, rows and tokens'),
        (PROMPTS[0], r'prompts of shape \(4,\) must have two axes, rows and tokens'),
        (PROMPTS + 40, r'prompts_BT has ids from \d+ to \d+; they must be from 0 to 49, below'),
        (PROMPTS - 50, 'prompts_BT has ids from -'),
        (PROMPTS.astype(float), 'prompts_BT holds float.*; it must hold whole numbers'),
        ([['a']], 'prompts_BT holds <U1; it must hold whole numbers'),
    ],
)
def test_prompts_that_are_no_rows_of_ids_are_refused(model, prompts, message):
    with refused(message):
        generate(model, prompts, 2)
    with refused(message):
        search(model, prompts, 2, separator=0, beam=2)


def test_prompts_without_a_token_are_refused(model):
    with refused(r'prompts of shape \(2, 0\) hold no token to continue'):
        generate(model, PROMPTS[:, :0], 2)


def test_an_encoder_does_not_generate():
    with refused("needs a model of kind 'decoder' here, not 'encoder'"):
        generate(make_model(kind='encoder'), PROMPTS, 2)


def test_sources_that_do_not_fit_are_refused():
    """The model is an encoder-decoder for sources of at most 12 tokens, with ids from 0 to 49."""
    model = make_model(**PAIRS)
    too_long_BS = np.zeros((2, CONTEXT + 1), int)
    too_large_BS = np.full((2, CONTEXT), VOCAB_SIZE)

    def source_of_zeros(*shape):
        return np.zeros(shape, int), np.ones(shape, bool)

    # A source is a pair of ids and of a mask, which is False on padding.
    # There are two prompts.
    with refused(r'source_BS has shape \(1, 4\); it must have .* a row for each of 2 prompts'):
        search(model, PROMPTS, 2, source=source_of_zeros(1, 4), separator=0, beam=2)
    with refused(r'source_BS has shape \(4,\); it must have two axes'):
        search(model, PROMPTS, 2, source=source_of_zeros(4), separator=0, beam=2)
    with refused('a source of 13 tokens does not fit into model.source_context=12'):
        source = (too_long_BS, np.ones_like(too_long_BS, bool))
        search(model, PROMPTS, 2, source=source, separator=0, beam=2)
    with refused('source_BS has ids from 50 to 50'):
        source = (too_large_BS, np.ones_like(too_large_BS, bool))
        search(model, PROMPTS, 2, source=source, separator=0, beam=2)
