"""Settings: round trips, overrides, what can work, and one clear sentence for each mistake."""

import dataclasses
import re

import pytest

from qkattn.config import (
    Config,
    Study,
    TuningConfig,
    fingerprint,
    from_config_dict,
    from_json,
    to_config_dict,
    to_json,
)
from qkattn.config.setting import settings
from qkattn.config.validate import check_section
from qkattn.errors import ConfigError
from qkattn.model.sites import validate


def changed(**sections) -> Config:
    config = Config()
    for name, fields in sections.items():
        section = dataclasses.replace(getattr(config, name), **fields)
        config = dataclasses.replace(config, **{name: section})
    return config


@pytest.mark.parametrize('config', [Config(), Study()], ids=['config', 'study'])
def test_round_trips(config):
    assert from_json(type(config), to_json(config)) == config
    assert from_config_dict(to_config_dict(config)) == config


@pytest.mark.parametrize('cls', [Config, Study])
def test_every_field_declares_a_description_and_a_default_within_its_bounds(cls):
    declared = settings(cls)
    assert len(declared) > 70
    for name, one in declared.items():
        assert one.doc.endswith('.') and not one.doc.startswith(' '), name
    check_section('', cls())
    assert declared[f'{"base." * (cls is Study)}model.dropout'].bounds.words(float) == (
        'at least 0 and below 1'
    )


def test_optional_fields_take_overrides_of_their_type():
    values = to_config_dict(Config())
    values.model.d_ff = 300
    values.model.scan_unroll = None
    assert from_config_dict(values).model.d_ff == 300
    with pytest.raises(TypeError):
        values.model.d_ff = 'wide'
    with pytest.raises(AttributeError):
        values.model.width = 3


def test_the_fingerprint_is_of_what_is_computed_not_of_where():
    assert fingerprint(Config()) == fingerprint(changed(mesh={'data': 8}))
    assert fingerprint(Config()) != fingerprint(changed(trials={'seeds': (1,)}))
    assert fingerprint(Config()) != fingerprint(changed(model={'value': 'no_v'}))


BOTH = {'kind': 'encoder_decoder'}
VARIANTS = {'encoder_variant': 'merged/no_vo', 'cross_variant': 'low_rank(rank=2)/vo'}


@pytest.mark.parametrize(
    'sections',
    [
        {},
        {'model': BOTH},
        {'model': {'kind': 'encoder', 'window': 3, 'positions': 'alibi'}},
        {'model': BOTH | VARIANTS | {'num_encoder_layers': 1, 'source_context': 300}},
        # The cross-attention has no rotary positions, whatever the model's are.
        {'model': BOTH | {'positions': 'rope', 'cross_variant': 'merged/vo'}},
        {'model': {'dropout': 0.1, 'attention_dropout': 0.0, 'activation_dropout': 0.5}},
        {'model': {'norm_position': 'post', 'positions': 'sinusoidal', 'activation': 'relu'}},
        {'train': {'label_smoothing': 0.1}},
        {'train': {'label_smoothing': 0}},
        {'optimizer': {'schedule': 'inverse_sqrt', 'warmup_steps': 1}},
        {'optimizer': {'schedule': 'linear', 'warmup_steps': 0}},
        {'decode': {'beam': 1, 'length_penalty': 0.0, 'max_sources': 1}},
        {'data': {'mask_rate': 0.99, 'tokenizer': 'bpe', 'tokenizer_size': 1}},
    ],
    ids=str,
)
def test_what_can_work_is_let_through(sections):
    validate(changed(**sections))


def refused(message: str, **sections) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        validate(changed(**sections))
    assert '\n' not in str(caught.value)


def test_attention_norms_without_gain_need_pre_norm():
    refused(
        'model.attention_gain=False needs model.norm_position=pre',
        model={'attention_gain': False, 'norm_position': 'post'},
    )


NAN, INF = float('nan'), float('inf')
RATE = 'must be at least 0 and below 1'


