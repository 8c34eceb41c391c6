"""A stored study: the directory of a study in a few files, from which reports are made again.

    study.json, ledger.jsonl, yardsticks.json   as in the study's directory
    logs.zip        plan.jsonl, results.jsonl, and of each run
        metrics.jsonl       without training records
        documents.json      but for runs of screening
        documents.sha256    of the documents.json that is left out, which the ledger needs

The files are read in the archive. A copy of a stored study is a working directory: `ablate` takes
the files out and goes on.
"""

import functools
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qkattn.errors import ReportError, RunDirectoryError
from qkattn.storage.archive import Archive, Member, is_clean, zipped
from qkattn.storage.files import (
    Files,
    Readable,
    as_path,
    first_link,
    read_errors,
    version_of,
    write_atomic,
)
from qkattn.storage.ledger import DOCUMENTS_SHA256, is_training, left_out_documents
from qkattn.storage.records import ARM_KEY, read_lines, write_json
from qkattn.study.tuning import SCREENING

LOGS = 'logs.zip'
MAX_LOGS = 2**30  # bytes; they are kept in memory
# The files of a stored study beside its logs.
WHOLE_FILES = ('study.json', 'ledger.jsonl', 'yardsticks.json')
PLAN = 'plan.jsonl'
RESULTS = 'results.jsonl'
METRICS = 'metrics.jsonl'
DOCUMENTS = 'documents.json'
# The files of a run in the logs.
RUN_FILES = (METRICS, DOCUMENTS, DOCUMENTS_SHA256)
# Names that no run's directory has: there are files of these names in a study, or in a run.
_TAKEN = {*WHOLE_FILES, *RUN_FILES, LOGS, PLAN, RESULTS, 'lock'}
_ADVICE = 'restore it from a copy'
# Fields that a line of results.jsonl has beside those of an entry of result.json.
_ONLY_IN_RESULTS = ('study', 'run', *ARM_KEY, 'stage', 'knob', 'target_parameters', 'residual')

Record = dict[str, Any]


class StoredFiles:
    """The files of a stored study: `files / name`, as of a study's directory."""

    def __init__(self, directory: Path, logs: bytes):
        """Checks the content of logs.zip.

        Raises ReportError where it is damaged, or has a file that is not one of its plan's runs.
        """
        self.directory = directory
        self.archive = Archive(directory / LOGS, logs)
        for name in (PLAN, RESULTS):
            if name not in self.archive:
                raise ReportError(f'{self.archive.path} has no {name}; {_ADVICE}')
        expected = {PLAN, RESULTS}
        for run in planned(self / PLAN):
            for name in RUN_FILES:
                expected.add(f'{run["directory"]}/{name}')
        for name in self.archive.names:
            if name not in expected:
                raise ReportError(
                    f'{self.archive.path}, member {name} is no file of a run in its {PLAN}; '
                    f'{_ADVICE}'
                )

    def __truediv__(self, name: str) -> Path | Member:
        if name in WHOLE_FILES:
            return self.directory / name
        return Member(self.archive, name)


def opened(directory: str | Path) -> Path | StoredFiles:
    """The files of a study, to be read by `/`: its directory, or the files of a stored study.

    Of a stored study it is the same object until one of its files changes. Raises ReportError if
    the stored study is damaged.
    """
    path = as_path(directory)
    logs = path / LOGS
    if not logs.is_file():
        return path
    size = version_of(logs)[0]
    if size > MAX_LOGS:
        raise ReportError(f'{logs} has {size:,} bytes, more than {MAX_LOGS:,}; {_ADVICE}')
    with read_errors(path):
        content = logs.read_bytes()
        other_files = [_bytes_or_none(path / name) for name in WHOLE_FILES]
    return _opened(path, content, tuple(other_files))


@functools.lru_cache(maxsize=64)
def _opened(directory: Path, logs: bytes, other_files: tuple[bytes | None, ...]) -> StoredFiles:
    """The stored study with logs of this content; the same object for the same arguments.

    `other_files`, the content of WHOLE_FILES, are an argument for that alone: readers keep results
    by the object, so there has to be another one where such a file has changed.
    """
    return StoredFiles(directory, logs)


