"""Objects in Cloud Storage.

Every write of an object gives it another generation, a version number. A write may name the
generation that it replaces; it fails if another process has written the object in between.

Paths are `etils.epath.Path`, which is like pathlib.Path but cannot append to a file. The variable
STORAGE_EMULATOR_HOST=http://127.0.0.1:PORT names an emulator, which is used without credentials.
"""

import contextlib
import functools
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

from etils import epath

from qkattn.config.imports import load_extra
from qkattn.errors import RunDirectoryError

# The extra of pyproject.toml that installs the libraries of this module.
EXTRA = 'gcs'
SCHEME = 'gs://'
# Seconds for which a request that fails is repeated.
PATIENCE = 20.0
# The roles that an account needs on a bucket.
ROLES = 'roles/storage.objectUser and roles/storage.legacyBucketReader'
# Most characters of a library's error that are shown.
_SHOWN = 200

# The libraries read these variables when they are imported. They make all access to buckets use one
# library and one protocol.
os.environ.setdefault('EPATH_USE_TF', 'false')
os.environ.setdefault('GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT', 'false')


class Object(NamedTuple):
    """An object in a bucket."""

    content: bytes
    generation: int
    updated: float  # when it was last written, in seconds on the bucket's clock


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether `path` has the form of a URL, valid or not."""
    return '://' in os.fspath(path)


def to_path(url: str | os.PathLike[str]) -> Path:
    """Returns the path of a gs:// URL, after checking that its bucket can be listed.

    Raises RunDirectoryError if the bucket cannot be listed, or for any other URL.
    """
    text = os.fspath(url)
    bucket, _ = _split(text)
    if not text.startswith(SCHEME) or not bucket:
        raise RunDirectoryError(
            f'{text} is not a URL of the form gs://BUCKET/PATH; give one that is, or mount '
            'the storage and give a directory'
        )
    _require_listing(bucket)
    return cast(Path, epath.Path(text))


@functools.lru_cache
def _require_listing(bucket: str) -> None:
    """Checks that a bucket can be listed; the cache makes this one check per bucket."""
    with _request(bucket, 'read', opening=True):
        listing = iter(_client().list_blobs(bucket, max_results=1, **_retry_arguments()))
        next(listing, None)  # only reading an entry sends the request


def check_writable(path: Path) -> None:
    """Raises RunDirectoryError unless objects can be written and deleted below `path`."""
    bucket, _ = _split(path)
    with _request(path, 'write', opening=True):
        # Orbax asks for the bucket itself, which needs a permission of its own.
        _client().get_bucket(bucket, **_retry_arguments())
    now(path)  # writes and deletes an object


def read(path: str | os.PathLike[str]) -> Object:
    """Reads the object at `path`; raises FileNotFoundError if there is none."""
    with _request(path, 'read') as blob:
        content = blob.download_as_bytes(**_retry_arguments())
        downloaded_generation = blob.generation
        # A download does not tell the time of the write.
        blob.reload(**_retry_arguments())
    if blob.generation != downloaded_generation:  # another process has written the object
        return read(path)
    return Object(content, downloaded_generation, blob.updated.timestamp())


def write(path: str | os.PathLike[str], content: bytes, generation: int | None = None) -> Object:
    """Writes the object at `path`, and returns it.

    Args:
      path: the URL of the object.
      content: what to write.
      generation: the generation of the object to replace; 0 if there must not be an object; None to
        replace any object.

    Raises FileExistsError if the object in the bucket has another generation.
    """
    with _request(path, 'write') as blob:
        try:
            blob.upload_from_string(
                content,
                'application/octet-stream',
                if_generation_match=generation,
                **_retry_arguments(),
            )
        except _google_error('PreconditionFailed') as error:
            # The library repeats a request whose answer was lost. If the first request succeeded,
            # the repeated one fails here, because it finds what the first one has written.
            if content:
                with contextlib.suppress(FileNotFoundError):
                    stored = read(path)
                    if stored.content == content:
                        return stored
            raise FileExistsError(f'{os.fspath(path)} was written by another process') from error
    return Object(content, blob.generation, blob.updated.timestamp())


def delete(path: str | os.PathLike[str], generation: int | None = None) -> None:
    """Deletes an object, unless it is gone or has another generation than `generation`.

    None deletes any generation.
    """
    expected_errors = (_google_error('NotFound'), _google_error('PreconditionFailed'))
    with _request(path, 'write') as blob, contextlib.suppress(*expected_errors):
        blob.delete(if_generation_match=generation, **_retry_arguments())


def now(path: str | os.PathLike[str]) -> float:
    """Returns the time on the bucket's clock in seconds.

    To learn it, the function writes an object below `path` and deletes it again.
    """
    probe = f'{os.fspath(path)}/.clock-{uuid.uuid4().hex}'
    stored = write(probe, b'', generation=0)
    delete(probe, stored.generation)
    return stored.updated


def _split(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Splits a URL into its bucket and the name of the object: gs://b/a/c is ('b', 'a/c')."""
    bucket, _, name = os.fspath(path).removeprefix(SCHEME).partition('/')
    return bucket, name


