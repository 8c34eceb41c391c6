"""Descriptions of fields and constants, which stand in calls of `setting` and in comments.

    num_heads: int = setting(4, 'N, query heads.', least=1, most=2**14)
    targets_BT: Any  # the tokens to predict
    # Integers are below this.
    INT_END = 2**31

A field that is a setting gets its default, description and bounds. Other fields and constants get
their comment: that of their line, or the one above it.
"""

import ast
import functools
import importlib
import io
import operator
import re
import tokenize
import typing
from pathlib import Path
from typing import Any

import griffe

from qkattn.config.setting import Setting, concrete_types, settings


class Descriptions(griffe.Extension):
    """Writes the docstrings of attributes that have none."""

    def on_attribute_instance(
        self, *, node: ast.AST | griffe.ObjectNode, attr: griffe.Attribute, **_: Any
    ) -> None:
        if attr.docstring is not None or not isinstance(node, ast.Assign | ast.AnnAssign):
            return
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == 'setting':
            field = _fields(attr.module.path, attr.parent.name)[attr.name]
            attr.value = repr(field.default)
            text = _description(field)
        else:
            text = _comment(attr.filepath, node.lineno, node.end_lineno)
        if text:
            attr.docstring = griffe.Docstring(text, parent=attr, lineno=attr.lineno)


@functools.cache
def _fields(module: str, path: str) -> dict[str, Setting]:
    """Returns the settings of a class of the package, by name."""
    return settings(operator.attrgetter(path)(importlib.import_module(module)))


def _description(field: Setting) -> str:
    """Returns what a setting is, which numbers it may hold, and whose keys are its names."""
    kind = concrete_types(field.kind)[0]
    if kind is tuple:
        kind = concrete_types(typing.get_args(field.kind)[0])[0]
    parts = [field.doc]
    if kind in (int, float):
        parts.append(f'Valid: {field.bounds.describe(kind)}.')
    for path in field.registries:
        name = path.rpartition(':')[2]
        parts.append(f'Names: the keys of [`{name}`][{path.replace(":", ".")}].')
    return '\n\n'.join(parts)


@functools.cache
def _comments(path: Path) -> dict[int, str]:
    """Returns the text of each comment of a file, by its line."""
    readline = io.StringIO(path.read_text('utf-8')).readline
    tokens = tokenize.generate_tokens(readline)
    return {
        token.start[0]: token.string.lstrip('# ')
        for token in tokens
        if token.type == tokenize.COMMENT
    }


def _comment(path: Path, first: int, last: int) -> str:
    """Returns the comment behind or above the statement of these lines; '' if there is none."""
    comments = _comments(path)
    if last in comments:
        return _escaped(comments[last])
    lines: list[str] = []
    source = path.read_text('utf-8').splitlines()
    # Not the comment behind the statement above.
    while (first := first - 1) in comments and source[first - 1].lstrip().startswith('#'):
        lines.insert(0, comments[first])
    return _escaped(' '.join(lines))


def _escaped(comment: str) -> str:
    """Returns Markdown that shows a comment; only its code, between backticks, is Markdown."""
    parts = comment.split('`')
    parts[::2] = [re.sub(r'[*<_]', r'\\\g<0>', part) for part in parts[::2]]
    return '`'.join(parts)
