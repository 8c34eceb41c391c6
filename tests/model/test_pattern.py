"""Layers of several variants in turn."""

import dataclasses

import jax
import numpy as np
import pytest

from qkattn.config import ModelConfig
from qkattn.convert.conversions import convert_model
from qkattn.errors import ConfigError
from qkattn.model import build, cost
from qkattn.study import arms
from qkattn.study.arms import parse_variant
from tests.attention import examples  # noqa: F401, the class `Differential`

VARIANTS = ['qk/vo', 'low_rank(rank=3)/no_v', 'merged/differential:Differential']
CONFIG = ModelConfig(
    pattern=','.join(VARIANTS), num_layers=5, d_model=16, num_heads=2, context=12, vocab_size=11
)


def test_layers_begin_as_those_of_models_with_one_variant():
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


def test_a_pattern_is_matched_and_not_converted():
    base = ModelConfig(d_model=128, num_layers=4, num_heads=4, context=128)
    config = dataclasses.replace(base, **parse_variant('qk/vo?pattern=qk/vo,qk/no_v'))
    target = cost.measured(base, 'total')
    matched = arms.match(config, target, destination='d_model')
    assert abs(cost.count(matched)['total'] / target - 1) <= 1e-3 and matched.d_model > 128
    with pytest.raises(ConfigError, match="one variant, but model.pattern is 'qk/vo,low_rank"):
        convert_model('merge', CONFIG, {})
