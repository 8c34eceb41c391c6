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
    """Reads the groups of a benchmark's directory.

    Raises ReportError if its file is missing, damaged or of another schema.
    """
    path = directory / FILE
    try:
        document = parse_json(read_whole(path))
        if document['schema'] != SCHEMA:
            raise ValueError(f'its schema is {document["schema"]}; this version reads {SCHEMA}')
        groups = []
        for group in document['groups']:
            rows = [Row(**row) for row in group['rows']]
            groups.append(Group(group['suite'], group['title'], rows, group['reference']))
        return groups
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ReportError(f'{path} is not a benchmark: {error!r}; measure it again') from error


HEADINGS = ('ms', 'from', 'to', 'ratio', 'tokens/s', 'ratio / by FLOPs', 'cache MiB')


def cells(row: Row, group: Group) -> dict[str, str]:
    """Returns the printed numbers of a row by heading, without those that it does not have.

    'ms' is the median over rounds, from the first quartile to the third. 'ratio' is the time
    relative to the group's reference. 'ratio / by FLOPs' divides it by the ratio of FLOPs: at 1,
    the row is as fast as its FLOPs predict.
    """
    if not row.rounds:
        return {}
    first_quartile, third_quartile = row.quartiles
    printed = {
        'ms': _milliseconds(row.median),
        'from': _milliseconds(first_quartile),
        'to': _milliseconds(third_quartile),
    }
    reference = group.row(group.reference)
    if reference is not None and row is not reference:
        ratio = row.ratio(reference)
        printed['ratio'] = f'{ratio:.3f}'
        different_flops = {other.extra.get('flops') for other in group.rows}
        if len(different_flops) > 1 and row.extra.get('flops'):
            ratio_of_flops = row.extra['flops'] / reference.extra['flops']
            printed['ratio / by FLOPs'] = f'{ratio / ratio_of_flops:.3f}'
    if row.extra.get('tokens'):
        printed['tokens/s'] = f'{row.extra["tokens"] / row.median:,.0f}'
    if 'cache_bytes' in row.extra:
        printed['cache MiB'] = f'{row.extra["cache_bytes"] / 2**20:,.2f}'
    return printed


def _milliseconds(seconds: float) -> str:
    """Formats a time in ms, with three digits below a second: 0.0123 -> '12.3', 2 -> '2,000'."""
    if seconds < 1:
        return f'{1e3 * seconds:,.3g}'
    return f'{1e3 * seconds:,.0f}'


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
