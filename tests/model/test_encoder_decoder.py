"""The encoder-decoder: a slow reference, packed rows, what may reach a logit, what it costs."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.config import ModelConfig
from qkattn.decode import kv_cache
from qkattn.model import EncoderDecoder, abstract_model, build, cost
from tests.model import slow_transformer as slow

CONFIG = ModelConfig(
    kind='encoder_decoder',
    d_model=16,
    num_layers=2,
    num_encoder_layers=1,
    num_heads=2,
    context=10,
    source_context=12,
    vocab_size=13,
    d_ff=24,
    scan_unroll=1,
)
# Three pairs, of so many source and target tokens; one of a single token on both sides.
SIZES = [(4, 5), (1, 1), (5, 3)]


def make(**fields) -> EncoderDecoder:
    """A model whose embeddings are large enough that every token matters."""
    model = build(dataclasses.replace(CONFIG, **fields), key=jax.random.key(0))
    model.w_embedding_VD[...] *= 4
    return model


logits_of = jax.jit(EncoderDecoder.__call__)


def packed() -> dict[str, np.ndarray]:
    """All pairs in one row, and padding behind them."""
    rng = np.random.default_rng(0)
    batch = {}
    for side, (tokens, segments) in enumerate(
        [('source_BS', 'source_segments_BS'), ('tokens_BT', 'segments_BT')]
    ):
        length = (CONFIG.source_context, CONFIG.context)[side]
        numbers = np.repeat(np.arange(1, 4), [size[side] for size in SIZES])
        batch[segments] = np.pad(numbers, (0, length - len(numbers)))[None]
        batch[tokens] = rng.integers(0, 13, (1, length))
    return batch


def unpacked(batch) -> dict[str, np.ndarray]:
    """Pair i in row i, alone and from the beginning."""
    out = {name: np.zeros((3, array.shape[1]), int) for name, array in batch.items()}
    for tokens, segments in [('source_BS', 'source_segments_BS'), ('tokens_BT', 'segments_BT')]:
        for i in range(3):
            pair = batch[tokens][batch[segments] == i + 1]
            out[tokens][i, : len(pair)] = pair
            out[segments][i, : len(pair)] = 1
    return out


@pytest.mark.parametrize(
    'fields',
    [
        {'norm_position': 'pre', 'activation': 'gelu', 'positions': 'learned'},
        {
            'norm_position': 'post',
            'activation': 'relu',
            'positions': 'sinusoidal',
            'scale_embeddings': True,
            'biases': True,
        },
        {
            'norm_position': 'post',
            'encoder_variant': 'merged/no_vo',
            'cross_variant': 'key_free/no_v',
            'shared_embeddings': False,
            'tied_embeddings': False,
        },
        {'norm': 'rmsnorm', 'biases': True, 'shared_embeddings': False, 'positions': 'none'},
        {'score': 'shared_qk', 'attention_gain': False},
    ],
    ids=str,
)
def test_the_numbers_are_those_of_the_slow_reference(fields):
    model = slow.shaken(make(**fields), 0.2)
    batch = packed()
    want = reference(model, **batch)
    got = np.asarray(logits_of(model, **batch))
    used_BT = batch['segments_BT'] > 0
    np.testing.assert_allclose(got[used_BT], want[used_BT], atol=2e-5 * np.abs(want).max())
    assert np.std(want[used_BT]) > 0.1


def reference(model, source_BS, source_segments_BS, tokens_BT, segments_BT):
    def pairs(segments_BT, segments_BS):
        mask_BTS = np.zeros((1, segments_BT.shape[1], segments_BS.shape[1]), bool)
        for b, t, s in np.ndindex(*mask_BTS.shape):
            # Padding reads something, so that the oracle has a softmax to take; nobody reads it.
            mask_BTS[b, t, s] = segments_BT[b, t] in (segments_BS[b, s], 0)
        return mask_BTS

    def places(segments_BT):
        seen, out = {}, []
        for segment in segments_BT[0]:
            out.append(seen.get(segment, 0))
            seen[segment] = out[-1] + 1
        return np.array([out])

    shared = model.config.shared_embeddings
    x_BSD = slow.embed(
        model.encoder,
        source_BS,
        places(source_segments_BS),
        model.w_embedding_VD if shared else None,
    )
    y_BSD = slow.run(model.encoder, x_BSD, pairs(source_segments_BS, source_segments_BS))
    T = tokens_BT.shape[1]
    x_BTD = slow.run(
        model,
        slow.embed(model, tokens_BT, places(segments_BT)),
        pairs(segments_BT, segments_BT) & np.tri(T, dtype=bool),
        y_BSD,
        pairs(segments_BT, source_segments_BS),
    )
    return slow.logits(model, x_BTD)


@pytest.mark.parametrize(
    'fields',
    [
        pytest.param({'positions': 'rope'}, marks=pytest.mark.slow),
        {'positions': 'rope', 'window': 2},
        pytest.param({'positions': 'alibi'}, marks=pytest.mark.slow),
        {
            'positions': 'alibi',
            'score': 'shared_qk(self_mask=True)',
            'value': 'k_is_v',
            'norm_position': 'post',
        },
        {
            'positions': 'learned',
            'cross_variant': 'shared_qk(self_mask=True)/vo',
            'encoder_variant': 'latent/latent',
        },
    ],
    ids=str,
)
def test_packed_pairs_are_to_the_model_what_they_are_alone(fields):
    model = make(**fields)
    batch = packed()
    alone = unpacked(batch)
    together = np.asarray(logits_of(model, **batch))[0]
    apart = np.asarray(logits_of(model, **alone))
    assert np.isfinite(together).all() and np.isfinite(apart).all()
    for i in range(3):
        want = apart[i, alone['segments_BT'][i] > 0]
        got = together[batch['segments_BT'][0] == i + 1]
        np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())
    # And a pair is what it is without any segments, in a row of its own length.
    source, target = SIZES[0]
    bare = logits_of(
        model,
        tokens_BT=batch['tokens_BT'][:, :target],
        source_BS=batch['source_BS'][:, :source],
    )
    np.testing.assert_allclose(together[:target], bare[0], atol=2e-5 * np.abs(bare).max())


D, F, V, T, S = 16, 24, 13, 10, 12


@pytest.mark.parametrize(
    ('fields', 'attention', 'embedding', 'norm'),
    [
        (
            {'encoder_variant': 'merged/no_vo', 'cross_variant': 'key_free/no_v'},
            (2 * 4 + 1 * 2 + 2 * 2) * D * D,
            V * D + T * D + S * D,
            10 * D,
        ),
        (
            {'shared_embeddings': False, 'positions': 'rope', 'norm_position': 'post'},
            5 * 4 * D * D,
            2 * V * D,
            8 * D,
        ),
        # q, k, v and o add a vector each; both directions of the MLP as well.
        (
            {'tied_embeddings': False, 'positions': 'none', 'biases': True},
            5 * (4 * D * D + 4 * D),
            2 * V * D,
            20 * D,
        ),
    ],
    ids=['three variants', 'separate', 'untied'],
)
def test_parameters_by_hand(fields, attention, embedding, norm):
    config = dataclasses.replace(CONFIG, **fields)
    mlp = 3 * (2 * D * F + (F + D if config.biases else 0))
    parts = {'embedding': embedding, 'attention': attention, 'mlp': mlp, 'norm': norm}
    assert cost.count(config) == parts | {'total': sum(parts.values())}


def test_no_two_parts_start_from_the_same_numbers():
    model = make(shared_embeddings=False, num_encoder_layers=2, source_context=10)
    stacks = (model.blocks, model.encoder.blocks)
    attentions = [model.blocks.cross_attention, *(stack.attention for stack in stacks)]
    families = [
        [part.score.w_q_DNH[i] for part in attentions for i in range(2)]
        + [part.score.w_k_DKH[i] for part in attentions for i in range(2)],
        [stack.mlp.w_in_DF[i] for stack in stacks for i in range(2)],
        [model.w_embedding_VD[...], model.encoder.w_embedding_VD[...]],
        [model.w_position_TD[...], model.encoder.w_position_TD[...]],
    ]
    for family in families:
        correlations = np.corrcoef([np.ravel(a) for a in family])
        assert np.abs(np.triu(correlations, 1)).max() < 0.5


def test_flops_by_hand():
    attention, mlp = 8 * D * D, 4 * D * F
    encoder = S * (attention + 4 * S * D + mlp)
    # Of the cross-attention, queries and output are per target token, keys and values per source.
    decoder = T * (attention + 4 * T * D + 4 * D * D + 4 * S * D + mlp) + S * 4 * D * D
    assert cost.flops_per_token(CONFIG) == (encoder + 2 * decoder) / T + 2 * D * V


@pytest.mark.parametrize(
    ('fields', 'floats'),
    [
        ({}, 2 * 4 * D),
        ({'num_kv_heads': 1}, 2 * 2 * D),
        ({'cross_variant': 'merged/no_v'}, 2 * 3 * D),
        ({'encoder_variant': 'merged/no_v'}, 2 * 4 * D),
    ],
    ids=str,
)
def test_the_cache_is_what_decoding_holds(fields, floats):
    config = dataclasses.replace(CONFIG, **fields)
    assert cost.cache_floats_per_token(config) == floats
    cache = jax.eval_shape(
        lambda model: kv_cache.encode_source(
            model, jnp.zeros((3, 5), jnp.int32), jnp.ones((3, 5), bool), 7
        ),
        abstract_model(config),
    )
    per_token = [
        sum(math.prod(array.shape) for array in jax.tree.leaves(arrays)) / (3 * length)
        for arrays, length in ((cache.layers, 7), (cache.source, 5))
    ]
    assert sum(per_token) == floats


def test_dropout_acts_on_both_sides_with_numbers_of_their_own():
    model = make(dropout=0.5, num_layers=1)
    batch = packed()
    plain, first, second = (
        np.asarray(logits_of(model, **batch, dropout_key=key))
        for key in (None, jax.random.key(0), jax.random.key(1))
    )
    assert np.abs(first - plain).max() > 0.1 and np.abs(first - second).max() > 0.1
    y_BSD = [model.encode(batch['source_BS'], dropout_key=k) for k in (None, jax.random.key(0))]
    assert np.abs(y_BSD[0] - y_BSD[1]).max() > 0.1
