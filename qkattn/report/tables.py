"""One data frame, of the columns of `qkattn.report.columns`, as CSV, text, Markdown and LaTeX."""

import math
import re
from collections.abc import Iterable, Sequence

import pandas as pd

from qkattn.report.columns import Column, columns, measured
from qkattn.report.prose import by_size, environment, one_line, sentences
from qkattn.stats.inference import LEVEL, POWER
from qkattn.verdict.arms import Arm
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study


def frame(study: Study, found: Findings) -> pd.DataFrame:
    """Unrounded numbers, one row per arm; None where there is no such number."""
    of_study = columns(study, found)
    records = [dict(cell for c in of_study for cell in c.cells(arm)) for arm in found.arms]
    return pd.DataFrame(records, dtype=object)


def csv_table(study: Study, found: Findings) -> str:
    """The data frame as CSV; an empty field where there is no such number."""
    return frame(study, found).to_csv(index=False, lineterminator='\n')


def printed(of_study: Sequence[Column], arms: Iterable[Arm]) -> list[list[str]]:
    """The cells of each arm as printed."""
    return [[column.print(arm) for column in of_study] for arm in arms]


def headed(study: Study, found: Findings) -> list[Column]:
    return [column for column in columns(study, found) if column.heading]


def text_table(study: Study, found: Findings) -> str:
    """Aligned plain text, two heading lines, one line per arm."""
    of_study = headed(study, found)
    headings = zip(*(f'{column.heading}|'.split('|')[:2] for column in of_study), strict=True)
    lines = [*headings, *printed(of_study, found.arms)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    lines.insert(2, ['-' * width for width in widths])
    places = [f'{"<" if of.left else ">"}{w}' for of, w in zip(of_study, widths, strict=True)]
    return '\n'.join('  '.join(map(format, line, places)).rstrip() for line in lines)


def markdown_table(of_study: Sequence[Column], arms: Iterable[Arm]) -> str:
    """A pipe table; pipes and backslashes in names are escaped."""
    titles = [column.heading.replace('|', ' ') for column in of_study]
    places = [':--' if column.left else '--:' for column in of_study]
    escapes = str.maketrans({'\\': r'\\', '|': r'\|'})
    rows = [titles, places, *printed(of_study, arms)]
    return '\n'.join(f'| {" | ".join(c.translate(escapes) for c in row)} |' for row in rows)


def headline(study: Study, found: Findings) -> str:
    """The result for a README: a Markdown table of few columns, and what was held equal.

    Arms in the order of their difference, the baseline first, size by size.
    """
    of_study = [column for column in columns(study, found) if column.headline]

    def rank(arm: Arm) -> tuple:
        difference = arm.difference.mean if arm.difference else math.inf
        return study.sizes.index(arm.size), not arm.is_baseline, difference

    table = markdown_table(of_study, sorted(found.arms, key=rank))
    return f'{table}\n\n{summary(study, found)[-1]}\n'


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
    """What a terminal shows: heading, what was found, table, notes and problems."""
    heading = [f'study {study.name}'] + ([study.question] if study.question else [])
    problems = [f'! {problem}' for problem in study.problems]
    table = text_table(study, found)
    parts = [*heading, '', *summary(study, found), '', table, '', *notes(study, found), *problems]
    return '\n'.join(parts) + '\n'


def report_markdown(study: Study, found: Findings) -> str:
    """What was found, the table and its notes as a Markdown document."""
    question = [one_line(study.question)] if study.question else []
    paragraphs = [f'# {one_line(study.name)}', *question, *summary(study, found)]
    rest = [f'- {one_line(note)}' for note in (*notes(study, found), *study.problems)]
    table = markdown_table(headed(study, found), found.arms)
    return '\n\n'.join([*paragraphs, table, '\n'.join(rest)]) + '\n'


def latex_table(study: Study, found: Findings) -> str:
    """A table environment, booktabs and nothing else; the caption says what is equal."""
    of_study = [column for column in columns(study, found) if column.brief]
    sizes = [printed(of_study, of_size) for of_size in by_size(found.arms).values()]
    template = environment(html=False).get_template('table.tex.j2')
    return template.render(study=study, found=found, columns=of_study, sizes=sizes, latex=latex)


_ESCAPES = {
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


def latex(text: str) -> str:
    """`text` for LaTeX's text mode, on one line; a sign before a digit becomes a minus.

    A character outside of what LaTeX's default fonts hold is written as its code point.
    """

    def escape(character: str) -> str:
        code = ord(character)
        return _ESCAPES.get(character, character if code <= LAST_LATIN else f'[U+{code:04X}]')

    pieces = re.split(r'(?<![\w.])-(?=\d)', one_line(text))
    # Ligatures would join the hyphens of a name.
    escaped = (''.join(map(escape, piece)).replace('--', '-{}-') for piece in pieces)
    return r'\ensuremath{-}'.join(escaped)
