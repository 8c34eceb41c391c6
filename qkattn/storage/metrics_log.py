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
    """The first complete lines of a log, without their content."""

    lines: int = 0
    size: int = 0  # in bytes
    crc32: int = 0  # of these bytes
    last_step: int | None = None

    def followed_by(self, line: bytes, step: int) -> '_Beginning':
        """This beginning with one more line, the record of a step."""
        crc32 = zlib.crc32(line, self.crc32)
        return _Beginning(self.lines + 1, self.size + len(line), crc32, step)


def read_metrics(path: str | os.PathLike | Readable) -> list[dict[str, Any]]:
    """The records of a log, but for an unfinished last line; RunDirectoryError if damaged."""
    return [record for record, _ in _parse(as_readable(path))]


def _parse(
    path: Readable, after: _Beginning = _Beginning()
) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Checks and yields the complete lines as (record, line with its newline).

    The lines of `after` are passed over. RunDirectoryError names the first damaged line. A last
    line that is no record is what a crash has left of one, and ends the log.
    """
    last_step = -math.inf if after.last_step is None else after.last_step
    with _reading(path) as file:
        file.seek(after.size)
        following = next(file, None)
        for number in itertools.count(after.lines + 1):
            line = following
            if line is None:
                return
            following = next(file, None)
            if following is None and not _is_complete(line):
                return
            record = _record(path, number, line)
            step = record['step']
            if step < last_step:
                raise _damaged_line(path, number, f'step {step} comes after step {last_step}')
            last_step = step
            yield record, line


@contextlib.contextmanager
def _reading(path: Readable) -> Iterator[IO[bytes]]:
    """Opens a log, which is read line by line: a long one need not fit in memory."""
    try:
        with read_errors(path), _opened(path) as file:
            yield file
    except OSError as error:
        raise damaged(path, error) from error


def _opened(path: Readable) -> IO[bytes]:
    if isinstance(path, Path) and not buckets.is_url(path):
        return open_regular(path)
    return io.BytesIO(path.read_bytes())  # in a bucket or an archive


def _is_complete(line: bytes) -> bool:
    """Whether a last line is a record, and not what a crash has left of one."""
    try:
        return line.endswith(b'\n') and isinstance(parse_json(line), dict)
    except ValueError:
        return False


def _record(path: Readable, number: int, line: bytes) -> dict[str, Any]:
    """The record of a line, without its checksum; RunDirectoryError where it is damaged."""
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
    """The complete lines of a log, or the first `limit`; of these it parses the last one alone.

    RunDirectoryError where that one is damaged.
    """
    num_lines = 0
    size = 0
    crc32 = 0
    last_whole_line = b''
    ends_in_part = False  # whether the log ends in a line without a newline
    with _reading(path) as file:
        for line in itertools.islice(file, limit):
            if not line.endswith(b'\n'):
                ends_in_part = True
                break
            last_whole_line = line
            num_lines += 1
            size += len(line)
            crc32 = zlib.crc32(line, crc32)
    if num_lines == 0:
        return _Beginning()
    # What a crash leaves stands at the end of the file, and may end in a newline, too.
    if limit is None and not ends_in_part and not _is_complete(last_whole_line):
        return _beginning(path, num_lines - 1)
    last_step = _record(path, num_lines, last_whole_line)['step']
    return _Beginning(num_lines, size, crc32, last_step)


class MetricsFile:
    """Appends records to a metrics log; in a bucket it grows in memory until `flush`.

    Only the next record overwrites what a crash left after the last complete line: a damaged file
    stays as it is. Each record has a `crc32`, which `read_metrics` checks and leaves out.

    A log may have millions of lines, so opening it parses the last of them alone; `rewind` proves
    that the others are those that were written.
    """

    def __init__(self, path: str | os.PathLike):
        """Opens `path`, or creates it; RunDirectoryError if its last complete line is damaged."""
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
        self._kept = _Beginning()  # the lines that were read or written, which `_cut` keeps
        self.flush()
        self._kept = _beginning(self.path)

    @property
    def last_step(self) -> int | None:
        """The step of the last record; None without any."""
        return self._kept.last_step

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one line, which survives the death of this process, in a bucket after `flush`.

        ValueError where `step` is missing or goes back; DiskError, with nothing of it written.
        """
        values = to_jsonable(record)
        check(values, {'step': int})
        if self.last_step is not None and values['step'] < self.last_step:
            raise ValueError(f'{self.path} is at step {self.last_step}; a step would repeat')
        line = json.dumps(with_checksum(values), allow_nan=False).encode() + b'\n'
        with disk_errors(self.path):
            self._cut()
            if self._file.write(line) != len(line):
                self._cut()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._kept = self._kept.followed_by(line, values['step'])

    def flush(self) -> dict[str, Any]:
        """Syncs all lines to disk or bucket; call it before a checkpoint is committed.

        Returns what the checkpoint keeps for `rewind`: the number of lines and their checksum.
        DiskError as `append`.
        """
        if buckets.is_url(self.path):
            write_atomic(self.path, self._file.getvalue())
        else:
            with disk_errors(self.path):
                os.fsync(self._file.fileno())
        return {'lines': self._kept.lines, 'crc32': self._kept.crc32}

    def check(self) -> None:
        """Raises RunDirectoryError unless the file holds what was written."""
        self._first(self.flush())

    def rewind(
        self, step: int, *, evaluated: bool = True, written: Mapping[str, Any] | None = None
    ) -> None:
        """Drops records after `step`, and a final one, so that a run resumed there repeats none.

        `written` is what `flush` returned before the checkpoint: the file must begin so. Without
        it, before the first checkpoint, the evaluation at `step` stays if it is `evaluated`.

        RunDirectoryError where a line that stays is damaged, or is another one than was written.
        Lines that are dropped may be damaged; a warning names the first such line.
        """
        self.flush()
        if written is None:
            self._kept = self._until(step, evaluated)
        else:
            self._kept = self._first(written)
        self._warn_of_damage_after(self._kept)
        self._cut()

    def close(self) -> None:
        """Flushes and closes; may be called twice."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()

    def _first(self, written: Mapping[str, Any]) -> _Beginning:
        """The lines that were written; RunDirectoryError where the file begins with others."""
        number = written['lines']
        # Lines are not parsed where their bytes are those that were written.
        with contextlib.suppress(RunDirectoryError):
            beginning = _beginning(self.path, number)
            if (beginning.lines, beginning.crc32) == (number, written['crc32']):
                return beginning
        # Parsing them all names the line that is damaged, if one is.
        num_sound = sum(1 for _ in itertools.islice(_parse(self.path), number))
        raise RunDirectoryError(
            f'{self.path}: its first {num_sound} lines are not the {number} that the run has '
            f'written; {ADVICE}'
        )

    def _until(self, step: int, evaluated: bool) -> _Beginning:
        """The lines up to a step, without those at the step that a resumed run makes again.

        They are the final record and, unless it was `evaluated` there, an evaluation.
        """
        kinds_made_again = ['final']
        if not evaluated:
            kinds_made_again.append('eval')
        beginning = _Beginning()
        kept = beginning
        for record, line in _parse(self.path):
            if record['step'] > step:
                break
            beginning = beginning.followed_by(line, record['step'])
            if record['step'] < step or record.get('kind') not in kinds_made_again:
                kept = beginning
        return kept

    def _warn_of_damage_after(self, kept: _Beginning) -> None:
        """Warns of the first damaged line among those that are dropped and made again."""
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
        """Drops what follows the last complete line; needs no room on the disk."""
        if self._file.seek(0, os.SEEK_END) > self._kept.size:
            self._file.truncate(self._kept.size)
