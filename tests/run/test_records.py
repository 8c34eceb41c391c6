"""JSON files and the metrics log, through crashes, damage and rewinding."""

import dataclasses
import json
import signal
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.errors import RunDirectoryError
from qkattn.run.records import MetricsFile, read_metrics, to_jsonable, write_json
from tests.processes import start_python


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
        '3': [1, None, True, 'text'],
        'point': {'x': 1.5, 'where': 'a/b'},
    }
    assert json.loads(json.dumps(converted)) == converted


@pytest.mark.parametrize('value', [1j, np.complex64(1j), {1}, print, {(1, 2): 3}, {True: 1}])
def test_to_jsonable_refuses_what_json_cannot_hold(value):
    with pytest.raises(TypeError):
        to_jsonable(value)


def test_values_that_are_not_finite_become_null(tmp_path):
    metrics = MetricsFile(tmp_path / 'metrics.jsonl')
    losses = jnp.array([1.0, jnp.nan, jnp.inf])
    metrics.append({'step': np.int64(1), 'loss': losses, 'best': float('-inf'), 'x': np.nan})
    metrics.close()

    def refuse(constant):
        raise AssertionError(f'{constant} is not strict JSON')

    line = (tmp_path / 'metrics.jsonl').read_text()
    expected = {'step': 1, 'loss': [1.0, None, None], 'best': None, 'x': None}
    assert json.loads(line, parse_constant=refuse) == expected


def test_write_json_leaves_the_file_where_a_value_has_no_json_form(tmp_path):
    path = tmp_path / 'result.json'
    write_json(path, {'a': 1})
    with pytest.raises(TypeError):
        write_json(path, {'a': print})
    assert json.loads(path.read_text()) == {'a': 1}
    assert [p.name for p in tmp_path.iterdir()] == ['result.json'], 'no temporary file stays'


@pytest.mark.parametrize('operation', ['write_json', 'rewind'])
def test_death_between_writing_and_replacing_leaves_the_old_file(tmp_path, operation):
    path = tmp_path / 'file'
    path.write_text('{"step": 1}\n{"step": 2}\n')
    process = start_python(
        """
        import os, signal, sys
        from qkattn.run.records import MetricsFile, write_json
        path, operation = sys.argv[1:]
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        if operation == 'rewind':
            MetricsFile(path).rewind(1)
        else:
            write_json(path, {'step': 3})
        """,
        path,
        operation,
    )
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, errors
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert len(list(tmp_path.iterdir())) == 2, 'it died after writing the temporary file'


def write_steps(path: Path, steps, tail: str = '') -> None:
    path.write_text(''.join(f'{{"step": {s}, "loss": 1.0}}\n' for s in steps) + tail)


def steps_of(path: Path) -> list[int]:
    return [record['step'] for record in read_metrics(path)]


def test_rewind_drops_later_steps_and_a_torn_line(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    write_steps(path, range(10, 60, 10), tail='{"step": 60, "lo')
    metrics = MetricsFile(path)
    assert metrics.last_step == 50
    metrics.rewind(30, every=10)
    assert metrics.last_step == 30
    for step in (40, 50):
        metrics.append({'step': step})
    metrics.close()
    assert steps_of(path) == [10, 20, 30, 40, 50]
    assert path.read_bytes().endswith(b'}\n')


def test_rewind_keeps_the_bytes_of_what_stays(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    path.write_text('{"step":1,  "loss": 0.10}\n{"step": 2}\n')
    MetricsFile(path).rewind(1)
    assert path.read_text() == '{"step":1,  "loss": 0.10}\n'


def test_rewind_to_the_start_empties_the_file(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    write_steps(path, [1, 2])
    metrics = MetricsFile(path)
    metrics.rewind(0)
    assert path.read_bytes() == b''
    metrics.append({'step': 1})
    assert steps_of(path) == [1]


@pytest.mark.parametrize('tail', ['{"step": 3}', '{"step": 3, "lo\n', '\0\0\0', '3\n'])
def test_opening_repairs_a_torn_end_so_that_appending_is_safe(tmp_path, tail):
    path = tmp_path / 'metrics.jsonl'
    write_steps(path, [1, 2], tail=tail)
    assert steps_of(path) == [1, 2], 'a reader of a live file leaves the torn line out'
    metrics = MetricsFile(path)
    metrics.append({'step': 3})
    assert steps_of(path) == [1, 2, 3]


@pytest.mark.parametrize('damage', ['{"step": 3, "lo\n', '\n', '[3]\n', '{"loss": 1}\n'])
def test_a_damaged_line_in_the_middle_is_named_and_nothing_is_changed(tmp_path, damage):
    path = tmp_path / 'metrics.jsonl'
    write_steps(path, [1, 2], tail=damage + '{"step": 4}\n')
    before = path.read_bytes()
    for reader in (read_metrics, MetricsFile):
        with pytest.raises(RunDirectoryError, match=r'metrics\.jsonl, line 3 '):
            reader(path)
    assert path.read_bytes() == before


def test_repeated_steps_are_detected_when_read_and_refused_when_written(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    write_steps(path, [1, 2, 3, 2, 3])
    with pytest.raises(RunDirectoryError, match='line 4 goes back to step 2 from step 3'):
        read_metrics(path)
    write_steps(path, [1, 2, 3])
    metrics = MetricsFile(path)
    with pytest.raises(ValueError, match='step 2 would repeat'):
        metrics.append({'step': 2})
    metrics.append({'step': 3, 'split': 'validation'})
    assert steps_of(path) == [1, 2, 3, 3]


def test_rewind_detects_gaps(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    write_steps(path, [5, 10, 20, 25])
    metrics = MetricsFile(path)
    with pytest.raises(RunDirectoryError, match='no record of 1 step up to 20.*at 15'):
        metrics.rewind(20, every=5)
    with pytest.raises(RunDirectoryError, match='no record of 2 steps up to 30.*at 15'):
        metrics.rewind(30, every=5)
    assert steps_of(path) == [5, 10, 20, 25]
    metrics.rewind(14, every=5)
    assert steps_of(path) == [5, 10]


@pytest.mark.parametrize('record', [{}, {'step': None}, {'step': 1.0}, {'step': True}])
def test_a_record_needs_an_integer_step(tmp_path, record):
    metrics = MetricsFile(tmp_path / 'metrics.jsonl')
    with pytest.raises(ValueError, match='integer "step"'):
        metrics.append(record)
    assert (tmp_path / 'metrics.jsonl').read_bytes() == b''
