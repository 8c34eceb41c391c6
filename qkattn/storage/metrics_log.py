"""The metrics log of a run: JSON Lines whose steps never go back, on a disk or in a bucket."""

import contextlib
import errno
import io
import json
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qkattn.errors import RunDirectoryError
from qkattn.storage import buckets
from qkattn.storage.files import (
    as_path,
    disk_errors,
    in_place,
    read_errors,
    read_whole,
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
Lines = list[tuple[dict[str, Any], bytes]]  # of a log: (record, line with its newline)


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The records of a log, but for an unfinished last line; RunDirectoryError if damaged."""
    return [record for record, _ in _parse(as_path(path))]


def _parse(path: Path) -> Lines:
    """The complete lines."""
    try:
        with read_errors(path):
            lines = read_whole(path).splitlines(keepends=True)
    except OSError as error:
        raise damaged(path, error) from error
    parsed: Lines = []
    step = -math.inf
    for number, line in enumerate(lines, start=1):
        record: Any = None
        with contextlib.suppress(ValueError):
            record = parse_json(line) if line.endswith(b'\n') else None
        if not isinstance(record, dict) and number == len(lines):
            break
        try:
            check(record, {'step': int})
            if record['step'] < step:
                raise ValueError(f'step {record["step"]} comes after step {step}')
            if CHECKSUM in record:
                remove_checksum(record)
        except ValueError as error:
            problem = f'{path}, line {number} is damaged ({error}); {ADVICE}'
            raise RunDirectoryError(problem) from error
        step = record['step']
        parsed.append((record, line))
    return parsed


class MetricsFile:
    """Appends records to a metrics log; in a bucket it grows in memory until `flush`.

    Only the next record overwrites what a crash left after the last complete line: a damaged file
    stays as it is. Each record has a `crc32`, which `read_metrics` checks and leaves out.
    """

    def __init__(self, path: str | os.PathLike):
        """Opens `path`, or creates it; RunDirectoryError if a line but the last is damaged."""
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
        self._end_with([])
        self.flush()
        self._end_with(_parse(self.path))

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one line, which survives the death of this process, in a bucket after `flush`.

        ValueError where `step` is missing or goes back; DiskError, with nothing of it written.
        """
        line = to_jsonable(record)
        check(line, {'step': int})
        if self.last_step is not None and line['step'] < self.last_step:
            raise ValueError(f'{self.path} is at step {self.last_step}; a step would repeat')
        data = json.dumps(with_checksum(line), allow_nan=False).encode() + b'\n'
        with disk_errors(self.path):
            self._cut()
            if self._file.write(data) != len(data):
                self._cut()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._add(line, data)

    def flush(self) -> dict[str, int]:
        """Syncs all lines to disk or bucket; call it before a checkpoint is committed.

        Returns what that keeps for `rewind`. DiskError as `append`.
        """
        if buckets.is_url(self.path):
            write_atomic(self.path, self._file.getvalue())
        else:
            with disk_errors(self.path):
                os.fsync(self._file.fileno())
        return {'lines': self._lines, 'crc32': self._crc32}

    def check(self) -> None:
        """Raises RunDirectoryError unless the file holds what was written."""
        self._first(self.flush())

    def rewind(
        self, step: int, *, evaluated: bool = True, written: Mapping[str, int] | None = None
    ) -> None:
        """Drops records after `step`, and a final one, so that a run resumed there repeats none.

        `written`: of `flush`, how the file must begin; without it, `evaluated`: the evaluation at
        `step` stays.
        """
        self.flush()
        if written is not None:
            lines = self._first(written)
        else:  # in checkpoints of earlier versions
            lines = [(record, line) for record, line in _parse(self.path) if record['step'] <= step]
            dropped = ('final',) if evaluated else ('final', 'eval')
            while lines and lines[-1][0]['step'] == step and lines[-1][0].get('kind') in dropped:
                lines.pop()
        self._end_with(lines)
        self._cut()

    def close(self) -> None:
        """Flushes and closes; may be called twice."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()

    def _first(self, written: Mapping[str, int]) -> Lines:
        """The lines that were written; RunDirectoryError where they are others."""
        number = written['lines']
        lines = _parse(self.path)[:number]
        if zlib.crc32(b''.join(line for _, line in lines)) != written['crc32']:
            raise RunDirectoryError(
                f'{self.path}: its first {len(lines)} lines are not the {number} that the run has '
                f'written; {ADVICE}'
            )
        return lines

    def _cut(self) -> None:
        """Drops what follows the last complete line; needs no room on the disk."""
        if self._file.seek(0, os.SEEK_END) > self._size:
            self._file.truncate(self._size)

    def _end_with(self, lines: Lines) -> None:
        self._lines, self._size, self._crc32, self.last_step = 0, 0, 0, None
        for record, line in lines:
            self._add(record, line)

    def _add(self, record: dict[str, Any], line: bytes) -> None:
        self._lines += 1
        self._size += len(line)
        self._crc32 = zlib.crc32(line, self._crc32)
        self.last_step = record['step']
