"""Reads JSON objects into dataclasses: their annotations are the schema."""

import dataclasses
import json
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar('T')
# A field's type, or the schema of an object: types by field.
Schema = Mapping[str, Any]
# What JSON has for a type; other types stand for themselves.
_TYPES: dict[Any, tuple[type, ...]] = {float: (int, float), dict: (dict,), Mapping: (dict,)}


def check(record: Any, schema: Schema) -> None:
    """Raises ValueError that names the field unless `record` is an object of this schema."""
    if not isinstance(record, dict):
        raise ValueError(f'expected an object, found {type(record).__name__}')
    for name, hint in schema.items():
        if name not in record:
            raise ValueError(f'field {name!r} is missing')
        of_object = isinstance(hint, Mapping)
        if not _fits(record[name], dict if of_object else hint):
            expected = ' or '.join(_expected(dict if of_object else hint))
            raise ValueError(f'field {name!r} is {record[name]!r}, expected {expected}')
        if of_object:
            check(record[name], hint)


def read(cls: type[T], record: Any, **given: Any) -> T:
    """A dataclass from an object; the fields in `given` are not read.

    Fields with a default may be absent; lists become tuples. Raises ValueError as `check`.
    """
    check(record, {})
    hints = typing.get_type_hints(cls)
    fields: tuple[dataclasses.Field, ...] = dataclasses.fields(cls)  # type: ignore[arg-type]
    names = [
        field.name
        for field in fields
        if field.name not in given and (field.name in record or _is_required(field))
    ]
    check(record, {name: hints[name] for name in names})
    return cls(**given, **{name: _frozen(record[name]) for name in names})


def json_lines(path: Path, label: str, problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Yields ('file:line', object); lines that are not JSON become problems."""
    with path.open(encoding='utf-8', errors='replace') as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield f'{label}:{number}', json.loads(line)
            except ValueError as error:
                problems.append(f'{label}:{number} is not JSON ({error}) and was left out.')


def flat(record: Mapping, separator: str = '.', prefix: str = '') -> Iterator[tuple[str, Any]]:
    """(name, value) of every value that is no mapping itself, named 'outer.inner'."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from flat(value, separator, f'{prefix}{name}{separator}')
        else:
            yield f'{prefix}{name}', value


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _options(hint: Any) -> tuple:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    return any(_is_of(value, option) for option in _options(hint))


def _is_of(value: Any, hint: Any) -> bool:
    kind = typing.get_origin(hint) or hint
    if kind is tuple:
        item = typing.get_args(hint)[0]
        return isinstance(value, list) and all(_fits(element, item) for element in value)
    return isinstance(value, _TYPES.get(kind, kind)) and not isinstance(value, bool)


def _expected(hint: Any) -> Iterator[str]:
    for option in _options(hint):
        kind = typing.get_origin(option) or option
        if kind is tuple:
            yield f'list of {"/".join(_expected(typing.get_args(option)[0]))}'
        elif kind is type(None):
            yield 'null'
        else:
            yield from (t.__name__ for t in _TYPES.get(kind, (kind,)))
