"""Whole models converted: same logits, and refusals that name the layer."""

import dataclasses

import jax
import numpy as np
import pytest

from qkattn.config import ModelConfig
from qkattn.convert import convert_model, logit_error
from qkattn.errors import ConfigError, ConversionError
from qkattn.model.cost import abstract_params

CONFIG = ModelConfig(
    d_model=32,
    num_layers=3,
    num_heads=4,
    context=24,
    vocab_size=50,
    biases=True,
    scan_unroll=1,
)
TOKENS = np.random.default_rng(1).integers(0, 50, (2, 20))


def params_of(config: ModelConfig) -> dict:
    """Trained-looking parameters: nothing at its initial value, gains about 1."""
    rng = np.random.default_rng(0)

    def draw(path, a):
        gain = path[-1].key.startswith('g_')
        return (gain + 0.2 * rng.standard_normal(a.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(config))


@pytest.mark.parametrize(
    ('changes', 'steps', 'variant'),
    [
        ({}, ['fold_gains', 'fold_biases', 'merge', 'merge_vo'], 'merged/merged_vo'),
        ({}, ['gauge_fix_qk', 'gauge_fix_vo', 'merge', 'unmerge'], None),
        ({'num_kv_heads': 2}, ['gqa_to_mha', 'merge'], 'merged/vo'),
        ({'num_kv_heads': 2}, ['gqa_to_latent'], None),
        ({'score': 'shared_qk', 'value': 'k_is_v'}, ['to_standard'], 'qk/vo'),
        ({'positions': 'rope'}, ['fold_gains', 'gauge_fix_vo'], 'qk/gauge_fixed'),
    ],
    ids=lambda v: '-'.join(v) if isinstance(v, list) else None,
)
def test_logits_are_kept(changes, steps, variant):
    config = dataclasses.replace(CONFIG, **changes)
    params = params_of(config)
    before = config, params
    for step in steps:
        config, params, errors = convert_model(step, config, params)
        assert errors == []
    assert logit_error(before, (config, params), TOKENS) < 1e-4
    assert variant in (None, f'{config.score}/{config.value}')
    if 'fold_gains' in steps:
        assert (params['blocks']['attention_norm']['g_D'] == 1).all()
        assert (params['blocks']['attention_norm']['b_D'] == 0).all()


def test_truncation_reports_the_error_of_every_layer():
    params = params_of(CONFIG)
    config, truncated, errors = convert_model('truncate(rank=2)', CONFIG, params)
    assert [error.rank for error in errors] == [2, 2, 2]
    assert all(0.1 < error.relative < 1 and 0.1 < error.measured < 1 for error in errors)
    assert logit_error((CONFIG, params), (config, truncated), TOKENS) > 1e-2


@pytest.mark.parametrize(
    ('text', 'changes', 'error', 'message'),
    [
        ('merge', {'positions': 'rope'}, ConversionError, 'layer 0: merge rewrites W_Q W_K'),
        ('truncate(rank=0)', {}, ConversionError, 'layer 0: .*rank=0'),
        ('gauge_fix_vo(pivot=True)', {}, ConversionError, 'a stack has one variant'),
        ('merge', {'kind': 'encoder_decoder'}, ConfigError, 'model.kind is encoder_decoder'),
    ],
)
def test_a_refusal_names_the_reason(text, changes, error, message):
    config = dataclasses.replace(CONFIG, **changes)
    with pytest.raises(error, match=message):
        convert_model(text, config, params_of(config))
