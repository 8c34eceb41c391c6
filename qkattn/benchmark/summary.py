"""Tables of a benchmark: text, Markdown and CSV from one list of columns."""

import csv
import dataclasses
import io
from collections.abc import Callable, Sequence
from typing import Any

from qkattn.benchmark import targets
from qkattn.benchmark.measurement import Group, Measurement
from qkattn.report.tables import markdown_table, text_table


@dataclasses.dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
      key: its name in the CSV.
      heading: with the unit.
      value: of a row in its group; None is an empty cell.
      text: its format, or a function that prints it.
      brief: whether tables in pages have it.
    """

    key: str
    heading: str
    value: Callable[[Measurement, Group], Any]
    text: str | Callable[[Any], str] = ''
    brief: bool = False

    def print(self, value: Any) -> str:
        if value is None:
            return ''
        return self.text(value) if callable(self.text) else format(value, self.text)


def extra(key: str, heading: str, text: str | Callable[[Any], str]) -> Column:
    return Column(key, heading, lambda row, group: row.extra.get(key), text)


def ratio(row: Measurement, group: Group) -> Measurement | None:
    """The rounds over those of the group's reference."""
    reference = group.reference_row()
    return row.ratios(reference) if reference and row.rounds and row is not reference else None


def milliseconds(seconds: float) -> str:
    return f'{1e3 * seconds:,.3g}' if seconds < 1 else f'{1e3 * seconds:,.0f}'


def mebibytes(size: float) -> str:
    return f'{size / 2**20:,.0f}' if size >= 2**24 else f'{size / 2**20:,.2f}'


def _spread(of: Callable[[Measurement, Group], Measurement | None], which: int) -> Callable:
    def value(row: Measurement, group: Group) -> float | None:
        measured = of(row, group)
        return measured.quartiles[which] if measured and measured.rounds else None

    return value


def _utilisation(row: Measurement, group: Group) -> float | None:
    rate, most = row.per_second('flops'), row.extra.get('peak_flops')
    return rate / most if rate and most else None


def _predicted(row: Measurement, group: Group) -> float | None:
    """The row's FLOPs over those of the reference, where rows of the group differ in them."""
    reference, flops = group.reference_row(), {other.extra.get('flops') for other in group.rows}
    if reference is None or len(flops) < 2 or row is reference or not row.extra.get('flops'):
        return None
    return row.extra['flops'] / reference.extra['flops']


def _excess(row: Measurement, group: Group) -> float | None:
    measured, predicted = ratio(row, group), _predicted(row, group)
    return measured.median / predicted if measured and predicted else None


def of_itself(row: Measurement, group: Group) -> Measurement:
    return row


COLUMNS = (
    Column('median_seconds', 'ms', lambda row, group: row.median, milliseconds, brief=True),
    Column('first_quartile_seconds', 'from', _spread(of_itself, 0), milliseconds, brief=True),
    Column('third_quartile_seconds', 'to', _spread(of_itself, 1), milliseconds, brief=True),
    Column(
        'ratio',
        'ratio',
        lambda row, group: (r := ratio(row, group)) and r.median,
        '.3f',
        brief=True,
    ),
    Column('ratio_first_quartile', 'from', _spread(ratio, 0), '.3f'),
    Column('ratio_third_quartile', 'to', _spread(ratio, 1), '.3f'),
    Column(
        'tokens_per_second',
        'tokens/s',
        lambda row, group: row.per_second('tokens'),
        ',.0f',
        brief=True,
    ),
    Column(
        'gigaflops',
        'GFLOP/s',
        lambda row, group: (rate := row.per_second('flops')) and rate / 1e9,
        ',.1f',
    ),
    Column('utilisation', 'MFU', _utilisation, '.1%', brief=True),
    Column(
        'gigabytes_per_second',
        'GB/s',
        lambda row, group: (rate := row.per_second('bytes')) and rate / 1e9,
        ',.1f',
    ),
    Column('predicted', 'by FLOPs', _predicted, '.3f'),
    Column('excess', 'ratio / by FLOPs', _excess, '.3f', brief=True),
    extra('floor_seconds', 'floor ms', milliseconds),
    extra('parameters', 'parameters', ',d'),
    extra('compile_seconds', 'compile s', '.1f'),
    extra('temporary_bytes', 'temporaries MiB', mebibytes),
    extra('step_peak_bytes', 'peak of a step MiB', mebibytes),
    extra('peak_bytes', 'peak MiB', mebibytes),
    extra('peak_device_bytes', 'device MiB', mebibytes),
    extra('cache_bytes', 'cache MiB', mebibytes),
    extra('failed', 'failed', str),
)


def shown(group: Group) -> list[Column]:
    """The columns of which a row of the group has a value."""
    return [c for c in COLUMNS if any(c.value(row, group) is not None for row in group.rows)]


def cells(
    group: Group, columns: Sequence[Column] | None = None
) -> tuple[list[tuple[str, bool]], list[list[str]]]:
    """Headings (with whether they stand left) and rows as printed."""
    columns = shown(group) if columns is None else columns
    headings = [('', True), *((column.heading, False) for column in columns)]
    rows = [
        [row.name, *(column.print(column.value(row, group)) for column in columns)]
        for row in group.rows
    ]
    return headings, rows


def text(group: Group) -> str:
    """The group's table for a terminal."""
    return '\n'.join([_title(group), text_table(*cells(group))])


def brief(group: Group) -> str:
    """The group's table for a page."""
    columns = [column for column in shown(group) if column.brief]
    return f'**{_title(group)}**\n\n{markdown_table(*cells(group, columns))}'


def _title(group: Group) -> str:
    return group.name + (f'; ratios to {group.reference}' if group.reference_row() else '')


def page(document: dict[str, Any], groups: Sequence[Group]) -> str:
    """All tables in Markdown, below the machine that they were measured on."""
    facts, load = document['machine'], document['load']
    versions = ', '.join(f'{k} {v}' for k, v in facts['versions'].items() if v)
    devices = ', '.join(facts['accelerators']) or 'no accelerator'
    lines = [
        f'{facts["cpu"]}, {facts["cores"]} cores, {facts["memory_bytes"] / 2**30:.0f} GiB, '
        f'{devices}; Python {facts["python"]}, {versions}; commit {facts["git"]["commit"]}; '
        f'load {load["start"]} at the start, {load["end"]} at the end.',
        'Medians of interleaved rounds, with their quartiles (from, to); ratios are medians of '
        'ratios of seconds, round by round.',
    ]
    if reached := targets.lines(groups, bool(facts['accelerators'])):
        lines += ['### targets', '\n'.join(f'- {line}' for line in reached)]
    for group in groups:
        lines += [f'### {_title(group)}', markdown_table(*cells(group))]
    return '\n\n'.join(lines) + '\n'


def csv_table(groups: Sequence[Group]) -> str:
    """All columns of all rows, unrounded; the first column names group and row."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator='\n')
    writer.writerow(['row', *(column.key for column in COLUMNS)])
    for group in groups:
        for row in group.rows:
            values = [column.value(row, group) for column in COLUMNS]
            writer.writerow([f'{group.name} / {row.name}', *values])
    return out.getvalue()