def _bytes_or_none(file: Path) -> bytes | None:
    """The content of a file; None where there is none."""
    return file.read_bytes() if file.is_file() else None


def pack(study: Files, destination: Path) -> None:
    """Writes the stored form of a study whose files are `study / name`.

    It has no checkpoints, no training records, and no provenance.json, which names machines and
    users. Raises ReportError, and writes nothing, where the files could not be read again.
    """
    logs = zipped(dict(_stored_logs(study)))
    StoredFiles(destination, logs)  # raises where nobody could read it
    for name in WHOLE_FILES:  # written first: they name the study to the next export
        if (study / name).is_file():
            write_atomic(destination / name, (study / name).read_bytes())
    write_atomic(destination / LOGS, logs)


def _stored_logs(study: Files) -> Iterator[tuple[str, bytes]]:
    """The name and content of each file in the logs.zip of a study."""
    yield PLAN, _complete_lines(study / PLAN)
    yield RESULTS, _complete_lines(study / RESULTS)
    for run in planned(study / PLAN):
        directory = run['directory']
        metrics = study / directory / METRICS
        if metrics.is_file():
            yield f'{directory}/{METRICS}', _complete_lines(metrics)
        documents = study / directory / DOCUMENTS
        digest = left_out_documents(study / directory)
        if documents.is_file():
            content = documents.read_bytes()
            if run['stage'] != SCREENING:
                yield f'{directory}/{DOCUMENTS}', content
                continue
            digest = hashlib.sha256(content).hexdigest()
        if digest is not None:
            yield f'{directory}/{DOCUMENTS_SHA256}', f'{digest}\n'.encode()


def _complete_lines(path: Readable) -> bytes:
    """The lines of a file but those of training and an unfinished last one; b'' without a file."""
    if not path.is_file():
        return b''
    lines = path.read_bytes().splitlines(keepends=True)
    return b''.join(line for line in lines if line.endswith(b'\n') and not is_training(line))


def unpack_in_place(directory: Path) -> None:
    """Turns a stored study, where there is one, into a directory in which the study can go on.

    Runs get the result.json that workers read; those without results begin anew, as nothing but
    their logs is stored. Raises ReportError, and writes nothing, if the stored study is damaged, or
    has a link where a run's directory goes.
    """
    files = opened(directory)
    if not isinstance(files, StoredFiles):
        return
    runs = planned(files / PLAN)
    for run in runs:
        _refuse_links(directory, run['directory'])
    results: dict[str, list[Record]] = {}
    for line in read_lines(files / RESULTS, {'run': str}):
        entry = {name: value for name, value in line.items() if name not in _ONLY_IN_RESULTS}
        results.setdefault(line['run'], []).append(entry)
    # A run that begins anew writes its own.
    metrics_left_out = {
        f'{run["directory"]}/{METRICS}' for run in runs if run['run'] not in results
    }
    for name in files.archive.names:
        if name not in metrics_left_out:
            write_atomic(directory / name, files.archive.read(name))
    for run in runs:
        if run['run'] in results:
            write_json(directory / run['directory'] / 'result.json', results[run['run']])
    (directory / LOGS).unlink()  # at last: until then all of this can be done again


def planned(plan: Readable) -> list[Record]:
    """The runs of plan.jsonl; [] without that file.

    Raises ReportError for a damaged line, and for a run whose directory is not one or two
    components below the study.
    """
    if not plan.is_file():
        return []
    schema = {'run': str, 'directory': str, 'stage': str}
    try:
        return read_lines(plan, schema, _ADVICE, check_run_directory)
    except RunDirectoryError as error:
        raise ReportError(str(error)) from error


def check_run_directory(run: Mapping[str, Any]) -> None:
    """Raises ValueError unless a run's directory is one or two components below its study."""
    directory = run['directory']
    parts = directory.split('/')
    if not is_clean(directory) or len(parts) > 2 or not _TAKEN.isdisjoint(parts):
        raise ValueError(
            f"field 'directory' is {directory!r}, expected one or two components below the study"
        )


def _refuse_links(directory: Path, name: str) -> None:
    """ReportError where a directory below the study, into which files go, is a link elsewhere."""
    link = first_link(directory, *name.split('/'))
    if link is not None:
        raise ReportError(f'{link} is a link, but files of {directory / LOGS} go there; remove it')
