"""Parts of a block: GELU, the branch each dropout acts on; layers of several variants."""

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
    with jax.enable_x64(True):
        x_F = jnp.linspace(-9, 9, 2001)
        expected_F = jax.vmap(order(exact_gelu))(x_F)
        np.testing.assert_allclose(jax.vmap(order(gelu))(x_F), expected_F, rtol=0, atol=1e-14)
        narrow_F = jax.vmap(order(gelu))(x_F.astype(jnp.float32))
        np.testing.assert_allclose(narrow_F, expected_F, rtol=0, atol=2e-6)


@pytest.mark.parametrize('order', [lambda f: f, jax.grad], ids=['forward', 'backward'])
def test_gelu_is_rounded_once_in_bfloat16(order):
    x_F = jnp.linspace(-4, 4, 257).astype(jnp.bfloat16)
    half_F = jax.vmap(order(gelu))(x_F)
    assert half_F.dtype == jnp.bfloat16
    expected_F = jax.vmap(order(exact_gelu))(x_F.astype(jnp.float32))
    np.testing.assert_allclose(half_F.astype(jnp.float32), expected_F, rtol=2**-8, atol=1e-6)


def branch_output(part: str, key=None, **fields):
    """What a block adds to the stream, with only the branch `part` at work."""
    block = Block(ModelConfig(**SIZES, **fields), key=jax.random.key(0))
    if part != 'attention':
        block.attention.value.w_o_NHD[...] *= 0
    block.mlp.w_out_FD[...] = jnp.eye(16) * (part == 'mlp')
    return np.asarray(block(STREAM_BTD, visible(7, 7, causal=False), key)) - STREAM_BTD


def share_that_is_kept(got, want):
    """The share of elements that dropout at 0.5 has kept, each twice as large; others are 0."""
    left = np.abs(got) > 1e-6
    np.testing.assert_allclose(got[left], 2 * want[left], rtol=1e-3, atol=1e-5)
    return left.mean()


def test_dropout_acts_on_whole_branches():
    for part in ('attention', 'mlp'):
        got = branch_output(part, KEY, dropout=0.5, attention_dropout=0.0)
        assert 0.3 < share_that_is_kept(got, branch_output(part)) < 0.7
    # With probabilities dropped as well, what is left is not twice what it was.
    both = branch_output('attention', KEY, dropout=0.5)
    left = np.abs(both) > 1e-6
    assert np.abs(both[left] - 2 * branch_output('attention')[left]).max() > 1e-2


def test_dropout_of_probabilities_acts_on_attention_alone():
    fields = {'dropout': 0.0, 'attention_dropout': 0.5}
    np.testing.assert_array_equal(branch_output('mlp', KEY, **fields), branch_output('mlp'))
    assert (
        np.abs(branch_output('attention', KEY, **fields) - branch_output('attention')).max() > 1e-2
    )


def test_dropout_of_activations_acts_on_the_mlp_alone():
    fields = {'activation_dropout': 0.5}
    np.testing.assert_array_equal(
        branch_output('attention', KEY, **fields), branch_output('attention')
    )
    assert 0.3 < share_that_is_kept(branch_output('mlp', KEY, **fields), branch_output('mlp')) < 0.7


def test_dropout_of_activations_keeps_the_mean_of_the_mlp():
    mlp = MLP(ModelConfig(**SIZES, activation_dropout=0.5), key=jax.random.key(0))
    draws = np.stack([mlp(STREAM_BTD, jax.random.key(seed)) for seed in range(200)])
    np.testing.assert_allclose(draws.mean(0), mlp(STREAM_BTD), atol=0.5)


def test_dropout_of_activations_is_drawn_apart_from_that_of_the_branch():
    """Two dropouts at 0.5 keep a quarter of the elements."""
    both = branch_output('mlp', KEY, dropout=0.5, attention_dropout=0.0, activation_dropout=0.5)
    assert 0.15 < (np.abs(both) > 1e-6).mean() < 0.35


# Layers of several variants in turn

VARIANTS = ['qk/vo', 'low_rank(rank=3)/no_v', 'merged/differential:Differential']
CONFIG = ModelConfig(
    pattern=','.join(VARIANTS), num_layers=5, d_model=16, num_heads=2, context=12, vocab_size=11
)


@pytest.mark.slow
def test_layers_of_a_pattern_are_initially_those_of_uniform_models():
    fresh = build(CONFIG, key=jax.random.key(0)).layers()
    assert [str(a.spec.variant) for a in fresh] == [*VARIANTS, *VARIANTS[:2]]
    assert fresh[2].value.layer == 2
    for index, variant in enumerate(VARIANTS[:2]):
        fields = parse_variant(variant)
        uniform = build(dataclasses.replace(CONFIG, pattern=None, **fields), key=jax.random.key(0))
        # The pattern of three variants is repeated from layer 3 on.
        for layer in (index, index + 3):
            one = fresh[layer]
            other = uniform.layers()[layer]
            jax.tree.map(np.testing.assert_array_equal, one, other)


def test_the_costs_of_a_pattern_are_sums_over_its_layers():
    # The cost of a model apart from its layers, and that of one layer of the variant.
    def uniform(variant, which):
        one = dataclasses.replace(CONFIG, pattern=None, num_layers=1, **parse_variant(variant))
        none = cost.measured(dataclasses.replace(one, num_layers=2), which)
        return 2 * cost.measured(one, which) - none, none - cost.measured(one, which)

    for which in ('total', 'non_embedding', 'flops', 'cache'):
        rest, layer = uniform('qk/vo', which)
        layers = 2 * layer + 2 * uniform(VARIANTS[1], which)[1] + uniform(VARIANTS[2], which)[1]
        assert cost.measured(CONFIG, which) == pytest.approx(rest + layers, rel=1e-12), which


def test_a_pattern_of_variants_is_matched_to_the_baseline():
    base = ModelConfig(d_model=128, num_layers=4, num_heads=4, context=128)
    config = dataclasses.replace(base, **parse_variant('qk/vo?pattern=qk/vo,qk/no_v'))
    target = cost.measured(base, 'total')
    matched = match(config, target, destination='d_model')
    assert abs(cost.count(matched)['total'] / target - 1) <= 1e-3
    assert matched.d_model > 128


def test_a_pattern_is_not_converted():
    with pytest.raises(ConfigError, match="one variant, but model.pattern is 'qk/vo,low_rank"):
        convert_model('merge', CONFIG, {})
