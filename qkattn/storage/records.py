"""JSON files that survive crashes: whole files replaced atomically, and lines of the metrics log.

Everything written here is strict JSON (no NaN, no Infinity).
"""

import dataclasses
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
from qkattn.storage.files import as_path, write_atomic
from qkattn.storage.json_schema import check

# How a trial ended: `status` of each entry of result.json.
FINISHED, DIVERGED = 'finished', 'diverged'

CHECKSUM = 'crc32'
ADVICE = 'restore it from a copy or use another run directory'
METRICS_ADVICE = (
    'restore the file from a copy or use another run directory; the checkpoints of this one are '
    'kept, and convert --source exports their parameters'
)
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
    """Parses JSON; ValueError where it is none, or nested deeper than anything written here.

    Whatever reads JSON of a file reads it by this function.
    """
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
                take(_parse_line(line))
        except ValueError as error:
            problems.append(f'{label}:{number} was left out: {error}.')


def _parse_line(line: bytes) -> Any:
    """The value of a line of JSON Lines, whose checksum, if it has one, is checked and left out."""
    value = parse_json(line)
    if isinstance(value, dict) and CHECKSUM in value:
        remove_checksum(value)
    return value


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
      RunDirectoryError: another line is damaged, has no integer `step`, or goes back in steps; a
        checksum is not that of its line.
    """
    return [record for record, _ in parse_metrics(as_path(path))]


def parse_metrics(path: Path) -> list[tuple[dict[str, Any], bytes]]:
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
        if complete and CHECKSUM in record:
            try:
                remove_checksum(record)
            except ValueError as error:
                raise RunDirectoryError(
                    f'{path}, line {number} is damaged ({error}); {METRICS_ADVICE}'
                ) from error
        if not complete and number == len(lines):
            break
        if not complete or type(record.get('step')) is not int:
            raise RunDirectoryError(
                f'{path}, line {number} is not a JSON object with an integer "step"; '
                f'{METRICS_ADVICE}'
            )
        if parsed and record['step'] < parsed[-1][0]['step']:
            raise RunDirectoryError(
                f'{path}, line {number} goes back to step {record["step"]} from step '
                f'{parsed[-1][0]["step"]}; {METRICS_ADVICE}'
            )
        parsed.append((record, line))
    return parsed
