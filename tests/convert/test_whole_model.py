"""Whole models converted: same logits, refusals with the layer, text written by both."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qkattn.config import ModelConfig
from qkattn.convert import whole_model
from qkattn.decode.generate import generate
from qkattn.errors import ConfigError, ConversionError
from qkattn.model import abstract_model
from qkattn.model.cost import abstract_params

CONFIG = ModelConfig(d_model=32, num_layers=3, num_heads=4, context=24, vocab_size=50, biases=True)
TOKENS = np.random.default_rng(1).integers(0, 50, (2, 20))


def params_of(config: ModelConfig) -> dict:
    """Trained-looking parameters: nothing at its initial value, gains about 1."""
    rng = np.random.default_rng(0)

    def draw(path, a):
        gain = path[-1].key.startswith('g_')
        return (gain + 0.2 * rng.standard_normal(a.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(config))


@pytest.mark.parametrize(
    ('changes', 'steps', 'cell'),
    [
        ({}, ['merge'], 'merged/vo'),
        ({}, ['fold_gains', 'fold_biases', 'merge', 'merge_vo'], 'merged/merged_vo'),
        ({}, ['gauge_fix_qk', 'gauge_fix_vo'], 'gauge_fixed/gauge_fixed'),
        ({}, ['merge', 'unmerge'], None),
        ({'num_kv_heads': 2}, ['gqa_to_mha'], 'qk/vo'),
        ({'num_kv_heads': 2}, ['gqa_to_latent'], None),
        ({'score': 'shared_qk', 'value': 'k_is_v'}, ['to_standard'], 'qk/vo'),
        ({'score': 'query_free', 'value': 'no_o'}, ['to_standard'], 'qk/vo'),
        ({'positions': 'rope'}, ['fold_gains', 'gauge_fix_vo'], 'qk/gauge_fixed'),
    ],
    ids=lambda v: '-'.join(v) if isinstance(v, list) else None,
)
def test_logits_are_kept(changes, steps, cell):
    config = dataclasses.replace(CONFIG, **changes)
    params = params_of(config)
    before = config, params
    for step in steps:
        config, params, notes = whole_model.apply(step, config, params)
        assert notes == [] or step == 'unmerge'
    assert whole_model.logit_error(before, (config, params), TOKENS) < 1e-4
    if cell:
        assert f'{config.score}/{config.value}' == cell


def test_truncation_says_what_it_costs_in_every_layer():
    params = params_of(CONFIG)
    config, truncated, notes = whole_model.apply('truncate(rank=2)', CONFIG, params)
    assert len(notes) == 3 and 'rank 2 leaves out' in notes[0]
    assert whole_model.logit_error((CONFIG, params), (config, truncated), TOKENS) > 1e-2


@pytest.mark.parametrize(
    ('text', 'changes', 'error', 'message'),
    [
        ('merge', {'positions': 'rope'}, ConversionError, 'layer 0: merge rewrites W_Q W_K'),
        ('merge', {'qk_norm': True}, ConversionError, 'layer 0: merge changes the length'),
        ('to_shared', {}, ConversionError, 'layer 0: '),
        ('fold', {}, ConfigError, "unknown conversion 'fold'; known are to_standard"),
        ('truncate', {}, ConfigError, "truncate.*'rank'"),
        ('gauge_fix_vo(pivot=True)', {}, ConversionError, 'a stack has one cell'),
        ('merge(', {}, ConfigError, 'must be written name'),
    ],
)
def test_a_refusal_names_the_reason(text, changes, error, message):
    config = dataclasses.replace(CONFIG, **changes)
    with pytest.raises(error, match=message):
        whole_model.apply(text, config, params_of(config))


def test_the_merged_model_writes_the_same_text():
    params = params_of(CONFIG)
    merged, merged_params, _ = whole_model.apply('merge', CONFIG, params)

    def write(config, params):
        model = nnx.merge(nnx.graphdef(abstract_model(config)), jax.tree.map(jnp.asarray, params))
        return np.asarray(generate(model, TOKENS[:, :4], 16))

    np.testing.assert_array_equal(write(CONFIG, params), write(merged, merged_params))
