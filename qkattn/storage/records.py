"""JSON files of runs and studies: written whole, with checksums, and checked when they are read.

JSON is strict (no NaN, no Infinity). A schema is a type, a union, or `tuple[T, ...]` for a list; a
mapping of field to schema for an object; or a list of one schema for a list that is not empty.
"""

import dataclasses
import functools
import json
import math
import os
import sys
import types
import typing
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from qkattn.config import Config, fingerprint
from qkattn.errors import ConfigError, RunDirectoryError
from qkattn.metrics import METRICS, TIMES, Metric, outside, result_fields, with_outside
from qkattn.storage.files import Readable, as_readable, read_errors, read_whole, write_atomic

T = TypeVar('T')
# The `status` of an entry of result.json.
FINISHED = 'finished'
DIVERGED = 'diverged'
CHECKSUM = 'crc32'
ADVICE = 'restore it from a copy or use another run directory'
_RESULT_ADVICE = 'restore it from a copy, or remove it: the same command then makes it again'
_TYPES: dict[Any, tuple[type, ...]] = {float: (int, float), Mapping: (dict,)}  # in JSON

CONFIG = {'hash': str, 'config': dict}
START = {'git': dict, 'python': str, 'versions': dict, 'devices': dict}  # in provenance.json
PROVENANCE = {'starts': [START]}
# An entry of result.json; `check_result` adds the metrics.
RESULT = {
    'trial': {'seed': int, 'learning_rate': float, 'weight_decay': float},
    'status': typing.Literal['finished', 'diverged'],
    'num_steps': int,
    'num_tokens': int,
    'config_hash': str,
    'parameters': {'attention': int, 'total': int},
    'config': {'d_model': int, 'd_ff': int},
    'flops_per_token': float,
    'cache_floats_per_token': float | None,
    'eval_tokens': int | None,
    'data': dict,
    'provenance': dict,
}
# A split of documents.json: names and targets of documents, and nats of each trial.
DOCUMENTS = {
    'documents': tuple[str, ...],
    'tokens': tuple[float, ...],
    'nats': tuple[tuple[float, ...] | None, ...],
}
# Files of a run that reports are not made from.
RUN_FILES = {'config.json': CONFIG, 'provenance.json': PROVENANCE, 'result.json': [RESULT]}
# What is read of study.json before it is compared field by field, and an arm in it.
STUDY = {'base': dict, **dict.fromkeys(('variants', 'sizes', 'corpora', 'arms'), list)}
ARM_KEY = {'variant': str, 'size': str, 'corpus': str, 'control': str | None}
# The field of a result that describes its metrics from outside, which it has only with such, and
# what that records of each, so that they are read without their modules.
OUTSIDE = 'outside_metrics'
_DESCRIBED = (
    *('role', 'description', 'label', 'unit', 'scale', 'decimals', 'direction', 'prefixes'),
    *('logged', 'for_text'),
)
# Fields of results that may be null; losses are in every result, others came later or are times.
_OPTIONAL: dict[str, type] = {**dict.fromkeys(TIMES, float), 'diverged_at': int}
_LOSSES = {
    f for m in METRICS.values() if m.role == 'loss' and m.logged for f in map(m.field, m.prefixes)
}


def to_jsonable(value: Any) -> Any:
    """`value` (or path, dataclass, array) in JSON's types, None for NaN; TypeError for others."""
    if hasattr(value, '__array__'):
        value = np.asarray(value).tolist()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(v) for v in value]
    raise TypeError(f'{value!r} of type {type(value).__name__} has no JSON form')


def write_json(path: str | os.PathLike, value: Any, *, indent: int | None = 2) -> None:
    """Writes `to_jsonable(value)`, an object or a list of objects, atomically, with checksums."""
    plain = to_jsonable(value)
    summed = [*map(with_checksum, plain)] if isinstance(plain, list) else with_checksum(plain)
    write_atomic(path, json.dumps(summed, allow_nan=False, indent=indent) + '\n')


def with_checksum(record: dict[str, Any]) -> dict[str, Any]:
    """A JSON object with the field `crc32`, the checksum of its other fields."""
    return record | {CHECKSUM: zlib.crc32(json.dumps(record, sort_keys=True).encode())}


