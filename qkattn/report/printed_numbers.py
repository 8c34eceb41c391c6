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
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

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


class Entry(NamedTuple):
    """A sentence of a page, rendered from its source."""

    kind: str
    where: str  # in numbers.toml
    page: str
    source: str
    text: str


def check_numbers(path: str | Path) -> dict[str, int]:
    """Checks the entries of a numbers.toml; returns how many there are of each kind.

    ReportError if an entry is malformed, or its page does not contain it.
    """
    entries, root = list(_entries(Path(path))), Path(path).parents[1]
    for entry in entries:
        if _plain(entry.text) not in _plain(_page(root / entry.page)):
            raise ReportError(
                f'{entry.page} does not contain {entry.text!r}, which is what {entry.source} '
                f'gives; correct the page, or {entry.where}'
            )
    return {kind: sum(entry.kind == kind for entry in entries) for kind in FIELDS}


def uncovered(path: str | Path, pages: Sequence[str | Path]) -> dict[str, list[str]]:
    """By page the decimals and percentages that no entry of a numbers.toml and no table covers."""
    entries, root = list(_entries(Path(path))), Path(path).parents[1]
    numbers = {}
    for page in map(Path, pages):
        name = Path(os.path.relpath(page, root)).as_posix()
        text = _plain(ELSEWHERE.sub(' ', _page(page)))
        for entry in entries:
            if entry.page == name:
                text = text.replace(_plain(ELSEWHERE.sub(' ', entry.text)), ' ')
        numbers[name] = MEASURED.findall(text)
    return {name: measured for name, measured in numbers.items() if measured}


def _entries(path: Path) -> Iterator[Entry]:
    try:
        content = tomllib.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError) as error:
        raise ReportError(f'{path} cannot be read: {error}') from error
    for kind, listed in content.items():
        for number, entry in enumerate(listed, start=1):
            where = f'{path}, [[{kind}]] entry {number}'
            if kind not in FIELDS or entry.keys() != FIELDS[kind]:
                raise ReportError(
                    f'{where} has {", ".join(entry)}; entries are '
                    + ' and '.join(f'[[{k}]] of {", ".join(sorted(v))}' for k, v in FIELDS.items())
                )
            text, source = entry['text'], entry['log' if kind == 'logged' else 'source']
            if kind == 'logged':
                try:
                    text = text.format(log=_log(path.parents[1] / source))
                except (OSError, ValueError, LookupError, TypeError) as error:
                    raise ReportError(
                        f'{where} cannot be made from {source} ({error!r}); correct the entry'
                    ) from error
            yield Entry(kind, where, entry['page'], source, re.sub(r'(?<=\d)%', ' %', text))


def _log(path: Path) -> Any:
    text = path.read_text(encoding='utf-8')
    if path.suffix == '.jsonl':
        return [parse_json(line) for line in text.splitlines()]
    if path.suffix != '.csv':
        return parse_json(text)
    table = pd.read_csv(path)
    names, rows = table[table.columns[0]], table.to_dict('records')
    return dict(zip(names, rows, strict=True)) if names.is_unique else rows


def _page(path: Path) -> str:
    try:
        text = path.read_text(encoding='utf-8')
        return ast.get_docstring(ast.parse(text)) or '' if path.suffix == '.py' else text
    except (OSError, ValueError, SyntaxError) as error:
        raise ReportError(f'page {str(path)!r} cannot be read: {error}.') from error


def _plain(text: str) -> str:
    return ' '.join(text.split())
