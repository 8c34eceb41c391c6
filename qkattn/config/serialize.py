"""Configs as JSON, as hashes, and as the ConfigDict that the command line overrides."""

import dataclasses
import hashlib
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from ml_collections import config_dict

from qkattn.config import schema
from qkattn.config.run_config import Config
from qkattn.config.study_config import Study
from qkattn.errors import ConfigError, UnknownFieldError

# Settings that do not change what a run computes, of which each worker of a study may have its own:
# devices, where the data lies, whose contents a run checks by fingerprints of their own, where the
# logs go, and what computes attention.
OF_MACHINE = ('mesh', 'data.data_dir', 'data.manual_dir', 'train.sinks', 'model.kernel')


def to_json(config: Any) -> dict[str, Any]:
    """The config as plain JSON values, without later fields at their default (`schema`)."""
    values, cls = {}, typing.cast(Any, type(config))
    always, defaults = schema.always_stored(cls), schema.defaults(cls)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        nested = dataclasses.is_dataclass(value)
        plain = schema.stored(field.name, value)
        value = to_json(value) if nested else json.loads(json.dumps(plain))
        if field.name in always or value != defaults[field.name]:
            values[field.name] = value
    return values


def from_json(cls: Any, values: Mapping[str, Any], where: str = '') -> Any:
    """Builds `cls` from nested values; fields that they lack have the default of their schema.

    Raises:
      UnknownFieldError: an unknown field.
      ConfigError: a section that is not an object.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f'{where.rstrip(".") or "config"}={values!r} must be an object of fields')
    types_by_field = typing.get_type_hints(cls)
    if unknown := sorted(set(values) - set(types_by_field)):
        raise UnknownFieldError(
            f'unknown field {where}{unknown[0]}={values[unknown[0]]!r}; use the newer version of '
            f'qkattn that wrote it, or one of {", ".join(types_by_field)}'
        )
    built = {}
    for name, value in {**schema.defaults(cls), **values}.items():
        expected, value = types_by_field[name], schema.loaded(name, value)
        if dataclasses.is_dataclass(expected):
            built[name] = from_json(expected, value, f'{where}{name}.')
        elif typing.get_origin(expected) is tuple and isinstance(value, (list, tuple)):
            built[name] = tuple(value)
        else:
            built[name] = value
    return cls(**built)


def fingerprint(config: Config) -> str:
    """Hash of what a run computes: of every field but OF_MACHINE, in the form of `to_json`."""
    return fingerprint_of(to_json(config))


def fingerprint_of(values: Mapping[str, Any]) -> str:
    """The fingerprint of a config as it is stored; `fingerprint` gave it when it was written.

    That of the same config may be another one today, where the config lacks fields of schema 1.
    """
    values = json.loads(json.dumps(values))
    for name in OF_MACHINE:
        section, _, field = name.rpartition('.')
        of = values.get(section) if section else values
        if isinstance(of, dict):
            of.pop(field, None)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def with_machine_of(config: Any, other: Any) -> Any:
    """The config with the settings OF_MACHINE of another one."""
    for name in OF_MACHINE:
        section, _, field = name.rpartition('.')
        old, new = (getattr(c, section) if section else c for c in (config, other))
        changed = dataclasses.replace(old, **{field: getattr(new, field)})
        config = dataclasses.replace(config, **{section: changed}) if section else changed
    return config


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = '') -> list[str]:
    """'section.field: old -> new' in JSON for every field that differs, 'absent' where it is."""
    found = []
    for name in {**old, **new}:
        of_old, of_new = old.get(name), new.get(name)
        if isinstance(of_old, Mapping) and isinstance(of_new, Mapping):
            found += differences(of_old, of_new, f'{prefix}{name}.')
            continue
        texts = [json.dumps(of[name]) if name in of else 'absent' for of in (old, new)]
        if texts[0] != texts[1]:
            found.append(f'{prefix}{name}: {texts[0]} -> {texts[1]}')
    return found


def to_config_dict(config: Any) -> config_dict.ConfigDict:
    """The config as a locked ConfigDict whose optional fields keep their type for overrides."""
    out = config_dict.ConfigDict()
    types_by_field = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            value = to_config_dict(value)
        elif type(None) in (options := concrete_types(types_by_field[field.name])):
            concrete = next(o for o in options if o is not type(None))
            reference = config_dict.placeholder(concrete)
            reference.set(value)
            value = reference
        out[field.name] = value
    return out.lock()


def from_config_dict(values: config_dict.ConfigDict) -> Config | Study:
    """Back to the dataclass, after overrides."""
    cls = Study if 'variants' in values else Config
    return from_json(cls, values.to_dict())


def concrete_types(annotation: Any) -> list[type]:
    """The concrete types that a field may hold; a Literal counts as the type of its values."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return [o for arm in typing.get_args(annotation) for o in concrete_types(arm)]
    if typing.get_origin(annotation) is Literal:
        return [type(typing.get_args(annotation)[0])]
    return [typing.get_origin(annotation) or annotation]
