"""Means over layers and heads: which there are, and of which layers."""

import jax
import numpy as np

from qkattn.analysis import means
from qkattn.config import ModelConfig
from qkattn.model import build


def test_patterns_are_measured_where_there_are_inputs():
    model = build(ModelConfig(d_model=8, num_heads=2, context=4), key=jax.random.key(0))
    of_circuits = jax.eval_shape(means, model).keys()
    assert {name[:3] for name in of_circuits} == {'qk_', 'ov_'} and len(of_circuits) == 8
    tokens_BT = np.zeros((1, 4), np.int32)
    more = jax.eval_shape(means, model, {'tokens_BT': tokens_BT}).keys() - of_circuits
    assert {name.partition('_')[0] for name in more} == {'attention'} and len(more) == 4
