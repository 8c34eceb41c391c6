"""JSON files that survive crashes: whole files replaced atomically, and the metrics log.

Everything written here is strict JSON (no NaN, no Infinity).
"""

import dataclasses
import errno
import itertools
import json
import math
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qkattn.errors import RunDirectoryError
from qkattn.run.appended import appended
from qkattn.run.files import as_path, disk_errors, write_atomic
from qkattn.run.json_schema import check

# How a trial ended: `status` of each entry of result.json.
FINISHED, DIVERGED = 'finished', 'diverged'

CHECKSUM = 'crc32'
ADVICE = 'restore it from a copy or use another run directory'
_MAX_DEPTH = 50


def to_jsonable(value: Any) -> Any:
    """Returns `value` in JSON's own types; numbers that are not finite become None.

    Takes numbers, strings, None, mappings, sequences, paths, dataclasses, numpy and jax scalars and
    arrays (any shape, as nested lists).

    Raises:
      TypeError: something else, e.g. a function or a complex number.
    """
    if hasattr(value, '__array__'):
        listed = np.asarray(value).tolist()
        if isinstance(listed, bool | int | float | str | list):
            return to_jsonable(listed)
    elif value is None or isinstance(value, bool | int | str):
        return value
    elif isinstance(value, float):
        return value if math.isfinite(value) else None
    elif isinstance(value, os.PathLike):
        return os.fspath(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {f.name: to_jsonable(getattr(value, f.name)) for f in fields}
    elif isinstance(value, Mapping):
        return {_key(k): to_jsonable(v) for k, v in value.items()}
    elif isinstance(value, list | tuple):
        return [to_jsonable(v) for v in value]
    raise TypeError(f'{value!r} of type {type(value).__name__} has no JSON form')


def _key(key: Any) -> str:
    if isinstance(key, str | int) and not isinstance(key, bool):
        return str(key)
    raise TypeError(f'{key!r} cannot be a JSON key; use a string or an integer')


def write_json(path: str | os.PathLike, value: Any, *, indent: int | None = 2) -> None:
    """Writes `to_jsonable(value)`, an object or a list of objects, replacing the file atomically.

    Each object gets a field `crc32`, the checksum of its other fields, which `read_json` checks
    and leaves out.

    Raises:
      TypeError: `value` has no JSON form; the file is untouched.
    """
    plain = to_jsonable(value)
    if isinstance(plain, list):
        summed: Any = [with_checksum(item) for item in plain]
    else:
        summed = with_checksum(plain)
    write_atomic(path, json.dumps(summed, allow_nan=False, indent=indent) + '\n')


def read_json(path: str | os.PathLike, schema: Any, advice: str = ADVICE) -> Any:
    """Reads a file written by `write_json`, or one without checksums by the same schema.

    Args:
      schema: what `json_schema.check` takes.
      advice: what to do with a file that is damaged.

    Raises:
      RunDirectoryError: it cannot be read, is not JSON, does not fit the schema, or a checksum is
        not that of the content; the message says what to do.
    """
    try:
        return parse_file(path, schema)
    except ValueError as error:
        raise damaged(path, error, advice) from error


def parse_file(path: str | os.PathLike, schema: Any) -> Any:
    """As `read_json`, but for ValueError with the reason alone."""
    try:
        value = parse_json(as_path(path).read_bytes())
    except OSError as error:
        raise ValueError(error.strerror or error) from error
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict) and CHECKSUM in item:
            remove_checksum(item)
    check(value, schema)
    return value


def parse_json(text: str | bytes) -> Any:
    """Parses JSON; ValueError where it is none, or nested deeper than anything written here."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError('it is nested too deeply') from error
    except ValueError as error:
        raise ValueError(f'it is not JSON ({error})') from error
    level: list[Any] = [[value]]
    for _ in range(_MAX_DEPTH):
        inner = itertools.chain(*(v.values() if isinstance(v, dict) else v for v in level))
        level = [v for v in inner if isinstance(v, dict | list)]
    if level:
        raise ValueError('it is nested too deeply')
    return value


def for_each_line(
    path: Path, label: str, problems: list[str], take: Callable[[Any], object]
) -> None:
    """Calls `take` with the value of each line; where that raises ValueError, names the line."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        problems.append(f'{label} does not exist.')
        return
    except OSError as error:
        problems.append(f'{label} cannot be read ({error.strerror}).')
        return
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                take(parse_json(line))
        except ValueError as error:
            problems.append(f'{label}:{number} was left out: {error}.')


