"""Paths in Cloud Storage, and writes of objects that succeed for one process only.

A path is an `etils.epath.Path`, which has the methods of pathlib.Path but no `open('a')`. Objects
whose owner matters are written here, by the generation (version number) that they replace.

Without Google: STORAGE_EMULATOR_HOST=http://127.0.0.1:PORT names an emulator, which is spoken to
without credentials. Every library that reads buckets is told of it here.
"""

import contextlib
import functools
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

from etils import epath

from qkattn.config.calls import load_extra
from qkattn.errors import RunDirectoryError

EXTRA = 'gcs'
SCHEME = 'gs://'
REACH = 15.0
"""Seconds after which a bucket counts as out of reach when it is opened."""
PATIENCE = 30.0
"""Seconds for which a later request is repeated."""
# CLOCK_BOOTTIME, where there is one, also counts the time for which a machine is suspended.
_CLOCK = getattr(time, 'CLOCK_BOOTTIME', time.CLOCK_MONOTONIC)
_CLOCKS: dict[str, float] = {}
"""By bucket, what its clock is ahead of `seconds`."""
ROLES = 'roles/storage.objectUser and roles/storage.legacyBucketReader'

# Read when the libraries are imported: one protocol and one library for every bucket.
os.environ.setdefault('EPATH_USE_TF', 'false')
os.environ.setdefault('GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT', 'false')


class Object(NamedTuple):
    """An object as it was read; `updated` is the second of its last write on the bucket's clock."""

    content: bytes
    generation: int
    updated: float


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is in a bucket, or claims to be."""
    return '://' in os.fspath(path)


def to_path(url: str | os.PathLike[str]) -> Path:
    """The path that `url` names, in a bucket that exists and can be listed.

    Raises:
      RunDirectoryError: not a gs:// URL, or the bucket is out of reach.
      ConfigError: the extra is not installed.
    """
    text = os.fspath(url)
    bucket = text.removeprefix(SCHEME).partition('/')[0]
    if not text.startswith(SCHEME) or not bucket:
        raise RunDirectoryError(
            f'{text} is a URL of another kind than gs://BUCKET/PATH; give one of those, or mount '
            'the storage and give a directory'
        )
    _open(bucket)
    return cast(Path, epath.Path(text))


def check_writable(path: Path) -> None:
    """Raises RunDirectoryError unless objects can be written and deleted below `path`."""
    bucket, _ = _split(path)
    with _sentences(bucket, 'write', opening=True):
        # Orbax asks for the bucket itself, which needs a permission of its own.
        _client().get_bucket(bucket, **_patience(REACH))
    _CLOCKS.pop(bucket, None)
    now(path)


def read(path: str | os.PathLike[str]) -> Object:
    """The object at `path`; FileNotFoundError where there is none."""
    with _request(path, 'read') as blob:
        content = blob.download_as_bytes(**_patience())
        generation = blob.generation
        blob.reload(**_patience())
    if blob.generation != generation:
        return read(path)
    return Object(content, generation, blob.updated.timestamp())


def generation(path: str | os.PathLike[str]) -> int:
    """The generation of the object at `path`; FileNotFoundError where there is none."""
    with _request(path, 'read') as blob:
        blob.reload(**_patience())
    return blob.generation


def write(path: str | os.PathLike[str], content: bytes, generation: int | None = None) -> int:
    """Writes an object whole and returns its generation.

    Args:
      generation: of the object that it replaces, 0 for none; None: whatever is there.

    Raises:
      FileExistsError: another process has written the object in between.
    """
    return _write(path, content, generation).generation


def delete(path: str | os.PathLike[str], generation: int | None = None) -> None:
    """Deletes an object; one that is gone, or is of another generation, is left as it is."""
    with (
        _request(path, 'write') as blob,
        contextlib.suppress(_api('NotFound'), _api('PreconditionFailed')),
    ):
        blob.delete(if_generation_match=generation, **_patience())


def now(path: str | os.PathLike[str]) -> float:
    """Seconds on the clock of the bucket, which is read once and continued by this machine's."""
    bucket, _ = _split(path)
    if bucket not in _CLOCKS:
        probe = f'{os.fspath(path)}/.clock-{uuid.uuid4().hex}'
        blob = _write(probe, b'', 0)
        _CLOCKS[bucket] = blob.updated.timestamp() - seconds()
        delete(probe, blob.generation)
    return seconds() + _CLOCKS[bucket]


