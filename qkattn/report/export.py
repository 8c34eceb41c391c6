"""Stores what is worth keeping of a study: a few small files that the report is made from again."""

from pathlib import Path

from qkattn.errors import ReportError
from qkattn.report.tables import csv_table, report_markdown
from qkattn.storage.files import write_atomic
from qkattn.storage.records import parse_file
from qkattn.study import stored
from qkattn.verdict import load_findings
from qkattn.verdict.load import Study


def export(study_dir: str | Path, destination: str | Path) -> Path:
    """Writes a study's stored form (see `qkattn.study.stored`), table.md and table.csv.

    `experiments.report --study` makes the rest of a report from it. A copy of an export is a
    working directory, in which the study goes on with the runs that have no result.

    Raises:
      ReportError: no study, or `destination` holds something else.
    """
    (study, found), destination = load_findings(study_dir), Path(destination)
    _check_destination(study, destination)
    stored.pack(study.files, destination)
    write_atomic(destination / 'table.md', report_markdown(study, found))
    write_atomic(destination / 'table.csv', csv_table(study, found))
    return destination


def _check_destination(study: Study, destination: Path) -> None:
    """Raises unless it is empty, absent, or holds an earlier export of the same study."""
    if destination.resolve() == study.directory.resolve():
        raise ReportError(f'{str(destination)!r} is the study itself; give another directory.')
    if destination.exists() and not destination.is_dir():
        raise ReportError(f'{str(destination)!r} is a file; give a directory.')
    if not destination.is_dir() or not any(destination.iterdir()):
        return
    try:
        name = parse_file(destination / 'study.json', {'name': str})['name']
    except ValueError:
        name = None
    if name != study.name:
        raise ReportError(
            f'{str(destination)!r} holds something else than study {study.name!r}; '
            'give an empty directory.'
        )
    if (destination / 'plan.jsonl').exists():
        raise ReportError(f'{str(destination)!r} holds a study that was run there; give another.')
