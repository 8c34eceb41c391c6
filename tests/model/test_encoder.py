"""Encoder and decoder: the numbers of a slow reference, padding, scale, where dropout acts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.attention import visible
from qkattn.config import ModelConfig
from qkattn.model import Decoder, Encoder, build
from qkattn.model.blocks import MLP, Block
from tests.attention import examples  # noqa: F401, classes that the settings name
from tests.lanes import thinned
from tests.model import slow_transformer as slow

CONFIG = ModelConfig(
    kind='encoder',
    d_model=16,
    num_layers=2,
    num_heads=2,
    context=7,
    vocab_size=11,
    d_ff=24,
    scan_unroll=1,
)
TOKENS = np.random.default_rng(0).integers(0, 11, (2, 7))


SCALED = {'norm_position': 'post', 'scale_embeddings': True}


def make(**fields) -> Encoder | Decoder:
    return build(dataclasses.replace(CONFIG, **fields), key=jax.random.key(0))


def logits_of(model, tokens_BT, **options):
    return np.asarray(jax.jit(type(model).__call__)(model, tokens_BT, **options))


@pytest.mark.parametrize('kind', ['encoder', 'decoder'])
def test_padding_is_never_read_wherever_it_stands(kind):
    model = make(kind=kind)
    valid_BT = np.ones((2, 7), bool)
    valid_BT[0, 5:] = valid_BT[1, :2] = False
    want = logits_of(model, TOKENS, valid_BT=valid_BT)
    got = logits_of(model, np.where(valid_BT, TOKENS, 3), valid_BT=valid_BT)
    np.testing.assert_array_equal(got[valid_BT], want[valid_BT])
    assert np.isfinite(got).all()
    shorter = logits_of(model, TOKENS[:1, :5])
    np.testing.assert_allclose(want[:1, :5], shorter, atol=1e-5)
    assert np.abs(logits_of(model, TOKENS) - want)[valid_BT].max() > 1e-3


def test_a_window_reaches_both_ways():
    model = make(window=2, num_layers=1)
    want = logits_of(model, TOKENS)
    other = TOKENS.copy()
    other[:, 3] = (other[:, 3] + 1) % 11
    moved_BT = np.abs(logits_of(model, other) - want).max(-1) > 1e-6
    assert moved_BT.tolist() == [[False, False, True, True, True, False, False]] * 2


FIELDS = [
    {'norm_position': 'pre', 'activation': 'gelu', 'positions': 'learned'},
    SCALED | {'activation': 'relu', 'positions': 'sinusoidal', 'biases': True},
    SCALED | {'norm': 'rmsnorm', 'tied_embeddings': False},
    {'norm_position': 'pre', 'activation': 'swiglu', 'positions': 'sinusoidal', 'biases': True},
    {'score': 'merged', 'value': 'no_v', 'biases': True, 'positions': 'none'},
    {'score': 'query_free', 'attention_gain': False},
    {'score': 't5_bias:T5Bias', 'value': 'differential:Differential', 'normalizer': 'sigmoid'},
    {'value': 'gated:Gated', 'normalizer': 'entmax15', 'biases': True, 'activation': 'geglu'},
]
# Each with either kind; the quick tests have every third.
PAIRS = [(f, k) for i, f in enumerate(FIELDS) for k in ('encoder', 'decoder')[:: (-1) ** i]]


@pytest.mark.parametrize(
    ('fields', 'kind'),
    thinned(PAIRS, every=3),
    ids=lambda of: of if isinstance(of, str) else '-'.join(map(str, of.values())),
)
def test_the_numbers_are_those_of_the_slow_reference(fields, kind):
    model = slow.shaken(make(kind=kind, **fields))
    valid_BT = np.arange(7) < np.array([[7], [4]])
    mask_BTS = np.broadcast_to(valid_BT[:, None], (2, 7, 7))
    if kind == 'decoder':
        mask_BTS = mask_BTS & np.tri(7, dtype=bool)
    x_BTD = slow.embed(model, TOKENS, np.broadcast_to(np.arange(7), (2, 7)))
    want = slow.logits(model, slow.run(model, x_BTD, mask_BTS))
    got = logits_of(model, TOKENS, valid_BT=valid_BT)
    np.testing.assert_allclose(got[valid_BT], want[valid_BT], atol=2e-5 * np.abs(want).max())
    assert model.final_norm is None or model.config.norm_position == 'pre'


X_BTD = np.random.default_rng(1).standard_normal((2, 7, 16)).astype(np.float32)


def branch(parts: str, key, **fields):
    """What a block adds to the stream, with only the branches in `parts` at work."""
    config = dataclasses.replace(CONFIG, d_ff=16, **fields)
    block = Block(config, key=jax.random.key(0))
    if 'attention' not in parts:
        block.attention.value.w_o_NHD[...] *= 0
    block.mlp.w_out_FD[...] = jnp.eye(16) * ('mlp' in parts)
    mask_BTS = visible(7, 7, causal=False)
    return np.asarray(block(X_BTD, mask_BTS, key)) - X_BTD


def is_a_part_of(got, want):
    """Which elements are left, each twice as large, and none other than that."""
    left = np.abs(got) > 1e-6
    np.testing.assert_allclose(got[left], 2 * want[left], rtol=1e-3, atol=1e-5)
    return left.mean()


def test_dropout_acts_on_whole_branches():
    key = jax.random.key(7)
    for parts in ('attention', 'mlp'):
        want = branch(parts, None, dropout=0.5, attention_dropout=0.0)
        got = branch(parts, key, dropout=0.5, attention_dropout=0.0)
        assert 0.3 < is_a_part_of(got, want) < 0.7
    # With probabilities dropped as well, what is left is not twice what it was.
    both = branch('attention', key, dropout=0.5)
    left = np.abs(both) > 1e-6
    want = branch('attention', None)
    assert np.abs(both[left] - 2 * want[left]).max() > 1e-2


def test_dropout_of_probabilities_and_of_activations_act_on_one_branch_each():
    key = jax.random.key(7)
    fields = {'dropout': 0.0, 'attention_dropout': 0.5}
    np.testing.assert_array_equal(branch('mlp', key, **fields), branch('mlp', None))
    assert np.abs(branch('attention', key, **fields) - branch('attention', None)).max() > 1e-2
    fields = {'activation_dropout': 0.5}
    np.testing.assert_array_equal(branch('attention', key, **fields), branch('attention', None))
    hidden = branch('mlp', None)
    assert 0.3 < is_a_part_of(branch('mlp', key, **fields), hidden) < 0.7
    mlp = MLP(dataclasses.replace(CONFIG, **fields), key=jax.random.key(0))
    many = np.stack([mlp(X_BTD, jax.random.key(i)) for i in range(200)]).mean(0)
    np.testing.assert_allclose(many, mlp(X_BTD), atol=0.5)
    # Drawn apart from the branch's own: a quarter of the elements is left by both.
    both = branch('mlp', key, dropout=0.5, attention_dropout=0.0, **fields)
    assert 0.15 < (np.abs(both) > 1e-6).mean() < 0.35


def test_embeddings_are_dropped_too_and_only_with_a_key():
    model = make(dropout=0.5)
    model.blocks.attention.value.w_o_NHD[...] *= 0
    model.blocks.mlp.w_out_FD[...] *= 0
    first, second = (logits_of(model, TOKENS, dropout_key=jax.random.key(i)) for i in (0, 1))
    assert np.abs(first - second).max() > 1e-2
    without_key = logits_of(make(dropout=0.5), TOKENS)
    np.testing.assert_array_equal(without_key, logits_of(make(), TOKENS))


@pytest.mark.parametrize(
    ('kind', 'tokens', 'source', 'message'),
    [
        ('decoder', 8, None, '8 tokens do not fit into model.context=7'),
        ('encoder', 8, None, '8 tokens do not fit into model.context=7'),
        ('encoder_decoder', 8, 7, '8 tokens do not fit into model.context=7'),
        ('encoder_decoder', 7, 8, '8 tokens do not fit into model.source_context=7'),
    ],
)
def test_more_tokens_than_there_is_room_for_are_refused(kind, tokens, source, message):
    inputs = {} if source is None else {'source_BS': jnp.zeros((1, source), int)}
    fields = {} if source is None else {'source_context': 7}
    with pytest.raises(ValueError, match=message):
        make(kind=kind, **fields)(jnp.zeros((1, tokens), int), **inputs)
