"""JSON files that survive crashes: whole files replaced atomically, and the metrics log.

Everything written here is strict JSON (no NaN, no Infinity).
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qkattn.errors import RunDirectoryError
from qkattn.run.files import write_atomic

# How a trial ended: `status` of each entry of result.json.
FINISHED, DIVERGED = 'finished', 'diverged'


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
    elif isinstance(value, Path):
        return str(value)
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


def _dumps(value: Any, **options: Any) -> str:
    return json.dumps(to_jsonable(value), allow_nan=False, **options)


def write_json(path: str | os.PathLike, value: Any, *, indent: int | None = 2) -> None:
    """Writes `to_jsonable(value)` to `path`, replacing the file atomically.

    Raises:
      TypeError: `value` has no JSON form; the file is untouched.
    """
    write_atomic(path, _dumps(value, indent=indent) + '\n')


def read_json(path: str | os.PathLike) -> Any:
    """Reads a file written by `write_json`.

    Raises:
      RunDirectoryError: the file is not JSON.
    """
    path = Path(path)
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise RunDirectoryError(
            f'{path} is damaged ({error}); restore it from a copy or use another run directory.'
        ) from error


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Reads a metrics file, also one that is being written: an unfinished last line is left out.

    Raises:
      RunDirectoryError: another line is damaged, has no integer `step`, or goes back in steps.
    """
    return [record for record, _ in _parse(Path(path))]


def _parse(path: Path) -> list[tuple[dict[str, Any], bytes]]:
    """Returns (record, line with its newline) for every complete line."""
    lines = path.read_bytes().splitlines(keepends=True)
    parsed: list[tuple[dict[str, Any], bytes]] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
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
    """Appends records to a JSON Lines file whose steps never go back."""

    def __init__(self, path: str | os.PathLike):
        """Opens `path`, or creates it; an unfinished last line is dropped.

        Raises:
          RunDirectoryError: a line other than the last is damaged.
        """
        self.path = Path(path)
        self.last_step: int | None = None
        """Steps done at the last record; None without records."""
        self._file = open(self.path, 'ab')  # noqa: SIM115 (open for the life of the object)
        self._keep(None)

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one line, which survives the death of this process.

        Args:
          record: numbers, strings, arrays; `step` (an integer, steps done) is required.

        Raises:
          ValueError: `step` is missing, or smaller than in the line before: call `rewind` first.
          TypeError: a value has no JSON form.
        """
        line = to_jsonable(record)
        step = line.get('step')
        if type(step) is not int:
            raise ValueError(f'a metrics record needs an integer "step", not {step!r}.')
        if self.last_step is not None and step < self.last_step:
            raise ValueError(f'{self.path} is at step {self.last_step}; step {step} would repeat.')
        self._file.write(_dumps(line).encode() + b'\n')
        self._file.flush()
        self.last_step = step

    def flush(self) -> None:
        """Syncs all lines to disk; call it before a checkpoint is committed."""
        os.fsync(self._file.fileno())

    def rewind(self, step: int, every: int | None = None) -> None:
        """Drops records after `step` and a final one, so that a run resumed there repeats none.

        Args:
          step: steps done in the checkpoint being resumed; 0 when starting over.
          every: steps between records. If given, each multiple of `every` up to `step` must be in
            the file.

        Raises:
          RunDirectoryError: the file is damaged, or records are missing.
        """
        if every is not None:
            present = {record['step'] for record, _ in _parse(self.path)}
            missing = [s for s in range(every, step + 1, every) if s not in present]
            if missing:
                raise RunDirectoryError(
                    f'{self.path} has no record of {len(missing)} '
                    f'step{"s" * (len(missing) > 1)} up to {step}, the first at {missing[0]}; '
                    'restore the file from a copy or use another run directory'
                )
        self._keep(step, final=False)

    def close(self) -> None:
        """Flushes and closes; may be called twice."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def _keep(self, last_step: int | None, *, final: bool = True) -> None:
        kept = [
            (record['step'], line)
            for record, line in _parse(self.path)
            if (last_step is None or record['step'] <= last_step)
            and (final or record.get('kind') != 'final')
        ]
        data = b''.join(line for _, line in kept)
        if len(data) != self.path.stat().st_size:
            write_atomic(self.path, data)
            self._file.close()
            self._file = open(self.path, 'ab')  # noqa: SIM115
        self.last_step = kept[-1][0] if kept else None
