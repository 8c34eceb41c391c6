"""JSON files of runs and studies, with atomic writes, checksums and schemas.

The JSON is strict, without NaN and Infinity. A schema is one of

    {'name': str, 'rate': float}     an object with at least these fields
    [{'name': str}]                  a non-empty list of such objects

and the types of fields are type hints, such as

    float, str | None, Literal['a']  an integer fits float, but true only fits bool
    tuple[float, ...]                a list of floats
    {'name': str}, [{'name': str}]   nested schemas
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
from qkattn.metrics import CORPORA, METRICS, TIMES, Metric, outside, result_fields, with_outside
from qkattn.storage.files import Readable, as_readable, read_errors, read_whole, write_atomic

T = TypeVar('T')
# The `status` of an entry of result.json.
FINISHED = 'finished'
DIVERGED = 'diverged'
# The field with the checksum of an object's other fields.
CHECKSUM = 'crc32'
ADVICE = 'restore it from a copy or use another run directory'
_RESULT_ADVICE = 'restore it from a copy, or remove it: the same command then makes it again'
# Python types of parsed JSON that fit a type hint. Any other type only fits itself.
_TYPES: dict[Any, tuple[type, ...]] = {float: (int, float), Mapping: (dict,)}

# Schema of config.json.
CONFIG = {'hash': str, 'config': dict}
# Schema of provenance.json, with an entry for each start of the run.
START = {'git': dict, 'python': str, 'versions': dict, 'devices': dict}
PROVENANCE = {'starts': [START]}
# Schema of an entry of result.json without its metrics.
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
# Schema of a split in documents.json.
DOCUMENTS = {
    'documents': tuple[str, ...],  # names
    'tokens': tuple[float, ...],  # target tokens of each document
    'nats': tuple[tuple[float, ...] | None, ...],  # for each trial, the loss of each document
}
# Schemas of a run's files that reports do not use.
RUN_FILES = {'config.json': CONFIG, 'provenance.json': PROVENANCE, 'result.json': [RESULT]}
# Schema of study.json, without the fields that are only compared.
STUDY = {'base': dict, 'variants': list, 'sizes': list, 'corpora': list, 'arms': list}
# The fields that identify an arm in study.json.
ARM_KEY = {'variant': str, 'size': str, 'corpus': str, 'control': str | None}
# The optional field of a result that describes its metrics from outside the package. With this
# description, reports need not import the modules of these metrics.
OUTSIDE = 'outside_metrics'
# The fields of `Metric` in this description.
_DESCRIBED_FIELDS = (
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
# Fields of a result, besides its metrics, that may be missing or null.
_OPTIONAL: dict[str, type] = {**dict.fromkeys(TIMES, float), 'diverged_at': int}


def _loss_fields() -> set[str]:
    """Returns the loss fields that every result must have, such as 'val_loss'."""
    fields: set[str] = set()
    for metric in METRICS.values():
        if metric.role == 'loss' and metric.logged:
            fields.update(metric.field(prefix) for prefix in metric.prefixes)
    return fields


def to_jsonable(value: Any) -> Any:
    """Converts dataclasses, arrays and paths to JSON types.

    NaN and infinity become None.

    Raises:
        TypeError: The type has no JSON form.
    """
    if hasattr(value, '__array__'):  # an array or number of NumPy or JAX
        value = np.asarray(value).tolist()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):  # an instance, no class
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): to_jsonable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(item) for item in value]
    raise TypeError(f'{value!r} of type {type(value).__name__} has no JSON form')


def write_json(path: str | os.PathLike, value: Any, *, indent: int | None = 2) -> None:
    """Writes an object or a list of objects atomically, with a checksum in each object.

    `value` may have any type that `to_jsonable` converts to an object or a list of objects.
    """
    converted = to_jsonable(value)
    if isinstance(converted, list):
        content: Any = [with_checksum(record) for record in converted]
    else:
        content = with_checksum(converted)
    write_atomic(path, json.dumps(content, allow_nan=False, indent=indent) + '\n')


def with_checksum(record: dict[str, Any]) -> dict[str, Any]:
    """Returns a JSON object with the added field `crc32`, a checksum of the other fields."""
    text = json.dumps(record, sort_keys=True)
    return {**record, CHECKSUM: zlib.crc32(text.encode())}


def remove_checksum(record: dict[str, Any]) -> None:
    """Removes the field `crc32`; raises ValueError if it does not match the other fields."""
    stored = record.pop(CHECKSUM, None)
    if stored != with_checksum(record)[CHECKSUM]:
        raise ValueError('its checksum does not match its content')


def read_json(path: str | os.PathLike | Readable, schema: Any, advice: str = ADVICE) -> Any:
    """Reads a file written by `write_json`, and checks its schema and checksums.

    Args:
        path: The file.
        schema: The schema of its content, as `check` takes it, such as {'seed': int}.
        advice: What the user can do about a damaged file; the end of the error message.

    Raises:
        RunDirectoryError: The file is damaged.
        ReadError: The system failed to read the file.
    """
    try:
        return parse_file(path, schema)
    except ValueError as error:
        raise damaged_file_error(path, error, advice) from error


def parse_file(path: str | os.PathLike | Readable, schema: Any) -> Any:
    """Reads a file like `read_json`, for a caller that writes its own error message.

    Raises:
        ValueError: The file is damaged. The message is only the reason.
        ReadError: The system failed to read the file.
    """
    path = as_readable(path)
    try:
        with read_errors(path):
            value = parse_json(read_whole(path))
    except OSError as error:
        raise ValueError(error.strerror or error) from error
    records = value if isinstance(value, list) else [value]
    for record in records:
        if isinstance(record, dict) and CHECKSUM in record:
            remove_checksum(record)
    check(value, schema)
    return value


def parse_json(text: str | bytes) -> Any:
    """Parses JSON text; raises ValueError if the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # deep nesting raises RecursionError
        raise ValueError(f'it is not JSON ({error})') from error


