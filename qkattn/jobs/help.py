"""--help of a script: its flags, and every field of its config by section.

A field has its type, what it may hold, its default and its description, as `setting` declares them.
"""

import dataclasses
import difflib
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from absl import app, flags

from qkattn.config import concrete_types
from qkattn.config.setting import Setting, settings
from qkattn.jobs.readers import ending_unread

WIDTH = 100


class HelpFlag(app.HelpFlag):
    """--help and -h: prints `text` and ends the process with code 0."""

    SHORT_NAME = 'h'

    def __init__(self, doc: str, kind: type | None):
        super().__init__()
        self.allow_override = True
        self._doc, self._kind = doc, kind

    def parse(self, argument: Any) -> None:
        if self.parser.parse(argument):
            with ending_unread():
                print(text(self._doc, self._kind))
            sys.exit(0)


def text(doc: str, kind: type | None) -> str:
    """The help of the running script.

    Args:
      doc: of the script.
      kind: of its config; None without one.
    """
    lines = [*inspect.cleandoc(doc).splitlines(), '', 'flags:']
    for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0]):
        lines += _entry(f'--{flag.name}: {flag.flag_type()}; default {flag.default!r}', flag.help)
    return '\n'.join([*lines, *(_sections(kind) if kind else ())])


def _sections(kind: Any, prefix: str = 'config.') -> Iterator[str]:
    """The fields of a class of settings, then those of its sections."""
    sections = {n: k for n, k in typing.get_type_hints(kind).items() if dataclasses.is_dataclass(k)}
    own = [s for name, s in settings(kind).items() if '.' not in name]
    if own:
        heading = f'{prefix[:-1]}: {inspect.getdoc(kind)}'.splitlines()[0]
        yield from ('', *textwrap.wrap(heading, WIDTH))
    for setting in own:
        valid = _valid(setting)
        yield from _entry(
            f'--{prefix}{setting.name}: {_type(setting.kind)}{", " * bool(valid)}{valid}; '
            f'default {setting.default!r}',
            setting.doc,
        )
    for name, section in sections.items():
        yield from _sections(section, f'{prefix}{name}.')


def _entry(head: str, description: str | None) -> list[str]:
    """A flag, and what it does; line breaks of a description are kept."""
    wrapped = textwrap.TextWrapper(WIDTH, break_long_words=False, break_on_hyphens=False)
    wrapped.initial_indent, wrapped.subsequent_indent = '  ', '    '
    lines = wrapped.wrap(head)
    wrapped.initial_indent, wrapped.subsequent_indent = '      ', '        '
    return lines + [
        line for part in (description or '').splitlines() for line in wrapped.wrap(part)
    ]


def _type(kind: Any) -> str:
    """A type as in 'int or None', 'tuple of float', or the values of a Literal."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return ' or '.join(map(repr, parts))
    if origin in (types.UnionType, typing.Union):
        return ' or '.join(map(_type, parts))
    if origin is tuple:
        return f'tuple of {_type(parts[0])}'
    return 'None' if kind is type(None) else kind.__name__


def _valid(setting: Setting) -> str:
    """The bounds of numbers; texts have their limits at the length of a path."""
    (kind, *_) = concrete_types(setting.kind)
    if kind is tuple:
        (kind, *_) = concrete_types(typing.get_args(setting.kind)[0])
    return setting.bounds.words(kind) if kind in (int, float) else ''


def misspelt(arguments: Sequence[str], kind: type) -> str | None:
    """A sentence on the first --config.FIELD that the config does not have; None without any."""
    known = settings(kind)
    sections = {name.rpartition('.')[0] for name in known}
    for argument in arguments:
        name = re.match(r'--?(?:no)?config\.([^=]*)', argument)
        if name and name[1] not in known and name[1] not in sections:
            near = difflib.get_close_matches(name[1], known, n=1)
            meant = f'; did you mean --config.{near[0]}?' if near else ''
            return f'unknown field --config.{name[1]}{meant} (--help lists all fields)'
    return None
