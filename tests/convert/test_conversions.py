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

    def draw(path, leaf):
        name = path[-1].key
        mean = 1 if name.startswith('g_') else 0
        return (mean + 0.2 * rng.standard_normal(leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(config))


GROUPED = {'num_kv_heads': 2}
POST = {'norm_position': 'post'}
TIED = {'score': 'shared_qk', 'value': 'k_is_v'}
DOUBLE = {'score': 'double', 'value': 'double'}
GAUGE_FIX_QK = 'examples.gauge_fixing:GAUGE_FIX_QK'
GAUGE_FIX_VO = 'examples.gauge_fixing:GAUGE_FIX_VO'
# Changes of CONFIG, the conversions, and the variant that they end with (None: any). Every
# conversion occurs, about half of them in post-norm models.
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
    for name, conversion in CONVERSIONS.items():
        assert conversion.function.__name__ == name


def test_every_conversion_is_in_the_table():
    tried = set()
    for _, steps, _ in EXACT_CONVERSIONS:
        for step in steps:
            name, _, _ = step.partition('(')  # 'truncate(rank=8)' -> 'truncate'
            tried.add(name)

    assert tried == {*CONVERSIONS, GAUGE_FIX_QK, GAUGE_FIX_VO}


@pytest.mark.parametrize(
    ('changes', 'steps', 'expected_variant'),
    slow_except(EXACT_CONVERSIONS[:1], EXACT_CONVERSIONS),
    ids=lambda argument: '-'.join(argument) if isinstance(argument, list) else None,
)
def test_exact_conversions_keep_the_logits_of_a_model(changes, steps, expected_variant):
    """A conversion rewrites the attention layers of a model as another variant.

    `steps` are conversions, which are applied in order to CONFIG with `changes`.
    """
    original_config = dataclasses.replace(CONFIG, **changes)
    original_params = random_params_of(original_config)

    config = original_config
    params = original_params
    for step in steps:
        config, params, errors = convert_model(step, config, params)
        # Only truncation returns errors, one per layer. Here they are 0, because the rank is full.
        num_errors = config.num_layers if 'truncate' in step else 0
        assert len(errors) == num_errors
        assert sum(errors) < 1e-6

    original = (original_config, original_params)
    assert logit_error(original, (config, params), TOKENS) < 1e-4
    if expected_variant is not None:
        assert str(config.variant) == expected_variant
    # `fold_gains` moves the gain, if there is one, and the bias of the norm into attention.
    if 'fold_gains' in steps:
        norm = params['blocks']['attention_norm']
        assert np.all(norm.get('g_D', 1) == 1)
        assert np.all(norm['b_D'] == 0)

    # `converted` does the same with a model object instead of parameters.
    original_model = with_params(original_config, original_params)
    converted_model = conversions.converted(original_model, *steps)
    assert converted_model.config == config
    expected_logits_BTV = with_params(config, params)(TOKENS)
    np.testing.assert_array_equal(converted_model(TOKENS), expected_logits_BTV)


def test_gauge_fixing_takes_a_block_that_is_invertible_in_every_layer():
    """Gauge fixing inverts H rows of W_K in each head, and the same rows in every layer.

    Rows that are best for one layer may be nearly singular in another layer. Inverting them would
    change the logits by large rounding errors.
    """
    H = 8
    params = random_params_of(CONFIG)
    w_k_LDKH = params['blocks']['attention']['score']['w_k_DKH']
    for head in range(CONFIG.num_heads):
        # In layer 0, these two rows are the largest, so they are best for this layer.
        first = head * H + 2
        second = head * H + 3
        w_k_LDKH[0, [first, second], head] *= 100
        # In layer 1, the two rows are nearly equal.
        difference_H = 1e-5 * w_k_LDKH[1, second, head]
        w_k_LDKH[1, second, head] = w_k_LDKH[1, first, head] + difference_H

    fixed_config, fixed_params, _ = convert_model(GAUGE_FIX_QK, CONFIG, params)

    assert logit_error((CONFIG, params), (fixed_config, fixed_params), TOKENS) < 1e-5


def test_a_conversion_that_does_not_apply_is_refused_with_the_reason():
    """A case has a conversion, changes of CONFIG, the error and a part of its message."""
    for conversion, changes, error, message in (
        ('fold_gains', POST, ConversionError, 'post-norm model the residual stream also'),
        ('truncate(rank=0)', {}, ConversionError, 'layer 0: .*rank=0'),
        ('merge', {'kind': 'encoder_decoder'}, ConfigError, "model.kind is 'encoder_decoder'"),
        ('truncate', {}, ConfigError, "truncate requires the option 'rank'"),
        ('unmerge(ranks=2)', {}, ConfigError, "no option 'ranks'; it takes rank"),
        ('math:pi', {}, ConfigError, "conversion='math:pi' is not a Conversion"),
    ):
        config = dataclasses.replace(CONFIG, **changes)
        params = random_params_of(config)
        with refused(message, error):
            convert_model(conversion, config, params)


def test_a_refusal_names_the_layer_that_is_singular():
    params = random_params_of(CONFIG)
    w_k_LDKH = params['blocks']['attention']['score']['w_k_DKH']
    # Layers 0 and 2 can invert only their last 8 rows, which are tiny in layer 1.
    w_k_LDKH[[0, 2], :-8] = 0
    w_k_LDKH[1, -8:] *= 1e-6

    with refused('^the block of W_K, layer 1, head 0, that becomes', ConversionError):
        convert_model(GAUGE_FIX_QK, CONFIG, params)


def test_logits_of_a_model_with_a_library_kernel_are_compared_on_any_device():
    config = dataclasses.replace(CONFIG, kernel='splash')
    params = random_params_of(CONFIG)
    merged_config, merged_params, _ = convert_model('merge', config, params)
    assert merged_config.kernel == 'splash'
    assert logit_error((config, params), (merged_config, merged_params), TOKENS) < 1e-4


def test_logits_are_compared_in_full_precision(monkeypatch):
    """With the TF32 of GPUs, exact conversions would move logits nearly as much as is allowed."""
    precisions = []

    def recording_with_params(config, params):
        precisions.append(jax.config.jax_default_matmul_precision)
        return with_params(config, params)

    monkeypatch.setattr(conversions, 'with_params', recording_with_params)
    model = (CONFIG, random_params_of(CONFIG))
    assert logit_error(model, model, TOKENS) == 0
    assert precisions == ['float32', 'float32']


def test_a_refusal_that_holds_for_all_layers_names_none():
    config, params, _ = convert_model('merge', CONFIG, random_params_of(CONFIG))

    with refused('^it starts from the score qk, not merged', ConversionError):
        convert_model(GAUGE_FIX_QK, config, params)


def test_layers_that_would_become_different_variants_are_refused(monkeypatch):
    """All layers of a model must have the same variant of attention."""
    layers = []

    def merge_all_but_the_first(layer):
        """Replaces a conversion. The first layer stays `qk/vo`."""
        layers.append(layer)
        is_first = len(layers) == 1
        return layer if is_first else merge_vo(layer)

    conversion = conversions.Conversion(merge_all_but_the_first, circuit='OV')
    monkeypatch.setitem(CONVERSIONS, 'merge_vo', conversion)

    with refused('layer 1 would become qk/merged_vo .* one variant', ConversionError):
        convert_model('merge_vo', CONFIG, random_params_of(CONFIG))
