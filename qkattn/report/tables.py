"""A report as text: table.md, table.csv, and what a terminal shows.

Beside the main table are sheets: parts of differences, controls, yardsticks, scaling laws, variants
and the ledger. Each is declared once, as rows of text, and printed in every format.
"""

import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from markupsafe import Markup

from qkattn.jobs.output import short, text_table, visible
from qkattn.report import columns, prose
from qkattn.report.columns import Heading, Table
from qkattn.report.prose import NONE, interval, one_line, rounded, sentences, words
from qkattn.stats.decision import ALPHA, level
from qkattn.stats.inference import POWER
from qkattn.stats.scaling import Interval, Law, Problem
from qkattn.storage import ledger
from qkattn.study.arm_key import ArmKey
from qkattn.verdict import rules
from qkattn.verdict.findings import Findings
from qkattn.verdict.trained_arm import TrainedArm
from qkattn.verdict.trained_study import TrainedStudy

WIDTH = 100  # columns that a report fits into, of a terminal or a log


def files(findings: Findings) -> dict[str, str]:
    """The files of a report that are compared with logs, by name."""
    return {'table.md': report_markdown(findings), 'table.csv': csv_table(findings)}


def csv_table(findings: Findings) -> str:
    """A row per arm, controls last, with the digits of `rounded`; empty without a number."""
    of_study = [*columns.columns(findings)]
    arms = findings.every_arm
    rows = [{n: rounded(v) for c in of_study for n, v in c.cells(arm).items()} for arm in arms]
    return csv_text(rows)


def csv_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows of equal names as CSV, the names first.

    Text that begins like a formula gets an apostrophe before it, so that a spreadsheet shows it as
    text. Numbers are written as they are, with their sign.
    """
    cells = [{_as_text(name): _as_text(value) for name, value in row.items()} for row in rows]
    return pd.DataFrame(cells, dtype=object).to_csv(index=False, lineterminator='\n')


# What spreadsheets take for the beginning of a formula.
_FORMULA = ('=', '+', '-', '@', '\t', '\r')


def _as_text(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell


def markdown_table(titles: Sequence[Heading], rows: Sequence[Sequence[str]]) -> str:
    """A pipe table; cells are escaped, but for the markup in those that are `Markup`."""
    names = [markdown(title.replace('|/', '/').replace('|', ' ')) for title, _ in titles]
    places = [':--' if left else '--:' for _, left in titles]
    escaped = [[c if isinstance(c, Markup) else markdown(c) for c in row] for row in rows]
    lines = [names, places, *([c.replace('|', r'\|') for c in row] for row in escaped)]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def markdown(text: str) -> str:
    """Text that Markdown shows as it is, on one line: without HTML, code, images and links."""
    return _MARKUP.sub(lambda match: _ESCAPES[match[0]], visible(one_line(text)))


# A bracket that no tag begins with, and an ampersand of no entity, are text in Markdown.
_MARKUP = re.compile(r'<(?=[A-Za-z/!?])|&(?=#?\w+;)|[\\`]|(?<=\])[(\[:]')
_ESCAPES = {'<': '&lt;', '&': '&amp;'} | {char: f'\\{char}' for char in '\\`([:'}


Row = dict[str, str]  # cells by heading


class Sheet(NamedTuple):
    """A table as text; its title and the note under it are `name`'s in templates/sheets.j2."""

    name: str
    headings: Sequence[Heading]
    rows: Sequence[Sequence[str]]
    title: str
    note: str


def sheets(findings: Findings) -> list[Sheet]:
    """The tables of a study, in the order in which they are printed."""
    study = findings.study
    made = {
        'parts': _table(_parts(findings)),
        'controls': columns.printed(columns.CONTROL, findings, findings.controls),
        'yardsticks': _table(_yardsticks(findings)),
        'laws': _table(_laws(findings)),
        'forms': _table(_forms(findings)),
        'ledger': _table(_ledger(study)),
    }
    return [
        Sheet(name, *table, *prose.macro('sheets.j2', name, {'study': study}, findings=findings))
        for name, table in made.items()
        if table[1]
    ]


_LEFT = {'variant', 'size', 'corpus', 'form', 'A[n]', 'B[n]', 'no number, because'}
_LEFT |= {'time, UTC', 'event', 'details'}


