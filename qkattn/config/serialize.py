"""Configs as JSON, as hashes, and as the ConfigDict that the command line overrides.

schema.json is {number: {class: {field: default when introduced}}}. Fields of schema 1 are stored
and hashed always, later ones only where they differ from that default: a new field changes no hash,
and a stored config without it keeps its meaning when the default of the dataclass changes. A number
is never edited: a field is added under the newest one, or the next.
"""

import dataclasses
import functools
import hashlib
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import config_dict

from qkattn.config.run_config import Config
from qkattn.config.setting import concrete_types
from qkattn.config.study_config import Study
from qkattn.errors import ConfigError, UnknownFieldError

FILE = Path(__file__).with_name('schema.json')
SCHEMAS: dict[str, dict[str, dict[str, Any]]] = json.loads(FILE.read_text(encoding='utf-8'))
# {field: {value: as it is stored}}, of values that schema 1 wrote in another form.
STORED_AS: dict[str, dict[str, Any]] = {'remat': {'none': False, 'full': True}}
# Settings that do not change what a run computes, of which each worker of a study may have its own.
OF_MACHINE = (
    *('mesh', 'data.data_dir', 'data.manual_dir', 'train.sinks', 'train.keep', 'model.kernel'),
)


@functools.cache
def defaults(cls: Any) -> dict[str, Any]:
    """The default with which each field was introduced (else its own), as JSON; {} of a section."""
    present: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(cls)}
    for number in SCHEMAS:
        present |= {n: v for n, v in introduced(number, cls).items() if n in present}
    sections: dict[str, Any] = {n: {} for n, v in present.items() if dataclasses.is_dataclass(v)}
    return json.loads(json.dumps(present | sections))


def introduced(number: str, cls: Any) -> dict[str, Any]:
    """The fields that a schema introduced, those of base classes included."""
    bases = [SCHEMAS[number].get(base.__name__, {}) for base in reversed(cls.__mro__)]
    return {name: default for fields in bases for name, default in fields.items()}


def to_json(config: Any) -> dict[str, Any]:
    """The config as plain JSON values, without later fields at their default in the schema."""
    values, cls = {}, typing.cast(Any, type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            value = to_json(value)
        elif isinstance(value, str):
            value = STORED_AS.get(field.name, {}).get(value, value)
        value = json.loads(json.dumps(value))
        if field.name in introduced('1', cls) or value != defaults(cls)[field.name]:
            values[field.name] = value
    return values


def from_json(cls: Any, values: Mapping[str, Any], where: str = '') -> Any:
    """Builds `cls` from nested values; fields that they lack have the default of their schema.

    UnknownFieldError for an unknown field, ConfigError for a section that is not an object.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f'{where.rstrip(".") or "config"}={values!r} must be an object of fields')
    kinds = typing.get_type_hints(cls)
    if unknown := sorted(set(values) - set(kinds)):
        raise UnknownFieldError(
            f'unknown field {where}{unknown[0]}={values[unknown[0]]!r}; use the newer version of '
            f'qkattn that wrote it, or one of {", ".join(kinds)}'
        )
    built: dict[str, Any] = {}
    for name, value in (defaults(cls) | dict(values)).items():
        for plain, stored in STORED_AS.get(name, {}).items():
            value = plain if stored is value else value
        if dataclasses.is_dataclass(kinds[name]):
            value = from_json(kinds[name], value, f'{where}{name}.')
        elif typing.get_origin(kinds[name]) is tuple and isinstance(value, list):
            value = tuple(value)
        built[name] = value
    return cls(**built)


def fingerprint(config: Config) -> str:
    """Hash of what a run computes: of every field but OF_MACHINE, in the form of `to_json`."""
    return fingerprint_of(to_json(config))


def fingerprint_of(values: Mapping[str, Any]) -> str:
    """The fingerprint of a config as it is stored, which may lack fields of schema 1."""
    values = json.loads(json.dumps(values))
    for name in OF_MACHINE:
        section, _, field = name.rpartition('.')
        fields = values.get(section) if section else values
        if isinstance(fields, dict):
            fields.pop(field, None)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def with_machine_of(config: Any, other: Any) -> Any:
    """The config with the settings OF_MACHINE of another one."""
    for name in OF_MACHINE:
        section, _, field = name.partition('.')
        value = getattr(other, section)
        if field:
            change = {field: getattr(value, field)}
            value = dataclasses.replace(getattr(config, section), **change)
        config = dataclasses.replace(config, **{section: value})
    return config


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = '') -> list[str]:
    """'section.field: old -> new' in JSON for every field that differs, 'absent' where it is."""
    changes = []
    for name in {**old, **new}:
        before, after = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changes += differences(before, after, f'{prefix}{name}.')
            continue
        texts = [json.dumps(side[name]) if name in side else 'absent' for side in (old, new)]
        if texts[0] != texts[1]:
            changes.append(f'{prefix}{name}: {texts[0]} -> {texts[1]}')
    return changes


def to_config_dict(config: Any) -> config_dict.ConfigDict:
    """The config as a locked ConfigDict whose optional fields keep their type for overrides."""
    values, kinds = config_dict.ConfigDict(), typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            value = to_config_dict(value)
        elif type(None) in (options := concrete_types(kinds[field.name])):
            reference = config_dict.placeholder(next(o for o in options if o is not type(None)))
            reference.set(value)
            value = reference
        values[field.name] = value
    return values.lock()


def from_config_dict(values: config_dict.ConfigDict) -> Config | Study:
    """Back to the dataclass, after overrides."""
    return from_json(Study if 'variants' in values else Config, values.to_dict())
