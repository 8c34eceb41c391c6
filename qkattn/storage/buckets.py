"""Objects in Google Cloud Storage.

Every write gives an object a new generation, its version number. A write with `generation` fails
if the stored object has another generation, so concurrent writers cannot overwrite each other.

Paths are `etils.epath.Path`. Set STORAGE_EMULATOR_HOST=http://127.0.0.1:PORT to use an emulator
without credentials.
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

# The extra in pyproject.toml that installs the libraries used here.
EXTRA = 'gcs'
SCHEME = 'gs://'
# Timeout in seconds of a request with its retries.
PATIENCE = 20.0
# IAM roles that an account needs on a bucket.
ROLES = 'roles/storage.objectUser and roles/storage.legacyBucketReader'
# Maximum length of a library's error in our error messages.
_MAX_REASON_LENGTH = 200

# etils and gcsfs read these variables at import. All access to buckets then uses one library and
# one protocol.
os.environ.setdefault('EPATH_USE_TF', 'false')
os.environ.setdefault('GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT', 'false')


class Object(NamedTuple):
    """A stored object."""

    content: bytes
    generation: int
    updated: float  # time of the last write, in seconds on the bucket's clock


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether `path` has the form of a URL, valid or not."""
    return '://' in os.fspath(path)


def to_path(url: str | os.PathLike[str]) -> Path:
    """Converts a gs:// URL to a path.

    Raises:
        RunDirectoryError: The bucket cannot be listed, or the URL has another form.
    """
    text = os.fspath(url)
    bucket, _ = _split(text)  # the bucket of gs://b/a is 'b'
    if not text.startswith(SCHEME) or not bucket:
        raise RunDirectoryError(
            f'{text} is not a URL of the form gs://BUCKET/PATH; give one that is, or mount '
            'the storage and give a directory'
        )
    _require_listing(bucket)
    return cast(Path, epath.Path(text))  # has the methods of `pathlib.Path`


@functools.lru_cache
def _require_listing(bucket: str) -> None:
    """Raises RunDirectoryError if a bucket cannot be listed; each bucket is checked once."""
    with _request(bucket, 'read', opening=True):
        listing = iter(_client().list_blobs(bucket, max_results=1, **_retry_arguments()))
        next(listing, None)  # the listing is lazy: `next` sends the request


def check_writable(path: Path) -> None:
    """Raises RunDirectoryError if objects cannot be written or deleted below `path`."""
    bucket, _ = _split(path)
    with _request(path, 'write', opening=True):
        # Orbax reads the bucket's metadata, which needs a separate permission.
        _client().get_bucket(bucket, **_retry_arguments())
    now(path)  # writes and deletes an object


def read(path: str | os.PathLike[str]) -> Object:
    """Reads the object at `path`; raises FileNotFoundError if the object does not exist."""
    with _request(path, 'read') as blob:
        content = blob.download_as_bytes(**_retry_arguments())
        # A download lacks the time of the write. `blob` could not fetch the time once its version
        # was overwritten, so a second handle asks for the newest version.
        newest = blob.bucket.blob(blob.name)
        newest.reload(**_retry_arguments())
    was_overwritten = newest.generation != blob.generation  # generations number the versions
    if was_overwritten:
        return read(path)
    return Object(content, newest.generation, newest.updated.timestamp())


def write(path: str | os.PathLike[str], content: bytes, generation: int | None = None) -> Object:
    """Writes the object at `path`, and returns it.

    Args:
        path: URL of the object.
        content: New content.
        generation: The generation (version number) that the stored object must have. 0 means that
            no object may exist, None means that any object is replaced.

    Raises:
        FileExistsError: The stored object has another generation.
    """
    with _request(path, 'write') as blob:
        try:
            blob.upload_from_string(
                content,
                'application/octet-stream',
                if_generation_match=generation,
                **_retry_arguments(),
            )
        except _google_error('PreconditionFailed') as error:  # another generation is stored
            # That generation may be from this call, as the library retries a request whose response
            # was lost. Then the object has this content. (Empty content may be anyone's.)
            if content:
                with contextlib.suppress(FileNotFoundError):
                    stored = read(path)
                    if stored.content == content:
                        return stored
            raise FileExistsError(f'{os.fspath(path)} was written by another process') from error
    return Object(content, blob.generation, blob.updated.timestamp())


def delete(path: str | os.PathLike[str], generation: int | None = None) -> None:
    """Deletes the object at `path` if it exists.

    With `generation`, an object of another generation is kept.
    """
    ignored_errors = (_google_error('NotFound'), _google_error('PreconditionFailed'))
    with _request(path, 'write') as blob, contextlib.suppress(*ignored_errors):
        blob.delete(if_generation_match=generation, **_retry_arguments())


