"""JSON files of runs and studies: written whole, with checksums, and checked when they are read.

JSON is strict: without NaN and Infinity. A schema says what a JSON value must contain:

    {'name': str, 'rate': float}     an object with these fields; it may have others
    [{'name': str}]                  a non-empty list of such objects
    float, str | None, Literal['a']  a value; an integer fits float, and true only fits bool
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
from qkattn.metrics import CORPORA, METRICS, TIMES, Metric, outside, result_fields, with_outside
from qkattn.storage.files import Readable, as_readable, read_errors, read_whole, write_atomic

T = TypeVar('T')
# The `status` of an entry of result.json.
FINISHED = 'finished'
DIVERGED = 'diverged'
# The field of an object that holds the checksum of its other fields.
CHECKSUM = 'crc32'
ADVICE = 'restore it from a copy or use another run directory'
_RESULT_ADVICE = 'restore it from a copy, or remove it: the same command then makes it again'
# The Python types of parsed JSON that fit a type of a schema. Other types only fit themselves.
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
# A split of documents.json: the names and numbers of targets of its documents, and per trial the
# loss of each document in nats.
DOCUMENTS = {
    'documents': tuple[str, ...],
    'tokens': tuple[float, ...],
    'nats': tuple[tuple[float, ...] | None, ...],
}
# The files of a run that reports do not use.
RUN_FILES = {'config.json': CONFIG, 'provenance.json': PROVENANCE, 'result.json': [RESULT]}
# The fields of study.json that are read before it is compared field by field.
STUDY = {'base': dict, 'variants': list, 'sizes': list, 'corpora': list, 'arms': list}
# The fields of an arm in study.json that tell it from other arms.
ARM_KEY = {'variant': str, 'size': str, 'corpus': str, 'control': str | None}
# The field of a result that describes its metrics from outside the package, so that reports need
# not import their modules. A result without such metrics does not have the field.
OUTSIDE = 'outside_metrics'
# The fields of a metric that the description contains.
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
# Fields of a result, besides its metrics, that may be missing or null.
_OPTIONAL: dict[str, type] = {**dict.fromkeys(TIMES, float), 'diverged_at': int}


def _loss_fields() -> set[str]:
    """Returns the fields of losses, such as val_loss, which every result must have."""
    fields: set[str] = set()
    for metric in METRICS.values():
        if metric.role == 'loss' and metric.logged:
            fields.update(metric.field(prefix) for prefix in metric.prefixes)
    return fields


def to_jsonable(value: Any) -> Any:
    """Converts a value to the types of JSON; a dataclass becomes an object, an array a list.

    NaN and infinity become None. Raises TypeError for a type that has no form in JSON.
    """
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
    """Writes an object, or a list of objects, atomically and with a checksum in each object.

    `to_jsonable` converts the value first.
    """
    plain = to_jsonable(value)
    if isinstance(plain, list):
        content: Any = [with_checksum(item) for item in plain]
    else:
        content = with_checksum(plain)
    write_atomic(path, json.dumps(content, allow_nan=False, indent=indent) + '\n')


def with_checksum(record: dict[str, Any]) -> dict[str, Any]:
    """Returns a JSON object with one more field, `crc32`: the checksum of the other fields."""
    text = json.dumps(record, sort_keys=True)
    return {**record, CHECKSUM: zlib.crc32(text.encode())}


def remove_checksum(record: dict[str, Any]) -> None:
    """Removes the field `crc32`; raises ValueError if it does not match the other fields."""
    stored = record.pop(CHECKSUM, None)
    if stored != with_checksum(record)[CHECKSUM]:
        raise ValueError('its checksum does not match its content')


def read_json(path: str | os.PathLike | Readable, schema: Any, advice: str = ADVICE) -> Any:
    """Reads a file of `write_json`, and checks it against a schema; checksums may be missing.

    Raises RunDirectoryError, which ends with `advice`, if the file is damaged. Raises ReadError if
    the system fails to read it.
    """
    try:
        return parse_file(path, schema)
    except ValueError as error:
        raise damaged_file_error(path, error, advice) from error


def parse_file(path: str | os.PathLike | Readable, schema: Any) -> Any:
    """Reads a file as `read_json` does, for a caller that makes its own error.

    Raises ValueError if the file is damaged. The text of the error is the reason, without the path.
    """
    path = as_readable(path)
    try:
        with read_errors(path):
            value = parse_json(read_whole(path))
    except OSError as error:
        raise ValueError(error.strerror or error) from error
    # The file holds an object, or a list of objects, and each may have a checksum.
    items = value if isinstance(value, list) else [value]
    for item in items:
        if isinstance(item, dict) and CHECKSUM in item:
            remove_checksum(item)
    check(value, schema)
    return value


def parse_json(text: str | bytes) -> Any:
    """Parses the JSON text of a file; raises ValueError if the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: deeply nested
        raise ValueError(f'it is not JSON ({error})') from error


