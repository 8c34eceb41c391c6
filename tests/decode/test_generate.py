"""Continuations: sampling as defined; greedy and beam search as by the uncached model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.decode.generate import choose, generate, search
from qkattn.errors import ConfigError
from qkattn.model import abstract_model
from tests.decode.test_kv_cache import CONFIG, TOKENS, make, uncached


@pytest.fixture(scope='module')
def model():
    return make()


def uncached_greedy(model, prompt_BT, num_tokens):
    tokens_BT = np.pad(prompt_BT, ((0, 0), (0, num_tokens)))
    for t in range(prompt_BT.shape[1], tokens_BT.shape[1]):
        tokens_BT[:, t] = uncached(model, tokens_BT[:, :12])[:, t - 1].argmax(-1)
    return tokens_BT[:, prompt_BT.shape[1] :]


def test_greedy_tokens_are_those_without_a_cache_and_of_a_beam_of_one(model):
    prompts_BT = np.random.default_rng(1).integers(0, 50, (40, 4))
    # 9 tokens fill the context, since the last one is not fed back.
    greedy_BT = np.asarray(generate(model, prompts_BT, 9))
    np.testing.assert_array_equal(greedy_BT, uncached_greedy(model, prompts_BT, 9))
    assert len(np.unique(greedy_BT)) > 3
    # A separator that greedy decoding reaches early in some rows, late in others, never in most.
    separator = int(np.bincount(greedy_BT[:, 1:].ravel(), minlength=50).argmax())
    found = search(model, prompts_BT, 9, separator=separator, beam=1)
    ended_BT = np.cumsum(greedy_BT == separator, axis=1) > 0
    assert 0 < ended_BT.any(axis=1).sum() < 40
    np.testing.assert_array_equal(found.tokens_BKT[:, 0], np.where(ended_BT, separator, greedy_BT))
    np.testing.assert_array_equal(
        found.lengths_BK[:, 0], np.minimum((~ended_BT).sum(axis=1) + 1, 9)
    )


def test_continuations_are_the_same_where_64_bit_types_are_allowed(model):
    draws = {'key': jax.random.key(3), 'temperature': 1.0, 'top_k': 9, 'top_p': 0.9}
    prompts = TOKENS[:, :4]

    def continued():
        found = search(model, prompts, 3, separator=3, beam=2)
        return generate(model, prompts, 3), generate(model, prompts, 3, **draws), *found

    expected = continued()
    with jax.enable_x64(True):
        for one, other in zip(continued(), expected, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_allclose(one, other, rtol=1e-5)


def test_sampling_depends_on_the_key_and_on_nothing_else(model):
    draws = {'key': jax.random.key(3), 'temperature': 1.0}
    first = generate(model, TOKENS[:, :4], 6, **draws)
    np.testing.assert_array_equal(first, generate(model, TOKENS[:, :4], 6, **draws))
    np.testing.assert_array_equal(first[:1], generate(model, TOKENS[:1, :4], 6, **draws))
    other = generate(model, TOKENS[:, :4], 6, **draws | {'key': jax.random.key(4)})
    assert np.any(first != other)
    same = generate(model, np.stack([TOKENS[0, :4]] * 2), 6, **draws)
    assert np.any(same[0] != same[1])
    flat = make()
    flat.w_output_DV[...] *= 0
    assert len(np.unique(generate(flat, TOKENS[:1, :4], 6, **draws))) > 1  # at every step anew


def reference_probabilities(logits_V, temperature, top_k, top_p):
    """Top-k, then top-p on what is left, one token at a time."""
    p_V = np.exp(np.float64(logits_V) / temperature)
    order = sorted(range(len(p_V)), key=lambda i: (-p_V[i], i))[:top_k]
    p_V = p_V / p_V[order].sum()
    kept, mass = [], 0.0
    for i in order:
        if top_p is not None and mass >= top_p:
            break
        kept.append(i)
        mass += p_V[i]
    out_V = np.zeros_like(p_V)
    out_V[kept] = p_V[kept] / mass
    return out_V


@pytest.mark.parametrize(
    ('temperature', 'top_k', 'top_p'),
    [
        (1.0, None, None),
        (0.5, None, None),
        (2.0, 3, None),
        (1.0, 1, None),
        (1.0, None, 0.6),
        (1.0, None, 1e-9),
        (0.7, 4, 0.8),
    ],
)
def test_draws_follow_the_defined_distribution(temperature, top_k, top_p):
    logits_V = np.array([0.3, 2.0, -1.0, 1.1, 2.0, 0.9], np.float32)  # a tie, unsorted
    count = 20_000
    keys_B = jax.random.split(jax.random.key(0), count)
    tokens_B = choose(
        jnp.broadcast_to(logits_V, (count, 6)),
        keys_B,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
    got_V = np.bincount(tokens_B, minlength=6) / count
    want_V = reference_probabilities(logits_V, temperature, top_k, top_p)
    np.testing.assert_array_equal(got_V > 0, want_V > 0)
    np.testing.assert_allclose(got_V, want_V, atol=4 * (0.25 / count) ** 0.5)


def test_ids_beyond_the_tokenizer_are_never_sampled(model):
    tokens = generate(model, TOKENS[:, :2], 8, key=jax.random.key(0), temperature=9.0, vocab_size=5)
    assert set(np.unique(tokens)) <= set(range(5)) and len(np.unique(tokens)) > 2


def test_scores_of_a_beam_are_those_of_the_uncached_model(model):
    prompts = [TOKENS[0, :4], TOKENS[1, :2]]  # of different lengths
    found = search(model, prompts, 8, separator=3, beam=4, length_penalty=0.7, vocab_size=45)
    lengths_BK = np.asarray(found.lengths_BK)
    assert len(np.unique(lengths_BK)) > 1
    for b, k in np.ndindex(2, 4):
        added = np.asarray(found.tokens_BKT[b, k, : lengths_BK[b, k]])
        assert added.max() < 45
        whole = np.concatenate([prompts[b], added])[:12]
        padded = np.pad(whole, (0, 12 - len(whole)))[None]
        logits_TV = np.asarray(uncached(model, padded)[0, :, :45], np.float64)
        nats_TV = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
        positions = len(prompts[b]) - 1 + np.arange(len(added))
        want = nats_TV[positions, added].sum() / len(added) ** 0.7
        np.testing.assert_allclose(found.scores_BK[b, k], want, rtol=1e-4)
    assert (np.diff(found.scores_BK, axis=1) <= 0).all()


FITS = [
    ({'num_tokens': 10}, '4 tokens and num_tokens=10 need 13 positions, .*model.context=12'),
    ({'num_tokens': 0}, 'num_tokens=0 must be at least 1'),
    ({'vocab_size': 51}, 'vocab_size=51 must be from 1 to model.vocab_size=50'),
    ({'prompts': [[1, 50]]}, r'prompts\[0\] holds id 50; ids are 0 to 49'),
    ({'prompts': [[1], [-1]]}, r'prompts\[1\] holds id -1'),
    ({'prompts': [[1.5]]}, r'prompts\[0\] is of float64'),
    ({'prompts': [[]]}, 'at least one token id'),
    ({'prompts': []}, 'at least one row'),
    ({'model': abstract_model(dataclasses.replace(CONFIG, kind='encoder'))}, "='encoder' .* must"),
]
SAMPLE = {'temperature': 1.0, 'key': jax.random.key(0)}
BEAM = {'separator': 0, 'beam': 2}
REFUSED = [
    *((generate, change, message) for change, message in FITS),
    (generate, {'temperature': -1.0}, 'temperature=-1.0'),
    (generate, {'temperature': float('nan')}, 'temperature=nan'),
    (generate, {'temperature': 1.0}, 'key is required'),
    (generate, {'top_k': 3}, 'no effect at temperature=0'),
    (generate, {**SAMPLE, 'top_k': 0}, 'top_k=0'),
    (generate, {**SAMPLE, 'top_p': 1.5}, 'top_p=1.5'),
    *((search, BEAM | change, message) for change, message in FITS),
    # Options of the search itself: tests/decode/test_beam.py.
    (search, {'separator': 9, 'beam': 2, 'vocab_size': 9}, 'separator=9 must be an id from 0 to 8'),
]


def test_bad_input_is_one_sentence(model):
    for function, change, message in REFUSED:
        arguments = {'model': model, 'prompts': TOKENS[:, :4], 'num_tokens': 2} | change
        with pytest.raises(ConfigError, match=message) as refusal:
            function(**arguments)
        assert '\n' not in str(refusal.value)
