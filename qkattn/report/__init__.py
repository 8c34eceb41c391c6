"""Reports: the files of a study directory in; tables, plots and one HTML page out."""

from collections.abc import Sequence
from pathlib import Path

from qkattn.errors import ReportError
from qkattn.report.csvfile import csv_table
from qkattn.report.figures.plots import figures
from qkattn.report.figures.style import Rendered
from qkattn.report.html import report_page
from qkattn.report.latex import latex_table
from qkattn.report.tables import headline, report_markdown, report_text
from qkattn.run.files import write_atomic
from qkattn.verdict import Findings, Study, find, load_study

__all__ = [
    'Findings',
    'ReportError',
    'Study',
    'documents',
    'find',
    'headline',
    'load_study',
    'report_text',
    'write_report',
]


def documents(study: Study) -> dict[str, str]:
    """Everything that is printed of a study but its figures, by file name; report.html is last."""
    found = find(study)
    return _documents(study, found, figures(study, found))


def _documents(study: Study, found: Findings, drawn: Sequence[Rendered]) -> dict[str, str]:
    return {
        'table.txt': report_text(study, found),
        'table.md': report_markdown(study, found),
        'table.csv': csv_table(found),
        'table.tex': latex_table(study, found),
        'report.html': report_page(study, found, drawn),
    }


def write_report(study_dir: str | Path) -> Path:
    """Writes report.html, table.txt, .md, .csv and .tex, and plots/ into the study directory.

    Returns the path of report.html, which is written last. Raises ReportError when the directory is
    no study or holds no result.
    """
    study = load_study(study_dir)
    found = find(study)
    drawn = figures(study, found)
    for figure in drawn:
        write_atomic(study.directory / 'plots' / f'{figure.stem}.png', figure.png)
        write_atomic(study.directory / 'plots' / f'{figure.stem}.svg', figure.paper_svg)
    for name, text in _documents(study, found, drawn).items():
        written = write_atomic(study.directory / name, text)
    return written