def remove_checksum(record: dict[str, Any]) -> None:
    """Takes `crc32` out of an object; ValueError where it is not that of the other fields."""
    stored = record.pop(CHECKSUM, None)
    if stored != with_checksum(record)[CHECKSUM]:
        raise ValueError('its checksum does not match its content')


def read_json(path: str | os.PathLike | Readable, schema: Any, advice: str = ADVICE) -> Any:
    """Reads a file of `write_json`, with or without checksums; RunDirectoryError if damaged.

    ReadError where the system fails to read it.
    """
    try:
        return parse_file(path, schema)
    except ValueError as error:
        raise damaged(path, error, advice) from error


def parse_file(path: str | os.PathLike | Readable, schema: Any) -> Any:
    """As `read_json`, but for ValueError with the reason alone."""
    path = as_readable(path)
    try:
        with read_errors(path):
            value = parse_json(read_whole(path))
    except OSError as error:
        raise ValueError(error.strerror or error) from error
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict) and CHECKSUM in item:
            remove_checksum(item)
    check(value, schema)
    return value


def parse_json(text: str | bytes) -> Any:
    """Parses JSON; ValueError where it is none. Whatever reads JSON of a file reads it so."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError('it is nested too deeply') from error
    except ValueError as error:
        raise ValueError(f'it is not JSON ({error})') from error


def read_lines(
    path: Readable,
    schema: Mapping[str, Any],
    advice: str = ADVICE,
    take: Callable[[Any], object] = lambda record: None,
) -> list[Any]:
    """The values of a file's lines, which fit a schema; `take` is called with each.

    RunDirectoryError names the first line that is damaged or for which `take` raises ValueError.
    """
    place = str(path)
    records = []
    try:
        with read_errors(path):
            lines = read_whole(path).splitlines()
        for number, line in enumerate(lines, start=1):
            place = f'{path}, line {number}'
            check(record := parse_json(line), schema)
            take(record)
            records.append(record)
    except (OSError, ValueError) as error:
        raise damaged(place, error, advice) from error
    return records


def damaged(
    path: str | os.PathLike | Readable, error: Exception, advice: str = ADVICE
) -> RunDirectoryError:
    """The error that says that a file cannot be used, why, and what to do."""
    reason = (isinstance(error, OSError) and error.strerror) or error
    return RunDirectoryError(f'{path} is damaged ({reason}); {advice}.')


def read_results(path: Path, config: Config) -> list[dict[str, Any]]:
    """The results of the run of a config; RunDirectoryError where damaged, or of another run."""
    results = read_json(path, [{}], _RESULT_ADVICE)
    config_hash = fingerprint(config)
    try:
        for result in results:
            check_result(result)
            check_config_hash(result, config_hash)
        stored = [result['trial'] for result in results]
        # Settings that trials have gained since the file was written are not in it.
        expected = [
            {name: value for name, value in trial.items() if name in stored[0]}
            for trial in config.trials.trials()
        ]
        if stored != expected:
            raise ValueError(
                f'it has results of {len(stored)} trials that do not belong to the run'
            )
    except ValueError as error:
        raise damaged(path, error, _RESULT_ADVICE) from error
    return results


def check_config_hash(result: Mapping[str, Any], expected: str) -> None:
    """Raises ValueError unless a result is of the run whose config has the hash `expected`."""
    if result['config_hash'] != expected:
        raise ValueError(
            f"field 'config_hash' is {result['config_hash']!r}, expected {expected!r}: it is the "
            'result of another run'
        )


def check_result(record: Any) -> None:
    """Raises ValueError that names the field unless `record` is a result, or has more fields."""
    check(record, RESULT)
    optional = result_fields(metrics_of(record)) | _OPTIONAL
    names = [name for name in optional if name in record or name in _LOSSES]
    check(record, {name: optional[name] | None for name in names})
    if record['status'] == FINISHED and record['val_loss'] is None:
        raise ValueError("field 'val_loss' of a finished trial is None")


def metrics_of(result: Mapping[str, Any]) -> Mapping[str, Metric]:
    """METRICS, and those from outside that a result describes; ValueError for a bad description."""
    if OUTSIDE not in result:
        return METRICS
    check(result, {OUTSIDE: dict})
    found = []
    for name, record in result[OUTSIDE].items():
        try:
            found.append(read(Metric, record, name=name, details={}))
        except ValueError as error:
            raise ValueError(f'metric {name!r}: {error}') from error
    return with_outside(found)


def described(metrics: Mapping[str, Metric]) -> dict[str, dict[str, Any]]:
    """What a result has of its metrics from outside: {OUTSIDE: descriptions}, {} without such.

    ConfigError for a metric that `metrics_of` would not read again.
    """
    descriptions = {
        name: {field: getattr(metric, field) for field in _DESCRIBED}
        for name, metric in outside(metrics).items()
    }
    recorded = to_jsonable({OUTSIDE: descriptions} if descriptions else {})
    try:
        metrics_of(recorded)
    except ValueError as error:
        raise ConfigError(f'train.metrics: {error}') from error
    return recorded


def check(value: Any, schema: Any) -> None:
    """Raises ValueError that names the field unless `value` has at least what the schema says."""
    if isinstance(schema, list):
        if not isinstance(value, list) or not value:
            raise ValueError('expected a non-empty list')
        for number, item in enumerate(value):
            try:
                check(item, schema[0])
            except ValueError as error:
                raise ValueError(f'entry {number}: {error}') from error
        return
    if not isinstance(value, dict):
        raise ValueError(f'expected an object, found {type(value).__name__}')
    for name, hint in schema.items():
        if name not in value:
            raise ValueError(f'field {name!r} is missing')
        kind = type(hint) if isinstance(hint, dict | list) else hint
        if not _fits(kind)(value[name]):
            expected = (
                kind.__name__ if isinstance(kind, type) else str(kind).removeprefix('typing.')
            )
            raise ValueError(f'field {name!r} is {value[name]!r:.80}, expected {expected}')
        if isinstance(hint, dict | list):
            check(value[name], hint)


def read(cls: type[T], record: Any, **given: Any) -> T:
    """A dataclass of `given` and an object's fields, lists as tuples; ValueError as `check`."""
    check(record, {})
    hints = typing.get_type_hints(cls)
    fields: tuple[dataclasses.Field, ...] = dataclasses.fields(cls)  # type: ignore[arg-type]
    required = {f.name for f in fields if f.default is dataclasses.MISSING}
    names = [f.name for f in fields if f.name in (required | record.keys()) - given.keys()]
    check(record, {name: hints[name] for name in names})
    return cls(**given, **{name: _frozen(record[name]) for name in names})


