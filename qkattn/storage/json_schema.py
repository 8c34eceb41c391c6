"""What a file that is read back must hold: the fields of its objects and their types.

A schema is a type, a union of types, `tuple[T, ...]` for a list; a mapping of field to schema for
an object; or a list of one schema for a list of such values that is not empty.
"""

import dataclasses
import functools
import math
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar('T')
# What JSON has for a type; other types stand for themselves.
_TYPES: dict[Any, tuple[type, ...]] = {float: (int, float), Mapping: (dict,)}
_MAX_SHOWN = 80  # characters of a value in a message


def check(value: Any, schema: Any) -> None:
    """Raises ValueError that names the field unless `value` is of this schema.

    An object may have other fields, too.
    """
    if isinstance(schema, list):
        if not isinstance(value, list) or not value:
            raise ValueError(f'expected a list that is not empty, found {_found(value)}')
        for number, item in enumerate(value):
            try:
                check(item, schema[0])
            except ValueError as error:
                raise ValueError(f'entry {number}: {error}') from error
        return
    if not isinstance(value, dict):
        raise ValueError(f'expected an object, found {_found(value)}')
    for name, hint in schema.items():
        if name not in value:
            raise ValueError(f'field {name!r} is missing')
        kind = type(hint) if isinstance(hint, dict | list) else hint
        if not _fits(kind)(value[name]):
            raise ValueError(f'field {name!r} is {_shown(value[name])}, expected {_expected(kind)}')
        if isinstance(hint, dict | list):
            check(value[name], hint)


def read(cls: type[T], record: Any, **given: Any) -> T:
    """A dataclass from an object, whose annotations are the schema; `given` is not read.

    Fields with a default may be absent; lists become tuples. Raises ValueError as `check`.
    """
    check(record, {})
    hints = typing.get_type_hints(cls)
    fields: tuple[dataclasses.Field, ...] = dataclasses.fields(cls)  # type: ignore[arg-type]
    required = {f.name for f in fields if f.default is dataclasses.MISSING}
    names = [f.name for f in fields if f.name in (required | record.keys()) - given.keys()]
    check(record, {name: hints[name] for name in names})
    return cls(**given, **{name: _frozen(record[name]) for name in names})


def flat(record: Mapping, separator: str = '.', prefix: str = '') -> Iterator[tuple[str, Any]]:
    """(name, value) of every value that is no mapping itself, named 'outer.inner'."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from flat(value, separator, f'{prefix}{name}{separator}')
        else:
            yield f'{prefix}{name}', value


def _shown(value: Any) -> str:
    """The value as a message shows it: its beginning where it is long."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f'{text[:_MAX_SHOWN]}...'


def _found(value: Any) -> str:
    return 'an empty list' if value == [] else type(value).__name__


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


@functools.cache
def _fits(hint: Any) -> Callable[[Any], bool]:
    """Whether values fit a hint, which is looked into once: files hold millions of values."""
    kind, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is types.UnionType:
        options = [_fits(option) for option in parts]
        return lambda value: any(fits(value) for fits in options)
    if kind is typing.Literal:
        return lambda value: value in parts
    if kind is tuple:
        item_fits = _fits(parts[0])
        return lambda value: isinstance(value, list) and all(map(item_fits, value))
    if kind is Mapping and parts and parts[1] is not Any:
        item_fits = _fits(parts[1])
        return lambda value: isinstance(value, dict) and all(map(item_fits, value.values()))
    allowed = _TYPES.get(kind, (kind,))

    def fits(value: Any) -> bool:
        if isinstance(value, bool):
            return kind in (bool, object)
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            return False  # digits without end, which nothing can compute with
        if isinstance(value, float) and not math.isfinite(value):
            return False  # strict JSON has no such numbers; 1e999 is read as one
        return isinstance(value, allowed)

    return fits


def _expected(hint: Any, joint: str = ' or ') -> str:
    kind, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is types.UnionType:
        return joint.join(_expected(option, joint) for option in parts)
    if kind is typing.Literal:
        return joint.join(map(repr, parts))
    if kind is tuple:
        return f'list of {_expected(parts[0], "/")}'
    if kind is Mapping and parts and parts[1] is not Any:
        return f'object of {_expected(parts[1], "/")}'
    if kind is type(None):
        return 'null'
    return joint.join(option.__name__ for option in _TYPES.get(kind, (kind,)))
