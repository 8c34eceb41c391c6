"""Paths, objects and errors of buckets, against a server on loopback."""

import socket

import pytest

from qkattn.errors import RunDirectoryError
from qkattn.storage import buckets
from qkattn.storage.files import as_path, local_copy, make_directory, replacing, write_atomic
from tests.refusals import refused

BUCKET_UNREACHABLE = 'gs://runs cannot be reached .*gcloud auth'


def test_a_new_directory_in_a_bucket_makes_no_object(bucket):
    path = make_directory('gs://runs/a')

    assert str(path / 'b') == 'gs://runs/a/b'
    assert not path.exists()
    assert not bucket.names('runs')


def test_text_and_bytes_are_written_to_a_bucket(bucket):
    path = make_directory('gs://runs/a')

    text_file = write_atomic(path / 'b', 'ä')
    bytes_file = write_atomic('gs://runs/a/c/d', b'\xff')

    assert text_file == path / 'b'
    assert bucket.read('runs', 'a/b') == 'ä'.encode()
    assert bytes_file.read_bytes() == b'\xff'


def test_a_bucket_url_has_the_methods_of_a_path(bucket):
    path = make_directory('gs://runs/a')
    write_atomic(path / 'b', 'text')
    write_atomic(path / 'c' / 'd', 'text')

    assert sorted(child.name for child in path.iterdir()) == ['b', 'c']
    assert path.is_dir()
    assert not path.is_file()
    assert (path / 'b').is_file()
    assert [str(match) for match in path.glob('c/*')] == ['gs://runs/a/c/d']
    assert as_path(path / 'b') == path / 'b'


def test_listings_of_a_bucket_are_not_cached(bucket):
    path = make_directory('gs://runs/a')
    write_atomic(path / 'b', 'text')
    assert [child.name for child in path.iterdir()] == ['b']

    bucket.put('runs', 'a/e', b'x')

    assert (path / 'e').exists()


def test_a_file_is_uploaded_whole_or_not_at_all(bucket):
    path = as_path('gs://runs/model.bin')
    data = bytes(range(256)) * 40_000  # large enough for a resumable upload

    with pytest.raises(ValueError, match='halfway'), replacing(path) as temporary:
        temporary.write_bytes(data)
        raise ValueError('halfway')
    assert bucket.names('runs') == []

    with replacing(path) as temporary:
        temporary.write_bytes(data)
    assert bucket.names('runs') == ['model.bin']
    assert bucket.read('runs', 'model.bin') == data

    with local_copy(path) as local:
        assert local.name == 'model.bin'
        assert local.read_bytes() == data


@pytest.mark.parametrize(
    ('url', 'message'),
    [
        ('gs://none/run', 'gs://none does not exist'),
        ('gs://forbidden/run', 'gs://forbidden may not be used to read: .*objectUser'),
        ('gs://read-only/run', 'gs://read-only may not be used to write: .*objectUser'),
        ('gs:///run', 'gs:///run is not a URL of the form gs://BUCKET/PATH; .* mount'),
    ],
)
def test_an_unusable_bucket_is_refused_in_one_sentence(bucket, url, message):
    with refused(message, RunDirectoryError):
        make_directory(url)


@pytest.mark.parametrize('server_is', ['silent', 'absent'])
def test_a_bucket_that_does_not_answer_is_refused_soon(bucket, monkeypatch, server_is):
    monkeypatch.setattr(buckets, 'PATIENCE', 0.5)
    buckets._client.cache_clear()

    with socket.create_server(('127.0.0.1', 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv('STORAGE_EMULATOR_HOST', f'http://127.0.0.1:{port}')
        if server_is == 'absent':
            server.close()

        with pytest.raises(RunDirectoryError, match=BUCKET_UNREACHABLE):
            as_path('gs://runs/a')


def test_a_bucket_without_credentials_is_refused_soon(bucket, monkeypatch, tmp_path):
    monkeypatch.setattr(buckets, 'PATIENCE', 0.5)
    buckets._client.cache_clear()
    monkeypatch.delenv('STORAGE_EMULATOR_HOST', raising=False)

    # No credentials are found in files, variables or the metadata server.
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.setenv('CLOUDSDK_CONFIG', str(tmp_path))
    monkeypatch.delenv('GOOGLE_APPLICATION_CREDENTIALS', raising=False)
    monkeypatch.setenv('GCE_METADATA_HOST', '127.0.0.1:1')

    with pytest.raises(RunDirectoryError, match=BUCKET_UNREACHABLE):
        as_path('gs://runs/a')


def test_a_lost_connection_is_not_a_wrong_setting(bucket, monkeypatch):
    path = as_path('gs://runs/a')

    monkeypatch.setattr(buckets, 'PATIENCE', 0.1)
    buckets._client.cache_clear()  # drops open connections
    bucket.shutdown()
    bucket.server_close()

    # A wrong setting would be a RunDirectoryError.
    with pytest.raises(ConnectionError, match='gs://runs cannot be reached'):
        write_atomic(path, 'x')
