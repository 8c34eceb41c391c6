"""Checks the numbers that pages print outside of tables made by this package.

docs/numbers.toml ties them to their sources, sentence by sentence:

    [[logged]]
    page = "docs/recipes.md"
    log = "experiments/results/char_lm_cpu/result.json"
    text = "**{log[0][val_loss]:.4f}** nats"      # a format string of the parsed log

    [[external]]
    page = "docs/recipes.md"
    text = "1.88 nats/character"
    source = "https://github.com/karpathy/nanoGPT"

A page has to contain the text, whatever its line breaks. A log is JSON, JSON Lines (a list), or
CSV: rows by their first column, or a list where that names several rows alike. A percentage is
written with a space. Of a Python file only the docstring is a page.
"""

import ast
import csv
import os
import re
import string
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qkattn.errors import ReportError
from qkattn.storage.records import parse_json

# Decimals and percentages.
MEASURED = re.compile(r'(?<![\w.,/^-])[-+]?\d[\d,]*(?:\.\d+(?:e[-+]?\d+)?(?!\w|\.\d)|(?= %))')
# Where numbers are no results: code, links, comments, articles, versions, headlines.
ELSEWHERE = re.compile(
    r'```.*?```|`[^`]*`|\]\([^)]*\)|https?://\S+|arXiv[: ]\S+|\b\d{4}\.\d{5}\b'
    r'|(?:>=|Python|jax) [\d.]+'
    r'|<!-- (?:headline|benchmark|claims|answers).*?<!-- end -->|<!--.*?-->',
    re.DOTALL,
)
FIELDS = {'logged': {'page', 'log', 'text'}, 'external': {'page', 'text', 'source'}}


def check_numbers(path: str | Path) -> dict[str, int]:
    """Checks the entries of a numbers.toml; returns how many there are of each kind.

    ReportError if an entry is malformed, or its page does not contain it.
    """
    path = Path(path)
    entries = _entries(path)
    root = path.parents[1]
    for kind, of_kind in entries.items():
        for number, entry in enumerate(of_kind, start=1):
            text = _text(kind, entry, root, f'{path}, [[{kind}]] entry {number}')
            if _plain(text) not in _plain(_page(root / entry['page'])):
                raise ReportError(
                    f'{entry["page"]} does not contain {text!r}, which is what '
                    f'{entry["log" if kind == "logged" else "source"]} gives; correct the page, or '
                    f'[[{kind}]] entry {number} of {path}'
                )
    return {kind: len(of_kind) for kind, of_kind in entries.items()}


def uncovered(path: str | Path, pages: Sequence[str | Path]) -> dict[str, list[str]]:
    """By page the decimals and percentages that no entry of a numbers.toml and no table covers."""
    path = Path(path)
    root, entries = path.parents[1], _entries(path)
    found = {}
    for page in map(Path, pages):
        name = Path(os.path.relpath(page, root)).as_posix()
        text = _plain(ELSEWHERE.sub(' ', _page(page)))
        for kind, of_kind in entries.items():
            for entry in of_kind:
                if entry['page'] == name:
                    covered = _text(kind, entry, root, str(path))
                    text = text.replace(_plain(ELSEWHERE.sub(' ', covered)), ' ')
        if numbers := [match[0] for match in MEASURED.finditer(text)]:
            found[name] = numbers
    return found


def _entries(path: Path) -> dict[str, list[dict[str, str]]]:
    try:
        content = tomllib.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError) as error:
        raise ReportError(f'{path} cannot be read: {error}') from error
    for kind, entries in content.items():
        for number, entry in enumerate(entries, start=1):
            if kind not in FIELDS or entry.keys() != FIELDS[kind]:
                raise ReportError(
                    f'{path}, [[{kind}]] entry {number} has {", ".join(entry)}; entries are '
                    + ' and '.join(f'[[{k}]] of {", ".join(sorted(v))}' for k, v in FIELDS.items())
                )
    return {kind: content.get(kind, []) for kind in FIELDS}


class _Formatter(string.Formatter):
    """Writes '90.6 %' where str.format writes '90.6%'."""

    def format_field(self, value: Any, format_spec: str) -> str:
        written = super().format_field(value, format_spec)
        return f'{written[:-1]} %' if format_spec.endswith('%') else written


def _text(kind: str, entry: Mapping[str, str], root: Path, where: str) -> str:
    if kind == 'external':
        return entry['text']
    try:
        return _Formatter().format(entry['text'], log=_log(root / entry['log']))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ReportError(
            f'{where} cannot be made from {entry["log"]} ({error!r}); correct the entry'
        ) from error


def _log(path: Path) -> Any:
    text = path.read_text(encoding='utf-8')
    if path.suffix == '.jsonl':
        return [parse_json(line) for line in text.splitlines()]
    if path.suffix != '.csv':
        return parse_json(text)
    rows = [
        {name: _number(value) for name, value in row.items()}
        for row in csv.DictReader(text.splitlines())
    ]
    by_name = {next(iter(row.values())): row for row in rows}
    return by_name if len(by_name) == len(rows) else rows


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _page(path: Path) -> str:
    try:
        text = path.read_text(encoding='utf-8')
        return ast.get_docstring(ast.parse(text)) or '' if path.suffix == '.py' else text
    except (OSError, ValueError, SyntaxError) as error:
        raise ReportError(f'page {str(path)!r} cannot be read: {error}.') from error


def _plain(text: str) -> str:
    return ' '.join(text.split())
