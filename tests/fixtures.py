"""Fixtures for all tests: a bucket, a browser, outside modules, and a stream without a reader."""

import importlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import fsspec
import pytest
from etils.epath import backend

from qkattn.storage import buckets
from tests.processes import ROOT

PAGE = ROOT / 'docs/outside.md'
BLOCK = re.compile(r'^```python\n# (\w+)\.py\n(.*?)^```$', re.MULTILINE | re.DOTALL)
MODULES = dict(BLOCK.findall(PAGE.read_text('utf-8')))
BROWSERS = ('chromium', 'chromium-browser', 'google-chrome')


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on sys.path with the modules of docs/outside.md."""
    for name, source in MODULES.items():
        (tmp_path / f'{name}.py').write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)


def chosen(metafunc: pytest.Metafunc, kind: str, names: list[str]) -> None:
    """Parametrizes a test that has an argument `kind`, such as 'metric'.

    If the command line has flags such as --metric=NAME, they replace `names` as values.
    """
    if kind in metafunc.fixturenames:
        given = metafunc.config.getoption(f'--{kind}')
        metafunc.parametrize(kind, given or names)


@pytest.fixture(scope='session')
def chromium() -> str:
    """The path of Chromium: QKATTN_TEST_CHROMIUM, or else the first browser on PATH."""
    path = os.environ.get('QKATTN_TEST_CHROMIUM')
    for name in BROWSERS:
        path = path or shutil.which(name)
    if not path:
        pytest.skip('Chromium is absent: install it, or set QKATTN_TEST_CHROMIUM to its path')
    return path


@pytest.fixture
def unread() -> Iterator[TextIO]:
    """The writing end of a pipe that nobody reads any more, as after `... | head`."""
    reading_end, writing_end = os.pipe()
    os.close(reading_end)
    with open(writing_end, 'w') as stream:
        yield stream


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server in memory with the buckets gs://runs and gs://read-only, which refuses changes.

    This process and its child processes use the server in place of Google Cloud Storage.
    """
    pytest.importorskip('gcsfs', reason="buckets need pip install -e '.[gcs]'")
    # The import is here, because the module needs packages that gcsfs brings.
    bucket_server = importlib.import_module('tests.bucket_server')
    server = bucket_server.Server('runs', 'read-only')

    for name in ('TENSORSTORE_GCS_HTTP_URL', 'GOOGLE_AUTH_TOKEN_FOR_TESTING'):
        monkeypatch.delenv(name, raising=False)
    # Clients of buckets send requests to this URL, and do not ask Google's metadata server.
    monkeypatch.setenv('STORAGE_EMULATOR_HOST', server.url)
    monkeypatch.setenv('NO_GCE_CHECK', 'true')
    # Clients that were made earlier would keep using another server.
    forget_buckets()

    yield server

    forget_buckets()
    server.shutdown()
    server.server_close()


def forget_buckets() -> None:
    """Removes clients of buckets from all caches."""
    for cached in (buckets._prepare, buckets._client, buckets._require_listing):
        cached.cache_clear()
    fsspec.config.conf.pop('gcs', None)
    fsspec.get_filesystem_class('gcs').clear_instance_cache()
    backend.fsspec_backend._get_filesystem.cache_clear()
