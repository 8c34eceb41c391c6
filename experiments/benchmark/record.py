"""benchmark.json: measured groups, the tables that pages print of them, and their targets."""

import dataclasses
import fnmatch
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.benchmark.race import Row
from qkattn.errors import ReportError
from qkattn.report.tables import markdown_table, text_table
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


def read(directory: str | Path) -> tuple[dict[str, Any], list[Group]]:
    """The machine of a benchmark, and what it has measured.

    Raises:
      FileNotFoundError: there is none in the directory.
      ReportError: a file that is damaged, or of another schema.
    """
    path = Path(directory) / FILE
    try:
        document = parse_json(path.read_text('utf-8'))
        groups = [
            Group(g['suite'], g['title'], [Row(**r) for r in g['rows']], g['reference'])
            for g in document['groups']
        ]
        machine, schema = dict(document['machine']), document['schema']
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ReportError(f'{path} is not a benchmark: {error!r}; measure it again') from error
    if schema != SCHEMA:
        raise ReportError(f'{path} has schema {schema}; this version reads {SCHEMA}')
    return machine, groups


# Headings of tables in pages, and those that a terminal shows besides.
PAGE = ('ms', 'from', 'to', 'ratio', 'tokens/s', 'MFU', 'ratio / by FLOPs')
HEADINGS = (*PAGE, 'cache MiB', 'failed')


def cells(row: Row, group: Group) -> dict[str, str]:
    """The printed numbers of a row by heading, as far as it has them."""
    if not row.rounds:
        return {'failed': row.extra.get('failed', '')}
    low, high = row.quartiles
    reference, numbers = group.row(group.reference), row.extra
    times = {'ms': row.median, 'from': low, 'to': high}
    printed = {name: _milliseconds(seconds) for name, seconds in times.items()}
    if reference and row is not reference:
        printed['ratio'] = f'{row.ratio(reference):.3f}'
        differ = len({other.extra.get('flops') for other in group.rows}) > 1
        if differ and numbers.get('flops'):
            printed['ratio / by FLOPs'] = f'{_ratio_by_flops(row, reference):.3f}'
    if rate := row.per_second('tokens'):
        printed['tokens/s'] = f'{rate:,.0f}'
    if numbers.get('peak_flops') and (rate := row.per_second('flops')):
        printed['MFU'] = f'{rate / numbers["peak_flops"]:.1%}'
    if 'cache_bytes' in numbers:
        printed['cache MiB'] = f'{numbers["cache_bytes"] / 2**20:,.2f}'
    return printed


def _milliseconds(seconds: float) -> str:
    return f'{1e3 * seconds:,.3g}' if seconds < 1 else f'{1e3 * seconds:,.0f}'


def _ratio_by_flops(row: Row, reference: Row) -> float | None:
    """Its ratio of times, divided by the ratio that FLOPs predict."""
    ratio = row.ratio(reference)
    return ratio and ratio / (row.extra['flops'] / reference.extra['flops'])


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


def _over(name: str, ratio: Callable = Row.ratio) -> Callable:
    """The function from a row to its ratio to another row of its group."""

    def number(row: Row, group: Group) -> float | None:
        reference = group.row(name)
        return None if reference is None or row is reference else ratio(row, reference)

    return number


def _cache(row: Row, group: Group) -> float:
    return row.extra['cache_bytes'] / row.extra['predicted_cache_bytes']


class Target(NamedTuple):
    """A number of the rows of a suite that is at most `limit`; where several have it, the worst."""

    text: str
    suite: str
    row: str  # a pattern: '*' is any
    number: Callable[[Row, Group], float | None]
    limit: float
    machine: str = ''  # 'cpu' or 'gpu'; '' is any


STEP, STUDY = 'a training step over', 'a study of 8 runs by --workers=auto over the same in'
VARIANT = "a variant's step over qk/vo's, divided by the ratio of their FLOPs"
TARGETS = (
    Target(f"{STEP} torch.compile's", 'steps', QKATTN, _over('torch.compile'), 1.1, 'cpu'),
    Target(f"{STEP} torch.compile's", 'steps', QKATTN, _over('torch.compile'), 1 / 1.1, 'gpu'),
    Target(f'{STEP} that of functional JAX', 'steps', QKATTN, _over('functional JAX'), 1.03),
    Target(VARIANT, 'steps', '*', _over('qk/vo', _ratio_by_flops), 1.15, 'cpu'),
    Target(VARIANT, 'steps', '*', _over('qk/vo', _ratio_by_flops), 1.2, 'gpu'),
    Target('8 trials by vmap over 8 runs', 'stacks', 'vmap, 8 *', _over(ONE_RUN), 0.25, 'gpu'),
    Target('bytes of a real cache over those predicted', 'decoding', '*', _cache, 1),
    Target(f'{STUDY} {ONE_PROCESS}', 'study', WORKERS, _over(ONE_PROCESS), 0.55, 'cpu'),
    # As slow as one process that has two cores, where threads bring nothing.
    Target(f'{STUDY} {ONE_CORE}', 'study', WORKERS, _over(ONE_CORE), 0.55, 'cpu'),
)


def target_lines(groups: Iterable[Group], machine: str) -> Iterator[str]:
    """A line for each target of this kind of machine that has been measured, met or missed."""
    timed = [(group, row) for group in groups for row in group.rows if row.rounds]
    for target in TARGETS:
        numbers = [
            target.number(row, group)
            for group, row in timed
            if group.suite == target.suite and fnmatch.fnmatch(row.name, target.row)
        ]
        worst = max((number for number in numbers if number is not None), default=None)
        if worst is not None and target.machine in ('', machine):
            missed = worst / target.limit - 1
            reached = f'missed by {missed:.1%}' if missed > 0 else 'met'
            yield f'{target.text}: {worst:.3g}, at most {target.limit:g}: {reached}'


def machine_kind(machine: Mapping[str, Any]) -> str:
    return 'gpu' if machine['accelerators'] else 'cpu'


BLOCK = re.compile(r'(<!-- benchmark: (\S+) \| (.+?) -->\n)(.*?)(<!-- end -->)', re.DOTALL)


def check_page(path: str | Path, *, write: bool = False) -> int:
    """Checks the tables of benchmarks in a page and returns how many blocks of them there are.

    A block stands between `<!-- benchmark: DIRECTORY | PATTERN -->` (relative to the page) and
    `<!-- end -->`: the tables of the groups whose names, 'SUITE: TITLE', match the pattern, or the
    list of targets for 'targets'.

    Args:
      write: replaces the blocks by what the benchmarks give.

    Raises:
      ReportError: a block that its benchmark does not give.
    """
    path = Path(path)
    text = path.read_text('utf-8')
    expected = BLOCK.sub(lambda m: f'{m[1]}{_block(path.parent / m[2], m[3])}{m[5]}', text)
    if write and expected != text:
        write_atomic(path, expected)
    elif expected != text:
        raise ReportError(
            f'{path} has other tables than its benchmarks give; python -m experiments.verify '
            '--write writes them'
        )
    return len(BLOCK.findall(text))


def _block(directory: Path, pattern: str) -> str:
    machine, groups = read(directory)
    if pattern == 'targets':
        return ''.join(f'- {line}\n' for line in target_lines(groups, machine_kind(machine)))
    matching = [group for group in groups if fnmatch.fnmatch(group.name, pattern)]
    if not matching:
        raise ReportError(f'{directory} has no group that matches {pattern!r}')
    return '\n\n'.join(table(group, markdown=True) for group in matching) + '\n'
