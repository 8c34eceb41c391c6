"""The metrics log of a run: JSON Lines in order of their steps, on a disk or in a bucket."""

import contextlib
import dataclasses
import errno
import io
import itertools
import json
import logging
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from qkattn.config.paths import open_regular
from qkattn.errors import RunDirectoryError
from qkattn.storage import buckets
from qkattn.storage.files import (
    Readable,
    as_path,
    as_readable,
    disk_errors,
    in_place,
    read_errors,
    write_atomic,
)
from qkattn.storage.records import (
    CHECKSUM,
    check,
    damaged_file_error,
    parse_json,
    remove_checksum,
    to_jsonable,
    with_checksum,
)

ADVICE = (
    'restore the file from a copy or use another run directory; the checkpoints of this one are '
    'kept, and convert --source exports their parameters'
)

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Prefix:
    """The first lines of a log: their number, size, checksum and last step."""

    num_lines: int = 0
    size: int = 0  # in bytes
    crc32: int = 0  # checksum of these bytes
    last_step: int | None = None  # step of the last line; None if there are no lines

    def with_line(self, line: bytes, step: int) -> '_Prefix':
        """Returns the prefix extended by a line whose record is at `step`."""
        return _Prefix(
            num_lines=self.num_lines + 1,
            size=self.size + len(line),
            crc32=zlib.crc32(line, self.crc32),
            last_step=step,
        )


def read_metrics(path: str | os.PathLike | Readable) -> list[dict[str, Any]]:
    """Reads the records of a metrics log, without a partial last line as a crash can leave.

    Raises:
        RunDirectoryError: Any other line is damaged.
    """
    return [record for record, _ in _read_records(as_readable(path))]


