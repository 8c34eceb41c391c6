"""Single layers of a stack, and models from rngs."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from qkattn.attention import visible
from qkattn.config import ModelConfig
from qkattn.errors import SpecError
from qkattn.model import EncoderDecoder, build
from qkattn.model.build import abstract_model

CONFIG = ModelConfig(d_model=16, num_layers=3, num_heads=2, context=7, vocab_size=11)
TOKENS = np.random.default_rng(0).integers(0, 11, (2, 7))


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
    config = dataclasses.replace(CONFIG, score=variant[0], value=variant[1], positions='learned')
    abstract, model = abstract_model(config), build(config, key=jax.random.key(0))
    shapes, arrays = jax.tree.leaves(abstract), jax.tree.leaves(model)
    assert jax.tree.structure(abstract) == jax.tree.structure(model)
    assert [(s.shape, s.dtype) for s in shapes] == [(a.shape, a.dtype) for a in arrays]
    assert model.w_embedding_VD[...].std() > 0


def test_an_encoder_decoder_has_layers_at_three_sites():
    config = ModelConfig(
        kind='encoder_decoder', num_layers=1, num_encoder_layers=2, d_model=16, num_heads=2,
        cross_variant='merged/vo', vocab_size=11, context=7,
    )  # fmt: skip
    model = EncoderDecoder(config, rngs=nnx.Rngs(0))
    assert len(model.layers()) == 1 and len(model.encoder.layers()) == 2
    (cross,) = model.layers('cross_attention')
    assert cross.spec.score == 'merged'
    y_BSD = model.encode(TOKENS)
    mask_BTS = visible(7, 7, causal=False)
    np.testing.assert_array_equal(cross(y_BSD, y_BSD=y_BSD), cross(y_BSD, mask_BTS, y_BSD=y_BSD))
    with pytest.raises(ValueError, match='known are attention, cross_attention'):
        model.layers('attend')


@pytest.mark.parametrize('kind', ['decoder', 'encoder', 'encoder_decoder'])
def test_a_model_takes_a_key_or_rngs(kind):
    config = ModelConfig(kind=kind, num_layers=1, d_model=16, num_heads=2)
    first = build(config, rngs=nnx.Rngs(3))
    second = build(config, key=nnx.Rngs(3).params())
    jax.tree.map(np.testing.assert_array_equal, first, second)
    with pytest.raises(SpecError, match='one of them'):
        build(config)
