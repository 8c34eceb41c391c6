"""Copies what is worth keeping of a study: small files that the report can be made from again."""

import json
from pathlib import Path

from qkattn.report.files import write_atomic
from qkattn.report.load import load_study
from qkattn.report.records import ReportError

FILES = ('study.json', 'plan.jsonl', 'results.jsonl', 'report.html')


def export(study_dir: str | Path, destination: str | Path) -> Path:
    """Writes the study's declaration, plan, results, evaluations, tables, report and figures.

    Left out are checkpoints, locks and claims, the training records of metrics.jsonl, and
    provenance.json, which names machines and users.

    Raises:
      ReportError: no study, or `destination` holds something else.
    """
    study, destination = load_study(study_dir), Path(destination)
    if destination.exists() and any(destination.iterdir()):
        there = destination / 'study.json'
        if not there.is_file() or json.loads(there.read_text())['name'] != study.name:
            raise ReportError(
                f'{str(destination)!r} holds something else than study {study.name!r}; '
                'give an empty directory.'
            )
    source = study.directory
    figures = [path for path in source.glob('plots/*') if path.suffix in ('.png', '.svg')]
    tables = [path for path in source.glob('table.*') if path.suffix != '.part']
    for path in (*(source / name for name in FILES), *figures, *tables):
        if path.is_file():
            write_atomic(destination / path.relative_to(source), path.read_bytes())
    for cell in study.cells:
        log = study.directory / cell.directory / 'metrics.jsonl'
        if cell.trials and log.is_file():
            lines = log.read_text(encoding='utf-8').splitlines(keepends=True)
            kept = [line for line in lines if json.loads(line)['kind'] == 'eval']
            write_atomic(destination / log.relative_to(source), ''.join(kept))
    return destination
