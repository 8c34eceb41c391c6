"""The summary table as aligned text, Markdown and CSV."""

import csv
import dataclasses
import io
import math
from collections.abc import Callable, Sequence

from qkattn.report.load import Study
from qkattn.report.measures import Measure, losses, scores
from qkattn.report.notes import notes
from qkattn.report.summary import Estimate, Row

NONE = '-'


@dataclasses.dataclass(frozen=True)
class Column:
    """One printed column: a heading of two short lines and the text of a row's cell."""

    heading: tuple[str, str]
    text: Callable[[Row], str]
    left: bool = False

    @property
    def title(self) -> str:
        return ' '.join(filter(None, self.heading))


def si(value: float | None, digits: int = 3) -> str:
    """`value` with `digits` significant digits and a decimal prefix, 1234567 -> '1.23M'."""
    if value is None:
        return NONE
    if value == 0:
        return '0'
    prefixes = ('', 'k', 'M', 'G', 'T', 'P', 'E')
    rounded = float(f'{value:.{digits - 1}e}')
    index = min(max(int(math.floor(math.log10(abs(rounded)) / 3)), 0), len(prefixes) - 1)
    scaled = rounded / 1000**index
    decimals = max(digits - 1 - int(math.floor(math.log10(abs(scaled)))), 0)
    text = f'{scaled:.{decimals}f}'
    if not index and '.' in text:
        text = text.rstrip('0').rstrip('.')
    return text + prefixes[index]


def _mean_sd(value: Estimate | None, decimals: int) -> str:
    if value is None:
        return NONE
    mean = f'{value.mean:.{decimals}f}'
    return mean if value.sd is None else f'{mean} ± {value.sd:.{decimals}f}'


def _difference(row: Row) -> str:
    if row.is_baseline:
        return 'baseline'
    value = row.difference
    if value is None:
        return NONE
    if value.low is None:
        return f'{value.mean:+.4f}'
    return f'{value.mean:+.4f} [{value.low:+.4f}, {value.high:+.4f}]'


def _learning_rate(row: Row) -> str:
    rate = row.learning_rate
    return NONE if rate is None else f'{rate:g}{"*" if row.at_edge else ""}'


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _residual(row: Row) -> str:
    residual = row.example.residual
    return NONE if residual is None else f'{100 * residual:+.3f}'


NAMES = (
    Column(('variant', ''), lambda row: row.variant, left=True),
    Column(('size', ''), lambda row: row.size, left=True),
)
COSTS = (
    Column(('seeds', ''), lambda row: str(len(row.chosen))),
    Column(('learning', 'rate'), _learning_rate),
    Column(('weights', ''), lambda row: f'{row.example.weights["total"]:,}'),
    Column(('residual', '%'), _residual),
    Column(('attention', 'weights'), lambda row: f'{row.example.weights["attention"]:,}'),
    Column(('d_model', ''), lambda row: str(row.example.config['d_model'])),
    Column(('d_ff', ''), lambda row: str(row.example.config['d_ff'])),
    Column(('FLOPs', '/token'), lambda row: si(row.example.flops_per_token)),
    Column(('cache', 'floats/token'), lambda row: si(row.example.cache_floats_per_token)),
    Column(('tokens', '/s'), lambda row: si(_mean(row.of_cells('tokens_per_second')))),
    Column(('cell', 's'), lambda row: si(sum(row.of_cells('train_seconds')))),
    Column(('diverged', ''), lambda row: f'{row.num_diverged}/{len(row.trials)}'),
)


def _measured(measure: Measure) -> Column:
    return Column(
        (measure.heading, 'mean ± sd'),
        lambda row: _mean_sd(measure.over_seeds(row), measure.decimals),
    )


def columns_of(rows: Sequence[Row]) -> tuple[Column, ...]:
    """The columns that mean something here; an interval is promised only where there is one.

    What was found stands left of what it cost, so that it is in sight on a narrow screen.
    """
    interval = any(row.difference and row.difference.low is not None for row in rows)
    heading = (
        ('difference in val loss,', 'nats/token [95 % t interval]')
        if interval
        else ('difference in', 'val loss, nats/token')
    )
    val, *test = map(_measured, losses(rows))
    found = (*map(_measured, scores(rows)), val, Column(heading, _difference), *test)
    return (*NAMES, *found, *COSTS)


