"""Settings that can work, and one clear sentence for each mistake, before anything compiles."""

import dataclasses
import re

from qkattn.config import Config, Study
from qkattn.config.setting import check_section, settings
from qkattn.model.sites import validate
from tests.refusals import refused

BOTH = {'model.kind': 'encoder_decoder'}
NAN, INF = float('nan'), float('inf')
INVERSE_SQRT = {'optimizer.schedule': 'inverse_sqrt'}
CROSS, ENCODER, PATTERN = 'model.cross_variant', 'model.encoder_variant', 'model.pattern'
DOT_PRODUCT = {'model.kernel': 'dot_product'}


def changed(fields: dict) -> Config:
    """The default config with fields by dotted name."""
    config = Config()
    for name, value in fields.items():
        section, field = name.split('.')
        change = dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{section: change})
    return config


def test_every_field_declares_a_description_and_a_default_within_its_bounds():
    for cls in (Config, Study):
        assert len(declared := settings(cls)) > 70
        for name, setting in declared.items():
            assert setting.doc.endswith('.') and not setting.doc.startswith(' '), name
        check_section('', cls())
    assert settings(Config)['model.dropout'].bounds.words(float) == 'at least 0 and below 1'


def test_what_can_work_is_let_through():
    for fields in (
        {},
        BOTH | {'model.encoder_variant': 'merged/no_vo', 'model.source_context': 300},
        # The cross-attention has no rotary positions, whatever the model's are.
        BOTH | {'model.positions': 'rope', 'model.cross_variant': 'merged/vo'},
        {'train.label_smoothing': 0, 'optimizer.warmup_steps': 0},
        {'optimizer.schedule': 'inverse_sqrt', 'optimizer.warmup_steps': 1},
        {'model.kernel': 'dot_product'},
        {'model.kernel': 'splash', 'model.context': 128},  # perhaps for a pod
        BOTH | {'model.kernel': 'blockwise'},
    ):
        validate(changed(fields))


def test_a_wrong_setting_is_named_with_its_value():
    for name, value, words in (
        ('model.kind', 'seq2seq', 'must be one of decoder, encoder,'),
        ('model.num_kv_heads', 3, 'must divide num_heads=4'),
        ('model.kernel', 'flash', 'must be one of auto, einsum, blockwise'),
        ('model.d_model', 130, 'must be a multiple of num_heads=4'),
        ('model.num_layers', True, 'must be of type int'),
        ('model.d_ff', 0, 'must be at least 1 and at most 2**20, or None'),
        ('model.biases', 1, 'must be of type bool'),
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
        ('trials.weight_decays', (0.0, 0.1), 'must be below 0.1 with optimizer.decay='),
        ('mesh.trial', 2, 'must divide the number of trials, 1'),
        ('data.name', 'a\nb', 'must be Unicode text'),
        ('model.encoder_variant', 'qk/vo', 'is a setting of an encoder-decoder, not of decoder'),
    ):
        with refused(re.escape(f'{name.partition(".")[2]}={value!r} {words}')):
            validate(changed({name: value}))


def test_settings_that_do_not_fit_each_other_are_refused():
    for fields, message in (
        (
            {'model.attention_gain': False, 'model.norm_position': 'post'},
            'model.attention_gain=False needs model.norm_position=pre',
        ),
        ({'model.num_heads': 2**14, 'model.head_size': 2**11}, 'must be at most 16777216'),
        ({'mesh.fsdp': 3}, 'mesh.data * mesh.fsdp = 3 must divide the microbatch of 16'),
        (INVERSE_SQRT | {'optimizer.warmup_steps': 0}, 'at least 1 with optimizer.schedule=inve'),
        (BOTH | {ENCODER: 'qqk/vo'}, "model.encoder_variant: unknown score 'qqk'"),
        (BOTH | {ENCODER: 'qk'}, "model.encoder_variant: variant 'qk' must be written"),
        (
            BOTH | {CROSS: 'merged/no_v', 'model.num_kv_heads': 1},
            'cross_variant: num_kv_heads=1 ch',
        ),
        ({PATTERN: 'qk/no_v,qk/vo'}, 'must begin with the variant of the model, qk/vo'),
        ({PATTERN: 'qk/vo,qk/no_v', 'model.num_layers': 1}, 'has 2 variants for num_layers=1'),
        (BOTH | {PATTERN: 'qk/vo,qk/no_v'}, 'is a setting of a decoder or an encoder'),
        ({PATTERN: 'qk/vo,qk/ov'}, "unknown value 'ov'"),
        ({PATTERN: 'qk/vo,'}, "variant '' must be written score/value"),
        ({PATTERN: ''}, "pattern='' must begin with"),
        ({PATTERN: 'qk/vo,merged/vo', 'model.positions': 'rope'}, '[1]: merged has no rotary'),
        (DOT_PRODUCT | {'model.positions': 'alibi'}, "model: kernel='dot_product' has no biases"),
        (BOTH | DOT_PRODUCT, "model: kernel='dot_product' takes no padding"),
    ):
        with refused(re.escape(message)):
            validate(changed(fields))
