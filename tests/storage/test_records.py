"""JSON files and the metrics log, through crashes, damage and rewinding."""

import dataclasses
import json
import signal
import unittest.mock
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.errors import DiskError, RunDirectoryError
from qkattn.storage.metrics_log import MetricsFile, read_metrics
from qkattn.storage.records import (
    read_json,
    to_jsonable,
    with_checksum,
    write_json,
)
from tests.processes import start_python


@pytest.fixture
def path(tmp_path):
    return tmp_path / 'metrics.jsonl'


def write_steps(path: Path, steps, tail: str = '') -> None:
    path.write_text(''.join(f'{{"step":{s},  "loss": 1.0}}\n' for s in steps) + tail)


def steps_of(path: Path) -> list[int]:
    return [record['step'] for record in read_metrics(path)]


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
def test_what_json_cannot_hold_is_refused_and_the_file_left_as_it_was(tmp_path, value):
    path = tmp_path / 'result.json'
    write_json(path, {'a': 1})
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_json(path, {'a': value})
    assert path.read_bytes() == before and read_json(path, {'a': int}) == {'a': 1}
    assert [p.name for p in tmp_path.iterdir()] == ['result.json'], 'no temporary file stays'


def test_values_that_are_not_finite_become_null(path):
    losses = jnp.array([1.0, jnp.nan, jnp.inf])
    record = {'step': np.int64(1), 'loss': losses, 'best': float('-inf'), 'x': np.nan}
    MetricsFile(path).append(record)
    # Python's reader takes NaN and Infinity, which are not JSON, by this function.
    found = json.loads(path.read_text(), parse_constant=lambda constant: constant)
    plain = {'step': 1, 'loss': [1.0, None, None], 'best': None, 'x': None}
    assert found == with_checksum(plain) and read_metrics(path) == [plain]


def test_death_between_writing_and_replacing_leaves_the_old_file(path):
    write_steps(path, [1, 2])
    before = path.read_text()
    process = start_python(
        """
        import os, signal, sys
        from qkattn.storage.records import write_json
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        write_json(sys.argv[1], {'step': 3})
        """,
        path,
    )
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, errors
    assert path.read_text() == before
    assert len(list(path.parent.iterdir())) == 2, 'it died after writing the temporary file'


@pytest.mark.parametrize('kept', [0, 30, 50])
def test_rewind_drops_later_steps_and_a_torn_line_and_no_byte_else(path, kept):
    write_steps(path, range(10, 60, 10), tail='{"step": 60, "lo')
    metrics = MetricsFile(path)
    assert metrics.last_step == 50
    metrics.rewind(kept, every=10)
    assert metrics.last_step == (kept or None)
    expected = path.with_name('expected')
    write_steps(expected, range(10, kept + 10, 10))
    assert path.read_bytes() == expected.read_bytes()
    metrics.append({'step': kept + 10})
    assert steps_of(path) == [*range(10, kept + 20, 10)]


def test_rewind_drops_the_final_record_which_is_made_again(path):
    write_steps(path, [5, 10], tail='{"step": 10, "kind": "final"}\n')
    metrics = MetricsFile(path)
    assert steps_of(path) == [5, 10, 10]
    metrics.rewind(10, every=5)
    assert steps_of(path) == [5, 10]


@pytest.mark.parametrize('tail', ['{"step": 3}', '{"step": 3, "lo\n', '\0\0\0', '3\n'])
def test_opening_repairs_a_torn_end_so_that_appending_is_safe(path, tail):
    write_steps(path, [1, 2], tail=tail)
    assert steps_of(path) == [1, 2], 'a reader of a live file leaves the torn line out'
    metrics = MetricsFile(path)
    metrics.append({'step': 3})
    assert steps_of(path) == [1, 2, 3]


