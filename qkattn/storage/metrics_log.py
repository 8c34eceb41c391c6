"""The metrics log of a run: JSON Lines whose steps never go back, on a disk or in a bucket."""

import contextlib
import errno
import io
import json
import logging
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qkattn.errors import Lost, RunDirectoryError
from qkattn.storage import buckets
from qkattn.storage.files import as_path, disk_errors, require_same_directory, write_atomic
from qkattn.storage.records import (
    CHECKSUM,
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
Lines = Sequence[tuple[dict[str, Any], bytes]]
"""(record, line with its newline) of complete lines."""

log = logging.getLogger(__name__)


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Reads a metrics file, also one that is being written: an unfinished last line is left out.

    Raises:
      RunDirectoryError: another line is damaged, has no integer `step`, or goes back in steps; a
        checksum is not that of its line.
    """
    return [record for record, _ in _parse(as_path(path))]


def _parse(path: Path) -> Lines:
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise damaged(path, error) from error
    parsed: list[tuple[dict[str, Any], bytes]] = []
    for number, line in enumerate(lines, start=1):
        record: Any = None
        with contextlib.suppress(ValueError):
            record = parse_json(line) if line.endswith(b'\n') else None
        if not isinstance(record, dict) and number == len(lines):
            break
        if problem := _problem(record, parsed[-1][0]['step'] if parsed else None):
            raise RunDirectoryError(f'{path}, line {number} {problem}; {ADVICE}')
        parsed.append((record, line))
    return parsed


def _problem(record: Any, last_step: int | None) -> str | None:
    """What is wrong with a record, whose checksum is left out."""
    if isinstance(record, dict) and CHECKSUM in record:
        try:
            remove_checksum(record)
        except ValueError as error:
            return f'is damaged ({error})'
    if not isinstance(record, dict) or type(record.get('step')) is not int:
        return 'is not a JSON object with an integer "step"'
    if last_step is not None and record['step'] < last_step:
        return f'goes back to step {record["step"]} from step {last_step}'
    return None


class _File(io.FileIO):
    """A file that grows; `sync` puts it on the disk."""

    def __init__(self, path: Path):
        super().__init__(path, 'a+b')
        self._path, self._directory = path, path.parent.stat()

    def sync(self) -> None:
        os.fsync(self.fileno())

    def in_place(self) -> bool:
        """Whether the path still names this file; DiskError if its directory is gone."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), os.fstat(self.fileno())):
                return True
        require_same_directory(self._path.parent, self._directory)
        return False


class _Object(io.BytesIO):
    """An object that grows in memory; `sync` uploads it whole.

    Raises:
      Lost: by `sync`, if another process has written the object.
    """

    def __init__(self, path: Path):
        self._path, self._synced, self._generation = path, None, 0
        with contextlib.suppress(FileNotFoundError):
            self._synced, self._generation, _ = buckets.read(path)
        super().__init__(self._synced or b'')
        self.seek(0, os.SEEK_END)
        self.sync()

    def sync(self) -> None:
        content = self.getvalue()
        if content == self._synced:
            return
        try:
            self._generation = buckets.write(self._path, content, self._generation)
        except FileExistsError as error:
            raise Lost(f'{self._path} was taken over: {error}') from error
        self._synced = content

    def in_place(self) -> bool:
        """True: `sync` finds out whether the object is another one."""
        return True


def _open(path: Path) -> _File | _Object:
    return _Object(path) if buckets.is_url(path) else _File(path)


class MetricsFile:
    """Appends records to a metrics log; in a bucket, lines are kept in memory until `flush`.

    What follows the last complete line, as a crash or a full disk leaves it, is overwritten by the
    next record, and not before: a file that turns out to be damaged stays as it is. Each record has
    a field `crc32`, which `read_metrics` checks and leaves out. A file that is removed or replaced
    while it is open is written again, with a warning.
    """

    def __init__(self, path: str | os.PathLike):
        """Opens `path`, or creates it.

        Raises:
          RunDirectoryError: it cannot be read, or a line other than the last is damaged.
        """
        self.path = as_path(path)
        self.last_step: int | None = None
        """Steps done at the last record; None without records."""
        try:
            self._file = _open(self.path)
        except OSError as error:
            raise damaged(self.path, error) from error
        self._end_with(_parse(self.path))

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one line, which survives the death of this process, in a bucket after `flush`.

        Args:
          record: numbers, strings, arrays; `step` (an integer, steps done) is required.

        Raises:
          ValueError: `step` is missing, or smaller than in the line before: call `rewind` first.
          TypeError: a value has no JSON form.
          DiskError: the line could not be written, and the file holds nothing of it; or the
            directory is gone.
          RunDirectoryError: the file has lost what was written.
        """
        line = to_jsonable(record)
        step = line.get('step')
        if type(step) is not int:
            raise ValueError(f'a metrics record needs an integer "step", not {step!r}.')
        if self.last_step is not None and step < self.last_step:
            raise ValueError(f'{self.path} is at step {self.last_step}; step {step} would repeat.')
        data = json.dumps(with_checksum(line), allow_nan=False).encode() + b'\n'
        with disk_errors(self.path):
            self._require_file()
            self._cut()
            if self._file.write(data) != len(data):
                self._cut()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._add(data)
        self.last_step = step

    def flush(self) -> dict[str, int]:
        """Syncs all lines to disk or bucket; call it before a checkpoint is committed.

        Returns:
          number and crc32 of the lines, which the checkpoint keeps for `rewind`.

        Raises:
          DiskError: as `append`.
        """
        with disk_errors(self.path):
            self._require_file()
            self._file.sync()
        return {'lines': self._lines, 'crc32': self._crc32}

    def check(self) -> None:
        """Raises RunDirectoryError unless the file holds what was written."""
        written = self.flush()
        self._require(_parse(self.path), written)

    def rewind(
        self,
        step: int,
        every: int | None = None,
        *,
        evaluated: bool = True,
        written: Mapping[str, int] | None = None,
    ) -> None:
        """Drops records after `step` and a final one, so that a run resumed there repeats none.

        Args:
          step: steps done in the checkpoint being resumed; 0 when starting over.
          every: steps between records. If given, each multiple of `every` up to `step` must be in
            the file.
          evaluated: whether the evaluation at `step` stays, if there is one.
          written: what `flush` returned before the checkpoint; None where it has kept nothing.

        Raises:
          RunDirectoryError: the file is damaged, or records are missing, or it does not begin with
            what was `written`.
        """
        self.flush()
        parsed = _parse(self.path)
        if every is not None:
            present = {record['step'] for record, _ in parsed}
            missing = [s for s in range(every, step + 1, every) if s not in present]
            if missing:
                raise RunDirectoryError(
                    f'{self.path} has no record of {len(missing)} '
                    f'step{"s" * (len(missing) > 1)} up to {step}, the first at {missing[0]}; '
                    f'{ADVICE}'
                )
        if written is not None:
            self._require(parsed, written)
            parsed = parsed[: written['lines']]
        dropped = ('final',) if evaluated else ('final', 'eval')
        # The dropped records are the last ones, so that what stays is the beginning of the file.
        self._end_with(
            [
                (record, line)
                for record, line in parsed
                if record['step'] < step
                or (record['step'] == step and record.get('kind') not in dropped)
            ]
        )
        self._cut()

    def close(self) -> None:
        """Flushes and closes; may be called twice."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()

    def _require_file(self) -> None:
        """Writes the file again where the path names another one, or none."""
        if self._file.in_place():
            return
        self._file.seek(0)
        content = self._file.read()[: self._size]
        if zlib.crc32(content) != self._crc32:
            raise RunDirectoryError(f'{self.path} was replaced while it was written to; {ADVICE}')
        log.warning('%s was removed or replaced, and is written again', self.path)
        write_atomic(self.path, content)
        self._file.close()
        self._file = _open(self.path)

    def _require(self, parsed: Lines, written: Mapping[str, int]) -> None:
        """Raises RunDirectoryError unless the first lines are those that were written."""
        number, lines = written['lines'], [line for _, line in parsed[: written['lines']]]
        if zlib.crc32(b''.join(lines)) != written['crc32']:
            problem = (
                f' has {len(lines)} of the {number} lines that the run has written'
                if len(lines) < number
                else f', lines 1 to {number} are not those that the run has written'
            )
            raise RunDirectoryError(f'{self.path}{problem}; {ADVICE}')

    def _cut(self) -> None:
        """Drops what follows the last complete line; needs no room on the disk."""
        end = self._file.seek(0, os.SEEK_END)
        if end < self._size:
            raise RunDirectoryError(
                f'{self.path} has {end:,} of the {self._size:,} bytes that the run has written; '
                f'{ADVICE}'
            )
        if end > self._size:
            self._file.truncate(self._size)

    def _end_with(self, lines: Lines) -> None:
        self._lines = self._size = self._crc32 = 0
        for _, line in lines:
            self._add(line)
        self.last_step = lines[-1][0]['step'] if lines else None

    def _add(self, line: bytes) -> None:
        self._lines += 1
        self._size += len(line)
        self._crc32 = zlib.crc32(line, self._crc32)
