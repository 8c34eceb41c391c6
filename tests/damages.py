"""Damages of files: what crashes, disks, editors, other programs and attackers leave behind."""

import copy
import enum
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar('T')
# The quick tests try each 24th case, the slow ones all cases.
EVERY = 24
SOME = [pytest.param(1, marks=pytest.mark.slow, id='all'), pytest.param(EVERY, id='some')]
NESTED = '[' * 100_000


class _Payload:
    """Exits the process where a pickle of it is loaded."""

    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle was executed')",)


PICKLE = pickle.dumps(_Payload())


def _always(content: bytes) -> Callable[[bytes], bytes]:
    """A damage that replaces any content by this content."""
    return lambda _: content


# Lines of JSON that are valid, but not the expected object.
JSON_TEXTS = ('null', '3', '"text"', '[]', '{}', '[null]', '[{}]')
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    'a pickle': _always(PICKLE),
    'empty': _always(b''),
    'half': lambda content: content[: len(content) // 2],
    'without its end': lambda content: content[:-3],
    'garbage': _always(b'\x80\x00garbage' * 7),
    'not UTF-8': lambda content: content.replace(b'"', b'"\xff', 1),
    'nested': _always(NESTED.encode()),
    'twice': lambda content: content + content,
    **{text: _always(f'{text}\n'.encode()) for text in JSON_TEXTS},
}


def some(cases: list[T], name: str, every: int) -> list[T]:
    """Returns the first case, which is a pickle, and every `every`-th of the other cases.

    Where the others start depends on the length of `name`, so that files get different damages.
    """
    others = cases[1:]
    start = len(name) % min(every, EVERY // 2)
    return [*cases[:1], *others[start::every]]


class Special(enum.Enum):
    """What may stand in the place of a regular file."""

    DIRECTORY = enum.auto()
    PIPE = enum.auto()  # nothing writes to it


def replace(path: Path, content: bytes | Special) -> None:
    """Puts content in the place of a file, whatever is there.

    Bytes become a file. Special.DIRECTORY becomes an empty directory, and Special.PIPE a named
    pipe.
    """
    # An earlier call may have left an empty directory or a pipe.
    if path.is_dir():
        path.rmdir()
    elif not path.is_file():
        path.unlink(missing_ok=True)

    # An existing file is overwritten without being deleted first.
    if isinstance(content, bytes):
        path.write_bytes(content)
        return

    path.unlink(missing_ok=True)
    if content is Special.DIRECTORY:
        path.mkdir()
    else:
        os.mkfifo(path)


def content_of(path: Path) -> bytes | Special:
    """Returns what is at the path, in the form that `replace` takes."""
    if path.is_file():
        return path.read_bytes()
    if path.is_dir():
        return Special.DIRECTORY
    return Special.PIPE


def whole(content: bytes) -> Iterator[tuple[str, bytes | Special]]:
    """Yields the damages of a whole file: (name, damaged content)."""
    for name, damage in DAMAGES.items():
        damaged = damage(content)
        if damaged != content:
            yield name, damaged
    yield 'a directory', Special.DIRECTORY
    yield 'a pipe', Special.PIPE


def fields(content: bytes) -> Iterator[tuple[str, bytes]]:
    r"""Yields (name, damaged content), where each field is removed or gets another type.

    For example, the content {"a": {"b": 1}} gives

        ('0: without a', b'{}\n')
        ('0: with another a', b'{"a": 3}\n')
        ('0: without a.b', b'{"a": {}}\n')
        ('0: with another a.b', b'{"a": {"b": "text"}}\n')

    The number 0 is the index of the damaged line. Of JSON Lines, the first and the last line are
    damaged. If a line is a list, its first object is damaged.
    """
    try:
        lines = [json.loads(content)]  # one JSON value
    except ValueError:
        lines = [json.loads(line) for line in content.splitlines()]  # JSON Lines

    last = len(lines) - 1
    for index in sorted({0, last}):
        sound_object = _object_at(lines, index)
        for path in _paths(sound_object):
            field = '.'.join(path)

            without_field = copy.deepcopy(lines)
            _remove(_object_at(without_field, index), path)
            yield f'{index}: without {field}', _encoded(without_field)

            with_other_type = copy.deepcopy(lines)
            _change_type(_object_at(with_other_type, index), path)
            yield f'{index}: with another {field}', _encoded(with_other_type)


def _object_at(lines: list[Any], place: int) -> dict[str, Any]:
    """Returns the object in a line, or the first object if the line is a list."""
    line = lines[place]
    return line[0] if isinstance(line, list) else line


def _paths(value: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns the paths of all fields, then the paths of fields of inner objects."""
    outer: list[tuple[str, ...]] = [(name,) for name in value]
    inner: list[tuple[str, ...]] = []
    for name, content in value.items():
        if isinstance(content, dict):
            inner += [(name, key) for key in content]
    return outer + inner


def _owner(value: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Returns the object that has the last field of the path."""
    for name in path[:-1]:
        value = value[name]
    return value


def _remove(value: dict[str, Any], path: tuple[str, ...]) -> None:
    del _owner(value, path)[path[-1]]


def _change_type(value: dict[str, Any], path: tuple[str, ...]) -> None:
    """Gives a field another type, and moves it to the end of its object."""
    owner = _owner(value, path)
    owner[path[-1]] = _other_type(owner.pop(path[-1]))


def _encoded(lines: list[Any]) -> bytes:
    return ''.join(json.dumps(line) + '\n' for line in lines).encode()


def _other_type(value: Any) -> Any:
    """Returns 3 for a text, a list or an object, and 'text' for any other value."""
    return 3 if isinstance(value, str | list | dict) else 'text'
