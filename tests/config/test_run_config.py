"""Settings that can work, and one clear sentence for each mistake, before anything compiles."""

import dataclasses
import re

import pytest

from qkattn.config import Config, Study
from qkattn.config.setting import check_section, settings
from qkattn.errors import ConfigError
from qkattn.model.sites import validate


def changed(sections: dict) -> Config:
    config = Config()
    for name, fields in sections.items():
        section = dataclasses.replace(getattr(config, name), **fields)
        config = dataclasses.replace(config, **{name: section})
    return config


@pytest.mark.parametrize('cls', [Config, Study])
def test_every_field_declares_a_description_and_a_default_within_its_bounds(cls):
    declared = settings(cls)
    assert len(declared) > 70
    for name, setting in declared.items():
        assert setting.doc.endswith('.') and not setting.doc.startswith(' '), name
    check_section('', cls())
    dropout = declared[f'{"base." * (cls is Study)}model.dropout']
    assert dropout.bounds.words(float) == 'at least 0 and below 1'


BOTH = {'kind': 'encoder_decoder'}
VARIANTS = {'encoder_variant': 'merged/no_vo', 'cross_variant': 'low_rank(rank=2)/vo'}


@pytest.mark.parametrize(
    'sections',
    [
        {},
        {'model': {'kind': 'encoder', 'window': 3, 'positions': 'alibi'}},
        {'model': BOTH | VARIANTS | {'num_encoder_layers': 1, 'source_context': 300}},
        # The cross-attention has no rotary positions, whatever the model's are.
        {'model': BOTH | {'positions': 'rope', 'cross_variant': 'merged/vo'}},
        {'train': {'label_smoothing': 0}, 'optimizer': {'warmup_steps': 0}},
        {'optimizer': {'schedule': 'inverse_sqrt', 'warmup_steps': 1}},
    ],
    ids=str,
)
def test_what_can_work_is_let_through(sections):
    validate(changed(sections))


NAN, INF = float('nan'), float('inf')


@pytest.mark.parametrize(
    ('setting', 'value', 'words'),
    [
        ('model.kind', 'seq2seq', 'must be one of decoder, encoder,'),
        ('model.num_kv_heads', 3, 'must divide num_heads=4'),
        ('model.d_model', 130, 'must be a multiple of num_heads=4'),
        ('model.d_model', 128.0, 'must be of type int'),
        ('model.num_layers', True, 'must be of type int'),
        ('model.d_ff', 0, 'must be at least 1 and at most 2**20, or None'),
        ('model.biases', 1, 'must be of type bool'),
        ('model.activation_dropout', None, 'must be of type float'),
        *(('model.dropout', r, 'must be at least 0 and below 1') for r in (-0.1, 1.0, NAN)),
        *(('model.init_qk', f, 'must be above 0 and finite') for f in (0.0, INF, NAN)),
        ('train.accumulation', 3, 'must divide batch_size=16'),
        ('train.log_every', 15, 'must be a multiple of train.steps_per_dispatch=10'),
        ('train.eval_every', 25, 'must be a multiple of train.log_every=10'),
        ('optimizer.warmup_steps', 1000, 'must be below train.num_steps=1000'),
        ('optimizer.clip_norm', 0.0, 'must be above 0 and finite in float32, or None'),
        ('trials.seeds', (), 'must hold at least one value'),
        ('trials.seeds', (1, 1), 'must hold no value twice'),
        ('trials.seeds', (-1,), 'must hold values that are at least 0 and below 2**31'),
        ('trials.seeds', (0.5,), 'must hold int values'),
        ('trials.weight_decays', (0.0, 0.1), 'must be below 0.1 with optimizer.decay='),
        ('mesh.trial', 2, 'must divide the number of trials, 1'),
        ('data.name', 'a\nb', 'must be Unicode text'),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(setting, value, words):
    section, field = setting.split('.')
    refused({section: {field: value}}, f'{field}={value!r} {words}')


NEEDS_BOTH = ('encoder_variant', 'qk/vo'), ('cross_variant', 'qk/vo'), ('num_encoder_layers', 2)


@pytest.mark.parametrize(
    ('sections', 'message'),
    [
        (
            {'model': {'attention_gain': False, 'norm_position': 'post'}},
            'model.attention_gain=False needs model.norm_position=pre',
        ),
        ({'model': {'num_heads': 2**14, 'head_size': 2**11}}, 'must be at most 16777216'),
        ({'mesh': {'fsdp': 3}}, 'mesh.data * mesh.fsdp = 3 must divide the microbatch of 16'),
        (
            {'optimizer': {'schedule': 'inverse_sqrt', 'warmup_steps': 0}},
            'optimizer.warmup_steps=0 must be at least 1 with optimizer.schedule=inverse_sqrt',
        ),
        *(
            ({'model': {field: value}}, f'model.{field}={value!r} is a setting of an encoder-dec')
            for field, value in (*NEEDS_BOTH, ('source_context', 8))
        ),
        *(
            ({'model': BOTH | fields}, message)
            for fields, message in (
                ({'encoder_variant': 'qqk/vo'}, "model.encoder_variant: unknown score 'qqk'"),
                ({'encoder_variant': 'qk'}, "encoder_variant: variant 'qk' must be writ"),
                (
                    {'cross_variant': 'merged/no_v', 'num_kv_heads': 1},
                    'model.cross_variant: num_kv_heads=1 changes nothing',
                ),
            )
        ),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_each_other_are_refused(sections, message):
    refused(sections, message)


def refused(sections: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        validate(changed(sections))
    assert '\n' not in str(caught.value)
