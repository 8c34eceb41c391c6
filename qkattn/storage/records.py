"""JSON files of runs and studies: written whole, with checksums, and checked when they are read.

JSON is strict (no NaN, no Infinity). A schema says what JSON must hold at least:

    {'name': str, 'rate': float}     an object with these fields, and perhaps others
    [{'name': str}]                  a list, which is not empty, of such objects
    float, str | None, Literal['a']  a value; an integer fits float, and true fits bool alone
    tuple[float, ...]                a list of such values
"""

import dataclasses
import functools
import json
import math
import os
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
# The field of an object that holds the checksum of the others.
CHECKSUM = 'crc32'
ADVICE = 'restore it from a copy or use another run directory'
_RESULT_ADVICE = 'restore it from a copy, or remove it: the same command then makes it again'
# The types that JSON gives for a type of a schema, where they are not the type itself.
_TYPES: dict[Any, tuple[type, ...]] = {float: (int, float), Mapping: (dict,)}

# config.json.
CONFIG = {'hash': str, 'config': dict}
# provenance.json, with an entry for each start of the run.
START = {'git': dict, 'python': str, 'versions': dict, 'devices': dict}
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
STUDY = {'base': dict, 'variants': list, 'sizes': list, 'corpora': list, 'arms': list}
ARM_KEY = {'variant': str, 'size': str, 'corpus': str, 'control': str | None}
# The field of a result that describes its metrics from outside, so that they are read without their
# modules. A result without such metrics does not have it.
OUTSIDE = 'outside_metrics'
# The fields of a metric that are described there.
_DESCRIBED = (
    'role',
    'description',
    'label',
    'unit',
    'scale',
    'decimals',
    'direction',
    'prefixes',
    'logged',
    'for_text',
)
# Fields of a result besides its metrics that it may lack, or that may be null.
_OPTIONAL: dict[str, type] = {**dict.fromkeys(TIMES, float), 'diverged_at': int}


def _loss_fields() -> set[str]:
    """The fields of losses, such as val_loss, which every result has; it may lack other metrics."""
    fields: set[str] = set()
    for metric in METRICS.values():
        if metric.role == 'loss' and metric.logged:
            fields.update(metric.field(prefix) for prefix in metric.prefixes)
    return fields


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
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): to_jsonable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(item) for item in value]
    raise TypeError(f'{value!r} of type {type(value).__name__} has no JSON form')


def write_json(path: str | os.PathLike, value: Any, *, indent: int | None = 2) -> None:
    """Writes `to_jsonable(value)`, an object or a list of objects, atomically, with checksums."""
    plain = to_jsonable(value)
    if isinstance(plain, list):
        content: Any = [with_checksum(item) for item in plain]
    else:
        content = with_checksum(plain)
    write_atomic(path, json.dumps(content, allow_nan=False, indent=indent) + '\n')


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
    """As `read_json`, but with ValueError, of the reason alone, where the file is damaged."""
    path = as_readable(path)
    try:
        with read_errors(path):
            value = parse_json(read_whole(path))
    except OSError as error:
        raise ValueError(error.strerror or error) from error
    items = value if isinstance(value, list) else [value]
    for item in items:
        if isinstance(item, dict) and CHECKSUM in item:
            remove_checksum(item)
    check(value, schema)
    return value


