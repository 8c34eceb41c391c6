"""Decoding with a key/value cache gives the logits of the uncached model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.attention import registry
from qkattn.config import ModelConfig
from qkattn.decode import kv_cache
from qkattn.model import Decoder, EncoderDecoder, build, cost
from qkattn.study import variant_catalogue
from tests.attention import examples
from tests.lanes import mostly_slow, slow_except

# Rolled layers (scan_unroll=1) compile faster. Tied embeddings would let tokens predict themselves.
CONFIG = ModelConfig(
    **dict(d_model=32, num_layers=2, num_heads=4, context=12, vocab_size=50, d_ff=32),
    **dict(tied_embeddings=False, scan_unroll=1),
)
TOKENS = np.random.default_rng(0).integers(0, 50, (2, 12))
CHUNK = 3  # tests append this many tokens at a time, so that each model compiles once
EXTENDED = dict(score='t5_bias:T5Bias', value='differential:Differential', normalizer='sigmoid')


def fields_of_variant(score: str, value: str) -> dict[str, str]:
    """Model fields for a variant, with RoPE if its Score supports that."""
    score_class, _ = registry.find_score(score)
    positions = 'rope' if score_class.supports_rope else 'alibi'
    if score == 'latent':
        score = 'latent(rope_size=4)'
    return {'score': score, 'value': value, 'positions': positions}


VARIANTS = [
    fields_of_variant(score, value)
    for score, value in sorted(variant_catalogue.documented_variants()) + examples.FOLDER_VARIANTS
]
OPTIONS = [
    {'positions': 'learned'},
    {'biases': True, 'num_kv_heads': 2, 'tied_embeddings': True, 'scan_unroll': 2},
    {'pattern': 'qk/vo,low_rank(rank=3)/no_v,merged/differential:Differential', 'num_layers': 5},
    {'positions': 'alibi', 'window': 3, 'qk_norm': True, 'logit_cap': 5.0},
    EXTENDED,
]
PAIRS = {'kind': 'encoder_decoder', 'num_encoder_layers': 1, 'd_ff': None}
# Two sources, of 9 and 4 tokens.
SOURCES = np.random.default_rng(2).integers(0, 50, (2, 9))
VALID = np.arange(9) < np.array([[9], [4]])
prefill = jax.jit(kv_cache.prefill)
uncached_logits = jax.jit(lambda model, *args, **kwargs: model(*args, **kwargs))
encode = jax.jit(kv_cache.encode_source, static_argnums=3)


def make_model(**fields) -> Decoder | EncoderDecoder:
    """A model whose embeddings are large enough that every token and position matters."""
    model = build(dataclasses.replace(CONFIG, **fields), key=jax.random.key(0))
    model.w_embedding_VD[...] *= 5
    return model


def cached_logits(model, tokens_BT, cache, chunk=CHUNK):
    """Appends the tokens to a cache in chunks, and returns the logits after each chunk."""
    num_tokens = tokens_BT.shape[1]
    logits_of_chunks = []
    for start in range(0, num_tokens, chunk):
        logits_BV, cache = prefill(model, tokens_BT[:, start : start + chunk], cache)
        logits_of_chunks.append(logits_BV)
    assert int(cache.length) == num_tokens
    return np.stack(logits_of_chunks, axis=1)


def after_each_chunk(logits_BTV):
    """Keeps the logits after the last token of each chunk."""
    return np.asarray(logits_BTV)[:, CHUNK - 1 :: CHUNK]


def assert_close(actual, expected):
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    'fields', [*mostly_slow(VARIANTS, every=18), *slow_except(OPTIONS[:2], OPTIONS)], ids=str
)
def test_a_model_decodes_from_a_cache_of_the_documented_size(fields):
    """Appending one token at a time to a cache gives the logits of one pass without a cache."""
    model = make_model(**fields)
    cache = kv_cache.init_cache(model, *TOKENS.shape)

    logits_BTV = cached_logits(model, TOKENS, cache, chunk=1)

    assert_close(logits_BTV, np.asarray(uncached_logits(model, TOKENS)))

    # The first axes of an array of the cache are layers, rows and tokens.
    cached_arrays = jax.tree.leaves(cache.layers)
    for array in cached_arrays:
        assert array.shape[1:3] == TOKENS.shape
    # `cost` computes from the config how many numbers all layers cache per token.
    float32_bytes = 4
    expected_bytes = float32_bytes * cost.cache_floats_per_token(model.config) * TOKENS.size
    assert sum(array.nbytes for array in cached_arrays) == expected_bytes


def test_a_cache_has_the_dtype_of_the_model():
    model = jax.tree.map(lambda p: p.astype(jnp.bfloat16), make_model())

    # `prefill` appends two tokens to a cache for 2 rows of 4 tokens.
    empty_cache = kv_cache.init_cache(model, 2, 4)
    logits_BV, filled_cache = jax.eval_shape(kv_cache.prefill, model, TOKENS[:, :2], empty_cache)

    # Logits are never narrower than float32.
    assert logits_BV.dtype == jnp.float32
    # All layers have the same variant of attention, so they share one entry.
    assert len(empty_cache.layers) == 1
    assert len(filled_cache.layers) == 1
    for array in jax.tree.leaves([empty_cache.layers, filled_cache.layers]):
        assert array.dtype == jnp.bfloat16


@pytest.mark.slow
def test_a_model_decodes_in_float64():
    with jax.enable_x64(True):
        model = jax.tree.map(lambda p: p.astype(jnp.float64), make_model(positions='rope'))
        cache = kv_cache.init_cache(model, *TOKENS.shape)

        logits = cached_logits(model, TOKENS, cache)

        expected = after_each_chunk(uncached_logits(model, TOKENS))
    assert logits.dtype == np.float64
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


MERGED = {'score': 'merged', 'value': 'no_v'}
SITES = [
    MERGED | {'cross_variant': 'query_free/vo', 'encoder_variant': 'key_free/no_o'},
    {'score': 'latent(rope_size=4)', 'cross_variant': 'latent/latent', 'positions': 'rope'},
    {'cross_variant': 'shared_qk(self_mask=True)/k_is_v', 'positions': 'alibi', 'value': 'no_vo'},
    {'positions': 'sinusoidal', 'scale_embeddings': True, 'norm_position': 'post'},
    {'positions': 'rope', 'num_kv_heads': 1, 'window': 3, 'biases': True, 'qk_norm': True},
    EXTENDED | {'cross_variant': 'qk/differential:Differential', 'value': 'gated:Gated'},
]


@pytest.mark.parametrize('fields', mostly_slow(SITES, every=6), ids=str)
def test_an_encoder_decoder_decodes_from_its_cache(fields):
    """The cache holds the keys and values of the target tokens and of the encoded source."""
    model = make_model(**PAIRS | fields)
    num_tokens = TOKENS.shape[1]

    cache = encode(model, SOURCES, VALID, num_tokens)
    logits = cached_logits(model, TOKENS, cache)

    # VALID is False on padding of the sources, which is segment 0.
    expected_logits = uncached_logits(
        model, TOKENS, source_BS=SOURCES, source_segments_BS=VALID.astype(np.int32)
    )
    assert_close(logits, after_each_chunk(expected_logits))

    # `cost` adds the cached numbers of a target token and of a source token.
    floats_per_token = 0
    for array in jax.tree.leaves(cache.layers):
        floats_per_token += array.size // TOKENS.size
    for array in jax.tree.leaves(cache.source):
        floats_per_token += array.size // SOURCES.size
    assert floats_per_token == cost.cache_floats_per_token(model.config)
