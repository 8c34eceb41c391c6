"""Parts of a block: GELU, the branch each dropout acts on, and layers of several variants."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.attention import visible
from qkattn.config import ModelConfig
from qkattn.convert.conversions import convert_model
from qkattn.errors import ConfigError
from qkattn.model import build, cost
from qkattn.model.blocks import MLP, Block, gelu
from qkattn.study.arms import parse_variant
from qkattn.study.matching import match
from tests.attention import examples  # noqa: F401, the class `Differential`

exact_gelu = functools.partial(jax.nn.gelu, approximate=False)
SIZES = {'d_model': 16, 'num_layers': 2, 'num_heads': 2, 'd_ff': 16}
STREAM_BTD = np.random.default_rng(1).standard_normal((2, 7, 16)).astype(np.float32)
KEY = jax.random.key(7)


@pytest.mark.parametrize('order', [lambda f: f, jax.grad], ids=['forward', 'backward'])
def test_gelu_and_its_gradient_are_exact(order):
    our_function = jax.vmap(order(gelu))
    jax_function = jax.vmap(order(exact_gelu))
    with jax.enable_x64(True):
        x_F = jnp.linspace(-9, 9, 2001)
        expected_F = jax_function(x_F)
        np.testing.assert_allclose(our_function(x_F), expected_F, rtol=0, atol=1e-14)
        in_float32_F = our_function(x_F.astype(jnp.float32))
        np.testing.assert_allclose(in_float32_F, expected_F, rtol=0, atol=2e-6)


@pytest.mark.parametrize('order', [lambda f: f, jax.grad], ids=['forward', 'backward'])
def test_gelu_is_rounded_once_in_bfloat16(order):
    x_F = jnp.linspace(-4, 4, 257).astype(jnp.bfloat16)
    got_F = jax.vmap(order(gelu))(x_F)
    expected_F = jax.vmap(order(exact_gelu))(x_F.astype(jnp.float32))
    assert got_F.dtype == jnp.bfloat16
    np.testing.assert_allclose(got_F.astype(jnp.float32), expected_F, rtol=2**-8, atol=1e-6)


def branch_output(part: str, key=None, **fields):
    """What the branch 'attention' or 'mlp' of a block adds. The other branch gives 0."""
    block = Block(ModelConfig(**SIZES, **fields), key=jax.random.key(0))
    if part == 'attention':
        block.mlp.w_out_FD[...] *= 0
    else:
        block.attention.value.w_o_NHD[...] *= 0
        block.mlp.w_out_FD[...] = jnp.eye(16)
    mask_BTS = visible(7, 7, causal=False)
    return np.asarray(block(STREAM_BTD, mask_BTS, key)) - STREAM_BTD


def is_kept(output):
    """Which elements dropout has kept: the others are 0."""
    return np.abs(output) > 1e-6


def share_that_is_kept(got, want):
    """The share of elements that dropout at 0.5 has kept, each twice as large."""
    kept = is_kept(got)
    np.testing.assert_allclose(got[kept], 2 * want[kept], rtol=1e-3, atol=1e-5)
    return kept.mean()


@pytest.mark.parametrize('part', ['attention', 'mlp'])
def test_dropout_acts_on_whole_branches(part):
    got = branch_output(part, KEY, dropout=0.5, attention_dropout=0.0)
    plain = branch_output(part)
    assert 0.3 < share_that_is_kept(got, plain) < 0.7


def test_dropout_acts_on_attention_probabilities_by_default():
    """Attention probabilities are dropped too, so outputs that are left are not just doubled."""
    got = branch_output('attention', KEY, dropout=0.5)
    plain = branch_output('attention')
    kept = is_kept(got)
    assert np.abs(got[kept] - 2 * plain[kept]).max() > 1e-2


def test_dropout_of_probabilities_acts_on_attention_alone():
    fields = {'dropout': 0.0, 'attention_dropout': 0.5}
    np.testing.assert_array_equal(branch_output('mlp', KEY, **fields), branch_output('mlp'))
    change = branch_output('attention', KEY, **fields) - branch_output('attention')
    assert np.abs(change).max() > 1e-2


def test_dropout_of_activations_acts_on_the_mlp_alone():
    attention = branch_output('attention', KEY, activation_dropout=0.5)
    np.testing.assert_array_equal(attention, branch_output('attention'))
    mlp = branch_output('mlp', KEY, activation_dropout=0.5)
    assert 0.3 < share_that_is_kept(mlp, branch_output('mlp')) < 0.7


def test_dropout_of_activations_keeps_the_mean_of_the_mlp():
    mlp = MLP(ModelConfig(**SIZES, activation_dropout=0.5), key=jax.random.key(0))
    outputs = [mlp(STREAM_BTD, jax.random.key(seed)) for seed in range(200)]
    np.testing.assert_allclose(np.mean(outputs, axis=0), mlp(STREAM_BTD), atol=0.5)


def test_dropout_of_activations_is_drawn_apart_from_that_of_the_branch():
    """Two dropouts at 0.5 keep a quarter of the elements."""
    both = branch_output('mlp', KEY, dropout=0.5, attention_dropout=0.0, activation_dropout=0.5)
    assert 0.15 < is_kept(both).mean() < 0.35


# Layers of several variants in turn

VARIANTS = ['qk/vo', 'low_rank(rank=3)/no_v', 'merged/differential:Differential']
CONFIG = ModelConfig(
    pattern=','.join(VARIANTS), num_layers=5, d_model=16, num_heads=2, context=12, vocab_size=11
)


@pytest.mark.slow
def test_layers_of_a_pattern_are_initially_those_of_uniform_models():
    """A pattern repeats several variants of attention over the layers of a model.

    Each layer has the same initial values as in a model with only its variant.
    """
    # Five layers: the pattern of three variants, then its first two again.
    layers = build(CONFIG, key=jax.random.key(0)).layers()
    first, second, third = VARIANTS
    variants_of_layers = [str(layer.spec.variant) for layer in layers]
    assert variants_of_layers == [first, second, third, first, second]

    # A Value knows the index of its layer.
    assert layers[2].value.layer == 2

    # Layers 0 and 3 have the first variant. Layers 1 and 4 have the second variant.
    for index, variant in ((0, first), (1, second)):
        config = dataclasses.replace(CONFIG, pattern=None, **parse_variant(variant))
        uniform_layers = build(config, key=jax.random.key(0)).layers()
        for layer in (index, index + 3):
            jax.tree.map(np.testing.assert_array_equal, layers[layer], uniform_layers[layer])


def costs_of_layer_and_rest(variant, quantity):
    """The cost of one layer of the variant, and the cost of the model without its layers."""
    one_layer = dataclasses.replace(CONFIG, pattern=None, num_layers=1, **parse_variant(variant))
    two_layers = dataclasses.replace(one_layer, num_layers=2)
    cost_of_one = cost.measured(one_layer, quantity)
    cost_of_two = cost.measured(two_layers, quantity)
    layer = cost_of_two - cost_of_one
    return layer, cost_of_one - layer


@pytest.mark.parametrize('quantity', ['total', 'non_embedding', 'flops', 'cache'])
def test_the_costs_of_a_pattern_are_sums_over_its_layers(quantity):
    first, rest = costs_of_layer_and_rest(VARIANTS[0], quantity)
    second, _ = costs_of_layer_and_rest(VARIANTS[1], quantity)
    third, _ = costs_of_layer_and_rest(VARIANTS[2], quantity)
    # Five layers: the pattern of three, then the first two again.
    expected = rest + 2 * first + 2 * second + third
    assert cost.measured(CONFIG, quantity) == pytest.approx(expected, rel=1e-12)


def test_a_pattern_of_variants_is_matched_to_the_baseline():
    base = ModelConfig(d_model=128, num_layers=4, num_heads=4, context=128)
    config = dataclasses.replace(base, **parse_variant('qk/vo?pattern=qk/vo,qk/no_v'))
    target = cost.measured(base, 'total')
    matched = match(config, target, destination='d_model')
    matched_total = cost.count(matched)['total']
    assert abs(matched_total / target - 1) <= 1e-3
    assert matched.d_model > 128


def test_a_pattern_is_not_converted():
    with pytest.raises(ConfigError, match="one variant, but model.pattern is 'qk/vo,low_rank"):
        convert_model('merge', CONFIG, {})
