"""Damages of files: what crashes, disks, editors, other programs and attackers leave behind."""

import copy
import enum
import functools
import json
import operator
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar('T')
EVERY = 24  # cases, of which one is tried in the quick tests, from one of the first twelve
SOME = [pytest.param(1, marks=pytest.mark.slow, id='all'), pytest.param(EVERY, id='some')]
NESTED = '[' * 100_000


class _Payload:
    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle was executed')",)


PICKLE = pickle.dumps(_Payload())
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    'a pickle': lambda content: PICKLE,
    'empty': lambda content: b'',
    'half': lambda content: content[: len(content) // 2],
    'without its end': lambda content: content[:-3],
    'garbage': lambda content: b'\x80\x00garbage' * 7,
    'not UTF-8': lambda content: content.replace(b'"', b'"\xff', 1),
    'nested': lambda content: NESTED.encode(),
    'twice': lambda content: content + content,
    **{
        text: lambda content, text=text: f'{text}\n'.encode()
        for text in ('null', '3', '"text"', '[]', '{}', '[null]', '[{}]')
    },
}


def some(cases: list[T], name: str, every: int) -> list[T]:
    """The first case, a pickle, and each `every`-th other, from one that differs by name."""
    return [*cases[:1], *cases[1:][len(name) % min(every, EVERY // 2) :: every]]


class Special(enum.Enum):
    """What may be in the place of a file."""

    DIRECTORY = enum.auto()
    PIPE = enum.auto()  # without anybody who writes to it


def replace(path: Path, content: bytes | Special) -> None:
    """Writes the content, or puts something else in the place of the file."""
    if path.is_dir():
        path.rmdir()
    elif not path.is_file():
        path.unlink(missing_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
        return
    path.unlink(missing_ok=True)
    if content is Special.DIRECTORY:
        path.mkdir()
    else:
        os.mkfifo(path)


def content_of(path: Path) -> bytes | Special:
    """The content that `replace` takes to make the path what it is."""
    if path.is_file():
        return path.read_bytes()
    return Special.DIRECTORY if path.is_dir() else Special.PIPE


def whole(content: bytes) -> Iterator[tuple[str, bytes | Special]]:
    """(name, damaged content) of a file, or what is in its place."""
    for name, damage in DAMAGES.items():
        if (damaged := damage(content)) != content:
            yield name, damaged
    yield 'a directory', Special.DIRECTORY
    yield 'a pipe', Special.PIPE


def fields(content: bytes) -> Iterator[tuple[str, bytes]]:
    """(name, content) with each field of the first object left out, or of another type.

    JSON Lines are damaged in their first and last lines.
    """
    try:
        values = [json.loads(content)]
    except ValueError:
        values = [json.loads(line) for line in content.splitlines()]
    for place in sorted({0, len(values) - 1}):
        for path in _paths(_object_at(values, place)):
            for how in ('without', 'with another'):
                damaged = copy.deepcopy(values)
                *parents, name = path
                owner = functools.reduce(operator.getitem, parents, _object_at(damaged, place))
                other = _other_type(owner.pop(name))
                owner |= {name: other} if how == 'with another' else {}
                text = ''.join(json.dumps(line) + '\n' for line in damaged)
                yield f'{place}: {how} {".".join(path)}', text.encode()


def _object_at(values: list[Any], place: int) -> dict[str, Any]:
    return values[place][0] if isinstance(values[place], list) else values[place]


def _paths(value: dict[str, Any]) -> list[tuple[str, ...]]:
    """Every field, and those of the objects in it."""
    inner = [(name, key) for name, rest in value.items() if isinstance(rest, dict) for key in rest]
    return [*((name,) for name in value), *inner]


def _other_type(value: Any) -> Any:
    """A text for a number, a number for a text, a list or an object."""
    return 3 if isinstance(value, str | list | dict) else 'text'