def read_lines(
    path: Readable,
    schema: Mapping[str, Any],
    advice: str = ADVICE,
    take: Callable[[Any], object] = lambda record: None,
) -> list[Any]:
    """Reads the records of a JSON Lines file.

    Args:
        path: The file.
        schema: The schema of each record, as `check` takes it, such as {'seed': int}.
        advice: What the user can do about a damaged file; the end of the error message.
        take: Called with each record; may raise ValueError to reject the record.

    Raises:
        RunDirectoryError: The file cannot be found, or the named line is damaged or rejected.
        ReadError: The system failed to read the file.
    """
    location = str(path)  # named in the error message
    records = []
    try:
        with read_errors(path):
            lines = read_whole(path).splitlines()
        for number, line in enumerate(lines, start=1):
            location = f'{path}, line {number}'
            record = parse_json(line)
            check(record, schema)
            take(record)  # may raise ValueError
            records.append(record)
    except (OSError, ValueError) as error:
        raise damaged_file_error(location, error, advice) from error
    return records


def damaged_file_error(
    path: str | os.PathLike | Readable, error: Exception, advice: str = ADVICE
) -> RunDirectoryError:
    """Returns the error for a damaged file, with the reason from `error`."""
    reason: object = error
    if isinstance(error, OSError) and error.strerror:
        reason = error.strerror  # without the errno and the path
    return RunDirectoryError(f'{path} is damaged ({reason}); {advice}.')


def read_results(path: Path, config: Config) -> list[dict[str, Any]]:
    """Reads a run's result.json, with one result per trial in the order of `config.trials`.

    A trial is a combination of a seed and hyperparameters.

    Raises:
        RunDirectoryError: The file is damaged, or has the results of another run.
    """
    any_objects: list[dict[str, Any]] = [{}]  # a schema; `check_result` checks the fields
    results = read_json(path, any_objects, _RESULT_ADVICE)
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
        raise damaged_file_error(path, error, _RESULT_ADVICE) from error
    return results


