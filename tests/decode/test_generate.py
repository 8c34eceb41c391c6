"""Continuations: sampling as defined; greedy and beam search as by the uncached model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.decode.generate import choose, generate, search
from tests.decode.test_kv_cache import PAIRS, TOKENS, make_model, uncached_logits
from tests.refusals import refused

PROMPTS = TOKENS[:, :4]


@pytest.fixture(scope='module')
def model():
    return make_model()


def test_greedy_tokens_are_the_same_without_a_cache(model):
    prompts_BT = np.random.default_rng(1).integers(0, 50, (40, 4))
    tokens_BT = np.pad(prompts_BT, ((0, 0), (0, 9)))
    for t in range(4, 13):
        tokens_BT[:, t] = uncached_logits(model, tokens_BT[:, :12])[:, t - 1].argmax(-1)
    # 9 tokens fill the context, since the last one is not fed back.
    greedy_BT = np.asarray(generate(model, prompts_BT, 9))
    np.testing.assert_array_equal(greedy_BT, tokens_BT[:, 4:])
    assert len(np.unique(greedy_BT)) > 3


def test_sampling_depends_only_on_the_key(model):
    draws = {'key': jax.random.key(3), 'temperature': 1.0}
    first = generate(model, PROMPTS, 6, **draws)
    np.testing.assert_array_equal(first, generate(model, PROMPTS, 6, **draws))
    np.testing.assert_array_equal(first[:1], generate(model, PROMPTS[:1], 6, **draws))
    assert np.any(first != generate(model, PROMPTS, 6, **draws | {'key': jax.random.key(4)}))
    same = generate(model, PROMPTS[[0, 0]], 6, **draws)
    assert np.any(same[0] != same[1])
    flat = make_model()
    flat.w_output_DV[...] *= 0
    assert len(np.unique(generate(flat, PROMPTS[:1], 6, **draws))) > 1  # at every step anew
    tokens = generate(flat, PROMPTS, 8, **draws, vocab_size=5)
    assert set(np.unique(tokens)) <= set(range(5))
    assert len(np.unique(tokens)) > 2


@pytest.mark.parametrize('temperature', [0.5, 2.0])
def test_draws_follow_the_softmax_of_the_logits(temperature):
    logits_V = np.array([0.3, 2.0, -1.0, 1.1, 2.0, 0.9], np.float32)
    count = 20_000
    logits_BV = jnp.broadcast_to(logits_V, (count, 6))
    keys_B = jax.random.split(jax.random.key(0), count)
    tokens_B = choose(logits_BV, keys_B, temperature=temperature)
    got_V = np.bincount(tokens_B, minlength=6) / count
    want_V = np.exp(np.float64(logits_V) / temperature)
    # Within four standard errors of a share.
    np.testing.assert_allclose(got_V, want_V / want_V.sum(), atol=4 * (0.25 / count) ** 0.5)


def test_scores_of_a_beam_are_those_of_the_uncached_model(model):
    best = search(model, PROMPTS, 8, separator=3, beam=4, length_penalty=0.7, vocab_size=45)
    lengths_BK = np.asarray(best.lengths_BK)
    assert len(np.unique(lengths_BK)) > 1
    for b, k in np.ndindex(2, 4):
        added = np.asarray(best.tokens_BKT[b, k, : lengths_BK[b, k]])
        assert added.max() < 45

        # The log-probability of the added tokens, divided by their number to the power 0.7.
        whole = np.concatenate([PROMPTS[b], added])
        padded = np.pad(whole, (0, 12 - len(whole)))[None]
        logits_TV = np.asarray(uncached_logits(model, padded)[0, :, :45], np.float64)
        nats_TV = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
        want = nats_TV[3 + np.arange(len(added)), added].sum() / len(added) ** 0.7
        np.testing.assert_allclose(best.scores_BK[b, k], want, rtol=1e-4)
    assert (np.diff(best.scores_BK, axis=1) <= 0).all()


def test_bad_input_is_refused_in_one_sentence(model):
    # The function, its options, and what the refusal says.
    beam = {'separator': 0, 'beam': 2}
    for function, options, message in (
        (generate, {'num_tokens': 10}, '4 tokens and num_tokens=10 need 13 .*model.context=12'),
        (generate, {'num_tokens': 0}, 'num_tokens=0 must be at least 1'),
        (generate, {'vocab_size': 51}, 'vocab_size=51 must be from 1 to model.vocab_size=50'),
        (generate, {'temperature': float('nan')}, 'temperature=nan'),
        (generate, {'temperature': 1.0}, 'key is required'),
        (search, beam | {'beam': 0}, 'beam=0 must be at least 1'),
        (search, beam | {'separator': 9, 'vocab_size': 9}, 'separator=9 must be .* 0 to 8'),
    ):
        with refused(message):
            function(model, PROMPTS, **{'num_tokens': 2} | options)

    # Prompts that neither function takes.
    for prompts, message in (
        (PROMPTS[0], r'prompts of shape \(4,\) must have two axes, rows and tokens'),
        (PROMPTS + 40, r'prompts_BT has ids from \d+ to \d+; they must be from 0 to 49, below'),
        (PROMPTS - 50, 'prompts_BT has ids from -'),
        (PROMPTS.astype(float), 'prompts_BT holds float.*; it must hold whole numbers'),
        ([['a']], 'prompts_BT holds <U1; it must hold whole numbers'),
    ):
        for function, options in ((generate, {}), (search, beam)):
            with refused(message):
                function(model, prompts, 2, **options)

    # Sources of an encoder-decoder, and other models and prompts.
    source = np.zeros((2, 13), int)
    pairs = make_model(**PAIRS)
    with refused('a source of 13 tokens does not fit into model.source_context=12'):
        search(pairs, PROMPTS, 2, (source, source == 0), **beam)
    with refused('source_BS has ids from 50 to 50'):
        search(pairs, PROMPTS, 2, source=(source[:, 1:] + 50, source == 0), **beam)
    with refused(r'prompts of shape \(2, 0\) hold no token to continue'):
        generate(model, PROMPTS[:, :0], 2)
    with refused("needs a model of kind 'decoder' here, not 'encoder'"):
        generate(make_model(kind='encoder'), PROMPTS, 2)
