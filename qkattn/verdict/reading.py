"""Reads JSON objects into dataclasses: their annotations are the schema."""

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar('T')
# What JSON has for a type; other types stand for themselves.
_TYPES: dict[Any, tuple[type, ...]] = {float: (int, float), Mapping: (dict,)}


def check(record: Any, schema: Mapping[str, Any]) -> None:
    """Raises ValueError that names the field unless `record` is an object of this schema.

    A schema has a type, or the schema of an object, for each field.
    """
    if not isinstance(record, dict):
        raise ValueError(f'expected an object, found {type(record).__name__}')
    for name, hint in schema.items():
        if name not in record:
            raise ValueError(f'field {name!r} is missing')
        kind = dict if isinstance(hint, Mapping) else hint
        if not _fits(record[name], kind):
            raise ValueError(f'field {name!r} is {record[name]!r}, expected {_expected(kind)}')
        if isinstance(hint, Mapping):
            check(record[name], hint)


def read(cls: type[T], record: Any, **given: Any) -> T:
    """A dataclass from an object; the fields in `given` are not read.

    Fields with a default may be absent; lists become tuples. Raises ValueError as `check`.
    """
    check(record, {})
    hints = typing.get_type_hints(cls)
    fields: tuple[dataclasses.Field, ...] = dataclasses.fields(cls)  # type: ignore[arg-type]
    required = {f.name for f in fields if f.default is dataclasses.MISSING}
    names = [f.name for f in fields if f.name in (required | record.keys()) - given.keys()]
    check(record, {name: hints[name] for name in names})
    return cls(**given, **{name: _frozen(record[name]) for name in names})


def parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f'it is not JSON ({error})') from error


def for_each_line(
    path: Path, label: str, problems: list[str], take: Callable[[Any], object]
) -> None:
    """Calls `take` with the value of each line; where that raises ValueError, names the line."""
    if not path.is_file():
        problems.append(f'{label} does not exist.')
        return
    with path.open(encoding='utf-8', errors='replace') as file:
        for number, line in enumerate(file, start=1):
            try:
                if line.strip():
                    take(parse_json(line))
            except ValueError as error:
                problems.append(f'{label}:{number} was left out: {error}.')


def flat(record: Mapping, separator: str = '.', prefix: str = '') -> Iterator[tuple[str, Any]]:
    """(name, value) of every value that is no mapping itself, named 'outer.inner'."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from flat(value, separator, f'{prefix}{name}{separator}')
        else:
            yield f'{prefix}{name}', value


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _fits(value: Any, hint: Any) -> bool:
    kind, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is types.UnionType:
        return any(_fits(value, option) for option in parts)
    if kind is tuple:
        return isinstance(value, list) and all(_fits(item, parts[0]) for item in value)
    return isinstance(value, _TYPES.get(kind, kind)) and not isinstance(value, bool)


def _expected(hint: Any, joint: str = ' or ') -> str:
    kind, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is types.UnionType:
        return joint.join(_expected(option, joint) for option in parts)
    if kind is tuple:
        return f'list of {_expected(parts[0], "/")}'
    if kind is type(None):
        return 'null'
    return joint.join(option.__name__ for option in _TYPES.get(kind, (kind,)))