@pytest.mark.parametrize(
    ('damage', 'message'),
    [
        ('{"step": 3, "lo\n', 'line 3 is not a JSON object'),
        ('\n', 'line 3 is not a JSON object'),
        ('[3]\n', 'line 3 is not a JSON object'),
        ('{"loss": 1}\n', 'line 3 is not a JSON object with an integer "step"'),
        ('{"step": 1}\n', 'line 3 goes back to step 1 from step 2'),
    ],
)
def test_a_damaged_line_in_the_middle_is_named_and_nothing_is_changed(path, damage, message):
    write_steps(path, [1, 2], tail=damage + '{"step": 4}\n')
    before = path.read_bytes()
    for reader in (read_metrics, MetricsFile):
        with pytest.raises(RunDirectoryError, match=rf'metrics\.jsonl, {message}'):
            reader(path)
    assert path.read_bytes() == before


def test_rewind_detects_gaps(path):
    write_steps(path, [5, 10, 20, 25])
    metrics = MetricsFile(path)
    with pytest.raises(RunDirectoryError, match='no record of 1 step up to 20.*at 15'):
        metrics.rewind(20, every=5)
    with pytest.raises(RunDirectoryError, match='no record of 2 steps up to 30.*at 15'):
        metrics.rewind(30, every=5)
    assert steps_of(path) == [5, 10, 20, 25]
    metrics.rewind(14, every=5)
    assert steps_of(path) == [5, 10]


def test_a_record_needs_an_integer_step_that_does_not_go_back(path):
    metrics = MetricsFile(path)
    for record in ({}, {'step': None}, {'step': 1.0}, {'step': True}):
        with pytest.raises(ValueError, match='integer "step"'):
            metrics.append(record)
    assert path.read_bytes() == b''
    metrics.append({'step': 3})
    with pytest.raises(ValueError, match='step 2 would repeat'):
        metrics.append({'step': 2})
    metrics.append({'step': 3, 'split': 'validation'})
    assert steps_of(path) == [3, 3]


@pytest.mark.parametrize('cut', [0.0, 0.4, 0.9])
def test_a_full_disk_leaves_whole_lines_and_the_next_record_follows_them(path, monkeypatch, cut):
    write_steps(path, [1, 2])
    metrics = MetricsFile(path)
    whole, file = path.read_bytes(), metrics._file
    partial = unittest.mock.Mock(wraps=file)
    partial.write = lambda data: file.write(data[: int(cut * len(data))])
    with monkeypatch.context() as patch, pytest.raises(DiskError) as refusal:
        patch.setattr(metrics, '_file', partial)
        metrics.append({'step': 3, 'loss': 1.0})
    assert f'{path.parent} cannot be written: the disk is full' in str(refusal.value)
    assert path.read_bytes() == whole
    metrics.append({'step': 3})
    metrics.close()
    line = json.dumps(with_checksum({'step': 3}))
    assert path.read_bytes() == whole + line.encode() + b'\n'


@pytest.fixture
def logged(path):
    """A log of six steps with an evaluation, and what `flush` has returned before the last two."""
    metrics = MetricsFile(path)
    for step in range(1, 5):
        metrics.append({'step': step, 'loss': 1.5})
    metrics.append({'step': 4, 'kind': 'eval'})
    kept = metrics.flush()
    for step in (5, 6):
        metrics.append({'step': step, 'loss': 1.5})
    metrics.close()
    return path, kept


def test_a_log_is_rewound_to_what_a_checkpoint_has_kept(logged):
    path, kept = logged
    lines = path.read_bytes().splitlines(keepends=True)
    metrics = MetricsFile(path)
    metrics.rewind(4, every=1, written=kept)
    assert path.read_bytes() == b''.join(lines[:5]) and metrics.flush() == kept
    metrics.append({'step': 5, 'loss': 1.5})
    assert path.read_bytes() == b''.join(lines[:6])


@pytest.mark.parametrize(
    ('damage', 'message'),
    [
        (lambda lines: [lines[0].replace(b'1.5', b'1.6'), *lines[1:]], 'line 1 is damaged .*check'),
        (lambda lines: [lines[0].replace(b'1.5', b'NaN'), *lines[1:]], 'line 1 is damaged .*check'),
        (lambda lines: [*lines[:4], *lines[5:]], 'lines 1 to 5 are not those that the run has'),
        (lambda lines: lines[:4], 'has 4 of the 5 lines that the run has written'),
        (lambda lines: [*lines[:2], b'{"step": 3}\n', *lines[3:]], 'lines 1 to 5 are not those'),
        (lambda lines: [], 'has no record of 4 steps up to 4, the first at 1'),
    ],
    ids=['digit', 'nan', 'no eval', 'cut', 'other', 'deleted'],
)
def test_a_log_that_is_not_what_was_written_is_refused_and_stays(logged, damage, message):
    path, kept = logged
    damaged = b''.join(damage(path.read_bytes().splitlines(keepends=True)))
    path.write_bytes(damaged)
    with pytest.raises(RunDirectoryError, match=rf'metrics\.jsonl,? {message}') as refusal:
        MetricsFile(path).rewind(4, every=1, written=kept)
    assert 'checkpoints of this one are kept' in str(refusal.value)
    assert path.read_bytes() == damaged