def _read_records(
    path: Readable, after: _Prefix = _Prefix()
) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yields (record, line) for each line of a log, without a partial last line.

    The first lines, which `after` describes, are skipped. Raises RunDirectoryError if another line
    is damaged or its step is out of order.
    """
    last_step = -math.inf if after.last_step is None else after.last_step
    line_number = after.num_lines
    with _open_to_read(path) as file:
        file.seek(after.size)  # the first lines have this many bytes
        line = next(file, None)
        while line is not None:
            line_number += 1
            next_line = next(file, None)  # read ahead to recognize the last line
            is_last = next_line is None
            if is_last and not _is_complete_record(line):
                return

            record = _parse_record(path, line_number, line)
            step = record['step']
            if step < last_step:
                raise _damaged_line(path, line_number, f'step {step} comes after step {last_step}')
            yield record, line

            last_step = step
            line = next_line


@contextlib.contextmanager
def _open_to_read(path: Readable) -> Iterator[IO[bytes]]:
    """Opens a log; raises RunDirectoryError if there is no regular file at `path`."""
    try:
        with read_errors(path), _open_file(path) as file:
            yield file
    except OSError as error:
        raise damaged_file_error(path, error) from error


def _open_file(path: Readable) -> IO[bytes]:
    """Opens a file for reading; an object in a bucket or archive is read into memory."""
    if isinstance(path, Path) and not buckets.is_url(path):
        return open_regular(path)
    return io.BytesIO(path.read_bytes())


def _is_complete_record(line: bytes) -> bool:
    """Whether a line ends in a newline and holds a JSON object, so that no crash cut it short."""
    try:
        return line.endswith(b'\n') and isinstance(parse_json(line), dict)
    except ValueError:
        return False


def _parse_record(path: Readable, line_number: int, line: bytes) -> dict[str, Any]:
    """Parses a line of a log, and checks and removes its checksum.

    Raises RunDirectoryError, which names the line number, if the line is damaged.
    """
    try:
        record = parse_json(line)
        check(record, {'step': int})
        if CHECKSUM in record:
            remove_checksum(record)
    except ValueError as error:
        raise _damaged_line(path, line_number, error) from error
    return record


def _damaged_line(path: Readable, line_number: int, reason: object) -> RunDirectoryError:
    return RunDirectoryError(f'{path}, line {line_number} is damaged ({reason}); {ADVICE}')


def _complete_lines(path: Readable, limit: int | None = None) -> _Prefix:
    """Returns number, size, checksum and last step of the complete lines of a log.

    `limit` is the maximum number of lines. Only the last complete line is parsed, to be fast;
    raises RunDirectoryError if this line is damaged.
    """
    num_lines = 0
    size = 0
    crc32 = 0
    last_line = b''
    has_partial_line = False
    with _open_to_read(path) as file:
        for line in itertools.islice(file, limit):
            if not line.endswith(b'\n'):
                has_partial_line = True
                break
            last_line = line
            num_lines += 1
            size += len(line)
            crc32 = zlib.crc32(line, crc32)
    if num_lines == 0:
        return _Prefix()

    # A crash can also leave a last line that ends in a newline but is no record. Do not count it.
    is_last_of_log = limit is None and not has_partial_line
    if is_last_of_log and not _is_complete_record(last_line):
        return _complete_lines(path, limit=num_lines - 1)
    last_record = _parse_record(path, num_lines, last_line)
    return _Prefix(num_lines=num_lines, size=size, crc32=crc32, last_step=last_record['step'])


def _open_to_append(path: Path) -> Any:
    """Opens a log for reading and appending; creates the file if `path` is on a disk.

    For a log in a bucket, returns an in-memory copy.
    """
    if not buckets.is_url(path):
        with disk_errors(path):
            return open(path, 'a+b', buffering=0, opener=in_place)  # refuses a link
    if not path.exists():
        return io.BytesIO()
    with read_errors(path):
        return io.BytesIO(path.read_bytes())


class MetricsFile:
    """Appends records, each with a checksum, to a metrics log.

    Opening a log is fast: only the last line is parsed. `rewind` checks the earlier lines. The next
    record overwrites a partial last line that a crash left behind. A log in a bucket is kept in
    memory until `flush`.
    """

    def __init__(self, path: str | os.PathLike):
        """Opens the log at `path`, or creates a log.

        Raises:
            RunDirectoryError: The last complete line is damaged.
        """
        self.path = as_path(path)
        try:
            self._file = _open_to_append(self.path)
        except OSError as error:
            raise damaged_file_error(self.path, error) from error

        self._sync()  # creates the log if it is in a bucket
        # Describes the complete lines. Anything after them in the file is part of a line.
        self._kept = _complete_lines(self.path)

    @property
    def last_step(self) -> int | None:
        """The step of the last record; None if there is no record."""
        return self._kept.last_step

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes a record as one line.

        The line survives if this process is killed; in a bucket, only after `flush`.

        Raises:
            ValueError: `step` is missing or below the last step.
            DiskError: The disk fails or is full. The line is then not written.
        """
        values = to_jsonable(record)
        check(values, {'step': int})
        if self.last_step is not None and values['step'] < self.last_step:
            raise ValueError(f'{self.path} is at step {self.last_step}; a step would repeat')
        line = json.dumps(with_checksum(values), allow_nan=False).encode() + b'\n'

        with disk_errors(self.path):
            self._truncate_after_kept()  # removes a partial line left by a crash
            num_written = self._file.write(line)
            if num_written != len(line):  # the disk is full
                self._truncate_after_kept()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._kept = self._kept.with_line(line, values['step'])

    def flush(self) -> dict[str, Any]:
        """Syncs all lines to the disk or bucket; call it before a checkpoint is committed.

        Returns:
            {'lines': number of lines, 'crc32': their checksum}, the argument `written` of `rewind`.

        Raises:
            DiskError: The disk fails.
        """
        self._sync()
        return {'lines': self._kept.num_lines, 'crc32': self._kept.crc32}

    def check(self) -> None:
        """Raises RunDirectoryError if the file differs from what was written."""
        written = self.flush()
        self._require_written_lines(written)

    def rewind(
        self, step: int, *, evaluated: bool = True, written: Mapping[str, Any] | None = None
    ) -> None:
        """Removes the records that a run resumed at `step` writes again.

        Args:
            step: Step of the checkpoint, or 0.
            evaluated: Whether to keep an evaluation at `step`; ignored with `written`.
            written: The lines to keep, as returned by `flush` before the checkpoint. If None, lines
                are kept by their steps.

        Raises:
            RunDirectoryError: A line to keep is damaged or has changed. If a line to remove is
                damaged, a warning is logged.
        """
        self.flush()
        if written is None:
            self._kept = self._lines_until(step, evaluated)
        else:
            self._kept = self._require_written_lines(written)
        self._warn_of_damage_after_kept()
        self._truncate_after_kept()

    def close(self) -> None:
        """Flushes and closes the file; a second call does nothing."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()

    def _sync(self) -> None:
        """Syncs the file to the disk or bucket."""
        if buckets.is_url(self.path):
            content = self._file.getvalue()  # the file is an io.BytesIO
            write_atomic(self.path, content)
        else:
            with disk_errors(self.path):
                os.fsync(self._file.fileno())

    def _require_written_lines(self, written: Mapping[str, Any]) -> _Prefix:
        """Returns the first lines of the file, those that `flush` described as `written`.

        Raises RunDirectoryError if the file starts with other lines.
        """
        num_written = written['lines']
        # If the checksum matches, the lines need not be parsed. An error is ignored, because
        # `_read_records` below reports it with the first damaged line.
        with contextlib.suppress(RunDirectoryError):
            prefix = _complete_lines(self.path, limit=num_written)
            has_all_lines = prefix.num_lines == num_written
            is_unchanged = prefix.crc32 == written['crc32']
            if has_all_lines and is_unchanged:
                return prefix

        # Reading raises at the first damaged line. Otherwise, lines are missing or have changed.
        records = itertools.islice(_read_records(self.path), num_written)
        num_intact = sum(1 for _ in records)
        raise RunDirectoryError(
            f'{self.path}: its first {num_intact} lines are not the {num_written} that the run has '
            f'written; {ADVICE}'
        )

    def _lines_until(self, step: int, evaluated: bool) -> _Prefix:
        """Returns the lines up to the last record that a resumed run does not repeat.

        A run resumed at `step` repeats later records. At `step` itself, it repeats the final record
        and, if `evaluated` is false, the evaluation.
        """
        repeated_kinds = ['final']
        if not evaluated:
            repeated_kinds.append('eval')

        lines_read = _Prefix()  # their number, size, checksum and last step
        lines_to_keep = _Prefix()
        for record, line in _read_records(self.path):
            if record['step'] > step:
                break
            lines_read = lines_read.with_line(line, record['step'])
            is_repeated = record['step'] == step and record.get('kind') in repeated_kinds
            if not is_repeated:
                lines_to_keep = lines_read
        return lines_to_keep

    def _warn_of_damage_after_kept(self) -> None:
        """Logs a warning if a line after the kept lines is damaged."""
        try:
            for _ in _read_records(self.path, after=self._kept):
                pass  # reading raises at the first damaged line
        except RunDirectoryError as error:
            damage = str(error).removesuffix(f'; {ADVICE}')
            log.warning(
                '%s; the lines from %s on are dropped, and training writes them again',
                damage,
                self._kept.num_lines + 1,
            )

    def _truncate_after_kept(self) -> None:
        """Truncates the file after the kept lines."""
        file_size = self._file.seek(0, os.SEEK_END)
        if file_size > self._kept.size:
            self._file.truncate(self._kept.size)