def seconds() -> float:
    """Time on a clock that nobody sets, for differences between two events of this machine."""
    return time.clock_gettime(_CLOCK)


def _write(path: str | os.PathLike[str], content: bytes, generation: int | None) -> Any:
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
            with contextlib.suppress(FileNotFoundError):
                if content and read(path).content == content:
                    blob.reload(**_patience())
                    return blob
            raise FileExistsError(f'{os.fspath(path)} was written by another process') from error
    return blob


def _split(path: str | os.PathLike[str]) -> tuple[str, str]:
    bucket, _, name = os.fspath(path).removeprefix(SCHEME).partition('/')
    return bucket, name


def _api(name: str) -> Any:
    """An exception of the client library."""
    return getattr(load_extra('google.api_core.exceptions', EXTRA), name)


def _patience(seconds: float | None = None) -> dict[str, Any]:
    """How long a request may take, and for how long it is repeated."""
    retry = load_extra('google.cloud.storage.retry', EXTRA).DEFAULT_RETRY
    return {'timeout': REACH, 'retry': retry.with_timeout(seconds or PATIENCE)}


@contextlib.contextmanager
def _request(path: str | os.PathLike[str], task: str) -> Iterator[Any]:
    """A block that uses an object, which it yields; FileNotFoundError where it reads none."""
    bucket, name = _split(path)
    with _sentences(bucket, task):
        try:
            yield _client().bucket(bucket).blob(name)
        except _api('NotFound') as error:
            if task != 'read':
                raise
            raise FileNotFoundError(f'{os.fspath(path)} does not exist') from error


@functools.lru_cache(maxsize=1)
def _client() -> Any:
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


@functools.lru_cache
def _open(bucket: str) -> None:
    """Checks once that the bucket can be listed."""
    with _sentences(bucket, 'read', opening=True):
        next(iter(_client().list_blobs(bucket, max_results=1, **_patience(REACH))), None)


@contextlib.contextmanager
def _sentences(bucket: str, task: str, opening: bool = False) -> Iterator[None]:
    """Raises RunDirectoryError, one sentence, for what a user can change.

    A bucket that was opened and cannot be reached later is a ConnectionError, after which the same
    command may be started again.
    """
    kind = RunDirectoryError if opening else ConnectionError
    _prepare()
    auth = load_extra('google.auth.exceptions', EXTRA)
    requests = load_extra('requests', EXTRA).exceptions
    timeouts = _api('RetryError'), _api('ServiceUnavailable')
    try:
        yield
    except (FileNotFoundError, FileExistsError, ConnectionError, RunDirectoryError):
        raise
    except Exception as error:
        line = (str(error).splitlines() or [type(error).__name__])[0][:200].rstrip('.')
        if isinstance(error, _api('NotFound')):
            kind, problem = RunDirectoryError, 'does not exist; create the bucket or give another'
        elif isinstance(error, (_api('Forbidden'), _api('Unauthorized'))):
            kind = RunDirectoryError
            problem = f'may not be used to {task}: give this account {ROLES} on the bucket'
        elif isinstance(error, (requests.RequestException, auth.TransportError, *timeouts)):
            problem = f'cannot be reached ({line}); check the network'
            problem += ' and STORAGE_EMULATOR_HOST' * ('STORAGE_EMULATOR_HOST' in os.environ)
        elif isinstance(error, (OSError, auth.GoogleAuthError)):
            problem = (
                f'cannot be used ({line}); run `gcloud auth application-default login` and set '
                'GOOGLE_CLOUD_PROJECT, or use a machine with a service account'
            )
        else:
            raise
        raise kind(f'{SCHEME}{bucket} {problem}') from error
