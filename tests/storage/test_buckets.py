"""Paths, objects and errors of buckets, against a server on loopback."""

import socket

import pytest

from qkattn.errors import RunDirectoryError
from qkattn.storage import buckets
from qkattn.storage.files import as_path, local_copy, make_directory, replacing, write_atomic
from tests.refusals import refused


def test_a_url_is_a_path_with_the_methods_of_pathlib(bucket):
    path = make_directory('gs://runs/a')
    assert str(path / 'b') == 'gs://runs/a/b'
    assert not path.exists()
    assert not bucket.names('runs')
    assert write_atomic(path / 'b', 'ä') == path / 'b'
    assert bucket.read('runs', 'a/b') == b'\xc3\xa4'
    assert write_atomic('gs://runs/a/c/d', b'\xff').read_bytes() == b'\xff'
    assert sorted(p.name for p in path.iterdir()) == ['b', 'c']
    assert path.is_dir()
    assert not path.is_file()
    assert (path / 'b').is_file()
    assert [str(p) for p in path.glob('c/*')] == ['gs://runs/a/c/d']
    bucket.put('runs', 'a/e', b'x')
    assert (path / 'e').exists()  # listings are not cached
    assert as_path(path / 'b') == path / 'b'


def test_a_file_of_a_library_is_uploaded_whole_or_not_at_all(bucket):
    path = as_path('gs://runs/model.bin')
    data = bytes(range(256)) * 40_000  # a resumable upload
    with pytest.raises(ValueError, match='halfway'), replacing(path) as temporary:
        temporary.write_bytes(data)
        raise ValueError('halfway')
    assert bucket.names('runs') == []
    with replacing(path) as temporary:
        temporary.write_bytes(data)
    assert bucket.read('runs', 'model.bin') == data
    assert bucket.names('runs') == ['model.bin']
    with local_copy(path) as local:
        assert local.read_bytes() == data
        assert local.name == 'model.bin'


@pytest.mark.parametrize(
    ('url', 'message'),
    [
        ('gs://none/run', 'gs://none does not exist'),
        ('gs://forbidden/run', 'gs://forbidden may not be used to read: .*objectUser'),
        ('gs://read-only/run', 'gs://read-only may not be used to write: .*objectUser'),
        ('gs:///run', 'gs:///run is not a URL of the form gs://BUCKET/PATH; .* mount'),
    ],
)
def test_a_bucket_that_cannot_be_used_is_one_sentence(bucket, url, message):
    with refused(message, RunDirectoryError):
        make_directory(url)


@pytest.mark.parametrize('reason', ['silent', 'absent', 'credentials'])
def test_a_bucket_that_does_not_answer_is_named_within_the_patience(
    bucket, monkeypatch, tmp_path, reason
):
    """The server accepts and is silent, or is absent; or no credentials are found."""
    monkeypatch.setattr(buckets, 'PATIENCE', 0.5)
    buckets._client.cache_clear()
    with socket.create_server(('127.0.0.1', 0)) as server:
        url = f'http://127.0.0.1:{server.getsockname()[1]}'
        monkeypatch.setenv('STORAGE_EMULATOR_HOST', url)
        if reason == 'credentials':
            monkeypatch.setenv('GCE_METADATA_HOST', '127.0.0.1:1')
            for name in ('HOME', 'CLOUDSDK_CONFIG'):
                monkeypatch.setenv(name, str(tmp_path))
            for name in ('STORAGE_EMULATOR_HOST', 'GOOGLE_APPLICATION_CREDENTIALS'):
                monkeypatch.delenv(name, raising=False)
        elif reason == 'absent':
            server.close()
        with pytest.raises(RunDirectoryError, match='gs://runs cannot be reached .*gcloud auth'):
            as_path('gs://runs/a')


def test_a_bucket_that_is_lost_later_is_no_wrong_setting(bucket, monkeypatch):
    path = as_path('gs://runs/a')
    monkeypatch.setattr(buckets, 'PATIENCE', 0.1)
    buckets._client.cache_clear()  # and its connections
    bucket.shutdown()
    bucket.server_close()
    with pytest.raises(ConnectionError, match='gs://runs cannot be reached'):
        write_atomic(path, 'x')
