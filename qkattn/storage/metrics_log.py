"""The metrics log of a run: JSON Lines whose steps never go back, on a disk or in a bucket."""

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
    """The lines from the first one to some later one, described without their content."""

    num_lines: int = 0
    size: int = 0  # in bytes
    crc32: int = 0  # checksum of these bytes
    last_step: int | None = None  # the step of the last line; None without a line

    def with_line(self, line: bytes, step: int) -> '_Prefix':
        """Returns the prefix that has one more line, whose record is at `step`."""
        crc32 = zlib.crc32(line, self.crc32)
        return _Prefix(self.num_lines + 1, self.size + len(line), crc32, step)


def read_metrics(path: str | os.PathLike | Readable) -> list[dict[str, Any]]:
    """Reads the records of a metrics log.

    A crash can leave a partial last line, which is left out. Raises RunDirectoryError if another
    line is damaged.
    """
    return [record for record, _ in _read_records(as_readable(path))]


def _read_records(
    path: Readable, after: _Prefix = _Prefix()
) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Reads a log, by default from its first line, and yields (record, line) for each line.

    Lines that are described by `after` are skipped.

    A crash can leave a partial last line, which is left out. Raises RunDirectoryError, which names
    the line, if another line is damaged, or if its step is below the step of the line before.
    """
    last_step = -math.inf if after.last_step is None else after.last_step
    number = after.num_lines  # the number of the line that was read last; the first line is line 1
    with _open_to_read(path) as file:
        file.seek(after.size)
        line = next(file, None)
        while line is not None:
            number += 1
            # Only the last line may be partial. Reading one line ahead shows which is the last.
            next_line = next(file, None)
            is_last = next_line is None
            if is_last and not _is_complete(line):
                return

            record = _parse_record(path, number, line)
            step = record['step']
            if step < last_step:
                raise _damaged_line(path, number, f'step {step} comes after step {last_step}')
            yield record, line

            last_step = step
            line = next_line


@contextlib.contextmanager
def _open_to_read(path: Readable) -> Iterator[IO[bytes]]:
    """Opens a log, to be read line by line; a long log need not fit into memory.

    Raises RunDirectoryError if the log is missing or is not a regular file.
    """
    try:
        with read_errors(path), _open_file(path) as file:
            yield file
    except OSError as error:
        raise damaged_file_error(path, error) from error


def _open_file(path: Readable) -> IO[bytes]:
    """Opens a file for reading; one in a bucket or an archive is read into memory."""
    if isinstance(path, Path) and not buckets.is_url(path):
        return open_regular(path)
    return io.BytesIO(path.read_bytes())


def _is_complete(line: bytes) -> bool:
    """Whether the last line of a log is a whole record; a crash may leave only part of one."""
    try:
        return line.endswith(b'\n') and isinstance(parse_json(line), dict)
    except ValueError:
        return False


def _parse_record(path: Readable, number: int, line: bytes) -> dict[str, Any]:
    """Parses a whole line of a log, and removes its checksum.

    Raises RunDirectoryError, which names the `number` of the line, if the line is damaged.
    """
    try:
        record = parse_json(line)
        check(record, {'step': int})
        if CHECKSUM in record:
            remove_checksum(record)
    except ValueError as error:
        raise _damaged_line(path, number, error) from error
    return record


def _damaged_line(path: Readable, number: int, reason: object) -> RunDirectoryError:
    return RunDirectoryError(f'{path}, line {number} is damaged ({reason}); {ADVICE}')


def _complete_lines(path: Readable, limit: int | None = None) -> _Prefix:
    """Describes the complete lines of a log, or only the first `limit` of them.

    A crash can leave a last line that is not complete. It has no newline, as in '{"step": 1', or it
    has one but is no record. It is left out. To be fast, only the last complete line is parsed;
    RunDirectoryError is raised if it is damaged.
    """
    num_lines = 0
    size = 0
    crc32 = 0
    last_line = b''
    ends_without_newline = False
    with _open_to_read(path) as file:
        for line in itertools.islice(file, limit):
            if not line.endswith(b'\n'):
                ends_without_newline = True
                break
            last_line = line
            num_lines += 1
            size += len(line)
            crc32 = zlib.crc32(line, crc32)
    if num_lines == 0:
        return _Prefix()

    # If `last_line` is the last line of the whole log, it may have a newline but be no record. Then
    # describe the lines before it.
    is_last_of_log = limit is None and not ends_without_newline
    if is_last_of_log and not _is_complete(last_line):
        return _complete_lines(path, limit=num_lines - 1)
    last_step = _parse_record(path, num_lines, last_line)['step']
    return _Prefix(num_lines, size, crc32, last_step)


def _open_to_append(path: Path) -> Any:
    """Opens a log to read it and to append to it; creates a log on a disk if there is none.

    A log in a bucket is copied into memory. `MetricsFile.flush` writes the copy to the bucket.
    """
    if not buckets.is_url(path):
        with disk_errors(path):
            return open(path, 'a+b', buffering=0, opener=in_place)
    if not path.exists():
        return io.BytesIO()
    with read_errors(path):
        return io.BytesIO(path.read_bytes())


class MetricsFile:
    """Appends records to a metrics log.

    A crash can leave part of a line at the end. The next record overwrites it; until then the file
    stays as it is. Each record has a checksum, `crc32`, which `read_metrics` checks and removes. In
    a bucket the log grows in memory until `flush` writes it.

    A log may have millions of lines, so opening it parses only the last one. `rewind` checks the
    other lines by the checksum that the checkpoint has stored.
    """

    def __init__(self, path: str | os.PathLike):
        """Opens the log at `path`, or creates it.

        Raises RunDirectoryError if the last complete line is damaged.
        """
        self.path = as_path(path)
        try:
            self._file = _open_to_append(self.path)
        except OSError as error:
            raise damaged_file_error(self.path, error) from error

        # A log in a bucket is so far only in memory. `flush` creates it, so that it can be read.
        self._kept = _Prefix()
        self.flush()
        # The lines to keep: those that are complete now, and those that `append` writes. Anything
        # after them is part of a line, which `_remove_rest` removes.
        self._kept = _complete_lines(self.path)

    @property
    def last_step(self) -> int | None:
        """The step of the last record; None if there is no record."""
        return self._kept.last_step

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes a record as one line.

        If this process is killed, the line is kept; in a bucket, only after `flush`. Raises
        ValueError if `step` is missing or below the last step. Raises DiskError if the disk fails
        or is full; the line is then not written.
        """
        values = to_jsonable(record)
        check(values, {'step': int})
        if self.last_step is not None and values['step'] < self.last_step:
            raise ValueError(f'{self.path} is at step {self.last_step}; a step would repeat')
        line = json.dumps(with_checksum(values), allow_nan=False).encode() + b'\n'

        with disk_errors(self.path):
            self._remove_rest()  # such as part of a line, after a crash
            num_written = self._file.write(line)
            if num_written != len(line):  # the disk is full
                self._remove_rest()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._kept = self._kept.with_line(line, values['step'])

    def flush(self) -> dict[str, Any]:
        """Syncs all lines to the disk or bucket; call it before a checkpoint is committed.

        Returns:
          {'lines': number of lines, 'crc32': their checksum}, which `rewind` takes as `written`.

        Raises:
          DiskError: the disk fails.
        """
        if buckets.is_url(self.path):
            # A log in a bucket is buffered in memory (io.BytesIO).
            content = self._file.getvalue()
            write_atomic(self.path, content)
        else:
            with disk_errors(self.path):
                os.fsync(self._file.fileno())
        kept_lines = self._kept
        return {'lines': kept_lines.num_lines, 'crc32': kept_lines.crc32}

    def check(self) -> None:
        """Raises RunDirectoryError unless the file holds the lines that were written."""
        written = self.flush()
        self._require_lines(written)

    def rewind(
        self, step: int, *, evaluated: bool = True, written: Mapping[str, Any] | None = None
    ) -> None:
        """Removes the records that the run writes again when it resumes at `step`.

        Args:
          step: the step of the checkpoint, or 0.
          evaluated: whether to keep an evaluation at `step`; only used without `written`.
          written: what `flush` returned before the checkpoint: the number of lines to keep and
            their checksum. None without a checkpoint; then the steps say which lines to keep.

        Raises RunDirectoryError if a line to keep is damaged or differs from what was written.
        Lines to remove may be damaged; a warning names the first such line.
        """
        self.flush()
        if written is None:
            self._kept = self._lines_until(step, evaluated)
        else:
            self._kept = self._require_lines(written)
        self._warn_of_damaged_rest()
        self._remove_rest()

    def close(self) -> None:
        """Flushes and closes the file; may be called twice."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()

    def _require_lines(self, written: Mapping[str, Any]) -> _Prefix:
        """Checks that the file begins with the lines that were written, and describes these lines.

        `written` is {'lines': number of lines, 'crc32': their checksum}. Raises RunDirectoryError
        if the file begins with other lines.
        """
        num_written = written['lines']
        # The checksum shows that no line has changed, so the lines need not be parsed. An error
        # here is ignored, because the code below raises one that names the first damaged line.
        with contextlib.suppress(RunDirectoryError):
            lines = _complete_lines(self.path, num_written)
            has_all_lines = lines.num_lines == num_written
            is_unchanged = lines.crc32 == written['crc32']
            if has_all_lines and is_unchanged:
                return lines

        # Parse the lines one by one, which raises at the first damaged line. If none is damaged,
        # lines are missing or have changed.
        num_sound = sum(1 for _ in itertools.islice(_read_records(self.path), num_written))
        raise RunDirectoryError(
            f'{self.path}: its first {num_sound} lines are not the {num_written} that the run has '
            f'written; {ADVICE}'
        )

    def _lines_until(self, step: int, evaluated: bool) -> _Prefix:
        """Describes the lines that a run keeps when it resumes at `step`, by their steps alone.

        A run that resumes at step 100 keeps the records of earlier steps. Of step 100, it writes
        the final record again, and also the evaluation unless `evaluated`. The lines end with the
        last record that it does not write again.
        """
        kinds_written_again = ['final']
        if not evaluated:
            kinds_written_again.append('eval')

        lines_so_far = _Prefix()
        lines_to_keep = _Prefix()
        for record, line in _read_records(self.path):
            if record['step'] > step:
                break
            lines_so_far = lines_so_far.with_line(line, record['step'])
            is_written_again = record['step'] == step and record.get('kind') in kinds_written_again
            if not is_written_again:
                lines_to_keep = lines_so_far
        return lines_to_keep

    def _warn_of_damaged_rest(self) -> None:
        """Warns of the first damaged line after the lines to keep, which `_remove_rest` removes."""
        try:
            # Reading the records raises an error at the first damaged line.
            for _ in _read_records(self.path, after=self._kept):
                pass
        except RunDirectoryError as error:
            damage = str(error).removesuffix(f'; {ADVICE}')
            log.warning(
                '%s; the lines from %s on are dropped, and training writes them again',
                damage,
                self._kept.num_lines + 1,
            )

    def _remove_rest(self) -> None:
        """Removes what follows the lines to keep; needs no room on the disk."""
        file_size = self._file.seek(0, os.SEEK_END)
        if file_size > self._kept.size:
            self._file.truncate(self._kept.size)
