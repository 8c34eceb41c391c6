"""The headline of a study as a table for a LaTeX article, which needs booktabs."""

import re

import pandas as pd

from qkattn.report.columns import columns
from qkattn.report.prose import environment
from qkattn.report.tables import printed
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study

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
        return _ESCAPES.get(character, character if code <= LAST_LATIN else f'[U+{code:04X}]')

    pieces = re.split(r'(?<![\w.])-(?=\d)', re.sub('[ \t\n]+', ' ', text))
    # Ligatures would join the hyphens of a name.
    escaped = (''.join(map(escape, piece)).replace('--', '-{}-') for piece in pieces)
    return r'\ensuremath{-}'.join(escaped)
