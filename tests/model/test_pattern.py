"""Layers of several variants in turn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.config import ModelConfig
from qkattn.convert.conversions import convert_model
from qkattn.decode import kv_cache
from qkattn.errors import ConfigError, SpecError
from qkattn.model import Decoder, abstract_model, build, cost
from qkattn.study import matching
from qkattn.study.arms import parse_variant
from tests.attention import examples  # noqa: F401, the class `Differential`
from tests.model import slow_transformer as slow

VARIANTS = ['qk/vo', 'low_rank(rank=3)/no_v', 'merged/differential:Differential']
CONFIG = ModelConfig(
    pattern=','.join(VARIANTS), num_layers=5, d_model=16, num_heads=2, context=12, vocab_size=11
)
TOKENS = np.random.default_rng(0).integers(0, 11, (2, 12))


@pytest.fixture(scope='module')
def model() -> Decoder:
    return slow.shaken(build(CONFIG, key=jax.random.key(0)))


@pytest.fixture(scope='module')
def want(model) -> np.ndarray:
    return slow.forward(model, TOKENS)


@pytest.mark.parametrize(
    'fields', [{}, {'scan_unroll': 1}, {'remat': 'dots', 'scan_unroll': 3}], ids=str
)
def test_the_numbers_are_those_of_the_slow_reference(model, want, fields):
    """Five layers of three variants: two layers are left after the only whole iteration."""
    abstract = abstract_model(dataclasses.replace(CONFIG, **fields))
    same = jax.tree.unflatten(jax.tree.structure(abstract), jax.tree.leaves(model))
    got = jax.jit(lambda model: model(TOKENS))(same)
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())


def test_decoding_with_a_cache_gives_the_same_numbers(model, want):
    cache = kv_cache.init_cache(model, *TOKENS.shape)
    shapes = [{name: a.shape for name, a in arrays.items()} for arrays in cache.layers]
    assert shapes == [
        {'k_BSKH': (2, 2, 12, 2, 8), 'v_BSKH': (2, 2, 12, 2, 8)},
        {'k_BSKR': (2, 2, 12, 2, 3), 'x_BSD': (2, 2, 12, 16)},
        {'x_BSD': (1, 2, 12, 16), 'v_BSMG': (1, 2, 12, 1, 16)},
    ]
    floats = sum(array.size for array in jax.tree.leaves(cache.layers)) // TOKENS.size
    assert cost.cache_floats_per_token(CONFIG) == floats == 2 * 32 + 2 * 22 + 32
    prefill = jax.jit(kv_cache.prefill)
    for first in range(0, 12, 3):
        logits_BV, cache = prefill(model, TOKENS[:, first : first + 3], cache)
        np.testing.assert_allclose(logits_BV, want[:, first + 2], atol=2e-5 * np.abs(want).max())
    taken = kv_cache.take_rows(cache, jnp.array([1, 1]))
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a[:, 0], b[:, 1]), taken.layers, cache.layers
    )


def test_layers_begin_as_those_of_models_with_one_variant(model):
    fresh = build(CONFIG, key=jax.random.key(0)).layers()
    assert [str(a.spec.variant) for a in fresh] == [*VARIANTS, *VARIANTS[:2]]
    assert fresh[2].value.layer == 2
    for index, variant in enumerate(VARIANTS[:2]):
        fields = parse_variant(variant)
        uniform = build(dataclasses.replace(CONFIG, pattern=None, **fields), key=jax.random.key(0))
        for layer in (index, index + 3):
            one, other = fresh[layer], uniform.layers()[layer]
            jax.tree.map(np.testing.assert_array_equal, one, other)


def test_costs_are_sums_over_layers():
    def uniform(variant, which):
        one = dataclasses.replace(CONFIG, pattern=None, num_layers=1, **parse_variant(variant))
        none = cost.measured(dataclasses.replace(one, num_layers=2), which)
        return 2 * cost.measured(one, which) - none, none - cost.measured(one, which)

    for which in ('total', 'non_embedding', 'flops', 'cache'):
        rest, layer = uniform('qk/vo', which)
        layers = 2 * layer + 2 * uniform(VARIANTS[1], which)[1] + uniform(VARIANTS[2], which)[1]
        assert cost.measured(CONFIG, which) == pytest.approx(rest + layers, rel=1e-12), which


def test_a_pattern_that_does_not_fit_is_not_built():
    for fields in ({'pattern': 'qk/no_v,qk/vo'}, {'pattern': 'qk/vo,qk/ov'}, {'num_layers': 2}):
        with pytest.raises(SpecError):
            build(dataclasses.replace(CONFIG, **fields), key=jax.random.key(0))


def test_a_pattern_is_matched_and_not_converted():
    base = ModelConfig(d_model=128, num_layers=4, num_heads=4, context=128)
    config = dataclasses.replace(base, **parse_variant('qk/vo?pattern=qk/vo,qk/no_v'))
    match = matching.match(config, cost.measured(base, 'total'), destination='d_model')
    assert abs(match.residual) <= 1e-3 and match.config.d_model > 128
    assert match.parameters['total'] == cost.measured(match.config, 'total')
    with pytest.raises(ConfigError, match="one variant, but model.pattern is 'qk/vo,low_rank"):
        convert_model('merge', CONFIG, {})