def check_config_hash(result: Mapping[str, Any], expected: str) -> None:
    """Raises ValueError if a result is not of the config with the hash `expected`."""
    if result['config_hash'] != expected:
        raise ValueError(
            f"field 'config_hash' is {result['config_hash']!r}, expected {expected!r}: it is the "
            'result of another run'
        )


def check_result(record: Any) -> None:
    """Checks an entry of result.json, which may have further fields.

    Raises:
        ValueError: The named field is missing or has a wrong type.
    """
    check(record, RESULT)

    # Metrics and the fields in _OPTIONAL, such as 'diverged_at', may be null. Except for losses,
    # they may also be missing.
    required_names = _loss_fields()
    type_by_name = metric_fields(record) | _OPTIONAL
    schema = {}
    for name, field_type in type_by_name.items():
        if name in record or name in required_names:
            schema[name] = field_type | None
    check(record, schema)

    if record['status'] == FINISHED and record['val_loss'] is None:
        raise ValueError("field 'val_loss' of a finished trial is None")


def metrics_of(result: Mapping[str, Any]) -> Mapping[str, Metric]:
    """Returns the metrics that a result may have, by name.

    The metrics are those of the package, and metrics from outside the package that the result
    describes in its field 'outside_metrics'.

    Raises:
        ValueError: A description is not valid.
    """
    if OUTSIDE not in result:
        return METRICS
    check(result, {OUTSIDE: dict})  # raises ValueError if the field is not an object
    descriptions = result[OUTSIDE]
    outside_metrics = []
    for name, description in descriptions.items():
        try:
            # JSON cannot describe `Metric.details`, which holds Python types.
            metric = read_dataclass(Metric, description, name=name, details={})
        except ValueError as error:
            raise ValueError(f'metric {name!r}: {error}') from error
        outside_metrics.append(metric)
    return with_outside(outside_metrics)


