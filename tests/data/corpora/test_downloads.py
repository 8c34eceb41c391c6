import hashlib
import socket

import pytest

from qkattn.config import DataConfig
from qkattn.data import cache
from qkattn.data.corpora import downloads
from qkattn.data.corpora.downloads import SourceFile, fetch
from qkattn.errors import ConfigError
from tests.data.web import serving, unplug

TEXT = b'one\ntwo\n'
SHA256 = hashlib.sha256(TEXT).hexdigest()
FAR = SourceFile('https://files.example.org/lines.txt', SHA256)


@pytest.fixture
def get(tmp_path):
    """Fetches one file into tmp_path/data; get(file, manual_dir=...)."""

    def get(file, **settings):
        (path,) = fetch('lines', [file], DataConfig(data_dir=str(tmp_path / 'data'), **settings))
        return path

    return get


@pytest.fixture
def served(tmp_path):
    """The directory of a web server, and the file on it."""
    directory = tmp_path / 'served'
    directory.mkdir()
    (directory / 'lines.txt').write_bytes(TEXT)
    with serving(directory) as url:
        yield directory, SourceFile(f'{url}/lines.txt', SHA256)


def left(tmp_path):
    return [path.name for path in (tmp_path / 'data').rglob('*') if path.is_file()]


def test_a_file_is_downloaded_once(tmp_path, get, served):
    directory, file = served
    path = get(file)
    assert path == tmp_path / 'data' / 'downloads' / 'lines' / 'lines.txt'
    assert path.read_bytes() == TEXT
    (directory / 'lines.txt').unlink()
    (path.parent / 'lock').unlink()
    assert get(file) == path
    # Without the lock, so that the files may be on a read-only disk.
    assert left(tmp_path) == ['lines.txt']


def test_a_damaged_file_is_named_and_fetched_again(get, served, monkeypatch):
    warnings = []
    monkeypatch.setattr(cache.log, 'warning', lambda text, *args: warnings.append(text % args))
    path = get(served[1])
    path.write_bytes(b'one\n')
    assert get(served[1]).read_bytes() == TEXT
    (warning,) = warnings
    assert f"'{path}' is damaged: its sha256 is" in warning


def test_a_changed_file_is_refused(tmp_path, get, served):
    directory, file = served
    (directory / 'lines.txt').write_bytes(b'one\nten\n')
    with pytest.raises(ConfigError, match=f'{file.url} has sha256 .* not {SHA256}; fetch') as said:
        get(file)
    assert '\n' not in str(said.value)
    assert left(tmp_path) == ['lock']


def test_a_file_that_the_server_lacks_is_named(get, served):
    url = f'{served[1].url}.gz'
    with pytest.raises(ConfigError, match=f'{url}.*404.*; fetch the files by hand'):
        get(SourceFile(url, SHA256))


def test_no_network_is_one_sentence_at_once_and_manual_files_help(tmp_path, get, monkeypatch):
    asked = unplug(monkeypatch)
    with pytest.raises(ConfigError) as said:
        get(FAR)
    assert asked == ['files.example.org']
    assert str(said.value) == (
        'https://files.example.org/lines.txt cannot be downloaded (Failed to resolve '
        "'files.example.org' ([Errno -2] Name or service not known)); fetch the files by hand and "
        'set data.manual_dir to the directory that holds lines.txt.'
    )
    assert left(tmp_path) == ['lock']
    (tmp_path / 'lines.txt').write_bytes(TEXT)
    assert get(FAR, manual_dir=str(tmp_path)).read_bytes() == TEXT
    (tmp_path / 'lines.txt').unlink()
    assert get(FAR).read_bytes() == TEXT


def test_a_server_that_does_not_answer_is_given_up(get, monkeypatch):
    monkeypatch.setattr(downloads, 'TIMEOUT', (0.2, 0.2))
    with socket.create_server(('127.0.0.1', 0)) as silent:
        url = f'http://127.0.0.1:{silent.getsockname()[1]}/lines.txt'
        with pytest.raises(ConfigError, match=r'cannot be downloaded .*timed out'):
            get(SourceFile(url, SHA256))


def test_manual_files_are_checked(tmp_path, get):
    path = tmp_path / 'lines.txt'
    with pytest.raises(ConfigError, match=f"'{path}' cannot be read .*{FAR.url} there"):
        get(FAR, manual_dir=str(tmp_path))
    path.write_bytes(b'one\nten\n')
    with pytest.raises(ConfigError, match=f"'{path}' has sha256 .*, not {SHA256}; put the file"):
        get(FAR, manual_dir=str(tmp_path))
    assert left(tmp_path) == ['lock']
