"""benchmark.json: measured groups, the tables that pages print of them, and their targets."""

import dataclasses
import fnmatch
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from experiments.benchmark.race import Measurement
from qkattn.errors import ReportError
from qkattn.report.tables import markdown_table, text_table
from qkattn.run.files import write_atomic
from qkattn.run.records import parse_json

SCHEMA = 1
FILE = 'benchmark.json'

# Names of rows that targets compare.
OWN = 'qkattn'
NO_AXIS, ONE_RUN = 'no axis of trials', 'one run'
ONE_PROCESS, ONE_CORE, WORKERS = 'one process', 'one process on one core', '--workers=auto'
BEST = 'the better of one process and a worker on each core'


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
    rows: Sequence[Measurement]
    reference: str = ''

    @property
    def name(self) -> str:
        return f'{self.suite}: {self.title}'

    def row(self, name: str) -> Measurement | None:
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
            Group(g['suite'], g['title'], [Measurement(**r) for r in g['rows']], g['reference'])
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
HEADINGS = (*PAGE, 'GFLOP/s', 'compile s', 'peak MiB', 'cache MiB', 'failed')


def cells(row: Measurement, group: Group) -> dict[str, str]:
    """The printed numbers of a row by heading, as far as it has them."""
    if not row.rounds:
        return {'failed': row.extra.get('failed', '')}
    low, high = row.quartiles
    reference, numbers = group.row(group.reference), row.extra
    printed = {
        'ms': _milliseconds(row.median),
        'from': _milliseconds(low),
        'to': _milliseconds(high),
    }
    if reference and row is not reference:
        printed['ratio'] = f'{row.ratio(reference):.3f}'
        differ = len({other.extra.get('flops') for other in group.rows}) > 1
        if differ and numbers.get('flops'):
            printed['ratio / by FLOPs'] = f'{_ratio_by_flops(row, reference):.3f}'
    if rate := row.per_second('tokens'):
        printed['tokens/s'] = f'{rate:,.0f}'
    if rate := row.per_second('flops'):
        printed['GFLOP/s'] = f'{rate / 1e9:,.1f}'
    if utilisation := _utilisation(row):
        printed['MFU'] = f'{utilisation:.1%}'
    if 'compile_seconds' in numbers:
        printed['compile s'] = f'{numbers["compile_seconds"]:.1f}'
    for name in ('peak', 'cache'):
        if f'{name}_bytes' in numbers:
            printed[f'{name} MiB'] = f'{numbers[f"{name}_bytes"] / 2**20:,.2f}'
    return printed


def _milliseconds(seconds: float) -> str:
    return f'{1e3 * seconds:,.3g}' if seconds < 1 else f'{1e3 * seconds:,.0f}'


def _utilisation(row: Measurement) -> float | None:
    """Model-FLOPs utilisation: of the largest product rate that was measured."""
    rate, peak = row.per_second('flops'), row.extra.get('peak_flops')
    return rate / peak if rate and peak else None


def _ratio_by_flops(row: Measurement, reference: Measurement) -> float | None:
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


