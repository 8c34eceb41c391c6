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
    damaged,
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
    there without an error. Any other damaged line raises RunDirectoryError, which names its number,
    and so does a step that is below the step before.
    """
    last_step = -math.inf if after.last_step is None else after.last_step
    number = after.lines
    with _reading(path) as file:
        file.seek(after.size)
        line = next(file, None)
        while line is not None:
            number += 1
            # Only the last line may be partial, so the next one is read first.
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
        raise damaged(path, error) from error


def _opened(path: Readable) -> IO[bytes]:
    if isinstance(path, Path) and not buckets.is_url(path):
        return open_regular(path)
    return io.BytesIO(path.read_bytes())  # from a bucket or an archive


def _is_complete(line: bytes) -> bool:
    """Whether the last line of a log is a whole record; a crash may leave only part of one."""
    try:
        return line.endswith(b'\n') and isinstance(parse_json(line), dict)
    except ValueError:
        return False


def _record(path: Readable, number: int, line: bytes) -> dict[str, Any]:
    """Parses a line of a log, and removes its checksum.

    Raises RunDirectoryError, which names the `number` of the line, if the line is damaged.
    """
    try:
        record: Any = parse_json(line) if line.endswith(b'\n') else None
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

    It parses only the last of these lines, and raises RunDirectoryError if that line is damaged.
    """
    num_lines = 0
    size = 0
    crc32 = 0
    last_line = b''
    has_part = False  # whether a line without a newline follows
    with _reading(path) as file:
        for line in itertools.islice(file, limit):
            if not line.endswith(b'\n'):
                has_part = True
                break
            last_line = line
            num_lines += 1
            size += len(line)
            crc32 = zlib.crc32(line, crc32)
    if num_lines == 0:
        return _Beginning()

    # A crash can also leave a last line that has a newline but is not a record.
    is_at_end = limit is None and not has_part
    if is_at_end and not _is_complete(last_line):
        return _beginning(path, num_lines - 1)
    last_step = _record(path, num_lines, last_line)['step']
    return _Beginning(num_lines, size, crc32, last_step)


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
        self._file: Any = io.BytesIO()
        try:
            if not buckets.is_url(self.path):
                with disk_errors(self.path):
                    self._file = open(  # noqa: SIM115
                        self.path, 'a+b', buffering=0, opener=in_place
                    )
            elif self.path.exists():
                with read_errors(self.path):
                    self._file = io.BytesIO(self.path.read_bytes())
        except OSError as error:
            raise damaged(self.path, error) from error
        # The lines that were read or written. `_cut` removes what follows them.
        self._kept = _Beginning()
        self.flush()
        self._kept = _beginning(self.path)

    @property
    def last_step(self) -> int | None:
        """The step of the last record; None if there is no record."""
        return self._kept.last_step

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes a record as one line.

        The line survives the death of this process; in a bucket only after `flush`. Raises
        ValueError if `step` is missing or below the last step. Raises DiskError if the disk fails
        or is full, and then writes nothing.
        """
        values = to_jsonable(record)
        check(values, {'step': int})
        if self.last_step is not None and values['step'] < self.last_step:
            raise ValueError(f'{self.path} is at step {self.last_step}; a step would repeat')
        line = json.dumps(with_checksum(values), allow_nan=False).encode() + b'\n'

        with disk_errors(self.path):
            self._cut()
            num_written = self._file.write(line)
            if num_written != len(line):
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
        self._first(written)

    def rewind(
        self, step: int, *, evaluated: bool = True, written: Mapping[str, Any] | None = None
    ) -> None:
        """Removes the records that a run which resumes at `step` writes again.

        Args:
          step: the step of the checkpoint, or 0.
          evaluated: whether to keep an evaluation at `step`; only used without `written`.
          written: what `flush` returned before the checkpoint, which tells the lines to keep. None
            before the first checkpoint; then the steps of the records tell them.

        Raises RunDirectoryError if a line to keep is damaged or differs from what was written.
        Lines to remove may be damaged; a warning names the first such line.
        """
        self.flush()
        if written is None:
            self._kept = self._until(step, evaluated)
        else:
            self._kept = self._first(written)
        self._warn_of_damage_after(self._kept)
        self._cut()

    def close(self) -> None:
        """Flushes and closes the file; may be called twice."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()

    def _first(self, written: Mapping[str, Any]) -> _Beginning:
        """Checks that the file begins with the lines that were written, and describes these lines.

        `written` is {'lines': number of lines, 'crc32': their checksum}. Raises RunDirectoryError
        if the file begins with other lines.
        """
        num_written = written['lines']
        # The checksum proves the lines without parsing them. `_beginning` parses the last one, and
        # raises if it is damaged; the error below then names the first damaged line.
        with contextlib.suppress(RunDirectoryError):
            beginning = _beginning(self.path, num_written)
            has_all_lines = beginning.lines == num_written
            if has_all_lines and beginning.crc32 == written['crc32']:
                return beginning

        # `_parse` raises at the first damaged line. If none is, the lines are other ones.
        num_sound = sum(1 for _ in itertools.islice(_parse(self.path), num_written))
        raise RunDirectoryError(
            f'{self.path}: its first {num_sound} lines are not the {num_written} that the run has '
            f'written; {ADVICE}'
        )

    def _until(self, step: int, evaluated: bool) -> _Beginning:
        """Describes the lines to keep when a run resumes at `step` without a checkpoint's help.

        They are the lines up to `step`. At `step` itself, a resumed run writes the final record
        again, and also the evaluation unless `evaluated`, so these lines are not kept.
        """
        kinds_written_again = ['final']
        if not evaluated:
            kinds_written_again.append('eval')

        beginning = _Beginning()
        kept = beginning
        for record, line in _parse(self.path):
            if record['step'] > step:
                break
            beginning = beginning.followed_by(line, record['step'])
            is_before = record['step'] < step
            if is_before or record.get('kind') not in kinds_written_again:
                kept = beginning
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
