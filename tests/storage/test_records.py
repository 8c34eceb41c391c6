"""JSON files: what they may hold, and what is said of a file that holds something else."""

import json
from dataclasses import make_dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.errors import RunDirectoryError
from qkattn.storage.records import check_result, read_json, to_jsonable, write_json
from tests.refusals import refused
from tests.studies import outside_record


def test_to_jsonable_covers_what_records_hold():
    pairs = [
        (np.float32(0.5), 0.5),
        (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
        (jnp.float32(0.25), 0.25),
        (jnp.ones((2,), jnp.bfloat16), [1.0, 1.0]),
        (np.bool_(True), True),
        ([jnp.array([1.0, jnp.nan]), float('-inf')], [[1.0, None], None]),
        ({3: (1, None, True, 'text')}, {'3': [1, None, True, 'text']}),
        (make_dataclass('Point', ['x', 'where'])(1.5, Path('a/b')), {'x': 1.5, 'where': 'a/b'}),
    ]
    for value, expected in pairs:
        assert json.loads(json.dumps(to_jsonable(value))) == expected
    for value in (1j, np.complex64(1j), print):
        with pytest.raises(TypeError):
            to_jsonable({'a': value})


@pytest.mark.parametrize('value', [{'a': 1, 'b': [1.5]}, [{'a': 1, 'b': [1.5]}, {'a': 2, 'b': []}]])
def test_a_file_that_was_changed_by_hand_is_refused_by_its_checksum(tmp_path, value):
    path = tmp_path / 'x.json'
    schema = {'a': int, 'b': tuple[float, ...]}
    schema = [schema] if isinstance(value, list) else schema
    write_json(path, value)
    assert read_json(path, schema) == value
    path.write_text(path.read_text().replace('1.5', '1.6'))
    with pytest.raises(RunDirectoryError, match=r'x\.json is damaged \(its checksum .*restore it'):
        read_json(path, schema)
    path.write_text(json.dumps(value))  # a file without checksums
    assert read_json(path, schema) == value


@pytest.mark.parametrize(
    ('name', 'change', 'message'),
    [
        ('top_3', {'unit': 3}, "metric 'top_3': field 'unit' is 3, expected str"),
        ('top_3', {'decimals': None}, "metric 'top_3': field 'decimals' is None, expected int"),
        ('top_3', {'value': 'os:system'}, "metric 'top_3': field 'value' is 'os:system', expected"),
        ('top_3', {'prefixes': ['train']}, "metric 'top_3': field 'prefixes' is"),
        ('val_loss', {'role': 'loss'}, "metric 'val_loss' of role 'loss' must have"),
        ('accuracy', {}, "metric 'accuracy' has the name of another"),
    ],
)
def test_a_description_of_a_metric_is_data_of_the_right_kind(name, change, message):
    record = outside_record('qk/vo')
    record['outside_metrics'] = {name: record['outside_metrics']['top_3'] | change}
    with refused(message, ValueError):
        check_result(record)


SCHEMA = {'name': str, 'rate': float, 'inner': {'count': int, 'kinds': tuple[str, ...] | None}}
SOUND = {'name': 'x', 'rate': 1, 'inner': {'count': 2, 'kinds': None}, 'more': 1}


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        (SOUND | {'rate': '1'}, "field 'rate' is '1', expected float"),
        (SOUND | {'rate': True}, "field 'rate' is True, expected float"),
        (b'{"name": "x", "rate": 1e999, "inner": {}}', "field 'rate' is inf, expected float"),
        (SOUND | {'inner': []}, r"field 'inner' is \[\], expected dict"),
        (SOUND | {'inner': {'kinds': None}}, "field 'count' is missing"),
        (SOUND | {'inner': {'count': 2, 'kinds': ['a', 1]}}, "field 'kinds' is .*, expected tuple"),
    ],
    ids=range(6),
)
def test_a_value_that_does_not_fit_its_schema_is_refused_in_one_sentence(
    tmp_path, content, message
):
    path = tmp_path / 'x.json'
    path.write_bytes(json.dumps(content).encode() if isinstance(content, dict) else content)
    with refused(message, RunDirectoryError) as refusal:
        read_json(path, SCHEMA)
    assert len(str(refusal.value)) < 400
    write_json(tmp_path / 'sound.json', SOUND)
    assert read_json(tmp_path / 'sound.json', SCHEMA)['rate'] == 1