def _table(rows: Iterator[Row]) -> Table:
    listed = list(rows)
    headings = [(name, name in _LEFT) for name in (listed[0] if listed else ())]
    return headings, [list(row.values()) for row in listed]


def _place(study: TrainedStudy, row: Any) -> Row:
    """The cells that identify an arm, or a variant over sizes or corpora, in this study."""
    place = {'variant': row.variant}
    for name, among in (('size', study.sizes), ('corpus', study.corpora)):
        if len(among) > 1 and hasattr(row, name):
            place[name] = getattr(row, name)
    return place


def _parts(findings: Findings) -> Iterator[Row]:
    """The difference at the same shape and reinvesting, which add up, and the longer budget."""
    study = findings.study
    for arm in findings.arms if findings.has_parts else ():
        if not arm.is_baseline:
            differences = {
                'at the same shape|minus the baseline': arm.parts.same_shape,
                'reinvesting|matched - same shape': arm.parts.reinvesting,
                'both|matched - baseline': arm.comparison,
            }
            if times := study.controls.longer:
                differences[f'at {times} x the steps|matched - baseline'] = arm.parts.longer
            texts = {n: interval(d.difference if d else None) for n, d in differences.items()}
            yield _place(study, arm) | texts


def _yardsticks(findings: Findings) -> Iterator[Row]:
    """Each baseline with the yardsticks that it has to beat."""
    for arm in rules.baselines(findings.study, findings.every_arm):
        yardstick = arm.yardstick
        best = yardstick.best(arm.split) if yardstick else None
        word_by_word = yardstick.bleu.get(arm.split) if yardstick else None
        row = {
            'size': arm.size,
            'corpus': arm.corpus,
            'trained|enough': 'no' if [*rules.untrained(arm)] else 'yes',
            'tokens|seen': prose.si(yardstick.seen) if yardstick else prose.NOT_RECORDED,
            f'{prose.SPLITS[findings.split]}|loss': f'{arm.loss.mean:.3f}' if arm.loss else NONE,
            'best counts|of these': best[0] if best else NONE,
            'their|loss': f'{best[1]:.3f}' if best else NONE,
        }
        for name, value, spec, task in (
            ('gain by|position', yardstick.gain if yardstick else None, '.3f', 'language'),
            ('BLEU', arm.bleu, '.1f', 'translation'),
            ('word by word,|BLEU', word_by_word, '.1f', 'translation'),
            ('worth of|sources', yardstick.sources if yardstick else None, '.3f', 'translation'),
        ):
            measured = prose.NOT_RECORDED if value is None else f'{value:{spec}}'
            row[name] = measured if yardstick and yardstick.task == task else NONE
        yield row


def _laws(findings: Findings) -> Iterator[Row]:
    """The law of each variant and the worth of its parameters, or why there is none."""
    study = findings.study
    for scaling in findings.scaling:
        law = scaling.law
        worth = scaling.worth
        fitted = dict.fromkeys(('E,|nats/token', 'A', 'a', 'R²'), NONE)
        loose = law.loose if isinstance(law, Law) else law
        if isinstance(law, Law) and not loose:
            numbers = _bounded(law.E), f'{law.A:.3g}', _bounded(law.a), f'{law.r_squared:.3f}'
            fitted = dict(zip(fitted, numbers, strict=True))
        problems = [x for x in (loose, worth) if isinstance(x, Problem)]
        why = '; '.join(map(prose.clause, problems)) or NONE
        per_parameter = _bounded(worth) if isinstance(worth, Interval) else NONE
        last = {'baseline parameters|per parameter': per_parameter, 'no number, because': why}
        yield _place(study, scaling) | fitted | last


def _bounded(number: Interval) -> str:
    """'0.300 [0.281, 0.319]'."""
    return f'{number.value:.3f} [{number.low:.3f}, {number.high:.3f}]'


def _forms(findings: Findings) -> Iterator[Row]:
    """The equations of each variant, with all options."""
    for name, arm in {arm.variant: arm for arm in findings.arms}.items():
        for form, score, value in prose.forms(arm.example.run.config['model']):
            yield {'variant': name, 'form': form, 'A[n]': score, 'B[n]': value}


