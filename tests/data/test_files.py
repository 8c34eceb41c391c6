import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from qkattn.data.cache import data_root, locked, replacing
from qkattn.errors import ConfigError


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


def test_unwritable_directory_is_one_sentence(tmp_path):
    (tmp_path / 'file').write_text('')
    with (
        pytest.raises(ConfigError, match='data_dir: .* cannot be written .*QKATTN_DATA') as caught,
        locked(tmp_path / 'file' / 'below' / 'lock'),
    ):
        pass
    assert '\n' not in str(caught.value)


def test_lock_excludes_others(tmp_path):
    path = tmp_path / 'count'
    path.write_text('0')

    def add_one(_):
        with locked(tmp_path / 'lock'):
            count = int(path.read_text())
            time.sleep(0.01)
            path.write_text(str(count + 1))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add_one, range(8)))
    assert path.read_text() == '8'


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / 'file'
    path.write_text('before')
    with pytest.raises(KeyError), replacing(path) as temporary:
        temporary.write_text('half')
        raise KeyError
    assert path.read_text() == 'before'
    with replacing(path) as temporary:
        temporary.write_text('after')
    assert [p.name for p in tmp_path.iterdir()] == ['file']
    assert path.read_text() == 'after'