def now(path: str | os.PathLike[str]) -> float:
    """Returns the time on the bucket's clock, in seconds.

    Writes a temporary object below `path` and returns the time of that write.
    """
    probe = f'{os.fspath(path)}/.clock-{uuid.uuid4().hex}'
    stored = write(probe, b'')  # the name is unique, so no generation is required
    delete(probe, stored.generation)
    return stored.updated


def _split(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Splits a URL into bucket and object name: gs://b/a/c into ('b', 'a/c')."""
    bucket, _, name = os.fspath(path).removeprefix(SCHEME).partition('/')
    return bucket, name


def _google_error(name: str) -> Any:
    """Returns an exception class of Google's libraries by name, such as 'NotFound'."""
    return getattr(load_extra('google.api_core.exceptions', EXTRA), name)


def _retry_arguments() -> dict[str, Any]:
    """Returns keyword arguments that make a request retry for PATIENCE seconds."""
    retry = load_extra('google.cloud.storage.retry', EXTRA).DEFAULT_RETRY
    return {'timeout': PATIENCE, 'retry': retry.with_timeout(PATIENCE)}


@functools.lru_cache(maxsize=1)
def _client() -> Any:
    """Returns the `google.cloud.storage` client, which is created once."""
    return load_extra('google.cloud.storage', EXTRA).Client()


@functools.lru_cache(maxsize=1)
def _prepare() -> None:
    """Configures tensorstore (for checkpoints) and gcsfs (for paths), once.

    Both use the emulator if STORAGE_EMULATOR_HOST is set. Settings made by the user are kept.
    """
    emulator = os.environ.get('STORAGE_EMULATOR_HOST')
    if emulator:
        # Read by tensorstore.
        os.environ.setdefault('TENSORSTORE_GCS_HTTP_URL', emulator)
        os.environ.setdefault('GOOGLE_AUTH_TOKEN_FOR_TESTING', 'none')

    # gcsfs reads the fsspec settings.
    load_extra('gcsfs', EXTRA)
    fsspec_settings = load_extra('fsspec.config', EXTRA).conf
    gcs_settings = fsspec_settings.setdefault('gcs', {})
    gcs_settings.setdefault('use_listings_cache', False)
    gcs_settings.setdefault('token', 'anon' if emulator else 'google_default')


@contextlib.contextmanager
def _request(path: str | os.PathLike[str], task: str, opening: bool = False) -> Iterator[Any]:
    """Yields the `Blob` at `path`, and translates errors of Google's libraries.

    Args:
        path: URL of an object or a bucket.
        task: 'read' or 'write'.
        opening: Whether the bucket is used for the first time, so that the user may have mistyped
            its name.

    Raises:
        RunDirectoryError: The bucket does not exist or access is denied; with `opening`, also if
            the bucket is unreachable.
        FileNotFoundError: The object to read does not exist.
        ConnectionError: The bucket is unreachable, without `opening`.
    """
    bucket, name = _split(path)
    _prepare()
    try:
        yield _client().bucket(bucket).blob(name)
    except (FileNotFoundError, FileExistsError, ConnectionError, RunDirectoryError):
        raise  # these errors of the block are for its caller
    except Exception as error:
        translated = _translate_error(error, path, task, opening)
        if translated is None:
            raise
        raise translated from error


def _translate_error(
    error: Exception, path: str | os.PathLike[str], task: str, opening: bool
) -> Exception | None:
    """Translates an error of Google's libraries into the error that `_request` raises.

    Returns None for an error of any other kind. The arguments are those of `_request`.
    """
    bucket, _ = _split(path)
    if isinstance(error, _google_error('NotFound')):
        # Without `opening`, the bucket is known to exist, so the object is missing.
        if task == 'read' and not opening:
            return FileNotFoundError(f'{os.fspath(path)} does not exist')
        return RunDirectoryError(
            f'{SCHEME}{bucket} does not exist; create the bucket or give another'
        )

    if isinstance(error, (_google_error('Forbidden'), _google_error('Unauthorized'))):
        return RunDirectoryError(
            f'{SCHEME}{bucket} may not be used to {task}: give this account {ROLES} on the bucket'
        )

    if _is_connection_problem(error):
        lines = str(error).splitlines()
        first_line = lines[0] if lines else type(error).__name__
        reason = first_line[:_MAX_REASON_LENGTH].rstrip('.')
        message = (
            f'{SCHEME}{bucket} cannot be reached ({reason}); check the network and '
            'STORAGE_EMULATOR_HOST, or run `gcloud auth application-default login` and set '
            'GOOGLE_CLOUD_PROJECT'
        )
        return RunDirectoryError(message) if opening else ConnectionError(message)
    return None


def _is_connection_problem(error: Exception) -> bool:
    """Whether the network, the service or the credentials caused an error."""
    credentials_error = load_extra('google.auth.exceptions', EXTRA).GoogleAuthError
    return isinstance(error, (OSError, _google_error('GoogleAPIError'), credentials_error))
