"""Copies what is worth keeping of a study: small files that the report can be made from again."""

from pathlib import Path

from qkattn.errors import ReportError
from qkattn.storage import ledger
from qkattn.storage.files import write_atomic
from qkattn.storage.records import parse_file
from qkattn.verdict.load import Study, load_study

FILES = (
    *('study.json', 'ledger.jsonl', 'plan.jsonl', 'results.jsonl', 'orphans.jsonl'),
    ledger.YARDSTICKS,
    *('trials.csv', 'report.html'),
)
FIGURES = ('.json', '.png', '.svg', '.pdf')
LOGS = ('metrics.jsonl', 'documents.json')


def export(study_dir: str | Path, destination: str | Path) -> Path:
    """Writes the study's declaration, plan, results, evaluations, tables, report and figures.

    Left out are checkpoints, locks and leases, the training records of finished runs, and
    provenance.json, which names machines and users. Logs and figures of an earlier export that
    the study no longer has are removed. A copy of an export is a working directory, in which the
    study goes on with the runs that have no result.

    Raises:
      ReportError: no study, or `destination` holds something else.
    """
    study, destination = load_study(study_dir), Path(destination)
    _check_destination(study, destination)
    source = study.directory
    kept = [*(source / name for name in FILES), *source.glob('table.*'), *_figures(source)]
    written = {
        write_atomic(destination / path.relative_to(source), path.read_bytes())
        for path in kept
        if path.is_file()
    }
    for run in study.runs:
        log, documents = (source / run.directory / name for name in LOGS)
        if not log.is_file():
            continue
        lines = log.read_bytes().splitlines(keepends=True)
        if run.trials:
            lines = [line for line in lines if not ledger.is_training(line)]
        written.add(write_atomic(destination / log.relative_to(source), b''.join(lines)))
        if documents.is_file():
            copy = destination / documents.relative_to(source)
            written.add(write_atomic(copy, documents.read_bytes()))
    logs = [path for name in LOGS for path in destination.glob(f'runs/*/{name}')]
    for path in {*logs, *_figures(destination)} - written:
        path.unlink()
        if not any(path.parent.iterdir()):
            path.parent.rmdir()
    return destination


def _figures(directory: Path) -> list[Path]:
    return [path for path in directory.glob('plots/*') if path.suffix in FIGURES]


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