def read_lines(
    path: Readable,
    schema: Mapping[str, Any],
    advice: str = ADVICE,
    take: Callable[[Any], object] = lambda record: None,
) -> list[Any]:
    """Reads a file of JSON Lines, and returns its values.

    Args:
      path: the file.
      schema: what each value must contain (see the top of this module).
      advice: the end of an error: what a user can do about a damaged file.
      take: a function that is called with each value, and raises ValueError to refuse it.

    Raises RunDirectoryError, which names the first line that is damaged or refused.
    """
    location = str(path)  # what an error names: the file, or a line of it
    records = []
    try:
        with read_errors(path):
            lines = read_whole(path).splitlines()
        for number, line in enumerate(lines, start=1):
            location = f'{path}, line {number}'
            record = parse_json(line)
            check(record, schema)
            take(record)
            records.append(record)
    except (OSError, ValueError) as error:
        raise damaged_file_error(location, error, advice) from error
    return records


def damaged_file_error(
    path: str | os.PathLike | Readable, error: Exception, advice: str = ADVICE
) -> RunDirectoryError:
    """Returns the error for a file that cannot be used, with the reason and what to do."""
    reason: object = error
    if isinstance(error, OSError) and error.strerror:
        reason = error.strerror  # without the number and the path
    return RunDirectoryError(f'{path} is damaged ({reason}); {advice}.')


def read_results(path: Path, config: Config) -> list[dict[str, Any]]:
    """Reads result.json of a run: a result for each trial of its `config`, in their order.

    A trial is one seed and one setting of the hyperparameters. Raises RunDirectoryError if the file
    is damaged, or if it has the results of another run.
    """
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
        raise damaged_file_error(path, error, _RESULT_ADVICE) from error
    return results


def check_config_hash(result: Mapping[str, Any], expected: str) -> None:
    """Raises ValueError unless a result belongs to the config with the hash `expected`."""
    if result['config_hash'] != expected:
        raise ValueError(
            f"field 'config_hash' is {result['config_hash']!r}, expected {expected!r}: it is the "
            'result of another run'
        )


def check_result(record: Any) -> None:
    """Raises ValueError, which names the field, unless `record` is an entry of result.json.

    The record may have fields that this function does not know.
    """
    # The fields that every result has with the same type, such as 'num_steps'.
    check(record, RESULT)

    # The metrics, such as 'val_loss', and the fields _OPTIONAL. Each may be null. Only the losses
    # have to be there.
    required = _loss_fields()
    schema = {}
    type_by_field = metric_fields(record) | _OPTIONAL
    for name, field_type in type_by_field.items():
        if name in record or name in required:
            schema[name] = field_type | None
    check(record, schema)

    if record['status'] == FINISHED and record['val_loss'] is None:
        raise ValueError("field 'val_loss' of a finished trial is None")


def metrics_of(result: Mapping[str, Any]) -> Mapping[str, Metric]:
    """Returns {name: metric} for the metrics that a result may have.

    These are the metrics of the package, and those from outside that the result describes in its
    field OUTSIDE (see `describe_outside_metrics`). Raises ValueError if a description is not valid.
    """
    if OUTSIDE not in result:
        return METRICS
    check(result, {OUTSIDE: dict})
    outside_metrics = []
    for name, description in result[OUTSIDE].items():
        try:
            # A description has no `details`, because they are Python types.
            metric = read_dataclass(Metric, description, name=name, details={})
        except ValueError as error:
            raise ValueError(f'metric {name!r}: {error}') from error
        outside_metrics.append(metric)
    return with_outside(outside_metrics)