def _google_error(name: str) -> Any:
    """Returns an exception of Google's libraries by name, such as NotFound."""
    return getattr(load_extra('google.api_core.exceptions', EXTRA), name)


def _retry_arguments() -> dict[str, Any]:
    """Returns the arguments by which a request that fails is repeated for PATIENCE seconds."""
    retry = load_extra('google.cloud.storage.retry', EXTRA).DEFAULT_RETRY
    return {'timeout': PATIENCE, 'retry': retry.with_timeout(PATIENCE)}


@functools.lru_cache(maxsize=1)
def _client() -> Any:
    """Returns the client of `google.cloud.storage` that sends all requests."""
    return load_extra('google.cloud.storage', EXTRA).Client()


@functools.lru_cache(maxsize=1)
def _prepare() -> None:
    """Sets up the other libraries that access buckets, once and before their first use.

    The libraries are tensorstore, for checkpoints, and gcsfs, for paths. Both use the emulator of
    STORAGE_EMULATOR_HOST if the variable is set. What the user has set stays as it is.
    """
    emulator = os.environ.get('STORAGE_EMULATOR_HOST')
    if emulator:
        # tensorstore reads environment variables.
        os.environ.setdefault('TENSORSTORE_GCS_HTTP_URL', emulator)
        os.environ.setdefault('GOOGLE_AUTH_TOKEN_FOR_TESTING', 'none')

    # gcsfs reads the settings of fsspec.
    load_extra('gcsfs', EXTRA)
    fsspec_settings = load_extra('fsspec.config', EXTRA).conf
    gcs_settings = fsspec_settings.setdefault('gcs', {})
    gcs_settings.setdefault('use_listings_cache', False)
    gcs_settings.setdefault('token', 'anon' if emulator else 'google_default')


@contextlib.contextmanager
def _request(path: str | os.PathLike[str], task: str, opening: bool = False) -> Iterator[Any]:
    """Yields the `Blob` at `path`, and turns errors of Google's libraries into those below.

    Args:
      path: the URL of an object, or of a bucket.
      task: 'read' or 'write', for errors.
      opening: whether this is the first use of a bucket that a user has named. A failure then means
        that the user has named a wrong bucket.

    Raises:
      RunDirectoryError: the bucket does not exist or may not be used; with `opening` also if it
        cannot be reached.
      FileNotFoundError: the object to read does not exist.
      ConnectionError: a bucket that was opened before cannot be reached.
    """
    bucket, name = _split(path)
    _prepare()
    try:
        yield _client().bucket(bucket).blob(name)
    except (FileNotFoundError, FileExistsError, ConnectionError, RunDirectoryError):
        raise  # the block has raised it for its caller
    except Exception as error:
        translated = _translate_error(error, path, task, opening)
        if translated is None:
            raise
        raise translated from error


def _translate_error(
    error: Exception, path: str | os.PathLike[str], task: str, opening: bool
) -> Exception | None:
    """Returns the error that `_request` raises for an error of Google's libraries.

    There are three kinds: the bucket or object does not exist, this account may not use the bucket,
    or the bucket cannot be reached. Returns None for any other error. The arguments are those of
    `_request`.
    """
    bucket, _ = _split(path)
    # The bucket or the object does not exist. A bucket that was opened exists, so that only the
    # object can be missing.
    if isinstance(error, _google_error('NotFound')):
        if task == 'read' and not opening:
            return FileNotFoundError(f'{os.fspath(path)} does not exist')
        return RunDirectoryError(
            f'{SCHEME}{bucket} does not exist; create the bucket or give another'
        )

    # This account may not use the bucket.
    if isinstance(error, (_google_error('Forbidden'), _google_error('Unauthorized'))):
        return RunDirectoryError(
            f'{SCHEME}{bucket} may not be used to {task}: give this account {ROLES} on the bucket'
        )

    # The bucket cannot be reached. The reason is the first line of the error, or its class.
    if _is_out_of_reach(error):
        lines = str(error).splitlines() or [type(error).__name__]
        reason = lines[0][:_SHOWN].rstrip('.')
        problem = (
            f'{SCHEME}{bucket} cannot be reached ({reason}); check the network and '
            'STORAGE_EMULATOR_HOST, or run `gcloud auth application-default login` and set '
            'GOOGLE_CLOUD_PROJECT'
        )
        return RunDirectoryError(problem) if opening else ConnectionError(problem)
    return None


def _is_out_of_reach(error: Exception) -> bool:
    """Whether the network, the service or the credentials have caused an error."""
    credentials_error = load_extra('google.auth.exceptions', EXTRA).GoogleAuthError
    return isinstance(error, (OSError, _google_error('GoogleAPIError'), credentials_error))