def _ledger(study: TrainedStudy) -> Iterator[Row]:
    for entry in study.ledger.entries:
        arms = [ArmKey(*ledger.arm_key(arm)) for arm in entry.get('arms', ())]
        (details,) = prose.macro('sheets.j2', 'entered', {'study': study}, entry=entry, arms=arms)
        yield {
            'time, UTC': str(entry['time']).removesuffix('+00:00').replace('T', ' '),
            'event': words(entry['event']),
            'look': str(entry.get('look', NONE)),
            'family': str(entry.get('family', NONE)),
            'details': details,
        }


def headline(findings: Findings) -> str:
    """The result for a README: a narrow Markdown table and what was held equal.

    Arms in the order of their difference, the baseline first, size by size and corpus by corpus.
    """

    def rank(arm: TrainedArm) -> tuple:
        return not arm.is_baseline, arm.difference.mean if arm.difference else math.inf

    groups = prose.by_where(findings.arms, findings.study).values()
    arms = [arm for group in groups for arm in sorted(group, key=rank)]
    lines = sentences('headline.j2', study=findings.study, findings=findings)
    text = markdown(' '.join([*lines, summary(findings)[-1]]))
    return f'{markdown_table(*columns.printed(columns.HEADLINE, findings, arms))}\n\n{text}\n'


def settings(findings: Findings) -> list[str]:
    """'name: value' of the settings that all arms share, of the runs that results are from."""
    return sentences('settings.j2', study=findings.study, findings=findings)


def summary(findings: Findings) -> list[str]:
    """The result in sentences; the last one states what all arms share."""
    return sentences('summary.j2', study=findings.study, findings=findings)


def notes(findings: Findings) -> list[str]:
    """Notes under the table: the meaning of the numbers and their limits."""
    about: dict[str, Any] = {'study': findings.study, 'findings': findings, 'power': POWER}
    about |= {'alpha': ALPHA, 'level': level}
    return sentences('notes.j2', **about, measures=columns.measured(findings))


def report_markdown(findings: Findings) -> str:
    """The result, the tables and their notes as a Markdown document."""
    study = findings.study
    question = [study.question] if study.question else []
    parts = [f'# {markdown(study.name)}', *map(markdown, [*question, *summary(findings)])]
    parts.append(markdown_table(*columns.printed(columns.PAGE, findings, findings.arms)))
    parts.append(_bullets([*notes(findings), *study.problems]))
    for sheet in sheets(findings):
        table = markdown_table(sheet.headings, sheet.rows)
        parts += [f'## {markdown(sheet.title)}', table, markdown(sheet.note)]
    return '\n\n'.join([*parts, '## Settings', _bullets(settings(findings))]) + '\n'


def _bullets(items: Iterable[str]) -> str:
    return '\n'.join(f'- {markdown(item)}' for item in items)


def terminal_text(findings: Findings, page: Path) -> str:
    """The result, the columns of the headline that fit, the yardsticks, and where the rest is."""
    study = findings.study
    lines = [f'study {study.name}', *([study.question] if study.question else []), '']
    lines += [*summary(findings), *(f'! {problem}' for problem in study.problems)]
    made = [
        columns.printed(columns.HEADLINE, findings, findings.arms),
        _table(_yardsticks(findings)),
    ]
    wrapper = textwrap.TextWrapper(WIDTH, break_long_words=False, break_on_hyphens=False)
    parts = ['\n'.join(wrapper.fill(visible(one_line(line))) for line in lines)]
    parts += [_fitted(*table) for table in made if table[1]]
    more = f'all columns, notes and settings: {page.with_name("table.md")}'
    return '\n\n'.join([*parts, f'{more}\nreport: {page}'])


def _fitted(titles: Sequence[Heading], rows: Sequence[Sequence[str]]) -> str:
    """The first columns, as many as fit.

    The first loses its middle beyond a quarter of the width, or where its texts begin to differ.
    """
    names = [visible(row[0]) for row in rows]
    longest = WIDTH // 4
    while len({short(name, longest) for name in names}) < len({*names}):
        longest += 1
    rows = [[short(name, longest), *row[1:]] for name, row in zip(names, rows, strict=True)]
    for number in range(len(titles), 0, -1):
        table = text_table(titles[:number], [row[:number] for row in rows])
        if max(map(len, table.splitlines())) <= WIDTH:
            break
    return table
