"""Paths, objects and errors of buckets, against a server on loopback."""

import socket

import pytest

from qkattn.errors import RunDirectoryError
from qkattn.storage import buckets
from qkattn.storage.files import as_path, local_copy, make_directory, replacing, write_atomic
from tests import bucket_server
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
    """A bucket has objects but no directories. `gs://runs/a/b` is the object `a/b` of `runs`."""
    path = make_directory('gs://runs/a')
    write_atomic(path / 'b', 'text')
    write_atomic(path / 'c' / 'd', 'text')

    # The objects are a/b and a/c/d. Their names are read as paths, so `a` has the children b and c.
    names_of_children = sorted(child.name for child in path.iterdir())
    assert names_of_children == ['b', 'c']
    assert path.is_dir()
    assert not path.is_file()
    assert (path / 'b').is_file()
    matches = [str(match) for match in path.glob('c/*')]
    assert matches == ['gs://runs/a/c/d']

    # `as_path` returns a path in a bucket unchanged.
    assert as_path(path / 'b') == path / 'b'


def test_listings_of_a_bucket_are_not_cached(bucket):
    path = make_directory('gs://runs/a')
    write_atomic(path / 'b', 'text')
    assert [child.name for child in path.iterdir()] == ['b']

    bucket.put('runs', 'a/e', b'x')

    assert (path / 'e').exists()


def test_a_file_is_uploaded_whole_or_not_at_all(bucket):
    """`replacing` gives a temporary file on this machine, and uploads it when the block ends."""
    path = as_path('gs://runs/model.bin')
    content = bytes(range(256)) * 40_000  # large enough for an upload in several requests

    # An error in the block prevents the upload, so the bucket `runs` stays empty.
    with pytest.raises(ValueError, match='halfway'), replacing(path) as temporary:
        temporary.write_bytes(content)
        raise ValueError('halfway')
    assert bucket.names('runs') == []

    # Without an error, the whole file is uploaded.
    with replacing(path) as temporary:
        temporary.write_bytes(content)
    assert bucket.names('runs') == ['model.bin']
    assert bucket.read('runs', 'model.bin') == content

    # `local_copy` downloads the file.
    with local_copy(path) as local:
        assert local.name == 'model.bin'
        assert local.read_bytes() == content


def test_an_object_that_is_overwritten_while_it_is_read_is_read_again(bucket, monkeypatch):
    """An object is read by two requests, for its content and for its time."""
    path = write_atomic('gs://runs/a', b'before')
    blob_class = buckets._client().bucket('runs').blob('a').__class__
    download = blob_class.download_as_bytes
    contents = []

    def download_and_overwrite(blob, **arguments):
        content = download(blob, **arguments)
        contents.append(content)
        if len(contents) == 1:
            bucket.put('runs', 'a', b'after')
        return content

    monkeypatch.setattr(blob_class, 'download_as_bytes', download_and_overwrite)

    # After the first download, its generation is gone, but the object is not.
    assert buckets.read(path).content == b'after'
    assert contents == [b'before', b'after']


def test_the_clock_of_a_bucket_is_read_although_an_answer_is_lost(bucket, monkeypatch):
    """The clock is the time of a write. The library repeats a write whose answer was lost."""
    path = make_directory('gs://runs/a')
    put = bucket.put

    def put_and_lose_answer(*arguments):
        monkeypatch.setattr(bucket, 'put', put)  # only the first answer is lost
        put(*arguments)
        raise bucket_server.Refused(503)

    monkeypatch.setattr(bucket, 'put', put_and_lose_answer)

    # `now` writes an object of a unique name, without a condition, so the repeated write replaces
    # the object of the first one. If the write required that no object exists, the repeated write
    # would be refused.
    assert buckets.now(path) > 0


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
    """Opening a bucket sends a request to its server. The request fails after PATIENCE seconds.

    A silent server accepts the connection, but does not answer. An absent server has closed its
    port.
    """
    monkeypatch.setattr(buckets, 'PATIENCE', 0.5)
    buckets._client.cache_clear()  # drops the client of the fixture's server

    # The operating system accepts connections, but the server never reads a request.
    with socket.create_server(('127.0.0.1', 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv('STORAGE_EMULATOR_HOST', f'http://127.0.0.1:{port}')
        if server_is == 'absent':
            server.close()

        with pytest.raises(RunDirectoryError, match=BUCKET_UNREACHABLE):
            as_path('gs://runs/a')


def test_a_bucket_without_credentials_is_refused_soon(bucket, monkeypatch, tmp_path):
    """A Google bucket needs credentials. The search for credentials ends after PATIENCE seconds.

    The message advises the user to log in with `gcloud auth`.
    """
    # Without this variable, the server of the fixture `bucket` is not used.
    monkeypatch.delenv('STORAGE_EMULATOR_HOST', raising=False)
    buckets._client.cache_clear()
    monkeypatch.setattr(buckets, 'PATIENCE', 0.5)

    # There are no credentials in files, in variables or on the metadata server.
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.setenv('CLOUDSDK_CONFIG', str(tmp_path))
    monkeypatch.delenv('GOOGLE_APPLICATION_CREDENTIALS', raising=False)
    monkeypatch.setenv('GCE_METADATA_HOST', '127.0.0.1:1')

    with pytest.raises(RunDirectoryError, match=BUCKET_UNREACHABLE):
        as_path('gs://runs/a')


def test_a_lost_connection_is_not_a_wrong_setting(bucket, monkeypatch):
    """The server answers when its bucket is opened, but is gone when a file is written."""
    path = as_path('gs://runs/a')  # opens the bucket: sends a first request to the server

    monkeypatch.setattr(buckets, 'PATIENCE', 0.1)  # seconds
    buckets._client.cache_clear()  # drops open connections
    bucket.shutdown()
    bucket.server_close()

    # If the server were gone when the bucket is opened, the error would be a RunDirectoryError.
    with pytest.raises(ConnectionError, match='gs://runs cannot be reached'):
        write_atomic(path, 'x')
