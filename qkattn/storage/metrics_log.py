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
class _Beginning:
    """The first complete lines of a log, described by their number, bytes and checksum."""

    lines: int = 0
    size: int = 0  # in bytes
    crc32: int = 0  # checksum of these bytes
    last_step: int | None = None  # the step of the last line; None without a line

    def followed_by(self, line: bytes, step: int) -> '_Beginning':
        """Returns this beginning with one more line, whose record is at `step`."""
        crc32 = zlib.crc32(line, self.crc32)
        return _Beginning(self.lines + 1, self.size + len(line), crc32, step)


def read_metrics(path: str | os.PathLike | Readable) -> list[dict[str, Any]]:
    """Reads the records of a metrics log.

    A crash can leave a partial last line, which is left out. Raises RunDirectoryError if another
    line is damaged.
    """
    return [record for record, _ in _parse(as_readable(path))]


def _parse(
    path: Readable, after: _Beginning = _Beginning()
) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Reads a log line by line, and yields each record with the line that holds it.

    Reading starts behind the lines of `after`. A crash can leave a partial last line: reading stops
    there without an error. Raises RunDirectoryError, which names the line, if any other line is
    damaged, or if its step is below the step of the line before.
    """
    last_step = -math.inf if after.last_step is None else after.last_step
    number = after.lines  # of the line that was read last; the first line is line 1
    with _reading(path) as file:
        file.seek(after.size)
        line = next(file, None)
        while line is not None:
            number += 1
            # Only the last line may be partial. Reading one line ahead shows which is the last.
            next_line = next(file, None)
            is_last = next_line is None
            if is_last and not _is_complete(line):
                return

            record = _record(path, number, line)
            step = record['step']
            if step < last_step:
                raise _damaged_line(path, number, f'step {step} comes after step {last_step}')
            yield record, line

            last_step = step
            line = next_line


@contextlib.contextmanager
def _reading(path: Readable) -> Iterator[IO[bytes]]:
    """Opens a log, to be read line by line; a long log need not fit into memory.

    Raises RunDirectoryError if the log is missing or is not a regular file.
    """
    try:
        with read_errors(path), _opened(path) as file:
            yield file
    except OSError as error:
        raise damaged_file_error(path, error) from error


def _opened(path: Readable) -> IO[bytes]:
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


def _record(path: Readable, number: int, line: bytes) -> dict[str, Any]:
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


def _beginning(path: Readable, limit: int | None = None) -> _Beginning:
    """Describes the complete lines of a log, or only the first `limit` of them.

    A crash can leave a last line that is not complete: it has no newline, or it has one but is not
    a record. This line is left out. Of the complete lines, only the last is parsed. Raises
    RunDirectoryError if it is damaged.
    """
    num_lines = 0
    size = 0
    crc32 = 0
    last_line = b''
    ends_in_part = False  # whether the log ends in a line without a newline
    with _reading(path) as file:
        for line in itertools.islice(file, limit):
            if not line.endswith(b'\n'):
                ends_in_part = True
                break
            last_line = line
            num_lines += 1
            size += len(line)
            crc32 = zlib.crc32(line, crc32)
    if num_lines == 0:
        return _Beginning()

    # `last_line` ends the log if all lines were read, and none of them was without a newline.
    is_last_of_log = limit is None and not ends_in_part
    if is_last_of_log and not _is_complete(last_line):
        return _beginning(path, limit=num_lines - 1)
    last_step = _record(path, num_lines, last_line)['step']
    return _Beginning(num_lines, size, crc32, last_step)


def _opened_to_append(path: Path) -> Any:
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
            self._file = _opened_to_append(self.path)
        except OSError as error:
            raise damaged_file_error(self.path, error) from error

        # The lines to keep: those that were complete when the log was opened, and those that were
        # written since. `_cut` removes what follows them.
        self._kept = _Beginning()
        self.flush()  # creates the log in a bucket, so that `_beginning` can read it
        self._kept = _beginning(self.path)

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
            self._cut()
            num_written = self._file.write(line)
            if num_written != len(line):  # the disk is full
                self._cut()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._kept = self._kept.followed_by(line, values['step'])

    def flush(self) -> dict[str, Any]:
        """Syncs all lines to the disk or bucket; call it before a checkpoint is committed.

        Returns the number of lines and their checksum. The checkpoint keeps them for `rewind`.
        Raises DiskError if the disk fails.
        """
        if buckets.is_url(self.path):
            write_atomic(self.path, self._file.getvalue())
        else:
            with disk_errors(self.path):
                os.fsync(self._file.fileno())
        return {'lines': self._kept.lines, 'crc32': self._kept.crc32}

    def check(self) -> None:
        """Raises RunDirectoryError unless the file holds the lines that were written."""
        written = self.flush()
        self._require_beginning(written)

    def rewind(
        self, step: int, *, evaluated: bool = True, written: Mapping[str, Any] | None = None
    ) -> None:
        """Removes the records that the run writes again when it resumes at `step`.

        Args:
          step: the step of the checkpoint, or 0.
          evaluated: whether to keep an evaluation at `step`; only used without `written`.
          written: what `flush` returned before the checkpoint: the number of lines to keep and
            their checksum. If it is None, as before the first checkpoint, the lines to keep are
            those of earlier steps.

        Raises RunDirectoryError if a line to keep is damaged or differs from what was written.
        Lines to remove may be damaged; a warning names the first such line.
        """
        self.flush()
        if written is None:
            self._kept = self._lines_before(step, evaluated)
        else:
            self._kept = self._require_beginning(written)
        self._warn_of_damage_after(self._kept)
        self._cut()

    def close(self) -> None:
        """Flushes and closes the file; may be called twice."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()

    def _require_beginning(self, written: Mapping[str, Any]) -> _Beginning:
        """Checks that the file begins with the lines that were written, and describes these lines.

        `written` is {'lines': number of lines, 'crc32': their checksum}. Raises RunDirectoryError
        if the file begins with other lines.
        """
        num_written = written['lines']
        # The checksum shows that no line has changed, so the lines need not be parsed. An error of
        # `_beginning` is suppressed, because the error below names the first damaged line.
        with contextlib.suppress(RunDirectoryError):
            beginning = _beginning(self.path, num_written)
            has_all_lines = beginning.lines == num_written
            is_unchanged = beginning.crc32 == written['crc32']
            if has_all_lines and is_unchanged:
                return beginning

        # `_parse` raises at the first damaged line. Without one, lines are missing or have changed.
        num_sound = sum(1 for _ in itertools.islice(_parse(self.path), num_written))
        raise RunDirectoryError(
            f'{self.path}: its first {num_sound} lines are not the {num_written} that the run has '
            f'written; {ADVICE}'
        )

    def _lines_before(self, step: int, evaluated: bool) -> _Beginning:
        """Describes the lines that a run keeps when it resumes at `step`, by their steps alone.

        A run that resumes at step 100 writes the final record of step 100 again, and also the
        evaluation of step 100 unless `evaluated`. The lines end with the last record up to step 100
        that the run does not write again.
        """
        kinds_written_again = ['final']
        if not evaluated:
            kinds_written_again.append('eval')

        lines_read = _Beginning()
        kept = lines_read
        for record, line in _parse(self.path):
            if record['step'] > step:
                break
            lines_read = lines_read.followed_by(line, record['step'])
            is_before = record['step'] < step
            if is_before or record.get('kind') not in kinds_written_again:
                kept = lines_read
        return kept

    def _warn_of_damage_after(self, kept: _Beginning) -> None:
        """Warns of the first damaged line behind the lines to keep, which `_cut` removes."""
        try:
            for _ in _parse(self.path, after=kept):
                pass
        except RunDirectoryError as error:
            damage = str(error).removesuffix(f'; {ADVICE}')
            log.warning(
                '%s; the lines from %s on are dropped, and training writes them again',
                damage,
                kept.lines + 1,
            )

    def _cut(self) -> None:
        """Removes what follows the kept lines; needs no room on the disk."""
        file_size = self._file.seek(0, os.SEEK_END)
        if file_size > self._kept.size:
            self._file.truncate(self._kept.size)
