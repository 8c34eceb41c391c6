import dataclasses
import json
import re

import pytest

from qkattn.data import cache
from qkattn.data.cache import DamagedCache, check_sha256, data_root, prepared_once, read_description
from qkattn.errors import ConfigError
from tests.processes import start_python


def test_data_root_prefers_the_argument_then_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv('QKATTN_DATA', str(tmp_path / 'environment'))
    monkeypatch.setenv('HOME', str(tmp_path))
    assert data_root(tmp_path / 'argument') == tmp_path / 'argument'
    assert data_root() == tmp_path / 'environment'
    monkeypatch.delenv('QKATTN_DATA')
    assert data_root() == tmp_path / '.cache' / 'qkattn'


def test_data_root_refuses_a_bucket():
    with pytest.raises(ConfigError, match=re.escape("data_dir='gs://bucket/x' is a URL")):
        data_root('gs://bucket/x')


class Notes:
    """A file that is prepared once; b'sound' is its only undamaged content."""

    def __init__(self, directory):
        self.path, self.lock = directory / 'notes' / 'file', directory / 'notes' / 'lock'
        self.num_prepared = 0

    def opened(self):
        data = self.path.read_bytes()
        if data != b'sound':
            raise DamagedCache('It is damaged.')
        return data

    def prepare(self):
        assert self.lock.exists()
        self.num_prepared += 1
        self.path.write_bytes(b'sound')

    def get(self):
        return prepared_once(self.lock, self.opened, self.prepare)


def test_what_is_there_is_opened_without_a_lock(tmp_path):
    notes = Notes(tmp_path)
    assert notes.get() == b'sound'
    notes.lock.unlink()
    assert notes.get() == b'sound'
    # So that a finished cache may be on a read-only disk.
    assert (notes.num_prepared, notes.lock.exists()) == (1, False)


def test_what_is_damaged_is_logged_and_prepared_again(tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr(cache.log, 'warning', lambda text, *args: warnings.append(text % args))
    notes = Notes(tmp_path)
    notes.get()
    assert not warnings
    notes.path.write_bytes(b'')
    assert (notes.get(), notes.num_prepared) == (b'sound', 2)
    assert warnings == ['It is damaged. It is prepared again.']


RACE = """
    import sys, time
    from pathlib import Path
    from qkattn.data.cache import prepared_once
    root = Path(sys.argv[1])

    def prepare():
        with (root / 'prepared').open('a') as file:
            file.write('x')
        time.sleep(0.1)
        (root / 'file').write_text('sound')

    print('ready', flush=True)
    while not (root / 'go').exists():
        time.sleep(0.001)
    print(prepared_once(root / 'lock', (root / 'file').read_text, prepare))
"""


def test_of_processes_that_race_one_prepares(tmp_path):
    processes = [start_python(RACE, tmp_path) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == 'ready\n', process.communicate()
    (tmp_path / 'go').touch()
    outputs = [process.communicate(timeout=120) for process in processes]
    assert outputs == [('sound\n', '')] * 3
    assert (tmp_path / 'prepared').read_text() == 'x'


@dataclasses.dataclass
class Described:
    name: str
    size: int


@pytest.mark.parametrize(
    ('content', 'says'),
    [
        (None, 'it cannot be read'),
        ('{', 'it cannot be read'),
        ('[]', 'it cannot be read'),
        ('{"name": "a"}', 'it cannot be read'),
        ('{"name": "b", "size": 1}', "name is 'b', not 'a'"),
    ],
)
def test_a_damaged_description_is_one_sentence(tmp_path, content, says):
    path = tmp_path / 'about.json'
    path.write_text(json.dumps({'name': 'a', 'size': 1}))
    assert read_description(path, Described, {'name': 'a'}) == Described('a', 1)
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(DamagedCache, match=f"^'{path}' is damaged: {says}") as caught:
        read_description(path, Described, {'name': 'a'})
    assert '\n' not in str(caught.value)


def test_a_sha256_is_checked(tmp_path):
    path, expected = tmp_path / 'file', '2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e88'
    path.write_text('foo')
    check_sha256(path, f'{expected}6266e7ae')
    with pytest.raises(DamagedCache, match=f"^'{path}' is damaged: its sha256 is .*, not x"):
        check_sha256(path, 'x')
    path.unlink()
    with pytest.raises(DamagedCache, match=f"^'{path}' is damaged: it cannot be read"):
        check_sha256(path, 'x')
