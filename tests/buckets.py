"""The bucket `runs` of a server on loopback, for tests; skipped where the extra is missing."""

import importlib
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from etils.epath import backend

from qkattn.storage import buckets

CACHES = (buckets._prepare, buckets._client, buckets._open)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server with the buckets `runs` and `read-only`, for this process and those it starts."""
    pytest.importorskip('gcsfs', reason="buckets need pip install -e '.[gcs]'")
    server = importlib.import_module('tests.bucket_server').Server('runs', 'read-only')
    for name in ('TENSORSTORE_GCS_HTTP_URL', 'GOOGLE_AUTH_TOKEN_FOR_TESTING'):
        monkeypatch.delenv(name, raising=False)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    _forget()
    yield server
    _forget()
    server.shutdown()
    server.server_close()


def _forget() -> None:
    buckets._CLOCKS.clear()
    for cached in CACHES:
        cached.cache_clear()
    fsspec.config.conf.pop('gcs', None)
    fsspec.get_filesystem_class('gcs').clear_instance_cache()
    backend.fsspec_backend._get_filesystem.cache_clear()