def damaged(path: str | os.PathLike, error: Exception, advice: str = ADVICE) -> RunDirectoryError:
    """The error that says that a file cannot be used, why, and what to do."""
    reason = (isinstance(error, OSError) and error.strerror) or error
    return RunDirectoryError(f'{path} is damaged ({reason}); {advice}.')


def with_checksum(record: dict[str, Any]) -> dict[str, Any]:
    """A JSON object with the field `crc32`, the checksum of its other fields."""
    return record | {CHECKSUM: _checksum(record)}


def remove_checksum(record: dict[str, Any]) -> None:
    """Takes `crc32` out of an object; ValueError where it is not that of the other fields."""
    if record.pop(CHECKSUM, None) != _checksum(record):
        raise ValueError('its checksum is not that of its content')


def _checksum(record: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Reads a metrics file, also one that is being written: an unfinished last line is left out.

    Raises:
      RunDirectoryError: another line is damaged, has no integer `step`, or goes back in steps.
    """
    return [record for record, _ in _parse(as_path(path))]


def _parse(path: Path) -> list[tuple[dict[str, Any], bytes]]:
    """Returns (record, line with its newline) for every complete line."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise damaged(path, error) from error
    parsed: list[tuple[dict[str, Any], bytes]] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = parse_json(line)
            complete = line.endswith(b'\n') and isinstance(record, dict)
        except ValueError:
            complete = False
        if not complete and number == len(lines):
            break
        if not complete or type(record.get('step')) is not int:
            raise RunDirectoryError(
                f'{path}, line {number} is not a JSON object with an integer "step"; '
                'restore the file from a copy or use another run directory.'
            )
        if parsed and record['step'] < parsed[-1][0]['step']:
            raise RunDirectoryError(
                f'{path}, line {number} goes back to step {record["step"]} from step '
                f'{parsed[-1][0]["step"]}; restore the file from a copy or use another run '
                'directory.'
            )
        parsed.append((record, line))
    return parsed


class MetricsFile:
    """Appends records to a JSON Lines file whose steps never go back.

    In a bucket, where nothing can be appended, lines are kept in memory until `flush`.

    What follows the last complete line, as a crash or a full disk leaves it, is overwritten by the
    next record, and not before: a file that turns out to be damaged stays as it is.
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
            self._file = appended(self.path)
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
          DiskError: the line could not be written; the file holds nothing of it.
        """
        line = to_jsonable(record)
        step = line.get('step')
        if type(step) is not int:
            raise ValueError(f'a metrics record needs an integer "step", not {step!r}.')
        if self.last_step is not None and step < self.last_step:
            raise ValueError(f'{self.path} is at step {self.last_step}; step {step} would repeat.')
        data = json.dumps(line, allow_nan=False).encode() + b'\n'
        with disk_errors(self.path):
            self._cut()
            if self._file.write(data) != len(data):
                self._cut()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(data)
        self.last_step = step

    def flush(self) -> None:
        """Syncs all lines to disk or bucket; call it before a checkpoint is committed."""
        with disk_errors(self.path):
            self._file.sync()

    def rewind(self, step: int, every: int | None = None, *, evaluated: bool = True) -> None:
        """Drops records after `step` and a final one, so that a run resumed there repeats none.

        Args:
          step: steps done in the checkpoint being resumed; 0 when starting over.
          every: steps between records. If given, each multiple of `every` up to `step` must be in
            the file.
          evaluated: whether the evaluation at `step` stays, if there is one.

        Raises:
          RunDirectoryError: the file is damaged, or records are missing.
        """
        self.flush()
        dropped = ('final',) if evaluated else ('final', 'eval')
        parsed = _parse(self.path)
        if every is not None:
            present = {record['step'] for record, _ in parsed}
            missing = [s for s in range(every, step + 1, every) if s not in present]
            if missing:
                raise RunDirectoryError(
                    f'{self.path} has no record of {len(missing)} '
                    f'step{"s" * (len(missing) > 1)} up to {step}, the first at {missing[0]}; '
                    'restore the file from a copy or use another run directory'
                )
        # These records are the last ones, so that what stays is the beginning of the file.
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
            self.flush()
            self._file.close()

    def _cut(self) -> None:
        """Drops what follows the last complete line; needs no room on the disk."""
        if self._file.seek(0, os.SEEK_END) > self._size:
            self._file.truncate(self._size)

    def _end_with(self, lines: list[tuple[dict[str, Any], bytes]]) -> None:
        self._size = sum(len(line) for _, line in lines)
        self.last_step = lines[-1][0]['step'] if lines else None
