"""Stored studies: a study as a few files, enough for reports and to continue the study.

    study.json, ledger.jsonl, yardsticks.json   as in the study's directory
    logs.zip        plan.jsonl, results.jsonl, and for each run
        metrics.jsonl       without training records
        documents.json      not for screening runs
        documents.sha256    for screening runs: the hash of documents.json, for the ledger

Reports read the files inside the archive. `ablate` unpacks the archive before it continues a study.
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
# The files of a stored study outside the archive.
WHOLE_FILES = ('study.json', 'ledger.jsonl', 'yardsticks.json')
PLAN = 'plan.jsonl'
RESULTS = 'results.jsonl'
METRICS = 'metrics.jsonl'
DOCUMENTS = 'documents.json'
# The files of a run in the archive.
RUN_FILES = (METRICS, DOCUMENTS, DOCUMENTS_SHA256)
# Names of files, which a run's directory must not have.
_TAKEN = {*WHOLE_FILES, *RUN_FILES, LOGS, PLAN, RESULTS, 'lock'}
_ADVICE = 'restore it from a copy'
# The fields of results.jsonl that result.json does not have.
_ONLY_IN_RESULTS = ('study', 'run', *ARM_KEY, 'stage', 'knob', 'target_parameters', 'residual')

Record = dict[str, Any]


class StoredFiles:
    """The files of a stored study. `files / name` opens a file, as with the path of a directory."""

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

    Returns the path of the directory or, for a stored study, a StoredFiles. The StoredFiles is the
    same object in all calls until a file changes, so it can be the key of a cache.

    Raises:
        ReportError: The stored study is damaged.
    """
    path = as_path(directory)
    logs_file = path / LOGS
    if not logs_file.is_file():
        return path
    size, _ = version_of(logs_file)  # in bytes
    if size > MAX_LOGS:
        raise ReportError(f'{logs_file} has {size:,} bytes, more than {MAX_LOGS:,}; {_ADVICE}')
    with read_errors(path):  # failures of the system raise ReadError
        logs = logs_file.read_bytes()
        other_files = [_bytes_or_none(path / name) for name in WHOLE_FILES]
    return _same_stored_files(path, logs, tuple(other_files))


@functools.lru_cache(maxsize=64)
def _same_stored_files(
    directory: Path, logs: bytes, other_files: tuple[bytes | None, ...]
) -> StoredFiles:
    """Returns a StoredFiles, which is the same object for the same content of all files.

    Args:
        directory: The directory of the stored study.
        logs: The content of logs.zip.
        other_files: The content of WHOLE_FILES. It is only part of the cache key.
    """
    return StoredFiles(directory, logs)


def _bytes_or_none(file: Path) -> bytes | None:
    """Returns the content of a file; None if it does not exist."""
    return file.read_bytes() if file.is_file() else None


def pack(study: Files, destination: Path) -> None:
    """Writes a study to a directory as a few files: WHOLE_FILES and the archive logs.zip.

    Checkpoints, training records and provenance.json are left out.

    Args:
        study: The files of the study, from `open_files`.
        destination: The directory to write to.

    Raises:
        ReportError: The archive could not be read again. Nothing is written.
    """
    logs = zip_bytes(dict(_stored_logs(study)))
    # Raise ReportError before writing if the archive is not readable.
    StoredFiles(destination, logs)
    # WHOLE_FILES begins with study.json, which identifies the study after a crash.
    for name in WHOLE_FILES:
        file = study / name
        if file.is_file():
            write_atomic(destination / name, file.read_bytes())
    write_atomic(destination / LOGS, logs)


