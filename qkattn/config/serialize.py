"""Configs as JSON, as hashes, and as the ConfigDict that the command line overrides.

schema.json is {number: {class: {field: default when introduced}}}. Fields of schema 1 are always
stored and hashed, later ones only where they differ from the default in the schema. So a field that
is added changes no hash, and a stored config without it keeps its meaning when the default of the
dataclass changes. Entries of schema.json are never edited: a field is added under the newest
number, or under the next one.
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
from qkattn.config.setting import concrete_types, is_optional
from qkattn.config.study_config import Study
from qkattn.errors import ConfigError, UnknownFieldError

FILE = Path(__file__).with_name('schema.json')
SCHEMAS: dict[str, dict[str, dict[str, Any]]] = json.loads(FILE.read_text(encoding='utf-8'))
# {field: {value: its stored form}}, of values that schema 1 stored in another form.
STORED_AS: dict[str, dict[str, Any]] = {'remat': {'none': False, 'full': True}}
# Settings that do not change what a run computes. Each worker of a study may have its own.
OF_MACHINE = (
    'mesh',
    'data.data_dir',
    'data.manual_dir',
    'train.sinks',
    'train.keep',
    'model.kernel',
)


@functools.cache
def defaults(cls: Any) -> dict[str, Any]:
    """The default of each field as JSON: that of its schema, else that of the class.

    The default of a section is {}, so that each of its fields takes its own.
    """
    values: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(cls)}
    for number in SCHEMAS:
        for name, default in introduced(number, cls).items():
            if name in values:
                values[name] = default
    for name, value in values.items():
        if dataclasses.is_dataclass(value):
            values[name] = {}
    return _plain(values)


def introduced(number: str, cls: Any) -> dict[str, Any]:
    """The fields that a schema introduced and their defaults, those of base classes included."""
    fields: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        fields |= SCHEMAS[number].get(base.__name__, {})
    return fields


def to_json(config: Any) -> dict[str, Any]:
    """The config as plain JSON values.

    A field that was introduced after schema 1 is left out where it has the default of its schema.
    """
    cls = typing.cast(Any, type(config))
    always_stored = introduced('1', cls)
    values = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            value = to_json(value)
        elif isinstance(value, str):
            value = STORED_AS.get(field.name, {}).get(value, value)
        value = _plain(value)
        if field.name in always_stored or value != defaults(cls)[field.name]:
            values[field.name] = value
    return values


def from_json(cls: Any, values: Mapping[str, Any], prefix: str = '') -> Any:
    """Builds `cls` from nested values; fields that they lack have the default of their schema.

    `prefix` is what names of fields begin with in errors, as in 'model.'. Raises UnknownFieldError
    for an unknown field, and ConfigError for a section that is not an object.
    """
    if not isinstance(values, Mapping):
        name = prefix.rstrip('.') or 'config'
        raise ConfigError(f'{name}={values!r} must be an object of fields')
    annotations = typing.get_type_hints(cls)
    if unknown := sorted(set(values) - set(annotations)):
        raise UnknownFieldError(
            f'unknown field {prefix}{unknown[0]}={values[unknown[0]]!r}; use the newer version of '
            f'qkattn that wrote it, or one of {", ".join(annotations)}'
        )
    fields: dict[str, Any] = {}
    for name, value in (defaults(cls) | dict(values)).items():
        annotation = annotations[name]
        if dataclasses.is_dataclass(annotation):
            fields[name] = from_json(annotation, value, f'{prefix}{name}.')
        elif typing.get_origin(annotation) is tuple and isinstance(value, list):
            fields[name] = tuple(value)
        else:
            fields[name] = _from_stored_form(name, value)
    return cls(**fields)


def _from_stored_form(name: str, value: Any) -> Any:
    """The value of a field whose stored form is `value`: 'none' for remat, stored as False."""
    for original, stored in STORED_AS.get(name, {}).items():
        if value is stored:
            return original
    return value


def _plain(value: Any) -> Any:
    """A value as JSON gives it back: tuples become lists."""
    return json.loads(json.dumps(value))


def fingerprint(config: Config) -> str:
    """Hash of what a run computes: of every field but OF_MACHINE, in the form of `to_json`."""
    return fingerprint_of(to_json(config))


def fingerprint_of(values: Mapping[str, Any]) -> str:
    """The fingerprint of a config as it is stored, which may lack fields of schema 1."""
    values = _plain(values)
    for name in OF_MACHINE:
        section, _, field = name.rpartition('.')
        fields = values.get(section) if section else values
        if isinstance(fields, dict):
            fields.pop(field, None)
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def with_machine_of(config: Any, other: Any) -> Any:
    """The config with the settings OF_MACHINE of another one."""
    for name in OF_MACHINE:
        section, _, field = name.partition('.')
        value = getattr(other, section)
        if field:
            changes = {field: getattr(value, field)}
            value = dataclasses.replace(getattr(config, section), **changes)
        config = dataclasses.replace(config, **{section: value})
    return config


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = '') -> list[str]:
    """A line 'section.field: old -> new' for every field that differs.

    Values are in JSON; that of a field which one side lacks is 'absent'.
    """
    lines = []
    for name in {**old, **new}:
        before = old.get(name)
        after = new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += differences(before, after, f'{prefix}{name}.')
            continue
        before_text = json.dumps(before) if name in old else 'absent'
        after_text = json.dumps(after) if name in new else 'absent'
        if before_text != after_text:
            lines.append(f'{prefix}{name}: {before_text} -> {after_text}')
    return lines


def to_config_dict(config: Any) -> config_dict.ConfigDict:
    """The config as a locked ConfigDict whose optional fields keep their type for overrides."""
    values = config_dict.ConfigDict()
    annotations = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        annotation = annotations[field.name]
        if dataclasses.is_dataclass(value):
            values[field.name] = to_config_dict(value)
        elif is_optional(annotation):
            # A plain None would take an override of any type.
            kinds = [kind for kind in concrete_types(annotation) if kind is not type(None)]
            reference = config_dict.placeholder(kinds[0])
            reference.set(value)
            values[field.name] = reference
        else:
            values[field.name] = value
    return values.lock()


def from_config_dict(values: config_dict.ConfigDict) -> Config | Study:
    """The dataclass of a ConfigDict, after overrides."""
    cls = Study if 'variants' in values else Config
    return from_json(cls, values.to_dict())
