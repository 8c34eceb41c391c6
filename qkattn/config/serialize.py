"""Configs as JSON, as hashes, and as the ConfigDict that the command line overrides.

Adding a field must not change the hashes of existing configs, and changing the default of a field
must not change the meaning of stored configs. Therefore schema.json keeps the default that each
field had when it was added, as {number: {class: {field: default}}}. Fields under the number 1 are
always stored and hashed. Other fields are stored and hashed only if they differ from that default.

Entries of schema.json are never edited. New fields go under the newest or a new number.
"""

import dataclasses
import functools
import hashlib
import json
import numbers
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
# {field: {value: stored value}} for values that are stored in another form.
STORED_AS: dict[str, dict[str, Any]] = {'remat': {'none': False, 'full': True}}
# Settings and sections of the machine, which do not change what a run computes.
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
    """Returns the values of fields that a stored config lacks, by field.

    The value is the default in schema.json. Fields that are not in schema.json have the default of
    the class. The value of a section is {}, which `from_json` completes.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        is_section = dataclasses.is_dataclass(field.default)
        values[field.name] = {} if is_section else field.default

    for number in SCHEMAS:  # '1', '2', ...
        for field_name, default in fields_added_by_schema(number, cls).items():
            # schema.json also has fields that were removed from the class.
            if field_name in values:
                values[field_name] = default
    return _tuples_to_lists(values)


def fields_added_by_schema(number: str, cls: Any) -> dict[str, Any]:
    """Returns {field: default} of a class under a number of schema.json, with inherited fields."""
    fields: dict[str, Any] = {}
    for base_class in reversed(cls.__mro__):
        fields |= SCHEMAS[number].get(base_class.__name__, {})
    return fields


def to_json(config: Any) -> dict[str, Any]:
    """Returns a config, or one of its sections, as JSON values.

    Fields under the number 1 of schema.json are always stored. A field that was added later is left
    out if it has its default value, so that the hashes of existing configs do not change.
    """
    cls = typing.cast(Any, type(config))
    always_stored = fields_added_by_schema('1', cls)
    default_by_field = defaults(cls)
    stored_values = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            value = to_json(value)
        elif isinstance(value, str):
            # For example, remat='none' is stored as False.
            stored_value_of = STORED_AS.get(field.name, {})
            value = stored_value_of.get(value, value)
        value = _tuples_to_lists(value)

        has_default_value = value == default_by_field[field.name]
        if field.name in always_stored or not has_default_value:
            stored_values[field.name] = value
    return stored_values


def from_json(cls: Any, values: Mapping[str, Any], prefix: str = '') -> Any:
    """Builds a config, or one of its sections, from JSON values; the inverse of `to_json`.

    Args:
        cls: The dataclass to build, such as Config.
        values: The JSON values, by field. Missing fields get their `defaults`.
        prefix: The prefix of field names in error messages, such as 'model.' for the section model.

    Raises:
        UnknownFieldError: The class does not have one of the fields.
        ConfigError: A section is not a mapping.
    """
    if not isinstance(values, Mapping):
        section_name = prefix.rstrip('.') or 'config'
        raise ConfigError(f'{section_name}={values!r} must be an object of fields')
    annotations = typing.get_type_hints(cls)
    unknown_fields = sorted(set(values) - set(annotations))
    if unknown_fields:
        unknown = unknown_fields[0]
        raise UnknownFieldError(
            f'unknown field {prefix}{unknown}={values[unknown]!r}; use the newer version of '
            f'qkattn that wrote it, or one of {", ".join(annotations)}'
        )

    fields: dict[str, Any] = {}
    complete_values = {**defaults(cls), **values}
    for field, value in complete_values.items():
        annotation = annotations[field]
        is_section = dataclasses.is_dataclass(annotation)
        is_tuple = typing.get_origin(annotation) is tuple
        if is_section:
            fields[field] = from_json(annotation, value, f'{prefix}{field}.')
        elif is_tuple and isinstance(value, list):
            fields[field] = tuple(value)
        else:
            fields[field] = _from_stored_value(field, value)
    return cls(**fields)


def _from_stored_value(field: str, stored_value: Any) -> Any:
    """Inverts STORED_AS: for example, returns 'none' for remat=False."""
    for value, stored in STORED_AS.get(field, {}).items():
        if stored_value is stored:
            return value
    return stored_value


def _tuples_to_lists(value: Any) -> Any:
    """Returns a value as it comes back from JSON, with lists for tuples."""
    return json.loads(json.dumps(value))


def fingerprint(config: Config) -> str:
    """Returns a hash of a config, without settings of the machine (OF_MACHINE)."""
    return fingerprint_of(to_json(config))


def fingerprint_of(values: Mapping[str, Any]) -> str:
    """Returns the hash of a config as JSON, without settings of the machine (OF_MACHINE)."""
    hashed_values: dict[str, Any] = _tuples_to_lists(values)  # a deep copy
    for name in OF_MACHINE:  # such as 'data.data_dir', or 'mesh' for a whole section
        section, _, field = name.partition('.')
        if not field:
            hashed_values.pop(section, None)
        elif isinstance(hashed_values.get(section), dict):
            hashed_values[section].pop(field, None)
    text = json.dumps(hashed_values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def with_machine_of(config: Any, other: Any) -> Any:
    """Returns `config` with the settings of the machine (OF_MACHINE) of `other`."""
    for name in OF_MACHINE:  # such as 'data.data_dir', or 'mesh' for a whole section
        section_name, _, field = name.partition('.')
        section = getattr(config, section_name)
        other_section = getattr(other, section_name)
        if field:
            other_value = getattr(other_section, field)
            new_section = dataclasses.replace(section, **{field: other_value})
        else:
            new_section = other_section
        config = dataclasses.replace(config, **{section_name: new_section})
    return config


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = '') -> list[str]:
    """Returns a line for each field that differs, such as 'model.d_model: 128 -> 256'.

    Args:
        old: A config as JSON.
        new: Another config as JSON.
        prefix: The prefix of field names, such as 'model.' for the section model.
    """
    lines = []
    all_fields = {**old, **new}
    for field in all_fields:
        old_value = old.get(field)
        new_value = new.get(field)
        if isinstance(old_value, Mapping) and isinstance(new_value, Mapping):
            lines += differences(old_value, new_value, f'{prefix}{field}.')
            continue
        old_text = json.dumps(old_value) if field in old else 'absent'
        new_text = json.dumps(new_value) if field in new else 'absent'
        if old_text != new_text:
            lines.append(f'{prefix}{field}: {old_text} -> {new_text}')
    return lines


def to_config_dict(config: Any) -> config_dict.ConfigDict:
    """Converts a config to a locked ConfigDict, whose fields the command line can override."""
    values = config_dict.ConfigDict()
    annotations = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        annotation = annotations[field.name]
        if dataclasses.is_dataclass(value):
            values[field.name] = to_config_dict(value)
        elif is_optional(annotation):
            # A placeholder makes ConfigDict check the type of overrides even if the value is None.
            value_types = concrete_types(annotation)  # such as [int, NoneType] for `int | None`
            value_types.remove(type(None))
            placeholder = config_dict.placeholder(value_types[0])
            placeholder.set(value)
            values[field.name] = placeholder
        elif annotation is float and isinstance(value, int):
            # A file may say dropout=0, and a flag 0.1. The hashes of 0 and 0.0 differ, so 0 stays.
            values[field.name] = config_dict.FieldReference(value, field_type=numbers.Real)
        else:
            values[field.name] = value
    return values.lock()


def from_config_dict(values: config_dict.ConfigDict) -> Config | Study:
    """Builds the Study or Config from a ConfigDict."""
    cls = Study if 'variants' in values else Config
    return from_json(cls, values.to_dict())
