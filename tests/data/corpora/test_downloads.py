import hashlib
import socket

import pytest

from qkattn.config import DataConfig
from qkattn.data.corpora import downloads
from qkattn.data.corpora.downloads import SourceFile, fetch
from tests.data.refusals import refused
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
    """A file on a web server, and its address."""
    path = tmp_path / 'served' / 'lines.txt'
    path.parent.mkdir()
    path.write_bytes(TEXT)
    with serving(path.parent) as url:
        yield path, SourceFile(f'{url}/lines.txt', SHA256)


def left(tmp_path):
    return [path.name for path in (tmp_path / 'data').rglob('*') if path.is_file()]


def test_a_file_is_downloaded_once_and_again_if_it_is_damaged(tmp_path, get, served, warnings):
    origin, file = served
    path = get(file)
    assert path == tmp_path / 'data' / 'downloads' / 'lines' / 'lines.txt'
    path.write_bytes(b'one\n')
    assert get(file).read_bytes() == TEXT
    (warning,) = warnings
    assert f"'{path}' is damaged: its sha256 is" in warning
    origin.unlink()
    (path.parent / 'lock').unlink()
    assert get(file) == path
    # Without the lock, so that the files may be on a read-only disk.
    assert left(tmp_path) == ['lines.txt']


def test_a_changed_and_a_missing_file_are_refused(tmp_path, get, served):
    origin, file = served
    origin.write_bytes(b'one\nten\n')
    with refused(f'{file.url} has sha256 .* not {SHA256}; fetch'):
        get(file)
    assert left(tmp_path) == ['lock']
    with refused(f'{file.url}.gz.*404.*; fetch the files by hand'):
        get(SourceFile(f'{file.url}.gz', SHA256))


def test_no_network_is_one_sentence_at_once_and_manual_files_help(tmp_path, get, monkeypatch):
    asked = unplug(monkeypatch)
    with refused(
        r'^https://files.example.org/lines.txt cannot be downloaded \(Failed to resolve '
        r"'files.example.org' \(\[Errno -2\] Name or service not known\)\); fetch the files by "
        r'hand and set data.manual_dir to the directory that holds lines.txt.$'
    ):
        get(FAR)
    assert asked == ['files.example.org']
    assert left(tmp_path) == ['lock']
    path, manual = tmp_path / 'lines.txt', {'manual_dir': str(tmp_path)}
    with refused(f"'{path}' cannot be read .*{FAR.url} there"):
        get(FAR, **manual)
    path.write_bytes(b'one\nten\n')
    with refused(f"'{path}' has sha256 .*, not {SHA256}; put the file"):
        get(FAR, **manual)
    assert left(tmp_path) == ['lock']
    path.write_bytes(TEXT)
    assert get(FAR, **manual).read_bytes() == TEXT
    path.unlink()
    assert get(FAR).read_bytes() == TEXT


def test_a_server_that_does_not_answer_is_given_up(get, monkeypatch):
    monkeypatch.setattr(downloads, 'TIMEOUT', (0.2, 0.2))
    with socket.create_server(('127.0.0.1', 0)) as silent:
        url = f'http://127.0.0.1:{silent.getsockname()[1]}/lines.txt'
        with refused(r'cannot be downloaded .*timed out'):
            get(SourceFile(url, SHA256))