Value = Callable[[Measurement, Group], float | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A bound on one number of the rows of a suite; where several rows have it, on the worst.

    Attributes:
      text: what the number is.
      suite, group, row: where it is read; the latter two are patterns, as '*'.
      value: the number of a row; None where it has none.
      sense, limit: its bound.
      machine: the kind of machine that it is a target on; '' is any.
    """

    text: str
    suite: str
    group: str = '*'
    row: str = '*'
    value: Value
    sense: Literal['at most', 'at least'] = 'at most'
    limit: float
    machine: Literal['', 'cpu', 'gpu'] = ''

    def measured(self, groups: Iterable[Group]) -> float | None:
        """The worst number; None where no row has it."""
        worst = max if self.sense == 'at most' else min
        return worst(self._numbers(groups), default=None)

    def _numbers(self, groups: Iterable[Group]) -> Iterator[float]:
        for group in groups:
            if group.suite == self.suite and fnmatch.fnmatch(group.title, self.group):
                for row in group.rows:
                    if row.rounds and fnmatch.fnmatch(row.name, self.row):
                        if (number := self.value(row, group)) is not None:
                            yield number

    def line(self, groups: Iterable[Group]) -> str | None:
        """The target, what was measured and whether that meets it; None where it was not."""
        if (number := self.measured(groups)) is None:
            return None
        missed = number / self.limit - 1 if self.sense == 'at most' else 1 - number / self.limit
        reached = 'met' if missed <= 0 else f'missed by {missed:.1%}'
        return f'{self.text}: {number:.3g}, {self.sense} {self.limit:g}: {reached}'


def over(name: str, ratio: Callable = Measurement.ratio) -> Value:
    """A row's ratio to another row of its group."""

    def value(row: Measurement, group: Group) -> float | None:
        reference = group.row(name)
        return None if reference is None or row is reference else ratio(row, reference)

    return value


def _cache(row: Measurement, group: Group) -> float | None:
    return row.extra['cache_bytes'] / row.extra['predicted_cache_bytes']


def _training(over_row: str, limit: float, machine: Literal['', 'cpu', 'gpu'] = '') -> Target:
    whose = {'torch.compile': "torch.compile's", 'functional JAX': 'that of functional JAX'}
    text = f'a training step over {whose[over_row]}'
    value = over(over_row)
    return Target(text=text, suite='steps', row=OWN, value=value, limit=limit, machine=machine)


def _by_flops(limit: float, machine: Literal['cpu', 'gpu']) -> Target:
    text = "a variant's step over qk/vo's, divided by the ratio of their FLOPs"
    value = over('qk/vo', _ratio_by_flops)
    return Target(text=text, suite='steps', value=value, limit=limit, machine=machine)


TARGETS = (
    _training('torch.compile', 1.1, 'cpu'),
    _training('torch.compile', 1 / 1.1, 'gpu'),
    _training('functional JAX', 1.03),
    Target(
        text='model-FLOPs utilisation of a training step',
        suite='steps',
        row=OWN,
        value=lambda row, group: _utilisation(row),
        sense='at least',
        limit=0.45,
        machine='gpu',
    ),
    _by_flops(1.15, 'cpu'),
    _by_flops(1.2, 'gpu'),
    Target(
        text='one trial through the axis of trials over one without it',
        suite='stacks',
        row=ONE_RUN,
        value=over(NO_AXIS),
        limit=1.02,
    ),
    Target(
        text='a stack of 8 trials over 8 runs one after another',
        suite='stacks',
        group='*trial',
        row='vmap, 8 trials',
        value=over(ONE_RUN),
        limit=0.25,
        machine='gpu',
    ),
    Target(
        text='bytes of a real cache over those predicted', suite='decoding', value=_cache, limit=1
    ),
    *(
        Target(
            text=f'a study of 8 runs by --workers=auto over {what}',
            suite='study',
            row=WORKERS,
            value=over(name),
            limit=limit,
            machine='cpu',
        )
        for what, limit, name in (
            ('the same in one process', 0.55, ONE_PROCESS),
            # As slow as one process that has two cores, where threads bring nothing.
            ('the same in one process on one core', 0.55, ONE_CORE),
            (BEST, 1.05, BEST),
        )
    ),
)


def target_lines(groups: Sequence[Group], on_gpu: bool) -> list[str]:
    """A line for each target of this kind of machine that `groups` have measured."""
    kinds = ('', 'gpu' if on_gpu else 'cpu')
    lines = [target.line(groups) for target in TARGETS if target.machine in kinds]
    return [line for line in lines if line is not None]


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
        lines = target_lines(groups, bool(machine['accelerators']))
        return ''.join(f'- {line}\n' for line in lines)
    matching = [group for group in groups if fnmatch.fnmatch(group.name, pattern)]
    if not matching:
        raise ReportError(f'{directory} has no group that matches {pattern!r}')
    return '\n\n'.join(table(group, markdown=True) for group in matching) + '\n'