@pytest.mark.parametrize('replaced', [False, True])
def test_a_log_that_is_removed_while_it_is_open_is_written_again(path, caplog, replaced):
    metrics = MetricsFile(path)
    metrics.append({'step': 1})
    whole = path.read_bytes()
    path.unlink()
    if replaced:
        path.write_text('other\n')
    metrics.append({'step': 2})
    assert 'metrics.jsonl was removed or replaced, and is written again' in caplog.text
    assert path.read_bytes().startswith(whole) and steps_of(path) == [1, 2]
    for call in (metrics.check, metrics.close):
        path.unlink()
        call()
    assert steps_of(path) == [1, 2]


def test_a_log_that_is_changed_while_it_is_open_is_refused(path):
    metrics = MetricsFile(path)
    metrics.append({'step': 1, 'loss': 1.5})
    metrics.append({'step': 2, 'loss': 1.5})
    whole = path.read_bytes()
    with path.open('r+b') as file:
        file.write(whole.replace(b'1.5', b'1.6', 1))
    with pytest.raises(RunDirectoryError, match='line 1 is damaged'):
        metrics.check()
    with path.open('r+b') as file:
        file.truncate(10)
    with pytest.raises(RunDirectoryError, match=r'has 10 of the \d+ bytes that the run has writt'):
        metrics.append({'step': 3})


@pytest.mark.parametrize('recreated', [False, True])
def test_a_log_whose_directory_is_gone_says_so(tmp_path, recreated):
    directory = tmp_path / 'runs/a'
    directory.mkdir(parents=True)
    metrics = MetricsFile(directory / 'metrics.jsonl')
    metrics.append({'step': 1})
    directory.rename(tmp_path / 'b')
    if recreated:
        directory.mkdir()
    for call in (lambda: metrics.append({'step': 2}), metrics.flush, metrics.close):
        with pytest.raises(DiskError, match=f'^{directory} is gone: it was removed, renamed or un'):
            call()
    assert metrics._file.closed and directory.exists() == recreated


def test_a_file_that_is_no_log_stays_as_it_is_until_a_record_is_written(path):
    path.write_bytes(b'\x80garbage')
    metrics = MetricsFile(path)
    with pytest.raises(RunDirectoryError, match='no record of 2 steps up to 2'):
        metrics.rewind(2, every=1)
    metrics.close()
    assert path.read_bytes() == b'\x80garbage'


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
        (SOUND | {'of': []}, r"field 'of' is \[\], expected dict"),
        (SOUND | {'of': {'kinds': None}}, "field 'count' is missing"),
        (SOUND | {'of': {'count': 2, 'kinds': ['a', 1]}}, 'expected list of str or null'),
    ],
    ids=range(11),
)
def test_what_does_not_fit_its_schema_is_one_sentence(tmp_path, content, message):
    path = tmp_path / 'x.json'
    if isinstance(content, dict):
        content = json.dumps(content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RunDirectoryError, match=message) as refusal:
        read_json(path, SCHEMA)
    assert '\n' not in str(refusal.value) and len(str(refusal.value)) < 400
    path.write_text(json.dumps(SOUND | {'more': 1}))
    assert read_json(path, SCHEMA)['rate'] == 1


def test_a_directory_in_the_place_of_a_file_is_one_sentence(tmp_path):
    for read in (lambda path: read_json(path, {}), read_metrics, MetricsFile):
        with pytest.raises(RunDirectoryError, match=r'is damaged \(Is a directory\); restore it'):
            read(tmp_path)
