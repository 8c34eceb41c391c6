"""Copies what is worth keeping of a study: small files that the report can be made from again."""

from pathlib import Path

from qkattn.errors import ReportError
from qkattn.run import ledger
from qkattn.run.files import write_atomic
from qkattn.run.records import parse_file
from qkattn.verdict.load import Study, load_study

FILES = (
    *('study.json', 'ledger.jsonl', 'plan.jsonl', 'results.jsonl', 'orphans.jsonl'),
    *('trials.csv', 'report.html'),
)


FIGURES = ('.json', '.png', '.svg', '.pdf')


def export(study_dir: str | Path, destination: str | Path) -> Path:
    """Writes the study's declaration, plan, results, evaluations, tables, report and figures.

    Left out are checkpoints, locks and leases, the training records of finished runs, and
    provenance.json, which names machines and users.

    Raises:
      ReportError: no study, or `destination` holds something else.
    """
    study, destination = load_study(study_dir), Path(destination)
    _check_destination(study, destination)
    source = study.directory
    figures = [path for path in source.glob('plots/*') if path.suffix in FIGURES]
    for path in (*(source / name for name in FILES), *source.glob('table.*'), *figures):
        if path.is_file():
            write_atomic(destination / path.relative_to(source), path.read_bytes())
    for run in study.runs:
        log = source / run.directory / 'metrics.jsonl'
        if not log.is_file():
            continue
        lines = log.read_bytes().splitlines(keepends=True)
        if run.trials:
            lines = [line for line in lines if not ledger.is_training(line)]
        write_atomic(destination / log.relative_to(source), b''.join(lines))
        documents = log.with_name('documents.json')
        if documents.is_file():
            write_atomic(destination / documents.relative_to(source), documents.read_bytes())
    return destination


def _check_destination(study: Study, destination: Path) -> None:
    """Raises unless it is empty, absent, or holds an earlier export of the same study."""
    if destination.resolve() == study.directory.resolve():
        raise ReportError(f'{str(destination)!r} is the study itself; give another directory.')
    if destination.exists() and not destination.is_dir():
        raise ReportError(f'{str(destination)!r} is a file; give a directory.')
    if not destination.is_dir() or not any(destination.iterdir()):
        return
    if (destination / 'runs').is_dir() and any(destination.glob('runs/*/checkpoints')):
        raise ReportError(f'{str(destination)!r} holds a study that was run there; give another.')
    try:
        name = parse_file(destination / 'study.json', {'name': str})['name']
    except ValueError:
        name = None
    if name != study.name:
        raise ReportError(
            f'{str(destination)!r} holds something else than study {study.name!r}; '
            'give an empty directory.'
        )
