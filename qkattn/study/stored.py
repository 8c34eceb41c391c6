"""A stored study: a study's directory as a few files, from which reports can be made again.

    study.json, ledger.jsonl, yardsticks.json   as in the study's directory
    logs.zip        plan.jsonl, results.jsonl, and for each run
        metrics.jsonl       without training records
        documents.json      for runs other than screening runs
        documents.sha256    for screening runs: the hash of documents.json, which the ledger needs

Reports read the files inside the archive. A copy of a stored study can be continued: `ablate`
unpacks the files first.
"""

import functools
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qkattn.errors import ReportError, RunDirectoryError
from qkattn.storage.archive import Archive, Member, is_clean, zip_bytes
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
# A run's directory must not have one of these names, as they are names of files.
_TAKEN = {*WHOLE_FILES, *RUN_FILES, LOGS, PLAN, RESULTS, 'lock'}
_ADVICE = 'restore it from a copy'
# A line of results.jsonl has these fields in addition to those of an entry in result.json.
_ONLY_IN_RESULTS = ('study', 'run', *ARM_KEY, 'stage', 'knob', 'target_parameters', 'residual')

Record = dict[str, Any]


class StoredFiles:
    """The files of a stored study. `files / name` is a file, as with a study's directory."""

    def __init__(self, directory: Path, logs: bytes):
        """Opens a stored study and checks which files its archive has.

        Args:
            directory: The directory of the stored study.
            logs: The content of its logs.zip.

        Raises:
            ReportError: The archive is damaged, lacks a required file, or has an unexpected one.
        """
        self.directory = directory
        self.archive = Archive(directory / LOGS, logs)
        required_names = (PLAN, RESULTS)
        for name in required_names:
            if name not in self.archive:
                raise ReportError(f'{self.archive.path} has no {name}; {_ADVICE}')

        allowed_names = set(required_names)
        plan = Member(self.archive, PLAN)
        for run in planned(plan):
            for file_name in RUN_FILES:
                allowed_names.add(f'{run["directory"]}/{file_name}')
        for name in self.archive.names:
            if name not in allowed_names:
                raise ReportError(
                    f'{self.archive.path}, member {name} is no file of a run in its {PLAN}; '
                    f'{_ADVICE}'
                )

    def __truediv__(self, name: str) -> Path | Member:
        if name in WHOLE_FILES:
            return self.directory / name
        return Member(self.archive, name)


