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
        """Returns the row with a name, if it has been measured."""
        for row in self.rows:
            if row.name == name and row.rounds:
                return row
        return None


def write(directory: Path, facts: Mapping[str, Any], groups: Sequence[Group]) -> None:
    """Writes benchmark.json into a directory: `facts`, such as the machine, and all groups."""
    group_records = [dataclasses.asdict(group) for group in groups]
    document = {'schema': SCHEMA, **facts, 'groups': group_records}
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
        distinct_flops = {other.extra.get('flops') for other in group.rows}
        if len(distinct_flops) > 1 and row.extra.get('flops'):
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
    """Returns the table of a group in Markdown, below its title.

    The columns are those of HEADINGS for which a row has a number.
    """
    cells_by_row = {row.name: cells(row, group) for row in group.rows}
    filled = {heading for cells_of_row in cells_by_row.values() for heading in cells_of_row}
    columns = [heading for heading in HEADINGS if heading in filled]
    # A heading is paired with whether its column is aligned to the left.
    headings = [('', True)]
    headings += [(column, False) for column in columns]
    lines = []
    for name, cells_of_row in cells_by_row.items():
        numbers = [cells_of_row.get(column, '') for column in columns]
        lines.append([name, *numbers])
    title = group.name
    if group.row(group.reference):
        title += f'; ratios to {group.reference}'
    return f'**{title}**\n\n{markdown_table(headings, lines)}'


def block(path: Path, _: str = '') -> str:
    """Returns the tables of some groups of a benchmark, for a page (`report.verify.check_page`).

    Args:
        path: DIRECTORY/PATTERN, such as 'experiments/results/benchmark/cpu/steps:*'. The pattern
            is for names of groups, 'SUITE: TITLE'.

    Raises:
        ReportError: The directory has no benchmark, or no group matches.
    """
    directory = path.parent
    pattern = path.name
    groups = [group for group in read(directory) if fnmatch.fnmatch(group.name, pattern)]
    if not groups:
        raise ReportError(f'{directory} has no group that matches {pattern!r}')
    return '\n\n'.join(table(group) for group in groups) + '\n'
