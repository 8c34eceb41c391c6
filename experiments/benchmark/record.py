"""benchmark.json: measured groups, the tables that pages print of them, and their targets."""

import dataclasses
import fnmatch
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.benchmark.race import Row
from qkattn.errors import ReportError
from qkattn.jobs.output import text_table
from qkattn.report.tables import markdown_table
from qkattn.storage.files import write_atomic
from qkattn.storage.records import parse_json

SCHEMA = 1
FILE = 'benchmark.json'

# Names of rows that targets compare.
QKATTN, ONE_RUN = 'qkattn', 'one run'
ONE_PROCESS, ONE_CORE, WORKERS = 'one process', 'one process on one core', '--workers=auto'


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows that were measured together, and are compared.

    Attributes:
      suite: that measured it.
      title: unique in its suite.
      rows: of its table.
      reference: name of the row to which times are related; '' is none.
    """

    suite: str
    title: str
    rows: Sequence[Row]
    reference: str = ''

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


def read(directory: Path) -> tuple[dict[str, Any], list[Group]]:
    """The machine of a benchmark, and what it has measured.

    Raises:
      ReportError: a file that is absent, damaged or of another schema.
    """
    path = directory / FILE
    try:
        document = parse_json(path.read_text('utf-8'))
        if document['schema'] != SCHEMA:
            raise ValueError(f'its schema is {document["schema"]}; this version reads {SCHEMA}')
        groups = [
            Group(g['suite'], g['title'], [Row(**r) for r in g['rows']], g['reference'])
            for g in document['groups']
        ]
        return dict(document['machine']), groups
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ReportError(f'{path} is not a benchmark: {error!r}; measure it again') from error


# Headings of tables in pages, and those that a terminal shows besides.
PAGE = ('ms', 'from', 'to', 'ratio', 'tokens/s', 'MFU', 'ratio / by FLOPs')
HEADINGS = (*PAGE, 'cache MiB', 'failed')


def cells(row: Row, group: Group) -> dict[str, str]:
    """The printed numbers of a row by heading, as far as it has them."""
    if not row.rounds:
        return {'failed': row.extra.get('failed', '')}
    reference, numbers = group.row(group.reference), row.extra
    times = zip(('ms', 'from', 'to'), (row.median, *row.quartiles), strict=True)
    printed = {
        name: f'{1e3 * seconds:,.3g}' if seconds < 1 else f'{1e3 * seconds:,.0f}'
        for name, seconds in times
    }
    if reference and row is not reference:
        printed['ratio'] = f'{row.ratio(reference):.3f}'
        differ = len({other.extra.get('flops') for other in group.rows}) > 1
        if differ and numbers.get('flops'):
            printed['ratio / by FLOPs'] = f'{_ratio_by_flops(row, reference):.3f}'
    if numbers.get('tokens'):
        printed['tokens/s'] = f'{numbers["tokens"] / row.median:,.0f}'
    if numbers.get('flops') and numbers.get('peak_flops'):  # of earlier versions
        printed['MFU'] = f'{numbers["flops"] / row.median / numbers["peak_flops"]:.1%}'
    if 'cache_bytes' in numbers:
        printed['cache MiB'] = f'{numbers["cache_bytes"] / 2**20:,.2f}'
    return printed


def table(group: Group, *, markdown: bool = False) -> str:
    """The group's table for a terminal, or for a page."""
    rows = {row.name: cells(row, group) for row in group.rows}
    possible = PAGE if markdown else HEADINGS
    shown = [name for name in possible if any(name in printed for printed in rows.values())]
    headings = [('', True), *((name, False) for name in shown)]
    lines = [
        [name, *(printed.get(heading, '') for heading in shown)] for name, printed in rows.items()
    ]
    title = group.name + (f'; ratios to {group.reference}' if group.row(group.reference) else '')
    if markdown:
        return f'**{title}**\n\n{markdown_table(headings, lines)}'
    return f'{title}\n{text_table(headings, lines)}'


def _ratio_by_flops(row: Row, reference: Row) -> float:
    """Its ratio of times, divided by the ratio that FLOPs predict."""
    return row.ratio(reference) / (row.extra['flops'] / reference.extra['flops'])


def _cache(row: Row, _: Row) -> float:
    return row.extra['cache_bytes'] / row.extra['predicted_cache_bytes']


class Target(NamedTuple):
    """A number of rows beside their reference that is at most `limit`; of several, the worst."""

    text: str
    suite: str
    row: str  # a pattern: '*' is any
    reference: str  # name of a row of the same group
    limit: float
    machine: str = ''  # 'cpu' or 'gpu'; '' is any
    number: Callable[[Row, Row], float] = Row.ratio


STEP, STUDY = 'a training step over', 'a study of 8 runs by --workers=auto over the same in'
VARIANT = "a variant's step over qk/vo's, divided by the ratio of their FLOPs"
TARGETS = (
    Target(f"{STEP} torch.compile's", 'steps', QKATTN, 'torch.compile', 1.1, 'cpu'),
    Target(f"{STEP} torch.compile's", 'steps', QKATTN, 'torch.compile', 1 / 1.1, 'gpu'),
    Target(f'{STEP} that of functional JAX', 'steps', QKATTN, 'functional JAX', 1.03),
    Target(VARIANT, 'steps', '*', 'qk/vo', 1.15, 'cpu', _ratio_by_flops),
    Target(VARIANT, 'steps', '*', 'qk/vo', 1.2, 'gpu', _ratio_by_flops),
    Target('8 trials by vmap over 8 runs', 'stacks', 'vmap, 8 *', ONE_RUN, 0.25, 'gpu'),
    Target('bytes of a real cache over those predicted', 'decoding', '*', 'qk/vo', 1, '', _cache),
    Target(f'{STUDY} {ONE_PROCESS}', 'study', WORKERS, ONE_PROCESS, 0.55, 'cpu'),
    # As slow as one process that has two cores, where threads bring nothing.
    Target(f'{STUDY} {ONE_CORE}', 'study', WORKERS, ONE_CORE, 0.55, 'cpu'),
)


def target_lines(groups: Iterable[Group], machine: Mapping[str, Any]) -> Iterator[str]:
    """A line for each target of this kind of machine that has been measured, met or missed."""
    kind = 'gpu' if machine['accelerators'] else 'cpu'
    groups = list(groups)
    for target in TARGETS:
        numbers = [
            target.number(row, reference)
            for group in groups
            for row in group.rows
            if group.suite == target.suite and fnmatch.fnmatch(row.name, target.row)
            if row.rounds and (reference := group.row(target.reference))
        ]
        if numbers and target.machine in ('', kind):
            missed = max(numbers) / target.limit - 1
            reached = f'missed by {missed:.1%}' if missed > 0 else 'met'
            yield f'{target.text}: {max(numbers):.3g}, at most {target.limit:g}: {reached}'


def block(path: Path, _: str = '') -> str:
    """The tables of DIRECTORY/PATTERN: of groups whose names, 'SUITE: TITLE', match the pattern.

    `DIRECTORY/targets` is the list of targets. A block of pages, see `report.verify.check_page`.

    Raises:
      ReportError: a directory without such a benchmark, or such groups.
    """
    machine, groups = read(path.parent)
    if path.name == 'targets':
        return ''.join(f'- {line}\n' for line in target_lines(groups, machine))
    matching = [group for group in groups if fnmatch.fnmatch(group.name, path.name)]
    if not matching:
        raise ReportError(f'{path.parent} has no group that matches {path.name!r}')
    return '\n\n'.join(table(group, markdown=True) for group in matching) + '\n'