def _stored_logs(study: Files) -> Iterator[tuple[str, bytes]]:
    """Yields the name and content of each file to store in logs.zip.

    Documents of a screening run are stored as their SHA-256.
    """
    yield PLAN, _complete_lines(study / PLAN)
    yield RESULTS, _complete_lines(study / RESULTS)
    for run in planned(study / PLAN):
        directory = run['directory']
        metrics = study / directory / METRICS
        if metrics.is_file():
            yield f'{directory}/{METRICS}', _complete_lines(metrics)

        documents = study / directory / DOCUMENTS
        digest: str | None = None  # the SHA-256 of documents that are left out
        if not documents.is_file():
            # If `study` is a stored study, it may have the SHA-256.
            digest = left_out_documents(study / directory)
        elif run['stage'] == SCREENING:
            digest = hashlib.sha256(documents.read_bytes()).hexdigest()
        else:
            yield f'{directory}/{DOCUMENTS}', documents.read_bytes()
        if digest is not None:
            yield f'{directory}/{DOCUMENTS_SHA256}', f'{digest}\n'.encode()


def _complete_lines(path: Readable) -> bytes:
    """Returns a file without training records and without an unfinished last line.

    Returns b'' if the file does not exist.
    """
    if not path.is_file():
        return b''
    lines = path.read_bytes().splitlines(keepends=True)
    return b''.join(line for line in lines if line.endswith(b'\n') and not is_training(line))


def unpack_in_place(directory: Path) -> None:
    """Unpacks a stored study, so that workers can continue it. Does nothing for other studies.

    Finished runs get a result.json. Unfinished runs start again, as checkpoints are not stored.

    Raises:
        ReportError: The stored study is damaged, or a run's directory is a link. Nothing is
            written then.
    """
    files = open_files(directory)
    if not isinstance(files, StoredFiles):
        return
    runs = planned(files / PLAN)
    for run in runs:
        _refuse_links(directory, run['directory'])
    results_by_run = _results_by_run(files)
    finished_runs = [run for run in runs if run['run'] in results_by_run]
    unfinished_runs = [run for run in runs if run['run'] not in results_by_run]

    # Unfinished runs write their metrics again, from the start.
    names_left_out = {f'{run["directory"]}/{METRICS}' for run in unfinished_runs}
    for name in files.archive.names:
        if name not in names_left_out:
            write_atomic(directory / name, files.archive.read(name))

    for run in finished_runs:
        file = directory / run['directory'] / 'result.json'
        write_json(file, results_by_run[run['run']])
    # The archive is removed last, so that the call can be repeated after a crash.
    (directory / LOGS).unlink()


def _results_by_run(files: StoredFiles) -> dict[str, list[Record]]:
    """Returns the content of result.json for each finished run, by id: a list of its trials."""
    results_by_run: dict[str, list[Record]] = {}
    for line in read_lines(files / RESULTS, {'run': str}):
        trial = {name: value for name, value in line.items() if name not in _ONLY_IN_RESULTS}
        results_by_run.setdefault(line['run'], []).append(trial)
    return results_by_run


def planned(plan: Readable) -> list[Record]:
    """Reads the runs of plan.jsonl; returns [] if the file does not exist.

    Raises:
        ReportError: A line is damaged, or `check_run_directory` refuses its directory.
    """
    if not plan.is_file():
        return []
    schema = {'run': str, 'directory': str, 'stage': str}
    try:
        return read_lines(plan, schema, _ADVICE, check_run_directory)
    except RunDirectoryError as error:
        raise ReportError(str(error)) from error


def check_run_directory(run: Mapping[str, Any]) -> None:
    """Raises ValueError unless `run['directory']` is a valid path such as 'runs/qk-vo-0123'."""
    directory = run['directory']
    parts = directory.split('/')
    has_taken_name = not _TAKEN.isdisjoint(parts)  # such as 'study.json'
    if not is_clean(directory) or len(parts) > 2 or has_taken_name:
        raise ValueError(
            f"field 'directory' is {directory!r}, expected one or two components below the study"
        )


def _refuse_links(directory: Path, name: str) -> None:
    """Raises ReportError if part of the path `name` in a study's directory is a link."""
    link = first_link(directory, *name.split('/'))
    if link is not None:
        raise ReportError(f'{link} is a link, but files of {directory / LOGS} go there; remove it')
