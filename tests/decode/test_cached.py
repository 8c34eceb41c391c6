"""Decoding with a cache: the numbers of the uncached model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.attention import SCORES, VALUES
from qkattn.config import ModelConfig
from qkattn.decode import cached
from qkattn.decode.generate import generate
from qkattn.model import Decoder, EncoderDecoder, abstract_model, build, cost
from qkattn.study import catalogue

# Rolled layers compile faster; an output matrix of its own keeps tokens from predicting themselves.
CONFIG = ModelConfig(
    d_model=32,
    num_layers=2,
    num_heads=4,
    context=12,
    vocab_size=50,
    d_ff=32,
    tied_embeddings=False,
    scan_unroll=1,
)
TOKENS = np.random.default_rng(0).integers(0, 50, (2, 12))
CELLS = sorted({catalogue.partner(n, c) for known in (SCORES, VALUES) for n, c in known.items()})
OPTIONS = [
    {'positions': 'learned'},
    {'positions': 'rope'},
    {'positions': 'alibi', 'window': 3},
    {'positions': 'sinusoidal', 'norm': 'rmsnorm'},
    {'positions': 'none', 'qk_norm': True, 'logit_cap': 5.0},
    {'biases': True, 'num_kv_heads': 2, 'tied_embeddings': True},
    {'score': 'latent', 'value': 'latent', 'scan_unroll': 2},
]


def make(**fields) -> Decoder:
    """A model whose embeddings are large enough that every token and position matters."""
    model = Decoder(dataclasses.replace(CONFIG, **fields), key=jax.random.key(0))
    model.w_embedding_VD[...] *= 5
    return model


@jax.jit
def read(model, tokens_BT, cache):
    return cached.prefill(model, tokens_BT, cache)


def all_logits(model, chunk):
    """Logits after the last token of each chunk, read through the cache."""
    cache, out = cached.init_cache(model, *TOKENS.shape), []
    for first in range(0, 12, chunk):
        logits_BV, cache = read(model, TOKENS[:, first : first + chunk], cache)
        out.append(logits_BV)
    return np.stack(out, axis=1)


def check_against_uncached(model, *chunks):
    want_BTV = np.asarray(jax.jit(Decoder.__call__)(model, TOKENS))
    assert np.std(want_BTV) > 0.1
    for chunk in chunks:
        want = want_BTV[:, chunk - 1 :: chunk]
        np.testing.assert_allclose(all_logits(model, chunk), want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(('score', 'value'), CELLS)
def test_every_cell_reads_its_cache_as_it_reads_the_sequence(score, value):
    positions = 'rope' if SCORES[score].supports_rope else 'alibi'
    if score == 'latent':
        score = 'latent(rope_size=4)'
    check_against_uncached(make(score=score, value=value, positions=positions), 1)


@pytest.mark.parametrize('fields', OPTIONS, ids=str)
def test_options_act_through_the_cache_in_chunks_too(fields):
    check_against_uncached(make(**fields), 1, 6)


@pytest.mark.parametrize(('score', 'value'), CELLS)
def test_the_cache_is_as_large_as_the_budget_says(score, value):
    config = dataclasses.replace(CONFIG, score=score, value=value)
    cache = cached.init_cache(abstract_model(config), batch=3, length=7)
    measured = sum(array.nbytes for array in cache.memory.values())
    assert measured == cost.cache_floats_per_token(config) * 4 * 3 * 7
    assert all(array.shape[:3] == (2, 3, 7) for array in cache.memory.values())


@pytest.mark.parametrize('positions', ['learned', 'sinusoidal', 'rope', 'alibi', 'none'])
def test_a_row_does_not_notice_its_padding(positions):
    model = make(positions=positions)
    prompts = [TOKENS[0, :2], TOKENS[1, :7]]
    together = generate(model, prompts, 5)
    np.testing.assert_array_equal(together[:1], generate(model, prompts[:1], 5))
    padded_BT = np.stack([np.r_[[9] * 5, prompts[0]], prompts[1]])
    cache = cached.init_cache(model, 2, 7)._replace(start_B=jnp.array([5, 0], jnp.int32))
    logits_BV, _ = read(model, padded_BT, cache)
    want_BTV = jax.jit(Decoder.__call__)(model, TOKENS[:1, :2])
    np.testing.assert_allclose(logits_BV[0], want_BTV[0, -1], atol=1e-4)


def test_a_cache_in_bfloat16_takes_half_the_room():
    model = jax.tree.map(lambda p: p.astype(jnp.bfloat16), make())
    cache = cached.init_cache(model, 1, 4)
    assert {array.dtype for array in cache.memory.values()} == {jnp.dtype(jnp.bfloat16)}
    assert generate(model, TOKENS[:, :2], 1).shape == (2, 1)


PAIRS = dataclasses.replace(CONFIG, kind='encoder_decoder', num_encoder_layers=1, d_ff=None)
# The second row is shorter.
SOURCES = np.random.default_rng(2).integers(0, 50, (2, 9))
VALID = np.arange(9) < np.array([[9], [4]])


def make_pairs(**fields) -> EncoderDecoder:
    """As `make`, with an encoder."""
    model = build(dataclasses.replace(PAIRS, **fields), key=jax.random.key(0))
    model.w_embedding_VD[...] *= 5
    return model


@jax.jit
def begin(model, source_BS, valid_BS):
    return cached.read_source(model, source_BS, valid_BS, TOKENS.shape[1])


SITES = [
    *(
        {
            'score': own[0],
            'value': own[1],
            'cross_variant': '/'.join(asked),
            'encoder_variant': '/'.join(e),
        }
        for own, asked, e in zip(CELLS[::6], CELLS[2::6], CELLS[4::6], strict=True)
    ),
    {'score': 'latent(rope_size=4)', 'cross_variant': 'latent/latent', 'positions': 'rope'},
    {
        'score': 'merged',
        'value': 'no_vo',
        'cross_variant': 'shared_qk(self_mask=True)/k_is_v',
        'positions': 'alibi',
    },
    {'positions': 'sinusoidal', 'scale_embeddings': True, 'norm_position': 'post'},
    {'positions': 'rope', 'num_kv_heads': 1, 'window': 3, 'biases': True, 'qk_norm': True},
    {'shared_embeddings': False, 'scan_unroll': 2, 'activation': 'relu', 'norm': 'rmsnorm'},
]


@pytest.mark.parametrize('fields', SITES, ids=lambda fields: '-'.join(map(str, fields.values())))
def test_an_encoder_decoder_reads_its_cache_as_it_reads_the_sequence(fields):
    model = make_pairs(**fields)
    want_BTV = np.asarray(
        jax.jit(EncoderDecoder.__call__)(
            model, TOKENS, source_BS=SOURCES, source_segments_BS=VALID.astype(np.int32)
        )
    )
    assert np.std(want_BTV) > 0.1
    tolerance = 1e-5 * np.abs(want_BTV).max()
    for chunk in (1,) if 'encoder_variant' in fields else (2, 6):
        cache = begin(model, SOURCES, VALID)
        for first in range(0, 12, chunk):
            logits_BV, cache = read(model, TOKENS[:, first : first + chunk], cache)
            want_BV = want_BTV[:, first + chunk - 1]
            np.testing.assert_allclose(logits_BV, want_BV, atol=tolerance)
    assert int(cache.length) == 12


def test_the_padding_of_a_source_is_never_read():
    model = make_pairs()
    other = np.where(VALID, SOURCES, 7)
    caches = [begin(model, source_BS, VALID) for source_BS in (SOURCES, other)]
    want, got = (read(model, TOKENS[:, :3], cache)[0] for cache in caches)
    np.testing.assert_array_equal(got, want)
    short = begin(model, SOURCES[1:, :4], VALID[1:, :4])
    alone = read(model, TOKENS[1:, :3], short)[0]
    np.testing.assert_allclose(alone, want[1:], atol=1e-5 * np.abs(want).max())
    whole = read(model, TOKENS[:, :3], begin(model, SOURCES, np.ones_like(VALID)))[0]
    assert np.abs(whole[1] - want[1]).max() > 1e-2


def test_a_reordered_cache_goes_on_as_the_rows_it_came_from():
    model = make_pairs()
    _, cache = read(model, TOKENS[:, :5], begin(model, SOURCES, VALID))
    rows = [1, 1, 0]
    got = read(model, TOKENS[rows, 5:7], cached.take_rows(cache, jnp.array(rows)))[0]
    want = read(model, TOKENS[:, 5:7], cache)[0][np.array(rows)]
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    # Hypotheses of a source change places; their source stays.
    four = cached.take_rows(cache, jnp.array([0, 0, 1, 1]))
    tokens_BT = np.random.default_rng(3).integers(0, 50, (4, 2))
    _, four = read(model, tokens_BT, four)
    rows = [1, 1, 3, 2]
    got = read(model, TOKENS[[0, 1, 0, 1], 6:8], cached.take_rows(four, jnp.array(rows)))[0]
    # The same, read anew.
    sources = np.array([0, 0, 1, 1])
    anew = begin(model, SOURCES[sources], VALID[sources])
    before_BT = np.concatenate([TOKENS[sources, :5], tokens_BT[rows]], axis=1)
    _, anew = read(model, before_BT, anew)
    want = read(model, TOKENS[[0, 1, 0, 1], 6:8], anew)[0]
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    assert np.abs(got[0] - got[1]).max() > 1e-2


def test_the_rows_of_a_decoder_are_reordered_with_their_padding():
    model = make()
    start_B = jnp.array([2, 0], jnp.int32)
    cache = cached.init_cache(model, 2, 12)._replace(start_B=start_B)
    _, cache = read(model, TOKENS[:, :5], cache)
    want = read(model, TOKENS[:, 5:7], cache)[0]
    taken = cached.take_rows(cache, jnp.array([1, 0]))
    got = read(model, TOKENS[::-1, 5:7], taken)[0]
    np.testing.assert_allclose(got, want[::-1], atol=1e-5 * np.abs(want).max())
