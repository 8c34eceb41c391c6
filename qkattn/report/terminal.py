"""What a terminal shows of a report: at most so many columns; the rest is in the files."""

import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

from qkattn.jobs.output import visible
from qkattn.report.columns import columns
from qkattn.report.figures.style import short
from qkattn.report.prose import one_line
from qkattn.report.sheets import Heading, yardsticks
from qkattn.report.tables import headings, printed, summary, text_table
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study

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
    """A table of the columns that fit, in their order.

    The first column, a name, loses its middle where it takes more than a quarter of the width.
    """
    kept = [0]
    rows = [[short(visible(row[0]), width // 4), *row[1:]] for row in rows]

    def table(places: Sequence[int]) -> str:
        of_rows = [[row[place] for place in places] for row in rows]
        return text_table([titles[place] for place in places], of_rows)

    for place in range(1, len(titles)):
        if max(map(len, table([*kept, place]).splitlines())) <= width:
            kept.append(place)
    return table(kept)


def wrapped(text: str, width: int) -> str:
    """`text` in lines of a terminal; a path is not broken."""
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
