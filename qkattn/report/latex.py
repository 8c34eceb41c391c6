"""The table of a study for a LaTeX article: booktabs and nothing else, no larger than its text."""

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from qkattn.report import prose
from qkattn.report.column import Column
from qkattn.report.columns import columns
from qkattn.report.prose import environment, one_line
from qkattn.verdict.arms import Arm
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study

# Widths are in ems of \footnotesize; \textwidth is TEXT of them or more in `article` at 10, 11 and
# 12 points. There is one GAP between columns. A line of a cell takes CELL at most, one of a name
# NAME, those of all names of an arm NAMES; headings break beyond the widest cell and HEADING.
TEXT, GAP, CELL, NAME, NAMES, HEADING = 38.9, 0.8, 14.5, 12.0, 21.0, 6.5
# Lines of arms for which a page has room, below caption and heading.
LINES = 30
# Bounds of the widths of characters in Computer Modern.
WIDTHS = {
    character: width
    for width, characters in {
        0.28: "!',.:;[]`il|",
        0.4: ' fj_It()rs',
        0.5: '0123456789acegoz?/$"*^~{}\\–',
        0.56: 'bdhknpquvxyJS',
        0.8: 'ABCDEFGHKLNOPQRTUVXYZ',
        0.84: 'mw+-<=>@&#%±×',
        1.2: 'MW→…\u2003',
    }.items()
    for character in characters
}
INDENT = '\u2003'
# Names break behind punctuation, and before what is itself the name of a variant or a module.
WORD = re.compile(r'\S+\s*')
PIECE = re.compile(r'.+?(?:\s+|(?<=[/,:?(])|(?<==)(?=\w+/)|(?<=\.)(?=[^\W\d])|$)')


class Stacked(NamedTuple):
    """A column as lines of text: of its heading, and of its cells in each group of arms."""

    place: str
    heading: Sequence[str]
    groups: Sequence[Sequence[Sequence[str]]]
    width: float


def latex_table(study: Study, found: Findings) -> str:
    """A table environment, with what is equal in its caption.

    Columns for which the text is too narrow stand in a further one, beside the same names, and so
    do arms for which a page is too short.
    """
    brief = [column for column in columns(study, found) if column.brief]
    groups = list(prose.by_where(found.arms, study).values())
    num_names = sum(1 for _ in itertools.takewhile(lambda column: column.left, brief))
    limits = itertools.chain([min(NAME, NAMES / num_names)] * num_names, itertools.repeat(CELL))
    stacked = [_stacked(*of, groups) for of in zip(brief, limits, strict=False)]
    template = environment(html=False).get_template('table.tex.j2')
    return template.render(
        study=study,
        found=found,
        tables=[
            table
            for block in _blocks(stacked[:num_names], stacked[num_names:])
            for table in _tables(block)
        ],
        gap=GAP / 2,
        latex=latex,
    )


def _stacked(column: Column, limit: float, groups: Sequence[Sequence[Arm]]) -> Stacked:
    cells = [[_wrapped(column.print(arm), limit, INDENT) for arm in arms] for arms in groups]
    body = [line for of in cells for cell in of for line in cell]
    limit = max(HEADING, *map(em, (*body, *column.heading.replace('|', ' ').split())))
    heading = [line for part in column.heading.split('|') for line in _wrapped(part, limit)]
    width = max(map(em, (*heading, *body)))
    return Stacked('l' if column.left else 'r', heading, cells, width)


def _blocks(names: list[Stacked], others: Sequence[Stacked]) -> Iterator[list[Stacked]]:
    """The columns of each tabular: the names, and as many of the others as fit beside them."""
    block = names
    for column in others:
        if block != names and sum(of.width + GAP for of in (*block, column)) - GAP > TEXT:
            yield block
            block = names
        block = [*block, column]
    yield block


def _tables(block: Sequence[Stacked]) -> Iterator[dict[str, Any]]:
    """Alignments, lines of the heading and groups of lines of each table, of LINES or fewer."""
    heading = _lines([of.heading[::-1] for of in block])[::-1]
    tables: list[list[list[str]]] = [[]]
    for groups in zip(*(of.groups for of in block), strict=True):
        tables[-1].append([])
        for cells in zip(*groups, strict=True):
            lines = _lines(cells)
            if tables[-1][0] and sum(map(len, tables[-1])) + len(lines) > LINES:
                tables.append([[]])
            tables[-1][-1] += lines
    for of in tables:
        places = ''.join(column.place for column in block)
        yield {'places': places, 'heading': heading, 'groups': [group for group in of if group]}


def _lines(cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a tabular for cells of several lines each."""
    lines = itertools.zip_longest(*cells, fillvalue='')
    return [' & '.join(map(latex, line)) for line in lines]


def em(text: str) -> float:
    """A bound of the width of `text`, in ems; of what is written as a code point, too."""
    return sum(WIDTHS.get(c, 0.9 if ord(c) <= LAST_LATIN else 5.0) for c in text)


def _wrapped(text: str, limit: float, indent: str = '') -> list[str]:
    """`text` as lines of at most `limit` ems, all but the first indented; long words are cut."""
    lines = ['']
    for piece in (PIECE if indent else WORD).findall(one_line(text)):
        for part in [piece] if em(indent + piece.rstrip()) <= limit else piece:
            if lines[-1] and em(lines[-1] + part.rstrip()) > limit:
                lines.append(indent)
            lines[-1] += part
    return [line.rstrip(' ') for line in lines]


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
    INDENT: r'\quad{}',
}
LAST_LATIN = 0x17F


def latex(text: str) -> str:
    """`text` for LaTeX's text mode, on one line; a sign before a digit becomes a minus.

    A character outside of what LaTeX's default fonts hold is written as its code point.
    """

    def escape(character: str) -> str:
        code = ord(character)
        return _ESCAPES.get(character, character if code <= LAST_LATIN else f'[U+{code:04X}]')

    pieces = re.split(r'(?<![\w.])-(?=\d)', re.sub('[ \t\n]+', ' ', text))
    # Ligatures would join the hyphens of a name.
    escaped = (''.join(map(escape, piece)).replace('--', '-{}-') for piece in pieces)
    return r'\ensuremath{-}'.join(escaped)