def corpora_of(result: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of the further corpora on which a run was evaluated.

    For the result {'data': {'evaluate': {'wikitext': {...}}, ...}, ...}, they are ('wikitext',).

    Raises:
        ValueError: The result has other than {name: description} in this place.
    """
    data = result.get('data')
    if not isinstance(data, dict) or CORPORA not in data:  # there are no further corpora
        return ()
    check(data, {CORPORA: dict})
    description_by_name = data[CORPORA]
    return tuple(description_by_name)


def metric_fields(result: Mapping[str, Any]) -> dict[str, type]:
    """Returns {field: type} for the metric fields of a result.

    Raises:
        ValueError: The result describes its metrics or corpora wrongly.
    """
    return result_fields(metrics_of(result), corpora_of(result))


def describe_outside_metrics(metrics: Mapping[str, Metric]) -> dict[str, dict[str, Any]]:
    """Describes metrics from outside the package, so that `metrics_of` can read them from a result.

    Returns:
        A field to add to a result, such as {'outside_metrics': {'top_3': {'role': 'score', ...}}}.
        {} if all metrics belong to the package.

    Raises:
        ConfigError: A metric has no valid description.
    """
    descriptions = {}
    for name, metric in outside(metrics).items():
        descriptions[name] = {field: getattr(metric, field) for field in _DESCRIBED_FIELDS}
    if not descriptions:
        return {}
    result_field = to_jsonable({OUTSIDE: descriptions})
    try:
        metrics_of(result_field)  # raises if a description is not valid
    except ValueError as error:
        raise ConfigError(f'train.metrics: {error}') from error
    return result_field


def check(value: Any, schema: Any) -> None:
    """Raises ValueError, which names the field, if `value` does not fit the schema.

    {'seed': int} is the schema of an object with an integer `seed`. [{'seed': int}] is the schema
    of a non-empty list of such objects. Schemas may be nested: {'trial': {'seed': int}}.
    """
    if isinstance(schema, list):
        _check_list(value, schema[0])
        return

    if not isinstance(value, dict):
        raise ValueError(f'expected an object, found {type(value).__name__}')
    for name, field_schema in schema.items():
        if name not in value:
            raise ValueError(f'field {name!r} is missing')
        is_nested = isinstance(field_schema, dict | list)
        if is_nested:
            _check_type(name, value[name], type(field_schema))
            check(value[name], field_schema)
        else:
            _check_type(name, value[name], field_schema)


def _check_list(value: Any, item_schema: Mapping[str, Any]) -> None:
    """Raises ValueError if `value` is not a non-empty list of objects that fit `item_schema`."""
    if not isinstance(value, list) or not value:
        raise ValueError('expected a non-empty list')
    for index, item in enumerate(value):
        try:
            check(item, item_schema)
        except ValueError as error:
            raise ValueError(f'entry {index}: {error}') from error


def _check_type(name: str, value: Any, hint: Any) -> None:
    """Raises ValueError if the value of the field `name` does not fit a type hint."""
    fits_hint = _fits(hint)
    if not fits_hint(value):
        expected = hint.__name__ if isinstance(hint, type) else str(hint).removeprefix('typing.')
        raise ValueError(f'field {name!r} is {value!r:.80}, expected {expected}')


def read_dataclass(cls: type[T], record: Any, **fixed: Any) -> T:
    """Builds a dataclass from a JSON object, with lists as tuples.

    Fields with a default may be missing in the object. Unknown fields are ignored.

    Args:
        cls: The dataclass.
        record: The JSON object.
        fixed: Fields that are set to these values instead of the object's.

    Raises:
        ValueError: The named field is missing or does not fit its annotation.
    """
    check(record, {})  # raises if the record is not an object
    hints = typing.get_type_hints(cls)
    schema = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in fixed:
            continue
        is_required = field.default is dataclasses.MISSING
        if is_required or field.name in record:
            schema[field.name] = hints[field.name]
    check(record, schema)
    values = {name: _as_tuples(record[name]) for name in schema}
    return cls(**fixed, **values)


def flat(record: Mapping, separator: str = '.', prefix: str = '') -> Iterator[tuple[str, Any]]:
    """Flattens nested mappings: yields (name, value) with names such as 'outer.inner'."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from flat(value, separator, f'{prefix}{name}{separator}')
        else:
            yield f'{prefix}{name}', value


def _as_tuples(value: Any) -> Any:
    """Converts nested lists to tuples; returns any other value unchanged."""
    if not isinstance(value, list):
        return value
    return tuple(_as_tuples(item) for item in value)


@functools.cache
def _fits(hint: Any) -> Callable[[Any], bool]:
    """Returns a function that tells whether a JSON value fits a type hint.

    `_fits(int | None)` returns a function that is true for 3 and for None. The cache makes checks
    of large files fast.
    """
    # For tuple[int, ...], the origin is `tuple` and the arguments are (int, ...).
    origin = typing.get_origin(hint) or hint
    arguments = typing.get_args(hint)

    if origin in (types.UnionType, typing.Union):  # such as int | None
        fits_options = [_fits(option) for option in arguments]
        return lambda value: any(fits_option(value) for fits_option in fits_options)

    if origin is typing.Literal:  # such as Literal['finished', 'diverged']
        return lambda value: value in arguments

    if origin is tuple:  # such as tuple[int, ...], a list in JSON
        fits_item = _fits(arguments[0])
        return lambda value: isinstance(value, list) and all(map(fits_item, value))

    has_value_type = len(arguments) == 2 and arguments[1] is not Any
    if origin is Mapping and has_value_type:  # such as Mapping[str, float]
        _, value_type = arguments
        fits_value = _fits(value_type)
        return lambda value: isinstance(value, dict) and all(map(fits_value, value.values()))

    types_in_json = _TYPES.get(origin, (origin,))  # (int, float) for float, else the type itself

    def fits_plain_type(value: Any) -> bool:
        if isinstance(value, bool):  # a bool is also an int for `isinstance`
            return origin in (bool, object)
        if isinstance(value, float) and not math.isfinite(value):
            return False  # Python parses 1e999 as infinity
        return isinstance(value, types_in_json)

    return fits_plain_type