@pytest.mark.parametrize(
    ('setting', 'value', 'words'),
    [
        ('model.kind', 'seq2seq', 'must be one of decoder, encoder,'),
        ('model.num_kv_heads', 3, 'must divide num_heads=4'),
        ('model.d_model', 130, 'must be a multiple of num_heads=4'),
        ('model.d_model', 128.0, 'must be of type int'),
        ('model.num_layers', 0, 'must be at least 1'),
        ('model.scan_unroll', 0, 'must be at least 1'),
        ('model.biases', 1, 'must be of type bool'),
        ('model.norm', 'batchnorm', 'must be one of layernorm'),
        ('model.norm_position', 'peri', 'must be one of pre, post'),
        ('model.activation', 'silu', 'must be one of gelu, '),
        ('model.activation_dropout', None, 'must be of type float'),
        *(
            (f'model.{name}', rate, RATE)
            for name in ('dropout', 'attention_dropout', 'activation_dropout')
            for rate in (-0.1, 1.0, NAN)
        ),
        ('train.num_steps', 0, 'must be at least 1'),
        ('train.accumulation', 3, 'must divide batch_size=16'),
        ('train.log_every', 15, 'must be a multiple of'),
        ('train.eval_every', 25, 'must be a multiple of'),
        ('train.lifting', 'loop', 'must be one of auto, vmap, map'),
        *(('train.label_smoothing', rate, RATE) for rate in (-0.1, 1.0, NAN)),
        ('optimizer.warmup_steps', 1000, 'must be below train.num_steps=1000'),
        ('optimizer.clip_norm', 0.0, 'must be above 0 and finite in float32, or None'),
        ('optimizer.beta2', 1.5, 'must be at least 0 and at most 1'),
        ('trials.seeds', (), 'must hold at least one value'),
        ('trials.seeds', (1, 1), 'must hold no value twice'),
        ('trials.seeds', (-1,), 'must hold values that are at least 0 and below 2**31'),
        ('trials.seeds', (0.5,), 'must hold int values'),
        ('trials.learning_rates', (NAN,), 'must hold values that are at least 0 and finite'),
        ('trials.learning_rates', ('fast',), 'must hold float values'),
        *(('model.init_qk', f, 'must be above 0 and finite') for f in (0.0, -1.0, INF, NAN)),
        ('model.init', 'xavier', 'must be one of fan_in, nanogpt'),
        ('trials.weight_decays', (0.0, 0.1), 'must be below 0.1 with optimizer.decay='),
        ('optimizer.decay', 'none', 'must be one of independent, coupled'),
        ('mesh.trial', 2, 'must divide the number of trials, 1'),
        ('mesh.tensor', 0, 'must be at least 1'),
        *(('decode.beam', beam, words) for beam, words in ((0, 'must be'), (2.5, 'must be of'))),
        ('decode.max_sources', 0, 'must be at least 1'),
        *(('decode.length_penalty', p, 'must be at least 0 and fin') for p in (-1.0, INF, NAN)),
        ('data.eval_sequences', 0, 'must be at least 1'),
        ('data.tokenizer_size', 0, 'must be at least 1'),
        ('data.drop_long', 1, 'must be of type bool'),
        *(('data.mask_rate', r, 'must be above 0 and below 1') for r in (0.0, 1.0, -0.5, NAN)),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(setting, value, words):
    section, field = setting.split('.')
    refused(f'{field}={value!r} {words}', **{section: {field: value}})


@pytest.mark.parametrize('kind', ['decoder', 'encoder'])
@pytest.mark.parametrize(
    ('field', 'value'),
    [
        ('encoder_variant', 'qk/vo'),
        ('cross_variant', 'qk/vo'),
        ('num_encoder_layers', 2),
        ('source_context', 64),
    ],
)
def test_settings_of_an_encoder_decoder_are_of_no_other_kind(kind, field, value):
    message = f'model.{field}={value!r} is a setting of an '
    refused(message, model={'kind': kind, field: value})


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'num_encoder_layers': 0}, 'num_encoder_layers=0 must be at least 1'),
        ({'source_context': 0}, 'model.source_context=0 must be at least 1'),
        ({'score': 'qqk'}, "model: unknown score 'qqk'"),
        ({'encoder_variant': 'qqk/vo'}, "model.encoder_variant: unknown score 'qqk'"),
        ({'encoder_variant': 'qk'}, "encoder_variant: variant 'qk' must be writ"),
        ({'cross_variant': 'qk/ov'}, "model.cross_variant: unknown value 'ov'"),
        (
            {'encoder_variant': 'merged/vo', 'positions': 'rope'},
            'model.encoder_variant: merged has no rotary form',
        ),
        (
            {'cross_variant': 'merged/no_v', 'num_kv_heads': 1},
            'model.cross_variant: num_kv_heads=1 changes nothing',
        ),
        ({'cross_variant': 'low_rank(rank=0)/vo'}, 'model.cross_variant: low_rank(rank=0) must be'),
    ],
    ids=str,
)
def test_a_wrong_variant_is_named_with_its_site(fields, message):
    refused(message, model=BOTH | fields)


def test_settings_that_do_not_fit_each_other_are_refused():
    refused('model.d_ff=0 must be at least 1', model={'d_ff': 0})
    refused('mesh.data * mesh.fsdp = 3 must divide the microbatch of 16', mesh={'data': 3})
    refused(
        'optimizer.warmup_steps=0 must be at least 1 with optimizer.schedule=inverse_sqrt',
        optimizer={'schedule': 'inverse_sqrt', 'warmup_steps': 0},
    )


def test_a_search_can_be_checked_alone():
    with pytest.raises(ConfigError, match='decode.max_sources=-1 must be at least 1'):
        check_section('decode.', dataclasses.replace(Config().decode, max_sources=-1))


@pytest.mark.parametrize('field', ['max_seeds', 'max_points'])
def test_the_numbers_of_trials_that_tuning_adds_are_bounded(field):
    with pytest.raises(ConfigError, match=f'{field}=1001 must be at least 1 and at most 1000'):
        check_section('tuning.', TuningConfig(**{field: 1001}))


def test_an_unknown_field_lists_the_known_ones():
    with pytest.raises(
        ConfigError, match='unknown field mesh.pipeline=2; use .*, or one of trial, data'
    ):
        from_json(Config, {'mesh': {'pipeline': 2}})
