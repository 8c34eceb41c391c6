"""Damages of files: what crashes, disks, editors and other programs leave behind."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar('T')
EVERY = 24  # cases, of which one is tried in the quick tests, from one of the first twelve
SOME = [pytest.param(1, marks=pytest.mark.slow, id='all'), pytest.param(EVERY, id='some')]
NESTED = '[' * 100_000
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    'empty': lambda content: b'',
    'half': lambda content: content[: len(content) // 2],
    'without its end': lambda content: content[:-3],
    'garbage': lambda content: b'\x80\x00garbage' * 7,
    'not UTF-8': lambda content: content.replace(b'"', b'"\xff', 1),
    'null': lambda content: b'null\n',
    'a number': lambda content: b'3\n',
    'a text': lambda content: b'"text"\n',
    'an empty list': lambda content: b'[]\n',
    'an empty object': lambda content: b'{}\n',
    'a list of null': lambda content: b'[null]\n',
    'a list of objects': lambda content: b'[{}]\n',
    'nested': lambda content: NESTED.encode(),
    'twice': lambda content: content + content,
}


def some(cases: list[T], name: str, every: int) -> list[T]:
    """Each `every`-th case, from one that differs by name."""
    return cases[len(name) % min(every, EVERY // 2) :: every]


def replace(path: Path, content: bytes | None) -> None:
    """Writes the content; None is a directory in the place of the file."""
    if path.is_dir():
        path.rmdir()
    if content is None:
        path.unlink(missing_ok=True)
        path.mkdir()
    else:
        path.write_bytes(content)


def whole(content: bytes) -> Iterator[tuple[str, bytes | None]]:
    """(name, damaged content) of a file, None for a directory in its place."""
    for name, damage in DAMAGES.items():
        if (damaged := damage(content)) != content:
            yield name, damaged
    yield 'a directory', None


def fields(content: bytes) -> Iterator[tuple[str, bytes]]:
    """(name, content) with each field of the first object left out, or of another type.

    JSON Lines are damaged in their first and last lines.
    """
    try:
        values, lines = [json.loads(content)], False
    except ValueError:
        values, lines = [json.loads(line) for line in content.splitlines()], True
    for place in dict.fromkeys((0, len(values) - 1)) if lines else (0,):
        value = values[place]
        for path in _paths(value[0] if isinstance(value, list) else value):
            for name, other in (('without', None), ('with another', _other_type)):
                changed = json.loads(json.dumps(value))
                inner: Any = changed[0] if isinstance(value, list) else changed
                for key in path[:-1]:
                    inner = inner[key]
                if other is None:
                    del inner[path[-1]]
                else:
                    inner[path[-1]] = other(inner[path[-1]])
                texts = [json.dumps(v) for v in (*values[:place], changed, *values[place + 1 :])]
                text = '\n'.join(texts) + '\n'
                yield f'{place}: {name} {".".join(path)}', text.encode()


def _paths(value: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Every field, and those of the objects in it."""
    for name, inner in value.items():
        yield (name,)
        if isinstance(inner, dict):
            yield from ((name, rest) for rest in inner)


def _other_type(value: Any) -> Any:
    """A text for a number, a number beyond any for a text, a number for a list or an object."""
    if isinstance(value, str):
        return 10**400
    return 3 if isinstance(value, list | dict) else 'text'
