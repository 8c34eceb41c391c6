"""The summary table as aligned text, Markdown and CSV, and the notes that belong under it."""

import csv
import dataclasses
import io
import math
from collections.abc import Callable, Sequence

from qkattn.report.load import Study
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


def _mean_sd(value: Estimate | None) -> str:
    if value is None:
        return NONE
    return f'{value.mean:.4f}' if value.sd is None else f'{value.mean:.4f} ± {value.sd:.4f}'


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


# What was found stands left of what it cost, so that it is in sight on a narrow screen.
COLUMNS = (
    Column(('variant', ''), lambda row: row.variant, left=True),
    Column(('size', ''), lambda row: row.size, left=True),
    Column(('val bits/byte', 'mean ± sd'), lambda row: _mean_sd(row.val_bits_per_byte)),
    Column(('difference in val loss,', 'nats/token [95 % t interval]'), _difference),
    Column(('test bits/byte', 'mean ± sd'), lambda row: _mean_sd(row.test_bits_per_byte)),
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


def columns_of(rows: Sequence[Row]) -> tuple[Column, ...]:
    """The columns, with a heading that promises an interval only where there is one."""
    if any(row.difference and row.difference.low is not None for row in rows):
        return COLUMNS
    narrow = Column(('difference in', 'val loss, nats/token'), _difference)
    return tuple(narrow if column.text is _difference else column for column in COLUMNS)


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


_ESTIMATES = ('val_loss', 'val_bits_per_byte', 'test_bits_per_byte', 'difference')


def csv_table(rows: Sequence[Row]) -> str:
    """Unrounded numbers, one line per row; an empty field means there is no such number."""
    out = io.StringIO()
    records = [_record(row) for row in rows]
    writer = csv.DictWriter(out, fieldnames=list(records[0]), lineterminator='\n')
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


def _record(row: Row) -> dict[str, object]:
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
    for name in _ESTIMATES:
        value: Estimate | None = getattr(row, name)
        for part in ('mean', 'sd', 'low', 'high', 'n'):
            record[f'{name}_{part}'] = None if value is None else getattr(value, part)
    return record | {
        'tokens_per_second': _mean(row.of_cells('tokens_per_second')),
        'train_seconds': sum(row.of_cells('train_seconds')),
        'compile_seconds': sum(row.of_cells('compile_seconds')),
        'diverged': row.num_diverged,
        'trials': len(row.trials),
    }


def notes(study: Study, rows: Sequence[Row]) -> tuple[str, ...]:
    """Sentences under the table: what the numbers are, and what they do not show."""
    said = []
    if study.baseline is not None:
        said.append(
            f'Difference: val loss minus that of {study.baseline} at the same size, paired by '
            'seed, in nats/token; above zero is worse than the baseline.'
        )
        said += [
            f'No difference at {size}: the baseline {study.baseline} has no finished trial there.'
            for size in study.sizes
            if not any(row.is_baseline and row.chosen for row in rows if row.size == size)
        ]
    counts = sorted({len(row.chosen) for row in rows if row.chosen})
    if counts and counts[-1] > 1:
        n = '-'.join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
        said.append(
            f'Intervals (95 %, Student t) over {n} seeds are descriptive: they are not corrected '
            'for the number of comparisons and are no verdict.'
        )
    else:
        said.append('One seed: no interval can be given, and a difference may be seed noise.')
    said.append(_learning_rate_note(rows))
    if any(row.at_edge for row in rows):
        said.append(
            '* The best learning rate is the smallest or largest that was run, so it is not '
            'bracketed.'
        )
    diverged = sum(row.num_diverged for row in rows)
    if diverged:
        total = sum(len(row.trials) for row in rows)
        said.append(f'{diverged} of {total} trials diverged; they are counted and never averaged.')
    residuals = [abs(row.example.residual) for row in rows if row.example.residual is not None]
    if study.matched is not None and residuals:
        said.append(
            f'Weights are matched in {study.matched.replace("_", "-")} count; the largest residual '
            f'is {100 * max(residuals):.3f} %.'
        )
    elif study.matched is None:
        said.append('Weights are not matched between variants.')
    said.append('FLOPs/token are those of a forward pass.')
    said.append("tokens/s and cell s are the whole cell's, all its trials together, training only.")
    if study.missing:
        names = ', '.join(f'{c.variant} at {c.size} ({c.progress})' for c in study.missing)
        said.append(f'Missing cells, {len(study.missing)} of {len(study.cells)}: {names}.')
    return tuple(said)


def _learning_rate_note(rows: Sequence[Row]) -> str:
    tuned = [row for row in rows if len(row.learning_rates) > 1]
    if not tuned:
        rates = sorted({rate for row in rows for rate in row.learning_rates})
        listed = ', '.join(f'{rate:g}' for rate in rates)
        return f'The learning rate was not tuned per arm: each ran at one only ({listed}).'
    listed = ', '.join(f'{rate:g}' for rate in sorted({r for t in tuned for r in t.learning_rates}))
    said = (
        f'Each row is shown at the learning rate with its lowest mean val loss, of {listed}; the '
        'same seeds chose it, so the loss is slightly optimistic.'
    )
    if len(tuned) < len(rows):
        names = ', '.join(f'{r.variant} at {r.size}' for r in rows if len(r.learning_rates) == 1)
        said += f' Not tuned, one learning rate only: {names}.'
    return said


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
