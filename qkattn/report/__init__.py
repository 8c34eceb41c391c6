"""Reports: the files of a study directory in; a table, plots and one HTML page out."""

from pathlib import Path

from qkattn.report.files import write_atomic
from qkattn.report.html import report_page
from qkattn.report.load import Study, load_study
from qkattn.report.plots import figures
from qkattn.report.records import ReportError
from qkattn.report.summary import Row, summarise
from qkattn.report.tables import csv_table, report_markdown, report_text

__all__ = [
    'ReportError',
    'Row',
    'Study',
    'load_study',
    'report_text',
    'summarise',
    'write_report',
]


def write_report(study_dir: str | Path) -> Path:
    """Writes report.html, table.txt, table.md, table.csv and plots/*.png into the study directory.

    Returns the path of report.html, which is written last. Raises ReportError when the directory is
    no study or holds no result.
    """
    study = load_study(study_dir)
    rows = summarise(study)
    drawn = figures(study, rows)
    for figure in drawn:
        write_atomic(study.directory / 'plots' / f'{figure.stem}.png', figure.png)
    write_atomic(study.directory / 'table.txt', report_text(study, rows))
    write_atomic(study.directory / 'table.md', report_markdown(study, rows))
    write_atomic(study.directory / 'table.csv', csv_table(rows))
    return write_atomic(study.directory / 'report.html', report_page(study, rows, drawn))
