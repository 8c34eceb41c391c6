"""Settings: round trips, overrides, and one clear sentence for each mistake."""

import dataclasses

import pytest

from qkattn.config import (
    Config,
    MeshConfig,
    Study,
    fingerprint,
    from_config_dict,
    from_json,
    to_config_dict,
    to_json,
)
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


def test_optional_fields_take_overrides_of_their_type():
    values = to_config_dict(Config())
    values.model.d_ff = 300
    values.model.scan_unroll = None
    assert from_config_dict(values).model.d_ff == 300
    with pytest.raises(TypeError):
        values.model.d_ff = 'wide'
    with pytest.raises(AttributeError):
        values.model.width = 3


def test_the_defaults_are_valid():
    validate(Config())


def test_the_fingerprint_is_of_what_is_computed_not_of_where():
    assert fingerprint(Config()) == fingerprint(changed(mesh={'data': 8}))
    assert fingerprint(Config()) != fingerprint(changed(trials={'seeds': (1,)}))
    assert fingerprint(Config()) != fingerprint(changed(model={'value': 'no_v'}))


@pytest.mark.parametrize(
    ('sections', 'message'),
    [
        ({'model': {'score': 'qq'}}, "unknown score 'qq'"),
        ({'model': {'d_model': 130}}, 'd_model=130 must be a multiple of num_heads=4'),
        ({'model': {'num_kv_heads': 3}}, 'num_kv_heads=3 must divide num_heads=4'),
        ({'model': {'norm': 'batchnorm'}}, "model.norm='batchnorm' must be one of layernorm"),
        ({'model': {'dropout': 1.0}}, 'model.dropout=1.0 must be at least 0 and below 1'),
        ({'model': {'num_layers': 0}}, 'model.num_layers=0 must be at least 1'),
        ({'model': {'d_ff': 0}}, 'model.mlp_width=0 must be at least 1'),
        ({'model': {'d_model': 128.0}}, 'model.d_model=128.0 must be of type int'),
        ({'model': {'biases': 1}}, 'model.biases=1 must be of type bool'),
        ({'model': {'scan_unroll': 0}}, 'model.scan_unroll=0 must be at least 1'),
        ({'train': {'num_steps': 0}}, 'train.num_steps=0 must be at least 1'),
        ({'train': {'accumulation': 3}}, 'accumulation=3 must divide batch_size=16'),
        ({'train': {'log_every': 15}}, 'train.log_every=15 must be a multiple of'),
        ({'train': {'eval_every': 25}}, 'train.eval_every=25 must be a multiple of'),
        ({'train': {'lifting': 'loop'}}, "train.lifting='loop' must be one of auto, vmap, map"),
        ({'optimizer': {'warmup_steps': 1000}}, 'warmup_steps=1000 must be at least 0 and below'),
        ({'optimizer': {'clip_norm': 0.0}}, 'clip_norm=0.0 must be above 0, or None'),
        ({'optimizer': {'beta2': 1.5}}, 'optimizer.beta2=1.5 must be in'),
        ({'trials': {'seeds': ()}}, 'must hold at least one value'),
        ({'trials': {'seeds': (1, 1)}}, 'none twice'),
        ({'trials': {'seeds': (-1,)}}, 'must be finite and not negative'),
        ({'trials': {'learning_rates': (float('nan'),)}}, 'must be finite'),
        ({'trials': {'learning_rates': ('fast',)}}, 'must hold float values'),
        ({'trials': {'seeds': (0.5,)}}, 'must hold int values'),
        ({'mesh': {'trial': 2}}, 'mesh.trial=2 must divide the number of trials, 1'),
        ({'mesh': {'data': 3}}, r'mesh.data \* mesh.fsdp = 3 must divide the microbatch of 16'),
        ({'mesh': {'tensor': 0}}, 'mesh.tensor=0 must be at least 1'),
        ({'data': {'eval_sequences': 0}}, 'data.eval_sequences=0 must be at least 1'),
    ],
    ids=str,
)
def test_a_wrong_setting_is_one_sentence(sections, message):
    with pytest.raises(ConfigError, match=message) as caught:
        validate(changed(**sections))
    assert '\n' not in str(caught.value)


def test_an_unknown_field_lists_the_known_ones():
    with pytest.raises(ConfigError, match='unknown field mesh.pipeline; known are trial, data'):
        from_json(Config, {'mesh': {'pipeline': 2}})
    assert MeshConfig().trial == 1