def flat(record: Mapping, separator: str = '.', prefix: str = '') -> Iterator[tuple[str, Any]]:
    """(name, value) of every value that is no mapping itself, named 'outer.inner'."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from flat(value, separator, f'{prefix}{name}{separator}')
        else:
            yield f'{prefix}{name}', value


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


@functools.cache
def _fits(hint: Any) -> Callable[[Any], bool]:
    """Whether values fit a hint, which is looked into once: files hold millions of values."""
    kind = typing.get_origin(hint) or hint
    parts = typing.get_args(hint)
    if kind in (types.UnionType, typing.Union):
        options = [_fits(option) for option in parts]
        return lambda value: any(fits(value) for fits in options)
    if kind is typing.Literal:
        return lambda value: value in parts
    if kind is tuple:
        item_fits = _fits(parts[0])
        return lambda value: isinstance(value, list) and all(map(item_fits, value))
    if kind is Mapping and parts and parts[1] is not Any:
        item_fits = _fits(parts[1])
        return lambda value: isinstance(value, dict) and all(map(item_fits, value.values()))
    allowed = _TYPES.get(kind, (kind,))

    def fits(value: Any) -> bool:
        if isinstance(value, bool):
            return kind in (bool, object)
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            return False  # digits without end, which nothing can compute with
        if isinstance(value, float) and not math.isfinite(value):
            return False  # strict JSON has no such numbers; 1e999 is read as one
        return isinstance(value, allowed)

    return fits
