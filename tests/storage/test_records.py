"""JSON files: what they may hold, and what is said of a file that holds something else."""

import json
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.errors import RunDirectoryError
from qkattn.storage.records import check_result, read_json, to_jsonable, write_json
from tests.refusals import refused
from tests.studies import outside_record


@dataclass
class Point:
    x: float
    where: Path


@pytest.mark.parametrize(
    ('value', 'expected'),
    [
        (np.float32(0.5), 0.5),
        (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
        (jnp.float32(0.25), 0.25),
        (jnp.ones((2,), jnp.bfloat16), [1.0, 1.0]),
        (np.bool_(True), True),
        ([jnp.array([1.0, jnp.nan]), float('-inf')], [[1.0, None], None]),
        ({3: (1, None, True, 'text')}, {'3': [1, None, True, 'text']}),
        (Point(1.5, Path('a/b')), {'x': 1.5, 'where': 'a/b'}),
    ],
)
def test_to_jsonable_converts_what_records_hold(value, expected):
    text = json.dumps(to_jsonable(value))
    assert json.loads(text) == expected


@pytest.mark.parametrize('value', [1j, np.complex64(1j), print])
def test_to_jsonable_refuses_other_types(value):
    with pytest.raises(TypeError):
        to_jsonable({'a': value})


RECORD_SCHEMA = {'a': int, 'b': tuple[float, ...]}


@pytest.mark.parametrize(
    ('value', 'schema'),
    [
        pytest.param({'a': 1, 'b': [1.5]}, RECORD_SCHEMA, id='record'),
        pytest.param(
            [{'a': 1, 'b': [1.5]}, {'a': 2, 'b': []}], [RECORD_SCHEMA], id='list of records'
        ),
    ],
)
def test_a_file_that_was_edited_is_refused_by_its_checksum(tmp_path, value, schema):
    path = tmp_path / 'x.json'
    write_json(path, value)
    assert read_json(path, schema) == value

    edited = path.read_text().replace('1.5', '1.6')
    path.write_text(edited)

    with pytest.raises(RunDirectoryError, match=r'x\.json is damaged \(its checksum .*restore it'):
        read_json(path, schema)


@pytest.mark.parametrize(
    ('value', 'schema'),
    [
        pytest.param({'a': 1, 'b': [1.5]}, RECORD_SCHEMA, id='record'),
        pytest.param(
            [{'a': 1, 'b': [1.5]}, {'a': 2, 'b': []}], [RECORD_SCHEMA], id='list of records'
        ),
    ],
)
def test_a_file_without_checksums_is_read(tmp_path, value, schema):
    path = tmp_path / 'x.json'
    path.write_text(json.dumps(value))
    assert read_json(path, schema) == value


@pytest.mark.parametrize(
    ('name', 'change', 'message'),
    [
        ('top_3', {'unit': 3}, "metric 'top_3': field 'unit' is 3, expected str"),
        ('top_3', {'decimals': None}, "metric 'top_3': field 'decimals' is None, expected int"),
        ('top_3', {'value': 'os:system'}, "metric 'top_3': field 'value' is 'os:system', expected"),
        ('top_3', {'prefixes': ['train']}, "metric 'top_3': field 'prefixes' is"),
        ('val_loss', {'role': 'loss'}, "role='loss' of metric 'val_loss' must be 'score'"),
        ('accuracy', {}, "metric 'accuracy' has the name of another"),
    ],
)
def test_a_wrong_description_of_a_metric_is_refused(name, change, message):
    record = outside_record('qk/vo')
    description = record['outside_metrics']['top_3'] | change
    record['outside_metrics'] = {name: description}

    with refused(message, ValueError):
        check_result(record)


SCHEMA = {'name': str, 'rate': float, 'inner': {'count': int, 'kinds': tuple[str, ...] | None}}
# A field that is not in the schema is allowed.
VALID = {'name': 'x', 'rate': 1, 'inner': {'count': 2, 'kinds': None}, 'more': 1}


def test_a_value_that_fits_its_schema_is_read(tmp_path):
    path = tmp_path / 'x.json'
    write_json(path, VALID)
    assert read_json(path, SCHEMA)['rate'] == 1


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'rate': '1'}, "field 'rate' is '1', expected float"),
        ({'rate': True}, "field 'rate' is True, expected float"),
        ({'inner': []}, r"field 'inner' is \[\], expected dict"),
        ({'inner': {'kinds': None}}, "field 'count' is missing"),
        ({'inner': {'count': 2, 'kinds': ['a', 1]}}, "field 'kinds' is .*, expected tuple"),
    ],
    ids=['string', 'boolean', 'list', 'missing field', 'list of other types'],
)
def test_a_value_that_does_not_fit_its_schema_is_refused(tmp_path, change, message):
    path = tmp_path / 'x.json'
    path.write_text(json.dumps(VALID | change))

    with refused(message, RunDirectoryError) as refusal:
        read_json(path, SCHEMA)
    assert len(str(refusal.value)) < 400


def test_a_number_that_overflows_is_refused(tmp_path):
    path = tmp_path / 'x.json'
    path.write_bytes(b'{"name": "x", "rate": 1e999, "inner": {}}')

    with refused("field 'rate' is inf, expected float", RunDirectoryError) as refusal:
        read_json(path, SCHEMA)
    assert len(str(refusal.value)) < 400