def corpora_of(result: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the entries of data.evaluate of a result; raises ValueError if they are damaged."""
    data = result.get('data')
    if not isinstance(data, dict) or CORPORA not in data:
        return ()
    check(data, {CORPORA: dict})
    return tuple(data[CORPORA])


def metric_fields(result: Mapping[str, Any]) -> dict[str, type]:
    """Returns the fields of a result that hold metrics, with their types; see `result_fields`.

    Raises ValueError as `metrics_of` and `corpora_of` do.
    """
    return result_fields(metrics_of(result), corpora_of(result))


def describe_outside_metrics(metrics: Mapping[str, Metric]) -> dict[str, dict[str, Any]]:
    """Describes the metrics from outside the package for a result, so that reports can show them.

    Returns the field of the result: {'outside_metrics': {'top_3': {'role': 'score', ...}}} for a
    metric top_3, or {} if all metrics are those of the package. Raises ConfigError if `metrics_of`,
    with which reports read the field, refuses a description.
    """
    descriptions = {}
    for name, metric in outside(metrics).items():
        descriptions[name] = {field: getattr(metric, field) for field in _DESCRIBED}
    if not descriptions:
        return {}
    result_field = to_jsonable({OUTSIDE: descriptions})
    try:
        metrics_of(result_field)
    except ValueError as error:
        raise ConfigError(f'train.metrics: {error}') from error
    return result_field


def check(value: Any, schema: Any) -> None:
    """Raises ValueError, which names the field, unless `value` fits the schema.

    {'seed': int} is the schema of an object with an integer `seed`, and [{'seed': int}] that of a
    list of such objects. Schemas may be nested: {'trial': {'seed': int}}.
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
            _check_type(name, value[name], type(field_schema))  # an object or a list
            check(value[name], field_schema)
        else:
            _check_type(name, value[name], field_schema)


def _check_list(value: Any, item_schema: Mapping[str, Any]) -> None:
    """Raises ValueError unless `value` is a list of one or more objects that fit `item_schema`."""
    if not isinstance(value, list) or not value:
        raise ValueError('expected a non-empty list')
    for number, item in enumerate(value):
        try:
            check(item, item_schema)
        except ValueError as error:
            raise ValueError(f'entry {number}: {error}') from error


def _check_type(name: str, value: Any, hint: Any) -> None:
    """Raises ValueError unless the value of the field `name` fits a type hint."""
    fits = _fits(hint)
    if not fits(value):
        expected = hint.__name__ if isinstance(hint, type) else str(hint).removeprefix('typing.')
        raise ValueError(f'field {name!r} is {value!r:.80}, expected {expected}')


def read_dataclass(cls: type[T], record: Any, **fixed: Any) -> T:
    """Builds a dataclass from the fields of a JSON object, with lists as tuples.

    The object may lack fields that have a default, and may have fields that the class lacks.

    Args:
      cls: the dataclass.
      record: the JSON object.
      fixed: values that the caller gives to fields. The object's values of these are not read.

    Raises ValueError, which names the field, if a value does not fit the annotation of its field.
    """
    check(record, {})  # raises unless the record is an object
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
    """Yields (name, value) for every value in nested mappings, with names as 'outer.inner'."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from flat(value, separator, f'{prefix}{name}{separator}')
        else:
            yield f'{prefix}{name}', value


def _as_tuples(value: Any) -> Any:
    """Converts a list, and the lists in it, to tuples; other values stay as they are."""
    if not isinstance(value, list):
        return value
    return tuple(_as_tuples(item) for item in value)


@functools.cache
def _fits(hint: Any) -> Callable[[Any], bool]:
    """Returns a function that tells whether a JSON value fits a type hint.

    `_fits(int | None)` returns a function that is true for 3 and for None. The cases below are the
    forms of a hint: a union, a Literal, a tuple or a Mapping of one type, and a plain type. The
    function is made once for each hint, because files hold millions of values.
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

    has_item_type = len(arguments) == 2 and arguments[1] is not Any
    if origin is Mapping and has_item_type:  # such as Mapping[str, float]
        fits_item = _fits(arguments[1])
        return lambda value: isinstance(value, dict) and all(map(fits_item, value.values()))

    types_in_json = _TYPES.get(origin, (origin,))  # a plain type, such as float

    def fits(value: Any) -> bool:
        if isinstance(value, bool):  # isinstance(True, int) is true, so bool comes first
            return origin in (bool, object)
        if isinstance(value, float) and not math.isfinite(value):
            return False  # Python reads 1e999 as infinity, which strict JSON does not have
        return isinstance(value, types_in_json)

    return fits
