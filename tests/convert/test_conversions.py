"""Whole models converted by name: same logits, and refusals that name the layer."""

import dataclasses

import jax
import numpy as np
import pytest

from qkattn.config import ModelConfig
from qkattn.convert import conversions
from qkattn.convert.circuits import merge_vo
from qkattn.convert.conversions import CONVERSIONS, convert_model, logit_error
from qkattn.errors import ConfigError, ConversionError
from qkattn.model import with_params
from qkattn.model.cost import abstract_params
from tests.lanes import slow_except
from tests.refusals import refused

CONFIG = ModelConfig(
    d_model=32, num_layers=3, num_heads=4, context=24, vocab_size=50, biases=True, scan_unroll=1
)
TOKENS = np.random.default_rng(1).integers(0, 50, (2, 20))


def random_params_of(config: ModelConfig) -> dict:
    """Parameters as after training: gains are near 1, and no bias is 0."""
    rng = np.random.default_rng(0)

    def draw(path, a):
        gain = path[-1].key.startswith('g_')
        return (gain + 0.2 * rng.standard_normal(a.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(config))


GROUPED = {'num_kv_heads': 2}
POST = {'norm_position': 'post'}
TIED = {'score': 'shared_qk', 'value': 'k_is_v'}
DOUBLE = {'score': 'double', 'value': 'double'}
GAUGE_FIX_QK = 'examples.gauge_fixing:GAUGE_FIX_QK'
GAUGE_FIX_VO = 'examples.gauge_fixing:GAUGE_FIX_VO'
# Every conversion once, half of them on post-norm models.
EXACT_CONVERSIONS = [
    ({}, ['fold_gains', 'fold_biases', 'merge', 'merge_vo'], 'merged/merged_vo'),
    ({}, [GAUGE_FIX_QK, GAUGE_FIX_VO, 'merge', 'unmerge'], None),
    (GROUPED | POST, ['gqa_to_mha', 'merge_vo', 'unmerge_vo'], 'qk/vo'),
    (GROUPED | POST, ['gqa_to_latent'], None),
    (TIED | POST, ['to_standard'], 'qk/vo'),
    (DOUBLE | POST, ['fold_double'], 'qk/vo'),
    (POST, ['truncate(rank=8)', 'truncate_vo(rank=8)'], 'qk/vo'),  # the head size
    ({'positions': 'rope'}, ['fold_gains', GAUGE_FIX_VO], None),
    ({'attention_gain': False}, ['fold_gains', 'merge'], 'merged/vo'),
]


def test_every_conversion_is_named_as_its_function():
    assert all(c.function.__name__ == name for name, c in CONVERSIONS.items())


def test_every_conversion_is_in_the_table():
    tried = {step.partition('(')[0] for _, steps, _ in EXACT_CONVERSIONS for step in steps}
    assert tried == {*CONVERSIONS, GAUGE_FIX_QK, GAUGE_FIX_VO}


@pytest.mark.parametrize(
    ('changes', 'steps', 'variant'),
    slow_except(EXACT_CONVERSIONS[:1], EXACT_CONVERSIONS),
    ids=lambda v: '-'.join(v) if isinstance(v, list) else None,
)
def test_exact_conversions_keep_the_logits_of_a_model(changes, steps, variant):
    config = dataclasses.replace(CONFIG, **changes)
    params = random_params_of(config)
    before = config, params
    for step in steps:
        config, params, errors = convert_model(step, config, params)
        assert len(errors) == 3 * ('truncate' in step)
        assert sum(errors) < 1e-6
    assert logit_error(before, (config, params), TOKENS) < 1e-4
    assert variant in (None, str(config.variant))

    # A folded norm is left without gain and bias.
    if 'fold_gains' in steps:
        assert (params['blocks']['attention_norm'].get('g_D', np.ones(1)) == 1).all()
        assert (params['blocks']['attention_norm']['b_D'] == 0).all()

    # A model is converted as its configuration and parameters are.
    again = conversions.converted(with_params(*before), *steps)
    assert again.config == config
    np.testing.assert_array_equal(again(TOKENS), with_params(config, params)(TOKENS))


def test_gauge_fixing_takes_a_block_that_is_invertible_in_every_layer():
    params = random_params_of(CONFIG)
    H = 8
    w_LDKH = params['blocks']['attention']['score']['w_k_DKH']
    for n in range(4):  # layer 0 alone would pick rows 2 and 3, which are nearly equal in layer 1
        w_LDKH[0, n * H + 2 : n * H + 4, n] *= 100
        w_LDKH[1, n * H + 3, n] = w_LDKH[1, n * H + 2, n] + 1e-5 * w_LDKH[1, n * H + 3, n]
    config, fixed, _ = convert_model(GAUGE_FIX_QK, CONFIG, params)
    assert logit_error((CONFIG, params), (config, fixed), TOKENS) < 1e-5


def test_a_conversion_that_does_not_apply_is_refused_with_the_reason():
    # The conversion, changes of the model, the error, and what it says.
    for text, changes, error, message in (
        ('fold_gains', POST, ConversionError, 'post-norm model the residual stream also'),
        ('truncate(rank=0)', {}, ConversionError, 'layer 0: .*rank=0'),
        ('merge', {'kind': 'encoder_decoder'}, ConfigError, "model.kind is 'encoder_decoder'"),
        ('truncate', {}, ConfigError, "truncate requires the option 'rank'"),
        ('unmerge(ranks=2)', {}, ConfigError, "no option 'ranks'; it takes rank"),
        ('math:pi', {}, ConfigError, "conversion='math:pi' is not a Conversion"),
    ):
        config = dataclasses.replace(CONFIG, **changes)
        with refused(message, error):
            convert_model(text, config, random_params_of(config))


def test_a_refusal_names_the_layer_unless_it_holds_for_all():
    """In layers 0 and 2 only the last 8 rows of W_K are not 0, and in layer 1 they are tiny.

    So the block that gauge fixing inverts is of these rows, and layer 1 alone is near singular.
    """
    params = random_params_of(CONFIG)
    w_LDKH = params['blocks']['attention']['score']['w_k_DKH']
    w_LDKH[[0, 2], :-8] = 0
    w_LDKH[1, -8:] *= 1e-6
    with refused('^the block of W_K, layer 1, head 0, that becomes', ConversionError):
        convert_model(GAUGE_FIX_QK, CONFIG, params)
    # A score that does not fit is that of every layer, so none is named.
    config, merged_params, _ = convert_model('merge', CONFIG, params)
    with refused('^it starts from the score qk, not merged', ConversionError):
        convert_model(GAUGE_FIX_QK, config, merged_params)


def test_layers_that_would_become_different_variants_are_refused(monkeypatch):
    layers = []

    def merge_all_but_the_first(layer):
        layers.append(layer)
        return merge_vo(layer) if len(layers) > 1 else layer

    conversion = conversions.Conversion(merge_all_but_the_first, 'OV')
    monkeypatch.setitem(CONVERSIONS, 'merge_vo', conversion)
    with refused('layer 1 would become qk/merged_vo .* one variant', ConversionError):
        convert_model('merge_vo', CONFIG, random_params_of(CONFIG))