def parse_json(text: str | bytes) -> Any:
    """Parses JSON; ValueError where it is none. Whatever reads JSON of a file reads it so."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
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
    place = str(path)  # what an error names
    records = []
    try:
        with read_errors(path):
            lines = read_whole(path).splitlines()
        for number, line in enumerate(lines, start=1):
            place = f'{path}, line {number}'
            record = parse_json(line)
            check(record, schema)
            take(record)
            records.append(record)
    except (OSError, ValueError) as error:
        raise damaged(place, error, advice) from error
    return records


def damaged(
    path: str | os.PathLike | Readable, error: Exception, advice: str = ADVICE
) -> RunDirectoryError:
    """The error that says that a file cannot be used, why, and what to do."""
    reason: object = error
    if isinstance(error, OSError) and error.strerror:
        reason = error.strerror  # without the number and the path
    return RunDirectoryError(f'{path} is damaged ({reason}); {advice}.')


def read_results(path: Path, config: Config) -> list[dict[str, Any]]:
    """The results of the run of a config; RunDirectoryError where damaged, or of another run."""
    results = read_json(path, [{}], _RESULT_ADVICE)
    config_hash = fingerprint(config)
    try:
        for result in results:
            check_result(result)
            check_config_hash(result, config_hash)
        trials = [result['trial'] for result in results]
        if trials != config.trials.trials():
            raise ValueError(
                f'it has results of {len(trials)} trials that do not belong to the run'
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
    kinds = result_fields(metrics_of(record)) | _OPTIONAL
    required = _loss_fields()
    schema = {}
    for name, kind in kinds.items():
        if name in record or name in required:
            schema[name] = kind | None
    check(record, schema)
    if record['status'] == FINISHED and record['val_loss'] is None:
        raise ValueError("field 'val_loss' of a finished trial is None")


def metrics_of(result: Mapping[str, Any]) -> Mapping[str, Metric]:
    """METRICS, and those from outside that a result describes; ValueError for a bad description."""
    if OUTSIDE not in result:
        return METRICS
    check(result, {OUTSIDE: dict})
    described_metrics = []
    for name, description in result[OUTSIDE].items():
        try:
            described_metrics.append(read(Metric, description, name=name, details={}))
        except ValueError as error:
            raise ValueError(f'metric {name!r}: {error}') from error
    return with_outside(described_metrics)


def described(metrics: Mapping[str, Metric]) -> dict[str, dict[str, Any]]:
    """What a result has of its metrics from outside: {OUTSIDE: descriptions}, {} without such.

    ConfigError for a metric that `metrics_of` would not read again.
    """
    descriptions = {}
    for name, metric in outside(metrics).items():
        descriptions[name] = {field: getattr(metric, field) for field in _DESCRIBED}
    if not descriptions:
        return {}
    recorded = to_jsonable({OUTSIDE: descriptions})
    try:
        metrics_of(recorded)
    except ValueError as error:
        raise ConfigError(f'train.metrics: {error}') from error
    return recorded


def check(value: Any, schema: Any) -> None:
    """Raises ValueError that names the field unless `value` has at least what the schema says.

    The schema is a mapping, or a list of one, as at the top of this module.
    """
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
        is_nested = isinstance(hint, dict | list)
        kind: Any = type(hint) if is_nested else hint
        if not _fits(kind)(value[name]):
            expected = kind.__name__ if isinstance(kind, type) else str(kind)
            expected = expected.removeprefix('typing.')
            raise ValueError(f'field {name!r} is {value[name]!r:.80}, expected {expected}')
        if is_nested:
            check(value[name], hint)


def read(cls: type[T], record: Any, **given: Any) -> T:
    """An instance of a dataclass from the fields of a JSON object, lists as tuples.

    Fields in `given` have that value whatever the object says; it may have fields that the class
    lacks, and lack those that have a default. ValueError as `check`, by the annotations.
    """
    check(record, {})
    hints = typing.get_type_hints(cls)
    schema = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        is_required = field.default is dataclasses.MISSING
        if field.name not in given and (is_required or field.name in record):
            schema[field.name] = hints[field.name]
    check(record, schema)
    return cls(**given, **{name: _as_tuples(record[name]) for name in schema})


def flat(record: Mapping, separator: str = '.', prefix: str = '') -> Iterator[tuple[str, Any]]:
    """(name, value) of every value that is no mapping itself, named 'outer.inner'."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from flat(value, separator, f'{prefix}{name}{separator}')
        else:
            yield f'{prefix}{name}', value


def _as_tuples(value: Any) -> Any:
    """A list of JSON, and the lists in it, as tuples; any other value as it is."""
    if not isinstance(value, list):
        return value
    return tuple(_as_tuples(item) for item in value)


@functools.cache
def _fits(hint: Any) -> Callable[[Any], bool]:
    """A function: whether a value of JSON fits a hint, such as `float` or `tuple[int, ...] | None`.

    The hint is taken apart once, as files hold millions of values.
    """
    origin = typing.get_origin(hint) or hint
    arguments = typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        fits_options = [_fits(option) for option in arguments]
        return lambda value: any(fits_option(value) for fits_option in fits_options)
    if origin is typing.Literal:
        return lambda value: value in arguments
    if origin is tuple:
        fits_item = _fits(arguments[0])
        return lambda value: isinstance(value, list) and all(map(fits_item, value))
    if origin is Mapping and arguments and arguments[1] is not Any:
        fits_item = _fits(arguments[1])
        return lambda value: isinstance(value, dict) and all(map(fits_item, value.values()))
    types_in_json = _TYPES.get(origin, (origin,))

    def fits(value: Any) -> bool:
        if isinstance(value, bool):  # which is an int to isinstance
            return origin in (bool, object)
        if isinstance(value, float) and not math.isfinite(value):
            return False  # strict JSON has no such numbers; 1e999 is read as one
        return isinstance(value, types_in_json)

    return fits
