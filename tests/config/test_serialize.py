"""Configs as JSON and hashes: a field that is added later changes nothing."""

import dataclasses
import json
import typing
from pathlib import Path

import pytest

from qkattn.config import ModelConfig, Study, serialize
from qkattn.config.run_config import Config, DataConfig, MeshConfig, TrainConfig, TrialsConfig
from qkattn.config.serialize import fingerprint, fingerprint_of, from_json, to_json
from qkattn.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class WiderModel(ModelConfig):
    lately: str = 'softmax'
    window: int | None = 64  # another default than that of schema 1


@dataclasses.dataclass(frozen=True)
class Extra:
    rate: float = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class WiderConfig(Config):
    model: WiderModel = WiderModel()
    extra: Extra = Extra()


def wider(**model):
    return WiderConfig(model=WiderModel(**{'window': None} | model))


def test_configs_make_round_trips_and_take_overrides_of_their_type():
    for config in (Config(), Study()):
        assert from_json(type(config), to_json(config)) == config
        assert serialize.from_config_dict(serialize.to_config_dict(config)) == config
    values = serialize.to_config_dict(Config())
    values.model.d_ff = 300
    values.model.scan_unroll = None
    assert serialize.from_config_dict(values).model.d_ff == 300
    with pytest.raises(TypeError):
        values.model.d_ff = 'wide'
    with pytest.raises(AttributeError):
        values.model.width = 3


def test_the_fingerprint_is_of_what_is_computed_not_of_where():
    assert fingerprint(Config()) == '5c6b1299941b'  # of the defaults of schema 1
    elsewhere = Config(
        mesh=MeshConfig(data=8),
        data=DataConfig(data_dir='a', manual_dir='b'),
        train=TrainConfig(sinks=('wandb',)),
        model=ModelConfig(kernel='einsum'),
    )
    assert fingerprint(elsewhere) == fingerprint(Config())
    assert serialize.with_machine_of(Config(), elsewhere) == elsewhere
    others = Config(trials=TrialsConfig(seeds=(1,))), Config(model=ModelConfig(value='no_v'))
    assert len({*map(fingerprint, (Config(), *others))}) == 3


def test_a_value_that_schema_1_wrote_otherwise_keeps_its_form():
    for value, stored in (('none', False), ('full', True), ('dots', 'dots')):
        config = Config(model=ModelConfig(remat=value))
        assert to_json(config)['model']['remat'] is stored or value == 'dots'
        assert from_json(Config, to_json(config)) == config
        assert (fingerprint(config) == fingerprint(Config())) == (value == 'none')


def test_a_later_field_is_stored_and_hashed_unless_it_is_at_its_default():
    assert to_json(wider()) == to_json(Config())
    for config in (wider(lately='sigmoid'), dataclasses.replace(wider(), extra=Extra(rate=0.25))):
        assert fingerprint(config) != fingerprint(Config())
        assert from_json(WiderConfig, to_json(config)) == config
        with pytest.raises(ConfigError, match=r'unknown field (model\.lately|extra)=.*newer'):
            from_json(Config, to_json(config))


def test_another_default_is_another_config_and_stored_ones_keep_their_meaning():
    assert fingerprint(WiderConfig()) != fingerprint(Config())
    stored = to_json(Config())
    del stored['model']['window'], stored['decode']
    assert from_json(WiderConfig, stored) == wider()
    assert fingerprint(from_json(Config, stored)) == fingerprint(Config()) != fingerprint_of(stored)


def test_the_default_of_a_later_field_is_frozen_with_its_schema(monkeypatch):
    later = serialize.SCHEMAS | {'2': {'WiderModel': {'lately': 'sigmoid'}}}
    monkeypatch.setattr(serialize, 'SCHEMAS', later)
    monkeypatch.setattr(serialize, 'defaults', serialize.defaults.__wrapped__)
    assert from_json(WiderConfig, to_json(Config())) == wider(lately='sigmoid')
    assert fingerprint(wider(lately='sigmoid')) == fingerprint(Config()) != fingerprint(wider())


def test_every_field_has_a_frozen_default():
    classes = [Study]
    for cls in classes:  # which grows by the sections
        classes += filter(dataclasses.is_dataclass, typing.get_type_hints(cls).values())
        frozen = [fields.get(cls.__name__, {}) for fields in serialize.SCHEMAS.values()]
        known = {name for fields in frozen for name in fields}
        missing = {n: v for n, v in serialize.defaults(cls).items() if n not in known}
        assert not missing, f'add to {serialize.FILE.name}: {json.dumps({cls.__name__: missing})}'


def test_committed_runs_are_named_by_the_hash_of_their_configs():
    results = Path(__file__).parents[2] / 'experiments/results'
    assert (studies := [*results.rglob('study.json')])
    for study in studies:
        declared = json.loads(study.read_text())
        assert fingerprint_of(declared['base']) == declared['base_hash'], study
        _, *runs = study.with_name('runs.jsonl').read_text().splitlines()
        for run in (json.loads(line)['plan'] for line in runs):
            sections = run['config'].items()  # what differs from the base
            config = {name: declared['base'][name] | fields for name, fields in sections}
            assert fingerprint_of(config) == run['run'], (study, run['run'])
            assert to_json(from_json(Config, config)) == config
