"""The numbered schema of stored configs: the defaults that fields had when they were introduced.

schema.json has {number: {class: {field: default}}}. The fields of schema 1 are stored and hashed
always; those of a later number only where they differ from their default there. So a field that is
added with a default changes no hash, no run directory and no plan, and a stored config without it
keeps its meaning when the default of the dataclass changes. A number is never edited: a field is
added under the newest one, or the next. STORED_AS has the values that are written otherwise.
"""

import dataclasses
import functools
import json
import typing
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name('schema.json')
SCHEMAS: dict[str, dict[str, dict[str, Any]]] = json.loads(FILE.read_text(encoding='utf-8'))

# {field: {value: as it is stored}}, of values that schema 1 wrote in another form.
STORED_AS: dict[str, dict[str, Any]] = {'remat': {'none': False, 'full': True}}


@functools.cache
def defaults(cls: Any) -> dict[str, Any]:
    """The default with which each field was introduced, as JSON; {} for a section.

    A field that is in no schema yet has that of the dataclass.
    """
    fields = dataclasses.fields(cls)
    own: dict[str, Any] = {
        f.name: {} if dataclasses.is_dataclass(f.default) else f.default for f in fields
    }
    frozen = {n: v for number in SCHEMAS for n, v in _fields(number, cls).items() if n in own}
    return json.loads(json.dumps(own | frozen))


def always_stored(cls: Any) -> set[str]:
    """The fields of schema 1."""
    return set(_fields('1', cls))


def classes(cls: Any) -> list[Any]:
    """The dataclass and those of its sections."""
    types = typing.get_type_hints(cls).values()
    return [cls, *(c for t in types if dataclasses.is_dataclass(t) for c in classes(t))]


def stored(field: str, value: Any) -> Any:
    """A field's value as it is stored."""
    return STORED_AS.get(field, {}).get(value, value) if isinstance(value, str) else value


def loaded(field: str, value: Any) -> Any:
    """The inverse of `stored`."""
    return next((v for v, s in STORED_AS.get(field, {}).items() if s is value), value)


def _fields(number: str, cls: Any) -> dict[str, Any]:
    """The fields that a schema introduced, those of base classes included."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        found |= SCHEMAS[number].get(base.__name__, {})
    return found