def text_table(rows: Sequence[Row]) -> str:
    """Aligned plain text, two heading lines, one line per row."""
    columns = columns_of(rows)
    lines = [
        [column.heading[0] for column in columns],
        [column.heading[1] for column in columns],
        *([_one_line(column.text(row)) for column in columns] for row in rows),
    ]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    rule = ['-' * width for width in widths]
    return '\n'.join(
        '  '.join(
            cell.ljust(width) if column.left else cell.rjust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in [*lines[:2], rule, *lines[2:]]
    )


def _one_line(text: str) -> str:
    return ' '.join(text.split())


def markdown_table(rows: Sequence[Row]) -> str:
    """A pipe table; pipes and backslashes in names are escaped."""
    columns = columns_of(rows)

    def line(cells: Sequence[str]) -> str:
        escaped = (_one_line(c).replace('\\', '\\\\').replace('|', '\\|') for c in cells)
        return f'| {" | ".join(escaped)} |'

    return '\n'.join(
        [
            line([column.title for column in columns]),
            line([':--' if column.left else '--:' for column in columns]),
            *(line([column.text(row) for column in columns]) for row in rows),
        ]
    )


def csv_table(rows: Sequence[Row]) -> str:
    """Unrounded numbers, one line per row; an empty field means there is no such number."""
    out = io.StringIO()
    fields = [measure.field for measure in losses(rows) + scores(rows)]
    records = [_record(row, fields) for row in rows]
    writer = csv.DictWriter(out, fieldnames=list(records[0]), lineterminator='\n')
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


def _record(row: Row, fields: Sequence[str]) -> dict[str, object]:
    trial = row.example
    record: dict[str, object] = {
        'variant': row.variant,
        'size': row.size,
        'is_baseline': int(row.is_baseline),
        'd_model': trial.config['d_model'],
        'd_ff': trial.config['d_ff'],
        'weights': trial.weights['total'],
        'target_weights': trial.target_weights,
        'residual': trial.residual,
        'attention_weights': trial.weights['attention'],
        'flops_per_token': trial.flops_per_token,
        'cache_floats_per_token': trial.cache_floats_per_token,
        'learning_rate': row.learning_rate,
        'learning_rates_run': ' '.join(f'{rate:g}' for rate in row.learning_rates),
        'learning_rate_at_edge': int(row.at_edge),
        'seeds': ' '.join(str(seed) for seed in sorted(t.seed for t in row.chosen)),
    }
    estimates = {'val_loss': row.val_loss}
    estimates |= {name: row.over_seeds(name) for name in fields}
    estimates['difference'] = row.difference
    for name, value in estimates.items():
        for part in ('mean', 'sd', 'low', 'high', 'n'):
            record[f'{name}_{part}'] = None if value is None else getattr(value, part)
    return record | {
        'tokens_per_second': _mean(row.of_cells('tokens_per_second')),
        'train_seconds': sum(row.of_cells('train_seconds')),
        'compile_seconds': sum(row.of_cells('compile_seconds')),
        'diverged': row.num_diverged,
        'trials': len(row.trials),
    }


def report_text(study: Study, rows: Sequence[Row]) -> str:
    """What a terminal shows: heading, table, notes and problems."""
    heading = [f'study {study.name}'] + ([study.question] if study.question else [])
    problems = [f'! {problem}' for problem in study.problems]
    parts = [*heading, '', text_table(rows), '', *notes(study, rows), *problems]
    return '\n'.join(parts) + '\n'


def report_markdown(study: Study, rows: Sequence[Row]) -> str:
    """The table and its notes as a Markdown document."""
    parts = [f'# {_one_line(study.name)}', '']
    if study.question:
        parts += [_one_line(study.question), '']
    parts += [markdown_table(rows), '']
    parts += [f'- {_one_line(note)}' for note in (*notes(study, rows), *study.problems)]
    return '\n'.join(parts) + '\n'
