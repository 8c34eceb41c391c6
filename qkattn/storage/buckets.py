"""Objects in Cloud Storage, written by the generation (version number) that they replace.

Paths are `etils.epath.Path`, which is pathlib.Path without `open('a')`. An emulator is named by
STORAGE_EMULATOR_HOST=http://127.0.0.1:PORT and used without credentials.
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
# Seconds for which a request is repeated.
PATIENCE = 20.0
# What an account needs on a bucket.
ROLES = 'roles/storage.objectUser and roles/storage.legacyBucketReader'
# Characters of a library's error that are shown.
_SHOWN = 200

# Read when the libraries are imported: one protocol and one library for every bucket.
os.environ.setdefault('EPATH_USE_TF', 'false')
os.environ.setdefault('GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT', 'false')


class Object(NamedTuple):
    """An object; `updated` is the second of its last write on the bucket's clock."""

    content: bytes
    generation: int
    updated: float


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is in a bucket, or claims to be."""
    return '://' in os.fspath(path)


def to_path(url: str | os.PathLike[str]) -> Path:
    """The path of a gs:// URL; RunDirectoryError for others, or if its bucket cannot be listed."""
    text = os.fspath(url)
    bucket, _ = _split(text)
    if not text.startswith(SCHEME) or not bucket:
        raise RunDirectoryError(
            f'{text} is not a URL of the form gs://BUCKET/PATH; give one that is, or mount '
            'the storage and give a directory'
        )
    _open(bucket)
    return cast(Path, epath.Path(text))


@functools.lru_cache
def _open(bucket: str) -> None:
    """Checks that a bucket can be listed, once for each bucket."""
    with _request(bucket, 'read', opening=True):
        listing = iter(_client().list_blobs(bucket, max_results=1, **_patience()))
        next(listing, None)  # sends the request


def check_writable(path: Path) -> None:
    """Raises RunDirectoryError unless objects can be written and deleted below `path`."""
    bucket, _ = _split(path)
    with _request(path, 'write', opening=True):
        # Orbax asks for the bucket itself, which needs a permission of its own.
        _client().get_bucket(bucket, **_patience())
    now(path)


def read(path: str | os.PathLike[str]) -> Object:
    """The object at `path`; FileNotFoundError where there is none."""
    with _request(path, 'read') as blob:
        content = blob.download_as_bytes(**_patience())
        generation = blob.generation
        blob.reload(**_patience())
    if blob.generation != generation:  # it was written in between
        return read(path)
    return Object(content, generation, blob.updated.timestamp())


def write(path: str | os.PathLike[str], content: bytes, generation: int | None = None) -> Object:
    """Writes the object at `path`.

    `generation` is that of the object to replace, 0 where there must be none, or None to replace
    whatever is there. FileExistsError where the bucket holds another generation.
    """
    with _request(path, 'write') as blob:
        try:
            blob.upload_from_string(
                content,
                'application/octet-stream',
                if_generation_match=generation,
                **_patience(),
            )
        except _api('PreconditionFailed') as error:
            # A request that is repeated because its answer was lost meets its own object.
            if content:
                with contextlib.suppress(FileNotFoundError):
                    stored = read(path)
                    if stored.content == content:
                        return stored
            raise FileExistsError(f'{os.fspath(path)} was written by another process') from error
    return Object(content, blob.generation, blob.updated.timestamp())


def delete(path: str | os.PathLike[str], generation: int | None = None) -> None:
    """Deletes an object; one that is gone, or is of another generation, is left as it is."""
    left_alone = _api('NotFound'), _api('PreconditionFailed')
    with _request(path, 'write') as blob, contextlib.suppress(*left_alone):
        blob.delete(if_generation_match=generation, **_patience())


def now(path: str | os.PathLike[str]) -> float:
    """Seconds on the clock of the bucket, which a write below `path` tells."""
    probe = f'{os.fspath(path)}/.clock-{uuid.uuid4().hex}'
    stored = write(probe, b'', 0)
    delete(probe, stored.generation)
    return stored.updated


def _split(path: str | os.PathLike[str]) -> tuple[str, str]:
    """The bucket of a URL, and the name of the object in it."""
    bucket, _, name = os.fspath(path).removeprefix(SCHEME).partition('/')
    return bucket, name


def _api(name: str) -> Any:
    """An exception of Google's libraries by name, such as NotFound."""
    return getattr(load_extra('google.api_core.exceptions', EXTRA), name)


def _patience() -> dict[str, Any]:
    """Arguments of every request: it is repeated for PATIENCE seconds."""
    retry = load_extra('google.cloud.storage.retry', EXTRA).DEFAULT_RETRY
    return {'timeout': PATIENCE, 'retry': retry.with_timeout(PATIENCE)}


@functools.lru_cache(maxsize=1)
def _client() -> Any:
    """The client of all requests, of `google.cloud.storage`."""
    return load_extra('google.cloud.storage', EXTRA).Client()


@functools.lru_cache(maxsize=1)
def _prepare() -> None:
    """Sets up the libraries that read buckets, before their first use."""
    emulator = os.environ.get('STORAGE_EMULATOR_HOST')
    if emulator:
        os.environ.setdefault('TENSORSTORE_GCS_HTTP_URL', emulator)
        os.environ.setdefault('GOOGLE_AUTH_TOKEN_FOR_TESTING', 'none')
    load_extra('gcsfs', EXTRA)
    settings = load_extra('fsspec.config', EXTRA).conf.setdefault('gcs', {})
    settings.setdefault('use_listings_cache', False)
    settings.setdefault('token', 'anon' if emulator else 'google_default')


@contextlib.contextmanager
def _request(path: str | os.PathLike[str], task: str, opening: bool = False) -> Iterator[Any]:
    """A block of requests; yields the `Blob` at `path`, and makes errors of Google's our own.

    `task` is 'read' or 'write'. With `opening`, where a user has just named the bucket, every
    failure is a wrong setting: RunDirectoryError. Otherwise the bucket worked before, so one that
    is out of reach is ConnectionError, and an object that is missing FileNotFoundError.
    """
    bucket, name = _split(path)
    _prepare()
    try:
        yield _client().bucket(bucket).blob(name)
    except (FileNotFoundError, FileExistsError, ConnectionError, RunDirectoryError):
        raise
    except Exception as error:
        if isinstance(error, _api('NotFound')):
            if task == 'read' and not opening:
                raise FileNotFoundError(f'{os.fspath(path)} does not exist') from error
            raise RunDirectoryError(
                f'{SCHEME}{bucket} does not exist; create the bucket or give another'
            ) from error
        if isinstance(error, (_api('Forbidden'), _api('Unauthorized'))):
            raise RunDirectoryError(
                f'{SCHEME}{bucket} may not be used to {task}: give this account {ROLES} on the '
                'bucket'
            ) from error
        if _is_out_of_reach(error):
            lines = str(error).splitlines() or [type(error).__name__]
            reason = lines[0][:_SHOWN].rstrip('.')
            problem = (
                f'{SCHEME}{bucket} cannot be reached ({reason}); check the network and '
                'STORAGE_EMULATOR_HOST, or run `gcloud auth application-default login` and set '
                'GOOGLE_CLOUD_PROJECT'
            )
            if opening:
                raise RunDirectoryError(problem) from error
            raise ConnectionError(problem) from error
        raise


def _is_out_of_reach(error: Exception) -> bool:
    """Whether an error is one of the network, the service or the credentials."""
    credentials_error = load_extra('google.auth.exceptions', EXTRA).GoogleAuthError
    return isinstance(error, (OSError, _api('GoogleAPIError'), credentials_error))
