"""Parts of models: GELU, logits, single layers of a stack, keys and rngs, kernels."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qkattn.attention import visible
from qkattn.attention.kernels import blockwise
from qkattn.config import ModelConfig
from qkattn.model import EncoderDecoder, abstract_model, build
from qkattn.model.blocks import gelu

CONFIG = ModelConfig(d_model=16, num_layers=3, num_heads=2, context=7, vocab_size=11)
TOKENS = np.random.default_rng(0).integers(0, 11, (2, 7))

exact = functools.partial(jax.nn.gelu, approximate=False)


@pytest.mark.parametrize('order', [lambda f: f, jax.grad], ids=['forward', 'backward'])
def test_gelu_is_exact_and_rounded_once_in_bfloat16(order):
    with jax.enable_x64(True):
        x_F = jnp.linspace(-9, 9, 2001)
        expected_F = jax.vmap(order(exact))(x_F)
        np.testing.assert_allclose(jax.vmap(order(gelu))(x_F), expected_F, rtol=0, atol=1e-14)
        narrow_F = jax.vmap(order(gelu))(x_F.astype(jnp.float32))
        np.testing.assert_allclose(narrow_F, expected_F, rtol=0, atol=2e-6)
    x_F = jnp.linspace(-4, 4, 257).astype(jnp.bfloat16)
    half_F = jax.vmap(order(gelu))(x_F)
    assert half_F.dtype == jnp.bfloat16
    expected_F = jax.vmap(order(exact))(x_F.astype(jnp.float32))
    np.testing.assert_allclose(half_F.astype(jnp.float32), expected_F, rtol=2**-8, atol=1e-6)


def test_logits_in_bfloat16_are_summed_in_float32():
    model = build(dataclasses.replace(CONFIG, num_layers=1), key=jax.random.key(0))
    model = jax.tree.map(lambda p: p.astype(jnp.bfloat16), model)
    x_BTD = jax.random.normal(jax.random.key(1), (2, 4, 16)).astype(jnp.bfloat16)
    w_VD = model.w_embedding_VD[...].astype(jnp.float32)
    assert model.logits(x_BTD).dtype == jnp.float32
    expected_BTV = x_BTD.astype(jnp.float32) @ w_VD.T
    np.testing.assert_allclose(model.logits(x_BTD), expected_BTV, rtol=0, atol=2e-5)


def test_the_layers_of_a_model_compute_what_its_blocks_compute():
    model = build(CONFIG, rngs=nnx.Rngs(0))
    x_BTD, layers = model.embed(TOKENS), model.layers()
    assert len(layers) == 3
    for index, layer in enumerate(layers):
        block = jax.tree.map(lambda stacked, index=index: stacked[index], model.blocks)
        x_BTD = block.around([layer], x_BTD)
        A_NDE, B_NDE = layer.matrix()
        assert A_NDE.shape == B_NDE.shape == (2, 16, 16)
    np.testing.assert_allclose(model.logits(model.normed(x_BTD)), model(TOKENS), atol=1e-5)


@pytest.mark.parametrize('variant', [('qk', 'vo'), ('merged(init="product")', 'low_rank')], ids=str)
def test_an_abstract_model_has_the_shapes_of_a_model_and_a_model_is_drawn_after_it(variant):
    config = dataclasses.replace(CONFIG, score=variant[0], value=variant[1])
    abstract, model = abstract_model(config), build(config, key=jax.random.key(0))
    shapes, arrays = jax.tree.leaves(abstract), jax.tree.leaves(model)
    assert jax.tree.structure(abstract) == jax.tree.structure(model)
    assert [(s.shape, s.dtype) for s in shapes] == [(a.shape, a.dtype) for a in arrays]
    assert model.w_embedding_VD[...].std() > 0


def test_an_encoder_decoder_has_layers_at_three_sites():
    config = dataclasses.replace(
        CONFIG,
        kind='encoder_decoder',
        num_layers=1,
        num_encoder_layers=2,
        cross_variant='merged/vo',
    )
    model = EncoderDecoder(config, rngs=nnx.Rngs(0))
    assert len(model.layers()) == 1 and len(model.encoder.layers()) == 2
    (cross,) = model.layers('cross_attention')
    assert cross.spec.score == 'merged'
    y_BSD = model.encode(TOKENS)
    mask_BTS = visible(7, 7, causal=False)
    np.testing.assert_array_equal(cross(y_BSD, y_BSD=y_BSD), cross(y_BSD, mask_BTS, y_BSD=y_BSD))
    with pytest.raises(ValueError, match='known are attention, cross_attention'):
        model.layers('attend')


SEGMENTS = jnp.array([[1] * 8 + [2] * 12, [1] * 13 + [2] * 4 + [0] * 3])
LONG = jax.random.randint(jax.random.key(0), SEGMENTS.shape, 0, 11)
KINDS = {
    'decoder': ({'score': 'merged', 'positions': 'alibi', 'remat': 'full', 'window': 9}, {}),
    'encoder': ({'value': 'no_v'}, {'valid_BT': jnp.arange(20) < jnp.array([[17], [17]])}),
    'encoder_decoder': (
        {'score': 'shared_qk(self_mask=True)'},
        {'source_BS': LONG[:, ::-1], 'source_segments_BS': SEGMENTS, 'segments_BT': SEGMENTS},
    ),
}


@pytest.mark.parametrize(
    'kind', ['decoder', *(pytest.param(k, marks=pytest.mark.slow) for k in list(KINDS)[1:])]
)
def test_a_stack_of_models_equals_that_of_einsums(kind, monkeypatch):
    """Losses and gradients of two trials."""
    monkeypatch.setitem(blockwise.BLOCK, 'cpu', 8)
    fields, inputs = KINDS[kind]
    weights_BT = inputs.get('segments_BT', jnp.ones_like(LONG)) > 0

    def loss(model):
        return (jnp.square(model(tokens_BT=LONG, **inputs)).mean(-1) * weights_BT).sum()

    results = []
    for kernel in ('blockwise', 'einsum'):
        sizes = {'num_layers': 2, 'num_heads': 4, 'context': 20, 'kernel': kernel}
        config = dataclasses.replace(CONFIG, kind=kind, **sizes, **fields)
        keys = jax.random.split(jax.random.key(1))
        models = jax.vmap(lambda key, config=config: build(config, key=key))(keys)
        results.append(jax.tree.leaves(jax.jit(jax.vmap(jax.value_and_grad(loss)))(models)))
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(np.abs(b).max(), 1e-3))
