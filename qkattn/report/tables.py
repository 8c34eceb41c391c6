"""One data frame, of the columns of `qkattn.report.columns`, as CSV, text and Markdown."""

import math
import re
from collections.abc import Iterable, Sequence

import pandas as pd
from markupsafe import Markup

from qkattn.jobs.output import visible
from qkattn.report import prose
from qkattn.report.column import Column
from qkattn.report.columns import columns, measured
from qkattn.report.prose import one_line, rounded, sentences
from qkattn.report.sheets import Heading, sheets
from qkattn.stats.inference import LEVEL, POWER
from qkattn.verdict.arms import Arm
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study


def frame(study: Study, found: Findings) -> pd.DataFrame:
    """Unrounded numbers, one row per arm, controls last; None where there is no such number."""
    of_study, arms = columns(study, found), (*found.arms, *found.controls)
    records = [dict(cell for c in of_study for cell in c.cells(arm)) for arm in arms]
    return pd.DataFrame(records, dtype=object)


def csv_table(study: Study, found: Findings) -> str:
    """The data frame as CSV, with the digits of `rounded`; an empty field where it has None."""
    table = frame(study, found)
    stored = pd.DataFrame({name: map(rounded, table[name]) for name in table}, dtype=object)
    return stored.to_csv(index=False, lineterminator='\n')


def printed(of_study: Sequence[Column], arms: Iterable[Arm]) -> list[list[str]]:
    """The cells of each arm as printed."""
    return [[column.print(arm) for column in of_study] for arm in arms]


def headed(study: Study, found: Findings) -> list[Column]:
    return [column for column in columns(study, found) if column.heading and column.full]


def headings(of_study: Sequence[Column]) -> list[Heading]:
    return [(column.heading, column.left) for column in of_study]


def text_table(titles: Sequence[Heading], rows: Sequence[Sequence[str]]) -> str:
    """Aligned plain text, two heading lines, one line per row; what is not text is escaped."""
    rows = [list(map(visible, row)) for row in rows]
    lines = [*zip(*(f'{title}|'.split('|')[:2] for title, _ in titles), strict=True), *rows]
    lines = [line for line in lines if any(line)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    lines.insert(len(lines) - len(rows), ['-' * width for width in widths])
    places = [f'{"<" if left else ">"}{w}' for (_, left), w in zip(titles, widths, strict=True)]
    return '\n'.join('  '.join(map(format, line, places)).rstrip() for line in lines)


def markdown_table(titles: Sequence[Heading], rows: Sequence[Sequence[str]]) -> str:
    """A pipe table; cells are escaped, but for the markup in those that are `Markup`."""
    names = [markdown(title.replace('|', ' ')) for title, _ in titles]
    places = [':--' if left else '--:' for _, left in titles]
    of_rows = [[c if isinstance(c, Markup) else markdown(c) for c in row] for row in rows]
    lines = [names, places, *([c.replace('|', r'\|') for c in row] for row in of_rows)]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def markdown(text: str) -> str:
    """Text that Markdown shows as it is, on one line: without HTML, code, images and links."""
    return _MARKUP.sub(lambda found: _ESCAPES[found[0]], visible(one_line(text)))


# A bracket that no tag begins with, and an ampersand of no entity, are text in Markdown.
_MARKUP = re.compile(r'<(?=[A-Za-z/!?])|&(?=#?\w+;)|[\\`]|(?<=\])[(\[:]')
_ESCAPES = {'<': '&lt;', '&': '&amp;'} | {char: f'\\{char}' for char in '\\`([:'}


def headline(study: Study, found: Findings) -> str:
    """The result for a README: a Markdown table of few columns, and what was held equal.

    Arms in the order of their difference, the baseline first, size by size and corpus by corpus.
    """
    of_study = [column for column in columns(study, found) if column.headline]
    groups = list(prose.by_where(found.arms, study))

    def rank(arm: Arm) -> tuple:
        difference = arm.difference.mean if arm.difference else math.inf
        return groups.index(prose.where(study, arm)), not arm.is_baseline, difference

    rows = printed(of_study, sorted(found.arms, key=rank))
    said = sentences('headline.j2', study=study, found=found)
    text = markdown(' '.join([*said, summary(study, found)[-1]]))
    return f'{markdown_table(headings(of_study), rows)}\n\n{text}\n'


def settings(study: Study, found: Findings) -> list[tuple[str, str]]:
    """Names and values of the settings that all arms share, of the runs that results are from."""
    runs = [study.by_name[arm.example.run] for arm in found.arms]
    models = [run.config['model'] for run in runs]
    said = sentences('settings.j2', study=study, found=found, config=runs[0].config, models=models)
    return [(name, value) for name, _, value in (line.partition(': ') for line in said)]


def summary(study: Study, found: Findings, html: bool = False) -> list[str]:
    """What was found, in sentences; the last one is what all arms have in common."""
    return sentences('summary.j2', html=html, study=study, found=found)


def notes(study: Study, found: Findings, with_remarks: bool = True) -> list[str]:
    """Sentences under the table: what the numbers are, and what they do not show."""
    return sentences(
        'notes.j2',
        study=study,
        found=found,
        columns=headed(study, found),
        measures=measured(found),
        with_remarks=with_remarks,
        level=LEVEL,
        power=POWER,
    )


def report_text(study: Study, found: Findings) -> str:
    """What a terminal shows: heading, what was found, tables, notes and problems."""
    heading = [f'study {study.name}'] + ([study.question] if study.question else [])
    problems = [f'! {problem}' for problem in study.problems]
    of_study = headed(study, found)
    table = text_table(headings(of_study), printed(of_study, found.arms))
    parts = [*heading, '', *summary(study, found), '', table, '', *notes(study, found), *problems]
    for sheet in sheets(study, found):
        parts += ['', sheet.title, '', text_table(sheet.headings, sheet.rows), '', sheet.note]
    parts += ['', 'Settings', '', *(f'{name}: {of}' for name, of in settings(study, found))]
    return '\n'.join(visible(line) for part in parts for line in part.split('\n')) + '\n'


def report_markdown(study: Study, found: Findings) -> str:
    """What was found, the tables and their notes as a Markdown document."""
    question = [study.question] if study.question else []
    of_study = headed(study, found)
    parts = [f'# {markdown(study.name)}', *map(markdown, [*question, *summary(study, found)])]
    parts.append(markdown_table(headings(of_study), printed(of_study, found.arms)))
    parts.append(_bullets([*notes(study, found), *study.problems]))
    for sheet in sheets(study, found):
        table = markdown_table(sheet.headings, sheet.rows)
        parts += [f'## {markdown(sheet.title)}', table, markdown(sheet.note)]
    lines = [f'{name}: {value}' for name, value in settings(study, found)]
    return '\n\n'.join([*parts, '## Settings', _bullets(lines)]) + '\n'


def _bullets(items: Iterable[str]) -> str:
    return '\n'.join(f'- {markdown(item)}' for item in items)
