"""benchmark.json: measured groups, and the tables that pages print of them."""

import dataclasses
import fnmatch
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.benchmark.race import Row
from qkattn.errors import ReportError
from qkattn.report.tables import markdown_table
from qkattn.storage.files import read_whole, write_atomic
from qkattn.storage.records import parse_json

SCHEMA = 1
FILE = 'benchmark.json'


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows that were measured together, and are compared."""

    suite: str
    title: str  # unique in its suite
    rows: Sequence[Row]
    reference: str = ''  # the name of the row to which times are related; '' is none

    @property
    def name(self) -> str:
        return f'{self.suite}: {self.title}'

    def row(self, name: str) -> Row | None:
        """The row of that name, if it has been measured."""
        return next((row for row in self.rows if row.name == name and row.rounds), None)


def write(directory: Path, facts: Mapping[str, Any], groups: Sequence[Group]) -> None:
    """Writes FILE: groups, the machine and its load."""
    document = {'schema': SCHEMA, **facts, 'groups': [dataclasses.asdict(g) for g in groups]}
    write_atomic(directory / FILE, json.dumps(document, indent=1) + '\n')


def read(directory: Path) -> list[Group]:
    """What a benchmark has measured; ReportError if absent, damaged or of another schema."""
    path = directory / FILE
    try:
        document = parse_json(read_whole(path))
        if document['schema'] != SCHEMA:
            raise ValueError(f'its schema is {document["schema"]}; this version reads {SCHEMA}')
        return [
            Group(g['suite'], g['title'], [Row(**r) for r in g['rows']], g['reference'])
            for g in document['groups']
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ReportError(f'{path} is not a benchmark: {error!r}; measure it again') from error


HEADINGS = ('ms', 'from', 'to', 'ratio', 'tokens/s', 'ratio / by FLOPs', 'cache MiB')


def cells(row: Row, group: Group) -> dict[str, str]:
    """The printed numbers of a row by heading, as far as it has them."""
    if not row.rounds:
        return {}
    reference = group.row(group.reference)
    numbers = row.extra
    times = zip(('ms', 'from', 'to'), (row.median, *row.quartiles), strict=True)
    printed = {
        name: f'{1e3 * seconds:,.3g}' if seconds < 1 else f'{1e3 * seconds:,.0f}'
        for name, seconds in times
    }
    if reference and row is not reference:
        printed['ratio'] = f'{row.ratio(reference):.3f}'
        differ = len({other.extra.get('flops') for other in group.rows}) > 1
        if differ and numbers.get('flops'):
            predicted = numbers['flops'] / reference.extra['flops']
            printed['ratio / by FLOPs'] = f'{row.ratio(reference) / predicted:.3f}'
    if numbers.get('tokens'):
        printed['tokens/s'] = f'{numbers["tokens"] / row.median:,.0f}'
    if 'cache_bytes' in numbers:
        printed['cache MiB'] = f'{numbers["cache_bytes"] / 2**20:,.2f}'
    return printed


def table(group: Group) -> str:
    """The group's table in Markdown."""
    rows = {row.name: cells(row, group) for row in group.rows}
    shown = [name for name in HEADINGS if any(name in printed for printed in rows.values())]
    headings = [('', True), *((name, False) for name in shown)]
    lines = [
        [name, *(printed.get(heading, '') for heading in shown)] for name, printed in rows.items()
    ]
    title = group.name + (f'; ratios to {group.reference}' if group.row(group.reference) else '')
    return f'**{title}**\n\n{markdown_table(headings, lines)}'


def block(path: Path, _: str = '') -> str:
    """The tables of DIRECTORY/PATTERN: of groups whose names, 'SUITE: TITLE', match the pattern.

    A block of pages, see `report.verify.check_page`. ReportError without such a benchmark or group.
    """
    groups = [group for group in read(path.parent) if fnmatch.fnmatch(group.name, path.name)]
    if not groups:
        raise ReportError(f'{path.parent} has no group that matches {path.name!r}')
    return '\n\n'.join(table(group) for group in groups) + '\n'