def open_files(directory: str | Path) -> Path | StoredFiles:
    """Opens the files of a study: `open_files(directory) / 'plan.jsonl'` can be read.

    Returns the directory itself, or for a stored study, which has its logs in an archive, a
    StoredFiles. Callers cache what they compute from these files, with the returned object as the
    key. So a stored study gets the same object again until one of its files changes.

    Raises ReportError if the stored study is damaged.
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
    return _same_stored_files(path, content, tuple(other_files))


@functools.lru_cache(maxsize=64)
def _same_stored_files(
    directory: Path, logs: bytes, other_files: tuple[bytes | None, ...]
) -> StoredFiles:
    """Returns a StoredFiles: the same object for the same arguments.

    `logs` is the content of logs.zip. `other_files`, the content of WHOLE_FILES, is an argument
    only so that a change in one of these files gives another object.
    """
    return StoredFiles(directory, logs)


def _bytes_or_none(file: Path) -> bytes | None:
    """Returns the content of a file; None if it does not exist."""
    return file.read_bytes() if file.is_file() else None


def pack(study: Files, destination: Path) -> None:
    """Writes a study in its stored form to the directory `destination`.

    The stored form is an archive of the logs, and the files WHOLE_FILES, such as study.json, as
    they are. Checkpoints, training records and provenance.json, which names machines and users, are
    left out. If the result could not be read again, raises ReportError and writes nothing.

    `study` is the directory of the study, or the files of a study that is stored already. Of both,
    `study / 'study.json'` is a file.
    """
    logs = zip_bytes(dict(_stored_logs(study)))
    # Opens the archive as a reader will, which raises ReportError if that fails.
    StoredFiles(destination, logs)
    # The logs are written last, and study.json first. If the export is interrupted, it can be
    # repeated: study.json shows that `destination` holds the same study.
    for name in WHOLE_FILES:
        if (study / name).is_file():
            write_atomic(destination / name, (study / name).read_bytes())
    write_atomic(destination / LOGS, logs)


def _stored_logs(study: Files) -> Iterator[tuple[str, bytes]]:
    """Yields the name and the content of each file for the logs.zip of a study.

    They are the plan, the results, and for each run its metrics and its documents. Of the documents
    of a screening run, only the SHA-256 is stored: no verdict uses them, but the ledger has to
    check them.
    """
    yield PLAN, _complete_lines(study / PLAN)
    yield RESULTS, _complete_lines(study / RESULTS)
    for run in planned(study / PLAN):
        directory = run['directory']
        metrics = study / directory / METRICS
        if metrics.is_file():
            yield f'{directory}/{METRICS}', _complete_lines(metrics)

        documents = study / directory / DOCUMENTS
        digest: str | None = None  # of documents that are left out
        if not documents.is_file():
            # `study` may be a stored study, which has only the SHA-256.
            digest = left_out_documents(study / directory)
        elif run['stage'] == SCREENING:
            digest = hashlib.sha256(documents.read_bytes()).hexdigest()
        else:
            yield f'{directory}/{DOCUMENTS}', documents.read_bytes()
        if digest is not None:
            yield f'{directory}/{DOCUMENTS_SHA256}', f'{digest}\n'.encode()


def _complete_lines(path: Readable) -> bytes:
    """Returns the lines of a file without training records and without an unfinished last line.

    Returns b'' if the file does not exist.
    """
    if not path.is_file():
        return b''
    lines = path.read_bytes().splitlines(keepends=True)
    return b''.join(line for line in lines if line.endswith(b'\n') and not is_training(line))


def unpack_in_place(directory: Path) -> None:
    """Unpacks a stored study, so that workers can continue it. Does nothing for other studies.

    A run with results is finished. It also gets a result.json, because workers look for this file.
    A run without results starts again from step 0, because checkpoints are not stored. If the
    stored study is damaged, or a run's directory is a link, raises ReportError and writes nothing.
    """
    files = open_files(directory)
    if not isinstance(files, StoredFiles):
        return
    runs = planned(files / PLAN)
    for run in runs:
        _refuse_links(directory, run['directory'])
    results_by_run = _results_by_run(files)

    # All files of the archive, but not the metrics of runs that start again and write their own.
    names_left_out: set[str] = set()
    for run in runs:
        if run['run'] not in results_by_run:
            names_left_out.add(f'{run["directory"]}/{METRICS}')
    for name in files.archive.names:
        if name not in names_left_out:
            write_atomic(directory / name, files.archive.read(name))

    for run in runs:
        if run['run'] in results_by_run:
            file = directory / run['directory'] / 'result.json'
            write_json(file, results_by_run[run['run']])
    # The archive is removed last, so that a crash before this line does no harm.
    (directory / LOGS).unlink()


def _results_by_run(files: StoredFiles) -> dict[str, list[Record]]:
    """Returns the content of result.json for each run with results, by its id.

    It is a list with one entry for each trial: the line of the trial in results.jsonl, without the
    fields that describe the run.
    """
    results_by_run: dict[str, list[Record]] = {}
    for line in read_lines(files / RESULTS, {'run': str}):
        entry = {name: value for name, value in line.items() if name not in _ONLY_IN_RESULTS}
        results_by_run.setdefault(line['run'], []).append(entry)
    return results_by_run


def planned(plan: Readable) -> list[Record]:
    """Reads the runs of plan.jsonl; returns [] if the file does not exist.

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
    """Raises ReportError if `name`, a directory below the study to write into, is a link."""
    link = first_link(directory, *name.split('/'))
    if link is not None:
        raise ReportError(f'{link} is a link, but files of {directory / LOGS} go there; remove it')
