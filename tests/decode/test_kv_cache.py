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

# Rolled layers compile faster; an output matrix of its own keeps tokens from predicting themselves.
CONFIG = ModelConfig(
    **dict(d_model=32, num_layers=2, num_heads=4, context=12, vocab_size=50, d_ff=32),
    **dict(tied_embeddings=False, scan_unroll=1),
)
TOKENS = np.random.default_rng(0).integers(0, 50, (2, 12))
CHUNK = 3  # every test appends that many tokens at a time, so that each model compiles once
EXTENDED = dict(score='t5_bias:T5Bias', value='differential:Differential', normalizer='sigmoid')
VARIANTS = [
    {'score': {'latent': 'latent(rope_size=4)'}.get(score, score), 'value': value}
    | {'positions': 'rope' if registry.find_score(score)[0].supports_rope else 'alibi'}
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
# The second row is shorter.
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


def last_logits(model, tokens_BT, cache, chunk=CHUNK):
    """Logits after each chunk of the tokens."""
    logits = []
    for first in range(0, tokens_BT.shape[1], chunk):
        logits_BV, cache = prefill(model, tokens_BT[:, first : first + chunk], cache)
        logits.append(logits_BV)
    assert int(cache.length) == tokens_BT.shape[1]
    return np.stack(logits, axis=1)


def assert_close(actual, expected):
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    'fields', [*mostly_slow(VARIANTS, every=18), *slow_except(OPTIONS[:2], OPTIONS)], ids=str
)
def test_a_model_decodes_from_a_cache_of_the_documented_size(fields):
    model = make_model(**fields)
    cache = kv_cache.init_cache(model, *TOKENS.shape)
    assert_close(
        last_logits(model, TOKENS, cache, chunk=1), np.asarray(uncached_logits(model, TOKENS))
    )
    assert all(array.shape[1:3] == TOKENS.shape for array in jax.tree.leaves(cache.layers))
    cached_bytes = sum(array.nbytes for array in jax.tree.leaves(cache.layers))
    assert cached_bytes == cost.cache_floats_per_token(model.config) * 4 * TOKENS.size


def test_a_cache_has_the_dtype_of_the_model():
    model = jax.tree.map(lambda p: p.astype(jnp.bfloat16), make_model())
    cache = kv_cache.init_cache(model, 2, 4)
    logits_BV, longer = jax.eval_shape(kv_cache.prefill, model, TOKENS[:, :2], cache)
    assert logits_BV.dtype == jnp.float32
    for (arrays,) in (cache.layers, longer.layers):
        assert {array.dtype for array in arrays.values()} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.slow
def test_a_model_decodes_in_float64():
    with jax.enable_x64(True):
        model = jax.tree.map(lambda p: p.astype(jnp.float64), make_model(positions='rope'))
        logits = last_logits(model, TOKENS, kv_cache.init_cache(model, *TOKENS.shape))
        expected = np.asarray(uncached_logits(model, TOKENS))[:, CHUNK - 1 :: CHUNK]
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
    model = make_model(**PAIRS | fields)
    sources = {'source_BS': SOURCES, 'source_segments_BS': VALID.astype(np.int32)}
    expected = np.asarray(uncached_logits(model, TOKENS, **sources))
    cache = encode(model, SOURCES, VALID, TOKENS.shape[1])
    assert_close(last_logits(model, TOKENS, cache), expected[:, CHUNK - 1 :: CHUNK])
    # The numbers held for each target token and each source token.
    held = sum(a.size // TOKENS.size for a in jax.tree.leaves(cache.layers))
    held += sum(a.size // SOURCES.size for a in jax.tree.leaves(cache.source))
    assert held == cost.cache_floats_per_token(model.config)
