"""Configs as JSON, as hashes, and as the ConfigDict that the command line overrides.

schema.json is {number: {class: {field: its default when it was introduced}}}. Fields of schema 1
are always stored and hashed. Later fields are only stored and hashed if they differ from their
default in schema.json. So adding a field changes no hash. And a stored config without the field
keeps its meaning even if the default of the dataclass changes.

Entries of schema.json are never edited. A field is added under the newest number or the next one.
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
# {field: {value: its stored form}} for values that are not stored as they are.
STORED_AS: dict[str, dict[str, Any]] = {'remat': {'none': False, 'full': True}}
# Settings of the machine, which do not change what a run computes. Workers of a study may differ
# in them. Each is a field, 'section.field', or a whole section.
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
    """Returns {field: the value that it has if a stored config lacks the field}.

    A config may be older than a field. It then has the value that was the default when the field
    was added, which schema.json keeps, even if the default of the class is another one today. A
    section has {}: `from_json` then gives each field of the section its own default.
    """
    # The defaults of the class.
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        is_section = dataclasses.is_dataclass(field.default)
        values[field.name] = {} if is_section else field.default

    # The defaults in schema.json come before them. It may also have fields that were removed.
    for number in SCHEMAS:
        for name, default in fields_added_by_schema(number, cls).items():
            is_field_of_class = name in values
            if is_field_of_class:
                values[name] = default
    return _tuples_to_lists(values)


def fields_added_by_schema(number: str, cls: Any) -> dict[str, Any]:
    """Returns {field: default} for the fields that schema `number` added to a class of settings.

    Fields of base classes are included. The default is the one at that time.
    """
    fields: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        fields |= SCHEMAS[number].get(base.__name__, {})
    return fields


def to_json(config: Any) -> dict[str, Any]:
    """Returns a config, or one of its sections, as plain JSON values: the form that is stored.

    Fields of schema 1 are always stored. A field that was added later is only stored if it differs
    from its default. So adding a field does not change the hashes of existing configs.
    """
    cls = typing.cast(Any, type(config))
    always_stored = fields_added_by_schema('1', cls)
    values = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            value = to_json(value)
        elif isinstance(value, str):
            # remat='none' is stored as False; most texts are stored as they are.
            stored_forms = STORED_AS.get(field.name, {})
            value = stored_forms.get(value, value)
        value = _tuples_to_lists(value)

        is_default = value == defaults(cls)[field.name]
        if field.name in always_stored or not is_default:
            values[field.name] = value
    return values


def from_json(cls: Any, values: Mapping[str, Any], prefix: str = '') -> Any:
    """Builds a config, or one of its sections, from the JSON values that `to_json` returns.

    A field that is missing gets its value from `defaults`.

    Args:
      cls: a class of settings, such as Config.
      values: {field: value}, with a mapping for each section.
      prefix: the beginning of names of fields in errors, 'model.' for the section model.

    Raises UnknownFieldError for an unknown field, ConfigError if a section is not a mapping.
    """
    if not isinstance(values, Mapping):
        name = prefix.rstrip('.') or 'config'
        raise ConfigError(f'{name}={values!r} must be an object of fields')
    annotations = typing.get_type_hints(cls)
    unknown_names = sorted(set(values) - set(annotations))
    if unknown_names:
        unknown = unknown_names[0]
        raise UnknownFieldError(
            f'unknown field {prefix}{unknown}={values[unknown]!r}; use the newer version of '
            f'qkattn that wrote it, or one of {", ".join(annotations)}'
        )

    fields: dict[str, Any] = {}
    complete_values = {**defaults(cls), **values}
    for name, value in complete_values.items():
        annotation = annotations[name]
        is_section = dataclasses.is_dataclass(annotation)
        is_tuple = typing.get_origin(annotation) is tuple
        if is_section:
            fields[name] = from_json(annotation, value, f'{prefix}{name}.')
        elif is_tuple and isinstance(value, list):  # JSON has lists for tuples
            fields[name] = tuple(value)
        else:
            fields[name] = _from_stored_form(name, value)
    return cls(**fields)


def _from_stored_form(name: str, value: Any) -> Any:
    """Returns the value of a field from its stored form: 'none' for remat, stored as False."""
    for original, stored in STORED_AS.get(name, {}).items():
        if value is stored:
            return original
    return value


def _tuples_to_lists(value: Any) -> Any:
    """Returns a value as JSON gives it back: tuples become lists."""
    return json.loads(json.dumps(value))


def fingerprint(config: Config) -> str:
    """Returns a hash of what a run computes: of all fields of `to_json` but OF_MACHINE."""
    return fingerprint_of(to_json(config))


def fingerprint_of(values: Mapping[str, Any]) -> str:
    """Returns the fingerprint of a stored config: a hash of its fields.

    Fields that the config lacks do not count. Nor do the settings OF_MACHINE, such as the mesh,
    because they do not change what a run computes.
    """
    hashed_values: dict[str, Any] = _tuples_to_lists(values)  # a copy, which may be changed
    for name in OF_MACHINE:
        section, _, field = name.partition('.')  # 'data.data_dir', or 'mesh' without a field
        if not field:
            hashed_values.pop(section, None)
        elif isinstance(hashed_values.get(section), dict):
            hashed_values[section].pop(field, None)
    text = json.dumps(hashed_values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def with_machine_of(config: Any, other: Any) -> Any:
    """Returns `config` with the settings OF_MACHINE of `other`, which do not change results."""
    for name in OF_MACHINE:
        section_name, _, field = name.partition('.')  # 'data.data_dir', or 'mesh' without a field
        section = getattr(config, section_name)
        section_of_other = getattr(other, section_name)
        if field:
            changes = {field: getattr(section_of_other, field)}
            section = dataclasses.replace(section, **changes)
        else:
            section = section_of_other
        config = dataclasses.replace(config, **{section_name: section})
    return config


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = '') -> list[str]:
    """Returns a line 'section.field: old -> new' for every field that differs.

    Values are written as JSON. A field that is missing on one side is 'absent' there. `prefix` is
    the beginning of every name, 'section.' inside a section.
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
    """Converts a config to a locked ConfigDict, which the command line overrides."""
    values = config_dict.ConfigDict()
    annotations = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        annotation = annotations[field.name]
        if dataclasses.is_dataclass(value):
            values[field.name] = to_config_dict(value)
        elif is_optional(annotation):
            # ConfigDict refuses an override of another type than the value, but accepts any type in
            # place of None. A placeholder has a type even if it holds None.
            value_types = concrete_types(annotation)  # [int, NoneType] for `int | None`
            value_types.remove(type(None))
            placeholder = config_dict.placeholder(value_types[0])
            placeholder.set(value)
            values[field.name] = placeholder
        else:
            values[field.name] = value
    return values.lock()


def from_config_dict(values: config_dict.ConfigDict) -> Config | Study:
    """Builds the Study or Config of a ConfigDict, after overrides."""
    cls = Study if 'variants' in values else Config
    return from_json(cls, values.to_dict())
