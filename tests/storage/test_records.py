"""JSON files: what they may hold, and what is said of a file that holds something else."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.errors import RunDirectoryError
from qkattn.storage.records import read_json, to_jsonable, write_json


@dataclasses.dataclass
class Point:
    x: float
    where: Path


def test_to_jsonable_covers_numpy_jax_and_containers():
    value = {
        'numpy': np.float32(0.5),
        'array': np.arange(4).reshape(2, 2),
        'jax': jnp.float32(0.25),
        'half': jnp.ones((2,), jnp.bfloat16),
        'flag': np.bool_(True),
        'not finite': [jnp.array([1.0, jnp.nan]), float('-inf')],
        3: (1, None, True, 'text'),
        'point': Point(1.5, Path('a/b')),
    }
    converted = to_jsonable(value)
    assert converted == {
        'numpy': 0.5,
        'array': [[0, 1], [2, 3]],
        'jax': 0.25,
        'half': [1.0, 1.0],
        'flag': True,
        'not finite': [[1.0, None], None],
        '3': [1, None, True, 'text'],
        'point': {'x': 1.5, 'where': 'a/b'},
    }
    assert json.loads(json.dumps(converted)) == converted


@pytest.mark.parametrize('value', [1j, np.complex64(1j), {1}, print, {(1, 2): 3}, {True: 1}])
def test_what_json_cannot_hold_is_refused_and_the_file_left_as_it_was(tmp_path, value):
    path = tmp_path / 'result.json'
    write_json(path, {'a': 1})
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_json(path, {'a': value})
    assert path.read_bytes() == before and read_json(path, {'a': int}) == {'a': 1}
    assert [p.name for p in tmp_path.iterdir()] == ['result.json'], 'no temporary file stays'


@pytest.mark.parametrize('value', [{'a': 1, 'b': [1.5]}, [{'a': 1, 'b': [1.5]}, {'a': 2, 'b': []}]])
def test_what_was_changed_by_hand_has_another_checksum(tmp_path, value):
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


SCHEMA = {'name': str, 'rate': float, 'of': {'count': int, 'kinds': tuple[str, ...] | None}}
SOUND = {'name': 'x', 'rate': 1, 'of': {'count': 2, 'kinds': None}}


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        ('', 'it is not JSON'),
        (b'\xff\xfe\x80', 'it is not JSON'),
        ('[' * 100_000, 'it is nested too deeply'),
        ('[' * 60 + ']' * 60, 'it is nested too deeply'),
        ('[]', 'expected an object, found an empty list'),
        (SOUND | {'rate': '1'}, "field 'rate' is '1', expected int or float"),
        (SOUND | {'rate': True}, "field 'rate' is True, expected int or float"),
        (SOUND | {'rate': 10**400}, r"field 'rate' is 10+\.\.\., expected int or float"),
        ('{"name": "x", "rate": 1e999, "of": {}}', "field 'rate' is inf, expected int or float"),
        (SOUND | {'of': []}, r"field 'of' is \[\], expected dict"),
        (SOUND | {'of': {'kinds': None}}, "field 'count' is missing"),
        (SOUND | {'of': {'count': 2, 'kinds': ['a', 1]}}, 'expected list of str or null'),
        (None, r'is damaged \(Is a directory\); restore it'),
    ],
    ids=range(13),
)
def test_what_does_not_fit_its_schema_is_one_sentence(tmp_path, content, message):
    path = tmp_path / 'x.json'
    content = json.dumps(content) if isinstance(content, dict) else content
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RunDirectoryError, match=message) as refusal:
        read_json(path, SCHEMA)
    assert '\n' not in str(refusal.value) and len(str(refusal.value)) < 400


def test_an_object_may_have_more_fields_than_its_schema(tmp_path):
    write_json(tmp_path / 'x.json', SOUND | {'more': 1})
    assert read_json(tmp_path / 'x.json', SCHEMA)['rate'] == 1
