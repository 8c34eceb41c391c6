"""A report as text: table.txt, .md, .csv and .tex, trials.csv, and what a terminal shows."""

import math
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from qkattn.jobs.output import visible
from qkattn.report import prose
from qkattn.report.columns import Column, columns, measured
from qkattn.report.figures.style import short
from qkattn.report.prose import environment, one_line, rounded, sentences
from qkattn.report.sheets import Heading, sheets, yardsticks
from qkattn.stats.inference import LEVEL, POWER
from qkattn.study.tuning import KNOBS
from qkattn.verdict.arms import Arm
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study
from qkattn.verdict.runs import Run, Trial


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
    lines = sentences('headline.j2', study=study, found=found)
    text = markdown(' '.join([*lines, summary(study, found)[-1]]))
    return f'{markdown_table(headings(of_study), rows)}\n\n{text}\n'


def settings(study: Study, found: Findings) -> list[tuple[str, str]]:
    """Names and values of the settings that all arms share, of the runs that results are from."""
    runs = [study.by_name[arm.example.run] for arm in found.arms]
    models = [run.config['model'] for run in runs]
    config = runs[0].config
    lines = sentences('settings.j2', study=study, found=found, config=config, models=models)
    return [(name, value) for name, _, value in (line.partition(': ') for line in lines)]


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
    parts += ['', 'Settings', '', *(f'{name}: {value}' for name, value in settings(study, found))]
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


_LATEX = {
    '\\': r'\textbackslash{}',
    **{character: f'\\{character}' for character in '{}$&#%_'},
    '^': r'\textasciicircum{}',
    '~': r'\textasciitilde{}',
    '<': r'\textless{}',
    '>': r'\textgreater{}',
    '|': r'\textbar{}',
    '"': "''",
    '±': r'\ensuremath{\pm}',
    '→': r'\ensuremath{\rightarrow}',
    '×': r'\ensuremath{\times}',
    '–': r'\textendash{}',
    '…': r'\ldots{}',
}
LAST_LATIN = 0x17F


def latex_table(study: Study, found: Findings) -> str:
    """A table environment with a row per arm; what all arms have in common is in its caption."""
    of_study = [column for column in columns(study, found) if column.headline]
    rows = [list(map(latex, row)) for row in printed(of_study, found.arms)]
    names = [latex(column.heading.replace('|', ' ')) for column in of_study]
    caption = environment(html=False).get_template('table.tex.j2').render(study=study, found=found)
    text = (
        pd.DataFrame(rows, columns=names)
        .style.hide(axis='index')
        .to_latex(
            caption=latex(caption.strip()),
            column_format=f'@{{}}{"".join("l" if c.left else "r" for c in of_study)}@{{}}',
            hrules=True,
            position_float='centering',
        )
    )
    return f'% needs \\usepackage{{booktabs}}\n{text}'


def latex(text: str) -> str:
    """`text` for LaTeX's text mode, on one line; a sign before a digit becomes a minus.

    A character outside of what LaTeX's default fonts hold is written as its code point.
    """

    def escape(character: str) -> str:
        code = ord(character)
        return _LATEX.get(character, character if code <= LAST_LATIN else f'[U+{code:04X}]')

    pieces = re.split(r'(?<![\w.])-(?=\d)', re.sub('[ \t\n]+', ' ', text))
    # Ligatures would join the hyphens of a name.
    escaped = (''.join(map(escape, piece)).replace('--', '-{}-') for piece in pieces)
    return r'\ensuremath{-}'.join(escaped)


WIDTH = 100
"""Columns of a terminal that a report fits into."""


def width_of_terminal() -> int:
    """The columns of this terminal, at most WIDTH, which is that of a log, too."""
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 0)).columns)


def terminal_text(study: Study, found: Findings, page: Path, width: int) -> str:
    """What was found, the table of the headline, problems, and where the rest is."""
    # The headline's columns come first, then those of both the full and the brief table.
    of_study = [c for c in columns(study, found) if c.headline or (c.brief and c.full)]
    of_study.sort(key=lambda column: not column.headline)
    table = fitted(headings(of_study), printed(of_study, found.arms), width)
    problems = [f'! {problem}' for problem in study.problems]
    lines = [f'study {study.name}', *([study.question] if study.question else []), '']
    lines += [*summary(study, found), *problems]
    more = f'all columns, notes and settings: {page.with_name("table.txt")}'
    lines = [wrapped(visible(one_line(line)), width) for line in lines]
    beside = yardsticks(study, found)
    measured = ['', fitted(*beside, width)] if beside[1] else []
    return '\n'.join([*lines, '', table, *measured, '', more, f'report: {page}'])


def fitted(titles: Sequence[Heading], rows: Sequence[Sequence[str]], width: int) -> str:
    """The columns that fit, in order; the first loses its middle beyond a quarter of the width."""
    kept = [0]
    rows = [[short(visible(row[0]), width // 4), *row[1:]] for row in rows]

    def table(columns: Sequence[int]) -> str:
        of_rows = [[row[column] for column in columns] for row in rows]
        return text_table([titles[column] for column in columns], of_rows)

    for column in range(1, len(titles)):
        if max(map(len, table([*kept, column]).splitlines())) <= width:
            kept.append(column)
    return table(kept)


def wrapped(text: str, width: int) -> str:
    """`text` in lines of a terminal; a path is not broken."""
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def trials_csv(study: Study, found: Findings) -> str:
    """CSV with one row per trial, in the order of the plan: arm, settings, end, metrics, run.

    Numbers are unrounded, in the unit of the result files, empty where there is none; what no trial
    has is left out. `chosen` is 1 for the trials that the results of an arm are the mean of.
    """
    chosen = {id(trial) for arm in (*found.arms, *found.controls) for trial in arm.chosen}
    rows = [
        _row(run, trial) | {'chosen': int(id(trial) in chosen), 'directory': run.directory}
        for run in study.runs
        for trial in run.trials
    ]
    table = pd.DataFrame(rows, dtype=object)
    optional = {'diverged_at', *(name for trial in study.trials for name in trial.metrics)}
    unmeasured = [name for name in optional if table[name].isna().all()]
    return table.drop(columns=unmeasured).to_csv(index=False, lineterminator='\n')


def _row(run: Run, trial: Trial) -> dict[str, Any]:
    return {
        **trial.key._asdict(),
        **{name: getattr(trial, name) for name in ('stage', 'knob', 'seed')},
        **dict(zip(KNOBS, trial.at, strict=True)),
        **{
            name: getattr(trial, name)
            for name in ('status', 'diverged_at', 'num_steps', 'num_tokens')
        },
        'parameters': trial.parameters['total'],
        **{name: getattr(trial, name) for name in ('target_parameters', 'residual')},
        **trial.metrics,
        'run': run.name,
    }
