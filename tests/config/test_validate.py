"""What the kinds of models, their data and their search may be set to."""

import dataclasses

import pytest

from qkattn.config import Config
from qkattn.config.validate import check_decode
from qkattn.errors import ConfigError
from qkattn.model.sites import validate


def changed(**sections) -> Config:
    config = Config()
    for name, fields in sections.items():
        section = dataclasses.replace(getattr(config, name), **fields)
        config = dataclasses.replace(config, **{name: section})
    return config


BOTH = {'kind': 'encoder_decoder'}


@pytest.mark.parametrize(
    'sections',
    [
        {'model': BOTH},
        {'model': {'kind': 'encoder', 'window': 3, 'positions': 'alibi'}},
        {
            'model': BOTH
            | {
                'encoder_variant': 'merged/no_vo',
                'cross_variant': 'low_rank(rank=2)/vo',
                'num_encoder_layers': 1,
                'source_context': 300,
                'shared_embeddings': False,
            }
        },
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


@pytest.mark.parametrize(
    ('sections', 'message'),
    [
        ({'model': {'kind': 'seq2seq'}}, "model.kind='seq2seq' must be one of decoder, encoder,"),
        *(
            ({'model': {'kind': kind, name: value}}, f'^model.{name}={value!r} is a setting of an ')
            for kind in ('decoder', 'encoder')
            for name, value in (
                ('encoder_variant', 'qk/vo'),
                ('cross_variant', 'qk/vo'),
                ('num_encoder_layers', 2),
                ('source_context', 64),
            )
        ),
        ({'model': BOTH | {'num_encoder_layers': 0}}, 'num_encoder_layers=0 must be at least 1'),
        ({'model': BOTH | {'source_context': 0}}, 'model.source_context=0 must be at least 1'),
        (
            {'model': BOTH | {'encoder_variant': 'qqk/vo'}},
            "^model.encoder_variant: unknown score 'qqk'",
        ),
        (
            {'model': BOTH | {'encoder_variant': 'qk'}},
            "encoder_variant: variant 'qk' must be writ",
        ),
        ({'model': BOTH | {'cross_variant': 'qk/ov'}}, "^model.cross_variant: unknown value 'ov'"),
        ({'model': BOTH | {'score': 'qqk'}}, "^model: unknown score 'qqk'"),
        (
            {'model': BOTH | {'encoder_variant': 'merged/vo', 'positions': 'rope'}},
            '^model.encoder_variant: merged has no rotary form',
        ),
        (
            {'model': BOTH | {'cross_variant': 'merged/no_v', 'num_kv_heads': 1}},
            '^model.cross_variant: num_kv_heads=1 changes nothing',
        ),
        (
            {'model': BOTH | {'cross_variant': 'low_rank(rank=0)/vo'}},
            '^model.cross_variant: .*rank',
        ),
        *(
            ({'model': {name: rate}}, f'^model.{name}={rate} must be at least 0 and below 1')
            for name in ('dropout', 'attention_dropout', 'activation_dropout')
            for rate in (-0.1, 1.0, float('nan'))
        ),
        ({'model': {'activation_dropout': None}}, 'activation_dropout=None must be of type float'),
        ({'model': {'norm_position': 'peri'}}, "norm_position='peri' must be one of pre, post"),
        ({'model': {'activation': 'silu'}}, "activation='silu' must be one of gelu, "),
        ({'train': {'label_smoothing': 1.0}}, 'label_smoothing=1.0 must be at least 0 and below'),
        ({'train': {'label_smoothing': -0.1}}, 'label_smoothing=-0.1 must be at least 0'),
        ({'train': {'label_smoothing': float('nan')}}, 'label_smoothing=nan must be at least 0'),
        (
            {'optimizer': {'schedule': 'inverse_sqrt', 'warmup_steps': 0}},
            'optimizer.warmup_steps=0 must be at least 1 with optimizer.schedule=inverse_sqrt',
        ),
        ({'decode': {'beam': 0}}, 'decode.beam=0 must be at least 1'),
        ({'decode': {'beam': 2.5}}, 'decode.beam=2.5 must be of type int'),
        ({'decode': {'max_sources': 0}}, 'decode.max_sources=0 must be at least 1'),
        ({'decode': {'length_penalty': -1.0}}, 'length_penalty=-1.0 must be at least 0 and fin'),
        ({'decode': {'length_penalty': float('inf')}}, 'length_penalty=inf must be at least 0'),
        ({'decode': {'length_penalty': float('nan')}}, 'length_penalty=nan must be at least 0'),
        *(
            ({'data': {'mask_rate': rate}}, f'data.mask_rate={rate} must be above 0 and below 1')
            for rate in (0.0, 1.0, -0.5, float('nan'))
        ),
        ({'data': {'tokenizer': 'words'}}, "tokenizer='words' must be one of bytes, characters"),
        ({'data': {'tokenizer_size': 0}}, 'data.tokenizer_size=0 must be at least 1'),
        ({'data': {'drop_long': 1}}, 'data.drop_long=1 must be of type bool'),
    ],
    ids=str,
)
def test_a_wrong_setting_is_one_sentence(sections, message):
    with pytest.raises(ConfigError, match=message) as caught:
        validate(changed(**sections))
    assert '\n' not in str(caught.value)


def test_a_search_can_be_checked_alone():
    check_decode(Config().decode)
    with pytest.raises(ConfigError, match='decode.max_sources=-1 must be at least 1'):
        check_decode(dataclasses.replace(Config().decode, max_sources=-1))
