"""Decoding with a cache: the numbers of the uncached model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn import budget, catalogue, decode
from qkattn.attention import SCORES, VALUES
from qkattn.config import ModelConfig
from qkattn.generate import generate
from qkattn.model import Decoder, abstract_model

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
    return decode.prefill(model, tokens_BT, cache)


def all_logits(model, chunk):
    """Logits after the last token of each chunk, read through the cache."""
    cache, out = decode.init_cache(model, *TOKENS.shape), []
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
    cache = decode.init_cache(abstract_model(config), batch=3, length=7)
    measured = sum(array.nbytes for array in cache.memory.values())
    assert measured == budget.cache_floats_per_token(config) * 4 * 3 * 7
    assert all(array.shape[:3] == (2, 3, 7) for array in cache.memory.values())


@pytest.mark.parametrize('positions', ['learned', 'sinusoidal', 'rope', 'alibi', 'none'])
def test_a_row_does_not_notice_its_padding(positions):
    model = make(positions=positions)
    prompts = [TOKENS[0, :2], TOKENS[1, :7]]
    together = generate(model, prompts, 5)
    np.testing.assert_array_equal(together[:1], generate(model, prompts[:1], 5))
    padded_BT = np.stack([np.r_[[9] * 5, prompts[0]], prompts[1]])
    cache = decode.init_cache(model, 2, 7)._replace(start_B=jnp.array([5, 0], jnp.int32))
    logits_BV, _ = read(model, padded_BT, cache)
    want_BTV = jax.jit(Decoder.__call__)(model, TOKENS[:1, :2])
    np.testing.assert_allclose(logits_BV[0], want_BTV[0, -1], atol=1e-4)


def test_a_cache_in_bfloat16_takes_half_the_room():
    model = jax.tree.map(lambda p: p.astype(jnp.bfloat16), make())
    cache = decode.init_cache(model, 1, 4)
    assert {array.dtype for array in cache.memory.values()} == {jnp.dtype(jnp.bfloat16)}
    assert generate(model, TOKENS[:, :2], 1).shape == (2, 1)
